"""Writing plain torch files as torch.save writes them, with the state dicts of an unwrapped model and its optimizer.

The elements of tensors lie in the files as in any other format, so that they are copied there in place; the rest of each archive
is frames. Two files: model.pt and optim.pt, the trainer's values in trainer.pt, and those of each rank in rank-00000.pt. One
file: checkpoint.pt has everything, {"model": ..., "optimizer": ..., and the trainer's values under their own keys}.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import torch

from fsdp_optim.arguments import check_one_of
from fsdp_optim.errors import CheckpointError, wrong_use
from fsdp_optim.foreign.archive.safe_values import KINDS, Kinds, in_file, safe
from fsdp_optim.foreign.archive.torch_zip import ArchiveFrames, TensorStub
from fsdp_optim.foreign.archive.tree import mapped
from fsdp_optim.foreign.torch.checked_values import check_safe, saved_by_torch
from fsdp_optim.foreign.torch.folder import EXTRAS, NAME, ONE, PARTS, PER_RANK, ROLES, TorchFilesProbe, sequence_of
from fsdp_optim.foreign.torch.reader import TORCH_FILE
from fsdp_optim.foreign.torch.roles import tells_roles
from fsdp_optim.formats.base.checksums import join_tables
from fsdp_optim.formats.base.description import OPAQUE, SCALAR, OptimDescription
from fsdp_optim.formats.base.frames import joined
from fsdp_optim.formats.base.index import CheckpointIndex
from fsdp_optim.formats.base.protocols import (
    COMMON,
    MODULES,
    CheckpointContents,
    Format,
    Half,
    PlannedFile,
    PlannedTensor,
    Prepared,
    Reader,
    Stamp,
    Writer,
    WrittenFiles,
)
from fsdp_optim.formats.base.saved_optim import contents_of, extras_in
from fsdp_optim.formats.base.summary import ManifestSummary, SavedRoles
from fsdp_optim.options import KeyBy
from fsdp_optim.storage.base import CheckpointProbe, Opened
from fsdp_optim.tensors.memory import bytes_in_memory, dtype_name, dtype_named
from fsdp_optim.tensors.model_dict import versions_of, with_versions

_VERSION = 1


@dataclass(frozen=True)
class TorchFiles(Format):
    """Plain torch files, `model.pt` and `optim.pt`, whose dicts an unwrapped model and its optimizer load.

    Attributes:
        key_by: whether the optimizer's dict calls parameters by "id" or by "name".
        one_file: whether one file, `checkpoint.pt`, has everything, as `{"model": ..., "optimizer": ...}`.
        for_fairscale: whether the optimizer's dict is for fairscale's own `get_shard_from_optim_state_dict`, which calls
            parameters by id, for a model whose root alone is wrapped.
    """

    key_by: KeyBy = "id"
    one_file: bool = False
    for_fairscale: bool = False

    needs_names: ClassVar[bool] = True
    saves: ClassVar[bool] = False
    probe: ClassVar[CheckpointProbe[Any]] = TorchFilesProbe()

    def __post_init__(self) -> None:
        check_one_of("key_by", self.key_by, ("id", "name"), CheckpointError)
        if self.for_fairscale and self.key_by == "name":
            raise wrong_use("fairscale's full dict calls parameters by id: leave key_by out")

    @property
    def name(self) -> str:
        return "fairscale" if self.for_fairscale else "torch_file" if self.one_file else "torch"

    def recognises(self, opened: Opened) -> bool:
        return opened.has(NAME)

    def open(self, opened: Opened, *, verify: bool) -> Reader:
        return TORCH_FILE.open(opened, verify=verify)

    def writer(self) -> Writer:
        return TorchWriter(self.key_by == "id", self.for_fairscale, self.one_file)

    def sequence_in(self, opened: Opened) -> int:
        return sequence_of(opened)


TORCH_FILES, ONE_TORCH_FILE, FAIRSCALE_FILES = TorchFiles(), TorchFiles(one_file=True), TorchFiles(for_fairscale=True)


@dataclass
class TorchWriter(Writer):
    """The `Writer` of plain torch files."""

    by_id: bool = True
    is_fairscales: bool = False
    in_one: bool = False
    _contents: CheckpointContents | None = None
    _modules: dict[str, Any] = field(default_factory=dict)
    _values: dict[str, Any] = field(default_factory=dict)
    _kinds: Kinds = field(default_factory=list)

    def prepare(self, index: CheckpointIndex, *, allow_pickle: bool, records: Mapping[str, type]) -> Prepared:
        contents = contents_of(index, allow_pickle=allow_pickle, records=records)
        for fqn, param in contents.optim.params.items() if contents.optim is not None else ():
            for name, _, value in param.values:
                if isinstance(value, tuple(records.values())):
                    raise CheckpointError(
                        f"{fqn}: {name!r} of its state has one part for each shard, which a full dict of torch cannot "
                        "represent: save it in this library's own format"
                    )
        if self.is_fairscales and contents.optim is not None:
            _check_fits_fairscale(contents.optim)
        self._contents = contents
        files: dict[str, bytes] = {}
        for name, value in extras_in(index, allow_pickle=allow_pickle):
            if not self._keeps(name, value, allow_pickle=allow_pickle):
                files.update([self.small(name, value, allow_pickle=allow_pickle)])
        return Prepared(contents.content, "", files, contents.optim, contents)

    def files(
        self, tensors: Mapping[Half, Sequence[PlannedTensor]], shared: str, *, most_nbytes: int, num_ranks: int
    ) -> list[PlannedFile]:
        """Plan one file for each half, or one for both, however large."""
        if not self.in_one:
            return [self._of_half(half, planned) for half, planned in tensors.items()]
        both = [tensor for planned in tensors.values() for tensor in planned]
        both.sort(key=lambda tensor: -dtype_named(tensor.dtype).itemsize)  # so that all elements are aligned
        stubs = {
            (tensor.half, tensor.key): TensorStub(tensor.dtype, tensor.shape, number)
            for number, tensor in enumerate(both)
        }
        kinds = {KINDS: self._kinds} if self._kinds else {}
        halves = {PARTS[half]: self._half(half, stubs) for half in tensors}
        tree = {**halves, **self._values, **kinds, **({} if tells_roles(halves, self._values) else {ROLES: [*halves]})}
        return [planned_archive(ONE, None, both, tree)]

    def _of_half(self, half: Half, tensors: Sequence[PlannedTensor]) -> PlannedFile:
        stubs = {
            (half, tensor.key): TensorStub(tensor.dtype, tensor.shape, number) for number, tensor in enumerate(tensors)
        }
        return planned_archive(f"{half}.pt", half, tensors, self._half(half, stubs))

    def _half(self, half: Half, stubs: Mapping[tuple[Half, str], TensorStub]) -> Any:
        """Return the state dict of the model or of the optimizer, with stubs in the place of tensors."""
        if self._contents is None:
            raise CheckpointError("files of torch are written by convert, whose ranks all prepare what they write")
        by_key = {key: stub for (of, key), stub in stubs.items() if of == half}
        if half == "optim" and self._contents.optim is not None:
            full = _full_dict(self._contents.optim, by_key, by_id=self.by_id)
            return _fairscales(full) if self.is_fairscales else full
        aliases = self._contents.aliases
        tied = {other: by_key[fqn] for other, fqn in aliases.items() if fqn in by_key}
        return with_values_of_modules({**by_key, **tied}, self._modules, aliases)

    def _keeps(self, name: str, value: Any, *, allow_pickle: bool) -> bool:
        """Take an extra into the planned files: values of modules are in the model's dict, and in one file all others too.

        Returns whether the extra needs no file of its own.
        """
        if name != MODULES and not self.in_one:
            return False
        if name == MODULES:
            kept = values_of_modules(value)
            check_safe(name, kept, allow_pickle=allow_pickle)
            self._modules.update(value)
            return True
        position = None if name == COMMON else int(name.rpartition("-")[2])
        if position is None:
            value = as_dict(value)
        kept, kinds = safe(value, () if position is None else (PER_RANK, position))
        self._kinds += kinds
        check_safe(name, kept, allow_pickle=allow_pickle)
        if position is None:
            taken = [key for key in kept if key in (*PARTS.values(), PER_RANK, KINDS, ROLES)]
            if taken:
                raise CheckpointError(
                    f"the trainer's value {taken[0]!r} has the name of a part of the file {ONE}: write the format "
                    '"torch", which has a file for each part'
                )
            self._values = {**kept, **self._values}
        else:
            self._values.setdefault(PER_RANK, {})[position] = kept
        return True

    def small(self, name: str, value: Any, *, allow_pickle: bool) -> tuple[str, bytes]:
        kept = in_file(value)
        check_safe(EXTRAS.get(name, name), kept, allow_pickle=allow_pickle)
        return EXTRAS.get(name, f"{name}.pt"), saved_by_torch(kept)

    def info_of(self, data: bytes) -> Any:
        return len(data)

    def last(
        self, prepared: Prepared, files: Sequence[PlannedFile], written: WrittenFiles, stamp: Stamp
    ) -> Iterator[tuple[str, bytes]]:
        contents: CheckpointContents = prepared.document
        yield manifest_of(
            prepared.content, contents, contents.world_size, files, written, stamp, roles=self._roles_of(contents)
        )

    def _roles_of(self, contents: CheckpointContents) -> SavedRoles:
        """Return which part of the files is the model's and which the optimizer's, for the manifest."""
        has_model = contents.weights != "none" and bool(contents.params or contents.aliases or self._modules)
        return SavedRoles(
            [PARTS["model"]][: self.in_one] if has_model else None,
            [PARTS["optim"]][: self.in_one] if contents.optim is not None else None,
        )


def planned_archive(name: str, half: Half | None, tensors: Sequence[PlannedTensor], tree: Any) -> PlannedFile:
    """Return the plan of a file. `tree`: the object in it, with a stub in the place of each tensor, numbered as `tensors`."""
    small, archive = SmallTensors(len(tensors)), ArchiveFrames()
    pending, frames, starts, at = archive.first(small.without(tree)), list[tuple[int, bytes]](), list[int](), 0
    for tensor in tensors:
        nbytes = prod(tensor.shape) * dtype_named(tensor.dtype).itemsize
        frames.append((at, pending + archive.tensor(len(starts), nbytes)))
        starts.append(at)
        pending, at = b"", at + nbytes
    pending += small.records(archive)
    head, between = joined([*frames, (at, pending + archive.end())])
    return PlannedFile(
        name=name,
        half=half,
        head=head,
        tensors=tuple(tensors),
        starts=tuple(starts),
        nbytes_of_data=at,
        segment_nbytes=0,
        tensors_in=lambda *_: name,
        between=between,
    )


def manifest_of(
    content: str,
    contents: CheckpointContents,
    world_size: int,
    files: Sequence[PlannedFile],
    written: WrittenFiles,
    stamp: Stamp,
    *,
    roles: SavedRoles | None = None,
) -> tuple[str, bytes]:
    """Return the manifest of a folder of torch files. Raises CheckpointError where a byte was not written."""
    for file in files:
        join_tables(file.name, written.rows[file.name], file.nbytes_of_data)
    summary = ManifestSummary(
        version=_VERSION,
        sequence=stamp.sequence,
        step=stamp.step,
        keep_last=None,
        created_ns=time.time_ns(),
        token=stamp.token,
        content=content,
        world_size=world_size,
        files={**{file.name: file.nbytes for file in files}, **written.extras},
        weights=contents.weights,
        weights_dtype=contents.weights_dtype,
        roles=roles,
    )
    return NAME, json.dumps({"brief": summary.to_json()}, indent=1).encode() + b"\n"


def as_dict(value: Any) -> dict[str, Any]:
    """Return the trainer's values by key: a value that is no dict has the key "extra"."""
    return value if isinstance(value, dict) else {"extra": value}


