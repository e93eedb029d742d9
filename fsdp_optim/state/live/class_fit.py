"""The comparison of a saved state with the live optimizer's class, and the part of a state that another class can use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import Struct

from fsdp_optim.errors import StateError
from fsdp_optim.state.dicts.full import FullState
from fsdp_optim.state.live.local import LocalOptim
from fsdp_optim.state.values.classes import READ_BY_LOADS, OptimizerClass, is_on


class LiveGroup(Struct, frozen=True):
    """One param group of a live optimizer: the optimizer's class, hyperparameters, FQNs, and the names of its state values."""

    of: OptimizerClass
    hyperparameters: Mapping[str, Any]
    fqns: tuple[str, ...]
    values: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Unmatched:
    """The names of hyperparameters and state values that only one side has, and that `strict=False` does not load.

    `kept`: FQN -> names of live state values that stay beside the loaded values. `text`: the difference, for a warning.
    """

    hyperparameters: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    kept: Mapping[str, frozenset[str]] = field(default_factory=dict)
    text: str = ""


def live_groups(
    optim: LocalOptim, fqns: Sequence[Sequence[str]], values: Mapping[str, frozenset[str]]
) -> tuple[LiveGroup, ...]:
    """Return the groups of a live optimizer. `fqns`: of each group; `values`: `LocalOptim.values_by_class` of all ranks."""
    return tuple(
        LiveGroup(of, hyper, tuple(names), values.get(of.name, frozenset()))
        for of, hyper, names in zip(optim.classes, optim.groups, fqns, strict=False)
    )


def fit_class(full: FullState, live: Sequence[LiveGroup], *, strict: bool) -> tuple[FullState, Unmatched]:
    """Return the part of a full state that optimizers of these classes can use: all of it where the classes are the same.

    Raises StateError (strict) that names the differences, where the classes differ.
    """
    state, groups = dict(full.state), list(full.groups)
    kept: dict[str, frozenset[str]] = {}
    hyperparameters: set[str] = set()
    values: set[str] = set()
    texts = []
    place_of = {fqn: place for place, group in enumerate(live) for fqn in group.fqns}
    for index, (hyper, fqns) in enumerate(full.groups):
        shared_with = _by_live_group(fqns, place_of)
        if not shared_with and len(live) == len(full.groups):
            shared_with[index] = set()  # a group without parameters is compared with the group at its place
        for place, shared in sorted(shared_with.items()):
            group = live[place]
            saved = _SavedState(
                full.class_of(index), hyper, frozenset(str(n) for f in shared for n in full.state.get(f, {}))
            )
            if not saved.is_of_another_class(group):
                continue
            text = saved.difference(group)
            if strict:
                raise StateError(f"{text}. {_FIX}")
            loaded = saved.common_values(group)
            groups[index] = (saved.common_hyperparameters(group), fqns)
            for fqn in shared & state.keys():
                state[fqn] = {name: value for name, value in state[fqn].items() if str(name) in loaded}
                kept[fqn] = group.values - loaded
                if not state[fqn]:
                    del state[fqn]
            hyperparameters |= saved.own_hyperparameters ^ _own(group.hyperparameters)
            values |= (saved.values ^ group.values) | (saved.values - loaded)
            texts.append(text)
    if not texts:
        return full, Unmatched()
    unmatched = Unmatched(tuple(sorted(hyperparameters)), tuple(sorted(values)), kept, texts[0])
    return replace(full, state=state, groups=tuple(groups)), unmatched


def _by_live_group(fqns: Iterable[str], place_of: Mapping[str, int]) -> dict[int, set[str]]:
    """Return the FQNs that the optimizer has, by the place of their live group."""
    shared: dict[int, set[str]] = {}
    for fqn in fqns:
        if fqn in place_of:
            shared.setdefault(place_of[fqn], set()).add(fqn)
    return shared


_FIX = (
    "Build an optimizer of the saved class, or give strict=False, which loads the hyperparameters and state values that both "
    "have and lists the rest"
)

# Hyperparameters that some versions of torch.optim and its schedulers add to the groups: they do not show another class.
_OPTIONS = frozenset({"foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"})
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})

# Hyperparameters that optimizers have in all versions: an added or a missing one shows another class.
_TELLING = frozenset(
    {
        *("betas", "eps", "weight_decay", "amsgrad", "momentum", "dampening", "nesterov", "alpha", "centered", "rho"),
        *("lr_decay", "lambd", "t0", "momentum_decay", "etas", "step_sizes"),
    }
)

# For each class of torch.optim: the state values that a step needs, and further values that the class may have.
_VALUES: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    name: (frozenset(needed.split()), frozenset(others.split()))
    for name, needed, others in (
        ("SGD", "", "momentum_buffer"),
        ("Muon", "", "momentum_buffer"),
        ("Adam", "step exp_avg exp_avg_sq", "max_exp_avg_sq"),
        ("AdamW", "step exp_avg exp_avg_sq", "max_exp_avg_sq"),
        ("NAdam", "step mu_product exp_avg exp_avg_sq", ""),
        ("RAdam", "step exp_avg exp_avg_sq", ""),
        ("SparseAdam", "step exp_avg exp_avg_sq", ""),
        ("Adamax", "step exp_avg exp_inf", ""),
        ("Adadelta", "step square_avg acc_delta", ""),
        ("Adagrad", "step sum", ""),
        ("RMSprop", "step square_avg", "momentum_buffer grad_avg"),
        ("ASGD", "step eta mu ax", ""),
        ("Rprop", "step prev step_size", ""),
    )
}


