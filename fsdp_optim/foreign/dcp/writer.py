"""Writing folders of torch.distributed.checkpoint (DCP), which stock torch loads without this library.

Keys are those of `{"model": ..., "optimizer": ...}` with the dicts of `get_model_state_dict` and `get_optimizer_state_dict`. The
hyperparameters are there nested and flattened, so both forms of the optimizer's dict find theirs; both name the same bytes.

Each tensor is cut into chunks of whole rows, and each chunk is an archive of torch.save (`torch_archives.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar

from fsdp_optim.errors import CheckpointError, shortened
from fsdp_optim.foreign.archive.torch_archives import ArchiveFile, TensorKind, file_plans
from fsdp_optim.foreign.dcp.boxes import chunks_of
from fsdp_optim.foreign.dcp.probe import NAME, VERSION, with_summary
from fsdp_optim.foreign.dcp.values import (
    CLASSES,
    KEYS,
    MODEL,
    OF_RANKS,
    OF_TUPLE,
    OPTIM,
    VERSIONS,
    DictClass,
    Path,
    PathGroup,
    ValueFile,
    ValueItem,
    apart,
    classes_in,
    flattened,
    items_in,
    other_keys_in,
    unasked_in,
)
from fsdp_optim.foreign.dcp.written_metadata import (
    ListedItem,
    check_keys,
    names_beside_weights,
    written_pickle,
)
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
from fsdp_optim.tensors.model_dict import versions_of

log = logging.getLogger("fsdp_optim")

_STATE, _GROUPS = "state", "param_groups"


@dataclass
class DcpWriter(Writer):
    """The `Writer` of DCP folders. `is_flat`: weights are at the top level, as torchtitan has them, not under "model"."""

    is_flat: bool = False

    writes_trees: ClassVar[bool] = True

    # Of the tensors that are not weights, by half and key; and the files.
    _paths: Mapping[str | None, Mapping[str, PathGroup]] = field(default_factory=dict)
    _files: dict[str, ArchiveFile] = field(default_factory=dict)
    _roles: SavedRoles | None = None

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
        self._paths = {"optim": _paths_of(contents.optim), "state": _paths_of_trees(common)}
        self._roles = self._roles_of(contents, weights, top_names, is_new=index.source is None)
        files = dict(self.small(name, value, allow_pickle=allow_pickle) for name, value in extras.items())
        small = [item for data in files.values() for item in items_in(data)]
        values = ValueFile(False, "save it in this library's own format")  # no load unpickles what is for an optimizer
        if contents.optim is not None:
            _add_optimizer(values, contents.optim, tuple(records.values()))
        if values.items:
            files["values.distcp"] = values.encoded()
        check_keys(
            [
                *(PathGroup(self._root, fqn) for fqn in (*index.weights, *contents.aliases)),
                *(paths for by_key in self._paths.values() for paths in by_key.values()),
                *(item.paths for item in values.items),
                *(ValueItem.from_json(item).paths for item in small),
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
        plans = list(file_plans(tensors, partial(chunks_of, num_ranks=num_ranks), most_nbytes))
        names = [f"{half}-{number + 1:05}-of-{len(plans):05}.distcp" for number in range(len(plans))]
        if len(plans) == 1:
            names = [f"{half}.distcp"]
        return [self._planned(name, half, plan) for name, plan in zip(names, plans, strict=True)]

    def _planned(self, name: str, half: Half, plan: ArchiveFile) -> PlannedFile:
        head, between = joined(plan.frames)
        self._files[name] = plan
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
                _add_value(values, f"state_dict()[{fqn!r}]", kept, PathGroup(self._root, fqn))
            _add_keys(values, "state_dict()", kept_by_name, name)
            versions = versions_of(value)
            if versions:
                values.add("the versions of modules", versions, PathGroup((KEYS,), VERSIONS))
            return "modules.distcp", values.encoded()
        if name == COMMON:
            given = value if isinstance(value, Mapping) else {"extra": value}
            for key, item in given.items():
                _add_value(values, f"state[{key!r}]", item, PathGroup((), str(key)))
            _add_keys(values, "state", given, name)
            return "extra.distcp", values.encoded()
        _add_value(values, "state", value, PathGroup((OF_RANKS,), str(int(name.removeprefix("rank-")))))
        _add_keys(values, "state", value, name)
        check_keys(item.paths for item in values.items)
        return f"{name}.distcp", values.encoded()

    def info_of(self, data: bytes) -> Any:
        return {"nbytes": len(data), "items": items_in(data)}

    def last(
        self, prepared: Prepared, files: Sequence[PlannedFile], written: WrittenFiles, stamp: Stamp
    ) -> Iterator[tuple[str, bytes]]:
        contents: CheckpointContents = prepared.document
        listed = list(self._listed(files, contents.aliases))
        for file in files:
            join_tables(file.name, written.rows[file.name], file.nbytes_of_data)  # raises where a byte was not written
        kind_of = cache(_kind_of_value)
        for name, info in written.extras.items():
            for item in map(ValueItem.from_json, info["items"]):
                kind = kind_of(*item.tensor) if item.tensor is not None else None
                listed.append(ListedItem(item.paths, kind, name, [(item.start, item.nbytes)]))
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
        yield NAME, with_summary(summary, list(written_pickle(stamp.folder, listed, stamp.token)))

    def _listed(self, files: Sequence[PlannedFile], aliases: Mapping[str, str]) -> Iterator[ListedItem]:
        """Yield all tensors with their places. `aliases`: other names of weights, each with that of the stored one."""
        others: dict[str, list[str]] = {}
        for other, stored in aliases.items():
            others.setdefault(stored, []).append(other)
        for file in files:
            of_half, starts = self._paths.get(file.half), iter(self._files[file.name].chunk_starts)
            for tensor, plan in zip(file.tensors, self._files[file.name].plans, strict=True):
                key = tensor.key
                paths = PathGroup(self._root, key, others.get(key, ())) if of_half is None else of_half[key]
                places = [(next(starts), archive.nbytes) for archive in plan.archives]
                yield ListedItem(paths, plan.kind, file.name, places)


def _kind_of_value(dtype: str, shape: Shape) -> TensorKind:
    return TensorKind(dtype, shape, (((0,) * len(shape), shape),))


# ------------------------------------------------------------------------------------------- values


def _add_value(values: ValueFile, where: str, value: Any, *groups: PathGroup) -> None:
    """Add the items of a value, each under the paths of all groups."""
    check_elements(where, value, CheckpointError)
    leaves = list(flattened(value, ()))
    unasked = unasked_in(leaves)
    for inner, item in leaves:
        if isinstance(item, InFile):  # written with the others of its half
            continue
        name = where + "".join(f"[{part!r}]" for part in inner)
        inside = [paths for group in groups for paths in _inside(group, inner)]
        values.add(
            name, item, *(inside if inner not in unasked else [apart(path) for paths in inside for path in paths])
        )


def _inside(group: PathGroup, inner: Path) -> list[PathGroup]:
    """Return the paths of what is inside the values of a group."""
    return [PathGroup((*path, *inner[:-1]), inner[-1]) for path in group] if inner else [group]


def _paths_of_trees(common: Any) -> dict[str, PathGroup]:
    """Return the path of each tensor of a tree, by its key."""
    inside = ((path, item) for path, item in flattened(common, ()) if isinstance(item, InFile))
    return {item.key: PathGroup(path[:-1], path[-1]) for path, item in inside}


def _add_keys(values: ValueFile, where: str, value: Any, name: str) -> None:
    """Add the keys of the dicts inside a value that are not str, and the classes of those that are no plain dicts.

    `name`: the name of the extra.
    """
    listed = list(other_keys_in(where, value))
    if listed:
        values.add(where, listed, PathGroup((KEYS,), name))
    opened = [f"{where}{''.join(f'[{part!r}]' for part in path)}" for path, keys in listed if keys == OF_TUPLE]
    if opened:
        log.warning(
            "torch's own load does not find tuples with tensors, which are saved by their items so that ranks can share them; "
            "fsdp_optim loads them. Give lists for torch: %s",
            shortened(opened),
        )
    _add_classes(values, where, list(classes_in(value)), name)


def _add_classes(values: ValueFile, where: str, classes: Sequence[DictClass], name: str) -> None:
    """Add the classes of dicts, and warn of those that are lost. `name`: as for `_add_keys`."""
    recorded = [(path, kind) for path, kind, _ in classes if kind]
    if recorded:
        values.add(where, recorded, PathGroup((KEYS, CLASSES), name))
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
            flat_names = [f"{_GROUPS}.{fqn}.{name}" for fqn in group.params if fqn != str(index)]
            paths = [PathGroup((OPTIM, _GROUPS, index), str(name))]
            if flat_names:
                paths.append(PathGroup((OPTIM,), flat_names[0], flat_names[1:]))
            _add_value(values, f"{where}: {name}", value, *paths)
        values.add(where, list(group.params), PathGroup((OPTIM, _GROUPS, index), "params"), are_names=True)
    for fqn, param in optim.params.items():
        for name, kind, value in param.values:
            if kind not in (SCALAR, OPAQUE):
                continue
            if isinstance(value, records):
                raise CheckpointError(
                    f"{fqn}: {name!r} of its state has one part for each shard, which torch.distributed.checkpoint cannot "
                    "represent: save it in this library's own format"
                )
            _add_value(values, f"{fqn}: {name!r} of its state", value, PathGroup((OPTIM, _STATE, fqn), str(name)))
    for name, value in optim.other_keys.items():
        _add_value(values, f"optimizer[{name!r}]", value, PathGroup((OPTIM,), str(name)))
    listed, classes = list[tuple[Path, list[Any]]](), list[DictClass]()
    for value, path in _optimizer_values(optim):
        listed += other_keys_in(OPTIM, value, path)
        classes += classes_in(value, path)
    if listed:
        values.add("the optimizer", listed, PathGroup((KEYS,), OPTIM))
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


def _paths_of(optim: OptimDescription | None) -> dict[str, PathGroup]:
    """Return the path of each stored tensor of the optimizer, by its key."""
    params = optim.params if optim is not None else {}
    return {
        key: PathGroup((OPTIM, _STATE, fqn), str(name))
        for fqn, param in params.items()
        for name, kind, key in param.values
        if kind not in (SCALAR, OPAQUE)
    }
