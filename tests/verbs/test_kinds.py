"""The kind of a state value: judged from evidence, recorded in full dicts, and believed by every reader."""

from __future__ import annotations

import copy
import itertools
import tempfile
import unittest
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
import torch.distributed as dist
from kit.cases import expand
from kit.compare import Differs, check_same, error_text
from kit.local_parts import local_of
from kit.options import as_options
from kit.trained import Trained
from kit.wrapping import cpu
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp_optim
from fsdp_optim import StateError
from fsdp_optim.layout import cut_named
from fsdp_optim.state.values import Evidence, Kind, Observation, infer_kind, observation_of, same
from fsdp_optim.testing import run_on_ranks


class Values(torch.optim.Optimizer):
    """Keeps what `make(param)` gives, and a moment."""

    def __init__(self, params: Any, make: Callable[[torch.Tensor], Mapping[Any, Any]]) -> None:
        super().__init__(params, {"lr": 0.1})
        self._make = make

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.state[param] = {"moment": param.grad.clone(), **self._make(param)}


class Shapes(nn.Module):
    """Parameters of one element, of one row, and of others."""

    units = ("wide", "")
    tensor_parallel: Mapping[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.empty(1))
        self.wide = nn.Linear(5, 4)
        self.last = nn.Linear(4, 1)


# What an optimizer may keep: on a plain module, and on every wrapper that has it.
KEPT: Mapping[str, Callable[[torch.Tensor], Mapping[Any, Any]]] = {
    "weights of shape (1,)": lambda param: {"weight": torch.tensor([0.25])},
    "a step of shape (1,)": lambda param: {"step": torch.tensor([3.0])},
    "a history": lambda param: {"history": torch.arange(4.0)},
    "a float called sum": lambda param: {"sum": 0.5},
    "a moment that is a dict": lambda param: {"momentum_buffer": {0.0: param.grad.clone(), "0.9": param.grad * 2}},
    "a list of numbers": lambda param: {"steps": [torch.tensor(1.0), torch.tensor(2.0)]},
    "equal numbers in a list": lambda param: {"steps": [torch.tensor(1.0), torch.tensor(1.0)]},
    "names that are no words": lambda param: {0: param.grad.clone(), (1, "a"): 2.0, "0": torch.tensor(7.0)},
    "a name with dots": lambda param: {"a.b": param.grad * 3, "b": param.grad * 4},
    "numbers of numpy": lambda param: {"n": numpy.int64(3), "x": numpy.float32(0.1), "flag": numpy.bool_(True)},
    "arrays": lambda param: {"codes": numpy.arange(6, dtype=numpy.uint8), "empty": numpy.zeros((0, 2))},
    "reduced moments": lambda param: {
        "exp_avg_sq": param.grad.mean(-1, keepdim=True) if param.ndim > 1 else param.grad
    },
    "nothing, a word, None": lambda param: {"none": None, "word": "a", "empty": {}, "list": []},
}


def fresh(trained: Trained) -> Any:
    return Values(trained.model.parameters(), lambda param: {})


def trips(wrap: str, folder: str) -> dict[str, str]:
    """Everything in `KEPT`, by every verb."""
    wrong = {}
    with cpu():
        for number, (what, make) in enumerate(KEPT.items()):
            if wrap == "FSDP2" and what == "reduced moments":
                continue  # a mean over a cut dimension is a sum that is not made
            trained = Trained(wrap, lambda params, make=make: Values(params, make), 1, Shapes)
            group = {"process_group": trained.process_group}
            for how in ("shard", "rekey", "scatter", "transfer", "save"):
                target = fresh(trained)
                try:
                    _send(trained, target, how, f"{folder}/{number}", group)
                    wanted, got = (
                        {i: dict(o.state[p]) for i, p in enumerate(trained.params) if p in o.state}
                        for o in (trained.optim, target)
                    )
                    if [list(v) for v in wanted.values()] != [list(v) for v in got.values()]:
                        raise Differs(f"names {got} not {wanted}")
                    if not same(wanted, got):
                        raise Differs(f"{got} not {wanted}")
                except Exception as error:
                    wrong[f"{what}, {how}"] = f"{type(error).__name__}: {error}"
    return wrong


