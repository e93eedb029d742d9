"""`fingerprint` of live models: the same in every wrapper and world, equal to the unwrapped model's, one byte at a time."""

from __future__ import annotations

import copy
import functools
import itertools
import unittest
from typing import Any

import numpy
import torch
import torch.distributed as dist
from kit.checkpoints import Whole, everything
from kit.compare import check_same, error_text
from kit.optimizers import OfModel, two_groups
from kit.prints import print_of
from kit.tables import Table
from kit.torch_limits import cannot_make
from kit.trained import STEPS, Trained, known_oracle
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from parameterized import parameterized
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp_optim
from fsdp_optim import CallOptions, Fingerprint, per_rank
from fsdp_optim.testing import run_on_ranks

PROJECTIONS = 2
OPTIMIZER = OfModel(two_groups)


@functools.cache
def expected() -> Fingerprint:
    """Of the unwrapped model and optimizer, one byte and one element at a time."""
    oracle = known_oracle(OPTIMIZER, STEPS, Whole)
    weights = {name: print_of(value, PROJECTIONS) for name, value in oracle.model.state_dict().items()}
    optim = {
        name: {key: print_of(value, PROJECTIONS) for key, value in state.items() if isinstance(value, Tensor)}
        for name, state in oracle.by_name().items()
    }
    return Fingerprint(weights, optim)


def check_equal(got: Fingerprint, want: Fingerprint) -> None:
    assert got == want, [str(difference) for difference in got.differences(want)]
    for half in ("weights", "optim", "state"):
        for key, value in want.values_of(half).items():
            other = got.values_of(half)[key]
            scale = 1 + value.norm
            numpy.testing.assert_allclose(other.norm, value.norm, rtol=1e-12, err_msg=str(key))
            numpy.testing.assert_allclose(other.projections, value.projections, atol=1e-12 * scale, err_msg=str(key))


def print_in(wrapper: str) -> str:
    with cpu():
        trained = Trained(wrapper, OPTIMIZER, model=Whole)
        before = everything(trained)
        got = fsdp_optim.fingerprint(trained.model, trained.optim, projections=PROJECTIONS)
        check_same("after the fingerprint", everything(trained), before)
    check_equal(got, expected())
    return got.to_json()


SIZES = (1, 2, 3, 4)
POSSIBLE = [(size, wrapper) for wrapper, size in itertools.product(WRAPPERS, SIZES) if not cannot_make(wrapper)]
PRINTS = Table(print_in, POSSIBLE)


class TestWrappers(unittest.TestCase):
    @parameterized.expand(POSSIBLE)
    def test_equals_the_unwrapped_model(self, world_size: int, wrapper: str) -> None:
        texts = PRINTS(world_size, wrapper)
        self.assertEqual(set(texts), {texts[0]}, "the same on all ranks, to the last digit")


# ------------------------------------------------------------------------------------------ other cuts, dtypes, state


class Odd(nn.Module):
    """Tensors of many dtypes, with fewer rows or columns than ranks, without elements and without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shapes = {
            "wide": (5, 700),
            "tall": (700, 3),
            "few": (2, 5),
            "row": (1,),
            "scalar": (),
            "none": (0, 4),
            "cube": (6, 4, 50),
        }
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.brief = nn.Parameter(torch.randn(9, 11, generator=generator).bfloat16())
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("mask", torch.rand(13, generator=generator) > 0.5)
        self.register_buffer("small", torch.randn(5, generator=generator).to(torch.float8_e4m3fn))
        self.register_buffer("phase", torch.randn(5, generator=generator, dtype=torch.complex64))
        self.register_buffer("nans", torch.tensor([1.0, torch.nan, torch.inf, -0.0]))


def sharded_on(dim: int) -> nn.Module:
    """Odd with each parameter cut along one dimension, where it has that, under DTensor."""
    model, mesh = Odd(), init_device_mesh("cpu", (dist.get_world_size(),))
    for name, param in list(model.named_parameters()):
        if param.dim() > dim:
            setattr(model, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(dim)])))
    return model


def check_odd(world_size: int) -> None:
    plain = Odd()
    want = {name: print_of(value.detach(), 1) for name, value in plain.state_dict().items() if name != "small"}
    world = CallOptions(process_group=dist.group.WORLD)
    mesh = init_device_mesh("cpu", (world_size,))
    models: dict[str, Any] = {"plain": plain, "uneven": Odd()}
    fully_shard(models["uneven"], mesh=mesh, ignored_params={models["uneven"].scalar})
    for dim in range(3):
        models[f"Shard({dim})"] = sharded_on(dim)
    for name, model in models.items():
        for bucket_nbytes in (4096, 64 << 20):
            options = CallOptions(process_group=world.process_group, bucket_nbytes=bucket_nbytes)
            got = fsdp_optim.fingerprint(model, projections=1, options=options)
            assert list(got.weights) == [*[*want][:8], "steps", "mask", "small", "phase", "nans"], (
                name,
                list(got.weights),
            )
            small = got.weights["small"]
            assert small.bits == print_of(plain.small.view(torch.uint8)).bits, name
            assert abs(small.norm - float(plain.small.double().norm())) < 1e-12, name
            check_equal(Fingerprint({key: got.weights[key] for key in want}), Fingerprint(want))
            assert got.weights["nans"].num_nonfinite == 2


def check_state(world_size: int) -> None:
    """Trees of state=, with DTensors; objects; what each rank has for itself."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (world_size,))
    model = fully_shard(nn.Linear(3, 5), mesh=mesh)
    value = torch.arange(70.0).view(7, 10)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.5), 3)
    state = {
        "ema": {"w": distribute_tensor(value, mesh, [Shard(0)]), "decay": 0.75},
        "scheduler": scheduler,
        "own": per_rank([rank, 3]),
    }
    before = copy.deepcopy(scheduler.state_dict())
    got = fsdp_optim.fingerprint(model, state=state)
    assert scheduler.state_dict() == before
    assert got.state["ema.w"] == print_of(value), got.state
    assert (got.state["ema.decay"].dtype, got.state["ema.decay"].norm) == ("float", 0.75)
    assert {key for key in got.state if key.startswith("own")} == {
        f"own.{i}[rank {r}]" for i in (0, 1) for r in range(world_size)
    }
    assert got.state["scheduler.step_size"].norm == 3.0
    again = fsdp_optim.fingerprint(model, state={**state, "own": per_rank([rank + 1, 3])})
    changed = [difference.fqn for difference in got.differences(again)]
    assert changed == [f"own.0[rank {r}]" for r in range(world_size)], changed


