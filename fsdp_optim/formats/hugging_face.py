"""Folders of Hugging Face, and plain safetensors files of any origin: weights, in one file or in several with an index."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec
from xxhash import xxh3_128

from fsdp_optim.errors import CheckpointError, shortened
from fsdp_optim.formats.base import StoredTensor
from fsdp_optim.formats.checkpoint import MOST_INDEX_NBYTES
from fsdp_optim.formats.distrust import distrusted
from fsdp_optim.formats.foreign import ForeignFormat, ForeignReader
from fsdp_optim.formats.header import Header, length_of_header, parse_header
from fsdp_optim.formats.json_text import parse_json
from fsdp_optim.formats.manifest import NAME
from fsdp_optim.storage.base import Opened, check_inside

_SUFFIX, _INDEX = ".safetensors", ".safetensors.index.json"
_WHOLE = "model.safetensors"
_SPLIT = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.safetensors")
_OF_OUR_SAVES = re.compile(r"optim(-\d{5}-of-\d{5})?\.safetensors|extra/.+|.+\.safetensors\.sums")


class HuggingFace(ForeignFormat):
    """Weights as `save_pretrained`, `save_file` and similar tools write them; without an optimizer."""

    name = "safetensors"

    def recognises(self, opened: Opened) -> bool:
        if opened.selected:
            return opened.selected.endswith((_SUFFIX, _INDEX))
        try:
            names = opened.names()
        except CheckpointError:
            return False
        if NAME in names or any(_OF_OUR_SAVES.fullmatch(name) for name in names):
            return False  # of a save of this library that did not end, or has lost its manifest
        return any(name.endswith(_SUFFIX) and "/" not in name for name in names)

    def open(self, opened: Opened, *, verify: bool) -> ForeignReader:
        return self.open_files(opened, opened.selected)

    def open_files(self, opened: Opened, selected: str) -> ForeignReader:
        """Open the file or the index `selected`; "": those of the folder."""
        digest = xxh3_128()
        listed: Mapping[str, str] | None = None
        index = self._index(opened, selected)
        if index is not None:
            text = opened.read_whole(index, most_nbytes=MOST_INDEX_NBYTES)
            digest.update(text)
            listed = weight_map_of(opened.named(index), text)
            files: Sequence[str] = sorted(set(listed.values()))
        else:
            files = self._files(opened, selected)
        model: dict[str, StoredTensor] = {}
        for name in files:
            header, offset = _header(opened, name, digest)
            for entry in header.entries:
                if entry.key in model:
                    raise CheckpointError(f"{opened.named(name)}: {entry.key} is in {model[entry.key].file} too")
                model[entry.key] = StoredTensor(
                    entry.key,
                    entry.dtype,
                    entry.shape,
                    name,
                    offset + entry.start,
                    request_nbytes=opened.request_nbytes,
                )
        if listed is not None:
            check_index(opened.named(str(index)), listed, {key: stored.file for key, stored in model.items()})
        return ForeignReader(opened, self.name, model, metadata_digest=digest.hexdigest())

    def _index(self, opened: Opened, selected: str) -> str | None:
        """The index to read; None if the tensors are in files without an index."""
        if selected:
            return selected if selected.endswith(_INDEX) else None
        found = [name for name in opened.names() if name.endswith(_INDEX) and "/" not in name]
        if len(found) > 1 and _WHOLE.replace(_SUFFIX, _INDEX) in found:
            return _WHOLE.replace(_SUFFIX, _INDEX)
        if len(found) > 1:
            raise CheckpointError(
                f"{opened.where}: has several indices, {', '.join(found)}: give the path of one of them"
            )
        return found[0] if found else None

    def _files(self, opened: Opened, selected: str) -> Sequence[str]:
        """The files of a place without an index."""
        if selected:
            return [selected]
        found = [name for name in opened.names() if name.endswith(_SUFFIX) and "/" not in name]
        if _WHOLE in found:
            return [_WHOLE]
        split = [matched for name in found if (matched := _SPLIT.fullmatch(name))]
        stems = {(one[1], one[3]) for one in split}
        if len(split) == len(found) and len(stems) == 1:
            total = int(split[0][3])
            missing = sorted(set(range(1, total + 1)) - {int(one[2]) for one in split})
            if missing or len(split) != total:
                raise CheckpointError(
                    f"{opened.where}: {len(split)} of {total} files are there; number {missing[0] if missing else 0} is missing"
                )
            return found
        if len(found) > 1:
            raise CheckpointError(
                f"{opened.where}: has {len(found)} safetensors files and no index that names those which belong together: give "
                f"the path of one of them: {shortened(found)}"
            )
        return found


HUGGING_FACE = HuggingFace()


def _header(opened: Opened, name: str, digest: xxh3_128) -> tuple[Header, int]:
    """The header of a file, and the byte at which its data begins."""
    path, nbytes = opened.named(name), opened.size_of(name)
    prefix = opened.read(name, 0, min(8, nbytes))
    text = opened.read(name, 8, length_of_header(path, prefix, nbytes))
    digest.update(prefix + text)
    return parse_header(path, text, nbytes - 8 - len(text)), 8 + len(text)


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def weight_map_of(path: str, text: bytes) -> Mapping[str, str]:
    """The file of each tensor, as an index file says. Raises CheckpointError for a damaged index."""
    with distrusted(path):
        listed = msgspec.convert(parse_json(path, text), _Index).weight_map
        for file in listed.values():
            check_inside(path, file)
        return listed


def check_index(path: str, listed: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raise CheckpointError unless the index and the files name the same tensors. `found`: the file of each tensor."""
    for key in {**listed, **found}:
        is_in = found.get(key, "in no file")
        if listed.get(key) != is_in:
            raise CheckpointError(f"{path}: says that {key} is in {listed.get(key)}, but it is {is_in}")