def _send(trained: Trained, target: Any, how: str, path: str, group: dict[str, Any]) -> None:
    if how == "transfer":
        fsdp_optim.transfer_optim_state(
            trained.model, trained.optim, trained.model, target, **as_options(fsdp_optim.CallOptions, **group)
        )
    elif how == "save":
        fsdp_optim.save(
            path, trained.model, trained.optim, **as_options(fsdp_optim.SaveOptions, **group, durable=False)
        )
        fsdp_optim.load(path, trained.model, target, **as_options(fsdp_optim.LoadOptions, **group, compare=True))
    else:
        full = trained.gather(None, "name" if how == "rekey" else "id")
        if how == "rekey":
            full = fsdp_optim.rekey_optim_state_dict(full, trained.model, "id")
        if how == "scatter":
            shard = fsdp_optim.scatter_full_optim_state_dict(
                trained.model, target, full, **as_options(fsdp_optim.CallOptions, **group)
            )
        else:
            shard = fsdp_optim.get_shard_from_optim_state_dict(trained.model, target, full)
        fsdp_optim.load_optim_state_dict(target, shard)


def dtensors_of_their_own(folder: str) -> None:
    """DTensors that have the parameter's shape and are not cut like it, and local tensors beside DTensors."""
    trained = Trained("FSDP2", lambda params: Values(params, lambda param: {}), 1, Shapes)
    for param in trained.params:
        whole = torch.arange(float(param.numel())).reshape(param.shape)
        values = trained.optim.state[param]
        values["replica"] = DTensor.from_local(whole, param.device_mesh, [Replicate()])
        if param.ndim > 1:
            last = param.ndim - 1
            part = whole.chunk(2, last)
            own_columns = part[dist.get_rank()] if dist.get_rank() < len(part) else whole[:, :0]
            values["columns"] = DTensor.from_local(
                own_columns.contiguous(), param.device_mesh, [Shard(last)], shape=param.shape, stride=param.stride()
            )
        values["local"] = torch.full(local_of(param).shape, 1.0 + dist.get_rank())
        values["shared"] = torch.tensor([2.0])
    full = trained.gather(None, "name")
    check_same(
        "kinds",
        full["kinds"]["wide.weight"],
        {
            "moment": "sharded",
            "replica": "placed 1",
            "columns": "placed 1 0:1",
            "local": "opaque",
            "shared": "opaque",
        },
    )
    check_same("whole", full["state"]["wide.weight"]["columns"], torch.arange(20.0).reshape(4, 5))
    for how in ("shard", "rekey", "scatter", "transfer", "save"):
        target = fresh(trained)
        _send(trained, target, how, f"{folder}/dtensors", {})
        for param in trained.params:
            wanted, got = trained.optim.state[param], target.state[param]
            if list(wanted) != list(got) or not same(dict(wanted), dict(got)):
                raise Differs(f"{how}: {dict(got)} not {dict(wanted)}")


def ranks_that_disagree() -> None:
    """A value that has the shape of one rank's part only."""
    trained = Trained("FSDP1 orig", lambda params: Values(params, lambda param: {}), 1, Shapes)
    first = next(param for param in trained.params if param.numel())
    numel = first.numel() if dist.get_rank() == 0 else 0
    sizes = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, numel)
    for param in trained.params:
        if param in trained.optim.state:
            trained.optim.state[param]["history"] = torch.arange(float(sizes[0]))
    full = trained.gather(None, "name")
    for fqn, values in full["state"].items():
        if "history" in values and full["kinds"][fqn]["history"] != "opaque":
            raise Differs(f"{fqn}: {full['kinds'][fqn]}, {values['history']}")
    target = fresh(trained)
    fsdp_optim.load_optim_state_dict(target, fsdp_optim.get_shard_from_optim_state_dict(trained.model, target, full))
    for param in trained.params:
        if not same(dict(trained.optim.state.get(param, {})), dict(target.state.get(param, {}))):
            raise Differs(f"{target.state.get(param)}, not {trained.optim.state.get(param)}")


