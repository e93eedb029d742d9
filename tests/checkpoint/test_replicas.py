"""Replicas: everything that can be compared is compared, whatever its class; and the ways to treat replicas that differ."""

from __future__ import annotations

import fractions
import tempfile
import threading
import unittest
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from kit.compare import Differs, check_same, error_text
from kit.options import as_options
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import fsdp_optim
from fsdp_optim.layout import FlatChunks, MeshBoxes, Whole
from fsdp_optim.state.values import Incomparable, fingerprint_of, key_of, same
from fsdp_optim.testing import run_on_ranks


class Parts:
    """An object that is compared by what is in it."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


class Nothing:
    """An object that is equal to nothing but itself."""


def of_two(number: int) -> torch.Tensor:
    return TwoTensor(torch.arange(6.0), torch.full((6,), float(number)))


# value of a rank -> a state value, equal on all ranks where the number is
VALUES: Mapping[str, Callable[[int], Any]] = {
    "a subclass": of_two,
    "numpy": lambda n: numpy.arange(n, n + 3),
    "an object of its own": lambda n: Parts([1.5, Parts(n)]),
    "a list of tensors": lambda n: [torch.zeros(3), torch.tensor([1.0, n])],
    "a dict of tensors": lambda n: {"0.5": torch.tensor([[n, 2]])},
    "another shape": lambda n: torch.full((2, 7), float(n)),
    "not contiguous": lambda n: torch.full((2, 7), float(n)).t(),
    "half a tensor": lambda n: torch.tensor([n, 0], dtype=torch.bfloat16),
    "a set": lambda n: {"a", f"b{n}"},
}


def plain(value: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model without a wrapper, with one state value, and a moment."""
    torch.default_generator.manual_seed(0)
    model = nn.Linear(3, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        optim.state[param] = {"momentum_buffer": torch.ones_like(param)}
    optim.state[model.weight]["blocks"] = value
    return model, optim


def gather(model: nn.Module, optim: Any, **more: Any) -> dict[str, Any] | None:
    return fsdp_optim.gather_full_optim_state_dict(
        model, optim, 0, key_by="name", **as_options(fsdp_optim.CallOptions, **more, process_group=dist.group.WORLD)
    )


def check_told(text: object, *words: str) -> None:
    missing = [word for word in words if word not in str(text)]
    if missing:
        raise Differs(f"{missing} are not in: {text}")


def gather_values() -> None:
    rank = dist.get_rank()
    for what, make in VALUES.items():
        full = gather(*plain(make(1)))
        if full is not None and not same(full["state"]["weight"]["blocks"], make(1)):
            raise Differs(f"{what}: {full['state']['weight']['blocks']}")
        told = error_text(lambda make=make: gather(*plain(make(rank))))
        check_told(told, "StateError", "weight", "rank 0", "rank 1", "name_of", "on_replica_mismatch='lowest_rank'")
        full = gather(*plain(make(rank)), on_replica_mismatch="lowest_rank")
        if full is not None and not same(full["state"]["weight"]["blocks"], make(0)):
            raise Differs(f"{what}, lowest rank: {full['state']['weight']['blocks']}")
    for value in (Nothing(), threading.Lock()):
        check_told(
            error_text(lambda value=value: gather(*plain(value))),
            "StateError",
            "weight: 'blocks'",
            "cannot be compared",
        )


def gather_in_another_order() -> None:
    """What rank 1 has instead of a dict of two values: in another order it is the same, under other names it is not."""
    model, optim = plain([1])
    zeros, filled = torch.zeros(2, 3), torch.ones(2, 3)
    for others, is_same in (
        ({"second": filled, "first": zeros}, True),
        ({"second": zeros, "first": filled}, False),
        ({"first": zeros, "third": filled}, False),
    ):
        optim.state[model.weight] = others if dist.get_rank() == 1 else {"first": zeros, "second": filled}
        told = error_text(lambda: gather(model, optim))
        if is_same:
            check_same("another order", told, ("", ""))
        else:
            check_told(told, "StateError", "weight", "rank 0", "rank 1")


class WithExtra(torch.optim.SGD):
    """Has more in its dict than torch's optimizers."""

    extra: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self.extra}


