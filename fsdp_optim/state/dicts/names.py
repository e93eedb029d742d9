"""The FQNs that the ids and names of a full dict stand for, for a given model and optimizer.

Names may have components that wrappers insert (`WrappedNames`): no module shows there whether a component is a wrapper's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fsdp_optim.state.dicts.order import Counted
from fsdp_optim.view import ModelView


@dataclass(frozen=True)
class Names:
    """The FQNs that the ids and names of a full dict stand for, for a given model and optimizer.

    Attributes:
        groups: the FQNs of each of the optimizer's groups, in the order of their ids.
        aliases: other FQN of a tied parameter -> its FQN.
        units: the FQNs of each live parameter, which can be in one group only.
        wrapper_parts: name components that wrappers insert, and that are not part of an FQN.
        unit_order: FQNs as fairscale's own full dict counts them; None for a model without fairscale units.
        model_order: all FQNs of the groups, in the unwrapped model's order.
        unknown_order: why ids without names cannot count these parameters; empty where they can.
        given: FQN in a dict that was written without `name_of` -> name from `name_of`.
        of_model: the names of all parameters of this rank's model; those that the optimizer has not are names of others.
    """

    groups: tuple[tuple[str, ...], ...]
    aliases: Mapping[str, str]
    unit_order: tuple[str, ...] | None = None
    units: tuple[tuple[str, ...], ...] = ()
    wrapper_parts: frozenset[str] = frozenset()
    model_order: tuple[str, ...] = ()
    unknown_order: str = ""
    given: Mapping[str, str] = field(default_factory=dict)
    of_model: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        counted: Sequence[Counted],
        view: ModelView,
        units: tuple[tuple[str, ...], ...],
        model_order: tuple[str, ...],
    ) -> Names:
        return cls(
            groups=tuple(group.fqns for group in counted),
            aliases=view.aliases,
            unit_order=view.unit_order,
            units=units,
            wrapper_parts=view.wrapper_parts,
            model_order=model_order,
            unknown_order=next((group.unknown for group in counted if group.unknown), ""),
            of_model=frozenset(view.order),
        )

    @cached_property
    def known(self) -> frozenset[str]:
        return frozenset(fqn for group in self.groups for fqn in group)

    def canonical(self, fqn: str) -> str:
        """Return the model's FQN for a name in a full dict, which may contain wrapper parts; an unknown name unchanged."""
        if not self.given and fqn in self.known:
            return fqn  # nearly always
        clean = cut(fqn, self.wrapper_parts)
        given = self.given.get(fqn, self.given.get(clean))
        if given is not None:
            return self.aliases.get(given, given)
        if fqn in self.known or fqn in self.of_model:
            return fqn
        for name in (fqn, fqn.removeprefix("module."), clean.removeprefix("module.")):
            wrapped = self._wrapped.find(name)
            if wrapped is not None:
                return self.aliases.get(wrapped, wrapped)
        candidates = self._without_module.get(_without_module(clean), ())
        return self.aliases.get(candidates[0], candidates[0]) if len(candidates) == 1 else fqn

    def would_collide(self, name: str, other: str) -> bool:
        """Return whether two names in a file are equal without wrapper parts, and the first is not a name in the model."""
        if name in self.known or name in self.aliases or name in self.of_model:
            return False
        return _without_module(cut(name, self.wrapper_parts)) == _without_module(cut(other, self.wrapper_parts))

    @cached_property
    def _wrapped(self) -> WrappedNames:
        return WrappedNames({*self.known, *self.aliases}, self.wrapper_parts)

    @cached_property
    def _without_module(self) -> dict[str, list[str]]:
        """FQN without `module` components -> FQNs; DistributedDataParallel inside another wrapper leaves such components."""
        by_cut_name: dict[str, list[str]] = {}
        for name in sorted({*self.known, *self.aliases}):
            by_cut_name.setdefault(_without_module(name), []).append(name)
        return by_cut_name


def _without_module(fqn: str) -> str:
    return ".".join(part for part in fqn.split(".") if part != "module")


def cut(name: str, parts: frozenset[str]) -> str:
    """Return a name without the components `parts`."""
    return ".".join(part for part in name.split(".") if part not in parts)


class WrappedNames:
    """An index of a model's names, searched by names that may have components of wrappers, or lack components of the model.

    A module of the model may have the name of a wrapper's component (`_orig_mod`). So a name itself comes first, then the name
    that needs the fewest components cut. Where this leaves two names, neither is taken.
    """

    def __init__(self, known: Iterable[str], parts: frozenset[str]) -> None:
        self._known, self._parts = frozenset(known), parts
        self._by_cut: dict[str, list[str]] = {}
        for name in sorted(self._known):
            self._by_cut.setdefault(cut(name, parts), []).append(name)

    def find(self, name: str) -> str | None:
        """Return the name in the model, or None."""
        if name in self._known:
            return name
        candidates = self._by_cut.get(cut(name, self._parts), [])
        if len(candidates) > 1:
            inside = [candidate for candidate in candidates if self._is_inside(candidate, name)]
            most = max((candidate.count(".") for candidate in inside), default=0)
            candidates = [candidate for candidate in inside if candidate.count(".") == most]
        return candidates[0] if len(candidates) == 1 else None

    def _is_inside(self, short: str, long: str) -> bool:
        """Return whether `short` is `long` without some of the wrappers' components."""
        left = short.split(".")
        for part in long.split("."):
            if left and part == left[0]:
                left.pop(0)
            elif part not in self._parts:
                return False
        return not left
