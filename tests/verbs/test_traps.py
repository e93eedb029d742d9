"""Traps around a call: summon_full_params, inference mode, a default device, sparse state; and plain words in errors."""

from __future__ import annotations

import contextlib
import tempfile
import traceback
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import Differs, check_refused, check_same, error_text
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.options import as_options
from kit.trained import Trained
from kit.wrapping import cpu
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

import fsdp_optim as F
from fsdp_optim.errors import counted_noun
from fsdp_optim.state.values import same
from fsdp_optim.testing import run_on_ranks

# ------------------------------------------------------------------------------------------ summon_full_params


def inside_summon(path: str) -> dict[str, tuple[str, str]]:
    """The error of every function inside `summon_full_params()`."""
    torch.cuda.synchronize = lambda *args: None  # type: ignore[assignment]  # fairscale's own, which needs a GPU for it
    errors: dict[str, tuple[str, str]] = {}
    with cpu():
        for wrap in ("FSDP1 flat", "FSDP1 orig", "fairscale flat", "fairscale non-flat"):
            trained = Trained(wrap)
            full = trained.gather(None)
            shard = trained.shard(full)
            F.save(path, trained.model, trained.optim, overwrite=True, options=F.SaveOptions(durable=False))
            whole = (
                trained.model.summon_full_params() if "fair" in wrap else TorchFSDP.summon_full_params(trained.model)
            )
            calls: dict[str, Callable[[], Any]] = {
                "save": lambda t=trained: F.save(path + "-new", t.model, t.optim, options=F.SaveOptions(timeout=60)),
                "load": lambda t=trained: F.load(path, t.model, options=F.LoadOptions(timeout=60)),
            }
            if wrap == "FSDP1 orig":
                calls["load_optim"] = lambda t=trained, s=shard: F.load_optim_state_dict(t.optim, s)
            elif wrap != "fairscale non-flat":
                calls["gather"] = lambda t=trained: t.gather(timeout=60)
                calls["iterate"] = lambda t=trained: list(
                    F.iter_full_optim_state(t.model, t.optim, options=F.CallOptions(timeout=60))
                )
                calls["shard"] = lambda t=trained, f=full: t.shard(f)
                calls["scatter"] = lambda t=trained, f=full: t.scatter(f, timeout=60)
            with whole:
                errors |= {f"{wrap}, {name}": error_text(call) for name, call in calls.items()}
                if "gather" not in calls:
                    check_same("gathered in it", trained.gather(None), full)
            check_same("gathered after it", trained.gather(None), full)
    return errors


class SummonTest(unittest.TestCase):
    def test_the_cause_and_the_way_out_are_said(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            told = run_on_ranks(inside_summon, 2, f"{folder}/saved")
        for label in told[0]:
            errors = [errors_of_rank[label] for errors_of_rank in told]
            kind = "StateError" if label.endswith("load_optim") else "WrapperError"
            if label.endswith("load_optim"):
                errors = errors[:1]  # of this rank alone
            check_refused(label, errors, kind, "summon_full_params()", "eave")


# ------------------------------------------------------------------------------------------ inference mode, default device


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


AROUND = {"inference mode": torch.inference_mode, "a default device": default_device}


class OfItsOwn(torch.Tensor):
    """A tensor of a class of its own, whose copies are made by code that names no device."""

    data_: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> OfItsOwn:  # type: ignore[misc]
        made: OfItsOwn = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, device=data.device)
        made.data_ = data
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], context: Any, size: Any, stride: Any) -> OfItsOwn:
        return cls(torch.empty(len(parts["data_"])).copy_(parts["data_"]))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_)
        raise NotImplementedError(func)


