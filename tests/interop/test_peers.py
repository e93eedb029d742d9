"""Other tools' full dicts are accepted as input, and theirs accept ours: torch FSDP1, torch's state dict API, fairscale."""

from __future__ import annotations

import copy
import functools
import unittest
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand
from kit.compare import check_refused, check_same, error_text
from kit.optimizers import adam, sgd
from kit.tables import Table, each
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from kit.wraps import in_fairscale
from parameterized import parameterized
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

Peer = Callable[[Trained], Any]


def _full(trained: Trained) -> Any:
    """`FSDP.full_optim_state_dict`, on all ranks."""
    return TorchFSDP.full_optim_state_dict(trained.model, trained.optim, rank0_only=False)


def _typed(trained: Trained, kind: StateDictType, state: Any, optim: Any) -> Any:
    with TorchFSDP.state_dict_type(trained.model, kind, state, optim):
        return TorchFSDP.optim_state_dict(trained.model, trained.optim)


def _optim_state_dict(trained: Trained) -> Any:
    return _typed(
        trained,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    )


def _sharded_optim_state_dict(trained: Trained) -> Any:
    return _typed(
        trained,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    )


def _rekeyed_by_id(trained: Trained) -> Any:
    return TorchFSDP.rekey_optim_state_dict(_full(trained), OptimStateKeyType.PARAM_ID, Oracle().model)


def _rekeyed_by_name(trained: Trained) -> Any:
    return TorchFSDP.rekey_optim_state_dict(Oracle().optim.state_dict(), OptimStateKeyType.PARAM_NAME, Oracle().model)


def _get_full(trained: Trained) -> Any:
    options = StateDictOptions(full_state_dict=True)
    return _on_all_ranks(get_optimizer_state_dict(trained.model, trained.optim, options=options))


def _get_flattened(trained: Trained) -> Any:
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    return _on_all_ranks(get_optimizer_state_dict(trained.model, trained.optim, options=options))


def _get_sharded(trained: Trained) -> Any:
    return get_optimizer_state_dict(trained.model, trained.optim)


