"""What a save of DCP writes, a load reads: values without such a form are refused by name, before the earlier checkpoint goes."""

from __future__ import annotations

import tempfile
import unittest
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from kit.compare import check_same, error_text
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

PLACES = {
    "state": "state['value']",
    "hyperparameter": "param group 0: value",
    "state of optimizer": "weight: 'value' of its",
}


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will remove them
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def odd_bool() -> torch.Tensor:
    return torch.tensor([2], dtype=torch.uint8).view(torch.bool)[0]


# Each with whether a load with allow_pickle=True reads it among the trainer's values. No load unpickles an optimizer's.
REFUSED: dict[str, tuple[Callable[[], Any], bool]] = {
    "other byte order": (lambda: numpy.arange(3, dtype=">f4"), False),
    "other byte order in a list": (lambda: [1, numpy.arange(3, dtype=">i8")], False),
    "other byte order in a set of a tuple": (lambda: ({numpy.dtype(">f4")},), False),
    "quantised tensor": (quantised, False),
    "quantised tensor in a tuple": (lambda: (quantised(), 1), False),
    "texts of numpy": (lambda: numpy.array(["a"]), False),
    "dtype of texts": (lambda: numpy.dtype("U1"), False),
    "number of too many bits": (lambda: 2**8192, False),
    "number that Python does not show": (lambda: 2**20_000, False),
    "long range": (lambda: range(1 << 21), True),
    "range of large numbers": (lambda: range(1 << 63, (1 << 63) + 3), False),
    "frozenset in a set": (lambda: {frozenset([1])}, False),
    "dict that makes frozensets": (lambda: (defaultdict(frozenset),), True),
    "storage": (lambda: torch.ones(2).untyped_storage(), False),
}
READ = {
    "number of 2041 bits": 2**2040,
    "number of 8192 bits": -(2**8191),
    "numbers in a dict": {"a": (2**2040, 2**4000)},
    "40 dimensions": numpy.zeros((1,) * 40),
}


def given(place: str, value: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """A model, its optimizer and the values of the trainer, with the value at a place."""
    model = torch.nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    if place == "hyperparameter":
        optim.param_groups[0]["value"] = value
    if place == "state of optimizer":
        optim.state[model.weight]["value"] = value
    return model, optim, {"value": value} if place == "state" else {}


def saved_by_one_rank(path: str) -> str:
    """Rank 1 alone has a value that no load reads; every rank hears of it."""
    value = numpy.arange(3, dtype=">f4") if dist.get_rank() else 1
    model = torch.nn.Linear(2, 2)
    state = {"value": fsdp_optim.per_rank(value)}
    return ": ".join(error_text(partial(fsdp_optim.save, path, model, state=state, format="dcp", overwrite=True)))


class ReadBackTest(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.path = Path(temporary.name, "a")

    def save(self, place: str, value: Any, **options: Any) -> None:
        model, optim, state = given(place, value)
        of_save = fsdp_optim.SaveOptions(**options)
        fsdp_optim.save(self.path, model, optim, state=state, format="dcp", overwrite=True, options=of_save)

    def load(self, place: str, **options: Any) -> Any:
        model, optim, _ = given("", None)
        loaded = fsdp_optim.load(self.path, model, optim, options=fsdp_optim.LoadOptions(**options))
        if place == "state":
            return loaded.state["value"]
        return optim.param_groups[0]["value"] if place == "hyperparameter" else optim.state[model.weight]["value"]

    @parameterized.expand([(f"{name}, {place}", name, place) for name in REFUSED for place in PLACES])
    def test_refused(self, _: str, name: str, place: str) -> None:
        make, is_pickled = REFUSED[name]
        self.save(place, "earlier")
        for allow_pickle in (False, True):
            if allow_pickle and is_pickled and place == "state":
                self.save(place, make(), allow_pickle=True)
                check_same("pickled", type(self.load(place, allow_pickle=True)), type(make()))
                continue
            kind, text = error_text(partial(self.save, place, make(), allow_pickle=allow_pickle))
            check_same("refused", (kind, PLACES[place] in text), ("CheckpointError", True))
            check_same("the earlier one", self.load(place), "earlier")

    @parameterized.expand([(f"{name}, {place}", name, place) for name in READ for place in PLACES])
    def test_read(self, _: str, name: str, place: str) -> None:
        self.save(place, READ[name])
        check_same(name, self.load(place), READ[name])

    def test_bools(self) -> None:
        """A load looks at the bytes of bools."""
        for value in (odd_bool(), (odd_bool(),)):
            kind, text = error_text(partial(self.save, "hyperparameter", value))
            check_same("refused", (kind, "param group 0: value" in text), ("CheckpointError", True))

    def test_one_rank_has_the_value(self) -> None:
        self.save("state", "earlier")
        for text in run_on_ranks(saved_by_one_rank, 2, str(self.path)):
            self.assertRegex(text, r"state\['value'\]: a ndarray .* no load reads")
        check_same("the earlier one", self.load("state"), "earlier")

    @parameterized.expand(["dcp", "torch", "torch_file"])
    def test_converted(self, format: str) -> None:
        """This library's own format has tuples of any depth among the keys of a dict."""
        model, optim, _ = given("", None)
        fsdp_optim.save(self.path, model, optim, state={"value": ({((((1,),),),): 2},)})
        target = self.path.with_name("b")
        kind, text = error_text(partial(fsdp_optim.convert, self.path, target, format=format))
        check_same("refused", (kind, "value" in text, target.exists()), ("CheckpointError", True, False))


if __name__ == "__main__":
    unittest.main()