def values_of_modules(value: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Return the values of modules by FQN, as the state dict of an unwrapped model has them."""
    return {fqn: module_value for fqn, (_, module_value) in value.items()}


def with_values_of_modules(
    model: Mapping[str, Any], values: Mapping[str, tuple[Any, Any]], aliases: Mapping[str, str]
) -> dict[str, Any]:
    """Return a model's dict with values of modules under all their names, and with the versions of these modules' code."""
    of_all = {**values, **{alias: values[fqn] for alias, fqn in aliases.items() if fqn in values}}
    full = {**model, **values_of_modules(of_all)}
    versions = versions_of(of_all)
    return with_versions(full, versions) if versions else full


def _check_fits_fairscale(optim: OptimDescription) -> None:
    """Refuse an optimizer that fairscale cannot have on one flat parameter."""
    if len(optim.groups) != 1:
        raise CheckpointError(
            f"the optimizer has {len(optim.groups)} param groups, and fairscale's full dict has one: write the format "
            '"torch", and load it by fsdp_optim.scatter_full_optim_state_dict'
        )
    without = [fqn for fqn in optim.groups[0].params if fqn not in optim.params or not optim.params[fqn].has_state]
    if without and len(without) < len(optim.groups[0].params):
        raise CheckpointError(
            f"{without[0]}: has no state, and others have: fairscale's full dict has one state for the whole flat parameter"
        )
    for fqn, param in optim.params.items():
        if not param.shape and any(kind not in (SCALAR, OPAQUE) for _, kind, _ in param.values):
            raise CheckpointError(
                f"{fqn}: has no dimensions, and fairscale takes such a parameter's state for that of the whole flat parameter: "
                'write the format "torch", and load it by fsdp_optim.scatter_full_optim_state_dict'
            )


def _fairscales(full: dict[str, Any]) -> dict[str, Any]:
    """Return a full dict by id for fairscale's reader, which cuts every tensor that is not in a list, even a single number."""
    state = {
        key: {
            name: [value] if isinstance(value, (torch.Tensor, TensorStub)) and not value.shape else value
            for name, value in values.items()
        }
        for key, values in full["state"].items()
    }
    (group,) = full["param_groups"]
    group = {name: value for name, value in group.items() if name != "param_names"}
    ids = dict.fromkeys(group["params"], 0 if state else None)
    return {**full, "state": state, "param_groups": [group], "param_id_map": ids, "uncollected_local_ids": []}


@dataclass
class SmallTensors:
    """Tensors that are not in files of the source: hyperparameters, for example. `contents`: their bytes by number."""

    number: int
    contents: dict[int, bytes] = field(default_factory=dict)

    def without(self, value: Any) -> Any:
        """Return the value with a stub in the place of each tensor."""
        return mapped(value, torch.Tensor, self._stub)

    def records(self, archive: ArchiveFrames) -> bytes:
        """Return the bytes of the tensors in an archive, each after its frame."""
        return b"".join(archive.tensor(number, len(content)) + content for number, content in self.contents.items())

    def _stub(self, value: torch.Tensor) -> TensorStub:
        plain = value.detach().to("cpu").contiguous()
        stub = TensorStub(dtype_name(plain.dtype), tuple(plain.shape), self.number)
        self.contents[self.number] = bytes_in_memory(plain)
        self.number += 1
        return stub


def _full_dict(optim: OptimDescription, stubs: Mapping[str, TensorStub], *, by_id: bool) -> dict[str, Any]:
    """Return the full dict of an optimizer on the unwrapped model."""
    fqns = [fqn for group in optim.groups for fqn in group.params]
    key_of: dict[str, Any] = {fqn: number if by_id else fqn for number, fqn in enumerate(fqns)}
    state = {
        key_of[fqn]: {
            name: value if kind in (SCALAR, OPAQUE) else stubs[value] for name, kind, value in optim.params[fqn].values
        }
        for fqn in fqns
        if fqn in optim.params and optim.params[fqn].has_state
    }
    groups = [
        {
            **dict(group.hyperparameters),
            "params": [key_of[fqn] for fqn in group.params],
            **({"param_names": list(group.params)} if by_id else {}),
        }
        for group in optim.groups
    ]
    return {**optim.other_keys, "state": state, "param_groups": groups}