class WithOpaque(torch.optim.Adam):
    """Adam with opaque values beside its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for values in self.state.values():
            values.setdefault("codes", OfItsOwn(torch.arange(7.0)))
            values.setdefault("nested", {"a": [torch.ones(2)], "array": numpy.arange(3)})
            values["nested"]["a"][0] += 1  # changed in place
        return result


def with_opaque(params: Any) -> torch.optim.Optimizer:
    return WithOpaque(params, lr=0.01)


WRAPPED = (
    ("FSDP2", adam),
    ("FSDP2", with_opaque),
    ("FSDP1 flat", with_opaque),
    ("fairscale flat", adam),
    ("DDP", with_opaque),
)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from tensors_in(getattr(value, name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "by_shard"):
        yield from tensors_in(value.by_shard)


def check_ordinary(what: str, value: Any) -> None:
    for tensor in tensors_in(value):
        if tensor.is_inference() or tensor.device.type != "cpu":
            raise Differs(f"{what}: a tensor is on {tensor.device}, or one of inference mode")


def around_every_call(around: str, path: str) -> None:
    """The results are as without anything around the call, and the next step can change it."""
    with cpu():
        for wrap, make in WRAPPED:
            trained = Trained(wrap, make, 2)
            group = {"process_group": trained.process_group}
            full = trained.gather(None, "name")
            sharded = (
                get_optimizer_state_dict(trained.model, trained.optim) if (wrap, make) == ("FSDP2", adam) else None
            )
            wanted = [dict(trained.optim.state.get(param, {})) for param in trained.params]
            fresh = Trained(wrap, make, 0)
            with AROUND[around]():
                again = trained.gather(None, "name")
                one_by_one = dict(
                    F.iter_full_optim_state(trained.model, trained.optim, None, **as_options(F.CallOptions, **group))
                )
                F.save(
                    path,
                    trained.model,
                    trained.optim,
                    overwrite=True,
                    **as_options(F.SaveOptions, **group, durable=False, allow_pickle=True),
                )
                shards = {"shard": fresh.shard(full), "scatter": fresh.scatter(full)}
                if sharded is not None:
                    shards["reshard"] = fresh.shard(sharded)
            check_ordinary("gathered", again)
            check_ordinary("iterated", one_by_one)
            if not same(again["state"], full["state"]) or not same(
                {name: values for name, values in one_by_one.items() if values}, full["state"]
            ):
                raise Differs(f"{wrap}: {again} and {one_by_one}, not {full}")
            for how in (*shards, "transfer", "load"):
                target = Trained(wrap, make, 0)
                with AROUND[around]():
                    if how == "transfer":
                        F.transfer_optim_state(
                            trained.model,
                            trained.optim,
                            target.model,
                            target.optim,
                            **as_options(F.CallOptions, **group),
                        )
                    elif how == "load":
                        F.load(
                            path,
                            target.model,
                            target.optim,
                            **as_options(F.LoadOptions, **group, allow_pickle=True),
                        )
                    else:
                        F.load_optim_state_dict(target.optim, shards[how])
                check_ordinary(how, dict(target.optim.state))
                got = [dict(target.optim.state.get(param, {})) for param in target.params]
                for loaded, expected in zip(got, wanted, strict=True):
                    if not same(loaded, expected) and not _padded(loaded, expected):
                        raise Differs(f"{wrap}, {how}: {loaded}, not {expected}")
                target.step([2])


def _padded(loaded: Any, expected: Any) -> bool:
    """Equal but for the padding of a flat parameter, which a load fills with zeros."""
    return list(loaded) == list(expected) and all(
        same(loaded[name], expected[name]) or name in ("exp_avg", "exp_avg_sq") for name in loaded
    )


class AroundTest(unittest.TestCase):
    @expand(*some([(around,) for around in AROUND], every=2))
    def test_results_are_ordinary_tensors(self, around: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(around_every_call, 2, around, f"{folder}/saved")

    def test_what_is_done_between_two_items_is_the_callers_own(self) -> None:
        trained = Trained("plain")
        with torch.inference_mode():
            for _ in F.iter_full_optim_state(trained.model, trained.optim):
                self.assertTrue(torch.is_inference_mode_enabled())
            self.assertTrue(torch.is_inference_mode_enabled())

    def test_a_shard_that_somebody_made_in_inference_mode(self) -> None:
        trained = Trained("plain")
        with torch.inference_mode():
            shard = {**trained.optim.state_dict()}
            shard["state"] = {
                key: {name: value.clone() for name, value in values.items()} for key, values in shard["state"].items()
            }
        target = Trained("plain", steps=0)
        F.load_optim_state_dict(target.optim, shard)
        for run in (trained, target):
            run.step([3])
        check_same("stepped", target.optim.state_dict()["state"], trained.optim.state_dict()["state"])

    def test_live_state_that_somebody_made_in_inference_mode_and_that_a_load_keeps(self) -> None:
        def model(*names: str) -> nn.ModuleDict:
            torch.manual_seed(0)
            return nn.ModuleDict({name: nn.Linear(3, 2) for name in names})

        def step(of: nn.Module, optim: torch.optim.Optimizer) -> None:
            for param in of.parameters():
                param.grad = torch.ones_like(param)
            optim.step()

        small, large = model("a"), model("a", "b")
        optim, kept = adam(small.parameters()), adam(large.parameters())
        step(small, optim)
        with torch.inference_mode():
            kept.state.update({p: {**optim.state[next(iter(optim.state))]} for p in large.parameters()})
            for param, values in kept.state.items():
                values |= {
                    "exp_avg": torch.ones_like(param),
                    "exp_avg_sq": torch.ones_like(param),
                    "step": torch.tensor(4.0),
                }
        with tempfile.TemporaryDirectory() as folder:
            F.save(f"{folder}/saved", small, optim, options=F.SaveOptions(durable=False))
            F.load(f"{folder}/saved", large, kept, strict=False)
        for param in large["b"].parameters():
            check_same("kept", kept.state[param]["exp_avg"], torch.ones_like(param))
        step(large, kept)
        self.assertEqual([float(kept.state[p]["step"]) for p in large.parameters()], [2.0, 2.0, 5.0, 5.0])

    def test_weights_of_a_model_for_inference_only(self) -> None:
        trained = Trained("plain")
        with tempfile.TemporaryDirectory() as folder:
            F.save(f"{folder}/saved", trained.model)
            with torch.inference_mode():
                model = Trained("plain", steps=0).model
                for param in model.parameters():
                    param.data = param.data.clone()
            F.load(f"{folder}/saved", model)
        check_same("weights", dict(model.state_dict()), dict(trained.model.state_dict()))


# ------------------------------------------------------------------------------------------ sparse state


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=True)
        self.head = nn.Linear(3, 2)


class SparseTest(unittest.TestCase):
    def setUp(self) -> None:
        self.model = Embedding()
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.step()

    def step(self) -> None:
        self.model.head(self.model.table(torch.tensor([1, 2, 1]))).sum().backward()
        self.optim.step()

    def test_a_sparse_momentum_is_refused_by_name(self) -> None:
        own, model, optim = self.optim.state_dict(), self.model, self.optim
        words = ("table.weight: momentum_buffer is a sparse tensor", ".to_dense()", "sparse=False")
        with tempfile.TemporaryDirectory() as folder:
            calls = {
                "gather": lambda: F.gather_full_optim_state_dict(model, optim),
                "iterate": lambda: list(F.iter_full_optim_state(model, optim)),
                "save": lambda: F.save(f"{folder}/new", model, optim),
                "transfer": lambda: F.transfer_optim_state(model, optim, model, optim),
            }
            for label, call in calls.items():
                check_refused(label, [error_text(call)], "WrapperError", *words)
            self.assertEqual(list(Path(folder).iterdir()), [])
        fresh = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        shard = lambda: F.get_shard_from_optim_state_dict(model, fresh, own)  # noqa: E731
        check_refused("shard", [error_text(shard)], "StateError", *words)

    def test_the_ways_out_work(self) -> None:
        values = self.optim.state[self.model.table.weight]
        values["momentum_buffer"] = values["momentum_buffer"].to_dense()
        full = F.gather_full_optim_state_dict(self.model, self.optim, key_by="name")
        check_same("dense", full["state"]["table.weight"]["momentum_buffer"], values["momentum_buffer"])
        F.load_optim_state_dict(self.optim, F.get_shard_from_optim_state_dict(self.model, self.optim, full))
        self.step()

    def test_sparse_adam_keeps_dense_moments(self) -> None:
        optim = torch.optim.SparseAdam(self.model.table.parameters())
        self.model.zero_grad()
        self.model.table(torch.tensor([1, 2])).sum().backward()
        optim.step()
        full = F.gather_full_optim_state_dict(self.model.table, optim)
        fresh = torch.optim.SparseAdam(self.model.table.parameters())
        F.load_optim_state_dict(fresh, F.get_shard_from_optim_state_dict(self.model.table, fresh, full))
        check_same("state", fresh.state_dict(), optim.state_dict())


# ------------------------------------------------------------------------------------------ words


def weights_that_differ(path: str) -> tuple[str, str]:
    trained = Trained("DDP")
    with torch.no_grad():
        local_of(trained.params[0]).add_(dist.get_rank())
    trained.model = trained.model.module  # nobody keeps them equal now
    return error_text(
        lambda: F.save(path, trained.model, options=F.SaveOptions(process_group=dist.group.WORLD, timeout=60))
    )


class WordsTest(unittest.TestCase):
    def test_one_is_not_plural(self) -> None:
        self.assertEqual([counted_noun(n, "rank") for n in (0, 1, 2)], ["0 ranks", "1 rank", "2 ranks"])
        model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
        in_one_group = torch.optim.SGD(model.parameters())
        in_two_groups = torch.optim.SGD([{"params": [param]} for param in model.parameters()])
        fulls = [F.gather_full_optim_state_dict(model, optim, key_by="name") for optim in (in_one_group, in_two_groups)]
        less = F.gather_full_optim_state_dict(model, torch.optim.SGD(model[0].parameters()), key_by="name")
        calls = {
            "1 param group,": lambda: F.get_shard_from_optim_state_dict(model, in_two_groups, fulls[0]),
            "1 parameter there": lambda: F.get_shard_from_optim_state_dict(model, in_one_group, less),
            "1 such parameter)": lambda: F.rekey_optim_state_dict(fulls[0], nn.Sequential(model[0]), "id"),
            "1 optimizer cannot load 2 shards": lambda: F.load_optim_state_dict(in_one_group, [fulls[0]] * 2),
        }
        for words, call in calls.items():
            check_refused(words, [error_text(call)], "StateError", words)

    def test_weights_are_not_called_state(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for kind, text in run_on_ranks(weights_that_differ, 2, f"{folder}/new"):
                self.assertEqual(kind, "StateError", text)
                self.assertIn("scale: its elements are not the same on rank 0 and rank 1", text)
                self.assertNotIn("state", text)

    def test_no_traceback_of_a_cause_that_says_the_same(self) -> None:
        model = nn.Linear(2, 1)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "file"
            file.write_text("")
            for call in (
                lambda: F.load(f"{folder}/missing", model),
                lambda: F.save(file / "new", model),
                lambda: F.load(None, model),  # type: ignore[arg-type]
            ):
                try:
                    call()
                except F.CheckpointError:
                    text = traceback.format_exc()
                self.assertEqual(text.count("Traceback"), 1, text)
