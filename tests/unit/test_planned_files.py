"""Whose bytes a planned file has: a format may change the lists of tensors that it is given, or make the tensors anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from msgspec import structs

from fsdp_optim.checkpoint.common.contents import SavedValue
from fsdp_optim.checkpoint.common.files import planned_files
from fsdp_optim.formats.base.header import Header
from fsdp_optim.formats.own.format import OwnWriter
from fsdp_optim.layout import Whole
from fsdp_optim.plugins import Half, PlannedFile, PlannedTensor

NAMES = ("a", "b", "c", "d")


def by_name(tensors: list[PlannedTensor]) -> None:
    tensors.sort(key=lambda tensor: tensor.key, reverse=True)


def all_anew(tensors: list[PlannedTensor]) -> None:
    tensors[:] = [structs.replace(tensor) for tensor in tensors]


def one_anew(tensors: list[PlannedTensor]) -> None:
    tensors[1] = structs.replace(tensors[1])


@pytest.mark.parametrize("change", [list.copy, list.reverse, by_name, all_anew, one_anew])
def test_each_planned_tensor_gets_its_own_value(change: Callable[[list[PlannedTensor]], Any]) -> None:
    class Changing(OwnWriter):
        def files(
            self, tensors: Mapping[Half, Sequence[PlannedTensor]], shared: str, **limits: int
        ) -> list[PlannedFile]:
            for of_half in tensors.values():
                assert isinstance(of_half, list)
                change(of_half)
            return super().files(tensors, shared, **limits)

    values: dict[Half, list[SavedValue]] = {
        "model": [
            SavedValue(name, "", torch.float32, Whole((4,), (0,)), is_state=False, stored_name=name) for name in NAMES
        ]
    }
    files = planned_files(Changing(), values, "", most_nbytes=1 << 20, num_ranks=1)
    pairs = [
        (tensor.key, value) for file in files for tensor, value in zip(file.plan.tensors, file.values, strict=True)
    ]
    assert sorted(key for key, _ in pairs) == list(NAMES)
    for key, value in pairs:
        assert value is values["model"][NAMES.index(key)]


@pytest.mark.parametrize(
    ("start", "stop", "names"),
    [(0, 8, "a"), (0, 9, "a, empty, b"), (8, 9, "b"), (23, 28, "b, c"), (24, 28, "c"), (8, 8, "")],
)
def test_a_file_names_the_tensors_of_a_range(start: int, stop: int, names: str) -> None:
    shapes = {"a": (2,), "empty": (0, 3), "b": (4,), "c": ()}
    tensors = [PlannedTensor(key, "float32", shape, "model") for key, shape in shapes.items()]
    (file,) = OwnWriter().files({"model": tensors}, "", most_nbytes=1 << 20, num_ranks=1)
    assert file.tensors_in(start, stop) == names
    assert (
        Header.of([(tensor.key, tensor.dtype, tensor.shape) for tensor in tensors], {}).tensors_in(start, stop) == names
    )
