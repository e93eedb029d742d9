"""Views that are learned from modules' own state-dict hooks: what they are, what is refused, and what is not touched."""

from __future__ import annotations

import copy
import tracemalloc
import unittest
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
from kit.hooked import (
    Attention,
    Hooked,
    alternating,
    experts,
    halves,
    joined_halves,
    joined_heads,
    stacked_experts,
)
from parameterized import parameterized
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp_optim
from fsdp_optim import CallOptions, View, WrapperError
from fsdp_optim.layout.views import numbers_of_part
from fsdp_optim.model_views.patterns import joined


def check_like_state_dict(model: nn.Module) -> list[View]:
    """Compare the names and elements that the Views give with those of the model's own state_dict()."""
    views, start = fsdp_optim.views_for(model), 0
    numbered, wanted = copy.deepcopy(model).double(), dict[str, Any]()
    for param in numbered.parameters():
        param.data = torch.arange(start, start + param.numel(), dtype=torch.float64).view(param.shape)
        start += param.numel()
    for live, param in numbered.named_parameters():
        name = live.replace("_checkpoint_wrapped_module.", "")
        of_name = [view for view in views if view.matches(name)]
        assert len(of_name) <= 1, (name, of_name)
        if not of_name:
            wanted[name] = param.detach().numpy()
        for view in of_name:
            for part, place in view.bind(name, tuple(param.shape)).parts:
                wanted[part] = param.detach().numpy().reshape(-1)[numbers_of_part(place)]
    saved = numbered.state_dict()
    assert saved.keys() == wanted.keys(), saved.keys() ^ wanted.keys()
    for name, value in saved.items():
        assert np.array_equal(value.numpy(), wanted[name]), name
    return views


