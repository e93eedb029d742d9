"""Ids count in the order of the optimizer, and are refused where no order is right."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand
from kit.compare import check_refused, check_same, error_text
from kit.local_parts import like
from kit.optimizers import OfModel, adam
from kit.options import as_options
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import check_full, cpu
from kit.wraps import WRAPPERS
from parameterized import parameterized
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _NamedOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel

import fsdp_optim
from fsdp_optim.state.dicts.order import Counted, OrderedParam, count, merge
from fsdp_optim.testing import run_on_ranks

FLAT = ("fairscale flat", "FSDP1 flat")


class Parts(nn.Module):
    """Units of equal shapes, one of them with a unit inside, which only their order distinguishes."""

    units = ("body.1", "body", "head", "critic", "")
    tensor_parallel: Mapping[str, Any] = {"head": ColwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 3)
        self.critic = nn.Linear(3, 3)


def parts_of(model: Any) -> dict[str, list[nn.Parameter]]:
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return {name: list(getattr(inner, name).parameters()) for name in ("body", "head", "critic")}


def head_then_body(model: Any) -> Any:
    parts = parts_of(model)
    return adam([*parts["critic"], *parts["head"], *parts["body"]])


def turned_in_groups(model: Any) -> Any:
    parts = parts_of(model)
    groups = [{"params": [*parts["head"], *parts["body"]], "lr": 0.5}, {"params": parts["critic"], "lr": 0.25}]
    return torch.optim.Adam(groups, lr=0.1)


def actor_and_critic(model: Any) -> Any:
    """Two optimizers with equal hyperparameters, which the library reads as one."""
    parts = parts_of(model)
    return [adam([*parts["critic"]]), adam([*parts["body"], *parts["head"]])]


def backwards(model: Any) -> Any:
    parts = parts_of(model)
    return adam(list(reversed([*parts["body"], *parts["head"], *parts["critic"]])))


MAKERS: dict[str, Callable[[Any], Any]] = {
    "head, body": head_then_body,
    "groups": turned_in_groups,
    "backwards": backwards,
}


def ids_of_every_wrapper(names: Iterable[str], every: bool) -> None:
    with cpu():
        for place, wrapper in enumerate(names):
            # no unwrapped model lists whole units backwards
            makers = [what for what in MAKERS if what != "backwards" or wrapper not in FLAT]
            for what in makers if every else makers[place % len(makers) :][:1]:
                _ids_both_ways(f"{wrapper}, {what}", wrapper, MAKERS[what])
            if every or wrapper in (*FLAT, "FSDP2", "plain"):
                _as_one(wrapper)


def _ids_both_ways(what: str, wrapper: str, make: Callable[[Any], Any]) -> None:
    oracle, trained = (of(make=OfModel(make), model=Parts) for of in (Oracle, partial(Trained, wrapper)))
    full = trained.gather(None)
    check_full(what, full, oracle.full())
    plain = Oracle(OfModel(make), 0, Parts)
    plain.optim.load_state_dict(full)
    check_same(f"{what}, loaded by a plain optimizer", plain.by_name(), oracle.by_name())

    named = trained.gather(None, "name")
    listed = [name for group in full["param_groups"] for name in group["param_names"]]
    check_same(f"{what}, names in groups", [n for g in named["param_groups"] for n in g["params"]], listed)
    check_same(f"{what}, state by name", list(named["state"]), listed)
    iterated = fsdp_optim.iter_full_optim_state(
        trained.model,
        trained.optim,
        None,
        options=fsdp_optim.CallOptions(process_group=trained.process_group, bucket_nbytes=64),
    )
    check_same(f"{what}, iterated", [name for name, _ in iterated], listed)

    bare = oracle.optim.state_dict()
    for verb in ("shard", "scatter"):
        target = Trained(wrapper, OfModel(make), 0, Parts)
        fsdp_optim.load_optim_state_dict(target.optim, getattr(target, verb)(bare))
        check_same(f"{what}, {verb} of bare ids", target.gather(None, "name")["state"], _sorted(oracle, listed))

    rekeyed = fsdp_optim.rekey_optim_state_dict(bare, trained.model, "name", optim=trained.optim)
    check_same(f"{what}, rekeyed to names", rekeyed["state"], _sorted(oracle, listed))
    for form, model in (("unwrapped", plain.model), ("wrapped", trained.model)):
        back = fsdp_optim.rekey_optim_state_dict(named, model, "id")
        check_full(f"{what}, rekeyed to ids with the {form} model", back, oracle.full())
    again = fsdp_optim.rekey_optim_state_dict(named, plain.model, "id", optim=plain.optim)
    check_full(f"{what}, rekeyed to ids with an optimizer", again, oracle.full())


def _as_one(wrapper: str) -> None:
    """Several optimizers with equal hyperparameters are counted as one optimizer with all their parameters in order."""
    trained, oracle = (
        Trained(wrapper, OfModel(actor_and_critic), model=Parts),
        Oracle(OfModel(actor_and_critic), model=Parts),
    )
    full = trained.gather(None)
    parts = parts_of(oracle.model)
    plain = adam([*parts["critic"], *parts["body"], *parts["head"]])
    plain.load_state_dict(full)
    loaded = {name: dict(plain.state[param]) for name, param in oracle.model.named_parameters()}
    check_same(f"{wrapper}, two optimizers as one", loaded, oracle.by_name())


def _sorted(oracle: Oracle, names: Iterable[str]) -> dict[str, Any]:
    state = oracle.by_name()
    return {name: state[name] for name in names}


class OrderTest(unittest.TestCase):
    """The gathered state equals, bit for bit, that of a plain optimizer built in the same order from the unwrapped model."""

    @expand(
        soon=[(2, tuple(WRAPPERS)[1::2]), (1, ("FSDP1 flat", "plain")), (3, ("FSDP2", "fairscale flat", "FSDP1 orig"))],
        later=[(size, (*WRAPPERS,), True) for size in (1, 2, 3)],
    )
    def test_ids_of_an_optimizer_with_an_order_of_its_own(
        self, world_size: int, wrappers: Sequence[str], every: bool = False
    ) -> None:
        run_on_ranks(ids_of_every_wrapper, world_size, wrappers, every)


# ------------------------------------------------------------------------------------------- where no order can be right


def ignoring(orig: bool) -> Callable[[Any], Any]:
    """FSDP1 takes the weights of two layers and leaves their biases; nothing tells which of them came first."""

    def wrap(model: Any) -> Any:
        left = [model.head.bias, model.body[0].bias]
        return TorchFSDP(model, device_id=torch.device("cpu"), use_orig_params=orig, ignored_states=left)

    return wrap


def taken_in_part(orig: bool) -> list[tuple[str, str]]:
    trained, oracle = Trained(ignoring(orig), model=Parts), Oracle(model=Parts)
    bare = oracle.optim.state_dict()
    named = trained.gather(None, "name")
    errors = [
        error_text(lambda: trained.gather(None)),
        error_text(lambda: trained.gather(1, "id")),
        error_text(lambda: trained.shard(bare)),
        error_text(lambda: trained.scatter(bare, 1)),
        error_text(lambda: fsdp_optim.rekey_optim_state_dict(bare, trained.model, "name")),
        error_text(lambda: fsdp_optim.rekey_optim_state_dict(named, trained.model, "id")),
        error_text(lambda: fsdp_optim.rekey_optim_state_dict(named, oracle.model, "id")),
    ]
    check_same("by name", _by_key(named["state"]), _by_key(oracle.by_name()))
    listed = [name for name, _ in fsdp_optim.iter_full_optim_state(trained.model, trained.optim, 0)]
    check_same("iterated as the state by name", listed, list(named["state"]))
    rekeyed = fsdp_optim.rekey_optim_state_dict(named, oracle.model, "id", optim=oracle.optim)
    check_full("the plain optimizer tells the order", rekeyed, oracle.full())
    target = Trained(ignoring(orig), steps=0, model=Parts)
    fsdp_optim.load_optim_state_dict(target.optim, target.shard(named))
    check_same("loaded by name", target.gather(None, "name")["state"], named["state"])
    if orig:
        weights, oracle = (of(make=OfModel(_weights), model=Parts) for of in (partial(Trained, ignoring(orig)), Oracle))
        check_full("the weights alone, whose order is known", weights.gather(None), oracle.full())
    return errors


def _weights(model: Any) -> Any:
    return adam([param for name, param in model.named_parameters() if name.endswith("weight")])


def _by_key(state: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(state.items()))


def torn_apart(wrapper: str) -> list[tuple[str, str]]:
    """The root unit has the first and the last parameters of the model: backwards, its originals are not in place."""
    with cpu():
        trained = Trained(wrapper, OfModel(lambda model: adam(list(model.parameters())[::-1])))
        bare = Oracle().optim.state_dict()
        check_same(wrapper, _by_key(trained.gather(None, "name")["state"]), _by_key(Oracle().by_name()))
        calls = (lambda: trained.gather(None), lambda: trained.shard(bare), lambda: trained.scatter(bare))
        return [error_text(call) for call in calls]


class Stages(nn.Module):
    """The whole model of a pipeline; a stage is one of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 3)
        self.body = nn.Linear(3, 3)
        self.act = nn.Linear(3, 3)


