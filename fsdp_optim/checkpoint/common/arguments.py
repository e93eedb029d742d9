"""The arguments of the calls on checkpoints, each together with its options. The ranks compare them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from fsdp_optim.arguments import (
    MAY_DIFFER,
    check_at_least,
    check_one_of,
    check_which_weights,
    compared_as,
    text_of_format,
)
from fsdp_optim.checkpoint.common.run_state import ModelTree, RunState
from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.options import (
    CallArguments,
    CallOptions,
    LoadOptions,
    OnDamage,
    SaveOptions,
    WhichWeights,
    fields_of,
)
from fsdp_optim.verbs.named_models import ModelNames, NamedModels

_MOST_STEPS = 1 << 63
_NOTHING, _ONE_MODEL = RunState(), ModelNames()

LoadArgumentsT = TypeVar("LoadArgumentsT", bound="LoadArguments")


def call_of(options: CallOptions, **arguments: Any) -> CallArguments:
    """Return the options of a save or a load that every call has."""
    return CallArguments(**{option.name: getattr(options, option.name) for option in fields(CallOptions)}, **arguments)


def _of_models(named: NamedModels | None) -> dict[str, Any]:
    return {"models": named.names, "wrong_options": named.wrong} if named is not None else {}


@dataclass(frozen=True)
class SaveArguments(SaveOptions):
    """The arguments of `save` and `async_save`. `tree`: the model is one of a state dict, whose other values are the `state`."""

    state: RunState = _NOTHING
    tree: ModelTree | None = None
    step: int | None = None
    overwrite: bool = False
    weights: WhichWeights = "all"
    models: ModelNames = _ONE_MODEL
    format: object = field(default="safetensors", metadata=compared_as(text_of_format))
    wrong_options: str = field(default="", metadata=MAY_DIFFER)

    @classmethod
    def of(cls, options: SaveOptions, state: Any, named: NamedModels | None = None, **arguments: Any) -> SaveArguments:
        """Return the arguments of a call that was given these options, and these models if they have names."""
        given = {**_of_models(named), **fields_of(SaveOptions, options)}
        return cls(**given, state=RunState(state), **arguments)

    @property
    def call(self) -> CallArguments:
        """The options that say who makes the call, and how."""
        return call_of(self)

    def validate(self) -> None:
        if self.wrong_options:
            raise StateError(self.wrong_options)
        super().validate()
        self.state.validate()
        check_which_weights(self.weights)
        if self.step is not None:
            check_at_least("step", self.step, 0, error=CheckpointError)
            if self.step >= _MOST_STEPS:
                raise CheckpointError(f"step must be at most {_MOST_STEPS - 1}, not {self.step}")


@dataclass(frozen=True)
class LoadArguments(LoadOptions):
    """The arguments of `load`.

    `allow_unexpected`: of names that one side has alone, a strict load refuses missing ones only. `fused`: the names in the
    checkpoint that the Views are of, when it is open. `drops_new_state`: a parameter that had no state at the save loses the
    state that it has; else such a load is refused.
    """

    state: RunState = _NOTHING
    strict: bool = True
    allow_unexpected: bool = False
    weights: WhichWeights = "all"
    models: ModelNames = _ONE_MODEL
    fused: tuple[str, ...] = field(default=(), metadata=MAY_DIFFER)
    drops_new_state: bool = False
    wrong_options: str = field(default="", metadata=MAY_DIFFER)

    @classmethod
    def of(
        cls: type[LoadArgumentsT], options: LoadOptions, state: Any, named: NamedModels | None = None, **arguments: Any
    ) -> LoadArgumentsT:
        """Return the arguments of a call that was given these options, and these models if they have names."""
        given = {**_of_models(named), **fields_of(LoadOptions, options)}
        return cls(**given, state=RunState(state), **arguments)

    @property
    def call(self) -> CallArguments:
        """The options that say who makes the call, and how. Replicas may differ, because a load replaces all of them."""
        of_call = {option.name: getattr(self, option.name) for option in fields(CallOptions)}
        of_call["on_replica_mismatch"] = "error"
        return CallArguments(**of_call, strict=self.strict, param_groups=self.param_groups, fused=self.fused)

    def validate(self) -> None:
        if self.wrong_options:
            raise StateError(self.wrong_options)
        super().validate()
        self.state.validate()
        check_which_weights(self.weights)


@dataclass(frozen=True)
class ResumeArguments(LoadArguments):
    """The arguments of `resume`."""

    on_damage: OnDamage = "error"

    def validate(self) -> None:
        super().validate()
        check_one_of("on_damage", self.on_damage, ("error", "previous"), CheckpointError)