def gather_extras() -> None:
    rank, model = dist.get_rank(), nn.Linear(3, 2)
    optim = WithExtra(model.parameters(), lr=0.1)
    extras: dict[str, Callable[[int], Any]] = {
        "loss_scale": lambda n: 2.0**n,
        "fp32_masters": lambda n: [torch.full((3,), float(n))],
        "scaler": lambda n: Parts(n),
    }
    for key, make in extras.items():
        optim.extra = {key: make(1)}
        full = gather(model, optim)
        if full is not None and not same(full[key], make(1)):
            raise Differs(f"{key}: {full[key]}")
        optim.extra = {key: make(rank)}
        check_told(error_text(lambda: gather(model, optim)), "StateError", key, "rank 0", "rank 1", "alike")
    optim.extra = {"lock": Nothing()}
    check_told(error_text(lambda: gather(model, optim)), "StateError", "lock", "cannot be compared")
    optim.extra = {}
    for value in (numpy.float32(0.1 + rank), fractions.Fraction(1, 3 + rank), Parts(rank)):
        optim.param_groups[0]["special"] = value
        check_told(error_text(lambda: gather(model, optim)), "StateError", "special", "rank 0", "rank 1")


def norm_beside_tensor_parallel() -> None:
    """A replica that nobody keeps equal, which differs in a bit; and one of each of two shards."""
    rank = dist.get_rank()
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "cut": nn.Linear(4, 4, bias=False)})
    mesh = init_device_mesh("cpu", (2,))
    model["cut"].weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    optim = torch.optim.Adam(model.parameters(), foreach=False)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    norm = model["norm"].weight
    optim.state[norm]["exp_avg"][2] += rank * 2.0**-20
    lowest = [value.clone() for value in optim.state[norm].values()]
    dist.broadcast(lowest[1], 0)
    check_told(error_text(lambda: gather(model, optim)), "norm.weight", "on_replica_mismatch='lowest_rank'")
    taken = {"on_replica_mismatch": "lowest_rank"}
    gathered: list[Any] = [gather(model, optim, **taken)]
    for full in (
        fsdp_optim.gather_full_optim_state_dict(
            model, optim, None, key_by="name", **as_options(fsdp_optim.CallOptions, **taken)
        ),
    ):
        gathered.append(full)
    gathered.append(
        {
            "state": dict(
                fsdp_optim.iter_full_optim_state(model, optim, None, **as_options(fsdp_optim.CallOptions, **taken))
            )
        }
    )
    for full in gathered:
        if full is not None:
            check_same("the lowest rank's", full["state"]["norm.weight"]["exp_avg"], lowest[1])
            check_same("the one that is cut", full["state"]["cut.weight"]["exp_avg"].shape, torch.Size([4, 4]))
    other = torch.optim.Adam(model.parameters())
    fsdp_optim.transfer_optim_state(model, optim, model, other, **as_options(fsdp_optim.CallOptions, **taken))
    check_same("transferred", other.state[norm]["exp_avg"], lowest[1])
    # the scalar of a replica
    optim.state[norm]["step"] += rank
    check_told(error_text(lambda: gather(model, optim)), "norm.weight", "step", "rank 0", "rank 1")
    full = gather(model, optim, **taken)
    if full is not None:
        check_same("the lowest rank's scalar", full["state"]["norm.weight"]["step"], torch.tensor(1.0))


