"""Trainings that do something unusual around a proven step, each saved, resumed by a new model, and compared."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_optim
from fsdp_optim import CheckpointManager, ManagerOptions, ResumeProof
from fsdp_optim.adapters import use_adapters
from fsdp_optim.state.values import same
from kit.masters import MasterOptimizer, Mixed, MixedAdapter
from kit.wraps import WRAPPERS

NEVER = 1_000_000_000


class Net(nn.Module):
    units = ("first", "second", "")

    def __init__(self, recomputes: bool | None = None, fails_at: int = 0) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.recomputes, self.fails_at, self.num_calls = recomputes, fails_at, 0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        if self.recomputes is None:
            y = torch.tanh(self.second(y))
        else:
            y = torch.tanh(checkpoint(self.second, y, use_reentrant=self.recomputes))
        return self.head(y)


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + (dist.get_rank() if dist.is_initialized() else 0))
    return torch.randn(6, 4, generator=generator)


class Trial:
    """A training: `call` is what makes the forward pass, `optims` what steps."""

    wrapper = "DDP"
    options: dict[str, Any] = {}

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: Any = WRAPPERS[self.wrapper](self.net())
        self.call: Any = self.model
        self.optim: Any = self.optimizer()
        self.prepare()

    def net(self) -> nn.Module:
        return Net()

    def optimizer(self) -> Any:
        return torch.optim.AdamW([param for param in self.model.parameters() if param.requires_grad], lr=0.01)

    def prepare(self) -> None:
        """Do what comes after the optimizer was made."""

    def step(self, number: int) -> None:
        self.optim.zero_grad()
        self.call(batch(number)).square().mean().backward()
        self.optim.step()

    def between(self, is_resumed: bool) -> None:
        """Comes between the save or the resume and the step."""

    def managed(self) -> Any:
        return self.model

    def manager(self, root: Any, **options: Any) -> CheckpointManager:
        return CheckpointManager(
            root,
            self.managed(),
            self.optim,
            prove=True,
            options=ManagerOptions(durable=False, signals=(), progress=False),
            **{"every": NEVER, **self.options, **options},
        )


class OnFsdp2(Trial):
    wrapper = "FSDP2"


class Compiled(Trial):
    def prepare(self) -> None:
        torch._dynamo.reset()
        self.call = torch.compile(self.model, backend="eager")


class CompiledWhole(Trial):
    """The inner model is compiled as one graph, and given to the manager as it is called."""

    wrapper = "plain"
    options = {}

    def prepare(self) -> None:
        torch._dynamo.reset()
        self.call = torch.compile(self.model, backend="eager", fullgraph=True)

    def managed(self) -> Any:
        return self.call


class CompiledInPlace(Trial):
    wrapper = "FSDP2"

    def prepare(self) -> None:
        torch._dynamo.reset()
        self.model.compile(backend="eager")


class CompiledWholeInPlace(Trial):
    wrapper = "plain"

    def prepare(self) -> None:
        torch._dynamo.reset()
        self.model.compile(backend="eager", fullgraph=True)


class Recomputing(Trial):
    def net(self) -> nn.Module:
        return Net(recomputes=False)


class RecomputingReentrant(OnFsdp2):
    def net(self) -> nn.Module:
        return Net(recomputes=True)


class EvaluatedBetween(OnFsdp2):
    """The saving run evaluates after its save, in eval mode and without gradients; the other does not."""

    context: Callable[[], Any] = staticmethod(torch.no_grad)

    def between(self, is_resumed: bool) -> None:
        if not is_resumed:
            self.model.eval()
            with self.context():
                self.call(batch(99))
            self.model.train()


class EvaluatedInInferenceMode(EvaluatedBetween):
    wrapper = "DDP"
    context = staticmethod(torch.inference_mode)


class TwoOptimizers(OnFsdp2):
    def optimizer(self) -> Any:
        first, *others = list(self.model.parameters())
        return [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]

    def step(self, number: int) -> None:
        for optim in self.optim:
            optim.zero_grad()
        self.call(batch(number)).square().mean().backward()
        for optim in self.optim:
            optim.step()


class OfNobody:
    """An optimizer that is none of torch's, and has no hooks."""

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.Adam(params, lr=0.01)

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> None:
        torch.optim.Adam.step.__wrapped__(self.inner)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


class WithoutHooks(OnFsdp2):
    def optimizer(self) -> Any:
        return OfNobody(self.model.parameters())


class Closure(Trial):
    """The forward pass is inside the optimizer's step."""

    def step(self, number: int) -> None:
        def loss() -> Any:
            self.optim.zero_grad()
            value = self.call(batch(number)).square().mean()
            value.backward()
            return value

        self.optim.step(loss)


class Failing(Trial):
    """A forward pass fails after the save and after the resume, and is made again."""

    def step(self, number: int) -> None:
        if number == 3:
            with contextlib.suppress(RuntimeError):
                self.call(torch.zeros(6, 5))
        super().step(number)


