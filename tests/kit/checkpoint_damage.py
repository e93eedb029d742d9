"""Ways to damage a checkpoint, some of them with matching checksums, and calls that fail."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import xxhash

from kit.checkpoint_format import MANIFEST, canonical, make_sums, read_manifest, read_safetensors, sums_of


def flip(path: Path, position: int, bit: int = 0) -> None:
    """`position` from the end where it is negative."""
    whole = bytearray(path.read_bytes())
    whole[position] ^= 1 << bit
    path.write_bytes(whole)


def shorten(folder: Path) -> None:
    """Cut a tensor file, which shows in a listing."""
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def flip_a_weight(folder: Path) -> None:
    """Flip a bit of a tensor, which shows in a load."""
    flip(folder / "model.safetensors", -1)


def garble(folder: Path) -> None:
    """Overwrite the manifest, so that not even the sequence number is known."""
    (folder / "fsdp_optim.json").write_bytes(b"{" * 50)


def raw_header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def packed(entries: Any) -> bytes:
    """The bytes of a header with its length."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return raw_header(text + b" " * (-len(text) % 8))


def entries_of(path: Path) -> dict[str, Any]:
    return json.loads(read_safetensors(path).header[8:])


def rewrite(path: Path, header: bytes, data: bytes | None = None) -> None:
    """Replace the header, and possibly the data, of a file, with matching checksums in the table and the manifest."""
    data = read_safetensors(path).data if data is None else data
    path.write_bytes(header + data)
    folder = next(parent for parent in path.parents if (parent / MANIFEST).exists())
    checkpoint = read_manifest(folder)
    entry = checkpoint["files"][str(path.relative_to(folder))]
    entry |= {"size": path.stat().st_size, "header_xxh3_64": xxhash.xxh3_64_hexdigest(header)}
    if entry["sums_xxh3_64"] is not None:
        sums_of(path).write_bytes(make_sums(data))
        entry["sums_xxh3_64"] = xxhash.xxh3_64_hexdigest(sums_of(path).read_bytes())
    seal(folder, checkpoint)


def seal(folder: Path, checkpoint: Any) -> None:
    """Write a manifest that has the right checksum, and a brief that agrees with the rest."""
    if isinstance(checkpoint, dict) and "brief" in checkpoint:
        checkpoint = checkpoint | {"brief": brief_of(checkpoint, checkpoint["brief"])}
    seal_as_it_is(folder, checkpoint)


def brief_of(checkpoint: Mapping[str, Any], was: Mapping[str, Any]) -> dict[str, Any]:
    """The brief of a manifest; entries that the manifest no longer has stay as they were."""
    summary = {key: value for key, value in was.items() if key != "xxh3_64"}
    summary |= {key: checkpoint[key] for key in ("created_ns", "token", "version", "world_size") if key in checkpoint}
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        summary["files"] = {name: info["size"] for name, info in checkpoint["files"].items()}
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        content = [sorted(checkpoint["model"]["params"]), checkpoint["has_optim"]]
        summary["content"] = xxhash.xxh3_64_hexdigest(canonical(content))
    return sealed_brief(summary)


