"""Private names of torch. No other file of the package uses one, and tests/test_private_names.py checks that.

Importing this module never fails. Without a name that it needs the vectorized engine cannot be used, and says so. Last
checked with torch 2.15.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_functorch: Any = getattr(torch._C, "_functorch", None)
_autograd: Any = getattr(torch._C, "_autograd", None)

PRIMITIVES = (
    *("_vmap_increment_nesting", "_vmap_decrement_nesting", "_add_batch_dim", "_remove_batch_dim"),
    *("push_dynamic_layer_stack", "pop_dynamic_layer_stack", "maybe_current_level", "maybe_get_level"),
    *("maybe_get_bdim", "is_batchedtensor", "get_unwrapped"),
)
"""Names in ``torch._C._functorch`` that ``torch.func.vmap`` is made of."""

SAVED_TENSOR_HOOKS = (
    "_saved_tensors_hooks_get_disabled_error_message",
    "_saved_tensors_hooks_disable",
    "_saved_tensors_hooks_enable",
)

LAZY = {
    **dict.fromkeys(
        ("register_pytree_node", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"),
        "torch.utils._pytree",
    ),
    "TorchDispatchMode": "torch.utils._python_dispatch",
}
"""Names that can be imported from here → torch's private module that has them."""
REASON = "saved-tensor hooks, as activation checkpointing uses them, do not work for several clients at once"


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(LAZY[name]), name)


def has_vmap_primitives() -> bool:
    """Return whether torch has all names that the functions below need, and they do what they should."""
    names = ((_functorch, PRIMITIVES), (_autograd, SAVED_TENSOR_HOOKS))
    if not all(hasattr(module, name) for module, wanted in names for name in wanted):
        return False
    stack = torch.arange(6.0).view(2, 3)
    try:
        with vmap_level(2) as level:
            view = to_client_view(stack, level)
            with outside_vmap():
                total = stack.sum(0)
            return (
                view.shape == total.shape == (3,)
                and stack_of(view, level) is not None
                and bool((to_stack(view + 1, level, 2) == stack + 1).all())
            )
    except (AttributeError, RuntimeError, TypeError):
        return False


class vmap_level:
    """Inside, operations on tensors from :func:`to_client_view` act on ``count`` clients, each with separate noise.

    ``torch.func.vmap`` does the same, but its bookkeeping of arguments takes a third of the time of a small step.
    ``with`` gives the level, which :func:`to_client_view` and :func:`to_stack` need.
    """

    __slots__ = ("_count", "_reason")

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> int:
        # as torch.autograd.graph.disable_saved_tensors_hooks, which is a generator
        self._reason = _autograd._saved_tensors_hooks_get_disabled_error_message()
        _autograd._saved_tensors_hooks_disable(REASON)
        return _functorch._vmap_increment_nesting(self._count, "different")

    def __exit__(self, *_: object) -> None:
        _functorch._vmap_decrement_nesting()
        if self._reason is None:
            _autograd._saved_tensors_hooks_enable()
        else:
            _autograd._saved_tensors_hooks_disable(self._reason)


class outside_vmap:
    """Inside, operations act on the stacks themselves. A class, because a generator takes three times as long."""

    __slots__ = ("_level",)

    def __enter__(self) -> None:
        self._level = _functorch.pop_dynamic_layer_stack()

    def __exit__(self, *_: object) -> None:
        _functorch.push_dynamic_layer_stack(self._level)


def to_client_view(stack: Tensor, level: int) -> Tensor:
    """Return a stack of shape (clients, *) as one client sees it: a tensor of shape (*)."""
    return _functorch._add_batch_dim(stack, 0, level)


def to_stack(tensor: Tensor, level: int, count: int) -> Tensor:
    """Return the stack of shape (clients, *) behind a result of shape (*). A result that clients share is repeated."""
    return _functorch._remove_batch_dim(tensor, level, count, 0)


def stack_of(tensor: Tensor, level: int) -> Tensor | None:
    """Return the stack behind a client's view, or None if the clients share the tensor, or in another transform."""
    if (
        _functorch.is_batchedtensor(tensor)
        and _functorch.maybe_get_level(tensor) == level == _functorch.maybe_current_level()
        and _functorch.maybe_get_bdim(tensor) == 0
    ):
        return _functorch.get_unwrapped(tensor)
    return None


def outside_of_vmap(tensor: Tensor) -> Tensor:
    """Return the values of all clients behind one client's view, and any other tensor as it is."""
    is_stacked = getattr(_functorch, "is_batchedtensor", None)
    return _functorch.get_unwrapped(tensor) if is_stacked is not None and is_stacked(tensor) else tensor


version_of = attrgetter("_version")
"""Number of times that a tensor has been written into."""


def version_if_any(tensor: Tensor) -> int | None:
    """Return :func:`version_of` a tensor. None in a functional transform or from ``inference_mode``."""
    is_transformed = getattr(_functorch, "is_functorch_wrapped_tensor", None)
    if is_transformed is not None and is_transformed(tensor):
        return None
    try:
        return version_of(tensor)
    except RuntimeError:
        return None


def backward_pass(node: Any) -> int | None:
    """Return the number of the backward pass that runs. None if it does not compute ``node``, or torch does not say."""
    number, runs = (getattr(torch._C, name, None) for name in ("_current_graph_task_id", "_will_engine_execute_node"))
    return number() if number is not None and runs is not None and runs(node) else None


FOREACH = "_foreach_"
foreach = SimpleNamespace(**{n.removeprefix(FOREACH): each for n, each in vars(torch).items() if n.startswith(FOREACH)})
"""torch's operations on lists of tensors: ``foreach.add_(tensors, others)`` is one call for all of them."""


def has_gradient_hook(parameter: Tensor) -> bool:
    """Return whether the gradient of ``parameter`` has a hook."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def has_forward_hook(module: nn.Module) -> bool:
    """Return whether ``module`` itself has a hook before or after ``forward``."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def remove_forward_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Remove ``hook`` from the forward hooks of ``module``, if it is one of them."""
    for number in [number for number, each in module._forward_hooks.items() if each is hook]:
        del module._forward_hooks[number]


def has_backward_hook(module: nn.Module) -> bool:
    """Return whether ``module`` itself has a hook before or after its backward pass."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_step_hook(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` has a hook before or after its step."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def flat_weights(weights: Sequence[Tensor]) -> dict[str, Any]:
    """Return the attributes with which a recurrent layer uses ``weights``, in the order of its ``all_weights``."""
    return {"_flat_weights": list(weights), "_flat_weight_refs": [None] * len(weights)}
