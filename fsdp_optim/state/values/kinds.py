"""The kind of a state value (sharded like its parameter, scalar, placed, opaque), and the evidence from which it is inferred."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import NamedTuple

import numpy
import torch

from fsdp_optim.layout import Shape
from fsdp_optim.tensors.memory import is_plain


class Kind(Enum):
    """The relation of a state value to its parameter.

    A SHARDED value has an element for each element of the parameter. A SCALAR is one number or word per parameter. A PLACED
    value is a DTensor with a shape or placements of its own. OPAQUE is any other value.
    """

    SHARDED = "sharded"
    SCALAR = "scalar"
    PLACED = "placed"
    OPAQUE = "opaque"


NON_PARAM_KIND = "loose"
"""The record in a full dict of an entry of the state that belongs to no parameter."""

# A parameter without dimensions has `step` and `exp_avg` of the same shape. These names of torch.optim are scalars, unless
# the values of that name of other parameters of the model show otherwise.
_SCALAR_NAMES = frozenset({"step", "mu_product", "eta", "mu"})

# Values of torch.optim with these names always have the shape of their parameter.
_SHARDED_NAMES = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "ax", "prev", "step_size"),
    }
)


class Observation(NamedTuple):
    """An observation of one value of one parameter.

    Attributes:
        name: the name of the value.
        shape: the shape of the parameter's tensor beside it.
        fits: whether the value has that shape.
        is_tensor: whether the value is a tensor with dimensions.
        is_reduced: whether the value has the rows of the parameter, but not all elements of each row (`_is_reduced`).
    """

    name: object
    shape: Shape
    fits: bool
    is_scalar: bool
    is_tensor: bool
    is_reduced: bool = False


@dataclass
class _Count:
    fits: Counter[Shape] = field(default_factory=Counter)
    small: int = 0  # values that fit a parameter of at most one element, which is weak evidence
    others: int = 0
    scalars: int = 0
    reduced: int = 0  # of the others
    fit_matrices: int = 0  # of those that fit; a vector has the shape of its rows, too

    @property
    def follows(self) -> bool | None:
        """Whether the values follow their parameters' shapes: by majority, and for more than one shape; None: unknown."""
        fits, others = sum(self.fits.values()), self.others + self.scalars
        if not fits and not others:
            return None
        return fits > others and (not others or len(self.fits) > 1)

    @property
    def is_reduced(self) -> bool:
        """Whether all values have one number for each row: those of vectors, then, have the shape of their parameters."""
        return 0 < self.reduced == self.others and not self.scalars and not self.fit_matrices


@dataclass(frozen=True)
class Evidence:
    """The evidence about the values of each name, from the parameters that have dimensions.

    Attributes:
        sharded: names whose values follow the shapes of their parameters.
        apart: names whose values do not follow them.
        scalar: names in `apart` whose values are all scalars.
        tensors: names with at least one value that is a tensor with dimensions.
        reduced: names whose values have one number for each row of their parameters.
        marked: whether the optimizer's values of DTensor parameters are DTensors, so that a plain tensor is no part of a DTensor.
    """

    sharded: frozenset[object] = frozenset()
    apart: frozenset[object] = frozenset()
    scalar: frozenset[object] = frozenset()
    tensors: frozenset[object] = frozenset()
    reduced: frozenset[object] = frozenset()
    marked: bool = False

    @classmethod
    def of(cls, observations: Iterable[Observation], *, marked: bool = False) -> Evidence:
        counts: dict[object, _Count] = {}
        tensors = set()
        for observation, number in Counter(observations).items():
            count = counts.get(observation.name)
            if count is None:
                count = counts[observation.name] = _Count()
            if observation.is_tensor:
                tensors.add(observation.name)
            if observation.is_scalar:
                count.scalars += number
            elif not observation.fits:
                count.others += number
                count.reduced += number if observation.is_reduced else 0
            elif prod(observation.shape) > 1:
                count.fits[observation.shape] += number
                count.fit_matrices += number if _is_matrix(observation.shape) else 0
            else:
                count.small += number
        known = {name: _known(name, count) for name, count in counts.items()}
        apart = frozenset(name for name, follows in known.items() if follows is False)
        return cls(
            sharded=frozenset(name for name, follows in known.items() if follows),
            apart=apart,
            scalar=frozenset(name for name in apart if not counts[name].others),
            tensors=frozenset(tensors),
            reduced=frozenset(name for name, count in counts.items() if count.is_reduced),
            marked=marked,
        )

    def follows(self, name: object) -> bool | None:
        """Return whether values of this name follow their parameters; None without evidence."""
        if name in self.sharded:
            return True
        return False if name in self.apart else True if name in _SHARDED_NAMES else None

    def must_follow(self, name: object) -> bool:
        """Return whether a value of this name without its parameter's shape is a mistake rather than a value of another kind."""
        if name in self.reduced:  # Adam-mini and others: most parameters may be vectors, whose values fit
            return False
        return name in self.sharded or (name in _SHARDED_NAMES and name in self.tensors)

    def says_scalar(self, name: object) -> bool:
        return name not in self.sharded and (name in self.scalar or name in _SCALAR_NAMES)


def _known(name: object, count: _Count) -> bool | None:
    follows = count.follows
    if follows is False and name in _SHARDED_NAMES:
        return sum(count.fits.values()) > count.others + count.scalars
    return follows


def is_known_moment(name: object) -> bool:
    """Return whether values of this name in torch.optim always have the shape of their parameter."""
    return name in _SHARDED_NAMES


def is_scalar(value: object) -> bool:
    """Return whether a value is a number (numpy's too), a flag, a word, None, or a tensor without dimensions."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return value is None or isinstance(value, (bool, int, float, complex, str, numpy.number, numpy.bool_))


def observation_of(name: object, value: object, shape: Shape) -> Observation:
    """Return the observation of a value in a full dict, for a parameter of this shape."""
    if not isinstance(value, torch.Tensor):
        return Observation(name, shape, False, is_scalar(value), False)
    num_dims = value.dim()
    fits = is_plain(value) and tuple(value.shape) == shape
    is_reduced = num_dims > 0 and not fits and _is_reduced(value.shape, shape)
    return Observation(name, shape, fits, num_dims == 0, num_dims > 0, is_reduced)


def _is_matrix(shape: Shape) -> bool:
    return len(shape) > 1 and sum(size > 1 for size in shape) > 1


def _is_reduced(shape: Sequence[int], param: Shape) -> bool:
    """Return whether a tensor of this shape has the rows of a parameter, and of its other dimensions one element or all.

    Those with one element may be left out. A part of the rows is no such shape: that is a shard.
    """
    if len(param) < 2 or shape[0] != param[0]:
        return False
    if len(shape) == len(param):
        return all(size in (1, full) for size, full in zip(shape, param, strict=True))
    left = iter(param)
    return all(size in left for size in shape)  # each after the one before


def infer_kind(name: object, value: object, shape: Shape, evidence: Evidence) -> Kind:
    """Return the kind of a value in a full dict that records no kinds, for a parameter of this shape."""
    if isinstance(value, torch.Tensor) and value.dim() == 0 == len(shape):
        return Kind.SCALAR if evidence.says_scalar(name) else Kind.SHARDED
    if is_scalar(value):
        return Kind.SCALAR
    if isinstance(value, torch.Tensor) and is_plain(value) and tuple(value.shape) == shape:
        return Kind.OPAQUE if evidence.follows(name) is False else Kind.SHARDED
    return Kind.OPAQUE
