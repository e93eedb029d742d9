"""Writing folders of torch.distributed.checkpoint (DCP), which stock torch loads without this library.

Keys are those of `{"model": ..., "optimizer": ...}` with the dicts of `get_model_state_dict` and `get_optimizer_state_dict`. The
hyperparameters are there nested and flattened, so both forms of the optimizer's dict find theirs; both name the same bytes.

Each tensor is cut into chunks of whole rows. Each chunk is an archive of torch.save: its elements lie in the file as in any other
format, and the rest of the archive is frames, which are the same for all chunks of one dtype and shape.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar, TypeAlias

from fsdp_optim.errors import CheckpointError, shortened
from fsdp_optim.foreign.archive.torch_zip import ALIGNMENT, TensorStub, frames_around
from fsdp_optim.foreign.dcp.boxes import chunks_of
from fsdp_optim.foreign.dcp.probe import NAME, VERSION, with_summary
from fsdp_optim.foreign.dcp.values import (
    CLASSES,
    KEYS,
    MODEL,
    OF_RANKS,
    OPTIM,
    VERSIONS,
    DictClass,
    Path,
    ValueFile,
    ValueItem,
    classes_in,
    flattened,
    items_in,
    other_keys_in,
)
from fsdp_optim.foreign.dcp.written_metadata import Chunk, WrittenItem, check_keys, names_beside_weights
from fsdp_optim.formats.base.checksums import join_tables
from fsdp_optim.formats.base.description import OPAQUE, SCALAR, OptimDescription
from fsdp_optim.formats.base.frames import joined
from fsdp_optim.formats.base.index import CheckpointIndex
from fsdp_optim.formats.base.protocols import (
    COMMON,
    MODULES,
    CheckpointContents,
    Half,
    PlannedFile,
    PlannedTensor,
    Prepared,
    Stamp,
    Writer,
    WrittenFiles,
)
from fsdp_optim.formats.base.records import TensorNames
from fsdp_optim.formats.base.saved_optim import contents_of, extras_in
from fsdp_optim.formats.base.summary import ManifestSummary, SavedRoles
from fsdp_optim.formats.base.tree_values import InFile
from fsdp_optim.layout import Shape
from fsdp_optim.tensors.elements import check_elements
from fsdp_optim.tensors.memory import dtype_named
from fsdp_optim.tensors.model_dict import versions_of

log = logging.getLogger("fsdp_optim")

_STATE, _GROUPS = "state", "param_groups"


@dataclass
class DcpWriter(Writer):
    """The `Writer` of DCP folders. `is_flat`: weights are at the top level, as torchtitan has them, not under "model"."""

    is_flat: bool = False

    writes_trees: ClassVar[bool] = True

    _paths: Mapping[str, Path] = field(default_factory=dict)  # of the tensors of trees, by key
    _roles: SavedRoles | None = None
    _chunks: dict[str, list[Chunk]] = field(default_factory=dict)

    @property
    def _root(self) -> Path:
        """The path of the model's dict."""
        return () if self.is_flat else (MODEL,)

    def prepare(self, index: CheckpointIndex, *, allow_pickle: bool, records: Mapping[str, type]) -> Prepared:
        contents = contents_of(index, allow_pickle=allow_pickle, records=records)
        extras = dict(extras_in(index, allow_pickle=allow_pickle, as_trees=True))
        common = extras.get(COMMON, {})
        top_names = [*map(str, common)] if isinstance(common, Mapping) else ["extra"]
        weights = {*index.weights, *contents.aliases, *extras.get(MODULES, {})}
        for name in sorted({*top_names} & {*self._taken(contents, weights), OF_RANKS, KEYS}):
            raise CheckpointError(
                f"state[{name!r}]: a DCP checkpoint has its own values under this key: give the value another key"
            )
        self._paths = _paths_of_trees(common)
        self._roles = self._roles_of(contents, weights, top_names, is_new=index.source is None)
        files = dict(self.small(name, value, allow_pickle=allow_pickle) for name, value in extras.items())
        small = [item for data in files.values() for item in items_in(data)]
        values = ValueFile(allow_pickle)
        if contents.optim is not None:
            _add_optimizer(values, contents.optim, tuple(records.values()))
        if values.items:
            files["values.distcp"] = values.encoded()
        check_keys(
            [
                *((*self._root, fqn) for fqn in (*index.weights, *contents.aliases)),
                *_paths_of(contents.optim).values(),
                *self._paths.values(),
                *(item.path for item in values.items),
                *(ValueItem.from_json(item).path for item in small),
            ]
        )
        return Prepared(contents.content, "", files, contents.optim, contents)

    def _taken(self, contents: CheckpointContents, weights: Collection[str]) -> set[str]:
        """Return the keys of the top level that the model and the optimizer have."""
        names = {*contents.params, *weights}
        of_model = {name.partition(".")[0] for name in names} | names if self.is_flat else {MODEL} if names else set()
        return of_model | ({OPTIM} if contents.optim is not None else set())

    def _roles_of(
        self, contents: CheckpointContents, weights: Collection[str], top_names: Sequence[str], *, is_new: bool
    ) -> SavedRoles | None:
        """Return the record of the roles; None for a tree of values by itself (`dcp.save`): whoever loads one knows its parts."""
        if is_new and not contents.params and not weights and contents.optim is None:
            return None
        return SavedRoles(
            ([] if self.is_flat else [MODEL]) if weights else None,
            [OPTIM] if contents.optim is not None else None,
            names_beside_weights(top_names) if weights and self.is_flat else [],
        )

    def files(
        self, tensors: Mapping[Half, Sequence[PlannedTensor]], shared: str, *, most_nbytes: int, num_ranks: int
    ) -> list[PlannedFile]:
        return [
            file for half, planned in tensors.items() for file in self._of_half(half, planned, most_nbytes, num_ranks)
        ]

    def _of_half(
        self, half: Half, tensors: Sequence[PlannedTensor], most_nbytes: int, num_ranks: int
    ) -> list[PlannedFile]:
        """Plan files of chunks."""
        plans = list(_plans(most_nbytes, tensors, num_ranks))
        names = [f"{half}-{number + 1:05}-of-{len(plans):05}.distcp" for number in range(len(plans))]
        if len(plans) == 1:
            names = [f"{half}.distcp"]
        return [self._planned(name, half, plan) for name, plan in zip(names, plans, strict=True)]

    def _planned(self, name: str, half: Half, plan: _FilePlan) -> PlannedFile:
        head, between = joined(plan.frames)
        self._chunks[name] = plan.chunks
        starts = tuple(plan.starts)
        return PlannedFile(
            name=name,
            half=half,
            head=head,
            tensors=tuple(plan.tensors),
            starts=starts,
            nbytes_of_data=plan.num_data,
            segment_nbytes=0,
            tensors_in=TensorNames(starts, tuple([tensor.key for tensor in plan.tensors])),
            between=between,
        )

    def small(self, name: str, value: Any, *, allow_pickle: bool) -> tuple[str, bytes]:
        values = ValueFile(allow_pickle)
        if name == MODULES:
            kept_by_name = {fqn: kept for fqn, (_, kept) in value.items()}
            for fqn, kept in kept_by_name.items():
                _add_value(values, f"state_dict()[{fqn!r}]", kept, (*self._root, fqn))
            _add_keys(values, "state_dict()", kept_by_name, name)
            versions = versions_of(value)
            if versions:
                values.add("the versions of modules", versions, (KEYS, VERSIONS))
            return "modules.distcp", values.encoded()
        if name == COMMON:
            given = value if isinstance(value, Mapping) else {"extra": value}
            for key, item in given.items():
                _add_value(values, f"state[{key!r}]", item, (str(key),))
            _add_keys(values, "state", given, name)
            return "extra.distcp", values.encoded()
        _add_value(values, "state", value, (OF_RANKS, str(int(name.removeprefix("rank-")))))
        _add_keys(values, "state", value, name)
        check_keys(item.path for item in values.items)
        return f"{name}.distcp", values.encoded()

    def info_of(self, data: bytes) -> Any:
        return {"nbytes": len(data), "items": items_in(data)}

    def last(
        self, prepared: Prepared, files: Sequence[PlannedFile], written: WrittenFiles, stamp: Stamp
    ) -> Iterator[tuple[str, bytes]]:
        contents: CheckpointContents = prepared.document
        listed = WrittenItem(stamp.folder)
        paths = _paths_of(contents.optim)
        others: dict[str, list[str]] = {}
        for other, stored in contents.aliases.items():
            others.setdefault(stored, []).append(other)
        for file in files:
            join_tables(file.name, written.rows[file.name], file.nbytes_of_data)  # raises where a byte was not written
            tensors = {tensor.key: tensor for tensor in file.tensors}
            for chunk in self._chunks[file.name]:
                tensor = tensors[chunk.key]
                if file.half != "model":
                    path = paths[chunk.key] if file.half == "optim" else self._paths[chunk.key]
                    listed.add_chunk(path, tensor, chunk, file.name)
                    continue
                for fqn in (chunk.key, *others.get(chunk.key, ())):
                    listed.add_chunk((*self._root, fqn), tensor, chunk, file.name)
        for name, info in written.extras.items():
            for item in map(ValueItem.from_json, info["items"]):
                listed.add_value(item, name)
        sizes = {file.name: file.nbytes for file in files} | {name: i["nbytes"] for name, i in written.extras.items()}
        summary = ManifestSummary(
            version=VERSION,
            sequence=stamp.sequence,
            step=stamp.step,
            keep_last=None,
            manager=stamp.manager,
            created_ns=time.time_ns(),
            token=stamp.token,
            content=prepared.content,
            world_size=contents.world_size,
            files=sizes,
            weights=contents.weights,
            weights_dtype=contents.weights_dtype,
            roles=self._roles,
        )
        yield NAME, with_summary(summary, pickle.dumps(listed.metadata(stamp.token)))


