"""transformers' own conversion of weights to the names of its files, called on other tensors in place of the weights.

The live model is not touched: the conversion sees a stand-in of the model's class with the same attributes, whose parameters have
the shapes of the tensors that are given.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_optim.adapters.transformers_names import transforms_of
from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import Shape

_MODELS, _LOADING = "transformers.modeling_utils", "transformers.core_model_loading"


@dataclass(frozen=True)
class Conversion:
    """The conversion of one transformers model.

    Attributes:
        model: the model.
        inner: the models inside it, each with its name there. All names are those of the unwrapped model.
        shapes: the unsharded shapes of the parameters and persistent buffers, by their names in the model.
    """

    model: nn.Module
    inner: tuple[tuple[str, nn.Module], ...]
    shapes: Mapping[str, Shape]

    def on(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what `save_pretrained` would write for tensors in place of weights, by name.

        A tensor that is only renamed is the same object as before.

        Raises:
            LayoutError: transformers cannot convert them.
        """
        revert = getattr(sys.modules[_LOADING], "revert_weight_conversion")  # noqa: B009  # no stubs
        try:
            with torch.no_grad():
                converted: dict[str, Tensor] = revert(self._stand_in(tensors), dict(tensors))
        except Exception as error:
            raise LayoutError(
                f"{type(self.model).__name__}: transformers cannot convert its weights to the names of its files "
                f"({type(error).__name__}: {error}), as save_pretrained would: leave views_for out, or give Views by hand"
            ) from error
        return converted

    def on_shapes(self) -> tuple[dict[str, str], dict[str, Shape]]:
        """Run it on tensors without elements: of integers, so that casts are no renamings.

        Returns:
            The names in the files of the parameters that are only renamed; the shapes of all other tensors in the files, by name.
        """
        given = {name: without_elements(shape) for name, shape in self.shapes.items()}
        try:
            converted = self.on(given)
        except LayoutError as error:
            wrong = next((name for name in self.shapes if not self._converts(name)), None)
            if wrong is None:
                raise
            raise LayoutError(f"{wrong}, by {self.operations(wrong)}: {error}") from error
        by_tensor = {id(tensor): stored for stored, tensor in converted.items()}
        renamed = {
            name: by_tensor[id(tensor)]
            for name, tensor in given.items()
            if id(tensor) in by_tensor and not tensor._version
        }
        others = set(converted).difference(renamed.values())
        return renamed, {name: tuple(tensor.shape) for name, tensor in converted.items() if name in others}

    def _converts(self, name: str) -> bool:
        """Whether a parameter can be converted by itself."""
        try:
            self.on({name: without_elements(self.shapes[name])})
        except LayoutError:
            return False
        return True

    def source_of(self, stored: str, names: Iterable[str]) -> str:
        """Return the first of some parameters that by itself gives a tensor of the files; the first of all where none does."""
        listed = list(names)
        for name in filter(self._converts, listed):
            if stored in self.on({name: without_elements(self.shapes[name])}):
                return name
        return listed[0]

    def operations(self, name: str) -> str:
        """Return the operations that convert a parameter as text."""
        for transform in reversed(self._transforms):
            quantization = getattr(transform, "quantization_operation", None)
            if quantization is not None:  # such a transform has no reverse
                return repr(quantization)
            back = transform.reverse_transform() if hasattr(transform, "operations") else None
            if back is not None and back.rename_source_key(name)[1] is not None:
                return ", ".join(map(repr, back.operations))
        return "a renaming"

    @cached_property
    def _transforms(self) -> list[Any]:
        return transforms_of(self.model, self._stand_in({}))

    def _stand_in(self, tensors: Mapping[str, Tensor]) -> Any:
        def get_parameter(name: str) -> Tensor:
            if name in tensors:
                return tensors[name]
            if name in self.shapes:
                return without_elements(self.shapes[name])
            raise AttributeError(f"{type(self.model).__name__} has no parameter {name}")

        def named_modules(*_: object, **__: object) -> Iterator[tuple[str, Any]]:
            yield "", stand_in
            for name, module in self.inner:
                yield name, _of_own_class(module)

        stand_in = _of_own_class(self.model)
        stand_in.__dict__ |= {"get_parameter": get_parameter, "named_modules": named_modules}
        return stand_in


def without_elements(shape: Shape) -> Tensor:
    """Return a tensor of a shape that takes no memory."""
    return torch.empty(shape, dtype=torch.int64, device="meta")


def conversions_in(
    modules: Iterable[tuple[str, nn.Module]], shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, Conversion]]:
    """Yield the conversion of each transformers model that is in no other one, with its name in the complete model.

    None where transformers is not loaded, or of a version before 5, which writes the names that the model has; and none for a
    model with adapters of PEFT, which transformers writes under their own names.

    Args:
        modules: all modules, with their names.
        shapes: the unsharded shapes of all parameters and persistent buffers, by name.
    """
    base = getattr(sys.modules.get(_MODELS), "PreTrainedModel", None)
    if base is None or not hasattr(sys.modules.get(_LOADING), "revert_weight_conversion"):
        return
    listed = list(modules)
    models = [(name, module) for name, module in listed if isinstance(module, base)]
    roots: list[str] = []
    for name, module in models:
        if any(_is_in(name, root) for root in roots):
            continue
        roots.append(name)
        if any(_is_of_peft(other) for path, other in listed if _is_in(path, name)):
            continue
        inner = tuple((_below(name, path), other) for path, other in models if path != name and _is_in(path, name))
        own = {_below(name, path): shape for path, shape in shapes.items() if _is_in(path, name)}
        yield name, Conversion(module, inner, own)


def _is_in(name: str, root: str) -> bool:
    return not root or name == root or name.startswith(f"{root}.")


def _is_of_peft(module: nn.Module) -> bool:
    return any(cls.__module__.startswith("peft.") for cls in type(module).__mro__)


def _below(root: str, name: str) -> str:
    return name.removeprefix(f"{root}.") if root else name


def _of_own_class(module: nn.Module) -> Any:
    """Return an object with the attributes of a module, of the class that it has without FSDP2, which makes one."""
    cls = next(cls for cls in type(module).__mro__ if not cls.__module__.startswith("torch."))
    made: Any = object.__new__(cls)
    made.__dict__.update(module.__dict__)
    return made
