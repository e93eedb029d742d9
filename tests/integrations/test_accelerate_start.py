"""`weights_from`: each rank reads its part of a Hugging Face folder, and the model is the one that Accelerate makes by itself."""

from __future__ import annotations

import contextlib
import tempfile
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same, refused_on_ranks
from kit.hugging_face import on_cpu, samples, trainer_of
from kit.local_parts import local_of
from kit.pretrained import build, ties_of, transformers
from parameterized import parameterized
from safetensors.torch import load_file, save_file
from torch import nn

import fsdp_optim
from fsdp_optim.integrations.accelerate import weights_from
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.hugging_face",)


@contextlib.contextmanager
def accelerator(*, ram_efficient: bool = True, **options: Any) -> Iterator[Any]:
    import accelerate

    with on_cpu("FSDP2"):
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=ram_efficient,
        )
        yield accelerate.Accelerator(fsdp_plugin=plugin, **options)


def of_folder(folder: Path, **options: Any) -> Any:
    return transformers().AutoModelForCausalLM.from_pretrained(folder, **options)


def on_meta(folder: Path, **_: Any) -> Any:
    """As `from_config` makes it in `init_empty_weights`: without parameters, with buffers."""
    import accelerate

    package = transformers()
    with accelerate.init_empty_weights():
        model = package.AutoModelForCausalLM.from_config(package.AutoConfig.from_pretrained(folder))
    model.tie_weights()
    return model


