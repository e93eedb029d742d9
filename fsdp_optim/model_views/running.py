"""A run of a module's hooks on numbers, as state_dict() and load_state_dict() run them on weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_optim.adapters.state_dict_hooks import Hook, HookedModule, HookedUnit
from fsdp_optim.errors import WrapperError, shortened
from fsdp_optim.model_views.guard import Forbidden, Guard, untouched
from fsdp_optim.tensors.model_dict import with_metadata


class HookFailed(Exception):
    """A hook raised an error of its own."""


@dataclass(frozen=True, eq=False)
class HookRun:
    """The hooks of one unit, with tensors in place of its parameters and buffers.

    Attributes:
        given: the tensors that the hooks got, by name.
        state: the dict as the hooks of state_dict() left it.
        guard: the mode in which they were run.
        trace: the operations that they made, each with its arguments that are no tensors.
    """

    unit: HookedUnit
    given: Mapping[str, torch.Tensor]
    state: dict[str, Any]
    guard: Guard
    trace: tuple[tuple[str, tuple[object, ...]], ...]

    @property
    def touched(self) -> list[str]:
        """The names whose tensors are no longer in the dict as they were given."""
        return [name for name in self.given if not self.is_left(name)]

    def is_left(self, name: str) -> bool:
        """Return whether a tensor is in the dict as it was given."""
        return self.state.get(name) is self.given[name] and not self.guard.is_written(self.given[name])


def run_save(unit: HookedUnit, given: Mapping[str, torch.Tensor]) -> HookRun:
    """Run the hooks of state_dict(), those of inner modules first.

    Raises:
        HookFailed: a hook raised an error.
        WrapperError: a hook did what it may not.
    """
    guard = Guard({tensor.fqn: tensor.live for tensor in unit.tensors.values()})
    guard.give(list(given.values()))
    state = _dict_of(unit, given)
    with _unchanged(unit):
        for hooked in _inner_first(unit.hooked):
            taken = state
            for hook in hooked.save:
                with _guarded(unit, hooked, hook, guard):
                    result = hook.call(hooked.module, taken, hooked.prefix, hooked.metadata)
                    if hook.takes_over and result is not None:
                        taken = result
            if (
                hooked is unit.outermost and not hooked.path
            ):  # torch returns what the root's hooks return, and only that
                state = taken
    return HookRun(unit, dict(given), dict(state), guard, tuple(guard.trace))


def run_load(run: HookRun, state: Mapping[str, Any]) -> dict[str, Any]:
    """Run the hooks of load_state_dict() on a dict, those of outer modules first, and return what the modules would load.

    Raises as `run_save` does.
    """
    unit, loaded = run.unit, dict(state)
    with _unchanged(unit):
        for hooked in unit.hooked:
            inside = {name: value for name, value in loaded.items() if name.startswith(hooked.prefix)}
            taken = _dict_of(unit, inside)
            for hook in hooked.load:
                with _guarded(unit, hooked, hook, run.guard):
                    _call_load(hook, hooked, taken)
            left = {name: value for name, value in loaded.items() if name not in inside}
            loaded = left | {name: value for name, value in taken.items() if name.startswith(hooked.prefix)}
    return loaded


def _call_load(hook: Hook, hooked: HookedModule, state: dict[str, Any]) -> None:
    messages = list[str]()
    lists: tuple[list[str], list[str], list[str]] = ([], [], messages)  # missing, unexpected, and errors
    hook.call(state, hooked.prefix, hooked.metadata, True, *lists)  # strict
    if messages:
        raise HookFailed(messages[0])


def refusal(unit: HookedUnit, why: str, names: Sequence[str] = ()) -> WrapperError:
    """Return the error that names a module, its hooks and its parameters."""
    hooks = ", ".join(dict.fromkeys(hook.name for hooked in unit.hooked for hook in hooked.save))
    named = names or list(unit.tensors)
    return WrapperError(
        f"{unit.outermost.what}: views='hooks' cannot learn from its state-dict hooks {hooks}: {why}. Give Views in place of "
        f"'hooks', as in views=[View(...)], for {shortened(named, most=4)}, or leave views out to keep the live names"
    )


@contextmanager
def _unchanged(unit: HookedUnit) -> Iterator[None]:
    """A context that refuses hooks which have changed the modules, after it has put back what they had."""
    with untouched(unit) as changed:
        yield
    if changed:
        raise refusal(unit, f"they changed the live model, {changed[0]}, which has been restored")


@contextmanager
def _guarded(unit: HookedUnit, hooked: HookedModule, hook: Hook, guard: Guard) -> Iterator[None]:
    try:
        with torch.no_grad(), guard:
            yield
    except Forbidden as error:
        raise refusal(unit, f"{hook.name} of {hooked.what} is not run, because {error}") from None
    except HookFailed:
        raise
    except Exception as error:
        raise HookFailed(f"{hook.name} of {hooked.what} raised {type(error).__name__}: {error}") from error


def _dict_of(unit: HookedUnit, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict as torch gives it to hooks, with the metadata of modules beside it."""
    return with_metadata(given, {hooked.path: hooked.metadata for hooked in unit.hooked})


def _inner_first(hooked: Sequence[HookedModule]) -> Iterator[HookedModule]:
    """Yield modules, which are listed outer ones first, as torch's state_dict() comes to the end of each."""
    open_ones: list[HookedModule] = []
    for module in hooked:
        while open_ones and not module.path.startswith(open_ones[-1].prefix):
            yield open_ones.pop()
        open_ones.append(module)
    yield from reversed(open_ones)
