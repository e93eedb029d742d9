"""Every verb on one wrapping, compared with the oracle."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim.testing import fairscale_on_cpu
from kit.compare import Differs, check_same
from kit.local_parts import local_of
from kit.models import Net
from kit.optimizers import adam, each_of
from kit.options import as_options
from kit.trained import STEPS, Oracle, Trained, known_oracle


def check_full(what: str, full: Any, wanted: Mapping[str, Any], **options: bool) -> None:
    """Raise unless a gathered dict by id equals the oracle's, `Oracle.full()`. `options` are those of `differences`."""
    if full is None:
        raise Differs(f"{what}: None")
    names = [group.get("param_names") for group in full["param_groups"]]
    check_same(f"{what}, param_names", names, [group["param_names"] for group in wanted["param_groups"]])
    check_same(f"{what}, state", by_name(full), by_name(wanted), **options)  # by name, because those errors say more
    check_same(f"{what}, state by id", dict.fromkeys(full["state"]), dict.fromkeys(wanted["state"]), **options)
    groups = [{key: group[key] for key in sorted(group)} for group in full["param_groups"]]
    wanted_groups = [{key: group[key] for key in sorted(group)} for group in wanted["param_groups"]]
    check_same(f"{what}, groups", groups, wanted_groups, **options)


def by_name(full: Mapping[str, Any]) -> dict[Any, Any]:
    """The state of a full dict by id, as {name: state}; without names, ids stay."""
    name_of = {i: n for g in full["param_groups"] for i, n in zip(g["params"], g["param_names"], strict=True)}
    return {name_of.get(i, i): values for i, values in full["state"].items()}


def check_named(what: str, full: Any, wanted: Mapping[str, Any]) -> None:
    """Raise unless a gathered dict by name has the state of `Oracle.by_name()`."""
    if full is None:
        raise Differs(f"{what}: None")
    check_same(what, full["state"], wanted)


def snapshot(trained: Trained) -> dict[str, Any]:
    """Everything that a call must not change: state and groups with identities, parameters and gradients."""
    optims, params = each_of(trained.optim), list(trained.model.parameters())
    return {
        **copies_of(trained.model, trained.optim),
        "identities": [
            (id(param), name, id(value))
            for optim in optims
            for param, values in optim.state.items()
            for name, value in values.items()
        ],
        "groups": [id(group) for optim in optims for group in optim.param_groups],
        "gradient identities": [id(param.grad) for param in params],
        "live": [id(param) for param in params],
        "random": torch.get_rng_state(),
    }


def copies_of(model: Any, optims: Any) -> dict[str, Any]:
    """Copies of this rank's part of a model, and of the optimizer or optimizers of it."""
    params = list(model.parameters())
    return {
        "optim": [_detached(optim.state_dict()) for optim in each_of(optims)],
        "values": [local_of(param).detach().clone() for param in params],
        "gradients": [None if p.grad is None else local_of(p.grad).clone() for p in params],
        "names": [name for name, _ in model.named_parameters()],
        "modes": [module.training for module in model.modules()],
    }


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return local_of(value).detach().clone()
    if isinstance(value, Mapping):
        return {key: _detached(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_detached(item) for item in value]
    return copy.deepcopy(value)


def check_trip(
    wrap: str | Callable[[nn.Module], Any],
    make: Any = adam,
    model: Callable[[], nn.Module] = Net,
    prepare: Callable[[nn.Module], Any] | None = None,
    before_calls: Callable[[Trained], Any] | None = None,
    ranks: Sequence[int] | None = None,
    unused: Collection[str] = (),
    oracle_make: Any = None,
    key_by: Any = "id",
    by_torch: bool = False,
    **kwargs: Any,
) -> dict[str, Any] | None:
    """On all `ranks` of a model (None: the world): every verb on one wrapping, compared with the oracle.

    `before_calls` gets every trained wrapping before anything is asked of the library (a forward pass, say).
    `unused`: parameters that never get a gradient. `oracle_make`: the optimizer whose full dict is wanted, where it is not
    what `make` makes. `key_by`: "name" where no order of ids is known. `kwargs` go to the collective verbs. Returns the first
    rank's full dict.
    """
    ranks = range(dist.get_world_size()) if ranks is None else ranks
    rank, first, last = dist.get_rank(), ranks[0], ranks[-1]
    plain_make = oracle_make or make
    oracle, further = (known_oracle(plain_make, steps, model, prepare, unused) for steps in (STEPS, STEPS + 2))
    trained, target = (Trained(wrap, make, steps, model, prepare, unused, by_torch) for steps in (STEPS, 0))
    if trained.process_group is not None:
        kwargs.setdefault("process_group", trained.process_group)
    for run in (trained, target) if before_calls is not None else ():
        before_calls(run)
    before = snapshot(trained)
    full = trained.gather(None, key_by, **kwargs)
    named = trained.gather(last, "name", **kwargs)
    listed = dict(
        fsdp_optim.iter_full_optim_state(
            trained.model, trained.optim, last, **as_options(fsdp_optim.CallOptions, **kwargs)
        )
    )
    check_same("the model and the optimizer, after gathering", snapshot(trained), before)

    untouched = snapshot(target)
    kept = copy.deepcopy((full, named))
    shard = target.shard(full)
    scattered = target.scatter(named, last, **kwargs)
    check_same("the model and the optimizer, after shard and scatter", snapshot(target), untouched)
    check_same("the full dicts, after shard and scatter", (full, named), kept)
    check_same("scatter's from names and get_shard's from ids", _detached(scattered), _detached(shard))
    fsdp_optim.load_optim_state_dict(target.optim, shard)
    with torch.no_grad():  # some optimizers' state depends on the parameters
        for param, source in zip(target.params, trained.params, strict=True):
            local_of(param).copy_(local_of(source))
    target.step(range(STEPS, STEPS + 2), unused)
    again = target.gather(last, key_by, **kwargs)

    def check(what: str, full: Any, wanted: Oracle) -> None:
        if key_by == "id":
            check_full(what, full, wanted.full())
        else:
            check_named(what, {"state": dict(sorted(full["state"].items()))}, dict(sorted(wanted.by_name().items())))

    check(f"rank {rank}, gathered to all", full, oracle)
    if rank != last and named is not None:
        raise Differs(f"rank {rank} got a {type(named).__name__}, but recipient_rank was {last}")
    wanted = oracle.by_name()
    order = oracle.names if key_by == "id" else list(full["param_groups"][0]["params"])
    if list(listed) != order:
        raise Differs(f"iter_full_optim_state names {list(listed)}, not {order}")
    if rank == last:
        check_named("gathered by name", named, {name: wanted[name] for name in order if name in wanted})
        check_same("iterated", {name: s for name, s in listed.items() if s}, named["state"])
        check("loaded, trained on, gathered again", again, further)
    return full if rank == first else None


@contextlib.contextmanager
def cpu() -> Iterator[None]:
    """A context in which fairscale runs without a GPU."""
    with fairscale_on_cpu():
        yield
