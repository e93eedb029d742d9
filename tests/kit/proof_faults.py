"""Faults of a resume: what goes wrong between `resume()` and the end of the next step, and the cause that a verdict must name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kit.proof_jobs import VOCABULARY, Job, Kind, Wrong

STATE, GROUPS, RANDOM, BATCH = "the loaded state", "the param groups", "the random states", "the batch"
NUMBERS, GRADIENTS, WEIGHTS, MOMENTS = "observed numbers", "the gradients", "the weights", "the moments"
BUFFERS, OBJECTS = "the buffers", "the objects of state="
HARMLESS = ""

PLAIN = Kind()
DROPOUT, BATCH_NORM, MIXED = Kind(dropout=0.2), Kind(batch_norm=True), Kind(precision="mixed")
REPLICAS, SGD = Kind("DDP"), Kind(optim="plain sgd")


@dataclass(frozen=True)
class Snapshot:
    """This rank's part of the weights, of the moments and of the average, by name, at an older step."""

    weights: Mapping[str, Tensor]
    moments: Mapping[tuple[str, str], Tensor]
    average: Mapping[str, Tensor]

    @classmethod
    def of(cls, job: Job) -> Snapshot:
        average = {name: part(value).clone() for name, value in job.average.items()}
        return cls(
            {name: part(param).clone() for name, param in params(job).items()},
            {(name, key): part(value).clone() for name, key, value in moments(job)},
            average,
        )


@dataclass(frozen=True)
class Fault:
    """`at_same`, `at_other`: the causes at the same number of ranks and at another one; `HARMLESS` where nothing is wrong there.

    `why`: why it is harmless there. `text`: what the verdict says at the same number of ranks. `fewest`: the ranks that the other
    world needs for it to be a fault.
    """

    name: str
    do: Callable[[Job, Snapshot], None]
    at_same: str
    at_other: str
    kind: Kind = PLAIN
    why: str = ""
    text: str = ""
    fewest: int = 1


def params(job: Job) -> dict[str, Tensor]:
    return {name.removeprefix("module."): param for name, param in job.model.named_parameters()}


def part(value: Any) -> Tensor:
    """This rank's part of a tensor, with the storage of the tensor."""
    inner = value.detach()
    return inner.to_local() if hasattr(inner, "to_local") else inner


def moments(job: Job) -> list[tuple[str, str, Tensor]]:
    """(name of the parameter, name of the value, tensor) of all moments, without step counts."""
    return [
        (name, key, value)
        for name, param in params(job).items()
        for key, value in job.optim.state[param].items()
        if key != "step" and isinstance(value, Tensor)
    ]


def is_last(job: Job) -> bool:
    return job.rank == dist.get_world_size() - 1


def change(job: Job, name: str, edit: Callable[[Tensor], Tensor]) -> None:
    """Replace the elements of an unsharded parameter."""
    param = params(job)[name]
    new = edit(param.detach().full_tensor() if hasattr(param, "full_tensor") else param.detach()).contiguous()
    if hasattr(param, "full_tensor"):
        new = torch.distributed.tensor.distribute_tensor(new, param.device_mesh, param.placements)
    with torch.no_grad():
        param.copy_(new)


def exchange(a: Tensor, b: Tensor) -> None:
    kept = part(a).clone()
    part(a).copy_(part(b))
    part(b).copy_(kept)


def through_bf16(value: Tensor) -> None:
    value.copy_(value.bfloat16().float())


# ------------------------------------------------------------------------------------------------ the loaded state


def moments_zeroed(job: Job, old: Snapshot) -> None:
    for _, _, value in moments(job):
        part(value).zero_()


def second_moment_zeroed(job: Job, old: Snapshot) -> None:
    part(job.optim.state[params(job)["blocks.0.up.weight"]]["exp_avg_sq"]).zero_()


def moments_forgotten(job: Job, old: Snapshot) -> None:
    job.optim.state.clear()


def moments_stale(job: Job, old: Snapshot) -> None:
    for name, key, value in moments(job):
        part(value).copy_(old.moments[name, key])


def moments_stale_on_a_rank(job: Job, old: Snapshot) -> None:
    if is_last(job):
        moments_stale(job, old)


def moments_exchanged(job: Job, old: Snapshot) -> None:
    state = job.optim.state
    a, b = params(job)["blocks.0.query.weight"], params(job)["blocks.0.value.weight"]
    for key in ("exp_avg", "exp_avg_sq"):
        exchange(state[a][key], state[b][key])


