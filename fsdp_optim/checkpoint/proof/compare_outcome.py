"""Compare what two steps led to: bit for bit, and where bits differ, within the bounds of sums in another order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from fsdp_optim.checkpoint.proof.bounds import (
    LINEAR,
    MASTERS,
    distance,
    is_near,
    is_within,
    norm_of_all,
    rounding_in,
    rounding_of,
    tolerance_of,
)
from fsdp_optim.checkpoint.proof.compare_inputs import flat_moments
from fsdp_optim.checkpoint.proof.findings import Compared, Finding, Pair
from fsdp_optim.checkpoint.proof.record import Measured, Values
from fsdp_optim.tensors.memory import dtype_named

_LARGEST_PART = 0.5  # of the norm of all, of an update or a moment of which nothing is known


def observed(pair: Pair) -> Compared:
    """Compare digests that were observed on each rank."""
    if not pair.is_alike:
        return Compared()
    return Compared.of(
        Finding(f"{name} of rank {rank} is another one")
        for name, values in pair.then.observed.items()
        for rank, (a, b) in enumerate(zip(values, pair.now.observed.get(name, values), strict=True))
        if a != b
    )


def numbers(pair: Pair) -> Compared:
    """Compare numbers that were observed: those of each rank where the model is cut alike, else their mean."""
    if pair.why_not_outcome:
        return Compared()
    findings = []
    for name, before in pair.then.numbers.items():
        after = pair.now.numbers.get(name)
        if after is None:
            continue
        if not pair.is_alike:
            before, after = (_mean(before),), (_mean(after),)
        for rank, (a, b) in enumerate(zip(before, after, strict=True)):
            if a == b or (math.isnan(a) and math.isnan(b)):
                continue
            who = f"{name} of rank {rank}" if pair.is_alike else f"the mean {name} of all ranks"
            batch = ", for the same batch" if any(pair.then.batches) and any(pair.now.batches) else ""
            findings.append(Finding(f"{who} was {a:.9g}, and is {b:.9g}{batch}", not is_near(a, b, pair.tolerance)))
    return Compared.of(findings)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else math.nan


def gradients(pair: Pair) -> Compared:
    """Compare the gradients that the optimizer got."""
    then, now = pair.then.gradients, pair.now.gradients
    if pair.then.has_updated != pair.now.has_updated:
        made = "made no step, and makes one now" if pair.now.has_updated else "made a step, and makes none now"
        return Compared((Finding(f"the optimizer {made}"),))
    if not then or not now:
        return Compared()
    if pair.why_not_outcome:
        return Compared.without(pair.why_not_outcome)
    total = max(norm_of_all(then.values()), norm_of_all(now.values()))
    findings = list(_in_bounds(then, now, "its gradient", dict.fromkeys(then, total), pair))
    if not any(finding.is_fault for finding in findings):
        before, after = norm_of_all(then.values()), norm_of_all(now.values())
        if abs(before - after) > pair.tolerance * total:  # rounding adds little to a norm: it has no direction
            findings.append(Finding(f"all gradients together had the norm {before:.9g}, and have {after:.9g}"))
    return Compared.of(findings, len(then))


def moments(pair: Pair) -> Compared:
    """Compare the optimizer's state after the step: counts exactly, the rest within bounds."""
    then, now = flat_moments(pair.then.came_out.moments), flat_moments(pair.now.came_out.moments)
    exact = [name for name, value in then.items() if not value.has_dims or not rounding_of(dtype_named(value.dtype))]
    findings = list(_exact({name: then[name] for name in exact}, now))
    bounded = {name: value for name, value in then.items() if name not in set(exact)}
    if pair.why_not_outcome:
        return Compared(tuple(findings), len(exact), (pair.why_not_outcome,) if bounded else ())
    totals: dict[str, list[Measured]] = {}
    for name in bounded:
        both = [value for value in (then[name], now.get(name)) if value is not None]
        totals.setdefault(_kind(name), []).append(max(both, key=_norm))
    norms = {kind: norm_of_all(values) for kind, values in totals.items()}
    more = {name: _more_of_moment(name, norms[_kind(name)], pair) for name in bounded}
    findings += _in_bounds(bounded, now, "", {name: norms[_kind(name)] for name in bounded}, pair, more)
    findings += [
        Finding(f"{name}: the saving run had no such state after the step") for name in now if name not in then
    ]
    return Compared.of(findings, len(then))


