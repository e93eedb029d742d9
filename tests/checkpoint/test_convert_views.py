"""Checkpoints converted and compared through Views: fused to canonical, canonical to fused, in every format, bit for bit."""

from __future__ import annotations

import functools
import tempfile
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from kit import commands
from kit.cases import expand, some
from kit.compare import check_same, refused_on_ranks, sorted_state
from kit.forked import LIBRARY, run
from kit.fused import VIEWS, Fused, Unfused, fused_from
from kit.trained import STEPS
from kit.wrapping import cpu
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import fsdp_optim
from fsdp_optim import ConvertOptions, LoadOptions, SaveOptions, View
from fsdp_optim.errors import FsdpOptimError
from fsdp_optim.plugins import TorchFiles
from fsdp_optim.registry import format_names
from fsdp_optim.testing import run_on_ranks

INVERSE = [view.inverse for view in VIEWS]
NAMES = [name for name, _ in Unfused().named_parameters()]
FUSED_NAMES = [name for name, _ in Fused().named_parameters()]
LEAST = 16 << 20  # of bucket_nbytes


def groups_of(names: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups, with other hyperparameters: experts, and all others."""
    experts = [param for name, param in names.items() if name.startswith("experts")]
    others = [param for name, param in names.items() if not name.startswith("experts")]
    return [{"params": others, "lr": 0.5}, {"params": experts, "lr": 0.25}]


def pair() -> tuple[tuple[nn.Module, torch.optim.Optimizer], tuple[nn.Module, torch.optim.Optimizer]]:
    """An unfused run, and the same by hand in the fused model: weights, moments, groups."""
    unfused, fused = Unfused(), Fused()
    torch.manual_seed(0)
    for param in unfused.parameters():
        nn.init.normal_(param)
    optim = torch.optim.AdamW(groups_of(dict(unfused.named_parameters())))
    for _ in range(STEPS):
        for param in unfused.parameters():
            param.grad = torch.randn_like(param)
        optim.step()
    fused_optim = torch.optim.AdamW(groups_of(dict(fused.named_parameters())))
    weights = fused_from({name: param.detach() for name, param in unfused.named_parameters()})
    moments = {
        key: fused_from({name: optim.state[param][key] for name, param in unfused.named_parameters()})
        for key in ("exp_avg", "exp_avg_sq")
    }
    for name, param in fused.named_parameters():
        param.data = weights[name].clone().reshape(param.shape).contiguous()
        values = {key: moments[key][name].reshape(param.shape).clone().contiguous() for key in moments}
        fused_optim.state[param] = {"step": torch.tensor(float(STEPS)), **values}
    return (unfused, optim), (fused, fused_optim)


def loaded(
    folder: str, *, is_fused: bool, views: Any = ()
) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[Any]]:
    """The weights and the optimizer of a checkpoint, by its names, loaded without Views."""
    model = Fused() if is_fused else Unfused()
    optim = torch.optim.AdamW(groups_of(dict(model.named_parameters())))
    fsdp_optim.load(folder, model, optim, options=LoadOptions(progress=False, views=views))
    names = {param: name for name, param in model.named_parameters()}
    state = {names[param]: values for param, values in optim.state.items()}
    groups = [[group["lr"], [names[param] for param in group["params"]]] for group in optim.param_groups]
    return {name: param.detach() for name, param in model.named_parameters()}, state, groups


def check(folder: str, run_of: tuple[nn.Module, torch.optim.Optimizer], *, is_fused: bool, views: Any = ()) -> None:
    model, optim = run_of
    names = {param: name for name, param in model.named_parameters()}
    expected = {names[param]: values for param, values in optim.state.items()}
    groups = [[group["lr"], [names[param] for param in group["params"]]] for group in optim.param_groups]
    weights, state, got = loaded(folder, is_fused=is_fused, views=views)
    check_same("weights", weights, {name: param.detach() for name, param in model.named_parameters()})
    check_same("state", sorted_state(state), sorted_state(expected))
    check_same("groups", got, groups)


class TestConvert(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = folder.name

    def saved(self, name: str, run_of: tuple[nn.Module, torch.optim.Optimizer], **options: Any) -> str:
        fsdp_optim.save(f"{self.root}/{name}", *run_of, options=SaveOptions(progress=False, **options))
        return f"{self.root}/{name}"

    @expand(*some([name for name in format_names() if not name.startswith("fairscale")], every=2))
    def test_every_format_either_way(self, format: str) -> None:
        """To canonical names and back to fused ones; files that call parameters by id get names. fairscale's have one group."""
        unfused, fused = pair()
        by_id = [name for group in unfused[1].param_groups for name in names_of(unfused[0], group)]
        source, there, back = self.saved("fused", fused), f"{self.root}/there", f"{self.root}/back"
        fsdp_optim.convert(source, there, format=format, options=ConvertOptions(views=VIEWS))
        check(there, unfused, is_fused=False)
        options = ConvertOptions(views=INVERSE, param_names=by_id, bucket_nbytes=LEAST)
        fsdp_optim.convert(there, back, options=options)
        check(back, fused, is_fused=True)
        result = fsdp_optim.diff(source, back)
        self.assertTrue(result.equal, str(result))
        again = f"{self.root}/again"
        fsdp_optim.convert(self.saved("unfused", unfused), again, format=format, options=ConvertOptions(views=INVERSE))
        check(again, fused, is_fused=True)

    def test_files_by_id_of_a_fused_run(self) -> None:
        unfused, fused = pair()
        source, by_id, apart = self.saved("fused", fused), f"{self.root}/by-id", f"{self.root}/apart"
        fsdp_optim.convert(source, by_id, format=TorchFiles(one_file=True, key_by="id"))
        names = [name for group in fused[1].param_groups for name in names_of(fused[0], group)]
        fsdp_optim.convert(by_id, apart, options=ConvertOptions(views=VIEWS, param_names=names))
        check(apart, unfused, is_fused=False)

    def test_a_flattened_dict_of_torch_keeps_its_groups(self) -> None:
        """It lists no groups, so a fused parameter must be found in that of its parts, and parts in that of the fused one."""
        unfused, fused = pair()
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        for name, run_of, other, views in (("fused", fused, unfused, VIEWS), ("apart", unfused, fused, INVERSE)):
            weights, state = get_state_dict(*run_of, options=options)
            torch_dcp.save({"model": weights, "optim": state}, checkpoint_id=f"{self.root}/{name}", no_dist=True)
            fsdp_optim.convert(f"{self.root}/{name}", f"{self.root}/{name}-to", options=ConvertOptions(views=views))
            check(f"{self.root}/{name}-to", other, is_fused=other is fused)
        check(f"{self.root}/fused", unfused, is_fused=False, views=VIEWS)

    def test_the_fact_is_kept(self) -> None:
        """As a save records it: added when a fused checkpoint is cut, and gone when its parts are joined."""
        _, fused = pair()
        source, there, back = self.saved("fused", fused), f"{self.root}/there", f"{self.root}/back"
        fsdp_optim.convert(source, there, options=ConvertOptions(views=VIEWS))
        lines = fsdp_optim.inspect(there).about["views"].splitlines()
        self.assertEqual([View.from_text(line) for line in lines], VIEWS)
        fsdp_optim.convert(there, back, options=ConvertOptions(views=INVERSE[1:]))
        self.assertEqual(fsdp_optim.inspect(back).about["views"].splitlines(), lines[:1])

    def test_fingerprints_are_left_out_where_values_change(self) -> None:
        _, fused = pair()
        source, there = self.saved("fused", fused, fingerprint=True), f"{self.root}/there"
        with self.assertLogs("fsdp_optim", "WARNING") as logged:
            fsdp_optim.convert(source, there, options=ConvertOptions(views=VIEWS[:1]))
        self.assertIn(
            "left out of the new checkpoint: the fingerprint, which is of the values that Views", logged.output[0]
        )
        self.assertTrue(
            fsdp_optim.diff(source, there, views=VIEWS[:1]).equal, "values that no View changes have theirs"
        )
        fsdp_optim.verify(there)

    def test_part_of_a_checkpoint(self) -> None:
        """Weights alone; an optimizer alone, whose parameters have recorded shapes."""
        unfused, fused = pair()
        for name, options in (("weights", {}), ("optim", {"weights": "none"})):
            halves = fused if name == "optim" else fused[:1]
            fsdp_optim.save(f"{self.root}/{name}", *halves, **options)
            fsdp_optim.convert(f"{self.root}/{name}", f"{self.root}/{name}-apart", options=ConvertOptions(views=VIEWS))
            fsdp_optim.convert(
                f"{self.root}/{name}-apart", f"{self.root}/{name}-back", options=ConvertOptions(views=INVERSE)
            )
            self.assertTrue(fsdp_optim.diff(f"{self.root}/{name}", f"{self.root}/{name}-back").equal)
        model, optim = Unfused(), None
        optim = torch.optim.AdamW(groups_of(dict(model.named_parameters())))
        fsdp_optim.load(f"{self.root}/weights-apart", model)
        fsdp_optim.load(f"{self.root}/optim-apart", model, optim, weights="none")
        expected = [unfused[1].state[param]["exp_avg"] for param in unfused[0].parameters()]
        check_same("moments", [optim.state[param]["exp_avg"] for param in model.parameters()], expected)

    def test_buffers(self) -> None:
        """A buffer is seen as a parameter is; so are the weights of a save of trainable ones."""
        model = Two(ab=(4, 3), frozen=(4, 3))
        model.register_buffer("counts", torch.arange(6.0))
        model.frozen.requires_grad_(False)
        fsdp_optim.save(f"{self.root}/from", model, weights="trainable")
        views = [AB, View("counts", "(a + b)", {"m": "a", "n": "b"})]
        fsdp_optim.convert(f"{self.root}/from", f"{self.root}/to", options=ConvertOptions(views=views))
        parts = Two(a=(2, 3), b=(2, 3))
        for name in "mn":
            parts.register_buffer(name, torch.zeros(3))
        fsdp_optim.load(f"{self.root}/to", parts, weights="trainable")
        check_same("buffers", torch.cat([parts.m, parts.n]), model.counts)
        inverse = [view.inverse for view in views]
        fsdp_optim.convert(f"{self.root}/to", f"{self.root}/back", options=ConvertOptions(views=inverse))
        fsdp_optim.load(f"{self.root}/back", model, weights="trainable")
        self.assertTrue(fsdp_optim.diff(f"{self.root}/from", f"{self.root}/back").equal)

    def test_several_models(self) -> None:
        """Names begin with that of the model."""
        unfused, fused = pair()
        fsdp_optim.save(f"{self.root}/two", {"m": fused[0], "other": nn.Linear(2, 2)}, {"m": fused[1]})
        views = [
            View(f"m.{v.name}" if "*" not in v.name else "m.*.oss", v.axes, parts_under_m(v), **dict(v.sizes))
            for v in VIEWS
        ]
        fsdp_optim.convert(f"{self.root}/two", f"{self.root}/apart", options=ConvertOptions(views=views))
        check(f"{self.root}/apart/m", unfused, is_fused=False)
        inverse = [view.inverse for view in views]
        fsdp_optim.convert(f"{self.root}/apart", f"{self.root}/back", options=ConvertOptions(views=inverse))
        self.assertTrue(fsdp_optim.diff(f"{self.root}/two", f"{self.root}/back").equal)


def parts_under_m(view: View) -> dict[str, str]:
    return {f"m.{part}": axes for part, axes in view.parts}


def names_of(model: nn.Module, group: Mapping[str, Any]) -> list[str]:
    names = {param: name for name, param in model.named_parameters()}
    return [names[param] for param in group["params"]]


class TestDiff(unittest.TestCase):
    def test_a_fused_and_an_unfused_checkpoint(self) -> None:
        unfused, fused = pair()
        with tempfile.TemporaryDirectory() as root:
            fsdp_optim.save(f"{root}/fused", *fused)
            fsdp_optim.save(f"{root}/apart", *unfused)
            self.assertFalse(fsdp_optim.diff(f"{root}/fused", f"{root}/apart").equal)
            result = fsdp_optim.diff(f"{root}/fused", f"{root}/apart", views=VIEWS)
            self.assertTrue(result.equal, str(result))
            self.assertEqual(sorted(v.name for v in result.values if ":" not in v.name), sorted(NAMES))
            result = fsdp_optim.diff(f"{root}/fused", f"{root}/apart", views=INVERSE)
            self.assertTrue(result.equal, str(result))
            self.assertEqual(sorted(v.name for v in result.values if ":" not in v.name), sorted(FUSED_NAMES))
            with torch.no_grad():
                unfused[0].get_parameter("attention.wk.weight")[1, 2] += 1
            fsdp_optim.save(f"{root}/other", *unfused)
            result = fsdp_optim.diff(f"{root}/fused", f"{root}/other", views=VIEWS)
            (value,) = result.differing
            self.assertEqual((value.name, value.num_differing), ("attention.wk.weight", 1))

    def test_several_processes_need_no_ranks(self) -> None:
        """Views that change neither checkpoint are refused, and a wrong list is."""
        _, fused = pair()
        with tempfile.TemporaryDirectory() as root:
            fsdp_optim.save(f"{root}/fused", *fused)
            for views, words in (
                ([*VIEWS, View("zz", "r", {"yy": "r"})], "View('zz', 'r', {'yy': 'r'}): no parameter of"),
                ([*VIEWS, INVERSE[0]], ".inverse: no parameter of"),
                (["ff"], "views must be a list of Views"),
            ):
                with self.assertRaises(FsdpOptimError) as refused:
                    fsdp_optim.diff(f"{root}/fused", f"{root}/fused", views=views)
                self.assertIn(words, str(refused.exception))


# ------------------------------------------------------------------------------------------------ ranks


def converted_on_ranks(folder: str) -> None:
    with cpu():
        fsdp_optim.convert(f"{folder}/fused", f"{folder}/there", options=ConvertOptions(views=VIEWS))
        fsdp_optim.convert(f"{folder}/there", f"{folder}/back", format="dcp", options=ConvertOptions(views=INVERSE))
        refused = functools.partial(fsdp_optim.convert, f"{folder}/fused", f"{folder}/no")
        other = ConvertOptions(views=[*VIEWS, View("zz", "r", {"yy": "r"})])
        refused_on_ranks("nothing", lambda: refused(options=other), "StateError", "View('zz'", "no parameter of")
        refused_on_ranks(
            "kind",
            lambda: refused(options=ConvertOptions(views=["x"])),
            "StateError",
            "views must be a list",  # type: ignore[list-item]
        )
        average = functools.partial(fsdp_optim.average, [f"{folder}/fused"] * 2, f"{folder}/no")
        refused_on_ranks(
            "average", lambda: average(options=ConvertOptions(views=VIEWS)), "StateError", "not of average"
        )
        assert not Path(f"{folder}/no").exists()


class TestRanks(unittest.TestCase):
    @expand(*some([1, 2, 3], every=2, first=1))
    def test_ranks_share_the_work(self, num: int) -> None:
        unfused, fused = pair()
        with tempfile.TemporaryDirectory() as folder:
            fsdp_optim.save(f"{folder}/fused", *fused)
            run_on_ranks(converted_on_ranks, num, folder)
            check(f"{folder}/there", unfused, is_fused=False)
            check(f"{folder}/back", fused, is_fused=True)


# ------------------------------------------------------------------------------------------------ refusals


class Two(nn.Module):
    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.ones(shape)))


