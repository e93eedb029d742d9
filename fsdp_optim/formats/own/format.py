"""This library's own format, which docs/format.md describes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import msgspec
import torch
from msgspec.structs import replace

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.checksums import hex_of, join_tables, segment_nbytes, sums_of
from fsdp_optim.formats.base.description import (
    GroupDescription,
    OptimDescription,
    decoded,
    encoded,
    is_text_alone,
    to_plain,
)
from fsdp_optim.formats.base.header import Header
from fsdp_optim.formats.base.index import CheckpointIndex
from fsdp_optim.formats.base.json_text import check_density, parse_json
from fsdp_optim.formats.base.protocols import (
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
from fsdp_optim.formats.base.records import TensorNames
from fsdp_optim.formats.base.saved_optim import contents_of, extras_in
from fsdp_optim.formats.own.extras import encode_extra, info_of
from fsdp_optim.formats.own.folders import (
    check_models,
    groups_by_model,
    groups_in,
    in_folder,
    shared_text,
    split_key,
)
from fsdp_optim.formats.own.manifest import (
    FINGERPRINT,
    MODEL,
    MOST_NBYTES,
    NAME,
    FileInfo,
    Manifest,
    ModelInfo,
    ParamInfo,
    ThinnedInfo,
    canonical_optim,
    manifest_in,
    version_for,
)
from fsdp_optim.formats.own.probe import PROBE, OwnProbe, is_of_optim, read_summary
from fsdp_optim.formats.own.reader import DESCRIPTION_FILE, INDEX, Checkpoint, file_of_extra
from fsdp_optim.storage.base import Opened
from fsdp_optim.tensors.memory import dtype_named

_WHERE = "the optimizer"
_PLAIN = {"format": "pt"}  # the metadata of every safetensors file: its tensors are torch's


@dataclass(frozen=True)
class OwnFormat(Format):
    """The format of this library: safetensors files with one copy of each tensor, tables of checksums, and a manifest.

    Attributes:
        weights_name: how the files of the weights begin, where another library looks for them under a name of its own.
        beside: small files of another library, by name, that are written with each checkpoint; of several models, those of one
            begin with its name: `actor/config.json`.
    """

    weights_name: str = MODEL
    beside: tuple[tuple[str, bytes], ...] = ()

    name: ClassVar[str] = "fsdp_optim"
    probe: ClassVar[OwnProbe] = PROBE

    def recognises(self, opened: Opened) -> bool:
        return opened.has(NAME)

    def open(self, opened: Opened, *, verify: bool) -> Reader:
        return Checkpoint.opened_in(opened, verify=verify)

    def writer(self) -> Writer:
        return OwnWriter(self.weights_name, self.beside)

    def sequence_in(self, opened: Opened) -> int:
        for read in (
            read_summary,
            lambda opened: manifest_in(opened).effective_summary,
        ):  # for a damaged summary the rest may do
            with contextlib.suppress(OSError):
                summary = read(opened)
                return summary.sequence if summary is not None else 0
        return 0


OURS = OwnFormat()


@dataclass(frozen=True)
class OwnWriter(Writer):
    """The `Writer` of this library's own format. The attributes are those of `OwnFormat`."""

    weights_name: str = MODEL
    beside: tuple[tuple[str, bytes], ...] = ()

    writes_trees: ClassVar[bool] = True
    keeps_fingerprint: ClassVar[bool] = True
    keeps_fused_state: ClassVar[bool] = True

    def prepare(self, index: CheckpointIndex, *, allow_pickle: bool, records: Mapping[str, type]) -> Prepared:
        if isinstance(index.source, Checkpoint):
            return self._copied(index.source, with_optim=index.optim is not None)
        contents = contents_of(index, allow_pickle=allow_pickle, records=records)
        extras = extras_in(index, allow_pickle=allow_pickle, as_trees=True)
        files = dict(self.small(name, value, allow_pickle=allow_pickle) for name, value in extras)
        optim, read_back = None, None
        if contents.optim is not None:
            values, tensors = encoded("optim", contents.optim, allow_pickle=allow_pickle, records=records)
            described = contents.optim.params
            is_plain = values["params"] is described  # as `encoded` leaves those that text alone describes
            others = [] if is_plain else [fqn for fqn, param in described.items() if not is_text_alone(param)]
            text = canonical_optim(values, plain=not others)
            optim = msgspec.Raw(text)
            read_back = _read_back(contents.optim, values, tensors, others, allow_pickle=allow_pickle, records=records)
            if not tensors:
                _check_text(values, text)
            if tensors:  # JSON in the manifest cannot contain tensors
                value, optim = to_plain(contents.optim), None
                files[DESCRIPTION_FILE] = encode_extra("optim", value, allow_pickle=allow_pickle, records=records)
        params = {key: ParamInfo(shape) for key, shape in contents.params.items()}
        of_weights = contents.weights, contents.weights_dtype, self.weights_name
        facts = index.facts
        fused = tuple(facts.views), tuple(facts.fused_state), tuple(facts.joint_steps)
        model = ModelInfo(params, dict(contents.aliases), *of_weights, facts.models, *fused)
        check_models("the new checkpoint", model.models, (), params)
        manifest = Manifest(
            files={},
            world_size=contents.world_size,
            model=model,
            has_optim=contents.optim is not None,
            optim=optim,
            created_ns=0,
            version=version_for(model, has_trees=bool(index.trees)),
        )
        return Prepared(contents.content, _shared(contents.optim, model.models), files, read_back, manifest)

    def _copied(self, reader: Checkpoint, *, with_optim: bool) -> Prepared:
        """Return the same, with the small files of a checkpoint of this format, which are not decoded.

        `with_optim` False: the new checkpoint gets no optimizer.
        """
        shared = _shared_of(reader, with_optim=with_optim)
        files = {name: reader.small_file(name) for name in reader.manifest.files if name.startswith("extra/")}
        model = replace(reader.manifest.model, weights_name=self.weights_name)
        version = version_for(model, has_trees=bool(reader.trees))
        manifest = replace(reader.manifest, model=model, version=version, summary=None)
        if not with_optim:
            files.pop(DESCRIPTION_FILE, None)
            manifest = replace(manifest, has_optim=False, optim=None)
        manifest = replace(manifest, thinned=None)  # of the checkpoint that was thinned alone
        content = manifest.model.content(has_optim=manifest.has_optim)
        return Prepared(content, shared, files, None, manifest)

    def files(
        self, tensors: Mapping[Half, Sequence[PlannedTensor]], shared: str, *, most_nbytes: int, num_ranks: int
    ) -> list[PlannedFile]:
        groups = groups_in(shared)
        planned: list[PlannedFile] = []
        for half, of_half in tensors.items():
            if groups is None or half == "state":
                planned += self._of_half("", half, of_half, "" if groups else shared, (most_nbytes, num_ranks))
                continue
            by_model: dict[str, list[PlannedTensor]] = {model: [] for model in groups}
            for tensor in of_half:
                by_model[split_key(half, tensor.key)[0]].append(tensor)
            for model, of_model in by_model.items():
                if half == "model" or groups[model] is not None:
                    planned += self._of_half(model, half, of_model, groups[model] or "", (most_nbytes, num_ranks))
        return planned

    def _of_half(
        self, model: str, half: Half, tensors: Sequence[PlannedTensor], groups: str, limits: tuple[int, int]
    ) -> list[PlannedFile]:
        """Plan files with the names that Hugging Face uses.

        `model`: the name of one of several; else empty. `groups`: its param groups for readers without this library. `limits`:
        the most bytes of a file, and the number of ranks.
        """
        most_nbytes, num_ranks = limits
        stem = in_folder(model, self.weights_name if half == "model" else half)
        metadata = _PLAIN | ({"param_groups": groups} if half == "optim" and groups else {})
        header = Header.of(_entries(model, half, tensors), metadata)
        left = iter(tensors)
        per_file = [list(islice(left, num)) for num in header.files_within(most_nbytes, _PLAIN)]
        per_file.sort(key=_has_no_weight)  # transformers reads the dtype of a model from the first file
        planned = []
        for number, in_file in enumerate(per_file, start=1):
            name = (
                f"{stem}.safetensors" if len(per_file) == 1 else f"{stem}-{number:05}-of-{len(per_file):05}.safetensors"
            )
            if len(per_file) > 1:
                header = Header.of(_entries(model, half, in_file), metadata if number == 1 else _PLAIN)
            planned.append(_planned(name, half, in_file, header, num_ranks))
        return planned

    def small(self, name: str, value: Any, *, allow_pickle: bool) -> tuple[str, bytes]:
        where = "state_dict()" if name == "model" else "state"
        return file_of_extra(name), encode_extra(where, value, allow_pickle=allow_pickle)

    def info_of(self, data: bytes) -> Any:
        return msgspec.to_builtins(info_of(data))

    def last(
        self, prepared: Prepared, files: Sequence[PlannedFile], written: WrittenFiles, stamp: Stamp
    ) -> Iterator[tuple[str, bytes]]:
        infos = msgspec.convert(written.extras, dict[str, FileInfo])
        for file in files:
            table, sums = join_tables(file.name, written.rows[file.name], file.nbytes_of_data), None
            if stamp.checksums:
                data = table.encoded()
                yield sums_of(file.name), data
                sums = hex_of(data)
            infos[file.name] = FileInfo(file.nbytes, hex_of(file.head), sums)
        beside = list(self.beside)
        for model in ("", *prepared.document.model.models):
            for stem in (self.weights_name, "optim", "state"):
                begin = in_folder(model, stem)
                split = [file for file in files if file.name.startswith(f"{begin}-")]
                if split:
                    beside.append((f"{begin}{INDEX}", _index_of(model, split)))
        if written.fingerprint:
            beside.append((FINGERPRINT, written.fingerprint))
        for name, data in beside:
            yield name, data
            infos[name] = FileInfo(len(data), hex_of(data), None)
        manifest = replace(prepared.document, files=infos, created_ns=time.time_ns(), token=stamp.token)
        summary = manifest.made_summary(stamp.sequence, stamp.step, manager=stamp.manager, wrapper=stamp.wrapper)
        yield NAME, replace(manifest, summary=summary).encoded()


