"""`prove_resume`: train, save, kill, resume in other worlds and wrappers, and compare the step that follows."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, not re-exported

from fsdp_optim.api import CheckpointManager, ManagerOptions, ResumeProof
from fsdp_optim.errors import FsdpOptimError, StateError
from fsdp_optim.testing.ranks import RanksFailed, WorkerDied, run_on_ranks

_PATIENCE = timedelta(hours=4)  # of other processes of torchrun
_NEVER = 1_000_000_000  # steps: this saves by save() alone

Wrap = Callable[[nn.Module], nn.Module]


@dataclass
class ResumeJob:
    """A small training, as `make_job` gives it on each rank.

    Attributes:
        model: the wrapped model.
        optim: its optimizer.
        step: makes the training step of a number, which begins with 1: batch, forward, backward, optimizer, scheduler. It may
            return a dict for `CheckpointManager.observe`, such as {"loss": loss}. The samples of a step must be the same at
            every world size, in equal parts, and the loss must be their mean.
        state: as for `CheckpointManager`: the scheduler, the scaler, the data loader.
    """

    model: nn.Module
    optim: Any
    step: Callable[[int], Mapping[str, Any] | None]
    state: Mapping[str, Any] | None = None


MakeJob = Callable[[Wrap], ResumeJob]


@dataclass(frozen=True)
class ProvenResume:
    """One resume, and the verdict about its first step.

    Attributes:
        world_size: the number of ranks.
        wrapper: the name of the wrapper.
        proof: the verdict.
    """

    world_size: int
    wrapper: str
    proof: ResumeProof

    @property
    def is_proven(self) -> bool:
        """Whether the step was equal, bit for bit or within rounding."""
        return self.proof.outcome in ("identical", "rounding")


class ResumeDiffers(FsdpOptimError, AssertionError):
    """A resume does not continue as the run that saved.

    Args:
        message: the table of all resumes.
        results: all resumes.
    """

    def __init__(self, message: str, results: Sequence[ProvenResume] = ()) -> None:
        super().__init__(message)
        self.results = tuple(results)


def prove_resume(
    make_job: MakeJob,
    *,
    worlds: Sequence[int] = (4, 2, 1),
    wrappers: Sequence[str | Wrap] = ("fsdp2",),
    steps: int = 3,
    timeout: float = 300.0,
    backend: str = "gloo",
) -> tuple[ProvenResume, ...]:
    """Prove that a training resumes as it would have continued, in every world and wrapper; print a table.

        def make_job(wrap):                              # at module level
            torch.manual_seed(0)
            model = wrap(Net())
            optim = torch.optim.AdamW(model.parameters())
            return ResumeJob(model, optim, lambda number: train_step(model, optim, number))

        def test_resume():
            prove_resume(make_job, worlds=[4, 2, 1], wrappers=["fsdp2", "ddp"])

    The first world and wrapper train `steps` steps, save, make one more step, and are killed by SIGKILL. Then each wrapper in
    each world resumes from that checkpoint, makes the same step, and compares it as `CheckpointManager(prove=True)` does. Runs
    under pytest and as a script, on local processes; under torchrun rank 0 does it, and the others wait for its result.

    Args:
        make_job: makes the job on a rank; a function at module level. `wrap` wraps a module, on the rank's device.
        worlds: numbers of ranks.
        wrappers: "fsdp2", "fsdp1", "ddp" or "plain" (one rank alone), or functions at module level that wrap a module.
        steps: the number of steps before the checkpoint.
        timeout: seconds for each run.
        backend: of torch.distributed.

    Returns:
        One `ProvenResume` for each wrapper and world, in this order.

    Raises:
        ResumeDiffers: the step of a resume differs, or could not be compared. The message has the table.
        RanksFailed: a job raised an error.
        StateError: an argument is wrong.
    """
    names = [_checked_name(wrapper) for wrapper in wrappers]
    if not worlds or not names or steps < 1:
        raise StateError("prove_resume needs at least one world, one wrapper and one step")
    runs = _Runs(make_job, tuple(worlds), tuple(wrappers), steps, timeout, backend)
    results = _once_of_torchrun(runs.results)
    table = _table(results)
    if os.environ.get("RANK", "0") == "0":
        print(table)
    wrong = [result for result in results if not result.is_proven]
    if wrong:
        raise ResumeDiffers(f"{len(wrong)} of {len(results)} resumes are not proven\n{table}", results)
    return results


@dataclass(frozen=True)
class _Runs:
    """The runs of one proof, on local processes."""

    make_job: MakeJob
    worlds: tuple[int, ...]
    wrappers: tuple[str | Wrap, ...]
    steps: int
    timeout: float
    backend: str

    def results(self) -> tuple[ProvenResume, ...]:
        with tempfile.TemporaryDirectory(prefix="prove-resume-") as root:
            self._save(root)
            return tuple(
                ProvenResume(world, _checked_name(wrapper), self._run(world, _resumed, root, wrapper)[0])
                for wrapper in self.wrappers
                for world in (self.worlds if wrapper != "plain" else (1,))
            )

    def _save(self, root: str) -> None:
        """Train until the checkpoint and one step more. All ranks are killed then."""
        world = self.worlds[0] if self.wrappers[0] != "plain" else 1
        try:
            self._run(world, _saved, root, self.wrappers[0])
        except RanksFailed as failed:
            others = [error for error in failed.errors.values() if not _was_killed(error)]
            if others or not failed.errors:
                raise

    def _run(self, world: int, run: Callable[..., Any], root: str, wrapper: str | Wrap) -> list[Any]:
        return run_on_ranks(
            run, world, self.make_job, wrapper, root, self.steps, timeout=self.timeout, backend=self.backend
        )


def _was_killed(error: BaseException) -> bool:
    return isinstance(error, WorkerDied) and error.exit_code == -signal.SIGKILL


def _saved(make_job: MakeJob, wrapper: str | Wrap, root: str, steps: int) -> None:
    """Runs on every rank, and does not return."""
    job = make_job(_wrap_of(wrapper))
    manager = _manager(job, root)
    for number in range(1, steps + 2):
        observed = job.step(number)
        if number > steps:
            manager.observe(**(observed or {}))
        manager.step(number)
        if number == steps:
            manager.save(number)
    manager.wait()  # for the record too
    os.kill(os.getpid(), signal.SIGKILL)


def _resumed(make_job: MakeJob, wrapper: str | Wrap, root: str, steps: int) -> ResumeProof | None:
    """Runs on every rank: resume, make one step, and return the verdict."""
    job = make_job(_wrap_of(wrapper))
    with _manager(job, root) as manager:
        number = manager.resume() + 1
        manager.observe(**(job.step(number) or {}))
        manager.step(number)
        return manager.proof


def _manager(job: ResumeJob, root: str) -> CheckpointManager:
    options = ManagerOptions(durable=False, signals=(), progress=False)
    return CheckpointManager(root, job.model, job.optim, state=job.state, every=_NEVER, prove=True, options=options)


def _in_fsdp2(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # here, because its import takes longer than all of this package

    uses = Counter(id(param) for child in module.children() for param in child.parameters())
    for child in module.children():
        params = list(child.parameters())
        is_tied = any(uses[id(param)] > 1 for param in params)  # which must be in one unit, so in that of the root
        if params and not is_tied and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            fully_shard(child)
    fully_shard(module)
    return module


def _in_fsdp1(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel  # as above

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return FullyShardedDataParallel(module, device_id=device, use_orig_params=True)


def _in_ddp(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def _plain(module: nn.Module) -> nn.Module:
    return module


_WRAPS: Mapping[str, Wrap] = {"fsdp2": _in_fsdp2, "fsdp1": _in_fsdp1, "ddp": _in_ddp, "plain": _plain}


def _wrap_of(wrapper: str | Wrap) -> Wrap:
    return _WRAPS[wrapper] if isinstance(wrapper, str) else wrapper


def _checked_name(wrapper: str | Wrap) -> str:
    if isinstance(wrapper, str) and wrapper not in _WRAPS:
        raise StateError(f"wrappers: {wrapper!r} is none of {', '.join(map(repr, _WRAPS))}, and no function")
    return wrapper if isinstance(wrapper, str) else getattr(wrapper, "__name__", repr(wrapper))


def _table(results: Sequence[ProvenResume]) -> str:
    head = ("wrapper", "ranks", "verdict")
    rows = [(result.wrapper, str(result.world_size), str(result.proof)) for result in results]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in (0, 1)]
    lines = [f"{name:<{widths[0]}}  {ranks:>{widths[1]}}  {verdict}" for name, ranks, verdict in (head, *rows)]
    return "\n".join(lines)


def _once_of_torchrun(make: Callable[[], tuple[ProvenResume, ...]]) -> tuple[ProvenResume, ...]:
    """Return the results of `make`, which rank 0 of torchrun calls alone; its error is raised on all ranks."""
    if not dist.is_torchelastic_launched() or os.environ["WORLD_SIZE"] == "1":
        return make()
    rank = os.environ["RANK"]
    is_master = rank == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=is_master, timeout=_PATIENCE)
    key = f"prove_resume/result/{store.add(f'prove_resume/calls/{rank}', 1)}"  # which ranks make equally often
    if rank == "0":
        outcome: Any = FsdpOptimError("rank 0 ended before it had results")
        try:
            outcome = make()
        except Exception as error:
            outcome = FsdpOptimError(f"rank 0: {type(error).__name__}: {error}")
            raise
        finally:
            store.set(key, pickle.dumps(outcome).hex())
    else:
        outcome = pickle.loads(bytes.fromhex(store.get(key).decode()))
        if isinstance(outcome, FsdpOptimError):
            raise outcome
    results: tuple[ProvenResume, ...] = outcome
    return results