STAGES = ("stem", "body", "act")  # sorted by name they come in another order


class Stage(nn.Module):
    def __init__(self, whole: Stages, name: str) -> None:
        super().__init__()
        setattr(self, name, getattr(whole, name))


def stage_of_this_rank(kind: str, steps: int) -> tuple[Any, Any]:
    """A different stage on each rank, stepped like the oracle."""
    oracle = Oracle(steps=0, model=Stages)
    name = STAGES[dist.get_rank()]
    module: Any = Stage(oracle.model, name)
    if kind == "FSDP2":
        groups = [DeviceMesh("cpu", [rank]) for rank in range(dist.get_world_size())]
        module = fully_shard(module, mesh=groups[dist.get_rank()])
    optim = adam(module.parameters())
    for step in range(steps):
        table = oracle.numbers.gradients(step)
        for fqn, param in module.named_parameters():
            start = oracle.numbers.start[fqn]
            param.grad = like(table[start : start + param.numel()].reshape(param.shape), param)
        optim.step()
    return module, optim


def pipeline(kind: str) -> list[tuple[str, str]]:
    whole = {"process_group": dist.group.WORLD}
    model, optim = stage_of_this_rank(kind, STEPS)
    oracle = Oracle(model=Stages)
    errors = [
        error_text(
            lambda: fsdp_optim.gather_full_optim_state_dict(
                model, optim, 0, **as_options(fsdp_optim.CallOptions, **whole)
            )
        )
    ]
    for recipient in (0, 1, 2, None):
        full = fsdp_optim.gather_full_optim_state_dict(
            model, optim, recipient, "name", **as_options(fsdp_optim.CallOptions, **whole)
        )
        if recipient in (dist.get_rank(), None):
            check_same(f"{kind} to {recipient}", _by_key(full["state"]), _by_key(oracle.by_name()))
    target, target_optim = stage_of_this_rank(kind, 0)
    bare = oracle.optim.state_dict()
    scatter, given = fsdp_optim.scatter_full_optim_state_dict, as_options(fsdp_optim.CallOptions, **whole)
    errors.append(error_text(lambda: scatter(target, target_optim, bare, 1, **given)))
    fsdp_optim.load_optim_state_dict(target_optim, scatter(target, target_optim, full, 1, **given))
    again = fsdp_optim.gather_full_optim_state_dict(
        target, target_optim, None, "name", **as_options(fsdp_optim.CallOptions, **whole)
    )
    check_same(f"{kind}, scattered and gathered again", again, full)
    errors.append(error_text(lambda: fsdp_optim.rekey_optim_state_dict(full, oracle.model, "id")))
    rekeyed = fsdp_optim.rekey_optim_state_dict(full, oracle.model, "id", optim=oracle.optim)
    check_full(f"{kind}, ids of the whole model's optimizer", rekeyed, oracle.full())
    return errors


