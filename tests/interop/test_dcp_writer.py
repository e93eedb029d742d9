"""save(format="dcp"): stock torch resumes from any wrapper's run, with calls of torch alone on its side."""

from __future__ import annotations

import functools
import io
import tempfile
import unittest
import zipfile
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit.cases import expand, those
from kit.compare import check_same
from kit.optimizers import adamw_tensor_lr
from kit.options import as_options
from kit.tables import Table
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

SAVED = ("fairscale flat", "fairscale non-flat", "FSDP1 flat", "FSDP1 orig", "FSDP2", "DDP")
LOADERS = ("FSDP2", "FSDP1 orig", "DDP", "plain")
FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)
MORE = range(STEPS, STEPS + 2)


EXTRA: dict[str, Any] = {
    "scheduler": {"last_epoch": 3, "lrs": [0.1, 0.2], "betas": (0.9, 0.99)},
    "ema": {"a.b": torch.arange(6.0).reshape(2, 3), "list": [torch.ones(1), {"x": 1}]},
    "numpy": numpy.random.RandomState(3).get_state(),
    "step": 7,
    "nothing": None,
}


def adam(params: Any) -> Any:
    return torch.optim.Adam(params, lr=0.01, betas=(0.85, 0.97), weight_decay=0.03)


def save_all(root: Path) -> None:
    for wrapper in SAVED:
        with cpu():
            trained = Trained(wrapper, adam)
            options: dict[str, Any] = {"durable": False, "process_group": trained.process_group}
            name = wrapper.replace(" ", "-")
            fsdp_optim.save(
                root / name, trained.model, trained.optim, format="dcp", **as_options(fsdp_optim.SaveOptions, **options)
            )
            fsdp_optim.async_save(
                root / f"{name}-titan",
                trained.model,
                trained.optim,
                format="torchtitan",
                **as_options(fsdp_optim.SaveOptions, **options),
            ).wait()
    own = Trained("FSDP2", adamw_tensor_lr)
    fsdp_optim.save(
        root / "tensor-lr", own.model, own.optim, format="dcp", options=fsdp_optim.SaveOptions(durable=False)
    )


@functools.cache
def saved() -> tempfile.TemporaryDirectory[str]:
    """A folder with what two ranks have saved."""
    folder = tempfile.TemporaryDirectory()
    run_on_ranks(save_all, 2, Path(folder.name))
    return folder


def resume(root: Path, name: str, wrapper: str, flattened: bool, is_titan: bool = False) -> None:
    """The steps of a job of stock torch: dcp.load into its own state dicts, and set_state_dict; then it trains on."""
    target = Trained(wrapper, adamw_tensor_lr if name == "tensor-lr" else adam, 0)
    options = FLATTENED if flattened else None
    model, optim = get_state_dict(target.model, target.optim, options=options)
    if is_titan:
        states: dict[str, Any] = {**model, "optimizer": optim}
        dcp.load(states, checkpoint_id=root / name)
        model = {key: states[key] for key in model}
        optim = states["optimizer"]
    else:
        states = {"model": model, "optimizer": optim}
        dcp.load(states, checkpoint_id=root / name)
        model, optim = states["model"], states["optimizer"]
    set_state_dict(target.model, target.optim, model_state_dict=model, optim_state_dict=optim, options=options)
    check_continues(f"{name} in {wrapper}", target)


def check_continues(what: str, resumed: Trained) -> None:
    """State, hyperparameters and weights are those of the run that never stopped, now and after two more steps."""
    make = resumed._make
    for steps in (STEPS, STEPS + 2):
        if steps > STEPS:
            resumed.step(MORE)
        wanted = Oracle(make, steps)
        full = StateDictOptions(full_state_dict=True)
        weights = get_model_state_dict(resumed.model, options=full)
        check_same(f"{what}: weights", weights, dict(wanted.model.state_dict()))
        optim = get_optimizer_state_dict(resumed.model, resumed.optim, options=full)
        check_same(f"{what}: state", {name: optim["state"].get(name) for name in wanted.names}, wanted.by_name())
        groups = [dict(group) for group in wanted.optim.state_dict()["param_groups"]]
        for group in (*groups, *optim["param_groups"]):
            del group["params"]
        check_same(f"{what}: groups", optim["param_groups"], groups)


def sorted_state(oracle: Oracle) -> dict[str, Any]:
    return {name: dict(sorted(values.items())) for name, values in oracle.by_name().items()}


def loaded_whole(path: Path) -> dict[str, Any]:
    """Everything in a checkpoint, by torch's own conversion to a file."""
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(path, file.name)
        content: dict[str, Any] = torch.load(file.name, weights_only=False)
    return content


