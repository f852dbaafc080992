"""Conversion of a deterministic network: chosen layers become Bayesian, or get Monte Carlo dropout."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from bayesian_torch.layers.base_variational_layer import BaseVariationalLayer_
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import ConversionError, listed, nearest, shown
from lightning_fedbayes.core.private_torch import has_backward_hook, has_forward_hook, remove_forward_hook
from lightning_fedbayes.layers import affine, base
from lightning_fedbayes.layers.base import BayesianAffine, BayesianLayer, Reparameterized
from lightning_fedbayes.layers.functional import ESTIMATORS, Estimator, inverse_softplus_std
from lightning_fedbayes.layers.priors import NormalPrior, Prior, check_std, choose_prior

AFFINE: dict[type[nn.Module], dict[Estimator, Callable[..., BayesianAffine]]] = {
    kind: {name: getattr(affine, kind.__name__ + name.title().replace("_", "")) for name in ESTIMATORS}
    for kind in (nn.Linear, *affine.CONVOLVE)
}
"""Deterministic layer → estimator → Bayesian layer."""

FLOOR = 0.01
"""Lower bound of |w| in MOPED's σ = δ|w|, relative to the layer's default standard deviation, so that σ > 0."""

CHILD = "mc_dropout"
"""Name of the submodule that a layer gets for the dropout of its output."""


def bayesianize(
    network: nn.Module,
    *,
    last: int | None = None,
    names: Sequence[str] | None = None,
    types: Sequence[type[nn.Module]] | None = None,
    estimator: Estimator = "local_reparameterization",
    prior_std: float | None = None,
    prior: Prior | None = None,
    init: Literal["fresh", "pretrained"] = "fresh",
    delta: float = 0.1,
    posterior_std: float | None = None,
    bayesian_bias: bool = True,
) -> nn.Module:
    r"""A copy of ``network`` in which the chosen layers are Bayesian. ``network`` itself stays as it is.

    Linear layers and (transposed) convolutions become the Bayesian layer of the same geometry. Any other module that
    holds trainable parameters (LSTM, embedding, attention, normalisation) becomes a
    :class:`~lightning_fedbayes.layers.Reparameterized`. A module used in two places stays one module.

    Args:
        network: any module without hooks or parametrisations on the chosen layers.
        last: the last n linear or convolutional layers in the order of definition. 0 gives an unchanged copy. Frozen
            layers do not count where others train.
        names: dotted names of the chosen modules, as in ``network.named_modules()``.
        types: all modules that are instances of these types.
        estimator: "local_reparameterization" (the least gradient noise), "flipout" (keeps the correlation between
            the positions of a convolution) or "reparameterization" (cheapest). It can be switched later.
        prior_std: standard deviation s of the Gaussian prior, 1 by default.
        prior: any other prior, in place of ``prior_std``.
        init: "fresh": torch's default initialisation for the means, prior N(0, s²). "pretrained" is MOPED (Krishnan
            et al. 2020) from the network's weights w: mean w, :math:`\sigma = \delta |w|`, prior N(w, s²).
        delta: :math:`\delta` of "pretrained". |w| counts as at least 1 % of the standard deviation of torch's default
            initialisation, so that a weight of 0 can move too.
        posterior_std: initial σ of "fresh". None is 0.1 × the standard deviation of the default initialisation.
        bayesian_bias: False keeps the biases of linear layers and convolutions deterministic.

    Raises ConversionError: not exactly one of ``last``, ``names`` and ``types`` is given, no layer matches, or a chosen
    module cannot be converted (the message names it and says why).

    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> [type(layer).__name__ for layer in bayesianize(network, last=1, estimator="flipout")]
    ['Linear', 'ReLU', 'LinearFlipout']
    """
    base.check_estimator(estimator)
    errors.check_choice("init", init, ("fresh", "pretrained"), error=ConversionError)
    if init == "pretrained" and posterior_std is not None:
        raise ConversionError(f"posterior_std={shown(posterior_std)} is for init='fresh'; 'pretrained' takes delta")
    errors.check_number("delta", delta, "(0, inf)", error=ConversionError)
    if posterior_std is not None:
        check_std("posterior_std", posterior_std)
    errors.check_flag("bayesian_bias", bayesian_bias, error=ConversionError)
    errors.check_kind("network", network, nn.Module, "give a torch.nn.Module", error=ConversionError)
    usual = choose_prior(0.0, None, prior_std, prior)

    def convert(layer: nn.Module) -> BayesianLayer:
        kind = affine_kind(layer)
        if kind is None:
            if init == "fresh":
                reset(layer)
            new = Reparameterized(layer, prior=usual, posterior_std=posterior_std)
        else:
            bias = cast("Tensor | None", layer.bias) is not None
            new = AFFINE[kind][estimator](**geometry(layer), bias=bias, bayesian_bias=bayesian_bias, prior=usual)
            carry_over(layer, new, posterior_std, pretrained=init == "pretrained")
        if init == "pretrained":
            moped(new, delta, None if prior is not None else 1.0 if prior_std is None else prior_std)
        return new.train(layer.training)

    copied = copy.deepcopy(network)
    chosen = choose(copied, last, names, types)
    for outer, module in chosen.items():
        check_convertible(copied, outer, module)
    for outer, module in chosen.items():
        parts = {id(inner) for inner in module.modules() if inner is not module}
        for inner, other in chosen.items():
            if id(other) in parts:  # its parameters would be sampled twice
                raise ConversionError(f"'{inner}' is a part of '{outer}', and both are chosen: choose one of them")
    # by identity: a module chosen under two names is converted once
    bayesian = {key: convert(layer) for key, layer in {id(layer): layer for layer in chosen.values()}.items()}
    if id(copied) in bayesian:
        return bayesian[id(copied)]
    for parent in [m for m in copied.modules() if not isinstance(m, BayesianLayer)]:
        for attribute, child in parent._modules.items():
            if id(child) in bayesian:
                parent._modules[attribute] = bayesian[id(child)]
    return copied


def choose(
    network: nn.Module, last: int | None, names: Sequence[str] | None, types: Sequence[type[nn.Module]] | None
) -> dict[str, nn.Module]:
    """The modules to convert by name. Raises ConversionError where the choice makes no sense."""
    if sum(choice is not None for choice in (last, names, types)) != 1:
        given = f"last={shown(last)}, names={shown(names)}, types={shown(types)}"
        raise ConversionError(f"{given}: give exactly one of last, names and types to choose the Bayesian layers")
    candidates = candidate_modules(network)
    if last is not None:
        errors.check_at_least("last", last, 0, error=ConversionError, why="it is how many layers become Bayesian")
        return choose_last(candidates, last)
    if names is not None:
        remedy = "give a list of one or more module names, such as ['fc1']"
        if isinstance(names, str) or not errors.check_strings("names", names, remedy, error=ConversionError):
            raise ConversionError(f"names={shown(names)}: {remedy}")
        known = dict(network.named_modules(remove_duplicate=False))
        for name in names:
            if name not in known:
                raise ConversionError(f"the network has no module '{name}'; {nearest(name, known)}")
        return {name: known[name] for name in names}
    assert types is not None
    wanted = tuple(types) if isinstance(types, Sequence) else (types,)
    if not wanted or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in wanted):
        raise ConversionError(f"types={shown(types)} must be classes of modules, such as (nn.Linear, nn.Conv2d)")
    found = {name: module for name, module in candidates.items() if isinstance(module, wanted)}
    if not found:
        present = sorted({type(module).__name__ for module in candidates.values()})
        asked = [kind.__name__ for kind in wanted]
        raise ConversionError(f"no layer is an instance of {asked}; the network has {listed(present)}")
    return found


def choose_last(candidates: dict[str, nn.Module], last: int) -> dict[str, nn.Module]:
    """The last ``last`` linear or convolutional layers, of those that train. Of all of them if none does."""
    if last == 0:
        return {}
    already = [name for name, module in candidates.items() if isinstance(module, BaseVariationalLayer_)]
    if already:
        raise ConversionError(f"last={last}: [{listed(map(repr, already))}] are Bayesian already; choose by names")
    known = [name for name, module in candidates.items() if affine_kind(module) is not None]
    if not known:
        raise ConversionError("the network has no linear or convolutional layer; choose other modules by names")
    live = [name for name in known if any(p.requires_grad for p in candidates[name].parameters(recurse=False))]
    live = live or known
    if last > len(live):
        frozen = [name for name in known if name not in live]
        rest = f"; frozen, so that they stay deterministic: {listed(frozen)}: set requires_grad first" if frozen else ""
        raise ConversionError(f"last={last}, but only {len(live)} layers can be converted: {listed(live)}{rest}")
    return {name: candidates[name] for name in live[-last:]}


def candidate_modules(network: nn.Module) -> dict[str, nn.Module]:
    """The network's modules by name, in definition order, without the parts of Bayesian and attention layers."""
    kinds = BaseVariationalLayer_ | nn.MultiheadAttention  # which reads its projection's weight without a call
    inside = {id(part) for part in parts_of(network, kinds)}
    return {name: module for name, module in network.named_modules() if id(module) not in inside}


