"""The digest of a value is of its content alone: a tensor whose elements lie in a row takes a shorter way to the same digest."""

from __future__ import annotations

import pytest
import torch

from fsdp_optim.state.values import Incomparable, fingerprint_of, same

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.int64, torch.complex64)
SHAPES = ((), (0,), (1,), (3, 4), (0, 5), (2, 3, 4))


def by_the_long_way(value: torch.Tensor) -> torch.Tensor:
    """The same elements, not in a row."""
    return torch.stack([value, value], dim=-1)[..., 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_strides_make_no_difference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randint(0, 2, shape).to(dtype)
    strided = by_the_long_way(value)
    assert strided.is_contiguous() == (value.numel() < 2)
    assert fingerprint_of(value) == fingerprint_of(strided)
    assert fingerprint_of(value.clone().requires_grad_(dtype.is_floating_point)) == fingerprint_of(strided)


def test_a_tensor_of_several_pieces() -> None:
    value = torch.arange(3 << 20)
    assert fingerprint_of(value) == fingerprint_of(by_the_long_way(value))


@pytest.mark.parametrize("bit", [torch.conj, torch._neg_view], ids=["conjugated", "negated"])
def test_bits_that_say_how_to_read(bit: object) -> None:
    value = torch.randn(3, dtype=torch.complex64)
    view = bit(value)  # type: ignore[operator]
    assert view.is_conj() or view.is_neg()
    assert fingerprint_of(view) == fingerprint_of(view.resolve_conj().resolve_neg().clone())
    assert fingerprint_of(view) != fingerprint_of(value)


def test_what_differs() -> None:
    value = torch.zeros(4)
    others = [value.view(2, 2), value.double(), value.int(), torch.tensor([0.0, 0.0, 0.0, -0.0])]
    assert len({fingerprint_of(each) for each in (value, *others)}) == 5


ZERO = torch._efficientzerotensor((3,))  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [ZERO, torch.empty(3, dtype=torch.qint8)], ids=["zeros", "quantised"])
def test_tensors_without_memory_or_without_a_scale(value: torch.Tensor) -> None:
    with pytest.raises(Incomparable):
        fingerprint_of(value)


INTEGERS = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int8)


def quantised(scale: float = 0.5, zero_point: int = 0) -> torch.Tensor:
    return torch._make_per_tensor_quantized_tensor(INTEGERS, scale, zero_point)


def by_channel(scales: tuple[float, ...], zero_points: tuple[int, ...], axis: int) -> torch.Tensor:
    return torch._make_per_channel_quantized_tensor(INTEGERS, torch.tensor(scales), torch.tensor(zero_points), axis)


QUANTISED = {
    "of the tensor": quantised(),
    "another scale": quantised(scale=0.25),
    "another zero": quantised(zero_point=1),
    "by rows": by_channel((0.5, 0.5), (0, 0), 0),
    "by columns": by_channel((0.5, 0.5, 0.5), (0, 0, 0), 1),
    "another scale of a row": by_channel((0.5, 0.25), (0, 0), 0),
    "another zero of a row": by_channel((0.5, 0.5), (0, 1), 0),
}


def test_quantised_tensors_with_the_same_integers() -> None:
    """Their scales and zero points are a part of their values."""
    assert len({fingerprint_of(value) for value in QUANTISED.values()}) == len(QUANTISED)
    for name, value in QUANTISED.items():
        assert same(value, value.clone()), name
        assert [other for other in QUANTISED if same(value, QUANTISED[other])] == [name]
