"""Small files where trainers look for an optimizer of their own: the load of one fails, and its error says what to call.

Without them, Hugging Face's Trainer would load the weights of a checkpoint, and silently begin the optimizer and the schedule
anew.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import torch


class _MissingStorage:
    """Stands for a storage of a file of `torch.save` that is not in the file."""


class _SignPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, says: str) -> None:
        super().__init__(file, protocol=2)
        self._says = says

    def persistent_id(self, value: Any) -> Any:
        """A storage by the name of its record, which `torch.load` names where the archive does not have it."""
        return ("storage", torch.FloatStorage, self._says, "cpu", 1) if isinstance(value, _MissingStorage) else None


def sign(call: str) -> bytes:
    """The content of such a file, whose load fails on any device. `call`: the trainer's call that would read it.

    The sentence that the error says has no slash, because it is the name of a record.
    """
    says = (
        "nothing is damaged: this file is a placeholder, and the optimizer of the checkpoint is in optim.safetensors beside it. "
        f"Call fsdp_optim.integrations.accelerate.enable() before {call}, which then resumes with it; or call "
        "fsdp_optim.load(folder, model, optimizer)"
    )
    content, file = io.BytesIO(), io.BytesIO()
    _SignPickler(content, says).dump(_MissingStorage())
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in (("data.pkl", content.getvalue()), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(
                zipfile.ZipInfo(f"sign/{name}"), data
            )  # which has no time, so that the bytes are always the same
    return file.getvalue()
