"""`load` takes files of torch.save with full checkpoints, as torch itself, fairscale, Lightning and trainers write them."""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import unittest
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.cases import expand
from kit.checkpoints import Whole, buffers_of, load, mine, scramble
from kit.compare import Differs, check_same, error_text, refused_on_ranks
from kit.folders import SharedFolder
from kit.optimizers import OfModel, two_groups
from kit.pretrained import build, tensors_of
from kit.scripts import TRAINING, run
from kit.trained import Oracle, Trained
from kit.wrapping import STEPS, WRAPPERS, cpu, in_fairscale, sgd
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

import fsdp_optim
from fsdp_optim.buckets.objects.memory import MemoryBucket
from fsdp_optim.buckets.objects.store import ObjectStore
from fsdp_optim.checkpoint.common.arguments import LoadArguments
from fsdp_optim.checkpoint.load import restore
from fsdp_optim.foreign.archive.torch_archive import read_archive
from fsdp_optim.foreign.reader import tensors_in
from fsdp_optim.foreign.torch.reader import TORCH_FILE
from fsdp_optim.storage.posix.opened_any import OpenFiles
from fsdp_optim.testing import run_on_ranks

ADAM = OfModel(two_groups)
SIZES = (1, 2, 3)


def whole(wrapper: Any, steps: int = STEPS, make: Any = ADAM) -> Trained:
    """A model with buffers and an optimizer with two groups, trained in a wrapper."""
    return Trained(wrapper, make, steps, Whole)


# ------------------------------------------------------------------------------------------- writers


def of_fsdp1(trained: Trained) -> tuple[Any, Any]:
    """FSDP1's full dicts by name."""
    with TorchFSDP.state_dict_type(
        trained.model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
    ):
        return trained.model.state_dict(), TorchFSDP.optim_state_dict(trained.model, trained.optim)


def of_fsdp2(trained: Trained, flat: bool) -> tuple[Any, Any]:
    """The full dicts of torch's state dict API, nested or flattened."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=flat)
    return (
        get_model_state_dict(trained.model, options=options),
        get_optimizer_state_dict(trained.model, trained.optim, options=options),
    )


def write_all(root: Path) -> None:
    """On two ranks: each wrapper's files as its own library makes them, written by the first rank."""
    is_first = dist.get_rank() == 0

    def put(name: str, value: Any, **options: Any) -> None:
        if is_first:
            (root / name).parent.mkdir(exist_ok=True)
            torch.save(value, root / name, **options)

    with cpu():
        model, named = of_fsdp1(whole("FSDP1 flat"))
        put("fsdp1-names.pt", {"model": model, "optimizer": named, "epoch": 3})
        put("olmo/model.pt", model)
        put("olmo/optim.pt", named)
        put("olmo/train.pt", {"global_step": 7, "seen": torch.arange(3)})
        put("pytorch_model_fsdp/pytorch_model_fsdp.bin", model)
        put("pytorch_model_fsdp/optimizer.bin", named)
        put("pytorch_model_fsdp/scheduler.bin", {"last_epoch": 5})
        put("pytorch_model_fsdp/random_states_0.pkl", {"torch": torch.get_rng_state()})
        if is_first:
            one = oracle()
            by_id = TorchFSDP.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, one.model, optim=one.optim)
            put("fsdp1-ids.pth", {"state_dict": model, "optim_state_dict": by_id, "loss": torch.tensor(0.5)})
        trained = whole("FSDP2")
        model, named = of_fsdp2(trained, flat=False)
        put("fsdp2.pt", {"app": {"model": model, "optim": named}})
        put("bare-model.pt", model)
        put("bare-optim.pt", named)
        put("sharded.pt", {"model": trained.model.state_dict()})  # a part of one rank
        put("flat.pt", {"model": model, "optimizer": of_fsdp2(trained, flat=True)[1]})
        trained = whole("DDP")
        value = {
            "model_state_dict": trained.model.state_dict(),
            "optimizer_state_dict": trained.optim.state_dict(),
            "args": argparse.Namespace(lr=0.5),
            "scheduler": {"last_epoch": 2},
        }
        put("ddp.ckpt", value)
        put("ddp-legacy.ckpt", value, _use_new_zipfile_serialization=False)
        put("hugging/optimizer.pt", trained.optim.state_dict())
        put("hugging/scheduler.pt", {"last_epoch": 2})
        put("hugging/training_args.bin", argparse.Namespace(lr=0.5))
        put("hugging/rng_state.pth", {"cpu": torch.get_rng_state()})
        if is_first:
            plain = {name: tensor.contiguous() for name, tensor in trained.model.module.state_dict().items()}
            save_file(plain, root / "hugging" / "model.safetensors")
        write_fairscale(put)


