"""An open checkpoint of several models, of which a caller wants some, or one by itself under its own names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from msgspec import structs

from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.formats.base.index import CheckpointIndex, SavedOptim, StoredExtra, StoredOptim
from fsdp_optim.formats.base.protocols import MODULES, Reader
from fsdp_optim.formats.base.records import StoredTensor

_STATE = "state."  # before the keys of an optimizer's tensors


@dataclass(frozen=True)
class Choice:
    """What a caller wants of a checkpoint of several models.

    Attributes:
        models: the names of the models with the weights to read.
        with_optim: the names of the models with the optimizers to read.
        alone: whether there is one, which is read as a checkpoint of that model, under its own names and without values of the
            trainer.
        renamed: a function from a name in the checkpoint to that of the live models, which begins with the name of one.
    """

    models: tuple[str, ...]
    with_optim: tuple[str, ...]
    alone: bool = False
    renamed: Callable[[str], str] = str

    def of_weights(self, name: str) -> str | None:
        """Return the name of a parameter, or of another part of a model, as the caller has it; None for other models."""
        return self._chosen(name, self.models)

    def of_optim(self, name: str) -> str | None:
        """Return the same for a parameter of an optimizer."""
        return self._chosen(name, self.with_optim)

    def of_key(self, key: str) -> str | None:
        """Return the same for the key of an optimizer's tensor; the key of another format stays as it is."""
        if not key.startswith(_STATE):
            return key
        name = self.of_optim(key.removeprefix(_STATE))
        return _STATE + name if name is not None else None

    def _chosen(self, name: str, models: Sequence[str]) -> str | None:
        model, dot, rest = str(self.renamed(name)).partition(".")
        if not dot or model not in models:
            return None
        return rest if self.alone else name

    def index(self, index: CheckpointIndex) -> CheckpointIndex:
        """Return what an index says about the chosen models."""
        extras = {
            name: _OfModels(extra, self) if name == MODULES else extra
            for name, extra in index.extras.items()
            if name == MODULES or not self.alone
        }
        has_all = not self.alone and set(index.facts.models) <= set(self.models)
        facts = replace(
            index.facts,
            models=() if self.alone else tuple(model for model in index.facts.models if model in self.models),
            with_optim=() if self.alone else tuple(m for m in index.facts.with_optim if m in self.with_optim),
            wrapper=index.facts.wrapper if has_all else "",  # of all models together
        )
        aliases = {alias: self.of_weights(fqn) for alias, fqn in _kept(index.aliases, self.of_weights)}
        return replace(
            index,
            where=f"{index.where}/{self.models[0]}" if self.alone else index.where,
            weights=dict(_renamed(index.weights, self.of_weights)),
            facts=facts,
            aliases={alias: fqn for alias, fqn in aliases.items() if fqn is not None},
            optim=self._optim(index) if index.optim is not None else None,
            extras=extras,
            trees={} if self.alone else index.trees,
            left_out=dict(_kept(index.left_out, self.of_weights)),
        )

    def _optim(self, index: CheckpointIndex) -> StoredOptim | None:
        stored, is_ours = index.optim, bool(index.facts.models)
        if stored is None or (is_ours and not set(index.facts.with_optim) & set(self.with_optim)):
            return None
        tensors = dict(_renamed(stored.tensors, self.of_key)) if is_ours else stored.tensors

        def decode(allow_pickle: bool, records: Mapping[str, type]) -> SavedOptim:
            return _of_optim(stored.decoded(allow_pickle=allow_pickle, records=records), self)

        return replace(stored, tensors=tensors, decode=decode)


@dataclass(frozen=True)
class SomeModels(Reader):
    """The `Reader` of some models of a checkpoint, which it closes with itself."""

    reader: Reader
    choice: Choice

    @cached_property
    def index(self) -> CheckpointIndex:
        return self.choice.index(self.reader.index)

    def read(
        self, extents: Mapping[str, Sequence[Extent]], did_read: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        self.reader.read(extents, did_read)

    def verified(self) -> SomeModels:
        return SomeModels(self.reader.verified(), self.choice)

    def check_unchanged(self) -> None:
        self.reader.check_unchanged()

    def close(self) -> None:
        self.reader.close()
        self.__dict__.pop("index", None)


@dataclass(frozen=True)
class _OfModels(StoredExtra):
    """The values of modules, of the chosen models alone."""

    extra: StoredExtra
    choice: Choice

    def decoded(self, *, allow_pickle: bool) -> Any:
        return self._chosen(self.extra.decoded(allow_pickle=allow_pickle))

    def decoded_each(self, *, allow_pickle: bool) -> Any:
        return self._chosen(self.extra.decoded_each(allow_pickle=allow_pickle))

    def _chosen(self, values: Any) -> Any:
        return dict(_kept(values, self.choice.of_weights)) if isinstance(values, Mapping) else values


def _kept(values: Mapping[str, Any], name_of: Callable[[str], str | None]) -> Iterator[tuple[str, Any]]:
    """Yield the values that have a name, each under that name."""
    for key, value in values.items():
        name = name_of(key)
        if name is not None:
            yield name, value


def _renamed(
    stored: Mapping[str, StoredTensor], name_of: Callable[[str], str | None]
) -> Iterator[tuple[str, StoredTensor]]:
    for name, tensor in _kept(stored, name_of):
        yield name, tensor if tensor.key == name else structs.replace(tensor, key=name)


def _of_optim(saved: SavedOptim, choice: Choice) -> SavedOptim:
    """Return the parameters of the chosen models.

    A dict that counts parameters by ids says nothing about models, and stays as it is.
    """
    full = saved.full
    if "param_groups" not in full:  # torch's flattened form: a key for each value
        return replace(saved, full={key: value for key, value in full.items() if _is_chosen(key, choice)})
    named = [*full.get("state", ()), *(name for group in full["param_groups"] for name in group.get("params", ()))]
    if not all(isinstance(name, str) for name in named):
        return saved
    state = {name: _values(values, choice) for name, values in _kept(full.get("state", {}), choice.of_optim)}
    groups = [
        {**group, "params": [name for name in map(choice.of_optim, group["params"]) if name is not None]}
        for group in full["param_groups"]
    ]
    chosen = [number for number, group in enumerate(groups) if group["params"]]
    new = {**full, "state": state, "param_groups": [groups[number] for number in chosen]}
    if "kinds" in full:
        new["kinds"] = dict(_kept(full["kinds"], choice.of_optim))
    classes = full.get("optimizer_class")
    if isinstance(classes, (list, tuple)) and len(classes) == len(groups):
        new["optimizer_class"] = [classes[number] for number in chosen]
    others = {
        name: value
        for key, value in saved.other_keys.items()
        if (name := choice.of_optim(key) if "." in key else key) is not None
    }
    return replace(saved, full=new, other_keys=others, shapes=dict(_kept(saved.shapes, choice.of_optim)))


def _values(values: Mapping[Any, Any], choice: Choice) -> dict[Any, Any]:
    """Return the state of one parameter, whose tensors have the keys that the index has."""
    return {
        name: structs.replace(value, key=key)
        if isinstance(value, StoredTensor) and (key := choice.of_key(value.key)) not in (None, value.key)
        else value
        for name, value in values.items()
    }


def _is_chosen(key: str, choice: Choice) -> bool:
    section, _, name = key.partition(".")
    return section not in ("state", "param_groups") or choice.of_optim(name) is not None
