"""The figures of diff are those of a loop over the elements, for each pair of dtypes and for numbers of any size."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fsdp_optim

NUMEL = 65_536 + 77  # more than one chunk
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32)
PAIRS = [(a, b) for a in DTYPES for b in DTYPES if a == b or torch.float32 in (a, b)]
WIDE, SHORT = (torch.float64, torch.float64), (torch.bfloat16, torch.float32)
SPECIAL = {
    "plain": [],
    "zeros": [0.0, -0.0],
    "halves": [math.nan, 1.0],
    "huge": [1e200, -1e200],
    "infinite": [math.inf, -math.inf],
}


def made(seed: int, dtype: torch.dtype, special: list[float]) -> torch.Tensor:
    """Small numbers, half of them the same for all seeds; the first ones are `special`, in the order of the seed."""
    generator = torch.Generator().manual_seed(seed)
    same = torch.arange(NUMEL, dtype=torch.float64) % 7
    values = torch.where(torch.arange(NUMEL) % 2 == 0, same, torch.randn(NUMEL, generator=generator) * 3)
    placed = special if seed else special[::-1]
    values[-1] = 100 * seed  # the largest difference, of one sign
    values[: len(placed)] = torch.tensor(placed, dtype=torch.float64)
    return values.to(dtype)


def figures(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float, float, float]:
    """The elements that differ, the largest difference, the norm of the difference, and that of `a`, element by element."""
    num, largest, squares, own = 0, 0.0, list[float](), list[float]()
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        own.append(x * x if math.isfinite(x) else 0.0)
        if x == y and (type(x) is not type(y) or math.copysign(1, x) == math.copysign(1, y)):  # integers have no -0
            continue
        if math.isnan(x) and math.isnan(y):
            continue
        num += 1
        apart = abs(x - y) if math.isfinite(x) and math.isfinite(y) else math.inf
        largest = max(largest, apart)
        squares.append(apart * apart)
    return num, largest, math.sqrt(math.fsum(squares)), math.sqrt(math.fsum(own))


def approximately(value: float) -> object:
    return value if math.isinf(value) else pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("dtypes", "special"),
    [(pair, name) for name in SPECIAL for pair in PAIRS if name == "plain" or pair in (WIDE, SHORT)],
    ids=str,
)
def test_figures(tmp_path: Path, dtypes: tuple[torch.dtype, torch.dtype], special: str) -> None:
    values = SPECIAL[special]
    if special == "huge" and dtypes != WIDE:
        values = [value / 1e170 for value in values]
    a, b = (made(seed, dtype, values) for seed, dtype in enumerate(dtypes))
    for name, tensor in (("a", a), ("b", b)):
        save_file({"value": tensor}, tmp_path / f"{name}.safetensors")
    places = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    (value,), (other,) = (fsdp_optim.diff(*pair).values for pair in (places, places[::-1]))
    num, largest, norm_of_difference, norm = figures(a, b)
    assert (value.num_differing, value.max_abs) == (num, largest)
    assert value.norm_of_difference == approximately(norm_of_difference)
    assert value.norm == approximately(norm)
    nans, infinities = ((int(count(a).sum()), int(count(b).sum())) for count in (torch.isnan, torch.isinf))
    assert (value.nans, value.infinities) == (nans, infinities)
    assert (other.num_differing, other.max_abs, other.norm_of_difference) == (num, largest, value.norm_of_difference)
    (same,) = fsdp_optim.diff(places[0], places[0]).values
    assert (same.equal, same.max_abs, same.norm_of_difference, same.norm) == (True, 0, 0, value.norm)