def sealed_brief(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A brief with the right checksum."""
    summary = {key: value for key, value in summary.items() if key != "xxh3_64"}
    return summary | {"xxh3_64": xxhash.xxh3_64_hexdigest(canonical(summary))}


def seal_as_it_is(folder: Path, checkpoint: Any) -> None:
    """Write a manifest with the right checksum, and an unchanged brief."""
    text = canonical(checkpoint)
    checksum = xxhash.xxh3_64_hexdigest(text).encode()
    (folder / MANIFEST).write_bytes(b'{"checksum":"' + checksum + b'","checkpoint":' + text + b"}")


Entries = dict[str, Any]


def offsets(begin: Any, end: Any) -> Callable[[Entries, str], Any]:
    """Let the header claim another place for a tensor; a number may be a function of the true place."""

    def edit(entries: Entries, name: str) -> None:
        places = entries[name]["data_offsets"]
        entries[name]["data_offsets"] = [
            place(places) if callable(place) else place for place in (begin, end) if place is not ...
        ]

    return edit


def field(key: str, value: Any) -> Callable[[Entries, str], Any]:
    def edit(entries: Entries, name: str) -> None:
        if value is ...:
            del entries[name][key]
        else:
            entries[name][key] = value(entries[name][key]) if callable(value) else value

    return edit


def where_another_is(entries: Entries, name: str) -> None:
    """Let the tensor begin where an earlier tensor begins, so that it does not reach beyond the end."""
    places = [entry["data_offsets"] for key, entry in entries.items() if key not in ("__metadata__", name)]
    begin, end = entries[name]["data_offsets"]
    other = min(place[0] for place in places)
    entries[name]["data_offsets"] = [other, other + end - begin]


def no_entry(entries: Entries, name: str) -> None:
    del entries[name]


def twice(entries: Entries, name: str) -> bytes:
    text = json.dumps(entries)
    return text[:-1].encode() + f", {json.dumps(name)}: {json.dumps(entries[name])}}}".encode()


def two_offsets(entries: Entries, name: str) -> bytes:
    """The key twice inside the tensor's entry; the last one is right."""
    text = json.dumps(entries)
    own = json.dumps(entries[name])
    return text.replace(own, '{"data_offsets": [0, 4], ' + own[1:], 1).encode()


BEGIN, END = (lambda places: places[0]), (lambda places: places[1])

LIES: dict[str, Callable[[Entries, str], Any]] = {
    "overlap": where_another_is,
    "overlap by a part": offsets(lambda p: p[0] - 4, lambda p: p[1] - 4),
    "overlap at the end": offsets(BEGIN, lambda p: p[1] + 4),
    "hole before it": offsets(lambda p: p[0] + 4, END),
    "hole of a tensor": no_entry,
    "beyond the end": offsets(lambda p: p[0] + (1 << 20), lambda p: p[1] + (1 << 20)),
    "2**63": offsets(2**63, lambda p: 2**63 + p[1] - p[0]),
    "2**63 - 8": offsets(2**63 - 8, lambda p: 2**63 - 8 + p[1] - p[0]),
    "2**64": offsets(2**64, lambda p: 2**64 + p[1] - p[0]),
    "2**64 and around": offsets(lambda p: 2**64 + p[0], lambda p: 2**64 + p[1]),
    "end at 2**63": offsets(BEGIN, 2**63),
    "negative": offsets(lambda p: p[0] - p[1], 0),
    "minus 2**63": offsets(-(2**63), lambda p: p[1] - p[0] - 2**63),
    "backwards": offsets(END, BEGIN),
    "not whole numbers": offsets(lambda p: float(p[0]), lambda p: float(p[1])),
    "infinity": offsets(BEGIN, float("inf")),
    "not a number": offsets(float("nan"), float("nan")),
    "strings": offsets(lambda p: str(p[0]), lambda p: str(p[1])),
    "null": offsets(None, None),
    "true": offsets(False, True),
    "one offset": offsets(BEGIN, ...),
    "no offsets": field("data_offsets", ...),
    "offsets are a dict": field("data_offsets", {"0": 0, "1": 4}),
    "dtype of another size": field("dtype", "F64"),
    "dtype that nobody knows": field("dtype", "Q7"),
    "dtype is a list": field("dtype", ["F32"]),
    "no dtype": field("dtype", ...),
    "shape too large": field("shape", lambda shape: [*shape[:-1], shape[-1] + 1]),
    "shape too small": field("shape", lambda shape: [*shape[:-1], shape[-1] - 1]),
    "shape with another dimension": field("shape", lambda shape: [*shape, 2]),
    "negative shape": field("shape", lambda shape: [-size for size in shape]),
    "shape of 2**63": field("shape", [2**63, 2**63]),
    "shape whose size wraps to nothing": field("shape", [2**32, 2**32]),
    "shape of fractions": field("shape", lambda shape: [float(size) for size in shape]),
    "shape is a string": field("shape", "57"),
    "no shape": field("shape", ...),
    "the name twice": twice,
    "offsets twice": two_offsets,
    "the entry is a list": lambda entries, name: entries.update({name: [1, 2]}),
    "the entry is null": lambda entries, name: entries.update({name: None}),
}

HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "longer than the file": lambda header: struct.pack("<Q", 1 << 20) + header[8:],
    "longer by one": lambda header: struct.pack("<Q", len(header) - 7) + header[8:],
    "of 2**63 bytes": lambda header: struct.pack("<Q", 2**63) + header[8:],
    "of 2**64 - 1 bytes": lambda header: struct.pack("<Q", 2**64 - 1) + header[8:],
    "of no bytes": lambda header: struct.pack("<Q", 0),
    "of one byte": lambda header: raw_header(b"{"),
    "empty dict": lambda header: packed({}),
    "a list": lambda header: packed([]),
    "a number": lambda header: packed(7),
    "null": lambda header: packed(None),
    "not JSON": lambda header: packed(b'{"stem.weight": '),
    "two values": lambda header: packed(b"{} {}"),
    "not UTF-8": lambda header: packed(b'{"\xff\xfe": 1}'),
    "half a surrogate as a field": lambda header: packed(
        b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], "\\ud800": 1}}'
    ),
    "half a surrogate as a dtype": lambda header: packed(
        b'{"a": {"dtype": "\\uDFFF", "shape": [0], "data_offsets": [0, 0]}}'
    ),
    "half a surrogate": lambda header: packed(b'{"\\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'),
    "a NUL in a name": lambda header: packed(b'{"a\\u0000": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'),
    "deep lists": lambda header: packed(b"[" * 200_000),
    "deep lists, closed": lambda header: packed(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep dicts": lambda header: packed(b'{"a": ' * 100_000 + b"1" + b"}" * 100_000),
    "a number of 100,000 digits": lambda header: packed(
        b'{"stem.weight": {"dtype": "F32", "shape": [7, 5], "data_offsets": [0, ' + b"9" * 100_000 + b"]}}"
    ),
    "a shape of 100,000 dimensions": lambda header: packed(
        {"stem.weight": {"dtype": "F32", "shape": [2] * 100_000, "data_offsets": [0, 140]}}
    ),
    "metadata is a list": lambda header: packed(json.loads(header[8:]) | {"__metadata__": ["pt"]}),
    "metadata is deep": lambda header: packed(
        json.dumps(json.loads(header[8:]) | {"__metadata__": 0}).encode().replace(b": 0}", b": " + b"[" * 99_999)
    ),
}


