"""Bases of Bayesian layers: Gaussian parameters with priors, layers that are linear in their weight, a wrapper."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from bayesian_torch.layers.base_variational_layer import BaseVariationalLayer_
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import Parameter
from torch.overrides import handle_torch_function, has_torch_function

from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import ConversionError, shown
from lightning_fedbayes.layers import functional
from lightning_fedbayes.layers.functional import Estimator, FlipoutNoise, Normal, inverse_softplus_std, softplus_std
from lightning_fedbayes.layers.kl import SMALL, KLWatch, joined_kl_sum, known
from lightning_fedbayes.layers.priors import FLOAT32, NormalPrior, Prior, check_std, choose_prior, map_tensors

RELATIVE_STD = 0.1
"""Initial σ of a weight, as a part of the standard deviation of its deterministic initialisation: the variance of an
output is then 1 % larger than in the deterministic layer."""


@dataclass(frozen=True)
class GaussianParameter:
    """A Gaussian parameter tensor of a layer: looks up mean, ρ and prior at every access, for ``functional_call``.

    Args:
        layer: the Bayesian layer, which holds ρ, under ``rho_name``, and the prior.
        path: name within the layer, without ``mu_``: "weight", "kernel", "bias", "module.weight_ih_l0".
        owner: the module that holds the mean, under ``mean_name``.
        mean_name, rho_name: names of attributes.
    """

    layer: BaseVariationalLayer_
    path: str
    owner: nn.Module
    mean_name: str
    rho_name: str

    @property
    def mean(self) -> Tensor:
        """Posterior mean μ, the live parameter."""
        return getattr(self.owner, self.mean_name)

    @property
    def rho(self) -> Tensor:
        """The live parameter ρ, for ``layers`` only. See :attr:`std`."""
        return getattr(self.layer, self.rho_name)

    @property
    def std(self) -> Tensor:
        """Posterior standard deviation σ > 0."""
        return softplus_std(self.rho)

    @property
    def variance(self) -> Tensor:
        """Posterior variance σ² > 0."""
        return self.std.square()

    @property
    def prior(self) -> Prior:
        """The prior in force: the one put by :meth:`replace_prior`, or else the layer's."""
        layer = cast("BayesianLayer", self.layer)
        return layer.replaced_priors.get(self.path) or layer.priors[self.path]

    def replace_prior(self, prior: Prior | None) -> None:
        """Put ``prior`` in force. None restores the layer's prior."""
        replaced = cast("BayesianLayer", self.layer).replaced_priors
        if prior is None:
            replaced.pop(self.path, None)
        else:
            replaced[self.path] = prior

    def kl(self) -> Tensor:
        """KL(q‖p) from the prior in force, summed over the entries, in nats. Returns a scalar."""
        return self.prior.kl(*known(self.mean, self.rho))


class BayesianLayer(BaseVariationalLayer_):
    """Base of this package's Bayesian layers: Gaussian parameters, their priors, and a switch to the posterior mean.

    Priors follow ``.to`` and ``deepcopy``. They are not part of the ``state_dict``.

    Attributes:
        mean_only: True if ``forward`` uses the posterior mean. See :func:`~lightning_fedbayes.layers.mean_only`.
        priors: path of each Gaussian parameter → prior.
        replaced_priors: priors in force instead. See :func:`~lightning_fedbayes.layers.set_prior`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mean_only = False
        self.priors: dict[str, Prior] = {}
        self.replaced_priors: dict[str, Prior] = {}

    @abstractmethod
    def gaussian_parameters(self) -> Iterator[GaussianParameter]:
        """The Gaussian parameters of this layer, in definition order."""

    def mean_layer(self) -> nn.Module:
        """The deterministic layer at the posterior mean, with this layer's mean parameters. Override this method."""
        raise ConversionError(f"{type(self).__name__} has no mean_layer: override it with the layer at the mean")

    def kl_loss(self) -> Tensor:
        """KL(q‖p) of the layer from its prior: the **sum** over its parameters, in nats, a scalar."""
        KLWatch.note()
        return sum_kl(self.gaussian_parameters())

    def _apply(self, fn: Any, recurse: bool = True) -> "BayesianLayer":
        super()._apply(fn, recurse)
        for priors in (self.priors, self.replaced_priors):
            priors.update({path: map_tensors(prior, fn) for path, prior in priors.items()})
        return self