def check_replicas() -> None:
    """Replicas that differ are an error on all ranks, as in a save, or those of the lowest rank count."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    with torch.no_grad():
        model.module.bias[1] = dist.get_rank()
    kind, text = error_text(lambda: fsdp_optim.fingerprint(model))
    assert (kind, "bias: its elements are not the same on rank 0 and rank 1" in text) == ("StateError", True), text
    got = fsdp_optim.fingerprint(model, options=CallOptions(on_replica_mismatch="lowest_rank"))
    lowest = model.module.bias.detach().clone()
    lowest[1] = 0
    assert got.weights["bias"] == print_of(lowest)
    assert got.weights["weight"] == print_of(model.module.weight)


def check_faults() -> None:
    """What was changed in a sharded model and its optimizer is named, by its kind."""
    trained = Trained("FSDP2", OPTIMIZER, model=Whole)
    before = fsdp_optim.fingerprint(trained.model, trained.optim)
    names = [name for name, _ in trained.model.named_parameters()]
    param = trained.params[0]
    state = trained.optim.state[param]
    with torch.no_grad():
        local = param.to_local()
        if dist.get_rank() == 0:
            bits = local.view(-1).view(torch.int32)
            bits[0] ^= 1
    avg, state["exp_avg"] = state["exp_avg"], state["exp_avg_sq"]
    state["exp_avg_sq"] = avg
    state["step"] += 1
    after = fsdp_optim.fingerprint(trained.model, trained.optim)
    told = [(difference.value, difference.kind) for difference in before.differences(after)]
    first = names[0]
    assert told == [
        (first, "values"),
        *((f"{first}:{name}", "values" if name == "step" else "exchanged") for name in before.optim[first]),
    ], told


def check_mistakes() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    for projections, words in (
        (-1, "projections must be at least 0"),
        (257, "at most 256"),
        (1.5, "an integer, not 1.5"),
    ):
        kind, text = error_text(functools.partial(fsdp_optim.fingerprint, model, projections=projections))
        assert (kind, words in text) == ("StateError", True), text
    kind, text = error_text(lambda: fsdp_optim.fingerprint(model, projections=dist.get_rank()))
    assert (kind, "projections=1" in text) == ("RankError", True), (kind, text)
    kind, text = error_text(lambda: fsdp_optim.fingerprint(model, state=[3]))
    assert (kind, "state must be a dict" in text) == ("StateError", True), text


def on_two_ranks() -> None:
    check_state(2)
    check_replicas()
    check_faults()
    check_mistakes()


class TestOthers(unittest.TestCase):
    @parameterized.expand([(1,), (2,), (4,)])
    def test_cuts_and_dtypes(self, world_size: int) -> None:
        run_on_ranks(check_odd, world_size, world_size)

    def test_state_replicas_faults_mistakes(self) -> None:
        run_on_ranks(on_two_ranks, 2)

    def test_a_plain_model_without_process_group(self) -> None:
        model = Odd()
        optim = torch.optim.SGD([model.wide, model.brief], lr=0.1, momentum=0.9)
        model.wide.grad, model.brief.grad = torch.ones_like(model.wide), torch.ones_like(model.brief)
        optim.step()
        got = fsdp_optim.fingerprint(model, optim)
        self.assertEqual(got.weights["cube"], print_of(model.cube))
        self.assertEqual(got.optim["brief"], {"momentum_buffer": print_of(optim.state[model.brief]["momentum_buffer"])})
        self.assertEqual(fsdp_optim.fingerprint(model.double()).differences(got)[0].kind, "dtype")
