"""The results of `diff` and `show`: frozen records of numbers, with representations that fit on a screen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isinf, prod

import torch

from fsdp_optim.errors import StateError, counted_noun, shortened
from fsdp_optim.results.contents import TensorInfo
from fsdp_optim.results.shown import MOST_SHOWN


@dataclass(frozen=True)
class ValueDiff:
    """One value that both checkpoints have in one shape, and how its elements differ.

    Attributes:
        name: the FQN of a weight, or `FQN:name` of a value of the optimizer's state, as the first checkpoint calls it.
        a, b: dtype, shape and bytes in the first and in the second checkpoint. A plain number counts as a tensor without
            dimensions; its dtype is the name of its type in Python.
        num_differing: elements whose bits differ. Where the dtypes differ: elements that are other numbers.
        max_abs: the largest `|a - b|`; infinite where one side has a NaN or an infinity and the other side has another element.
        norm: the 2-norm of the elements of `a` that are finite.
        norm_of_difference: the 2-norm of `a - b`; infinite as `max_abs` is.
        nans, infinities: how many there are in `a` and in `b`.
    """

    name: str
    a: TensorInfo
    b: TensorInfo
    num_differing: int
    max_abs: float
    norm: float
    norm_of_difference: float
    nans: tuple[int, int] = (0, 0)
    infinities: tuple[int, int] = (0, 0)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.a.shape)

    @property
    def relative(self) -> float:
        """`||a - b|| / ||a||`: 0 for equal numbers, infinite where `a` is zero and `b` is not."""
        if not self.norm_of_difference:
            return 0.0
        if isinf(self.norm_of_difference):
            return inf
        return self.norm_of_difference / self.norm if self.norm else inf

    @property
    def equal(self) -> bool:
        """Whether dtype and all bits are equal."""
        return not self.num_differing and self.a.dtype == self.b.dtype

    def __repr__(self) -> str:
        dtypes = self.a.dtype if self.a.dtype == self.b.dtype else f"{self.a.dtype} and {self.b.dtype}"
        if self.equal:
            return f"ValueDiff({self.name!r}, equal, {dtypes}, shape={self.a.shape})"
        special = [
            f", {name}={counts[0]} and {counts[1]}"
            for name, counts in (("nans", self.nans), ("infinities", self.infinities))
            if any(counts)
        ]
        return (
            f"ValueDiff({self.name!r}, {self.num_differing} of {self.numel} differ, relative={self.relative:.3g}, "
            f"max_abs={self.max_abs:.3g}, {dtypes}, shape={self.a.shape}{''.join(special)})"
        )


@dataclass(frozen=True)
class ShapeDiff:
    """One value that has different shapes. Its elements were not compared.

    Attributes:
        name: as in `ValueDiff`.
        a, b: dtype, shape and bytes on each side.
    """

    name: str
    a: TensorInfo
    b: TensorInfo


@dataclass(frozen=True)
class HyperparameterDiff:
    """One hyperparameter that differs, and the parameters for which it does.

    Attributes:
        name: the name in the param groups. "param group" for parameters that only one of the optimizers lists.
        a, b: the values as text; "-" where there is none.
        params: the FQNs.
    """

    name: str
    a: str
    b: str
    params: tuple[str, ...]

    def __repr__(self) -> str:
        return f"HyperparameterDiff({self.name}: {self.a} and {self.b}, <{shortened(self.params, MOST_SHOWN)}>)"


@dataclass(frozen=True)
class ObjectDiff:
    """One value that is no tensor on at least one side, and differs.

    Attributes:
        name: as in `ValueDiff`; `:key` for an entry of the optimizer's dict that belongs to no parameter; `state=:path` for a
            number, a string or another plain value in `state=`, with the names and numbers on its path, joined by dots.
        a, b: the values as text, cut where they are long.
    """

    name: str
    a: str
    b: str


@dataclass(frozen=True)
class DiffResult:
    """The differences between two checkpoints.

    Attributes:
        a, b: the paths or URLs.
        steps: the `step` of each checkpoint; None where it says none, and where only some names were compared.
        values: the values that were compared, in the order of their names, equal ones too.
        shapes: values of different shapes.
        only_in_a, only_in_b: names that only one of the checkpoints has.
        hyperparameters: the hyperparameters that differ.
        objects: other values that differ, of the optimizer and in `state=`.
        tolerance: as it was given: the largest `relative` of values that are within.
        notes: how parameters without names were matched, and what was left out, one sentence each.
    """

    a: str
    b: str
    steps: tuple[int | None, int | None]
    values: tuple[ValueDiff, ...]
    shapes: tuple[ShapeDiff, ...] = ()
    only_in_a: tuple[str, ...] = ()
    only_in_b: tuple[str, ...] = ()
    hyperparameters: tuple[HyperparameterDiff, ...] = ()
    objects: tuple[ObjectDiff, ...] = ()
    tolerance: float | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tolerance is not None and not self.tolerance >= 0:
            raise StateError(f"tolerance is a relative norm of at least 0, such as 1e-6, not {self.tolerance!r}")

    @property
    def differing(self) -> tuple[ValueDiff, ...]:
        """The values that are not equal, the largest `relative` first."""
        return tuple(sorted((value for value in self.values if not value.equal), key=lambda value: -value.relative))

    @property
    def within(self) -> tuple[ValueDiff, ...]:
        """The values that are not equal, and whose `relative` is at most `tolerance`; empty without one."""
        return tuple(value for value in self.differing if self._is_within(value))

    @property
    def beyond(self) -> tuple[ValueDiff, ...]:
        """The values that are not equal and not within the tolerance."""
        return tuple(value for value in self.differing if not self._is_within(value))

    def _is_within(self, value: ValueDiff) -> bool:
        return self.tolerance is not None and value.relative <= self.tolerance

    @property
    def steps_differ(self) -> bool:
        """Whether both checkpoints say a step, and not the same."""
        return None not in self.steps and self.steps[0] != self.steps[1]

    @property
    def equal(self) -> bool:
        """Whether everything that was compared is equal, bit by bit."""
        return not self.differing and self._others_are_equal

    @property
    def equal_within_tolerance(self) -> bool:
        """Whether all differences are those of values within the tolerance."""
        return not self.beyond and self._others_are_equal

    @property
    def _others_are_equal(self) -> bool:
        lists = (self.shapes, self.only_in_a, self.only_in_b, self.hyperparameters, self.objects)
        return not any(lists) and not self.steps_differ

    def __repr__(self) -> str:
        parts = [f"equal={self.equal}", f"a={self.a!r}", f"b={self.b!r}"]
        differing = self.differing
        compared = counted_noun(len(self.values), "value")
        if not differing:
            parts.append(f"values=<{compared}, all equal>")
        else:
            within = f", {len(self.within)} within {self.tolerance:g}" if self.tolerance is not None else ""
            worst = shortened((f"{value.name} {value.relative:.3g}" for value in differing), MOST_SHOWN)
            parts.append(f"values=<{compared}, {len(differing)} differ{within}: {worst}>")
        if self.steps_differ:
            parts.append(f"steps={self.steps}")
        named: dict[str, Iterable[str]] = {
            "shapes": (f"{item.name} {item.a.shape} and {item.b.shape}" for item in self.shapes),
            "only_in_a": self.only_in_a,
            "only_in_b": self.only_in_b,
            "hyperparameters": (f"{item.name}: {item.a} and {item.b}" for item in self.hyperparameters),
            "objects": (item.name for item in self.objects),
        }
        parts += [f"{name}=<{text}>" for name, items in named.items() if (text := shortened(items, MOST_SHOWN))]
        return f"DiffResult({', '.join(parts)})"


@dataclass(frozen=True)
class ValueStatistics:
    """Figures about the elements of one value. NaNs and infinities are counted, and left out of all other figures.

    Attributes:
        path: the checkpoint.
        name: the FQN of a weight, or `FQN:name` of a value of the optimizer's state.
        dtype, shape, nbytes: of the value; of the slice, if one was given.
        slice: the slice, as it was given; None for all elements.
        min, max, mean: over the finite elements; None where there are none. Of complex elements: of their absolute values.
        norm: the 2-norm.
        num_zeros: elements that are zero.
        num_nans, num_infinities: other elements that are no finite numbers.
        histogram: how many finite elements lie in each of the bins of equal width from `min` to `max`.
        elements: the elements of the slice, if one was given.
    """

    path: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    slice: str | None
    min: float | None
    max: float | None
    mean: float | None
    norm: float
    num_zeros: int
    num_nans: int
    num_infinities: int
    histogram: tuple[int, ...]
    elements: torch.Tensor | None = None

    def __repr__(self) -> str:
        special = [
            f", {name}={number}"
            for name, number in (("num_nans", self.num_nans), ("num_infinities", self.num_infinities))
            if number
        ]
        figures = ", ".join(
            f"{name}={value:.6g}" for name in ("min", "max", "mean") if (value := getattr(self, name)) is not None
        )
        return (
            f"ValueStatistics({self.name!r}, {self.dtype}, shape={self.shape}, nbytes={self.nbytes}, "
            f"{figures}{', ' if figures else ''}norm={self.norm:.6g}{''.join(special)})"
        )
