"""The folder of one of several models, opened by its own path: a checkpoint of that model, without values of the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.protocols import Format, Reader
from fsdp_optim.formats.base.some_models import Choice, SomeModels
from fsdp_optim.formats.own.manifest import NAME, manifest_in
from fsdp_optim.formats.own.probe import PROBE, OwnProbe
from fsdp_optim.formats.own.reader import Checkpoint
from fsdp_optim.storage.base import Opened


@dataclass(frozen=True)
class OneOfSeveral(Format):
    """The format of the checkpoint that a model's folder is in, read as one of this model alone. It is only read."""

    model: str

    name: ClassVar[str] = "fsdp_optim"
    probe: ClassVar[OwnProbe] = PROBE

    def recognises(self, opened: Opened) -> bool:
        try:
            return opened.has(NAME) and self.model in manifest_in(opened).model.models
        except CheckpointError:
            return False

    def open(self, opened: Opened, *, verify: bool) -> Reader:
        choice = Choice((self.model,), (self.model,), alone=True)
        return SomeModels(Checkpoint.opened_in(opened, verify=verify), choice)

    def writer(self) -> None:
        return None

    def sequence_in(self, opened: Opened) -> int:
        return 0
