"""The manifest, `fsdp_optim.json`, which lists the files. It is written last and makes a folder a checkpoint.

The classes below are the schema of its JSON. msgspec writes and reads them by their types, and rejects other types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.checksums import hex_of
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.json_text import check_density, parse_json
from fsdp_optim.formats.base.summary import ManagerRecord, ManifestSummary, Nbytes, TimeNs, content_of
from fsdp_optim.formats.own.folders import check_models
from fsdp_optim.storage.base import Opened, Undecided, check_name

NAME = "fsdp_optim.json"
MOST_NBYTES = 1 << 28  # in a manifest; a parameter needs some hundred
FORMAT, VERSION = "fsdp_optim", 5
_VERSION_OF_ALL_WEIGHTS, _VERSION_OF_SOME_WEIGHTS, _VERSION_OF_TREES = 2, 3, 4
MODEL = "model"
"""How the names of files with weights begin, unless the manifest says otherwise."""

RANK_EXTRA = "extra/rank-"
"""The beginning of the name of a file with the extra of one rank; five digits follow."""


_PARAMS, _OPTIM = "params", "optim"
_SORTED = msgspec.json.Encoder(order="sorted")

FINGERPRINT = "fingerprint.json"
"""The file of the fingerprints of all values, if the save has made them."""


class NewerVersion(Undecided):
    """The cause of a CheckpointError about a checkpoint that only a newer version of the library can read."""


class FileInfo(Struct, frozen=True):
    """One safetensors file: its size in bytes, and the hashes of its header and of its table of checksums (None: no table)."""

    nbytes: Nbytes = msgspec.field(name="size")
    header: str = msgspec.field(name="header_xxh3_64")
    sums: str | None = msgspec.field(name="sums_xxh3_64")


class ParamInfo(Struct, frozen=True):
    """One parameter or buffer of the model."""

    shape: tuple[int, ...]


class ModelInfo(Struct, frozen=True, omit_defaults=True):
    """The model: its parameters and buffers by FQN. `aliases`: other names, each with the stored FQN.

    `weights`: which of them the files have: "all", "trainable" or "none". `weights_dtype`: torch's name of the dtype to which
    floating-point weights were cast; None: they were saved as they were. `weights_name`: how the names of their files begin.
    `models`: the names of several models, each with a folder of its own; all FQNs begin with one of them.
    `views`: the Views through which the save has seen fused parameters, as text: facts for users, but for `fused_state`: the
    names of fused parameters whose state has their own names, and which the same View alone can load. `joint_steps`: optimizers
    that have stepped fused parameters as one.
    """

    params: dict[str, ParamInfo]
    aliases: dict[str, str]
    weights: Literal["all", "trainable", "none"] = "all"
    weights_dtype: str | None = None
    weights_name: str = MODEL
    models: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    fused_state: tuple[str, ...] = ()
    joint_steps: tuple[str, ...] = ()

    def content(self, *, has_optim: bool) -> str:
        """Return the `content` of a summary."""
        return content_of(self.params, has_optim=has_optim, weights=self.weights, weights_dtype=self.weights_dtype)


class ThinnedInfo(Struct, frozen=True):
    """What `thin` has taken from a checkpoint: its files, and the `content` of the summary that it had."""

    files: tuple[str, ...]
    content: str


class Manifest(Struct, frozen=True, kw_only=True):
    """The content of a manifest.

    Attributes:
        optim: the `canonical` text of the description of the optimizer, whose values take many times the memory; None if there is
            no optimizer, or if its description has a file of its own.
        summary: the summary at the beginning, under the key "brief"; None if an older version of the library saved.
        thinned: the record of `thin`, which has removed the optimizer; None otherwise.
        checksum: the hash of a manifest that was read; empty for a new one.
    """

    files: dict[str, FileInfo]
    world_size: Annotated[int, Meta(ge=1)]
    model: ModelInfo
    has_optim: bool
    optim: msgspec.Raw | None
    created_ns: TimeNs
    token: str = ""
    format: str = FORMAT
    version: int = 0
    summary: ManifestSummary | None = field(default=None, name="brief")
    thinned: ThinnedInfo | None = None
    checksum: str = ""

    @property
    def effective_summary(self) -> ManifestSummary:
        """The summary or, for a manifest without one, a summary that is made of the rest."""
        return self.summary if self.summary is not None else self.made_summary(0)

    def made_summary(
        self,
        sequence: int,
        step: int | None = None,
        keep_last: int | None = None,
        manager: ManagerRecord | None = None,
        wrapper: str = "",
    ) -> ManifestSummary:
        """Return a summary that agrees with the rest of the manifest."""
        return ManifestSummary(
            version=self.version,
            sequence=sequence,
            step=step,
            keep_last=keep_last,
            created_ns=self.created_ns,
            token=self.token,
            content=self.model.content(has_optim=self.has_optim),
            world_size=self.world_size,
            files={name: info.nbytes for name, info in self.files.items()},
            manager=manager,
            weights=self.model.weights,
            weights_dtype=self.model.weights_dtype,
            thinned_from=self.thinned.content if self.thinned is not None else None,
            wrapper=wrapper,
        )

    def encoded(self) -> bytes:
        """Return the bytes of the file."""
        values = msgspec.to_builtins(replace(self, optim=None))
        del values["checksum"]
        if self.thinned is None:
            del values["thinned"]
        values["brief"] = self.effective_summary.to_json()
        texts = {key: canonical(value) for key, value in values.items()}
        if self.optim is not None:
            texts["optim"] = bytes(self.optim)
        body = b"{%s}" % b",".join([b'"%s":%s' % (key.encode(), text) for key, text in sorted(texts.items())])
        check_density(NAME, body)  # refuses a text that no reader accepts
        return b'{"checksum":"%s","checkpoint":%s}\n' % (hex_of(body).encode(), body)


def version_for(model: ModelInfo, *, has_trees: bool) -> int:
    """Return the lowest version of the format that has all entries of a new manifest, so that older readers can read it.

    `has_trees`: some files have tensors of `state=`.
    """
    if model.models:
        return VERSION
    if has_trees:
        return _VERSION_OF_TREES
    is_plain = (model.weights, model.weights_dtype, model.weights_name) == ("all", None, MODEL)
    return _VERSION_OF_ALL_WEIGHTS if is_plain else _VERSION_OF_SOME_WEIGHTS


class _Head(Struct, frozen=True):
    """The fields that every version of the format has."""

    format: str
    version: int


class _Document(Struct, frozen=True):
    checksum: str
    checkpoint: dict[str, Any]


class _RawDocument(Struct, frozen=True):
    """The same with the texts of the values."""

    checksum: str
    checkpoint: dict[str, msgspec.Raw]

    @property
    def nbytes(self) -> int:
        """The length of the text as this library writes it: with nothing between its parts, and each key once."""
        texts = [b'{"checksum":"%s","checkpoint":{}}\n' % self.checksum.encode(), b"," * (len(self.checkpoint) - 1)]
        keys = sum(len(b'"%s":' % key.encode()) for key in self.checkpoint)
        return sum(map(len, texts)) + keys + sum(memoryview(text).nbytes for text in self.checkpoint.values())


def canonical(values: Any) -> bytes:
    """Return values as the JSON text that the checksum of a manifest covers."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def canonical_optim(values: Mapping[str, Any], *, plain: bool) -> bytes:
    """Return the same of a description of an optimizer.

    `plain`: whether names, words, lists and whole numbers are all that its parameters have, so that msgspec, which writes floats
    and unprintable characters in another way, gives the same text in a third of the time.
    """
    if not plain:
        return canonical(values)
    rest = canonical({**values, _PARAMS: {}})
    empty = b'"%s":{}}' % _PARAMS.encode()
    if not rest.endswith(empty):
        return canonical(msgspec.to_builtins(values))
    return b'%s"%s":%s}' % (rest[: -len(empty)], _PARAMS.encode(), _SORTED.encode(values[_PARAMS]))


