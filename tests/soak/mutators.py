"""Ways to change the files of a checkpoint: bytes, JSON, headers, whole files; and to make checksums agree with the change."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Mapping
from typing import Any

import xxhash
from kit.checkpoint_damage import HEADERS, LIES, MANIFESTS, brief_of, packed, sys_digits
from kit.checkpoint_format import MANIFEST, SUMS_MAGIC, make_sums

Files = dict[str, bytes | str | None]
"""The files of a checkpoint by name: the bytes; None for a missing file; "folder", "link" or "pipe" for one of these."""

Done = tuple[str, bool]
"""The change in words, and whether a checksum was made to agree with it."""

_DEEP, _TWICE = "@deep@", "@twice@"
_HUGE = (2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, 10**4299, 10**4300, 10**5000)
_TAGS = ("tuple", "set", "frozenset", "size", "float", "complex", "bytes", "bytearray", "range", "dtype", "device")
_TAGS += ("dict", "ordered", "counter", "tensor", "ndarray", "numpy", "record", "pickle", "nothing", "")
_WORDS = (
    "",
    "a",
    "\0",
    "\ud800",
    "ä",
    "..",
    "/",
    "../x",
    "a" * 5000,
    "nan",
    "F64",
    "F32",
    "BOOL",
    "I64",
    "tensor",
    "placed",
)
_WORDS += (
    "scalar",
    "scalar tensor",
    "opaque",
    "stem.weight",
    "state.stem.weight.exp_avg",
    "$tensor",
    "__metadata__",
    _DEEP,
)

# ------------------------------------------------------------------------------------------- bytes


def _span(rng: random.Random, data: bytes, most: int = 64) -> tuple[int, int]:
    begin = rng.randrange(len(data) + 1)
    return begin, min(len(data), begin + rng.randint(1, most))


def flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def overwrite(rng: random.Random, data: bytes) -> bytes:
    begin, end = _span(rng, data)
    fill = rng.choice((bytes(end - begin), b"\xff" * (end - begin), rng.randbytes(end - begin), b" " * (end - begin)))
    return data[:begin] + fill + data[end:]


def remove(rng: random.Random, data: bytes) -> bytes:
    begin, end = _span(rng, data)
    return data[:begin] + data[end:]


def insert(rng: random.Random, data: bytes) -> bytes:
    begin, _ = _span(rng, data)
    more = rng.choice((bytes, rng.randbytes, lambda n: b"[" * n, lambda n: b'{"a":' * n))(rng.choice((1, 8, 16, 3000)))
    return data[:begin] + more + data[begin:]


def repeat(rng: random.Random, data: bytes) -> bytes:
    begin, end = _span(rng, data)
    return data[:end] + data[begin:end] + data[end:]


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.choice((0, 1, 7, 8, 9, len(data) // 2, max(len(data) - 1, 0), rng.randrange(len(data) + 1)))]


def extend(rng: random.Random, data: bytes) -> bytes:
    return data + rng.choice((b"\0", bytes(8), rng.randbytes(16), bytes(4096), b"\n", data))


def move(rng: random.Random, data: bytes) -> bytes:
    """Exchange two ranges of bytes."""
    (a, b), (c, d) = sorted((_span(rng, data), _span(rng, data)))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:] if b <= c else data[::-1]


def a_number(rng: random.Random, data: bytes) -> bytes:
    """Replace eight bytes by a number at an edge, such as the largest ones."""
    place = rng.choice((0, 8, 16, 24, rng.randrange(max(len(data) // 8, 1)) * 8))
    number = rng.choice((0, 1, 7, 8, len(data), len(data) - 8, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 100_000_001))
    return data[:place] + struct.pack("<Q", max(number, 0)) + data[place + 8 :]


BYTES = (flip, flip, overwrite, remove, insert, repeat, cut, extend, move, a_number)

# ------------------------------------------------------------------------------------------- JSON


def _value(rng: random.Random, depth: int = 0) -> Any:
    """A random JSON value."""
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return rng.choice((*_HUGE, *(-n for n in _HUGE)))
    if kind == 1:
        return rng.choice((0, 1, -1, 2, 3, 4, 8, 7, 64, 16_777_215, 16_777_216))
    if kind == 2:
        return rng.choice((0.0, -0.0, 1.5, 1e308, float("inf"), float("-inf"), float("nan")))
    if kind == 3:
        return rng.choice((None, True, False))
    if kind in (4, 5):
        return rng.choice(_WORDS)
    if kind == 6:
        return [_value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 3)))]
    if kind == 7:
        return {rng.choice(_WORDS): _value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2)))}
    tagged = rng.choice((_value(rng, depth + 1), {"$range": [0, rng.choice((5, 1 << 20, 1 << 24, 1 << 62)), 1]}))
    return {"$" + rng.choice(_TAGS): tagged}


def places_in(
    value: Any, path: tuple[Any, ...] = (), alike: Callable[[Any], Any] | None = None
) -> list[tuple[Any, ...]]:
    """The places of all values in a JSON document: the keys that lead to each value, the whole document first.

    `alike`: a function of a value; of the values in one container with equal results, only the first is listed.
    """
    places = [path]
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    if alike is not None:
        items = list({repr(alike(item)): (key, item) for key, item in reversed(items)}.values())[::-1]
    for key, item in items:
        places += places_in(item, (*path, key), alike)
    return places


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def mutate_json(rng: random.Random, value: Any) -> Any:
    """A copy of a JSON document with one random change."""
    whole = [json.loads(json.dumps(value))]
    places = places_in(whole)[1:]
    path = rng.choice(places)
    parent, key, now = _at(whole, path[:-1]), path[-1], _at(whole, path)
    kind = rng.randrange(9)
    if kind == 0:
        del parent[key]
        return whole[0] if whole else None
    if kind == 1:
        parent[key] = json.loads(json.dumps(_at(whole, rng.choice(places))))  # a value from another place
    elif kind == 2:
        other = rng.choice(places)
        if other[: len(path)] != path and path[: len(other)] != other:
            parent[key], _at(whole, other[:-1])[other[-1]] = _at(whole, other), now
    elif kind == 3 and isinstance(parent, dict):
        parent[rng.choice([*parent, *_WORDS])] = parent.pop(key)
    elif kind == 4 and isinstance(parent, dict):
        parent[_TWICE + key] = rng.choice((now, _value(rng)))
    elif kind == 5 and type(now) in (int, float) and now == now and abs(now) < 1e300:
        parent[key] = rng.choice((now + 1, now - 1, -now, now * 2, now // 2, float(now), str(now), [now], bool(now)))
    elif kind == 6:
        parent[key] = rng.choice(([now], {"a": now}, {"$" + rng.choice(_TAGS): now}, [now, now], str(now)))
    elif kind == 7 and isinstance(now, list):
        now[:] = rng.choice((now[::-1], now + now, now[1:], [*now, _value(rng)], now * 20))
    else:
        parent[key] = _value(rng)
    return whole[0]


def text_of(rng: random.Random, value: Any, canonical: bool) -> bytes:
    """The text of a document from `mutate_json`, with doubled keys and deep nesting where the document asks for these."""
    limit = sys_digits(0)
    try:
        text = json.dumps(value, sort_keys=canonical, separators=(",", ":") if canonical else None, ensure_ascii=False)
    except (ValueError, RecursionError):  # a circle
        text = "[]"
    finally:
        sys_digits(limit)
    depth = rng.choice((100, 900, 2000, 100_000))
    text = text.replace(f'"{_DEEP}"', rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth)))
    return text.replace(f'"{_TWICE}', '"').encode(errors="surrogatepass")


# ------------------------------------------------------------------------------------------- files of a checkpoint


def split_header(data: bytes) -> tuple[bytes, bytes] | None:
    """The JSON header and the data of a safetensors file; None for other files."""
    if len(data) < 8:
        return None
    (length,) = struct.unpack("<Q", data[:8])
    return (data[8 : 8 + length], data[8 + length :]) if length <= len(data) - 8 else None


def _safetensors(files: Mapping[str, Any]) -> list[str]:
    return [name for name, data in files.items() if name.endswith(".safetensors") and isinstance(data, bytes)]


def in_bytes(rng: random.Random, files: Files) -> Done:
    name = rng.choice([name for name, data in files.items() if isinstance(data, bytes)])
    how = rng.choice(BYTES)
    files[name] = how(rng, files[name])  # type: ignore[arg-type]
    return f"{how.__name__} {name}", False


def in_data(rng: random.Random, files: Files) -> Done:
    """Change the data behind the header only."""
    name = rng.choice(_safetensors(files))
    parts = split_header(files[name])  # type: ignore[arg-type]
    if parts is None or not parts[1]:
        return in_bytes(rng, files)
    how = rng.choice(BYTES)
    files[name] = struct.pack("<Q", len(parts[0])) + parts[0] + how(rng, parts[1])
    return f"{how.__name__} the data of {name}", False


def in_json(rng: random.Random, files: Files) -> Done:
    """Change the manifest or an index."""
    name = rng.choice([MANIFEST, *(name for name in files if name.endswith(".json"))])
    value = _parsed(files[name])
    if value is None:
        return in_bytes(rng, files)
    inner = name == MANIFEST and isinstance(value, dict) and rng.random() < 0.9
    before = value["checkpoint"] if inner and "checkpoint" in value else value
    after = mutate_json(rng, before)
    lies = before is not value and rng.random() < 0.7
    if lies and rng.random() < 0.8:
        _repair_brief(after)
    text = text_of(rng, after, canonical=True)
    if before is not value:
        checksum = xxhash.xxh3_64_hexdigest(text) if lies else str(value.get("checksum"))
        text = b'{"checksum":"%s","checkpoint":%s}' % (checksum.encode(errors="replace"), text)
    files[name] = text
    return f"{'sealed ' if lies else ''}JSON of {name}", lies


def in_header(rng: random.Random, files: Files) -> Done:
    name = rng.choice(_safetensors(files))
    parts = split_header(files[name])  # type: ignore[arg-type]
    value = _parsed(parts[0]) if parts is not None else None
    if parts is None or not isinstance(value, dict):
        return in_bytes(rng, files)
    metadata = value.get("__metadata__")
    said = metadata.get("json") if isinstance(metadata, dict) else None
    inner = _parsed(said.encode(errors="surrogatepass")) if isinstance(said, str) else None
    if inner is not None and rng.random() < 0.7:
        metadata["json"] = text_of(rng, mutate_json(rng, inner), canonical=False).decode(errors="replace")
        text = text_of(rng, value, canonical=False)
    else:
        text = text_of(rng, mutate_json(rng, value), canonical=False)
    text += b" " * (-len(text) % 8)
    files[name] = struct.pack("<Q", len(text)) + text + parts[1]
    return f"header of {name}", False


def by_a_known_lie(rng: random.Random, files: Files) -> Done:
    """One of the changes that the tests of damage list in a table."""
    kind = rng.randrange(3)
    name = rng.choice([MANIFEST] if kind == 2 else _safetensors(files))
    parts = split_header(files[name]) if kind != 2 else None  # type: ignore[arg-type]
    try:
        if kind == 0 and parts is not None:
            value = json.loads(parts[0])
            victim = rng.choice([key for key in value if key != "__metadata__"])
            what, edit = rng.choice(list(LIES.items()))
            header = edit(value, victim)
            files[name] = packed(value if header is None else header) + parts[1]
        elif kind == 1 and parts is not None:
            what, change = rng.choice(list(HEADERS.items()))
            files[name] = change(struct.pack("<Q", len(parts[0])) + parts[0]) + parts[1]
        else:
            what, edit_manifest = rng.choice(list(MANIFESTS.items()))
            edited = edit_manifest(json.loads(files[MANIFEST])["checkpoint"])  # type: ignore[arg-type]
            _repair_brief(edited)
            files[MANIFEST] = sealed(edited)
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ):  # the value is absent, or was changed before
        return in_bytes(rng, files)
    return f"{what} in {name}", name == MANIFEST


def by_another_file(rng: random.Random, files: Files, donor: Mapping[str, bytes]) -> Done:
    """Replace a file, in part or whole, by another one of this checkpoint or by the file of this name of another save."""
    name = rng.choice(list(files))
    data = files[name]
    kind = rng.randrange(4)
    if kind == 0:
        other = rng.choice(list(files))
        files[name], files[other] = files[other], files[name]
        return f"{name} and {other} change places", False
    if kind == 1:
        files[name] = files[rng.choice(list(files))]
        return f"another file for {name}", False
    if kind == 2 or not isinstance(data, bytes) or len(data) < 2:
        names = [file_name for file_name in (name, f"{name}.sums") if file_name in donor]
        for file_name in names:
            files[file_name] = donor[file_name]
        return f"{names} of another save", False
    begin, end = _span(rng, data, len(data))
    files[name] = data[:begin] + donor.get(name, b"")[begin:end].ljust(end - begin, b"\0") + data[end:]
    return f"bytes [{begin}, {end}) of {name} of another save", False


def by_no_file(rng: random.Random, files: Files) -> Done:
    name = rng.choice(list(files))
    files[name] = rng.choice((None, None, "folder", "link", "pipe"))
    return f"{name} is {files[name] or 'missing'}", False


Mutator = Callable[[random.Random, Files], Done]
MUTATORS: tuple[tuple[int, Mutator], ...] = (
    (5, in_bytes),
    (2, in_data),
    (6, in_json),
    (6, in_header),
    (3, by_a_known_lie),
)
MUTATORS += ((1, by_no_file),)

# ------------------------------------------------------------------------------------------- checksums that agree


def _parsed(data: Any) -> Any:
    try:
        return json.loads(data) if isinstance(data, bytes) else None
    except (ValueError, RecursionError):
        return None


def sealed(checkpoint: Any) -> bytes:
    """Write a manifest with the right checksum."""
    limit = sys_digits(0)
    try:
        body = json.dumps(checkpoint, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    finally:
        sys_digits(limit)
    text = body.encode(errors="surrogatepass")
    return b'{"checksum":"%s","checkpoint":%s}\n' % (xxhash.xxh3_64_hexdigest(text).encode(), text)


def repair(files: Files, *, tables: bool = True) -> None:
    """Make all checksums agree with the files: those of extras, data and headers, and the manifest's own."""
    outer = _parsed(files.get(MANIFEST))
    checkpoint = outer.get("checkpoint") if isinstance(outer, dict) else None
    if not isinstance(checkpoint, dict):
        return
    named = checkpoint.get("files")
    for name, info in named.items() if isinstance(named, dict) else ():
        data = files.get(name)
        if not isinstance(data, bytes) or not isinstance(info, dict):
            continue
        if name.startswith("extra/"):
            data = files[name] = _repaired_extra(data)
        parts = split_header(data) if name.endswith(".safetensors") else None
        header = data[: len(data) - len(parts[1])] if parts is not None else data
        if "size" in info and type(info["size"]) is int:
            info["size"] = len(data)
        if "header_xxh3_64" in info:
            info["header_xxh3_64"] = xxhash.xxh3_64_hexdigest(header)
        table = files.get(f"{name}.sums")
        if isinstance(table, bytes) and parts is not None and info.get("sums_xxh3_64") is not None:
            if tables and table.startswith(SUMS_MAGIC):
                table = files[f"{name}.sums"] = make_sums(parts[1])
            info["sums_xxh3_64"] = xxhash.xxh3_64_hexdigest(table)
    _repair_brief(checkpoint)
    files[MANIFEST] = sealed(checkpoint)


def _repair_brief(checkpoint: Any) -> None:
    """Make the beginning of the manifest agree with the rest."""
    if isinstance(checkpoint, dict) and isinstance(checkpoint.get("brief"), dict):
        limit = sys_digits(0)
        try:
            checkpoint["brief"] = brief_of(checkpoint, checkpoint["brief"])
        except (ValueError, TypeError):  # surrogates, or values that cannot be sorted
            pass
        finally:
            sys_digits(limit)


def _repaired_extra(data: bytes) -> bytes:
    parts = split_header(data)
    value = _parsed(parts[0]) if parts is not None else None
    metadata = value.get("__metadata__") if isinstance(value, dict) else None
    if parts is None or not isinstance(metadata, dict) or not isinstance(metadata.get("json"), str):
        return data
    text = metadata["json"].encode(errors="surrogatepass")
    metadata["xxh3_64"] = xxhash.xxh3_64_hexdigest(text) + xxhash.xxh3_64_hexdigest(parts[1])
    limit = sys_digits(0)
    try:
        return packed(value) + parts[1]
    finally:
        sys_digits(limit)
