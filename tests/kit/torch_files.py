"""Full checkpoints in files of torch.save, as each library writes them, and damaged ones."""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
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

from kit.checkpoints import Whole
from kit.optimizers import OfModel, sgd, two_groups
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from kit.wraps import in_fairscale

ADAM = OfModel(two_groups)


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
            unwrapped = oracle()
            by_id = TorchFSDP.rekey_optim_state_dict(
                named, OptimStateKeyType.PARAM_ID, unwrapped.model, optim=unwrapped.optim
            )
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


def one_unit(model: Any) -> Any:
    """fairscale's own full dict has right names for one unit only."""
    model.units = ("",)
    return in_fairscale(model)


def oracle() -> Oracle:
    return Oracle(ADAM, STEPS, Whole)


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
    for name, content in values.items():
        torch.save(content, place / name)
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
