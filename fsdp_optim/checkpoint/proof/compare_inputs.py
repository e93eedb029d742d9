"""Compare what went into two steps: the loaded state, the param groups, random states and batches. All of it bit for bit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fsdp_optim.checkpoint.proof.findings import Compared, Finding, Pair
from fsdp_optim.checkpoint.proof.record import Batch, Groups, Measured, StateValues, Values, WentIn
from fsdp_optim.errors import shortened


def loaded_state(pair: Pair) -> Compared:
    """Compare the weights, buffers and moments before the step, and the modes of the modules."""
    then, now = pair.then.went_in, pair.now.went_in
    if then is None or now is None:
        run = "the saving run" if then is None else "this run"
        return Compared.without(f"the state that went into the step, because no forward pass of {run} was seen")
    pairs = [*_pairs(_flat(then), _flat(now))]
    cast = [name for name, a, b in pairs if a is not None and b is not None and a.dtype != b.dtype]
    findings = [*_modes(then, now), *_different(pairs, _by_bits(then))]
    skipped = (f"{shortened(cast)}, which have another dtype now",) if cast else ()
    return Compared(tuple(findings), len(pairs), skipped)


def _flat(state: WentIn) -> dict[str, Measured]:
    """Return all values by name, as messages call them."""
    return {**state.weights, **flat_moments(state.moments), **state.trees}


def flat_moments(moments: StateValues) -> dict[str, Measured]:
    """Return the moments by FQN and name, as messages call them."""
    return {f"{fqn}: {name}": value for fqn, values in moments.items() for name, value in values.items()}


def _by_bits(state: WentIn) -> Mapping[str, str]:
    """Digest -> the value that had it, of values large enough that equal ones are no coincidence."""
    return {value.bits: name for name, value in _flat(state).items() if value.numel > 1 and value.norm}


def _pairs(then: Values, now: Values) -> Iterator[tuple[str, Measured | None, Measured | None]]:
    for name in {**then, **now}:
        yield name, then.get(name), now.get(name)


def _different(
    pairs: Sequence[tuple[str, Measured | None, Measured | None]], known: Mapping[str, str]
) -> Iterator[Finding]:
    for name, then, now in pairs:
        if then is None or now is None:
            which = (
                "this run has it, and the saving run had not"
                if then is None
                else "the saving run had it, and this run has not"
            )
            yield Finding(f"{name}: {which}")
        elif then.numel != now.numel:
            yield Finding(f"{name}: had {then.numel} elements at the save, and has {now.numel}")
        elif then.dtype == now.dtype and then.bits != now.bits:
            yield Finding(f"{name}: {_how_it_differs(name, then, now, known)}")


def _how_it_differs(name: str, then: Measured, now: Measured, known: Mapping[str, str]) -> str:
    other = known.get(now.bits)
    if other is not None and other != name:
        return f"has the elements that {other} had"
    if then.num_nonfinite != now.num_nonfinite:
        return f"{then.num_nonfinite} elements were not finite, and {now.num_nonfinite} are now"
    if not then.has_dims:
        return f"was {then.norm:.9g}, and is {now.norm:.9g}"
    if f"{then.norm:.9g}" == f"{now.norm:.9g}":  # whose sums the ranks may have added in another order
        return f"has other bits, with the same norm {then.norm:.9g}"
    return f"had the norm {then.norm:.9g}, and has {now.norm:.9g}"


def _modes(then: WentIn, now: WentIn) -> Iterator[Finding]:
    for names, others, text in (
        (then.evaluated, now.evaluated, "was in eval mode, and is in training mode"),
        (now.evaluated, then.evaluated, "was in training mode, and is in eval mode"),
        (then.frozen, now.frozen, "required no gradient, and does now"),
        (now.frozen, then.frozen, "required a gradient, and does not now"),
    ):
        known = set(others)
        yield from (Finding(f"{name or 'the model'}: {text}") for name in names if name not in known)
    for alias in {**then.aliases, **now.aliases}:
        before, after = then.aliases.get(alias), now.aliases.get(alias)
        if before != after:
            how = f"was tied to {before}, and is not now" if after is None else f"is tied to {after} now"
            yield Finding(f"{alias}: {how}")


def groups(pair: Pair) -> Compared:
    """Compare the hyperparameters of the param groups in the optimizer's step."""
    then, now = pair.then, pair.now
    if then.has_updated != now.has_updated:
        return Compared()  # one of the two has none of the optimizer's step
    findings = [*_groups(then.groups, now.groups, "")]
    if not pair.has_same_ranks and then.other_groups and now.other_groups:
        return Compared(tuple(findings), 0, ("the param groups of each rank, which differ from each other",))
    for rank in {**then.other_groups, **now.other_groups}:
        before = then.other_groups.get(rank, then.groups)
        after = now.other_groups.get(rank, now.groups)
        findings += _groups(before, after, f" of rank {rank}")
    return Compared.of(findings)


