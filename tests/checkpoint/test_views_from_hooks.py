"""`views="hooks"` in every call: what the hooks of modules show is seen as hand-written Views are, on all ranks alike."""

from __future__ import annotations

import functools
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import Differs, check_same, refused_on_ranks, sorted_state
from kit.forked import LIBRARY, run
from kit.hooked import Attention, Hooked, halves, joined_halves
from kit.local_parts import local_of
from kit.log_texts import log_texts
from kit.optimizers import adam
from kit.trained import STEPS, Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CallOptions, CheckpointManager, LoadOptions, ManagerOptions, SaveOptions, View
from fsdp_optim.testing import run_on_ranks

WRAPPERS = ("FSDP2", "FSDP1 flat", "FSDP1 orig", "HSDP", "DDP", "fairscale flat", "plain")


class Net(nn.Module):
    """Two fused feed-forwards, a fused attention, and a parameter that is not fused."""

    units = ("layers.0", "layers.1", "")

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Hooked(halves, joined_halves, w13=(8, 3), b=(5,)) for _ in range(2))
        self.attention = Attention(2, 3, 2, 3)
        self.norm = nn.LayerNorm(3)


class Apart(nn.Module):
    """The parts as parameters of their own, without hooks."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"w1": (4, 3), "w3": (4, 3), "b": (5,)}
        self.layers = nn.ModuleList(_holder(shapes) for _ in range(2))
        self.attention = _holder({"q": (12, 3), "k": (4, 3), "v": (4, 3)})
        self.norm = nn.LayerNorm(3)


def _holder(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    return nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})


@functools.cache
def by_hand() -> list[View]:
    halves_of = {f"layers.{{i}}.w{n}": f"{'ab'[n // 3]} c" for n in (1, 3)}
    heads = {f"attention.{part}": f"(g {part} d) c" for part in "qkv"}
    return [
        View("layers.{i}.w13", "(a + b) c", halves_of),
        View("attention.qkv", "(g (q + k + v) d) c", heads, q=3, k=1, v=1, d=2),
    ]


# --------------------------------------------------------------------------------------------- every call


def results(views: Any, folder: str, wrapper: str) -> dict[str, Any]:
    """What every call gives with these Views."""
    source = Trained(wrapper, adam, STEPS, Net)
    options = CallOptions(views=views, process_group=source.process_group)
    kinds: dict[str, Any] = {"process_group": source.process_group, "views": views}
    full = fsdp_optim.gather_full_optim_state_dict(source.model, source.optim, None, "name", options=options)
    assert full is not None
    given = full if dist.get_rank() == 0 else None
    by_call: dict[str, Any] = {"gather": sorted_state(full["state"])}
    iterated = dict(fsdp_optim.iter_full_optim_state(source.model, source.optim, None, options=options))
    by_call["iterate"] = sorted_state(iterated)
    by_call["weights"] = fsdp_optim.gather_full_model_state_dict(source.model, None, options=options)
    by_call["fingerprint"] = str(fsdp_optim.fingerprint(source.model, source.optim, options=options))
    for name, call in (
        ("scatter", lambda t: fsdp_optim.scatter_full_optim_state_dict(t.model, t.optim, given, 0, options=options)),
        ("shard", lambda t: fsdp_optim.get_shard_from_optim_state_dict(t.model, t.optim, full, options=options)),
        ("transfer", lambda t: fsdp_optim.transfer_optim_state(source.model, source.optim, t.model, t.optim, options=options)),
    ):  # fmt: skip
        target = Trained(wrapper, adam, 0, Net)
        shard = call(target)
        if name != "transfer":
            fsdp_optim.load_optim_state_dict(target.optim, shard)
        by_call[name] = local_state(target)
    fsdp_optim.save(f"{folder}/saved", source.model, source.optim, step=1, options=SaveOptions(**kinds))
    fsdp_optim.async_save(f"{folder}/background", source.model, source.optim, options=SaveOptions(**kinds)).wait()
    for name in ("saved", "background"):
        target = Trained(wrapper, adam, 0, Net)
        fsdp_optim.load(f"{folder}/{name}", target.model, target.optim, options=LoadOptions(**kinds))
        by_call[name] = local_state(target), [local_of(param).clone() for param in target.params]
        by_call[f"{name}, names"] = names_in(f"{folder}/{name}")
    for _ in range(2):
        target = Trained(wrapper, adam, 0, Net)
        manager = CheckpointManager(
            f"{folder}/run", target.model, target.optim, every=1, options=ManagerOptions(**kinds)
        )
        with manager:
            by_call["resumed"] = manager.resume()
            target.step(range(1))
            manager.step(by_call["resumed"] + 1)
        by_call["managed"] = local_state(target)
    return by_call


def names_in(folder: str) -> list[str]:
    """The names of all weights and of all state."""
    summary = fsdp_optim.inspect(folder)
    return [*sorted(summary.model), *sorted(map(str, summary.state))]


def local_state(trained: Trained) -> list[Any]:
    states = [trained.optim.state.get(param, {}) for param in trained.params]
    return [{name: local_of(value).clone() for name, value in state.items()} for state in states]


def every_call(folder: str, wrapper: str) -> None:
    """On one rank: what is learned does in every call what is written by hand."""
    with cpu():
        wanted, learned = (results(views, f"{folder}/{views!r:.8}", wrapper) for views in (by_hand(), "hooks"))
        for what, value in wanted.items():
            check_same(f"{wrapper}, {what}", learned[what], value)


def trained_apart(folder: str, wrapper: str) -> None:
    """On one rank: a model without hooks has its names, with the same option; so a run continues fused or unfused."""
    with cpu():
        apart, fused = (Trained(wrapper, adam, 0, model) for model in (Apart, Net))
        fsdp_optim.load(f"{folder}/apart", apart.model, apart.optim, options=LoadOptions(views="hooks"))
        fsdp_optim.save(f"{folder}/again", apart.model, apart.optim, options=SaveOptions(views="hooks"))
        fsdp_optim.load(f"{folder}/again", fused.model, fused.optim, options=LoadOptions(views="hooks", compare=True))
        same = Trained(wrapper, adam, STEPS, Net)
        check_same("weights", [local_of(p) for p in fused.params], [local_of(p) for p in same.params])
        check_same("state", local_state(fused), local_state(same))
        if fsdp_optim.inspect(f"{folder}/again").about.get("views"):
            raise Differs("a model without hooks has Views")


def saved(folder: str, wrapper: str) -> None:
    with cpu():
        source = Trained(wrapper, adam, STEPS, Net)
        fsdp_optim.save(f"{folder}/apart", source.model, source.optim, options=SaveOptions(views="hooks"))


class TestCalls(unittest.TestCase):
    @expand(*some([(wrapper, n) for wrapper in WRAPPERS for n in (1, 2, 3)], every=5))
    def test_every_call_does_what_hand_written_views_do(self, wrapper: str, world_size: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(every_call, world_size, folder, wrapper)

    def test_one_option_serves_a_run_with_the_fusion_on_and_off(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(saved, 2, folder, "FSDP2")
            run_on_ranks(trained_apart, 2, folder, "FSDP2")

    def test_a_save_loads_the_room_with_it_alone_and_never_the_compiler(self) -> None:
        code = """
