"""Tensors of bools have bytes 0 and 1: others, which torch takes for true here and for nothing there, are damage."""

from __future__ import annotations

import cProfile
import itertools
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from kit.checkpoint_format import MANIFEST, all_bytes, read_safetensors
from kit.compare import check_refused, check_same, error_text
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.options import as_options, state_for
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized
from soak.mutators import repair
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

import fsdp_optim
from fsdp_optim.formats.base.bools import BoolRanges
from fsdp_optim.plugins import Extent
from fsdp_optim.testing import run_on_ranks

QUIET: dict[str, Any] = {"durable": False, "progress": False}
ODD = (2, 128, 255)


class Masked(nn.Module):
    units = ("first", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("used", torch.tensor(False))


def masked(wrapper: str = "plain") -> Trained:
    """With bools in all places that a checkpoint has for them."""
    trained = Trained(wrapper, adam, 1, Masked)
    for param in trained.params:
        trained.optim.state[param] |= {"seen": param.detach() != 0, "done": torch.tensor(True)}
    return trained


def extras() -> dict[str, Any]:
    return {
        "tensor": torch.tensor([[True], [False]]),
        "array": numpy.array([True, False]),
        "number": numpy.bool_(True),
        "inside": [{"deep": torch.tensor(False)}],
    }


def places(folder: Path) -> Iterator[tuple[str, str, int]]:
    """(file, tensor, byte of the file) of the first and the last byte of every tensor of bools."""
    for path in sorted(folder.rglob("*.safetensors")):
        file = read_safetensors(path)
        for key, tensor in file.tensors.items():
            start, stop = file.places[key]
            if tensor.dtype is torch.bool:
                for at in sorted({start, stop - 1}):
                    yield str(path.relative_to(folder)), key, len(file.header) + at


def mutate(folder: Path, name: str, at: int, byte: int) -> None:
    """Change one byte, and make all checksums agree."""
    files: dict[str, Any] = all_bytes(folder)
    changed = bytearray(files[name])
    changed[at] = byte
    files[name] = bytes(changed)
    repair(files)
    for file, data in files.items():
        (folder / file).write_bytes(data)


def values_of(trained: Trained) -> list[torch.Tensor]:
    states = [value for param in trained.params for value in trained.optim.state[param].values()]
    return [local_of(value).detach().clone() for value in (*trained.params, *trained.model.buffers(), *states)]


def load_mutated(folder: Path) -> list[tuple[tuple[str, str], str]]:
    """The errors of all ranks, where one byte of a shard is neither 0 nor 1; and the tensor that it is in."""
    with cpu():
        trained, told = masked("FSDP2"), []
        fsdp_optim.save(folder, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **QUIET))
        for name, key, at in list(places(folder)):
            dist.barrier()
            good = all_bytes(folder)
            dist.barrier()
            if dist.get_rank() == 0:
                mutate(folder, name, at, 2)
            dist.barrier()
            had = values_of(trained)
            told.append((error_text(lambda: fsdp_optim.load(folder, trained.model, trained.optim)), key))
            check_same("nothing is changed", values_of(trained), had)
            dist.barrier()
            if dist.get_rank() == 0:
                for file, data in good.items():
                    (folder / file).write_bytes(data)
        return told


class BoolsTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name, "step")

    def test_other_bytes_are_damage(self) -> None:
        trained = masked()
        fsdp_optim.save(
            self.folder,
            trained.model,
            trained.optim,
            state=state_for(extras(), {f"own {name}": value for name, value in extras().items()}),
            **as_options(fsdp_optim.SaveOptions, **QUIET),
        )
        good, listed = all_bytes(self.folder), list(places(self.folder))
        check_same(
            "files",
            sorted({name.split(".")[0] for name, *_ in listed}),
            ["extra/common", "extra/rank-00000", "model", "optim", "state"],
        )
        self.assertGreater(len(listed), 20)
        had = values_of(trained)
        for number, (name, key, at) in enumerate(listed):
            mutate(self.folder, name, at, ODD[number % len(ODD)])
            for options in ({}, {"verify": False}):
                kind, text = error_text(
                    lambda options=options: fsdp_optim.load(
                        self.folder, trained.model, trained.optim, **as_options(fsdp_optim.LoadOptions, **options)
                    )
                )
                self.assertEqual(kind, "CheckpointError", (name, key, text))
                for word in (str(self.folder / name), f" {key} ", str(ODD[number % len(ODD)])):
                    self.assertIn(word, text)
            check_same("nothing is changed", values_of(trained), had)
            for file, data in good.items():
                (self.folder / file).write_bytes(data)
        fsdp_optim.load(self.folder, trained.model, trained.optim, options=fsdp_optim.LoadOptions(compare=True))
        for name, _, at in listed[:4]:  # another number of the two is no damage
            mutate(self.folder, name, at, 1 - good[name][at])
            fsdp_optim.load(self.folder, trained.model, trained.optim, options=fsdp_optim.LoadOptions(compare=True))
            for file, data in good.items():
                (self.folder / file).write_bytes(data)

    def test_in_the_shard_of_any_rank(self) -> None:
        by_rank = run_on_ranks(load_mutated, 2, self.folder)
        self.assertGreater(len(by_rank[0]), 8)
        for number, (_, key) in enumerate(by_rank[0]):
            check_refused(key, [told[number][0] for told in by_rank], "CheckpointError", key, "neither 0 nor 1")

    @parameterized.expand([(2,), ("true",), (None,), (1,)])
    def test_has_state(self, value: Any) -> None:
        trained = masked()
        fsdp_optim.save(self.folder, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **QUIET))
        files: dict[str, Any] = all_bytes(self.folder)
        text = files[MANIFEST].decode()
        shown = {2: "2", "true": '"true"', None: "null", 1: "1"}[value]
        files[MANIFEST] = text.replace('"has_state":true', f'"has_state":{shown}', 1).encode()
        repair(files)
        (self.folder / MANIFEST).write_bytes(files[MANIFEST])
        kind, text = error_text(lambda: fsdp_optim.load(self.folder, trained.model, trained.optim))
        self.assertEqual(kind, "CheckpointError", text)
        self.assertIn("has_state", text)

    @parameterized.expand(["mask", "first.weight: 'seen'", "first.weight: 'done'", "state.a.0"])
    def test_what_would_not_be_loaded_is_not_saved(self, where: str) -> None:
        trained, more = masked(), {}
        fsdp_optim.save(self.folder, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **QUIET))
        odd = torch.tensor([1, 0, 2], dtype=torch.uint8).view(torch.bool)
        state = trained.optim.state[trained.params[0]]
        if where == "mask":
            trained.model.mask = odd
        elif "seen" in where:
            state["seen"].view(torch.uint8)[0, 0] = 7
        elif "done" in where:
            state["done"] = odd[2]
        else:
            more = {"extra": {"a": [odd]}}
        before = all_bytes(self.folder)
        kind, text = error_text(
            lambda: fsdp_optim.save(
                self.folder,
                trained.model,
                trained.optim,
                overwrite=True,
                **as_options(fsdp_optim.SaveOptions, **QUIET, **more),
            )
        )
        self.assertEqual(kind, "CheckpointError", text)
        self.assertIn(where, text)
        self.assertEqual(all_bytes(self.folder), before)

    def test_ranges_of_a_file(self) -> None:
        """Every byte of every range, where ranges begin and end in, before and after tensors of bools."""
        listed = [(start, stop, f"b{start}") for start, stop in ((5, 8), (2, 3), (5, 5))]
        bools = {at: key for start, stop, key in listed for at in range(start, stop)}
        ranges = BoolRanges(listed)
        for start, stop, odd in itertools.product(range(10), range(10), range(10)):
            data = bytes(2 if at == odd else 1 for at in range(start, stop))
            key = bools.get(odd) if start <= odd < stop else None
            extents = [Extent(0, memoryview(b"")), Extent(start, memoryview(data))]
            kind, text = error_text(lambda extents=extents: ranges.check("file", extents))
            self.assertEqual((kind, f"file: {key} is" in text), ("CheckpointError" if key else "", key is not None))

    def test_tensors_that_share_bytes(self) -> None:
        ranges = BoolRanges([(0, 10, "long"), (1, 2, "short"), (6, 7, "inside")])
        for odd, first, key in ((9, 3, "long"), (1, 0, "long"), (6, 6, "long")):
            data = memoryview(bytes(2 if at == odd else 0 for at in range(first, 10)))
            _, text = error_text(lambda first=first, data=data: ranges.check("file", [Extent(first, data)]))
            self.assertIn(f"file: {key} is a bool tensor", text)

    def test_many_reads_of_many_tensors(self) -> None:
        """A read is compared with few of the tensors: a file may have as many of both."""
        num = 0

        class Counted(int):
            def __lt__(self, other: int) -> bool:
                nonlocal num
                num += 1
                return int(self) < other

            __gt__ = __ge__ = __le__ = __lt__

        ranges = BoolRanges([(at, at + 1, f"b{at}") for at in range(1000)])
        for at in range(1000):
            extent = Extent(Counted(at), memoryview(b"\2"))
            _, text = error_text(lambda extent=extent: ranges.check("file", [extent]))
            self.assertIn(f"file: b{at} is a bool tensor", text)
        self.assertLess(num, 20 * 1000)

    def test_in_values_of_torch_files(self) -> None:
        """The values of the trainer, which are read whole: in a file of torch, and in an item of a DCP folder."""
        odd, model = torch.arange(29) % 6 == 0, nn.Linear(3, 1)
        data = odd.view(torch.uint8).numpy().tobytes()
        tree = {"model": model.state_dict(), "mine": (odd, 3)}
        self.folder.mkdir()
        torch.save(tree, self.folder / "file.pt")
        torch.distributed.checkpoint.save(tree, checkpoint_id=self.folder / "dcp")
        for path, where in ((self.folder / "file.pt",) * 2, (self.folder / "dcp/__0_0.distcp", self.folder / "dcp")):
            good = path.read_bytes()
            self.assertIn(data, good)
            for at in (0, len(odd) - 1):
                path.write_bytes(good.replace(data, data[:at] + b"\3" + data[at + 1 :]))
                kind, text = error_text(lambda where=where: fsdp_optim.load(where, model))
                self.assertEqual(kind, "CheckpointError", text)
                self.assertIn(f"{path}: a tensor in it is a bool tensor, and one of its bytes is 3", text)
            path.write_bytes(good)
            self.assertTrue(torch.equal(fsdp_optim.load(where, model).state["mine"][0], odd))

    def test_bools_that_no_call_needs_are_not_read(self) -> None:
        """Neither their bytes nor the archive that each is in, which may be damaged."""
        model, mask = nn.Linear(3, 1), torch.ones(65 << 20, dtype=torch.bool)  # too large to be read with other values
        torch.distributed.checkpoint.save(
            {"model": model.state_dict(), "masks": {"a": mask, "b": torch.ones(7, dtype=torch.bool)}},
            checkpoint_id=self.folder,
        )
        saved = torch.distributed.checkpoint.FileSystemReader(self.folder).read_metadata()
        (item,) = (item for index, item in saved.storage_data.items() if index.fqn == "masks.a")
        path = self.folder / item.relative_path
        good = path.read_bytes()
        data = bytearray(good)
        data[item.offset : item.offset + 60] = bytes(60)
        path.write_bytes(data)
        weight = model.weight.detach().clone()
        nn.init.zeros_(model.weight)
        fsdp_optim.load(self.folder, model)
        check_same("weight", model.weight.detach(), weight)
        masks = {"a": torch.zeros_like(mask), "b": torch.zeros(7, dtype=torch.bool)}
        kind, text = error_text(lambda: fsdp_optim.load(self.folder, model, state={"masks": masks}))
        self.assertEqual((kind, "masks.a" in text), ("CheckpointError", True), text)
        data = bytearray(good)
        data[good.index(b"\1" * 100) + mask.numel() - 1] = 7
        path.write_bytes(data)
        kind, text = error_text(lambda: fsdp_optim.load(self.folder, model, state={"masks": masks}))
        self.assertEqual((kind, "masks.a is a bool tensor" in text), ("CheckpointError", True), text)

    def test_views_of_one_storage_are_checked_once(self) -> None:
        """Of a file of torch in which many tensors share bytes; and those that are not contiguous."""
        base = torch.zeros(300, 64, dtype=torch.bool)
        weights = {"base": base, **{f"part{row}": base[row, :4] for row in range(300)}}
        model = nn.Module()
        for name, value in weights.items():
            model.register_buffer(name, value.clone())
        path = self.folder.with_suffix(".pt")
        base[7, :4] = True
        turned = (torch.arange(30) % 7 == 0).view(5, 6)
        between = torch.full((5, 3), 9, dtype=torch.uint8).view(
            torch.bool
        )  # bytes of no tensor, which were never written
        between[:, 1] = True
        model.register_buffer("between", torch.zeros(5, dtype=torch.bool))
        model.register_buffer("turned", turned.t().contiguous())
        torch.save({**weights, "turned": turned.t(), "between": between[:, 1]}, path)
        profile = cProfile.Profile()
        profile.runcall(fsdp_optim.load, path, model)
        self.assertTrue(model.get_buffer("part7").all() and model.get_buffer("between").all())
        checks = [entry for entry in profile.getstats() if getattr(entry.code, "co_name", "") == "_largest"]
        self.assertLess(sum(entry.callcount for entry in checks), 3 * len(weights))
        good = path.read_bytes()
        for data, key in ((b"\1\1\1\1", "base"), (turned.view(torch.uint8).numpy().tobytes(), "turned")):
            self.assertIn(data, good)
            path.write_bytes(good.replace(data, data[:-1] + b"\5", 1))
            kind, text = error_text(lambda: fsdp_optim.load(path, model))
            self.assertEqual((kind, f": {key} is a bool tensor" in text), ("CheckpointError", True), text)
            self.assertTrue(text.startswith(str(path)), text)

    def test_between_other_tensors_of_one_item(self) -> None:
        """DCP's safetensors: the metadata say of all tensors of a file that they begin where the first does."""
        model = nn.Linear(3, 2)
        model.register_buffer("mask", torch.arange(29) % 3 == 0)
        filesystem = torch.distributed.checkpoint.filesystem
        if not hasattr(filesystem, "SerializationFormat"):
            self.skipTest("this torch writes no such files")
        kind = filesystem.SerializationFormat.SAFETENSORS
        writer = FileSystemWriter(self.folder, serialization_format=kind)
        of_trainer = torch.arange(31) % 5 == 0  # of the trainer, whose values are read whole
        torch.distributed.checkpoint.save({"model": model.state_dict(), "mine": of_trainer}, storage_writer=writer)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        for value in model.state_dict().values():
            value.zero_()
        fsdp_optim.load(self.folder, model)
        check_same("values", model.state_dict(), saved)
        (path,) = (file for file in self.folder.iterdir() if file.name != ".metadata")
        good = path.read_bytes()
        for key, value in (("mask", saved["mask"]), ("mine", of_trainer)):
            data = value.view(torch.uint8).numpy().tobytes()
            for at in (0, len(data) - 1):
                path.write_bytes(good.replace(data, data[:at] + b"\2" + data[at + 1 :]))
                kind, text = error_text(lambda: fsdp_optim.load(self.folder, model))
                self.assertEqual((kind, f"{key} is a bool tensor" in text), ("CheckpointError", True), text)

    def test_in_files_of_dcp(self) -> None:
        """They have no checksums: in weights, in the optimizer's state, and in a tree of `state=`."""
        size = 37
        patterns = {key: torch.arange(size) % every == 0 for key, every in (("mask", 2), ("seen", 3), ("tree.deep", 5))}
        model = nn.Linear(size, 1, bias=False)
        model.register_buffer("mask", patterns["mask"].clone())
        optim = torch.optim.SGD(model.parameters(), momentum=0.9)
        optim.state[model.weight]["seen"] = patterns["seen"].clone().view(1, size)
        tree = {"tree": {"deep": patterns["tree.deep"].clone()}}
        fsdp_optim.save(self.folder, model, optim, state=tree, format="dcp")
        for key, pattern in patterns.items():
            data = pattern.view(torch.uint8).numpy().tobytes()
            (path,) = (file for file in self.folder.glob("*.distcp") if data in file.read_bytes())
            good = path.read_bytes()
            for at in (0, size - 1):
                path.write_bytes(good.replace(data, data[:at] + b"\2" + data[at + 1 :]))
                empty = {"tree": {"deep": torch.zeros(size, dtype=torch.bool)}}
                kind, text = error_text(lambda empty=empty: fsdp_optim.load(self.folder, model, optim, state=empty))
                self.assertEqual(kind, "CheckpointError", (key, text))
                self.assertIn("is a bool tensor, and one of its bytes is 2", text)
                self.assertIn(f"{key} is ", text)
                self.assertFalse(empty["tree"]["deep"].any())
            path.write_bytes(good)
        fsdp_optim.load(self.folder, model, optim, state=tree)


if __name__ == "__main__":
    unittest.main()
