r"""Gaussian posteriors of networks that train as they always do: by the curvature of the loss, or by the path."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fedbayes.core import errors
from lightning_fedbayes.core.batches import Unpack, Whole, check_unpack, number_of_examples, output_of, unpacked
from lightning_fedbayes.core.errors import FedBayesError, FederationError, nearest, raised_as, shown
from lightning_fedbayes.core.posterior import GaussianPosterior, zeros_like
from lightning_fedbayes.layers import evaluation_mode
from lightning_fedbayes.layers.posterior_view import gaussian_parameters
from lightning_fedbayes.metrics.likelihoods import Likelihood, check_by_example, get_likelihood, likelihood_of
from lightning_fedbayes.modules.sources.curvature.systems import chosen_precision

Curvature = Literal["ggn", "empirical"]

ENTRIES = 2**24
"""Most entries of the Jacobians that are held at once."""

BATCHES = (
    "give batches of inputs that the module's forward takes and of targets, such as a DataLoader's, or say which is "
    "which by Laplace(unpack=lambda batch: (inputs, targets))"
)

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Laplace:
    r"""Diagonal Laplace approximation of the posterior, in one pass over the training data.

    .. math:: q(\theta) = N\left(\hat\theta, \left(\tfrac1\tau \sum_i F_i + s^{-2}\right)^{-1}\right)

    with :math:`\hat\theta` at the end of training, and :math:`F_i` the diagonal of the generalised Gauss-Newton matrix
    of example i, for these likelihoods the Fisher information, or of the empirical Fisher, at the label :math:`y_i`.

    ::

        laplace = fb.Laplace(prior_std=None)
        posterior = laplace.posterior(model, train_dataloader)
        predictive = fb.PosteriorPredictive(model, posterior)        # of the linearised network
        sites = [laplace.site(model, loader) for loader in loaders]  # at each client, with the same network
        posterior = laplace.fuse(model, sites)                       # at the server: of the pooled data

    Under ``FederatedBayes(posterior=fb.Laplace())`` every client takes the pass after its local training (under sites
    at the global model that it received), and its loss gains the prior of the method.

    When to use it: for a trained network, or to keep an optimizer. Outside of a federation, training should end at a
    maximum of the posterior: with a weight decay of :math:`\tau / n s^2`.

    Args:
        likelihood: of the outputs of ``forward``, or its name. None: the module's attribute ``likelihood``, or the only
            one that fits the first batch (:func:`~lightning_fedbayes.metrics.likelihoods.likelihood_of`).
            Batches and outputs have the forms of :class:`~lightning_fedbayes.PosteriorPredictive`.
        curvature: "ggn", or "empirical", which takes one backward pass per example in place of one per output.
        prior_std: s > 0 of the prior N(0, s²). None: :meth:`posterior` and :meth:`fuse` choose it by the evidence
            (:func:`~lightning_fedbayes.modules.sources.curvature.systems.chosen_precision`).
        temperature: :math:`\tau` > 0; 1 is Bayes. Where clients fit few examples perfectly, choose a smaller one.
        parameters: patterns (``fnmatch``) of the parameters that get a posterior. The others are point masses. By
            default all that require gradients.
        unpack: batch → (inputs, targets), if the form of a batch does not tell.

    Raises: FederationError if an argument is out of range.
    Source: MacKay 1992; Daxberger et al. 2021.
    """

    likelihood: Likelihood | str | None = None
    curvature: Curvature = "ggn"
    prior_std: float | None = 1.0
    temperature: float = 1.0
    parameters: Sequence[str] = ("*",)
    unpack: Unpack | None = None

    def __post_init__(self) -> None:
        check_unpack(self.unpack)
        if self.likelihood is not None:
            try:
                object.__setattr__(self, "likelihood", get_likelihood(self.likelihood))
            except FedBayesError as error:
                raise FederationError(f"Laplace: {error}") from None
        errors.check_choice("curvature", self.curvature, get_args(Curvature))
        if self.prior_std is not None:
            errors.check_number("prior_std", self.prior_std, "(0, 1e19)", why="it is a standard deviation")
        errors.check_number("temperature", self.temperature, "(0, inf)")
        patterns = errors.check_strings("parameters", self.parameters, "give patterns of names")
        object.__setattr__(self, "parameters", patterns)

    def posterior(self, module: nn.Module, batches: Iterable[Any]) -> GaussianPosterior:
        """Return the posterior of a trained ``module``, with copies of its parameters as means.

        Args:
            module: its ``forward`` gives logits or means. It runs in evaluation mode.
            batches: of the training data, such as a DataLoader. FederationError if they lack targets.
        """
        return self.fuse(module, [self.site(module, batches)])

    def site(self, module: nn.Module, batches: Iterable[Any]) -> Tensors:
        r"""Return a client's message to :meth:`fuse`, :math:`\sum_i F_i / \tau` by name. See :meth:`posterior`."""
        errors.check_kind("module", module, nn.Module, "give a torch.nn.Module")
        with raised_as(FederationError, f"Laplace: {type(module).__name__} cannot be measured", BATCHES):
            site = self.information(module, chosen_parameters(module, self.parameters), batches)[0]
        for name, value in site.items():
            if not bool(torch.isfinite(value).all()):
                where = f"{int((~value.isfinite()).sum())} of {value.numel()} entries"
                remedy = "look for NaN in the inputs, or for training that has diverged"
                raise FederationError(f"Laplace: the information of '{name}' is not finite at {where}: {remedy}")
        return site

    def fuse(self, module: nn.Module, sites: Sequence[Mapping[str, Tensor]]) -> GaussianPosterior:
        """Return the posterior of the pooled data of all clients, with copies of the module's parameters as means.

        Raises: FederationError if ``sites`` is empty, or one is of another network or has negative or infinite values.
        """
        errors.check_kind("module", module, nn.Module, "give a torch.nn.Module")
        errors.check_kind("sites", sites, list | tuple, "give a list of what site() has returned")
        if not sites:
            raise FederationError("fuse: no site; give what site() has returned, of every client")
        mean = {name: p.detach().clone() for name, p in module.named_parameters()}
        chosen = chosen_parameters(module, self.parameters)
        rule = "all clients have to take site() of this module"
        for number, site in enumerate(sites):
            errors.check_kind(f"sites[{number}]", site, Mapping, rule)
            check_shapes(f"sites[{number}]", site, chosen, "the module", rule)
            for name, value in site.items():
                if not bool((torch.isfinite(value) & (value >= 0)).all()):
                    wrong = f"sites[{number}]['{name}'] is negative or not finite"
                    raise FederationError(f"{wrong}, unlike a sum of squares: leave this client out")
        total = {name: torch.stack([site[name].to(p) for site in sites]).sum(0) for name, p in chosen.items()}
        if self.prior_std is None:
            precision = chosen_precision(total.values(), chosen.values())
        else:
            precision = float(self.prior_std) ** -2  # NumPy has no negative powers of integers
        variance = {
            name: (total[name] + precision).reciprocal() if name in total else zeros_like(value)
            for name, value in mean.items()
        }
        return GaussianPosterior(mean, variance, linearised=True)

    def fixed_prior_std(self, who: str) -> float:
        """Return s for the user ``who``. Raise FederationError if it is to be chosen."""
        if self.prior_std is None:
            remedy = "give prior_std=1.0, or train first and use posterior() or fuse(), which choose it"
            raise FederationError(f"Laplace(prior_std=None): {who} needs the prior from the start: {remedy}")
        return float(self.prior_std)

    def information(
        self,
        module: nn.Module,
        parameters: Mapping[str, Tensor],
        batches: Iterable[Any],
        others: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensors, int]:
        r"""Return :math:`\sum_i F_i / \tau` at ``parameters``, by name, and the number of examples.

        ``batches`` are of inputs and targets, or results of :meth:`unpacked`. ``others`` replace the module's other
        parameters and buffers. The module runs in evaluation mode.
        """
        errors.check_kind("batches", batches, Iterable, "give batches of inputs and targets, such as a DataLoader")
        values = {name: p.detach() for name, p in parameters.items()}
        total, count = {name: torch.zeros_like(value) for name, value in values.items()}, 0
        with evaluation_mode(module):
            for batch in batches:
                inputs, targets = self.unpacked(batch, module)
                count += len(targets)
                for name, each in self._of_batch(module, values, inputs, targets, others or {}).items():
                    total[name] += each
        return {name: each / self.temperature for name, each in total.items()}, count

    def unpacked(self, batch: Any, module: nn.Module | None = None) -> Any:
        """Return inputs and targets of a batch. Without the module, the whole batch for :meth:`information`."""
        if module is None:
            return Whole(batch)
        inputs, targets = unpacked(batch, module, self.unpack, needs_targets=True)
        count = len(inputs) if isinstance(inputs, Tensor) and inputs.ndim else number_of_examples(inputs)
        if not targets.ndim or not len(targets) or (count is not None and count != len(targets)):
            both = f"inputs are {shown(inputs)} and targets {shown(targets)}"
            raise FederationError(f"Laplace: {both}: give as many of both, at least one")
        return inputs, targets

    def likelihood_for(
        self, module: nn.Module, outputs: Tensor, targets: Tensor, others: Mapping[str, Tensor] | None = None
    ) -> Likelihood:
        """Return the likelihood of a batch's outputs and targets. FederationError if none fits.

        ``others`` replace the module's parameters and buffers, such as its noise.
        """
        given, values = self.likelihood, {f"0.{name}": value for name, value in (others or {}).items()}
        try:
            known = (
                given if isinstance(given, Likelihood) else functional_call(_Said(module), values, (outputs, targets))
            )
            known.check(outputs, targets)
        except FedBayesError as error:
            raise FederationError(f"Laplace: {error}") from None
        self.check_likelihood(known)
        return known

    def check_likelihood(self, whose: Any) -> None:
        """Raise FederationError if a likelihood, or a module's, has no terms of single examples."""
        remedy = "Laplace adds up the information of each example: take Bayesian layers, fb.IVON or fb.SWAG"
        check_by_example(self.likelihood or whose, remedy, FederationError)

    def terms(self, known: Likelihood, output: Tensor, target: Tensor) -> Tensor:
        """Return functions of one example, shape (terms,). Their squared gradients sum to its information."""
        if self.curvature == "empirical":
            return known.nll(output[None], target[None]).sum().reshape(1)
        return known.terms(output, target)

    def _of_batch(
        self, module: nn.Module, values: Tensors, inputs: Any, targets: Tensor, others: Mapping[str, Tensor]
    ) -> Tensors:
        def terms(values: Tensors, inputs: Any, targets: Tensor) -> Tensor:
            with raised_as(FederationError, f"Laplace: {type(module).__name__} cannot take {shown(inputs)}", BATCHES):
                outputs = output_of(module, inputs, {**others, **values})
            if len(outputs) != len(targets):
                both = f"outputs are {shown(outputs)} and targets {shown(targets)}"
                raise FederationError(f"Laplace: {both}: give as many of both")
            known = self.likelihood_for(module, outputs, targets, others)
            return torch.stack([self.terms(known, *each) for each in zip(outputs, targets)])

        def squared(example: Any, target: Tensor) -> Tensors:
            jacobians = torch.func.jacrev(
                lambda values: self.terms(known, output_of_one(module, {**others, **values}, example), target)
            )(values)
            return {name: each.square().sum(0) for name, each in jacobians.items()}

        if number_of_examples(inputs) is None:
            return sum_of_squares(terms, values, [(inputs, targets)])
        with torch.no_grad():
            output = output_of_one(module, {**others, **values}, rows(inputs, 0))
            known = self.likelihood_for(module, output.expand(len(targets), *output.shape), targets, others)
            outputs = len(self.terms(known, output, targets[0]))
        size = sum(value.numel() for value in values.values())
        try:
            each = torch.func.vmap(squared, chunk_size=max(1, ENTRIES // (size * outputs)))(inputs, targets)
        except (RuntimeError, ValueError):  # an error of the network itself shows below
            parts = (slice(number, number + 1) for number in range(len(targets)))
            return sum_of_squares(terms, values, ((rows(inputs, part), targets[part]) for part in parts))
        return {name: value.sum(0) for name, value in each.items()}


@dataclass(frozen=True)
class SWAG:
    r"""Diagonal SWAG: the mean and the variance of the weights along the path of training.

    .. math:: q(\theta) = N\left(\bar\theta,\ c\,\overline{(\theta_t - \bar\theta)^2} + \epsilon^2\right)

    over the steps t of the last part of a client's local training. The mean replaces the client's weights. Give
    ``FederatedBayes(posterior=fb.SWAG())``.

    When to use it: with SGD at a constant learning rate, so that noise moves the path about the optimum, and several
    local epochs. It has no prior, so it does not work with sites.

    Args:
        start: share of the local steps that is left out, in [0, 1).
        scale: c > 0.
        min_std: :math:`\epsilon` > 0; FederationError for values out of range.
        parameters: see :class:`Laplace`.

    Source: Maddox et al. 2019, the diagonal part.
    """

    start: float = 0.5
    scale: float = 1.0
    min_std: float = 1e-3
    parameters: Sequence[str] = ("*",)

    def __post_init__(self) -> None:
        errors.check_number("start", self.start, "[0, 1)", why="it is the share of steps that is left out")
        errors.check_number("scale", self.scale, "(0, inf)")
        errors.check_number("min_std", self.min_std, "(0, inf)", why="it is a standard deviation")
        patterns = errors.check_strings("parameters", self.parameters, "give patterns of names")
        object.__setattr__(self, "parameters", patterns)


Source = Laplace | SWAG
"""Source of the posterior of parameters outside of Bayesian layers."""


def chosen_parameters(module: nn.Module, patterns: Sequence[str]) -> Tensors:
    """Return matching parameters outside of Bayesian layers. FederationError if there are none."""
    bayesian = {id(p) for each in gaussian_parameters(module).values() for p in (each.mean, each.rho)}
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = matching(patterns, trained, "parameter that requires gradients")
    outside = {name: p for name, p in found.items() if id(p) not in bayesian}
    if not outside:
        why = "is of a Bayesian layer, which has a posterior already: leave this source out"
        raise FederationError(f"parameters={list(patterns)}: each that matches {why}")
    return outside


def matching(patterns: Sequence[str], known: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the entries of ``known`` that match a pattern. FederationError if a pattern matches none of ``what``."""
    found = {}
    for pattern in patterns:
        names = [name for name in known if fnmatchcase(name, pattern)]
        if not names:
            raise FederationError(f"parameters pattern '{pattern}' matches no {what}: {nearest(pattern, known)}")
        found |= {name: known[name] for name in names}
    return found


def check_shapes(part: str, given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], whose: str, rule: str) -> None:
    """Raise FederationError, with the ``rule``, unless ``part`` of a client has the names and shapes of ``wanted``."""
    shapes, expected = ({name: tuple(value.shape) for name, value in each.items()} for each in (given, wanted))
    if shapes != expected:
        name = next(iter(dict(shapes.items() ^ expected.items())))
        mine, other = (each.get(name, "missing") for each in (shapes, expected))
        raise FederationError(f"{part}: '{name}' is {mine}, and that of {whose} is {other}: {rule}")


class _Said(nn.Sequential):
    """Says the likelihood of the module in it, as ``functional_call`` asks."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Likelihood:  # pyright: ignore
        return likelihood_of(self[0], outputs, targets)


def rows(inputs: Any, which: int | slice) -> Any:
    """Return rows of all tensors of a collection."""
    return apply_to_collection(inputs, Tensor, lambda tensor: tensor[which])


def output_of_one(module: nn.Module, values: Mapping[str, Tensor], example: Any) -> Tensor:
    """Return the output for one example, both without the dimension of the batch. See ``output_of``."""
    batch = apply_to_collection(example, Tensor, lambda tensor: tensor.unsqueeze(0))
    return output_of(module, batch, values).squeeze(0)


def sum_of_squares(
    terms: Callable[[Tensors, Any, Tensor], Tensor], values: Tensors, parts: Iterable[tuple[Any, Tensor]]
) -> Tensors:
    """Return the sum over examples of squared gradients of ``terms``, shape (examples, terms), without ``vmap``."""
    total = {name: torch.zeros_like(value) for name, value in values.items()}
    for inputs, targets in parts:
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        with torch.enable_grad():
            functions = terms(leaves, inputs, targets).flatten().unbind()
        for function in functions:
            gradients = torch.autograd.grad(function, list(leaves.values()), retain_graph=True, allow_unused=True)
            for name, gradient in zip(leaves, gradients):
                if gradient is not None:
                    total[name] += gradient.square()
    return total
