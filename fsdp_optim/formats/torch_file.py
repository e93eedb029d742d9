"""Plain torch files, in which `torch.save` has written a model and an optimizer, in one file or in a folder of files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import prod
from typing import Any

from fsdp_optim.errors import CheckpointError, shortened
from fsdp_optim.formats.base import StoredTensor
from fsdp_optim.formats.checkpoint import MOST_INDEX_NBYTES
from fsdp_optim.formats.codec import Withheld
from fsdp_optim.formats.foreign import ForeignFormat, ForeignReader, Source, tensors_in
from fsdp_optim.formats.hugging_face import HUGGING_FACE, check_index, weight_map_of
from fsdp_optim.formats.manifest import NAME
from fsdp_optim.formats.pickle_table import Unread
from fsdp_optim.formats.torch_archive import TorchArchive, is_torch_archive, read_archive
from fsdp_optim.formats.torch_parts import TorchParts, is_extra_state, joined_optims, parts_of
from fsdp_optim.formats.tree import unread_in
from fsdp_optim.storage.base import Opened

_INDEX = ".bin.index.json"
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".th", ".tar")
_MODEL_FILES = ("pytorch_model.bin", "pytorch_model_fsdp.bin", "model.pt", "model.pth")
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_OPTIM_FILES = ("optimizer.bin", "optimizer.pt", "optim.pt", "optim.pth")
_EXTRA_FILES = (
    *("train.pt", "trainer.pt", "scheduler.bin", "scheduler.pt", "scaler.pt", "sampler.bin", "training_args.bin"),
)
_OF_ONE_RANK = ("random_states_", "rng_state")  # files that say nothing about the model
_MOST_EXTRA_NBYTES = 64 << 20  # of the tensors in one value of the trainer


class TorchFile(ForeignFormat):
    """Full checkpoints in files of `torch.save`."""

    name = "torch"

    def recognises(self, opened: Opened) -> bool:
        if opened.selected:
            return opened.selected.endswith(_INDEX) or is_torch_archive(opened, opened.selected)
        try:
            names = [name for name in opened.names() if "/" not in name]
        except CheckpointError:
            return False
        if NAME in names:
            return False
        if any(name.endswith(".safetensors") for name in names):
            return any(name in names for name in _OPTIM_FILES) and any(name in names for name in _SAFETENSORS)
        return any(name.endswith(_INDEX) for name in names) or any(
            is_torch_archive(opened, name) for name in names if name.endswith(_SUFFIXES)
        )

    def open(self, opened: Opened, *, verify: bool) -> ForeignReader:
        files = _Files.of(opened)
        content = _Content(opened)
        if files.model.endswith(_INDEX):
            content.add_index(files.model)
        elif files.model in _SAFETENSORS:
            content.add_safetensors(files.model, verify=verify)
        elif files.model:
            content.add(files.model)
        if files.optim:
            content.add(files.optim)
        for name in files.extras:
            content.add_extra(name)
        return content.reader(self.name)


TORCH_FILE = TorchFile()


@dataclass(frozen=True)
class _Files:
    """The names of the files to read; "" for none. `model` may be a file that has everything."""

    model: str = ""
    optim: str = ""
    extras: Sequence[str] = ()

    @classmethod
    def of(cls, opened: Opened) -> _Files:
        if opened.selected:
            return cls(opened.selected)
        names = [name for name in opened.names() if "/" not in name]
        safe = [name for name in reversed(_SAFETENSORS) if name in names]
        indices = [name for name in names if name.endswith(_INDEX)]
        whole = [name for name in _MODEL_FILES if name in names]
        models = safe[:1] or indices or whole
        optims = [name for name in _OPTIM_FILES if name in names]
        extras = [name for name in _EXTRA_FILES if name in names]
        if not models:
            models = [
                name
                for name in names
                if name.endswith(_SUFFIXES)
                and name not in (*_OPTIM_FILES, *_EXTRA_FILES)
                and not name.startswith(_OF_ONE_RANK)
                and is_torch_archive(opened, name)
            ]
        for found in (models, optims):
            if len(found) > 1:
                raise CheckpointError(
                    f"{opened.where}: has {len(found)} torch files of the same kind: give the path of one of them: "
                    f"{shortened(found)}"
                )
        if not models and not optims:
            raise CheckpointError(f"{opened.where}: has no file of a model or an optimizer")
        return cls(models[0] if models else "", optims[0] if optims else "", extras)


@dataclass
class _Content:
    """The model and the optimizer that have been found in the files so far."""

    opened: Opened
    model: dict[str, StoredTensor] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    optim: Mapping[str, Any] | None = None
    where_optim: str = ""
    num_optims: int = 1
    extras: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    pickled: list[Callable[[], Mapping[str, Any]]] = field(default_factory=list)

    def add(self, name: str) -> None:
        """Add all parts of a file."""
        archive = self._archive(name)
        parts = parts_of(archive.where, archive.value)
        if parts.model is not None:
            self._add_model(archive, parts.model, parts.where_model)
        if parts.optims:
            if self.optim is not None:
                raise CheckpointError(
                    f"{archive.where}: has an optimizer, and so has {self.where_optim}: give the path of one of the files"
                )
            joined = joined_optims(f"{archive.where}: {parts.where_optim}", parts.optims)
            self.optim, self.where_optim, self.num_optims = _with_keys(joined), archive.where, len(parts.optims)
        self._add_rest(archive, parts)

    def add_extra(self, name: str) -> None:
        """Add a file of the trainer under the first part of its name."""
        archive, stem = self._archive(name), name.partition(".")[0]
        self.extras[stem] = _value(archive, stem, archive.value)
        if isinstance(self.extras[stem], Withheld):
            self.pickled.append(lambda: {stem: _real(archive, stem, archive.unpickled())})

    def add_index(self, name: str) -> None:
        """Add the weights of all files that an index names."""
        path = self.opened.named(name)
        text = self.opened.read_whole(name, most_nbytes=MOST_INDEX_NBYTES)
        self.digests.append(sha256(text).hexdigest())
        listed = weight_map_of(path, text)
        for file in sorted(set(listed.values())):
            archive = self._archive(file)
            parts = parts_of(archive.where, archive.value)
            if parts.model is None:
                raise CheckpointError(f"{archive.where}: has no weights, but {path} names it")
            self._add_model(archive, parts.model, parts.where_model)
        check_index(path, {key: file for key, file in listed.items() if not is_extra_state(key)}, self._files_of())

    def add_safetensors(self, name: str, *, verify: bool) -> None:
        """Add the weights of safetensors files beside an optimizer of torch."""
        found = HUGGING_FACE.open_files(self.opened, name)
        self.model.update(found.model)
        self.digests.append(found.metadata_digest)

    def reader(self, format_name: str) -> ForeignReader:
        return ForeignReader(
            self.opened,
            format_name,
            self.model,
            self.optim,
            self.sources,
            extra_values=self.extras or None,
            module_values=self.modules,
            num_optims=self.num_optims,
            pickled=self._unpickled if self.pickled else None,
            metadata_digest=sha256(" ".join(self.digests).encode()).hexdigest(),
        )

    def _unpickled(self) -> Mapping[str, Any]:
        return {**self.extras, **{key: item for load in self.pickled for key, item in load().items()}}

    def _archive(self, name: str) -> TorchArchive:
        archive = read_archive(self.opened, name)
        self.sources.update(archive.sources)
        self.digests.append(archive.digest)
        return archive

    def _files_of(self) -> Mapping[str, str]:
        return {key: self.sources[s.file].file if s.file in self.sources else s.file for key, s in self.model.items()}

    def _add_model(self, archive: TorchArchive, model: Mapping[str, Any], key: str) -> None:
        versions = getattr(model, "_metadata", None)
        for name, value in model.items():
            if name in self.model or name in self.modules:
                raise CheckpointError(f"{archive.where}: {name} is in another file too")
            if is_extra_state(name) or not isinstance(value, (StoredTensor, Unread)):
                path = name.rpartition(".")[0]
                version = versions[path].get("version") if isinstance(versions, dict) and path in versions else None
                kept = _value(archive, name, value)
                self.modules[name] = kept if isinstance(kept, Withheld) else [version, kept]
            elif isinstance(value, StoredTensor):
                self.model[name] = replace(value, key=name, request_nbytes=self.opened.request_nbytes)
            else:
                raise CheckpointError(
                    f"{archive.where}: {key}[{name!r}] is a {_what(value)}; only plain tensors are read: save a plain copy"
                )

    def _add_rest(self, archive: TorchArchive, parts: TorchParts) -> None:
        withheld = []
        for key, value in parts.rest.items():
            name = key if isinstance(key, str) else repr(key)
            self.extras[name] = _value(archive, name, value)
            if isinstance(self.extras[name], Withheld):
                withheld.append((key, name))

        def real() -> Mapping[str, Any]:
            tree: Any = archive.unpickled()
            for key in parts.path:
                tree = tree[key]
            return {name: _real(archive, name, tree[key]) for key, name in withheld}

        if withheld:
            self.pickled.append(real)


def _with_keys(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same full dict with a name for each tensor; tensors with the same elements get one name."""
    names: dict[tuple[Any, ...], str] = {}

    def keyed(value: Any, path: str) -> Any:
        if isinstance(value, StoredTensor):
            place = (value.file, value.start, value.dtype, value.shape)
            return replace(value, key=names.setdefault(place, path) if prod(value.shape) else path)
        if isinstance(value, Mapping):
            return {key: keyed(item, f"{path}.{key}" if path else f"{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            items = (keyed(item, f"{path}.{index}") for index, item in enumerate(value))
            return type(value)(items) if type(value) in (list, tuple) else value
        return value

    named: Mapping[str, Any] = keyed(tree, "")
    return named


def _value(archive: TorchArchive, name: str, value: Any) -> Any:
    """A value of the trainer with its tensors, or Withheld for an object that is not read."""
    unread = unread_in(value)
    if unread is not None:
        return Withheld(
            f"{archive.where}: {name} has an object of the class {unread.what}, and making it can run any code: give "
            "allow_pickle=True if you trust the author of the file"
        )
    return _real(archive, name, value)


def _real(archive: TorchArchive, name: str, value: Any) -> Any:
    nbytes = sum(prod(stored.shape) * stored.itemsize for stored in tensors_in(value))
    if nbytes > _MOST_EXTRA_NBYTES:
        return Withheld(
            f"{archive.where}: {name} has tensors of {nbytes} bytes, and at most {_MOST_EXTRA_NBYTES} are read for each value "
            "besides the model and the optimizer: read them with torch.load(..., mmap=True)"
        )
    return archive.materialised(value)


def _what(value: Any) -> str:
    return value.what if isinstance(value, Unread) else type(value).__name__
