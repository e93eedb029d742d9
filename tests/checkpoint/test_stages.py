"""Pipeline stages: `model` is the list of the stages of a rank, and all ranks together save, load and gather one whole model."""

from __future__ import annotations

import unittest
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand
from kit.compare import check_refused, check_same, error_text
from kit.folders import InFolder
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.stages import Language, TrainedStages, stage_of, whole_oracle
from kit.trained import STEPS
from kit.wraps import in_fsdp1, mesh_2d
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

# ------------------------------------------------------------------------------------------ what each rank has


def loop(num_stages: int, pp: int, pp_rank: int) -> list[int]:
    """Virtual stages, dealt to the ranks in turn."""
    return list(range(pp_rank, num_stages, pp))


def by_dimension(pp: int) -> tuple[DeviceMesh, int]:
    """The mesh of this rank's data parallel group, and its place in the pipeline."""
    mesh = mesh_2d((pp, dist.get_world_size() // pp), ("pp", "dp"))
    return mesh["dp"], mesh["pp"].get_local_rank()


def in_place(kind: str, steps: int) -> TrainedStages:
    """This rank's part of a pipeline."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if kind == "plain":
        return TrainedStages(loop(world, world, rank), world, steps)
    if kind == "virtual":
        return TrainedStages(loop(2 * world, world, rank), 2 * world, steps)
    if kind == "virtual, an optimizer each":
        return TrainedStages(loop(2 * world, world, rank), 2 * world, steps, each=True)
    if kind == "uneven":  # the first rank has two stages, the others one
        return TrainedStages([0, 1] if rank == 0 else [rank + 1], world + 1, steps)
    if kind == "V":
        return TrainedStages([rank, 2 * world - 1 - rank], 2 * world, steps, each=True)
    mesh, place = by_dimension(2)
    grid = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "replicate", "shard"))["replicate", "shard"]
    wraps: dict[str, Any] = {
        "FSDP2": lambda stage: fully_shard(stage, mesh=mesh),
        "plain replicas": lambda stage: stage,
        "FSDP1": lambda stage: in_fsdp1(stage, process_group=mesh.get_group()),
        "DDP": lambda stage: nn.parallel.DistributedDataParallel(stage, process_group=mesh.get_group()),
        "HSDP": lambda stage: fully_shard(stage, mesh=grid),
    }
    return TrainedStages(loop(4, 2, place), 4, steps, wraps[kind], each=kind != "FSDP1")


def weights_here(trained: TrainedStages) -> list[torch.Tensor]:
    return [local_of(param).detach().clone() for param in trained.params]


def local_parts(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return local_of(value)
    if isinstance(value, dict):
        return {key: local_parts(item) for key, item in value.items()}
    return [local_parts(item) for item in value] if isinstance(value, list) else value


def trip(kind: str, folder: str) -> None:
    """Every verb and a save, compared with the unpipelined training."""
    trained, target = in_place(kind, STEPS), in_place(kind, 0)
    model, optim = trained.model, trained.optim
    oracle, rank = whole_oracle(STEPS), dist.get_rank()
    last = dist.get_world_size() - 1
    full = trained.gather(None, "name")
    check_same("gathered", dict(sorted(full["state"].items())), dict(sorted(oracle.by_name().items())))
    listed = dict(fsdp_optim.iter_full_optim_state(model, optim, last))
    check_same(
        "iterated",
        [] if rank != last else {k: v for k, v in listed.items() if v},
        full["state"] if rank == last else [],
    )
    whole = fsdp_optim.gather_full_model_state_dict(model, last)
    check_same("whole on the recipient", whole is not None, rank == last)
    if whole is not None:
        check_same("weights", dict(sorted(whole.items())), dict(sorted(oracle.model.state_dict().items())))
    shard, scattered = target.shard(full), target.scatter(full, last)
    check_same("shard and scatter", local_parts(scattered), local_parts(shard))
    fsdp_optim.load_optim_state_dict(target.optim, shard)
    fsdp_optim.scatter_full_model_state_dict(target.model, whole, last)
    check_same("weights, scattered", weights_here(target), weights_here(trained))
    target.step([STEPS])
    moved = in_place(kind, 0)
    fsdp_optim.transfer_optim_state(trained.model, trained.optim, moved.model, moved.optim)
    check_same("transferred", moved.gather(None, "name"), full)
    trained.step([STEPS])
    again, further = target.gather(None, "name"), whole_oracle(STEPS + 1)
    check_same("trained on", again["state"], trained.gather(None, "name")["state"])
    check_same("as the oracle", dict(sorted(again["state"].items())), dict(sorted(further.by_name().items())))
    fsdp_optim.async_save(f"{folder}/{kind}", trained.model, trained.optim, step=1).wait()


NOW = [(2, "uneven"), (2, "V"), (4, "FSDP2")]
LATER = [
    *((2, kind) for kind in ("plain", "virtual", "virtual, an optimizer each")),
    *((4, kind) for kind in ("plain replicas", "FSDP1", "DDP", "HSDP")),
]


def saved(kind: str, folder: str) -> None:
    trained = in_place(kind, STEPS)
    fsdp_optim.save(f"{folder}/step", trained.model, trained.optim)


def loaded(kind: str, folder: str) -> None:
    target, wanted = in_place(kind, 0), in_place(kind, STEPS)
    for stage in target.model:
        for buffer in stage.buffers():
            buffer.zero_()
    fsdp_optim.load(f"{folder}/step", target.model, target.optim, options=fsdp_optim.LoadOptions(compare=True))
    check_same("weights", weights_here(target), weights_here(wanted))
    buffers = [[*stage.buffers()] for stage in target.model]
    check_same("buffers", buffers, [[*stage.buffers()] for stage in wanted.model])
    check_same("state", target.gather(None, "name"), wanted.gather(None, "name"))


# ------------------------------------------------------------------------------------------ trained by torch's schedules

MICROBATCHES = 4


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(11, (8, 6), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def unpipelined(steps: int) -> tuple[Language, torch.optim.Optimizer]:
    """The same training on one process, microbatch by microbatch."""
    torch.manual_seed(0)
    model = Language()
    optim = adam(model.parameters())
    for step in range(steps):
        tokens, target = batch_of(step)
        for microbatch, wanted in zip(tokens.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            loss_of(model(microbatch), wanted).backward()
        for param in model.parameters():
            param.grad.div_(MICROBATCHES)
        optim.step()
        optim.zero_grad()
    return model, optim


def by_schedule(folder: str, virtual: int, last: int) -> int:
    """Train in a pipeline from the newest checkpoint of a manager to a step; returns the step that was resumed from."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole, num = Language(), virtual * world
    indices = loop(num, world, rank)
    stages = [stage_of(whole, index, num) for index in indices]
    optims = [adam(stage.parameters()) for stage in stages]
    parts = [PipelineStage(part, i, num, torch.device("cpu")) for part, i in zip(stages, indices, strict=True)]
    schedule: Any
    if virtual > 1:
        schedule = ScheduleInterleaved1F1B(parts, MICROBATCHES, loss_fn=loss_of)
    else:
        schedule = Schedule1F1B(parts[0], MICROBATCHES, loss_fn=loss_of)
    with fsdp_optim.CheckpointManager(
        folder, stages, optims, every=2, options=fsdp_optim.ManagerOptions(signals=())
    ) as manager:
        first = manager.resume()
        for step in range(first, last):
            tokens, target = batch_of(step)
            schedule.step(*([tokens] if rank == 0 else []), **({"target": target} if rank == world - 1 else {}))
            for optim in optims:
                optim.step()
                optim.zero_grad()
            manager.step(step + 1)
    return first


def as_unpipelined(folder: str) -> None:
    for step in (2, 4):
        wanted, wanted_optim = unpipelined(step)
        model = Language()
        optim = adam(model.parameters())
        fsdp_optim.load(f"{folder}/step-{step:08}", model, optim)
        check_same(f"step {step}", model.state_dict(), wanted.state_dict())
        check_same(f"state of step {step}", optim.state_dict()["state"], wanted_optim.state_dict()["state"])


# ------------------------------------------------------------------------------------------ ties and mistakes


def tied(folder: str) -> None:
    """The head of the last rank has the values of the embeddings: under one name, they are one parameter."""
    rank = dist.get_rank()

    def name_of(fqn: str, _: int) -> str:
        return "embed.weight" if fqn == "head.weight" else fqn

    trained, target = in_place("plain", STEPS), in_place("plain", 0)
    shared = whole_oracle(STEPS).model.embed.weight.detach()
    if rank == 1:
        with torch.no_grad():
            trained.model[0].head.weight.copy_(shared)
    errors = [
        error_text(
            partial(
                fsdp_optim.save,
                f"{folder}/differ",
                trained.model,
                trained.optim,
                options=fsdp_optim.SaveOptions(name_of=name_of),
            )
        )
    ]
    fsdp_optim.save(f"{folder}/step", trained.model, options=fsdp_optim.SaveOptions(name_of=name_of))
    fsdp_optim.load(f"{folder}/step", target.model, options=fsdp_optim.LoadOptions(name_of=name_of))
    check_same("loaded into both", weights_here(target), weights_here(trained))
    check_refused("their state", errors, "StateError", "embed.weight", "rank 0", "rank 1")


def mistakes() -> dict[str, tuple[str, str]]:
    rank = dist.get_rank()
    trained = in_place("virtual", STEPS)
    stages, optim = trained.model, trained.optim

    class Holder:
        submod = stages[0]

    gather = fsdp_optim.gather_full_optim_state_dict
    copied = [*stages, stage_of(Language(), 0, 4)] if rank == 0 else stages
    errors = {
        "empty": error_text(partial(gather, [] if rank else stages, optim)),
        "twice": error_text(partial(gather, [stages[0], stages[0]], optim)),
        "a stage object": error_text(partial(gather, [Holder()], optim)),
        "no stage": error_text(partial(gather, [stages[0], 5], optim)),
        "two tensors": error_text(partial(fsdp_optim.gather_full_model_state_dict, copied)),
    }
    full = gather(stages, optim, None, "name")
    del full["state"]["layers.0.up.weight"]
    full["param_groups"][0]["params"].remove("layers.0.up.weight")
    shard = fsdp_optim.reshard_optim_state_dict
    errors["a parameter less"] = error_text(partial(shard, stages, optim, full if rank else {}))
    errors["a parameter less on all"] = error_text(partial(shard, stages, optim, full))
    if rank == 0:
        stages[1].angles.add_(1)
    errors["buffers"] = error_text(partial(fsdp_optim.gather_full_model_state_dict, stages))
    return errors


WORDS = {
    "empty": ("WrapperError", "empty list"),
    "twice": ("WrapperError", "stage 1", "twice"),
    "a stage object": ("WrapperError", "stage 0", "submod"),
    "no stage": ("WrapperError", "stage 1", "int"),
    "two tensors": ("WrapperError", "embed.weight", "stages 0 and 2", "name_of="),
    "a parameter less": ("StateError", "state"),
    "a parameter less on all": ("StateError", "layers.0.up.weight"),
    "buffers": ("StateError", "angles", "2 pipeline stages"),
}


def shared_parameter(folder: str) -> None:
    """One Parameter in two stages of a rank, under one name and under two."""
    first, last = stage_of(Language(), 0, 2), stage_of(Language(), 1, 2)
    last.head.weight = first.embed.weight
    last.embed = nn.Embedding(11, 6)
    last.embed.weight = first.embed.weight
    optim = adam([*first.parameters(), *(p for p in last.parameters() if p is not first.embed.weight)])
    for param in [*first.parameters(), *last.parameters()]:
        param.grad = torch.ones_like(param)
    optim.step()
    fsdp_optim.save(f"{folder}/shared", [first, last], optim)
    whole = Language()
    whole.head.weight = whole.embed.weight
    whole_optim = adam(whole.parameters())
    fsdp_optim.load(f"{folder}/shared", whole, whole_optim)
    check_same("tied", whole.embed.weight, first.embed.weight)
    state = whole_optim.state[whole.embed.weight]
    check_same("its state", dict(state), dict(optim.state[first.embed.weight]))


class StagesTest(InFolder):
    def test_ties_and_mistakes(self) -> None:
        run_on_ranks(tied, 2, str(self.root))
        run_on_ranks(shared_parameter, 1, str(self.root))
        by_rank = run_on_ranks(mistakes, 2)
        for name, (kind, *words) in WORDS.items():
            check_refused(name, [errors[name] for errors in by_rank], kind, *words)

    def test_schedules_of_torch(self) -> None:
        """Trained in a pipeline, resumed in another pipeline, and loaded by the whole model: as if there were none."""
        root = str(self.root)
        self.assertEqual(run_on_ranks(by_schedule, 2, root, 2, 2), [0, 0])
        self.assertEqual(run_on_ranks(by_schedule, 3, root, 1, 4), [2, 2, 2])
        run_on_ranks(as_unpipelined, 1, root)  # in such a process, because the number of threads changes sums

    @expand(NOW, LATER)
    def test_every_verb(self, world_size: int, kind: str) -> None:
        run_on_ranks(trip, world_size, kind, str(self.root))
        further = whole_oracle(STEPS + 1)
        plain = whole_oracle(0)
        with torch.no_grad():
            plain.model.angles.zero_()
        fsdp_optim.load(self.root / kind, plain.model, plain.optim, options=fsdp_optim.LoadOptions(compare=True))
        check_same("unpipelined", plain.model.state_dict(), further.model.state_dict())
        check_same("its state", plain.by_name(), further.by_name())

    @parameterized.expand(
        [("unpipelined", [(2, "plain"), (2, "V"), (4, "FSDP2")]), ("virtual", [(3, "uneven"), (1, "plain")])]
    )
    def test_a_checkpoint_of_another_cut(self, source: str, targets: list[tuple[int, str]]) -> None:
        if source == "unpipelined":
            oracle = whole_oracle(STEPS)
            fsdp_optim.save(self.root / "step", oracle.model, oracle.optim)
        else:
            run_on_ranks(saved, 2, source, str(self.root))
        for world_size, kind in targets:
            run_on_ranks(loaded, world_size, kind, str(self.root))


if __name__ == "__main__":
    unittest.main()
