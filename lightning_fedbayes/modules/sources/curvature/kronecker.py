r"""One-shot federation: Laplace posteriors with Kronecker factors, the server that solves for their sum, the result."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedbayes.core.batches import output_of
from lightning_fedbayes.core.errors import FederationError, check_at_least, check_kind, check_number, raised_as
from lightning_fedbayes.core.posterior import GaussianPosterior, at_least_float32, zeros_like
from lightning_fedbayes.layers import evaluation_mode
from lightning_fedbayes.layers.scaler import UNITS
from lightning_fedbayes.modules.sources.curvature.diagonal import BATCHES, Laplace, check_shapes, matching
from lightning_fedbayes.modules.sources.curvature.systems import KroneckerSystem

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class KroneckerSite:
    r"""The message of a client in a one-shot federation: its weights, and their curvature layer by layer.

    Args:
        mean, buffers: all parameters and all floating buffers, name → tensor.
        inputs: layer → A, the mean of :math:`a a^\top` over the examples, a the inputs of the layer, with a 1 for the
            bias: shape (in, in).
        outputs: layer → B, the sum over the examples of :math:`g g^\top`, g the gradients at its outputs: (out, out).
        num_examples: of the client.
    """

    mean: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    num_examples: int


@dataclass(frozen=True)
class KroneckerLaplace:
    r"""One-shot federation of networks after their usual training: Laplace with Kronecker factors (K-FAC).

    Client k trains, then takes one pass over its data for the curvature of every linear layer and convolution,
    :math:`\Lambda_k = B_k \otimes A_k`, which keeps the correlations that :class:`~lightning_fedbayes.Laplace` drops.
    The server sums the clients' sites and the prior, without data, and solves

    .. math:: \left(\sum_k \Lambda_k + s^{-2} I\right) \mu
              = \sum_k \left(\Lambda_k + \tfrac{n_k}{n} s^{-2} I\right) \hat\theta_k

    by conjugate gradients. This assumes that a client's training ended at the mode of its share of the posterior, with
    the prior :math:`N(0, s^2)` to the power of :math:`n_k / n`: a weight decay of :math:`\tau / n s^2` on its mean
    loss, n the number of examples of all clients. For linear regression it gives the posterior of the pooled data.

    ::

        one_shot = fb.KroneckerLaplace(fb.Laplace(prior_std=0.1))
        sites = [one_shot.site(network, loader) for network, loader in clients]   # at each client, after its training
        posterior = one_shot.fuse(sites)                                          # at the server
        predictive = fb.PosteriorPredictive(network, posterior)

    When to use it: where clients can send once, and their networks start from the same weights. A site holds the
    layers' second moments of inputs and gradients.

    Args:
        curvature: a :class:`~lightning_fedbayes.Laplace`: likelihood, curvature, temperature :math:`\tau`, s, and the
            patterns of ``parameters``. A layer counts if its weight matches and requires gradients. All else
            (normalisation, embeddings, buffers) is averaged by numbers of examples, without a variance.
        damping: d ≥ 0. A layer's prior precision gains d times the mean of its diagonal of :math:`\sum_k \Lambda_k`,
            which draws directions of little curvature to the clients' average. 0 is Bayes.

    Raises: FederationError if an argument is out of range.
    Source: Martens and Grosse 2015; Grosse and Martens 2016 for convolutions; Jhunjhunwala et al. 2024, FedFisher.
    """

    curvature: Laplace = field(default_factory=Laplace)
    damping: float = 0.0

    def __post_init__(self) -> None:
        check_kind("curvature", self.curvature, Laplace, "give a Laplace")
        self.curvature.fixed_prior_std("KroneckerLaplace")
        check_number("damping", self.damping, "[0, inf)")

    def site(self, module: nn.Module, batches: Iterable[Any]) -> KroneckerSite:
        """Return a client's message after its training.

        ``module`` and ``batches`` as for :meth:`Laplace.posterior`.

        Raises FederationError: no layer matches, there is no example, a layer is used several times or is another kind
        of convolution, or a batch has no targets or other inputs.
        """
        check_kind("module", module, nn.Module, "give a torch.nn.Module")
        check_kind("batches", batches, Iterable, "give batches of inputs and targets, such as a DataLoader")
        layers = self._layers(module)
        inner, outer, count = dict[str, Tensor](), dict[str, Tensor](), 0
        what = f"KroneckerLaplace: {type(module).__name__} cannot be measured"
        with evaluation_mode(module), raised_as(FederationError, what, BATCHES):
            for batch in batches:
                inputs, targets = self.curvature.unpacked(batch, module)
                count += len(targets)
                with torch.enable_grad(), _recorded(layers) as record:
                    found = output_of(module, inputs)
                    known = self.curvature.likelihood_for(module, found, targets)
                    terms = torch.func.vmap(partial(self.curvature.terms, known))(found, targets)
                    missing = layers.keys() - record.keys()
                    if missing:
                        raise FederationError(f"KroneckerLaplace: layer '{min(missing)}' does not run: leave it out")
                    shifts = [shift for _, shift in record.values()]
                    for term in terms.sum(0):
                        gradients = torch.autograd.grad(term, shifts, retain_graph=True, materialize_grads=True)
                        for name, gradient in zip(record, gradients):
                            rows = _rows(layers[name], gradient)
                            outer[name] = outer.get(name, 0) + _gram(rows) * (len(targets) / len(rows))
                for name, (seen, _) in record.items():
                    inner[name] = inner.get(name, 0) + _gram(_patches(layers[name], seen))
        if not count:
            raise FederationError("KroneckerLaplace: a client without an example has no curvature: leave it out")
        mean = {name: p.detach().clone() for name, p in module.named_parameters()}
        buffers = {name: b.detach().clone() for name, b in module.named_buffers() if b.is_floating_point()}
        inputs = {name: (each / count).to(layers[name].weight) for name, each in inner.items()}
        outputs = {name: (each / self.curvature.temperature).to(layers[name].weight) for name, each in outer.items()}
        site = KroneckerSite(mean, buffers, inputs, outputs, count)
        _check_finite("KroneckerLaplace: ", site)
        return site

    def fuse(self, sites: Sequence[KroneckerSite]) -> "KroneckerPosterior":
        """Return the global posterior of the clients' sites and the prior.

        Raises FederationError: ``sites`` is empty, sites differ in names, shapes or units (of a
        :class:`~lightning_fedbayes.FederatedScaler`), or a value is not finite.
        """
        check_kind("sites", sites, list | tuple, "give a list of what site() has returned")
        if not sites:
            raise FederationError("fuse: no site; give what site() has returned, of every client")
        for number, each in enumerate(sites):
            check_kind(f"sites[{number}]", each, KroneckerSite, "give what site() returns")
            rule = "all clients have to train the same network"
            for part in ("mean", "buffers", "inputs", "outputs"):
                given, wanted = getattr(each, part), getattr(sites[0], part)
                check_shapes(f"sites[{number}].{part}", given, wanted, "sites[0]", rule)
            _check_finite(f"sites[{number}].", each)
            units = [n for n in each.buffers if n.endswith(UNITS) and not each.buffers[n].equal(sites[0].buffers[n])]
            if units:
                what = f"sites[{number}].buffers['{units[0]}'] is not that of sites[0]: clients have different scales"
                remedy = "Fill the module's scaler before clients train, FederatedScaler(targets=(mean, std))"
                raise FederationError(f"{what} and weights in different units. {remedy}, or give scaler=False")
        total = sum(each.num_examples for each in sites)
        shares = [each.num_examples / total for each in sites]
        mean = _averaged([each.mean for each in sites], shares)
        terms, priors = {}, dict[str, float]()
        for layer in sites[0].inputs:
            terms[layer] = [(each.inputs[layer].double(), each.outputs[layer].double()) for each in sites]
            level = sum(float(a.diagonal().mean() * b.diagonal().mean()) for a, b in terms[layer])
            priors[layer] = self.curvature.fixed_prior_std("KroneckerLaplace") ** -2 + self.damping * level
            centre = joined(layer, {name: value.double() for name, value in mean.items()})
            # relative to the average, which the prior's shares do not change, so that rounding is small
            moved = [joined(layer, each.mean).double() - centre for each in sites]
            target = sum((b @ x @ a for x, (a, b) in zip(moved, terms[layer])), torch.zeros_like(centre))
            moved = KroneckerSystem(terms[layer], priors[layer]).solve(target)
            mean |= split(centre + moved, layer, mean)
        return KroneckerPosterior(mean, terms, priors, _averaged([each.buffers for each in sites], shares))

    def _layers(self, module: nn.Module) -> dict[str, Any]:
        supported = {
            f"{name}.weight" if name else "weight": layer
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d) and layer.weight.requires_grad
        }
        uses = Counter(id(p) for each in module.modules() for p in each.parameters(recurse=False))
        found = {}
        patterns = self.curvature.parameters
        for name, layer in matching(patterns, supported, "weight of a linear layer or convolution").items():
            why = ""
            if not isinstance(layer, nn.Linear) and (
                layer.groups != 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str)
            ):
                why = "has groups, padding by name or another padding mode than zeros"
            elif uses[id(layer.weight)] > 1:
                why = "is the weight of another layer, too, and has no one input"
            if why:
                raise FederationError(f"KroneckerLaplace: '{name}' {why}: leave it out by Laplace(parameters=[...])")
            found[name.removesuffix("weight").removesuffix(".")] = layer
        return found


@contextmanager
def _recorded(layers: Mapping[str, Any]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Inside, record every layer's input and a zero that is added to its output and gets the output's gradient."""
    record: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def after(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            if name in record:
                why = "runs several times in a pass, and has no one input: leave it out by Laplace(parameters=[...])"
                raise FederationError(f"KroneckerLaplace: layer '{name}' {why}")
            shift = torch.zeros_like(output, requires_grad=True)
            record[name] = inputs[0].detach(), shift
            return output + shift

        return after

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _patches(layer: Any, inputs: Tensor) -> Tensor:
    """Return the inputs of a layer, shape (examples × positions, in), with a 1 for the bias."""
    if isinstance(layer, nn.Linear):
        rows = inputs.reshape(-1, inputs.shape[-1]).T[None]
    else:
        sizes = [layer.kernel_size, layer.dilation, layer.padding, layer.stride]
        if isinstance(layer, nn.Conv1d):
            inputs, sizes = inputs.unsqueeze(-1), [(*size, rest) for size, rest in zip(sizes, (1, 1, 0, 1))]
        rows = F.unfold(inputs, *sizes)
    rows = rows.transpose(1, 2).flatten(0, 1)
    return rows if layer.bias is None else F.pad(rows, (0, 1), value=1.0)


def _rows(layer: Any, gradient: Tensor) -> Tensor:
    """Return gradients at a layer's outputs, shape (examples × positions, out)."""
    if isinstance(layer, nn.Linear):
        return gradient.reshape(-1, gradient.shape[-1])
    return gradient.transpose(0, 1).flatten(1).T


def _averaged(values: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> Tensors:
    return {
        name: torch.stack([share * each[name].double() for share, each in zip(shares, values)]).sum(0).to(like)
        for name, like in values[0].items()
    }


def _check_finite(whose: str, site: KroneckerSite) -> None:
    for part in ("mean", "buffers", "inputs", "outputs"):
        for name, value in getattr(site, part).items():
            if not bool(torch.isfinite(value).all()):
                remedy = "leave this client out, and look for NaN in its inputs"
                raise FederationError(f"{whose}{part}['{name}'] is not finite: {remedy}")


def _gram(rows: Tensor) -> Tensor:
    rows = at_least_float32(rows)
    return (rows.T @ rows).double()


@dataclass(frozen=True)
class KroneckerPosterior:
    r"""Gaussian posterior whose precision is a sum of Kronecker products, layer by layer.

    .. math:: \Lambda = \sum_k B_k \otimes A_k + s^{-2} I

    Args:
        mean: all parameters, name → tensor. Point masses outside of the layers in ``terms``.
        terms: layer → the pairs :math:`(A_k, B_k)` of the clients, float64.
        prior_precisions: layer → :math:`s^{-2}`, with the damping.
        buffers: averages, for ``module.load_state_dict({**mean, **buffers}, strict=False)``.
    """

    mean: Mapping[str, Tensor]
    terms: Mapping[str, Sequence[tuple[Tensor, Tensor]]]
    prior_precisions: Mapping[str, float]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    linearised: ClassVar[bool] = True  # see GaussianPosterior

    @cached_property
    def systems(self) -> dict[str, KroneckerSystem]:
        r"""Layer → its :math:`\Lambda`."""
        return {layer: KroneckerSystem(terms, self.prior_precisions[layer]) for layer, terms in self.terms.items()}

    def diagonal(self) -> GaussianPosterior:
        r"""Return the nearest mean-field posterior in reverse KL, with variances :math:`1/\Lambda_{ii}`."""
        variance = {name: zeros_like(value) for name, value in self.mean.items()}
        for layer, terms in self.terms.items():
            diagonals = torch.stack([torch.outer(b.diagonal(), a.diagonal()) for a, b in terms])
            for name, value in split(1 / (diagonals.sum(0) + self.prior_precisions[layer]), layer, self.mean).items():
                variance[name] = value
        return GaussianPosterior(dict(self.mean), variance, linearised=True)

    def sample(self, draws: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        r"""Return exact draws of the parameters, name → shape (draws, \*shape), with noise of ``generator``.

        .. math:: \theta = \mu + \Lambda^{-1} z, \qquad
                  z = \sum_k B_k^{1/2} Z_k A_k^{1/2} + s^{-1} Z_0 \sim N(0, \Lambda)

        with one linear system per draw and layer.
        """
        check_at_least("draws", draws, 1)
        sets = {name: value.expand(draws, *value.shape) for name, value in self.mean.items()}
        for layer, terms in self.terms.items():
            roots, prior = [(_root(a), _root(b)) for a, b in terms], self.prior_precisions[layer]
            like = terms[0][1].new_empty(terms[0][1].shape[0], terms[0][0].shape[0])

            def noise(like: Tensor = like) -> Tensor:
                return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)

            for name in split(like, layer, self.mean):
                sets[name] = sets[name].clone()
            for draw in range(draws):
                pushed = sum((b @ noise() @ a for a, b in roots), prior**0.5 * noise())
                for name, value in split(self.systems[layer].solve(pushed), layer, self.mean).items():
                    sets[name][draw] += value
        return sets

    def to(self, device: torch.device | str) -> "KroneckerPosterior":
        """This posterior on another device."""
        parts = {name: getattr(self, name) for name in ("mean", "terms", "buffers")}
        return replace(self, **apply_to_collection(parts, Tensor, lambda tensor: tensor.to(device)))

    def state_dict(self) -> dict[str, Any]:
        """Return a state for :meth:`from_state_dict`: tensors, numbers, and dicts and lists of them."""
        return {
            "mean": dict(self.mean),
            "terms": {layer: [list(pair) for pair in terms] for layer, terms in self.terms.items()},
            "prior_precisions": dict(self.prior_precisions),
            "buffers": dict(self.buffers),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "KroneckerPosterior":
        """The posterior that :meth:`state_dict` stored."""
        terms = {layer: [(a, b) for a, b in pairs] for layer, pairs in state["terms"].items()}
        return cls(dict(state["mean"]), terms, dict(state["prior_precisions"]), dict(state["buffers"]))


def joined(layer: str, tensors: Mapping[str, Tensor], leading: int = 0) -> Tensor:
    r"""Return weight and bias of a layer, behind ``leading`` dimensions, as one matrix (\*, out, in), bias last."""
    prefix = f"{layer}." if layer else ""
    weight, bias = tensors[f"{prefix}weight"].flatten(leading + 1), tensors.get(f"{prefix}bias")
    return weight if bias is None else torch.cat([weight, bias[..., None]], -1)


def split(matrix: Tensor, layer: str, like: Mapping[str, Tensor]) -> Tensors:
    """Undo :func:`joined`, with the shapes and dtypes of ``like``."""
    prefix = f"{layer}." if layer else ""
    names = [name for name in (f"{prefix}weight", f"{prefix}bias") if name in like]
    width = like[names[0]].flatten(1).shape[1]
    parts = matrix[:, :width], matrix[:, width:]
    return {name: part.reshape(like[name].shape).to(like[name]) for name, part in zip(names, parts)}


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp_min(0).sqrt() @ vectors.T