def parts_of(network: nn.Module, kinds: Any) -> list[nn.Module]:
    """The modules inside of modules of the given kinds."""
    whole = [each for each in network.modules() if isinstance(each, kinds)]
    return [part for each in whole for part in each.modules() if part is not each]


def affine_kind(module: nn.Module) -> type[nn.Module] | None:
    """Return the type of deterministic layer that ``module`` computes: linear, convolution, or None for any other."""
    kinds = (kind for kind in AFFINE if isinstance(module, kind) and type(module).forward is kind.forward)
    return next(kinds, None)


def check_convertible(network: nn.Module, name: str, module: nn.Module) -> None:
    """Raise ConversionError, with the reason, if the chosen ``module`` cannot become Bayesian."""
    reason, is_affine = None, affine_kind(module) is not None
    if any(isinstance(inner, BaseVariationalLayer_) for inner in module.modules()):
        reason = "is Bayesian already, or a part of it is"
    elif isinstance(module, LazyModuleMixin):
        reason = "is lazy, so its sizes are unknown: run one batch through the network first"
    elif id(module) not in {id(candidate) for candidate in candidate_modules(network).values()}:
        reason = "is inside an attention or Bayesian layer, which does not call it: choose that layer"
    elif any(module is part for part in parts_of(network, nn.TransformerEncoderLayer)):
        reason = "is inside a TransformerEncoderLayer, which reads its weight: wrap that whole layer in Reparameterized"
    elif is_parametrized(module) or (is_affine and not isinstance(module._parameters.get("weight"), Tensor)):
        reason = "has a parametrised weight (weight_norm, spectral_norm, ...): remove the parametrisation first"
    elif has_forward_hook(module) or has_backward_hook(module):
        reason = "has hooks, which would be lost: register them after the conversion"
    elif not any(p.is_floating_point() for p in module._parameters.values() if p is not None):
        children = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
        reason = f"holds no parameter itself: choose among {listed(children)}" if children else "has no parameter"
    elif not is_affine and not any(p.requires_grad for p in module.parameters()):
        reason = "has only frozen parameters, which stay deterministic: set requires_grad first"
    else:
        mine, inside = {id(p) for p in module.parameters()}, set(module.modules())
        others = [(path, other) for path, other in network.named_modules() if other not in inside]
        shared = [path for path, other in others if not mine.isdisjoint(map(id, other._parameters.values()))]
        if shared:
            reason = f"shares a parameter with '{shared[0]}': untie them first"
    if reason is not None:
        raise ConversionError(f"'{name}' ({type(module).__name__}) cannot be made Bayesian: it {reason}")


