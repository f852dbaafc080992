"""Swap of a module's tensors for the time of a step."""

from collections.abc import Mapping

from torch import Tensor, nn

from lightning_fedbayes.clients.snapshot import Location, Swap, swapped
from lightning_fedbayes.core.private_torch import flat_weights


class ParameterSwap:
    """Puts other tensors in place of the parameters and buffers of a module, for the time of a step.

    ``torch.func.functional_call`` does the same for one call and takes ten times as long. A tied tensor is replaced in
    all its locations, as is the list of parameters that a recurrent layer keeps. The module must not be rebuilt while
    this is in use.
    """

    def __init__(self, module: nn.Module) -> None:
        self._locations: dict[str, list[Location]] = {}
        names: dict[int, str] = {}
        for path, owner in module.named_modules():
            for tensors in (owner._parameters, owner._buffers):
                for attribute, tensor in tensors.items():
                    if tensor is None:
                        continue
                    name = names.setdefault(id(tensor), f"{path}.{attribute}" if path else attribute)
                    self._locations.setdefault(name, []).append((tensors, attribute))
        self._recurrent: list[tuple[nn.RNNBase, list[tuple[str, Tensor]]]] = []
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase):
                weights = [weight for group in layer.all_weights for weight in group]
                if all(id(weight) in names for weight in weights):  # else they are computed from others
                    self._recurrent.append((layer, [(names[id(weight)], weight) for weight in weights]))

    def __getitem__(self, name: str) -> Tensor | None:
        tensors, attribute = self._locations[name][0]
        return tensors[attribute]

    def using(self, tensors: Mapping[str, Tensor]) -> swapped:
        """Inside, the module holds ``tensors`` (dotted name → tensor of any shape)."""
        swaps: list[Swap] = [(each, tensor) for name, tensor in tensors.items() for each in self._locations[name]]
        for layer, weights in self._recurrent:
            kept = flat_weights([tensors.get(name, weight) for name, weight in weights])
            swaps += [((vars(layer), attribute), value) for attribute, value in kept.items()]
        return swapped(swaps)
