"""The arguments of `convert`, together with its options. The processes compare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from fsdp_optim.arguments import MAY_DIFFER, check_at_least, check_one_of
from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.options import CallArguments, ConvertOptions, KeyBy, fields_of


@dataclass(frozen=True)
class ConvertArguments(ConvertOptions):
    """The arguments of `convert`."""

    format: str = "safetensors"
    world_size: int | None = None
    key_by: KeyBy | None = None
    units: Mapping[str, Sequence[str]] | None = None
    flatten_parameters: bool | None = None
    overwrite: bool = False
    wrong_options: str = field(default="", metadata=MAY_DIFFER)

    @classmethod
    def of(cls, options: ConvertOptions, **arguments: Any) -> ConvertArguments:
        """The arguments of a call that was given these options."""
        return cls(**fields_of(ConvertOptions, options), **arguments)

    @property
    def call(self) -> CallArguments:
        """The options that say which processes make the call."""
        return CallArguments(process_group=self.process_group, timeout=self.timeout)

    def validate(self) -> None:
        if self.wrong_options:
            raise StateError(self.wrong_options)
        super().validate()
        if self.world_size is not None:
            check_at_least("world_size", self.world_size, 1, error=CheckpointError)
        if self.key_by is not None:
            check_one_of("key_by", self.key_by, ("id", "name"), CheckpointError)
        units = self.units if isinstance(self.units, (Mapping, NoneType)) else {None: None}
        for path, fqns in (units or {}).items():
            if (
                not isinstance(path, str)
                or not isinstance(fqns, (list, tuple))
                or not all(isinstance(f, str) for f in fqns)
            ):
                raise StateError(f"units must be a dict from paths of modules to lists of FQNs, not {self.units!r}")