def _more_of_moment(name: str, norm: float, pair: Pair) -> float:
    """Return how far a moment may be away besides what rounding makes of a sum. `norm`: of all moments of its name."""
    fqn, _, kind = name.rpartition(": ")
    spreads = [record.came_out.spread for record in (pair.then, pair.now)]
    if kind in MASTERS and any(fqn in spread for spread in spreads):
        return max(spread.get(fqn, 0.0) for spread in spreads)
    if kind in LINEAR:
        return max(spread.get(name, 0.0) for spread in spreads)
    return _LARGEST_PART * norm


def _kind(name: str) -> str:
    return name.rpartition(": ")[2]


def _norm(value: Measured) -> float:
    return value.norm


def weights(pair: Pair) -> Compared:
    """Compare the parameters after the step."""
    buffers_of = set(pair.then.came_out.buffers)
    then = {name: value for name, value in pair.then.came_out.weights.items() if name not in buffers_of}
    if pair.why_not_outcome:
        return Compared.without(pair.why_not_outcome)
    now = pair.now.came_out.weights
    bounds = _bounds_of_weights(pair, then)
    findings = []
    for name, before in then.items():
        after = now.get(name)
        if after is None:
            findings.append(Finding(f"{name}: the saving run had it after the step, and this run has not"))
        elif before.bits != after.bits and before.dtype == after.dtype:
            bound = 0.0 if pair.has_same_gradients else bounds[name]
            findings.append(_away(f"{name}:", before, after, bound))
    return Compared.of(findings, len(then))


def _bounds_of_weights(pair: Pair, then: Values) -> dict[str, float]:
    """Return how far each weight may be away, as a norm."""
    spread, other = pair.then.came_out.spread, pair.now.came_out.spread
    went_in = pair.then.went_in
    updates = {
        name: distance(went_in.weights[name].projections, value.projections)
        for name, value in then.items()
        if went_in is not None and name in went_in.weights
    }
    all_updates = math.hypot(*(update for update in updates.values() if math.isfinite(update)))
    bounds = {}
    for name, value in then.items():
        kept = rounding_of(dtype_named(value.dtype)) * value.norm
        if name in spread or name in other:
            bounds[name] = kept + max(spread.get(name, 0.0), other.get(name, 0.0))
        else:
            bounds[name] = kept + _LARGEST_PART * all_updates
    return bounds


def buffers(pair: Pair) -> Compared:
    """Compare the buffers after the step."""
    names = pair.then.came_out.buffers
    then, now = pair.then.came_out.weights, pair.now.came_out.weights
    if pair.why_not_outcome:
        return Compared()
    both = {name: then[name] for name in names if name in then and name in now}
    floats = {name: value for name, value in both.items() if value.has_dims and rounding_of(dtype_named(value.dtype))}
    findings = [*_exact({name: value for name, value in both.items() if name not in floats}, now)]
    findings += _in_bounds(
        floats, now, "", {name: max(value.norm, now[name].norm) for name, value in floats.items()}, pair
    )
    return Compared.of(findings, len(both))


def objects(pair: Pair) -> Compared:
    """Compare the objects of `state=` after the step."""
    findings = [*_texts("", pair.then.came_out.objects, pair.now.came_out.objects, pair)]
    trees, trees_now = pair.then.came_out.trees, pair.now.came_out.trees
    if not pair.why_not_outcome:
        both = {name: value for name, value in trees.items() if name in trees_now}
        findings += _trees(both, trees_now, pair)
    if pair.has_same_ranks:
        own = zip(pair.then.came_out.own_objects, pair.now.came_out.own_objects, strict=True)
        for rank, (then, now) in enumerate(own):
            findings += _texts(f" of rank {rank}", then, now, pair)
    return Compared.of(findings)


