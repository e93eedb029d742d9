"""Plain torch files, in which `torch.save` has written a model and an optimizer, in one file or in a folder of files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import prod
from typing import Any

from msgspec import structs

from fsdp_optim.errors import CheckpointError, shortened
from fsdp_optim.foreign.archive.safe_values import KINDS, of_file, restored
from fsdp_optim.foreign.archive.torch_archive import TorchArchive, is_torch_archive, read_archive
from fsdp_optim.foreign.hugging_face.reader import HUGGING_FACE, check_index, weight_map_of
from fsdp_optim.foreign.reader import ForeignFormat, ForeignReader, ForeignValues, Source, versioned
from fsdp_optim.foreign.torch.folder import EXTRAS, PER_RANK, checked_summary, rank_in, roles_in
from fsdp_optim.foreign.torch.folder import NAME as OUR_MANIFEST
from fsdp_optim.foreign.torch.roles import (
    TorchParts,
    is_no_tensor,
    joined_optims,
    parts_of,
    recorded_in,
    recorded_parts,
)
from fsdp_optim.formats.base.codec import Withheld
from fsdp_optim.formats.base.index import in_class_of, stored_in
from fsdp_optim.formats.base.protocols import COMMON, SavedWeights, StoredTensor
from fsdp_optim.formats.base.summary import ManifestSummary
from fsdp_optim.formats.base.unread import Unread, unread_in
from fsdp_optim.formats.own.manifest import NAME
from fsdp_optim.formats.own.small_files import MOST_INDEX_NBYTES
from fsdp_optim.storage.base import Opened
from fsdp_optim.tensors.model_dict import is_extra_state, versions_beside

_INDEX = ".bin.index.json"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".th", ".tar")
"""The ends of the names of torch files."""

_MODEL_FILES = ("pytorch_model.bin", "pytorch_model_fsdp.bin", "model.pt", "model.pth")
_PYTORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_OPTIM_FILES = ("optimizer.bin", "optimizer.pt", "optim.pt", "optim.pth")
_EXTRA_FILES = (
    *("train.pt", "trainer.pt", "scheduler.bin", "scheduler.pt", "scaler.pt", "sampler.bin", "training_args.bin"),
)
_OF_ONE_RANK = ("random_states_", "rng_state")  # files that say nothing about the model
_MOST_RANKS = 1 << 20
_MOST_EXTRA_NBYTES = 64 << 20  # of the tensors in one value of the trainer
_MOST_TIMES = 4  # bytes of the values of modules, in which tensors may share memory, for each byte of the files


class TorchFile(ForeignFormat):
    """Full checkpoints in files of `torch.save`."""

    name = "torch"
    claims_folders = False

    def recognises(self, opened: Opened) -> bool:
        if opened.selected:
            return opened.selected.endswith(_INDEX) or is_torch_archive(opened, opened.selected)
        try:
            names = [name for name in opened.names() if "/" not in name]
        except CheckpointError:
            return False
        if NAME in names:
            return False
        if OUR_MANIFEST in names:
            return True
        if any(name in names for name in _PYTORCH) and not any(name in names for name in _SAFETENSORS):
            return True
        if any(name.endswith(".safetensors") for name in names):
            return any(name in names for name in _OPTIM_FILES) and any(name in names for name in _SAFETENSORS)
        return any(name.endswith(_INDEX) for name in names) or any(
            is_torch_archive(opened, name) for name in names if name.endswith(SUFFIXES)
        )

    def open(self, opened: Opened, *, verify: bool) -> ForeignReader:
        content = _Content(opened, summary=checked_summary(opened))
        files = _Files.of(opened)
        if files.model.endswith(_INDEX):
            content.add_index(files.model)
        elif files.model in _SAFETENSORS:
            content.add_safetensors()
        elif files.model:
            content.add(files.model)
        if files.optim:
            content.add(files.optim)
        for name in files.extras:
            content.add_extra(name)
        for rank, name in files.of_ranks.items():
            content.add_rank(rank, name)
        return content.reader(self.name)


TORCH_FILE = TorchFile()


@dataclass(frozen=True)
class _Files:
    """The names of the files to read; "" for none. `model` may be a file that has everything. `of_ranks`: by rank."""

    model: str = ""
    optim: str = ""
    extras: Sequence[str] = ()
    of_ranks: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, opened: Opened) -> _Files:
        if opened.selected:
            return cls(opened.selected)
        names = [name for name in opened.names() if "/" not in name]
        safe = [name for name in _SAFETENSORS if name in names]
        indices = [name for name in names if name.endswith(_INDEX) and _PYTORCH[0] not in names]
        whole = [name for name in _MODEL_FILES if name in names]
        models = safe[:1] or indices or whole
        optims = [name for name in _OPTIM_FILES if name in names]
        extras = [name for name in _EXTRA_FILES if name in names]
        is_ours = OUR_MANIFEST in names
        of_ranks = {rank: name for name in names if is_ours and (rank := rank_in(name)) is not None}
        if is_ours:
            extras = [name for name in extras if name == EXTRAS[COMMON]]
        if not models:
            models = [
                name
                for name in names
                if name.endswith(SUFFIXES)
                and name not in (*_OPTIM_FILES, *_EXTRA_FILES, *of_ranks.values())
                and not name.startswith(_OF_ONE_RANK)
                and is_torch_archive(opened, name)
            ]
        for candidates in (models, optims):
            if len(candidates) > 1:
                raise CheckpointError(
                    f"{opened.where}: has {len(candidates)} torch files of the same kind: give the path of one of them: "
                    f"{shortened(candidates)}"
                )
        if not models and not optims and not is_ours:
            raise CheckpointError(f"{opened.where}: has no file of a model or an optimizer")
        return cls(models[0] if models else "", optims[0] if optims else "", extras, of_ranks)


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
    files: list[str] = field(default_factory=list)
    notes: Sequence[str] = ()
    digests: list[str] = field(default_factory=list)
    pickled: list[Callable[[], Mapping[str, Any]]] = field(default_factory=list)
    ranks: dict[int, Any] = field(default_factory=dict)
    summary: ManifestSummary | None = None

    def add(self, name: str) -> None:
        """Add all parts of a file."""
        archive = self._archive(name)
        roles = recorded_in(archive.value) or roles_in(self.opened, name)
        if roles is not None:
            parts = recorded_parts(archive.where, archive.value, roles)
        else:
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
        if self.summary is not None:  # the file has the values themselves, as they were given to save
            self._add_own(archive)
            return
        self.extras[stem] = _value(archive, stem, archive.value)
        if isinstance(self.extras[stem], Withheld):
            self.pickled.append(lambda: {stem: _real(archive, stem, archive.unpickled())})

    def _add_own(self, archive: TorchArchive) -> None:
        """Add the values of the trainer in a file that this library has written."""
        made = of_file(archive.where, _value(archive, "extra", archive.value))
        if isinstance(made, dict):
            self.extras.update({key if isinstance(key, str) else repr(key): item for key, item in made.items()})
        else:
            self.extras["extra"] = made
        if isinstance(made, Withheld):
            self.pickled.append(lambda: {"extra": of_file(archive.where, _real(archive, "extra", archive.unpickled()))})

    def add_rank(self, rank: int, name: str) -> None:
        """Add the file of the values of one rank."""
        archive = self._archive(name)

        def pickled() -> Any:
            return of_file(archive.where, _real(archive, name, archive.unpickled()))

        made = of_file(archive.where, _value(archive, name, archive.value))
        self.ranks[rank] = ForeignValues(made, pickled) if isinstance(made, Withheld) else made

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

    def add_safetensors(self) -> None:
        """Add the weights of safetensors files beside an optimizer of torch, as of a folder without the optimizer."""
        reader = HUGGING_FACE.open_files(self.opened, "")
        self.notes = reader.notes
        self.files += reader.all_files()
        self.model.update(reader.model)
        self.digests.append(reader.metadata_digest)

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
            rank_extras=[self.ranks.get(rank) for rank in range(max(self.ranks, default=-1) + 1)],
            world_size=self.summary.world_size if self.summary is not None else len(self.ranks),
            step=self.summary.step if self.summary is not None else None,
            weights=SavedWeights(self.summary.weights, self.summary.weights_dtype)
            if self.summary is not None
            else SavedWeights(),
            pickled=self._unpickled if self.pickled else None,
            metadata_digest=sha256(" ".join(self.digests).encode()).hexdigest(),
            files=self.files,
            notes=self.notes,
        )

    def _unpickled(self) -> Mapping[str, Any]:
        return {**self.extras, **{key: item for load in self.pickled for key, item in load().items()}}

    def _archive(self, name: str) -> TorchArchive:
        archive = read_archive(self.opened, name)
        self.files.append(name)
        self.sources.update(archive.sources)
        self.digests.append(archive.digest)
        return archive

    def _files_of(self) -> Mapping[str, str]:
        return {key: self.sources[s.file].file if s.file in self.sources else s.file for key, s in self.model.items()}

    def _add_model(self, archive: TorchArchive, model: Mapping[str, Any], key: str) -> None:
        versions = versions_beside(model)
        left = max(_MOST_EXTRA_NBYTES, _MOST_TIMES * sum(map(self.opened.size_of, self.files)))
        for given, value in model.items():
            name = given if isinstance(given, str) else repr(given)
            if name in self.model or name in self.modules:
                raise CheckpointError(f"{archive.where}: {name} is in another file too")
            if is_extra_state(name) or not isinstance(value, (StoredTensor, Unread)) or is_no_tensor(value):
                kept = _value(archive, name, value, left)  # a part of the model, however large that is
                left -= _nbytes_in(value) if not isinstance(kept, Withheld) else 0
                self.modules |= versioned(versions, {name: kept})
            elif isinstance(value, StoredTensor):
                self.model[name] = structs.replace(value, key=name, request_nbytes=self.opened.request_nbytes)
            else:
                raise CheckpointError(
                    f"{archive.where}: {key}[{name!r}] is a {_what(value)}; only plain tensors are read: save a plain copy"
                )

    def _add_rest(self, archive: TorchArchive, parts: TorchParts) -> None:
        withheld = []
        kinds = parts.rest.get(KINDS, [])
        of_ranks = parts.rest.get(PER_RANK)
        is_by_rank = isinstance(of_ranks, dict) and all(
            type(rank) is int and 0 <= rank < _MOST_RANKS for rank in of_ranks
        )
        for key, value in parts.rest.items():
            if key == KINDS:
                continue
            if key == PER_RANK and is_by_rank:
                self._add_ranks(archive, parts.path, value, kinds)
                continue
            name = key if isinstance(key, str) else repr(key)
            self.extras[name] = restored(archive.where, _value(archive, name, value), kinds, (key,))
            if isinstance(self.extras[name], Withheld):
                withheld.append((key, name))

        def real() -> Mapping[str, Any]:
            tree = _inside(archive.unpickled(), parts.path)
            return {
                name: restored(archive.where, _real(archive, name, tree[key]), kinds, (key,)) for key, name in withheld
            }

        if withheld:
            self.pickled.append(real)

    def _add_ranks(self, archive: TorchArchive, path: Sequence[Any], of_ranks: Mapping[int, Any], kinds: Any) -> None:
        """Add the values of the ranks in a file that has everything."""
        for rank, value in of_ranks.items():
            name, at = f"{PER_RANK}[{rank}]", (PER_RANK, rank)
            made = _value(archive, name, value)

            def pickled(rank: int = rank, name: str = name, at: tuple[Any, ...] = at) -> Any:
                tree = _inside(archive.unpickled(), (*path, PER_RANK))
                return restored(archive.where, _real(archive, name, tree[rank]), kinds, at)

            self.ranks[rank] = (
                ForeignValues(made, pickled) if isinstance(made, Withheld) else restored(archive.where, made, kinds, at)
            )


def _inside(tree: Any, path: Sequence[Any]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _with_keys(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the same full dict with a name for each tensor; tensors with the same elements get one name."""
    names: dict[tuple[Any, ...], str] = {}

    def keyed(value: Any, path: str) -> Any:
        if isinstance(value, StoredTensor):
            place = (value.file, value.start, value.dtype, value.shape)
            return structs.replace(value, key=names.setdefault(place, path) if prod(value.shape) else path)
        if isinstance(value, Mapping):
            items_of = {key: keyed(item, f"{path}.{key}" if path else f"{key}") for key, item in value.items()}
            return in_class_of(value, items_of)
        if isinstance(value, (list, tuple)):
            items = (keyed(item, f"{path}.{index}") for index, item in enumerate(value))
            return type(value)(items) if type(value) in (list, tuple) else value
        return value

    named: Mapping[str, Any] = keyed(tree, "")
    return named


def _value(archive: TorchArchive, name: str, value: Any, most_nbytes: int = _MOST_EXTRA_NBYTES) -> Any:
    """Return a value of the trainer with its tensors, or Withheld for an object that is not read."""
    unread = unread_in(value)
    if unread is not None:
        return Withheld(
            f"{archive.where}: {name} has an object of the class {unread.what}, and making it can run any code: give "
            "allow_pickle=True if you trust the author of the file"
        )
    return _real(archive, name, value, most_nbytes)


def _real(archive: TorchArchive, name: str, value: Any, most_nbytes: int = _MOST_EXTRA_NBYTES) -> Any:
    nbytes = _nbytes_in(value)
    if nbytes > most_nbytes:
        return Withheld(
            f"{archive.where}: {name} has tensors of {nbytes} bytes, and at most {most_nbytes} are read for each value "
            "besides the model and the optimizer: read them with torch.load(..., mmap=True)",
            is_unsafe=False,
        )
    return archive.materialised(value)


def _nbytes_in(value: Any) -> int:
    return sum(prod(stored.shape) * stored.itemsize for stored in stored_in(value))


def _what(value: Any) -> str:
    return value.what if isinstance(value, Unread) else type(value).__name__