def _groups(then: Groups, now: Groups, whose: str) -> Iterator[Finding]:
    if len(then) != len(now):
        yield Finding(f"the optimizer{whose} had {len(then)} param groups, and has {len(now)}")
        return
    for index, (a, b) in enumerate(zip(then, now, strict=True)):
        for key in {**a, **b}:
            if a.get(key) != b.get(key):
                values = f"was {a.get(key, 'absent')}, and is {b.get(key, 'absent')}"
                yield Finding(f"{key} of param group {index}{whose} {values}")


def random_states(pair: Pair) -> Compared:
    """Compare the random states of each rank before the step."""
    then, now = pair.then.random, pair.now.random
    if not pair.has_same_ranks:
        return Compared()
    findings, notes = list[Finding](), list[str]()
    for rank, (before, after) in enumerate(zip(then, now, strict=True)):
        names = [name for name in before.at_forward if before.at_forward[name] != after.at_forward.get(name)]
        for name in names:
            was_restored = before.at_start.get(name) == after.at_start.get(name)
            is_used = name in before.drawn_inside or name in after.drawn_inside
            text = f"the generator {name!r} of rank {rank} is in another state"
            if was_restored:
                here = name in after.drawn_before
                text += f": {'this run drew' if here else 'the saving run drew'} numbers between the "
                text += f"{'resume' if here else 'save'} and the step"
            if is_used or not was_restored:
                findings.append(Finding(text))
            else:
                notes.append(f"{text}, and the step draws none")
    return Compared(tuple(findings), 0, tuple(notes[:1]))


def batch_of_all(pair: Pair) -> Compared:
    """Compare the batches: of each rank where the model is cut alike, else the samples of all ranks together."""
    then, now = pair.then, pair.now
    if not any(then.batches) or not any(now.batches) or then.is_observed != now.is_observed:
        return Compared()
    if pair.is_alike or pair.has_same_batches:
        return Compared.of(_batches_of_ranks(then.batches, now.batches))
    return _samples(then.batches, now.batches)


def _batches_of_ranks(then: Sequence[Sequence[Batch]], now: Sequence[Sequence[Batch]]) -> Iterator[Finding]:
    rank_of = {batch.digest: rank for rank, batches in enumerate(then) for batch in batches}
    for rank, (before, after) in enumerate(zip(then, now, strict=True)):
        if len(before) != len(after):
            yield Finding(f"rank {rank} had {len(before)} forward passes in the step, and {len(after)} now")
            continue
        for number, (a, b) in enumerate(zip(before, after, strict=True)):
            if a.digest != b.digest:
                owner = rank_of.get(b.digest)
                which = f" {number + 1} of {len(before)}" if len(before) > 1 else ""
                how = f"has the batch that rank {owner} had" if owner is not None else "is another one"
                yield Finding(f"batch{which} of rank {rank} {how}")


def _samples(then: Sequence[Sequence[Batch]], now: Sequence[Sequence[Batch]]) -> Compared:
    before, after = ([batch for batches in ranks for batch in batches] for ranks in (then, now))
    shapes = {batch.row_shapes for batch in (*before, *after)}
    if len(shapes) != 1 or "" in shapes:
        return Compared.without("the batch, whose samples have other shapes at this world size")
    old, new = (_shares(batches) for batches in (before, after))
    if old == new:
        return Compared()
    num_new, num_missing = len(new.keys() - old.keys()), len(old.keys() - new.keys())
    if num_new:
        return Compared((Finding(f"{num_new} of {len(new)} samples were not in the step of the saving run"),))
    if num_missing:
        return Compared((Finding(f"{num_missing} of {len(old)} samples of the saving run's step are missing"),))
    num_other = sum(old[row] != new[row] for row in old)
    return Compared((Finding(f"{num_other} of {len(new)} samples are in the step more or less often than the others"),))


def _shares(batches: Sequence[Batch]) -> dict[str, int]:
    """Return digest of a sample -> how often it was given, without a common factor: ranks of a tensor-parallel group share."""
    counts = Counter(row for batch in batches for row in batch.rows)
    factor = math.gcd(*counts.values())
    return {row: count // factor for row, count in counts.items()}