class Overflowing(Trial):
    """The loss scale is too large at the step, which both runs leave out."""

    def prepare(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def step(self, number: int) -> None:
        self.optim.zero_grad()
        loss = self.call(batch(number)).square().mean() * (float("inf") if number == 3 else 1.0)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optim)
        self.scaler.update()


class Frozen(OnFsdp2):
    """Only the head is trained and saved; the rest is built by the same seed in each run."""

    options = {"weights": "trainable"}

    def net(self) -> nn.Module:
        torch.manual_seed(7)
        net = Net()
        net.first.requires_grad_(False)
        net.second.requires_grad_(False)
        return net


class Stages(Trial):
    """Pipeline stages of one model, as a list."""

    wrapper = "plain"

    def prepare(self) -> None:
        self.stages = [nn.Module(), nn.Module()]
        self.stages[0].first, self.stages[1].second, self.stages[1].head = (
            self.model.first,
            self.model.second,
            self.model.head,
        )

    def managed(self) -> Any:
        return self.stages

    def step(self, number: int) -> None:
        self.optim.zero_grad()
        torch.manual_seed(number)
        self.model(torch.randn(6, 4)).square().mean().backward()
        self.optim.step()


IDENTICAL: dict[str, type[Trial]] = {
    kind.__name__: kind
    for kind in (
        Trial,
        OnFsdp2,
        Compiled,
        CompiledInPlace,
        Recomputing,
        RecomputingReentrant,
        EvaluatedBetween,
        EvaluatedInInferenceMode,
        TwoOptimizers,
        WithoutHooks,
        Closure,
        Failing,
        Overflowing,
        Frozen,
    )
}
"""Trials of a job with several ranks whose resume is bit-identical."""

ALONE: dict[str, type[Trial]] = {kind.__name__: kind for kind in (CompiledWhole, CompiledWholeInPlace, Stages)}
"""The same, in a job of one rank."""


def trained(root: Any, trial: Trial, first: int = 1, last: int = 2, **options: Any) -> None:
    """Make some steps, save, make a step more, and write its record."""
    with trial.manager(root, **options) as manager:
        for number in range(first, last + 1):
            trial.step(number)
            manager.step(number)
        manager.save(last)
        trial.between(False)
        trial.step(last + 1)
        manager.step(last + 1)


def resumed(root: Any, trial: Trial, change: Callable[[Trial], None] | None = None) -> ResumeProof | None:
    with trial.manager(root) as manager:
        number = manager.resume(strict=not trial.options) + 1
        trial.between(True)
        if change is not None:
            change(trial)
        trial.step(number)
        manager.step(number)
        return manager.proof


def halved(trial: Trial) -> None:
    """A fault: a weight of half its size."""
    for model in [trial.managed()] if not isinstance(trial.managed(), list) else trial.managed():
        for name, param in model.named_parameters():
            if name.endswith("head.weight"):
                param.detach().mul_(0.5)


def results(root: Path, names: list[str]) -> dict[str, Any]:
    """Runs on every rank: the verdict about an honest resume of each trial, and about a faulty one; or a traceback."""
    by_name: dict[str, Any] = {}
    for name in names:
        kind = {**IDENTICAL, **ALONE}[name]
        try:
            trained(root / name, kind(0))
            by_name[name] = resumed(root / name, kind(1)), resumed(root / name, kind(1), halved)
        except Exception:
            by_name[name] = traceback.format_exc(), None
    return by_name


@contextlib.contextmanager
def noted(root: Any, trial: Trial, **options: Any) -> Iterator[tuple[Trial, CheckpointManager]]:
    with trial.manager(root, **options) as manager:
        yield trial, manager


def every_step(root: Path) -> list[Any]:
    """Saves of every step; then a run that resumes and continues, a run that resumes from that one, and a rollback."""
    with noted(root, OnFsdp2(0), every=1) as (trial, manager):
        for number in (1, 2, 3):
            trial.step(number)
            manager.step(number)
    with noted(root, OnFsdp2(1), every=1) as (trial, manager):
        proofs = [manager.resume()]
        for number in (4, 5):
            trial.step(number)
            manager.step(number)
        proofs.append(manager.proof)  # the run before had made no step after its last checkpoint
    with noted(root, OnFsdp2(2), every=1) as (trial, manager):
        manager.rollback(3)
        trial.step(4)
        manager.step(4)
        proofs.append(manager.proof)
        manager.rollback(1)
        trial.step(2)
        manager.step(2)
        proofs.append(manager.proof)
    return proofs