def _trees(then: Values, now: Values, pair: Pair) -> Iterator[Finding]:
    """Yield the trees with other bits. Such as averages follow the weights, and may be as far away as these."""
    weights = pair.then.came_out.weights
    of_weights = _bounds_of_weights(pair, weights)
    by_numel: dict[int, float] = {}
    for name, weight in weights.items():
        by_numel[weight.numel] = max(by_numel.get(weight.numel, 0.0), of_weights[name])
    for name, before in then.items():
        after = now[name]
        if before.bits != after.bits:
            fqn = next((fqn for fqn in weights if name.endswith(f".{fqn}")), None)
            away = of_weights[fqn] if fqn is not None else by_numel.get(before.numel, 0.0)
            rounding = max(rounding_in(before, pair.rounding), rounding_in(after, pair.rounding))
            bound = away + tolerance_of(rounding) * max(before.norm, after.norm)
            yield _away(f"{name}:", before, after, 0.0 if pair.has_same_gradients else bound)


def _texts(
    whose: str, then: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]], pair: Pair
) -> Iterator[Finding]:
    for name in then:
        before, after = then[name], now.get(name, {})
        for path in {**before, **after}:
            a, b = before.get(path, "absent"), after.get(path, "absent")
            if a != b:
                near = _are_near(a, b, pair)
                if near or not pair.why_not_outcome or not _is_float(a):
                    yield Finding(f"state[{name!r}]{whose}: {path or 'its value'} was {a}, and is {b}", not near)


def _is_float(text: str) -> bool:
    return _float_of(text) is not None or text.startswith("tensor(")


def _are_near(a: str, b: str, pair: Pair) -> bool:
    then, now = _float_of(a), _float_of(b)
    return then is not None and now is not None and is_near(then, now, pair.tolerance)


def _float_of(text: str) -> float | None:
    """Return a floating number from its text; None for an integer, and for anything else."""
    if text.lstrip("-").isdigit():
        return None
    try:
        return float(text)
    except ValueError:
        return None


def _exact(then: Values, now: Values) -> Iterator[Finding]:
    for name, before in then.items():
        after = now.get(name)
        if after is None:
            yield Finding(f"{name}: the saving run had it after the step, and this run has not")
        elif before.bits != after.bits:
            yield Finding(f"{name}: was {before.norm:.9g}, and is {after.norm:.9g}")


def _in_bounds(
    then: Values,
    now: Values,
    what: str,
    norms: Mapping[str, float],
    pair: Pair,
    more: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[Finding]:
    """Yield the values with other bits.

    `norms`: the norm in whose parts each may differ. `more`: how far each may be away besides.
    """
    for name, before in then.items():
        after = now.get(name)
        where = f"{name}: {what}" if what else f"{name}:"
        if after is None:
            yield Finding(f"{where} is absent now".replace(": is", ": it is"))
        elif before.bits != after.bits:
            rounding = max(rounding_in(before, pair.rounding), rounding_in(after, pair.rounding))
            bound = tolerance_of(rounding) * norms[name] + more.get(name, 0.0)
            yield _away(where, before, after, 0.0 if pair.has_same_gradients and not what else bound)


def _away(where: str, before: Measured, after: Measured, bound: float) -> Finding:
    """Return the finding about a value with other bits. `bound`: as a norm; 0 where none can be explained."""
    apart = distance(before.projections, after.projections)
    near = bound > 0 and is_within(apart, bound) and before.num_nonfinite == after.num_nonfinite
    return Finding(f"{where} {_apart(before, after, apart, bound)}", not near)


def _apart(before: Measured, after: Measured, apart: float, bound: float) -> str:
    if before.num_nonfinite != after.num_nonfinite:
        return f"had {before.num_nonfinite} elements that are not finite, and has {after.num_nonfinite}"
    explained = f"rounding explains {bound:.3g}" if bound else "the gradients are the same, bit for bit"
    return f"had the norm {before.norm:.9g}, and has {after.norm:.9g}; the difference is about {apart:.3g}, and {explained}"
