"""A test class for every Adapter; `fsdp_optim.adapters.Adapter` has the protocol.

    def make():                                       # at module level, so that a worker can import it
        return MyAdapter()

    def wrap(module):                                 # on every rank, with the same module
        return MyWrapper(module)

    class TestMyWrapper(AdapterConformance, unittest.TestCase):
        make_adapter = staticmethod(make)
        wrap = staticmethod(wrap)

Each test runs on all world sizes of the class, on live ranks over gloo.
"""

from __future__ import annotations

import copy
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_optim.adapters import Adapter, ModelReader, use_adapters
from fsdp_optim.api import gather_full_optim_state_dict, get_shard_from_optim_state_dict, load_optim_state_dict
from fsdp_optim.testing.fairscale_cpu import fairscale_on_cpu
from fsdp_optim.testing.ranks import run_on_ranks
from fsdp_optim.view import ModelView, NamedHandle

VALUES = ("momentum_buffer", "exp_avg", "exp_avg_sq")
"""Names of state values that the library knows to be cut like their parameter: SGD and Adam need these to step."""

ModelAndOptim = tuple[nn.Module, Any]
"""A wrapped model, and its optimizer."""


class Awkward(nn.Module):
    """A nested model with awkward shapes, in which each element is its own number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))
        self.first = nn.Linear(5, 7)
        self.inner = nn.Sequential(nn.Linear(3, 4, bias=False), nn.LayerNorm(4))
        start = 1
        for param in self.parameters():
            param.data = torch.arange(start, start + param.numel(), dtype=torch.float32).view(param.shape)
            start += param.numel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use every parameter."""
        self.inner(x[..., :3])
        made: torch.Tensor = self.first(x) * self.scale
        return made


class AdapterConformance:
    """A mix-in for a `unittest.TestCase`: the promises of an Adapter, one per test.

    Attributes:
        make_adapter: makes the adapter; None for one that is known already (built in, or installed).
        wrap: wraps a module, whose parameters have whole numbers of up to three digits as their elements, all different.
        make_optimizer: makes the optimizer of a wrapped model, which has a `state` as those of torch; it is never stepped.
        world_sizes: how many ranks there are.
        num_padded_promised: whether the wrapper pads, so that at some size a Handle must say so.
    """

    make_adapter: Callable[[], Adapter] | None = None
    wrap: Callable[[nn.Module], nn.Module]
    make_optimizer: Callable[[nn.Module], Any] = staticmethod(
        lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    )
    world_sizes: Sequence[int] = (1, 2, 3)
    num_padded_promised: bool = False

    def test_every_element_is_where_the_layout_says(self) -> None:
        """Each element lies where the placement says, and on no other rank; the ranks together hold all elements."""
        for by_rank in self._on_ranks(check_elements):
            compare_elements(by_rank)

    def test_names_and_order_are_those_of_the_unwrapped_model(self) -> None:
        """Every parameter occurs once, under the name of the unwrapped model."""
        self._on_ranks(check_names)

    def test_local_and_from_local_are_inverse(self) -> None:
        """`local` and `from_local` are inverse, for the dtype of the parameter and for another one."""
        self._on_ranks(check_inverse)

    def test_all_ranks_see_the_same(self) -> None:
        """All ranks see the same shapes, and the same ranks of a call."""
        for by_rank in self._on_ranks(view_facts):
            compare_views(by_rank)

    def test_padding_is_counted(self) -> None:
        """A local tensor is as long as its elements and its padding together."""
        results = self._on_ranks(check_padding)
        if self.num_padded_promised and not any(any(by_rank) for by_rank in results):
            raise AssertionError("no Handle has num_padded at any world size")

    def test_nothing_is_changed(self) -> None:
        """Reading leaves parameters, gradients, state, groups and modules as they are."""
        self._on_ranks(check_unchanged)

    def test_a_gather_gives_the_plain_values(self) -> None:
        """State that equals the parameters gathers to the unwrapped parameters, and loads again unchanged."""
        self._on_ranks(check_gather)

    def _on_ranks(self, check: Callable[[ModelAndOptim, ModelReader], Any]) -> list[list[Any]]:
        cls = type(self)
        if not isinstance(self, unittest.TestCase):
            raise TypeError("AdapterConformance is a mix-in: inherit from unittest.TestCase too")
        results = []
        for size in self.world_sizes:
            with self.subTest(world_size=size):
                results.append(run_on_ranks(run_check, size, check, cls))
        return results


