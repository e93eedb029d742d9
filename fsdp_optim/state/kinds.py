"""What kind a state value is: sharded like its parameter, a scalar, placed by itself, or opaque; judged from evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import NamedTuple

import numpy
import torch

from fsdp_optim.layout import Shape
from fsdp_optim.memory import is_plain


class Kind(Enum):
    """What a state value is to its parameter.

    SHARDED follows the parameter's elements. SCALAR is one per parameter. PLACED is a DTensor with a shape or placements
    of its own. OPAQUE is anything else.
    """

    SHARDED = "sharded"
    SCALAR = "scalar"
    PLACED = "placed"
    OPAQUE = "opaque"


LOOSE_KIND = "loose"
"""What a full dict records of an entry of its state that is no parameter's."""

# For a parameter without dimensions, `step` and `exp_avg` look alike. These names of torch.optim are scalars; where
# other parameters of the model have a value of the same name, they show what it is.
_SCALAR_NAMES = frozenset({"step", "mu_product", "eta", "mu"})

# And these of torch.optim are always shaped like their parameter.
_SHARDED_NAMES = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "ax", "prev", "step_size"),
    }
)


class Sight(NamedTuple):
    """One value of one parameter: its name, the shape of the parameter's tensor there, and whether the value has it."""

    name: object
    shape: Shape
    fits: bool
    is_scalar: bool
    is_tensor: bool


@dataclass
class _Count:
    fits: Counter[Shape] = field(default_factory=Counter)
    small: int = 0  # fits where the parameter has one element or none, which says little
    others: int = 0
    scalars: int = 0

    @property
    def follows(self) -> bool | None:
        """Whether the value follows its parameter's shape: by majority, and where it was seen to follow; None: unknown."""
        fits, others = sum(self.fits.values()), self.others + self.scalars
        if not fits and not others:
            return None
        return fits > others and (not others or len(self.fits) > 1)


@dataclass(frozen=True)
class Evidence:
    """What the values of one name are, for parameters that have dimensions.

    Attributes:
        sharded: names of values that follow the shape of their parameters.
        apart: names of values that do not.
        scalar: those of `apart` that are scalars wherever they are seen.
        tensors: names of values some of which are tensors with dimensions.
        marked: the optimizer's values of DTensor parameters are DTensors, so that another tensor is no part of one.
    """

    sharded: frozenset[object] = frozenset()
    apart: frozenset[object] = frozenset()
    scalar: frozenset[object] = frozenset()
    tensors: frozenset[object] = frozenset()
    marked: bool = False

    @classmethod
    def of(cls, sights: Iterable[Sight], *, marked: bool = False) -> Evidence:
        counts: dict[object, _Count] = {}
        tensors = set()
        for sight, number in Counter(sights).items():
            count = counts.get(sight.name)
            if count is None:
                count = counts[sight.name] = _Count()
            if sight.is_tensor:
                tensors.add(sight.name)
            if sight.is_scalar:
                count.scalars += number
            elif not sight.fits:
                count.others += number
            elif prod(sight.shape) > 1:
                count.fits[sight.shape] += number
            else:
                count.small += number
        known = {name: _known(name, count) for name, count in counts.items()}
        apart = frozenset(name for name, follows in known.items() if follows is False)
        return cls(
            sharded=frozenset(name for name, follows in known.items() if follows),
            apart=apart,
            scalar=frozenset(name for name in apart if not counts[name].others),
            tensors=frozenset(tensors),
            marked=marked,
        )

    def follows(self, name: object) -> bool | None:
        """Whether values of this name follow their parameters; None where nothing says so."""
        if name in self.sharded:
            return True
        return False if name in self.apart else True if name in _SHARDED_NAMES else None

    def has_to_follow(self, name: object) -> bool:
        """Whether a value of this name that does not have its parameter's shape is a mistake, not a value of another kind."""
        return name in self.sharded or (name in _SHARDED_NAMES and name in self.tensors)

    def says_scalar(self, name: object) -> bool:
        return name not in self.sharded and (name in self.scalar or name in _SCALAR_NAMES)


def _known(name: object, count: _Count) -> bool | None:
    follows = count.follows
    if follows is False and name in _SHARDED_NAMES:
        return sum(count.fits.values()) > count.others + count.scalars
    return follows


def is_known_moment(name: object) -> bool:
    """Whether torch.optim has values of this name that are always shaped like their parameter."""
    return name in _SHARDED_NAMES


def is_scalar(value: object) -> bool:
    """A number (numpy's too), a flag, a word, None, or a tensor without dimensions."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return value is None or isinstance(value, (bool, int, float, complex, str, numpy.number, numpy.bool_))


def sight_of(name: object, value: object, shape: Shape) -> Sight:
    """A value of a full dict, of a parameter of this shape."""
    tensor = isinstance(value, torch.Tensor) and value.dim() > 0
    fits = isinstance(value, torch.Tensor) and is_plain(value) and tuple(value.shape) == shape
    return Sight(name, shape, fits, is_scalar(value), tensor)


def kind_of(name: object, value: object, shape: Shape, evidence: Evidence) -> Kind:
    """The kind of a value of a full dict that records no kinds, of a parameter of this shape."""
    if isinstance(value, torch.Tensor) and value.dim() == 0 == len(shape):
        return Kind.SCALAR if evidence.says_scalar(name) else Kind.SHARDED
    if is_scalar(value):
        return Kind.SCALAR
    if isinstance(value, torch.Tensor) and is_plain(value) and tuple(value.shape) == shape:
        return Kind.OPAQUE if evidence.follows(name) is False else Kind.SHARDED
    return Kind.OPAQUE
