"""convert(format="deepspeed_universal"): universal checkpoints, from which DeepSpeed's own engine resumes at any world size."""

from __future__ import annotations

import json
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from kit.compare import check_same
from kit.counted_kill import killed_before
from kit.deepspeed_engine import one_group, run_engines, why_not
from kit.folders import SharedFolder
from kit.forked import LIBRARY, run
from kit.zero_checkpoints import BUFFERS, state_of, unpacked
from kit.zero_runs import FROZEN, STEPS, TIED, Leaf, Model, optimizer
from parameterized import parameterized
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim import CheckpointError, StateError
from fsdp_optim.foreign.deepspeed.universal_state import UniversalParam, _alike
from fsdp_optim.plugins import DeepSpeedUniversal
from fsdp_optim.testing import run_on_ranks

QUIET = fsdp_optim.ConvertOptions(durable=False, progress=False)
SAVING = fsdp_optim.SaveOptions(durable=False, progress=False)
FIRST, MIDDLE, LAST = "emb.weight", "body.1.gain", "body.3.bias"
BF16 = {"bf16": {"enabled": True}}


def trained(
    steps: int = STEPS, *, groups: int = 2, dtype: torch.dtype = torch.float32, has_unused: bool = False
) -> Any:
    """A model and its optimizer after some steps of torch alone."""
    model = Model()
    model.unused = Leaf(weight=(3, 2)) if has_unused else None
    model.to(dtype)
    optim = optimizer(model) if groups == 2 else one_group(model)
    step_on(model, optim, range(steps))
    return model, optim