AB = View("ab", "(a + b) c", {"a": "a c", "b": "b c"})


class TestRefused(unittest.TestCase):
    def refuses(
        self, model: nn.Module, optim: torch.optim.Optimizer | None, *words: str, views: Any = (AB.inverse,)
    ) -> None:
        with tempfile.TemporaryDirectory() as root:
            fsdp_optim.save(f"{root}/from", model, optim)
            with self.assertRaises(FsdpOptimError) as refused:
                fsdp_optim.convert(f"{root}/from", f"{root}/to", options=ConvertOptions(views=list(views)))
            for word in words:
                self.assertIn(word, str(refused.exception))
            self.assertFalse(Path(f"{root}/to").exists())

    def test_a_part_that_is_missing(self) -> None:
        self.refuses(Two(a=(2, 3)), None, "ab: ", "makes it of parts of which b is not there, beside a")

    def test_parts_of_other_shapes(self) -> None:
        self.refuses(Two(a=(2, 3), b=(2, 4)), None, "b: a part of ab", "dimension 1 of shape [2, 4] is 4", "c=3")

    def test_parts_of_other_dtypes(self) -> None:
        model = Two(a=(2, 3), b=(2, 3))
        model.b.data = model.b.data.to(torch.bfloat16)
        self.refuses(model, None, "ab: its parts a and b have different dtypes, float32 and bfloat16")

    def test_a_name_that_is_taken(self) -> None:
        self.refuses(Two(a=(2, 3), b=(2, 3), ab=(4, 3)), None, "ab: is in the checkpoint, beside its part a")

    def test_parts_in_two_groups(self) -> None:
        model = Two(a=(2, 3), b=(2, 3))
        optim = torch.optim.SGD([{"params": [model.a]}, {"params": [model.b], "lr": 0.5}], lr=0.1)
        self.refuses(model, optim, "its part a is in param group 0 and b in param group 1")

    def test_a_part_that_the_optimizer_does_not_have(self) -> None:
        model = Two(a=(2, 3), b=(2, 3))
        self.refuses(model, torch.optim.SGD([model.a], lr=0.1), "the optimizer has its part a and not b")

    def test_steps_that_differ(self) -> None:
        model = Two(a=(2, 3), b=(2, 3))
        optim = stepped(torch.optim.Adam(model.parameters()), model.a, model.b)
        self.refuses(stepped(optim, model.b) and model, optim, "its parts a and b have different step, 1.0 and 2.0")

    def test_a_part_without_state(self) -> None:
        model = Two(a=(2, 3), b=(2, 3))
        optim = stepped(torch.optim.Adam(model.parameters()), model.a)
        self.refuses(model, optim, "its parts a and b have different state", "none")

    def test_values_of_another_shape(self) -> None:
        model = Two(a=(2, 3), b=(2, 3))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        for param in (model.a, model.b):
            optim.state[param]["row"] = torch.ones(2)
        self.refuses(model, optim, "a: row is a ", "tensor of shape [2], not of the shape [2, 3]")
        fused = Two(ab=(4, 3))
        of_fused = torch.optim.SGD(fused.parameters(), lr=0.1)
        of_fused.state[fused.ab]["row"] = torch.ones(4)
        self.refuses(fused, of_fused, "ab: row is a ", "cannot be cut into its parts (a, b)", views=(AB,))

    def test_a_tied_part(self) -> None:
        model = Two(a=(2, 3), b=(2, 3))
        model.other = model.a
        self.refuses(model, None, "are one tied parameter", "cannot be joined")

    def test_two_parameters_of_one_part(self) -> None:
        twice = View("xx", "(a + b) c", {"a": "a c", "b": "b c"})
        self.refuses(Two(a=(2, 3), b=(2, 3)), None, "is a part of two parameters", views=(AB.inverse, twice.inverse))


