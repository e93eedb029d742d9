"""Small values of a DCP checkpoint: flattened as torch.distributed.checkpoint flattens them, one torch.save archive for each.

A file of values has the archives one after the other, then an index as JSON, and the length of the index in 8 bytes. Readers of
DCP do not look at the index, because `.metadata` lists the items too.
"""

from __future__ import annotations

import io
import json
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.read_back import ALLOW, check_read_back
from fsdp_optim.formats.base.bools import check_bools_of
from fsdp_optim.formats.base.tree_values import InFile, leaves_of
from fsdp_optim.tensors.elements import check_elements, is_usual
from fsdp_optim.tensors.memory import dtype_name

Path: TypeAlias = "tuple[str | int, ...]"
"""The place of a value in nested dicts and lists."""

OF_TUPLE = ["()"]
"""What stands among the recorded keys for a list that is a tuple in truth: one with tensors, which are items of their own."""

MODEL, OPTIM = "model", "optimizer"
"""The keys of the dicts of the model and of the optimizer in what this library writes."""

OF_RANKS = "per_rank_extra"
"""The key of the trainer's values of each rank, which are under the numbers of the ranks."""

KEYS = "fsdp_optim_keys"
"""The key of the original keys of dicts that have other keys than str, which torch.distributed.checkpoint turns into str."""

VERSIONS = "versions"
"""The key, beside those of parts, of the versions of the code of the modules that have values, by path."""

CLASSES = "classes"
"""The key, beside those of parts, of the classes of dicts that are no plain ones, by part."""

_EMPTY = "empty"
"""The key, beside those of parts, of empty dicts, by their path as JSON.

torch.distributed.checkpoint has no keys for them. Under the key of its path, torch's load would take an empty dict for that of a
checkpoint of torch 2.3, and look for the keys of that version.
"""

_LENGTH = 8  # bytes


@dataclass(frozen=True, slots=True)
class PathGroup:
    """Paths of one value that differ in the last part only: `name`, and those of `others`."""

    prefix: Path
    name: str | int
    others: Sequence[str] = ()

    def __len__(self) -> int:
        return 1 + len(self.others)

    def __iter__(self) -> Iterator[Path]:
        return ((*self.prefix, name) for name in (self.name, *self.others))


def keys_in(group: PathGroup) -> list[str]:
    """Return the keys of all paths of a group, as `key_of` has them."""
    begin = key_of((*group.prefix, ""))
    return [f"{begin}{name}" for name in (group.name, *group.others)]


def key_of(path: Path) -> str:
    """Return the key under which torch.distributed.checkpoint saves the value at a path."""
    return ".".join(map(str, path))