def manifest_in(opened: Opened) -> Manifest:
    """Read and verify the manifest. Raises CheckpointError if it is missing, damaged, or of a newer version."""
    if not opened.has(NAME):
        raise CheckpointError(
            f"{opened.where}: has no {NAME}: it is not a checkpoint of this library, or its save did not finish"
        )
    path = opened.named(NAME)
    text = opened.read_whole(NAME, most_nbytes=MOST_NBYTES)
    check_density(path, text)
    text, optim = _with_optim_apart(text) or (text, None)
    is_apart = optim is not None
    values = parse_json(path, text)
    with as_checkpoint_error(path):
        document = msgspec.convert(values, _Document)
        head = msgspec.convert(document.checkpoint, _Head)
        if head.format != FORMAT:
            raise CheckpointError(f"{path}: has the format {head.format!r}, not {FORMAT!r}")
        if not 1 <= head.version <= VERSION:
            raise CheckpointError(
                f"{path}: has the schema version {head.version!r}; this fsdp_optim reads up to {VERSION}: install a newer one"
            ) from NewerVersion()
        checksum = document.checksum
        if not is_apart and not _is_as_written(text, checksum) and hex_of(canonical(document.checkpoint)) != checksum:
            raise CheckpointError(
                f"{path}: is not the manifest that was saved: its checksum differs; load another checkpoint"
            )
        summary = document.checkpoint.get("brief")
        fields = {**document.checkpoint, "checksum": checksum}
        if fields.get(_OPTIM) is not None:
            optim, fields[_OPTIM] = msgspec.Raw(canonical(fields[_OPTIM])), None
        manifest = replace(msgspec.convert(fields, Manifest), optim=optim)
        for name in (*manifest.files, *(manifest.thinned.files if manifest.thinned is not None else ())):
            check_name(path, name)
        check_models(path, manifest.model.models, manifest.files, manifest.model.params)
        for name in manifest.files:
            if name.startswith(RANK_EXTRA) and int(name.removeprefix(RANK_EXTRA)[:5]) >= manifest.world_size:
                raise ValueError(f"{name} is of a rank beyond the {manifest.world_size} ranks that saved")
        if summary is not None:
            _check_summary(path, manifest, ManifestSummary.from_json(path, summary))
        return manifest