def write_fairscale(put: Callable[..., None]) -> None:
    """fairscale's full model and what its own method gathers of one unit, as it has been written since its first version."""
    from fairscale.nn.data_parallel import FullyShardedDataParallel as Theirs

    trained = Trained(one_unit, sgd, 0)
    trained.model(torch.ones(2, 5)).sum().backward()  # its gather needs buffers that a forward pass makes
    trained.forget_gradients()
    trained.fresh_optimizer()
    trained.step(range(STEPS))
    model = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    full = copy.deepcopy(Theirs.gather_full_optim_state_dict(trained.model, trained.optim, recipient_rank=0))
    if full is None:
        return
    put("fairscale.pt", {"model": model, "last_optimizer_state": full, "extra_state": {"epoch": 2}})
    first = {key: value for key, value in full.items() if key in ("state", "param_id_map", "param_groups")}
    put("fairscale-first.pt", {"model": model, "optimizer": first}, _use_new_zipfile_serialization=False)
    lists = copy.deepcopy(full)
    last = max(lists["state"])
    for key, values in lists["state"].items():
        if key == last:  # fairscale gives a 0-dim tensor of each rank to the last parameter of a unit
            values["scale"] = [torch.tensor(2.5), torch.tensor(2.5)]
    put("fairscale-lists.pt", {"model": model, "optimizer": lists})
    for values in lists["state"].values():
        if "scale" in values:
            values["scale"][1] += 1
    put("fairscale-lists-differ.pt", {"model": model, "optimizer": lists})


def write_units(root: Path) -> None:
    """The state that fairscale itself gathers of a model with several units, whose ids count unit after unit."""
    from fairscale.nn.data_parallel import FullyShardedDataParallel as Theirs

    with cpu():
        trained = Trained("fairscale flat", sgd, 0)
        trained.model(torch.ones(2, 5)).sum().backward()
        trained.forget_gradients()
        trained.fresh_optimizer()
        trained.step(range(STEPS))
        model = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
        full = copy.deepcopy(Theirs.gather_full_optim_state_dict(trained.model, trained.optim, recipient_rank=0))
        if full is not None:
            torch.save({"model": model, "last_optimizer_state": full}, root / "fairscale-units.pt")


def load_units(root: Path) -> None:
    """The same units at another size; another wrapper does not know the order of units."""
    with cpu():
        alike, target = (Trained("fairscale flat", sgd, steps) for steps in (STEPS, 0))
        scramble(target)
        load(root / "fairscale-units.pt", target, compare=True)
        check_same("units", mine(target), mine(alike))
        other = Trained("FSDP2", sgd, 0)
        refused_on_ranks(
            "other units", partial(load, root / "fairscale-units.pt", other), "StateError", "by FSDP unit", "rekey"
        )


def one_unit(model: Any) -> Any:
    """fairscale's own full dict has right names for one unit only."""
    model.units = ("",)
    return in_fairscale(model)


def oracle() -> Oracle:
    return Oracle(ADAM, STEPS, Whole)


# ------------------------------------------------------------------------------------------- loads

LOADS = (
    ("fsdp1-names.pt", "FSDP2"),
    ("fsdp1-names.pt", "FSDP1 flat"),
    ("fsdp1-ids.pth", "FSDP1 orig"),
    ("fsdp1-ids.pth", "fairscale flat"),
    ("fsdp2.pt", "FSDP1 flat"),
    ("fsdp2.pt", "FSDP2"),
    ("flat.pt", "FSDP1 orig"),
    ("flat.pt", "plain"),
    ("ddp.ckpt", "FSDP2"),
    ("ddp.ckpt", "fairscale non-flat"),
    ("ddp-legacy.ckpt", "DDP"),
    ("ddp-legacy.ckpt", "fairscale flat"),
    ("olmo", "FSDP2"),
    ("pytorch_model_fsdp", "FSDP1 orig"),
    ("hugging", "DDP"),
)

