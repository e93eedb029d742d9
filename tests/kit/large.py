"""Checkpoints of every kind that can be converted, in any size: for tests of the memory that a conversion takes."""

from __future__ import annotations

import io
import itertools
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks
from kit.optimizers import adam
from kit.rank_files import save_fairscale, save_olmo_local, save_sharded
from kit.trained import Trained
from kit.wrapping import cpu
from kit.zero_files import write_universal, write_zero

WIDTH, NUM = 1024, 3
NAMES = [f"layers.{index}.weight" for index in range(NUM)]
"""Each of these weights has `rows` rows of 4 KiB. There are two moments of each, or as many more weights."""


def weights(rows: int) -> dict[str, Tensor]:
    return {name: torch.full((rows, WIDTH), float(index)) for index, name in enumerate(NAMES)}


def full(rows: int) -> dict[str, dict[str, object]]:
    """A model's state dict, and an optimizer's by name."""
    state = {name: {"exp_avg": value + 0.25, "exp_avg_sq": value + 0.5} for name, value in weights(rows).items()}
    groups = [{"lr": 0.5, "params": NAMES}]
    return {"model": dict(weights(rows)), "optimizer": {"state": state, "param_groups": groups}}


class Wide(nn.Module):
    """Weights of the same sizes, for ranks."""

    units = ("",)
    rows = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, self.rows, bias=False) for _ in range(NUM))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).sum() for layer in self.layers])


def ours(folder: Path, rows: int) -> None:
    torch_file(folder.with_name(f"{folder.name}-full"), rows)
    fsdp_optim.convert(
        folder.with_name(f"{folder.name}-full"),
        folder,
        options=fsdp_optim.ConvertOptions(durable=False, progress=False),
    )


def safetensors(folder: Path, rows: int) -> None:
    folder.mkdir()
    save_file(
        {f"{name}.{part}": value for part in "abc" for name, value in weights(rows).items()}, folder / "x.safetensors"
    )


def torch_file(folder: Path, rows: int, *, is_zip: bool = True) -> None:
    folder.mkdir()
    torch.save(full(rows), folder / "last.pt", _use_new_zipfile_serialization=is_zip)


def torch_legacy(folder: Path, rows: int) -> None:
    torch_file(folder, rows, is_zip=False)


def _many(rows: int) -> dict[str, Tensor]:
    """Weights of 1 MiB, because a tensor that is read whole takes memory of its own."""
    size = min(rows, 256)
    return {
        f"{name}.{part}": torch.full((WIDTH, size), float(part))
        for name, part in itertools.product(NAMES, range(3 * rows // size))
    }


def torch_transposed(folder: Path, rows: int) -> None:
    """Tensors whose elements do not lie in row-major order."""
    folder.mkdir()
    torch.save({"model": {name: value.T for name, value in _many(rows).items()}}, folder / "last.pt")


def torch_compressed(folder: Path, rows: int) -> None:
    """A file that another program has packed again."""
    folder.mkdir()
    stored = io.BytesIO()
    torch.save({"model": _many(rows)}, stored)
    with zipfile.ZipFile(stored) as plain, zipfile.ZipFile(folder / "last.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for record in plain.infolist():
            packed.writestr(record.filename, plain.read(record), zipfile.ZIP_DEFLATED, compresslevel=1)


def dcp_folder(folder: Path, rows: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(full(rows), checkpoint_id=folder)


def zero(folder: Path, rows: int, stage: int) -> None:
    state = {"exp_avg": [weights(rows)], "exp_avg_sq": [weights(rows)]}
    write_zero(folder, stage, 2, [weights(rows)], state, step=3)


def universal(folder: Path, rows: int) -> None:
    write_universal(folder, 2, [weights(rows)], {"exp_avg": [weights(rows)], "exp_avg_sq": [weights(rows)]}, step=3)


RANK_FILES: Mapping[str, tuple[str, Callable[..., None]]] = {
    "fairscale": ("fairscale flat", lambda folder, **parts: save_fairscale(folder, stem="last", **parts)),
    "ShardedTensor": ("FSDP1 flat", save_sharded),
    "DTensor": ("FSDP2", lambda folder, **parts: save_sharded(folder, kind="names", **parts)),
    "OLMo local": ("FSDP1 orig", save_olmo_local),
}


def _on_ranks(name: str, folder: Path, rows: int) -> None:
    Wide.rows = rows
    wrap, save = RANK_FILES[name]
    folder.mkdir(exist_ok=True)
    with cpu():
        trained = Trained(wrap, adam, 1, Wide)
        trained.forget_gradients()
        save(str(folder), model=trained.model, optim=trained.optim)


def _by_ranks(name: str) -> Callable[[Path, int], None]:
    def write(folder: Path, rows: int) -> None:
        run_on_ranks(_on_ranks, 2, name, folder, rows)

    return write


SOURCES: Mapping[str, Callable[[Path, int], None]] = {
    "safetensors": safetensors,
    "torch": torch_file,
    "torch legacy": torch_legacy,
    "torch transposed": torch_transposed,
    "torch compressed": torch_compressed,
    "DCP": dcp_folder,
    "ZeRO 2": lambda folder, rows: zero(folder, rows, 2),
    "ZeRO 3": lambda folder, rows: zero(folder, rows, 3),
    "universal": universal,
    **{name: _by_ranks(name) for name in RANK_FILES},
}
"""By the name of a kind of checkpoint of another library, the function that writes one."""
