"""The description of a wrapped model by an adapter: one Handle per live parameter, with the placements of its originals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct, structs
from torch import nn

from fsdp_optim.errors import WrapperError, counted_noun
from fsdp_optim.layout import Placement, Shape
from fsdp_optim.tensors.dtensors import as_local, dtensor_like, is_dtensor, local_of, placement_of_value
from fsdp_optim.tensors.memory import detached_copy, flatten, in_shape, is_plain, laid_out_like

if TYPE_CHECKING:
    from typing_extensions import Self


class Original(Struct, frozen=True):
    """One original parameter inside a live parameter: the owner module and attribute, and where the elements live.

    `place`: the position among the parameters that the wrapper took out of their modules; None for a parameter that stayed
    registered.
    """

    module: nn.Module
    attribute: str
    placement: Placement
    place: int | None = None


@dataclass(frozen=True)
class Handle:
    """One live parameter on this rank: the flat parameter, shard or ordinary parameter that an optimizer holds.

    Attributes:
        param: the live parameter itself (its identity matters: an optimizer's groups are matched by it).
        originals: the original parameters inside the live parameter, in their order there.
        local_shape: the shape of state values on this rank, padding included.
        num_padded: padding elements at the end of each group rank's chunk; empty when the wrapper pads nothing.
        collected: False where the wrapper forbids to collect the state (`no_broadcast_optim_state`).
        synchronized: True where the wrapper itself keeps replicas equal; False: equality must be checked.
        loose: True where no wrapper knows which ranks hold the parameter, so its placement names all ranks of the model.
        aliases: other (module, attribute) places of the originals, by position in `originals`.
        kept: gives this rank's elements where the wrapper sometimes keeps them elsewhere than in `param`.
        skipped: True where the wrapper gives this rank no element and no gradient, so no optimizer has state for it here.
        cast_by_wrapper: True where the wrapper casts it in the first forward pass, so the present dtype says little (buffers).
        master: for a master (`Adapter.masters`), the name of the state value that has the elements in the optimizer's own
            state_dict(), and from which load_state_dict() restores them.
        fused: the names of live parameters of which Views have made some of the originals (`fsdp_optim.canonical`).
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
    fused: tuple[str, ...] = ()

    @classmethod
    def like(
        cls, other: Mapping[str, Any], placement: Placement, param: torch.Tensor, sites: Sequence[tuple[nn.Module, str]]
    ) -> Self:
        """Return the Handle of a parameter that is cut as another one is.

        A frozen dataclass sets each of its attributes by a call, which would take most of the time of reading a parameter.

        Args:
            other: the attributes of that one's Handle.
            sites: where the parameter is registered: the modules and attributes.
        """
        handle = cls.__new__(cls)
        attributes = vars(handle)
        attributes.update(other)
        attributes["param"], attributes["originals"] = param, (Original(*sites[0], placement),)
        if len(sites) > 1:
            attributes["aliases"] = tuple((0, module, attribute) for module, attribute in sites[1:])
        return handle

    def weights(self) -> torch.Tensor:
        """Return the parameter's elements on this rank, in the local shape; shares the parameter's memory."""
        return self.kept().detach() if self.kept is not None else self.param.detach()

    def as_value(self) -> torch.Tensor:
        """Return the parameter as `held` and `is_held` take a value of its shape: `weights`, or the parameter itself."""
        return self.weights()

    @property
    def weights_dtype(self) -> torch.dtype:
        """The dtype of `weights`."""
        return self.param.dtype if self.kept is None else self.kept().dtype

    def install(self, flat: torch.Tensor) -> None:
        """Overwrite the elements that `weights` gives with the elements of a 1-D tensor."""
        with writing_into(self.param):
            self.weights().copy_(in_shape(flat, self.local_shape))

    def filled(self) -> torch.Tensor | None:
        """Return the tensor into which `install` copies, and nothing else, so that those of many parameters are filled at once.

        It has the local shape. None: `install` does more.
        """
        if type(self).install is not Handle.install or not is_written_as_now(self.param):
            return None
        weights = self.weights()
        return weights if is_plain(weights) else None  # not every class has torch's bulk operations

    def held(self, value: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's part of a state value, sharing its memory; None for a value that is not cut like the parameter."""
        return value.detach() if self.is_held(value) else None

    def is_held(self, value: torch.Tensor) -> bool:
        """Return whether a state value is cut like the parameter."""
        return is_plain(value) and value.shape == self.local_shape

    @property
    def sort(self) -> tuple[object, ...] | None:
        """A key that is equal only for Handles to which state values of equal `sort_of` are alike, held and marked or not.

        None: this is not known, as for a class of its own way to tell what is held.
        """
        cls = type(self)
        if cls.is_held is not Handle.is_held or cls.is_marked is not Handle.is_marked:
            return None
        return cls, self.local_shape, self.local_numel < 2 and self.is_cut

    def sort_of(self, value: object) -> object:
        """Return what `is_held` and `is_marked` look at, and the dtype: a key, which may have ids of parts of the value."""
        cls = type(value)
        return (cls, value.dtype, value.shape) if isinstance(value, torch.Tensor) else cls

    def local(self, value: torch.Tensor) -> torch.Tensor | None:
        """Return the result of `held` as a 1-D tensor: a copy where the value is not contiguous."""
        held = self.held(value)
        return flatten(held) if held is not None else None

    @property
    def takes_shaped(self) -> bool:
        """Whether `from_local` also takes contiguous elements in the local shape, which then need no view in another one."""
        return type(self).from_local is Handle.from_local

    def from_local(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a state value in the live optimizer's form, from this rank's elements: the inverse of `local`.

        The value is in the memory of `flat`, with the strides of the parameter, as optimizers make it.
        """
        if self.param.shape == self.local_shape:
            return laid_out_like(flat, self.param)
        return in_shape(flat, self.local_shape)

    @property
    def marks(self) -> bool:
        """Whether state values that are cut like this parameter have a class that records the cut (DTensor)."""
        return False

    def is_marked(self, value: torch.Tensor) -> bool:
        """Return whether a state value records its own cut: a DTensor does, whatever its parameter is."""
        return is_dtensor(value)

    def placement_of(self, value: torch.Tensor) -> Placement | None:
        """Return the placement of a state value that records a shape or a cut of its own; None for all other values."""
        return placement_of_value(value)

    def place_like(self, shape: Shape, cut: str = "") -> Placement | None:
        """Return how this wrapper would cut a value of another shape than the parameter's; None where it cannot.

        `cut`: the cut of the saved value as text (`cut_of`), where it is known.
        """
        return None

    def placed_local(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements, as a 1-D tensor, of a value for which `placement_of` gives a placement."""
        if is_dtensor(value):
            return flatten(local_of(value))
        raise WrapperError(f"a {type(value).__name__} does not record where its elements live")

    def from_placed(self, flat: torch.Tensor, placement: Placement) -> torch.Tensor:
        """Return a value with a placement of its own, from this rank's elements: the inverse of `placed_local`."""
        raise WrapperError(f"this wrapper cannot place a value of shape {list(placement.shape)}")

    def own_place(self, live: object) -> Placement | None:
        """Return the placement of a live value with a cut of its own, by which a load cuts a value of the same name and shape.

        None where nothing says so: the live value is cut like the parameter, or is no DTensor.
        """
        return self.placement_of(live) if is_dtensor(live) and not self.is_held(live) else None

    def like_live(self, flat: torch.Tensor, live: Any) -> torch.Tensor:
        """Return a value in the form of the live value of `own_place`, from this rank's elements."""
        return dtensor_like(flat, live)

    def unwrap(self, value: Any) -> Any:
        """Return an opaque value without references to objects of this process, so that it can be sent to another rank."""
        return as_local("an opaque value", value)

    def rewrap(self, value: Any) -> Any:
        """Return the opaque value on the receiving rank: the inverse of `unwrap`."""
        return value

    @property
    def local_numel(self) -> int:
        return prod(self.local_shape)

    @property
    def is_cut(self) -> bool:
        """Whether a rank may hold only a part of the parameter."""
        return any(original.placement.num_shards > 1 or original.placement.is_open for original in self.originals)

    @property
    def device(self) -> torch.device:
        return self.param.device

    @property
    def is_meta(self) -> bool:
        """Whether the parameter is on the meta device, without memory."""
        return self.param.is_meta


class NamedHandle(Struct, frozen=True):
    """A Handle with the clean FQNs of its originals."""

    handle: Handle
    fqns: tuple[str, ...]

    @property
    def placements(self) -> Mapping[str, Placement]:
        return {fqn: original.placement for fqn, original in zip(self.fqns, self.handle.originals, strict=True)}

    def with_all_collected(self) -> NamedHandle:
        """Return the same, also where the wrapper forbids to collect the state."""
        return self if self.handle.collected else structs.replace(self, handle=replace(self.handle, collected=True))


@dataclass(frozen=True)
class ModuleValue:
    """One entry of a module's state_dict() that is neither a parameter nor a buffer.

    Attributes:
        key: the entry's name in the module (`_extra_state`).
        value: the entry's value, which may share memory with the module.
        others: the entry's FQNs by other paths to the same module.
        stage_copies: the entries of other pipeline stages of this rank with the same FQN.
    """

    module: nn.Module
    key: str
    value: Any
    others: tuple[str, ...] = ()
    stage_copies: tuple[ModuleValue, ...] = ()


@dataclass(frozen=True)
class ModuleValues:
    """The entries of state_dict() on this rank that are neither parameters nor buffers.

    Attributes:
        values: the entries by FQN.
        extra_state_loaders: modules that may load entries that they do not have now, by path.
        lost: FQNs of entries that their modules cannot load.
        hooked: modules whose state_dict() is changed by hooks, which this library does not run.
    """

    values: Mapping[str, ModuleValue] = field(default_factory=dict)
    extra_state_loaders: Mapping[str, nn.Module] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()

    @property
    def aliases(self) -> dict[str, str]:
        return {other: fqn for fqn, entry in self.values.items() for other in entry.others}

    def extra_state_loader_of(self, fqn: str) -> tuple[nn.Module, str] | None:
        """Return the innermost module that may load an entry with this FQN, and the entry's name in the module."""
        paths = [path for path in self.extra_state_loaders if not path or fqn.startswith(f"{path}.")]
        path = max(paths, key=len, default=None)
        return (self.extra_state_loaders[path], fqn[len(path) + 1 :] if path else fqn) if path is not None else None


def is_written_as_now(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was made in the mode, of inference or not, that is on now, so that it can be overwritten in it."""
    return tensor.is_inference() == torch.is_inference_mode_enabled()


def writing_into(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context in which a tensor can be overwritten: without autograd, in the mode in which the tensor was made."""
    if is_written_as_now(tensor):
        # Nearly always; to enter a mode takes longer than to copy a small tensor.
        return torch.no_grad() if torch.is_grad_enabled() else nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(mode=tensor.is_inference()))
    stack.enter_context(torch.no_grad())
    return stack


def check_materialized(handles: Iterable[NamedHandle], rank: int) -> None:
    """Refuse a model with parameters or buffers on the meta device, which have no memory to read or to fill.

    Raises WrapperError that names the first such tensor and the fix.
    """
    on_meta = [fqn for named in handles if named.handle.is_meta for fqn in named.fqns]
    if on_meta:
        raise WrapperError(
            f"{on_meta[0]}: on rank {rank} this tensor is on the meta device and has no memory "
            f"({counted_noun(len(on_meta), 'such tensor')}): call model.to_empty(device=...) first, compute the buffers with "
            "persistent=False anew, which no checkpoint has, then load a checkpoint into the model, or initialize it"
        )


@dataclass(frozen=True)
class ModelView:
    """A wrapped model as this rank sees it.

    Attributes:
        handles: every live parameter, in the order of the wrapped model's `parameters()`.
        order: the FQNs of the original parameters, in the order of the unwrapped model's `parameters()`.
        aliases: other FQN of a tied parameter -> its FQN in `order`.
        ranks: the global ranks that share the model, sorted; this rank alone for a plain module.
        rank: this global rank.
        given_names: FQN on this rank -> the name from `name_of`; empty without `name_of`.
        unmatched: the Views, as text, that name nothing of this rank's model.
        seen_through: all Views, as text, through which the model is seen.
        wrapper_parts: name components that wrappers insert, and that are not part of an FQN.
        mixed: for each module from which the wrapper took only some parameters, the FQNs of the parameters that it took and of
            the parameters that it left. The order between the two groups is lost; `order` has the taken parameters first.
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
    unmatched: tuple[str, ...] = ()
    seen_through: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank not in self.ranks:
            raise WrapperError(
                f"rank {self.rank} makes a call for a model that lives on the ranks {list(self.ranks)} only"
            )

    def handle_of(self, param: torch.Tensor) -> NamedHandle | None:
        return self._by_param.get(id(param))

    def position_of(self, named: NamedHandle) -> int:
        """Return the index of a live parameter in the wrapped model's `parameters()`."""
        return self._positions[id(named.handle.param)]

    @cached_property
    def place_of(self) -> Mapping[str, int]:
        """The index of each original parameter in the unwrapped model's `parameters()`."""
        return {fqn: place for place, fqn in enumerate(self.order)}

    @cached_property
    def _by_param(self) -> dict[int, NamedHandle]:
        return {id(named.handle.param): named for named in self.handles}

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {id(named.handle.param): position for position, named in enumerate(self.handles)}


@dataclass(frozen=True)
class LocalPart:
    """One rank's part of a DTensor inside an opaque value: local elements, the cut as text (`cut_of`), the unsharded shape."""

    local: Any
    cut: str
    shape: Shape

    def __deepcopy__(self, memo: object) -> LocalPart:
        return replace(self, local=detached_copy(self.local))


def has_local_part(value: Any) -> bool:
    """Return whether a value is a LocalPart, or a container with one inside."""
    if type(value) is dict:
        return any(map(has_local_part, value.values()))
    if type(value) in (list, tuple):
        return any(map(has_local_part, value))
    return isinstance(value, LocalPart)
