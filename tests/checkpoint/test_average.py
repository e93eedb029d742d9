"""The average of checkpoints, against a sum of one element at a time, rounded by exact fractions."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from kit.checkpoint_format import all_bytes, check_folder
from kit.compare import check_same, refused
from kit.conversions import MEMORY
from kit.folders import SharedFolder
from kit.forked import LIBRARY, run
from kit.options import state_for
from kit.pretrained import build
from parameterized import parameterized
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fsdp_optim
from fsdp_optim import CheckpointError, ConvertOptions, StateError
from fsdp_optim.errors import ReplacedError
from fsdp_optim.offline.conversion.workers import RankWork
from fsdp_optim.plugins import TorchFiles
from fsdp_optim.testing import run_on_ranks

QUICK = ConvertOptions(durable=False, progress=False)
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
SHORT = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.float64, torch.float32, *SHORT)
WIDTH, STEP = 7, 5


def rounded(value: float, dtype: torch.dtype) -> Tensor:
    """The element of a dtype that is nearest to a number: of its neighbours the nearest one; of two the even one."""
    about = torch.tensor(value, dtype=torch.float64).to(dtype)
    if dtype in (torch.float64, torch.float32) or not about.float().isfinite():
        return about
    kind = BITS[dtype.itemsize]
    bits = int(about.view(kind))
    near = [torch.tensor(bits + by, dtype=torch.int64).to(kind).view(dtype) for by in (-1, 0, 1)]
    finite = [
        element for element in near if element.float().isfinite() and (element.float() >= 0) == (about.float() >= 0)
    ]
    return min(
        finite, key=lambda element: (abs(Fraction(element.item()) - Fraction(value)), int(element.view(kind)) & 1)
    )


def averaged(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Element by element, in Python's floats; rounded once to the dtype of the last tensor."""
    last, elements = tensors[-1], []
    for values in zip(*(tensor.reshape(-1).double().tolist() for tensor in tensors), strict=True):
        total = weights[0] * values[0]
        for weight, value in itertools.islice(zip(weights, values, strict=True), 1, None):
            total += weight * value
        elements.append(rounded(total / sum(weights), last.dtype))
    return torch.stack(elements).reshape(last.shape) if elements else last.clone()