def run_check(check: Callable[[ModelAndOptim, ModelReader], Any], cls: type[AdapterConformance]) -> Any:
    """Run a check of a freshly wrapped model on this rank."""
    with ExitStack() as stack:
        if find_spec("fairscale") is not None:  # `wrap` may use it
            stack.enter_context(fairscale_on_cpu())
        if cls.make_adapter is not None:
            stack.enter_context(use_adapters([cls.make_adapter()]))
        model = cls.wrap(Awkward())
        return check((model, cls.make_optimizer(model)), ModelReader(model))


def _plain() -> dict[str, torch.Tensor]:
    """Return the parameters of the unwrapped model. Whole numbers survive a wrapper that keeps fewer bits."""
    return {fqn: param.detach() for fqn, param in Awkward().named_parameters()}


def _views(made: ModelAndOptim, reader: ModelReader) -> Iterator[ModelView]:
    """Yield the view of the model alone, and the view with its optimizer."""
    yield reader.read()
    yield reader.read(optim=made[1])


def _local(named: NamedHandle) -> torch.Tensor:
    local = named.handle.local(named.handle.weights())
    _expect(local is not None, f"{named.fqns}: local() does not know weights()")
    return local if local is not None else torch.empty(0)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"rank {dist.get_rank()}: {what}")


def check_elements(made: ModelAndOptim, reader: ModelReader) -> list[dict[str, list[int]]]:
    """Return the numbers on this rank, by FQN. Raises unless they are where the placement says."""
    plain, me, by_view = _plain(), dist.get_rank(), []
    for view in _views(made, reader):
        held: dict[str, list[int]] = {}
        for named in view.handles:
            local = _local(named)
            for fqn, placement in named.placements.items():
                _expect(placement.shape == tuple(plain[fqn].shape), f"{fqn}: the layout says shape {placement.shape}")
                numbers = held.setdefault(fqn, [])
                shard = placement.shard_of(me)
                for block in placement.blocks(shard) if shard is not None else ():
                    there = plain[fqn]
                    for dim, (offset, size) in enumerate(zip(block.box.offsets, block.box.sizes, strict=True)):
                        there = there.narrow(dim, offset, size)
                    here = local[block.offset : block.offset + block.box.numel].float().cpu()
                    _expect(
                        torch.equal(here, there.reshape(-1)),
                        f"{fqn}: {block} has {here.tolist()}, and the parameter has {there.reshape(-1).tolist()} there",
                    )
                    numbers += [int(number) for number in here.tolist()]
        by_view.append(held)
    return by_view


def compare_elements(by_rank: Sequence[list[dict[str, list[int]]]]) -> None:
    """Check that the ranks together hold every element of the parameters, and of the tensors in the optimizer."""
    for views in zip(*by_rank, strict=True):
        for fqn, whole in _plain().items():
            covered = {number for held in views for number in held.get(fqn, ())}
            missing = sorted({int(number) for number in whole.reshape(-1).tolist()} - covered)
            if missing:
                raise AssertionError(f"{fqn}: no rank holds the elements {missing}")


def check_names(made: ModelAndOptim, reader: ModelReader) -> None:
    """Check that names and order are those of `named_parameters()` of the unwrapped model."""
    for view in _views(made, reader):
        _expect(list(view.order) == list(_plain()), f"the order is {list(view.order)}, not {list(_plain())}")
        fqns = [fqn for named in view.handles for fqn in named.fqns]
        _expect(sorted(fqns) == sorted(view.order), f"the Handles have {fqns}")