def plain_stages_without_a_group() -> list[tuple[str, str]]:
    model, optim = stage_of_this_rank("plain", STEPS)
    own = fsdp_optim.gather_full_optim_state_dict(model, optim, None)
    check_same("own", len(own["state"]), 2)
    return [
        error_text(lambda: fsdp_optim.gather_full_optim_state_dict(model, optim, 0, "name")),
        error_text(lambda: list(fsdp_optim.iter_full_optim_state(model, optim, 0))),
    ]


class NoOrderTest(unittest.TestCase):
    @parameterized.expand([(False,), (True,)])
    def test_a_module_that_fsdp1_took_in_part(self, orig: bool) -> None:
        by_rank = run_on_ranks(taken_in_part, 2, orig)
        for place, errors in enumerate(zip(*by_rank, strict=True)):
            check_refused(f"call {place}", errors, "StateError", "ignored_states", "key_by='name'", "body.0.bias")

    @parameterized.expand(FLAT)
    def test_a_flat_parameter_around_others_in_an_order_of_its_own(self, wrapper: str) -> None:
        for place, errors in enumerate(zip(*run_on_ranks(torn_apart, 2, wrapper), strict=True)):
            check_refused(f"call {place}", errors, "StateError", "flat parameter", "key_by='name'", "scale")

    @parameterized.expand(("plain", "FSDP2"))
    def test_pipeline_stages(self, kind: str) -> None:
        for place, errors in enumerate(zip(*run_on_ranks(pipeline, 3, kind), strict=True)):
            check_refused(f"call {place}", errors, "StateError", "no rank has both", "key_by='name'")

    def test_plain_stages_are_not_dropped(self) -> None:
        for rank, errors in enumerate(run_on_ranks(plain_stages_without_a_group, 3)):
            for error in errors if rank else ():
                check_refused(f"rank {rank}", [error], "RankError", f"rank {rank}", "process_group=")


