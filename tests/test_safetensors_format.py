"""What `save` writes is safetensors to the letter: read back by a reader of this file, and by the safetensors package.

The reader, the tables of checksums and the marker are written here from the format's description alone; other tests of
checkpoints use them too. `python tests/test_safetensors_format.py` makes the golden checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import shutil
import struct
import tempfile
import unittest
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
import xxhash
from parameterized import parameterized
from torch import Tensor, nn
from wrapping import Differs, OfModel, Oracle, Trained, adam, check_same, cpu, local_of, sgd

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

MARKER = "fsdp_optim.json"
SUMS_MAGIC = b"FSOSUMS1"
MAX_SEGMENT = 4 << 20

# ------------------------------------------------------------------------------------------- an independent reader

ITEM_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
ITEM_SIZES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}
TORCH_DTYPES = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "F16": torch.float16}
TORCH_DTYPES |= {"BF16": torch.bfloat16, "I32": torch.int32, "F32": torch.float32, "I64": torch.int64}
TORCH_DTYPES |= {"F64": torch.float64}


class NotValid(AssertionError):
    """A file is not what the format says."""


@dataclasses.dataclass
class File:
    metadata: dict[str, str]
    tensors: dict[str, Tensor]  # in the order of their bytes
    places: dict[str, tuple[int, int]]  # in the data section
    header: bytes  # the 8 bytes of its length, too
    data: bytes


def read_safetensors(path: Path) -> File:
    """Everything that is in a safetensors file; raises where it is not valid."""
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


def read_marker(folder: Path) -> dict[str, Any]:
    """The "checkpoint" of a marker; raises where its checksum is wrong."""
    whole = json.loads((folder / MARKER).read_bytes(), object_pairs_hook=functools.partial(_once, folder / MARKER))
    if set(whole) != {"checksum", "checkpoint"}:
        raise NotValid(f"{folder / MARKER}: {list(whole)}")
    wanted = xxhash.xxh3_64_hexdigest(canonical(whole["checkpoint"]))
    if whole["checksum"] != wanted:
        raise NotValid(f"{folder / MARKER}: checksum {whole['checksum']!r}, not {wanted!r}")
    return whole["checkpoint"]


def check_folder(folder: Path) -> list[str]:
    """Raise unless everything in a checkpoint is valid and agrees with its marker. The names of its safetensors files."""
    checkpoint = read_marker(folder)
    if (checkpoint["format"], checkpoint["version"]) != ("fsdp_optim", 1):
        raise NotValid(f"{folder}: format {checkpoint['format']!r}, version {checkpoint['version']!r}")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))
    indexes = [path.name for path in folder.glob("*.index.json")]
    check_same("files of the marker", sorted(checkpoint["files"]), sorted([*names, *indexes]))
    for name in names:
        file, entry, table = read_safetensors(folder / name), checkpoint["files"][name], sums_of(folder / name)
        if "/" in name:  # has no table
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
    return names


def in_order(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in sorted(values)}


def tensors_of(folder: Path, what: str) -> dict[str, Tensor]:
    """All tensors of "model" or "optim", whether it is split or not."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{what}*.safetensors")):
        tensors = read_safetensors(path).tensors
        if set(found) & set(tensors):
            raise NotValid(f"{path}: {sorted(set(found) & set(tensors))} are in another file too")
        found |= tensors
    return in_order(found)


