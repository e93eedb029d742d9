"""A save under names that the caller gives in place of the model's names: the names, and the values under them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from msgspec import structs

from fsdp_optim.checkpoint.common.contents import SavedHalf, SavedValue
from fsdp_optim.checkpoint.load.matching import renamer
from fsdp_optim.errors import StateError
from fsdp_optim.formats.base.index import CheckpointIndex, SavedOptim
from fsdp_optim.options import Rename
from fsdp_optim.transport.agree import all_equal
from fsdp_optim.transport.base import RankGroup


@dataclass(frozen=True)
class SavedNames:
    """The names in a checkpoint. `new`: by model name, the new name of a parameter, buffer or module value that gets one."""

    new: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, group: RankGroup, rename: Rename | None, weights: SavedHalf, state: SavedHalf | None) -> SavedNames:
        """Agree on the names that `rename` gives. Called by all ranks.

        Raises StateError, the same on all ranks, for two parameters of one name, and for ranks that give different names.
        """
        if rename is None:
            return cls()
        view, values = weights.local.view, weights.local.module_values
        aliases = {**view.aliases, **values.aliases}
        fqns = dict.fromkeys([*weights.global_state.params, *weights.global_state.module_values])
        fqns.update(dict.fromkeys(state.global_state.params if state is not None else ()))
        new = _new_names(renamer(rename), [*fqns, *aliases])
        text = json.dumps({fqn: new.get(fqn, fqn) for fqn in fqns}, sort_keys=True)  # aliases may differ between stages
        is_same = all_equal(group, "renamed", text.encode())
        if not is_same:
            raise StateError("rename= gives other names on some ranks than on others: give the same one on all ranks")
        _check_distinct(new, fqns, aliases)
        return cls(new)

    def __call__(self, fqn: str) -> str:
        return self.new.get(fqn, fqn)

    @property
    def given(self) -> dict[str, str]:
        """By name in the checkpoint, the model's name where it differs."""
        return {new: fqn for fqn, new in self.new.items()}

    def of_half(self, half: SavedHalf) -> SavedHalf:
        """Return a half with its values under their new names."""
        if not self.new:
            return half
        values = {self(fqn): value for fqn, value in half.module_values.items()}
        return replace(half, tensors=tuple(map(self._of_value, half.tensors)), module_values=values)

    def _of_value(self, value: SavedValue) -> SavedValue:
        if value.fqn not in self.new:
            return value
        before = f"state.{value.fqn}" if value.is_state else value.fqn
        after = f"state.{self(value.fqn)}" if value.is_state else self(value.fqn)
        return structs.replace(value, stored_name=after + value.stored_name[len(before) :])

    def of_index(self, index: CheckpointIndex) -> CheckpointIndex:
        """Rename in an index what `of_half` does not rename: aliases, and weights that are left out."""
        if not self.new:
            return index
        aliases = {self(alias): self(fqn) for alias, fqn in index.aliases.items()}
        return replace(
            index,
            left_out={self(fqn): shape for fqn, shape in index.left_out.items()},
            aliases={alias: fqn for alias, fqn in aliases.items() if alias != fqn},
        )

    def of_optim(self, saved: SavedOptim) -> SavedOptim:
        """Return a saved optimizer with its parameters under their new names."""
        if not self.new:
            return saved
        full = saved.full
        groups = [{**group, "params": list(map(self, group["params"]))} for group in full["param_groups"]]
        named = {key: {self(fqn): values for fqn, values in full[key].items()} for key in ("state", "kinds")}
        shapes = {self(fqn): shape for fqn, shape in saved.shapes.items()}
        return replace(saved, full={**full, **named, "param_groups": groups}, shapes=shapes)


def _new_names(function: Callable[[str], str], names: Iterable[str]) -> dict[str, str]:
    new = {}
    for name in names:
        renamed = function(name)
        if not isinstance(renamed, str) or not renamed:
            raise StateError(f"rename returned {renamed!r} for {name}, which is not a name")
        if renamed != name:
            new[name] = renamed
    return new


def _check_distinct(new: Mapping[str, str], fqns: Iterable[str], aliases: Mapping[str, str]) -> None:
    """Raise StateError for two parameters that would have one name. The names of one tied parameter may fall together."""
    taken: dict[str, str] = {}
    for name in (*fqns, *aliases):
        stored, fqn = new.get(name, name), aliases.get(name, name)
        other = taken.setdefault(stored, fqn)
        if other != fqn:
            raise StateError(
                f"rename gives {other} and {name} the same name {stored}: a checkpoint has one parameter of a name, so give "
                "each one a name of its own"
            )
