"""The arguments of `convert`, together with its options. The processes compare them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fsdp_optim.arguments import MAY_DIFFER, compared_as, text_of_format
from fsdp_optim.errors import StateError
from fsdp_optim.options import CallArguments, ConvertOptions, fields_of


@dataclass(frozen=True)
class ConvertArguments(ConvertOptions):
    """The arguments of `convert`."""

    format: object = field(default="safetensors", metadata=compared_as(text_of_format))
    overwrite: bool = False
    wrong_options: str = field(default="", metadata=MAY_DIFFER)

    @classmethod
    def of(cls, options: ConvertOptions, **arguments: Any) -> ConvertArguments:
        """Return the arguments of a call that was given these options."""
        return cls(**fields_of(ConvertOptions, options), **arguments)

    @property
    def call(self) -> CallArguments:
        """The options that say which processes make the call."""
        return CallArguments(process_group=self.process_group, timeout=self.timeout)

    def validate(self) -> None:
        if self.wrong_options:
            raise StateError(self.wrong_options)
        super().validate()

    def refuse_views(self, call: str) -> None:
        """Raise StateError for Views that were given to a call that does not convert."""
        if self.views:
            raise StateError(
                f"views= is an option of convert, not of {call}: convert the checkpoint through them first"
            )