def stepped(optim: torch.optim.Optimizer, *params: nn.Parameter) -> torch.optim.Optimizer:
    optim.zero_grad()
    for param in params:
        param.grad = torch.ones_like(param)
    optim.step()
    return optim


# ------------------------------------------------------------------------------------------------ the command line


def called(*words: str) -> tuple[int, str]:
    code, out, err = commands.called(*words)
    return code, out + err


class TestCommands(unittest.TestCase):
    def test_views_in_a_file(self) -> None:
        """As inspect shows them, one a line; comments and empty lines are none; a line that is no View is named."""
        unfused, fused = pair()
        with tempfile.TemporaryDirectory() as root:
            fsdp_optim.save(f"{root}/fused", *fused)
            Path(f"{root}/views").write_text("# of the run\n\n" + "\n".join(map(repr, VIEWS)))
            Path(f"{root}/inverse").write_text("\n".join(map(repr, INVERSE)))
            Path(f"{root}/wrong").write_text(f"{VIEWS[0]!r}\nprint(1)\n")
            self.assertEqual(called("convert", f"{root}/fused", f"{root}/there", "--views", f"{root}/views")[0], 0)
            check(f"{root}/there", unfused, is_fused=False)
            self.assertEqual(called("convert", f"{root}/there", f"{root}/back", "--views", f"{root}/inverse")[0], 0)
            check(f"{root}/back", fused, is_fused=True)
            self.assertEqual(called("diff", f"{root}/fused", f"{root}/there", "--views", f"{root}/views")[0], 0)
            self.assertEqual(called("diff", f"{root}/fused", f"{root}/there")[0], 1)
            for command in ("convert", "diff"):
                code, text = called(command, f"{root}/fused", f"{root}/there", "--views", f"{root}/wrong")
                self.assertNotIn(code, (0, 1) if command == "diff" else (0,))
                self.assertIn("line 2 of the file of views", text)


