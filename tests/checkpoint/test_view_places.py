"""Views where ranks have different parameters: pipeline stages, declared slices of stacked experts, and buffers."""

from __future__ import annotations

import functools
import tempfile
import unittest
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same, refused_on_ranks, sorted_state
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.slices import NUM_EXPERTS, TrainedSlices, whole_moe
from kit.stages import TrainedStages, whole_oracle
from kit.trained import STEPS, Trained
from kit.wrapping import cpu
from kit.wraps import in_fsdp2
from safetensors.torch import load_file
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim import CallOptions, LoadOptions, SaveOptions, View
from fsdp_optim.testing import run_on_ranks

Split = Callable[[str, Tensor], Mapping[str, Tensor]]
"""(name of a live parameter, a whole value of its shape) -> its canonical parts."""

STACKS = [
    View("experts.up", "e u c", {"experts.{e}.up": "c u"}),
    View("experts.bias", "e (a + b)", {"gates": "(e a)", "ups": "(e b)"}),
]
LAYERS = [View("layers.{i}.up.weight", "(a + b) c", {"layers.{i}.gate": "a c", "layers.{i}.more": "c b"}, a=4)]


def of_stacks(name: str, value: Tensor) -> Mapping[str, Tensor]:
    if name == "experts.up":
        return {f"experts.{e}.up": value[e].T.contiguous() for e in range(NUM_EXPERTS)}
    return (
        {"gates": value[:, 0].contiguous(), "ups": value[:, 1].contiguous()}
        if name == "experts.bias"
        else {name: value}
    )


def of_layers(name: str, value: Tensor) -> Mapping[str, Tensor]:
    if not name.endswith("up.weight"):
        return {name: value}
    stem = name.removesuffix("up.weight")
    return {f"{stem}gate": value[:4].contiguous(), f"{stem}more": value[4:].T.contiguous()}


def canonical(state: Mapping[str, Mapping[str, Any]], split: Split) -> dict[str, dict[str, Any]]:
    """The state of the whole model by canonical name: what is no tensor with dimensions goes to every part."""
    parts: dict[str, dict[str, Any]] = {}
    for fqn, values in state.items():
        for name, value in values.items():
            is_cut = value.dim() > 0
            for part, cut in split(fqn, value if is_cut else torch.empty(0)).items() if is_cut else ():
                parts.setdefault(part, {})[name] = cut
        for name, value in values.items():
            if not value.dim():
                for part in split(fqn, values["exp_avg"]):
                    parts[part][name] = value
    return sorted_state(parts)


def check(trained: Trained, oracle: Any, views: list[View], split: Split, folder: str, again: Trained) -> None:
    """Gathered, saved, and loaded into the same model on ranks that have other parts of it."""
    options = {"process_group": dist.group.WORLD}
    full = fsdp_optim.gather_full_optim_state_dict(
        trained.model, trained.optim, None, "name", options=CallOptions(views=views, **options)
    )
    wanted = canonical(oracle.by_name(), split)
    check_same("gathered", sorted_state(full["state"]), wanted)
    fsdp_optim.save(folder, trained.model, trained.optim, options=SaveOptions(views=views, **options))
    weights = {part: cut for name, value in oracle.values().items() for part, cut in split(name, value).items()}
    saved = load_file(f"{folder}/model.safetensors")
    check_same("saved", {name: saved[name] for name in sorted(weights)}, dict(sorted(weights.items())))
    load = LoadOptions(views=views, compare=True, **options)
    fsdp_optim.load(folder, again.model, again.optim, options=load)
    full = fsdp_optim.gather_full_optim_state_dict(
        again.model, again.optim, None, "name", options=CallOptions(views=views, **options)
    )
    check_same("loaded", sorted_state(full["state"]), wanted)


def slices(folder: str) -> None:
    with cpu():
        rank = dist.get_rank()
        trained = TrainedSlices(rank * 4, rank * 4 + 4, STEPS)
        again = TrainedSlices(*((0, 6), (6, 8))[rank], 0)
        check(trained, whole_moe(STEPS), STACKS, of_stacks, folder, again)


def stages(folder: str) -> None:
    with cpu():
        rank = dist.get_rank()
        trained, again = TrainedStages([rank], 2, STEPS), TrainedStages([1 - rank], 2, 0)
        check(trained, whole_oracle(STEPS), LAYERS, of_layers, folder, again)


class Buffered(nn.Module):
    units = ("",)
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(4, 2))
        self.register_buffer("counts", torch.arange(6.0).view(2, 3))


def buffers(folder: str) -> None:
    with cpu():
        trained = Trained(in_fsdp2, adam, 1, Buffered)
        views = [View("counts", "(a + b) c", {"a.counts": "c a", "b.counts": "c b"})]
        fsdp_optim.save(folder, trained.model, trained.optim, options=SaveOptions(views=views))
        saved = load_file(f"{folder}/model.safetensors")
        check_same("a", saved["a.counts"], torch.tensor([[0.0], [1.0], [2.0]]))
        check_same("b", saved["b.counts"], torch.tensor([[3.0], [4.0], [5.0]]))
        trained.model.counts.zero_()
        before = local_of(trained.params[0]).data_ptr(), trained.model.counts.data_ptr()
        fsdp_optim.load(folder, trained.model, trained.optim, options=LoadOptions(views=views))
        check_same("counts", trained.model.counts, torch.arange(6.0).view(2, 3))
        check_same("places", (local_of(trained.params[0]).data_ptr(), trained.model.counts.data_ptr()), before)


class Halves(nn.Module):
    """Two ranks have one part each of w13."""

    units = ("",)
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(8, 3))
        self.norm = nn.Parameter(torch.empty(3))


def whole_state(folder: str) -> None:
    """What ranks may not differ in without Views, they may not with them, though no rank has the same part."""
    views = [View("w13", "(a + b) c", {"w1": "a c", "w3": "b c"})]
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        "no state": lambda values: values.clear(),
        "step is tensor": lambda values: values.update(step=torch.tensor(7.0)),
        "exp_avg is": lambda values: values.update(exp_avg=values["exp_avg"].bfloat16()),
        "exp_avg_sq is": lambda values: values.pop("exp_avg_sq"),
    }
    with cpu():
        for wrapper in ("FSDP2", "FSDP1 orig"):
            for words, change in changes.items():
                trained = Trained(wrapper, adam, 1, Halves)
                param = next(p for name, p in trained.model.named_parameters() if name.endswith("w13"))
                if dist.get_rank():
                    change(trained.optim.state[param])
                    if not trained.optim.state[param]:
                        del trained.optim.state[param]
                for given in ([], views):
                    options = SaveOptions(views=given, process_group=dist.group.WORLD)
                    refused_on_ranks(
                        f"{wrapper}, {words}, {len(given)}",
                        functools.partial(fsdp_optim.save, folder, trained.model, trained.optim, options=options),
                        "StateError",
                        words,
                        "w13: " if wrapper == "FSDP2" else "w",  # there a rank may hold some of both parts
                    )
        assert not Path(folder).exists()


class TestPlaces(unittest.TestCase):
    def check(self, function: Callable[[str], None]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(function, 2, f"{folder}/step")

    def test_slices_of_stacked_experts(self) -> None:
        self.check(slices)

    def test_pipeline_stages(self) -> None:
        self.check(stages)

    def test_buffers(self) -> None:
        self.check(buffers)

    def test_ranks_with_other_state_of_a_fused_parameter(self) -> None:
        self.check(whole_state)