def step_on(model: nn.Module, optim: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optim.zero_grad()
        model(2.0**-step).backward()
        optim.step()


def expectation(model: nn.Module, optim: torch.optim.Optimizer, *, trains: bool = True) -> dict[str, Any]:
    """What the engine must have, in the words of torch alone: this model itself, and after two more steps."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    expected: dict[str, Any] = {
        "weights": {name: param.detach().clone() for name, param in params.items()},
        "state": {
            name: {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in (optim.state.get(param) or no_state(param)).items()
            }
            for name, param in params.items()
        },
        "groups": [{key: group[key] for key in ("lr", "betas", "weight_decay")} for group in optim.param_groups],
    }
    if trains:
        step_on(model, optim, range(STEPS, STEPS + 2))
        expected["after"] = {name: param.detach().clone() for name, param in params.items()}
    return expected


def no_state(param: Tensor) -> dict[str, Tensor]:
    return {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}


def with_masters(path: Path) -> dict[str, Any]:
    """A torch file of a model in bf16, whose optimizer has fp32 weights in its state. Returns the expectation."""
    model, optim = trained()
    names = {param: name for name, param in model.named_parameters()}
    full = optim.state_dict()
    order = [param for group in optim.param_groups for param in group["params"]]
    for number, values in full["state"].items():
        values["master_param"] = order[number].detach().clone()
    for group in full["param_groups"]:
        group["param_names"] = [names[order[number]] for number in group["params"]]
    weights = {
        name: value.bfloat16() if value.is_floating_point() else value for name, value in model.state_dict().items()
    }
    weights.update({alias: weights[fqn] for alias, fqn in TIED.items()})
    torch.save({"model": weights, "optimizer": full, "epoch": 4, "global_step": STEPS}, path)
    return expectation(model, optim)


class UniversalTest(SharedFolder):
    """One checkpoint of this library, converted once."""

    @classmethod
    def fill(cls) -> None:
        cls.model, cls.optim = trained()
        cls.state = {"epoch": 4, "rng": numpy.arange(3, dtype=numpy.int16), "nothing": None}
        of_ranks = {"own": fsdp_optim.per_rank({"seed": (1, 2)})}
        fsdp_optim.save(
            cls.root / "src", cls.model, cls.optim, step=STEPS, state={**cls.state, **of_ranks}, options=SAVING
        )
        with unittest.TestCase().assertLogs("fsdp_optim", "WARNING") as logged:
            fsdp_optim.convert(cls.root / "src", cls.root / "ds", format="deepspeed_universal", options=QUIET)
        cls.logged = logged.output

    def file(self, name: str) -> Any:
        return torch.load(self.root / "ds" / name, weights_only=True)

    def test_the_files(self) -> None:
        """Each value of each parameter, as `ds_to_universal` lays it out, against the live model."""
        params = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        folders = {path.name for path in (self.root / "ds" / "zero").iterdir() if path.is_dir()}
        self.assertEqual(folders, set(params))
        self.assertTrue({FIRST, MIDDLE, LAST} < folders and not folders & {FROZEN, *TIED, *BUFFERS})
        for fqn, param in params.items():
            files = sorted(path.name for path in (self.root / "ds" / "zero" / fqn).iterdir())
            self.assertEqual(files, ["exp_avg.pt", "exp_avg_sq.pt", "fp32.pt", "step.pt"])
            values = {"fp32": param.detach(), **self.optim.state[param]}
            self.assertTrue(torch.equal(self.file(f"zero/{fqn}/step.pt"), values.pop("step")))
            for name, value in values.items():
                check_same(f"{fqn} {name}", self.file(f"zero/{fqn}/{name}.pt"), {"cat_dim": 0, "param": value})

    def test_the_rest(self) -> None:
        common, model = self.file("zero/optimizer_state.pt"), self.file("mp_rank_00_model_states.pt")
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": [number]}
            for number, group in enumerate(self.optim.state_dict()["param_groups"])
        ]
        self.assertEqual(common, {"ds_version": "0.19.8", "param_groups": groups})
        names = {param: name for name, param in self.model.named_parameters()}
        listed = [[names[param] for param in group["params"]] for group in self.optim.param_groups]
        self.assertEqual([[*shapes] for shapes in model["param_shapes"]], listed)
        self.assertEqual(model["shared_params"], TIED)
        check_same("module", dict(sorted(model["module"].items())), dict(sorted(self.others().items())))
        self.assertEqual((model["global_steps"], model["epoch"]), (STEPS, 4))
        self.assertEqual((self.root / "ds" / "latest_universal").read_text(), ".")

    def others(self) -> dict[str, Tensor]:
        return {**BUFFERS, FROZEN: self.model.frozen.weight.detach()}

    def test_what_deepspeed_does_not_load_is_named(self) -> None:
        log = " ".join(self.logged)
        for word in ("3 tensors", FROZEN, *BUFFERS, "stage 3 of ZeRO cannot resume", "step"):
            self.assertIn(word, log)

    def test_the_way_back(self) -> None:
        """This library's reader finds all that the source has, to the bit."""
        self.assertTrue(fsdp_optim.diff(self.root / "src", self.root / "ds").equal)
        self.assertEqual(fsdp_optim.verify(self.root / "ds").format, "deepspeed")
        model = Model()
        optim = optimizer(model)
        result = fsdp_optim.load(self.root / "ds", model, optim)
        self.assertEqual((result.missing_keys, result.unexpected_keys, result.step), ((), (), STEPS))
        rng, known = result.state["rng"], {**self.state, "own": {"seed": (1, 2)}}
        self.assertTrue(numpy.array_equal(rng, known.pop("rng")) and rng.dtype == numpy.int16)
        check_same("state", {key: value for key, value in result.state.items() if key != "rng"}, known, in_order=False)
        check_same("optimizer", optim.state_dict(), self.optim.state_dict(), in_order=False)
        check_same("weights", model.state_dict(), self.model.state_dict())
        fsdp_optim.convert(self.root / "ds", self.root / "back", options=QUIET)
        self.assertTrue(fsdp_optim.diff(self.root / "src", self.root / "back").equal)

    def test_small_units_and_ranks_give_the_same_files(self) -> None:
        run_on_ranks(convert_on_ranks, 2, self.root)
        for path in (self.root / "ds").rglob("*.pt"):
            self.assertEqual(
                path.read_bytes(), (self.root / "by ranks" / path.relative_to(self.root / "ds")).read_bytes()
            )

    def test_a_new_one_takes_the_place(self) -> None:
        """With other parameters: nothing of the older one stays but files of the user."""
        fsdp_optim.convert(self.root / "src", self.root / "twice", format="deepspeed_universal", options=QUIET)
        (self.root / "twice" / "notes.txt").write_text("mine")
        model = nn.Linear(2, 3)
        optim = torch.optim.SGD(model.parameters(), momentum=0.5)
        model(torch.ones(2)).sum().backward()
        optim.step()
        fsdp_optim.save(self.root / "small", model, optim, options=SAVING)
        with self.assertRaisesRegex(CheckpointError, "overwrite"):
            fsdp_optim.convert(self.root / "small", self.root / "twice", format="deepspeed_universal", options=QUIET)
        fsdp_optim.convert(
            self.root / "small", self.root / "twice", format="deepspeed_universal", options=QUIET, overwrite=True
        )
        names = sorted(path.name for path in (self.root / "twice" / "zero").iterdir())
        self.assertEqual(names, ["bias", "optimizer_state.pt", "weight"])
        self.assertEqual((self.root / "twice" / "notes.txt").read_text(), "mine")
        momentum = torch.load(self.root / "twice" / "zero" / "weight" / "momentum_buffer.pt")["param"]
        self.assertTrue(torch.equal(momentum, optim.state[model.weight]["momentum_buffer"]))

    def test_through_a_url(self) -> None:
        """Into objects, whose manifest is put last, and back."""
        url = f"file://{self.root}/objects"
        fsdp_optim.convert(self.root / "src", url, format="deepspeed_universal", options=QUIET)
        self.assertTrue(fsdp_optim.diff(self.root / "src", url).equal)

    @parameterized.expand([(0,), (7,), (25,), (52,)])
    def test_a_kill_leaves_nothing_that_looks_like_a_checkpoint(self, number: int) -> None:
        """Before any file, folder or rename; the next conversion removes what is left."""
        target = self.root / f"killed {number}" / "to"
        code = f"import fsdp_optim\nfsdp_optim.convert({str(self.root / 'src')!r}, {str(target)!r}, format='deepspeed_universal')"
        done = run(killed_before(number, ("open", "mkdir", "rename"), code), preload=LIBRARY)
        self.assertEqual(done.returncode, -9, done.stderr)
        self.assertFalse(target.exists())
        fsdp_optim.convert(self.root / "src", target, format="deepspeed_universal", options=QUIET)
        self.assertEqual([path.name for path in target.parent.iterdir()], ["to"])
        self.assertTrue(fsdp_optim.diff(self.root / "src", target).equal)


def convert_on_ranks(root: Path) -> None:
    options = fsdp_optim.ConvertOptions(durable=True, progress=False, bucket_nbytes=16 << 20)
    fsdp_optim.convert(root / "src", root / "by ranks", format="deepspeed_universal", options=options)


class OtherSourcesTest(SharedFolder):
    """Parameters without state, weights in 16 bits, and checkpoints of DeepSpeed itself."""

    def convert(self, source: str, **options: Any) -> Path:
        target = self.root / f"{source} converted"
        fsdp_optim.convert(
            self.root / source, target, format=DeepSpeedUniversal(**options), options=QUIET, overwrite=True
        )
        return target

    def test_a_parameter_without_state(self) -> None:
        model, optim = trained(has_unused=True)
        fsdp_optim.save(self.root / "unused", model, optim, options=SAVING)
        with self.assertRaisesRegex(CheckpointError, r"unused.weight has no 'exp_avg'.*fill_missing=True"):
            self.convert("unused")
        self.assertFalse((self.root / "unused converted").exists())
        folder = self.convert("unused", fill_missing=True) / "zero" / "unused.weight"
        zeros = torch.load(folder / "exp_avg.pt", weights_only=True)["param"]
        self.assertTrue(torch.equal(zeros, torch.zeros(3, 2)) and torch.load(folder / "step.pt") == STEPS)
        other, live = trained(0, has_unused=True)
        fsdp_optim.load(self.root / "unused converted", other, live)
        check_same(
            "zeros",
            live.state[other.unused.weight],
            {"step": torch.tensor(3.0), **no_state(torch.zeros(3, 2))},
            in_order=False,
        )

    def test_shapes_of_all_kinds(self) -> None:
        """Parameters without dimensions, which DeepSpeed cannot cut, without elements, and with one; the step is unknown."""
        model = Odd(scale=torch.tensor(2.0), empty=torch.empty(0, 3), single=torch.ones(1), große=torch.ones(3, 2))
        optim = torch.optim.AdamW(model.parameters())
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optim.step()
        fsdp_optim.save(self.root / "odd", model, optim, options=SAVING)
        shapes = {
            name: torch.load(self.convert("odd") / "zero" / name / "exp_avg_sq.pt")["param"].shape
            for name, _ in model.named_parameters()
        }
        self.assertEqual(shapes, {"scale": (1,), "empty": (0, 3), "single": (1,), "große": (3, 2)})
        self.assertTrue(fsdp_optim.diff(self.root / "odd", self.root / "odd converted").equal)
        self.assertIsNone(fsdp_optim.load(self.root / "odd converted").step)
        self.assertEqual(torch.load(self.root / "odd converted" / "mp_rank_00_model_states.pt")["global_steps"], 1)

    def test_weights_in_16_bits_keep_their_dtype(self) -> None:
        """The engine copies them into fp32, which changes no element."""
        model, optim = trained(dtype=torch.bfloat16)
        fsdp_optim.save(self.root / "bf16", model, optim, options=SAVING)
        weight = torch.load(self.convert("bf16") / "zero" / LAST / "fp32.pt")["param"]
        self.assertTrue(weight.dtype is torch.bfloat16 and torch.equal(weight, model.body[3].bias))
        self.assertTrue(fsdp_optim.diff(self.root / "bf16", self.root / "bf16 converted").equal)

    def test_masters(self) -> None:
        """The fp32 weights are in the state, under a name that the caller gives; those in 16 bits are in the module."""
        expected = with_masters(self.root / "masters")
        folder = self.convert("masters", masters="master_param")
        module = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)["module"]
        for fqn, master in expected["weights"].items():
            self.assertTrue(torch.equal(torch.load(folder / "zero" / fqn / "fp32.pt")["param"], master))
            self.assertTrue(torch.equal(module[fqn], master.bfloat16()))
            self.assertFalse((folder / "zero" / fqn / "master_param.pt").exists())
        with self.assertRaisesRegex(CheckpointError, "no parameter has the value 'fp32'.*master_param"):
            self.convert("masters", masters="fp32")

    @parameterized.expand(["z1-w2-bf16", "z2-w4-fp16", "z3-w3-fp32", "z2-w3-aligned-universal"])
    def test_from_deepspeed(self, run: str) -> None:
        oracle = unpacked(self.root, run)
        target = self.convert(run)
        self.assertTrue(fsdp_optim.diff(self.root / run, target).equal)
        for fqn, values in state_of(oracle).items():
            for name, value in {**values, "fp32": oracle[fqn]}.items():
                file = torch.load(target / "zero" / fqn / f"{name}.pt", weights_only=True)
                self.assertTrue(torch.equal(file if name == "step" else file["param"], value), (fqn, name))
        model = torch.load(target / "mp_rank_00_model_states.pt", weights_only=True)
        self.assertEqual((model["global_steps"], model["epoch"], model["ds_version"]), (STEPS, 4, "0.19.8"))
        self.assertEqual(model["lr_scheduler"]["last_epoch"], STEPS)