class Mlp(nn.Module):
    """A model that trains with real gradients, with tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.last = nn.Linear(10, 6)
        self.again = nn.Linear(10, 6, bias=False)
        self.again.weight = self.last.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norm(self.first(x)))
        return (self.last(inner) + self.again(inner)).square().mean()


def optimizer_of(model: nn.Module) -> Any:
    """Two groups with hyperparameters of their own, and a schedule that changes these."""
    biases = [param for name, param in model.named_parameters() if param.dim() == 1]
    others = [param for name, param in model.named_parameters() if param.dim() > 1]
    groups = [{"params": others, "betas": (0.8, 0.95)}, {"params": biases, "weight_decay": 0.0}]
    optim = torch.optim.AdamW(groups, lr=0.03, eps=1e-7)
    return optim, torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 0.9**step)


def train(model: nn.Module, optim: Any, sched: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(8, 6, generator=generator))
        optim.zero_grad()
        loss.backward()
        optim.step()
        sched.step()
        losses.append(loss.item())
    return losses


class TrainState:
    """The state of torchtitan's trainer: it loads what dcp.load has read."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.step = int(values["step"])


def losses_match(root: Path) -> None:
    """A loop in torchtitan's way continues from a save of this library, beside the run that never stopped."""
    never_stopped = fully_shard(Mlp())
    optim, sched = optimizer_of(never_stopped)
    train(never_stopped, optim, sched, range(3))
    extra = {"train_state": {"step": torch.tensor(3, dtype=torch.int32)}, "lr_scheduler": sched.state_dict()}
    options: dict[str, Any] = {"extra": extra, "durable": False, "on_replica_mismatch": "lowest_rank"}
    fsdp_optim.save(
        root / "titan",
        never_stopped,
        optim,
        format="torchtitan",
        step=3,
        **as_options(fsdp_optim.SaveOptions, **options),
    )
    stats = {name: buffer.clone() for name, buffer in never_stopped.named_buffers()}
    wanted = train(never_stopped, optim, sched, range(3, 6))

    model = fully_shard(Mlp())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optim, sched = optimizer_of(model)
    trainer = TrainState()
    state = get_optimizer_state_dict(model, optim, options=FLATTENED)
    states = {**get_model_state_dict(model), "optimizer": state, "lr_scheduler": sched, "train_state": trainer}
    dcp.load(states, checkpoint_id=root / "titan")
    set_optimizer_state_dict(model, optim, states["optimizer"], options=FLATTENED)
    for name, buffer in model.named_buffers():  # each rank has statistics of its own, and the save has those of rank 0
        buffer.copy_(stats[name])
    check_same("the step", (trainer.step, sched.last_epoch), (3, 3))
    check_same("losses", train(model, optim, sched, range(3, 6)), wanted)


def save_extras(path: Path, extra: dict[str, Any]) -> None:
    trained = Trained("FSDP2", adam)
    rank = dist.get_rank()
    options: dict[str, Any] = {"extra": extra, "per_rank_extra": {"rng": torch.full((3,), rank)}, "durable": False}
    fsdp_optim.save(path, trained.model, trained.optim, format="dcp", **as_options(fsdp_optim.SaveOptions, **options))


def in_order(full: dict[str, Any]) -> dict[str, Any]:
    """A full dict with the values of each parameter in the order of their names."""
    state = {key: dict(sorted(values.items())) for key, values in full["state"].items()}
    groups = [dict(sorted(group.items())) for group in full["param_groups"]]
    return {"state": state, "param_groups": groups}


def load_ours(path: Path, wrapper: str, has_extras: bool) -> None:
    """This library's own load, at another world size, in another wrapper."""
    with cpu():
        target, wanted = Trained(wrapper, adam, 0), Trained(wrapper, adam)
        restored = fsdp_optim.load(
            path,
            target.model,
            target.optim,
            options=fsdp_optim.LoadOptions(compare=True, process_group=target.process_group),
        )
        check_same(wrapper, *[in_order(of.gather(None)) for of in (target, wanted)])
        full = StateDictOptions(full_state_dict=True)
        if wrapper == "FSDP2":
            weights = [get_model_state_dict(of.model, options=full) for of in (target, wanted)]
            check_same("weights", *weights)
        check_same("world size", restored.world_size, 2 if has_extras else restored.world_size)
        if has_extras:
            check_same("extra", (restored.state["step"], restored.state["scheduler"]["lrs"]), (7, [0.1, 0.2]))
            check_same("of ranks", restored.all_ranks, tuple({"rng": torch.full((3,), rank)} for rank in range(2)))


WAYS = {"nested": ("", False, False), "flattened": ("", True, False), "torchtitan": ("-titan", True, True)}
"""How torch reads: nested dicts, flattened ones, or as torchtitan keeps them."""

