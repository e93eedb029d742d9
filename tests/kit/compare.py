"""The comparison of two values of any class, bit by bit; the error names the places that differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import fsdp_optim


class Differs(AssertionError):
    """Two things that should be the same are not."""


def differences(
    got: Any, wanted: Any, where: str = "", *, in_order: bool = True, same_mappings: bool = False
) -> Iterator[str]:
    """Every difference of types, shapes, dtypes, keys, and bits.

    `in_order`: keys must come in the same order. `same_mappings`: mappings must be of one class.
    """
    options = {"in_order": in_order, "same_mappings": same_mappings}
    if isinstance(got, Tensor) and isinstance(wanted, Tensor):
        yield from _of_tensors(got, wanted, where)
    elif isinstance(got, Mapping) and isinstance(wanted, Mapping):
        if same_mappings and type(got) is not type(wanted):
            yield f"{where}: a {type(got).__name__}, not a {type(wanted).__name__}"
        if (list(got) != list(wanted)) if in_order else (set(got) != set(wanted)):
            yield f"{where}: keys {list(got)}, not {list(wanted)}"
        for key in wanted:
            if key in got:
                yield from differences(got[key], wanted[key], f"{where}[{key!r}]", **options)
    elif type(got) is not type(wanted):
        yield f"{where}: {got!r} ({type(got).__name__}), not {wanted!r} ({type(wanted).__name__})"
    elif dataclasses.is_dataclass(wanted) and not isinstance(wanted, type):
        yield from differences(_fields_of(got), _fields_of(wanted), where, **options)
    elif isinstance(wanted, (list, tuple)) and len(got) == len(wanted):
        for place, (value, other) in enumerate(zip(got, wanted, strict=True)):
            yield from differences(value, other, f"{where}[{place}]", **options)
    elif got.hex() != wanted.hex() if isinstance(wanted, float) else got != wanted:
        yield f"{where}: {got!r}, not {wanted!r}"


def _of_tensors(got: Tensor, wanted: Tensor, where: str) -> Iterator[str]:
    if (got.dtype, got.shape) != (wanted.dtype, wanted.shape) or isinstance(got, DTensor):
        kind = type(got).__name__
        yield f"{where}: {kind} {got.dtype} {list(got.shape)}, not {wanted.dtype} {list(wanted.shape)}"
    elif not torch.equal(_bytes(got), _bytes(wanted)):
        wrong = (_bytes(got) != _bytes(wanted)).reshape(-1, got.element_size()).any(1).nonzero().flatten()
        a, b = got.reshape(-1)[wrong[:4]].tolist(), wanted.reshape(-1)[wrong[:4]].tolist()
        yield f"{where}: {len(wrong)} of {got.numel()} elements, at {wrong[:4].tolist()}: {a}, not {b}"


def _fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _bytes(value: Tensor) -> Tensor:
    if not value.numel():
        return torch.empty(
            0, dtype=torch.uint8
        )  # torch calls it contiguous, whatever its strides, and does not view it as bytes
    return value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def check_same(what: str, got: Any, wanted: Any, **options: bool) -> None:
    """Raise, and say where, unless two values are the same to the bit. `options` are those of `differences`."""
    differing = list(differences(got, wanted, **options))
    if differing:
        shown = "\n  ".join(differing[:10])
        raise Differs(f"{what}: {len(differing)} differences:\n  {shown}")


def check_value(what: str, got: Any, wanted: Any) -> None:
    """As `check_same`, but keys may come in any order, and mappings must be of one class."""
    check_same(what, got, wanted, in_order=False, same_mappings=True)


def sorted_state(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """State by name, parameters and values in the order of their names: others' dicts have orders of their own."""
    return {fqn: dict(sorted(state[fqn].items())) for fqn in sorted(state)}


def error_text(call: Callable[[], Any]) -> tuple[str, str]:
    """(class, message) of the error of a call; ("", "") if the call raises nothing."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def refused(call: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    """Raise unless a call of one process is refused, with all these words."""
    check_refused("the call", [error_text(call)], kind.__name__, *words)


def refused_on_ranks(what: str, call: Callable[[], Any], kind: str, *words: str) -> None:
    """Raise, on every rank, unless all ranks refuse a call with one and the same error, with all these words."""
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error_text(call))
    check_refused(what, errors, kind, *words)


def check_refused(what: str, errors: Sequence[tuple[str, str]], kind: str, *words: str) -> None:
    """Raise unless all ranks had one and the same error, of one class, with all these words."""
    told = "\n".join(f"  rank {rank}: {name or 'no error'}: {text}" for rank, (name, text) in enumerate(errors))
    if {name for name, _ in errors} != {kind}:
        raise Differs(f"{what}: not {kind} on all ranks:\n{told}")
    if len({text for _, text in errors}) != 1:
        raise Differs(f"{what}: not the same words on all ranks:\n{told}")
    lacking = [word for word in words if word not in errors[0][1]]
    if lacking:
        raise Differs(f"{what}: {lacking} not in {errors[0][1]!r}")


Full = dict[str, Any]


def check_keys(where: str, got: Mapping[Any, Any], want: Mapping[Any, Any]) -> None:
    lacks, extra = [k for k in want if k not in got], [k for k in got if k not in want]
    if lacks or extra:
        raise Differs(f"{where}: lacks {lacks}, has {extra} too many")


def check_close(where: str, got: Any, want: Any, rtol: float, atol: float) -> None:
    """As `check_value`, but floating tensors may differ by rounding."""
    if isinstance(want, Mapping) and isinstance(got, Mapping):
        check_keys(where, got, want)
        for key in want:
            check_close(f"{where}[{key!r}]", got[key], want[key], rtol, atol)
    elif isinstance(want, Tensor) and isinstance(got, Tensor) and want.is_floating_point():
        if got.dtype != want.dtype or got.shape != want.shape:
            raise Differs(f"{where}: {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}")
        if not torch.allclose(got, want, rtol=rtol, atol=atol):
            raise Differs(f"{where}: differs by up to {float((got - want).abs().max())}")
    else:
        check_value(where, got, want)


def tensors_in(value: Any, where: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{where}[{i}]")


def check_own_memory(full: Full, *others: Any) -> None:
    """Every tensor is on the CPU and has a storage of just its own size, shared with nothing in `full` or `others`."""
    seen = {t.untyped_storage().data_ptr(): f"a live tensor {where}" for where, t in tensors_in(others)}
    for where, tensor in tensors_in(full):
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or tensor.requires_grad:
            raise Differs(f"{where}: on {tensor.device}, requires_grad {tensor.requires_grad}")
        if storage.nbytes() != tensor.numel() * tensor.element_size():
            raise Differs(f"{where}: {tensor.numel()} elements in a storage of {storage.nbytes()} bytes")
        if storage.nbytes() and storage.data_ptr() in seen:
            raise Differs(f"{where}: shares its storage with {seen[storage.data_ptr()]}")
        seen[storage.data_ptr()] = where


def storages(value: Any) -> set[int]:
    """Addresses of the memory of all tensors."""
    pointers = {tensor.untyped_storage().data_ptr() for _, tensor in tensors_in(value)}
    return pointers - {0}  # tensors without elements


def gathered_state(model: Any, optim: Any) -> dict[str, Any]:
    """The weights of a model, and its optimizer's state by name, whole on all ranks and in the order of the names."""
    weights = fsdp_optim.gather_full_model_state_dict(model, recipient_rank=None)
    state = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None, key_by="name")
    return {"weights": dict(sorted((weights or {}).items())), "state": sorted_state((state or {})["state"])}