EXTRAS: Mapping[str, Any] = {
    "fsdp1-names.pt": {"epoch": 3},
    "fsdp1-ids.pth": {"loss": torch.tensor(0.5)},
    "olmo": {"train": {"global_step": 7, "seen": torch.arange(3)}},
    "pytorch_model_fsdp": {"scheduler": {"last_epoch": 5}},
}


def load_all(root: Path, loads: Sequence[tuple[str, str]]) -> None:
    """Each file in its wrapper: values, buffers, state and groups are those of training without files, bit for bit."""
    for name, wrapper in loads:
        with cpu():
            alike, target = whole(wrapper), whole(wrapper, 0)
            scramble(target)
            restored = load(root / name, target, compare=True)
            what = f"{name} -> {wrapper} on {dist.get_world_size()} ranks"
            check_same(what, mine(target), mine(alike))
            check_same(f"{what}: names", (restored.missing_keys, restored.unexpected_keys), ((), ()))
            if name in EXTRAS:
                check_same(f"{what}: extra", dict(restored.state), EXTRAS[name])
            for one in (target, alike):
                one.step([STEPS])
            check_same(f"{what}: trained on", mine(target), mine(alike))


def load_parts(root: Path) -> None:
    """Weights alone, an optimizer alone, and a model without the optimizer of its file."""
    with cpu():
        alike, target = whole("FSDP2"), whole("FSDP2", 0)
        scramble(target)
        for name in ("bare-model.pt", "olmo/model.pt", "ddp.ckpt"):
            scramble(target)
            fsdp_optim.load(root / name, target.model, options=fsdp_optim.LoadOptions(compare=True))
            check_same(name, mine(target)["values"], mine(alike)["values"])
            check_same(name, buffers_without_scratch(target), buffers_without_scratch(alike))
        scramble(target)
        before = mine(target)["values"]
        for strict in (True, False):
            asked = partial(load, root / "bare-optim.pt", target, strict=strict)
            refused_on_ranks(f"no weights, strict={strict}", asked, "StateError", "no weights", 'weights="none"')
        load(root / "bare-optim.pt", target, compare=True, weights="none")
        check_same("the state", mine(target)["state"], mine(alike)["state"])
        check_same("the weights", mine(target)["values"], before)
        refused_on_ranks(
            "no optimizer", partial(fsdp_optim.load, root / "bare-optim.pt", target.model), "StateError", "no weights"
        )
        refused_on_ranks(
            "no state", partial(load, root / "bare-model.pt", target), "StateError", "without an optimizer"
        )


def buffers_without_scratch(trained: Trained) -> dict[str, Tensor]:
    return {name: value for name, value in buffers_of(trained).items() if not name.endswith("scratch")}


def load_fairscales(root: Path) -> None:
    """fairscale's dicts of all versions; what a list of numbers of all ranks has, is one number."""
    wanted = {name: dict(values) for name, values in Oracle(sgd).by_name().items()}
    for name, wrapper in (
        ("fairscale.pt", "FSDP2"),
        ("fairscale.pt", "FSDP1 flat"),
        ("fairscale-first.pt", "plain"),
        ("fairscale-first.pt", "FSDP1 orig"),
        ("fairscale-lists.pt", "FSDP2"),
    ):
        with cpu():
            alike, target = (Trained(wrapper, sgd, steps) for steps in (STEPS, 0))
            scramble(target)
            load(root / name, target, strict="lists" not in name)
            check_same(f"{name}: values", mine(target)["values"], mine(alike)["values"])
            state = target.gather(None, "name")["state"]
            scale = {"scale": torch.tensor(2.5)} if "lists" in name else {}
            check_same(
                f"{name}: state", state, {key: {**values, **scale} for key, values in wanted.items()}, in_order=False
            )
    with cpu():
        target = Trained("FSDP2", sgd, 0)
        refused_on_ranks(
            "lists", partial(load, root / "fairscale-lists-differ.pt", target), "StateError", "scale", "differs between"
        )


