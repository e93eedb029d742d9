"""The verdict about two records of a step, made by hand: the first cause, bits and bounds, what cannot be compared."""

from __future__ import annotations

import unittest
from typing import Any

from msgspec import structs
from parameterized import parameterized

from fsdp_optim.checkpoint.proof.record import Batch, CameOut, Measured, Random, StepRecord, WentIn
from fsdp_optim.checkpoint.proof.verdict import verdict
from fsdp_optim.wire import decode, encode

EPS = 2.0**-23


def value(bits: str, norm: float = 1.0, away: float = 0.0, **others: Any) -> Measured:
    """A weight of 100 elements whose projections are `away` from those of another one."""
    return Measured(bits, "float32", 100, norm, 0, tuple(sign + away for sign in (1.0, -2.0, 0.5, 3.0)), **others)


STEP = Measured("5", "float32", 1, 5.0, 0, (5.0,) * 4, has_dims=False)
RECORD = StepRecord(
    saved_step=4,
    step=5,
    world_size=2,
    structure="fsdp2 on 2",
    rounding=EPS,
    went_in=WentIn(
        weights={"a": value("1"), "b": value("2"), "a.mean": value("3")},
        moments={"a": {"exp_avg": value("4"), "step": STEP}, "b": {"exp_avg": value("6"), "step": STEP}},
        aliases={"head": "a"},
    ),
    groups=({"lr": "0.1"}, {"lr": "0.2"}),
    random=(Random({"torch": "f"}, {"torch": "f"}, {"torch": "f"}),) * 2,
    batches=((Batch("x", ("1", "2"), "int64 [3]"),), (Batch("y", ("3", "4"), "int64 [3]"),)),
    numbers={"loss": (1.0, 2.0)},
    observed={"mask": ("m", "n")},
    gradients={"a": value("7"), "b": value("8")},
    came_out=CameOut(
        weights={"a": value("9", away=0.1), "b": value("10", away=0.1), "a.mean": value("11")},
        moments={"a": {"exp_avg": value("12"), "step": STEP}, "b": {"exp_avg": value("13"), "step": STEP}},
        buffers=("a.mean",),
        spread={"a": 1e-4, "b": 1e-4},
        objects={"scheduler": {"last_epoch": "5", "lr": "0.1"}},
        own_objects=({"loader": {"position": "7"}}, {"loader": {"position": "8"}}),
    ),
)
ELSEWHERE = structs.replace(
    RECORD,
    world_size=1,
    structure="plain",
    random=RECORD.random[:1],
    batches=((Batch("z", ("4", "2", "1", "3"), "int64 [3]"),),),
    numbers={"loss": (1.5,)},
    observed={},
    came_out=structs.replace(RECORD.came_out, own_objects=({"loader": {"position": "15"}},)),
)


def changed(record: StepRecord, path: str, new: Any) -> StepRecord:
    """A record with another value at a path of fields."""
    name, _, rest = path.partition(".")
    return structs.replace(record, **{name: changed(getattr(record, name), rest, new) if rest else new})


def with_value(record: StepRecord, path: str, name: str, new: Measured | None) -> StepRecord:
    """A record with another value of a name in a mapping at a path; None: without it."""
    mapping: Any = record
    for field in path.split("."):
        mapping = getattr(mapping, field)
    rest = {key: known for key, known in mapping.items() if key != name}
    return changed(record, path, rest if new is None else {**rest, name: new})


def with_moment(record: StepRecord, path: str, fqn: str, name: str, new: Measured) -> StepRecord:
    mapping: Any = record
    for field in path.split("."):
        mapping = getattr(mapping, field)
    return changed(record, path, {**mapping, fqn: {**mapping[fqn], name: new}})