class BayesianAffine(BayesianLayer):
    """A layer that is linear in a Gaussian weight. ``template``, a deterministic one, gives shapes and first means."""

    default_estimator: ClassVar[Estimator] = "reparameterization"
    deterministic: ClassVar[Any] = nn.Linear
    dims: ClassVar[int] = 0

    bias: Parameter | None
    mu_bias: Parameter | None
    rho_bias: Parameter | None

    def __init_subclass__(cls, estimator: Estimator | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.default_estimator = estimator or cls.default_estimator

    def __init__(
        self,
        template: nn.Module,
        weight_name: str,
        prior: Prior,
        posterior_mu_init: float,
        posterior_rho_init: float | None,
        bayesian_bias: bool,
    ) -> None:
        super().__init__()
        errors.check_number("posterior_mu_init", posterior_mu_init, FLOAT32, error=ConversionError)
        if posterior_rho_init is not None:
            errors.check_number("posterior_rho_init", posterior_rho_init, FLOAT32, error=ConversionError)
        errors.check_flag("bayesian_bias", bayesian_bias, error=ConversionError)
        self._estimator: Estimator = self.default_estimator
        self.weight_name = weight_name
        weight, bias = cast("Tensor", template.weight), cast("Tensor | None", template.bias)
        initial_std = default_weight_std(weight)

        def add_gaussian(name: str, initial: Tensor) -> None:
            if posterior_rho_init is None:
                rho = inverse_softplus_std(torch.full_like(initial, RELATIVE_STD * initial_std))
            else:
                rho = torch.full_like(initial, posterior_rho_init)
            self.register_parameter(f"mu_{name}", Parameter(initial.detach() + posterior_mu_init))
            self.register_parameter(f"rho_{name}", Parameter(rho.detach()))
            self.priors[name] = prior

        add_gaussian(weight_name, weight)
        if bias is None or not bayesian_bias:
            self.register_parameter("mu_bias", None)
            self.register_parameter("rho_bias", None)
            self.register_parameter("bias", None if bias is None else Parameter(bias.detach().clone()))
        else:
            add_gaussian("bias", bias)
            self.register_parameter("bias", None)

    @property
    def estimator(self) -> Estimator:
        """Estimator of the output: "reparameterization", "local_reparameterization" or "flipout". May be assigned."""
        return self._estimator

    @estimator.setter
    def estimator(self, name: Estimator) -> None:
        self._estimator = check_estimator(name)

    def gaussian_parameters(self) -> Iterator[GaussianParameter]:
        """The weight, and the bias unless it is deterministic."""
        for name in self.priors:
            yield GaussianParameter(self, name, self, f"mu_{name}", f"rho_{name}")

    @abstractmethod
    def template(self, bias: bool) -> nn.Module:
        """A deterministic layer of this geometry, on the device "meta"."""

    def mean_layer(self) -> nn.Module:
        """The linear layer or convolution at the posterior mean."""
        bias = self.bias if self.mu_bias is None else self.mu_bias
        layer: Any = self.template(bias is not None).train(self.training)
        layer.weight, layer.bias = getattr(self, f"mu_{self.weight_name}"), bias
        return layer

    @abstractmethod
    def op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The deterministic layer at the given parameters."""

    @abstractmethod
    def sign_shapes(self, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of Flipout's input and output signs: the shapes of input and output, with 1 along space and time."""

    def forward(self, x: Tensor, return_kl: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The output at sampled weights (mean-only: at their mean), with ``return_kl`` also :meth:`kl_loss`."""
        output = self._output(self.op, x)
        return (output, self.kl_loss()) if return_kl else output

    def _output(self, op: functional.Op, x: Tensor) -> Tensor:
        """The output, with tallies of squared gradients where the priors in force ask for them."""
        output = self._sampled(op, x)
        if not self.replaced_priors or not torch.is_grad_enabled():
            return output
        weight, bias = (getattr(self.replaced_priors.get(name), "squares", None) for name in (self.weight_name, "bias"))
        return output if weight is bias is None else functional.with_tallies(output, x, weight, bias, op, self.dims)

    def _sampled(self, op: functional.Op, x: Tensor) -> Tensor:
        weight_mean: Tensor = getattr(self, f"mu_{self.weight_name}")
        bias_mean = self.bias if self.mu_bias is None else self.mu_bias
        if self.mean_only:
            return op(x, weight_mean, bias_mean)
        refuse_export(self)
        weight_rho: Tensor = getattr(self, f"rho_{self.weight_name}")
        if self.estimator == "reparameterization":
            if bias_mean is None or self.rho_bias is None:
                (weight,) = draw([weight_mean], [weight_rho])
                return op(x, weight, bias_mean)
            weight, bias = draw([weight_mean, bias_mean], [weight_rho, self.rho_bias])
            return op(x, weight, bias)
        if self.estimator == "local_reparameterization":
            weight, bias = Normal(*known(weight_mean, weight_rho)), None
            if bias_mean is not None:
                bias = Normal(bias_mean, None if self.rho_bias is None else softplus_std(self.rho_bias))
            mean, std = functional.output_moments(op, x, weight, bias)
            return mean + std * torch.randn_like(mean)
        weight_mean, change = known(weight_mean, weight_rho, draws=True)
        biases = () if self.mu_bias is None or self.rho_bias is None else known(self.mu_bias, self.rho_bias, draws=True)
        noise = FlipoutNoise(change, biases[1] if biases else None, *random_signs(self.sign_shapes(x), x))
        return self.flipout(op, x, weight_mean, bias_mean, noise)

    def flipout(self, op: functional.Op, x: Tensor, weight: Tensor, bias: Tensor | None, noise: FlipoutNoise) -> Tensor:
        """Output of Flipout. Arguments as for :func:`~lightning_fedbayes.layers.functional.flipout`."""
        return functional.flipout(op, x, weight, bias, noise)

    def extra_repr(self) -> str:
        """The deterministic layer in torch's words, then the estimator and the prior of the weight."""
        prior = self.priors[self.weight_name]
        text = repr(prior) if len(repr(prior)) < 80 else type(prior).__name__
        bias = self.bias if self.mu_bias is None else self.mu_bias
        shown = SimpleNamespace(**{"output_padding": (0,), **vars(self), "bias": bias})  # vmap asks, and forbids draws
        return f"{self.deterministic.extra_repr(shown)}, estimator={self.estimator!r}, prior={text}"


class Reparameterized(BayesianLayer):
    r"""Wraps a module so that every call samples its parameters, :math:`w = \mu + \sigma \odot \epsilon`.

    When to use it: for a module without a Bayesian layer of its kind (LSTM, embedding, attention, normalisation, a
    whole block). The parameters of ``module`` are the means, so its pretrained ``state_dict`` loads into ``.module``.
    Parameters that are frozen when it is wrapped stay deterministic. The batch shares one weight sample, and an LSTM
    keeps it for a whole sequence.

    Args:
        module: the module to wrap. It is kept, not copied.
        prior: of every entry. None: N(0, 1).
        posterior_std: initial σ. None: for each parameter 0.1 × the root mean square of its values (of all the
            module's values where it is all zero).

    Raises:
        ConversionError: no parameter to sample, a Bayesian layer inside, lazy parameters, or an impossible prior or σ.

    >>> lstm = Reparameterized(nn.LSTM(3, 4, batch_first=True))
    >>> output, (hidden, cell) = lstm(torch.zeros(2, 5, 3))
    >>> output.shape
    torch.Size([2, 5, 4])
    """

    def __init__(self, module: nn.Module, *, prior: Prior | None = None, posterior_std: float | None = None) -> None:
        super().__init__()
        prior = choose_prior(0.0, None, None, prior)
        errors.check_kind("module", module, nn.Module, "give a torch.nn.Module", error=ConversionError)
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
            raise ConversionError(f"{type(module).__name__} is lazy: run it on one batch before it is wrapped")
        if any(isinstance(inner, BaseVariationalLayer_) for inner in module.modules()):
            raise ConversionError(f"{type(module).__name__} is or contains a Bayesian layer: it would be sampled twice")
        means = {name: p for name, p in module.named_parameters() if p.requires_grad and p.is_floating_point()}
        if not means:
            raise ConversionError(f"{type(module).__name__} has no trainable floating-point parameter to sample")
        if posterior_std is not None:
            check_std("posterior_std", posterior_std)
        self.module = module
        fallback = root_mean_square(torch.cat([mean.detach().flatten() for mean in means.values()])) or 1.0
        for name, mean in means.items():
            std = posterior_std or RELATIVE_STD * (root_mean_square(mean) or fallback)
            rho = inverse_softplus_std(torch.full_like(mean, std, requires_grad=False))
            self.register_parameter(rho_name(name), Parameter(rho))
            self.priors[f"module.{name}"] = prior

    def gaussian_parameters(self) -> Iterator[GaussianParameter]:
        """Every sampled parameter of the module."""
        for path in self.priors:
            name = path.removeprefix("module.")
            owner, _, attribute = name.rpartition(".")
            yield GaussianParameter(self, path, self.module.get_submodule(owner), attribute, rho_name(name))

    def mean_layer(self) -> nn.Module:
        """The wrapped module, whose parameters are the means."""
        return self.module

    def forward(self, *args: Any, return_kl: bool = False, **kwargs: Any) -> Any:
        """Return the module's output at sampled parameters, or at their means where the layer is mean-only."""
        if self.mean_only:
            output = self.module(*args, **kwargs)
        else:
            refuse_export(self)
            parameters = list(self.gaussian_parameters())
            draws = draw([each.mean for each in parameters], [each.rho for each in parameters])
            names = [each.path.removeprefix("module.") for each in parameters]
            output = functional_call(self.module, dict(zip(names, draws)), args, kwargs)
        return (output, self.kl_loss()) if return_kl else output


def is_exporting() -> bool:
    """True while ``torch.export``, ``torch.onnx.export`` or ``torch.jit.trace`` records a network."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def refuse_export(layer: nn.Module) -> None:
    """Raise ConversionError if an export would record the draw that ``layer`` is about to make."""
    if is_exporting():
        what = f"{type(layer).__name__} is exported while it draws: the network would be random, or one draw forever"
        raise ConversionError(f"{what}. Export fb.mean_network(module), the same network at its posterior mean")


def draw(means: Sequence[Tensor], rhos: Sequence[Tensor]) -> list[Tensor]:
    """A draw of each N(μ, σ²), with noise of torch's global generator. A ``TorchFunctionMode`` can override it."""
    if has_torch_function((*means, *rhos)):
        return handle_torch_function(draw, (*means, *rhos), means, rhos)
    pairs = (known(mean, rho) for mean, rho in zip(means, rhos))
    return [torch.addcmul(mean, std, torch.randn_like(mean)) for mean, std in pairs]


def sum_kl(parameters: Iterable[GaussianParameter]) -> Tensor:
    """Sum of the divergences of Gaussian parameters from their priors, in nats. Small ones of one prior are joined."""
    groups: dict[Any, list[GaussianParameter]] = {}
    for parameter in parameters:
        key: Any = parameter
        prior, mean = parameter.prior, parameter.mean
        if isinstance(prior, NormalPrior) and prior.is_scalar and mean.numel() < SMALL:
            key = prior.mean, prior.std, mean.dtype, mean.device
        groups.setdefault(key, []).append(parameter)
    total: Any = None
    for key, group in groups.items():
        if len(group) == 1:
            divergence = group[0].kl()
        else:
            divergence = joined_kl_sum([each.mean for each in group], [each.rho for each in group], *key[:2])
        total = divergence if total is None else total + divergence
    return total


def default_weight_std(weight: Tensor) -> float:
    r"""Standard deviation :math:`1/\sqrt{3\,\mathrm{fan\_in}}` of torch's initial weight and bias."""
    return 1 / math.sqrt(3 * max(1, math.prod(weight.shape[1:])))


def random_signs(shapes: Sequence[tuple[int, ...]], like: Tensor) -> list[Tensor]:
    """Independent ±1 of equal probability, of each shape, with the dtype and device of ``like``."""
    sizes = [math.prod(shape) for shape in shapes]
    signs = torch.rsub(torch.randint(0, 2, (sum(sizes),), dtype=like.dtype, device=like.device), 1, alpha=2)
    return [part.view(shape) for part, shape in zip(signs.split(sizes), shapes)]


def check_template(bias: Any, device: Any, dtype: Any, **sizes: Any) -> None:
    """Raise ConversionError unless a layer can have these. ``sizes``: name → features or channels."""
    for name, size in sizes.items():
        errors.check_at_least(name, size, 1, 2**31 - 1, error=ConversionError)
    errors.check_flag("bias", bias, error=ConversionError)
    try:
        made = torch.empty(0, device=device, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:  # an unknown device or dtype
        given = f"device={shown(device)}, dtype={shown(dtype)}"
        raise ConversionError(f"{given}: torch makes no such tensor: {error}") from None
    if not made.is_floating_point():
        raise ConversionError(f"dtype={shown(dtype)}: the parameters of a layer are floating-point numbers")


def check_estimator(name: str) -> Estimator:
    """Return ``name`` if it is an estimator, else raise ConversionError."""
    errors.check_choice("estimator", name, functional.ESTIMATORS, error=ConversionError)
    return cast("Estimator", name)


def rho_name(name: str) -> str:
    """Attribute that holds the ρ of the inner parameter ``name``. An attribute name has no dots."""
    return f"rho_{name.replace('.', '/')}"


def root_mean_square(values: Tensor) -> float:
    """Square root of the mean of the squares. 0 for no values."""
    return float(values.detach().float().square().mean().sqrt()) if values.numel() else 0.0
