"""What Views refuse by name, on all ranks alike and before anything is written; and what goes through the other calls."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kit.compare import Differs, check_same, refused_on_ranks, sorted_state
from kit.fused import VIEWS, Factored, TrainedFused, Unfused
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from safetensors.torch import load_file
from torch import nn

import fsdp_optim
from fsdp_optim import CallOptions, CheckpointManager, LoadOptions, ManagerOptions, SaveOptions, View
from fsdp_optim.testing import run_on_ranks

SAVE, LOAD, CALL = SaveOptions(views=VIEWS), LoadOptions(views=VIEWS), CallOptions(views=VIEWS)
HALVES = View("w", "(a + b) c", {"a.w": "a c", "b.w": "b c"})


def untouched(what: str, trained: Trained, call: Callable[[], Any], kind: str, *words: str, folder: str = "") -> None:
    """Refused on all ranks alike, with nothing changed and nothing written."""
    before = [local_of(param).clone() for param in trained.params]
    refused_on_ranks(what, call, kind, *words)
    check_same(f"{what}, weights", [local_of(param) for param in trained.params], before)
    if folder and Path(folder).exists():
        raise Differs(f"{what}: {folder} was made")


# ------------------------------------------------------------------------------------------------ refusals


def views_that_do_not_fit(folder: str) -> None:
    with cpu():
        fused = TrainedFused("FSDP2", adam, 1)
        cases: list[tuple[str, list[Any], str, tuple[str, ...]]] = [
            ("nothing", [HALVES], "StateError", ("View('w', '(a + b) c'", "on any rank")),
            ("shape", [View("ff.w13", "f c", {"x": "f c"})], "LayoutError", ("ff.w13", "the axes 'f c' are 2")),
            (
                "taken",
                [View("ff.w13", "f s c", {"ff.w2.weight": "f s c"})],
                "WrapperError",
                ("ff.w2.weight", "a part of ff.w13"),
            ),
            (
                "two",
                [*VIEWS, View("ff.{x}", "f s c", {"y.{x}": "f s c"})],
                "WrapperError",
                ("ff.w13", "two Views are of"),
            ),
            ("no list", VIEWS[0], "StateError", ("views must be a list of Views",)),
            ("no View", ["w"], "StateError", ("views must be a list of Views",)),
        ]
        for what, views, kind, words in cases:
            place = f"{folder}/{what}"

            def save(views: Any = views, place: str = place) -> Any:
                return fsdp_optim.save(place, fused.model, fused.optim, options=SaveOptions(views=views))

            untouched(what, fused, save, kind, *words, folder=place)
            untouched(what, fused, lambda views=views: fused.gather(None, "name", views=views), kind, *words)


def other_views_on_other_ranks(folder: str) -> None:
    with cpu():
        fused, rank = TrainedFused("FSDP2", adam, 1), torch.distributed.get_rank()
        options = SaveOptions(views=VIEWS[: len(VIEWS) - rank])
        untouched(
            "other Views",
            fused,
            lambda: fsdp_optim.save(f"{folder}/step", fused.model, fused.optim, options=options),
            "RankError",
            "views=",
            folder=f"{folder}/step",
        )


def state_of_another_shape(folder: str) -> None:
    with cpu():
        fused, apart = TrainedFused("plain", Factored, 1), Trained("plain", Factored, 1, Unfused)
        save = SaveOptions(views=VIEWS, process_group=fused.process_group)
        untouched(
            "saved",
            fused,
            lambda: fsdp_optim.save(f"{folder}/fused", fused.model, fused.optim, options=save),
            "StateError",
            "attention.wqkv.weight: row_var is a Tensor of shape",
            "leave the View of attention.wqkv.weight out",
            folder=f"{folder}/fused",
        )
        fsdp_optim.save(
            f"{folder}/apart", apart.model, apart.optim, options=SaveOptions(process_group=apart.process_group)
        )
        load = LoadOptions(views=VIEWS, process_group=fused.process_group)
        refused_on_ranks(
            "loaded",
            lambda: fsdp_optim.load(f"{folder}/apart", fused.model, fused.optim, options=load),
            "StateError",
            "attention.wqkv.weight: row_var is",
        )
        way_out = SaveOptions(process_group=fused.process_group)
        fsdp_optim.save(f"{folder}/kept", fused.model, fused.optim, options=way_out)


def saved_in_parts(folder: str, change: Callable[[Trained], None]) -> None:
    with cpu():
        apart = Trained("FSDP2", adam, STEPS, Unfused)
        change(apart)
        fsdp_optim.save(folder, apart.model, apart.optim)


def other_step(apart: Trained) -> None:
    state = apart.optim.state[dict(apart.model.named_parameters())["attention.wk.weight"]]
    state["step"] = state["step"] + 1


def no_state(apart: Trained) -> None:
    del apart.optim.state[dict(apart.model.named_parameters())["attention.wk.weight"]]


def in_two_groups(apart: Trained) -> None:
    """wv decays, the rest does not: groups as trainers make them for an unfused model."""
    named = dict(apart.model.named_parameters())
    optim = torch.optim.Adam(
        [
            {"params": [param for name, param in named.items() if "wv" not in name], "lr": 0.5},
            {"params": [param for name, param in named.items() if "wv" in name], "lr": 0.25},
        ]
    )
    optim.state.update(apart.optim.state)
    apart.optim = optim


def refused_load(folder: str, words: tuple[str, ...], options: LoadOptions = LOAD) -> None:
    with cpu():
        fused = TrainedFused("FSDP2", adam, 0)
        untouched(
            "load",
            fused,
            lambda: fsdp_optim.load(folder, fused.model, fused.optim, options=options),
            "StateError",
            *words,
        )


def loaded_live_groups(folder: str) -> None:
    with cpu():
        fused = TrainedFused("FSDP2", adam, 0)
        options = LoadOptions(views=VIEWS, param_groups="live")
        fsdp_optim.load(folder, fused.model, fused.optim, options=options)
        state = fused.gather(None, "name", views=VIEWS)["state"]
        check_same("state", sorted_state(state), sorted_state(Oracle(adam, STEPS, Unfused).by_name()))


class Tied(nn.Module):
    units = ("",)
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(24.0).view(4, 6))
        self.other = nn.Module()
        self.other.w = self.w


def tied(folder: str) -> None:
    with cpu():
        model = Trained("FSDP2", adam, 1, Tied)
        refused_on_ranks(
            "tied, and a View of one name",
            lambda: fsdp_optim.save(f"{folder}/x", model.model, model.optim, options=SaveOptions(views=[HALVES])),
            "WrapperError",
            "other.w and w are one tied parameter",
        )
        both = [HALVES, View("other.w", "(a + b) c", {"other.a": "a c", "other.b": "b c"})]
        fsdp_optim.save(f"{folder}/y", model.model, model.optim, options=SaveOptions(views=both))
        aliases = fsdp_optim.inspect(f"{folder}/y").aliases
        check_same("aliases", dict(sorted(aliases.items())), {"other.a": "a.w", "other.b": "b.w"})
        fsdp_optim.load(f"{folder}/y", model.model, model.optim, options=LoadOptions(views=both))
        unlike = [HALVES, View("other.w", "c (a + b)", {"other.a": "c a", "other.b": "c b"})]
        refused_on_ranks(
            "tied, and another cut",
            lambda: fsdp_optim.save(f"{folder}/x", model.model, model.optim, options=SaveOptions(views=unlike)),
            "WrapperError",
            "their Views have different parts",
        )


# ------------------------------------------------------------------------------------------------ other calls


def through_other_calls(folder: str) -> None:
    with cpu():
        fused, apart = TrainedFused("FSDP2", adam, STEPS), Trained("FSDP1 flat", adam, 0, Unfused)
        oracle = Oracle(adam, STEPS, Unfused)
        wanted, values = sorted_state(oracle.by_name()), dict(sorted(oracle.values().items()))

        fsdp_optim.transfer_optim_state(fused.model, fused.optim, apart.model, apart.optim, options=CALL)
        check_same("transferred", sorted_state(apart.gather(None, "name", views=VIEWS)["state"]), wanted)

        back = TrainedFused("FSDP1 orig", adam, 0)
        shard = back.scatter(fused.gather(0, "name", views=VIEWS), views=VIEWS)
        fsdp_optim.load_optim_state_dict(back.optim, shard)
        check_same("scattered", sorted_state(back.gather(None, "name", views=VIEWS)["state"]), wanted)
        full = fused.gather(None, "name", views=VIEWS)
        fsdp_optim.load_optim_state_dict(back.optim, back.shard(full, views=VIEWS))
        check_same("sharded", sorted_state(back.gather(None, "name", views=VIEWS)["state"]), wanted)

        model = fsdp_optim.gather_full_model_state_dict(fused.model, options=CALL)
        fsdp_optim.scatter_full_model_state_dict(back.model, model, options=CALL)
        gathered = fsdp_optim.gather_full_model_state_dict(back.model, None, options=CALL)
        check_same("weights", dict(sorted(gathered.items())), values)

        fsdp_optim.async_save(f"{folder}/async", fused.model, fused.optim, options=SAVE).wait()
        renamed = SaveOptions(views=VIEWS, rename={"": "model."})
        fsdp_optim.save(f"{folder}/renamed", fused.model, fused.optim, options=renamed)
        for name, prefix in (("async", ""), ("renamed", "model.")):
            saved = load_file(f"{folder}/{name}/model.safetensors")
            check_same(name, dict(sorted(saved.items())), {f"{prefix}{fqn}": value for fqn, value in values.items()})
        summary = fsdp_optim.inspect(f"{folder}/async")
        texts = summary.about["views"].splitlines()
        check_same("Views of the checkpoint", [View.from_text(text) for text in texts], VIEWS)
        check_same("no Views", "views" in fsdp_optim.inspect(_without(folder, apart)).about, False)


def _without(folder: str, apart: Trained) -> str:
    fsdp_optim.save(f"{folder}/without", apart.model, apart.optim, options=SaveOptions())
    return f"{folder}/without"


def managed(folder: str) -> None:
    with cpu():
        fused = TrainedFused("FSDP2", adam, STEPS)
        options = ManagerOptions(views=VIEWS, rng=False, signals=())
        with CheckpointManager(folder, fused.model, fused.optim, every=1, options=options) as manager:
            manager.save(1)
            manager.wait()
        again = TrainedFused("HSDP", adam, 0)
        with CheckpointManager(folder, again.model, again.optim, every=1, options=options) as manager:
            check_same("step", manager.resume(), 1)
        wanted = sorted_state(Oracle(adam, STEPS, Unfused).by_name())
        check_same("resumed", sorted_state(again.gather(None, "name", views=VIEWS)["state"]), wanted)


class Large(nn.Module):
    """Rows that lie element by element between others, in tensors that are longer than what is copied with others."""

    units = ("",)
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.oss = nn.Parameter(torch.empty(2, 64, 2 * 300))
        self.pairs = nn.Parameter(torch.empty(2 * 2000, 16))
        self.heads = nn.Parameter(torch.empty(64 * 3 * 4, 50))


LARGE = [
    View("oss", "e c (f (a + b))", {"w1.{e}": "(f a) c", "w3.{e}": "(f b) c"}, a=1, b=1),
    View("pairs", "(f (a + b)) c", {"gate": "(f a) c", "up": "c (f b)"}, a=1, b=1),
    View("heads", "(g (q + k + v) d) c", {"q": "(g q d) c", "k": "(g k d) c", "v": "g v d c"}, q=1, k=1, v=1, d=4),
]


def large_parts(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    oss, pairs, heads = values["oss"], values["pairs"], values["heads"].unflatten(0, (64, 3, 4))
    parts = {f"w{1 + 2 * n}.{e}": oss[e, :, n::2].T for n in range(2) for e in range(2)}
    parts |= {"gate": pairs[::2], "up": pairs[1::2].T, "v": heads[:, 2:3]}
    return parts | {"q": heads[:, 0].flatten(0, 1), "k": heads[:, 1].flatten(0, 1)}


def large(folder: str, wrapper: str) -> None:
    """In little memory, so that values go in windows."""
    with cpu():
        trained = Trained(wrapper, adam, 2, Large)
        oracle = Oracle(adam, 2, Large)
        own = trained.process_group
        save = SaveOptions(views=LARGE, bucket_nbytes=64 << 10, process_group=own)
        fsdp_optim.save(f"{folder}/{wrapper}", trained.model, trained.optim, options=save)
        saved = load_file(f"{folder}/{wrapper}/model.safetensors")
        wanted = {name: value.contiguous() for name, value in large_parts(oracle.values()).items()}
        check_same(wrapper, dict(sorted(saved.items())), dict(sorted(wanted.items())))
        again = Trained(wrapper, adam, 0, Large)
        load = LoadOptions(views=LARGE, bucket_nbytes=64 << 10, compare=True, process_group=again.process_group)
        fsdp_optim.load(f"{folder}/{wrapper}", again.model, again.optim, options=load)
        for part, other in zip(again.params, trained.params, strict=True):
            check_same(f"{wrapper}, weights", local_of(part), local_of(other))
            states = [
                {name: local_of(value) for name, value in side.optim.state[param].items()}
                for side, param in ((again, part), (trained, other))
            ]
            check_same(f"{wrapper}, state", *states)


def some_missing(folder: str) -> None:
    """strict=False: parts that the checkpoint lacks keep what they have, beside parts of the same fused parameter that it has."""
    with cpu():
        apart = Trained("FSDP2", adam, 2, Unfused)
        half = nn.Module()
        half.ff = nn.Module()
        half.ff.w1 = nn.Module()
        half.ff.w1.weight = dict(apart.model.named_parameters())["ff.w1.weight"]
        fsdp_optim.save(f"{folder}/half", half)
        fused = TrainedFused("FSDP2", adam, 0)
        before = Oracle(adam, 0, Unfused).values()
        result = fsdp_optim.load(f"{folder}/half", fused.model, strict=False, options=LOAD)
        if "ff.w3.weight" not in result.missing_keys:
            raise Differs(str(result.missing_keys))
        now = fsdp_optim.gather_full_model_state_dict(fused.model, None, options=CALL)
        wanted = before | {"ff.w1.weight": Oracle(adam, 2, Unfused).values()["ff.w1.weight"]}
        check_same("weights", dict(sorted(now.items())), dict(sorted(wanted.items())))


def of_two_dtypes(folder: str) -> None:
    """Parts of one fused parameter, interleaved in memory, that were saved in two dtypes."""
    with cpu():
        values = Oracle(adam, 2, Unfused).values()
        gates = nn.Module()
        gates.ff = nn.ModuleDict({name: nn.Module() for name in ("w1", "w3")})
        gates.ff["w1"].weight = nn.Parameter(values["ff.w1.weight"].to(torch.float64))
        gates.ff["w3"].weight = nn.Parameter(values["ff.w3.weight"])
        options = SaveOptions(process_group=torch.distributed.group.WORLD)
        fsdp_optim.save(f"{folder}/two", gates, options=options)
        fused = TrainedFused("FSDP2", adam, 0)
        load = LoadOptions(views=VIEWS, cast=True)
        fsdp_optim.load(f"{folder}/two", fused.model, strict=False, options=load)
        now = fsdp_optim.gather_full_model_state_dict(fused.model, None, options=CALL)
        wanted = Oracle(adam, 0, Unfused).values() | {name: values[name] for name in ("ff.w1.weight", "ff.w3.weight")}
        check_same("weights", dict(sorted(now.items())), dict(sorted(wanted.items())))


class TestRefusals(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def test_views_that_do_not_fit(self) -> None:
        run_on_ranks(views_that_do_not_fit, 2, self.folder)

    def test_ranks_with_other_views(self) -> None:
        run_on_ranks(other_views_on_other_ranks, 2, self.folder)

    def test_state_of_another_shape(self) -> None:
        run_on_ranks(state_of_another_shape, 2, self.folder)

    def test_parts_with_other_steps(self) -> None:
        run_on_ranks(saved_in_parts, 2, f"{self.folder}/step", other_step)
        words = "step is", "for attention.wq.weight", "for attention.wk.weight", "parts of attention.wqkv.weight"
        run_on_ranks(refused_load, 2, f"{self.folder}/step", words)

    def test_a_part_without_state(self) -> None:
        run_on_ranks(saved_in_parts, 2, f"{self.folder}/step", no_state)
        words = "attention.wq.weight has state and attention.wk.weight has none", "parts of attention.wqkv.weight"
        run_on_ranks(refused_load, 2, f"{self.folder}/step", words)

    def test_parts_in_two_groups(self) -> None:
        run_on_ranks(saved_in_parts, 2, f"{self.folder}/step", in_two_groups)
        words = "attention.wq.weight is in group 0", "attention.wv.weight is in group 1", "param_groups='live'"
        run_on_ranks(refused_load, 2, f"{self.folder}/step", words)
        run_on_ranks(loaded_live_groups, 2, f"{self.folder}/step")

    def test_a_tied_parameter(self) -> None:
        run_on_ranks(tied, 2, self.folder)


class TestCalls(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def test_other_calls(self) -> None:
        run_on_ranks(through_other_calls, 2, self.folder)

    def test_a_manager(self) -> None:
        run_on_ranks(managed, 2, self.folder)

    def test_rows_that_lie_apart(self) -> None:
        for wrapper in ("FSDP2", "FSDP1 flat", "plain"):
            run_on_ranks(large, 2, self.folder, wrapper)
        run_on_ranks(large, 1, f"{self.folder}/one", "plain")

    def test_parts_of_two_dtypes(self) -> None:
        run_on_ranks(of_two_dtypes, 2, self.folder)

    def test_parts_that_a_checkpoint_lacks(self) -> None:
        run_on_ranks(some_missing, 2, self.folder)


class Muon(torch.optim.SGD):
    """Named as an optimizer that steps a matrix as a whole."""


class TestWarning(unittest.TestCase):
    def test_an_optimizer_that_steps_a_matrix_as_a_whole(self) -> None:
        """The state is cut exactly, and one warning of the process says what that means."""
        model = nn.ParameterDict({"w": nn.Parameter(torch.ones(4, 3)), "other": nn.Parameter(torch.ones(3))})
        optim = Muon(model.parameters(), lr=0.1, momentum=0.9)
        model["w"].sum().backward()
        optim.step()
        with tempfile.TemporaryDirectory() as root, self.assertLogs("fsdp_optim", "WARNING") as logged:
            for step in (1, 2):
                fsdp_optim.save(f"{root}/{step}", model, optim, options=SaveOptions(views=[HALVES]))
            self.assertEqual(fsdp_optim.inspect(f"{root}/2").about["not_elementwise"], "Muon")
            sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            fsdp_optim.save(f"{root}/3", model, sgd, options=SaveOptions(views=[HALVES]))
            self.assertNotIn("not_elementwise", fsdp_optim.inspect(f"{root}/3").about)
            fsdp_optim.save(f"{root}/4", model, optim)
            self.assertNotIn("not_elementwise", fsdp_optim.inspect(f"{root}/4").about)
        said = [line for line in logged.output if "steps the fused parameter as one matrix" in line]
        self.assertEqual(len(said), 1, logged.output)
        self.assertIn("a.w: Muon", said[0])
