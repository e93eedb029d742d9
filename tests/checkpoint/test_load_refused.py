"""What save and load refuse on all ranks alike, changing nothing; `strict=False`; and options that are kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand
from kit.checkpoints import (
    FURTHER,
    Whole,
    check_files,
    everything,
    load,
    mine,
    opened,
    oracle_after,
    save,
    save_trained,
)
from kit.compare import check_refused, check_same, error_text
from kit.folders import InFolder
from kit.models import freeze_stem
from kit.optimizers import OfModel, two_groups, two_optimizers
from kit.options import as_options
from kit.trained import STEPS, Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


class Reshaped(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.mix = nn.Parameter(torch.empty(3, 2, 4))


class Renamed(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.top = self.head
        del self.head


class OtherBuffers(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(3, 2)
        self.count = torch.tensor(1, dtype=torch.int32)
        self.register_buffer("newer", torch.zeros(1))
        del self.empty


class Longer(Whole):
    """`Whole` and one more unit, with a buffer of its own."""

    units = ("stem", "block.0", "block", "added", "")

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Linear(3, 2)
        self.added.register_buffer("seen", torch.tensor([4, 5]))


class Small(nn.Module):
    """Few enough elements that bf16 has a number for each."""

    units = ("inner", "")

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.last = nn.Linear(7, 5, bias=False)


def halves(model: nn.Module) -> None:
    model.to(torch.bfloat16)


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "shapes": (
        {"model": Whole},
        {"model": Reshaped},
        ("head.weight", "[2, 5]", "[3, 5]", "head.bias", "[2]", "[3]", "mix", "[3, 2, 5]", "[3, 2, 4]"),
    ),
    "names": ({"model": Whole}, {"model": Renamed}, ("head.weight", "head.bias", "top.weight", "top.bias")),
    "dtypes": (
        {"model": Small},
        {"model": Small, "prepare": halves},
        ("inner.weight", "inner.bias", "last.weight", "bfloat16", "float32"),
    ),
    "buffers": (
        {"model": Whole},
        {"model": OtherBuffers},
        ("mean", "[2, 3]", "[3, 2]", "count", "int64", "int32", "newer", "empty"),
    ),
    "longer": ({"model": Whole}, {"model": Longer}, ("added.weight", "added.bias", "added.seen")),
    "shorter": ({"model": Longer}, {"model": Whole}, ("added.weight", "added.bias", "added.seen")),
    "trained now": ({"prepare": freeze_stem}, {}, ("stem.weight", "frozen")),
}
ONLY_WITH_TORCH = ("dtypes",)  # fairscale refuses to wrap parameters that are not fp32


def save_sources(root: Path, wrapper: str) -> None:
    with cpu():
        for case, (source, _, _) in DIFFERENT.items():
            if case not in ONLY_WITH_TORCH or "fairscale" not in wrapper:
                save(root / case, Trained(wrapper, **source))


def load_refused(root: Path, wrapper: str) -> dict[str, tuple[str, str]]:
    errors = {}
    with cpu():
        for case, (_, kwargs, _) in DIFFERENT.items():
            if case in ONLY_WITH_TORCH and "fairscale" in wrapper:
                continue
            target = Trained(wrapper, **{**kwargs, "steps": 2})
            before = everything(target)
            errors[case] = error_text(lambda case=case, target=target: load(root / case, target))
            check_same(f"{case}: after the refusal", everything(target), before)
    return errors


class RefusedTest(InFolder):
    @expand(
        soon=[("fairscale flat", "FSDP2")],
        later=[("FSDP1 flat", "FSDP1 orig"), ("FSDP2", "fairscale flat"), ("DDP", "plain")],
    )
    def test_another_model(self, source: str, target: str) -> None:
        run_on_ranks(save_sources, 2, self.root, source)
        cases = [case for case in DIFFERENT if (self.root / case).exists()]
        if "fairscale" in source:  # something to refuse is there anyway
            run_on_ranks(save_trained, 2, self.root / "dtypes", "FSDP2", DIFFERENT["dtypes"][0])
            cases.append("dtypes")
        by_rank = run_on_ranks(load_refused, 3, self.root, target)
        tried = [case for case in cases if case in by_rank[0]]
        self.assertGreaterEqual(len(tried), len(DIFFERENT) - 1)
        for case in tried:
            check_refused(case, [errors[case] for errors in by_rank], "StateError", *DIFFERENT[case][2])

    def test_files_that_are_not_there(self) -> None:
        for path in (self.root / "none", self.root):
            errors = run_on_ranks(load_refused_at, 2, path)
            check_refused(str(path), errors, "CheckpointError", str(path))
        self.assertTrue(issubclass(fsdp_optim.CheckpointError, (fsdp_optim.FsdpOptimError)))
        self.assertTrue(issubclass(fsdp_optim.CheckpointError, OSError))

    def test_a_path_that_is_taken(self) -> None:
        kwargs = {"model": Whole, "make": OfModel(two_groups)}
        run_on_ranks(save_trained, 2, self.path, "FSDP2", kwargs)
        check_refused(
            "taken", run_on_ranks(save_refused_at, 2, self.path), "CheckpointError", str(self.path), "overwrite"
        )
        check_files(self.path, oracle_after(STEPS))
        self.check_only("step-1")
        run_on_ranks(save_trained, 3, self.path, "FSDP1 orig", {**kwargs, "steps": FURTHER}, overwrite=True)
        check_files(self.path, oracle_after(FURTHER))
        self.check_only("step-1")

    @parameterized.expand((("longer",), ("shorter",)))
    def test_not_strict(self, case: str) -> None:
        source, target, names = DIFFERENT[case]
        run_on_ranks(save_trained, 2, self.path, "FSDP1 flat", source)
        by_rank = run_on_ranks(load_not_strict, 3, self.path, "FSDP2", target)
        missing, unexpected = (sorted(names), []) if case == "longer" else ([], sorted(names))
        self.assertEqual(by_rank, [(missing, unexpected)] * 3)
        for stem in ("model", "optim"):
            saved, before, after = (opened(self.root / name, stem) for name in ("step-1", "before", "after"))
            self.assertEqual(list(after), list(before))
            check_same(stem, after, {name: saved.get(name, before[name]) for name in before})
            kept = [name for name in before if name not in saved]
            self.assertEqual(bool(kept), case == "longer")

    def test_not_strict_refuses_other_shapes(self) -> None:
        source, target, words = DIFFERENT["shapes"]
        run_on_ranks(save_trained, 2, self.path, "FSDP1 flat", source)
        errors = run_on_ranks(refused_not_strict, 2, self.path, "FSDP2", target)
        check_refused("shapes", errors, "StateError", *words)

    @expand(soon=[("fairscale flat", "FSDP2")], later=[("FSDP1 orig", "fairscale flat")])
    def test_hyperparameters_that_stay(self, source: str, target: str) -> None:
        run_on_ranks(save_trained, 2, self.path, source, {"make": OfModel(two_groups)})
        errors = run_on_ranks(load_keeping, 2, self.path, target)
        check_refused("an unknown one", errors, "StateError", "lrr")

    def test_a_hyperparameter_that_only_the_first_optimizer_has(self) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {"make": OfModel(two_optimizers)})
        errors = run_on_ranks(load_keeping_betas, 2, self.path)
        check_refused("SGD has no betas", errors, "StateError", "betas")

    @parameterized.expand(("strict", "check", "optim"))
    def test_ranks_that_ask_for_different_things(self, case: str) -> None:
        """Refused at once, and by all: none of them waits for another."""
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {})
        errors = run_on_ranks(load_differently, 2, self.path, case, timeout=40.0)
        words = "all ranks must make the same call" if case == "optim" else "every rank must make the same calls"
        check_refused(case, errors, "RankError", words)

    def test_another_number_of_groups(self) -> None:
        run_on_ranks(save_trained, 2, self.path, "FSDP2", {"make": OfModel(two_groups)})
        errors = run_on_ranks(load_refused_at, 2, self.path)
        check_refused("groups", errors, "StateError", "groups", "2", "1")


def load_refused_at(path: Path) -> tuple[str, str]:
    target = Trained("FSDP2", torch.optim.AdamW)
    before = everything(target)
    error = error_text(lambda: load(path, target))
    check_same("after the refusal", everything(target), before)
    return error


def load_differently(path: Path, case: str) -> tuple[str, str]:
    target, is_first = Trained("FSDP2", steps=1), dist.get_rank() == 0
    before = everything(target)
    options: dict[str, Any] = {"strict": is_first} if case == "strict" else {}
    if case == "check":
        options["compare"] = is_first
    optim = target.optim if case != "optim" or is_first else None
    error = error_text(
        lambda: fsdp_optim.load(
            path, target.model, optim, **as_options(fsdp_optim.LoadOptions, **options, progress=False, timeout=8.0)
        )
    )
    check_same("after the refusal", everything(target), before)
    return error


def load_keeping_betas(path: Path) -> tuple[str, str]:
    target = Trained("FSDP2", OfModel(two_optimizers), steps=1)
    before = everything(target)
    error = error_text(lambda: load(path, target, keep_hyperparameters=("betas",)))
    check_same("after the refusal", everything(target), before)
    return error


def save_refused_at(path: Path) -> tuple[str, str]:
    return error_text(lambda: save(path, Trained("FSDP2", steps=1)))


def load_not_strict(path: Path, wrapper: str, kwargs: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    with cpu():
        target = Trained(wrapper, **{**kwargs, "steps": 2})
        save(path.parent / "before", target)
        restored = load(path, target, strict=False)
        save(path.parent / "after", target)
        target.step([7])
        return sorted(restored.missing_keys), sorted(restored.unexpected_keys)


def refused_not_strict(path: Path, wrapper: str, kwargs: Mapping[str, Any]) -> tuple[str, str]:
    with cpu():
        target = Trained(wrapper, **{**kwargs, "steps": 2})
        before = everything(target)
        error = error_text(lambda: load(path, target, strict=False))
        check_same("after the refusal", everything(target), before)
        return error


def load_keeping(path: Path, wrapper: str) -> tuple[str, str]:
    with cpu():
        alike = Trained(wrapper, OfModel(two_groups))
        for keep, lrs, betas in (
            ((), [0.5, 0.125], (0.5, 0.75)),
            (("lr",), [7.0, 8.0], (0.5, 0.75)),
            (("lr", "betas"), [7.0, 8.0], (0.0, 0.25)),
        ):
            target = Trained(wrapper, OfModel(two_groups), steps=0)
            for group, lr in zip(target.optim.param_groups, (7.0, 8.0), strict=True):
                group.update(lr=lr, weight_decay=lr, betas=(0.0, 0.25))
            load(path, target, keep_hyperparameters=keep)
            got = target.optim.param_groups
            check_same(f"keep={keep}, lr", [group["lr"] for group in got], lrs)
            check_same(f"keep={keep}, betas", [group["betas"] for group in got], [betas, betas])
            check_same(f"keep={keep}, weight_decay", [group["weight_decay"] for group in got], [0.25, 0.01])
            check_same(f"keep={keep}, state", mine(target)["state"], mine(alike)["state"])
        before = everything(target)
        error = error_text(lambda: load(path, target, keep_hyperparameters=("lrr",)))
        check_same("after the refusal", everything(target), before)
        return error