FAULTS: dict[str, tuple[StepRecord, str, str]] = {
    "weight": (
        with_value(RECORD, "went_in.weights", "b", value("0", 1.5)),
        "the loaded state",
        "b: had the norm 1, and has 1.5",
    ),
    "weights exchanged": (
        with_value(RECORD, "went_in.weights", "b", value("1")),
        "the loaded state",
        "b: has the elements that a had",
    ),
    "moment": (
        with_moment(RECORD, "went_in.moments", "a", "exp_avg", value("0", 0.0)),
        "the loaded state",
        "a: exp_avg: had the norm 1, and has 0",
    ),
    "step": (
        with_moment(RECORD, "went_in.moments", "a", "step", structs.replace(STEP, bits="0", norm=6.0)),
        "the loaded state",
        "a: step: was 5, and is 6",
    ),
    "lost weight": (with_value(RECORD, "went_in.weights", "b", None), "the loaded state", "b: the saving run had it"),
    "not finite": (
        with_value(RECORD, "went_in.weights", "b", structs.replace(value("0"), num_nonfinite=3)),
        "the loaded state",
        "b: 0 elements were not finite, and 3 are now",
    ),
    "buffer that went in": (
        with_value(RECORD, "went_in.weights", "a.mean", value("0")),
        "the loaded state",
        "a.mean: has other",
    ),
    "untied": (changed(RECORD, "went_in.aliases", {}), "the loaded state", "head: was tied to a, and is not now"),
    "frozen": (
        changed(RECORD, "went_in.frozen", ("a",)),
        "the loaded state",
        "a: required a gradient, and does not now",
    ),
    "eval": (
        changed(RECORD, "went_in.evaluated", ("",)),
        "the loaded state",
        "the model: was in training mode, and is in eval",
    ),
    "lr": (
        changed(RECORD, "groups", ({"lr": "0.1"}, {"lr": "0.4"})),
        "the param groups",
        "lr of param group 1 was 0.2, and is 0.4",
    ),
    "group": (changed(RECORD, "groups", ({"lr": "0.1"},)), "the param groups", "had 2 param groups, and has 1"),
    "random": (
        changed(RECORD, "random", (RECORD.random[0], Random({"torch": "o"}, {"torch": "o"}, {"torch": "o"}))),
        "the random states",
        "the generator 'torch' of rank 1 is in another state",
    ),
    "batch": (
        changed(RECORD, "batches", (RECORD.batches[0], (Batch("q", ("9", "4"), "int64 [3]"),))),
        "the batch",
        "batch of rank 1 is another one",
    ),
    "batches exchanged": (
        changed(RECORD, "batches", RECORD.batches[::-1]),
        "the batch",
        "batch of rank 0 has the batch that rank 1 had",
    ),
    "accumulation": (
        changed(RECORD, "batches", (RECORD.batches[0] * 2, RECORD.batches[1])),
        "the batch",
        "rank 0 had 1 forward passes in the step, and 2 now",
    ),
    "observed": (changed(RECORD, "observed", {"mask": ("m", "o")}), "observed values", "mask of rank 1 is another one"),
    "loss": (
        changed(RECORD, "numbers", {"loss": (1.0, 2.1)}),
        "observed numbers",
        "loss of rank 1 was 2, and is 2.1, for the same batch",
    ),
    "gradient": (
        with_value(RECORD, "gradients", "b", value("0", away=0.3)),
        "the gradients",
        "b: its gradient had the norm",
    ),
    "weight after": (
        with_value(RECORD, "came_out.weights", "b", value("0", away=0.2)),
        "the weights",
        "b: had the norm",
    ),
    "moment after": (
        with_moment(RECORD, "came_out.moments", "b", "exp_avg", value("0", away=0.3)),
        "the moments",
        "b: exp_avg: had the norm",
    ),
    "step after": (
        with_moment(RECORD, "came_out.moments", "b", "step", structs.replace(STEP, bits="0", norm=7.0)),
        "the moments",
        "b: step: was 5, and is 7",
    ),
    "buffer": (
        with_value(RECORD, "came_out.weights", "a.mean", value("0", away=0.5)),
        "the buffers",
        "a.mean: had the norm",
    ),
    "schedule": (
        changed(RECORD, "came_out.objects", {"scheduler": {"last_epoch": "6", "lr": "0.1"}}),
        "the objects of state=",
        "state['scheduler']: last_epoch was 5, and is 6",
    ),
    "loader": (
        changed(RECORD, "came_out.own_objects", (RECORD.came_out.own_objects[0], {"loader": {"position": "9"}})),
        "the objects of state=",
        "state['loader'] of rank 1: position was 8, and is 9",
    ),
}


