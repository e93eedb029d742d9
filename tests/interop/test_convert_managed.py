"""A manager's own checkpoints as files of torch, and back: nothing of the random states is lost, and a resume is the same."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy
import torch
from kit.compare import Differs, check_same
from kit.folders import SharedFolder
from kit.managed import Run
from kit.wrapping import cpu
from parameterized import parameterized
from safetensors.torch import load_file
from torch import nn

import fsdp_optim
from fsdp_optim.checkpoint.common.run_state import RANDOM
from fsdp_optim.plugins import encode_values, set_random_states
from fsdp_optim.testing import run_on_ranks

STEPS = 4


def trained(root: str) -> list[Any]:
    """Train beyond the checkpoint of step 4; the losses of steps 5 and 6 on this rank."""
    with cpu():
        run = Run(root, "FSDP2", every=STEPS)
        for step in range(1, STEPS + 3):
            run.train(step)
            run.manager.step(step)
        run.manager.close()
        return [run.losses[step] for step in (STEPS + 1, STEPS + 2)]


def resumed(root: str, places: list[str]) -> list[list[Any]]:
    """The losses of the same steps after a load of each place, with random states that were others before."""
    losses = []
    with cpu():
        for place in places:
            run = Run(root, "FSDP2", every=100)
            objects = {"scheduler": run.scheduler, "scaler": run.scaler, "average": run.average}
            state = {**objects, "loader": fsdp_optim.per_rank(run.loader)}
            result = fsdp_optim.load(place, run.model, run.optim, state=state)
            set_random_states(result.state[RANDOM])
            for step in (STEPS + 1, STEPS + 2):
                run.train(step)
            run.manager.close()
            losses.append([run.losses[step] for step in (STEPS + 1, STEPS + 2)])
    return losses


def hashes(folder: Path) -> dict[str, str]:
    """The hash of the file of each rank's values, of the elements of each tensor, and of the values that ranks have in common.

    A conversion from files of torch leaves the tensors among these in one file with them.
    """
    digests = {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in folder.glob("extra/rank*")
    }
    own = fsdp_optim.load(folder)
    common = {name: value for name, value in own.state.items() if not own.all_ranks or name not in own.all_ranks[0]}
    digests["common"] = sha256(encode_values("state", common, allow_pickle=False)).hexdigest()
    for path in {*folder.glob("model.safetensors"), *folder.glob("optim.safetensors")}:
        for name, value in load_file(path).items():
            digests[f"{path.name} {name}"] = sha256(value.numpy().tobytes()).hexdigest()
    return digests


class ManagedTest(SharedFolder):
    losses: list[Any]

    @classmethod
    def fill(cls) -> None:
        cls.losses = run_on_ranks(trained, 2, str(cls.root / "run"))
        cls.source = cls.root / "run" / f"step-{STEPS:08}"

    def test_there_and_back(self) -> None:
        """By both formats of torch, and from these to each other: equal bytes, and a resume with equal losses on each rank."""
        ways = {"torch": ["torch"], "torch_file": ["torch_file"], "both": ["torch_file", "torch", "torch_file"]}
        for name, formats in ways.items():
            place = self.source
            for number, format in enumerate(formats):
                target = self.root / f"{name}-{number}"
                fsdp_optim.convert(
                    place, target, format=format, options=fsdp_optim.ConvertOptions(durable=False, progress=False)
                )
                place = target
            back = self.root / f"back-{name}" / self.source.name
            fsdp_optim.convert(place, back, options=fsdp_optim.ConvertOptions(durable=False, progress=False))
            wanted = hashes(self.source)
            self.assertIn("extra/rank-00001.safetensors", wanted)
            check_same(name, hashes(back), wanted, in_order=False)
        backs = [self.root / f"back-{name}" / self.source.name for name in ways]
        backs += [self.root / "torch-0", self.root / "torch_file-0" / "checkpoint.pt"]
        by_rank = run_on_ranks(resumed, 2, str(self.root / "others"), list(map(str, backs)))
        for rank, of_rank in enumerate(by_rank):
            for name, losses in zip(backs, of_rank, strict=True):
                check_same(f"{name} on rank {rank}", losses, self.losses[rank])

    def test_stock_torch_reads_it(self) -> None:
        """Without unpickling any object: numpy's state is a tuple with a tensor, which numpy takes."""
        fsdp_optim.convert(
            self.source,
            self.root / "file",
            format="torch_file",
            options=fsdp_optim.ConvertOptions(durable=False, progress=False),
        )
        fsdp_optim.convert(
            self.source,
            self.root / "folder",
            format="torch",
            options=fsdp_optim.ConvertOptions(durable=False, progress=False),
        )
        whole = torch.load(self.root / "file" / "checkpoint.pt", weights_only=True)
        saved = fsdp_optim.load(self.source).all_ranks
        for rank in range(2):
            alone = torch.load(self.root / "folder" / f"rank-{rank:05}.pt", weights_only=True)
            for file in (whole["per_rank_extra"][rank], alone):
                name, state, *rest = file[RANDOM]["numpy"]
                wanted = saved[rank][RANDOM]["numpy"]
                check_same("the state", types_in((name, state.numpy(), *rest)), types_in(tuple(wanted)))
                before = numpy.random.get_state()
                try:
                    numpy.random.set_state(file[RANDOM]["numpy"])
                    check_same("taken", types_in(numpy.random.get_state()), types_in(wanted))
                finally:
                    numpy.random.set_state(before)

    @parameterized.expand([("torch", False), ("torch_file", False), ("torch_file", True)])
    def test_loaded(self, format: str, is_file: bool) -> None:
        """`load` gives the values as they were saved, with the types of numpy, of this rank and of all."""
        target = self.own_folder() / "made"
        fsdp_optim.convert(
            self.source, target, format=format, options=fsdp_optim.ConvertOptions(durable=False, progress=False)
        )
        result = fsdp_optim.load(target / "checkpoint.pt" if is_file else target)
        wanted = fsdp_optim.load(self.source)
        check_same("extra", types_in(dict(result.state)), types_in(dict(wanted.state)))
        check_same("of this rank", types_in(result.state["loader"]), types_in(wanted.state["loader"]))
        check_same("of all", types_in(result.all_ranks), types_in(wanted.all_ranks))
        self.assertEqual(len(result.all_ranks), 2)
        self.assertEqual(type(result.state[RANDOM]["numpy"][1]), numpy.ndarray)