def save_replicas(folder: str) -> None:
    """Every kind of save takes the lowest rank's, and says so alike."""
    rank = dist.get_rank()
    model, optim = plain(torch.full((2, 7), 1.0 + rank))
    optim.state[model.bias]["momentum_buffer"] += rank
    more = {"process_group": dist.group.WORLD}
    check_told(
        error_text(lambda: fsdp_optim.save(f"{folder}/no", model, optim, **as_options(fsdp_optim.SaveOptions, **more))),
        "lowest_rank",
    )
    fsdp_optim.save(
        f"{folder}/a", model, optim, **as_options(fsdp_optim.SaveOptions, **more, on_replica_mismatch="lowest_rank")
    )
    fsdp_optim.async_save(
        f"{folder}/b", model, optim, **as_options(fsdp_optim.SaveOptions, **more, on_replica_mismatch="lowest_rank")
    ).wait()
    for name in ("a", "b"):
        fsdp_optim.load(f"{folder}/{name}", model, optim, **as_options(fsdp_optim.LoadOptions, **more))
        check_same(name, optim.state[model.bias]["momentum_buffer"], torch.ones(2))
        check_same(name, optim.state[model.weight]["blocks"], torch.full((2, 7), 1.0))
    wrong = error_text(lambda: gather(model, optim, on_replica_mismatch="first"))
    check_told(wrong, "StateError", "on_replica_mismatch", "'lowest_rank'", "'first'")


def hybrid() -> None:
    """Two replicas of two shards, of which one shard differs."""
    rank = dist.get_rank()
    with cpu():
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("r", "s"))
        model = nn.Linear(4, 4, bias=False)
        model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["s"], [Shard(0)]))
        optim = torch.optim.Adam(model.parameters())
        model.weight.sum().backward()
        optim.step()
        if rank == 3:
            optim.state[model.weight]["exp_avg"].to_local().add_(1)
        check_told(error_text(lambda: gather(model, optim)), "weight", "rank 3", "lowest_rank")
        full = gather(model, optim, on_replica_mismatch="lowest_rank")
        if full is not None and not bool(
            (full["state"]["weight"]["exp_avg"] == full["state"]["weight"]["exp_avg"][0, 0]).all()
        ):
            raise Differs(str(full["state"]["weight"]["exp_avg"]))


class TestReplicas(unittest.TestCase):
    """Ranks that hold a parameter of one name."""

    def test_values_of_any_class_are_compared_by_their_parts(self) -> None:
        run_on_ranks(gather_values, 2)

    def test_the_names_of_values_are_compared_and_not_their_order(self) -> None:
        run_on_ranks(gather_in_another_order, 2)

    def test_other_keys_and_hyperparameters_are_compared(self) -> None:
        run_on_ranks(gather_extras, 2)

    def test_the_lowest_rank_counts_where_asked_for(self) -> None:
        run_on_ranks(norm_beside_tensor_parallel, 2)

    def test_a_save_takes_the_lowest_rank_where_asked_for(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_replicas, 2, folder)
            self.assertEqual({path.name for path in Path(folder).iterdir()}, {"a", "b"})

    def test_one_shard_of_a_replica_that_differs(self) -> None:
        run_on_ranks(hybrid, 4)


