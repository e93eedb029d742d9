"""diff: equal checkpoints of any format and world size are equal, and each fault in one of them is found and counted."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
from kit import dcp
from kit.conversions import MEMORY
from kit.folders import SharedFolder
from kit.optimizers import adam
from kit.peaks import Peak
from kit.rank_files import Buffered, save_fairscale
from kit.trained import Oracle, Trained
from kit.wrapping import cpu
from parameterized import parameterized
from safetensors.torch import save_file
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim import CheckpointError, StateError
from fsdp_optim.formats.own import OURS
from fsdp_optim.offline.values import named_values
from fsdp_optim.testing import run_on_ranks

QUICK = fsdp_optim.SaveOptions(durable=False, progress=False)
CONVERT = fsdp_optim.ConvertOptions(durable=False, progress=False)
PLAIN = ("ours-2", "ours-3", "converted-dcp", "converted-torch", "converted-file", "dcp", "fairscale")


def save_ours(place: str) -> None:
    with cpu():
        trained = Trained("FSDP2", adam, model=Buffered)
        fsdp_optim.save(place, trained.model, trained.optim, step=3, options=QUICK)


def save_dcp(place: str) -> None:
    with cpu():
        dcp.nested(Trained("FSDP2", adam, model=Buffered), Path(place))


def save_shards(place: str) -> None:
    with cpu():
        trained = Trained("fairscale flat", adam, model=Buffered)
        save_fairscale(place, "checkpoint_last", trained.model, trained.optim)


OF_TRAINERS = {
    "dcp": {f"state=:train_state.{name}" for name in ("tokens", "losses.0", "losses.1", "step")},
    "fairscale": {
        *("state=:cfg.optimizer.lr.0", "state=:extra_state.epoch", "state=:extra_state.rng"),
        *("state=:optimizer_history.0.num_updates", "state=:optimizer_history.0.optimizer_name"),
    },
}


class SameTrainingTest(SharedFolder):
    """One training, saved by several tools at several world sizes."""

    @classmethod
    def fill(cls) -> None:
        run_on_ranks(save_ours, 2, str(cls.root / "ours-2"))
        run_on_ranks(save_ours, 3, str(cls.root / "ours-3"))
        run_on_ranks(save_dcp, 2, str(cls.root / "dcp"))
        (cls.root / "fairscale").mkdir()
        run_on_ranks(save_shards, 2, str(cls.root / "fairscale"))
        for format, name in (("dcp", "dcp"), ("torch", "torch"), ("torch_file", "file")):
            fsdp_optim.convert(cls.root / "ours-2", cls.root / f"converted-{name}", format=format, options=CONVERT)

    @parameterized.expand([(name,) for name in PLAIN[1:]])
    def test_equal_in_both_orders(self, name: str) -> None:
        oracle = Oracle(adam, model=Buffered)
        for places in ((PLAIN[0], name), (name, PLAIN[0])):
            result = fsdp_optim.diff(self.root / places[0], self.root / places[1])
            names = {value.name for value in result.values}
            wanted = {f"{fqn}:{key}" for fqn, state in oracle.by_name().items() for key in state}
            wanted |= {fqn for fqn, value in oracle.model.state_dict().items() if isinstance(value, Tensor)}
            self.assertEqual(names, wanted)
            of_trainer = OF_TRAINERS.get(name, set())  # which the other tools did not save
            self.assertEqual((result.shapes, {*result.only_in_a, *result.only_in_b}), ((), of_trainer))
            differing = [value for value in result.differing if value.num_differing]
            self.assertEqual(differing, [])
            self.assertEqual(result.hyperparameters, ())
            if name not in ("fairscale", "dcp"):  # steps are numbers of another type; the trainer has values of its own
                self.assertTrue(result.equal, result)

    def test_norms_are_those_of_torch(self) -> None:
        oracle = Oracle(adam, model=Buffered)
        result = fsdp_optim.diff(self.root / "dcp", self.root / "ours-3")
        weights = oracle.model.state_dict()
        for value in result.values:
            fqn, _, key = value.name.rpartition(":") if ":" in value.name else (value.name, "", "")
            elements = oracle.by_name()[fqn][key] if key else weights[fqn]
            wanted = math.sqrt(math.fsum(x * x for x in elements.double().flatten().tolist()))
            self.assertAlmostEqual(value.norm, wanted, delta=1e-12 * wanted)


class Two:
    """A model and an optimizer in one process, whose second copy gets a fault."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model: Any = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 70_001))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        for param in self.model.parameters():
            param.grad = torch.randn_like(param)
        self.optim.step()

    def save(self, place: Path, step: int | None = 1) -> None:
        fsdp_optim.save(place, self.model, self.optim, step=step, options=QUICK)


