"""Time and memory to open a checkpoint of very many tensors: ours, a folder of Hugging Face, and torch's DCP.

    python benchmarks/opening.py [--num 200000] [--folder DIR] [--worlds 2 4]

The checkpoints have names, dtypes, shapes and places of so many tensors: a weight and three values of Adam for each parameter.
Their elements are holes in sparse files, and nothing reads them. Each call runs in a process of its own. `load` without a model
opens the checkpoint and reads the trainer's values; `inspect` describes everything. "Extra MiB": the highest resident size of the
process, over that before the call. At several ranks: bytes that the rank that reads most has read, and its memory.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from xxhash import xxh3_64_hexdigest

sys.path.insert(0, str(Path(__file__).parent))

from measure import peak, reset_peak

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

_VALUES = ("exp_avg", "exp_avg_sq", "step")
_ROWS, _COLUMNS = 4, 8
_FILES = 100  # of the folder of Hugging Face
_RUN = """
import time
import torch, fsdp_optim
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))
before, begun, begun_cpu = peak(), time.perf_counter(), time.process_time()
fsdp_optim.{call}({path!r})
print(time.perf_counter() - begun, time.process_time() - begun_cpu, peak() - before)
"""


def of_rank(path: str) -> tuple[float, float, float]:
    """Open a checkpoint on all ranks: processor time, MB that this rank has read, and MiB of its memory."""
    fsdp_optim.load  # noqa: B018  # imported before the clock starts
    reset_peak()
    before, nbytes, begun = peak(), _nbytes_read(), time.process_time()
    fsdp_optim.load(path)
    return time.process_time() - begun, (_nbytes_read() - nbytes) / 1e6, (peak() - before) / (1 << 20)


def _nbytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def _fqns(num: int) -> list[str]:
    return [f"layers.{index // 8}.experts.{index % 8}.weight" for index in range(num // (1 + len(_VALUES)))]


def _shape_of(name: str) -> list[int]:
    return [] if name == "step" else [_ROWS, _COLUMNS]


def make_ours(folder: Path, fqns: list[str]) -> None:
    """A checkpoint of our own format, made of the manifest of a small one."""
    model = torch.nn.Linear(_COLUMNS, _ROWS, bias=False)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, _COLUMNS)).sum().backward()
    optim.step()
    fsdp_optim.save(folder, model, optim, options=fsdp_optim.SaveOptions(durable=False, progress=False))
    manifest = json.loads((folder / "fsdp_optim.json").read_text())["checkpoint"]
    del manifest["brief"]
    (like,) = manifest["optim"]["params"].values()
    manifest["model"]["params"] = {fqn: {"shape": [_ROWS, _COLUMNS]} for fqn in fqns}
    manifest["optim"]["params"] = {fqn: json.loads(json.dumps(like).replace("weight", fqn)) for fqn in fqns}
    manifest["optim"]["groups"][0]["params"] = fqns
    state = {f"state.{fqn}.{name}": _shape_of(name) for fqn in fqns for name in _VALUES}
    for stem, tensors in (("model", {fqn: [_ROWS, _COLUMNS] for fqn in fqns}), ("optim", state)):
        manifest["files"][f"{stem}.safetensors"] = _sparse(folder / f"{stem}.safetensors", tensors)
        (folder / f"{stem}.safetensors.sums").unlink(missing_ok=True)
    body = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    (folder / "fsdp_optim.json").write_bytes(
        b'{"checksum":"%s","checkpoint":%s}\n' % (xxh3_64_hexdigest(body).encode(), body)
    )


def _sparse(path: Path, tensors: dict[str, list[int]]) -> dict[str, Any]:
    """Write a safetensors file without elements; return its entry in the manifest."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, shape in tensors.items():
        nbytes = 4 * _ROWS * _COLUMNS if shape else 4
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    head = len(text).to_bytes(8, "little") + text
    path.write_bytes(head)
    os.truncate(path, len(head) + at)
    return {"size": len(head) + at, "header_xxh3_64": xxh3_64_hexdigest(head), "sums_xxh3_64": None}


