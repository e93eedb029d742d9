"""The files of `save` are safetensors to the letter: read back by a reader of this file, and by the safetensors package.

The reader is that of tests/kit/checkpoint_format.py, which knows the format only from its description.
`PYTHONPATH=tests python tests/checkpoint/test_safetensors_format.py` makes the golden checkpoint.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.checkpoint_format import (
    GOLDEN,
    MODELS,
    Buffered,
    NotValid,
    check_folder,
    check_sums,
    extra,
    in_order,
    read_manifest,
    read_safetensors,
    tensors_of,
)
from kit.compare import Differs, check_same
from kit.golden import check_kept, digest, make
from kit.local_parts import local_of
from kit.optimizers import OfModel, adam, sgd
from kit.options import as_options, state_for
from kit.trained import Oracle, Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


def save_trained(path: Path, wrapper: str, model: str, **options: Any) -> None:
    """On each rank: what the tests look at."""
    with cpu():
        make = sgd if model == "Large" else adam
        trained = Trained(wrapper, make, model=MODELS[model])
        options.setdefault("process_group", trained.process_group)
        fsdp_optim.save(path, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **options))


@functools.cache
def oracle(model: str) -> Oracle:
    return Oracle(sgd if model == "Large" else adam, model=MODELS[model])


def check_content(folder: Path, model: str) -> None:
    """Raise unless the files have what the unwrapped model's training has, to the bit."""
    wanted = oracle(model)
    check_same("the model", tensors_of(folder, "model"), in_order(wanted.model.state_dict()))
    state = {f"state.{fqn}.{name}": v for fqn, values in wanted.by_name().items() for name, v in values.items()}
    check_same("the optimizer", tensors_of(folder, "optim"), in_order(state))
    first = sorted(folder.glob("optim*.safetensors"))[0]
    groups = json.loads(read_safetensors(first).metadata["param_groups"])
    check_same("params of the groups", [group["params"] for group in groups], [wanted.names])
    for key in ("lr", "weight_decay"):
        check_same(key, [group[key] for group in groups], [group[key] for group in wanted.optim.param_groups])


# ------------------------------------------------------------------------------------------- tests


class FormatTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = _temporary()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def saved(self, world_size: int, wrapper: str, model: str, **options: Any) -> Path:
        run_on_ranks(save_trained, world_size, self.root / "saved", wrapper, model, **options)
        return self.root / "saved"

    @parameterized.expand(
        [("FSDP2", 1), ("FSDP2", 2), ("FSDP2", 3), ("fairscale flat", 2), ("FSDP1 flat", 2), ("DDP", 2), ("plain", 2)]
    )
    def test_one_file_each(self, wrapper: str, world_size: int) -> None:
        folder = self.saved(world_size, wrapper, "Buffered")
        names = check_folder(folder)
        check_same("files", [n for n in names if "/" not in n], ["model.safetensors", "optim.safetensors"])
        check_content(folder, "Buffered")
        check_same("format", read_safetensors(folder / "model.safetensors").metadata["format"], "pt")
        check_same("the world", read_manifest(folder)["world_size"], world_size)
        check_same("what lies beside it", [p.name for p in self.root.iterdir()], ["saved"])

    @parameterized.expand([("FSDP2",), ("plain",)])
    def test_every_dtype(self, wrapper: str) -> None:
        folder = self.saved(2, wrapper, "Dtypes")
        check_folder(folder)
        check_content(folder, "Dtypes")

    def test_several_segments(self) -> None:
        folder = self.saved(2, "FSDP2", "Large")
        check_folder(folder)
        for what in ("model", "optim"):
            if check_sums(folder / f"{what}.safetensors") < 3:
                raise NotValid(f"{what}: 9 MiB in less than 3 segments of at most 4 MiB")
        check_content(folder, "Large")

    @parameterized.expand(
        [("split", 100, {}), ("each in its own", 1, {}), ("per rank", 0, {"strategy": "per_rank_files"})]
    )
    def test_several_files(self, _: str, most: int, options: dict[str, Any]) -> None:
        if most:
            options = {**options, "max_file_size": most}
        folder = self.saved(2, "FSDP2", "Buffered", **options)
        names = check_folder(folder)
        check_content(folder, "Buffered")
        for what in ("model", "optim"):
            parts = [name for name in names if name.startswith(what)]
            count = len(parts)
            check_same("names", parts, [f"{what}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)])
            files = {name: read_safetensors(folder / name) for name in parts}
            index = json.loads((folder / f"{what}.safetensors.index.json").read_bytes())
            weight_map = {tensor: name for name, file in files.items() for tensor in file.tensors}
            check_same("weight_map", in_order(index["weight_map"]), in_order(weight_map))
            total = sum(len(file.data) for file in files.values())
            check_same("total_size", index["metadata"]["total_size"], total)
            too_large = [n for n, file in files.items() if most and len(file.data) > most and len(file.tensors) > 1]
            if too_large or count < 2:
                raise NotValid(f"{count} files, too large: {too_large}")

    def test_without_checksums_there_are_none(self) -> None:
        folder = self.saved(2, "FSDP2", "Buffered", checksums=False)
        check_same("tables", list(folder.rglob("*.sums")), [])
        check_folder(folder)
        check_content(folder, "Buffered")

    def test_without_an_optimizer(self) -> None:
        run_on_ranks(save_model_only, 2, self.root / "saved")
        names = check_folder(self.root / "saved")
        check_same("files", [name for name in names if "/" not in name], ["model.safetensors"])
        check_same(
            "the model", tensors_of(self.root / "saved", "model"), in_order(oracle("Buffered").model.state_dict())
        )

    def test_what_the_trainer_adds(self) -> None:
        folder = self.saved(2, "FSDP2", "Buffered", extra=extra(), per_rank_extra={"rng": torch.arange(3)})
        names = check_folder(folder)
        wanted = ["extra/common.safetensors", "extra/rank-00000.safetensors", "extra/rank-00001.safetensors"]
        check_same("files", [name for name in names if "/" in name], wanted)
        check_same(
            "tensors of all ranks",
            read_safetensors(folder / "state.safetensors").tensors,
            {"tensor": extra()["tensor"]},
        )
        for name in wanted[1:]:
            check_same(name, list(read_safetensors(folder / name).tensors.values()), [torch.arange(3)])

    def test_the_reader_of_this_file_is_not_blind(self) -> None:
        """The reader of the tests above refuses wrong files."""
        folder = self.saved(2, "FSDP2", "Buffered")
        path = folder / "optim.safetensors"
        whole = path.read_bytes()
        file = read_safetensors(path)
        first, *_, last = file.places
        spans = {name: f'"data_offsets":[{begin},{end}]'.encode() for name, (begin, end) in file.places.items()}
        if not all(re.sub(rb"\s", b"", file.header).count(span) == 1 for span in spans.values()):
            raise NotValid("offsets are not written as this test thinks")
        tight = bytearray(whole)
        tight[-1] ^= 1
        for wrong in (whole[:-1], whole + b"\0", whole[:8] + b" " + whole[9:], whole.replace(b"F32", b"F64", 1)):
            path.write_bytes(wrong)
            with self.assertRaises((NotValid, ValueError)):
                read_safetensors(path)
        path.write_bytes(bytes(tight))
        with self.assertRaisesRegex(NotValid, "another hash"):
            check_sums(path)
        with self.assertRaises(Differs):
            check_same("the optimizer", read_safetensors(path).tensors[last], file.tensors[last])
        check_same(f"{first} is as it was", read_safetensors(path).tensors[first], file.tensors[first])


def save_model_only(path: Path) -> None:
    with cpu():
        fsdp_optim.save(path, Trained("FSDP2", model=Buffered).model)


def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fsdp_optim_format_")


# ------------------------------------------------------------------------------------------- the golden checkpoint


# What `PYTHONPATH=tests python tests/checkpoint/test_safetensors_format.py` printed. It is made once for each version of
# the format, and never again:
# a golden checkpoint that a newer version cannot load is a bug of that version.
GOLDEN_SHA256 = "f8c17fcab4ba09d51c1201f826911964cc551d8374f89eea67a77362d134b4af"


class Golden(nn.Module):
    units = ("stem", "low", "")
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 7)
        self.low = nn.Linear(3, 5, bias=False, dtype=torch.bfloat16)
        self.named = nn.ModuleDict({"größe": nn.Linear(2, 3)})
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(5))


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [{"params": params[:2], "lr": 0.5}, {"params": params[2:], "lr": 0.125, "weight_decay": 0.0625}]
    return torch.optim.AdamW(groups, betas=(0.5, 0.75))