# ------------------------------------------------------------------------------------------------ memory

MEMORY = """
import torch
from kit.peaks import Peak
import fsdp_optim
from fsdp_optim import ConvertOptions, View
views = [View("{name}", "{axes}", {parts!r}, **{sizes!r})]
small, big = {{"w": torch.zeros({small})}}, {{"w": torch.arange({numel}, dtype=torch.float32).view({big})}}
root, quiet = {root!r}, dict(bucket_nbytes={memory}, durable=False, progress=False)
for name, tensors in (("small", small), ("big", big)):
    model = torch.nn.ParameterDict(tensors)
    fsdp_optim.save(root + "/" + name, model)
del model, tensors, big
def both(name):
    fsdp_optim.convert(f"{{root}}/{{name}}", f"{{root}}/{{name}}-apart", options=ConvertOptions(views=views, **quiet))
    back = [view.inverse for view in views]
    fsdp_optim.convert(f"{{root}}/{{name}}-apart", f"{{root}}/{{name}}-back", options=ConvertOptions(views=back, **quiet))
both("small")
torch.set_num_threads(4)
with Peak() as peak:
    both("big")
assert fsdp_optim.diff(root + "/big", root + "/big-back", progress=False).equal
print(peak.mib)
"""
SLACK = 8  # MiB: the interpreter's, and those of threads