def flipped(two: Two) -> None:
    two.model[2].weight.data.view(torch.int32)[65_536, 3] ^= 1 << 20


def exchanged(two: Two) -> None:
    data = two.model[0].weight.data
    data[0, 1], data[4, 6] = data[4, 6].clone(), data[0, 1].clone()


def not_a_number(two: Two) -> None:
    two.optim.state[two.model[2].bias]["exp_avg"][70_000] = math.nan


def infinite(two: Two) -> None:
    two.model[0].bias.data[1:3] = torch.tensor([math.inf, -math.inf])


def negative_zero(two: Two) -> None:
    two.model[1].running_mean[2] = -0.0


def counted(two: Two) -> None:
    two.model[1].num_batches_tracked += 2**60 + 1


def stepped(two: Two) -> None:
    two.optim.state[two.model[0].weight]["step"] += 1


FAULTS: Mapping[str, tuple[Callable[[Two], None], str, int]] = {
    "a flipped bit": (flipped, "2.weight", 1),
    "an exchanged pair": (exchanged, "0.weight", 2),
    "a NaN": (not_a_number, "2.bias:exp_avg", 1),
    "infinities": (infinite, "0.bias", 2),
    "a negative zero": (negative_zero, "1.running_mean", 1),
    "a large integer": (counted, "1.num_batches_tracked", 1),
    "a step": (stepped, "0.weight:step", 1),
}


def tensor_of(two: Two, name: str) -> Tensor:
    fqn, _, key = name.partition(":")
    named = dict(two.model.named_parameters())
    return two.optim.state[named[fqn]][key] if key else two.model.state_dict()[fqn]


def figures(a: Tensor, b: Tensor) -> tuple[int, float, float]:
    """The number of differing elements, the largest difference and its norm, one element after the other."""
    num, largest, squares = 0, 0.0, 0.0
    for x, y in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True):
        if numpy.array(x).tobytes() != numpy.array(y).tobytes():
            apart = abs(x - y) if math.isfinite(x) and math.isfinite(y) else math.inf
            num, largest, squares = num + 1, max(largest, apart), squares + float(apart) ** 2
    return num, largest, math.sqrt(squares)


class FaultsTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        Two().save(cls.root / "a")
        for name, (fault, _, _) in FAULTS.items():
            two = Two()
            fault(two)
            two.save(cls.root / name)

    @parameterized.expand([(name, format) for name in FAULTS for format in ("safetensors", "dcp", "torch")])
    def test_one_value_differs(self, fault: str, format: str) -> None:
        change, name, number = FAULTS[fault]
        place = self.own_folder() / "b"
        fsdp_optim.convert(self.root / fault, place, format=format, options=CONVERT)
        result = fsdp_optim.diff(self.root / "a", place, bucket_nbytes=MEMORY)
        self.assertFalse(result.equal)
        (value,) = result.differing
        changed = Two()
        change(changed)
        a, b = tensor_of(Two(), name), tensor_of(changed, name)
        num, largest, norm = figures(a, b)
        self.assertEqual((value.name, value.num_differing, num), (name, number, number))
        self.assertEqual(value.max_abs, largest)
        self.assertEqual(value.norm_of_difference, norm)
        for counts, count in ((value.nans, torch.isnan), (value.infinities, torch.isinf)):
            self.assertEqual(counts, (int(count(a).sum()), int(count(b).sum())))
        self.assertIn(f"1 differ: {name}", repr(result))
        self.assertEqual(result.hyperparameters, ())

    def test_a_tolerance_sorts(self) -> None:
        places = self.root / "a", self.root / "a flipped bit"
        (value,) = fsdp_optim.diff(*places).differing
        within = fsdp_optim.diff(*places, tolerance=value.relative)
        self.assertEqual((within.within, within.beyond), ((value,), ()))
        self.assertTrue(within.equal_within_tolerance)
        self.assertFalse(within.equal)
        beyond = fsdp_optim.diff(*places, tolerance=value.relative / 2)
        self.assertEqual((beyond.within, beyond.beyond), ((), (value,)))
        self.assertFalse(fsdp_optim.diff(self.root / "a", self.root / "a NaN", tolerance=1e300).equal_within_tolerance)
        with self.assertRaisesRegex(StateError, "tolerance"):
            fsdp_optim.diff(*places, tolerance=-1.0)

    def test_a_pattern_chooses(self) -> None:
        two = Two()
        flipped(two)
        two.optim.param_groups[0]["lr"] = 0.02
        place = self.own_folder() / "b"
        two.save(place, step=2)
        self.assertEqual(len(fsdp_optim.diff(self.root / "a", place, match="2.*").differing), 1)
        result = fsdp_optim.diff(self.root / "a", place, match="*:exp_avg")
        self.assertEqual(len(result.values), 6)
        self.assertTrue(result.equal)

    def test_threads_and_memory_do_not_matter(self) -> None:
        other = Two()
        for param in other.model.parameters():
            param.data += torch.rand_like(param) * 1e-3
        place = self.own_folder() / "b"
        other.save(place)
        before, results = torch.get_num_threads(), []
        try:
            for threads, memory in ((1, 512 << 20), (4, 512 << 20), (3, 512 << 20)):
                torch.set_num_threads(threads)
                results.append(fsdp_optim.diff(self.root / "a", place, bucket_nbytes=memory))
        finally:
            torch.set_num_threads(before)
        self.assertEqual(results[0], results[1])
        self.assertEqual(results[0], results[2])

    def test_too_little_memory_is_refused(self) -> None:
        with self.assertRaisesRegex(CheckpointError, "bucket_nbytes"):
            fsdp_optim.diff(self.root / "a", self.root / "a", bucket_nbytes=1 << 20)

    def test_inputs_stay_as_they_were(self) -> None:
        before = {path: path.read_bytes() for path in self.root.rglob("*") if path.is_file()}
        fsdp_optim.diff(self.root / "a", self.root / "a NaN")
        self.assertEqual({path: path.read_bytes() for path in self.root.rglob("*") if path.is_file()}, before)

    def test_damage_is_an_error(self) -> None:
        place = self.own_folder() / "b"
        shutil.copytree(self.root / "a", place)
        file = place / "optim.safetensors"
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        with self.assertRaisesRegex(CheckpointError, "optim.safetensors"):
            fsdp_optim.diff(self.root / "a", place)

    @parameterized.expand([("a",), ("b",)])
    def test_a_checkpoint_that_is_written_again_meanwhile_is_an_error(self, name: str) -> None:
        """Its values may be of both saves."""
        folder = self.own_folder()
        for copied in ("a", "b"):
            shutil.copytree(self.root / "a", folder / copied)
        manifest = folder / name / OURS.probe.manifest
        real = os.preadv

        def preadv(*args: Any) -> int:
            num = real(*args)
            manifest.write_bytes(manifest.read_bytes())
            return num

        with mock.patch.object(os, "preadv", preadv), self.assertRaisesRegex(CheckpointError, f"/{name}: .*again"):
            fsdp_optim.diff(folder / "a", folder / "b")