def thinned(reader: Checkpoint) -> tuple[bytes | None, tuple[str, ...]]:
    """Return the manifest of a checkpoint without its optimizer, and the names of the files to remove.

    The manifest is None where the checkpoint has no optimizer: then the files are those that an earlier call may have left.
    """
    manifest = reader.manifest
    if not manifest.has_optim:
        return None, manifest.thinned.files if manifest.thinned is not None else ()
    gone = {name for name in manifest.files if is_of_optim(name)}
    removed = (*gone, *(sums_of(name) for name in gone if manifest.files[name].sums is not None))
    summary = manifest.effective_summary
    thin = replace(
        manifest,
        files={name: info for name, info in manifest.files.items() if name not in gone},
        has_optim=False,
        optim=None,
        thinned=ThinnedInfo(tuple(sorted(removed)), summary.content),
    )
    made = thin.made_summary(summary.sequence, summary.step, summary.keep_last, summary.manager, summary.wrapper)
    return replace(thin, summary=made).encoded(), tuple(sorted(removed))


def _has_no_weight(tensors: Sequence[PlannedTensor]) -> bool:
    """Return whether a file has integers and flags alone."""
    return not any(dtype_named(tensor.dtype).is_floating_point for tensor in tensors)


def _planned(name: str, half: Half, tensors: Sequence[PlannedTensor], header: Header, num_ranks: int) -> PlannedFile:
    entries = header.entries
    starts = tuple(entry.start for entry in entries)
    return PlannedFile(
        name=name,
        half=half,
        head=header.encoded(),
        tensors=tuple(tensors),
        starts=starts,
        nbytes_of_data=header.data_nbytes,
        segment_nbytes=segment_nbytes((entry.stop - entry.start for entry in entries), num_ranks),
        tensors_in=TensorNames(starts, tuple(entry.key for entry in entries)),  # not the header, which is large
    )


