"""fsdp_optim.testing: fairscale FSDP trains on CPU as plain torch does."""

from __future__ import annotations

import unittest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import scripts
from kit.testing_ranks import blocks, nested
from parameterized import parameterized
from torch import Tensor, nn

from fsdp_optim.testing import (
    fairscale_on_cpu,
    forget_fairscale_groups,
    run_on_ranks,
)

BATCH = 12  # divisible by every world size below


def train(
    model: nn.Module, steps: int, rank: int = 0, world_size: int = 1, micro_batches: int = 1
) -> dict[str, Tensor]:
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # unlike Adam, sees the gradient's scale
    for step in range(steps):
        data = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step))
        optim.zero_grad()
        for part in data.chunk(world_size)[rank].chunk(micro_batches):
            (model(part).float().pow(2).mean() / micro_batches).backward()
        optim.step()
    return {name: value.float() for name, value in model.state_dict().items()}


def train_sharded(steps: int, micro_batches: int = 1, **kwargs: Any) -> dict[str, Tensor]:
    with fairscale_on_cpu(), fairscale_on_cpu():
        return train(nested(blocks(), **kwargs), steps, dist.get_rank(), dist.get_world_size(), micro_batches)


def clipped_norm_sharded() -> float:
    with fairscale_on_cpu():
        model = nested(blocks())
        data = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(0))
        model(data.chunk(dist.get_world_size())[dist.get_rank()]).pow(2).mean().backward()
        norm = model.clip_grad_norm_(0.01)
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    squares = grads.pow(2).sum()
    dist.all_reduce(squares)
    return float(norm), float(squares.sqrt())  # type: ignore[return-value]


def no_sync_gradients() -> list[Tensor]:
    """The gradient shards of two passes, the first of which is not reduced."""
    with fairscale_on_cpu():
        model = nested(blocks())
        data = torch.ones(2, 5)
        with model.no_sync():
            model(data).sum().backward()
        model(data).sum().backward()
        both = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(data).sum().backward()
        return [a - 2 * p.grad for a, p in zip(both, model.parameters(), strict=True)]


def train_on_halves() -> list[int]:
    """An inner unit on half of the ranks; the world size that each unit sees."""
    from fairscale.nn import FullyShardedDataParallel

    with fairscale_on_cpu():
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        inner = FullyShardedDataParallel(nn.Linear(5, 5), process_group=halves[dist.get_rank() // 2])
        model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(5, 3)))
        train(model, 2, dist.get_rank(), dist.get_world_size())
        return [inner.world_size, model.world_size]


class TestFairscaleOnCpu(unittest.TestCase):
    @parameterized.expand(
        [
            (f"{name}_on_{world_size}", kwargs, world_size, tolerance)
            for name, kwargs, tolerance, world_sizes in [
                ("plain", {}, 1e-6, (1, 2, 3, 4)),
                ("unflattened", {"flatten_parameters": False}, 1e-6, (3,)),
                ("bucket_cap_of_the_gpu", {"bucket_cap_mb": 25}, 1e-6, (4,)),
                ("kept_full", {"reshard_after_forward": False}, 1e-6, (2,)),
                ("offloaded", {"move_params_to_cpu": True}, 1e-6, (4,)),
                ("offloaded_fp16", {"move_params_to_cpu": True, "mixed_precision": True}, 5e-4, (1, 3)),
                ("fp16_reduced_in_fp32", {"mixed_precision": True, "fp32_reduce_scatter": True}, 5e-4, (1, 2)),
            ]
            for world_size in world_sizes
        ]
    )
    def test_trains_as_plain_torch_does(
        self, name: str, kwargs: dict[str, Any], world_size: int, tolerance: float
    ) -> None:
        expected = train(blocks(), steps=3)
        untrained = blocks().state_dict()
        for state in run_on_ranks(train_sharded, world_size, 3, **kwargs):
            self.assertEqual(list(state), list(expected))
            for key in expected:
                torch.testing.assert_close(state[key], expected[key], rtol=0, atol=tolerance)
                self.assertGreater(float((state[key] - untrained[key]).abs().max()), 10 * tolerance)

    def test_low_precision_communication(self) -> None:
        expected = train(blocks(), steps=3)
        [state, _] = run_on_ranks(train_sharded, 2, 3, mixed_precision=True)
        for key in expected:
            torch.testing.assert_close(state[key], expected[key], rtol=0, atol=5e-4)

    def test_gradients_accumulate(self) -> None:
        expected = train(blocks(), steps=2)
        for kwargs in ({}, {"move_params_to_cpu": True}):
            [state, _] = run_on_ranks(train_sharded, 2, 2, 3, **kwargs)
            for key in expected:
                torch.testing.assert_close(state[key], expected[key], rtol=0, atol=1e-6)

    def test_gradients_accumulate_without_reduction(self) -> None:
        for differences in run_on_ranks(no_sync_gradients, 2):
            for difference in differences:
                self.assertEqual(float(difference.abs().max()), 0.0)

    def test_clip_grad_norm(self) -> None:
        model = blocks()
        model(torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(0))).pow(2).mean().backward()
        expected = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        for norm, clipped in run_on_ranks(clipped_norm_sharded, 3):
            self.assertAlmostEqual(norm, expected, places=5)
            self.assertAlmostEqual(clipped, 0.01, places=5)

    def test_units_on_a_part_of_the_ranks(self) -> None:
        self.assertEqual(run_on_ranks(train_on_halves, 4), [[2, 4]] * 4)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the context changes nothing")
    def test_everything_is_put_back(self) -> None:
        from fairscale.nn import FullyShardedDataParallel as Wrapper
        from fairscale.nn.data_parallel import fully_sharded_data_parallel as module

        def patched() -> list[object]:
            cuda = [torch.cuda.current_stream, torch.cuda.stream, torch.cuda.synchronize]
            tensor = [torch.Tensor.record_stream, torch.Tensor.pin_memory, torch.Tensor.cuda]
            return [*cuda, *tensor, module._get_default_cuda_device, Wrapper._setup_streams, Wrapper.clip_grad_norm_]

        before = patched()
        with fairscale_on_cpu():
            with fairscale_on_cpu():
                within = patched()
            self.assertEqual(patched(), within)  # leaving the inner one changes nothing
        with pytest.raises(KeyError), fairscale_on_cpu():
            raise KeyError
        self.assertEqual(patched(), before)
        self.assertEqual([a is b for a, b in zip(within, before, strict=True)].count(True), 1)  # Tensor.cuda stays
        self.assertNotIn("record_stream", vars(torch.Tensor))

    def test_forgets_dead_groups(self) -> None:
        from fairscale.internal.parallel import get_process_group_cached

        get_process_group_cached._global_group_cache = {"default": "dead"}
        forget_fairscale_groups()
        forget_fairscale_groups()
        self.assertFalse(hasattr(get_process_group_cached, "_global_group_cache"))

    def test_import_loads_neither_fairscale_nor_pytest(self) -> None:
        code = "import sys, fsdp_optim.testing; print([m for m in ('fairscale', 'pytest') if m in sys.modules])"
        self.assertEqual(scripts.run(code, preload=("fsdp_optim.testing",)).stdout.strip(), "[]")
