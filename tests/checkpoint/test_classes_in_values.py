"""Classes in the values of a checkpoint: those of dicts come back, and a class by itself is read by those who trust the file."""

from __future__ import annotations

import codecs
import enum
import logging
import tempfile
import unittest
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from kit.compare import check_same, error_text
from kit.log_texts import log_texts
from kit.optimizers import adam
from parameterized import parameterized

import fsdp_optim

FORMATS = ("safetensors", "dcp", "torchtitan")
PICKLED = fsdp_optim.ConvertOptions(allow_pickle=True)  # defaultdicts need it in files of torch
WRITTEN = ("torch", "torch_file", "deepspeed_universal")  # by convert


class Colour(enum.Enum):
    RED = 1


class Held:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.inner == other.inner

    __hash__ = None  # type: ignore[assignment]


class Config(dict[str, Any]):
    pass


DICTS = {
    "ordered": OrderedDict(b=1, a=2),
    "counter": Counter(a=2, b=1),
    "order": OrderedDict([("z", 1), ("a", {"y": 2}), ("m", torch.ones(1)), ("b", OrderedDict([("y", 1), ("x", 2)]))]),
    "empty": OrderedDict(),
    "deep": {"a": [1, (2, {"b": OrderedDict(c=Counter(x=1))})], 3: OrderedDict({1: "a", "b": 2})},
    "tensors": OrderedDict(x=torch.ones(2), y={"z": Counter(a=1)}),
    "list": [OrderedDict(a=1), {"b": OrderedDict(c=torch.zeros(1))}],
}
BY_THEMSELVES = {
    "in a tuple of keys": {(int, 1): 2},
    "class": list,
    "in a list": [1, {"a": torch.Size}],
    "in a tuple": (Counter, 2),
    "in a set": {dict},
    "a key": {list: 1},
    "tensor": torch.Tensor,
    "storage": torch.FloatStorage,
    "function": torch.add,
    "of an object": Held([list, {"a": OrderedDict}]),
    "partial": partial(int, "3"),
}
REFUSED = {
    "class": list,
    "function": codecs.encode,
    "key": {"a": {int: 1}},
    "deque": deque([1]),
    "slice": slice(1, 2),
}
OBJECTS = {
    "tuples": {(Colour.RED, 1): 2},
    "tuples of a set": {(Colour.RED, (1, 2))},
    "keys": {Colour.RED: 1},
    "items": {Colour.RED},
    "deep key": [{"a": {Colour.RED: 2}}],
}