def check_inverse(made: ModelAndOptim, reader: ModelReader) -> None:
    """Check that `from_local` makes a value with the cut of the parameter, and that `local` returns the same elements."""
    for view in _views(made, reader):
        for named in view.handles:
            for dtype in (torch.float32, torch.float64):
                flat = torch.arange(named.handle.local_numel, dtype=dtype, device=named.handle.device)
                value = named.handle.from_local(flat.clone())
                _expect(named.handle.is_held(value), f"{named.fqns}: is_held() denies what from_local() made")
                back = named.handle.local(value)
                # A tensor without elements may not know its dtype, as torch's LocalShardsWrapper.
                same = back is not None and (
                    (back.dtype == dtype and torch.equal(back, flat)) if len(flat) else not back.numel()
                )
                _expect(same, f"{named.fqns}: from_local() and local() of {dtype} are not inverse")


def view_facts(made: ModelAndOptim, reader: ModelReader) -> list[Any]:
    """Return the ranks, the order, and the shape of each parameter."""
    _expect(dist.get_rank() in reader.ranks, f"the ranks of the model are {reader.ranks}")
    return [
        (reader.ranks, view.order, {fqn: p.shape for named in view.handles for fqn, p in named.placements.items()})
        for view in _views(made, reader)
    ]


def compare_views(by_rank: Sequence[list[Any]]) -> None:
    """Check that all ranks see the same."""
    for rank, seen in enumerate(by_rank):
        if seen != by_rank[0]:
            raise AssertionError(f"rank {rank} sees {seen}, and rank 0 sees {by_rank[0]}")


def check_padding(made: ModelAndOptim, reader: ModelReader) -> bool:
    """Return whether there is padding at all."""
    me, has_padding = dist.get_rank(), False
    for view in _views(made, reader):
        for named in view.handles:
            padded = named.handle.num_padded
            shard = named.handle.originals[0].placement.shard_of(me) if padded else None
            numel = sum(placement.numel_on(me) for placement in named.placements.values())
            padding = padded[shard] if shard is not None and shard < len(padded) else 0
            has_padding = has_padding or any(padded)
            local = named.handle.local_numel
            numbers = (
                f"{named.fqns}: {local} elements lie here, {numel} of parameters and {padding} of padding are described"
            )
            _expect(numel + padding <= local if len(named.fqns) > 1 else numel + padding == local, numbers)
    return has_padding


def check_unchanged(made: ModelAndOptim, reader: ModelReader) -> None:
    """Check that reading changes nothing that a training step depends on."""
    model, optim = made
    before = _state_of(model, optim)
    for view in _views(made, reader):
        for named in view.handles:
            _local(named)
    _expect(_same(before, _state_of(model, optim)), "reading the model has changed it, or its optimizer")


def _state_of(model: nn.Module, optim: Any) -> list[Any]:
    named = [(name, id(param), param.requires_grad, param.grad) for name, param in model.named_parameters()]
    modules = [(name, id(module), module.training) for name, module in model.named_modules()]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optim.param_groups]
    views = [n.handle.local(n.handle.weights()) for n in ModelReader(model).read(optim=optim).handles]
    return [named, modules, copy.deepcopy(groups), [view.clone() if view is not None else None for view in views]]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def check_gather(made: ModelAndOptim, reader: ModelReader) -> None:
    """Check that the state value of every parameter is the parameter, doubled."""
    model, optim = made
    view = reader.read(optim=optim)
    for param in [param for group in optim.param_groups for param in group["params"]]:
        named = view.handle_of(param)
        if named is None:
            raise AssertionError(f"a parameter of the optimizer (shape {list(param.shape)}) has no Handle")
        if not named.handle.skipped:
            doubled = {name: named.handle.from_local(2.0 * _local(named).reshape(-1).float()) for name in VALUES}
            optim.state[param] = {"step": torch.tensor(3.0), **doubled}
    full = gather_full_optim_state_dict(model, optim, None, "name") or {}
    _check_doubled("gathered", full)
    shard = get_shard_from_optim_state_dict(model, optim, full)
    for values in list(optim.state.values()):
        values.clear()
    load_optim_state_dict(optim, shard)
    _check_doubled("loaded and gathered again", gather_full_optim_state_dict(model, optim, None, "name"))


def _check_doubled(what: str, full: Any) -> None:
    for fqn, whole in _plain().items():
        for name in VALUES:
            got = full["state"].get(fqn, {}).get(name)
            same = got is not None and torch.equal(got, 2.0 * whole)
            _expect(same, f"{fqn}: {what}: {name} is {got}, not {2.0 * whole}")
