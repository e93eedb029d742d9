"""A checkpoint of one floating dtype for a model of another: refused with the way out, and converted with cast=True."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import check_refused, check_same, error_text
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.trained import Oracle, Trained
from kit.wrapping import cpu, snapshot
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.checkpoint.common import casting
from fsdp_optim.testing import run_on_ranks


class Small(nn.Module):
    """Few enough elements that bf16 has a number for each."""

    units = ("inner", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.norm = nn.LayerNorm(3)
        self.last = nn.Linear(7, 5, bias=False)


class Longer(Small):
    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.empty(7))


class MasterAdam(torch.optim.Optimizer):
    """Not torch's: its state is fp32, whatever the parameter is."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
            state["step"] += 1
            state["exp_avg"].mul_(0.9).add_(param.grad.to(torch.float32), alpha=0.3)


def halves(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def norm_in_fp32(model: Any) -> None:
    model.to(torch.bfloat16)
    model.norm.to(torch.float32)


def as_they_are(model: nn.Module) -> None:
    pass


def saved(folder: str, make: Any, prepare: Callable[[nn.Module], None]) -> Oracle:
    """A checkpoint of a plain model, and that model."""
    oracle = Oracle(make, 2, Small, prepare)
    with torch.no_grad():
        for param in oracle.model.parameters():  # something that bf16 must round where it can
            param.mul_(1 / 3)
    fsdp_optim.save(folder, oracle.model, oracle.optim)
    return oracle


def weights(target: Trained, folder: Path) -> dict[str, torch.Tensor]:
    """The whole values of the target, read from a checkpoint of its own."""
    fsdp_optim.save(
        folder, target.model, options=fsdp_optim.SaveOptions(process_group=target.process_group), overwrite=True
    )
    return dict(sorted(safetensors.torch.load_file(folder / "model.safetensors").items()))


def loaded(wrapper: str, folder: str, now: str) -> list[tuple[str, str]]:
    with cpu():
        dtype = {"half": torch.bfloat16, "single": torch.float32}[now]
        prepare = halves if now == "half" else as_they_are
        errors = []
        for make, name in ((adam, "adam"), (MasterAdam, "master")):
            path = f"{folder}/{name}"
            plain = torch.load(f"{folder}/{name}.pt")
            for steps in (0, 1):
                target = Trained(wrapper, make, steps, Small, prepare)
                before = snapshot(target)
                load = partial(
                    fsdp_optim.load,
                    path,
                    target.model,
                    target.optim,
                    options=fsdp_optim.LoadOptions(process_group=target.process_group),
                )
                errors.append(error_text(load))
                check_same("nothing is changed", snapshot(target), before)
                group = target.process_group
                load(options=fsdp_optim.LoadOptions(process_group=group, cast=True, compare=True))
                check_same("dtypes", {local_of(param).dtype for param in target.params}, {dtype})
                got = weights(target, Path(folder, "again"))
                check_same("weights", got, {name: w.to(dtype) for name, w in sorted(plain["model"].items())})
                state = target.gather(None, "name")["state"]
                wanted = {
                    fqn: {
                        key: value.to(dtype) if name == "adam" and value.dim() else value
                        for key, value in values.items()
                    }
                    for fqn, values in plain["optim"].items()
                }
                check_same(f"{name}: state", state, wanted)
                target.step([5])
        return errors


def mixed(wrapper: str, folder: str) -> None:
    """Originals that were saved in two dtypes, in one flat parameter."""
    with cpu():
        plain = torch.load(f"{folder}/mixed.pt")["model"]
        for model in (Small, Longer):
            target = Trained(wrapper, MasterAdam, 1, model)
            before = weights(target, Path(folder, "again"))
            restored = fsdp_optim.load(
                f"{folder}/mixed",
                target.model,
                options=fsdp_optim.LoadOptions(cast=True, process_group=target.process_group),
                strict=model is Small,
            )
            got = weights(target, Path(folder, "again"))
            check_same("missing", restored.missing_keys, () if model is Small else ("added",))
            kept = {} if model is Small else {"added": before["added"]}
            wanted = {**{name: w.float() for name, w in plain.items()}, **kept}
            check_same("weights", got, dict(sorted(wanted.items())))


class CastTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def save(self, name: str, make: Any, prepare: Callable[[nn.Module], None]) -> None:
        oracle = saved(f"{self.folder.name}/{name}", make, prepare)
        told = {"model": oracle.model.state_dict(), "optim": oracle.by_name()}
        torch.save(told, f"{self.folder.name}/{name}.pt")

    @expand(
        *some([(w, now) for w in ("FSDP1 flat", "FSDP1 orig", "FSDP2", "plain") for now in ("half", "single")], every=3)
    )
    def test_weights_are_converted_and_training_goes_on(self, wrapper: str, now: str) -> None:
        before = as_they_are if now == "half" else halves
        self.save("adam", adam, before)
        self.save("master", MasterAdam, before)
        by_rank = run_on_ranks(loaded, 2, wrapper, self.folder.name, now)
        for errors in zip(*by_rank, strict=True):
            check_refused(wrapper, errors, "StateError", "cast=True", "inner.weight", "float32", "bfloat16")

    @expand(*some(["FSDP1 flat", "FSDP1 orig", "FSDP2"], every=2))
    def test_two_dtypes_into_one(self, wrapper: str) -> None:
        self.save("mixed", MasterAdam, norm_in_fp32)
        run_on_ranks(mixed, 2, wrapper, self.folder.name)

    def test_numbers_that_are_not_floating_are_never_converted(self) -> None:
        model, other = nn.Linear(2, 2), nn.Linear(2, 2)
        model.register_buffer("count", torch.tensor([1, 2], dtype=torch.int64))
        other.register_buffer("count", torch.tensor([1, 2], dtype=torch.int32))
        path = f"{self.folder.name}/ints"
        fsdp_optim.save(path, model)
        for cast in (False, True):
            kind, text = error_text(lambda: fsdp_optim.load(path, other, options=fsdp_optim.LoadOptions(cast=cast)))  # noqa: B023
            self.assertEqual(kind, "StateError", text)
            self.assertIn("1 difference:\ncount: int64 in the checkpoint, int32 in the model", text)
            self.assertNotIn("cast=True", text)


def cast_beside_absent_ones(path: str) -> None:
    """A checkpoint without the biases, for units whose biases share flat parameters with weights."""
    with cpu():
        numbers = Oracle(adam, 0, Small).model.state_dict()
        other = {name: value + 1 / 3 for name, value in numbers.items()}  # bf16 has none of these
        target = Trained("FSDP1 flat", adam, 0, Small, values=other)
        fsdp_optim.load(path, target.model, strict=False, options=fsdp_optim.LoadOptions(cast=True))
        full = fsdp_optim.gather_full_model_state_dict(target.model, None) or {}
        wanted = {name: other[name] if "bias" in name else value for name, value in numbers.items()}
        check_same("model", dict(sorted(full.items())), dict(sorted(wanted.items())))


LARGE = 1e30  # more than float16 has
NARROW = fsdp_optim.LoadOptions(cast=True, compare=True)


def in_half(model: nn.Module) -> None:
    model.to(torch.float16)


def too_large(wrapper: str, folder: str) -> list[tuple[str, str]]:
    """The errors of loads into float16; nothing is changed."""
    with cpu():
        target = Trained(wrapper, adam, 1, Small, in_half)
        before, tree, errors = snapshot(target), torch.zeros(3, dtype=torch.float16), []
        options = fsdp_optim.LoadOptions(cast=True, process_group=target.process_group)
        for name in ("weight", "state", "tree"):
            optim = target.optim if name == "state" else None
            state = {"tree": tree} if name == "tree" else None
            load = partial(fsdp_optim.load, f"{folder}/{name}", target.model, optim, state=state, options=options)
            errors.append(error_text(load))
            check_same("nothing is changed", (snapshot(target), tree), (before, torch.zeros_like(tree)))
        full = torch.load(f"{folder}/full.pt") if dist.get_rank() == 0 else None
        call = fsdp_optim.CallOptions(process_group=target.process_group)
        errors.append(
            error_text(
                partial(fsdp_optim.scatter_full_model_state_dict, target.model, full, 0, cast=True, options=call)
            )
        )
        check_same("nothing is changed", snapshot(target), before)
        return errors


class RangeTest(unittest.TestCase):
    """A number that becomes infinite in the live dtype is refused, as it is at a save with `weights_dtype`."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    @parameterized.expand(["FSDP1 flat", "FSDP2"])
    def test_on_all_ranks(self, wrapper: str) -> None:
        for name in ("weight", "state", "tree"):
            oracle = Oracle(adam, 1, Small)
            tree = torch.ones(3)
            last = oracle.model.last.weight
            values = {"weight": last.data, "state": oracle.optim.state[last]["exp_avg"], "tree": tree}
            values[name].view(-1)[-1] = LARGE
            fsdp_optim.save(self.root / name, oracle.model, oracle.optim, state={"tree": tree})
            if name == "weight":
                torch.save(oracle.model.state_dict(), self.root / "full.pt")
        named = ("last.weight", "exp_avg", "tree", "last.weight")
        for name, errors in zip(
            named, zip(*run_on_ranks(too_large, 2, wrapper, str(self.root)), strict=True), strict=True
        ):
            words = (name, "would become infinite in float16", "65504")
            check_refused(wrapper, errors, "StateError", *words)

    def test_one_process(self) -> None:
        model = nn.Linear(2, 1)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[65519.0, float("inf")]]))
            model.bias.fill_(float("nan"))
        fsdp_optim.save(self.root / "fits", model, state={"tree": torch.tensor([-LARGE, 1.0])})
        half = nn.Linear(2, 1).half()
        fsdp_optim.load(self.root / "fits", half, options=NARROW)
        self.assertEqual(half.weight.tolist(), [[65504.0, float("inf")]], "it is rounded to the largest number")
        self.assertTrue(half.bias.isnan().all())
        tree = torch.zeros(2, dtype=torch.float16)
        for model_given in (None, half):
            kind, text = error_text(
                partial(fsdp_optim.load, self.root / "fits", model_given, state={"tree": tree}, options=NARROW)
            )
            self.assertEqual(kind, "StateError", text)
            self.assertIn("1 element of its float32 elements would become infinite in float16", text)
            self.assertEqual(tree.tolist(), [0, 0])
        with torch.no_grad():
            model.weight.fill_(65520.0)
        fsdp_optim.save(self.root / "fits", model, overwrite=True)
        kind, text = error_text(partial(fsdp_optim.load, self.root / "fits", half, options=NARROW))
        self.assertIn("weight on rank 0: 2 elements of its float32 elements would become infinite in float16", text)
        self.assertEqual(half.weight.tolist(), [[65504.0, float("inf")]])

    @parameterized.expand([(is_saved, cast) for is_saved in (True, False) for cast in (True, False)])
    def test_packed_numbers(self, is_saved: bool, cast: bool) -> None:
        """torch converts neither to them nor from them, which a load says before it changes anything."""
        packed, plain = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), torch.zeros(4)
        model, other = nn.Linear(2, 2), nn.Linear(2, 2)
        model.register_buffer("numbers", packed if is_saved else plain)
        other.register_buffer("numbers", plain if is_saved else packed)
        fsdp_optim.save(self.root / "step", model)
        before = other.weight.clone()
        options = fsdp_optim.LoadOptions(cast=cast)
        kind, text = error_text(partial(fsdp_optim.load, self.root / "step", other, options=options))
        self.assertEqual(kind, "StateError", text)
        self.assertIn("nothing was loaded. 1 difference:\nnumbers: float", text)
        self.assertTrue(torch.equal(other.weight, before))


class AbsentTest(unittest.TestCase):
    def test_what_the_checkpoint_lacks_keeps_its_dtype(self) -> None:
        """It does not pass through the checkpoint's dtype, which has fewer bits."""
        weights = {
            name: value for name, value in Oracle(adam, 0, Small).model.state_dict().items() if "bias" not in name
        }
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/model.safetensors"
            safetensors.torch.save_file({name: value.to(torch.bfloat16) for name, value in weights.items()}, path)
            run_on_ranks(cast_beside_absent_ones, 2, path)


class StateDtypeTest(unittest.TestCase):
    def test_what_the_live_optimizer_has_decides(self) -> None:
        """A floating value never becomes a whole number, which would drop its elements' fractions."""
        lives = (torch.float32, torch.bfloat16, torch.int8, None)
        dtypes = []
        for dtype in lives:
            live = {"moment": torch.zeros(3, dtype=dtype)} if dtype is not None else {}
            fqns, handle = ("a",), SimpleNamespace(weights_dtype=torch.bfloat16)
            param: Any = SimpleNamespace(state=live, named=SimpleNamespace(fqns=fqns), handle=handle, group_index=0)
            optim: Any = SimpleNamespace(classes=())
            weights: Any = {"a": SimpleNamespace(dtype="float32")}
            dtypes.append(casting.state_dtype(optim, param, "moment", torch.float32, weights))
        self.assertEqual(dtypes, [torch.float32, torch.bfloat16, torch.float32, torch.float32])
