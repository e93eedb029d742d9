"""Folders of torch.distributed.checkpoint, written by torch in the layouts of several trainers, load into every wrapper.

What is loaded is compared, bit for bit, with the same wrapper that has trained itself.
"""

from __future__ import annotations

import pickle
import tempfile
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit.cases import expand
from kit.checkpoints import Whole, everything, load, load_trained, mine, optims_of, scramble
from kit.compare import Differs, check_same, error_text
from kit.dcp import HAVE_TRAIN_STATE, LAYOUTS, TRAIN_STATE, model_dict
from kit.dcp_files import DcpFiles
from kit.local_parts import local_of
from kit.models import Tied, freeze_stem
from kit.optimizers import OfModel, adam, adamw_tensor_lr, two_groups, two_optimizers, without_stem
from kit.store_calls import url_of
from kit.trained import Trained
from kit.wrapping import cpu
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fsdp_optim
from fsdp_optim.buckets.objects import MemoryBucket, ObjectStore
from fsdp_optim.formats.own import PROBE
from fsdp_optim.storage.posix import OpenFolder
from fsdp_optim.testing import run_on_ranks

TWO_GROUPS = {"make": OfModel(two_groups), "model": Whole}

# What writes, its world size, the layout; what loads follows from the place in the list. Each layout is written and loaded once.
SOON = [
    ("FSDP2", 2, "nested"),
    ("FSDP2", 2, "flattened"),
    ("FSDP2 x TP", 4, "torchtitan"),
    ("FSDP2", 2, "two threads"),
    ("FSDP2", 2, "app"),
    ("FSDP2", 2, "accelerate"),
    ("FSDP2", 2, "lightning parallel"),
    ("FSDP2", 4, "OLMo-core"),
    ("FSDP2", 2, "without ranks"),
    ("HSDP", 4, "nested"),
    ("FSDP1 flat", 2, "FSDP1"),
    ("FSDP1 orig", 2, "nested"),
    ("FSDP1 flat", 2, "lightning FSDP"),
    ("DDP", 4, "own calls"),
    ("plain", 1, "own calls"),
]
LATER = [
    ("FSDP2", 4, "torchtitan"),
    ("FSDP2 x TP", 2, "nested"),
    ("FSDP1 orig", 4, "FSDP1"),
    ("FSDP1 orig", 2, "accelerate"),
    ("DDP", 2, "nested"),
]
SAVES = [*SOON, *LATER]


def save_all(saves: list[tuple[str, str, str, dict[str, Any]]]) -> None:
    with cpu():
        for path, wrapper, layout, kwargs in saves:
            LAYOUTS[layout](Trained(wrapper, **kwargs), Path(path))


def load_all(loads: list[tuple[str, str, dict[str, Any]]]) -> list[Any]:
    results = []
    for path, wrapper, kwargs in loads:
        try:
            results.append(load_trained(Path(path), wrapper, kwargs, compare=True))
        except Exception as error:
            raise AssertionError(f"{path} into {wrapper}: {error}") from error
    return results


TARGETS = ("FSDP2", "FSDP1 flat", "FSDP1 orig", "fairscale flat", "plain", "fairscale non-flat")


