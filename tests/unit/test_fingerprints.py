"""What two fingerprints say about each other, and their JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import unittest

import torch
from kit.prints import print_of

from fsdp_optim import Difference, Fingerprint, StateError, ValueFingerprint

_GENERATOR = torch.Generator().manual_seed(0)
A, B, C = (torch.randn(4, 3, generator=_GENERATOR) for _ in range(3))
ALL = Fingerprint(
    {"a": print_of(A), "b": print_of(B)},
    {"a": {"exp_avg": print_of(A * 2), "exp_avg_sq": print_of(A * A)}, "b": {"exp_avg": print_of(B * 2)}},
    {"ema.a": print_of(C, 2)},
)


def changed(half: str, fqn: str, value: ValueFingerprint, name: str = "") -> Fingerprint:
    """ALL with another value in one place."""
    values = dict(getattr(ALL, half))
    values[fqn] = {**values[fqn], name: value} if name else value
    return dataclasses.replace(ALL, **{half: values})


class TestDifferences(unittest.TestCase):
    def check(self, other: Fingerprint, *expected: tuple[str, str]) -> tuple[Difference, ...]:
        differences = ALL.differences(other)
        self.assertEqual([(difference.value, difference.kind) for difference in differences], list(expected))
        self.assertEqual(len(other.differences(ALL)), len(expected))
        return differences

    def test_equal(self) -> None:
        self.check(ALL)
        # The last digits of floats depend on the order of a sum, and are not compared.
        self.check(changed("weights", "a", dataclasses.replace(print_of(A), norm=3.0, projections=(1.0,))))

    def test_other_values(self) -> None:
        (difference,) = self.check(changed("weights", "b", print_of(B * 1.5)), ("b", "values"))
        self.assertRegex(str(difference), r"^b: has other elements \(norm .* here, .* there\)$")
        (difference,) = self.check(changed("optim", "a", print_of(A * -2), "exp_avg"), ("a:exp_avg", "values"))
        self.assertIn("of the same norm", str(difference))
        (difference,) = self.check(changed("optim", "a", print_of(A * 0), "exp_avg"), ("a:exp_avg", "values"))
        self.assertRegex(str(difference), r"\(all zeros there, norm .* here\)")
        (difference,) = self.check(changed("state", "ema.a", print_of(C * math.nan)), ("state['ema.a']", "values"))
        self.assertIn("0 elements are not finite here, 12 there", str(difference))

    def test_exchanged(self) -> None:
        both = dataclasses.replace(ALL, weights={"a": print_of(B), "b": print_of(A)})
        difference, other = self.check(both, ("a", "exchanged"), ("b", "exchanged"))
        self.assertEqual((difference.partner, other.partner), (("b", ""), ("a", "")))
        self.assertEqual(str(difference), "a: was exchanged with b")
        moments = {"exp_avg": print_of(A * A), "exp_avg_sq": print_of(A * 2)}
        difference, _ = self.check(
            dataclasses.replace(ALL, optim={**ALL.optim, "a": moments}),
            ("a:exp_avg", "exchanged"),
            ("a:exp_avg_sq", "exchanged"),
        )
        self.assertEqual(str(difference), "a:exp_avg: was exchanged with a:exp_avg_sq")

    def test_rotated_is_not_exchanged(self) -> None:
        """Each of three has the elements of the next one: the texts say so."""
        here = Fingerprint({"a": print_of(A), "b": print_of(B), "c": print_of(C)})
        there = Fingerprint({"a": print_of(B), "b": print_of(C), "c": print_of(A)})
        difference, *_ = here.differences(there)
        self.assertEqual((difference.kind, difference.partner), ("values", ("c", "")))
        self.assertIn("a: has other elements, which c has there", str(difference))

    def test_equal_values_are_not_exchanged(self) -> None:
        here = Fingerprint({"a": print_of(A), "b": print_of(B), "c": print_of(B)})
        there = Fingerprint({"a": print_of(B), "b": print_of(B), "c": print_of(B)})
        (difference,) = here.differences(there)
        self.assertEqual((difference.fqn, difference.kind, difference.partner), ("a", "values", None))

    def test_dtype_and_shape(self) -> None:
        (difference,) = self.check(changed("weights", "a", print_of(A.bfloat16())), ("a", "dtype"))
        self.assertEqual(str(difference), "a: is float32 here and bfloat16 there")
        (difference,) = self.check(changed("weights", "a", print_of(A.view(3, 4))), ("a", "shape"))
        self.assertEqual(str(difference), "a: has the shape [4, 3] here and [3, 4] there")

    def test_missing(self) -> None:
        difference, other = self.check(
            dataclasses.replace(ALL, weights={"a": print_of(A), "new": print_of(A)}),
            ("b", "missing there"),
            ("new", "missing here"),
        )
        self.assertEqual((str(difference), str(other)), ("b: is here alone", "new: is not here"))
        self.assertEqual((other.here, other.there), (None, print_of(A)))


class TestJson(unittest.TestCase):
    def test_and_back(self) -> None:
        odd = Fingerprint(
            {"x": ValueFingerprint(1 << 127, "float8_e4m3fn", (), math.inf, 3, (1.5, -math.inf))},
            {"x": {"step": ValueFingerprint(7, "int", (), 3.0), "m": ValueFingerprint(8, "float32", (2,), 1.0, 1)}},
        )
        for given in (ALL, odd, Fingerprint()):
            back = Fingerprint.from_json(given.to_json())
            self.assertEqual(back, given)
            for half in ("weights", "optim", "state"):
                for key, value in given.values_of(half).items():
                    again = back.values_of(half)[key]
                    self.assertEqual((again.norm, again.projections), (value.norm, value.projections))
            self.assertEqual(back.to_json(), given.to_json())
        self.assertEqual(json.loads(odd.to_json())["weights"]["x"][0], "8" + "0" * 31)

    def test_other_text_is_refused(self) -> None:
        for text in (
            "",
            "{}",
            "[]",
            '{"fingerprint": 1}',
            '{"fingerprint": 1, "weights": {"a": [1]}, "optim": {}, "state": {}}',
            '{"fingerprint": 1, "weights": {"a": ["1", "int", [], 1%s]}, "optim": {}, "state": {}}' % ("0" * 400),
            "[" * 100_000,
        ):
            with self.assertRaisesRegex(StateError, "not the JSON of a fingerprint"):
                Fingerprint.from_json(text)
        with self.assertRaisesRegex(StateError, "of version 2, and this version of fsdp_optim makes"):
            Fingerprint.from_json(ALL.to_json().replace('"fingerprint": 1', '"fingerprint": 2'))

    def test_repr(self) -> None:
        self.assertEqual(repr(ALL), "Fingerprint(2 weights, 3 optimizer values, 1 other value)")
        self.assertEqual(len(ALL), 6)
        self.assertRegex(
            repr(print_of(A)), r"^ValueFingerprint\([0-9a-f]{32}, float32, shape=\(4, 3\), norm=[0-9.]+\)$"
        )
