"""The results of the calls on a checkpoint without a model: here, because the code of these calls is imported by them alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_optim.errors import counted_noun


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Attributes:
        dtype: torch's name of the dtype.
        shape: the shape.
        nbytes: the number of bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class GroupInfo:
    """One param group of a checkpoint.

    Attributes:
        hyperparameters: their values by name.
        params: the parameters by FQN, or by id where there are no names.
    """

    hyperparameters: Mapping[str, Any]
    params: tuple[Any, ...]


@dataclass(frozen=True, repr=False)
class Inspected:
    """The contents of a checkpoint, without the elements of its tensors.

    Attributes:
        path: the path or URL of the checkpoint.
        format: the name of its format.
        about: facts about the save, for users.
        world_size: the number of ranks that saved; 0 if unknown.
        step: the `step` that was given to `save`.
        weights: which of the model's weights were saved: "all", "trainable" or "none"; None if unknown.
        weights_dtype: torch's name of the dtype to which the save cast floating weights; None if it did not, or if unknown.
        model: the weights and buffers by FQN.
        aliases: other names of these, each with the FQN.
        has_optim: whether an optimizer was saved.
        state: the optimizer's state by FQN, or by id where there are no names: tensors, and the texts of other values.
        groups: its param groups.
        optimizer_class: the name of its class, or one for each group; empty if unknown.
        extras: the names of other values, of the trainer and of modules: "common", "model", and "rank-00000" and so on.
    """

    path: str
    format: str
    about: Mapping[str, str]
    world_size: int
    step: int | None
    weights: str | None
    weights_dtype: str | None
    model: Mapping[str, TensorInfo]
    aliases: Mapping[str, str]
    has_optim: bool
    state: Mapping[Any, Mapping[Any, TensorInfo | str]]
    groups: tuple[GroupInfo, ...]
    optimizer_class: tuple[str, ...]
    extras: tuple[str, ...]

    def __repr__(self) -> str:
        """The figures; a tree of all tensors would fill the screen."""
        values = [value for its in self.state.values() for value in its.values()]
        parts = {
            "path": repr(self.path),
            "format": repr(self.format),
            "world_size": self.world_size,
            "step": self.step,
            "weights": repr(self.weights),
            "model": f"<{counted_noun(len(self.model), 'tensor')}>",
            "state": f"<{counted_noun(len(values), 'value')} of {counted_noun(len(self.state), 'parameter')}>",
            "nbytes": self.nbytes,
            "extras": self.extras,
        }
        return f"Inspected({', '.join(f'{name}={value}' for name, value in parts.items())})"

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        tensors = [*self.model.values(), *(value for values in self.state.values() for value in values.values())]
        return sum(one.nbytes for one in tensors if isinstance(one, TensorInfo))


@dataclass(frozen=True)
class Verified:
    """The result of `verify`, which has found nothing wrong.

    Attributes:
        path: where the checkpoint is.
        format: the name of its format.
        num_tensors, nbytes: the tensors that were read, and their bytes.
        has_checksums: whether every byte of the tensors was compared with a checksum: this library's own, or the CRC32 that files
            of `torch.save` have. False: the format has none, or the save wrote none. Then everything is there and can be read,
            but changed bytes do not show.
        num_extras: the number of other values that were read: those of the trainer, of ranks and of modules.
    """

    path: str
    format: str
    num_tensors: int
    nbytes: int
    has_checksums: bool
    num_extras: int