class UnlikeTest(SharedFolder):
    """Checkpoints that do not have the same values."""

    @classmethod
    def fill(cls) -> None:
        Two().save(cls.root / "a")

    def diff(self, two: Two, **options: Any) -> fsdp_optim.DiffResult:
        place = self.own_folder() / "b"
        two.save(place, options.pop("step", 1))
        return fsdp_optim.diff(self.root / "a", place, **options)

    def test_other_shapes(self) -> None:
        two = Two()
        two.model[1].running_mean = torch.zeros(6)
        result = self.diff(two)
        self.assertEqual([(s.name, s.a.shape, s.b.shape) for s in result.shapes], [("1.running_mean", (5,), (6,))])
        self.assertFalse(result.equal)
        self.assertEqual(result.differing, ())

    def test_other_dtypes(self) -> None:
        two = Two()
        two.model[1].running_var = two.model[1].running_var.double()
        two.model[1].running_mean = torch.tensor([0, 0, 0, 2, 0])
        result = self.diff(two)
        values = {value.name: value for value in result.differing}
        self.assertEqual(set(values), {"1.running_var", "1.running_mean"})
        self.assertEqual((values["1.running_var"].num_differing, values["1.running_var"].b.dtype), (0, "float64"))
        self.assertEqual((values["1.running_mean"].num_differing, values["1.running_mean"].max_abs), (1, 2.0))
        self.assertFalse(result.equal)

    def test_names_of_one_side(self) -> None:
        two = Two()
        two.model.add_module("more", nn.Linear(2, 2))
        del two.optim.state[two.model[0].bias]
        result = self.diff(two)
        self.assertEqual(result.only_in_b, ("more.bias", "more.weight"))
        self.assertEqual(result.only_in_a, ("0.bias:exp_avg", "0.bias:exp_avg_sq", "0.bias:step"))
        self.assertFalse(result.equal)

    def test_another_lr(self) -> None:
        two = Two()
        two.optim.param_groups[0]["lr"] = 0.02
        result = self.diff(two)
        (setting,) = result.hyperparameters
        self.assertEqual((setting.name, setting.a, setting.b), ("lr", "0.01", "0.02"))
        self.assertEqual(setting.params, tuple(name for name, _ in two.model.named_parameters()))
        self.assertEqual((result.equal, result.differing), (False, ()))

    def test_the_same_groups_in_another_order_are_equal(self) -> None:
        params = dict(Two().model.named_parameters())
        places = []
        for names in (["0.weight", "0.bias"], ["0.bias", "0.weight"]):
            two = Two()
            live = dict(two.model.named_parameters())
            groups = [{"params": [live[name]], "lr": 0.5 if name == "0.bias" else 0.25} for name in names]
            state = two.optim.state
            two.optim = torch.optim.AdamW([*groups, {"params": [live[n] for n in params if n not in names]}], lr=0.01)
            two.optim.state = state
            places.append(self.own_folder() / "b")
            two.save(places[-1])
        self.assertTrue(fsdp_optim.diff(*places).equal)

    def test_another_step(self) -> None:
        result = self.diff(Two(), step=2)
        self.assertEqual((result.equal, result.steps, result.differing), (False, (1, 2), ()))
        self.assertTrue(self.diff(Two(), step=None).equal)

    def test_without_an_optimizer(self) -> None:
        place = self.own_folder() / "b"
        fsdp_optim.save(place, Two().model, step=1, options=QUICK)
        result = fsdp_optim.diff(self.root / "a", place)
        self.assertEqual((len(result.only_in_a), len(result.values)), (18, 9))
        self.assertIn("without an optimizer", result.notes[0])

    def test_other_objects(self) -> None:
        two = Two()
        two.optim.state[two.model[0].bias]["exp_avg"] = "gone"
        (item,) = self.diff(two).objects
        self.assertEqual((item.name, item.b), ("0.bias:exp_avg", "'gone'"))

    def test_a_tensor_and_nothing(self) -> None:
        two = Two()
        two.optim.state[two.model[0].bias]["exp_avg"] = None
        (item,) = self.diff(two).objects
        self.assertEqual((item.name, item.b), ("0.bias:exp_avg", "None"))

    def test_entries_that_one_optimizer_has(self) -> None:
        """Whichever of the two checkpoints has them."""
        place = self.own_folder()
        for name, more in (("plain", {}), ("scaled", {"scale": 2.0}), ("other", {"scale": 4.0})):
            two = Two()
            two.optim.register_state_dict_post_hook(lambda _, own, more=more: {**own, **more})
            two.save(place / name)
        for a, b, texts in (
            ("plain", "scaled", ("-", "2.0")),
            ("scaled", "plain", ("2.0", "-")),
            ("scaled", "other", ("2.0", "4.0")),
        ):
            (item,) = fsdp_optim.diff(place / a, place / b).objects
            self.assertEqual((item.name, item.a, item.b), (":scale", *texts))


