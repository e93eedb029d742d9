"""The same training with FSDP and without, and comparisons that say what differs.

The oracle needs no forward: every original parameter gets a random gradient, the wrapped model's ranks get theirs cut
out of it by `models.cut`, and the optimizers step. Elementwise optimizers then have the same state, bit for bit.
"""

from __future__ import annotations

import copy
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from parameterized import parameterized
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks
from kit import models
from kit.models import Live, Wrapping

T = TypeVar("T")
STEPS = 3
Full = dict[str, Any]

# ---------------------------------------------------------------------------------------------------- optimizers


class Peculiar(torch.optim.Optimizer):
    """An optimizer whose state has scalars of every type, and elements of other dtypes than the parameter's."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, steps = self.state[p], self.state[p].get("step", 0) + 1
                state["step"] = steps
                # Names of moments of torch.optim: of others, one element says nothing of what they are.
                state["square_avg"] = state.get("square_avg", 0) + p.grad.double()
                state["grad_avg"] = p.grad.to(torch.bfloat16)
                state["prev"] = p.grad.mul(10).to(torch.int8)
                state["step_size"] = p.grad > 0
                state["decay"] = 0.9**steps
                state["warm"] = steps > 1
                state["phase"] = "warm" if steps > 1 else "cold"
                state["nothing"] = None
                state["seen"] = torch.tensor(steps, dtype=torch.int64)
                state["mu"] = torch.tensor(0.5**steps, dtype=torch.float64)
                p.sub_(state["square_avg"].to(p.dtype), alpha=group["lr"])


# Weight decay makes the state depend on the parameters too.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adamw_amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.25, "weight_decay": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01, "weight_decay": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01, "weight_decay": 0.01}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01, "weight_decay": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.1, "t0": 1.0, "lambd": 0.5}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "peculiar": (Peculiar, {"lr": 0.1}),
}

# State values that are one for the whole parameter; all others have an element for each of the parameter's.
ONE_PER_PARAMETER = {"step", "mu_product", "eta", "mu", "decay", "warm", "phase", "nothing", "seen"}

# ---------------------------------------------------------------------------------------------------- the training


@dataclass(frozen=True)
class Group:
    """A param group of the parameters whose FQN starts with one of `prefixes`."""

    prefixes: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, *prefixes: str, **options: Any) -> Group:
        return cls(prefixes, tuple(options.items()))


@dataclass(frozen=True)
class Setup:
    """What is trained. A parameter belongs to the first group that has a prefix of its FQN, or is not optimized.

    Attributes:
        idle: prefixes of parameters, and the steps in which those get no gradient.
        reverse: the optimizer gets the live parameters in the opposite order inside each group, the originals of each in place.
        fairscale: with fairscale's own wrapper class.
        schedule: every step makes each group's lr smaller, and notes it in the group.
        named: the wrapped model's optimizer is built from `named_parameters()`, and keeps the wrapped names.
    """

    model: str
    wrapping: Wrapping
    optimizer: str = "adam"
    groups: tuple[Group, ...] = (Group(("",)),)
    frozen: tuple[str, ...] = ()
    idle: tuple[tuple[str, tuple[int, ...]], ...] = ()
    reverse: bool = False
    fairscale: bool = False
    schedule: bool = False
    named: bool = False

    def group_of(self, fqn: str) -> int | None:
        hits = (i for i, group in enumerate(self.groups) if fqn.startswith(group.prefixes or ("no parameter",)))
        return next(hits, None)

    def gradient(self, fqn: str, param: Tensor, index: int, step: int) -> Tensor | None:
        """A random one that depends on nothing but its arguments."""
        if fqn.startswith(self.frozen or ("no parameter",)):
            return None
        if any(fqn.startswith(prefix) and step in steps for prefix, steps in self.idle):
            return None
        return torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + index))

    def end_step(self, optim: torch.optim.Optimizer, step: int) -> None:
        if self.schedule:
            for group in optim.param_groups:
                group["lr"] *= 0.75
                group["noted"] = [step, "lr", {"lr": group["lr"]}]


class Plain:
    """The unwrapped model and its optimizer."""

    def __init__(self, setup: Setup, steps: Iterable[int] = ()) -> None:
        self.setup = setup
        self.model = plain_model(setup)
        self.shapes = {fqn: param.shape for fqn, param in self.model.named_parameters()}
        in_groups: list[list[Tensor]] = [[] for _ in setup.groups]
        self.fqns: list[list[str]] = [[] for _ in setup.groups]
        params = dict(self.model.named_parameters())
        lives = models.live_parameters(self.model, setup.wrapping) if setup.reverse else ()
        for fqn in [fqn for live in reversed(lives) for fqn in live.fqns] or params:
            index = setup.group_of(fqn)
            if index is not None:
                in_groups[index].append(params[fqn])
                self.fqns[index].append(fqn)
        self.optim = make_optimizer(setup, in_groups)
        self.ids = {fqn: i for i, fqn in enumerate(fqn for group in self.fqns for fqn in group)}
        self.feed(steps)

    def feed(self, steps: Iterable[int]) -> None:
        for step in steps:
            for index, (fqn, param) in enumerate(self.model.named_parameters()):
                param.grad = self.setup.gradient(fqn, param, index, step)
            self.optim.step()
            self.setup.end_step(self.optim, step)

    def train(self, steps: Iterable[int]) -> None:
        """Forward and backward."""
        for step in steps:
            self.optim.zero_grad()
            loss_of(self.model, models.batch(self.setup.model, step)).backward()
            self.optim.step()

    def params(self) -> dict[str, Tensor]:
        return {fqn: param.detach().clone() for fqn, param in self.model.named_parameters()}

    def state(self) -> dict[str, dict[str, Any]]:
        """By FQN."""
        state = self.optim.state_dict()["state"]
        return {fqn: state[i] for fqn, i in self.ids.items() if i in state}


class Wrapped:
    """The wrapped model and its optimizer, on this rank. Needs `fairscale_on_cpu`."""

    def __init__(
        self,
        setup: Setup,
        steps: Iterable[int] = (),
        params: Mapping[str, Tensor] | None = None,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        self.setup, self.rank, self.world_size = setup, dist.get_rank(), dist.get_world_size()
        plain = plain_model(setup, params)
        self.originals = {
            fqn: param.detach().clone() for fqn, param in plain.named_parameters()
        }  # fairscale frees them
        self.index = {fqn: i for i, fqn in enumerate(self.originals)}
        self.lives = models.live_parameters(plain, setup.wrapping)
        self.model = wrap(plain) if wrap else models.wrap(plain, setup.wrapping, setup.fairscale)
        self.params = dict(zip(self.lives, self.model.parameters(), strict=True))
        names = dict(zip(self.lives, (name for name, _ in self.model.named_parameters()), strict=True))
        for live, param in self.params.items():
            check_value(f"the oracle's {live.fqns}", param.detach(), self.cut(live, self.originals))
        in_groups: list[list[Any]] = [[] for _ in setup.groups]
        by_group: list[list[Live]] = [[] for _ in setup.groups]
        for live in reversed(self.lives) if setup.reverse else self.lives:
            index = setup.group_of(live.fqns[0])
            if index is not None:
                param = self.params[live]
                in_groups[index].append((names[live], param) if setup.named else param)
                by_group[index].append(live)
        self.ids = {live: i for i, live in enumerate(live for group in by_group for live in group)}
        self.group_ids = [[self.ids[live] for live in group] for group in by_group]
        self.optim = make_optimizer(setup, in_groups)
        self.feed(steps)

    def cut(self, live: Live, values: Mapping[str, Tensor]) -> Tensor:
        return models.cut(live, [values[fqn] for fqn in live.fqns], self.rank, self.world_size)

    def feed(self, steps: Iterable[int]) -> None:
        for step in steps:
            for live, param in self.params.items():
                grads = {f: self.setup.gradient(f, self.originals[f], self.index[f], step) for f in live.fqns}
                given = {f: grad for f, grad in grads.items() if grad is not None}
                if given and len(given) < len(grads):
                    raise ValueError(f"a mistake of the test: {live} has gradients for {sorted(given)} only")
                param.grad = self.cut(live, given) if given else None
            self.optim.step()
            self.setup.end_step(self.optim, step)

    def train(self, steps: Iterable[int]) -> None:
        """Forward and backward on this rank's part of each global batch."""
        for step in steps:
            self.optim.zero_grad()
            mine = models.batch(self.setup.model, step).chunk(self.world_size)[self.rank]
            loss_of(self.model, mine).backward()
            self.optim.step()

    def gather(self, recipient_rank: int | None = 0, **kwargs: Any) -> Full | None:
        if self.setup.fairscale:
            return fsdp_optim.gather_full_optim_state_dict(self.model, self.optim, recipient_rank, **kwargs)
        return self.model.gather_full_optim_state_dict(self.optim, recipient_rank=recipient_rank, **kwargs)

    def shard(self, full: Full | None, how: str) -> dict[str, Any]:
        if self.setup.fairscale and how.startswith("method"):  # its class has a method of its own
            how = "function"
        if how == "method":
            return self.model.get_shard_from_optim_state_dict(full)
        if how == "method with optim":
            return self.model.get_shard_from_optim_state_dict(full, self.optim)
        if how == "function":
            return fsdp_optim.get_shard_from_optim_state_dict(self.model, self.optim, full)
        assert how == "scatter", how
        source = self.world_size - 1
        given = full if self.rank == source else None
        return fsdp_optim.scatter_full_optim_state_dict(self.model, self.optim, given, source_rank=source)

    def load(self, shard: dict[str, Any], how: str = "function") -> None:
        if how == "method" and self.setup.optimizer != "peculiar":  # torch's own casts to the parameter's dtype
            self.optim.load_state_dict(shard)
        else:
            fsdp_optim.load_optim_state_dict(self.optim, shard)

    def assemble(self) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
        """The state and the parameters by FQN, put together from what every rank holds."""
        mine = (self.optim.state_dict()["state"], [param.detach() for param in self.params.values()])
        held: list[Any] = [None] * self.world_size
        dist.all_gather_object(held, mine)
        states, params = [state for state, _ in held], [params for _, params in held]
        whole_params: dict[str, Tensor] = {}
        for i, live in enumerate(self.lives):
            whole_params |= self._whole(live, [local[i] for local in params])
        whole_states: dict[str, dict[str, Any]] = {}
        for live, local_id in self.ids.items():
            if local_id not in states[0]:
                continue
            whole_states |= {fqn: {} for fqn in live.fqns}
            for name, value in states[0][local_id].items():
                if name in ONE_PER_PARAMETER:
                    values = dict.fromkeys(live.fqns, value)
                else:
                    values = self._whole(live, [state[local_id][name] for state in states])
                for fqn in live.fqns:
                    whole_states[fqn][name] = values[fqn]
        return whole_states, whole_params

    def _whole(self, live: Live, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        flat, start, found = torch.cat([shard.reshape(-1) for shard in (shards if live.is_cut else shards[:1])]), 0, {}
        for fqn in live.fqns:
            shape = self.originals[fqn].shape
            found[fqn] = flat[start : start + shape.numel()].reshape(shape)
            start += shape.numel()
        return found


def plain_model(setup: Setup, params: Mapping[str, Tensor] | None = None) -> nn.Module:
    model = models.build(setup.model)
    for fqn, param in model.named_parameters():
        if params is not None:
            param.data.copy_(params[fqn])
        param.requires_grad_(not fqn.startswith(setup.frozen or ("no parameter",)))
    return model


def make_optimizer(setup: Setup, in_groups: Sequence[Sequence[Any]]) -> torch.optim.Optimizer:
    cls, options = OPTIMIZERS[setup.optimizer]
    groups = [{"params": list(p), **dict(g.options)} for p, g in zip(in_groups, setup.groups, strict=True)]
    return cls(groups, **options)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    out = model(inputs).float()
    weights = torch.linspace(-1.0, 1.0, out[0].numel()).reshape(out[0].shape)
    return (out * weights).mean() + out.pow(2).mean()


# ---------------------------------------------------------------------------------------------------- comparisons


class Differs(AssertionError):
    """Two things that should be the same are not."""


def check_value(where: str, got: Any, want: Any) -> None:
    """Same type, and for tensors same dtype, shape and bits."""
    if type(got) is not type(want) and not (isinstance(got, Tensor) and isinstance(want, Tensor)):
        raise Differs(f"{where}: {got!r} is a {type(got).__name__}, not a {type(want).__name__} ({want!r})")
    if isinstance(want, Tensor):
        _check_tensor(where, got, want)
    elif isinstance(want, Mapping):
        check_keys(where, got, want)
        for key in want:
            check_value(f"{where}[{key!r}]", got[key], want[key])
    elif isinstance(want, (list, tuple)):
        if len(got) != len(want):
            raise Differs(f"{where}: {len(got)} items {got!r}, not {len(want)}: {want!r}")
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            check_value(f"{where}[{i}]", a, b)
    elif got != want:
        raise Differs(f"{where}: {got!r}, not {want!r}")


def check_keys(where: str, got: Mapping[Any, Any], want: Mapping[Any, Any]) -> None:
    lacks, extra = [k for k in want if k not in got], [k for k in got if k not in want]
    if lacks or extra:
        raise Differs(f"{where}: lacks {lacks}, has {extra} too many")


def _check_tensor(where: str, got: Tensor, want: Tensor) -> None:
    for what, a, b in (("dtype", got.dtype, want.dtype), ("shape", tuple(got.shape), tuple(want.shape))):
        if a != b:
            raise Differs(f"{where}: {what} {a}, not {b}")
    if not torch.equal(_bits(got), _bits(want)):
        wrong = (_bits(got) != _bits(want)).reshape(-1, got.element_size()).any(1).nonzero().flatten()
        first = int(wrong[0])
        a, b = got.reshape(-1)[first].item(), want.reshape(-1)[first].item()
        raise Differs(f"{where}: {len(wrong)} of {got.numel()} elements differ, at {first}: {a!r}, not {b!r}")


def _bits(value: Tensor) -> Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def check_close(where: str, got: Any, want: Any, rtol: float, atol: float) -> None:
    """As `check_value`, but floating tensors may differ by rounding."""
    if isinstance(want, Mapping) and isinstance(got, Mapping):
        check_keys(where, got, want)
        for key in want:
            check_close(f"{where}[{key!r}]", got[key], want[key], rtol, atol)
    elif isinstance(want, Tensor) and isinstance(got, Tensor) and want.is_floating_point():
        if got.dtype != want.dtype or got.shape != want.shape:
            raise Differs(f"{where}: {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}")
        if not torch.allclose(got, want, rtol=rtol, atol=atol):
            raise Differs(f"{where}: differs by up to {float((got - want).abs().max())}")
    else:
        check_value(where, got, want)


def tensors_in(value: Any, where: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{where}[{i}]")


def check_own_memory(full: Full, *others: Any) -> None:
    """Every tensor is on the CPU and has a storage of just its own size, shared with nothing in `full` or `others`."""
    seen = {t.untyped_storage().data_ptr(): f"a live tensor {where}" for where, t in tensors_in(others)}
    for where, tensor in tensors_in(full):
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or tensor.requires_grad:
            raise Differs(f"{where}: on {tensor.device}, requires_grad {tensor.requires_grad}")
        if storage.nbytes() != tensor.numel() * tensor.element_size():
            raise Differs(f"{where}: {tensor.numel()} elements in a storage of {storage.nbytes()} bytes")
        if storage.nbytes() and storage.data_ptr() in seen:
            raise Differs(f"{where}: shares its storage with {seen[storage.data_ptr()]}")
        seen[storage.data_ptr()] = where


def storages(value: Any) -> set[int]:
    """Addresses of the memory of all tensors."""
    found = {tensor.untyped_storage().data_ptr() for _, tensor in tensors_in(value)}
    return found - {0}  # tensors without elements


def check_full(full: Full | None, wrapped: Wrapped, plain: Plain) -> None:
    """The full dict, by id, is the unwrapped optimizer's, and says where it came from."""
    if full is None:
        raise Differs(f"rank {wrapped.rank} is a recipient and got None")
    want = plain.optim.state_dict()
    by_fqn = {fqn: full["state"][i] for fqn, i in plain.ids.items() if i in full["state"]}
    check_value("state", by_fqn, plain.state())  # first by name, because that says more
    check_value("state by id", full["state"], want["state"])
    names = [group.get("param_names") for group in full["param_groups"]]
    check_value("param_names", names, plain.fqns)
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in full["param_groups"]]
    check_value("param_groups", groups, want["param_groups"])
    home = {fqn: local_id for live, local_id in wrapped.ids.items() for fqn in live.fqns}
    id_map = {i: home[fqn] if i in want["state"] else None for fqn, i in plain.ids.items()}
    check_value("param_id_map", full["param_id_map"], id_map)
    check_value("num_padded", full["num_padded"], num_padded(wrapped))
    check_value("uncollected_local_ids", full["uncollected_local_ids"], [])
    check_own_memory(full, wrapped.optim.state_dict(), list(wrapped.params.values()))


def num_padded(wrapped: Wrapped) -> list[list[int]]:
    """Per live parameter in the order of local ids, the padding of every rank."""
    numels = {live: sum(wrapped.originals[fqn].numel() for fqn in live.fqns) for live in wrapped.ids}
    return [models.padding(live, numel, wrapped.world_size) for live, numel in numels.items()]


def local_state(wrapped: Wrapped, plain: Plain) -> dict[int, dict[str, Any]]:
    """What this rank's optimizer has to hold after loading, cut out of the unwrapped optimizer's state."""
    whole = plain.state()
    state: dict[int, dict[str, Any]] = {}
    for live, local_id in wrapped.ids.items():
        values = [whole.get(fqn) for fqn in live.fqns]
        if values[0] is None:
            continue
        state[local_id] = {}
        for name, value in values[0].items():
            if name in ONE_PER_PARAMETER:
                state[local_id][name] = value
            else:
                state[local_id][name] = wrapped.cut(live, {f: whole[f][name] for f in live.fqns})
    return state


def check_shard(
    where: str,
    shard: Mapping[str, Any],
    wrapped: Wrapped,
    plain: Plain,
    with_padding: bool = True,
    with_names: bool = True,
) -> None:
    """The optimizer's own dict on this rank: exactly this rank's cut of the unwrapped state; zeros in the padding.

    `with_padding=False` after training: some optimizers write into it. `with_names=False` for a shard that was made
    without the optimizer: it cannot have the optimizer's own `param_names`.
    """
    got, want = shard["state"], local_state(wrapped, plain)
    if not with_padding:
        got, want = without_padding(got, wrapped), without_padding(want, wrapped)
    check_value(f"{where}: state", got, want)
    named = with_names and wrapped.setup.named
    groups = [
        {**group, "params": ids, **({"param_names": live["param_names"]} if named else {})}
        for group, ids, live in zip(
            plain.optim.state_dict()["param_groups"], wrapped.group_ids, wrapped.optim.param_groups, strict=True
        )
    ]
    check_value(f"{where}: param_groups", shard["param_groups"], groups)


def without_padding(state: Mapping[int, Mapping[str, Any]], wrapped: Wrapped) -> dict[int, dict[str, Any]]:
    result = {}
    for local_id, padding in enumerate(num_padded(wrapped)):
        mine = padding[wrapped.rank] if padding else 0
        if local_id in state:
            result[local_id] = {
                name: value[: len(value) - mine] if isinstance(value, Tensor) and value.dim() and mine else value
                for name, value in state[local_id].items()
            }
    return result


# ---------------------------------------------------------------------------------------------------- on ranks

HOWS = ("method", "method with optim", "function", "scatter")


@dataclass(frozen=True)
class Resume:
    """A full dict that was gathered after `STEPS` steps of `setup` is given back in one of the `HOWS`, and trained on.

    `then`: what is trained from there on, when it is something else.
    """

    setup: Setup
    full: Full
    how: str
    then: Setup | None = None


def gather_all(setups: Sequence[Setup], recipient_rank: int | None) -> list[tuple[Full | None, str]]:
    """On one rank of a world: train each, gather, check. The full dict, and what was wrong."""
    with fairscale_on_cpu():
        return [_and_problem(_gather_one, setup, recipient_rank) for setup in setups]


def gather_problems(setups: Sequence[Setup], recipient_rank: int | None) -> list[str]:
    """As `gather_all`, without the full dicts."""
    return [text for _, text in gather_all(setups, recipient_rank)]


def _gather_one(setup: Setup, recipient_rank: int | None) -> tuple[Full | None, str]:
    wrapped = Wrapped(setup, range(STEPS))
    full = wrapped.gather(recipient_rank)
    if recipient_rank in (None, wrapped.rank):
        check_full(full, wrapped, Plain(setup, range(STEPS)))
    elif full is not None:
        raise Differs(f"rank {wrapped.rank} is no recipient and got a {type(full).__name__}")
    return full, ""


def resume_all(resumes: Sequence[Resume]) -> list[str]:
    """On one rank of a world: what was wrong with each."""
    with fairscale_on_cpu():
        return [_and_problem(_resume_one, resume)[1] for resume in resumes]


def _resume_one(resume: Resume) -> tuple[None, str]:
    then = resume.then or resume.setup
    plain = Plain(resume.setup, range(STEPS))
    wrapped = Wrapped(then, params=plain.params())
    recipient = wrapped.world_size - 1
    before = copy.deepcopy(resume.full)
    shard = wrapped.shard(resume.full, resume.how)
    shared = storages(shard) & storages(resume.full)
    given = copy.deepcopy(shard)  # because the optimizer may train on in the shard's own tensors
    wrapped.load(shard, resume.how)
    again = wrapped.gather(recipient)
    loaded = copy.deepcopy(wrapped.optim.state_dict())
    wrapped.feed(range(STEPS, STEPS + 2))
    # Comparisons come after the last collective, so that a rank that finds something does not keep the others waiting.
    check_value("the input", resume.full, before)
    if shared:
        raise Differs(f"the shard shares {len(shared)} storages with the full dict")
    check_shard("the shard", given, wrapped, plain, with_names=resume.how != "method")
    check_shard("the optimizer after loading", loaded, wrapped, plain)
    if wrapped.rank == recipient:
        check_full(again, wrapped, plain)
    elif again is not None:
        raise Differs(f"rank {wrapped.rank} is no recipient and got a {type(again).__name__}")
    plain.setup = then
    plain.feed(range(STEPS, STEPS + 2))
    check_shard("the optimizer, trained on", wrapped.optim.state_dict(), wrapped, plain, with_padding=False)
    for live, param in wrapped.params.items():
        check_value(f"parameter {live.fqns}, trained on", param.detach(), wrapped.cut(live, plain.params()))
    return None, ""


def _and_problem(check: Callable[..., tuple[T, str]], *args: Any) -> tuple[T | None, str]:
    try:
        return check(*args)
    except Exception:
        return None, traceback.format_exc()


def raise_problems(by_rank: Sequence[Sequence[str]], what: Sequence[object]) -> None:
    problems = [
        f"rank {rank} of {len(by_rank)}, {what[i]}:\n{text}"
        for rank, mine in enumerate(by_rank)
        for i, text in enumerate(mine)
        if text
    ]
    if problems:
        raise Differs("\n".join(problems))


def gathered(setups: Sequence[Setup], world_size: int, recipient_rank: int | None = 0) -> list[Full]:
    """The recipient's full dicts, each compared with the unwrapped optimizer's."""
    by_rank = run_on_ranks(gather_all, world_size, setups, recipient_rank)
    raise_problems([[text for _, text in mine] for mine in by_rank], setups)
    return [full for full, _ in by_rank[recipient_rank or 0] if full is not None]


def resumed(resumes: Sequence[Resume], world_size: int) -> None:
    """Each compared with the unwrapped training: the shards, the loaded optimizer, gathered again, trained on."""
    by_rank = run_on_ranks(resume_all, world_size, resumes)
    raise_problems(by_rank, [f"{resume.how}, {resume.setup}" for resume in resumes])


def case_name(function: Callable[..., None], number: str, param: Any) -> str:
    """For parameterized: all arguments in the name of the test, so that -k finds them."""
    return parameterized.to_safe_name("_".join([function.__name__, number, *map(str, param.args)]))


WORLD_SIZES = (1, 2, 3, 4)
PAIRS = tuple(itertools.product(WORLD_SIZES, WORLD_SIZES))


class Pairs:
    """Named set-ups that are saved at one world size and resumed at another, each pair in one of the `HOWS`.

    Those in `at_every_pair` meet all pairs; the others meet two pairs each, which are different ones for its neighbours, so that
    eight set-ups meet all of them. `others()` has the rest of the product, for tests that are marked slow. All set-ups of
    a world size share one call, because a call costs more than what it does.
    """

    def __init__(self, setups: Mapping[str, Setup], at_every_pair: Iterable[str] = (), inverse: bool = False) -> None:
        self._setups = dict(setups)
        self._at_every_pair = frozenset(at_every_pair)
        self._inverse = inverse
        self._saved: dict[int, dict[str, tuple[Full | None, str]]] = {}
        self._resumed: dict[tuple[int, int], dict[str, str]] = {}

    def others(self) -> Pairs:
        return Pairs(self._setups, self._at_every_pair, not self._inverse)

    def cases(self, names: Iterable[str] | None = None) -> list[tuple[str, int, int]]:
        return [(name, *pair) for name in names or self._setups for pair in PAIRS if self._meets(name, *pair)]

    def check(self, name: str, saved: int, now: int) -> None:
        """Raises Differs with what was wrong in this one case."""
        if (saved, now) not in self._resumed:
            self._resumed[saved, now] = self._resume(saved, now)
        if problem := self._resumed[saved, now][name]:
            raise Differs(f"{name}, {self._how(name, saved, now)}, {saved} -> {now}:\n{problem}")

    def _meets(self, name: str, saved: int, now: int) -> bool:
        place = list(self._setups).index(name)
        is_near = (place + saved + now) % 4 == 0 and (place // 4 + saved) % 2 == 0
        return (name in self._at_every_pair or is_near) != self._inverse

    def _how(self, name: str, saved: int, now: int) -> str:
        return HOWS[(list(self._setups).index(name) + saved + 2 * now) % 4]

    def _save(self, world_size: int) -> dict[str, tuple[Full | None, str]]:
        names = [name for name in self._setups if any(self._meets(name, world_size, now) for now in WORLD_SIZES)]
        by_rank = run_on_ranks(gather_all, world_size, [self._setups[name] for name in names], 0)
        return {name: (by_rank[0][i][0], "".join(mine[i][1] for mine in by_rank)) for i, name in enumerate(names)}

    def _resume(self, saved: int, now: int) -> dict[str, str]:
        if saved not in self._saved:
            self._saved[saved] = self._save(saved)
        problems = {name: f"when saved: {problem}" for name, (_, problem) in self._saved[saved].items() if problem}
        fulls = {name: full for name, (full, _) in self._saved[saved].items() if full is not None}
        names = [name for name in fulls if name not in problems and self._meets(name, saved, now)]
        resumes = [Resume(self._setups[name], fulls[name], self._how(name, saved, now)) for name in names]
        by_rank = run_on_ranks(resume_all, now, resumes)
        for i, name in enumerate(names):
            problems[name] = "".join(f"rank {rank}: {mine[i]}" for rank, mine in enumerate(by_rank) if mine[i])
        return problems