def moments_through_bf16(job: Job, old: Snapshot) -> None:
    for _, _, value in moments(job):
        through_bf16(part(value))


def moments_shifted(job: Job, old: Snapshot) -> None:
    """Each bias of the attention gets the moments of the bias before it, as where a parameter was inserted."""
    names = [f"blocks.0.{name}.bias" for name in ("query", "key", "value")]
    kept = {name: part(job.optim.state[params(job)[name]]["exp_avg"]).clone() for name in names}
    for before, after in itertools.pairwise(names):
        part(job.optim.state[params(job)[after]]["exp_avg"]).copy_(kept[before])


def step_count_off(job: Job, old: Snapshot) -> None:
    for state in job.optim.state.values():
        state["step"] += 1


def step_count_of_a_parameter(job: Job, old: Snapshot) -> None:
    job.optim.state[params(job)["norm.weight"]]["step"].zero_()


def weights_through_bf16(job: Job, old: Snapshot) -> None:
    for param in params(job).values():
        through_bf16(part(param))


def weights_stale(job: Job, old: Snapshot) -> None:
    for name, param in params(job).items():
        part(param).copy_(old.weights[name])


def shard_stale(job: Job, old: Snapshot) -> None:
    if is_last(job):
        weights_stale(job, old)


def a_weight_stale(job: Job, old: Snapshot) -> None:
    part(params(job)["blocks.0.norm.weight"]).copy_(old.weights["blocks.0.norm.weight"])


def experts_swapped(job: Job, old: Snapshot) -> None:
    for kind in ("weight", "bias"):
        exchange(params(job)[f"blocks.0.experts.first.{kind}"], params(job)[f"blocks.0.experts.second.{kind}"])


def moments_of_experts_swapped(job: Job, old: Snapshot) -> None:
    a, b = (job.optim.state[params(job)[f"blocks.0.experts.{which}.weight"]] for which in ("first", "second"))
    for key in ("exp_avg", "exp_avg_sq"):
        exchange(a[key], b[key])


def weight_transposed(job: Job, old: Snapshot) -> None:
    change(job, "blocks.0.query.weight", lambda weight: weight.T)


def rows_shifted(job: Job, old: Snapshot) -> None:
    change(job, "embedding.weight", lambda weight: weight.roll(1, 0))


def an_element_flipped(job: Job, old: Snapshot) -> None:
    change(job, "blocks.0.down.weight", lambda weight: weight.index_fill(0, torch.tensor([3]), 0.0))


def norm_initial(job: Job, old: Snapshot) -> None:
    part(params(job)["norm.weight"]).fill_(1.0)


def untied(job: Job, old: Snapshot) -> None:
    """Done by `Kind.tied`: the head is a parameter of its own."""


def frozen(job: Job, old: Snapshot) -> None:
    params(job)["blocks.0.up.weight"].requires_grad_(False)


def evaluating(job: Job, old: Snapshot) -> None:
    job.model.eval()


def a_dropout_off(job: Job, old: Snapshot) -> None:
    job.model.blocks[0].dropout.eval()


def statistics_reset(job: Job, old: Snapshot) -> None:
    job.model.batch_norm.running_mean.zero_()
    job.model.batch_norm.running_var.fill_(1.0)


def a_buffer_reset(job: Job, old: Snapshot) -> None:
    job.model.num_calls.zero_()


def replica_apart(job: Job, old: Snapshot) -> None:
    if is_last(job):
        params(job)["blocks.0.up.weight"].detach().mul_(1.01)


def average_stale(job: Job, old: Snapshot) -> None:
    for name, value in job.average.items():
        part(value).copy_(old.average[name])


def average_of_weights(job: Job, old: Snapshot) -> None:
    """It begins again from the weights."""
    for value, param in zip(job.average.values(), params(job).values(), strict=True):
        part(value).copy_(part(param))


# ------------------------------------------------------------------------------------------------ groups, schedule, random


def in_group(index: int, key: str, value: object) -> Callable[[Job, Snapshot], None]:
    def edit(job: Job, old: Snapshot) -> None:
        job.optim.param_groups[index][key] = value

    return edit


def lr_of_a_group(job: Job, old: Snapshot) -> None:
    job.optim.param_groups[1]["lr"] *= 1.1


def lr_on_a_rank(job: Job, old: Snapshot) -> None:
    if is_last(job):
        lr_of_a_group(job, old)