# ------------------------------------------------------------------------------------------- names for ids


def named(model: Any) -> Any:
    """An optimizer that sorts the names in its groups, and not those in its state."""
    return _NamedOptimizer(dict(model.named_parameters()), torch.optim.Adam, None, None, lr=0.01)


def named_in_groups(model: Any) -> Any:
    params = list(model.parameters())
    groups = [{"params": params[2:][::-1]}, {"params": params[:2], "lr": 0.5}]
    return _NamedOptimizer(dict(model.named_parameters()), torch.optim.Adam, groups, None, lr=0.01)


class Misnamed(torch.optim.Adam):
    """An optimizer with names that the model does not have."""

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        groups = [{**g, "params": [f"p{i}" for i in g["params"]]} for g in packed["param_groups"]]
        return {"state": {f"p{i}": s for i, s in packed["state"].items()}, "param_groups": groups}


def named_optimizers(wrapper: str, folder: str) -> tuple[str, str]:
    for make in (named, named_in_groups) if "flat" not in wrapper else (named,):
        what = f"{wrapper}, {make.__name__}"
        trained = Trained(wrapper, OfModel(make), model=Parts)
        oracle = Oracle(OfModel(lambda model, make=make: make(model)._optimizer), model=Parts)
        check_full(what, trained.gather(None), oracle.full())
        full = trained.gather(None, "name")
        target = Trained(wrapper, OfModel(make), 1, Parts)  # it loads into state that is there
        fsdp_optim.load_optim_state_dict(target.optim, target.shard(full))
        check_same(f"{what}, loaded", target.gather(None, "name")["state"], full["state"])
    path, group = f"{folder}/{wrapper}", trained.process_group
    fsdp_optim.save(
        path,
        trained.model,
        trained.optim,
        options=fsdp_optim.SaveOptions(process_group=group, progress=False, durable=False),
    )
    target = Trained(wrapper, OfModel(make), 1, Parts)
    fsdp_optim.load(
        path, target.model, target.optim, options=fsdp_optim.LoadOptions(process_group=group, progress=False)
    )
    check_same(f"{what}, from a checkpoint", target.gather(None, "name")["state"], full["state"])
    bad = Trained(wrapper, Misnamed)
    return error_text(lambda: bad.gather(None))


