"""Where a module's parameters and buffers live, so that others can take their places for a while."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

Home = tuple[dict[str, Tensor | None], str]
"""The dict of a module that holds a tensor, and its name there."""


class Places:
    """The homes of a module's parameters and buffers by their dotted names; a tied tensor has several.

    ``torch.func.functional_call`` does the same for one call; this costs a tenth of it.

    Args:
        module: any network, which must not be rebuilt while this is in use.
    """

    def __init__(self, module: nn.Module) -> None:
        self._homes: dict[str, list[Home]] = {}
        names: dict[int, str] = {}
        for path, owner in module.named_modules(remove_duplicate=True):
            for tensors in (owner._parameters, owner._buffers):
                for attribute, tensor in tensors.items():
                    if tensor is None:
                        continue
                    name = names.setdefault(id(tensor), f"{path}.{attribute}" if path else attribute)
                    self._homes.setdefault(name, []).append((tensors, attribute))  # pyright: ignore[reportArgumentType]

    def __getitem__(self, name: str) -> Tensor | None:
        tensors, attribute = self._homes[name][0]
        return tensors[attribute]

    def holding(self, tensors: Mapping[str, Tensor]) -> Holding:
        """Inside, the module holds ``tensors`` (name → tensor of any shape) in place of its own."""
        return Holding([(home, tensor) for name, tensor in tensors.items() for home in self._homes[name]])


class Holding:
    """Inside, tensors are in the homes of others: a class, because every step enters one."""

    __slots__ = ("_before", "_guests")

    def __init__(self, guests: list[tuple[Home, Tensor]]) -> None:
        self._guests = guests

    def __enter__(self) -> None:
        self._before = [home[attribute] for (home, attribute), _ in self._guests]
        for (home, attribute), tensor in self._guests:
            home[attribute] = tensor

    def __exit__(self, *error: object) -> None:
        for ((home, attribute), _), own in zip(self._guests, self._before):
            home[attribute] = own
