"""Experts on groups of ranks, beside parameters on all ranks: train, save sharded, resume with experts placed elsewhere.

Every rank counts its experts from `experts.0`. The oracle is the run that never stopped, of all experts in one process.
"""

from __future__ import annotations

import itertools
import tempfile
import unittest
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand
from kit.experts import expert_wrap, global_name
from kit.language_model import adamw, check_close
from kit.options import as_options
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import StateDictType

import fsdp_optim
from fsdp_optim.testing import RankPool

NUM_EXPERTS, WIDTH = 4, 6
BEFORE, AFTER = 3, 3  # steps


@dataclass(frozen=True)
class Places:
    """Where experts are. `of_groups`: the experts of each group of ranks; `per_group`: the number of ranks in a group."""

    of_groups: tuple[tuple[int, ...], ...]
    per_group: int

    @property
    def world_size(self) -> int:
        return len(self.of_groups) * self.per_group

    def experts_of(self, rank: int) -> tuple[int, ...]:
        return self.of_groups[rank // self.per_group]

    def group_of(self, rank: int) -> tuple[int, ...]:
        first = rank // self.per_group * self.per_group
        return tuple(range(first, first + self.per_group))

    def name_of(self, fqn: str, rank: int) -> str:
        """The name of a parameter in the whole model, from its name on a rank."""
        return global_name(self.experts_of(rank), fqn)


SAVED = Places(((0, 1), (2, 3)), 1)
RESUMED = {
    "the same ranks": SAVED,
    "twice as many ranks": Places(((0, 1), (2, 3)), 2),
    "one expert on each rank": Places(((0,), (1,), (2,), (3,)), 1),
    "experts elsewhere": Places(((2, 3), (0, 1)), 1),
    "other neighbours": Places(((3, 0), (1, 2)), 1),
}


class Mixture(nn.Module):
    def __init__(self, expert_ids: tuple[int, ...]) -> None:
        super().__init__()
        self.mine = expert_ids
        self.trunk = nn.Linear(WIDTH, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in expert_ids)
        self.head = nn.Linear(3, 2)
        with torch.no_grad():
            for name, param in self.named_parameters():
                whole = global_name(expert_ids, name)
                generator = torch.Generator().manual_seed(sum(map(ord, whole)))
                param.copy_(torch.rand(param.shape, generator=generator) - 0.5)

    def forward(self, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results of the batches of this rank's experts."""
        return [self.head(torch.tanh(e(torch.tanh(self.trunk(x))))) for e, x in zip(self.experts, batches, strict=True)]


def batch_of(expert: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + expert)
    return torch.rand(7, WIDTH, generator=generator), torch.randint(0, 2, (7,), generator=generator)


def train(
    model: Any, optim: torch.optim.Optimizer, steps: range, expert_ids: tuple[int, ...], num_groups: int
) -> list[float]:
    """The loss of all experts at each step. Every rank of a group has the same batches."""
    losses = []
    for step in steps:
        batches = [batch_of(expert, step) for expert in expert_ids]
        optim.zero_grad()
        results = model([x for x, _ in batches])
        loss = torch.stack(
            [nn.functional.cross_entropy(r, y) for r, (_, y) in zip(results, batches, strict=True)]
        ).sum()
        (loss * num_groups).backward()  # wrappers take the mean over all ranks, so that the trunk's gradient is the sum
        for param in model.experts.parameters():
            if param.grad is not None:
                param.grad.mul_(1 / num_groups)  # and the experts' gradients, over their own group
        optim.step()
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size() // num_groups
        losses.append(float(total))
    return losses


def unbroken() -> list[float]:
    everything = tuple(range(NUM_EXPERTS))
    model = Mixture(everything)
    return train(model, adamw(model.parameters()), range(BEFORE + AFTER), everything, 1)


def made(kind: str, places: Places) -> tuple[Any, torch.optim.Optimizer, tuple[int, ...]]:
    rank = dist.get_rank()
    expert_ids = places.experts_of(rank)
    model = expert_wrap(kind, places.group_of(rank))(Mixture(expert_ids))
    return model, adamw(model.parameters()), expert_ids


def save(root: Path, kind: str) -> None:
    """Sharded, by torch's own calls (FSDP1) and by ours."""
    model, optim, expert_ids = made(kind, SAVED)
    check_close("before", train(model, optim, range(BEFORE), expert_ids, len(SAVED.of_groups)), unbroken()[:BEFORE])
    fsdp_optim.save(
        root / "ours",
        model,
        optim,
        options=fsdp_optim.SaveOptions(name_of=SAVED.name_of, durable=False, progress=False),
    )
    if "FSDP1" not in kind:
        return
    with TorchFSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        content = {"model": model.state_dict(), "optimizer": TorchFSDP.optim_state_dict(model, optim)}
    (root / "theirs").mkdir(exist_ok=True)
    torch.save(content, root / "theirs" / f"checkpoint-{dist.get_rank()}.pt")


def name_in_whole(stored: str) -> str:
    """The name in the whole model of a name that several ranks have used: `experts.0.weight@1`."""
    name, _, rank = stored.partition("@")
    return SAVED.name_of(name, int(rank)) if rank else name


def resume(root: Path, kind: str, places: Places, which: str) -> None:
    model, optim, expert_ids = made(kind, places)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    options: dict[str, Any] = {"rename": name_in_whole} if which == "theirs" else {}
    fsdp_optim.load(
        root / which,
        model,
        optim,
        **as_options(fsdp_optim.LoadOptions, **options, name_of=places.name_of, compare=True, progress=False),
    )
    losses = train(model, optim, range(BEFORE, BEFORE + AFTER), expert_ids, len(places.of_groups))
    check_close(which, losses, unbroken()[BEFORE:])


# What was saved, and where experts go, are independent: FSDP2's meet every place, and the others one or two.
SOON = [
    *(("FSDP2", "ours", how) for how in RESUMED),
    *(("FSDP1 flat", "theirs", how) for how in ("the same ranks", "experts elsewhere")),
    ("FSDP1 flat", "ours", "twice as many ranks"),
    ("FSDP1 orig", "theirs", "one expert on each rank"),
    ("FSDP1 orig", "ours", "other neighbours"),
]
LATER = [
    case for case in itertools.product(("FSDP1 flat", "FSDP1 orig"), ("ours", "theirs"), RESUMED) if case not in SOON
]


class ExpertWorkflowTest(unittest.TestCase):
    pool: RankPool
    root: Path

    @classmethod
    def setUpClass(cls) -> None:
        cls.pool = RankPool()
        cls.addClassCleanup(cls.pool.close)
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.root = Path(folder.name)

    def saved(self, kind: str) -> Path:
        """The folder of what was saved of this kind."""
        root = self.root / kind
        if not root.exists():
            root.mkdir()
            self.pool.run(save, SAVED.world_size, root, kind)
        return root

    @expand(SOON, LATER)
    def test_sharded_saves_resume_with_experts_elsewhere(self, kind: str, which: str, how: str) -> None:
        places = RESUMED[how]
        self.pool.run(resume, places.world_size, self.saved(kind), kind, places, which)


if __name__ == "__main__":
    unittest.main()
