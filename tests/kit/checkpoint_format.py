"""An independent reader and writer of checkpoints, made from the description in docs/format.md alone."""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import xxhash
from torch import Tensor, nn

from kit.compare import check_same

MANIFEST = "fsdp_optim.json"
SUMS_MAGIC = b"FSOSUMS1"
MAX_SEGMENT = 4 << 20

# ------------------------------------------------------------------------------------------- an independent reader

ITEM_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
ITEM_SIZES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}
TORCH_DTYPES = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "F16": torch.float16}
TORCH_DTYPES |= {"BF16": torch.bfloat16, "I32": torch.int32, "F32": torch.float32, "I64": torch.int64}
ITEM_SIZES |= {"F8_E4M3": 1, "F8_E5M2": 1, "C64": 8}
TORCH_DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64}
TORCH_DTYPES |= {"F64": torch.float64}


class NotValid(AssertionError):
    """A file contradicts the format."""


@dataclasses.dataclass
class File:
    metadata: dict[str, str]
    tensors: dict[str, Tensor]  # in the order of their bytes
    places: dict[str, tuple[int, int]]  # in the data section
    header: bytes  # the 8 bytes of its length, too
    data: bytes


def read_safetensors(path: Path) -> File:
    """The content of a safetensors file; raises for an invalid file."""
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    text, data = whole[8 : 8 + length], whole[8 + length :]
    if len(text) != length or not text.startswith(b"{") or len(whole[: 8 + length]) % 8:
        raise NotValid(f"{path}: a header of {length} bytes, of {len(whole)}, that begins with {text[:1]!r}")
    entries = json.loads(text, object_pairs_hook=functools.partial(_once, path))
    metadata = entries.pop("__metadata__", {})
    if not all(type(item) is str for item in (*metadata, *metadata.values())):
        raise NotValid(f"{path}: __metadata__ is not strings: {metadata}")
    tensors, places, end = {}, {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (begin, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        nbytes = functools.reduce(int.__mul__, shape, ITEM_SIZES[dtype])
        right = begin == end and stop - begin == nbytes and stop <= len(data)
        if set(entry) != {"dtype", "shape", "data_offsets"} or not right:
            raise NotValid(f"{path}: {name}: {entry}, after {end} bytes")
        raw = (
            torch.frombuffer(bytearray(data[begin:stop]), dtype=torch.uint8)
            if nbytes
            else torch.empty(0, dtype=torch.uint8)
        )
        if begin % ITEM_SIZES[dtype]:
            raise NotValid(f"{path}: {name}: {dtype} at {begin} is not aligned")
        tensors[name], places[name], end = raw.view(TORCH_DTYPES[dtype]).reshape(shape), (begin, stop), stop
    if end != len(data):
        raise NotValid(f"{path}: {len(data)} bytes of data, of which tensors have {end}")
    return File(metadata, tensors, places, whole[: 8 + length], data)


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise NotValid(f"{path}: a key twice in {[key for key, _ in pairs]}")
    return dict(pairs)


def read_sums(path: Path) -> list[tuple[int, int]]:
    """The (end of segment, hash) of a table, unchecked."""
    whole = path.read_bytes()
    if not whole.startswith(SUMS_MAGIC) or (len(whole) - len(SUMS_MAGIC)) % 16:
        raise NotValid(f"{path}: {len(whole)} bytes that begin with {whole[:8]!r}")
    return list(struct.iter_unpack("<QQ", whole[len(SUMS_MAGIC) :]))


def make_sums(data: bytes) -> bytes:
    """A table for a data section."""
    ends = [*range(MAX_SEGMENT, len(data), MAX_SEGMENT), len(data)]
    begins = [0, *ends[:-1]]
    hashes = [xxhash.xxh3_64_intdigest(data[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    pairs = zip(ends, hashes, strict=True) if data else ()
    return SUMS_MAGIC + b"".join(struct.pack("<QQ", end, value) for end, value in pairs)


def check_sums(path: Path) -> int:
    """Raise unless the table beside a safetensors file is right. The number of its segments."""
    data, table = read_safetensors(path).data, read_sums(sums_of(path))
    begin = 0
    for end, value in table:
        if not begin < end <= begin + MAX_SEGMENT:
            raise NotValid(f"{path}.sums: a segment from {begin} to {end}")
        if value != xxhash.xxh3_64_intdigest(data[begin:end]):
            raise NotValid(f"{path}.sums: the segment from {begin} to {end} has another hash")
        begin = end
    if begin != len(data):
        raise NotValid(f"{path}.sums: ends at {begin}, and the data at {len(data)}")
    return len(table)


def sums_of(path: Path) -> Path:
    return path.with_name(path.name + ".sums")


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The "checkpoint" of a manifest; raises where its checksum is wrong."""
    whole = json.loads((folder / MANIFEST).read_bytes(), object_pairs_hook=functools.partial(_once, folder / MANIFEST))
    if set(whole) != {"checksum", "checkpoint"}:
        raise NotValid(f"{folder / MANIFEST}: {list(whole)}")
    wanted = xxhash.xxh3_64_hexdigest(canonical(whole["checkpoint"]))
    if whole["checksum"] != wanted:
        raise NotValid(f"{folder / MANIFEST}: checksum {whole['checksum']!r}, not {wanted!r}")
    return whole["checkpoint"]


def check_folder(folder: Path) -> list[str]:
    """Raise unless everything in a checkpoint is valid and agrees with its manifest. The names of its safetensors files."""
    checkpoint = read_manifest(folder)
    if checkpoint["format"] != "fsdp_optim" or checkpoint["version"] not in (1, 2, 3, 4, 5):
        raise NotValid(f"{folder}: format {checkpoint['format']!r}, version {checkpoint['version']!r}")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))
    indexes = [str(path.relative_to(folder)) for path in folder.rglob("*.index.json")]
    beside = [name for name in checkpoint["files"] if name.endswith(".json") and name not in indexes]
    check_same("files of the manifest", sorted(checkpoint["files"]), sorted([*names, *indexes, *beside]))
    for name in (*indexes, *beside):
        header = xxhash.xxh3_64_hexdigest((folder / name).read_bytes())
        check_same(f"{name}, hash", checkpoint["files"][name]["header_xxh3_64"], header)
    for name in names:
        file, entry, table = read_safetensors(folder / name), checkpoint["files"][name], sums_of(folder / name)
        if name.startswith("extra/"):  # has no table
            hashes = [xxhash.xxh3_64_hexdigest(part) for part in (file.metadata["json"].encode(), file.data)]
            check_same(f"{name}, hashes", file.metadata["xxh3_64"], "".join(hashes))
        elif table.exists():
            check_sums(folder / name)
        check_same(f"{name}, size", entry["size"], (folder / name).stat().st_size)
        check_same(f"{name}, header", entry["header_xxh3_64"], xxhash.xxh3_64_hexdigest(file.header))
        sums_hash = xxhash.xxh3_64_hexdigest(table.read_bytes()) if table.exists() else None
        check_same(f"{name}, table", entry["sums_xxh3_64"], sums_hash)
        by_package = safetensors.torch.load_file(folder / name)
        check_same(f"{name}, by the safetensors package", in_order(by_package), in_order(file.tensors))
        with safetensors.safe_open(folder / name, "pt") as opened:
            check_same(f"{name}, metadata", in_order(opened.metadata() or {}), in_order(file.metadata))
    in_trees = [name for name in names if name.startswith("state")]
    common = folder / "extra" / "common.safetensors"
    values = json.loads(read_safetensors(common).metadata["json"]) if common.exists() else None
    check_same("tensors of trees", sorted(_stored_in(values)), list(tensors_of(folder, "state")) if in_trees else [])
    models = checkpoint["model"].get("models", [])
    version = checkpoint["version"]
    check_same("version", (version == 5, version == 4), (bool(models), bool(in_trees) and not models))
    if models:
        _check_models(folder, checkpoint, models, names)
    return names


def _check_models(folder: Path, checkpoint: dict[str, Any], models: list[str], names: list[str]) -> None:
    """Raise unless the folders of several models have all parameters, each under the name in its model."""
    places = {name.partition("/")[0] for name in names if "/" in name} - {"extra"}
    check_same("folders", places <= set(models), True)
    stored = {f"{model}.{key}" for model in models for key in tensors_of(folder / model, "model")}
    if checkpoint["model"].get("weights", "all") == "all":
        check_same("parameters", sorted(checkpoint["model"]["params"]), sorted(stored))
    described = checkpoint["optim"]["params"] if checkpoint["optim"] is not None else {}
    keys = [
        key
        for param in described.values()
        for _, how, key in param["values"]
        if how.partition(" ")[0] in ("tensor", "placed") or how == "scalar tensor"
    ]
    in_files = [f"state.{model}.{key[6:]}" for model in models for key in tensors_of(folder / model, "optim")]
    if checkpoint["has_optim"] and checkpoint["optim"] is not None:
        check_same("state", sorted(keys), sorted(in_files))


def _stored_in(value: Any) -> list[str]:
    if isinstance(value, dict):
        return (
            [value["$stored"]] if "$stored" in value else [key for item in value.values() for key in _stored_in(item)]
        )
    return [key for item in value for key in _stored_in(item)] if isinstance(value, list) else []


def in_order(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in sorted(values)}


def tensors_of(folder: Path, what: str) -> dict[str, Tensor]:
    """All tensors of "model" or "optim", whether it is split or not."""
    by_name: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{what}*.safetensors")):
        tensors = read_safetensors(path).tensors
        if set(by_name) & set(tensors):
            raise NotValid(f"{path}: {sorted(set(by_name) & set(tensors))} are in another file too")
        by_name |= tensors
    return in_order(by_name)


def all_bytes(folder: Path) -> dict[str, bytes]:
    """The content of a folder, by name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# ------------------------------------------------------------------------------------------- models


class Buffered(nn.Module):
    """Uneven parameters, buffers (one of them not persistent), and a name that is not ASCII."""

    units = ("stem", "named.größe", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 7)
        self.named = nn.ModuleDict({"größe": nn.Linear(2, 3)})
        self.scale = nn.Parameter(torch.empty(1))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("cache", torch.ones(2), persistent=False)


class Dtypes(nn.Module):
    """Every dtype of parameters and buffers, an odd number of bytes of each, and nothing at all."""

    units = ("low", "high", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(3, 5, dtype=torch.bfloat16)
        self.high = nn.Linear(3, 3, dtype=torch.float64)
        self.single = nn.Linear(3, 1)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(-(2**62)))
        self.register_buffer("none", torch.empty(0, 3))
        for dtype, values in {"uint8": [1, 2, 255], "int8": [-128], "int16": [1, -2, 3], "int32": [2**31 - 1]}.items():
            self.register_buffer(f"in_{dtype}", torch.tensor(values, dtype=getattr(torch, dtype)))
        self.register_buffer("in_float16", torch.tensor([0.5, -0.0, float("inf")], dtype=torch.float16))
        self.register_buffer("nans", torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32))


class Large(nn.Module):
    """9 MiB and a few bytes: three segments."""

    units = ("",)
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(3, 5))
        self.large = nn.Parameter(torch.empty(1536, 1536))
        self.last = nn.Parameter(torch.empty(7))


MODELS: dict[str, Callable[[], nn.Module]] = {"Buffered": Buffered, "Dtypes": Dtypes, "Large": Large}


def extra() -> dict[str, Any]:
    nested = {"list": [1, 2.5, None, True, "größe"], "empty": {}}
    return {"step": 7, "nested": nested, "tensor": torch.tensor([1.5, -0.0], dtype=torch.bfloat16)}


GOLDEN = Path(__file__).parents[1] / "data" / "golden"