def _on_all_ranks(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _plain(trained: Trained) -> Any:
    return Oracle().optim.state_dict()


PEERS: dict[str, tuple[Peer, tuple[str, ...]]] = {
    "FSDP.full_optim_state_dict": (_full, ("FSDP1 flat",)),
    "FSDP.optim_state_dict, full": (_optim_state_dict, ("FSDP1 flat", "FSDP1 orig")),
    "FSDP.optim_state_dict, sharded": (_sharded_optim_state_dict, ("FSDP1 flat", "FSDP1 orig")),
    "FSDP.rekey_optim_state_dict by id": (_rekeyed_by_id, ("FSDP1 flat",)),
    "FSDP.rekey_optim_state_dict by name": (_rekeyed_by_name, ("FSDP1 flat",)),
    "get_optimizer_state_dict, full": (_get_full, ("FSDP1 orig", "FSDP2", "DDP", "plain")),
    "get_optimizer_state_dict, flattened": (_get_flattened, ("FSDP1 orig", "FSDP2", "DDP", "plain")),
    "a plain optimizer's": (_plain, ("plain",)),
}

TARGETS = ("fairscale flat", "fairscale non-flat", "FSDP1 flat", "FSDP1 orig", "FSDP2", "HSDP", "DDP", "plain")
FEW_TARGETS = ("fairscale flat", "FSDP1 orig", "FSDP2")


def from_peer(peer: str, source: str, num: str = "all") -> None:
    """Into every wrapper, or into a few, by both verbs."""
    with cpu():
        trained = Trained(source)
        given = PEERS[peer][0](trained)
        wanted = Oracle().by_name()
        sharded = "sharded" in peer
        # what torch's sharded optimizers give is the same for all of them: FSDP1's meets every wrapper
        for wrapper in (source,) if sharded else FEW_TARGETS if num == "few" else TARGETS:
            target = Trained(wrapper, steps=0)
            kept = None if sharded else copy.deepcopy(given)
            fsdp_optim.load_optim_state_dict(target.optim, target.shard(given))
            again = target.gather(None, "name")
            check_state(f"{peer} of {source} -> {wrapper}", again, wanted)
            if sharded:
                continue  # no rank has all of it, so that none can scatter it
            fsdp_optim.load_optim_state_dict(target.optim, target.scatter(given))
            scattered = target.gather(None, "name")
            check_state(f"{peer} of {source} -> {wrapper}, scattered", scattered, wanted)
            lr = target.optim.param_groups[0]["lr"]
            check_same(f"{peer} of {source} -> {wrapper}, lr", float(lr), 0.01)
            if kept is not None:
                check_same("the peer's dict is left as it was", given, kept)


def check_state(what: str, full: Any, wanted: Mapping[str, Any]) -> None:
    """The state by name, in whatever order a peer has put the values of one parameter."""
    check_same(what, {n: dict(sorted(s.items())) for n, s in full["state"].items()}, _sorted(wanted))


def _sorted(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dict(sorted(values.items())) for name, values in state.items()}


def at_another_size(given: Mapping[str, Any], wrapper: str) -> None:
    """The dicts of peers, by their names."""
    with cpu():
        for peer, full in given.items():
            target = Trained(wrapper, steps=0)
            fsdp_optim.load_optim_state_dict(target.optim, target.shard(full))
            check_state(f"{peer} into {wrapper}", target.gather(None, "name"), Oracle().by_name())


def scattering_what_is_sharded(source: str) -> list[tuple[str, str]]:
    with cpu():
        given = _sharded_optim_state_dict(Trained(source))
        target = Trained(source, steps=0)
        return [error_text(lambda: target.scatter(given))]


def made_by(sources: Mapping[str, str]) -> Any:
    with cpu():
        given = {f"{peer} of {source}": PEERS[peer][0](Trained(source)) for peer, source in sources.items()}
        return given if dist.get_rank() == 0 else None


ELSEWHERE = {
    "FSDP.full_optim_state_dict": "FSDP1 flat",
    "FSDP.optim_state_dict, full": "FSDP1 orig",
    "get_optimizer_state_dict, full": "FSDP2",
    "get_optimizer_state_dict, flattened": "FSDP2",
}
# A peer's dict is read in one way, whatever wrapper gets it: one of each kind, by id and by name, meets all wrappers.
IN_ALL = (("FSDP.full_optim_state_dict", "FSDP1 flat"), ("a plain optimizer's", "plain"))
PAIRS = [(peer, source) for peer, (_, sources) in PEERS.items() for source in sources]
FROM = Table(
    from_peer,
    [
        (2, peer, source, "all" if (peer, source) in IN_ALL else "few")
        for peer, source in PAIRS
        if source in (PEERS[peer][1][0], "FSDP2")
    ],
    [(2, peer, source, "all") for peer, source in PAIRS if (peer, source) not in IN_ALL],
)


class FromPeersTest(unittest.TestCase):
    @expand(*FROM.soon_and_later)
    def test_is_accepted_by_every_wrapper(self, *case: Any) -> None:
        FROM(*case)

    @parameterized.expand(("FSDP1 flat", "FSDP1 orig"))
    def test_one_ranks_shards_are_not_scattered(self, source: str) -> None:
        by_rank = run_on_ranks(scattering_what_is_sharded, 2, source, timeout=30.0)
        check_refused("scatter", [errors[0] for errors in by_rank], "StateError", "scale", "ShardedTensor")

    def test_at_another_world_size(self) -> None:
        given = run_on_ranks(made_by, 2, ELSEWHERE)[0]
        for wrapper, world_size in (("FSDP2", 3), ("FSDP1 flat", 4), ("fairscale flat", 1)):
            run_on_ranks(at_another_size, world_size, given, wrapper)


# ------------------------------------------------------------------------------------------- fairscale's own


def one_unit(model: Any) -> Any:
    """fairscale's own full dict has right names for one unit only."""
    model.units = ("",)
    return in_fairscale(model)


@functools.cache
def given_by_fairscale() -> Any:
    """The state that fairscale's own method gathers on two ranks."""
    return run_on_ranks(of_fairscale, 2)[0]


def of_fairscale() -> Any:
    """The same, on one of these ranks."""
    from fairscale.nn.data_parallel import FullyShardedDataParallel as Theirs

    with cpu():
        trained = Trained(one_unit, sgd, steps=0)
        trained.model(torch.ones(2, 5)).sum().backward()  # its gather needs buffers that a forward pass makes
        trained.forget_gradients()
        trained.fresh_optimizer()
        trained.step(range(STEPS))
        full = Theirs.gather_full_optim_state_dict(trained.model, trained.optim, recipient_rank=0)
        return copy.deepcopy(full)


def from_fairscale(given: Any, wrapper: str) -> None:
    with cpu():
        kept = copy.deepcopy(given)
        target = Trained(one_unit if wrapper == "one unit" else wrapper, sgd, steps=0)
        fsdp_optim.load_optim_state_dict(target.optim, target.shard(given))
        group = dist.group.WORLD
        again = target.gather(None, "name", process_group=group)
        fsdp_optim.load_optim_state_dict(target.optim, target.scatter(given, process_group=group))
        scattered = target.gather(None, "name", process_group=group)
        check_state(f"fairscale -> {wrapper}", again, Oracle(sgd).by_name())
        check_state(f"fairscale -> {wrapper}, scattered", scattered, Oracle(sgd).by_name())
        check_same("fairscale's dict is left as it was", given, kept)


class FromFairscaleTest(unittest.TestCase):
    @parameterized.expand((2, 3))
    def test_its_own_full_dict(self, world_size: int) -> None:
        wrappers = [(wrapper,) for wrapper in ("one unit", "FSDP1 flat", "FSDP2", "plain")]
        run_on_ranks(each, world_size, functools.partial(from_fairscale, given_by_fairscale()), wrappers)


# ------------------------------------------------------------------------------------------- ours to them


def _scatter_full(target: Trained, named: Any) -> Any:
    given = named if dist.get_rank() == 0 else None
    target.optim.load_state_dict(TorchFSDP.scatter_full_optim_state_dict(given, target.model, optim=target.optim))


def _to_load(target: Trained, named: Any) -> Any:
    with TorchFSDP.state_dict_type(
        target.model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(rank0_only=False),
    ):
        target.optim.load_state_dict(TorchFSDP.optim_state_dict_to_load(target.model, target.optim, named))


def _set_full(target: Trained, named: Any) -> Any:
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(target.model, target.optim, named, options=options)


def _set_from_rank_0(target: Trained, named: Any) -> Any:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = named if dist.get_rank() == 0 else {}
    set_optimizer_state_dict(target.model, target.optim, given, options=options)


READERS: dict[str, tuple[Callable[[Trained, Any], Any], tuple[str, ...]]] = {
    "FSDP.scatter_full_optim_state_dict": (_scatter_full, ("FSDP1 flat",)),
    "FSDP.optim_state_dict_to_load": (_to_load, ("FSDP1 flat", "FSDP1 orig")),
    "set_optimizer_state_dict, full": (_set_full, ("FSDP1 orig", "FSDP2", "DDP", "plain")),
    "set_optimizer_state_dict, broadcast_from_rank0": (_set_from_rank_0, ("FSDP1 orig", "FSDP2", "DDP", "plain")),
}


def to_peer(reader: str, wrapper: str, sources: Sequence[str]) -> None:
    with cpu():
        for source in sources:
            named = Trained(source).gather(None, "name")
            target = Trained(wrapper, steps=0)
            READERS[reader][0](target, named)
            check_state(f"{source} -> {reader} of {wrapper}", target.gather(None, "name"), Oracle().by_name())
            check_same("lr", float(target.optim.param_groups[0]["lr"]), 0.01)


# What is gathered of one wrapper is what is gathered of any other: one reader meets that of all.
SOURCES = ("fairscale flat", "FSDP1 flat", "FSDP1 orig", "FSDP2", "DDP", "plain")
FEW_SOURCES = ("fairscale flat", "FSDP2")
READS = [(reader, wrapper) for reader, (_, wrappers) in READERS.items() for wrapper in wrappers]
TO = Table(
    to_peer,
    [
        (2, reader, wrapper, SOURCES if (reader, wrapper) == READS[0] else FEW_SOURCES)
        for reader, wrapper in READS
        if wrapper in (READERS[reader][1][0], "FSDP2")
    ],
    [(2, reader, wrapper, SOURCES) for reader, wrapper in READS[1:]],
)


class ToPeersTest(unittest.TestCase):
    @expand(*TO.soon_and_later)
    def test_reads_ours(self, *case: Any) -> None:
        TO(*case)

    @expand(
        soon=[("fairscale flat", adam), ("FSDP1 orig", sgd), ("FSDP2", adam)],
        later=[("fairscale flat", sgd), ("FSDP1 orig", adam), ("FSDP2", sgd)],
    )
    def test_a_plain_optimizer_reads_ours(self, wrapper: str, make: Any) -> None:
        full = run_on_ranks(ours, 3, wrapper, make)[0]
        oracle, plain = Oracle(make), Oracle(make, steps=0)
        plain.optim.load_state_dict(full)
        check_same("the plain optimizer", plain.by_name(), oracle.by_name())


def ours(wrapper: str, make: Any) -> Any:
    with cpu():
        return Trained(wrapper, make).gather(0)
