"""The version of a module's code goes with its entries through every dict and file, because later versions change earlier ones'.

The module here keeps what it was told when it loaded. torch's own `load_state_dict()` of the unwrapped model is the oracle.
"""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same
from kit.optimizers import adam
from kit.rank_files import save_fairscale, save_sharded
from kit.wrapping import cpu
from kit.wraps import in_ddp, in_fairscale, in_fsdp1, in_fsdp2
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import registry
from fsdp_optim.plugins import FairscaleShards
from fsdp_optim.testing import run_on_ranks

VERSION = 3
WRAPS = {"DDP": in_ddp, "fairscale": in_fairscale, "FSDP1": in_fsdp1, "FSDP2": in_fsdp2}
RANK_FILES = ("fairscale", "FSDP1", "FSDP2")


class Packed(nn.Module):
    """Its scales were reciprocals before version 3."""

    _version = VERSION

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 3), float(number)))
        self.scales = [float(number)] * 4
        self.told: list[Any] = []

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scales"] = self.scales

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *lists: Any
    ) -> None:
        version = local_metadata.get("version")
        self.told.append(version)
        scales = state_dict.pop(prefix + "scales", None)
        if scales is not None:
            self.scales = list(scales) if version == VERSION else [1 / scale for scale in scales]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)


class Deep(nn.Module):
    units = ("",)

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(Packed(number)))
        self.norm = nn.BatchNorm1d(3)
        self.shared = self.inner[2]


NAMES = [fqn for fqn, _ in Deep().named_parameters()]
FORMATS = [
    (name, FairscaleShards(world_size=2, units={"": NAMES}) if name == "fairscale_shards" else name)
    for name in registry.format_names()
]


def packed_of(model: Deep) -> Packed:
    (packed,) = (module for module in model.modules() if isinstance(module, Packed))
    return packed


def check_loaded(where: str, model: Deep, number: int = 5) -> None:
    packed = packed_of(model)
    check_same(f"{where}: what the module was told", {*packed.told}, {VERSION})
    check_same(f"{where}: its entry", packed.scales, [float(number)] * 4)


def full_dicts() -> None:
    for name, wrap in WRAPS.items():
        wrapped = wrap(Deep(5))
        full = fsdp_optim.gather_full_model_state_dict(wrapped, recipient_rank=None)
        target, oracle = Deep(), Deep(5).state_dict()
        check_same(f"{name}: beside the entries", dict(full._metadata), dict(oracle._metadata))  # type: ignore[attr-defined]
        target.load_state_dict(full)
        check_loaded(f"{name}: torch's load_state_dict()", target)
        saved = Path(tempfile.mkdtemp(), "model.pt")
        torch.save(full, saved)
        torch.load(saved, weights_only=True)
        target = Deep()
        fsdp_optim.scatter_full_model_state_dict(wrap(target), full if dist.get_rank() == 0 else None)
        check_loaded(f"{name}: scattered", target)


class Stage(nn.Module):
    def __init__(self, rank: int, number: int = 0) -> None:
        super().__init__()
        made = {0: lambda: nn.Sequential(nn.Linear(3, 3)), 1: lambda: nn.Sequential(nn.Dropout(), Packed(number))}
        self.stages = nn.ModuleDict({str(rank): made[rank]()})


def full_dict_of_stages() -> None:
    """The lowest rank gets the versions of modules that only another rank has."""
    rank = dist.get_rank()
    options = fsdp_optim.CallOptions(process_group=dist.group.WORLD)
    full = fsdp_optim.gather_full_model_state_dict(Stage(rank, 5), options=options)
    if full is not None:
        versions = {path: of_module["version"] for path, of_module in full._metadata.items()}  # type: ignore[attr-defined]
        paths = ("", "stages", "stages.0", "stages.0.0", "stages.1", "stages.1.1")
        check_same("versions", dict(sorted(versions.items())), dict.fromkeys(paths, 1) | {"stages.1.1": VERSION})
    target = Stage(rank)
    fsdp_optim.scatter_full_model_state_dict(target, full, options=options)
    if rank == 1:
        check_loaded("stages", target)  # type: ignore[arg-type]


def renamed_full_dict() -> None:
    """`name_of` gives parameters other names; the versions are under the paths in these."""
    options = fsdp_optim.CallOptions(name_of=lambda fqn, rank: f"model.{fqn}")
    full = fsdp_optim.gather_full_model_state_dict(in_fsdp2(Deep(5)), recipient_rank=None, options=options)
    outer = nn.ModuleDict({"model": Deep()})
    outer.load_state_dict(full)
    check_loaded("name_of", outer["model"])  # type: ignore[arg-type]


def in_memory() -> None:
    with cpu():
        full_dicts()
        full_dict_of_stages()
        renamed_full_dict()


def save_rank_files(root: str) -> None:
    with cpu():
        for name in RANK_FILES:
            model = WRAPS[name](Deep(5))
            optim = adam(model.parameters())
            folder = Path(root, name)
            folder.mkdir(exist_ok=True)
            if name == "fairscale":
                save_fairscale(str(folder), "checkpoint_last", model, optim)
            else:
                save_sharded(str(folder), model, optim)


class VersionsOfModulesTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = Path(temporary.name)

    def test_full_dicts_in_memory(self) -> None:
        run_on_ranks(in_memory, 2)

    @parameterized.expand(FORMATS)
    def test_formats_that_are_written(self, name: str, format: Any) -> None:
        model = Deep(5)
        optim = adam(model.parameters())
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optim.step()
        fsdp_optim.save(self.root / "own", model, optim)
        fsdp_optim.convert(self.root / "own", self.root / "other", format=format)
        target = Deep()
        fsdp_optim.load(self.root / "other", target, adam(target.parameters()))
        check_loaded(name, target)
        fsdp_optim.convert(self.root / "other", self.root / "back", model=Deep(), format="safetensors")
        target = Deep()
        fsdp_optim.load(self.root / "back", target, adam(target.parameters()))
        check_loaded(f"{name}, and back", target)

    @parameterized.expand([("dcp",), ("torchtitan",)])
    def test_formats_that_are_saved(self, format: str) -> None:
        fsdp_optim.save(self.root / "a", Deep(5), format=format)
        target = Deep()
        fsdp_optim.load(self.root / "a", target)
        check_loaded(format, target)

    @parameterized.expand([("torch", "model.pt"), ("torch_file", "checkpoint.pt")])
    def test_torch_files_are_loaded_by_torch(self, format: str, name: str) -> None:
        fsdp_optim.save(self.root / "own", Deep(5))
        fsdp_optim.convert(self.root / "own", self.root / "other", format=format)
        saved = torch.load(self.root / "other" / name, weights_only=True)
        target = Deep()
        target.load_state_dict(saved if format == "torch" else saved["model"])
        check_loaded(format, target)

    def test_files_of_each_rank(self) -> None:
        run_on_ranks(save_rank_files, 2, str(self.root))
        for name in RANK_FILES:
            target = Deep()
            fsdp_optim.load(self.root / name, target)
            check_loaded(name, target)


if __name__ == "__main__":
    unittest.main()
