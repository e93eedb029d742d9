"""A number for each element of a model, by which a wrapper's cut is read from the wrapped model itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

_FIRST = 64  # wrappers fill padding with smaller values


class Numbers:
    """A unique number for every element of an unwrapped model, and gradients by these numbers."""

    least = _FIRST

    def __init__(self, model: nn.Module) -> None:
        self.start: dict[str, int] = {}
        self.numel: dict[str, int] = {}
        self.shape: dict[str, torch.Size] = {}
        self._total = _FIRST
        for name, param in model.named_parameters():
            self.start[name] = self._total
            self.numel[name] = param.numel()
            self.shape[name] = param.shape
            self._total += param.numel()

    def give(self, model: nn.Module) -> None:
        """Give every element its number as its value."""
        for name, param in model.named_parameters():
            param.data = self.of(name).reshape(param.shape).to(param.dtype)

    def of(self, name: str) -> Tensor:
        """The numbers of a parameter's elements."""
        return torch.arange(self.start[name], self.start[name] + self.numel[name])

    def gradients(self, step: int) -> Tensor:
        """The gradients by number; the gradient of padding is zero."""
        generator = torch.Generator().manual_seed(1000 + step)
        table = torch.randn(self._total, generator=generator)
        table[:_FIRST] = 0.0
        return table

    def read(self, values: Tensor) -> Tensor:
        """The numbers of the elements, from their values."""
        elements = values.detach().cpu().reshape(-1).to(torch.float64)
        if not torch.equal(elements, elements.round()) or (
            elements.numel() and not 0 <= float(elements.max()) < self._total
        ):
            raise AssertionError(f"{elements.tolist()}: not numbers of elements: the wrapper has changed them")
        return elements.long()

    def names_of(self, numbers: Tensor) -> set[str]:
        """The names of the parameters that have these elements."""
        stop = {name: start + self.numel[name] for name, start in self.start.items()}
        return {name for name, start in self.start.items() if bool(((numbers >= start) & (numbers < stop[name])).any())}

    def table(self, values: Mapping[str, Tensor]) -> Tensor:
        """Values by number, from whole values by name; the value of padding, and of other parameters, is zero."""
        table = torch.zeros(self._total, dtype=next(iter(values.values())).dtype)
        for name, value in values.items():
            table[self.start[name] :][: self.numel[name]] = value.detach().reshape(-1)
        return table

    def split(self, names: Iterable[str], indices: Sequence[Tensor], parts: Sequence[Tensor]) -> dict[str, Tensor]:
        """Whole values by name, from the parts of all ranks and the numbers of their elements."""
        table = torch.zeros(self._total, dtype=parts[0].dtype)
        for index, part in zip(indices, parts, strict=True):
            table[index] = part.detach().reshape(-1)
        return {name: table[self.start[name] :][: self.numel[name]].view(self.shape[name]) for name in names}