def decays_exchanged(job: Job, old: Snapshot) -> None:
    a, b = job.optim.param_groups
    a["weight_decay"], b["weight_decay"] = b["weight_decay"], a["weight_decay"]


def schedule_new(job: Job, old: Snapshot) -> None:
    """A new scheduler, which sets the learning rate of its beginning."""
    for group in job.optim.param_groups:
        group["lr"] = group["initial_lr"] = 0.01
    job.scheduler = torch.optim.lr_scheduler.LambdaLR(job.optim, lambda number: min(1.0, (number + 2) / 6))


def schedule_forgotten(job: Job, old: Snapshot) -> None:
    """The scheduler is not restored, but the groups are."""
    job.scheduler.last_epoch = 0


def schedule_ahead(job: Job, old: Snapshot) -> None:
    job.scheduler.step()


def random_of_a_rank(job: Job, old: Snapshot) -> None:
    if is_last(job):
        torch.manual_seed(7)


def random_alike(job: Job, old: Snapshot) -> None:
    torch.manual_seed(7)


# ------------------------------------------------------------------------------------------------ the step


def wrong(**values: Any) -> Callable[[Job, Snapshot], None]:
    """A step that does something else: see `Wrong`."""

    def set_wrong(job: Job, old: Snapshot) -> None:
        job.wrong = replace(Wrong(), **values)

    return set_wrong


def batch_skipped(job: Job, old: Snapshot) -> None:
    job.loader.position += 1


def batch_repeated(job: Job, old: Snapshot) -> None:
    job.loader.position -= 1


def batches_swapped(job: Job, old: Snapshot) -> None:
    job.part = (job.part + 1) % job.num_parts


def batch_of_rank_0(job: Job, old: Snapshot) -> None:
    job.part = 0


def _shuffled(samples: Tensor) -> Tensor:
    return samples[torch.randperm(len(samples), generator=torch.Generator().manual_seed(3))]


def _a_token(samples: Tensor) -> Tensor:
    samples = samples.clone()
    samples[5, 2] = (samples[5, 2] + 1) % VOCABULARY
    return samples


def _drop_a_gradient(job: Job) -> None:
    params(job)["blocks.0.value.bias"].grad = None


def _double_on_a_rank(job: Job) -> None:
    if is_last(job):
        for param in params(job).values():
            part(param.grad).mul_(2.0)


def _stale_gradient(job: Job) -> None:
    for param in params(job).values():
        param.grad = param.grad * 1.05


def _step_again(job: Job) -> None:
    job.optim.step()


def _update_lost(job: Job) -> None:
    """A parameter misses its update."""
    part(params(job)["blocks.0.down.weight"]).copy_(job.before)


def _keep(job: Job) -> None:
    job.before = part(params(job)["blocks.0.down.weight"]).clone()


def _round_after(job: Job) -> None:
    for param in params(job).values():
        through_bf16(part(param))


def scale_doubled(job: Job, old: Snapshot) -> None:
    job.scaler.scale *= 2


def scale_too_large(job: Job, old: Snapshot) -> None:
    """The gradients overflow, and the step is left out."""
    job.scaler.scale = 1e38
    job.wrong = Wrong(loss_factor=1e3)


def momentum_of_statistics(job: Job, old: Snapshot) -> None:
    job.model.batch_norm.momentum = 0.2


def softer_attention(job: Job, old: Snapshot) -> None:
    """Another model code: a forward pass with a factor of 0.99."""
    job.model.blocks[0].value.register_forward_hook(lambda module, args, output: output * 0.99)


_NEXT = "of the same samples in all, whatever their order over ranks"
_STATISTICS = "not compared, because each rank takes the statistics of its own samples"
_OWN = "ranks of another world have random states of their own"