class WithoutNamesTest(SharedFolder):
    """Optimizers whose dicts have ids."""

    @classmethod
    def fill(cls) -> None:
        two = Two()
        two.save(cls.root / "ours")
        torch.save({"model": two.model.state_dict(), "optimizer": two.optim.state_dict()}, cls.root / "both.pt")
        torch.save({"optimizer": two.optim.state_dict()}, cls.root / "optim.pt")
        plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optim = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        for param in plain.parameters():
            param.grad = torch.ones_like(param)
        optim.step()
        torch.save({"model": plain.state_dict(), "optimizer": optim.state_dict()}, cls.root / "plain.pt")
        fsdp_optim.save(cls.root / "plain", plain, optim, options=QUICK)

    def test_names_of_the_other_side(self) -> None:
        for places in (("ours", "both.pt"), ("both.pt", "ours")):
            result = fsdp_optim.diff(self.root / places[0], self.root / places[1])
            self.assertTrue(result.equal, result)
            self.assertEqual(len(result.values), 9 + 18)
            self.assertIn("by id", result.notes[0])

    def test_two_files_by_id(self) -> None:
        result = fsdp_optim.diff(self.root / "both.pt", self.root / "both.pt")
        self.assertTrue(result.equal)
        self.assertIn("0:exp_avg", {value.name for value in result.values})

    def test_names_of_the_weights(self) -> None:
        result = fsdp_optim.diff(self.root / "plain.pt", self.root / "plain.pt")
        self.assertTrue(result.equal)
        self.assertIn("1.weight:momentum_buffer", {value.name for value in result.values})
        self.assertIn("names of the weights", result.notes[0])

    def test_given_names(self) -> None:
        names = [name for name, _ in Two().model.named_parameters()]
        result = fsdp_optim.diff(self.root / "optim.pt", self.root / "optim.pt", param_names=names)
        self.assertEqual({value.name.split(":")[0] for value in result.values}, set(names))
        self.assertEqual(result.notes, ())
        with self.assertRaisesRegex(StateError, "6 parameters by ids, and param_names has 2"):
            fsdp_optim.diff(self.root / "optim.pt", self.root / "optim.pt", param_names=names[:2])

    def test_names_that_do_not_fit_are_not_taken(self) -> None:
        result = fsdp_optim.diff(self.root / "plain", self.root / "both.pt")
        self.assertIn("0:exp_avg", result.only_in_b)
        self.assertIn("match no names", result.notes[-1])


class TiedTest(SharedFolder):
    def test_aliases_are_followed(self) -> None:
        tied = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
        tied["b"].weight = tied["a"].weight
        untied = nn.ModuleDict({"b": nn.Linear(3, 3, bias=False)})
        untied["b"].weight = tied["a"].weight
        for name, model in (("tied", tied), ("untied", untied)):
            optim = torch.optim.Adam(model.parameters())
            tied["a"].weight.grad = torch.ones(3, 3)
            optim.step()
            optim.state[tied["a"].weight]["step"].fill_(1)
            fsdp_optim.save(self.root / name, model, optim, options=QUICK)
        result = fsdp_optim.diff(self.root / "untied", self.root / "tied")
        self.assertEqual((result.only_in_a, result.only_in_b), ((), ()))
        self.assertEqual(
            {value.name for value in result.values},
            {"b.weight", *(f"b.weight:{k}" for k in ("exp_avg", "exp_avg_sq", "step"))},
        )