class TestSame(unittest.TestCase):
    """Whether two values are the same, by comparison and by their digests."""

    ALIKE: tuple[tuple[Any, Any], ...] = (
        (torch.arange(6).view(2, 3), torch.arange(6).view(3, 2).t().contiguous().t().reshape(2, 3)),
        (torch.ones(3, 4).t(), torch.ones(4, 3)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({3, 1}, {1, 3}),
        (Parts(1, [2]), Parts(1, [2])),
        (numpy.arange(4)[::2], numpy.array([0, 2])),
        (fractions.Fraction(2, 6), fractions.Fraction(1, 3)),
    )
    DIFFERENT: tuple[tuple[Any, Any], ...] = (
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.ones(2, 3), torch.ones(3, 2)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (1, 1.0),
        (1, True),
        ((1, 2), [1, 2]),
        (["ab", "c"], ["a", "bc"]),
        ({"a": {"b": 1}}, {"a": {"b": 2}}),
        (Parts(1), Parts(2)),
        (numpy.float32(0.1), numpy.float32(0.001)),
        (numpy.float32(0.5), numpy.float64(0.5)),
        (numpy.arange(4), numpy.arange(4.0)),
        (fractions.Fraction(1, 3), fractions.Fraction(1, 4)),
        (torch.float32, torch.float16),
        (lambda x: x + 1, lambda x: x + 2),
        (numpy.array(["a", None], dtype=object), numpy.array(["b", None], dtype=object)),
    )

    def test_alike(self) -> None:
        for a, b in self.ALIKE:
            with self.subTest(a=a, b=b):
                self.assertTrue(same(a, b))
                self.assertEqual(fingerprint_of(a), fingerprint_of(b))
                self.assertEqual(key_of(a), key_of(b))

    def test_different(self) -> None:
        for a, b in self.DIFFERENT:
            with self.subTest(a=a, b=b):
                self.assertFalse(same(a, b))
                self.assertNotEqual(fingerprint_of(a), fingerprint_of(b))
                self.assertNotEqual(key_of(a), key_of(b))

    def test_an_object_in_itself(self) -> None:
        looped, other = Parts(), Parts()
        looped.parts, other.parts = (looped, 1), (other, 1)
        self.assertEqual(fingerprint_of(looped), fingerprint_of(other))

    @parameterized.expand([(Nothing(),), (threading.Lock(),), ((i for i in range(3)),), ([1, {"a": Nothing()}],)])
    def test_what_cannot_be_compared_is_not_taken_for_equal(self, value: Any) -> None:
        for digest in (fingerprint_of, key_of):
            with self.assertRaises(Incomparable):
                digest(value)

    def test_optimizers_are_one_group_only_where_they_can_be_compared(self) -> None:
        """Several optimizers over one model, whose learning rates differ in what prints alike or cannot be compared."""
        for rates in ((numpy.float32(0.1), numpy.float32(0.001)), (fractions.Fraction(1, 2), fractions.Fraction(1, 3))):
            model = nn.Linear(3, 2)
            optims = [torch.optim.SGD([model.weight], lr=0.5), torch.optim.SGD([model.bias], lr=0.5)]
            for optim, rate in zip(optims, rates, strict=True):
                optim.param_groups[0]["lr"] = rate
            full = fsdp_optim.gather_full_optim_state_dict(model, optims)
            self.assertEqual([group["lr"] for group in (full or {})["param_groups"]], list(rates))
        nothing = Nothing()
        for optim in optims:
            optim.param_groups[0]["lr"] = nothing
        full = fsdp_optim.gather_full_optim_state_dict(model, optims)
        self.assertEqual(len((full or {})["param_groups"]), 2)

    def test_a_large_tensor_is_digested_in_bounded_memory(self) -> None:
        import tracemalloc

        value = {"codes": torch.zeros(40 << 20, dtype=torch.uint8).view(5, -1).t()}
        tracemalloc.start()
        try:
            fingerprint_of(value)
            self.assertLess(tracemalloc.get_traced_memory()[1], 4 << 20)  # no text of it
        finally:
            tracemalloc.stop()

    def test_placements_on_their_lowest_ranks(self) -> None:
        cases = (
            (Whole((3,), (4, 2, 7)), (2,)),
            (FlatChunks((8,), 0, 4, ((4, 5), (2, 3))), (2, 3)),
            (MeshBoxes((4, 4), (2, 2), ((1, 0),), ((0, 1, 2, 3),)), (0, 1)),
            (MeshBoxes((4, 4), (2, 2), ((0, 1),), ((3, 1, 2, 0),)), (0, 1)),
            (MeshBoxes((4, 4), (2, 2), (), ((3, 1, 2, 0),)), (0,)),
            (MeshBoxes((4, 4), (2, 2), ((1, 0), (0, 1)), ((5, 6, 7, 8), (0, 1, 2, 3))), (0, 1, 2, 3)),
        )
        for placement, ranks in cases:
            with self.subTest(placement=placement):
                lowest = placement.on_lowest_ranks()
                self.assertEqual(lowest.ranks, ranks)
                self.assertEqual(lowest.num_shards, placement.num_shards)
                for shard in range(placement.num_shards):
                    self.assertEqual(lowest.blocks(shard), placement.blocks(shard))
                    self.assertEqual(lowest.holders(shard), (min(placement.holders(shard)),))
                    self.assertEqual(lowest.shard_of(min(placement.holders(shard))), shard)
