"""How far an honest step may be away where sums are made in another order: at another world size, or in another wrapper.

Two runs with equal weights and equal batches have gradients that differ by rounding alone. A matrix product in 16 bits adds in
fp32 and rounds once, so its error is a few roundings of the dtype, whatever the size. In fp32 itself the sums are rounded too: n
terms in another order differ by about sqrt(n) roundings. So the difference of a gradient, as a norm, is at most

    tolerance = 4 roundings of fp16 or bf16, 64 roundings of fp32 or fp64         times the norm of all gradients together

A random projection of a difference with norm d is a number of size d (its standard deviation, since the signs are independent),
and the root of the mean square of four of them is above 4 d once in some 10^12 cases. So a value differs where that root is above
4 tolerances: 3e-5 in fp32, 0.125 in bf16, 0.016 in fp16, times the norm of all values of its name. Measured for gradients of
honest resumes of `tests/kit/proof_jobs.py`, from 2 ranks to 1, 3 and 4 and between wrappers: at most 2e-7 in fp32, 6e-3 in bf16.

The norm of all gradients together, a loss, and other numbers hardly change, because the differences of many elements have no
common direction: at most 8e-8 in fp32 and 1.2e-3 in bf16 there. One tolerance bounds them: 8e-6 and 0.031. So gradients that
are all 5 % too large are seen in bf16 too, though each alone would pass.

Weights have no such bound, because Adam divides by the root of the second moment: where a gradient is nothing but rounding, the
step is as large as anywhere. Their bound follows from the second moment v of each element, with the norm G of all gradients:

    sum over the elements of  min(2 lr, lr c tolerance G / (sqrt(v) + eps))^2     as a norm, plus one rounding of the weights

where c is the share of a new gradient in the first moment. Masters of weights are bounded alike, and the moment of RMSprop's
steps, without lr. A step of SGD is linear: lr (1 + momentum) tolerance G. Nothing is known of other optimizers, so that only a
step of twice the size shows.

Where both runs are cut alike and the optimizer got the same gradients, bit for bit, nothing is explained by rounding any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_optim.checkpoint.proof.record import Measured
from fsdp_optim.tensors.memory import dtype_named

_PROJECTED = 4.0  # the root of the mean square of four projections, over the norm of what is projected
_ROUNDINGS_OF_16_BITS, _ROUNDINGS_OF_SUMS = 4.0, 64.0
_COARSEST_SUM = 2.0**-20  # of a dtype whose sums are rounded like its products

SECOND_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum")
"""The names of second moments in torch's optimizers, by whose roots a step is divided. The first that is there counts."""

MOMENT_OF_STEPS = "momentum_buffer"
"""The moment of steps that were divided by a root already: RMSprop's. SGD's, of the same name, is one of gradients."""

MASTERS = frozenset({"master", "master_param", "master_params", "fp32"})
"""The names of the fp32 values of weights in an optimizer's state."""

LINEAR = frozenset({*SECOND_MOMENTS, "exp_avg", MOMENT_OF_STEPS, "grad_avg"})
"""The names of moments that follow from a gradient as sums do. Nothing is known of others, such as the step sizes of Rprop."""


def rounding_of(dtype: torch.dtype) -> float:
    """Return the relative distance of neighbouring numbers of a floating or complex dtype; 0 for any other."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def tolerance_of(rounding: float) -> float:
    """Return how far a gradient may be away, over the norm of all gradients, by the coarsest rounding of the step."""
    return rounding * (_ROUNDINGS_OF_SUMS if rounding <= _COARSEST_SUM else _ROUNDINGS_OF_16_BITS)


def is_near(then: float, now: float, tolerance: float) -> bool:
    """Return whether two numbers, such as losses and norms, are within a tolerance, in parts of their size or of 1.

    Roundings of many elements add little to a mean or a norm, because they have no direction: so one tolerance is wide.
    """
    if not (math.isfinite(then) and math.isfinite(now)):
        return then == now or (math.isnan(then) and math.isnan(now))
    return abs(then - now) <= tolerance * max(abs(then), abs(now), 1.0)


def norm_of_all(values: Iterable[Measured]) -> float:
    """Return the norm of several tensors together."""
    return math.hypot(*(value.norm for value in values))  # whose squares may be too large for a float


def distance(then: Sequence[float], now: Sequence[float]) -> float:
    """Return the root of the mean square of the differences of projections; infinity where there are none to compare."""
    if not then or len(then) != len(now):
        return math.inf
    return math.dist(then, now) / math.sqrt(len(then))


def is_within(apart: float, norm: float) -> bool:
    """Return whether projections that are `apart` may be those of a difference with this norm."""
    return apart <= _PROJECTED * norm


def rounding_in(value: Measured, rounding: float) -> float:
    """Return the coarser of a step's rounding and of that of the dtype in which a value is kept."""
    return max(rounding, rounding_of(dtype_named(value.dtype)))


@dataclass(frozen=True)
class StepSize:
    """How a step of an optimizer follows from a gradient.

    `lr`: the learning rate. `epsilon`: what is added to the root of the second moment. `share`: of a new gradient in the first
    moment, with the correction of Adam's for the first steps. `momentum`: of SGD.
    """

    lr: float
    epsilon: float
    share: float
    momentum: float

    @classmethod
    def of(cls, group: Mapping[str, Any], state: Mapping[str, Any]) -> StepSize:
        """Read a param group, and the state of one of its parameters after the step."""
        betas = group.get("betas")
        first = float(betas[0]) if isinstance(betas, (list, tuple)) and betas else 0.0
        step = state.get("step")
        count = float(step) if isinstance(step, (int, float, torch.Tensor)) else 0.0
        share = (1 - first) / (1 - first**count) if count >= 1 and 0 < first < 1 else 1 - first
        lr, epsilon = abs(float(group.get("lr", 1.0))), float(group.get("eps", 1e-8))
        return cls(lr, epsilon, share, float(group.get("momentum", 0.0)))

    def linear(self, away: float) -> float:
        """Return how far a step of SGD may be away, where its gradient may be `away`."""
        return self.lr * (1 + self.momentum) * away


def spread_of(second: torch.Tensor, step: StepSize, away: float) -> float:
    """Return the square of how far this rank's elements of a weight may be away, from its second moment.

    `second`: the second moment on this rank, of any shape. `away`: how far a gradient may be away. Takes memory for a copy of
    `second` in fp32, so large ones come in pieces.
    """
    root = second.to(torch.float32, copy=True).clamp_(min=0).sqrt_().add_(max(step.epsilon, 1e-30))
    apart = root.reciprocal_().mul_(step.lr * step.share * away).clamp_(max=2 * step.lr)
    return float(apart.square_().sum(dtype=torch.float64))