class AllDtypes(nn.Module):
    """Buffers of each dtype, with values whose averages lie at, or next to, the middle between two numbers of the dtype."""

    def __init__(self, seed: int, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(seed)
        for number, dtype in enumerate(dtypes):
            scales = torch.randint(-5, 6, (40,), generator=draws)
            values = torch.randn(40, generator=draws, dtype=torch.float64) * 2.0**scales
            self.register_buffer(
                f"floats_{number}", torch.cat([values, torch.tensor([0.0, -0.0, 1e-40, 1.0])]).to(dtype)
            )
        self.register_buffer("complex", torch.randn(3, 2, generator=draws, dtype=torch.complex64))
        self.register_buffer("count", torch.tensor([seed, 7]))
        self.register_buffer("same", torch.arange(4))
        self.register_buffer("mask", torch.tensor([True, seed % 2 == 0]))
        self.register_buffer("scalar", torch.tensor(0.1 * seed))
        self.register_buffer("empty", torch.empty(0, 3))


class Linears(nn.Module):
    def __init__(self, seed: int, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(5, width), nn.Linear(width, 3)


def trained(seed: int, num_steps: int = 2, width: int = WIDTH) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Linears(seed, width)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    for _ in range(num_steps):
        model.second(model.first(torch.randn(4, 5))).square().mean().backward()
        optim.step()
    return model, optim


def save(path: Path, model: nn.Module, optim: Any = None, **options: Any) -> Path:
    fsdp_optim.save(path, model, optim, options=fsdp_optim.SaveOptions(durable=False, progress=False), **options)
    return path


def by_ranks(sources: list[Path], target: Path) -> Any:
    return fsdp_optim.average(sources, target, weights=[1, 2, 3], moments="average", options=QUICK)


def saved_by_ranks(path: Path, seed: int) -> None:
    model = Linears(seed)
    fully_shard(model)
    save(path, model)


class AverageTest(SharedFolder):
    def setUp(self) -> None:
        self.folder = self.own_folder()

    def average(self, sources: Sequence[Path], **options: Any) -> Any:
        before = [all_bytes(source) for source in sources if source.is_dir()]
        done = fsdp_optim.average(sources, self.folder / "average", options=QUICK, **options)
        check_same("the sources", [all_bytes(source) for source in sources if source.is_dir()], before)
        check_folder(self.folder / "average")
        fsdp_optim.verify(self.folder / "average", progress=False)
        return done

    @parameterized.expand([(None,), ([1, 1, 1],), ([0.1, 2, 1.7],), ([3, 1, 1],)])
    def test_every_dtype(self, weights: list[float] | None) -> None:
        models = [AllDtypes(seed) for seed in (1, 2, 3)]
        paths = [save(self.folder / f"{number}", model) for number, model in enumerate(models)]
        done = self.average(paths, weights=weights)
        got = load_file(self.folder / "average" / "model.safetensors")
        buffers = [dict(model.named_buffers()) for model in models]
        for name, last in buffers[-1].items():
            tensors = [of_model[name] for of_model in buffers]
            if last.dtype.is_complex:
                real = averaged([torch.view_as_real(tensor) for tensor in tensors], weights or [1, 1, 1])
                check_same(name, torch.view_as_real(got[name]), real)
            elif last.dtype.is_floating_point:
                check_same(name, got[name], averaged(tensors, weights or [1, 1, 1]))
            else:
                check_same(name, got[name], last)
        self.assertEqual(done.differing, ("count", "mask"))
        self.assertEqual(done.num_averaged, len(buffers[-1]) - 3)
        self.assertAlmostEqual(sum(done.weights), 1.0)

    def test_rounded_once(self) -> None:
        """Numbers a hair above the middle of two elements, which float32 rounds to the middle, and then to the even element."""
        for number, dtype in enumerate((torch.bfloat16, torch.float16)):
            step = torch.finfo(dtype).eps
            middle = 1 + step / 2
            values = [torch.tensor([middle, 1.0, 1 + step], dtype=torch.float64) for _ in range(2)]
            values[0][0] += 2.0**-40
            paths = [self.folder / f"{number}-{index}.safetensors" for index in range(2)]
            save_file({"weight": values[0]}, paths[0])
            save_file({"weight": values[1].float().to(dtype)}, paths[1])
            sources = [paths[0], paths[1]]
            fsdp_optim.average(sources, self.folder / f"to-{number}", weights=[1, 1e-300], options=QUICK)
            got = load_file(self.folder / f"to-{number}" / "model.safetensors")["weight"]
            check_same("weight", got, torch.tensor([1 + step, 1.0, 1 + step], dtype=torch.float64).to(dtype))

    def test_equal_checkpoints_stay_as_they_are(self) -> None:
        """But for float64, in which the sum itself is rounded."""
        path = save(self.folder / "one", AllDtypes(4, DTYPES[1:]))
        self.assertEqual(self.average([path] * 5).differing, ())
        got, wanted = (load_file(self.folder / name / "model.safetensors") for name in ("average", "one"))
        check_same("all", {name: got[name] for name in wanted}, wanted)

    def test_any_formats_and_dtypes(self) -> None:
        """Two ranks of FSDP2, a DCP folder, and a file of torch.save, in other dtypes and orders."""
        models = [Linears(seed) for seed in range(4)]
        run_on_ranks(saved_by_ranks, 2, self.folder / "ours", 0)
        dcp.save({"model": models[1].double().state_dict()}, checkpoint_id=self.folder / "dcp")
        torch.save(models[2].half().state_dict(), self.folder / "model.pt")
        backwards = dict(reversed(models[3].bfloat16().state_dict().items()))
        (self.folder / "hf").mkdir()
        save_file(backwards, self.folder / "hf" / "model.safetensors")
        sources = [self.folder / name for name in ("ours", "dcp", "model.pt", "hf")]
        done = self.average(sources, weights=[1, 2, 1, 1])
        self.assertEqual(done.differing, ())
        got = load_file(self.folder / "average" / "model.safetensors")
        for name in backwards:
            tensors = [model.state_dict()[name] for model in models]
            check_same(name, got[name], averaged(tensors, [1, 2, 1, 1]))

    def test_values_of_other_dtypes_with_equal_bytes_differ(self) -> None:
        """Of values that are not averaged: a byte of the one is another number in the other."""
        paths = []
        for name, dtype in (("signed", torch.int8), ("unsigned", torch.uint8)):
            model = nn.Linear(2, 1)
            model.register_buffer("table", torch.zeros(3, dtype=dtype))
            paths.append(save(self.folder / name, model))
        self.assertEqual(self.average(paths).differing, ("table",))

    def test_tied_weights(self) -> None:
        """One source has them once, with another name; the last one has them twice."""
        models = [Linears(seed) for seed in range(2)]
        tied = nn.ModuleDict({"first": models[0].first, "again": models[0].first})
        paths = [save(self.folder / "tied", tied), self.folder / "last.safetensors"]
        self.assertEqual(
            fsdp_optim.inspect(paths[0]).aliases, {"again.weight": "first.weight", "again.bias": "first.bias"}
        )
        last = {
            f"{name}.{part}": torch.randn_like(value)
            for name in tied
            for part, value in models[1].first.state_dict().items()
        }
        save_file(last, paths[1])
        self.average(paths)
        got = load_file(self.folder / "average" / "model.safetensors")
        for name, value in last.items():
            before = models[0].first.state_dict()[name.partition(".")[2]]
            check_same(name, got[name], averaged([before, value], [1, 1]))

    def test_weights_tied_in_the_last_one(self) -> None:
        """A torch file has both names of one tensor; two tensors of their own are refused."""
        models = [Linears(seed) for seed in range(2)]
        tied = [nn.ModuleDict({"first": model.first, "again": model.first}) for model in models]
        torch.save(tied[0].state_dict(), self.folder / "both.pt")
        paths = [self.folder / "both.pt", save(self.folder / "tied", tied[1])]
        self.average(paths)
        got = load_file(self.folder / "average" / "model.safetensors")
        wanted = [model.first.state_dict() for model in models]
        for part in ("weight", "bias"):
            check_same(part, got[f"first.{part}"], averaged([values[part] for values in wanted], [1, 1]))
        self.assertEqual(fsdp_optim.inspect(self.folder / "average").aliases, fsdp_optim.inspect(paths[1]).aliases)
        apart = {name: value.clone() for name, value in tied[0].state_dict().items()}
        save_file(apart, self.folder / "apart.safetensors")
        with self.assertRaisesRegex(fsdp_optim.StateError, "again.* another name of first.* as the last one"):
            fsdp_optim.average([self.folder / "apart.safetensors", paths[1]], self.folder / "refused", options=QUICK)

    def test_moments(self) -> None:
        """Moments are averaged; steps, the groups and the trainer's values are the last one's, and what differs is named."""
        runs = [trained(0), trained(1, 3), trained(2)]
        state = state_for({"note": "of the last"})
        paths = [
            save(self.folder / f"{seed}", *run, state=state if seed == 2 else None, step=seed)
            for seed, run in enumerate(runs)
        ]
        done = self.average(paths, moments="average", weights=[1, 2, 3])
        names = [name for name, _ in runs[0][0].named_parameters()]
        self.assertEqual(done.differing, tuple(sorted([*(f"{name}:step" for name in names), "lr of param group 0"])))
        model, optim = trained(9)
        restored = fsdp_optim.load(self.folder / "average", model, optim)
        self.assertEqual(restored.step, 2)
        self.assertEqual(optim.param_groups[0]["lr"], 0.03)
        for name, param in model.named_parameters():
            of_runs = [
                (dict(run.named_parameters())[name], of.state[dict(run.named_parameters())[name]]) for run, of in runs
            ]
            check_same(name, param.detach(), averaged([weight.detach() for weight, _ in of_runs], [1, 2, 3]))
            check_same("step", optim.state[param]["step"], of_runs[-1][1]["step"])
            for moment in ("exp_avg", "exp_avg_sq"):
                wanted = averaged([values[moment] for _, values in of_runs], [1, 2, 3])
                check_same(f"{name}: {moment}", optim.state[param][moment], wanted)

    def test_moments_of_files_of_torch(self) -> None:
        """The optimizers of other formats, whose kinds are inferred, in any place of the list."""
        runs = [trained(0), trained(1)]
        sources = [save(self.folder / f"ours-{seed}", *run) for seed, run in enumerate(runs)]
        for seed in range(2):
            target = self.folder / f"torch-{seed}"
            fsdp_optim.convert(sources[seed], target, format=TorchFiles(key_by="name"), options=QUICK)
        self.average(sources, moments="average")
        wanted = {half: load_file(self.folder / "average" / f"{half}.safetensors") for half in ("model", "optim")}
        for first, second in (("ours-0", "torch-1"), ("torch-0", "ours-1"), ("torch-0", "torch-1")):
            done = fsdp_optim.average(
                [self.folder / first, self.folder / second],
                self.folder / f"{first}{second}",
                moments="average",
                options=QUICK,
            )
            self.assertEqual(done.differing, ("lr of param group 0",), (first, second))
            for half, tensors in wanted.items():
                got = load_file(self.folder / f"{first}{second}" / f"{half}.safetensors")
                check_same(f"{half} of {first}, {second}", {key: got[key] for key in tensors}, tensors)

    def test_without_moments(self) -> None:
        paths = [save(self.folder / f"{seed}", *trained(seed)) for seed in range(2)]
        self.average(paths)
        self.assertFalse(fsdp_optim.inspect(self.folder / "average").has_optim)
        self.assertEqual([name for name in all_bytes(self.folder / "average") if "optim.s" in name], [])
        refused(lambda: fsdp_optim.load(self.folder / "average", *trained(5)), StateError, "without an optimizer")
        model, _ = trained(6)
        fsdp_optim.load(self.folder / "average", model)

    def test_ranks_write_the_same_files(self) -> None:
        paths = [save(self.folder / f"{seed}", *trained(seed, seed + 1)) for seed in range(3)]
        done = by_ranks(paths, self.folder / "alone")
        results = run_on_ranks(by_ranks, 2, paths, self.folder / "ranks")
        alone, ranks = all_bytes(self.folder / "alone"), all_bytes(self.folder / "ranks")
        del alone["fsdp_optim.json"], ranks["fsdp_optim.json"]
        check_same("files", ranks, alone)
        self.assertEqual({result.differing for result in results}, {done.differing})

    def refused(
        self, words: Sequence[str], sources: Sequence[Any], error: type[Exception] = StateError, **options: Any
    ) -> None:
        """Nothing is written, nor left."""
        before = sorted(self.folder.iterdir())
        refused(lambda: fsdp_optim.average(sources, self.folder / "refused", options=QUICK, **options), error, *words)
        self.assertEqual(sorted(self.folder.iterdir()), before)

    def test_refused(self) -> None:
        first = save(self.folder / "first", *trained(0))
        wide = save(self.folder / "wide", *trained(0, width=WIDTH + 1))
        weights = save(self.folder / "weights", trained(0)[0])
        names = self.folder / "names.safetensors"
        save_file({"first.weight": torch.zeros(WIDTH, 5), "other": torch.zeros(1)}, names)
        ints = self.folder / "ints.safetensors"
        save_file({name: value.long() for name, value in trained(0)[0].state_dict().items()}, ints)
        self.refused(("first.weight", "[7, 5]", str(first), "[8, 5]", str(wide)), [first, wide])
        self.refused(("other", str(first), str(names), "one model"), [first, names])
        self.refused(("other", str(first), str(names)), [names, first, names])
        self.refused(("first.weight", "int64", "float32", str(ints)), [ints, first])
        self.refused((str(weights), "has no optimizer", 'moments="drop"'), [first, weights], moments="average")
        self.refused(("two or more",), [first])
        self.refused(("two or more",), str(first))
        self.refused(("2 numbers", "3 checkpoints"), [first] * 3, weights=[1, 2])
        for wrong in ([1, 0], [1, float("nan")], [-1, 2], ["1", 1], "11", [True, 1]):
            self.refused(("weights must be",), [first] * 2, weights=wrong)
        self.refused(("moments must be", "'keep'"), [first] * 2, moments="keep")
        self.refused(("no such folder",), [first, self.folder / "nothing"], CheckpointError)
        fsdp_optim.average([first, first], self.folder / "there", options=QUICK)
        refused(
            lambda: fsdp_optim.average([first, first], self.folder / "there", options=QUICK),
            CheckpointError,
            "overwrite",
        )
        fsdp_optim.average([first, first], self.folder / "there", overwrite=True, options=QUICK)

    def test_state_of_other_parameters(self) -> None:
        model, optim = trained(0)
        first = save(self.folder / "first", model, optim)
        del optim.state[model.second.bias]
        second = save(self.folder / "second", model, optim)
        self.refused(("second.bias:exp_avg", str(first), str(second)), [first, second], moments="average")
        self.average([first, second])

    def test_damage_is_noticed(self) -> None:
        paths = [save(self.folder / f"{seed}", *trained(seed)) for seed in range(2)]
        file = paths[0] / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
        self.refused((str(file),), paths, CheckpointError)

    def test_one_replaced_meanwhile(self) -> None:
        """Another save puts its manifest over a source: the average is not written."""
        paths = [save(self.folder / f"{seed}", *trained(seed)) for seed in range(2)]
        real = RankWork.run

        def run_and_thin(work: Any, *args: Any) -> None:
            real(work, *args)
            fsdp_optim.thin(paths[0])

        with mock.patch.object(RankWork, "run", run_and_thin):
            refused(lambda: fsdp_optim.average(paths, self.folder / "to", options=QUICK), ReplacedError, str(paths[0]))
        self.assertFalse((self.folder / "to").exists())

    def test_memory(self) -> None:
        """Of three checkpoints of 64 MiB, in the dtypes that need most."""
        for number, dtype in enumerate((torch.float64, torch.float32, torch.bfloat16)):
            save_file(
                {f"{key}": torch.randn(1 << 22).to(dtype) for key in range(4)}, self.folder / f"{number}.safetensors"
            )
            save_file({"0": torch.randn(9).to(dtype)}, self.folder / f"small-{number}.safetensors")
        code = f"""
from kit.peaks import Peak
import torch, fsdp_optim
root, options = {str(self.folder)!r}, fsdp_optim.ConvertOptions(bucket_nbytes={MEMORY}, durable=False, progress=False)
torch.set_num_threads(2)
fsdp_optim.average([f"{{root}}/small-{{number}}.safetensors" for number in range(3)], root + "/small-to", options=options)
with Peak() as peak:
    fsdp_optim.average([f"{{root}}/{{number}}.safetensors" for number in range(3)], root + "/to", options=options)
print(peak.mib)
"""
        done = run(code, preload=LIBRARY)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertLess(float(done.stdout), MEMORY / 2**20 + 8)

    def test_from_pretrained(self) -> None:
        models = [build("llama") for _ in range(2)]
        with torch.no_grad():
            for param in models[1].parameters():
                param.add_(torch.randn_like(param))
        paths = []
        for number, model in enumerate(models):
            paths.append(save(self.folder / f"{number}", model))
        self.average(paths)
        shutil.copy(_config(models[0], self.folder), self.folder / "average" / "config.json")
        loaded = type(models[0]).from_pretrained(self.folder / "average").state_dict()
        for name, tensor in loaded.items():
            tensors = [model.state_dict()[name] for model in models]
            check_same(name, tensor, averaged(tensors, [1, 1]))


def _config(model: Any, folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(model.config.to_dict()))
    return path
