"""Values whose elements cannot be copied are refused by name, on all ranks alike, by every call, and nothing is left behind."""

from __future__ import annotations

import copy
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_refused, check_same, error_text, refused
from kit.options import as_options
from parameterized import parameterized
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

QUIET: dict[str, Any] = {"durable": False, "progress": False, "overwrite": True}
DEEP = "nested more than 100 levels deep, or contains itself"


def nested_in(kind: Callable[[Any], Any], levels: int = 3000) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = kind(value)
    return value


def cycle() -> Any:
    items: list[Any] = [1]
    items.append({"again": items})
    return items


VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: torch.ones(3, device="meta"), "on the meta device and has no elements"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is a nested tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "is a nested tensor",
    ),
    "cycle": (cycle, DEEP),
    "lists": (lambda: nested_in(lambda value: [value]), DEEP),
    "dicts": (lambda: nested_in(lambda value: {"k": value}), DEEP),
    "tuples": (lambda: nested_in(lambda value: (value,)), DEEP),
    "lazy": (nn.UninitializedBuffer, "has no shape before the first forward pass"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "to_dense()"),
    "int4": (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.int4), "view(torch.uint8)"),
    "uint4": (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.uint4), "view(torch.uint8)"),
    "float4 without dimensions": (
        lambda: torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "reshape(1)",
    ),
}


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 6)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optim.step()
    return model, optim


def put(optim: torch.optim.Optimizer, where: str, value: Any) -> str:
    """Put a value into an optimizer. Returns the words by which an error names the place."""
    if where == "state":
        optim.state[optim.param_groups[0]["params"][1]]["odd"] = value
        return "bias: odd"
    optim.param_groups[0]["odd"] = value
    return "odd of param group 0"


def readers(root: Path, model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Callable[[], Any]]:
    other, other_optim = stepped()
    return {
        "save": lambda: fsdp_optim.save(root / "a", model, optim, **as_options(fsdp_optim.SaveOptions, **QUIET)),
        "save dcp": lambda: fsdp_optim.save(
            root / "a", model, optim, format="dcp", **as_options(fsdp_optim.SaveOptions, **QUIET)
        ),
        "async_save": lambda: fsdp_optim.async_save(
            root / "a", model, optim, **as_options(fsdp_optim.SaveOptions, **QUIET)
        ).wait(),
        "gather": lambda: fsdp_optim.gather_full_optim_state_dict(model, optim, None),
        "iterate": lambda: list(fsdp_optim.iter_full_optim_state(model, optim, None)),
        "transfer": lambda: fsdp_optim.transfer_optim_state(model, optim, other, other_optim),
    }


def extra_state_loaders(full: Any) -> dict[str, Callable[[], Any]]:
    model, optim = stepped()
    return {
        "get_shard": lambda: fsdp_optim.get_shard_from_optim_state_dict(model, optim, full),
        "scatter": lambda: fsdp_optim.scatter_full_optim_state_dict(model, optim, full),
        "rekey": lambda: fsdp_optim.rekey_optim_state_dict(full, model, "name"),
    }


class WithoutElementsTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="fsdp_optim_elements_")
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    @parameterized.expand([(name, where) for name in VALUES for where in ("state", "group")])
    def test_in_an_optimizer(self, name: str, where: str) -> None:
        make, words = VALUES[name]
        model, optim = stepped()
        place = put(optim, where, make())
        for call, read in readers(self.root, model, optim).items():
            with self.subTest(call):
                kind, text = error_text(read)
                self.assertIn(kind, ("StateError", "WrapperError", "CheckpointError"), text[:500])
                self.assertIn(place, text)
                if not (name == "csr" and where == "state"):  # whose message is that of all sparse state
                    self.assertIn(words, text)
        self.assertEqual(list(self.root.iterdir()), [])

    @parameterized.expand([(name, where) for name in VALUES for where in ("state", "group", "top")])
    def test_in_a_full_dict(self, name: str, where: str) -> None:
        make, words = VALUES[name]
        full = fsdp_optim.gather_full_optim_state_dict(*stepped(), None)
        parts = {"state": next(iter(full["state"].values())), "group": full["param_groups"][0], "top": full}
        parts[where]["odd"] = make()
        for call, take in extra_state_loaders(full).items():
            with self.subTest(call):
                refused(take, fsdp_optim.StateError, "odd", words)

    @parameterized.expand([(name,) for name in VALUES])
    def test_in_a_shard(self, name: str) -> None:
        make, words = VALUES[name]
        model, optim = stepped()
        shard = copy.deepcopy(optim.state_dict())
        shard["state"][1]["odd"] = make()
        before = {key: value.clone() for key, value in optim.state[model.bias].items()}
        refused(lambda: fsdp_optim.load_optim_state_dict(optim, shard), fsdp_optim.StateError, "'odd'", words)
        check_same("the state", dict(optim.state[model.bias]), before)

    @parameterized.expand([(name, format) for name in VALUES for format in ("safetensors", "dcp")])
    def test_in_extras(self, name: str, format: str) -> None:
        make, words = VALUES[name]
        model, optim = stepped()
        for key in ("extra", "per_rank_extra"):
            for at, value in {"'mine'": {"mine": make()}, "'deep'": {"deep": {"b": [make()]}}}.items():
                with self.subTest(f"{key} {at}"):
                    kind, text = error_text(
                        lambda: fsdp_optim.save(
                            self.root / "a",
                            model,
                            optim,
                            format=format,
                            **as_options(fsdp_optim.SaveOptions, **{key: value}, **QUIET),  # noqa: B023
                        )
                    )
                    self.assertEqual(kind, "CheckpointError", text[:500])
                    self.assertIn(f"state[{at}]", text[:500])
                    if name not in ("csr", "float4 without dimensions", "int4", "uint4"):
                        self.assertIn(words.replace(", or contains itself", ""), text)
        self.assertEqual(list(self.root.iterdir()), [])

    @parameterized.expand([("conj().imag",), ("conj",), ("imag.neg",)])
    def test_views_that_torch_computes_later(self, kind: str) -> None:
        number = torch.tensor([1 + 2j, 3 - 4j])
        value = {"conj().imag": number.conj().imag, "conj": number.conj(), "imag.neg": torch._neg_view(number.imag)}[
            kind
        ]
        model, optim = stepped()
        for format in ("safetensors", "dcp"):
            fsdp_optim.save(
                self.root / format,
                model,
                optim,
                state={"a": [value]},
                format=format,
                **as_options(fsdp_optim.SaveOptions, **QUIET),
            )
            (loaded,) = fsdp_optim.load(self.root / format, model, optim).state["a"]
            check_same(f"{kind}, {format}", loaded, value.resolve_conj().resolve_neg().clone())
            self.assertFalse(loaded.is_neg() or loaded.is_conj())


class ModelsWithoutElementsTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="fsdp_optim_elements_")
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        fsdp_optim.save(self.root / "there", *stepped(), **as_options(fsdp_optim.SaveOptions, **QUIET))

    def calls(self, model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Callable[[], Any]]:
        full = fsdp_optim.gather_full_optim_state_dict(*stepped(), None)
        weights = stepped()[0].state_dict()
        return {
            **readers(self.root, model, optim),
            "load": lambda: fsdp_optim.load(self.root / "there", model, optim),
            "load weights": lambda: fsdp_optim.load(self.root / "there", model),
            "gather weights": lambda: fsdp_optim.gather_full_model_state_dict(model, None),
            "scatter weights": lambda: fsdp_optim.scatter_full_model_state_dict(model, weights),
            "get_shard": lambda: fsdp_optim.get_shard_from_optim_state_dict(model, optim, full),
            "scatter": lambda: fsdp_optim.scatter_full_optim_state_dict(model, optim, full),
        }

    def check(self, calls: dict[str, Callable[[], Any]], *words: str) -> None:
        for name, call in calls.items():
            with self.subTest(name):
                kind, text = error_text(call)
                self.assertIn(kind, ("WrapperError", "StateError"), text)
                for word in words:
                    self.assertIn(word, text)
        self.assertEqual([path.name for path in self.root.iterdir()], ["there"])

    def test_lazy_parameters(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(5))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        self.check(self.calls(model, optim), "1.weight", "before the first forward pass", "run the model once")

    def test_lazy_buffers(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.LazyBatchNorm1d(affine=False))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        self.check(self.calls(model, optim), "1.running_mean", "before the first forward pass")

    @parameterized.expand(["nested", "jagged", "int4", "uint4", "csr", "sparse", "quantised"])
    def test_weights(self, name: str) -> None:
        others = {
            "sparse": lambda: torch.eye(3).to_sparse(),
            "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        }
        value = others[name]() if name in others else VALUES[name][0]()
        for kind in ("buffer", "parameter"):
            model = nn.Linear(4, 6)
            if kind == "buffer":
                model.register_buffer("odd", value)
            else:
                model.register_parameter("odd", nn.Parameter(value, requires_grad=False))
            calls = {
                "save": lambda: fsdp_optim.save(self.root / "a", model, **as_options(fsdp_optim.SaveOptions, **QUIET)),  # noqa: B023
                "save dcp": lambda: fsdp_optim.save(
                    self.root / "a",
                    model,  # noqa: B023
                    format="dcp",
                    **as_options(fsdp_optim.SaveOptions, **QUIET),
                ),
                "gather": lambda: fsdp_optim.gather_full_model_state_dict(model, None),  # noqa: B023
            }
            self.check(calls, "odd: ")

    def test_fake_tensors(self) -> None:
        with FakeTensorMode():
            model, optim = stepped()
        self.check(self.calls(model, optim), "weight", "fake tensor", "FakeTensorMode")

    def test_inside_fake_tensor_mode(self) -> None:
        model, optim = stepped()
        calls = self.calls(model, optim)
        with FakeTensorMode(allow_non_fake_inputs=True):
            self.check(calls, "FakeTensorMode is active")


def on_ranks(root: str) -> list[tuple[str, str]]:
    """The errors where one rank has such a value, by value and by rank."""
    errors = []
    for make, _ in VALUES.values():
        for odd in range(dist.get_world_size()):
            model = nn.parallel.DistributedDataParallel(nn.Linear(4, 6))
            optim = torch.optim.Adam(model.parameters())
            model(torch.ones(1, 4)).sum().backward()
            optim.step()
            if dist.get_rank() == odd:
                put(optim, "group", make())
            errors.append(
                error_text(
                    lambda: fsdp_optim.save(
                        root,
                        model,  # noqa: B023
                        optim,  # noqa: B023
                        **as_options(fsdp_optim.SaveOptions, **QUIET, timeout=60.0),
                    )
                )
            )
    return errors


class OnRanksTest(unittest.TestCase):
    def test_one_rank_has_the_value(self) -> None:
        with tempfile.TemporaryDirectory() as root:
            by_rank = run_on_ranks(on_ranks, 2, f"{root}/step")
            for index, errors in enumerate(zip(*by_rank, strict=True)):
                words = list(VALUES.values())[index // 2][1]
                check_refused(
                    f"{list(VALUES)[index // 2]} on rank {index % 2}",
                    errors,
                    errors[0][0],
                    "odd of param group 0",
                    words,
                )
                self.assertNotIn(errors[0][0], ("", "RecursionError", "RuntimeError", "NotImplementedError"))
            self.assertFalse(Path(root, "step").exists())