def adamw(model: nn.Module) -> Any:
    """Two groups of parameters, in another order than the model's."""
    named = dict(reversed(list(model.named_parameters())))
    groups = [
        {"params": [p for n, p in named.items() if "norm" in n or "ln_" in n], "weight_decay": 0.0},
        {"params": [p for n, p in named.items() if "norm" not in n and "ln_" not in n]},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def seen_of(model: Any, optim: Any) -> dict[str, Any]:
    """All that a start decides: values, dtypes, cuts, ties, buffers, and which parameter is where in the optimizer."""
    named = dict(model.named_parameters())
    fqns = {id(param): fqn for fqn, param in named.items()}
    return {
        "weights": {fqn: local_of(param.detach()).clone() for fqn, param in named.items()},
        "kinds": {fqn: (str(p.placements), p.requires_grad, p.device.type) for fqn, p in named.items()},
        "buffers": dict(model.named_buffers()),
        "ties": ties_of(model),
        "groups": [[fqns[id(param)] for param in group["params"]] for group in optim.param_groups],
    }


def started(
    folder: Path, made: Callable[..., Any], inside: Callable[[], Any], mixed: str, **options: Any
) -> dict[str, Any]:
    """A start, and what two steps from it give."""
    with accelerator(mixed_precision=mixed) as loop:
        with inside():
            model = made(folder, **options)
            model, optim = loop.prepare(model, adamw(model))
        seen = seen_of(model, optim)
        losses = []
        for step in range(2):
            batch = samples()[2 * step + dist.get_rank()]["input_ids"][None]
            loss = model.eval()(input_ids=batch, labels=batch).loss
            loop.backward(loss)
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        return {**seen, "losses": losses, "end": seen_of(model, optim)}


def compare(root: Path, folder: Path, made: str, mixed: str, options: dict[str, Any]) -> None:
    wanted = started(folder, of_folder, contextlib.nullcontext, mixed, **options)
    got = started(folder, MAKERS[made], lambda: weights_from(folder), mixed, **options)
    check_same("the start", got, wanted)


MAKERS = {"from_pretrained": of_folder, "on meta": on_meta}
CASES = [
    ("llama", "from_pretrained", "no", {}),
    ("llama, tied", "from_pretrained", "no", {}),
    ("llama, tied", "on meta", "no", {}),
    ("llama, twice", "from_pretrained", "no", {}),
    ("llama, bfloat16", "from_pretrained", "bf16", {}),
    ("llama", "from_pretrained", "bf16", {"dtype": torch.bfloat16}),
    ("llama, tied", "from_pretrained", "no", {"dtype": torch.bfloat16}),
    ("gpt2, tied", "from_pretrained", "no", {}),
]


def write(name: str, folder: Path) -> None:
    """A folder, of several files for "llama"; `twice`: with the tied weights under both names."""
    model = build(name.replace("twice", "tied"))
    model.save_pretrained(folder, max_shard_size="4KB" if "," not in name else "1GB")
    if "twice" in name:
        tensors = load_file(folder / "model.safetensors")
        save_file(
            {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors"
        )


def nothing_is_read(folder: Path) -> None:
    """Memory that torch fills with NaN is all that a model has inside the block, before it is prepared."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with accelerator() as loop, weights_from(folder):
            model = of_folder(folder)
            check_same(
                "empty",
                [bool(param.isnan().all()) for param in model.parameters()],
                [True] * len([*model.parameters()]),
            )
            check_same("buffers", [bool(b.isnan().any()) for b in model.buffers()], [False] * len([*model.buffers()]))
            model, _ = loop.prepare(model, torch.optim.SGD(model.parameters()))
            check_same("filled", any(bool(local_of(p).isnan().any()) for p in model.parameters()), False)
    finally:
        torch.use_deterministic_algorithms(before)
    with accelerator():
        check_same("read again after the block", any(p.isnan().any() for p in of_folder(folder).parameters()), False)


class WithStatistics(nn.Module):
    """A persistent buffer, of which Accelerate by itself has no idea (it raises AttributeError)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)


def with_buffers(root: Path) -> None:
    model = WithStatistics()
    wanted = {name: torch.rand_like(value.float()).to(value.dtype) for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        (root / "plain").mkdir()
        save_file(wanted, root / "plain" / "model.safetensors")
    torch.manual_seed(3)
    dist.barrier()
    with accelerator() as loop:
        loop.state.fsdp_plugin.auto_wrap_policy = None
        with weights_from(root / "plain"):
            model, _ = loop.prepare(model, torch.optim.SGD(model.parameters()))
    kept = load_file(root / "plain" / "model.safetensors")
    full = fsdp_optim.gather_full_model_state_dict(model, recipient_rank=None)
    check_same("weights and buffers", dict(sorted(full.items())), dict(sorted(kept.items())))


def refusals(folder: Path, other: Path) -> None:
    def prepare(path: Path, **options: Any) -> None:
        with accelerator(**options) as loop, weights_from(path):
            model = on_meta(folder)
            loop.prepare(model, torch.optim.SGD(model.parameters()))

    def not_prepared() -> None:
        with accelerator(), weights_from(folder):
            kept.append(of_folder(folder))

    def twice() -> None:
        with weights_from(folder), weights_from(folder):
            pass

    def strange() -> None:
        with accelerator() as loop, weights_from(folder):
            loop.prepare(on_meta(folder), torch.optim.SGD(on_meta(folder).parameters()))

    kept: list[Any] = []
    refused_on_ranks("no head", lambda: prepare(other), "StateError", "lm_head.weight", "rename")
    refused_on_ranks("another way", lambda: prepare(folder, ram_efficient=False), "StateError", "cpu_ram_efficient")
    refused_on_ranks("not prepared", not_prepared, "StateError", "LlamaForCausalLM", "accelerator.prepare")
    refused_on_ranks("twice", twice, "StateError", "already")
    refused_on_ranks("an optimizer of another model", strange, "StateError", "SGD")


def trained(folder: Path, root: Path, inside: Callable[[], Any]) -> Any:
    with on_cpu("FSDP2"), inside():
        trainer = trainer_of("FSDP2", root / "out", model=of_folder(folder), save_strategy="no")
        trainer.accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = True
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def in_a_trainer(folder: Path, root: Path) -> None:
    wanted = trained(folder, root, contextlib.nullcontext)
    check_same("losses of a Trainer", trained(folder, root, lambda: weights_from(folder)), wanted)


class StartTest(unittest.TestCase):
    def setUp(self) -> None:
        self.root = Path(self.enterContext(tempfile.TemporaryDirectory()))

    @parameterized.expand(CASES)
    def test_a_start_is_the_one_of_accelerate(self, name: str, made: str, mixed: str, options: dict[str, Any]) -> None:
        write(name, self.root / "hub")
        run_on_ranks(compare, 2, self.root, self.root / "hub", made, mixed, options)

    def test_no_weight_is_read_before_a_model_is_prepared(self) -> None:
        write("llama, tied", self.root / "hub")
        run_on_ranks(nothing_is_read, 2, self.root / "hub")

    def test_persistent_buffers_are_filled(self) -> None:
        run_on_ranks(with_buffers, 2, self.root)

    def test_what_would_leave_a_model_without_values_is_refused(self) -> None:
        write("llama", self.root / "hub")
        write("llama, whole", self.root / "other")
        tensors = load_file(self.root / "other" / "model.safetensors")
        tensors.pop("lm_head.weight")
        save_file(tensors, self.root / "other" / "model.safetensors")
        run_on_ranks(refusals, 2, self.root / "hub", self.root / "other")

    def test_a_trainer_starts_the_same(self) -> None:
        write("llama", self.root / "hub")
        run_on_ranks(in_a_trainer, 2, self.root / "hub", self.root)


if __name__ == "__main__":
    unittest.main()
