"""Fused parameters whose state no View can cut: a save keeps it under their names, and a load finds it for the same fusion."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fsdp_optim.adapters import ModelReader
from fsdp_optim.errors import LayoutError, StateError, shortened
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.layout import Shape
from fsdp_optim.layout.views import BoundView, View
from fsdp_optim.options import CallArguments
from fsdp_optim.state.dicts.full import FullState
from fsdp_optim.state.live.fit_check import Fit
from fsdp_optim.state.live.fused import names_of_unfit
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.state.values.kinds import Kind
from fsdp_optim.transport.agree import all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure
from fsdp_optim.verbs.call import Local, read_local


def agree_on_kept(reader: ModelReader, optim: Optimizers, group: RankGroup, options: CallArguments) -> frozenset[str]:
    """Return the names of fused parameters whose state cannot be cut, on any rank. Called by all ranks."""
    failure, own = Failure(), list[str]()
    with failure:
        own = names_of_unfit(read_local(reader, optim, options, group.ranks).optim)
    result = all_gather_bytes(
        group, "fused state", json.dumps(sorted(own)).encode(), error=failure.error, fatal=failure.fatal
    )
    return frozenset(name for rank in group.ranks for name in json.loads(result.content_of(rank)))


@dataclass(frozen=True)
class KeptFusions:
    """The fused parameters whose state a checkpoint has under their own names.

    Attributes:
        names: the names, as the model has them.
        texts: the Views of the save.
        shapes: the shapes of the parameters at the save, by name.
    """

    where: str = ""
    names: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    @cached_property
    def _bound(self) -> Mapping[str, BoundView]:
        """The fusions of the save, by name."""
        bound = {}
        with as_checkpoint_error(f"{self.where}: the Views of the save"):
            views = list(map(View.from_text, self.texts))
            for name in self.names:
                view = next((view for view in views if view.matches(name)), None)
                if view is not None and name in self.shapes:
                    bound[name] = view.bind(name, self.shapes[name])
        return bound

    def is_alike(self, live: BoundView) -> bool:
        """Return whether a live parameter is fused as it was at the save, so that it gets the state as it is."""
        saved = self._bound.get(live.name)
        return saved is not None and saved.parts == live.parts

    def read(self, reader: ModelReader, optim: Optimizers, options: CallArguments, ranks: tuple[int, ...]) -> Local:
        """Read the model and the optimizer of a load. Parameters that are fused as at the save stay whole."""
        everything = replace(options, collect="all")
        return read_local(reader, optim, everything, ranks, self.is_alike if self.names else None)

    def check(self, full: FullState, shapes: Mapping[str, Shape], views: Sequence[str], *, strict: bool) -> FullState:
        """Return the state without that of fusions which the model has not, and which no other can load.

        Args:
            shapes: the shapes of the live parameters of all ranks, by name.
            views: the Views of the load, as text.

        Raises StateError for one, if `strict`.
        """
        seen = list(map(View.from_text, views)) if self.names else []
        lost = [name for name in self.names if name in full.state and not self._is_there(name, shapes, seen)]
        if lost and strict:
            raise StateError(self._refusal(lost[0], full))
        if not lost:
            return full
        return replace(full, state={fqn: values for fqn, values in full.state.items() if fqn not in lost})

    def _is_there(self, name: str, shapes: Mapping[str, Shape], views: Sequence[View]) -> bool:
        """Return whether a live parameter has the name and the fusion of the save."""
        view = next((view for view in views if view.matches(name)), None)
        if view is None or name not in shapes:
            return False
        try:
            return self.is_alike(view.bind(name, shapes[name]))
        except LayoutError:
            return False

    def _refusal(self, name: str, full: FullState) -> str:
        kinds = full.kinds.get(name, {})
        plain = (Kind.SHARDED.value, Kind.SCALAR.value)
        value = next((str(each) for each in full.state[name] if kinds.get(each) not in plain), "a value")
        saved = self._bound.get(name)
        fusion = f"the View {saved.view}" if saved is not None else "the View of the save"
        parts = f" ({shortened(saved.names)})" if saved is not None else ""
        return (
            f"{name}: {value} of its state has not the shape of the parameter, so it was saved for this fusion alone "
            f"(fused_state='keep'), and cannot be cut into the parts{parts}: load it into a model that has {name} fused alike, "
            f"with {fusion}, or give strict=False, by which these parameters begin without state"
        )

    def without(self, fit: Fit, full: FullState, known: Collection[str]) -> Fit:
        """Return what differs (`strict=False`): parameters whose state `check` has left out begin anew.

        `known`: the live parameters of all ranks.
        """
        lost = [name for name in self.names if name not in full.state]
        parts = [part for name in lost for part in (self._bound[name].names if name in self._bound else ())]
        anew = {fqn: None for fqn in (*lost, *parts) if fqn in known and fqn not in full.state}
        if not anew:
            return fit
        missing = tuple(fqn for fqn in fit.missing if fqn not in anew)
        return replace(fit, missing=missing, begun_anew=tuple(dict.fromkeys((*fit.begun_anew, *anew))))


def kept_at_save(names: Collection[str]) -> Callable[[BoundView], bool] | None:
    """Return what says of a live parameter that a save keeps it whole; None for no names."""
    return (lambda bound: bound.name in names) if names else None
