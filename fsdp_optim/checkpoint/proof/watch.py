"""One step, followed by hooks that exist only around it.

    start                      the save or the resume: random states
    first forward pass         weights, moments, modes of modules; random states; the batch
    other forward passes       their batches
    the optimizer's step       hyperparameters, gradients, random states
    finish                     everything after the step: `CameOut`, made by `joined.py`

Hooks make no collective calls: with pipeline stages the ranks come to them one after the other. What a rank has is kept as sums,
which the ranks add at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_optim.checkpoint.proof.bounds import rounding_of
from fsdp_optim.checkpoint.proof.measured import NO_MEASURES, LocalMeasures, ModelMarks, ModelMeter
from fsdp_optim.checkpoint.proof.observed import (
    batch_of,
    digest_of,
    number_of,
    random_digests,
    rounding_behind,
)
from fsdp_optim.checkpoint.proof.record import Batch, Groups, Random
from fsdp_optim.state.values.classes import innermost

log = logging.getLogger("fsdp_optim")

_TF32 = 2.0**-10


class _Removable(Protocol):
    def remove(self) -> None: ...


class StepWatch:
    """What one rank sees of a step. Made and finished by all ranks; nothing in between communicates.

    Attributes:
        went_in: the weights, the moments and the marks of the model before the step; None until a hook was called.
        trees: the tensors in plain values of `state=` before the step.
        gradients: those that the optimizer gets; None until then.
        groups: the hyperparameters of the optimizer's step, or before the step where it made none; None until a hook was called.
        has_updated: whether the optimizer has begun its step.
        batches: one for each forward pass.
        is_observed: whether `observe` gave the batches.
        numbers, observed: what else `observe` gave.
        rounding: the coarsest rounding that the forward pass showed.
        has_failed: whether an error has ended the watching.
    """

    def __init__(
        self,
        meter: ModelMeter,
        trees: Callable[[], Mapping[str, torch.Tensor]],
        *,
        watches_batches: bool = True,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        """Register the hooks.

        Args:
            trees: gives the tensors in plain values of `state=`, by key, without communication.
            watches_batches: digests of what the model gets are made. False where that is no batch, as in pipeline stages.
            at_end: called once, when each optimizer has made its first step.
        """
        self.meter, self._trees = meter, trees
        self.trees, self.has_updated = NO_MEASURES, False
        self.went_in: tuple[LocalMeasures, LocalMeasures, ModelMarks] | None = None
        self.gradients: LocalMeasures | None = None
        self.groups: Groups | None = None
        self.batches: list[Batch] = []
        self.is_observed = False
        self.numbers: dict[str, float] = {}
        self.observed: dict[str, str] = {}
        self.rounding = _rounding_of_params(meter)
        self._watches_batches, self.has_failed = watches_batches, False
        self._at_start, self._at_forward, self._at_update = random_digests(), dict[str, str](), dict[str, str]()
        self._hooks: list[_Removable] = []
        optims = [innermost(optim) for optim in meter.optimizers]
        self._waits_for, self._at_end = {id(optim) for optim in optims}, at_end
        for model in meter.models:
            self._hooks.append(model.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True))
            self._hooks.append(model.register_forward_hook(self._after_forward, with_kwargs=True))
        for optim in optims:
            register = getattr(optim, "register_step_pre_hook", None)
            if callable(register):
                self._hooks.append(register(self._before_update))
            register = getattr(optim, "register_step_post_hook", None)
            if callable(register) and at_end is not None:
                self._hooks.append(register(self._after_update))

    @property
    def random(self) -> Random:
        """The digests of this rank's random states."""
        return Random(self._at_start, self._at_forward, self._at_update)

    def observe(self, values: Mapping[str, object]) -> None:
        """Take what the user shows of the step: a batch, which replaces those that hooks have seen, numbers, and other trees."""
        for name, value in values.items():
            number = number_of(value)
            if name == "batch":
                self.batches = [*(self.batches if self.is_observed else ()), batch_of(value)]
                self.is_observed = True
            elif number is not None:
                self.numbers[name] = number
            else:
                self.observed[name] = digest_of(value)

    def close(self) -> None:
        """Remove the hooks. May be called again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # -------------------------------------------------------------------------------------------- hooks

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self.gradients is not None:
            return
        with self._without_errors():
            if self.went_in is None:
                self._take_state()
            if self._watches_batches and not self.is_observed:
                self.batches.append(batch_of([args, kwargs]))

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self.gradients is not None:
            return
        with self._without_errors():
            self.rounding = max(self.rounding, rounding_behind(output))

    def _before_update(self, optim: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self.gradients is not None:
            return
        with self._without_errors():
            if self.went_in is None:  # the forward pass was compiled, or is not a call of the model
                self._take_state()
            self._at_update, self.has_updated = random_digests(), True
            self.groups = self.meter.groups()
            self.gradients = self.meter.gradients()

    def _after_update(self, optim: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._waits_for.discard(id(optim))
        if not self._waits_for and self._at_end is not None and not torch.compiler.is_compiling():
            at_end, self._at_end = self._at_end, None
            at_end()

    def _take_state(self) -> None:
        self._at_forward = random_digests()
        self.went_in = self.meter.weights(), self.meter.moments(), self.meter.marks()
        self.trees, self.groups = self.meter.trees(self._trees()), self.meter.groups()

    def _without_errors(self) -> _Quietly:
        return _Quietly(self)

    def fail(self, error: BaseException) -> None:
        """Stop watching, because a proof must not stop the training."""
        self.has_failed = True
        log.warning("this step cannot be watched, so no resume is proven by it: %s: %s", type(error).__name__, error)
        self.close()


class _Quietly:
    """A context in which an error ends the watching, and not the training."""

    def __init__(self, watch: StepWatch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        self._watch.fail(error)
        return True


def _rounding_of_params(meter: ModelMeter) -> float:
    """Return the coarsest rounding of the parameters, and of the products of matrices that are made of them."""
    params = [param for model in meter.models for param in model.parameters()]
    is_tf32 = any(param.is_cuda for param in params) and torch.get_float32_matmul_precision() != "highest"
    return max([rounding_of(param.dtype) for param in params] + [_TF32] * is_tf32, default=0.0)