def typed(value: Any) -> Any:
    """A value with the class of everything in it, to compare."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, (dict, MappingProxyType)):
        items = [(typed(key), typed(item)) for key, item in value.items()]
        return type(value), getattr(value, "default_factory", None), items
    if isinstance(value, (list, tuple)):
        return type(value), [*map(typed, value)]
    return type(value), value


def without_classes(value: Any) -> Any:
    """The value with plain dicts, to compare."""
    if isinstance(value, dict):
        return {key: without_classes(item) for key, item in value.items()}
    return type(value)(map(without_classes, value)) if isinstance(value, (list, tuple)) else value


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    optim = adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    return model, optim


def by_itself(function: Any) -> Any:
    """partial objects and functions compare by identity."""
    return (function.func, function.args) if isinstance(function, partial) else function


class InValues(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.path = Path(temporary.name, "a")
        self.model, self.optim = trained()

    def load(self, **options: Any) -> Any:
        loaded = fsdp_optim.load(self.path, self.model, options=fsdp_optim.LoadOptions(**options))
        return loaded.state["value"]

    @parameterized.expand([(f"{name}, {format}", value, format) for name, value in DICTS.items() for format in FORMATS])
    def test_dicts_keep_their_class(self, _: str, value: Any, format: str) -> None:
        for number, given in enumerate((value, fsdp_optim.per_rank(value))):
            self.path = self.path.with_name(f"{number}")
            fsdp_optim.save(self.path, self.model, self.optim, state={"value": given}, format=format)
            check_same(format, typed(self.load()), typed(value))

    def test_dicts_that_come_back_as_plain_ones_from_dcp(self) -> None:
        """As no other format takes them without pickle. Their tensors are where they were, and the folder can be converted."""
        for number, value in enumerate(
            (
                defaultdict(int, a=1),
                defaultdict(list, a=[torch.ones(2)]),
                Counter(a=torch.ones(2)),
                OrderedDict(b={"c": Counter(a=[torch.ones(1)])}),
            )
        ):
            self.path = self.path.with_name(f"{number}")
            with log_texts(logging.WARNING) as told:
                fsdp_optim.save(self.path, self.model, state={"value": value}, format="dcp")
            self.assertIn("come back as plain dicts: state['value']", "".join(told))
            wanted = without_classes(value)
            check_same("loaded", without_classes(self.load()), wanted)
            for format in ("safetensors", "torch"):
                target = self.path.with_name(f"{number} as {format}")
                fsdp_optim.convert(self.path, target, format=format)
                check_same(format, without_classes(fsdp_optim.load(target, self.model).state["value"]), wanted)

    def test_tuples_that_are_one_value(self) -> None:
        """A class in a tuple without tensors comes back, and no warning says otherwise."""
        with log_texts(logging.WARNING) as told:
            options = fsdp_optim.SaveOptions(allow_pickle=True)
            fsdp_optim.save(self.path, self.model, state={"value": (Config(a=1),)}, format="dcp", options=options)
        check_same("told", told, [])
        check_same("loaded", typed(self.load(allow_pickle=True)), typed((Config(a=1),)))

    @parameterized.expand([(format,) for format in WRITTEN])
    def test_converted(self, format: str) -> None:
        for name in ("ordered", "counter"):
            own = self.path.with_name(f"own {name}")
            fsdp_optim.save(own, self.model, self.optim, state={"value": DICTS[name]}, format="dcp")
            self.path = self.path.with_name(f"to {name}")
            fsdp_optim.convert(own, self.path, format=format)
            check_same(format, typed(self.load()), typed(DICTS[name]))

    @parameterized.expand([("dcp",), ("torchtitan",)])
    def test_values_of_an_optimizer(self, format: str) -> None:
        first = self.optim.state[next(iter(self.model.parameters()))]
        first["maps"] = OrderedDict(b=[Counter(a=1)], a={1: OrderedDict(x=2)})
        self.optim.param_groups[0]["plan"] = OrderedDict(b=1, a={"c": Counter(x=1)})
        fsdp_optim.save(self.path, self.model, self.optim, format=format)
        target = adam(self.model.parameters())
        fsdp_optim.load(self.path, self.model, target)
        check_same("the group", typed(target.param_groups[0]["plan"]), typed(self.optim.param_groups[0]["plan"]))
        # torch's load_state_dict() makes plain dicts of those in the state, a file has them as they are
        fsdp_optim.convert(self.path, self.path.with_name("to"), format="torch", options=PICKLED)
        saved = torch.load(self.path.with_name("to") / "optim.pt", weights_only=False)
        check_same("the state", typed(saved["state"][0]["maps"]), typed(first["maps"]))

    def test_dicts_with_tensors_in_an_optimizer(self) -> None:
        """Of this library's formats, and of torch.save."""
        value = OrderedDict(b=[torch.ones(2), {"c": OrderedDict(d=torch.zeros(1))}], a=Counter(x=1), aa=2)
        self.optim.state[next(iter(self.model.parameters()))]["maps"] = value
        self.optim.param_groups[0]["plan"] = value
        torch.save(
            {"model": self.model.state_dict(), "optimizer": self.optim.state_dict()}, self.path.with_name("torch")
        )
        for format in FORMATS:
            fsdp_optim.save(self.path.with_name(format), self.model, self.optim, format=format)
        for source in (*FORMATS, "torch"):
            to_file = self.path.with_name(f"from {source}")
            fsdp_optim.convert(self.path.with_name(source), to_file, model=self.model, format="torch", options=PICKLED)
            saved = torch.load(to_file / "optim.pt", weights_only=False)
            check_same(source, typed(saved["state"][0]["maps"]), typed(value))
            check_same(source, typed(saved["param_groups"][0]["plan"]), typed(value))

    def test_extra_state_of_modules(self) -> None:
        class Remembering(torch.nn.Linear):
            seen: Any = OrderedDict(b=1, a=Counter(x=2))

            def get_extra_state(self) -> Any:
                return self.seen

            def set_extra_state(self, state: Any) -> None:
                self.seen = state

        fsdp_optim.save(self.path, Remembering(2, 2), format="dcp")
        target = Remembering(2, 2)
        target.seen = {}
        fsdp_optim.load(self.path, target)
        check_same("seen", typed(target.seen), typed(Remembering.seen))

    def test_classes_that_dcp_has_no_place_for(self) -> None:
        value = {"config": Config(a=1), "view": MappingProxyType({"b": 1})}
        with log_texts(logging.WARNING) as told:
            fsdp_optim.save(self.path, self.model, state={"value": value}, format="dcp")
        self.assertIn("state['value']['config'] (Config), state['value']['view'] (mappingproxy)", "".join(told))
        check_same("plain", typed(self.load()), typed({"config": {"a": 1}, "view": {"b": 1}}))

    @parameterized.expand(REFUSED.items())
    def test_a_save_refuses_what_a_load_would_not_read(self, what: str, value: Any) -> None:
        for format in FORMATS:
            kind, text = error_text(
                partial(fsdp_optim.save, self.path, self.model, state={"value": value}, format=format)
            )
            check_same(format, (kind, "value" in text, "allow_pickle=True" in text), ("CheckpointError", True, True))
            self.assertFalse(self.path.exists())

    @parameterized.expand([(name, value, kind) for name, value in BY_THEMSELVES.items() for kind in ("torch", "dcp")])
    def test_by_themselves(self, name: str, value: Any, kind: str) -> None:
        """In files of others: named, or read as they are by those who trust the file."""
        if kind == "dcp" and name in ("a key", "in a tuple of keys"):
            return  # torch makes a str of it
        tree = {"model": self.model.state_dict(), "value": value, "other": 3}
        if kind == "dcp":
            dcp.save(tree, checkpoint_id=self.path, no_dist=True)
        else:
            torch.save(tree, self.path)
        error, text = error_text(self.load)
        check_same("refused", (error, "allow_pickle=True" in text), ("CheckpointError", True))
        loaded = fsdp_optim.load(self.path, self.model)
        check_same("the others", loaded.state["other"], 3)
        check_same("trusted", by_itself(self.load(allow_pickle=True)), by_itself(value))

    @parameterized.expand(OBJECTS.items())
    def test_objects_among_keys_and_items(self, name: str, value: Any) -> None:
        torch.save({"model": self.model.state_dict(), "value": value}, self.path)
        error, text = error_text(self.load)
        check_same("refused", (error, "Colour" in text), ("CheckpointError", True))
        check_same("trusted", self.load(allow_pickle=True), value)

    @parameterized.expand([("param_groups",), ("state",)])
    def test_in_an_optimizer(self, where: str) -> None:
        saved = self.optim.state_dict()
        saved[where][0]["kind"] = OrderedDict
        torch.save({"model": self.model.state_dict(), "optimizer": saved}, self.path)
        error, text = error_text(partial(fsdp_optim.load, self.path, self.model, self.optim))
        check_same("refused", (error, "collections.OrderedDict" in text), ("CheckpointError", True))


if __name__ == "__main__":
    unittest.main()
