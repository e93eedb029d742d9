"""A small language model that trains as large ones do, for the proofs of resumes: every world has the same samples in a step.

Tied embeddings, attention with biases, norms, a pair of experts, two param groups, clipping, accumulation, a schedule, a loss
scale and an average of the weights; in every wrapper, with several optimizers, and in several precisions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import fsdp_optim
from kit.wraps import WRAPPERS, in_fsdp2

VOCABULARY, WIDTH, HIDDEN, LENGTH = 31, 12, 24, 7
NUM_SAMPLES, NUM_MICRO = 24, 2  # of a step, of all ranks together
LIMIT = 0.5  # of the norm of the gradients
NEVER = 1_000_000_000  # steps: a manager then saves by save() alone


class Experts(nn.Module):
    """Two experts, of which each token takes a part."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        return share[..., :1] * torch.tanh(self.first(x)) + share[..., 1:] * torch.tanh(self.second(x))


class Block(nn.Module):
    """Attention, two matrices and the experts. The gradient of `key.bias` is nothing but rounding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.experts = Experts()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights = (self.query(y) @ self.key(y).transpose(-1, -2) / math.sqrt(WIDTH)).softmax(-1)
        x = x + self.dropout(weights @ self.value(y))
        return x + self.down(torch.nn.functional.gelu(self.up(x))) + self.experts(x)


class Small(nn.Module):
    """The model. `units`: the modules that get a wrapper of their own."""

    units = ("blocks.0", "")
    tensor_parallel = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}

    def __init__(self, dropout: float = 0.0, batch_norm: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(1))
        self.batch_norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.3)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        self.num_calls.add_(1)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(x))


class Lion(torch.optim.Optimizer):
    """An optimizer without a second moment, whose step is a sign."""

    def __init__(self, params: Any, lr: float = 0.003, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is not None:
                    moment = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.sub_((moment * first + param.grad * (1 - first)).sign(), alpha=group["lr"])
                    moment.mul_(second).add_(param.grad, alpha=1 - second)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, betas=(0.9, 0.95)),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "plain sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.003, momentum=0.9),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=0.01),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, lr=0.5),
    "lion": lambda groups: Lion(groups),
}


class Scaler:
    """A loss scale that works for gradients of every kind, and grows after some steps without an overflow."""

    def __init__(self) -> None:
        self.scale, self.num_good = 256.0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "num_good": self.num_good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self.num_good = state["scale"], state["num_good"]

    def update(self, is_finite: bool) -> None:
        self.num_good = self.num_good + 1 if is_finite else 0
        if not is_finite or self.num_good % 3 == 0:
            self.scale *= 2.0 if is_finite else 0.5


class Loader:
    """Gives the samples of each step: the same at every world size."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]

    def __next__(self) -> Tensor:
        self.position += 1
        generator = torch.Generator().manual_seed(self.position)
        starts = torch.randint(0, VOCABULARY, (NUM_SAMPLES, 1), generator=generator)
        strides = torch.randint(1, 4, (NUM_SAMPLES, 1), generator=generator)
        return (starts + strides * torch.arange(LENGTH)) % VOCABULARY


@dataclass(frozen=True)
class Kind:
    """A job. `precision`: "fp32"; "mixed": bf16 in the wrapper, or by autocast; "bf16": of all parameters."""

    wrapper: str = "FSDP2"
    optim: str = "adamw"
    precision: str = "fp32"
    dropout: float = 0.0
    batch_norm: bool = False
    tied: bool = True
    has_average: bool = True

    def __str__(self) -> str:
        extra = [name for name, has in (("dropout", self.dropout), ("BatchNorm", self.batch_norm)) if has]
        return " ".join([self.wrapper, self.optim, self.precision, *extra])


@dataclass
class Wrong:
    """What a faulty step does otherwise."""

    limit: float | None = LIMIT
    num_micro: int = NUM_MICRO
    loss_factor: float = 1.0
    samples: Callable[[Tensor], Tensor] = lambda samples: samples
    own: Callable[[Tensor, int], Tensor] = lambda samples, rank: samples
    targets: Callable[[Tensor], Tensor] = lambda targets: targets
    before_update: Sequence[Callable[[Job], None]] = ()
    after_update: Sequence[Callable[[Job], None]] = ()
    averages: bool = True
    autocasts: bool = True