def geometry(layer: Any) -> dict[str, Any]:
    """The constructor arguments of a linear or convolutional layer, without its bias and prior."""
    made = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    if isinstance(layer, nn.Linear):
        return {"in_features": layer.in_features, "out_features": layer.out_features, **made}
    names = (*affine.GEOMETRY, "output_padding") if layer.transposed else affine.GEOMETRY
    return {name: getattr(layer, name) for name in names} | made


@torch.no_grad()
def carry_over(old: nn.Module, new: BayesianAffine, posterior_std: float | None, pretrained: bool) -> None:
    """Give ``new`` the trainability, and where ``pretrained`` the weights, of the layer it replaces."""
    gaussian = {each.path: each for each in new.gaussian_parameters()}
    for name, path in (("weight", new.weight_name), ("bias", "bias")):
        value = cast("Tensor | None", getattr(old, name))
        if value is None:
            continue
        parameter = gaussian.get(path)
        mean = cast("Tensor", new.bias) if parameter is None else parameter.mean
        if parameter is not None:
            parameter.rho.requires_grad_(value.requires_grad)
            if posterior_std is not None:
                parameter.rho.copy_(inverse_softplus_std(torch.full_like(parameter.rho, posterior_std)))
        mean.requires_grad_(value.requires_grad)
        if pretrained:
            mean.copy_(value)