def _with_optim_apart(text: bytes) -> tuple[bytes, msgspec.Raw] | None:
    """Return the text with null in the place of the optimizer's description, and the description.

    None for a text that was not written in this way, or has another checksum, and where there is no description.
    """
    try:
        document = msgspec.json.decode(text, type=_RawDocument)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    optim = document.checkpoint.get(_OPTIM)
    if (
        optim is None
        or bytes(optim) == b"null"
        or document.nbytes != len(text)
        or not _is_as_written(text, document.checksum)
    ):
        return None
    rest = {**document.checkpoint, _OPTIM: msgspec.Raw(b"null")}
    return msgspec.json.encode(replace(document, checkpoint=rest)), msgspec.Raw(bytes(optim))


def _check_summary(path: str, manifest: Manifest, summary: ManifestSummary) -> None:
    """Raise CheckpointError unless the summary agrees with the rest, because some readers read only the summary."""
    facts = summary.sequence, summary.step, summary.keep_last, summary.manager, summary.wrapper
    if manifest.made_summary(*facts) != summary:
        raise CheckpointError(f"{path}: its brief and the rest contradict each other; load another checkpoint")


def _is_as_written(text: bytes, checksum: str) -> bool:
    """Return whether the text has the checksum as it stands, so that its values need not be encoded again for the comparison."""
    prefix, suffix = b'{"checksum":"%s","checkpoint":' % checksum.encode(errors="replace"), b"}\n"
    if not text.startswith(prefix) or not text.endswith(suffix):
        return False
    return hex_of(memoryview(text)[len(prefix) : -len(suffix)]) == checksum