VALUES: dict[str, Any] = {
    "array": numpy.arange(6, dtype=numpy.uint32).reshape(2, 3),
    "turned": numpy.arange(6.0).reshape(2, 3).T,
    "no elements": numpy.zeros((2, 0), numpy.float16),
    "number": numpy.float32(0.1),
    "flag": numpy.bool_(True),
    "complex": numpy.complex64(1 - 2j),
    "most": numpy.uint64(2**64 - 1),
    "lists": [(numpy.int8(-3), [numpy.zeros(0)]), {"deep": {2: numpy.float64("nan")}}],
    "bytes": (b"", b"x"),
    "range": range(2, 9, 3),
    "frozen": frozenset([1, 2]),
    "plain": {"a": None, 3: (1.5, "x")},
}


class ValuesTest(SharedFolder):
    """Values that OURS keeps and that `weights_only` does not know: each by itself, as a value of all ranks and of one."""

    @parameterized.expand([(name,) for name in VALUES])
    def test_there_and_back(self, name: str) -> None:
        self.check(name, {"value": VALUES[name]}, VALUES[name])

    def test_all_together(self) -> None:
        self.check("all", dict(VALUES), [*VALUES.values()])

    def check(self, name: str, extra: Any, of_rank: Any) -> None:
        root, model = self.own_folder(), nn.Linear(2, 2)
        fsdp_optim.save(
            root / "saved",
            model,
            state={**extra, "per_rank_extra": fsdp_optim.per_rank(of_rank)},
            options=fsdp_optim.SaveOptions(durable=False),
        )
        for format in ("torch", "torch_file"):
            fsdp_optim.convert(
                root / "saved", root / format, format=format, options=fsdp_optim.ConvertOptions(durable=False)
            )
            for path in (root / format).glob("*.pt"):
                torch.load(path, weights_only=True)
            result = fsdp_optim.load(root / format)
            check_same("types", types_in(result.state), types_in({**extra, "per_rank_extra": of_rank}))
            fsdp_optim.convert(root / format, root / f"back-{format}", options=fsdp_optim.ConvertOptions(durable=False))
            check_same(f"{name} by {format}", hashes(root / f"back-{format}"), hashes(root / "saved"), in_order=False)

    def test_a_list_of_kinds_that_is_not_of_the_values(self) -> None:
        """Of a file that was changed: an error of this library that names the file."""
        path = self.own_folder() / "made.pt"
        model = dict(nn.Linear(2, 2).state_dict())
        places: list[Any] = [3, [3], [(("value",), "numpy.object")], [(("value", "a"), "ndarray")]]
        places += [[(("value",), "range")], [(("value",), "a kind")]]
        for kinds in places:
            torch.save({"model": model, "value": (0, 1 << 40, 1), "fsdp_optim_kinds": kinds}, path)
            try:
                fsdp_optim.load(path)
            except fsdp_optim.CheckpointError as error:
                self.assertIn(str(path), str(error))
            else:
                raise Differs(f"{kinds}: was loaded")


def types_in(value: Any) -> Any:
    """A value with the type of each part, in a form that NaN equals itself in."""
    if isinstance(value, dict):
        return type(value).__name__, {key: types_in(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [types_in(item) for item in value]
    if isinstance(value, (numpy.ndarray, torch.Tensor)):
        return type(value).__name__, str(value.dtype), value.shape, value.tolist()
    return type(value).__name__, repr(value)