def load_what_only_its_class_can_make(root: Path) -> None:
    """An object of another class is withheld by name, and everything else is loaded."""
    with cpu():
        target = whole("FSDP2", 0)
        restored = load(root / "ddp.ckpt", target)
        check_same("a plain value", restored.state["scheduler"], {"last_epoch": 2})
        kind, text = error_text(lambda: restored.state["args"])
        if kind != "CheckpointError" or "argparse.Namespace" not in text or "allow_pickle=True" not in text:
            raise Differs(f"{kind}: {text}")
        again = load(root / "ddp.ckpt", target, allow_pickle=True)
        check_same("with allow_pickle", again.state["args"], argparse.Namespace(lr=0.5))
        check_same("with allow_pickle", again.state["scheduler"], {"last_epoch": 2})
        of_folder = load(root / "hugging", target, allow_pickle=True)
        check_same("a file", of_folder.state["training_args"], argparse.Namespace(lr=0.5))


# ------------------------------------------------------------------------------------------- what is read


class Wide(nn.Module):
    """Rows that three ranks share evenly, large enough to tell a part from the whole."""

    units = ("0", "1", "2", "")

    def __init__(self) -> None:
        super().__init__()
        for index in range(3):
            self.add_module(str(index), nn.Linear(600, 600, bias=False))


@contextmanager
def counted() -> Iterator[list[int]]:
    """The sizes of all reads of files."""
    sizes: list[int] = []
    read_into = OpenFiles.read_into

    def count(self: OpenFiles, name: str, pieces: Any, offset: int) -> None:
        sizes.append(sum(map(len, pieces)))
        read_into(self, name, pieces, offset)

    with mock.patch.object(OpenFiles, "read_into", count):
        yield sizes


def read_parts(root: Path) -> None:
    """Each rank reads its part of the elements, at most a tenth more, and the metadata."""
    share = (root / "wide.pt").stat().st_size / dist.get_world_size()
    for wrapper in ("FSDP2", "FSDP1 flat", "fairscale flat", "DDP"):
        with cpu():
            torch.manual_seed(5)
            model = WRAPPERS[wrapper](Wide())
            optim = torch.optim.Adam(model.parameters())
            with counted() as sizes:
                fsdp_optim.load(
                    root / "wide.pt", model, optim, options=fsdp_optim.LoadOptions(process_group=dist.group.WORLD)
                )
            if sum(sizes) > 1.1 * share + (200 << 10):
                raise Differs(f"{wrapper}: {sum(sizes)} bytes were read, and {share:.0f} are a rank's part")
            with counted() as sizes:
                fsdp_optim.load(root / "wide.pt", model, options=fsdp_optim.LoadOptions(process_group=dist.group.WORLD))
            if sum(sizes) > 1.1 * share / 3 + (200 << 10):
                raise Differs(f"{wrapper}: {sum(sizes)} bytes were read of the weights alone")


# ------------------------------------------------------------------------------------------- damage


