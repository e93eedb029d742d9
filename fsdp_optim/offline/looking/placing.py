"""Placement: which rank would hold how much of a checkpoint, by the Layout that a wrapper would give. No elements are read.

CheckpointSummary  ->  parameters in the order of the optimizer, and what every rank holds complete
                   ->  one Placement for each, by the wrapper                                  assumed_layouts.py
                   ->  its elements on each rank, times their bytes, also for the state  ->  PlacementResult
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy

from fsdp_optim.arguments import check_names
from fsdp_optim.errors import StateError, counted_noun
from fsdp_optim.layout import Numbers, Placement, Shape
from fsdp_optim.offline.looking.assumed_layouts import Wrapping, unit_of
from fsdp_optim.results.contents import CheckpointSummary, TensorInfo
from fsdp_optim.results.rank_maps import EmptyRanks, PlacementResult, RankRun, TensorPlacement, runs_of

WEIGHTS, _STEP = "weights", "step"
_OF_BATCH_NORM = ("*running_mean", "*running_var", "*num_batches_tracked")
_COUNTED = ("int", "uint", "bool")  # dtypes that no parameter of a wrapper has


def placement(
    summary: CheckpointSummary,
    *,
    ranks: int,
    wrapper: str,
    units: Sequence[str] | None = None,
    replicated: Sequence[str] = (),
) -> PlacementResult:
    """Return what each rank would hold of a checkpoint."""
    if units is not None:
        check_names("units", units, "['layers.*', 'embed']")
    check_names("replicated", replicated, "['*.inv_freq']")
    wrapping = Wrapping.of(wrapper, ranks)
    names = _Names.of(summary, replicated)
    return _Map(summary, wrapping, wrapper, names, units).result()


@dataclass(frozen=True)
class _Names:
    """The parameters of a checkpoint with their shapes, in order; the other weights; and the state by FQN.

    `notes`: what was assumed. `by_id`: the optimizer has ids, which fit no weights.
    """

    params: Mapping[str, Shape]
    complete: tuple[str, ...]
    state: Mapping[str, Mapping[str, TensorInfo]]
    notes: tuple[str, ...]
    by_id: bool

    @classmethod
    def of(cls, summary: CheckpointSummary, replicated: Sequence[str]) -> _Names:
        patterns = (*_OF_BATCH_NORM, *replicated)
        complete = {
            fqn
            for fqn, tensor in summary.model.items()
            if tensor.dtype.startswith(_COUNTED) or any(fnmatch.fnmatchcase(fqn, pattern) for pattern in patterns)
        }
        weights = {fqn: tensor.shape for fqn, tensor in summary.model.items() if fqn not in complete}
        keys = list(dict.fromkeys([*(key for group in summary.groups for key in group.params), *summary.state]))
        shapes = {key: _shape_of(summary, key) for key in keys}
        by_id = bool(keys) and not all(isinstance(key, str) for key in keys)
        fits = by_id and list(shapes.values()) == list(weights.values())
        named = dict(zip(keys, weights if fits else map(str, keys), strict=False))
        params = {
            named[key]: shape for key, shape in shapes.items() if shape is not None and named[key] not in complete
        }
        notes = tuple(_notes_of(weights.keys() - params.keys() if keys else (), complete, is_matched=fits))
        tensors = {
            named[key]: {str(name): value for name, value in values.items() if isinstance(value, TensorInfo)}
            for key, values in summary.state.items()
        }
        return cls({**params, **weights}, tuple(sorted(complete)), tensors, notes, by_id and not fits)


def _shape_of(summary: CheckpointSummary, key: object) -> Shape | None:
    """Return the shape of a parameter: of its weight, else of its largest value; None where there is neither."""
    weight = summary.model.get(str(key))
    values = [value for value in summary.state.get(key, {}).values() if isinstance(value, TensorInfo)]
    return weight.shape if weight is not None else max((value.shape for value in values), key=prod, default=None)


def _notes_of(unknown: Sequence[str] | set[str], complete: set[str], *, is_matched: bool) -> Iterator[str]:
    if is_matched:
        yield "the optimizer calls its parameters by ids, which were matched with the weights by their order and shapes"
    if unknown:
        yield (
            f"{counted_noun(len(unknown), 'weight')} that the optimizer does not have, such as {min(unknown)}: cut as "
            "parameters are, because a checkpoint does not say which are buffers"
        )
    if complete:
        yield f"{counted_noun(len(complete), 'buffer')}, such as {min(complete)}: complete on every rank"


@dataclass
class _Map:
    """The bytes on each rank, tensor by tensor."""

    summary: CheckpointSummary
    wrapping: Wrapping
    wrapper: str
    names: _Names
    units: Sequence[str] | None
    tensors: list[TensorPlacement] = field(default_factory=list)
    empty: list[EmptyRanks] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _scalars: list[str] = field(default_factory=list)
    _unlike: list[str] = field(default_factory=list)
    _numels: dict[Placement, Numbers] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights, self.state, self.padding = (numpy.zeros(self.wrapping.num_ranks, numpy.int64) for _ in range(3))

    def result(self) -> PlacementResult:
        if self.wrapping.is_flat:
            self._flat()
        else:
            for fqn in self.names.params:
                self._parameter(fqn)
        for fqn in self.names.complete:
            self._add(fqn, WEIGHTS, self.summary.model[fqn], self.wrapping.complete(self.summary.model[fqn].shape))
            for name, value in self.names.state.get(fqn, {}).items():
                self._add(fqn, name, value, self.wrapping.complete(value.shape))
        return PlacementResult(
            path=self.summary.path,
            wrapper=self.wrapper,
            num_ranks=self.wrapping.num_ranks,
            weights=tuple(self.weights.tolist()),
            state=tuple(self.state.tolist()),
            padding=tuple(self.padding.tolist()),
            tensors=tuple(self.tensors),
            empty=tuple(self.empty),
            is_flat=self.wrapping.is_flat,
            rules=(
                self._rule(),
                *self.names.notes,
                *self.notes,
                *self._exceptions(),
                "dtypes are those of the checkpoint",
            ),
        )

    def _rule(self) -> str:
        if self.wrapping.name == "ddp":
            return "every rank holds everything"
        if not self.wrapping.is_flat:
            over = counted_noun(self.wrapping.num_shards, "rank")
            replicas = f", on {self.wrapping.num_replicas} groups of ranks" if self.wrapping.name == "hsdp" else ""
            return f"each parameter is cut along its first dimension over {over}, as torch.chunk cuts it{replicas}"
        given = (
            "each module up to the first number of its name, as layers.0"
            if self.units is None
            else f"each module that {' or '.join(self.units)} matches"
        )
        orig = " (use_orig_params=False)" if self.wrapping.name == "fsdp1" else ""
        order = (
            "in the optimizer's order"
            if self.summary.groups
            else "in the order of the checkpoint, which may be another"
        )
        return f"one flat parameter{orig} for {given}, and one for all other parameters, {order}"

    def _exceptions(self) -> Iterator[str]:
        """Yield what was counted as complete on every rank, and might not be so."""
        if self._scalars:
            yield (
                f"{counted_noun(len(self._scalars), 'parameter')} without dimensions, such as {self._scalars[0]}, which "
                "fully_shard refuses: complete on every rank"
            )
        if self._unlike:
            yield (
                f"{counted_noun(len(self._unlike), 'value')} with another shape than the parameter, such as {self._unlike[0]}: "
                "complete on every rank"
            )

    # --------------------------------------------------------------------------- single parameters

    def _parameter(self, fqn: str) -> None:
        shape = self.names.params[fqn]
        where = self.wrapping.of_parameter(shape)
        weight = self.summary.model.get(fqn)
        numels = self._numel_of(where)
        if weight is not None:
            self._add(fqn, WEIGHTS, weight, where)
            if self.wrapping.name != "ddp":  # fully_shard keeps the shards of a parameter in storages of equal size
                self.padding += (where.most_numel - numels) * _itemsize(weight)
        if not shape and self.wrapping.name != "ddp":
            self._scalars.append(fqn)
        self._note_empty(fqn, shape[0] if shape else 1, numels)
        for name, value in self.names.state.get(fqn, {}).items():
            is_cut = value.shape == shape
            self._add(fqn, name, value, where if is_cut else self._complete(fqn, name, value))

    def _complete(self, fqn: str, name: str, value: TensorInfo) -> Placement:
        """Return the Placement of a value that has not the shape of its parameter."""
        if value.shape:
            self._unlike.append(f"{fqn}:{name}")
        return self.wrapping.complete(value.shape)

    # --------------------------------------------------------------------------- flat parameters

    def _flat(self) -> None:
        if self.names.by_id:
            raise StateError(
                f"{self.summary.path}: the optimizer calls its parameters by ids, which fit no weights here, so the order in a "
                "flat parameter is not known: convert the checkpoint with param_names first"
            )
        for pattern in self.units or ():
            if not any(unit_of(fqn, [pattern]) for fqn in self.names.params):
                raise StateError(
                    f"{self.summary.path}: units={pattern!r}: fits the path of no module with parameters: give paths "
                    "of modules, as layers.*"
                )
        units: dict[tuple[str, str], dict[str, Shape]] = {}
        for fqn, shape in self.names.params.items():
            weight = self.summary.model.get(fqn)
            key = unit_of(fqn, self.units), weight.dtype if weight is not None else ""
            units.setdefault(key, {})[fqn] = shape
        if len({path for path, _ in units}) < len(units):
            self.notes.append("a unit with several dtypes, which a flat parameter cannot have: one for each dtype")
        for (path, _), shapes in units.items():
            self._unit(path, shapes)

    def _unit(self, path: str, shapes: Mapping[str, Shape]) -> None:
        placements = self.wrapping.of_unit(shapes)
        held = sum((self._numel_of(where) for where in placements.values()), numpy.zeros_like(self.padding))
        padded = self.wrapping.chunk_numel(shapes) - held
        self._note_empty(path, sum(map(prod, shapes.values())), held)
        weights = [self.summary.model[fqn] for fqn in shapes if fqn in self.summary.model]
        self.padding += padded * max(map(_itemsize, weights), default=0)
        for fqn, weight in ((fqn, self.summary.model[fqn]) for fqn in shapes if fqn in self.summary.model):
            self._add(fqn, WEIGHTS, weight, placements[fqn])
        values: dict[str, dict[str, TensorInfo]] = {}
        for fqn in shapes:
            for name, value in self.names.state.get(fqn, {}).items():
                values.setdefault(name, {})[fqn] = value
        for name, by_fqn in values.items():
            is_cut = name != _STEP and all(value.shape == shapes[fqn] for fqn, value in by_fqn.items())
            if is_cut:
                self.padding += padded * max(map(_itemsize, by_fqn.values()))
            elif any(value.shape for value in by_fqn.values()):
                self._unlike += [f"{fqn}:{name}" for fqn in by_fqn]
            else:  # a step: one of each flat parameter
                by_fqn = dict([next(iter(by_fqn.items()))])
            for fqn, value in by_fqn.items():
                self._add(fqn, name, value, placements[fqn] if is_cut else self.wrapping.complete(value.shape))

    # --------------------------------------------------------------------------- sums

    def _add(self, fqn: str, kind: str, tensor: TensorInfo, where: Placement) -> None:
        nbytes = self._numel_of(where) * _itemsize(tensor)
        name = fqn if kind == WEIGHTS else f"{fqn}:{kind}"
        self.tensors.append(TensorPlacement(name, kind, tensor.nbytes, runs_of(nbytes.tolist())))
        if kind == WEIGHTS:
            self.weights += nbytes
        else:
            self.state += nbytes

    def _numel_of(self, where: Placement) -> Numbers:
        """Return how many elements each rank holds."""
        known = self._numels.get(where)
        if known is None:
            known = self._numels[where] = numels_of(where, self.wrapping.num_ranks)
        return known

    def _note_empty(self, name: str, size: int, numels: Numbers) -> None:
        runs = tuple(RankRun(run.first, run.last, 0) for run in runs_of(numels.tolist()) if not run.nbytes)
        if size and runs and numels.any():
            self.empty.append(EmptyRanks(name, size, runs))


def numels_of(where: Placement, num_ranks: int) -> Numbers:
    """Return how many elements of a parameter whose shards are runs each of these ranks holds, from the tables of the planner."""
    shards = numpy.arange(where.num_shards)
    table = where.run_table(shards)
    if table is None:
        raise StateError(f"a parameter {where} is not cut into runs")
    numels = numpy.zeros(num_ranks, numpy.int64)
    for holders in where.holders_of(shards):
        numels[holders] = (table.highs - table.lows)[0]
    return numels


def _itemsize(tensor: TensorInfo) -> int:
    numel = prod(tensor.shape)
    return tensor.nbytes // numel if numel else 0