FAULTS: tuple[Fault, ...] = (
    Fault("all moments zero", moments_zeroed, STATE, STATE, text="has 0"),
    Fault("a second moment zero", second_moment_zeroed, STATE, STATE, text="blocks.0.up.weight: exp_avg_sq"),
    Fault("the optimizer's state forgotten", moments_forgotten, STATE, STATE),
    Fault("moments of the step before", moments_stale, STATE, STATE),
    Fault("moments of the step before, on a rank", moments_stale_on_a_rank, STATE, STATE),
    Fault("moments of two weights exchanged", moments_exchanged, STATE, STATE, text="has the elements that"),
    Fault("moments of the parameter before", moments_shifted, STATE, STATE, text="has the elements that"),
    Fault("moments through bf16", moments_through_bf16, STATE, STATE),
    Fault("step counts off by one", step_count_off, STATE, STATE, text="was 3, and is 4"),
    Fault("the step count of a parameter zero", step_count_of_a_parameter, STATE, STATE, text="norm.weight: step"),
    Fault("weights through bf16", weights_through_bf16, STATE, STATE),
    Fault("weights of the step before", weights_stale, STATE, STATE),
    Fault("a rank's shard of the step before", shard_stale, STATE, STATE),
    Fault("a weight of the step before", a_weight_stale, STATE, STATE, text="blocks.0.norm.weight"),
    Fault("a pair of experts swapped", experts_swapped, STATE, STATE, text="has the elements that"),
    Fault(
        "moments of a pair of experts swapped", moments_of_experts_swapped, STATE, STATE, text="that blocks.0.experts"
    ),
    Fault("a weight transposed", weight_transposed, STATE, STATE, text="with the same norm"),
    Fault("rows of the embedding shifted", rows_shifted, STATE, STATE, text="with the same norm"),
    Fault("a row zero", an_element_flipped, STATE, STATE, text="blocks.0.down.weight"),
    Fault("a norm at its initial values", norm_initial, STATE, STATE, text="norm.weight"),
    Fault("a tied weight untied", untied, STATE, STATE, replace(PLAIN, tied=False), text="was tied to"),
    Fault("a weight frozen", frozen, STATE, STATE, text="required a gradient, and does not now"),
    Fault("eval mode", evaluating, STATE, STATE, DROPOUT, text="is in eval mode"),
    Fault(
        "a dropout in eval mode", a_dropout_off, STATE, STATE, DROPOUT, text="blocks.0.dropout: was in training mode"
    ),
    Fault("statistics of BatchNorm reset", statistics_reset, STATE, STATE, BATCH_NORM, text="batch_norm.running_mean"),
    Fault("a buffer reset", a_buffer_reset, STATE, STATE, text="num_calls: was 6, and is 0"),
    Fault("a replica apart", replica_apart, STATE, NUMBERS, REPLICAS, text="blocks.0.up.weight", fewest=2),
    Fault("the average of the step before", average_stale, STATE, STATE, text="state.average"),
    Fault("the average begun again", average_of_weights, STATE, STATE, text="state.average"),
    Fault("lr of a group 10 % up", lr_of_a_group, GROUPS, GROUPS, text="lr of param group 1"),
    Fault("lr 10 % up on a rank", lr_on_a_rank, GROUPS, GROUPS, text="lr of param group 1"),
    Fault(
        "decay of a group lost", in_group(0, "weight_decay", 0.0), GROUPS, GROUPS, text="weight_decay of param group 0"
    ),
    Fault("decays of groups exchanged", decays_exchanged, GROUPS, GROUPS, text="weight_decay of param group"),
    Fault("betas changed", in_group(0, "betas", (0.9, 0.95)), GROUPS, GROUPS, text="betas"),
    Fault("eps changed", in_group(0, "eps", 1e-6), GROUPS, GROUPS, text="eps"),
    Fault("a scheduler that begins again", schedule_new, GROUPS, GROUPS, text="lr of param group 0"),
    Fault("a scheduler one step ahead", schedule_ahead, GROUPS, GROUPS, text="lr of param group 0"),
    Fault("a scheduler not restored", schedule_forgotten, OBJECTS, OBJECTS, text="last_epoch"),
    Fault("random states of a rank", random_of_a_rank, RANDOM, HARMLESS, DROPOUT, why=_OWN, text="of rank"),
    Fault("one random state on all ranks", random_alike, RANDOM, HARMLESS, DROPOUT, why=_OWN),
    Fault("a batch skipped", batch_skipped, BATCH, BATCH, text="is another one"),
    Fault("a batch repeated", batch_repeated, BATCH, BATCH),
    Fault("batches swapped between ranks", batches_swapped, BATCH, HARMLESS, why=_NEXT, text="has the batch that rank"),
    Fault("the batch of rank 0 on all ranks", batch_of_rank_0, BATCH, BATCH, text="rank 0 had", fewest=2),
    Fault("samples in another order", wrong(samples=_shuffled), BATCH, HARMLESS, why=_NEXT),
    Fault("a token changed", wrong(samples=_a_token), BATCH, BATCH),
    Fault("accumulation of 1 instead of 2", wrong(num_micro=1), BATCH, BATCH, text="forward passes"),
    Fault(
        "targets off by one", wrong(targets=lambda targets: (targets + 1) % VOCABULARY), NUMBERS, NUMBERS, text="loss"
    ),
    Fault("the loss doubled", wrong(loss_factor=2.0), NUMBERS, NUMBERS, text="grad_norm"),
    Fault("another forward pass", softer_attention, NUMBERS, NUMBERS, text="loss"),
    Fault("no clipping", wrong(limit=None), GRADIENTS, GRADIENTS),
    Fault("clipping at another norm", wrong(limit=0.45), GRADIENTS, GRADIENTS),
    Fault(
        "a gradient lost", wrong(before_update=(_drop_a_gradient,)), GRADIENTS, GRADIENTS, text="blocks.0.value.bias"
    ),
    Fault("gradients of a rank doubled", wrong(before_update=(_double_on_a_rank,)), GRADIENTS, GRADIENTS),
    Fault("gradients 5 % up", wrong(before_update=(_stale_gradient,)), GRADIENTS, GRADIENTS),
    Fault("gradients 5 % up, in bf16", wrong(before_update=(_stale_gradient,)), GRADIENTS, GRADIENTS, MIXED),
    Fault("an overflow, so no step", scale_too_large, NUMBERS, NUMBERS, text="grad_norm"),
    Fault("the update made twice", wrong(after_update=(_step_again,)), WEIGHTS, WEIGHTS),
    Fault("the update made twice, plain SGD", wrong(after_update=(_step_again,)), WEIGHTS, WEIGHTS, SGD),
    Fault("an update lost", wrong(before_update=(_keep,), after_update=(_update_lost,)), WEIGHTS, WEIGHTS),
    Fault(
        "an update lost, plain SGD", wrong(before_update=(_keep,), after_update=(_update_lost,)), WEIGHTS, WEIGHTS, SGD
    ),
    Fault("weights through bf16 after the update", wrong(after_update=(_round_after,)), WEIGHTS, WEIGHTS),
    Fault("statistics of another momentum", momentum_of_statistics, BUFFERS, HARMLESS, BATCH_NORM, why=_STATISTICS),
    Fault("the loss scale doubled", scale_doubled, OBJECTS, OBJECTS, text="scale"),
    Fault("the average not updated", wrong(averages=False), OBJECTS, OBJECTS, text="state.average"),
)