import sys, tempfile, torch, fsdp_optim
model = torch.nn.Linear(2, 2)
views = [fsdp_optim.View("weight", "a b", {"w": "b a"})]
fsdp_optim.save(tempfile.mkdtemp() + "/1", model, options=fsdp_optim.SaveOptions(views=views))
print([name for name in sys.modules if name.startswith("fsdp_optim.model_views")])
fsdp_optim.save(tempfile.mkdtemp() + "/1", model, options=fsdp_optim.SaveOptions(views="hooks"))
print("fsdp_optim.model_views" in sys.modules)
from kit.hooked import Hooked, halves
fsdp_optim.save(tempfile.mkdtemp() + "/1", Hooked(halves, w=(2,), w13=(4, 2)), options=fsdp_optim.SaveOptions(views="hooks"))
print("torch._dynamo" in sys.modules)
"""
        done = run(code, preload=LIBRARY)
        self.assertEqual(done.stdout.split(), ["[]", "True", "False"], done.stderr)


# ------------------------------------------------------------------------------------------ several ranks


def stage(rank: int) -> nn.Module:
    """One of two pipeline stages, each with another fusion."""
    model = Net()
    model.layers = nn.ModuleDict({str(rank): model.layers[rank]})
    if rank:
        del model.attention
        del model.norm
    return model


def staged(folder: str) -> list[str]:
    """On one rank: a stage of its own."""
    rank = dist.get_rank()
    model = stage(rank)
    optim = adam(model.parameters())
    for number, param in enumerate(model.parameters()):
        param.data.fill_(float(number + 1 + 10 * rank))
        param.grad = torch.ones_like(param)
    optim.step()
    fsdp_optim.save(folder, [model], optim, options=SaveOptions(views="hooks"))
    before = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.data.zero_()
    fsdp_optim.load(folder, [model], optim, options=LoadOptions(views="hooks", compare=True))
    check_same("loaded", [param.detach() for param in model.parameters()], before)
    return fsdp_optim.inspect(folder).about["views"].split("\n")


def raises(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    raise ValueError("no such thing")


def all_reduces(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    numbers = state.pop(f"{prefix}w13")
    dist.all_reduce(numbers)
    state[f"{prefix}w1"], state[f"{prefix}w3"] = numbers.chunk(2)


def gathers(module: Any, state: dict[str, Any], prefix: str) -> None:
    state.pop(f"{prefix}w13")
    state[f"{prefix}w1"], state[f"{prefix}w3"] = module.w13.full_tensor().chunk(2)


def asks_all(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    dist.all_gather_object([None] * dist.get_world_size(), "names")
    halves(module, state, prefix)


def refused(folder: str, save: Callable[..., None], failing: list[int], *words: str) -> None:
    """On one rank: the hooks of some ranks are refused on all ranks alike, with nothing changed and nothing written."""
    with cpu():
        trained = Trained("FSDP2", adam, 1, Net)
        if dist.get_rank() in failing:
            broken = trained.model.layers[1]
            broken.register_state_dict_post_hook(lambda module, state, prefix, _: save(module, state, prefix))
            broken._state_dict_hooks.popitem(last=False)
        before = [local_of(param).clone() for param in trained.params]
        options, model, optim = CallOptions(views="hooks", timeout=60), trained.model, trained.optim
        for what, call in (
            ("save", lambda: fsdp_optim.save(folder, model, optim, options=SaveOptions(views="hooks", timeout=60))),
            ("gather", lambda: fsdp_optim.gather_full_optim_state_dict(model, optim, options=options)),
            ("weights", lambda: fsdp_optim.gather_full_model_state_dict(model, options=options)),
        ):
            refused_on_ranks(what, call, "WrapperError", "layers.1 (FSDPHooked)", "views=[View(...)]", *words)
        check_same("weights", [local_of(param) for param in trained.params], before)
        if Path(folder).exists():
            raise Differs(f"{folder} was made")


def different_options() -> None:
    """On one rank: ranks that give other options."""
    with cpu():
        trained = Trained("FSDP2", adam, 1, Net)
        options = CallOptions(views="hooks" if dist.get_rank() else by_hand())
        refused_on_ranks(
            "options", lambda: fsdp_optim.gather_full_optim_state_dict(trained.model, trained.optim, options=options),
            "RankError", "views='hooks'",
        )  # fmt: skip


def experts_of_ranks(folder: str) -> None:
    """On one rank: each has experts of its own, which name_of tells apart, and so the parts of them."""
    rank = dist.get_rank()
    model = nn.Module()
    model.experts = nn.ModuleList([Hooked(halves, joined_halves, w13=(4, 2))])
    model.experts[0].w13.data.copy_(torch.arange(8.0).view(4, 2) + 10 * rank)

    def name_of(fqn: str, of: int) -> str:
        return fqn.replace("experts.0", f"experts.{of}")

    group = dist.new_group([rank], use_local_synchronization=True)
    wrapped = torch.distributed.fsdp.fully_shard(
        model, mesh=dist.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    )
    options = SaveOptions(views="hooks", name_of=name_of, process_group=dist.group.WORLD)
    fsdp_optim.save(folder, wrapped, options=options)
    check_same("names", names_in(folder), [f"experts.{of}.{part}" for of in range(2) for part in ("w1", "w3")])


def warnings_of(folder: str) -> dict[str, bool]:
    """On one rank: whether a save says that hooks are not run."""
    model = Net()
    warned = {}
    for what, views in (("without", ()), ("hooks", "hooks")):
        with log_texts() as texts:
            fsdp_optim.save(f"{folder}/{what}", model, options=SaveOptions(views=views))
        warned[what] = any("state-dict hooks are not run" in text for text in texts)
    return warned


class TestRanks(unittest.TestCase):
    def test_stages_learn_different_views_and_all_are_recorded(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for views in run_on_ranks(staged, 2, f"{folder}/step"):
                names = [View.from_text(text).name for text in views]
                self.assertEqual(names, ["layers.0.w13", "attention.qkv", "layers.1.w13"])

    @parameterized.expand(
        [
            ("raises", raises, [0], ("raised ValueError: no such thing",)),
            ("raises", raises, [1], ("raised ValueError: no such thing",)),
            ("raises", raises, [2], ("raised ValueError: no such thing",)),
            ("all-reduces", all_reduces, [0, 1, 2], ("makes a collective call, c10d.allreduce_",)),
            ("all-reduces on one", all_reduces, [1], ("makes a collective call, c10d.allreduce_",)),
            ("gathers its weight", gathers, [0, 1, 2], ("live tensor layers.1.w13",)),
            ("asks all ranks", asks_all, [1], ("makes a collective call, c10d.",)),
        ]
    )
    def test_what_hooks_may_not_do(self, _: str, save: Any, failing: list[int], words: tuple[str, ...]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(refused, 3, f"{folder}/step", save, failing, *words)

    def test_ranks_must_give_one_option(self) -> None:
        run_on_ranks(different_options, 2)

    def test_parts_have_the_names_that_name_of_gives(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(experts_of_ranks, 2, f"{folder}/step")

    def test_hooks_that_are_run_are_not_warned_of(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(warnings_of(folder), {"without": True, "hooks": False})