def with_record(data: bytes, record: str, content: bytes | None) -> bytes:
    """The same archive with another content of a record, or without it."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            if name.partition("/")[2] == record:
                if content is not None:
                    new.writestr(name, content)
            else:
                new.writestr(name, old.read(name))
    return file.getvalue()


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def make_refused(root: Path) -> None:
    """The places of REFUSED."""
    data = (root / "fsdp2.pt").read_bytes()
    value = torch.load(root / "fsdp2.pt")["app"]
    model, optim = value["model"], value["optim"]
    place = root / "refused"
    place.mkdir()
    (place / "sharded.pt").write_bytes((root / "sharded.pt").read_bytes())
    (place / "cut.pt").write_bytes(data[: len(data) * 2 // 3])
    (place / "short-storage.pt").write_bytes(with_record(data, "data/3", b"\0"))
    (place / "no-storage.pt").write_bytes(with_record(data, "data/3", None))
    (place / "no-pickle.pt").write_bytes(with_record(data, "data.pkl", None))
    (place / "big-endian.pt").write_bytes(with_record(data, "byteorder", b"big"))
    sparse = {**model, "stem.weight": model["stem.weight"].to_sparse()}
    first, *_ = optim["state"]
    groups, state = optim["param_groups"], optim["state"]
    values: dict[str, Any] = {
        "sparse.pt": {"model": sparse, "optimizer": optim},
        "sparse-state.pt": {
            "model": model,
            "optimizer": {**optim, "state": {**state, first: {"x": torch.eye(2).to_sparse()}}},
        },
        "evil-group.pt": {
            "model": model,
            "optimizer": {**optim, "param_groups": [{**group, "lr": Command(f"touch {root}/ran")} for group in groups]},
        },
        "evil.pt": Command(f"touch {root}/ran"),
        "module.pt": nn.Linear(2, 2),
        "list.pt": [model, optim],
        "two-models.pt": {"model": model, "state_dict": model, "optimizer": optim},
        "two-optims.pt": {"model": model, "optimizer": optim, "optim": optim},
        "nothing.pt": {"epoch": 3, "args": {"lr": 1}},
        "other-shape.pt": {"model": {**model, "stem.weight": torch.zeros(3, 3)}, "optimizer": optim},
        "no-weight.pt": {
            "model": {key: value for key, value in model.items() if key != "stem.weight"},
            "optimizer": optim,
        },
        "other-ids.pt": {"model": model, "optimizer": {"state": {}, "param_groups": [{"params": [0, 1]}]}},
        "several.pt": {"model": model, "optimizer_states": [{"state": {}, "param_groups": [{"params": [0]}]}] * 2},
    }
    for name, one in values.items():
        torch.save(one, place / name)
    for name, entries in {
        "two-files": ("a.pt", "b.pt"),
        "no-files": (),
        "missing": ("pytorch_model-00001-of-00002.bin",),
        "leads-out": ("pytorch_model-00001-of-00002.bin",),
    }.items():
        (place / name).mkdir()
        for entry in entries:
            torch.save(model, place / name / entry)
    for name, file in (("missing", "pytorch_model-00002-of-00002.bin"), ("leads-out", "../evil.pt")):
        weight_map = {**dict.fromkeys(model, "pytorch_model-00001-of-00002.bin"), "stem.weight": file}
        (place / name / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


REFUSED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("cut.pt", "CheckpointError", ("cut.pt",)),
    ("short-storage.pt", "CheckpointError", ("short-storage.pt", "storage 3 has 1 bytes")),
    ("no-storage.pt", "CheckpointError", ("no-storage.pt", "data/3 is missing")),
    ("no-pickle.pt", "CheckpointError", ("no-pickle.pt", "data.pkl is missing")),
    ("big-endian.pt", "CheckpointError", ("big-endian.pt", "byte order")),
    ("sparse.pt", "CheckpointError", ("sparse.pt", "'stem.weight'", "sparse")),
    ("sharded.pt", "CheckpointError", ("sharded.pt", "DTensor")),
    ("sparse-state.pt", "CheckpointError", ("sparse-state.pt", "x of ", "sparse")),
    ("evil-group.pt", "CheckpointError", ("evil-group.pt", "lr of a param group", "system")),
    ("evil.pt", "CheckpointError", ("evil.pt", "system")),
    ("module.pt", "CheckpointError", ("module.pt", "torch.nn.modules.linear.Linear", "state_dict()")),
    ("list.pt", "CheckpointError", ("list.pt", "a list")),
    ("two-models.pt", "CheckpointError", ("two-models.pt", "'model', 'state_dict'")),
    ("two-optims.pt", "CheckpointError", ("two-optims.pt", "'optimizer', 'optim'")),
    ("nothing.pt", "CheckpointError", ("nothing.pt", "'epoch', 'args'")),
    ("other-shape.pt", "StateError", ("stem.weight", "[3, 3]", "nothing was loaded")),
    ("no-weight.pt", "StateError", ("stem.weight", "the checkpoint does not")),
    ("other-ids.pt", "StateError", ("2 parameters",)),
    ("several.pt", "StateError", ("has 2 optimizers", "1 was given")),
    ("two-files", "CheckpointError", ("a.pt, b.pt", "path of one")),
    ("no-files", "CheckpointError", ("no-files",)),
    ("missing", "CheckpointError", ("pytorch_model-00002-of-00002.bin",)),
    ("leads-out", "CheckpointError", ("../evil.pt",)),
)


def refuse_all(root: Path) -> None:
    """On all ranks alike, and nothing is loaded."""
    with cpu():
        target = whole("FSDP2", 1)
        before = mine(target)
        for name, kind, words in REFUSED:
            refused_on_ranks(name, partial(load, root / "refused" / name, target), kind, *words)
            check_same(f"{name}: what was there", mine(target), before)
        if (root / "ran").exists():
            raise Differs("a command of a file was run")


# ------------------------------------------------------------------------------------------- more optimizers than one


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Adam for the unit `stem`, SGD for the rest."""
    named = list(model.named_parameters())
    stem = [param for name, param in named if "stem" in name.split(".")]
    rest = [param for name, param in named if "stem" not in name.split(".")]
    return [torch.optim.Adam(stem, lr=0.5), torch.optim.SGD(rest, lr=0.25, momentum=0.5)]