def renamed(value: Any, was: str, name: str) -> Any:
    """Replace a string in all keys and values."""
    if isinstance(value, Mapping):
        return {renamed(key, was, name): renamed(item, was, name) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item, was, name) for item in value]
    return name if value == was else value


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda checkpoint: [],
    "null": lambda checkpoint: None,
    "nothing in it": lambda checkpoint: {},
    "no files": lambda checkpoint: {k: v for k, v in checkpoint.items() if k != "files"},
    "files are a list": lambda checkpoint: checkpoint | {"files": list(checkpoint["files"])},
    "files are empty": lambda checkpoint: checkpoint | {"files": {}},
    "another format": lambda checkpoint: checkpoint | {"format": "fsdp_optim_other"},
    "no format": lambda checkpoint: {k: v for k, v in checkpoint.items() if k != "format"},
    "no version": lambda checkpoint: {k: v for k, v in checkpoint.items() if k != "version"},
    "version of words": lambda checkpoint: checkpoint | {"version": "1"},
    "version 0": lambda checkpoint: checkpoint | {"version": 0},
    "version -1": lambda checkpoint: checkpoint | {"version": -1},
    "version true": lambda checkpoint: checkpoint | {"version": True},
    "version null": lambda checkpoint: checkpoint | {"version": None},
    "world of nobody": lambda checkpoint: checkpoint | {"world_size": 0},
    "world of less": lambda checkpoint: checkpoint | {"world_size": -1},
    "world of words": lambda checkpoint: checkpoint | {"world_size": "2"},
    "no model": lambda checkpoint: {k: v for k, v in checkpoint.items() if k != "model"},
    "model is a number": lambda checkpoint: checkpoint | {"model": 7},
    "optim is a number": lambda checkpoint: checkpoint | {"optim": 7},
}


def with_file(**values: Any) -> Callable[[dict[str, Any]], Any]:
    """Other values for one of the files."""

    def edit(checkpoint: dict[str, Any]) -> Any:
        checkpoint["files"]["model.safetensors"].update(values)
        return checkpoint

    return edit


def with_group(**values: Any) -> Callable[[dict[str, Any]], Any]:
    """Other values for the optimizer's group."""

    def edit(checkpoint: dict[str, Any]) -> Any:
        checkpoint["optim"]["groups"][0].update(values)
        return checkpoint

    return edit


def with_state(**values: Any) -> Callable[[dict[str, Any]], Any]:
    """Other entries in the description of a parameter's state."""

    def edit(checkpoint: dict[str, Any]) -> Any:
        checkpoint["optim"]["params"]["stem.weight"].update(values)
        return checkpoint

    return edit


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {"$tuple": [value]}
    return value


