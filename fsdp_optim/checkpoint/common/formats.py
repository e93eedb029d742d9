"""The formats that can be read: built-in formats are asked first whether they recognise a checkpoint, then installed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points

from fsdp_optim.errors import CheckpointError, ReplacedError
from fsdp_optim.foreign.dcp.format import DCP_FOLDER, TORCHTITAN_FOLDER
from fsdp_optim.foreign.dcp.reader import DCP
from fsdp_optim.foreign.deepspeed.reader import DEEPSPEED
from fsdp_optim.foreign.hugging_face.reader import HUGGING_FACE
from fsdp_optim.foreign.per_rank.fairscale_shards import FAIRSCALE_SHARDS
from fsdp_optim.foreign.per_rank.fairscale_units import Units
from fsdp_optim.foreign.per_rank.fairscale_writer import WrittenFairscaleShards
from fsdp_optim.foreign.per_rank.olmo_local import OLMO_LOCAL
from fsdp_optim.foreign.per_rank.rank_tensors import RANK_TENSORS
from fsdp_optim.foreign.torch.reader import TORCH_FILE
from fsdp_optim.foreign.torch.writer import WrittenTorchFiles
from fsdp_optim.formats.base.protocols import Format, Reader, replaced_error
from fsdp_optim.formats.own.format import OURS, OwnFormat
from fsdp_optim.options import KeyBy
from fsdp_optim.storage.base import Opened, Store, is_sure_that_not

GROUP = "fsdp_optim.formats"
"""The group of entry points by which other packages add formats. Each names an object that is a `Format`."""

FORMATS: tuple[Format, ...] = (OURS,)

SAVED: tuple[Format, ...] = (OURS, DCP_FOLDER)
"""The formats that `save` writes, one for each manifest. Their checkpoints in one folder are numbered together."""

FOREIGN: tuple[Format, ...] = (DCP, DEEPSPEED, FAIRSCALE_SHARDS, OLMO_LOCAL, RANK_TENSORS, TORCH_FILE, HUGGING_FACE)
"""The formats of other libraries, in the order in which they are asked whether they recognise the files of a place.