class Job:
    """A training on this rank, and its manager."""

    def __init__(self, root: Any, kind: Kind, seed: int = 0, **options: Any) -> None:
        self.kind, self.rank = kind, dist.get_rank()
        torch.manual_seed(seed)
        small = Small(kind.dropout, kind.batch_norm, kind.tied)
        self.num_parts = dist.get_world_size()
        self.part = self.rank
        if kind.wrapper == "FSDP2 x TP":
            tp = {1: 1, 2: 2, 3: 3, 4: 2}[self.num_parts]
            self.num_parts, self.part = self.num_parts // tp, self.rank // tp
        self.model = _wrapped(small, kind)
        self.optim = OPTIMIZERS[kind.optim](_groups(self.model, kind))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optim, _schedule)
        self.scaler, self.loader = Scaler(), Loader()
        self.average = self._weights_now() if kind.has_average and kind.wrapper in _KEEP_SHAPES else {}
        torch.manual_seed(1000 + seed + self.part)
        self.wrong = Wrong()
        self.losses: list[float] = []
        state = {"scheduler": self.scheduler, "scaler": self.scaler, "loader": self.loader, "average": self.average}
        self.manager = fsdp_optim.CheckpointManager(
            root,
            self.model,
            self.optim,
            state=state,
            every=NEVER,
            prove=True,
            options=fsdp_optim.ManagerOptions(durable=False, signals=(), progress=False),
            **options,
        )

    def _weights_now(self) -> dict[str, Tensor]:
        return {_plain_name(name): param.detach().clone() for name, param in self.model.named_parameters()}

    def step(self) -> float:
        """One training step, without the manager's end of it. Returns the loss of all ranks."""
        wrong, kind = self.wrong, self.kind
        self.optim.zero_grad()
        samples, total = wrong.samples(next(self.loader)), 0.0
        for micro in samples.chunk(NUM_MICRO)[: wrong.num_micro]:
            tokens = wrong.own(micro.chunk(self.num_parts)[self.part], self.rank)
            is_auto = kind.precision == "mixed" and kind.wrapper in ("DDP", "plain") and wrong.autocasts
            with torch.autocast("cpu", torch.bfloat16) if is_auto else contextlib.nullcontext():
                logits = self.model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), wrong.targets(tokens[:, 1:]).flatten())
            (loss * (self.scaler.scale * wrong.loss_factor / wrong.num_micro)).backward()
            total += float(loss.detach()) / wrong.num_micro
        norm = self._unscale_and_clip()
        self.manager.observe(loss=total, grad_norm=norm)
        for change in wrong.before_update:
            change(self)
        is_finite = math.isfinite(norm)
        if is_finite:
            self.optim.step()
        self.scaler.update(is_finite)
        self._share_statistics()
        for change in wrong.after_update:
            change(self)
        self.scheduler.step()
        if wrong.averages:
            self._average()
        self.losses.append(_mean(total))
        return self.losses[-1]

    def run(self, first: int, last: int) -> list[float]:
        """The steps of these numbers, with the manager. Returns their losses."""
        losses = []
        for number in range(first, last + 1):
            losses.append(self.step())
            self.manager.step(number)
        return losses

    @torch.no_grad()
    def _unscale_and_clip(self) -> float:
        """Divide the gradients by the scale, and bound their norm, as the wrapper has them. Returns the norm before."""
        squares = torch.zeros((), dtype=torch.float64)
        gradients = [param.grad for param in self.model.parameters() if param.grad is not None]
        for gradient in gradients:
            gradient.div_(self.scaler.scale)
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            squares += whole.double().square().sum()
        if self.kind.wrapper.startswith(("FSDP1", "fairscale")):
            dist.all_reduce(squares)
        norm = float(squares.sqrt())
        if self.wrong.limit is not None and norm > self.wrong.limit:
            for gradient in gradients:
                gradient.mul_(self.wrong.limit / norm)
        return norm

    @torch.no_grad()
    def _share_statistics(self) -> None:
        """Make the statistics of BatchNorm, which each rank takes of its own samples, the mean of all ranks."""
        for name, buffer in self.model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                dist.all_reduce(buffer)
                buffer.div_(dist.get_world_size())

    @torch.no_grad()
    def _average(self) -> None:
        for name, param in self.model.named_parameters():
            if self.average:
                self.average[_plain_name(name)].lerp_(param.detach(), 0.05)


_KEEP_SHAPES = ("FSDP2", "HSDP", "FSDP2 x TP", "DDP", "plain")
"""Wrappers whose parameters a tree of `state=` may have."""


def _plain_name(name: str) -> str:
    return name.removeprefix("module.")


def _mean(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _schedule(number: int) -> float:
    return min(1.0, (number + 2) / 6)


def _wrapped(small: Small, kind: Kind) -> Any:
    if kind.precision == "bf16":
        small = small.to(torch.bfloat16)
    if kind.precision != "mixed" or kind.wrapper in ("DDP", "plain"):
        return WRAPPERS[kind.wrapper](small)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return in_fsdp2(small, mp_policy=policy)


def is_decayed(name: str, kind: Kind) -> bool:
    """Whether a parameter is in the first group. Flat parameters are whole units."""
    if kind.wrapper.endswith(" flat"):
        return "blocks.0" in name
    return not (name.endswith("bias") or "norm" in name)


def _groups(model: Any, kind: Kind) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    decayed = [param for name, param in named if is_decayed(name, kind)]
    others = [param for name, param in named if not is_decayed(name, kind)]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