def flattened(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the values inside dicts, and inside lists that have dicts or tensors, each with its path.

    So are tuples with tensors of trees. An empty dict is a value, which torch.distributed.checkpoint would leave out.
    """
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from flattened(item, (*path, str(name)))
    elif _is_opened(value):
        for index, item in enumerate(value):
            yield from flattened(item, (*path, index))
    else:
        yield path, value


def unasked_in(leaves: Collection[tuple[Path, Any]]) -> set[Path]:
    """Return the paths of the empty dicts for which no load of torch.distributed.checkpoint asks.

    It asks for an item of a list that has nothing to save if a later one has something. `leaves`: as `flattened` yields them.
    """
    empty = [path for path, item in leaves if isinstance(item, Mapping) and not item]
    if not empty:
        return set()
    last: dict[Path, int] = {}  # by list, the last item that has something to save
    for path, _ in (leaf for leaf in leaves if not isinstance(leaf[1], Mapping) or leaf[1]):
        for depth, part in enumerate(path):
            if isinstance(part, int):
                last[path[:depth]] = max(part, last.get(path[:depth], 0))
    return {path for path in empty if not (path and isinstance(path[-1], int) and path[-1] < last.get(path[:-1], 0))}


def apart(path: Path) -> PathGroup:
    """Return the path under which an empty dict is saved that torch.distributed.checkpoint would leave out."""
    return PathGroup((KEYS, _EMPTY), json.dumps(path))


def with_apart(where: str, paths: Mapping[str, Path]) -> Mapping[str, Path]:
    """Return the paths of keys, with those that empty dicts had before `apart`. Raises CheckpointError for others than of it."""
    begin = key_of((KEYS, _EMPTY, ""))
    length = len(begin)
    moved = {}
    for key in [key for key in paths if key[:length] == begin]:  # there may be very many
        try:
            path = json.loads(key.removeprefix(begin))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{where}: {key:.100}: is no path of an empty dict") from error
        if not isinstance(path, list) or not path or not all(type(part) in (str, int) for part in path):
            raise CheckpointError(f"{where}: {key:.100}: is no path of an empty dict")
        moved[key] = tuple(path)
    return {**paths, **moved} if moved else paths


def other_keys_in(where: str, value: Any, path: Path = ()) -> Iterator[tuple[Path, list[Any]]]:
    """Yield the path and the keys of each dict inside a value that has other keys than str.

    Raises CheckpointError if two keys of a dict become the same str.
    """
    if isinstance(value, Mapping) and value:
        if len({str(key) for key in value}) < len(value):
            twice = next(key for key in value if [str(other) for other in value].count(str(key)) > 1)
            raise CheckpointError(
                f"{where}{''.join(f'[{part!r}]' for part in path)}: two keys become {str(twice)!r} in a DCP checkpoint, whose "
                "keys are str: give one of them another name"
            )
        if type(value) is OrderedDict or not all(isinstance(key, str) for key in value):
            yield path, list(value)
        for key, item in value.items():
            yield from other_keys_in(where, item, (*path, str(key)))
    elif _is_opened(value):
        if isinstance(value, tuple):
            yield path, OF_TUPLE
        for index, item in enumerate(value):
            yield from other_keys_in(where, item, (*path, index))


def with_keys(where: str, value: Any, listed: Any) -> Any:
    """Return a value with the original keys of its dicts. `listed`: pairs as `other_keys_in` gives them.

    Raises CheckpointError if they do not fit the value.
    """
    return with_recorded(where, value, keys_by_path(where, listed), ())


def keys_by_path(where: str, listed: Any) -> dict[Path, list[Any]]:
    """Return recorded keys by the path of their dict. Raises CheckpointError for other than `other_keys_in` gives."""
    by_path: dict[Path, list[Any]] = {}
    for pair in listed if isinstance(listed, list) else [None]:
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], tuple) and isinstance(pair[1], list)
        ):
            raise CheckpointError(f"{where}: {KEYS}: is not a list of keys by path")
        by_path[pair[0]] = pair[1]
    return by_path


def with_recorded(where: str, value: Any, by_path: Mapping[Path, list[Any]], path: Path) -> Any:
    """Return a value with its recorded keys. `path`: its own place among those of `by_path`."""
    if isinstance(value, dict):
        made = {key: with_recorded(where, item, by_path, (*path, key)) for key, item in value.items()}
        if path not in by_path:
            return made
        keys = by_path[path]
        if sorted(map(str, keys)) != sorted(made):
            raise CheckpointError(f"{where}: {KEYS}: has other keys than {'.'.join(map(str, path))}")
        return {key: made[str(key)] for key in keys}
    if isinstance(value, list):
        items = [with_recorded(where, item, by_path, (*path, index)) for index, item in enumerate(value)]
        return tuple(items) if by_path.get(path) == OF_TUPLE else items
    return value


DictClass: TypeAlias = "tuple[Path, str, type]"
"""The path of a dict, the recorded name of its class, and the class."""


def classes_in(value: Any, path: Path = ()) -> Iterator[DictClass]:
    """Yield the path, recorded name and class of each dict inside a value that is no plain dict.

    The name is "" for a class that is not recorded: such a dict comes back as a plain one.
    """
    if isinstance(value, Mapping):
        if type(value) is not dict and value:  # an empty one is a value of its own, with its class
            yield path, _named(value), type(value)
        for key, item in value.items():
            yield from classes_in(item, (*path, str(key)))
    elif _is_opened(value):
        for index, item in enumerate(value):
            yield from classes_in(item, (*path, index))


def _named(value: Mapping[Any, Any]) -> str:
    if type(value) is Counter and _has_tensors(value):
        return ""  # in a tree whose tensors are in files, a Counter is one value
    return type(value).__name__ if type(value) in (OrderedDict, Counter) else ""


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    return isinstance(value, (InFile, torch.Tensor))


def classes_by_path(where: str, recorded: Any) -> dict[Path, str]:
    """Return recorded classes by the path of their dict. Raises CheckpointError for others than pairs of path and name."""
    if not isinstance(recorded, list) or not all(map(_is_pair, recorded)):
        raise CheckpointError(f"{where}: {KEYS}: {CLASSES} is not a list of names by path")
    return dict(recorded)


def _is_pair(pair: Any) -> bool:
    return (
        isinstance(pair, tuple)
        and len(pair) == 2
        and isinstance(pair[0], tuple)
        and all(type(part) in (str, int) for part in pair[0])
        and isinstance(pair[1], str)
    )


def with_classes(where: str, value: Any, names: Mapping[Path, str], path: Path) -> Any:
    """Return a value whose dicts have their recorded classes again. `path`: its own place among those of `names`."""
    if type(value) is dict:
        made = {key: with_classes(where, item, names, (*path, str(key))) for key, item in value.items()}
        return _of_class(where, made, names[path]) if path in names else made
    if type(value) in (list, tuple):
        return type(value)([with_classes(where, item, names, (*path, index)) for index, item in enumerate(value)])
    return value


def _of_class(where: str, value: dict[Any, Any], name: str) -> Any:
    if name not in (OrderedDict.__name__, Counter.__name__):
        raise CheckpointError(f"{where}: has a dict of the class {name!r:.80}, which a newer version may know")
    return OrderedDict(value) if name == OrderedDict.__name__ else Counter(value)


def _is_opened(value: Any) -> bool:
    """Return whether the items of a list or tuple have paths of their own."""
    if isinstance(value, tuple):
        return any(isinstance(leaf, InFile) for _, leaf in leaves_of(value))
    return isinstance(value, list) and not _is_leaf(value)


def _is_leaf(value: Any) -> bool:
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list):
        return not _is_opened(value)
    return all(_is_leaf(item) and not isinstance(item, (torch.Tensor, InFile)) for item in value)


@dataclass(frozen=True)
class ValueItem:
    """One value of a file of values, under one or more paths.

    `tensor`: torch's name of the dtype, and the shape; None for a value that is no tensor.
    """

    paths: PathGroup
    start: int
    nbytes: int
    tensor: tuple[str, tuple[int, ...]] | None = None

    def to_json(self) -> list[Any]:
        """Return the item as JSON values."""
        tensor = self.tensor and [self.tensor[0], list(self.tensor[1])]
        return [list(self.paths.prefix), self.paths.name, list(self.paths.others), self.start, self.nbytes, tensor]

    @classmethod
    def from_json(cls, values: Any) -> ValueItem:
        """The inverse of `to_json`."""
        prefix, name, others, start, nbytes, tensor = values
        kind = (tensor[0], tuple(tensor[1])) if tensor is not None else None
        return cls(PathGroup(tuple(prefix), name, tuple(others)), start, nbytes, kind)


@dataclass
class ValueFile:
    """Values on their way into a file. Equal values are stored once.

    `allow_pickle`: store objects of any class. `instead`: what else the user can do with those.
    """

    allow_pickle: bool
    instead: str = ALLOW
    items: list[ValueItem] = field(default_factory=list)
    _data: bytearray = field(default_factory=bytearray)
    _known: dict[Any, tuple[int, int]] = field(default_factory=dict)

    def add(self, where: str, value: Any, *groups: PathGroup, are_names: bool = False) -> None:
        """Store a value under the paths of several groups. `are_names`: it is a list of str, which every load reads.

        Raises CheckpointError that names a value which cannot be stored.
        """
        if isinstance(value, torch.Tensor):
            value = _own(where, value)
        tensor = (dtype_name(value.dtype), tuple(value.shape)) if isinstance(value, torch.Tensor) else None
        known = _identity(value) if tensor is None else None
        at = self._known.get(known) if known is not None else None
        if at is None:
            archive = _archive(where, value)
            at = self._known.get(archive)
            if at is None:
                if not are_names and not is_usual(value):
                    allows = self.allow_pickle and tensor is None  # a tensor is read in place
                    what = type(value).__name__
                    check_read_back(where, what, archive, allow_pickle=allows, instead=self.instead)
                at = self._known[archive] = (len(self._data), len(archive))
                self._data += archive
            if known is not None:
                self._known[known] = at
        self.items += [ValueItem(group, *at, tensor) for group in groups]

    def encoded(self) -> bytes:
        """Return the bytes of the file."""
        index = json.dumps([item.to_json() for item in self.items], separators=(",", ":")).encode()
        return bytes(self._data) + index + len(index).to_bytes(_LENGTH, "little")


def _identity(value: Any) -> Any:
    """Return a key that equal values have alone, without their archive; None where there is none."""
    if type(value) is int or type(value) is str:
        return type(value), value
    return (type(value), repr(value)) if isinstance(value, (float, bool, type(None))) else None


def _own(where: str, value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the CPU. Raises CheckpointError for one whose elements cannot be copied."""
    check_elements(where, value, CheckpointError)
    if value.layout is not torch.strided:
        raise CheckpointError(
            f"{where}: is a sparse tensor ({value.layout}): give its to_dense(), or its indices and values"
        )
    if value.is_quantized:
        raise CheckpointError(
            f"{where}: is a quantised tensor ({value.dtype}), which no load reads: give its dequantize()"
        )
    if value.dtype is torch.bool:
        check_bools_of(where, value)
    return value.detach().to("cpu").resolve_conj().resolve_neg().contiguous().clone()


def items_in(data: bytes) -> list[Any]:
    """Return the items of a file of values, as JSON values."""
    length = int.from_bytes(data[-_LENGTH:], "little")
    items: list[Any] = json.loads(data[-_LENGTH - length : -_LENGTH])
    return items


def _archive(where: str, value: Any) -> bytes:
    """Return the value as an archive of torch.save. Raises CheckpointError for objects that pickle refuses."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # of any class, where the object has its own way to be pickled
        raise CheckpointError(f"{where}: a {type(value).__name__} cannot be saved: {error}") from error
    return buffer.getvalue()
