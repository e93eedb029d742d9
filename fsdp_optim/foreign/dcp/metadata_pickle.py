"""The pickle of a `.metadata` file, read without running anything in it.

`inert_pickle.py` reads other pickles. It would take minutes here, because a checkpoint of a thousand ranks has millions of
objects. So this file uses the unpickler of the standard library, with stand-ins for the few classes that torch writes, after
`pickle_operations.py` has checked the operations.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fsdp_optim.foreign.dcp.pickle_operations import Operations
from fsdp_optim.formats.base.distrust import as_checkpoint_error

_OF_TORCH = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed._shard.checkpoint.metadata",  # torch 1.13
)
_OF_WRITERS = (
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.checkpoint.filesystem",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "olmo_core.distributed.checkpoint.filesystem",
)
_SHARDED_TENSORS = "torch.distributed._shard.sharded_tensor.metadata"  # torch 2.0 to 2.2


_MOST_IN_TUPLE = 4096


class _PickledRecord:
    """An object of the pickle: its attributes, and no behaviour."""


class SavedMetadata(_PickledRecord):
    """The metadata of torch: all keys, what a planner adds, and the place of each chunk."""

    state_dict_metadata: Any = None
    planner_data: Any = None
    storage_data: Any = None


class SavedTensor(_PickledRecord):
    """A tensor: its dtype, shape and chunks."""

    properties: Any = None
    size: Any = None
    chunks: Any = None


class SavedChunk(_PickledRecord):
    """One chunk of a tensor: a box."""

    offsets: Any = None
    sizes: Any = None


class SavedBytes(_PickledRecord):
    """A value that is no tensor."""


class SavedProperties(_PickledRecord):
    """The properties of a tensor; the dtype is needed."""

    dtype: Any = None

    def __setstate__(self, state: Any) -> None:
        self.dtype = state.get("dtype") if isinstance(state, dict) else state[0]


class SavedIndex(_PickledRecord):
    """The key of one chunk in a dict: equal to itself only, so that a file has no say in comparisons."""

    fqn: Any = None
    offset: Any = None


class SavedPlace(_PickledRecord):
    """A range of a file: an archive of torch.save. `transforms`: as for `ItemPlace`."""

    file: Any = None
    start: Any = None
    nbytes: Any = None
    transforms: Any = None

    def __setstate__(self, state: Any) -> None:
        file, start, nbytes = state["relative_path"], state["offset"], state["length"]
        if type(file) is not str or type(start) is not int or type(nbytes) is not int or start < 0 or nbytes < 0:
            raise ValueError(f"{nbytes!r} bytes from {start!r} on in {file!r} are no part of a file")
        self.file, self.start, self.nbytes = file, start, nbytes
        self.transforms = tuple(state.get("transform_descriptors") or ())


class SavedStorageMeta(_PickledRecord):
    """What a writer says about the place of the checkpoint, which is not needed."""


class Unknown:
    """The stand-in for every other class: it takes all arguments, and does nothing."""

    what = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Ignore an item, where the class was a list."""

    def extend(self, items: Any) -> None:
        """Ignore items."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def add(self, item: Any) -> None:
        """Ignore an item, where the class was a set."""


_OF_METADATA: Mapping[str, type] = {
    "Metadata": SavedMetadata,
    "TensorStorageMetadata": SavedTensor,
    "BytesStorageMetadata": SavedBytes,
    "ChunkStorageMetadata": SavedChunk,
    "TensorProperties": SavedProperties,
    "MetadataIndex": SavedIndex,
    "StorageMeta": SavedStorageMeta,
}
WORDS = frozenset(
    {
        "torch.serialization._get_layout",
        *(f"{module}._MEM_FORMAT_ENCODING" for module in _OF_TORCH),
        f"{_SHARDED_TENSORS}.MEM_FORMAT_ENCODING",
        *(f"{module}.{kind}Path" for module in ("pathlib", "pathlib._local") for kind in ("", "Posix", "Windows")),
        *(f"{module}.Pure{kind}Path" for module in ("pathlib", "pathlib._local") for kind in ("", "Posix", "Windows")),
    }
)
"""Functions and classes whose results are not needed."""

CLASSES: Mapping[str, type] = {
    **{f"{module}.{name}": made for module in _OF_TORCH for name, made in _OF_METADATA.items()},
    **{f"{module}._StorageInfo": SavedPlace for module in _OF_WRITERS},
    f"{_SHARDED_TENSORS}.TensorProperties": SavedProperties,
}


class _Unpickler(pickle.Unpickler):
    """The reader of one pickle: it gives stand-ins, names of dtypes, and inert objects in the place of everything else.

    The classes are made anew for each pickle, because a pickle can set attributes of whatever it names. The unpickler of the
    standard library is used, because this file may have millions of objects.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(io.BufferedReader(file))  # in blocks: there are no frames
        self._made: dict[str, Any] = {"torch.Size": size_of, "collections.OrderedDict": dict}

    def persistent_load(self, made: Any) -> Any:
        """Look at each tuple when it is made, which `Operations` asks for: it is a path, a shape, or arguments."""
        if tuple not in map(type, made) and len(made) <= _MOST_IN_TUPLE:
            return made  # as nearly all are
        left, inside = _MOST_IN_TUPLE - len(made), [item for item in made if type(item) is tuple]
        while inside:
            nested = inside.pop()
            left -= len(nested)
            inside.extend(item for item in nested if type(item) is tuple)
            if left < 0:
                break
        if left < 0:
            raise ValueError(f"a tuple of more than {_MOST_IN_TUPLE} values, with those of the tuples inside")
        return made

    def find_class(self, module: str, name: str) -> Any:
        what = f"{module}.{name}"
        if module == "torch" and isinstance(dtype := torch.__dict__.get(name), torch.dtype):
            return dtype
        if what not in self._made:
            self._made[what] = self._stand_in(what)
        return self._made[what]

    def _stand_in(self, what: str) -> Any:
        if what in WORDS:
            return lambda *args: ""
        parent = CLASSES.get(what, Unknown)
        return type(parent.__name__, (parent,), {"what": what})


def load(where: str, pieces: Iterable[bytes]) -> Any:
    """Return the object in a pickle that comes in pieces: no further one is asked for when one shows that it is damaged.

    Raises CheckpointError, which names `where`, for a pickle that is cut short or damaged.
    """
    with as_checkpoint_error(where):
        file = io.BytesIO()
        for piece in Operations().checked(pieces):
            file.write(piece)
        file.seek(0)
        try:
            return _Unpickler(file).load()
        except (pickle.UnpicklingError, EOFError, ImportError) as error:
            raise ValueError(str(error)) from error


def size_of(items: Any = ()) -> tuple[int, ...]:
    """Return a torch.Size, which is made of numbers only."""
    made = tuple(items)
    if not all(type(item) is int for item in made):
        raise ValueError("a shape that has other values than numbers")
    return made


def is_size(value: Any) -> bool:
    """Return whether a value is a size: a tuple of numbers, none of them below zero."""
    return type(value) is tuple and all(type(length) is int and length >= 0 for length in value)


def in_words(value: Any) -> str:
    """Return an object of the pickle as a noun for error messages."""
    if isinstance(value, Unknown):
        return f"an object of the class {value.what}"
    if isinstance(value, type):
        return f"the class {getattr(value, 'what', value.__name__)}"
    return f"an object of the class {type(value).__name__}"
