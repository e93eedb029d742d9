"""Values that one rank sends to others, in byte ranges of any budget, on ranks that are threads."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from kit.compare import check_same

from fsdp_optim.testing import run_on_threads
from fsdp_optim.transport import NOTHING, Failure, Parcel, send, world_here
from fsdp_optim.transport.agree import agree


def value_of(index: int) -> Any:
    """Tensors and arrays of several element sizes, none of them a multiple of a byte range."""
    return {
        "wide": torch.arange(37).to(torch.complex128) + index,
        "strided": torch.arange(60, dtype=torch.float64).view(6, 10)[:, 1::2] + index,
        "narrow": [torch.arange(33, dtype=torch.int16), torch.arange(7, dtype=torch.uint8)],
        "conjugated": (torch.arange(9) + 2j).conj(),
        "negated": (torch.arange(9) + 2j).conj().imag,
        "array": numpy.arange(41, dtype=numpy.float32) + index,
        "rest": ("word", index, None),
    }


def plain(value: Any) -> Any:
    views = {name: value[name].resolve_conj().resolve_neg() for name in ("conjugated", "negated")}
    return {**value, **views, "array": torch.from_numpy(value["array"])}


def exchange_parcels(nbytes: int) -> None:
    world = world_here()
    group = world.group("a call", range(world.size), None, 20.0, nbytes)
    parcels = [Parcel(0, (1, 2)), Parcel(2, (0, 2)), Parcel(1, (1,)), Parcel(1, (0, 2))]
    failure = Failure()
    arrived = send(group, parcels, lambda index: value_of(index) if index != 3 else NOTHING, failure)
    agree(group, "sent", failure.error)
    wanted = {index: plain(value_of(index)) for index in ({1}, {0}, {0})[world.rank]}
    for value in arrived.values():
        assert value["conjugated"].tolist() == [complex(number, -2) for number in range(9)]
        assert value["negated"].tolist() == [-2.0] * 9
    check_same("arrived", {index: plain(value) for index, value in arrived.items()}, wanted)


@pytest.mark.parametrize("nbytes", [1, 50, 100, 333, 1 << 20])
def test_every_budget(nbytes: int) -> None:
    run_on_threads(exchange_parcels, 3, nbytes)


def test_a_value_that_cannot_be_had() -> None:
    """All ranks raise the error of the sending rank, before anything is sent."""

    def gone(index: int) -> Any:
        raise OSError("no value")

    def fail(bad: int) -> str:
        group = world_here().group("a call", range(3), None, 20.0)
        try:
            send(group, [Parcel(bad, tuple({0, 1, 2} - {bad}))], gone, Failure())
        except Exception as error:
            return str(error)
        return ""

    for bad in range(3):
        assert set(run_on_threads(fail, 3, bad)) == {f"rank {bad}: OSError: no value"}
