"""``torch.func.vmap`` without its bookkeeping of arguments, which takes a third of the time of a small step."""

from __future__ import annotations

from torch import Tensor
from torch._C import _autograd, _functorch  # pyright: ignore[reportAttributeAccessIssue]

REASON = "saved-tensor hooks, as activation checkpointing uses them, do not work for several clients at once"


class clients:
    """Inside, operations on tensors that :func:`enter` made act on ``count`` clients, each with noise of its own.

    Enters as the level, which :func:`enter` and :func:`leave` need.
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


def enter(stack: Tensor, level: int) -> Tensor:
    """What one client sees of a stack of shape (clients, *): a tensor of shape (*)."""
    return _functorch._add_batch_dim(stack, 0, level)


def leave(tensor: Tensor, level: int, count: int) -> Tensor:
    """The stack of shape (clients, *) of what each client has made; what they share is repeated."""
    return _functorch._remove_batch_dim(tensor, level, count, 0)


class beneath:
    """Inside, operations are on stacks themselves, as outside of :func:`clients`.

    A class, because a step enters it for every site, and a generator takes three times as long.
    """

    __slots__ = ("_level",)

    def __enter__(self) -> None:
        self._level = _functorch.pop_dynamic_layer_stack()

    def __exit__(self, *_: object) -> None:
        _functorch.push_dynamic_layer_stack(self._level)


def stack_of(tensor: Tensor, level: int) -> Tensor | None:
    """The stack behind what one client sees; None if the clients share it, or another transform is at work."""
    if (
        _functorch.is_batchedtensor(tensor)
        and _functorch.maybe_get_level(tensor) == level == _functorch.maybe_current_level()
        and _functorch.maybe_get_bdim(tensor) == 0
    ):
        return _functorch.get_unwrapped(tensor)
    return None