class NamesForIdsTest(unittest.TestCase):
    @parameterized.expand(("plain", "DDP", "FSDP1 orig", "FSDP1 flat", "FSDP2"))
    def test_names_stand_for_what_they_name(self, wrapper: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            errors = run_on_ranks(named_optimizers, 2, wrapper, folder)
        check_refused("names of nobody", errors, "WrapperError", "'p0'", "Misnamed")


# ------------------------------------------------------------------------------------------- other readers


def without_the_optimizer() -> list[tuple[str, str]]:
    """fairscale's method without an optimizer lists parameters in the order of the saved optimizer, or raises an error."""
    with cpu():
        trained = Trained("fairscale non-flat", OfModel(head_then_body), model=Parts)
        full = Trained("FSDP2", OfModel(head_then_body), model=Parts).gather(None)
        shard = trained.model.get_shard_from_optim_state_dict(full)
        wanted = trained.model.get_shard_from_optim_state_dict(full, trained.optim)
        check_same("in the saved optimizer's order", shard["state"], wanted["state"])
        flat = Trained("fairscale flat", steps=0)
        own_order = Trained("FSDP2", OfModel(lambda model: adam(list(model.parameters())[::-1]))).gather(None)
        return [error_text(lambda: flat.model.get_shard_from_optim_state_dict(own_order))]


def between_orders() -> None:
    """Transfer matches parameters by name, whatever the order of the two optimizers."""
    with cpu():
        source = Trained("FSDP1 flat", OfModel(head_then_body), model=Parts)
        target = Trained("FSDP2", steps=0, model=Parts)
        fsdp_optim.transfer_optim_state(source.model, source.optim, target.model, target.optim)
        check_same("transferred", target.gather(None, "name")["state"], Oracle(model=Parts).by_name())


class OtherReadersTest(unittest.TestCase):
    def test_without_the_optimizer(self) -> None:
        by_rank = run_on_ranks(without_the_optimizer, 2)
        check_refused("flat", [errors[0] for errors in by_rank], "StateError", "order of its own", "optim=")

    def test_transfer(self) -> None:
        run_on_ranks(between_orders, 2)

    def test_groups_that_a_model_cannot_tell(self) -> None:
        oracle = Oracle(OfModel(turned_in_groups), model=Parts)
        bare = oracle.optim.state_dict()
        name, text = error_text(lambda: fsdp_optim.rekey_optim_state_dict(bare, oracle.model, "name"))
        check_refused("without optim=", [(name, text)], "StateError", "2 param groups", "optim=")
        rekeyed = fsdp_optim.rekey_optim_state_dict(bare, oracle.model, "name", optim=oracle.optim)
        check_same("with optim=", _by_key(rekeyed["state"]), _by_key(oracle.by_name()))
        other = adam([*oracle.model.head.parameters()])
        name, text = error_text(lambda: fsdp_optim.rekey_optim_state_dict(rekeyed, oracle.model, "id", optim=other))
        check_refused("an optimizer of other parameters", [(name, text)], "StateError", "head.weight")

    def test_another_tools_list_that_nothing_explains(self) -> None:
        oracle = Oracle(model=Parts)
        state, group = oracle.by_name(), oracle.optim.state_dict()["param_groups"][0]
        names = sorted(oracle.names, reverse=True)
        foreign = {"state": state, "param_groups": [{**group, "params": names}]}
        error = error_text(lambda: fsdp_optim.rekey_optim_state_dict(foreign, oracle.model, "id"))
        check_refused("neither order", [error], "StateError", "unknown", "optim=")
        kept = fsdp_optim.rekey_optim_state_dict(foreign, oracle.model, "name")
        check_same("by name", kept["param_groups"][0]["params"], names)
        rekeyed = fsdp_optim.rekey_optim_state_dict(foreign, oracle.model, "id", optim=oracle.optim)
        check_full("with optim=", rekeyed, oracle.full())

    def test_further_keys_by_parameter_are_rekeyed(self) -> None:
        oracle = Oracle(model=Parts)
        full = fsdp_optim.gather_full_optim_state_dict(oracle.model, oracle.optim)
        full["uncollected_local_ids"] = [3]
        full["num_padded"] = {i: [i] for i in full["state"]}  # stands for any key by parameter
        rekeyed = fsdp_optim.rekey_optim_state_dict(full, oracle.model, "name")
        check_same("by parameter", rekeyed["num_padded"], {name: [i] for i, name in enumerate(oracle.names)})
        check_same("others", rekeyed["uncollected_local_ids"], [3])


# ------------------------------------------------------------------------------------------- the rule itself


class CountTest(unittest.TestCase):
    def counted(self, *units: tuple[int, str], mixed: Any = ()) -> Counted:
        names = "abcdefgh"
        return count([OrderedParam(at, tuple(f)) for at, f in units], {n: i for i, n in enumerate(names)}, mixed)

    def test_in_the_wrapped_models_order_it_is_the_unwrapped_models(self) -> None:
        self.assertEqual(self.counted((0, "ad"), (1, "b"), (2, "c")), Counted(tuple("abcd")))

    def test_runs_are_in_place(self) -> None:
        self.assertEqual(self.counted((2, "ef"), (0, "ad"), (1, "bc")), Counted(tuple("efabcd"), own_order=True))
        self.assertEqual(self.counted((1, "cd"), (0, "ab")), Counted(tuple("cdab"), own_order=True))

    def test_a_flat_parameter_around_another_run_has_no_order(self) -> None:
        for units in ([(1, "bc"), (0, "ad")], [(2, "c"), (0, "ad"), (1, "b")]):
            self.assertIn("lies between a and d", self.counted(*units).unknown)

    def test_parameters_that_were_taken_and_left(self) -> None:
        self.assertIn("a and b", self.counted((0, "a"), (1, "b"), mixed=[(("a",), ("b",))]).unknown)
        self.assertEqual(self.counted((0, "a"), (1, "c"), mixed=[(("a",), ("b",))]).unknown, "")

    def test_ranks_together(self) -> None:
        def together(*lists: str, own: bool = False) -> Counted:
            return merge([Counted(tuple(names.split()), own_order=own) for names in lists], ())

        self.assertEqual(together("a b c", "a b c").fqns, ("a", "b", "c"))
        self.assertEqual(together("a x.0.w z", "a x.1.w z"), Counted(("a", "x.0.w", "x.1.w", "z")))
        self.assertEqual(together("a x.10.w", "a x.9.w").fqns, ("a", "x.9.w", "x.10.w"))
        self.assertEqual(together("b a c", "a", "c").unknown, "")
        self.assertIn("no rank has both", together("stem", "body").unknown)
        self.assertIn("no rank has both", together("a x.0.w", "a x.1.w", own=True).unknown)
        self.assertIn("no rank has both", together("a x0.w", "a x1.w").unknown)
        self.assertIn("no rank has both", together("a x.1.w", "a y").unknown)
        self.assertIn("contradict", together("a b", "b a").unknown)