class Odd(nn.Module):
    def __init__(self, **params: Tensor) -> None:
        super().__init__()
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value))


class RefusedTest(SharedFolder):
    """What DeepSpeed has no place for is named, with the fix, before anything is written."""

    def refused(self, words: str, model: nn.Module, optim: torch.optim.Optimizer | None, **values: Any) -> None:
        source, target = self.root / self.id(), self.root / f"{self.id()} converted"
        fsdp_optim.save(source, model, optim, options=SAVING, overwrite=True, **values)
        with self.assertRaisesRegex(CheckpointError, words):
            fsdp_optim.convert(source, target, format="deepspeed_universal", options=QUIET)
        self.assertFalse(target.exists())

    def stepped(self, model: nn.Module, kind: Any = torch.optim.Adam, **options: Any) -> torch.optim.Optimizer:
        optim: torch.optim.Optimizer = kind(model.parameters(), **options)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optim.step()
        return optim

    def test_refused(self) -> None:
        model = Odd(a=torch.ones(4, 2), b=torch.ones(3))
        self.refused("has no optimizer.*param groups.*safetensors", model, None)
        optim = self.stepped(model)
        model.a.grad = None
        optim.step()
        self.refused("b has made 2 steps and a 1: .*groups of their own", model, optim)
        wide = Odd(a=torch.ones(2, dtype=torch.float64))
        self.refused("a is float64.*float32", wide, self.stepped(wide))
        optim = self.stepped(model)
        optim.state[model.b]["fp32"] = torch.ones(3)
        self.refused("b: 'fp32' of its state .*masters='fp32'", model, optim)
        self.refused("'module'.*another name", model, self.stepped(model), state={"module": 1})
        self.refused('weights="all"', model, self.stepped(model), weights="none")

    @parameterized.expand([("ratio", 0.5), ("factors", torch.ones(4)), ("history", [1, 2])])
    def test_state_of_other_kinds(self, name: str, value: Any) -> None:
        model = Odd(a=torch.ones(4, 2))
        optim = self.stepped(model)
        optim.state[model.a][name] = value
        self.refused(f"a: '{name}' of its state is .*format=\"torch\"", model, optim)

    def test_options(self) -> None:
        for wrong in ({"masters": 3}, {"masters": ""}, {"fill_missing": "yes"}):
            with self.assertRaisesRegex((CheckpointError, StateError), next(iter(wrong))):
                DeepSpeedUniversal(**wrong)


