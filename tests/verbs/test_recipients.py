"""Who gets the full dict: any one rank, or all; the others keep nothing, and hold no more than a bucket on the way."""

from __future__ import annotations

import gc
import unittest
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same
from kit.groups import (
    adam,
    check_alike,
    check_gathered,
    error_of,
    nested_net,
    new_groups,
    plain_net,
    raw,
)
from kit.peaks import MIB, Peak
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim.fairscale import FullyShardedDataParallel as FSDP
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks
from fsdp_optim.verbs.gather import _check_ids


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a nested dict."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


@fairscale_on_cpu()
def gather_on_every_rank_in_turn() -> None:
    model, optim, _ = nested_net()
    plain = plain_net()
    for recipient in (*range(dist.get_world_size()), None):
        full = model.gather_full_optim_state_dict(optim, recipient)
        check_gathered(full, recipient, *plain)
        by_function = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=recipient)
        check_same(f"method and function, recipient_rank={recipient}", by_function, full, in_order=False)
    default = model.gather_full_optim_state_dict(optim)
    check_gathered(default, 0, *plain)
    # A recipient's dict is its own: writing into it changes no other one, on this rank or another.
    first, second = (model.gather_full_optim_state_dict(optim, None) for _ in range(2))
    if dist.get_rank() == 0:
        for tensor in tensors_of(first):
            tensor.fill_(7)
    dist.barrier()
    check_gathered(second, None, *plain)
    if dist.get_rank() != 0:
        check_gathered(first, None, *plain)


@fairscale_on_cpu()
def wrong_recipients() -> list[tuple[str, str, float]]:
    model, optim, _ = nested_net()
    errors = [
        error_of(lambda: fsdp_optim.gather_full_optim_state_dict(model, optim, recipient))  # noqa: B023
        for recipient in (2, -1, 100)
    ]
    errors.append(error_of(lambda: next(fsdp_optim.iter_full_optim_state(model, optim, 2))))
    errors.append(error_of(lambda: fsdp_optim.scatter_full_optim_state_dict(model, optim, None, 2)))
    check_gathered(fsdp_optim.gather_full_optim_state_dict(model, optim, 1), 1, *plain_net())
    return errors


@fairscale_on_cpu()
def recipient_of_another_group() -> tuple[str, str, float] | None:
    """Rank 2 exists, but the model does not live there."""
    group = new_groups([0, 1])
    if group is None:
        return None
    model = FSDP(nn.Linear(3, 2), process_group=group, process_group_reduce_scatter=group)
    optim = adam(model.parameters())
    return error_of(lambda: fsdp_optim.gather_full_optim_state_dict(model, optim, 2))


ROWS, COLUMNS = 1024, 4096  # 16 MiB in float32
BUCKET = 2 * MIB


def big_model() -> tuple[Any, torch.optim.Optimizer]:
    model = FSDP(nn.Linear(COLUMNS, ROWS, bias=False))
    optim = adam(model.parameters())
    for param in model.params:
        param.grad = torch.full_like(param, 0.5)
    optim.step()
    for param in model.params:
        param.grad = None
    return model, optim


def storages() -> dict[int, int]:
    """Address -> bytes of every tensor that Python can reach."""
    gc.collect()
    sizes = {}
    for value in gc.get_objects():
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.layout == torch.strided:
            storage = value.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


