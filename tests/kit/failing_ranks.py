"""All calls of the verbs on ranks of which one fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist

import fsdp_optim
from fsdp_optim.transport import world_here
from kit.compare import check_same
from kit.groups import (
    check_gathered,
    frozen_copy,
    nested_net,
    plain_net,
)
from kit.trained import state_by_name

Error = tuple[str, str, float]
WORLD = 3
PATIENCE = 60.0  # seconds; a rank that waits for it has hung
SOON = 30.0  # seconds: less than what a hang takes, and far more than a busy machine needs
SMALL = 128  # bytes in a bucket, so that there are many

# ---------------------------------------------------------------------------------------------- the calls


class Calls:
    """A trained model, and a fresh one, and what is to come of each call."""

    def __init__(self) -> None:
        self.model, self.optim, _ = nested_net()
        self.fresh, self.fresh_optim, _ = nested_net(0)
        self.plain = plain_net()
        self.full = fsdp_optim.gather_full_optim_state_dict(self.model, self.optim, None)
        self.recipient = 1

    def run(self, verb: str, model: Any = None, optim: Any = None, timeout: float = PATIENCE) -> Any:
        """One call with a model and an optimizer that may be broken ones, which plans anew; the iterator is exhausted."""
        world_here().plans.clear()
        model = self.model if model is None else model
        if verb == "gather":
            optim = optim or self.optim
            return fsdp_optim.gather_full_optim_state_dict(
                model, optim, self.recipient, options=fsdp_optim.CallOptions(timeout=timeout, bucket_nbytes=SMALL)
            )
        if verb == "iter":
            optim = optim or self.optim
            return dict(
                fsdp_optim.iter_full_optim_state(
                    model, optim, self.recipient, options=fsdp_optim.CallOptions(timeout=timeout, bucket_nbytes=SMALL)
                )
            )
        given = self.full if dist.get_rank() == self.recipient else None
        optim = optim or self.optim
        return fsdp_optim.scatter_full_optim_state_dict(
            model, optim, given, self.recipient, options=fsdp_optim.CallOptions(timeout=timeout, bucket_nbytes=SMALL)
        )

    def check(self, verb: str) -> None:
        """The group still works."""
        result = self.run(verb)
        if verb == "gather":
            check_gathered(result, self.recipient, *self.plain)
        elif verb == "iter":
            state = state_by_name(*self.plain)
            check_same(
                "iterated", result, state if dist.get_rank() == self.recipient else dict.fromkeys(state), in_order=False
            )
        else:
            check_same("scattered", result, frozen_copy(self.optim), in_order=False)


# ---------------------------------------------------------------------------------------------- exceptions


class NthCall:
    """Stands for a function, whose `nth` call (from 0) does something else; counts them."""

    def __init__(self, function: Any, nth: int, instead: Callable[[], Any]) -> None:
        self._function, self._nth, self._instead = function, nth, instead
        self.count = 0

    def __get__(self, instance: Any, owner: Any) -> Any:
        return lambda *args, **kwargs: self(instance, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.count == self._nth + 1:
            self._instead()
        return self._function(*args, **kwargs)

    @property
    def reached(self) -> bool:
        return self.count > self._nth


@contextlib.contextmanager
def nth_call(targets: Sequence[tuple[Any, str]], nth: int, instead: Callable[[], Any]) -> Iterator[Any]:
    """The nth call of each of some functions does something else. Gives what says whether it was reached."""
    with contextlib.ExitStack() as stack:
        stand_ins = [NthCall(getattr(owner, name), nth, instead) for owner, name in targets]
        for (owner, name), stand_in in zip(targets, stand_ins, strict=True):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield lambda: any(stand_in.reached for stand_in in stand_ins)