def one_element_each() -> tuple[dict[str, Any], tuple[str, str]]:
    """A flat parameter of one element on each rank: nothing says what a value of shape (1,) and an unknown name is."""

    def pair() -> nn.Module:
        model = nn.Module()
        model.pair = nn.Parameter(torch.empty(2))
        return model

    with cpu():
        made = lambda params: Values(params, lambda param: {"x": torch.tensor([5.0]), "exp_avg": param.grad.clone()})  # noqa: E731
        trained = Trained("FSDP1 flat", made, 1, pair)
        full = trained.gather(None, "name")
        target = fresh(trained)
        fsdp_optim.load_optim_state_dict(
            target, fsdp_optim.get_shard_from_optim_state_dict(trained.model, target, full)
        )
        for param in trained.params:
            if not same(dict(trained.optim.state[param]), dict(target.state[param])):
                raise Differs(f"{target.state[param]}, not {trained.optim.state[param]}")
        plain = pair()
        told = error_text(
            lambda: fsdp_optim.get_shard_from_optim_state_dict(
                plain, Values(plain.parameters(), lambda param: {}), full
            )
        )
        return full["kinds"]["pair"], told


class WithOwnKeys(torch.optim.SGD):
    """Keeps something under a key that is no parameter, as MADGRAD and SPAM do."""

    def __init__(self, params: Any, k: int = 0) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.state["k"] = torch.tensor([k])  # type: ignore[index]
        self.state["total"] = {"steps": k}  # type: ignore[index]


def keys_of_no_parameter(folder: str) -> None:
    rank = dist.get_rank()
    for wrap in ("FSDP2", "FSDP1 flat", "fairscale flat"):
        with cpu():
            trained = Trained(wrap, lambda params: WithOwnKeys(params, 5), 1, Shapes)
            for how in ("shard", "rekey", "scatter", "transfer", "save"):
                target = WithOwnKeys(trained.model.parameters())
                _send(trained, target, how, f"{folder}/{wrap}", {})
                check_same(f"{wrap}, {how}", target.state["k"], torch.tensor([5]))  # type: ignore[index]
                check_same(f"{wrap}, {how}", target.state["total"], {"steps": 5})  # type: ignore[index]
            plain = WithOwnKeys(Shapes().parameters())
            plain.load_state_dict(trained.gather(None))
            check_same("as torch keeps it", plain.state["k"], torch.tensor([5]))  # type: ignore[index]
            trained.optim.state["k"] += rank
            told = error_text(lambda trained=trained: trained.gather())
            if told[0] != "StateError" or not all(word in told[1] for word in ("'k'", "rank 0", "rank 1")):
                raise Differs(str(told))


