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
from fsdp_optim.formats.base.description import OptimDescription, decoded, encoded, is_text_alone, to_plain
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
from fsdp_optim.formats.base.saved_optim import contents_of, extras_in
from fsdp_optim.formats.own.extras import encode_extra, info_of
from fsdp_optim.formats.own.manifest import (
    MODEL,
    MOST_NBYTES,
    NAME,
    FileInfo,
    Manifest,
    ModelInfo,
    ParamInfo,
    ThinnedInfo,
    canonical,
    manifest_in,
    version_for,
)
from fsdp_optim.formats.own.probe import PROBE, OwnProbe, is_of_optim, read_summary
from fsdp_optim.formats.own.reader import DESCRIPTION_FILE, INDEX, Checkpoint, file_of_extra
from fsdp_optim.memory import dtype_named
from fsdp_optim.storage.base import Opened

_WHERE = "the optimizer"
_PLAIN = {"format": "pt"}  # the metadata of every safetensors file: its tensors are torch's


@dataclass(frozen=True)
class OwnFormat(Format):
    """The format of this library: safetensors files with one copy of each tensor, tables of checksums, and a manifest.

    Attributes:
        weights_name: how the files of the weights begin, where another library looks for them under a name of its own.
        beside: small files of another library, by name, that are written with each checkpoint.
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

    def prepare(self, index: CheckpointIndex, *, allow_pickle: bool, records: Mapping[str, type]) -> Prepared:
        if isinstance(index.source, Checkpoint):
            return self._copied(index.source, with_optim=index.optim is not None)
        contents = contents_of(index, allow_pickle=allow_pickle, records=records)
        extras = extras_in(index, allow_pickle=allow_pickle, as_trees=True)
        files = dict(self.small(name, value, allow_pickle=allow_pickle) for name, value in extras)
        optim, read_back, shared = None, None, ""
        if contents.optim is not None:
            values, tensors = encoded("optim", contents.optim, allow_pickle=allow_pickle, records=records)
            optim = msgspec.Raw(canonical(values))
            read_back = _read_back(contents.optim, values, tensors, allow_pickle=allow_pickle, records=records)
            if not tensors:
                _check_text(values, bytes(optim))
            shared = _plain_groups(contents.optim)
            if tensors:  # JSON in the manifest cannot contain tensors
                value, optim = to_plain(contents.optim), None
                files[DESCRIPTION_FILE] = encode_extra("optim", value, allow_pickle=allow_pickle, records=records)
        params = {key: ParamInfo(shape) for key, shape in contents.params.items()}
        of_weights = contents.weights, contents.weights_dtype, self.weights_name
        model = ModelInfo(params, dict(contents.aliases), *of_weights, views=tuple(index.facts.views))
        manifest = Manifest(
            files={},
            world_size=contents.world_size,
            model=model,
            has_optim=contents.optim is not None,
            optim=optim,
            created_ns=0,
            version=version_for(model, has_trees=bool(index.trees)),
        )
        return Prepared(contents.content, shared, files, read_back, manifest)

    def _copied(self, reader: Checkpoint, *, with_optim: bool) -> Prepared:
        """Return the same, with the small files of a checkpoint of this format, which are not decoded.

        `with_optim` False: the new checkpoint gets no optimizer.
        """
        first = min((name for name in reader.files if name.startswith("optim")), default=None)
        metadata = reader.files[first].header.metadata if first is not None and with_optim else {}
        files = {name: reader.small_file(name) for name in reader.manifest.files if name.startswith("extra/")}
        model = replace(reader.manifest.model, weights_name=self.weights_name)
        version = version_for(model, has_trees=bool(reader.trees))
        manifest = replace(reader.manifest, model=model, version=version, summary=None)
        if not with_optim:
            files.pop(DESCRIPTION_FILE, None)
            manifest = replace(manifest, has_optim=False, optim=None)
        manifest = replace(manifest, thinned=None)  # of the checkpoint that was thinned alone
        content = manifest.model.content(has_optim=manifest.has_optim)
        return Prepared(content, metadata.get("param_groups", ""), files, None, manifest)

    def files(
        self, tensors: Mapping[Half, Sequence[PlannedTensor]], shared: str, *, most_nbytes: int, num_ranks: int
    ) -> list[PlannedFile]:
        return [
            file
            for half, planned in tensors.items()
            for file in self._of_half(half, planned, shared, most_nbytes, num_ranks)
        ]

    def _of_half(
        self, half: Half, tensors: Sequence[PlannedTensor], shared: str, most_nbytes: int, num_ranks: int
    ) -> list[PlannedFile]:
        """Plan files with the names that Hugging Face uses."""
        stem = self.weights_name if half == "model" else half
        metadata = _PLAIN | ({"param_groups": shared} if half == "optim" and shared else {})
        header = Header.of(((tensor.key, tensor.dtype, tensor.shape) for tensor in tensors), metadata)
        left = iter(tensors)
        per_file = [list(islice(left, num)) for num in header.files_within(most_nbytes, _PLAIN)]
        per_file.sort(key=_has_no_weight)  # transformers reads the dtype of a model from the first file
        planned = []
        for number, in_file in enumerate(per_file, start=1):
            name = (
                f"{stem}.safetensors" if len(per_file) == 1 else f"{stem}-{number:05}-of-{len(per_file):05}.safetensors"
            )
            if len(per_file) > 1:
                header = Header.of(
                    ((tensor.key, tensor.dtype, tensor.shape) for tensor in in_file),
                    metadata if number == 1 else _PLAIN,
                )
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
        for stem in (self.weights_name, "optim", "state"):
            split = [file for file in files if file.name.startswith(f"{stem}-")]
            if split:
                beside.append((f"{stem}{INDEX}", _index_of(split)))
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
    return PlannedFile(
        name=name,
        half=half,
        head=header.encoded(),
        tensors=tuple(tensors),
        starts=tuple(entry.start for entry in entries),
        nbytes_of_data=header.data_nbytes,
        segment_nbytes=segment_nbytes((entry.stop - entry.start for entry in entries), num_ranks),
        tensors_in=header.tensors_in,
    )


def _check_text(values: Mapping[str, Any], text: bytes) -> None:
    """Raise CheckpointError for the JSON of an optimizer that no reader accepts."""
    check_density(_WHERE, text)
    if len(text) > MOST_NBYTES // 2:
        params = values["params"]
        largest = max(params, key=lambda fqn: len(json.dumps(params[fqn])))
        raise CheckpointError(
            f"{largest}: the description of its state takes most of {len(text)} bytes, and a reader accepts only "
            f"{MOST_NBYTES // 2}: keep large values as tensors"
        )


def _read_back(
    optim: OptimDescription,
    values: Mapping[str, Any],
    tensors: Sequence[torch.Tensor],
    *,
    allow_pickle: bool,
    records: Mapping[str, type],
) -> OptimDescription:
    """Return a description as a reader will decode it from its JSON values. Raises CheckpointError if no reader accepts it.

    Parameters that are described by text alone are read as they are.
    """
    others = {fqn: values["params"][fqn] for fqn, param in optim.params.items() if not is_text_alone(param)}
    text = json.dumps({**values, "params": others}, separators=(",", ":")).encode()
    try:
        read = decoded(_WHERE, parse_json(_WHERE, text), tensors, allow_pickle=allow_pickle, records=records)
    except CheckpointError as error:
        raise CheckpointError(f"nothing was saved, because it could not be loaded: {error}") from error
    return dataclasses.replace(read, params={fqn: read.params.get(fqn, param) for fqn, param in optim.params.items()})


def _plain_groups(description: OptimDescription) -> str:
    """Return the param groups as JSON for readers without this library. The exact values are in the manifest."""

    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else str(value)

    def named(value: Any) -> Any:
        """Return the value with keys that JSON allows."""
        if isinstance(value, Mapping):
            return {key if isinstance(key, (str, int, float)) else str(key): named(item) for key, item in value.items()}
        return [named(item) for item in value] if isinstance(value, (list, tuple)) else value

    groups = [{**named(dict(group.hyperparameters)), "params": list(group.params)} for group in description.groups]
    return json.dumps(groups, default=plain)


def _index_of(files: Sequence[PlannedFile]) -> bytes:
    """Return the index of a split half, as Hugging Face writes it: the file of each tensor."""
    index = {
        "metadata": {"total_size": sum(file.nbytes_of_data for file in files)},
        "weight_map": {tensor.key: file.name for file in files for tensor in file.tensors},
    }
    return json.dumps(index, indent=2).encode() + b"\n"
