"""Checkpoints that DeepSpeed has written, and files made like them."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePath

import torch
from safetensors.torch import load_file
from torch import Tensor

from fsdp_optim.foreign.deepspeed.reader import DEEPSPEED
from fsdp_optim.foreign.reader import ForeignReader
from fsdp_optim.formats.own import PROBE
from fsdp_optim.storage.posix import Folder
from fsdp_optim.testing.foreign_readers import read_elements
from kit.zero_runs import STEPS

DATA = Path(__file__).parents[1] / "data" / "deepspeed" / "checkpoints.tar.xz"
TAG = f"global_step{STEPS}"
BUFFERS = {"body.1.running": torch.arange(3.0) / 4, "body.1.count": torch.tensor(2**40 + 3)}


def unpacked(folder: Path, run: str = "") -> dict[str, Tensor]:
    """Unpack the checkpoints, or one run's, and return the oracle: the same training without DeepSpeed."""
    with tarfile.open(DATA) as archive:
        wanted = [
            file for file in archive if PurePath(file.name).parts[:1] in ((run,), ("oracle.safetensors",)) or not run
        ]
        archive.extractall(folder, wanted, filter="data")
    return load_file(folder / "oracle.safetensors")


def state_of(oracle: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    state: dict[str, dict[str, Tensor]] = {}
    for key, tensor in oracle.items():
        if key.startswith("state."):
            fqn, _, name = key.removeprefix("state.").rpartition(".")
            state.setdefault(fqn, {})[name] = tensor
    return state


def opened(path: Path) -> ForeignReader:
    return DEEPSPEED.open(Folder(path, PROBE).open_any(), verify=True)


def elements(reader: ForeignReader, fqn: str, name: str = "") -> Tensor:
    stored = reader.full_dict["state"][fqn][name] if name else reader.model[fqn]
    data = bytearray(read_elements(reader, stored, 0, stored.placement.numel))
    return torch.frombuffer(data, dtype=getattr(torch, stored.dtype)).reshape(stored.shape)