class Masters(Trial):
    """bf16 weights, and fp32 masters that the optimizer cuts over the ranks."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Mixed(Net())
        self.call, self.optim = self.model, MasterOptimizer(self.model)

    def step(self, number: int) -> None:
        self.model.zero_grad()
        self.model(batch(number).bfloat16()).float().square().mean().backward()
        for param in self.model.parameters():
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())  # type: ignore[union-attr]
        self.optim.step()


def rounded(trial: Trial) -> None:
    """A fault: the masters are made from the bf16 weights."""
    trial.optim.master.data.copy_(trial.optim.master.data.bfloat16().float())


def masters(root: Path) -> list[Any]:
    """Masters that are restored, and masters that are made anew."""
    with use_adapters([MixedAdapter()]):
        trained(root, Masters(0))
        return [resumed(root, Masters(1)), resumed(root, Masters(1), rounded)]


def untouched(root: Path) -> list[Any]:
    """Whether a manager leaves weights, moments, gradients, groups and random states as they are, and no hooks at the end."""
    trial = OnFsdp2(0)
    pairs = []
    with trial.manager(root) as manager:
        for number in (1, 2, 3):
            trial.step(number)
            before = _everything(trial)
            manager.step(number)
            pairs.append(same(before[:-1], _everything(trial)[:-1]))
            if number == 2:
                before = _everything(trial)
                manager.save(2)
                pairs.append(same(before[:-1], _everything(trial)[:-1]))
    without = OnFsdp2(0)
    for number in (1, 2, 3):
        without.step(number)
    return [*pairs, same(_everything(without), _everything(trial))]


def _everything(trial: Trial) -> list[Any]:
    params = list(trial.model.parameters())
    return [
        [param.detach().to_local().clone() for param in params],
        [param.grad.to_local().clone() for param in params],
        [
            {
                key: (value.to_local() if hasattr(value, "to_local") else value).clone()
                for key, value in trial.optim.state[param].items()
            }
            for param in params
        ],
        [{key: value for key, value in group.items() if key != "params"} for group in trial.optim.param_groups],
        torch.get_rng_state(),
        [
            len(hooks)
            for hooks in (
                trial.model._forward_pre_hooks,
                trial.model._forward_hooks,
                trial.optim._optimizer_step_pre_hooks,
                trial.optim._optimizer_step_post_hooks,
            )
        ],
    ]


def no_step(root: Path) -> list[Any]:
    """A run that resumes and ends without a step, one that makes another step, and one that continues."""
    trained(root, OnFsdp2(0))
    proofs = []
    with noted(root, OnFsdp2(1)) as (trial, manager):
        manager.resume()
        proofs.append(manager.proof)
    with noted(root, OnFsdp2(1)) as (trial, manager):
        manager.resume()
        trial.step(4)
        manager.step(4)
        proofs.append(manager.proof)
    proofs.append(resumed(root, OnFsdp2(1)))
    return proofs


def two_managers(root: Path) -> list[Any]:
    """Two managers of one training, in two folders."""
    trial = OnFsdp2(0)
    with trial.manager(root / "a") as a, trial.manager(root / "b") as b:
        trial.step(1)
        for manager in (a, b):
            manager.step(1)
            manager.save(1)
        trial.step(2)
        for manager in (a, b):
            manager.step(2)
    return [resumed(root / "a", OnFsdp2(1)), resumed(root / "b", OnFsdp2(1))]


def killed_before_the_record(root: Path) -> list[Any]:
    """Without the record of the step; then with one that is of another checkpoint, cut off, and of the right one."""
    trained(root, OnFsdp2(0))
    record = root / "step-00000002" / "proof.json"
    dist.barrier()  # rank 0 writes it last
    content = record.read_bytes()
    dist.barrier()  # before rank 0 removes it
    proofs: list[Any] = []
    for text in (None, content.replace(b'"checkpoint": "', b'"checkpoint": "x'), content[:100], content):
        if dist.get_rank() == 0:
            record.unlink(missing_ok=True)
            if text is not None:
                record.write_bytes(text)
        dist.barrier()
        try:
            proofs.append(resumed(root, OnFsdp2(1)))
        except fsdp_optim.FsdpOptimError as error:
            proofs.append(error)
    return proofs


def observed_digests(root: Path) -> list[Any]:
    """What a user shows: numbers, and trees, of which another one is told."""
    proofs = []
    for index, other in enumerate((None, "ids", "loss")):
        trial = OnFsdp2(index)
        with trial.manager(root) as manager:
            number = manager.resume() if index else 0
            for step in range(number + 1, 4):
                trial.step(step)
                ids = torch.arange(3) + (other == "ids")
                manager.observe(ids=ids, loss=torch.tensor(2.0 + (other == "loss")), batch={"x": batch(step)})
                manager.step(step)
                if step == 2 and not index:
                    manager.save(2)
            proofs.append(manager.proof)
    return proofs[1:]


_SEQUENCES = (masters, untouched, every_step, no_step, two_managers, observed_digests, killed_before_the_record)


def sequences(root: Path) -> dict[str, Any]:
    """Runs on every rank."""
    by_name: dict[str, Any] = {}
    for function in _SEQUENCES:
        name = function.__name__
        try:
            by_name[name] = function(root / name)
        except Exception:
            by_name[name] = traceback.format_exc()
    return by_name