def golden_model(wrapper: str, filled: bool) -> Trained:
    """Every value is a simple function of the element's number, not of anybody's arithmetic."""
    trained = Trained(wrapper, OfModel(two_groups), steps=1, model=Golden)
    trained.forget_gradients()
    with torch.no_grad():
        for param, index in zip(trained.params, trained.index, strict=True):
            values = trained.optim.state[param]
            values["step"].fill_(7 if filled else 1)
            by_name = {"exp_avg": -index / 4, "exp_avg_sq": index * 2}
            for tensor, numbers in [(param, index), *((values[name], n) for name, n in by_name.items())]:
                local = local_of(tensor)
                local.copy_(numbers.reshape(local.shape) if filled else torch.zeros(()))
    for buffer in () if filled else trained.model.buffers():
        buffer.zero_()
    return trained


def contents(trained: Trained) -> dict[str, Any]:
    """This rank's part of all that a checkpoint restores."""
    state = [in_order(trained.optim.state[param]) for param in trained.params]
    return {
        "parameters": [local_of(param).detach() for param in trained.params],
        "buffers": dict(trained.model.named_buffers()),
        "state": [{name: local_of(value) for name, value in values.items()} for values in state],
        "groups": [in_order({k: v for k, v in g.items() if k != "params"}) for g in trained.optim.param_groups],
    }


def save_golden(path: Path) -> None:
    trained = golden_model("FSDP2", filled=True)
    own = {"rank": dist.get_rank(), "rng": torch.arange(3) + dist.get_rank()}
    fsdp_optim.save(path, trained.model, trained.optim, state=state_for(extra(), own))


def load_golden(path: Path, wrapper: str) -> None:
    wanted, trained = golden_model(wrapper, filled=True), golden_model(wrapper, filled=False)
    for group in trained.optim.param_groups:
        group["lr"] = 99.0
    restored = fsdp_optim.load(
        path, trained.model, trained.optim, options=fsdp_optim.LoadOptions(process_group=trained.process_group)
    )
    check_same("loaded", contents(trained), contents(wanted))
    check_same("extra", {name: restored.state[name] for name in extra()}, extra())
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = {"rank": rank, "rng": torch.arange(3) + rank} if rank < 2 else {}  # it was saved by two
    check_same("per_rank", {name: restored.state[name] for name in ("rank", "rng") if name in restored.state}, own)
    check_same("missing", len(restored.missing_keys), 0 if rank < 2 else 2)


def save_on_ranks(path: Path) -> None:
    run_on_ranks(save_golden, 2, path)


class GoldenTest(unittest.TestCase):
    def test_it_is_still_what_it_was(self) -> None:
        check_kept(GOLDEN, GOLDEN_SHA256, 1)

    def test_a_plain_process_loads_it(self) -> None:
        load_golden(GOLDEN, "plain")

    @parameterized.expand([("FSDP2", 2), ("FSDP2", 3), ("plain", 2)])
    def test_ranks_load_it(self, wrapper: str, world_size: int) -> None:
        run_on_ranks(load_golden, world_size, GOLDEN, wrapper)


class MakeGoldenTest(unittest.TestCase):
    """The program that makes the golden checkpoint makes one that the tests accept."""

    def test_made_and_loaded(self) -> None:
        with _temporary() as root:
            folder = Path(root) / "golden"
            first = make(folder, save_on_ranks)
            self.assertEqual(digest(folder), first)
            load_golden(folder, "plain")
            run_on_ranks(load_golden, 3, folder, "FSDP2")
            (folder / "optim.safetensors").rename(folder / "other.safetensors")
            self.assertNotEqual(digest(folder), first)
            shutil.rmtree(folder)
            self.assertEqual(list(_names(Path(root))), [])


def _names(folder: Path) -> Iterator[str]:
    return (path.name for path in folder.iterdir())


if __name__ == "__main__":
    print(f'GOLDEN_SHA256 = "{make(GOLDEN, save_on_ranks)}"')
