"""save and load: states that are not like the usual one, and models on some of the ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.checkpoints import (
    Whole,
    check_files,
    check_groups,
    everything,
    in_order,
    load,
    load_trained,
    mine,
    opened,
    oracle_after,
    save,
    save_trained,
    scramble,
)
from kit.compare import check_refused, check_same, error_text
from kit.folders import InFolder
from kit.groups import (
    Distribution,
    name_of_experts,
    plain_experts,
    with_experts,
)
from kit.models import Net, Tied, freeze_stem
from kit.opaque import Blockwise, opaque_state
from kit.optimizers import OfModel, Peculiar, adamw_tensor_lr, two_groups, two_optimizers, without_stem
from kit.torch_limits import cannot_make, skip_if
from kit.trained import STEPS, Oracle, Trained, state_by_name
from kit.wrapping import cpu
from kit.wraps import in_fsdp2
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_optim
import fsdp_optim.fairscale
from fsdp_optim.storage.posix import writer
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks


def save_with_few_open(path: Path, kwargs: Mapping[str, Any], durable: bool) -> None:
    """Raise where more files were open at once than are said to be."""
    most, real = 0, writer.FolderWriter._fd

    def count(self: writer.FolderWriter, name: str) -> int:
        nonlocal most
        fd = real(self, name)
        most = max(most, len(self._open))
        return fd

    with mock.patch.object(writer, "_MOST_OPEN", 2), mock.patch.object(writer.FolderWriter, "_fd", count):
        save_trained(path, "FSDP1 orig", kwargs, max_file_size=200, overwrite=True, durable=durable)
    check_same("open at once", most, 2)


OTHERS: dict[str, dict[str, Any]] = {
    "a frozen unit": {"prepare": freeze_stem},
    "a unit that is never used": {"unused": ("stem.weight", "stem.bias")},
    "not trained yet": {"steps": 0},
    "parameters that no optimizer has": {"prepare": freeze_stem, "make": OfModel(without_stem)},
    "several optimizers": {"make": OfModel(two_optimizers)},
    "a learning rate that is a tensor": {"make": adamw_tensor_lr},
    "tied weights": {"model": Tied},
}
ABSENT = {
    "a frozen unit": ["stem.bias", "stem.weight"],
    "a unit that is never used": ["stem.bias", "stem.weight"],
    "not trained yet": sorted(name for name, _ in Net().named_parameters()),
}
TRIPS = (("FSDP1 flat", 2, "FSDP2", 3), ("FSDP2", 4, "fairscale flat", 2), ("DDP", 2, "FSDP1 orig", 3))  # in turn


class StatesTest(InFolder):
    @expand(
        soon=[(case, *TRIPS[i % 3]) for i, case in enumerate(OTHERS)][::2],
        later=[(case, *TRIPS[(i + j) % 3]) for i, case in enumerate(OTHERS) for j in (0, 1) if i % 2 or j],
    )
    def test_trip(self, case: str, source: str, size: int, target: str, target_size: int) -> None:
        kwargs = OTHERS[case]
        run_on_ranks(save_trained, size, self.path, source, kwargs)
        oracle = Oracle(**kwargs)
        if isinstance(oracle.optim, torch.optim.Optimizer) and case != "a learning rate that is a tensor":
            check_groups(self.path, oracle)
        check_files(self.path, oracle)
        for report in run_on_ranks(load_trained, target_size, self.path, target, kwargs):
            self.assertEqual(report["absent"], ABSENT.get(case, []))
        self.check_only("step-1")

    @expand(soon=[("fairscale flat", 3, "FSDP2", 2)], later=[("FSDP1 orig", 2, "FSDP2", 3), ("DDP", 2, "HSDP", 4)])
    def test_values_of_every_type(self, source: str, size: int, target: str, target_size: int) -> None:
        """Moments of one, two and eight bytes, 0-dim tensors, numbers, words, None."""
        kwargs = {"make": Peculiar}
        run_on_ranks(save_trained, size, self.path, source, kwargs)
        check_files(self.path, Oracle(Peculiar))
        run_on_ranks(load_trained, target_size, self.path, target, kwargs)

    @expand(*some((("fairscale flat",), ("FSDP1 flat",), ("FSDP1 orig",), ("FSDP2",)), every=2, first=1))
    def test_ranks_that_hold_nothing(self, wrapper: str) -> None:
        """Four ranks, and parameters of one element or none; saved by them, and restored on them."""
        kwargs = {"model": Sparse}
        run_on_ranks(save_trained, 4, self.path, wrapper, kwargs)
        check_files(self.path, Oracle(model=Sparse))
        run_on_ranks(load_trained, 1, self.path, wrapper, kwargs)
        run_on_ranks(save_trained, 1, self.path, wrapper, kwargs, overwrite=True)
        run_on_ranks(load_trained, 4, self.path, wrapper, kwargs)
        self.check_only("step-1")

    def test_tied_weights_open_as_one(self) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {"model": Tied})
        names = list(safetensors.torch.load_file(self.path / "model.safetensors"))
        self.assertIn("embed.weight", names)
        self.assertNotIn("out.weight", names)
        model, oracle = Tied(), Oracle(model=Tied)
        safetensors.torch.load_model(model, str(self.path / "model.safetensors"))
        check_same("safetensors' own loading", dict(model.state_dict()), dict(oracle.model.state_dict()))
        self.assertIs(model.out.weight, model.embed.weight)

    @expand(soon=[("FSDP2 x TP", 4, "FSDP1 flat", 3)], later=[("FSDP1 flat", 3, "FSDP2 x TP", 4)])
    def test_buffer_of_a_tensor_parallel_unit(self, source: str, size: int, target: str, target_size: int) -> None:
        """torch makes it a DTensor."""
        skip_if(self, cannot_make(source) or cannot_make(target))
        kwargs = {"model": WithOffset}
        run_on_ranks(save_trained, size, self.path, source, kwargs)
        check_files(self.path, Oracle(model=WithOffset))
        run_on_ranks(load_trained, target_size, self.path, target, kwargs)

    @expand(*some(("fairscale flat", "FSDP1 orig", "FSDP2"), every=2))
    def test_state_that_is_not_shaped_like_its_parameter(self, wrapper: str) -> None:
        run_on_ranks(save_blockwise, 2, self.path, wrapper)
        self.assertEqual(run_on_ranks(load_blockwise, 2, self.path, wrapper), [("", "")] * 2)
        check_refused(
            "3 ranks", run_on_ranks(load_blockwise, 3, self.path, wrapper), "StateError", "absmax", "2 shards"
        )

    def test_experts_on_groups_of_their_own(self) -> None:
        run_on_ranks(save_experts, 3, self.path, [[0], [1], [2]])
        plain, optim = plain_experts(3)
        self.assertEqual(sorted(opened(self.path, "model")), sorted(name for name, _ in plain.named_parameters()))
        state = {
            f"state.{n}.{key}": v for n, values in state_by_name(plain, optim).items() for key, v in values.items()
        }
        check_same("optim", opened(self.path, "optim"), {key: state[key] for key in sorted(state)})
        run_on_ranks(load_experts, 2, self.path, [[2], [0, 1]])
        for stem in ("model", "optim"):
            check_same(f"{stem}, again", opened(self.root / "again", stem), opened(self.path, stem))

    def test_model_on_some_of_the_ranks(self) -> None:
        """Rank 0 has no part in it, and makes no call."""
        run_on_ranks(trip_on_last_two, 3, self.path)
        check_files(self.path, Oracle())

    @expand(soon=[("FSDP1 flat", "FSDP2")], later=[("FSDP2", "fairscale flat"), ("plain", "DDP")])
    def test_no_optimizer(self, source: str, target: str) -> None:
        run_on_ranks(save_weights, 2, self.path, source)
        self.assertEqual(list(self.path.glob("optim*")), [])
        check_same("model", opened(self.path, "model"), dict(sorted(Oracle(model=Whole).model.state_dict().items())))
        check_refused("an optimizer, and no state", run_on_ranks(load_weights, 3, self.path, target), "StateError")

    def test_weights_alone_of_a_checkpoint_with_an_optimizer(self) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP1 orig", {"model": Whole})
        run_on_ranks(load_weights, 3, self.path, "FSDP2")

    @expand(soon=[("in_place", 3), ("per_rank_files", 3)], later=[("in_place", 1), ("per_rank_files", 1)])
    def test_strategy(self, strategy: str, size: int) -> None:
        kwargs = {"model": Whole, "make": OfModel(two_groups)}
        run_on_ranks(save_trained, size, self.path, "FSDP1 flat", kwargs, strategy=strategy, durable=True)
        check_files(self.path, oracle_after(STEPS))
        check_groups(self.path, oracle_after(STEPS))
        run_on_ranks(load_trained, 2, self.path, "FSDP2", kwargs, compare=True)

    @parameterized.expand((("small buckets", {"bucket_nbytes": 4096}), ("no checksums", {"checksums": False})))
    def test_option(self, _: str, options: dict[str, Any]) -> None:
        kwargs = {"model": Whole, "make": OfModel(two_groups)}
        run_on_ranks(save_trained, 3, self.path, "fairscale flat", kwargs, **options)
        check_files(self.path, oracle_after(STEPS))
        self.assertEqual(bool(list(self.path.glob("*.sums"))), options.get("checksums", True))
        options.pop("checksums", None)
        run_on_ranks(load_trained, 2, self.path, "FSDP2", kwargs, **options)

    def test_more_files_than_may_be_open(self) -> None:
        kwargs = {"model": Whole, "make": OfModel(two_groups)}
        for durable in (True, False):
            run_on_ranks(save_with_few_open, 2, self.path, kwargs, durable)
            check_files(self.path, oracle_after(STEPS))
            self.assertGreater(len(list(self.path.glob("*.safetensors"))), 8)
        run_on_ranks(load_trained, 3, self.path, "FSDP2", kwargs, compare=True)

    def test_several_files(self) -> None:
        kwargs = {"model": Whole, "make": OfModel(two_groups)}
        limit = 200
        run_on_ranks(save_trained, 3, self.path, "HSDP", kwargs, max_file_size=limit)
        oracle = oracle_after(STEPS)
        check_files(self.path, oracle)
        check_groups(self.path, oracle)
        for stem in ("model", "optim"):
            index = json.loads((self.path / f"{stem}.safetensors.index.json").read_text())
            names = sorted(file.name for file in self.path.glob(f"{stem}*.safetensors"))
            self.assertGreater(len(names), 2)
            self.assertEqual(names, [f"{stem}-{i + 1:05}-of-{len(names):05}.safetensors" for i in range(len(names))])
            self.assertEqual(sorted(set(index["weight_map"].values())), names)
            nbytes = {name: value.nbytes for name, value in opened(self.path, stem).items()}
            self.assertEqual(index["metadata"]["total_size"], sum(nbytes.values()))
            for name in names:
                inside = [nbytes[key] for key, file in index["weight_map"].items() if file == name]
                self.assertTrue(len(inside) == 1 or sum(inside) <= limit, (name, inside))
        run_on_ranks(load_trained, 2, self.path, "FSDP1 orig", kwargs)


def save_blockwise(path: Path, wrapper: str) -> None:
    with cpu():
        save(path, Trained(wrapper, Blockwise))


def load_blockwise(path: Path, wrapper: str) -> tuple[str, str]:
    """State that is not shaped like its parameter: back on as many ranks as it is of, refused on others."""
    with cpu():
        alike, target = (Trained(wrapper, Blockwise, steps) for steps in (STEPS, 1))
        before = everything(target)
        error = error_text(lambda: load(path, target))
        if error[0]:
            check_same("after the refusal", everything(target), before)
        else:
            check_same("opaque values", opaque_state(target), opaque_state(alike))
            check_same("restored", mine(target), mine(alike))
        return error


@fairscale_on_cpu()
def save_experts(path: Path, distribution: Distribution) -> None:
    model, optim, _ = with_experts(distribution[dist.get_rank()])
    fsdp_optim.save(
        path, model, optim, options=fsdp_optim.SaveOptions(name_of=name_of_experts(distribution), progress=False)
    )


@fairscale_on_cpu()
def load_experts(path: Path, distribution: Distribution) -> None:
    model, optim, _ = with_experts(distribution[dist.get_rank()], steps=0)
    name_of = name_of_experts(distribution)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(-3)
    fsdp_optim.load(path, model, optim, options=fsdp_optim.LoadOptions(name_of=name_of, progress=False, compare=True))
    full = fsdp_optim.fairscale.gather_full_optim_state_dict(
        model, optim, None, "name", collect="all", options=fsdp_optim.CallOptions(name_of=name_of)
    )
    check_same("state", in_order(full["state"]), in_order(state_by_name(*plain_experts(3))))
    fsdp_optim.save(
        path.parent / "again", model, optim, options=fsdp_optim.SaveOptions(name_of=name_of, progress=False)
    )


class WithOffset(Net):
    def __init__(self) -> None:
        super().__init__()
        self.stem.register_buffer("offset", torch.tensor([0.1, 0.2]))


class Sparse(nn.Module):
    """First, in the middle and last: parameters that most of four ranks have nothing of."""

    units = ("inner", "")

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(0, 5))
        self.inner = nn.Linear(1, 1)
        self.between = nn.Parameter(torch.empty(2, 3))
        self.last = nn.Parameter(torch.empty(1))
        self.nothing = nn.Parameter(torch.empty(0))


def trip_on_last_two(path: Path) -> None:
    mesh = DeviceMesh("cpu", [1, 2])
    if dist.get_rank():
        trained, target = (Trained(lambda model: in_fsdp2(model, mesh), steps=steps) for steps in (STEPS, 0))
        save(path, trained, per_rank_extra={"rank": dist.get_rank()})
        scramble(target)
        restored = load(path, target)
        check_same("restored", mine(target), mine(trained))
        check_same("of this rank", restored.state["rank"], dist.get_rank())


def save_weights(path: Path, wrapper: str) -> None:
    with cpu():
        trained = Trained(wrapper, model=Whole)
        fsdp_optim.save(
            path, trained.model, options=fsdp_optim.SaveOptions(process_group=trained.process_group, progress=False)
        )


def load_weights(path: Path, wrapper: str) -> tuple[str, str]:
    """Returns what is said to an optimizer for which there is no state."""
    with cpu():
        alike, target = Trained(wrapper, model=Whole), Trained(wrapper, model=Whole, steps=0)
        before = everything(target)
        error = ("", "")
        if not list(path.glob("optim*")):
            error = error_text(lambda: load(path, target))
            check_same("after the refusal", everything(target), before)
        state = mine(target)["state"]
        fsdp_optim.load(
            path, target.model, options=fsdp_optim.LoadOptions(process_group=target.process_group, progress=False)
        )
        got, wanted = mine(target), mine(alike)
        check_same("parameters", got["values"], wanted["values"])
        check_same("buffers", got["buffers"], wanted["buffers"])
        check_same("the optimizer is left alone", got["state"], state)
        return error
