"""What a trainer saves beside the model and the optimizer comes back as it was, for all ranks and for each rank."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from kit.cases import expand
from kit.checkpoints import load, save
from kit.compare import check_refused, check_same, error_text
from kit.folders import InFolder
from kit.log_texts import lines_said
from kit.options import as_options, state_for
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


@dataclasses.dataclass
class Own:
    """A class of the trainer's."""

    best: float
    table: list[int]


class Point(NamedTuple):
    x: int
    y: int


class Colour(enum.IntEnum):
    RED = 1


def trainer_state() -> dict[str, Any]:
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 3)
    wide = torch.arange(12.0).reshape(3, 4)
    return {
        "step": 1000,
        "big": 2**70 + 1,
        "negative zero": -0.0,
        "tiny": 5e-324,
        "third": 1 / 3,
        "infinite": [float("inf"), float("-inf")],
        "none": None,
        "flags": [True, False, 1, 0],
        "word": 'ö "quoted" \n\x00 日本語 😀',
        "tuple": (1, (2.0, None), [3, ("four",)], ()),
        "nested": {"a": {"b": {"": [{}, [], {"c.d/e": (1,)}]}}},
        "__tuple__": {"__tuple__": [1, 2]},
        "tensor": {"__tensor__": 0, "$tensor": "x", "__type__": "tuple", "type": "tensor", "tuple": [1], "dict": {}},
        "__metadata__": {"__metadata__": "x"},
        "../../up": "/etc",
        "scheduler": scheduler.state_dict(),
        "python": random.Random(3).getstate(),
        "rng": torch.get_rng_state(),
        "tensors": (
            torch.tensor(1.5, dtype=torch.bfloat16),
            torch.empty(0, 3, dtype=torch.int16),
            torch.tensor([True, False, True]),
            torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float64),
            wide.t(),
            wide[1:, ::2],
            wide[1],
            {"deep": [torch.tensor(2**62)]},
        ),
    }


class ChangedOrRefused:
    """Values that JSON would give back as other values."""

    values: dict[str, Any] = {
        "numbers as keys": {30: 1, 40: 2},
        "True as a key": {True: "a"},
        "None as a key": {None: "a"},
        "tuples as keys": {(1, 2): "a"},
        "a set": {1, 2},
        "bytes": b"\x00\xff",
        "complex": 1j,
        "not a number": float("nan"),
        "numpy's float": numpy.float64(0.5),
        "numpy's int": numpy.int64(3),
        "numpy's array": numpy.arange(3),
        "Counter": collections.Counter({3: 1}),
        "OrderedDict": collections.OrderedDict(a=1),
        "defaultdict": collections.defaultdict(int, a=1),
        "named tuple": Point(1, 2),
        "enum": Colour.RED,
        "Size": torch.Size([1, 2]),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "half a character": "\ud800",
        "own class": Own(0.5, [1, 2]),
    }


def alike(got: Any, wanted: Any) -> bool:
    return type(got) is type(wanted) and repr(got) == repr(wanted)


