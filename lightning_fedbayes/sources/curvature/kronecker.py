r"""One-shot federation: Laplace posteriors with Kronecker factors, and the server that solves for their sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedbayes.core.batches import output_of
from lightning_fedbayes.core.errors import FederationError, check_kind, check_number, nearest, raised_as
from lightning_fedbayes.layers import evaluation_mode
from lightning_fedbayes.layers.scaler import UNITS
from lightning_fedbayes.sources.curvature.diagonal import BATCHES, Laplace, check_shapes
from lightning_fedbayes.sources.curvature.kronecker_posterior import KroneckerPosterior, Tensors, joined, split
from lightning_fedbayes.sources.curvature.systems import KroneckerSystem


@dataclass(frozen=True)
class KroneckerSite:
    r"""The message of a client in a one-shot federation: its weights, and their curvature layer by layer.

    Args:
        mean: all parameters, name → tensor.
        buffers: all floating buffers, name → tensor.
        inputs: layer → A, the mean of :math:`a a^\top` over the examples, a the inputs of the layer, with a 1 for the
            bias: shape (in, in).
        outputs: layer → B, the sum over the examples of :math:`g g^\top`, g the gradients at its outputs: shape
            (out, out).
        num_examples: of the client.
    """

    mean: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    num_examples: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for each in (self.mean, self.buffers, self.inputs, self.outputs) for t in each.values())


@dataclass(frozen=True)
class KroneckerLaplace:
    r"""One-shot federation of networks that train as they always do: Laplace with Kronecker factors (K-FAC).

    Client k trains as it likes, then takes one pass over its data for the curvature of every linear layer and
    convolution, :math:`\Lambda_k = B_k \otimes A_k`, which keeps the correlations that
    :class:`~lightning_fedbayes.Laplace` drops. The server has no data; it sums the clients' sites and the prior, and
    solves

    .. math:: \left(\sum_k \Lambda_k + s^{-2} I\right) \mu
              = \sum_k \left(\Lambda_k + \tfrac{n_k}{n} s^{-2} I\right) \hat\theta_k

    by conjugate gradients. A client's training is thereby taken to have ended at the mode of its share of the
    posterior, whose prior is :math:`N(0, s^2)` to the power of :math:`n_k / n`: a weight decay of
    :math:`\tau / n s^2` on its mean loss, n the number of examples of all clients. For linear regression the result is
    the posterior of the pooled data.

    ::

        one_shot = fb.KroneckerLaplace(prior_std=0.1)
        sites = [one_shot.site(network, loader) for network, loader in clients]   # at each client, after its training
        posterior = one_shot.fuse(sites)                                          # at the server
        predictive = fb.PosteriorPredictive(network, posterior)

    When to use it: where clients can send once, and their networks start from the same weights. A site holds the
    layers' second moments of inputs and gradients: more bytes than a diagonal, and more about the data.

    Args:
        curvature: a :class:`~lightning_fedbayes.Laplace`: its task, its curvature, the noise, the temperature
            :math:`\tau`, s, and the patterns of ``parameters``. A layer is taken if its weight matches and requires
            gradients. Everything else (normalisation, embeddings, buffers) is averaged by numbers of examples and has
            no variance.
        damping: d ≥ 0. A layer's prior precision gains d times the mean of its diagonal of :math:`\sum_k \Lambda_k`,
            which draws what the curvature says little about to the clients' average. 0 is Bayes; held-out examples
            choose it (``python -m benchmarks.posterior.one_shot``).

    Raises:
        FederationError: an argument is out of range.

    Source: Martens and Grosse 2015; Grosse and Martens 2016 for convolutions; Jhunjhunwala et al. 2024, FedFisher,
    which minimises the same sum by Adam from the average and stops early.
    """

    curvature: Laplace = field(default_factory=Laplace)
    damping: float = 0.0

    def __post_init__(self) -> None:
        check_kind("curvature", self.curvature, Laplace, "give a Laplace")
        self.curvature.fixed_prior_std("KroneckerLaplace")
        check_number("damping", self.damping, "[0, inf)")

    def site(self, module: nn.Module, batches: Iterable[Any]) -> KroneckerSite:
        """Return what a client sends after its training.

        Args:
            module: trained; its ``forward`` gives logits or means. It runs in evaluation mode.
            batches: of the client's training data, such as a DataLoader; see :class:`~lightning_fedbayes.Laplace`.

        Raises:
            FederationError: no layer matches, there is no example, a layer runs several times in a pass, shares its
                weight or is of another kind of convolution, or a batch has no targets or other inputs.
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

    def fuse(self, sites: Sequence[KroneckerSite]) -> KroneckerPosterior:
        """Return the global posterior of the clients' sites and the prior.

        Raises:
            FederationError: there is no site, sites differ in their names, shapes or units (a
                :class:`~lightning_fedbayes.FederatedScaler`'s), or a value is not finite.
        """
        check_kind("sites", sites, list | tuple, "give a list of what site() has returned")
        if not sites:
            raise FederationError("fuse: no site; give what site() has returned, of every client")
        for number, each in enumerate(sites):
            check_kind(f"sites[{number}]", each, KroneckerSite, "give what site() returns")
            for part in ("mean", "buffers", "inputs", "outputs"):
                check_shapes(
                    f"sites[{number}].{part}",
                    getattr(each, part),
                    getattr(sites[0], part),
                    "sites[0]",
                    "all clients have to train the same network",
                )
            _check_finite(f"sites[{number}].", each)
            units = [n for n in each.buffers if n.endswith(UNITS) and not each.buffers[n].equal(sites[0].buffers[n])]
            if units:
                raise FederationError(
                    f"sites[{number}].buffers['{units[0]}'] is not that of sites[0]: clients have scales of their own, "
                    "and their weights are in different units. Fill the module's scaler before clients train, by the "
                    "data of all or by numbers, FederatedScaler(targets=(mean, std)), or give scaler=False"
                )
        total = sum(each.num_examples for each in sites)
        shares = [each.num_examples / total for each in sites]
        mean = _averaged([each.mean for each in sites], shares)
        terms, priors = {}, dict[str, float]()
        for layer in sites[0].inputs:
            terms[layer] = [(each.inputs[layer].double(), each.outputs[layer].double()) for each in sites]
            level = sum(float(a.diagonal().mean() * b.diagonal().mean()) for a, b in terms[layer])
            priors[layer] = self.curvature.fixed_prior_std("KroneckerLaplace") ** -2 + self.damping * level
            centre = joined(layer, {name: value.double() for name, value in mean.items()})
            # relative to the average: the prior's shares leave it as it is, and rounding is that of the differences
            moved = [joined(layer, each.mean).double() - centre for each in sites]
            target = sum((b @ x @ a for x, (a, b) in zip(moved, terms[layer])), torch.zeros_like(centre))
            moved = KroneckerSystem(terms[layer], priors[layer]).solve(target)
            mean |= split(centre + moved, layer, mean)
        return KroneckerPosterior(mean, terms, priors, _averaged([each.buffers for each in sites], shares))

    def _layers(self, module: nn.Module) -> dict[str, Any]:
        """Return the layers that get a precision, by name."""
        supported = {
            f"{name}.weight" if name else "weight": layer
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d) and layer.weight.requires_grad
        }
        uses = Counter(id(p) for each in module.modules() for p in each.parameters(recurse=False))
        found = {}
        for pattern in self.curvature.parameters:
            matching = [name for name in supported if fnmatchcase(name, pattern)]
            if not matching:
                raise FederationError(
                    f"parameters pattern '{pattern}' matches no weight of a linear layer or convolution: "
                    f"{nearest(pattern, supported)}"
                )
            for name in matching:
                layer = supported[name]
                is_plain = isinstance(layer, nn.Linear) or (
                    layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
                )
                if not is_plain:
                    raise FederationError(
                        f"KroneckerLaplace: '{name}' has groups, padding by name or another padding mode than zeros: "
                        "leave it out by Laplace(parameters=[...])"
                    )
                if uses[id(layer.weight)] > 1:
                    raise FederationError(
                        f"KroneckerLaplace: '{name}' is the weight of another layer, too, and has no one input: leave "
                        "it out by Laplace(parameters=[...])"
                    )
                found[name.removesuffix("weight").removesuffix(".")] = layer
        return found


@contextmanager
def _recorded(layers: Mapping[str, Any]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Inside, every layer leaves its input and a zero that its output gains, whose gradient is the output's."""
    record: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def after(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            if name in record:
                raise FederationError(
                    f"KroneckerLaplace: layer '{name}' runs several times in a pass, and has no one input: leave it "
                    "out by Laplace(parameters=[...])"
                )
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
    """Return the clients' average, name → tensor of the first client's dtype."""
    return {
        name: torch.stack([share * each[name].double() for share, each in zip(shares, values)]).sum(0).to(like)
        for name, like in values[0].items()
    }


def _check_finite(whose: str, site: KroneckerSite) -> None:
    """Raise FederationError unless all values of a client's ``site`` are finite."""
    for part in ("mean", "buffers", "inputs", "outputs"):
        for name, value in getattr(site, part).items():
            if not bool(torch.isfinite(value).all()):
                raise FederationError(
                    f"{whose}{part}['{name}'] is not finite: leave this client out, and look for NaN in its inputs"
                )


def _gram(rows: Tensor) -> Tensor:
    """Return the sum of the outer products of rows with themselves, float64."""
    rows = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    return (rows.T @ rows).double()
