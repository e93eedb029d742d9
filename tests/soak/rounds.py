"""All calls, again and again, on the same ranks: memory, descriptors, threads and keys of the rendezvous store do not grow."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import Differs, check_same, differences
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.options import as_options
from kit.retention import save_managed
from kit.trained import Trained

import fsdp_optim
from fsdp_optim.testing import run_on_ranks
from soak.ranks import LIMIT, Layers
from soak.torture import Torture, temporary

WORLD = 2
WRAPPERS = ("FSDP2", "FSDP1 flat", "plain")
ROUNDS, WARM = 40, 10  # rounds of one case, and those of them before the first count
SHORT_ROUNDS, SHORT_WARM = 7, 3  # in the part of `make test-all`
MOST_MEMORY = 24 << 20  # bytes more at the end than at the first count


def used() -> dict[str, int]:
    """The resources that this process holds now."""
    gc.collect()
    with open("/proc/self/statm") as file:
        memory = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "Python's threads": threading.active_count(),
        "keys of the store": dist.distributed_c10d._get_default_store().num_keys(),
        "memory": memory,
    }


def one_round(trained: Trained, target: Trained, root: Path, number: int) -> None:
    """Make each call once, and two calls that fail."""
    group: Any = {"process_group": trained.process_group, "timeout": LIMIT}
    full = trained.gather(0, timeout=LIMIT)
    named = trained.gather(None, "name", timeout=LIMIT)
    for _ in fsdp_optim.iter_full_optim_state(
        trained.model, trained.optim, 0, **as_options(fsdp_optim.CallOptions, **group)
    ):
        pass
    fsdp_optim.load_optim_state_dict(target.optim, target.scatter(full))
    fsdp_optim.load_optim_state_dict(target.optim, target.shard(named))
    fsdp_optim.transfer_optim_state(
        trained.model, trained.optim, target.model, target.optim, **as_options(fsdp_optim.CallOptions, **group)
    )
    extras = {"extra": {"number": number}, "per_rank_extra": {"rank": dist.get_rank()}}
    fsdp_optim.save(
        root / "current",
        trained.model,
        trained.optim,
        overwrite=True,
        **as_options(fsdp_optim.SaveOptions, **extras, **group),
    )
    save_managed(root, number, trained.model, trained.optim, keep_last=2, durable=True, **group, **extras)
    for path in (root / "current", fsdp_optim.latest(root)):
        restored = fsdp_optim.load(
            path, target.model, target.optim, **as_options(fsdp_optim.LoadOptions, **group, compare=True)
        )  # type: ignore[arg-type]
        check_same("extras", (restored.state["number"], restored.state["rank"]), (number, dist.get_rank()))
    for param, loaded_param in zip(trained.params, target.params, strict=True):
        unequal = list(differences(local_of(loaded_param).detach(), local_of(param).detach()))
        if unequal:
            raise Differs(f"round {number}: {unequal[:3]}")
    for path, options in (
        (root / "nothing", {}),
        (root / "current", {"strict": False, "keep_hyperparameters": ("nobody",)}),
    ):
        try:
            fsdp_optim.load(
                path,
                target.model,
                target.optim,
                **as_options(fsdp_optim.LoadOptions, **options, **group),
            )  # type: ignore[arg-type]
        except fsdp_optim.FsdpOptimError:
            continue
        raise Differs(f"round {number}: {path.name} was loaded")


def rounds(root: Path, wrapper: str, count: int, warm_after: int) -> tuple[dict[str, int], dict[str, int]]:
    """Run rounds on this rank. Returns its resources after the first rounds, and at the end."""
    torch.set_num_threads(1)
    trained, target = (Trained(wrapper, adam, steps, Layers) for steps in (2, 1))
    trained.forget_gradients()
    warm: dict[str, int] = {}
    for number in range(count):
        if number == warm_after:
            dist.barrier()
            warm = used()
        one_round(trained, target, root, number)
    dist.barrier()
    time.sleep(0.05)  # for threads that end by themselves
    return warm, used()


def run(torture: Torture) -> None:
    """Run some rounds of each wrapper in turn."""
    count, warm_after = (SHORT_ROUNDS, SHORT_WARM) if torture.short else (ROUNDS, WARM)
    with temporary() as folder:
        for number in torture.numbers():
            wrapper = WRAPPERS[number % len(WRAPPERS)]
            with torture.case(number, wrapper):
                root = folder / f"{number}"
                root.mkdir()
                by_rank = run_on_ranks(rounds, WORLD, root, wrapper, count, warm_after, timeout=10 * LIMIT)
                torture.figures["rounds"] += count
                probe(by_rank, count - warm_after, torture.figures)


def probe(by_rank: list[Any], more: int, figures: Counter[str]) -> None:
    """Raise if a resource has grown."""
    wrong = []
    for rank, (warm, end) in enumerate(by_rank):
        most = {name: count + (MOST_MEMORY if name == "memory" else 0) for name, count in warm.items()}
        wrong += [f"rank {rank}: {name}: {warm[name]}, then {end[name]}" for name in warm if end[name] > most[name]]
        grown = max(end["memory"] - warm["memory"], 0) >> 10
        figures["KiB of memory more, at most"] = max(figures["KiB of memory more, at most"], grown)
    if wrong:
        raise Differs(f"after {more} more rounds more is held: {'; '.join(wrong)}")