class LayoutsTest(unittest.TestCase):
    root: str

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.root = folder.name

    @classmethod
    def save(cls, numbers: Sequence[int]) -> None:
        """Let torch write these, where it has not yet."""
        for world in (1, 2, 4):
            new = [n for n in numbers if SAVES[n][1] == world and not Path(cls.root, f"{n}").exists()]
            saves = [(f"{cls.root}/{n}", SAVES[n][0], SAVES[n][2], TWO_GROUPS) for n in new]
            if saves:
                run_on_ranks(save_all, world, saves)

    def test_every_layout_loads(self) -> None:
        """Each at one world size into one wrapper."""
        self.check(lambda number, world: number < len(SOON) and number % 3 == world - 1)

    @pytest.mark.slow
    def test_every_layout_loads_at_the_other_world_sizes(self) -> None:
        """And of every wrapper."""
        self.check(lambda number, world: number >= len(SOON) or number % 3 != world - 1)

    def check(self, is_met: Callable[[int, int], bool]) -> None:
        self.save([number for number in range(len(SAVES)) if any(is_met(number, world) for world in (1, 2, 3))])
        for world in (1, 2, 3):
            numbers = [number for number in range(len(SAVES)) if is_met(number, world)]
            wrappers = [TARGETS[(number // 3 + world) % len(TARGETS)] for number in numbers]
            loads = [(f"{self.root}/{n}", wrapper, TWO_GROUPS) for n, wrapper in zip(numbers, wrappers, strict=True)]
            for results in run_on_ranks(load_all, world, loads):
                for number, result in zip(numbers, results, strict=True):
                    layout = SAVES[number][2]
                    if layout in HAVE_TRAIN_STATE:
                        check_same(layout, dict(sorted(result["extra"]["train_state"].items())), TRAIN_STATE)


# ------------------------------------------------------------------------------------------- parts of models and optimizers


def without_state(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "frozen": ("FSDP2", "FSDP1 orig", {"make": OfModel(without_stem), "model": Whole, "prepare": freeze_stem}),
    "no state": ("FSDP2", "DDP", {"make": without_state, "model": Whole}),
    "some without state": ("FSDP2", "FSDP2", {"model": Whole, "unused": ("head.bias", "stem.weight")}),
    "tensor hyperparameters": ("DDP", "FSDP2", {"make": adamw_tensor_lr, "model": Whole}),
    "two optimizers": ("FSDP2", "FSDP2", {"make": OfModel(two_optimizers), "model": Whole}),
    "tied": ("FSDP2", "DDP", {"model": Tied}),
}
WITHOUT_STATE = {"some without state": ["head.bias", "stem.weight"]}


def save_cases(root: str) -> None:
    with cpu():
        for name, (wrapper, _, kwargs) in CASES.items():
            trained = Trained(wrapper, **kwargs)
            saved: dict[str, Any] = {"model": model_dict(trained)}
            for number, optim in enumerate(optims_of(trained)):
                saved[f"optimizer_{number}"] = get_optimizer_state_dict(trained.model, optim)
            dcp.save(saved, checkpoint_id=Path(root) / name)


def load_cases(root: str) -> dict[str, Any]:
    return {name: load_trained(Path(root) / name, other, kw, compare=True) for name, (_, other, kw) in CASES.items()}


def part_by_part(root: str) -> None:
    """The folder of the model alone, and the folder of the optimizer alone."""
    with cpu():
        trained, other = Trained("FSDP2", **TWO_GROUPS), Trained("FSDP2", **{**TWO_GROUPS, "steps": 0})
        LAYOUTS["accelerate"](trained, Path(root) / "parts")
        scramble(other)
        fsdp_optim.load(
            Path(root) / "parts" / "pytorch_model_fsdp_0",
            other.model,
            options=fsdp_optim.LoadOptions(compare=True, progress=False),
        )
        check_same("weights", mine(other)["values"], mine(trained)["values"])
        load(Path(root) / "parts" / "optimizer_0", other, weights="none")
        check_same("state", mine(other)["state"], mine(trained)["state"])


class PartsTest(unittest.TestCase):
    @expand(soon=[3], later=[2])
    def test_cases(self, world: int) -> None:
        """Frozen and tied parameters, parameters without state, hyperparameters that are tensors, several optimizers."""
        with tempfile.TemporaryDirectory() as root:
            run_on_ranks(save_cases, 2, root)
            for results in run_on_ranks(load_cases, world, root):
                for name, result in results.items():
                    if name in WITHOUT_STATE:
                        self.assertEqual(result["absent"], WITHOUT_STATE[name])

    def test_part_by_part(self) -> None:
        with tempfile.TemporaryDirectory() as root:
            run_on_ranks(part_by_part, 2, root)


# ------------------------------------------------------------------------------------------- bytes, and damage


class Large(nn.Module):
    units = ("layers.0", "layers.1", "")

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 512))


def few_bytes(root: str) -> None:
    """Save at 2 ranks, then count what each rank reads of the data files when it loads at the same size, and cut otherwise."""
    with cpu():
        trained, path = Trained("FSDP2", model=Large), Path(root) / "large"
        LAYOUTS["nested"](trained, path)
        dist.barrier()
        real, read = OpenFolder.read_into, [0]

        def counted(opened: Any, name: str, pieces: Any, offset: int) -> None:
            read[0] += sum(map(len, pieces)) if name.endswith(".distcp") else 0
            real(opened, name, pieces, offset)

        for wrapper in ("FSDP2", "FSDP1 flat", "fairscale flat"):
            other = Trained(wrapper, model=Large, steps=0)
            read[0] = 0
            with mock.patch.object(OpenFolder, "read_into", counted):
                load(path, other)
            own = 3 * sum(local_of(param).nbytes for param in other.params)
            if not 0.99 * own <= read[0] <= 1.1 * own:  # padding is not read
                raise Differs(f"{wrapper}: {read[0]} bytes were read for {own} bytes of elements")


Damage = tuple[str, int, bytes | None, list[str]]
"""A file, where its bytes change, the bytes (None: the file is gone), and what the error says."""


def damaged(root: str, damages: list[Damage]) -> None:
    """Loads of a checkpoint with one damage each: an error on every rank that has these names, and nothing is changed."""
    folder = Path(root) / "nested"
    with cpu():
        target = Trained("FSDP2", **{**TWO_GROUPS, "steps": 0})
        before = everything(target)
        for file, start, data, names in damages:
            whole = (folder / file).read_bytes()
            dist.barrier()
            if dist.get_rank() == 0 and data is None:
                (folder / file).unlink()
            elif dist.get_rank() == 0:
                rest = whole[start + len(data or b"") :] if data else b""
                (folder / file).write_bytes(whole[:start] + (data or b"") + rest)
            dist.barrier()
            text = ": ".join(error_text(lambda: load(folder, target)))
            for name in ("CheckpointError", file if names else "nested", *names):
                if name not in text:
                    raise Differs(f"{file}, {start}: {name} is not in: {text}")
            check_same(f"{file}, {start}", everything(target), before)
            dist.barrier()
            if dist.get_rank() == 0:
                (folder / file).write_bytes(whole)
            dist.barrier()


class BytesTest(unittest.TestCase):
    def test_each_rank_reads_its_own_elements(self) -> None:
        with tempfile.TemporaryDirectory() as root:
            run_on_ranks(few_bytes, 2, root)

    def test_damage_is_an_error_on_all_ranks(self) -> None:
        """A file that is missing, cut, or of another program, and the description of one chunk that has changed."""
        with tempfile.TemporaryDirectory() as root:
            run_on_ranks(save_all, 2, [(f"{root}/nested", "FSDP2", "nested", TWO_GROUPS)])
            folder = Path(root) / "nested"
            first = opened_metadata(folder).info("model.mix")
            damages: list[Damage] = [
                (".metadata", 0, None, []),
                (".metadata", 0, b"{}", []),
                (".metadata", 300, b"", []),
                ("__1_0.distcp", 0, None, ["missing"]),
                ("__1_0.distcp", 5000, b"", ["cut short"]),
                (first.relative_path, first.offset, b"XXXX", ["model.mix"]),
                (first.relative_path, first.offset + 90, b"XXXX", ["model.mix"]),
            ]
            run_on_ranks(damaged, 2, root, damages)

    def test_from_a_bucket(self) -> None:
        """By requests for ranges: for each chunk one for its elements, and one for what is before them."""
        with tempfile.TemporaryDirectory() as root:
            run_on_ranks(save_all, 2, [(f"{root}/nested", "FSDP2", "nested", {"model": Large})])
            trained = run_on_ranks(alone, 1)[0]
            bucket, requests = MemoryBucket(), list[tuple[str, int]]()
            for file in sorted((Path(root) / "nested").iterdir()):
                bucket.put(f"run/{file.name}", file.read_bytes())
            smallest = min(file.stat().st_size for file in (Path(root) / "nested").glob("*.distcp"))
            real = bucket.read_into

            def counted(key: str, pieces: Any, offset: int, **kwargs: Any) -> None:
                requests.append((key, sum(map(len, pieces))))
                real(key, pieces, offset, **kwargs)

            with mock.patch.object(bucket, "read_into", counted):
                model = Large()
                optim = adam(model.parameters())
                with url_of(ObjectStore(bucket, "run", PROBE)) as url:
                    fsdp_optim.load(url, model, optim)
            check_same("weights", dict(model.named_parameters()), trained[0])
            check_same("moments", [dict(sorted(moments.items())) for moments in optim.state.values()], trained[1])
            data = [nbytes for key, nbytes in requests if key.endswith(".distcp")]
            num_chunks = 2 * 3 * 4 + 4  # of two ranks: weights and two moments of four parameters; and their steps
            self.assertLessEqual(len(data), 2 * num_chunks + 5 * 6)  # and the directory of one archive of each kind
            self.assertLess(max(data), smallest / 2)


def alone() -> tuple[dict[str, torch.Tensor], list[Any]]:
    trained = Trained("plain", model=Large)
    state = [dict(sorted(trained.optim.state[param].items())) for param in trained.params]
    return dict(trained.model.named_parameters()), state


def opened_metadata(folder: Path) -> Any:
    files = DcpFiles(folder.parent / "unused")
    files.metadata = pickle.loads((folder / ".metadata").read_bytes())
    return files


if __name__ == "__main__":
    unittest.main()