def all_bytes(folder: Path) -> dict[str, bytes]:
    """What a folder holds, by name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# ------------------------------------------------------------------------------------------- models


class Buffered(nn.Module):
    """Uneven parameters, buffers, one that is not to be saved, and a name that is not ASCII."""

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


def save_trained(path: Path, wrapper: str, model: str, **options: Any) -> None:
    """On each rank: what the tests look at."""
    with cpu():
        make = sgd if model == "Large" else adam
        trained = Trained(wrapper, make, model=MODELS[model])
        options.setdefault("process_group", trained.process_group)
        fsdp_optim.save(path, trained.model, trained.optim, **options)


@functools.cache
def oracle(model: str) -> Oracle:
    return Oracle(sgd if model == "Large" else adam, model=MODELS[model])


def check_content(folder: Path, model: str) -> None:
    """Raise unless the files have what the unwrapped model's training has, to the bit."""
    wanted = oracle(model)
    check_same("the model", tensors_of(folder, "model"), in_order(wanted.model.state_dict()))
    state = {f"state.{fqn}.{name}": v for fqn, values in wanted.by_name().items() for name, v in values.items()}
    check_same("the optimizer", tensors_of(folder, "optim"), in_order(state))
    first = sorted(folder.glob("optim*.safetensors"))[0]
    groups = json.loads(read_safetensors(first).metadata["param_groups"])
    check_same("params of the groups", [group["params"] for group in groups], [wanted.names])
    for key in ("lr", "weight_decay"):
        check_same(key, [group[key] for group in groups], [group[key] for group in wanted.optim.param_groups])


# ------------------------------------------------------------------------------------------- tests


class FormatTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = _temporary()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def saved(self, world_size: int, wrapper: str, model: str, **options: Any) -> Path:
        run_on_ranks(save_trained, world_size, self.root / "saved", wrapper, model, **options)
        return self.root / "saved"

    @parameterized.expand(
        [("FSDP2", 1), ("FSDP2", 2), ("FSDP2", 3), ("fairscale flat", 2), ("FSDP1 flat", 2), ("DDP", 2), ("plain", 2)]
    )
    def test_one_file_each(self, wrapper: str, world_size: int) -> None:
        folder = self.saved(world_size, wrapper, "Buffered")
        names = check_folder(folder)
        check_same("files", [n for n in names if "/" not in n], ["model.safetensors", "optim.safetensors"])
        check_content(folder, "Buffered")
        check_same("format", read_safetensors(folder / "model.safetensors").metadata["format"], "pt")
        check_same("the world", read_marker(folder)["world_size"], world_size)
        check_same("what lies beside it", [p.name for p in self.root.iterdir()], ["saved"])

    @parameterized.expand([("FSDP2",), ("plain",)])
    def test_every_dtype(self, wrapper: str) -> None:
        folder = self.saved(2, wrapper, "Dtypes")
        check_folder(folder)
        check_content(folder, "Dtypes")

    def test_several_segments(self) -> None:
        folder = self.saved(2, "FSDP2", "Large")
        check_folder(folder)
        for what in ("model", "optim"):
            if check_sums(folder / f"{what}.safetensors") < 3:
                raise NotValid(f"{what}: 9 MiB in less than 3 segments of at most 4 MiB")
        check_content(folder, "Large")

    @parameterized.expand(
        [("split", 100, {}), ("each in its own", 1, {}), ("per rank", 0, {"strategy": "per_rank_files"})]
    )
    def test_several_files(self, _: str, most: int, options: dict[str, Any]) -> None:
        if most:
            options = {**options, "max_file_size": most}
        folder = self.saved(2, "FSDP2", "Buffered", **options)
        names = check_folder(folder)
        check_content(folder, "Buffered")
        for what in ("model", "optim"):
            mine = [name for name in names if name.startswith(what)]
            count = len(mine)
            check_same("names", mine, [f"{what}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)])
            files = {name: read_safetensors(folder / name) for name in mine}
            index = json.loads((folder / f"{what}.safetensors.index.json").read_bytes())
            weight_map = {tensor: name for name, file in files.items() for tensor in file.tensors}
            check_same("weight_map", in_order(index["weight_map"]), in_order(weight_map))
            total = sum(len(file.data) for file in files.values())
            check_same("total_size", index["metadata"]["total_size"], total)
            too_large = [n for n, file in files.items() if most and len(file.data) > most and len(file.tensors) > 1]
            if too_large or count < 2:
                raise NotValid(f"{count} files, too large: {too_large}")

    def test_without_checksums_there_are_none(self) -> None:
        folder = self.saved(2, "FSDP2", "Buffered", checksums=False)
        check_same("tables", list(folder.rglob("*.sums")), [])
        check_folder(folder)
        check_content(folder, "Buffered")

    def test_without_an_optimizer(self) -> None:
        run_on_ranks(save_model_only, 2, self.root / "saved")
        names = check_folder(self.root / "saved")
        check_same("files", [name for name in names if "/" not in name], ["model.safetensors"])
        check_same(
            "the model", tensors_of(self.root / "saved", "model"), in_order(oracle("Buffered").model.state_dict())
        )

    def test_what_the_trainer_adds(self) -> None:
        folder = self.saved(2, "FSDP2", "Buffered", extra=extra(), per_rank_extra={"rng": torch.arange(3)})
        names = check_folder(folder)
        wanted = ["extra/common.safetensors", "extra/rank-00000.safetensors", "extra/rank-00001.safetensors"]
        check_same("files", [name for name in names if "/" in name], wanted)
        stored = list(read_safetensors(folder / wanted[0]).tensors.values())
        check_same("tensors of extra", stored, [extra()["tensor"]])
        for name in wanted[1:]:
            check_same(name, list(read_safetensors(folder / name).tensors.values()), [torch.arange(3)])

    def test_the_reader_of_this_file_is_not_blind(self) -> None:
        """What the tests above rely on refuses what is wrong."""
        folder = self.saved(2, "FSDP2", "Buffered")
        path = folder / "optim.safetensors"
        whole = path.read_bytes()
        file = read_safetensors(path)
        first, *_, last = file.places
        spans = {name: f'"data_offsets":[{begin},{end}]'.encode() for name, (begin, end) in file.places.items()}
        if not all(re.sub(rb"\s", b"", file.header).count(span) == 1 for span in spans.values()):
            raise NotValid("offsets are not written as this test thinks")
        tight = bytearray(whole)
        tight[-1] ^= 1
        for wrong in (whole[:-1], whole + b"\0", whole[:8] + b" " + whole[9:], whole.replace(b"F32", b"F64", 1)):
            path.write_bytes(wrong)
            with self.assertRaises((NotValid, ValueError)):
                read_safetensors(path)
        path.write_bytes(bytes(tight))
        with self.assertRaisesRegex(NotValid, "another hash"):
            check_sums(path)
        with self.assertRaises(Differs):
            check_same("the optimizer", read_safetensors(path).tensors[last], file.tensors[last])
        check_same(f"{first} is as it was", read_safetensors(path).tensors[first], file.tensors[first])


def save_model_only(path: Path) -> None:
    with cpu():
        fsdp_optim.save(path, Trained("FSDP2", model=Buffered).model)


def extra() -> dict[str, Any]:
    nested = {"list": [1, 2.5, None, True, "größe"], "empty": {}}
    return {"step": 7, "nested": nested, "tensor": torch.tensor([1.5, -0.0], dtype=torch.bfloat16)}


def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fsdp_optim_format_")


# ------------------------------------------------------------------------------------------- the golden checkpoint

GOLDEN = Path(__file__).parent / "data" / "golden"

# What `python tests/test_safetensors_format.py` printed. It is made once for each version of the format, and never again:
# a golden checkpoint that a newer version cannot load is a bug of that version.
GOLDEN_SHA256 = "f8c17fcab4ba09d51c1201f826911964cc551d8374f89eea67a77362d134b4af"


class Golden(nn.Module):
    units = ("stem", "low", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 7)
        self.low = nn.Linear(3, 5, bias=False, dtype=torch.bfloat16)
        self.named = nn.ModuleDict({"größe": nn.Linear(2, 3)})
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(5))


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [{"params": params[:2], "lr": 0.5}, {"params": params[2:], "lr": 0.125, "weight_decay": 0.0625}]
    return torch.optim.AdamW(groups, betas=(0.5, 0.75))


def golden_model(wrapper: str, filled: bool) -> Trained:
    """Every value is a simple function of the element's number, not of anybody's arithmetic."""
    trained = Trained(wrapper, OfModel(two_groups), steps=1, model=Golden)
    trained.forget_gradients()
    with torch.no_grad():
        for param, index in zip(trained.params, trained.index, strict=True):
            values = trained.optim.state[param]
            values["step"].fill_(7 if filled else 1)
            by_name = {"exp_avg": -index / 4, "exp_avg_sq": index * 2}
            for tensor, numbers in [(param, index), *((values[name], n) for name, n in by_name.items())]:
                local = local_of(tensor)
                local.copy_(numbers.reshape(local.shape) if filled else torch.zeros(()))
    for buffer in () if filled else trained.model.buffers():
        buffer.zero_()
    return trained


def contents(trained: Trained) -> dict[str, Any]:
    """This rank's part of all that a checkpoint restores."""
    state = [in_order(trained.optim.state[param]) for param in trained.params]
    return {
        "parameters": [local_of(param).detach() for param in trained.params],
        "buffers": dict(trained.model.named_buffers()),
        "state": [{name: local_of(value) for name, value in values.items()} for values in state],
        "groups": [in_order({k: v for k, v in g.items() if k != "params"}) for g in trained.optim.param_groups],
    }


def save_golden(path: Path) -> None:
    trained = golden_model("FSDP2", filled=True)
    mine = {"rank": dist.get_rank(), "rng": torch.arange(3) + dist.get_rank()}
    fsdp_optim.save(path, trained.model, trained.optim, extra=extra(), per_rank_extra=mine)


def load_golden(path: Path, wrapper: str) -> None:
    wanted, trained = golden_model(wrapper, filled=True), golden_model(wrapper, filled=False)
    for group in trained.optim.param_groups:
        group["lr"] = 99.0
    restored = fsdp_optim.load(path, trained.model, trained.optim, process_group=trained.process_group)
    check_same("loaded", contents(trained), contents(wanted))
    check_same("extra", dict(restored), extra())
    rank = dist.get_rank() if dist.is_initialized() else 0
    rank = rank if rank < 2 else 0  # it was saved by two
    check_same("per_rank", dict(restored.per_rank), {"rank": rank, "rng": torch.arange(3) + rank})


def digest(folder: Path) -> str:
    """Of the names and bytes of all files."""
    found = hashlib.sha256()
    for name, data in sorted(all_bytes(folder).items()):
        found.update(f"{name}\0{len(data)}\0".encode() + data)
    return found.hexdigest()


def make_golden(folder: Path = GOLDEN) -> str:
    """Write the golden checkpoint, on two ranks; its digest."""
    if folder.exists():
        raise SystemExit(f"{folder} is there already: it is made once. Move it away to make another.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    run_on_ranks(save_golden, 2, folder)
    check_folder(folder)
    return digest(folder)


class GoldenTest(unittest.TestCase):
    def setUp(self) -> None:
        if not GOLDEN.exists():
            self.skipTest(f"golden: there is no {GOLDEN} yet; `python {Path(__file__).name}` makes it")

    def test_it_is_still_what_it_was(self) -> None:
        self.assertEqual(digest(GOLDEN), GOLDEN_SHA256)
        check_folder(GOLDEN)

    def test_a_plain_process_loads_it(self) -> None:
        load_golden(GOLDEN, "plain")

    @parameterized.expand([("FSDP2", 2), ("FSDP2", 3), ("plain", 2)])
    def test_ranks_load_it(self, wrapper: str, world_size: int) -> None:
        run_on_ranks(load_golden, world_size, GOLDEN, wrapper)


class MakeGoldenTest(unittest.TestCase):
    """What makes the golden checkpoint makes one that the tests of it accept."""

    def test_made_and_loaded(self) -> None:
        with _temporary() as root:
            folder = Path(root) / "golden"
            first = make_golden(folder)
            self.assertEqual(digest(folder), first)
            load_golden(folder, "plain")
            run_on_ranks(load_golden, 3, folder, "FSDP2")
            (folder / "optim.safetensors").rename(folder / "other.safetensors")
            self.assertNotEqual(digest(folder), first)
            shutil.rmtree(folder)
            self.assertEqual(list(_names(Path(root))), [])


def _names(folder: Path) -> Iterator[str]:
    return (path.name for path in folder.iterdir())


if __name__ == "__main__":
    print(f'GOLDEN_SHA256 = "{make_golden()}"')