class TestTrips(unittest.TestCase):
    def test_everything_comes_back_on_a_plain_module(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(trips("plain", folder), {})

    @expand(soon=("FSDP2",), later=("fairscale non-flat", "FSDP1 flat", "FSDP1 orig"))
    def test_everything_comes_back_on_two_ranks(self, wrap: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(run_on_ranks(trips, 2, wrap, folder), [{}, {}])

    def test_dtensors_that_are_cut_in_their_own_way(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(dtensors_of_their_own, 2, folder)

    def test_a_value_that_has_the_shape_of_one_ranks_part(self) -> None:
        run_on_ranks(ranks_that_disagree, 2)

    def test_what_one_element_does_not_show_is_kept_per_shard(self) -> None:
        for kinds, (error, text) in run_on_ranks(one_element_each, 2):
            self.assertEqual(kinds, {"moment": "opaque", "x": "opaque", "exp_avg": "sharded"})
            self.assertEqual(error, "StateError")
            self.assertIn("pair: moment", text)

    def test_state_under_keys_that_are_no_parameters(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(keys_of_no_parameter, 2, folder)


class TestRecord(unittest.TestCase):
    """The kinds in a full dict."""

    def setUp(self) -> None:
        self.trained = Trained("plain", lambda params: Values(params, KEPT["weights of shape (1,)"]), 1, Shapes)
        self.full = self.trained.gather(key_by="name")

    def shard(self, full: Any) -> Any:
        return fsdp_optim.get_shard_from_optim_state_dict(self.trained.model, fresh(self.trained), full)

    def test_parameters_with_the_same_kinds_share_one_dict(self) -> None:
        kinds = self.full["kinds"]
        self.assertEqual(set(kinds), set(self.full["state"]))
        self.assertEqual(kinds["wide.weight"], {"moment": "sharded", "weight": "opaque"})
        self.assertEqual(len({id(words) for words in kinds.values()}), 1)

    def test_torch_reads_it_without_trust(self) -> None:
        with tempfile.TemporaryFile() as file:
            torch.save(self.full, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=True)
        check_same("loaded", loaded, self.full)
        plain = Values(Shapes().parameters(), lambda param: {})
        plain.load_state_dict(self.trained.gather())
        self.assertNotIn("kinds", plain.state_dict())

    def test_the_record_is_believed(self) -> None:
        """A value whose shape says one thing and whose record says another."""
        full = copy.deepcopy(self.full)
        words = dict(full["kinds"]["one"])
        full["kinds"]["one"] = {**words, "weight": "sharded"}
        self.shard(full)
        full["kinds"]["wide.weight"] = {**words, "weight": "sharded"}
        with self.assertRaisesRegex(StateError, r"wide\.weight: weight has shape \[1\]"):
            self.shard(full)

    def test_a_moment_that_was_cut_short_is_refused(self) -> None:
        for wrong in (torch.ones(2), torch.tensor(1.0), 0.5, None, [1.0]):
            full = copy.deepcopy(self.full)
            full["state"]["wide.weight"]["moment"] = wrong
            with self.assertRaisesRegex(StateError, r"wide\.weight: moment"):
                self.shard(full)

    def test_a_record_that_nobody_wrote_is_refused(self) -> None:
        for kinds in (
            7,
            {"one": "x"},
            {"one": {"moment": "square"}},
            {"one": {"moment": "placed x"}},
            {"one": {"moment": 3}},
        ):
            with self.assertRaisesRegex(StateError, "kinds"):
                self.shard({**self.full, "kinds": kinds})

    def test_without_a_record_it_is_judged(self) -> None:
        """A dict of somebody else: the weights of shape (1,) are no moments, although one parameter has that shape."""
        full = {key: value for key, value in self.full.items() if key != "kinds"}
        shard = self.shard(full)
        target = fresh(self.trained)
        fsdp_optim.load_optim_state_dict(target, shard)
        for param in self.trained.params:
            self.assertTrue(same(dict(self.trained.optim.state[param]), dict(target.state[param])))


class TestEvidence(unittest.TestCase):
    """Kinds of values, in one process."""

    def sights(self, *cases: tuple[str, tuple[int, ...], Any]) -> Evidence:
        return Evidence.of(observation_of(name, value, shape) for name, shape, value in cases)

    def test_by_majority_where_a_value_was_seen_to_follow(self) -> None:
        zeros = torch.zeros
        cases: tuple[tuple[bool | None, list[tuple[str, tuple[int, ...], Any]]], ...] = (
            (True, [("x", (2, 3), zeros(2, 3)), ("x", (4,), zeros(4))]),
            (True, [("x", (4,), zeros(4))]),
            (True, [("x", (2, 3), zeros(2, 3)), ("x", (4,), zeros(4)), ("x", (5,), zeros(2))]),
            (False, [("x", (4,), zeros(4)), ("x", (5,), zeros(4))]),  # a tie
            (False, [("x", (4,), zeros(4)), ("x", (4,), zeros(4)), ("x", (5,), zeros(4))]),  # one shape says nothing
            (False, [("x", (1,), zeros(1)), ("x", (5,), zeros(1))]),
            (False, [("x", (4,), 0.5)]),
            (None, [("x", (1,), zeros(1))]),
            (None, []),
            (True, [("exp_avg", (1,), zeros(1))]),
            (True, [("exp_avg", (4,), zeros(4)), ("exp_avg", (4,), zeros(4)), ("exp_avg", (5,), zeros(4))]),
        )
        for wanted, seen in cases:
            with self.subTest(seen=seen):
                self.assertEqual(self.sights(*seen).follows(seen[0][0] if seen else "x"), wanted)

    def test_the_order_of_what_is_seen_says_nothing(self) -> None:
        seen = [("x", (4,), torch.zeros(4)), ("x", (5,), torch.zeros(5)), ("x", (1,), torch.zeros(1)), ("x", (3,), 1.0)]
        kinds = {repr(self.sights(*order)) for order in itertools.permutations(seen)}
        self.assertEqual(len(kinds), 1)

    def test_a_parameter_without_dimensions(self) -> None:
        value = torch.tensor(1.0)
        self.assertEqual(infer_kind("step", value, (), Evidence()), Kind.SCALAR)
        self.assertEqual(infer_kind("exp_avg", value, (), Evidence()), Kind.SHARDED)
        self.assertEqual(infer_kind("x", value, (), self.sights(("x", (3,), value))), Kind.SCALAR)
        self.assertEqual(infer_kind("step", value, (), self.sights(("step", (3,), torch.zeros(3)))), Kind.SHARDED)

    def test_one_number_for_each_row(self) -> None:
        """Vectors have such values in their own shape, whatever their number; a shard is a mistake."""
        vectors = [("v", (size,), (size,)) for size in (1, 3, 5, 6)]
        for is_mistake, seen in (
            (False, [("v", (3, 4), (3,))]),
            (False, [("v", (3, 4), (3, 1))]),
            (False, [("v", (3, 4), (3,)), ("v", (8, 2, 5, 5), (8,)), ("v", (2, 1), (2,))]),
            (False, [("v", (3, 4), (3, 1)), ("v", (8, 2, 5, 5), (8, 2, 1, 1)), ("v", (2, 1), (2, 1))]),
            (False, [("v", (8, 2, 5, 5), (8, 5, 5))]),
            (True, [("v", (3, 4), (1, 4))]),  # a row
            (True, [("v", (3, 4), (4,))]),
            (True, [("v", (3, 4), (3, 2))]),
            (True, [("v", (3, 4), (3, 1, 1))]),
            (True, [("v", (2, 3, 4), (2, 4, 3))]),
            (True, [("v", (3, 4), (3,)), ("v", (5, 4), (5, 4))]),
            (True, [("v", (3, 4), (3,)), ("v", (5, 4), (2, 4))]),
            (True, [("v", (3, 4), (3,)), ("v", (7,), (2,))]),
            (True, [("v", (3, 4), (3,)), ("v", (5, 4), ())]),
        ):
            for name in ("v", "exp_avg_sq"):
                zeros = [(name, param, torch.zeros(shape)) for _, param, shape in (*vectors, *seen)]
                with self.subTest(name=name, seen=seen):
                    self.assertEqual(self.sights(*zeros).must_follow(name), is_mistake)

    def test_words_of_cuts(self) -> None:
        self.assertIsNone(cut_named(""))
        self.assertEqual(cut_named("1"), (1, ()))
        self.assertEqual(cut_named("2 1:0 0:3"), (2, ((1, 0), (0, 3))))
        self.assertEqual(cut_named("1 0:1:2"), (1, ((0, 1, 2),)))
        for wrong in ("x", "1 0", "1 0:", "1 0:1:2:3", "1  0:1"):
            with self.assertRaises(ValueError):
                cut_named(wrong)
        self.assertEqual(Observation("x", (1,), True, False, True), observation_of("x", torch.zeros(1), (1,)))