def _check_text(values: Mapping[str, Any], text: bytes) -> None:
    """Raise CheckpointError for the JSON of an optimizer that no reader accepts."""
    check_density(_WHERE, text)
    if len(text) > MOST_NBYTES // 2:
        params = values["params"]
        largest = max(params, key=lambda fqn: len(msgspec.json.encode(params[fqn])))
        raise CheckpointError(
            f"{largest}: the description of its state takes most of {len(text)} bytes, and a reader accepts only "
            f"{MOST_NBYTES // 2}: keep large values as tensors"
        )


def _read_back(
    optim: OptimDescription,
    values: Mapping[str, Any],
    tensors: Sequence[torch.Tensor],
    others: Sequence[str],
    *,
    allow_pickle: bool,
    records: Mapping[str, type],
) -> OptimDescription:
    """Return a description as a reader will decode it from its JSON values. Raises CheckpointError if no reader accepts it.

    Parameters that are described by text alone, all but `others`, are read as they are.
    """
    every = values["params"]
    params = every if "$dict" in every else {fqn: every[fqn] for fqn in others}  # pairs, where a name begins with "$"
    text = json.dumps({**values, "params": params}, separators=(",", ":")).encode()
    try:
        read = decoded(_WHERE, parse_json(_WHERE, text), tensors, allow_pickle=allow_pickle, records=records)
    except CheckpointError as error:
        raise CheckpointError(f"nothing was saved, because it could not be loaded: {error}") from error
    return dataclasses.replace(read, params={**optim.params, **read.params})