class TestMemory(unittest.TestCase):
    @expand(
        *some(
            [
                (
                    "e c (f (a + b))",
                    {"{e}.one": "(f a) c", "{e}.two": "(f b) c"},
                    {"a": 1, "b": 1},
                    (2, 2, 4),
                    (20, 512, 2048),
                ),
                ("(f (a + b)) c", {"one": "(f a) c", "two": "(f b) c"}, {"a": 1, "b": 1}, (4, 2), (10240, 2048)),
                ("i o", {"linear": "o i"}, {}, (4, 2), (10240, 2048)),
            ],
            every=2,
        )
    )
    def test_a_stack_much_larger_than_the_bucket(
        self, axes: str, parts: dict[str, str], sizes: dict[str, int], small: tuple[int, ...], big: tuple[int, ...]
    ) -> None:
        """80 MiB in 16 MiB, in a process that has converted something already, so that no import counts."""
        with tempfile.TemporaryDirectory() as root:
            numel = torch.Size(big).numel()
            given = {"name": "w", "axes": axes, "parts": parts, "sizes": sizes, "small": small, "big": big}
            done = run(MEMORY.format(root=root, memory=LEAST, numel=numel, **given), preload=LIBRARY)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertLess(float(done.stdout), LEAST / 2**20 + SLACK)