def saved(root: Any, kind: Kind) -> None:
    """Runs on every rank: train, save two steps, and make one more step."""
    job = Job(root, replace(kind, tied=True))
    with job.manager:
        for number in range(1, 5):
            job.run(number, number)
            if number in (2, 3):
                job.manager.save(number)
                job.manager.wait()


def older(root: Any, kind: Kind) -> Snapshot:
    """This rank's part of the first of the two checkpoints."""
    job = Job(root, kind, seed=3)
    with job.manager:
        job.manager.rollback(to=2)
        return Snapshot.of(job)


def verdicts(root: Any, names: list[str]) -> dict[str, tuple[Any, list[float]]]:
    """Runs on every rank: resume with each fault of these names, which share a kind but for ties. "": without a fault.

    Returns the verdict, and the loss of the step.
    """
    kind = next((BY_NAME[name].kind for name in names if name), PLAIN)
    old = older(root, replace(kind, tied=True))
    return {name: _resumed(root, name, BY_NAME[name].kind if name else kind, old) for name in names}


def curves(root: Any, names: list[str], num_after: int) -> dict[str, list[float]]:
    """Runs on one rank, without a wrapper: the losses of the step after a resume with each fault, and of the steps after it."""
    losses = {}
    for name in names:
        kind = replace(BY_NAME[name].kind, wrapper="plain")
        where = Path(root) / str(replace(kind, tied=True))
        if not where.exists():
            saved(where, kind)
            losses[str(kind)] = _resumed(where, "", replace(kind, tied=True), None, num_after)[1]
        losses[name] = _resumed(where, name, kind, older(where, replace(kind, tied=True)), num_after)[1]
    return losses


def _resumed(root: Any, name: str, kind: Kind, old: Snapshot | None, num_after: int = 0) -> tuple[Any, list[float]]:
    job = Job(root, kind, seed=5)
    with job.manager:
        number = job.manager.resume(strict=job.kind.tied)
        if name and old is not None:
            BY_NAME[name].do(job, old)
        losses = job.run(number + 1, number + 1)
        job.wrong = Wrong()
        losses += [job.step() for _ in range(num_after)]
        return job.manager.proof, losses


BY_NAME = {fault.name: fault for fault in FAULTS}