@torch.no_grad()
def moped(layer: BayesianLayer, delta: float, prior_std: float | None) -> None:
    r"""Set σ to :math:`\delta |w|` around the means w of ``layer``. Centre the prior at w if ``prior_std`` is given."""
    parameters = list(layer.gaussian_parameters())
    fallback = base.root_mean_square(torch.cat([each.mean.flatten() for each in parameters])) or 1.0
    for parameter in parameters:
        if isinstance(layer, BayesianAffine):
            scale = base.default_weight_std(getattr(layer, f"mu_{layer.weight_name}"))
        else:
            scale = base.root_mean_square(parameter.mean) or fallback
        parameter.rho.copy_(inverse_softplus_std(delta * parameter.mean.abs().clamp_min(FLOOR * scale)))
        if prior_std is not None:
            layer.priors[parameter.path] = NormalPrior(parameter.mean.detach().clone(), prior_std)


def reset(module: nn.Module) -> None:
    """Initialise ``module`` and its submodules as their constructors do."""
    for inner in reversed(list(module.modules())):
        again = getattr(inner, "reset_parameters", None) or getattr(inner, "_reset_parameters", None)
        if again is not None:
            again()
        elif inner._parameters:
            name = type(inner).__name__
            raise ConversionError(f"{name} has no reset_parameters: write this method, or use init='pretrained'")


class MCDropout(nn.Module):
    r"""Dropout that stays active at prediction, :math:`y = x \odot z / (1 - p)` with z 0 at probability p, else 1.

    Averaging predictions over its masks is Monte Carlo dropout (Gal & Ghahramani 2016). It is active in training and
    evaluation, and off inside :func:`~lightning_fedbayes.layers.mean_only`. Inputs have any shape.

    Args:
        p: probability that an entry is dropped, in [0, 1), else ConversionError.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        errors.check_number("p", p, "[0, 1)", error=ConversionError, why="it is the probability of dropout")
        self.p = p
        self.mean_only = False

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` under a fresh mask, scaled to keep its mean."""
        if not self.mean_only:
            base.refuse_export(self)
        return F.dropout(x, self.p, training=not self.mean_only)

    def extra_repr(self) -> str:
        """The dropout probability."""
        return f"p={self.p}"


def with_mc_dropout(network: nn.Module, rate: float = 0.2) -> nn.Module:
    """A copy of ``network`` with Monte Carlo dropout after its linear layers and convolutions. ``network`` stays as is.

    The last such layer in the order of definition, which makes the outputs, gets no dropout. Names in the
    ``state_dict`` stay the same, so checkpoints of ``network`` load.

    When to use it: a posterior at the price of a deterministic network, [FBDL] §3.9. It has no KL. Weight decay is its
    prior (Gal & Ghahramani 2016).

    Args:
        network: a module without Bayesian layers and dropout of this kind, with at least two linear layers or
            convolutions, else ConversionError.
        rate: probability that an entry of a layer's output is dropped, in [0, 1).

    Source: [FBDL] §3.1 and Figure 1b: "a dropout layer after each convolutional and linear layer" of a block.

    >>> with_mc_dropout(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), rate=0.1)[0].mc_dropout
    MCDropout(p=0.1)
    """
    errors.check_kind("network", network, nn.Module, "give a torch.nn.Module", error=ConversionError)
    copied = copy.deepcopy(network)
    candidates = candidate_modules(copied)
    layers = {name: module for name, module in candidates.items() if affine_kind(module) is not None}
    bayesian = [name for name, module in candidates.items() if isinstance(module, BaseVariationalLayer_)]
    if bayesian:
        raise ConversionError(f"{bayesian} are Bayesian already; Monte Carlo dropout is for a deterministic network")
    if len(layers) < 2:
        remedy = "the last one gets no dropout; give at least two, or put MCDropout into the network"
        raise ConversionError(f"the network has {len(layers)} linear layers or convolutions, and {remedy}")
    *hidden, _ = layers.items()
    for name, layer in hidden:
        if CHILD in layer._modules:
            raise ConversionError(f"'{name}' ({type(layer).__name__}) has Monte Carlo dropout already; convert once")
        layer.add_module(CHILD, MCDropout(rate))
        layer.register_forward_hook(_drop_output)
    return copied


def _drop_output(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Drop entries of ``output``. A copy of the layer finds its own dropout through ``layer``."""
    return layer.get_submodule(CHILD)(output)


def remove_mc_dropout(layer: nn.Module) -> None:
    """Undo :func:`with_mc_dropout` of one layer, in place, if it was applied."""
    if isinstance(layer._modules.get(CHILD), MCDropout):
        del layer._modules[CHILD]
        remove_forward_hook(layer, _drop_output)