def _shared(optim: OptimDescription | None, models: Sequence[str]) -> str:
    """Return the string by which every rank plans the files: the param groups and, if there are several, their models."""
    if not models:
        return _plain_groups(optim.groups) if optim is not None else ""
    groups = groups_by_model(optim, models)
    return shared_text({model: _plain_groups(groups[model]) if model in groups else None for model in models})


def _shared_of(reader: Checkpoint, *, with_optim: bool) -> str:
    """Return the same string, of a checkpoint of this format whose files have the groups."""
    models, groups = reader.manifest.model.models, dict[str, str | None]()
    for model in models or ("",):
        begin = in_folder(model, "optim")
        first = min((name for name in reader.files if name.startswith((f"{begin}.", f"{begin}-"))), default=None)
        if first is not None and with_optim:
            groups[model] = reader.files[first].header.metadata.get("param_groups", "")
    return shared_text({model: groups.get(model) for model in models}) if models else groups.get("") or ""


def _plain_groups(groups: Sequence[GroupDescription]) -> str:
    """Return the param groups as JSON for readers without this library. The exact values are in the manifest."""

    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else str(value)

    def named(value: Any) -> Any:
        """Return the value with keys that JSON allows."""
        if isinstance(value, Mapping):
            return {key if isinstance(key, (str, int, float)) else str(key): named(item) for key, item in value.items()}
        return [named(item) for item in value] if isinstance(value, (list, tuple)) else value

    listed = [{**named(dict(group.hyperparameters)), "params": list(group.params)} for group in groups]
    return json.dumps(listed, default=plain)


def _entries(model: str, half: Half, tensors: Sequence[PlannedTensor]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield the key in its file, the dtype and the shape of each tensor."""
    return ((_key_in_file(model, half, tensor.key), tensor.dtype, tensor.shape) for tensor in tensors)


def _key_in_file(model: str, half: Half, key: str) -> str:
    return split_key(half, key)[1] if model else key


def _index_of(model: str, files: Sequence[PlannedFile]) -> bytes:
    """Return the index of a split half, as Hugging Face writes it: the file of each tensor, by names in the folder."""
    index = {
        "metadata": {"total_size": sum(file.nbytes_of_data for file in files)},
        "weight_map": {
            _key_in_file(model, tensor.half, tensor.key): file.name.rpartition("/")[2]
            for file in files
            for tensor in file.tensors
        },
    }
    return json.dumps(index, indent=2).encode() + b"\n"