@fairscale_on_cpu()
def what_stays_after_a_gather(recipient: int) -> dict[str, list[int]]:
    """Sizes in MiB of tensors from 1 MiB that are there after a gather, and were not there before."""
    model, optim = big_model()
    known = storages()
    full = fsdp_optim.gather_full_optim_state_dict(
        model, optim, recipient, options=fsdp_optim.CallOptions(bucket_nbytes=BUCKET)
    )
    with_dict = [nbytes // MIB for address, nbytes in storages().items() if address not in known and nbytes >= MIB]
    assert (full is not None) == (dist.get_rank() == recipient)
    del full
    without = [nbytes // MIB for address, nbytes in storages().items() if address not in known and nbytes >= MIB]
    for _, state in fsdp_optim.iter_full_optim_state(
        model, optim, recipient, options=fsdp_optim.CallOptions(bucket_nbytes=BUCKET)
    ):
        del state
    iterated = [nbytes // MIB for address, nbytes in storages().items() if address not in known and nbytes >= MIB]
    return {"with the dict": sorted(with_dict), "without it": without, "iterated": iterated}


@fairscale_on_cpu()
def peaks(recipient: int | None) -> dict[str, float]:
    """Extra memory of a gather and of a scatter, in MiB; a small one first, which starts what gloo keeps."""
    model, optim = big_model()
    rank, measured = dist.get_rank(), {}
    small, small_optim, _ = nested_net()
    warm = fsdp_optim.gather_full_optim_state_dict(small, small_optim, recipient)
    fsdp_optim.scatter_full_optim_state_dict(small, small_optim, warm, recipient or 0)
    with Peak() as peak:
        full = fsdp_optim.gather_full_optim_state_dict(
            model, optim, recipient, options=fsdp_optim.CallOptions(bucket_nbytes=BUCKET)
        )
    measured["gather"] = peak.mib
    source = recipient or 0
    given = full if rank == source else None
    with Peak() as peak:
        shard = fsdp_optim.scatter_full_optim_state_dict(
            model, optim, given, source, options=fsdp_optim.CallOptions(bucket_nbytes=BUCKET)
        )
    measured["scatter"] = peak.mib
    check_same("scattered", shard["state"], optim.state_dict()["state"], in_order=False)
    return measured


class TestRecipients(unittest.TestCase):
    def test_every_rank_in_turn_and_all(self) -> None:
        run_on_ranks(gather_on_every_rank_in_turn, 3)

    def test_a_recipient_that_is_not_a_member_is_an_error_on_all_ranks(self) -> None:
        by_rank = run_on_ranks(wrong_recipients, 2)
        for wrong, errors in zip((2, -1, 100, 2, 2), zip(*by_rank, strict=True), strict=True):
            check_alike(errors, "RankError", f"_rank {wrong}", "[0, 1]")

    def test_a_rank_where_the_model_does_not_live_cannot_receive(self) -> None:
        errors = run_on_ranks(recipient_of_another_group, 3)[:2]
        check_alike(errors, "RankError", "recipient_rank 2", "[0, 1]")


class TestMemory(unittest.TestCase):
    """State of 32 MiB on two ranks, in buckets of 2 MiB."""

    def test_other_ranks_keep_no_copy(self) -> None:
        for rank, sizes in enumerate(run_on_ranks(what_stays_after_a_gather, 2, recipient=1)):
            assert sizes["with the dict"] == ([16, 16] if rank == 1 else []), (rank, sizes)
            assert sizes["without it"] == [], (rank, sizes)
            assert sizes["iterated"] == [], (rank, sizes)

    def test_only_the_recipient_needs_memory_for_the_state(self) -> None:
        """Measured as the operating system sees it, so that nothing hides; 6 MiB for what is neither state nor bucket."""
        state, bucket, rest = 32, BUCKET / MIB, 6
        receiver, other = run_on_ranks(peaks, 2, recipient=0)
        assert receiver["gather"] < state + bucket + rest, receiver
        assert receiver["gather"] > state - rest, f"this measures nothing: {receiver}"
        assert other["gather"] < bucket + rest, other
        for rank in (receiver, other):
            assert rank["scatter"] < state / 2 + bucket + rest, rank

    def test_every_recipient_needs_memory_once(self) -> None:
        for measured in run_on_ranks(peaks, 2, recipient=None):
            assert measured["gather"] < 32 + BUCKET / MIB + 6, measured


def test_ids_are_refused_on_all_ranks_if_one_recipient_cannot_have_them() -> None:
    """Recipients that hold variants of a parameter each count what they hold themselves."""
    reasons = ("", "the order of rank 1 is unknown")
    for variants, recipients, is_refused in (((1, 2), (0, 1), True), ((1, 2), (0,), False), ((), (0, 1), False)):
        params = {"weight": SimpleNamespace(variants=variants)}
        global_state: Any = SimpleNamespace(
            params=params, as_seen_by=lambda rank: SimpleNamespace(unknown_order=reasons[rank])
        )
        name, text, _ = error_of(lambda: _check_ids(global_state, recipients))  # noqa: B023
        assert (name, reasons[1] in text) == (("StateError", True) if is_refused else ("", False)), (name, text)


def test_raw_sees_every_bit() -> None:
    """The comparison that all of these tests rest on: -0.0 is not 0.0, and NaN is NaN."""
    assert raw(torch.tensor([0.0])) != raw(torch.tensor([-0.0]))
    assert raw(torch.tensor([float("nan")])) == raw(torch.tensor([float("nan")]))