TORCH_FILE recognises any file of torch.save, so formats of which such files are a part come before it.
"""


@dataclass(frozen=True)
class FormatChoices:
    """The choices of a caller about the format that is written.

    Attributes:
        world_size: the number of ranks whose shards are written; None for a format with one copy of each tensor.
        key_by: whether parameters of the optimizer are called by "id" or by "name"; None: as the format does it by itself.
        weights_name, beside: as for `OwnFormat`, for that format.
        units, flattens: how parameters are flattened, for a format with flat parameters; None: as the source says.
    """

    world_size: int | None = None
    key_by: KeyBy | None = None
    weights_name: str = OURS.weights_name
    beside: tuple[tuple[str, bytes], ...] = ()
    units: Units | None = None
    flattens: bool | None = None


def _shards(wanted: FormatChoices) -> Format:
    if wanted.world_size is None:
        raise CheckpointError(
            'the format "fairscale_shards" has a file for each rank: give world_size=, the number of ranks that will load it'
        )
    if wanted.key_by is not None:
        raise CheckpointError("fairscale's shards call parameters by id: leave key_by out")
    return WrittenFairscaleShards(wanted.world_size, wanted.units, wanted.flattens)


def _ours(wanted: FormatChoices) -> Format:
    if wanted.world_size is not None:
        raise CheckpointError(
            'world_size is for formats with a part for each rank: the format "safetensors" has one copy of each tensor, which '
            "loads at any world size"
        )
    if wanted.key_by == "id":
        raise CheckpointError('a checkpoint of the format "safetensors" calls parameters by name: leave key_by out')
    return OwnFormat(wanted.weights_name, wanted.beside)


def _dcp(wanted: FormatChoices, format: Format) -> Format:
    if wanted.world_size is not None:
        raise CheckpointError(
            f'world_size is for formats with a part for each rank: the format "{format.name}" has one copy of each tensor, which '
            "loads at any world size"
        )
    if wanted.key_by == "id":
        raise CheckpointError(f'a checkpoint of the format "{format.name}" calls parameters by name: leave key_by out')
    return format


def _torch(wanted: FormatChoices, is_fairscales: bool = False, in_one: bool = False) -> Format:
    made = WrittenTorchFiles(by_id=wanted.key_by != "name", is_fairscales=is_fairscales, in_one=in_one)
    if wanted.world_size is not None:
        raise CheckpointError(
            f'world_size is for formats with a part for each rank: the format "{made.name}" has full dicts'
        )
    if is_fairscales and not made.by_id:
        raise CheckpointError("fairscale's full dict calls parameters by id: leave key_by out")
    return made


WRITTEN: Mapping[str, Callable[[FormatChoices], Format]] = {
    "safetensors": _ours,
    "dcp": partial(_dcp, format=DCP_FOLDER),
    "torchtitan": partial(_dcp, format=TORCHTITAN_FOLDER),
    "torch": _torch,
    "torch_file": partial(_torch, in_one=True),
    "fairscale": partial(_torch, is_fairscales=True),
    "fairscale_shards": _shards,
}
"""The formats that can be written, by the names that callers give."""


def format_named(name: str, wanted: FormatChoices = FormatChoices()) -> Format:
    """The format that a caller has named. Raises CheckpointError for an unknown name, and for choices it does not have."""
    if not isinstance(name, str) or name not in WRITTEN:
        raise CheckpointError(f"format must be one of {', '.join(map(repr, WRITTEN))}, not {name!r}")
    if wanted.units is not None and WRITTEN[name] is not _shards:
        raise CheckpointError(f'units= is for formats with flat parameters ("fairscale_shards"), not for {name!r}')
    if wanted.flattens is not None and WRITTEN[name] is not _shards:
        raise CheckpointError(f'flatten_parameters= is for fairscale\'s shards ("fairscale_shards"), not for {name!r}')
    return WRITTEN[name](wanted)


_LOOKS = 5  # times, for a place where another checkpoint replaces the one that is being opened


def format_of(opened: Opened) -> Format | None:
    """The format that recognises an open checkpoint; None if no format does."""
    is_any = opened.is_any
    for built_in in FOREIGN if is_any else FORMATS:
        if built_in.recognises(opened):
            return built_in
    return next((one for one in _installed() if one.is_foreign == is_any and one.recognises(opened)), None)


def _installed() -> Iterator[Format]:
    """The formats of other packages, each loaded when the iteration reaches it."""
    for point in entry_points(group=GROUP):
        try:
            installed: Format = point.load()
        except Exception as error:
            raise CheckpointError(
                f"the format {point.name} of {point.value} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        yield installed


def open_checkpoint(store: Store, *, verify: bool, format: Format | None = None) -> Reader:
    """Open the checkpoint in a store, and try again if another save replaces it meanwhile. `format` None: it is recognised.

    Raises CheckpointError that names the damaged file.
    """
    for attempt in range(1, _LOOKS + 1):
        opened, found = _opened(store, format)
        try:
            return found.open(opened, verify=verify)
        except BaseException as error:
            try:
                was_replaced = isinstance(error, CheckpointError) and _is_replaced(opened)
            finally:
                opened.close()
            if not was_replaced:
                raise
            if attempt == _LOOKS:
                raise replaced_error(opened.where) from error
    raise ReplacedError(f"{store.where}: unreachable")


def _is_replaced(opened: Opened) -> bool:
    """Whether another checkpoint has taken the place; False where the store cannot tell, so that its first error is raised."""
    try:
        return opened.was_replaced()
    except OSError:
        return False


def _opened(store: Store, format: Format | None) -> tuple[Opened, Format]:
    """The files of a store, and their format. If no format recognises them, this library's own names the missing files."""
    if format is not None:
        return (store.open_any() if format.is_foreign else store.open()), format
    try:
        opened = store.open()
    except CheckpointError as error:  # there may be a file, or objects of another library
        foreign = _foreign(store) if is_sure_that_not(error) else None
        if foreign is None:
            raise
        return foreign
    try:
        found = format_of(opened)
        foreign = _foreign(store) if found is None else None
    except BaseException:
        opened.close()
        raise
    if foreign is None:
        return opened, found or OURS
    try:
        opened.close()
    except BaseException:
        foreign[0].close()
        raise
    return foreign


def _foreign(store: Store) -> tuple[Opened, Format] | None:
    """The files of another library's checkpoint, and their format; None if no format recognises them."""
    try:
        opened = store.open_any()
    except CheckpointError as error:
        if is_sure_that_not(error):
            return None
        raise
    try:
        found = format_of(opened)
    except BaseException:
        opened.close()
        raise
    if found is None:
        opened.close()
        return None
    return opened, found