def _values_of(live: LiveGroup) -> tuple[frozenset[str], frozenset[str]] | None:
    """Return the state values that a step of a group needs, and all values that the group may have; None for an unknown class."""
    if live.of.torch_name not in _VALUES:
        return None
    needed, others = _VALUES[live.of.torch_name]
    switched_on = {name for key, name in _SWITCHES.items() if is_on(live.hyperparameters, key)}
    if not needed:  # SGD makes its only value in its first step
        return needed, others
    return needed | others & switched_on, needed | others


def lacking_values(of: OptimizerClass, hyperparameters: Mapping[str, Any], values: Collection[str]) -> str:
    """Return why a torch.optim optimizer cannot step with these state values and hyperparameters; "" where it can, or others.

    A parameter without any state is no failure: its state begins at its next step.
    """
    live = LiveGroup(of, hyperparameters, ())
    if not values or not of.is_of_torch or (known := _values_of(live)) is None:
        return ""
    lacking = sorted(known[0] - set(values))
    if not lacking:
        return ""
    switches = [key for key, name in _SWITCHES.items() if name in lacking and is_on(hyperparameters, key)]
    because = f" with {switches[0]}={hyperparameters[switches[0]]}" if switches else ""
    way = (
        f"build the optimizer with {switches[0]}={_OFF[switches[0]]}, or load the saved {switches[0]} too"
        if switches
        else ""
    )
    return (
        f"{of.name} needs {', '.join(lacking)} in its next step{because}, and the saved state has only "
        f"{', '.join(sorted(values))}: {way or 'load the state of an optimizer of this class'}"
    )


_OFF = {"amsgrad": False, "centered": False, "momentum": 0}

# Hyperparameters that switch a state value on.
_SWITCHES = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}


def _own(hyperparameters: Iterable[str]) -> frozenset[str]:
    return frozenset(hyperparameters) - _OF_SCHEDULERS


class _SavedState(Struct, frozen=True):
    """A group of a saved state: the optimizer's class ("" where not recorded), hyperparameters, names of the state values."""

    name: str
    hyperparameters: Mapping[str, Any]
    values: frozenset[str]

    def __post_init__(self) -> None:
        for key in READ_BY_LOADS:
            is_on(self.hyperparameters, key)  # raises StateError, which torch's load would not

    @property
    def own_hyperparameters(self) -> frozenset[str]:
        return _own(self.hyperparameters)

    def is_of_another_class(self, live: LiveGroup) -> bool:
        """Return whether the classes differ: by the recorded class, else by the names that only one side has."""
        if self.name and not live.of.is_the_class(self.name):
            return True
        return self._has_other_hyperparameters(live) or self._has_other_values(live)

    def _has_other_values(self, live: LiveGroup) -> bool:
        """Return whether each side has values that the other does not have.

        The values of an optimizer without state are known for torch.optim's own classes only.
        """
        needed = may_have = live.values
        if not live.values and live.of.is_of_torch:
            needed, may_have = _values_of(live) or (live.values, live.values)
        return bool(self.values - may_have and needed - self.values)

    def _has_other_hyperparameters(self, live: LiveGroup) -> bool:
        if not self.hyperparameters:  # torch's flattened dicts of models without state have none
            return False
        known = {*live.hyperparameters, *live.of.hyperparameters}
        foreign = self.own_hyperparameters - known - _OPTIONS
        lacking = frozenset(live.of.hyperparameters) - self.own_hyperparameters - _OPTIONS
        flag = "decoupled_weight_decay"
        both = flag in self.hyperparameters and flag in live.hyperparameters
        decoupled = both and not self.name and is_on(self.hyperparameters, flag) != is_on(live.hyperparameters, flag)
        return decoupled or bool((foreign | lacking) & _TELLING) or bool(foreign and lacking)

    def difference(self, live: LiveGroup) -> str:
        if self.name and not live.of.is_the_class(self.name):
            text = f"the state is of the class {self.name}, the optimizer of the class {live.of.name}"
        else:
            text = f"the state is of another class than the optimizer's {live.of.name}"
        saved_names, live_names = self.own_hyperparameters, _own(live.hyperparameters)
        text += _only("hyperparameters", saved_names - live_names, live_names - saved_names)
        flag = "decoupled_weight_decay"
        if flag in saved_names & live_names and is_on(self.hyperparameters, flag) != is_on(live.hyperparameters, flag):
            text += (
                f"; {flag} is {self.hyperparameters[flag]} in the state, {live.hyperparameters[flag]} in the optimizer"
            )
        if live.values:
            text += _only("state values", self.values - live.values, live.values - self.values)
        return text

    def common_hyperparameters(self, live: LiveGroup) -> dict[str, Any]:
        """Return the hyperparameters of the live group, with the saved value of each that both sides have.

        Hyperparameters that define the class, or decide which state values exist, keep their live value.
        """
        stays = {"decoupled_weight_decay", *_SWITCHES}
        saved = self.hyperparameters
        return {
            key: saved[key] if key in saved and key not in stays else value
            for key, value in live.hyperparameters.items()
        }

    def common_values(self, live: LiveGroup) -> frozenset[str]:
        """Return the state values that both sides have; none where the live optimizer could not step with them alone."""
        if live.values:
            return self.values & live.values
        is_related = self.name in live.of.names or set(self.hyperparameters) == set(live.hyperparameters)
        if is_related and not live.of.is_of_torch:
            return self.values
        known = _values_of(live)
        if known is None:
            return frozenset()
        needed, may_have = known
        return self.values & may_have if needed <= self.values else frozenset()


def _only(what: str, saved: frozenset[str], live: frozenset[str]) -> str:
    sides = [
        f"{what} that only {where} has: {', '.join(sorted(map(str, names)))}"
        for where, names in (("the state", saved), ("the optimizer", live))
        if names
    ]
    return "".join(f"; {side}" for side in sides)
