"""What an adapter says of a wrapped model: one Handle per live parameter, and where its original parameters live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fsdp_optim.errors import WrapperError, counted_noun
from fsdp_optim.layout import Placement, Shape
from fsdp_optim.memory import flatten, is_plain, own


@dataclass(frozen=True)
class Original:
    """One original parameter inside a live one: its owner module and attribute there, and where its elements live.

    `place`: its position among those that the wrapper took out of their modules; None for one that stayed registered.
    """

    module: nn.Module
    attribute: str
    placement: Placement
    place: int | None = None


@dataclass(frozen=True)
class Handle:
    """One live parameter on this rank, as an optimizer holds it: a flat parameter, a shard, or an ordinary one.

    Attributes:
        param: the live parameter itself (identity matters: it is how an optimizer's groups are read).
        originals: the original parameters in it, in their order inside the live one.
        local_shape: the shape that state values have on this rank, padding included.
        num_padded: padding elements at the end of each group rank's chunk; empty when the wrapper pads nothing.
        collected: False where the wrapper says that its state must not be collected (`no_broadcast_optim_state`).
        synchronized: True where the wrapper itself keeps replicas equal; False: equality has to be checked.
        loose: True where no wrapper tells which ranks have it, so that its placement names all that share the model.
        aliases: other (module, attribute) places of the originals, by position in `originals`.
        kept: gives this rank's elements where the wrapper keeps them elsewhere than in `param` at times.
        skipped: True where the wrapper gives this rank no element and no gradient, so that an optimizer never has state for it.
        cast_by_wrapper: True where the wrapper casts it in the first forward pass, so that its dtype says little (buffers).
        master: of a master (`Adapter.masters`), the name of the state value under which the optimizer's own state_dict() has
            its elements, and from which load_state_dict() restores them.
    """

    param: torch.Tensor
    originals: tuple[Original, ...]
    local_shape: Shape
    num_padded: tuple[int, ...] = ()
    collected: bool = True
    synchronized: bool = True
    loose: bool = False
    aliases: tuple[tuple[int, nn.Module, str], ...] = ()
    kept: Callable[[], torch.Tensor] | None = None
    skipped: bool = False
    cast_by_wrapper: bool = False
    master: str | None = None

    def weights(self) -> torch.Tensor:
        """The parameter itself on this rank, in the form of its state values; shares its memory."""
        return self.kept().detach() if self.kept is not None else self.param.detach()

    def install(self, flat: torch.Tensor) -> None:
        """Overwrite the parameter on this rank with other elements, 1-D; those of `weights`."""
        with torch.inference_mode(mode=self.param.is_inference()), torch.no_grad():
            self.weights().copy_(flat.view(self.local_shape))

    def held(self, value: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of a state value as it lies in memory, or None when it is not cut like the parameter."""
        return value.detach() if self.is_held(value) else None

    def is_held(self, value: torch.Tensor) -> bool:
        """Whether a state value is cut like the parameter."""
        return is_plain(value) and value.shape == self.local_shape

    def local(self, value: torch.Tensor) -> torch.Tensor | None:
        """The same as a 1-D tensor: a copy where it is not contiguous."""
        held = self.held(value)
        return flatten(held) if held is not None else None

    def from_local(self, flat: torch.Tensor) -> torch.Tensor:
        """The inverse of `local`: a state value as the live optimizer holds it, from this rank's elements."""
        return flat.view(self.local_shape)

    @property
    def marks(self) -> bool:
        """Whether values that are cut like this parameter are of a class that says so (DTensor)."""
        return False

    def is_marked(self, value: torch.Tensor) -> bool:
        """Whether a value says itself how it is cut."""
        return False

    def placement_of(self, value: torch.Tensor) -> Placement | None:
        """Where a state value lives that has a shape or a cut of its own and says so itself; None for all others."""
        return None

    def place_like(self, shape: Shape, cut: str = "") -> Placement | None:
        """How this wrapper would cut a value of another shape than the parameter's; None where it would not.

        `cut`: how the value was cut when it was saved, where that is known (`cut_of`).
        """
        return None

    def placed_local(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a value that has a `placement_of` its own, as a 1-D tensor."""
        raise WrapperError(f"a {type(value).__name__} does not say where it lives")

    def from_placed(self, flat: torch.Tensor, placement: Placement) -> torch.Tensor:
        """The inverse of `placed_local`."""
        raise WrapperError(f"this wrapper cannot place a value of shape {list(placement.shape)}")

    def unwrap(self, value: Any) -> Any:
        """An opaque value without anything that belongs to this process, so that it can travel."""
        return value

    def rewrap(self, value: Any) -> Any:
        """The inverse of `unwrap`."""
        return value

    @property
    def local_numel(self) -> int:
        return int(torch.Size(self.local_shape).numel())

    @property
    def is_cut(self) -> bool:
        """Whether a rank may hold only a part of it."""
        return any(original.placement.num_shards > 1 for original in self.originals)

    @property
    def device(self) -> torch.device:
        return self.param.device

    @property
    def is_meta(self) -> bool:
        """Whether it has no memory."""
        return self.param.is_meta


@dataclass(frozen=True)
class NamedHandle:
    """A Handle and the clean FQNs of its originals."""

    handle: Handle
    fqns: tuple[str, ...]

    @property
    def placements(self) -> Mapping[str, Placement]:
        return {fqn: original.placement for fqn, original in zip(self.fqns, self.handle.originals, strict=True)}


@dataclass(frozen=True)
class ModuleValue:
    """One entry that a module's state_dict() has besides its parameters and buffers.

    Attributes:
        key: its name in the module (`_extra_state`).
        value: as the module gives it, which may share memory with it.
        others: its names by other paths to the same module.
    """

    module: nn.Module
    key: str
    value: Any
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModuleValues:
    """What state_dict() has of the modules on this rank besides parameters and buffers.

    Attributes:
        values: by FQN.
        takers: modules that may take values that they do not have now, by path.
        lost: FQNs of values that their modules could not take back.
        hooked: modules whose state_dict() is changed by hooks, which nobody has run.
    """

    values: Mapping[str, ModuleValue] = field(default_factory=dict)
    takers: Mapping[str, nn.Module] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()

    @property
    def aliases(self) -> dict[str, str]:
        return {other: fqn for fqn, one in self.values.items() for other in one.others}

    def taker_of(self, fqn: str) -> tuple[nn.Module, str] | None:
        """The innermost module that may take a value of this name, and its name there."""
        paths = [path for path in self.takers if not path or fqn.startswith(f"{path}.")]
        path = max(paths, key=len, default=None)
        return (self.takers[path], fqn[len(path) + 1 :] if path else fqn) if path is not None else None


def check_materialized(handles: Iterable[NamedHandle], rank: int) -> None:
    """Refuse a model with parameters or buffers on the meta device: they have no memory to read or to fill.

    Raises WrapperError that names the first of them and the way out.
    """
    on_meta = [fqn for named in handles if named.handle.is_meta for fqn in named.fqns]
    if on_meta:
        raise WrapperError(
            f"{on_meta[0]}: on rank {rank} it is on the meta device, so it has no memory "
            f"({counted_noun(len(on_meta), 'such tensor')}): call model.to_empty(device=...) first, then "
            "load a checkpoint into it, or initialize it"
        )


@dataclass(frozen=True)
class ModelView:
    """A wrapped model as this rank sees it.

    Attributes:
        handles: every live parameter, in the order of the wrapped model's `parameters()`.
        order: the FQNs of the original parameters, in the order of the unwrapped model's `parameters()`.
        aliases: other names of tied parameters, to the name in `order`.
        ranks: the global ranks that share the model, sorted; this rank alone for a plain module.
        rank: this global rank.
        given_names: this rank's own FQNs, to the names that `name_of` gave; empty without `name_of`.
        wrapper_parts: what wrappers put into names, which is no part of an FQN.
        mixed: for each module of which the wrapper took some parameters and left some, the FQNs of those that it took and of
            those that it left. Their order among each other is lost; those that it took are put first.
        unit_order: FQNs as the wrapper's own full dict counts them, unit after unit; None where there is no such count.
    """

    handles: tuple[NamedHandle, ...]
    order: tuple[str, ...]
    ranks: tuple[int, ...]
    rank: int
    aliases: Mapping[str, str] = field(default_factory=dict)
    unit_order: tuple[str, ...] | None = None
    mixed: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()
    wrapper_parts: frozenset[str] = frozenset()
    given_names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rank not in self.ranks:
            raise WrapperError(f"rank {self.rank} calls for a model that lives on ranks {list(self.ranks)} only")

    def handle_of(self, param: torch.Tensor) -> NamedHandle | None:
        return self._by_param.get(id(param))

    def position_of(self, named: NamedHandle) -> int:
        """The place of a live parameter in the wrapped model's `parameters()`."""
        return self._positions[id(named.handle.param)]

    @cached_property
    def place_of(self) -> Mapping[str, int]:
        """The place of each original parameter in the unwrapped model's `parameters()`."""
        return {fqn: place for place, fqn in enumerate(self.order)}

    @cached_property
    def _by_param(self) -> dict[int, NamedHandle]:
        return {id(named.handle.param): named for named in self.handles}

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {id(named.handle.param): position for position, named in enumerate(self.handles)}


@dataclass(frozen=True)
class LocalPart:
    """One rank's part of a DTensor that is in an opaque value: its elements, how it is cut (`cut_of`), and its whole shape."""

    local: Any
    cut: str
    shape: Shape

    def __deepcopy__(self, memo: object) -> LocalPart:
        return replace(self, local=own(self.local))


def has_local_part(value: Any) -> bool:
    """Whether something in a value is a part of a DTensor."""
    if type(value) is dict:
        return any(map(has_local_part, value.values()))
    if type(value) in (list, tuple):
        return any(map(has_local_part, value))
    return isinstance(value, LocalPart)