# What a save writes does not depend on how it will be read: each wrapper's meets one way, and one wrapper's meets all.
BY_FSDP2 = those(
    [(3, name.replace(" ", "-"), "FSDP2", how) for name in SAVED for how in WAYS],
    lambda _size, name, _wrapper, how: name == "FSDP2" or how == list(WAYS)[len(name) % len(WAYS)],
)
BY_OTHERS = [(3, "FSDP2", wrapper, "flattened") for wrapper in LOADERS if wrapper != "FSDP2"]
# torch gives some ranks of FSDP1 no param groups
BY_OTHERS += [(3, "fairscale-flat", wrapper, "nested") for wrapper in LOADERS if "FSDP" not in wrapper]
TENSOR_LR = [(3, "tensor-lr", "FSDP2", how) for how in ("nested", "flattened")]


def resume_in(root: Path, name: str, wrapper: str, how: str) -> None:
    suffix, flattened, is_titan = WAYS[how]
    resume(root, name + suffix, wrapper, flattened, is_titan)


@functools.cache
def resumes() -> Table:
    soon, later = BY_FSDP2
    return Table(functools.partial(resume_in, Path(saved().name)), [*soon, *BY_OTHERS, *TENSOR_LR], later)


def load_again(root: Path) -> None:
    """All that needs three ranks, of the saves and of what was converted."""
    load_ours(root / "given", "fairscale flat", True)
    load_ours(root / "fairscale-flat-titan", "FSDP2", False)
    resume(root, "back-dcp", "FSDP2", False)
    resume(root, "back-torchtitan", "FSDP2", True, True)


class StockResumesTest(unittest.TestCase):
    root: Path

    @classmethod
    def setUpClass(cls) -> None:
        cls.root = Path(saved().name)

    @expand(*BY_FSDP2)
    def test_resumed_by_fsdp2(self, *case: Any) -> None:
        resumes()(*case)

    @parameterized.expand(BY_OTHERS)
    def test_resumed_by_others(self, *case: Any) -> None:
        """By FSDP1, DDP and no wrapper."""
        resumes()(*case)

    @parameterized.expand(TENSOR_LR)
    def test_a_hyperparameter_that_is_a_tensor(self, *case: Any) -> None:
        """The learning rate of a capturable optimizer."""
        resumes()(*case)

    def test_losses_are_those_of_the_run_that_never_stopped(self) -> None:
        """A torchtitan-like loop: two groups, tied weights, a schedule, the trainer's own state."""
        run_on_ranks(losses_match, 2, self.root)

    def test_extras(self) -> None:
        """The trainer's values are found where torch.distributed.checkpoint looks for them."""
        extra = dict(EXTRA)
        run_on_ranks(save_extras, 2, self.root / "extras", extra)
        content = loaded_whole(self.root / "extras")
        numpys, arrays = extra.pop("numpy"), content["numpy"]
        self.assertTrue(all(map(numpy.array_equal, arrays, numpys)), arrays)  # type: ignore[arg-type, call-overload]
        check_same("extras", {name: content[name] for name in extra}, extra)
        check_same("of ranks", content["per_rank_extra"], {str(n): {"rng": torch.full((3,), n)} for n in range(2)})
        oracle = Oracle(adam)
        check_same("weights", content["model"], dict(oracle.model.state_dict()))
        state = content["optimizer"]["state"]
        check_same("state", {name: dict(sorted(state[name].items())) for name in oracle.names}, sorted_state(oracle))

    def test_loaded_by_this_library(self) -> None:
        """Recognised, in either layout, and converted to this library's format and back."""
        run_on_ranks(save_extras, 2, self.root / "given", EXTRA)
        fsdp_optim.convert(self.root / "given", self.root / "ours", options=fsdp_optim.ConvertOptions(durable=False))
        for format in ("dcp", "torchtitan"):
            fsdp_optim.convert(
                self.root / "ours",
                self.root / f"back-{format}",
                format=format,
                options=fsdp_optim.ConvertOptions(durable=False),
            )
        run_on_ranks(load_ours, 1, self.root / "back-torchtitan", "FSDP2", True)
        run_on_ranks(load_again, 3, self.root)

    def test_each_item_is_a_file_of_torch_save(self) -> None:
        """The bytes of each item by themselves, mapped and plain; tensors begin at multiples of 64 bytes of the file."""
        metadata = dcp.FileSystemReader(self.root / "FSDP2").read_metadata()
        wanted = {f"model.{name}": param for name, param in Oracle(adam).model.state_dict().items()}
        for index, place in metadata.storage_data.items():
            path = self.root / "FSDP2" / place.relative_path
            data = path.read_bytes()[place.offset : place.offset + place.length]
            item = self.root / "item.pt"
            item.write_bytes(data)
            value = torch.load(io.BytesIO(data), weights_only=True)
            if isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
                check_same("mapped", torch.load(item, weights_only=True, mmap=True), value)
                with zipfile.ZipFile(item) as archive:
                    self.assertIn("archive/data/0", archive.namelist())
                self.assertTrue(path.name == "values.distcp" or place.offset % 64 == 0)
            if index.fqn in wanted:
                check_same(index.fqn, value, wanted[index.fqn])
