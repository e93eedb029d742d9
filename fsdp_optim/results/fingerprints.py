"""Fingerprints of models and optimizers: what `fingerprint` returns, how two are compared, and their text as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

from fsdp_optim.errors import StateError, counted_noun, shortened

_VERSION = 1
"""The number of the function that makes the bits. Fingerprints of another number cannot be compared."""

_HALVES = ("weights", "optim", "state")

DifferenceKind = Literal["values", "exchanged", "dtype", "shape", "missing here", "missing there"]


@dataclass(frozen=True)
class ValueFingerprint:
    """The fingerprint of one value: equal for equal values, however they are cut, on any device.

    Two are equal if bits, dtype, shape and `num_nonfinite` are. The floats are sums whose last digits depend on the order of
    the summands, and so on the sharding: they are not compared.

    Attributes:
        bits: 128 bits of the dtype's raw bits and the index of every element: 0.0 and -0.0 differ, and so do NaNs.
        dtype: `float32`; for a value that is no tensor, the name of its type in Python.
        shape: the unsharded shape; empty for a value that is no tensor.
        norm: the 2-norm of the elements that are finite, in float64; 0 where elements are no numbers.
        num_nonfinite: how many elements are NaN or infinite.
        projections: for each j the sum over elements i of s(j, i) * value[i], in float64: s is 1 or -1 at random, a fixed
            function of j and of the row-major index i. Elements that are not finite count as 0, and complex numbers as pairs.
    """

    bits: int
    dtype: str
    shape: tuple[int, ...] = ()
    norm: float = field(default=0.0, compare=False)
    num_nonfinite: int = 0
    projections: tuple[float, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        special = f", num_nonfinite={self.num_nonfinite}" if self.num_nonfinite else ""
        return f"ValueFingerprint({self.bits:032x}, {self.dtype}, shape={self.shape}, norm={self.norm:.6g}{special})"


@dataclass(frozen=True)
class Difference:
    """One value that two fingerprints do not agree on. `str()` says it in a line.

    Attributes:
        half: "weights", "optim" or "state".
        fqn: the parameter or buffer, or the key of a value of `state=`.
        name: the name of the value of the optimizer's state; "" for weights and `state=`.
        kind: "values": other elements. "exchanged": the value has the elements that `partner` has in the other fingerprint, and
            the reverse. "dtype" or "shape": another one. "missing here", "missing there": only the other one, or only this one,
            has the value.
        here, there: the value in the fingerprint whose `differences` were asked, and in the other one; None where it is missing.
        partner: (FQN, name) of the value that has the same elements in the other fingerprint; None: there is no such value.
    """

    half: str
    fqn: str
    name: str
    kind: DifferenceKind
    here: ValueFingerprint | None
    there: ValueFingerprint | None
    partner: tuple[str, str] | None = None

    @property
    def value(self) -> str:
        """The name of the value: `0.weight`, `0.weight:exp_avg`, `state['ema.w']`."""
        return _shown(self.half, self.fqn, self.name)

    def __str__(self) -> str:
        here, there = self.here, self.there
        if here is None or there is None:
            return f"{self.value}: {'is not here' if here is None else 'is here alone'}"
        if self.kind == "exchanged" and self.partner is not None:
            return f"{self.value}: was exchanged with {_shown(self.half, *self.partner)}"
        if self.kind == "dtype":
            return f"{self.value}: is {here.dtype} here and {there.dtype} there"
        if self.kind == "shape":
            return f"{self.value}: has the shape {list(here.shape)} here and {list(there.shape)} there"
        copied = f", which {_shown(self.half, *self.partner)} has there" if self.partner is not None else ""
        return f"{self.value}: has other elements{copied} ({_norms(here, there)})"


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprints of all values of a model, an optimizer and other state: the same on all ranks, and for every sharding.

    Attributes:
        weights: parameters and buffers by FQN, and other entries of the model's state_dict().
        optim: FQN -> name -> each value of the optimizer's state.
        state: the values of `state=` by key: `ema.w` for state={"ema": {"w": ...}}. A value of each rank's own has
            `loader[rank 3]`, the number counting the ranks of the call.
    """

    weights: Mapping[str, ValueFingerprint] = field(default_factory=dict)
    optim: Mapping[str, Mapping[str, ValueFingerprint]] = field(default_factory=dict)
    state: Mapping[str, ValueFingerprint] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.weights) + sum(map(len, self.optim.values())) + len(self.state)

    def values_of(self, half: str) -> dict[tuple[str, str], ValueFingerprint]:
        """Return the values of one half by (FQN or key, name); the name is "" but for the optimizer.

        Args:
            half: "weights", "optim" or "state".
        """
        if half == "optim":
            return {(fqn, name): value for fqn, values in self.optim.items() for name, value in values.items()}
        return {(fqn, ""): value for fqn, value in getattr(self, half).items()}

    def differences(self, other: Fingerprint) -> tuple[Difference, ...]:
        """Return how the values of `self` differ from those of another fingerprint: weights, optimizer and state, in this order.

        Args:
            other: the other fingerprint, of any sharding.
        """
        return tuple(
            difference
            for half in _HALVES
            for difference in _differences(half, self.values_of(half), other.values_of(half))
        )

    def to_json(self) -> str:
        """Return the fingerprint as JSON on one line. Bits are 32 hexadecimal digits."""
        optim = {fqn: _to_records(values) for fqn, values in self.optim.items()}
        records = {"weights": _to_records(self.weights), "optim": optim, "state": _to_records(self.state)}
        return json.dumps({"fingerprint": _VERSION, **records})

    @classmethod
    def from_json(cls, text: str | bytes) -> Fingerprint:
        """Return the fingerprint that `to_json` has written.

        Args:
            text: the JSON.

        Raises:
            StateError: the text is something else, or of another version of the library whose bits cannot be compared.
        """
        try:
            record = json.loads(text)
            version = record["fingerprint"]
            if version != _VERSION:
                raise StateError(
                    f"this is a fingerprint of version {version}, and this version of fsdp_optim makes and compares version "
                    f"{_VERSION}: make both fingerprints with one version"
                )
            optim = {fqn: _from_records(values) for fqn, values in record["optim"].items()}
            return cls(_from_records(record["weights"]), optim, _from_records(record["state"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"this is not the JSON of a fingerprint: {type(error).__name__}: {error}") from error

    def __repr__(self) -> str:
        nums = [
            counted_noun(num, noun)
            for num, noun in (
                (len(self.weights), "weight"),
                (sum(map(len, self.optim.values())), "optimizer value"),
                (len(self.state), "other value"),
            )
            if num
        ]
        return f"Fingerprint({', '.join(nums) or 'nothing'})"


def summary_of(differences: tuple[Difference, ...], most: int = 4) -> str:
    """Return differences as one text, for messages."""
    return shortened(map(str, differences), most, "; ")


def _differences(
    half: str, here: Mapping[tuple[str, str], ValueFingerprint], there: Mapping[tuple[str, str], ValueFingerprint]
) -> Iterator[Difference]:
    differing = [key for key, value in here.items() if key in there and value != there[key]]
    by_bits: dict[ValueFingerprint, list[tuple[str, str]]] = {}
    for key in differing:
        by_bits.setdefault(there[key], []).append(key)
    for key, value in here.items():
        other = there.get(key)
        if other is None:
            yield Difference(half, *key, "missing there", value, None)
        elif value != other:
            kind: DifferenceKind = (
                "dtype" if value.dtype != other.dtype else "shape" if value.shape != other.shape else "values"
            )
            partners = [partner for partner in by_bits.get(value, ()) if partner != key] if kind == "values" else []
            mutual = [partner for partner in partners if here[partner] == other]
            partner = next(iter(mutual or partners), None)
            yield Difference(half, *key, "exchanged" if mutual else kind, value, other, partner)
    for key, other in there.items():
        if key not in here:
            yield Difference(half, *key, "missing here", None, other)


def _shown(half: str, fqn: str, name: str) -> str:
    return f"state[{fqn!r}]" if half == "state" else f"{fqn}:{name}" if half == "optim" else fqn


def _norms(here: ValueFingerprint, there: ValueFingerprint) -> str:
    """Return what the norms of two values with other elements say."""
    if here.num_nonfinite != there.num_nonfinite:
        return f"{here.num_nonfinite} elements are not finite here, {there.num_nonfinite} there"
    if not here.norm and not there.norm:
        return "no norms"
    if not here.norm or not there.norm:
        zero, other = ("here", "there") if not here.norm else ("there", "here")
        return f"all zeros {zero}, norm {max(here.norm, there.norm):.6g} {other}"
    if abs(here.norm - there.norm) <= 1e-12 * max(here.norm, there.norm):
        return f"of the same norm {here.norm:.6g}: elements moved, or signs changed"
    return f"norm {here.norm:.9g} here, {there.norm:.9g} there"


def _to_records(values: Mapping[str, ValueFingerprint]) -> dict[str, list[Any]]:
    """Return [bits, dtype, shape, norm, `num_nonfinite`, projections] of each value, without defaults at the end."""
    records = {}
    for name, value in values.items():
        record: list[Any] = [f"{value.bits:032x}", value.dtype, list(value.shape), _to_number(value.norm)]
        if value.num_nonfinite or value.projections:
            record.append(value.num_nonfinite)
        if value.projections:
            record.append([_to_number(number) for number in value.projections])
        records[name] = record
    return records


def _from_records(records: Mapping[str, list[Any]]) -> dict[str, ValueFingerprint]:
    values = {}
    for key, record in records.items():
        bits, dtype, shape, norm, *rest = record
        num_nonfinite, projections = (*rest, 0, ())[:2] if not rest else (*rest, ())[:2]
        values[key] = ValueFingerprint(
            bits=int(bits, 16),
            dtype=str(dtype),
            shape=tuple(map(int, shape)),
            norm=float(norm),
            num_nonfinite=int(num_nonfinite),
            projections=tuple(map(float, projections)),
        )
    return values


def _to_number(value: float) -> float | str:
    return value if isfinite(value) else repr(value)  # JSON has no infinity