class OtherFilesTest(SharedFolder):
    def test_a_folder_of_hugging_face_without_an_optimizer(self) -> None:
        two, folder = Two(), self.root / "hub"
        two.save(self.root / "ours")
        folder.mkdir()
        weights = {name: value.clone() for name, value in two.model.state_dict().items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        result = fsdp_optim.diff(self.root / "ours", folder)
        self.assertEqual(({value.name for value in result.values}, result.differing), (set(weights), ()))
        self.assertEqual(len(result.only_in_a), 18)

    def test_large_values_of_another_shape_are_read_in_windows(self) -> None:
        places = []
        for number in range(2):
            two = Two()
            state = two.optim.state[two.model[0].weight]
            state["basis"] = torch.arange(700.0 * 700).reshape(700, 700)
            state["basis"][699, 3] += number
            places.append(self.root / f"basis-{number}.pt")
            torch.save({"model": two.model.state_dict(), "optimizer": two.optim.state_dict()}, places[-1])
        names = [name for name, _ in Two().model.named_parameters()]
        with mock.patch.object(named_values, "read_constants", wraps=named_values.read_constants) as read:
            (value,) = fsdp_optim.diff(*places, param_names=names).differing
        self.assertEqual((value.name, value.num_differing, value.max_abs), ("0.weight:basis", 1, 1.0))
        self.assertTrue(read.call_args_list)
        self.assertTrue(all(tensor.shape != (700, 700) for call in read.call_args_list for tensor in call.args[1]))
        shown = fsdp_optim.show(places[1], "0:basis", slice="699, 2:5")
        self.assertEqual(shown.elements.tolist(), [699 * 700 + 2, 699 * 700 + 4, 699 * 700 + 4])


class MemoryTest(SharedFolder):
    def test_it_is_bounded_by_the_budget(self) -> None:
        for name, factor in (("a", 1.0), ("b", 1.5)):
            torch.manual_seed(0)
            model = nn.Linear(4096, 4096)  # 64 MiB
            model.weight.data *= factor
            fsdp_optim.save(self.root / name, model, options=QUICK)
        fsdp_optim.diff(self.root / "a", self.root / "a", bucket_nbytes=MEMORY, match="bias")  # imports, and threads
        with Peak() as peak:
            result = fsdp_optim.diff(self.root / "a", self.root / "b", bucket_nbytes=MEMORY)
        self.assertAlmostEqual(result.values[1].relative, 0.5, delta=1e-7)
        self.assertLess(peak.mib, 16 + 8)


class PageTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        Two().save(cls.root / "a")
        two = Two()
        for fault, _, _ in FAULTS.values():
            fault(two)
        two.optim.param_groups[0]["lr"] = 0.02
        two.model.add_module("<more>", nn.Linear(2, 2))
        two.save(cls.root / "b", step=2)

    def test_it_has_everything_and_fetches_nothing(self) -> None:
        file = self.own_folder() / "page.html"
        result = fsdp_optim.diff(self.root / "a", self.root / "b", html=file)
        text = file.read_text()
        for value in result.differing:
            self.assertIn(f">{value.name}<", text)
        self.assertEqual(text.count("<i class=odd title="), 2)
        for piece in ("prefers-color-scheme: dark", "&lt;more&gt;.weight", "0.02", "<h2>Steps</h2><p>1 and 2</p>"):
            self.assertIn(piece, text)
        for piece in ("http:", "https:", "<script", "<link", "url(", "@import", "<more>"):
            self.assertNotIn(piece, text)
        self.assertEqual([path.name for path in file.parent.iterdir()], ["page.html"])