@unittest.skipIf(why_not(), why_not())
class EngineTest(SharedFolder):
    """DeepSpeed 0.19 itself, on the CPU over gloo. The expectations are trainings by torch alone."""

    def add(
        self, name: str, expected: Mapping[str, Any], *runs: tuple[dict[str, Any], dict[str, Any]], **about: Any
    ) -> None:
        """Convert the checkpoint of this name, and add a case for each setting of ZeRO."""
        format = DeepSpeedUniversal(**about.pop("options", {}))
        fsdp_optim.convert(self.root / name, self.root / f"{name}.ds", format=format, options=QUIET)
        torch.save(expected, self.root / f"{name}.pt")
        for zero, settings in runs:
            case = {"groups": 2, "has_unused": False, **about, "zero": zero, "settings": settings}
            places = {"folder": str(self.root / f"{name}.ds"), "expected": str(self.root / f"{name}.pt")}
            self.cases.append(
                {"name": f"{name} {zero} {settings}", **case, **places, "by_latest": len(self.cases) % 2 == 0}
            )

    def save(self, name: str, model: nn.Module, optim: torch.optim.Optimizer) -> None:
        fsdp_optim.save(self.root / name, model, optim, step=STEPS, state={"epoch": 4}, options=SAVING)

    @classmethod
    def fill(cls) -> None:
        cls.cases: list[dict[str, Any]] = []

    def test_the_engine_resumes_at_two_world_sizes(self) -> None:
        model, optim = trained()
        self.save("fp32", model, optim)
        self.add("fp32", expectation(model, optim), ({"stage": 1}, {}), ({"stage": 2}, {}), ({"stage": 2}, BF16))
        model, optim = trained(groups=1)
        self.save("one", model, optim)
        self.add(
            "one", expectation(model, optim), ({"stage": 3}, {}), ({"stage": 3}, BF16), ({"stage": 1}, {}), groups=1
        )
        model, optim = trained(has_unused=True)
        self.save("unused", model, optim)
        self.add(
            "unused",
            expectation(model, optim, trains=False),
            ({"stage": 1}, {}),
            has_unused=True,
            options={"fill_missing": True},
        )
        model, optim = trained(dtype=torch.bfloat16)
        self.save("bf16", model, optim)
        self.add("bf16", expectation(model, optim, trains=False), ({"stage": 1}, BF16))
        expected = with_masters(self.root / "masters")
        self.add("masters", expected, ({"stage": 1}, BF16), ({"stage": 2}, BF16), options={"masters": "master_param"})
        unpacked(self.root, "z2-w3-aligned")
        self.add("z2-w3-aligned", expectation(*trained()), ({"stage": 1}, {}), ({"stage": 2}, BF16))
        (self.root / "cases.json").write_text(json.dumps(self.cases))
        run_engines(self.root / "cases.json", [2, 3])


class GroupTest(unittest.TestCase):
    def test_the_parameter_that_has_the_value(self) -> None:
        """Not another one, which has made steps, or the same one."""
        adam = {"exp_avg": "a", "exp_avg_sq": "b"}
        params = [UniversalParam("w", (2,), adam, step=3), UniversalParam("b", (2,), {"momentum_buffer": "c"}, step=3)]
        with self.assertRaisesRegex(
            CheckpointError, "w has no 'momentum_buffer' in its state, and b of the same group"
        ):
            _alike("here", params, fill_missing=False)
        without = [UniversalParam("w", (2,), adam), UniversalParam("b", (2,), adam, step=3)]
        with self.assertRaisesRegex(CheckpointError, "w has no 'step' in its state, and b of the same group"):
            _alike("here", without, fill_missing=False)


if __name__ == "__main__":
    unittest.main()