def make_hugging_face(folder: Path, fqns: list[str]) -> None:
    """A folder of weights in `_FILES` files with an index, as transformers writes it."""
    folder.mkdir()
    names = [f"{fqn}.{name}" for fqn in fqns for name in ("weight", *_VALUES[:-1], "bias")]
    weight_map = {}
    for number in range(_FILES):
        file = f"model-{number + 1:05}-of-{_FILES:05}.safetensors"
        own = names[number * len(names) // _FILES : (number + 1) * len(names) // _FILES]
        _sparse(folder / file, {name: [_ROWS, _COLUMNS] for name in own})
        weight_map |= dict.fromkeys(own, file)
    index = {"metadata": {"total_size": 4 * _ROWS * _COLUMNS * len(names)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def make_dcp(folder: Path, fqns: list[str]) -> None:
    """A folder of torch.distributed.checkpoint, as one rank writes it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    folder.mkdir()
    state: dict[str, Any] = {}
    paths: dict[str, tuple[object, ...]] = {}
    places: dict[Any, Any] = {}
    data, at = io.BytesIO(), 0
    groups = ("optimizer", "param_groups", 0)
    for path, value in (((*groups, "lr"), 1e-3), ((*groups, "params"), fqns)):
        key = ".".join(map(str, path))
        torch.save(value, saved := io.BytesIO())
        data.write(saved.getvalue())
        state[key], paths[key] = BytesStorageMetadata(), path
        places[MetadataIndex(key)] = _StorageInfo("__0_0.distcp", at, len(saved.getvalue()))
        at = data.tell()
    for fqn in fqns:
        for path in (("model", fqn), *(("optimizer", "state", fqn, name) for name in _VALUES)):
            size = torch.Size(_shape_of(path[-1]))
            key, zeros = ".".join(path), torch.Size([0] * len(size))
            properties = TensorProperties(torch.float32)
            state[key] = TensorStorageMetadata(properties, size, [ChunkStorageMetadata(zeros, size)])
            paths[key], nbytes = path, 1024 + 4 * size.numel()
            places[MetadataIndex(key, zeros, 0)] = _StorageInfo("__0_0.distcp", at, nbytes)
            at += nbytes
    (folder / "__0_0.distcp").write_bytes(data.getvalue())
    os.truncate(folder / "__0_0.distcp", at)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(state, paths, places)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num", type=int, default=200_000)
    parser.add_argument("--worlds", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp())
    rows, rows_of_ranks = [], []
    for name, make in (("our own", make_ours), ("Hugging Face", make_hugging_face), ("DCP", make_dcp)):
        path = folder / f"{name.replace(' ', '-')}-{asked.num}"
        if not path.exists():
            make(path, _fqns(asked.num))
        for call in ("load", "inspect"):
            script = _RUN.format(call=call, path=str(path))
            env = {**os.environ, "PYTHONPATH": str(Path(fsdp_optim.__file__).parents[1])}
            done = subprocess.run(
                [sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, cwd=folder, env=env
            )
            seconds, cpu, extra = map(float, done.stdout.split())
            rows.append([name, call, f"{seconds:.2f}", f"{cpu:.2f}", f"{extra:.0f}"])
        for world in asked.worlds:
            ranks = run_on_ranks(of_rank, world, str(path), timeout=600)
            most = [max(figures) for figures in zip(*ranks, strict=True)]
            rows_of_ranks.append([name, world, *(f"{figure:.2f}" for figure in most)])
    print(f"{asked.num} tensors")
    print(tabulate(rows, headers=["format", "call", "seconds", "CPU seconds", "extra MiB"], tablefmt="github"))
    print(
        tabulate(
            rows_of_ranks,
            headers=["format", "ranks", "CPU seconds of a rank", "MB read by a rank", "extra MiB of a rank"],
            tablefmt="github",
        )
    )


if __name__ == "__main__":
    main()