class Tripwire:
    """Raises when it is unpickled, and leaves a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


class ExtraTest(InFolder):
    def plain(self) -> nn.Module:
        return nn.Linear(3, 2)

    def test_comes_back_as_it_was(self) -> None:
        extra = trainer_state()
        given = copy.deepcopy(extra)
        fsdp_optim.save(self.path, self.plain(), state=state_for(extra))
        check_same("what was given", extra, given)
        restored = fsdp_optim.load(self.path, self.plain())
        check_same("extra", dict(restored.state), given)
        self.assertEqual(str(restored.state["negative zero"]), "-0.0")
        for tensor in restored.state["tensors"][:-1]:
            tensor.zero_()  # each in memory of its own, that can be written to
        check_same("read again", dict(fsdp_optim.load(self.path).state), given)

    def test_none_and_nothing(self) -> None:
        for number, extra in enumerate((None, {})):
            path = self.root / f"step-{number}"
            fsdp_optim.save(path, self.plain(), state=state_for(extra))
            restored = fsdp_optim.load(path)
            self.assertEqual(dict(restored.state), {})
            self.assertEqual((tuple(restored.missing_keys), tuple(restored.unexpected_keys)), ((), ()))

    @parameterized.expand(ChangedOrRefused.values)
    def test_never_changed_in_silence(self, case: str) -> None:
        """Given back as it was, or refused by name; with allow_pickle=True always given back."""
        value = ChangedOrRefused.values[case]
        extra = {"good": 1, "outer": [{"inner name": value}]}
        kind, text = error_text(lambda: fsdp_optim.save(self.path, self.plain(), state=state_for(extra)))
        if kind:
            self.assertIn("inner name", text)
            self.assertIn("allow_pickle", text)
            self.assertEqual(kind, "CheckpointError")
            self.check_only()
        else:
            back = fsdp_optim.load(self.path).state["outer"][0]["inner name"]
            self.assertTrue(alike(back, value), f"{value!r} ({type(value)}) came back as {back!r} ({type(back)})")
        fsdp_optim.save(
            self.path,
            self.plain(),
            state=state_for(extra),
            options=fsdp_optim.SaveOptions(allow_pickle=True),
            overwrite=True,
        )
        back = fsdp_optim.load(self.path, options=fsdp_optim.LoadOptions(allow_pickle=True)).state["outer"][0][
            "inner name"
        ]
        self.assertTrue(alike(back, value), f"{value!r} came back from the pickle as {back!r} ({type(back)})")

    @parameterized.expand((("of an own class", Own(0.5, [1])), ("nothing but an object", object()), ("code", print)))
    def test_a_value_that_is_neither_json_nor_a_tensor(self, _: str, value: Any) -> None:
        extra = {"outer": [{"inner name": value}]}
        for arguments in ({"extra": extra}, {"per_rank_extra": extra}):
            kind, text = error_text(
                lambda arguments=arguments: fsdp_optim.save(
                    self.path, self.plain(), **as_options(fsdp_optim.SaveOptions, **arguments)
                )
            )
            self.assertEqual(kind, "CheckpointError", text)
            self.assertIn("inner name", text)
            self.check_only()

    def test_nothing_is_unpickled_unasked(self) -> None:
        mark = self.root / "mark"
        extra = {"bomb": Tripwire(mark)}
        source, model = self.plain(), self.plain()
        fsdp_optim.save(
            self.path,
            source,
            state=state_for(extra, extra),
            options=fsdp_optim.SaveOptions(allow_pickle=True),
        )
        self.check_only("step-1")
        restored = fsdp_optim.load(self.path, model)  # the weights need no trust
        check_same("the model", dict(model.state_dict()), dict(source.state_dict()))
        for ask in (lambda: restored.state["bomb"], lambda: dict(restored.state)):
            kind, text = error_text(ask)
            self.assertEqual(kind, "CheckpointError", text)
            self.assertIn("allow_pickle", text)
        self.check_only("step-1")
        fsdp_optim.load(self.path, model, options=fsdp_optim.LoadOptions(allow_pickle=True))
        self.check_only("step-1", "mark")

    @expand(
        soon=[("FSDP2", 2, "fairscale flat", 4), ("FSDP1 flat", 4, "FSDP1 orig", 2)], later=[("DDP", 3, "plain", 3)]
    )
    def test_of_each_rank(self, source: str, size: int, target: str, target_size: int) -> None:
        run_on_ranks(save_per_rank, size, self.path, source)
        by_rank = run_on_ranks(load_per_rank, target_size, self.path, target)
        for rank, (missing, state, records) in enumerate(by_rank):
            wanted = of_rank(rank) if rank < size else {}
            check_same("values", state, {"step": 7, "pair": (1, 2), **wanted})
            absent = () if rank < size else tuple(f"state[{name!r}]" for name in of_rank(0))
            check_same("missing", missing, absent)
            told = [text for text in records if "new" in text]
            new = f"ranks {size} to {target_size - 1} are new" if target_size > size + 1 else f"rank {size} is new"
            self.assertEqual(len(told), int(rank == 0 and target_size > size), (rank, records))
            self.assertTrue(all(f"was saved by {size} ranks, so {new}: " in text for text in told), told)

    def test_one_rank_has_a_value_that_is_refused(self) -> None:
        for bad in (0, 1, 2):
            errors = run_on_ranks(save_bad_extra, 3, self.path, bad)
            check_refused(f"rank {bad}", errors, "CheckpointError", "inner name")
            self.check_only()


def of_rank(rank: int) -> dict[str, Any]:
    return {"rank": rank, "rng": torch.arange(rank + 3), "nested": {"tuple": (rank, None)}}


def save_per_rank(path: Path, wrapper: str) -> None:
    with cpu():
        save(path, Trained(wrapper), extra={"step": 7, "pair": (1, 2)}, per_rank_extra=of_rank(dist.get_rank()))


def load_per_rank(path: Path, wrapper: str) -> tuple[tuple[str, ...], dict[str, Any], list[str]]:
    with cpu(), lines_said() as lines:
        restored = load(path, Trained(wrapper, steps=0))
    return restored.missing_keys, dict(restored.state), lines


def save_bad_extra(path: Path, bad: int) -> tuple[str, str]:
    value: Any = object() if dist.get_rank() == bad else [1, 2]
    return error_text(lambda: save(path, Trained("FSDP2"), per_rank_extra={"outer": [{"inner name": value}]}))
