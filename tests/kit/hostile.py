"""Files of other libraries with one value that no program writes: another type, a huge number, a name that leads elsewhere."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim.plugins import FairscaleShards
from kit.zero_files import write_universal, write_zero

WEIGHTS: Mapping[str, Tensor] = {"w": torch.arange(6.0).reshape(3, 2), "b": torch.arange(3.0)}
_STATE = {"exp_avg": [WEIGHTS], "exp_avg_sq": [WEIGHTS]}


class Pair(nn.Module):
    """A model with these weights, whose values are others."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = (nn.Parameter(torch.full_like(WEIGHTS[name], 7.0)) for name in ("w", "b"))


# ------------------------------------------------------------------------------------------- sound checkpoints


def _torch_file(folder: Path) -> None:
    folder.mkdir()
    state = {name: {"step": torch.tensor(3.0), "exp_avg": value} for name, value in WEIGHTS.items()}
    optim = {"state": state, "param_groups": [{"lr": 0.1, "params": ["w", "b"]}]}
    torch.save({"model": dict(WEIGHTS), "optimizer": optim, "epoch": 3}, folder / "a.pt")


def _fairscales_full_dict(folder: Path) -> None:
    folder.mkdir()
    state = {index: {"exp_avg": value} for index, value in enumerate(WEIGHTS.values())}
    optim = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}], "param_id_map": {0: 0, 1: 0}}
    full = {**optim, "uncollected_local_ids": [], "num_padded": {0: 0}}
    torch.save({"model": dict(WEIGHTS), "last_optimizer_state": full}, folder / "a.pt")


def _fairscale_shards(folder: Path, *, flattens: bool) -> None:
    checkpoint = folder.with_name(f"{folder.name}-ours")
    _torch_file(checkpoint.with_name(f"{checkpoint.name}-full"))
    fsdp_optim.convert(
        checkpoint.with_name(f"{checkpoint.name}-full"), checkpoint, options=fsdp_optim.ConvertOptions(durable=False)
    )
    format = FairscaleShards(2, {"": ["w", "b"]}, flatten_parameters=flattens)
    fsdp_optim.convert(checkpoint, folder, format=format, options=fsdp_optim.ConvertOptions(durable=False))
    (folder / "torch_files.json").unlink()


def _olmo_local(folder: Path) -> None:
    flat, infos = torch.arange(10.0), _infos()
    for half in ("model", "optim"):
        (folder / half).mkdir(parents=True)
    for rank in range(2):
        data = flat[5 * rank : 5 * rank + 5].clone()
        handle = {
            "data": data,
            "_fqns": ["w", "b"],
            "_shapes": [torch.Size([3, 2]), torch.Size([3])],
            "_numels": [6, 3],
        }
        handle |= {"_numels_with_padding": [6, 3], "_shard_numel_padded": 0, "_shard_param_infos": infos[rank]}
        named = {f"flat_param.{name}": value for name, value in handle.items()}
        torch.save({"modules": [{"name": "", "handles": [named]}]}, folder / "model" / f"rank{rank}.pt")
        group = {"lr": 0.1, "params": [0], "param_names": ["_flat_param"]}
        optim = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": data}}, "param_groups": [group]}
        torch.save(optim, folder / "optim" / f"rank{rank}.pt")
    (folder / "metadata.yaml").write_text("world_size: 2\n")


def _infos() -> list[list[tuple[Any, ...]]]:
    """Where the parameters lie on each rank: whether, offset, number, first and last element."""
    return [[(True, 0, 5, 0, 4), (False, None, None, None, None)], [(True, 0, 1, 5, 5), (True, 1, 3, 0, 2)]]


def _dcp(folder: Path) -> None:
    state = {name: {"step": torch.tensor(3.0), "exp_avg": value} for name, value in WEIGHTS.items()}
    optim = {"state": state, "param_groups": [{"lr": 0.1, "params": ["w", "b"]}]}
    dcp.save({"model": dict(WEIGHTS), "optim": optim, "epoch": 3}, checkpoint_id=folder)


def _legacy_file(folder: Path) -> None:
    folder.mkdir()
    torch.save({"model": dict(WEIGHTS), "epoch": 3}, folder / "a.pt", _use_new_zipfile_serialization=False)


BY_BYTES: Mapping[str, Callable[[Path], None]] = {"DCP": _dcp, "legacy torch file": _legacy_file}
"""The kinds that only bytes are changed of."""

KINDS: Mapping[str, Callable[[Path], None]] = {
    "torch file": _torch_file,
    "full dict of fairscale": _fairscales_full_dict,
    "fairscale flat": lambda folder: _fairscale_shards(folder, flattens=True),
    "fairscale non-flat": lambda folder: _fairscale_shards(folder, flattens=False),
    "OLMo local": _olmo_local,
    "ZeRO 2": lambda folder: write_zero(folder, 2, 2, [WEIGHTS], _STATE, step=3, client={"c": 3}),
    "ZeRO 3": lambda folder: write_zero(folder, 3, 2, [WEIGHTS], _STATE, step=3, client={"c": 3}),
    "universal 2": lambda folder: write_universal(folder, 2, [WEIGHTS], _STATE, 3),
    "universal 3": lambda folder: write_universal(folder, 3, [WEIGHTS], _STATE, 3),
}
"""By the name of a kind of checkpoint, the function that writes one."""


# ------------------------------------------------------------------------------------------- what no program writes