def load_several(root: Path) -> None:
    """A list of optimizers takes the list of a file, by id and by name."""
    two = OfModel(two_optimizers)
    for name in ("two-ids.pt", "two-names.pt"):
        for wrapper in ("FSDP2", "FSDP1 flat", "DDP"):
            with cpu():
                alike, target = whole(wrapper, make=two), whole(wrapper, 0, two)
                scramble(target)
                load(root / name, target, compare=True)
                check_same(f"{name} -> {wrapper}", mine(target), mine(alike))
    with cpu():
        one = whole("FSDP2", 0)
        refused_on_ranks("one for two", partial(load, root / "two-ids.pt", one), "StateError", "2 optimizers", "a list")


class TorchFilesTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        run_on_ranks(write_all, 2, cls.root)

    def test_every_file_loads(self) -> None:
        """Each at one size."""
        for index, size in enumerate(SIZES):
            run_on_ranks(load_all, size, self.root, LOADS[index :: len(SIZES)])

    @pytest.mark.slow
    def test_every_file_loads_at_every_size(self) -> None:
        for size in SIZES:
            run_on_ranks(load_all, size, self.root, LOADS)

    def test_weights_alone_and_an_optimizer_alone(self) -> None:
        run_on_ranks(load_parts, 2, self.root)

    @expand(soon=[3], later=[2])
    def test_fairscales_dicts_of_all_versions(self, size: int) -> None:
        run_on_ranks(load_fairscales, size, self.root)

    @expand(soon=[3], later=[1, 2])
    def test_fairscales_dict_of_several_units(self, size: int) -> None:
        run_on_ranks(write_units, 2, self.root)
        run_on_ranks(load_units, size, self.root)

    def test_converted_without_ranks(self) -> None:
        """Into a checkpoint of this library, which has the same values."""
        fsdp_optim.convert(self.root / "fsdp1-names.pt", self.root / "converted")
        target, wanted = whole("plain", 0), oracle()
        scramble(target)
        fsdp_optim.load(
            self.root / "converted", target.model, target.optim, options=fsdp_optim.LoadOptions(compare=True)
        )
        check_same("model", dict(target.model.state_dict()), dict(wanted.model.state_dict()))
        state = target.optim.state_dict()["state"]
        check_same("state", state, wanted.optim.state_dict()["state"], in_order=False)

    def test_objects_of_other_classes(self) -> None:
        run_on_ranks(load_what_only_its_class_can_make, 2, self.root)

    def test_each_rank_reads_its_part(self) -> None:
        model = Wide()
        optim = torch.optim.Adam(model.parameters())
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optim.step()
        torch.save({"model": model.state_dict(), "optimizer": optim.state_dict()}, self.root / "wide.pt")
        run_on_ranks(read_parts, 3, self.root)

    def test_what_is_not_whole_or_not_clear_is_refused(self) -> None:
        make_refused(self.root)
        run_on_ranks(refuse_all, 2, self.root)

    def test_several_optimizers(self) -> None:
        one = Oracle(OfModel(two_optimizers), STEPS, Whole)
        model, optims = one.model.state_dict(), [optim.state_dict() for optim in one.optim]
        torch.save({"state_dict": model, "optimizer_states": optims}, self.root / "two-ids.pt")
        names = {param: name for name, param in one.model.named_parameters()}
        by_name = [
            {
                "state": {names[param]: values for param, values in optim.state.items()},
                "param_groups": [
                    {**group, "params": [names[param] for param in group["params"]]} for group in optim.param_groups
                ],
            }
            for optim in one.optim
        ]
        torch.save({"model": model, "optimizer": dict(zip("ab", by_name, strict=True))}, self.root / "two-names.pt")
        run_on_ranks(load_several, 2, self.root)

    def test_a_split_model_with_an_index(self) -> None:
        """As save_pretrained wrote it before safetensors; tied weights are stored once, or share their bytes."""
        for name in ("bert", "gpt2, tied"):
            folder = self.root / f"split {name}"
            folder.mkdir()
            state = build(name).state_dict()
            half = len(state) // 2
            listed = {}
            for number, keys in enumerate((list(state)[:half], list(state)[half:]), start=1):
                file = f"pytorch_model-{number:05}-of-00002.bin"
                torch.save({key: state[key] for key in keys}, folder / file)
                listed.update(dict.fromkeys(keys, file))
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": listed}))
            for place in (folder, folder / "pytorch_model.bin.index.json"):
                model = zeroed(build(name))
                fsdp_optim.load(place, model, options=fsdp_optim.LoadOptions(compare=True))
                check_same(f"{place}", tensors_of(model), tensors_of(build(name)))

    def test_tied_weights_into_a_model_that_does_not_tie_them(self) -> None:
        """Both names have the same bytes of the file."""
        tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        tied[1].weight = tied[0].weight
        torch.save(tied.state_dict(), self.root / "tied.pt")
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        fsdp_optim.load(self.root / "tied.pt", model, options=fsdp_optim.LoadOptions(compare=True))
        check_same("weights", dict(model.state_dict()), dict(tied.state_dict()))

    def test_one_step_of_several_parameters(self) -> None:
        """A tensor that several parameters share is one stored tensor, and is read once."""
        step = torch.tensor(3.0)
        state = {index: {"step": step, "exp_avg": torch.ones(2) * index} for index in range(3)}
        torch.save({"state": state, "param_groups": [{"params": [0, 1, 2]}]}, self.root / "shared.pt")
        with closing(OpenFiles.at(self.root / "shared.pt")) as opened:
            reader = TORCH_FILE.open(opened, verify=True)
            self.assertEqual(sorted(one.shape for one in reader.optim.values()), [(), (2,), (2,), (2,)])

    def test_other_orders_of_elements(self) -> None:
        """Weights and state in channels_last, and a transposed weight."""
        model = nn.Sequential(nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last), nn.Linear(5, 4))
        model[1].weight = nn.Parameter(torch.randn(5, 4).t())
        optim = torch.optim.Adam(model.parameters())
        for param in model.parameters():
            param.grad = torch.randn(param.shape)
        optim.step()
        torch.save({"model": model.state_dict(), "optimizer": optim.state_dict()}, self.root / "orders.pt")
        target = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Linear(5, 4))
        target_optim = torch.optim.Adam(target.parameters())
        fsdp_optim.load(self.root / "orders.pt", target, target_optim, options=fsdp_optim.LoadOptions(compare=True))
        check_same("model", dict(target.state_dict()), dict(model.state_dict()))
        check_same("state", target_optim.state_dict()["state"], optim.state_dict()["state"])

    def test_a_value_that_modules_add(self) -> None:
        """get_extra_state's, with the version of the module's code."""

        class Counter(nn.Linear):
            count = 0

            def get_extra_state(self) -> Any:
                return {"count": self.count, "seen": torch.tensor([1, 2])}

            def set_extra_state(self, state: Any) -> None:
                self.count = state["count"]

        saved, target = nn.Sequential(Counter(2, 2)), nn.Sequential(Counter(2, 2))
        saved[0].count = 5
        torch.save({"model": saved.state_dict()}, self.root / "added.pt")
        fsdp_optim.load(self.root / "added.pt", target)
        self.assertEqual(target[0].count, 5)

    def test_large_values_beside_the_model(self) -> None:
        """They are not read by every rank: an access says so."""
        model = nn.Linear(2, 2)
        ema = {"weight": torch.zeros(5000, 5000), "bias": torch.zeros(2)}
        torch.save({"model": model.state_dict(), "ema": ema, "epoch": 1}, self.root / "ema.pt")
        with counted() as sizes:
            restored = fsdp_optim.load(self.root / "ema.pt", model)
        self.assertLess(sum(sizes), 1 << 20)
        self.assertEqual(restored.state["epoch"], 1)
        with self.assertRaisesRegex(fsdp_optim.CheckpointError, "ema has tensors of 100000008 bytes"):
            restored.state["ema"]

    def test_from_a_bucket(self) -> None:
        bucket = MemoryBucket()
        wanted = oracle()
        bucket.put("run/last.pt", (self.root / "fsdp2.pt").read_bytes())
        for place in ("run/last.pt", "run"):
            target = whole("plain", 0)
            scramble(target)
            store = ObjectStore(bucket, place, TORCH_FILE.probe)
            restore.restore(store, target.model, target.optim, LoadArguments(compare=True))
            check_same(place, dict(target.model.state_dict()), dict(wanted.model.state_dict()))
            check_same(place, target.optim.state_dict()["state"], wanted.optim.state_dict()["state"])

    def test_a_dtensor_is_given_to_a_stand_in(self) -> None:
        """For formats whose files have the part of one rank: the description, and the state with the local tensor."""
        names = {"torch.distributed.tensor.DTensor": Described}
        with closing(OpenFiles.at(self.root)) as opened:
            found = read_archive(opened, "sharded.pt", stand_ins=names).value["model"]["stem.weight"]
        dtype, shape = found.description[:2]
        self.assertEqual((dtype, tuple(shape)), (torch.float32, (7, 5)))
        self.assertEqual([one.shape for one in tensors_in(found.state)], [(4, 5)])

    @expand(soon=[(True,)], later=[(False,)])
    def test_accelerates_folders(self, safe: bool) -> None:
        """Written by Accelerate, in a process of its own, with and without safetensors."""
        folder = self.root / f"accelerate-{safe}"
        done = run(ACCELERATE.format(folder=str(folder), safe=safe), preload=TRAINING)
        self.assertEqual(done.returncode, 0, done.stderr)
        wanted = torch.load(folder / "wanted.zip")  # no name of a checkpoint
        model = nn.Linear(3, 2)
        optim = torch.optim.AdamW(model.parameters(), lr=9.0)
        restored = fsdp_optim.load(folder, model, optim, options=fsdp_optim.LoadOptions(compare=True))
        check_same("model", dict(model.state_dict()), dict(wanted["model"]))
        check_same("optimizer", optim.state_dict()["state"], wanted["optim"]["state"])
        self.assertEqual(optim.param_groups[0]["lr"], wanted["optim"]["param_groups"][0]["lr"])
        self.assertEqual(restored.state["scheduler"]["last_epoch"], wanted["scheduler"]["last_epoch"])

    @pytest.mark.slow
    def test_lightnings_checkpoint(self) -> None:
        """Written by Lightning's Trainer. In `make test`, tests/integrations/test_lightning.py goes on from one."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import lightning

            class Module(lightning.LightningModule):
                def __init__(self, width: int = 4) -> None:
                    super().__init__()
                    self.save_hyperparameters()
                    self.net = nn.Linear(3, width)

                def training_step(self, batch: Any, index: int) -> Any:
                    return self.net(batch).square().mean()

                def configure_optimizers(self) -> Any:
                    return torch.optim.AdamW(self.parameters(), lr=0.5)

            options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            trainer = lightning.Trainer(
                max_steps=2, accelerator="cpu", enable_model_summary=False, default_root_dir=self.root, **options
            )
            module = Module()
            trainer.fit(module, torch.utils.data.DataLoader(torch.randn(4, 3), batch_size=2))
            trainer.save_checkpoint(self.root / "lightning.ckpt")
        target = Module()
        optim = torch.optim.AdamW(target.parameters())
        restored = fsdp_optim.load(
            self.root / "lightning.ckpt", target, optim, options=fsdp_optim.LoadOptions(compare=True)
        )
        check_same("model", dict(target.state_dict()), dict(module.state_dict()))
        check_same("optimizer", optim.state_dict(), trainer.optimizers[0].state_dict())
        self.assertEqual((restored.state["global_step"], dict(restored.state["hyper_parameters"])), (2, {"width": 4}))


class Described:
    """A stand-in for a tensor subclass."""

    def __init__(self, *description: Any) -> None:
        self.description = description

    def __setstate__(self, state: Any) -> None:
        self.state = state


ACCELERATE = """
import torch
from accelerate import Accelerator
from torch import nn
accelerator = Accelerator(cpu=True)
model = nn.Linear(3, 2)
optim = torch.optim.AdamW(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optim, 1)
model, optim, scheduler = accelerator.prepare(model, optim, scheduler)
for _ in range(3):
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optim.step()
    scheduler.step()
accelerator.save_state({folder!r}, safe_serialization={safe})
parts = {{"model": model.state_dict(), "optim": optim.state_dict(), "scheduler": scheduler.state_dict()}}
torch.save(parts, {folder!r} + "/wanted.zip")
"""


def zeroed(model: Any) -> Any:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_() if tensor.is_floating_point() else None
    return model


if __name__ == "__main__":
    unittest.main()
