"""The argument `state=`: objects of the trainer, and trees of values, which are saved beside the model and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from fsdp_optim.arguments import Arguments
from fsdp_optim.checkpoint.common.random_states import random_states
from fsdp_optim.errors import StateError
from fsdp_optim.formats.base.checksums import hex_of
from fsdp_optim.tensors.elements import MOST_DEEP
from fsdp_optim.tensors.memory import is_plain

RESERVED = "fsdp_optim."
"""The prefix of names that no value of the trainer may have."""

RANDOM = f"{RESERVED}rng"
"""The name of a rank's random states among its values."""

BY_NAME = f"{RESERVED}by_name"
"""Among a rank's values, where their names alone look like those of an older version's manager: it is the trainer's own names."""

OLD_STATE, OLD_RANK, OLD_RANDOM = "state", "rank", "random"
"""The keys under which older versions of a CheckpointManager saved the state of objects, for all ranks and for each rank."""

NOTHING: Mapping[str, Any] = MappingProxyType({})

_MOST_TEXT = 4096  # characters of the names that ranks compare as they are


class ModelTree(Struct, frozen=True):
    """A state dict of torch.distributed.checkpoint that is saved. `place`: the keys that lead to the model's dict in it."""

    place: tuple[str, ...]


@dataclass(frozen=True)
class PerRank:
    """A value or an object that differs between ranks: each rank saves its own. `per_rank` makes it."""

    value: Any


def per_rank(value: Any) -> Any:
    """Mark a value or an object in `state=` as each rank's own: every rank saves its own, and loads its own.

        save(path, model, optim, state={"scheduler": scheduler, "loader": per_rank(loader)})

    At another world size a plain value is that of the same index: a new rank gets none, and `missing_keys` of the result says
    so. An object is never given the state of the same index then, because rank 1 of 4 has another part of the data than rank 1
    of 2: it must have a method

        def reshard(self, states: list[Any], world_size: int) -> list[Any]

    which gets the saved states of all ranks, in the order of these ranks, and returns the states of `world_size` new ranks, in
    their order, for their `load_state_dict`. None as a state: that rank keeps its own, and `missing_keys` names it. The method
    changes neither the object nor the states, and does not communicate, because each loading rank calls it alone: with equal
    arguments it must return equal states on all ranks. Each rank reads the states of all ranks for it, and holds them until the
    load ends, so they must be small. It is not called where the number of ranks is the same, unless the object has a method
    `fits(self, state) -> bool` too, which says False of the rank's own saved state, because other ranks share data now, say.

    Where an object does not have the method, or it raises StateError because it cannot serve this number of ranks, the load
    raises StateError before anything is changed; with strict=False the object stays as it is on all ranks, which a warning and
    `missing_keys` say. `fsdp_optim.integrations.torchdata` has the method for a StatefulDataLoader.

    Args:
        value: as an unmarked value in `state=`.
    """
    return value if isinstance(value, PerRank) else PerRank(value)


def is_stateful(value: object) -> bool:
    """Return whether a value is an object with a state, in contrast to a tree of values."""
    return callable(getattr(value, "state_dict", None)) or callable(getattr(value, "load_state_dict", None))


@dataclass(frozen=True)
class RunState(Arguments):
    """The value of `state=`, or None. `rng`: each rank's random states belong to it too."""

    given: Any = None
    rng: bool = False

    @property
    def is_given(self) -> bool:
        return self.given is not None

    @property
    def named(self) -> Mapping[str, Any]:
        """The objects and values by name, each rank's own as `PerRank`."""
        return self.given if isinstance(self.given, Mapping) else NOTHING

    @property
    def in_turn(self) -> Iterator[tuple[str, Any]]:
        """The same in the order of their names, in which all ranks call objects.

        A state_dict() or load_state_dict() may be a collective call, and the dicts of ranks may have different orders.
        """
        return iter([(name, self.named[name]) for name in sorted(self.named, key=str)])

    def compared_text(self) -> str:
        """Return the names. The values may differ between ranks: the lowest rank's values count."""
        kinds = sorted(
            (str(name), "per rank" if isinstance(value, PerRank) else "") for name, value in self.named.items()
        )
        names = [f"{name} ({kind})" if kind else name for name, kind in kinds]
        text = str(names if self.is_given else None)
        if len(text) > _MOST_TEXT:  # a model's weights, each by its name
            text = f"<{len(names)} names, {hex_of(text.encode())}>"
        return f"state={text}, rng={self.rng}"

    def validate(self) -> None:
        """Raise StateError for a value that is no mapping of names, and for an object that has no complete state."""
        if self.given is None:
            return
        if not isinstance(self.given, Mapping) or not all(isinstance(name, str) for name in self.given):
            raise StateError(
                "state must be a dict from names to objects or values, as in state={'scheduler': scheduler}, not "
                f"{_shown(self.given)}"
            )
        for name, value in self.given.items():
            if name.startswith(RESERVED):
                raise StateError(f"state[{name!r}]: names that begin with {RESERVED!r} are the library's own")
            inner = value.value if isinstance(value, PerRank) else value
            lacking = [m for m in ("state_dict", "load_state_dict") if not callable(getattr(inner, m, None))]
            if lacking and is_stateful(inner):
                raise StateError(f"state[{name!r}], a {type(inner).__name__}, does not have {lacking[0]}()")

    def saved(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return the values that ranks have in common, and the values of this rank; None where there are none.

        All ranks call this method, because a state_dict() may be a collective call.
        """
        states = {name: _state_of(f"state[{name!r}]", value) for name, value in self.in_turn}
        values = {name: states[name] for name in self.named}
        own = {name: value.value for name, value in values.items() if isinstance(value, PerRank)}
        for name, value in own.items():
            refuse_sharded(f"state[{name!r}]", value)
        common = {name: value for name, value in values.items() if not isinstance(value, PerRank)}
        if self.rng:
            own[RANDOM] = random_states()
        if own.keys() == {OLD_STATE, OLD_RANK, OLD_RANDOM}:
            own[BY_NAME] = True
        return common or None, own or None


def _state_of(where: str, value: Any) -> Any:
    """Return the tree to save for an object or a value, as `PerRank` if the caller marked it."""
    if isinstance(value, PerRank):
        return PerRank(_state_of(where, value.value))
    if not is_stateful(value):
        return value
    try:
        state = value.state_dict()
    except Exception as error:
        raise StateError(f"{where}: its state_dict() failed: {type(error).__name__}: {error}") from error
    return state


def refuse_sharded(where: str, value: Any, depth: int = 0) -> None:
    """Raise StateError for a value that no rank has completely, and that ranks cannot save together.

    ShardedTensors, and DTensors of `per_rank(...)`, whose parts would be saved as if they were complete.
    """
    if depth > MOST_DEEP:  # which the encoder refuses
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            refuse_sharded(f"{where}[{key!r}]", item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            refuse_sharded(f"{where}[{index}]", item, depth + 1)
    elif not is_plain(value) and _is_cut(value):
        raise StateError(
            f"{where}: is a {type(value).__name__}, which is cut over ranks: give sharded tensors without per_rank(), and a "
            "sharded module with the model, as in model=nn.ModuleDict({'model': model, 'ema': ema})"
        )


def _is_cut(value: Any) -> bool:
    """Return whether a value is a ShardedTensor, or a DTensor that is not replicated."""
    if callable(getattr(value, "local_shards", None)):
        return True
    return not all(placement.is_replicate() for placement in getattr(value, "placements", ()))


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a dict with the key {next(name for name in value if not isinstance(name, str))!r}"
    return f"a {type(value).__name__}"