# ------------------------------------------------------------------------------------------- tensors


@dataclass
class _FilePlan:
    """The tensors of a file and their chunks, in the order of their bytes.

    Attributes:
        num_data, place: the bytes of the data and of the file up to here.
        starts: the byte of the data at which each tensor begins.
    """

    num_data: int = 0
    place: int = 0
    tensors: list[PlannedTensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    frames: list[tuple[int, bytes]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def add(self, tensor: PlannedTensor, chunks: _ChunkKinds) -> None:
        self.tensors.append(tensor)
        self.starts.append(self.num_data)
        for offsets, sizes, nbytes_of_data, before, after in chunks:
            gap = bytes(-self.place % ALIGNMENT)
            self.frames += [(self.num_data, gap + before), (self.num_data + nbytes_of_data, after)]
            nbytes = len(before) + nbytes_of_data + len(after)
            self.chunks.append(Chunk(tensor.key, offsets, sizes, self.place + len(gap), nbytes))
            self.place += len(gap) + nbytes
            self.num_data += nbytes_of_data

    def place_after(self, chunks: _ChunkKinds) -> int:
        """Return the bytes of the file with the chunks of one more tensor, as `add` counts them."""
        place = self.place
        for *_, nbytes_of_data, before, after in chunks:
            place += -place % ALIGNMENT + len(before) + nbytes_of_data + len(after)
        return place


_ChunkKinds: TypeAlias = Sequence[tuple[Shape, Shape, int, bytes, bytes]]
"""Of the chunks of a tensor: offsets, sizes, bytes of data, and the bytes of the file before and after these."""


def _kinds_of(dtype: str, shape: Shape, num_ranks: int) -> _ChunkKinds:
    chunks = []
    for offsets, sizes in chunks_of(shape, dtype_named(dtype).itemsize, num_ranks):
        stub = TensorStub(dtype, sizes, 0)
        before, after = frames_around(stub, [stub])
        chunks.append((offsets, sizes, stub.nbytes, before, after))
    return chunks


def _plans(most_nbytes: int, tensors: Sequence[PlannedTensor], num_ranks: int) -> Iterator[_FilePlan]:
    """Yield the plan of each file, in order: at most `most_nbytes` with the frames between the data, or one larger tensor."""
    plan, kinds_of = _FilePlan(), cache(partial(_kinds_of, num_ranks=num_ranks))
    for tensor in tensors:
        chunks = kinds_of(tensor.dtype, tensor.shape)
        if plan.tensors and plan.place_after(chunks) > most_nbytes:
            yield plan
            plan = _FilePlan()
        plan.add(tensor, chunks)
    yield plan


# ------------------------------------------------------------------------------------------- values


def _add_value(values: ValueFile, where: str, value: Any, *paths: Path) -> None:
    """Add the items of a value, each under all of the paths."""
    check_elements(where, value, CheckpointError)
    for inner, item in flattened(value, ()):
        if isinstance(item, InFile):  # written with the others of its half
            continue
        name = where + "".join(f"[{part!r}]" for part in inner)
        values.add(name, item, *((*path, *inner) for path in paths))


def _paths_of_trees(common: Any) -> dict[str, Path]:
    """Return the path of each tensor of a tree, by its key."""
    return {item.key: path for path, item in flattened(common, ()) if isinstance(item, InFile)}


def _add_keys(values: ValueFile, where: str, value: Any, name: str) -> None:
    """Add the keys of the dicts inside a value that are not str, and the classes of those that are no plain dicts.

    `name`: the name of the extra.
    """
    listed = list(other_keys_in(where, value))
    if listed:
        values.add(where, listed, (KEYS, name))
    _add_classes(values, where, list(classes_in(value)), name)


def _add_classes(values: ValueFile, where: str, classes: Sequence[DictClass], name: str) -> None:
    """Add the classes of dicts, and warn of those that are lost. `name`: as for `_add_keys`."""
    recorded = [(path, kind) for path, kind, _ in classes if kind]
    if recorded:
        values.add(where, recorded, (KEYS, CLASSES, name))
    lost = [
        f"{where}{''.join(f'[{part!r}]' for part in path)} ({cls.__name__})" for path, kind, cls in classes if not kind
    ]
    if lost:
        log.warning("a DCP folder has no place for these classes; they come back as plain dicts: %s", shortened(lost))


def _add_optimizer(values: ValueFile, optim: OptimDescription, records: tuple[type, ...]) -> None:
    """Add everything that an optimizer's dict has besides tensors in files."""
    for index, group in enumerate(optim.groups):
        where = f"param group {index}"
        for name, value in group.hyperparameters:
            # A parameter that is called as its group is numbered has the same value under the same key already.
            in_flattened = ((OPTIM, f"{_GROUPS}.{fqn}.{name}") for fqn in group.params if fqn != str(index))
            _add_value(values, f"{where}: {name}", value, (OPTIM, _GROUPS, index, str(name)), *in_flattened)
        values.add(where, list(group.params), (OPTIM, _GROUPS, index, "params"))
    for fqn, param in optim.params.items():
        for name, kind, value in param.values:
            if kind not in (SCALAR, OPAQUE):
                continue
            if isinstance(value, records):
                raise CheckpointError(
                    f"{fqn}: {name!r} of its state has one part for each shard, which torch.distributed.checkpoint cannot "
                    "represent: save it in this library's own format"
                )
            _add_value(values, f"{fqn}: {name!r} of its state", value, (OPTIM, _STATE, fqn, str(name)))
    for name, value in optim.other_keys.items():
        _add_value(values, f"optimizer[{name!r}]", value, (OPTIM, str(name)))
    listed, classes = list[tuple[Path, list[Any]]](), list[DictClass]()
    for value, path in _optimizer_values(optim):
        listed += other_keys_in(OPTIM, value, path)
        classes += classes_in(value, path)
    if listed:
        values.add("the optimizer", listed, (KEYS, OPTIM))
    _add_classes(values, "optimizer", classes, OPTIM)


def _optimizer_values(optim: OptimDescription) -> Iterator[tuple[Any, Path]]:
    """Yield the parts of an optimizer's dict that are dicts, or may have some inside, each with its path."""
    for index, group in enumerate(optim.groups):
        yield {**dict(group.hyperparameters), "params": None}, (_GROUPS, index)
    for fqn, param in optim.params.items():
        if not all(type(name) is str for name, _, _ in param.values):
            yield dict.fromkeys(name for name, _, _ in param.values), (_STATE, fqn)
        for name, kind, value in param.values:
            if kind in (SCALAR, OPAQUE) and isinstance(value, (Mapping, list)):
                yield value, (_STATE, fqn, str(name))
    yield optim.other_keys, ()


def _paths_of(optim: OptimDescription | None) -> dict[str, Path]:
    """Return the path of each stored tensor of the optimizer, by its key."""
    params = optim.params if optim is not None else {}
    return {
        key: (OPTIM, _STATE, fqn, str(name))
        for fqn, param in params.items()
        for name, kind, key in param.values
        if kind not in (SCALAR, OPAQUE)
    }