MANIFESTS |= {
    "groups are a number": lambda checkpoint: checkpoint | {"optim": checkpoint["optim"] | {"groups": 7}},
    "params of a group are numbers": with_group(params=[0, 1]),
    "params of a group are unknown": with_group(params=["nobody"]),
    "params of a group are lists": with_group(params=[["stem.weight"]]),
    "hyperparameters are an object": with_group(hyperparameters={"lr": 0.5}),
    "hyperparameter of no kind": with_group(hyperparameters=[["lr", {"$system": "true"}]]),
    "hyperparameter is a pickle": with_group(hyperparameters=[["lr", {"$pickle": "gASVAgAAAAAAAABLAS4="}]]),
    "hyperparameter of no bytes": with_group(hyperparameters=[["lr", {"$bytes": "%%%"}]]),
    "hyperparameter of no tensor": with_group(hyperparameters=[["lr", {"$tensor": 2**63}]]),
    "hyperparameter of no device": with_group(hyperparameters=[["lr", {"$device": "moon:0"}]]),
    "hyperparameter of no dtype": with_group(hyperparameters=[["lr", {"$dtype": "system"}]]),
    "hyperparameter of a large range": with_group(hyperparameters=[["lr", {"$tuple": {"$range": [0, 2**62, 1]}}]]),
    "hyperparameters 900 deep": with_group(hyperparameters=[["lr", nested(450)]]),
    "shape of a parameter": with_state(shape=[5, 7]),
    "shape of a parameter, huge": with_state(shape=[2**63, 2**63]),
    "shape of a parameter, words": with_state(shape="57"),
    "state of a tensor that is not there": with_state(values=[["exp_avg", "tensor", "state.nobody.exp_avg"]]),
    "state of another shape": with_state(values=[["exp_avg", "tensor", "state.stem.bias.exp_avg"]]),
    "state of no kind": with_state(values=[["exp_avg", "system", "true"]]),
    "state of numbers": with_state(values=[1, 2]),
    "state is a number": with_state(values=7),
    "scalar tensor with dimensions": with_state(values=[["step", "scalar tensor", "state.stem.bias.exp_avg"]]),
    "state that is a pickle": with_state(values=[["step", "opaque", {"$pickle": "gASVAgAAAAAAAABLAS4="}]]),
    "state that is a record": with_state(values=[["step", "opaque", {"$record": ["os.system", {"command": "true"}]}]]),
}
OF_ANOTHER_MODEL = ("files are empty", "params of a group are numbers", "params of a group are unknown")
OF_ANOTHER_MODEL += ("params of a group are lists", "state of no kind")
"""The damages that a load may refuse as the checkpoint of another model."""
MANIFESTS |= {
    f"size {size!r}": with_file(size=size) for size in (-1, 0, 1, 2**63, 2**64, 1e300, float("inf"), "100", None, [])
}
MANIFESTS["size of 5000 digits"] = with_file(size=10**5000)
MANIFESTS |= {f"header hash {value!r}": with_file(header_xxh3_64=value) for value in ("", 7, None, "0" * 16)}
MANIFESTS |= {f"sums hash {value!r}": with_file(sums_xxh3_64=value) for value in ("", 7, "0" * 16)}


def sys_digits(limit: int) -> int:
    """How many digits of an int Python reads and writes; the limit before."""
    was = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(limit)
    return was


READING = [(os, name) for name in ("pread", "preadv", "read", "readv", "open")]


class NthCalls:
    """A wrapper of several functions: the nth call, counted over all of them, first does something else."""

    def __init__(self, nth: int, instead: Callable[[], Any]) -> None:
        self.nth, self.count, self._instead = nth, 0, instead
        self._lock = threading.Lock()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.count += 1
                now = self.count == self.nth + 1
            if now:
                self._instead()
            return function(*args, **kwargs)

        return call

    @property
    def reached(self) -> bool:
        return self.count > self.nth


@contextlib.contextmanager
def nth_call(functions: Sequence[tuple[Any, str]], nth: int, instead: Callable[[], Any]) -> Iterator[NthCalls]:
    calls = NthCalls(nth, instead)
    with contextlib.ExitStack() as stack:
        for owner, name in functions:
            stack.enter_context(mock.patch.object(owner, name, calls.around(getattr(owner, name))))
        yield calls


def failing(number: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


WRITING = [(os, name) for name in ("pwrite", "pwritev", "write", "writev")]
MAKING = [
    (os, name) for name in ("open", "mkdir", "ftruncate", "posix_fallocate", "fsync", "fdatasync", "sync_file_range")
]
MAKING = [(owner, name) for owner, name in MAKING if hasattr(owner, name)]
MOVING = [(os, name) for name in ("rename", "replace", "link", "symlink", "unlink", "remove", "rmdir")]