class VerdictTest(unittest.TestCase):
    def test_equal_records_are_identical(self) -> None:
        proof = verdict(RECORD, RECORD)
        self.assertEqual((proof.outcome, proof.cause), ("identical", ""))
        self.assertEqual(str(proof), f"resume proven: step 5 is bit-identical ({proof.num_values} values)")
        self.assertEqual(proof.num_values, 7 + 2 + 2 + 4 + 1)  # went in, gradients, weights, moments, buffer

    @parameterized.expand(sorted(FAULTS))
    def test_the_cause_is_named(self, name: str) -> None:
        now, cause, text = FAULTS[name]
        proof = verdict(RECORD, now)
        self.assertEqual((proof.outcome, proof.cause), ("different", cause), str(proof))
        self.assertIn(text, str(proof))
        self.assertIn("step 5 after the checkpoint of step 4", str(proof))

    def test_the_first_cause_counts(self) -> None:
        both = changed(FAULTS["lr"][0], "numbers", {"loss": (9.0, 9.0)})
        self.assertEqual(verdict(RECORD, both).cause, "the param groups")

    @parameterized.expand(sorted(set(FAULTS) - {"random", "batches exchanged", "accumulation", "observed", "loader"}))
    def test_at_another_world_size(self, name: str) -> None:
        """What went in is compared bit for bit there too, and what came out by its bounds."""
        fault, cause, _ = FAULTS[name]
        other_batch = ((Batch("z", ("1", "2", "9", "4"), "int64 [3]"),),)
        now = structs.replace(
            fault,
            world_size=1,
            structure="plain",
            random=ELSEWHERE.random,
            observed={},
            batches=other_batch if name == "batch" else ELSEWHERE.batches,
            numbers={"loss": (sum(fault.numbers["loss"]) / 2,)},
            came_out=structs.replace(fault.came_out, own_objects=ELSEWHERE.came_out.own_objects),
        )
        proof = verdict(RECORD, now)
        self.assertEqual((proof.outcome, proof.cause), ("different", cause), str(proof))

    def test_rounding_at_another_world_size_is_no_fault(self) -> None:
        now = with_value(ELSEWHERE, "gradients", "b", value("0", away=1e-6))
        now = with_value(now, "came_out.weights", "b", value("0", away=0.1 + 1e-5))
        proof = verdict(RECORD, with_moment(now, "came_out.moments", "b", "exp_avg", value("0", away=1e-6)))
        self.assertEqual(proof.outcome, "rounding", str(proof))
        self.assertIn("sums of 2 ranks are made by 1 now", str(proof))

    def test_other_bits_in_the_same_structure_are_not_blamed_within_bounds(self) -> None:
        proof = verdict(RECORD, with_value(RECORD, "gradients", "b", value("0", away=1e-6)))
        self.assertEqual(proof.outcome, "rounding", str(proof))
        self.assertIn("not bit-repeatable: b: its gradient", str(proof))

    def test_coarse_dtypes_have_coarse_bounds(self) -> None:
        now = with_value(RECORD, "gradients", "b", value("0", away=0.01))
        self.assertEqual(verdict(RECORD, now).cause, "the gradients")
        self.assertEqual(verdict(RECORD, structs.replace(now, rounding=2.0**-7)).outcome, "rounding")

    @parameterized.expand([("dropout",), ("batch norm",)])
    def test_what_depends_on_the_ranks_is_not_compared_at_another_number(self, reason: str) -> None:
        now = with_value(ELSEWHERE, "gradients", "b", value("0", away=5.0))
        if reason == "dropout":
            now = structs.replace(now, random=(Random({"torch": "s"}, {"torch": "f"}, {"torch": "u"}),))
        else:
            now = structs.replace(now, depends_on_ranks="BatchNorm1d takes the statistics of each rank's own batch")
        proof = verdict(RECORD, now)
        self.assertEqual(proof.outcome, "identical", str(proof))
        self.assertIn("not compared: the results of the step", str(proof))
        wrong = with_moment(now, "came_out.moments", "b", "step", structs.replace(STEP, bits="0", norm=7.0))
        self.assertEqual(verdict(RECORD, wrong).cause, "the moments")  # counts are exact everywhere

    def test_random_numbers_drawn_before_a_step_that_draws_none_are_a_note(self) -> None:
        now = changed(RECORD, "random", (Random({"torch": "f"}, {"torch": "g"}, {"torch": "g"}),) * 2)
        proof = verdict(RECORD, now)
        self.assertEqual(proof.outcome, "identical", str(proof))
        self.assertIn("this run drew numbers between the resume and the step", str(proof))
        drawing = changed(RECORD, "random", (Random({"torch": "f"}, {"torch": "g"}, {"torch": "h"}),) * 2)
        self.assertEqual(verdict(RECORD, drawing).cause, "the random states")

    def test_samples_of_other_shapes_are_not_compared(self) -> None:
        now = structs.replace(ELSEWHERE, batches=((Batch("z", ("9",), "int64 [4]"),),))
        proof = verdict(RECORD, now)
        self.assertEqual(proof.outcome, "identical", str(proof))
        self.assertIn("the batch, whose samples have other shapes", str(proof))

    def test_a_cast_is_said(self) -> None:
        cast = structs.replace(value("0"), dtype="bfloat16")
        proof = verdict(RECORD, with_value(RECORD, "went_in.weights", "b", cast))
        self.assertIn("b, which have another dtype now", str(proof))

    def test_another_step_is_unknown(self) -> None:
        proof = verdict(RECORD, structs.replace(RECORD, step=7))
        self.assertEqual(proof.outcome, "unknown")
        self.assertIn("recorded step 5 after this checkpoint, and this run made step 7", str(proof))

    def test_norms_whose_squares_are_no_floats(self) -> None:
        large = structs.replace(value("0", 1e200), dtype="float64", projections=(1e200, -1e200, 1e199, 3e200))
        for path, outcome in (("gradients", "rounding"), ("came_out.weights", "different")):
            then, now = (with_value(RECORD, path, "b", structs.replace(large, bits=bits)) for bits in "01")
            self.assertEqual(verdict(then, now).outcome, outcome, path)

    def test_a_record_survives_its_text(self) -> None:
        self.assertEqual(decode(StepRecord, encode(RECORD)), RECORD)
