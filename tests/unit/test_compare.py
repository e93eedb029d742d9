"""The comparison of the kit raises for every difference, and names its place."""

from __future__ import annotations

import collections
import dataclasses
import unittest
from typing import Any

import torch
from kit.compare import Differs, check_same, check_value
from parameterized import parameterized

NAN = float("nan")


@dataclasses.dataclass
class Point:
    at: Any


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "a number": (1, 2),
    "a number of another type": (1, 1.0),
    "a bool and a number": (True, 1),
    "a number and a tensor": (1, torch.tensor(1)),
    "the sign of zero": (0.0, -0.0),
    "a word": ("a", "b"),
    "nothing": (None, 0),
    "a list and a tuple": ([1], (1,)),
    "the length of a list": ([1], [1, 1]),
    "the last of a list": ([1, 2], [1, 3]),
    "a key": ({"a": 1}, {"b": 1}),
    "a key more": ({"a": 1, "b": 2}, {"a": 1}),
    "a key less": ({"a": 1}, {"a": 1, "b": 2}),
    "a value deep inside": ({"a": [{"b": torch.zeros(2)}]}, {"a": [{"b": torch.tensor([0.0, 1e-45])}]}),
    "a dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    "a shape": (torch.zeros(2, 1), torch.zeros(1, 2)),
    "the sign of a zero in a tensor": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "the payload of a NaN": tuple(
        torch.tensor([0x7FC00000 + i], dtype=torch.int32).view(torch.float32) for i in (0, 1)
    ),
    "a field": (Point(torch.zeros(1)), Point(torch.ones(1))),
}
SAME: dict[str, tuple[Any, Any]] = {
    "NaN": (NAN, NAN),
    "NaN in a tensor": (torch.tensor([NAN]), torch.tensor([NAN])),
    "tensors without elements": (torch.zeros(0, 3), torch.zeros(0, 3)),
    "tensors without dimensions": (torch.tensor(1.5), torch.tensor(1.5)),
    "other strides": (torch.arange(6).reshape(2, 3).t(), torch.arange(6).reshape(2, 3).t().contiguous()),
    "a field": (Point([1]), Point([1])),
}


class CompareTest(unittest.TestCase):
    @parameterized.expand(DIFFERENT)
    def test_it_raises_in_both_directions(self, name: str) -> None:
        value, other = DIFFERENT[name]
        for got, wanted in ((value, other), (other, value)):
            with self.assertRaisesRegex(Differs, "^here: "):
                check_same("here", got, wanted)
            with self.assertRaisesRegex(Differs, "^here: "):
                check_value("here", got, wanted)
            with self.assertRaisesRegex(Differs, "^here: "):
                check_same("here", got, wanted, in_order=False)

    @parameterized.expand(SAME)
    def test_it_does_not_raise(self, name: str) -> None:
        check_same("here", *SAME[name])

    def test_the_order_of_keys(self) -> None:
        mapping, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
        check_same("here", mapping, other, in_order=False)
        with self.assertRaisesRegex(Differs, "keys"):
            check_same("here", mapping, other)
        with self.assertRaisesRegex(Differs, "keys"):
            check_same("here", [mapping], [other])

    def test_the_class_of_a_mapping(self) -> None:
        check_same("here", collections.OrderedDict(a=1), {"a": 1})
        with self.assertRaisesRegex(Differs, "OrderedDict"):
            check_value("here", collections.OrderedDict(a=1), {"a": 1})
