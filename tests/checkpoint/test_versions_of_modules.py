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


class Word(str):
    __slots__ = ()


ODD = ((1, 2), True, [1], Word("3"), None)
"""What no checkpoint has as a version: the entries are saved without one, as those of torch without `_metadata`."""


def odd(version: Any) -> Any:
    made = nn.Sequential(nn.Linear(2, 2), type("Odd", (Codes,), {"_version": version})())
    made[1].codes = [5]
    return made


def odd_versions_in_memory() -> None:
    for version in ODD:
        source, target = in_fsdp2(odd(version)), in_fsdp2(odd(version))
        target[1].codes = [0]
        full = fsdp_optim.gather_full_model_state_dict(source)
        fsdp_optim.scatter_full_model_state_dict(target, full)
        check_same(repr(version), target[1].codes, [5])


class Codes(nn.Module):
    """Without parameters."""

    _version = VERSION

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.told = [0], list[Any]()

    def get_extra_state(self) -> Any:
        return self.codes

    def set_extra_state(self, state: Any) -> None:
        self.codes = state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        self.told.append(local_metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def without_parameters() -> None:
    for name_of in (None, lambda fqn, rank: fqn):
        options = fsdp_optim.CallOptions(name_of=name_of)
        model = in_fsdp2(nn.Sequential(nn.Linear(2, 2), Codes()))
        full = fsdp_optim.gather_full_model_state_dict(model, None, options=options)
        target = nn.Sequential(nn.Linear(2, 2), Codes())
        target.load_state_dict(full)
        check_same(f"name_of {name_of}", target[1].told, [VERSION])


def in_memory() -> None:
    with cpu():
        full_dicts()
        full_dict_of_stages()
        renamed_full_dict()
        without_parameters()
        odd_versions_in_memory()


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

    @parameterized.expand(FORMATS)
    def test_odd_versions(self, name: str, format: Any) -> None:
        for number, version in enumerate(ODD):
            own, other = self.root / f"{number}", self.root / f"{number} other"
            model = odd(version)
            optim = adam(model.parameters())
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optim.step()
            fsdp_optim.save(own, model, optim)
            if name != "fairscale_shards":  # whose units are those of the other model
                fsdp_optim.convert(own, other, format=format)
            target = odd(version)
            target[1].codes = [0]
            fsdp_optim.load(other if other.exists() else own, target)
            check_same(repr(version), (target[1].codes, target[1].told), ([5], [None]))

    def test_an_odd_version_in_a_file_of_torch(self) -> None:
        saved = odd((1, 2)).state_dict()
        torch.save({"model": saved}, self.root / "a.pt")
        fsdp_optim.convert(self.root / "a.pt", self.root / "b", format="torch")
        torch.load(self.root / "b" / "model.pt", weights_only=True)

    def test_files_of_each_rank(self) -> None:
        run_on_ranks(save_rank_files, 2, str(self.root))
        for name in RANK_FILES:
            target = Deep()
            fsdp_optim.load(self.root / name, target)
            check_loaded(name, target)


if __name__ == "__main__":
    unittest.main()