def _itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def values() -> list[Any]:
    """The values that are put in the place of any value."""
    numbers = [-1, 0, 1, 1 << 70, 10**5000, -(1 << 40), 3.5, float("nan"), float("inf"), 1j, True, None]
    texts = ["a/../b", "\0", "\ud800", "x" * 100_000, "w", b"x"]
    containers = [[], {}, (), set(), {1: 2}, [1, 2], {"w": 3}, {(1, 2): 3}, range(1 << 40), _itself()]
    sizes = [torch.Size([1 << 40, 1 << 20]), torch.Size([1 << 31] * 3), torch.float32, torch.device("cpu")]
    shapes = [torch.zeros(3), torch.zeros(0), torch.ones(2, 2, dtype=torch.int64), torch.zeros(1).expand(1 << 40)]
    return [*numbers, *texts, *containers, *sizes, *shapes, torch.zeros((), dtype=torch.bfloat16)]


KEYS = ("", "a/../b", "\0", "\ud800", 1 << 70, -1, None, (1, 2), 1.5, True, "x" * 5000, "module.", "state.")
"""The values that are put in the place of any key of a dict."""

Place = tuple[Any, ...]
"""The keys and indices that lead to a value."""


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """The places of all values in a tree."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, child in items:
        yield from places(child, (*at, key))


def changed(value: Any, place: Place, change: Callable[[Any, Any], Any]) -> Any:
    """A copy of a tree. `change`: a function of the container and the key, or of None and None for the tree itself."""
    if not place:
        return change(None, None)
    key, *rest = place
    if not rest:
        return change(value, key)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = changed(value[key], tuple(rest), change)
    return copy if isinstance(value, (dict, list)) else tuple(copy)


def mutated(tree: Any, rng: random.Random) -> tuple[Place, Callable[[Any, Any], Any]]:
    """A place of a tree, and the change there: a value replaced or removed, or its key renamed."""
    place = rng.choice(list(places(tree)))
    kind = rng.random()
    value, other = rng.choice(values()), rng.choice(KEYS)

    def change(container: Any, key: Any) -> Any:
        if container is None:
            return value
        copy = dict(container) if isinstance(container, dict) else list(container)
        if kind < 0.15:
            del copy[key]
        elif kind > 0.85 and isinstance(container, dict):
            copy = {other if name == key else name: item for name, item in container.items()}
        else:
            copy[key] = value
        return copy if isinstance(container, (dict, list)) else tuple(copy)

    return place, change


def damage(folder: Path, seed: int) -> str:
    """Change one value in a file of a checkpoint, or in the files of all its ranks; returns the change in words."""
    rng = random.Random(seed)
    files = sorted(folder.rglob("*.pt"))
    file = rng.choice(files)
    tree = torch.load(file, weights_only=False)
    place, change = mutated(tree, rng)
    torch.save(changed(tree, place, change), file)
    for other in files if rng.random() < 0.4 else ():
        beside = torch.load(other, weights_only=False)
        if other != file and other.parent == file.parent and place in list(places(beside)):
            torch.save(changed(beside, place, change), other)
    return f"seed {seed}: {file.relative_to(folder)}, {place!r:.300}"


# ------------------------------------------------------------------------------------------- bytes that no program writes


_OPERATIONS = (
    b"}",
    b"]",
    b")",
    b"(",
    b"t",
    b"\x85",
    b"\x86",
    b"R",
    b"b",
    b"0",
    b"u",
    b"s",
    b"a",
    b"e",
    b"\x81",
    b"N",
    b"Q",
    b"2",
    b".",
)
_OPERATIONS += (b"h\x01", b"q\x01", b"r\xff\xff\xff\x7f", b"\x8a\xff", b"X\xff\xff\xff\xff", b"cos\nsystem\n", b"K\xff")


def damage_bytes(folder: Path, seed: int) -> str:
    """Change bytes of one file: of the pickle inside an archive, whose checksum then fits, or of the file itself."""
    rng = random.Random(seed)
    file = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    data = file.read_bytes()
    if zipfile.is_zipfile(file) and rng.random() < 0.7:
        with zipfile.ZipFile(file) as archive:
            records = {name: _content(archive, name) for name in archive.namelist()}
        name = next(name for name in records if name.endswith("data.pkl"))
        records[name], what = _other_bytes(records[name], rng)
        method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
        with zipfile.ZipFile(file, "w", method) as archive:
            for record, content in records.items():
                archive.writestr(record, content)
        what = f"the pickle, {what}"
    else:
        data, what = _other_bytes(data, rng)
        file.write_bytes(data)
    return f"seed {seed}: {file.relative_to(folder)}: {what}"


def _content(archive: zipfile.ZipFile, name: str) -> bytes:
    """The bytes of a record. The checksums of elements are no promise of this library's own archives."""
    with archive.open(name) as record:
        record._expected_crc = None  # type: ignore[attr-defined]
        return record.read()


def _other_bytes(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    at = rng.randrange(len(data) + 1)
    end = min(at + rng.choice((1, 1, 4, 40)), len(data))
    kind = rng.choice(("changed", "removed", "cut", "twice", "an operation", "many operations", "many operations"))
    made = {
        "changed": lambda: data[:at] + rng.randbytes(end - at) + data[end:],
        "removed": lambda: data[:at] + data[end:],
        "cut": lambda: data[:at],
        "twice": lambda: data[:end] + data[at:],
        "an operation": lambda: data[:at] + rng.choice(_OPERATIONS) + data[at:],
        "many operations": lambda: data[:at] + rng.choice(_OPERATIONS) * rng.choice((1000, 500_000)) + data[at:],
    }[kind]()
    return made, f"{kind} at byte {at}"