def of(save: Any, load: Any = None, **shapes: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleDict({"layer": Hooked(save, load, **(shapes or {"w13": (8, 3)}))})


def keep(change: Callable[[Any, str], None]) -> Any:
    """A hook that does something with the key of w13."""
    return lambda module, state, prefix: change(state, f"{prefix}w13")


def rename(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}weight"] = state.pop(f"{prefix}w13")


def transpose(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}w13"] = state[f"{prefix}w13"].T.contiguous()


LEARNED = {
    "halves": (of(halves, joined_halves), "(w1 + w3) c", {"layer.w1": "w1 c", "layer.w3": "w3 c"}),
    "no load hook": (of(halves), "(w1 + w3) c", {"layer.w1": "w1 c", "layer.w3": "w3 c"}),
    "alternating": (of(alternating), "(d (w1 + w3)) c", {"layer.w1": "(d w1) c", "layer.w3": "(d w3) c"}),
    "renamed": (of(rename), "d c", {"layer.weight": "d c"}),
    "transposed": (of(transpose), "d c", {"layer.w13": "c d"}),
    "experts": (of(experts, stacked_experts, stack=(3, 4, 10)), "e c (gate + up)",
                {"layer.{e}.gate": "gate c", "layer.{e}.up": "up c"}),
    "attention": (lambda: Attention(2, 3, 4, 5), "(d (a_0 + a_1 + a_2)) c",
                  {"q": "(d a_0) c", "k": "(d a_1) c", "v": "(d a_2) c"}),
}  # fmt: skip


class TestLearned(unittest.TestCase):
    @parameterized.expand(list(LEARNED))
    def test_views_give_what_state_dict_gives(self, what: str) -> None:
        make, axes, parts = LEARNED[what]
        (view,) = check_like_state_dict(make())
        self.assertEqual((view.axes, dict(view.parts)), (axes, parts))

    @parameterized.expand(
        [
            ("drops", lambda state, key: state.pop(key)),
            ("adds", lambda state, key: state.update({"version": torch.tensor(3), "text": "x"})),
            ("adds a copy", lambda state, key: state.update({"copy": state[key].clone(), "same": state[key]})),
            ("puts it back", lambda state, key: state.update({key: state.pop(key).detach()})),
        ]
    )
    def test_what_is_not_renamed_or_cut_keeps_its_live_name(self, _: str, change: Any) -> None:
        self.assertEqual(fsdp_optim.views_for(of(keep(change))()), [])

    def test_without_hooks_there_are_none(self) -> None:
        self.assertEqual(fsdp_optim.views_for(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))), [])

    def test_the_hooks_of_torch_are_none_of_the_models(self) -> None:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        inner = Hooked(halves, joined_halves, w13=(4, 2))
        model = nn.ModuleDict({"layer": checkpoint_wrapper(inner)})
        self.assertEqual(fsdp_optim.views_for(checkpoint_wrapper(nn.Linear(2, 2))), [])
        self.assertEqual([view.name for view in fsdp_optim.views_for(model)], ["layer.w13"])
        check_like_state_dict(model)

    def test_equal_layers_are_learned_once_and_have_one_view(self) -> None:
        layers = nn.ModuleList(Hooked(halves, joined_halves, w13=(8, 3)) for _ in range(12))
        model = nn.ModuleDict({"layers": layers, "other": Hooked(halves, joined_halves, w13=(8, 3))})
        views = check_like_state_dict(model)
        self.assertEqual([view.name for view in views], ["layers.{i}.w13", "other.w13"])
        times = [
            layer.num_calls[0] for layer in layers
        ]  # each once without elements, which shows that it does the same
        self.assertEqual((times[0] > 1, times[1:]), (True, [1] * 11))

    @parameterized.expand([("small", (8, 3)), ("large", (2048, 1024))])
    def test_hooks_that_do_otherwise_in_a_layer_of_some_name(self, _: str, shape: tuple[int, ...]) -> None:
        """The modules are equal in all but their names, which hooks get as the prefix of keys."""

        def split(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
            (alternating if prefix == "1." else halves)(module, state, prefix)
            if prefix == "2.":
                first, second = f"{prefix}w1", f"{prefix}w3"
                state[first], state[second] = state[second], state[first]

        layers = nn.ModuleList(Hooked(split, w13=shape) for _ in range(4))
        names = [view.name for view in check_like_state_dict(layers)]
        self.assertEqual(names, ["0.w13", "3.w13", "1.w13", "2.w13"])

    def test_layers_whose_attributes_differ_are_learned_apart(self) -> None:
        """The same hooks and shapes, and other groups of heads."""
        model = nn.ModuleList([Attention(2, 4, 3, 5), Attention(3, 2, 3, 5), Attention(2, 4, 3, 5)])
        self.assertEqual(model[0].qkv.shape, model[1].qkv.shape)
        views = check_like_state_dict(model)
        self.assertEqual([view.name for view in views], ["0.qkv", "2.qkv", "1.qkv"])

    def test_hooks_of_inner_modules_come_first(self) -> None:
        def prefixed(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
            for name in [name for name in state if name.startswith(f"{prefix}inner.")]:
                state[f"{prefix}core.{name.removeprefix(f'{prefix}inner.')}"] = state.pop(name)

        def unprefixed(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
            for name in [name for name in state if name.startswith(f"{prefix}core.")]:
                state[f"{prefix}inner.{name.removeprefix(f'{prefix}core.')}"] = state.pop(name)

        model = Hooked(prefixed, unprefixed, own=(2,))
        model.inner = Hooked(halves, joined_halves, w13=(8, 3), other=(3, 4))
        views = check_like_state_dict(model)
        self.assertEqual(sorted(view.name for view in views), ["inner.other", "inner.w13"])

    def test_a_dict_that_the_hook_of_the_root_returns_is_the_state_dict(self) -> None:
        class Root(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(2, 3)
                self._register_state_dict_hook(lambda m, state, *_: {f"model.{n}": v for n, v in state.items()})

        views = check_like_state_dict(Root())
        self.assertEqual([part for view in views for part, _ in view.parts], ["model.inner.weight", "model.inner.bias"])
        self.assertEqual(fsdp_optim.views_for(nn.ModuleList([Root()])), [])  # torch heeds what the root returns alone

    def test_a_module_in_two_places_has_views_by_both_names(self) -> None:
        layer = Hooked(halves, joined_halves, w13=(8, 3))
        views = fsdp_optim.views_for(nn.ModuleDict({"a": layer, "b": layer}))
        self.assertEqual([view.name for view in views], ["a.w13", "b.w13"])

    def test_buffers_are_learned_too(self) -> None:
        model = Hooked(lambda module, state, prefix: state.update(bias=state.pop("counts")), None, w=(2,))
        model.register_buffer("counts", torch.zeros(4))
        self.assertEqual([view.name for view in fsdp_optim.views_for(model)], ["counts"])


def load_swapped(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}w13"] = torch.cat([state.pop(f"{prefix}w3"), state.pop(f"{prefix}w1")])


def load_other_name(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}w13_"] = torch.cat([state.pop(f"{prefix}w1"), state.pop(f"{prefix}w3")])


def mixed(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}qkv"] = torch.cat([state.pop(f"{prefix}q"), state.pop(f"{prefix}k")])


def raises(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    raise KeyError("lacking")


SHUFFLED = torch.randperm(24, generator=torch.Generator().manual_seed(1))

REFUSED: dict[str, tuple[Any, str]] = {
    "casts": (of(keep(lambda s, key: s.update(w=s.pop(key).bfloat16()))), r"compute w, of torch.bfloat16"),
    "casts and back": (
        of(keep(lambda s, key: s.update(w=s.pop(key).float().long()))),
        r"23 elements of 24 are in no part",
    ),
    "scales": (of(keep(lambda s, key: s.update(w=s.pop(key) * 2))), r"compute w, whose values are no elements"),
    "scales in place": (of(keep(lambda s, key: s[key].mul_(2))), r"compute layer.w13, whose values"),
    "averages": (of(keep(lambda s, key: s.update(w=s.pop(key).sum(0)))), r"compute w, whose values"),
    "pads": (of(keep(lambda s, key: s.update(w=nn.functional.pad(s.pop(key), (0, 1))))), r"compute w, whose values"),
    "some rows": (of(keep(lambda s, key: s.update(w=s.pop(key)[:5]))), r"layer.w13.*9 elements of 24 are in no part"),
    "a row twice": (
        of(keep(lambda s, key: s.update(a=s[key][:5], b=s.pop(key)[4:]))),
        r"27 elements and the live parameter 24",
    ),
    "shuffles": (
        of(keep(lambda s, key: s.update(w=s.pop(key).view(-1)[SHUFFLED]))),
        r"what they make of layer.w13: its part w",
    ),
    "mixes two": (of(mixed, None, q=(4, 3), k=(2, 3)), r"layer.qkv has elements of layer.q and of layer.k"),
    "raises": (of(raises), r"raises of layer \(Hooked\) raised KeyError: 'lacking'|raised KeyError: 'lacking'"),
    "load swaps": (of(halves, load_swapped), r"do not make layer.w13 again: there is other elements"),
    "load forgets": (of(halves, load_other_name), r"do not make layer.w13 again: there is no such entry"),
    "load raises": (of(halves, raises), r"load_state_dict\(\) cannot take what state_dict\(\) gives.*lacking"),
}


def uses_weight(module: Any, state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}w13"] = module.w13.detach() + 0


def reduces(module: Any, state: dict[str, Any], prefix: str) -> None:
    torch.ops._c10d_functional.all_reduce(state[f"{prefix}w13"], "sum", "0")


def writes(module: Any, state: dict[str, Any], prefix: str) -> None:
    OUTSIDE.add_(1)
    halves(module, state, prefix)


def replaces(module: Any, state: dict[str, Any], prefix: str) -> None:
    module.w13 = nn.Parameter(torch.ones(8, 3))
    halves(module, state, prefix)


def moves(module: Any, state: dict[str, Any], prefix: str) -> None:
    module.w13.data = torch.ones(8, 3)
    halves(module, state, prefix)


def counts(module: Any, state: dict[str, Any], prefix: str) -> None:
    module.num_saves = getattr(module, "num_saves", 0) + 1
    halves(module, state, prefix)


def loads_by_itself(module: Any, state: dict[str, Any], prefix: str) -> None:
    with torch.no_grad():
        module.w13.copy_(torch.cat([state.pop(f"{prefix}w1"), state.pop(f"{prefix}w3")]))


OUTSIDE = torch.zeros(1)

FORBIDDEN: dict[str, tuple[Any, str]] = {
    "reads a weight": (of(uses_weight), r"uses the live tensor layer.w13"),
    "all-reduces": (of(reduces), r"makes a collective call, _c10d_functional.all_reduce"),
    "writes elsewhere": (of(writes), r"writes into a tensor that is not in the dict: aten.add_"),
    "replaces a weight": (
        of(replaces),
        r"changed the live model, the tensor w13 of this Hooked, which has been restored",
    ),
    "moves a weight": (of(moves), r"changed the live model, the elements of w13 of this Hooked"),
    "counts": (of(counts), r"changed the live model, the attribute num_saves of this Hooked"),
    "load copies": (of(halves, loads_by_itself), r"uses the live tensor layer.w13"),
}


class TestRefused(unittest.TestCase):
    @parameterized.expand([*REFUSED, *FORBIDDEN])
    def test_it_names_module_hook_parameter_and_fix(self, what: str) -> None:
        make, text = (REFUSED | FORBIDDEN)[what]
        with self.assertRaisesRegex(WrapperError, text) as raised:
            fsdp_optim.views_for(make())
        for name in ("layer (Hooked)", "hooks _counted.<locals>.change", "views=[View(...)]", "layer."):
            self.assertIn(name, str(raised.exception))

    @parameterized.expand([*REFUSED, *FORBIDDEN])
    def test_nothing_of_the_model_is_changed(self, what: str) -> None:
        model = (REFUSED | FORBIDDEN)[what][0]()
        layer, outside = model["layer"], OUTSIDE.clone()
        places = [(name, id(param), param.data_ptr(), param.clone()) for name, param in model.named_parameters()]
        attributes, generator = dict(vars(layer)), torch.get_rng_state()
        with self.assertRaises(WrapperError):
            fsdp_optim.views_for(model)
        self.assertEqual(vars(layer), attributes)
        self.assertTrue(torch.equal(OUTSIDE, outside) and torch.equal(torch.get_rng_state(), generator))
        for (name, param), (before, place, memory, value) in zip(model.named_parameters(), places, strict=True):
            self.assertEqual((name, id(param), param.data_ptr()), (before, place, memory))
            self.assertTrue(torch.equal(param, value))

    @parameterized.expand([("a name", "hook"), ("a View", View("a", "c", {"b": "c"})), ("texts", ["hooks"])])
    def test_what_is_no_list_of_views(self, _: str, views: Any) -> None:
        with self.assertRaisesRegex(fsdp_optim.StateError, r"views must be a list of Views, .*, 'hooks' or"):
            CallOptions(views=views).validate()


class Counting(TorchDispatchMode):
    """The bytes of the largest tensor in memory that an operation has made."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self.most = max(self.most, tensor.nbytes)
        return result


def by_size(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Large parameters are halves, small ones alternate: no operation shows this at all sizes."""
    (halves if state[f"{prefix}w13"].numel() > 1 << 25 else alternating)(module, state, prefix)


def shifted(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """The same operations, with another argument for large parameters."""
    w13 = state[f"{prefix}w13"]
    state[f"{prefix}w13"] = w13.roll(1 if w13.numel() > 1 << 20 else 2, 0)


def cut_at(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    w13 = state.pop(f"{prefix}w13")
    state[f"{prefix}w1"], state[f"{prefix}w3"] = w13[:4096].contiguous(), w13[4096:].contiguous()


LARGE: dict[str, Callable[[], nn.Module]] = {
    "halves": of(halves, joined_halves, w13=(2 * 14336, 4096)),
    "alternating": of(alternating, None, w13=(2 * 14336, 4096)),
    "rows of fixed sizes": of(cut_at, joined_halves, w13=(4096 + 1024, 8192)),
    "experts": of(experts, stacked_experts, stack=(64, 2048, 4096)),
    "attention": lambda: nn.ModuleDict({"layer": Attention(8, 8, 128, 8192)}),
    "attention of four groups": lambda: nn.ModuleDict({"layer": Attention(4, 16, 128, 8192)}),
    "attention of three groups": lambda: nn.ModuleDict({"layer": Attention(3, 2, 80, 16384)}),
}
SMALL: dict[str, Callable[[], nn.Module]] = {
    "halves": of(halves, joined_halves, w13=(8, 6)),
    "alternating": of(alternating, None, w13=(8, 6)),
    "experts": of(experts, stacked_experts, stack=(64, 3, 6)),
    "attention": lambda: nn.ModuleDict({"layer": Attention(8, 8, 128, 3)}),
    "attention of four groups": lambda: nn.ModuleDict({"layer": Attention(4, 16, 128, 3)}),
    "attention of three groups": lambda: nn.ModuleDict({"layer": Attention(3, 2, 80, 3)}),
}


class TestLarge(unittest.TestCase):
    @parameterized.expand(list(LARGE))
    def test_gigabytes_are_learned_in_a_few_megabytes(self, what: str) -> None:
        with torch.device("meta"):
            model = LARGE[what]()
        self.assertGreater(8 * max(param.numel() for param in model.parameters()), 100 << 20)
        tracemalloc.start()
        with Counting() as counting:
            (view,) = fsdp_optim.views_for(model)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self.assertLess(max(peak, counting.most), 32 << 20)
        if what in SMALL:
            self.assertEqual([view], check_like_state_dict(SMALL[what]()))
        saved = model.state_dict()
        (live,) = dict(model.named_parameters())
        shapes = view.bind(live, tuple(model.get_parameter(live).shape)).shapes
        self.assertEqual(shapes, {name: tuple(value.shape) for name, value in saved.items()})

    def test_twins_and_the_exact_way_have_one_view(self) -> None:
        """Just too large to be learned exactly, and small enough to be compared."""
        model = nn.ModuleDict({"layer": Attention(8, 4, 32, 1024)})
        self.assertGreater(8 * prod(model["layer"].qkv.shape), 8 << 20)
        check_like_state_dict(model)

    @parameterized.expand([("other operations", by_size), ("other arguments", shifted)])
    def test_hooks_that_do_otherwise_when_parameters_are_large(self, _: str, save: Any) -> None:
        with torch.device("meta"):
            model = of(save, None, w13=(2 * 14336, 4096))()
        with self.assertRaisesRegex(WrapperError, "take no smaller shapes|at smaller sizes"):
            fsdp_optim.views_for(model)

    def test_hooks_that_need_elements_and_are_large(self) -> None:
        def looks(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
            if state[f"{prefix}w13"].max().item() >= 0:
                halves(module, state, prefix)

        check_like_state_dict(of(looks, None, w13=(8, 3))())
        with torch.device("meta"):
            model = of(looks, None, w13=(2 * 14336, 4096))()
        with self.assertRaisesRegex(WrapperError, "do not run on the meta device, and 939524096 bytes of numbers"):
            fsdp_optim.views_for(model)


def layer(number: object, part: str = "w1", size: int = 2) -> View:
    return View(f"a.{number}.w", "(d s) c", {f"a.{number}.{part}": "d s c"}, d=size)


class TestPatterns(unittest.TestCase):
    @parameterized.expand(
        [
            ("all", [layer(0), layer(1), layer(10)], [], ["a.{i}.w"]),
            ("one", [layer(0)], ["a.1.w"], ["a.0.w"]),
            ("other axes between", [layer(0), layer(2)], ["a.1.w"], ["a.0.w", "a.2.w"]),
            ("other sizes between", [layer(0), layer(2), layer(1, size=3)], [], ["a.0.w", "a.2.w", "a.1.w"]),
            ("other names", [layer(0), layer(1), layer("x")], [], ["a.0.w", "a.1.w", "a.x.w"]),
            ("other parts", [layer(0), layer(1, "w2")], [], ["a.0.w", "a.1.w"]),
        ]
    )
    def test_layers_are_joined(self, _: str, views: list[View], others: list[str], wanted: list[str]) -> None:
        names = [*(view.name for view in views), *others]
        result = joined(views, names)
        self.assertEqual([view.name for view in result], wanted)
        for view in views:
            (same,) = [each for each in result if each.matches(view.name)]
            self.assertEqual(same.bind(view.name, (12, 3)).shapes, view.bind(view.name, (12, 3)).shapes)

    def test_two_numbers_and_axes_that_are_called_like_placeholders(self) -> None:
        views = [
            View(
                f"a.{block}.b.{expert}.w",
                "(i + j) k",
                {f"a.{block}.b.{expert}.x": "i k", f"a.{block}.b.{expert}.y": "j k"},
            )
            for block in range(2)
            for expert in range(3)
        ]
        (view,) = joined(views, [view.name for view in views])
        self.assertEqual(view.name, "a.{l}.b.{m}.w")
        self.assertEqual(view.bind("a.1.b.2.w", (4, 1)).names, ("a.1.b.2.x", "a.1.b.2.y"))

    def test_numbers_of_parts_that_are_not_those_of_the_layer(self) -> None:
        views = [View(f"a.{n}.w", "c", {f"b.{n + 1}.w": "c"}) for n in range(3)]
        self.assertEqual(joined(views, []), views)


class TestHeads(unittest.TestCase):
    def test_the_hooks_of_the_kit_undo_each_other(self) -> None:
        module = Attention(2, 3, 4, 5)
        module.qkv.data = torch.randn_like(module.qkv)
        state = dict(module.state_dict())
        joined_heads(module, state, "")
        self.assertTrue(torch.equal(state["qkv"], module.qkv))
