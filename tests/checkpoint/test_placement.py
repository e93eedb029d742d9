"""placement(): the bytes of each rank are those that the live wrappers hold, parameter by parameter."""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

import torch
from kit.checkpoints import Whole
from kit.commands import called
from kit.compare import check_same
from kit.folders import SharedFolder
from kit.local_parts import local_of
from kit.models import mlp
from kit.trained import Oracle, Trained
from kit.wrapping import cpu
from kit.wraps import in_fsdp1, in_fsdp2, wrap_units
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.errors import StateError
from fsdp_optim.testing import run_on_ranks

QUICK = fsdp_optim.SaveOptions(durable=False, progress=False)
BUFFERS = ("mean", "empty", "*.offset", "*.brief")
UNITS = ("stem", "block.0", "block")


def in_units_by_number(model: nn.Module) -> Any:
    return wrap_units(model, in_fsdp1, ["0", "2", "4", ""])


def in_one_fsdp2(model: nn.Module) -> Any:
    return wrap_units(model, in_fsdp2, [""])


MODELS = {"whole": Whole, "mlp": mlp}
BY_NUMBER: dict[str, Any] = {"by number": in_units_by_number, "one FSDP2": in_one_fsdp2}


def held(wrap: str, model: str) -> dict[str, Any]:
    """What this rank holds, counted by the numbers of elements that the kit has given to every parameter."""
    with cpu():
        trained = Trained(BY_NUMBER.get(wrap, wrap), model=MODELS[model])
    numbers, nbytes, padding = trained.numbers, dict[str, int](), 0
    first = min(numbers.start.values())
    for param, index in zip(trained.params, trained.index, strict=True):
        local = local_of(param).detach()
        spare = local.untyped_storage().nbytes() - local.nbytes if "FSDP2" in wrap or wrap == "HSDP" else 0
        padding += int((index < first).sum()) * local.itemsize + spare
        values = {"": local, **{f":{name}": local_of(value) for name, value in trained.optim.state[param].items()}}
        for suffix, value in values.items():
            if value.dim() == 0:
                nbytes["steps"] = nbytes.get("steps", 0) + value.nbytes
                continue
            padding += int((index < first).sum()) * value.itemsize if suffix else 0
            for name, start in numbers.start.items():
                num = int(((index >= start) & (index < start + numbers.numel[name])).sum())
                if num:
                    nbytes[name + suffix] = nbytes.get(name + suffix, 0) + num * value.itemsize
    for name, buffer in trained.model.named_buffers():
        if not name.endswith("scratch"):
            nbytes["buffers"] = nbytes.get("buffers", 0) + buffer.nbytes
    return {"nbytes": nbytes, "padding": padding}


def placed(placement: fsdp_optim.PlacementResult, rank: int, params: set[str]) -> dict[str, Any]:
    """The same from the result."""
    nbytes: dict[str, int] = {}
    for tensor in placement.tensors:
        fqn = tensor.name.partition(":")[0]
        key = "buffers" if fqn not in params else "steps" if tensor.kind == "step" else tensor.name
        if (num := tensor.nbytes_on(rank)) or key in ("buffers", "steps"):
            nbytes[key] = nbytes.get(key, 0) + num
    return {"nbytes": nbytes, "padding": placement.padding[rank]}


class PlacementTest(SharedFolder):
    oracles: dict[str, Oracle]

    @classmethod
    def fill(cls) -> None:
        cls.oracles = {name: Oracle(model=model) for name, model in MODELS.items()}
        for name, oracle in cls.oracles.items():
            fsdp_optim.save(cls.root / name, oracle.model, oracle.optim, step=3, options=QUICK)

    @parameterized.expand(
        [
            ("FSDP2", "whole", "fsdp2", 2, None),
            ("FSDP2", "whole", "fsdp2", 3, None),
            ("one FSDP2", "mlp", "fsdp2", 4, None),
            ("HSDP", "whole", "hsdp:2x2", 4, None),
            ("FSDP1 flat", "whole", "fsdp1", 2, UNITS),
            ("FSDP1 flat", "whole", "fsdp1", 3, UNITS),
            ("by number", "mlp", "fsdp1", 3, None),
            ("fairscale flat", "whole", "fairscale", 2, UNITS),
            ("fairscale flat", "whole", "fairscale", 3, UNITS),
            ("DDP", "whole", "ddp", 2, None),
        ]
    )
    def test_ranks_hold_what_it_says(self, wrap: str, model: str, wrapper: str, ranks: int, units: Any) -> None:
        result = fsdp_optim.placement(self.root / model, ranks=ranks, wrapper=wrapper, units=units, replicated=BUFFERS)
        params = set(self.oracles[model].names)
        for rank, live in enumerate(run_on_ranks(held, ranks, wrap, model)):
            planned = placed(result, rank, params)
            check_same(f"rank {rank}", dict(sorted(planned["nbytes"].items())), dict(sorted(live["nbytes"].items())))
            self.assertEqual(planned["padding"], live["padding"])
            self.assertEqual(result.nbytes[rank], sum(live["nbytes"].values()) + live["padding"])
        self.assertEqual(result.largest, result.nbytes.index(max(result.nbytes)))
        self.assertEqual(result.imbalance, max(result.nbytes) * ranks / sum(result.nbytes))

    def test_empty_ranks(self) -> None:
        result = fsdp_optim.placement(self.root / "whole", ranks=8, replicated=BUFFERS)
        empty = {each.name: each for each in result.empty}
        shapes = {name: param.shape for name, param in self.oracles["whole"].model.named_parameters()}
        wanted = {name: f"{-(-shape[0] // -(-shape[0] // 8))}..7" for name, shape in shapes.items() if shape[0] < 7}
        self.assertEqual({name: each.ranks for name, each in empty.items() if each.size < 7}, wanted)
        self.assertEqual(empty["scale"].size, 1)
        self.assertTrue(any(line.startswith("1..7: no element of scale") for line in result.describe_empty()))

    def test_weights_of_no_optimizer_are_said(self) -> None:
        model = nn.Linear(4, 6)
        optim = torch.optim.SGD([model.weight], lr=0.1)
        fsdp_optim.save(self.root / "frozen", model, optim, options=QUICK)
        result = fsdp_optim.placement(self.root / "frozen", ranks=3)
        self.assertTrue(any("1 weight that the optimizer does not have, such as bias" in rule for rule in result.rules))
        self.assertEqual(result.weights, (40, 40, 40))

    def test_ids(self) -> None:
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        optim = torch.optim.Adam(model.parameters())
        model(torch.ones(4)).sum().backward()
        optim.step()
        file = self.own_folder() / "both.pt"
        torch.save({"model": model.state_dict(), "optimizer": optim.state_dict()}, file)
        result = fsdp_optim.placement(file, ranks=2, wrapper="fsdp1")
        self.assertIn("matched with the weights", result.rules[1])
        self.assertEqual(result.state, (2 * 4 * (30 + 28) // 2 + 2 * 4,) * 2)  # a step for each of two flat parameters
        torch.save({"optimizer": optim.state_dict()}, file)
        self.assertEqual(fsdp_optim.placement(file, ranks=2).state, (2 * 4 * 29 + 4 * 4,) * 2)
        with self.assertRaisesRegex(StateError, "by ids, which fit no weights"):
            fsdp_optim.placement(file, ranks=2, wrapper="fairscale")

    @parameterized.expand(
        [
            ("fsdp3", 4, "wrapper='fsdp3' is unknown: give one of fsdp2"),
            ("hsdp", 4, "is unknown"),
            ("hsdp:2x3", 4, "2 x 3 = 6 ranks, and ranks is 4"),
            ("fsdp2", 0, "ranks must be at least 1"),
            (3, 4, "wrapper=3 is unknown"),
        ]
    )
    def test_wrong_wrappers(self, wrapper: Any, ranks: int, why: str) -> None:
        with self.assertRaisesRegex(StateError, re.escape(why)):
            fsdp_optim.placement(self.root / "mlp", ranks=ranks, wrapper=wrapper)

    def test_a_text_is_no_list(self) -> None:
        for name in ("units", "replicated"):
            with self.assertRaisesRegex(StateError, f"{name} must be a list of names, as in .*, not 'layers'"):
                fsdp_optim.placement(self.root / "mlp", ranks=2, **{name: "layers"})

    def test_values_of_other_shapes_are_said_once(self) -> None:
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
        optim = torch.optim.Adafactor(model.parameters())
        model(torch.ones(6)).sum().backward()
        optim.step()
        path = self.own_folder() / "a"
        fsdp_optim.save(path, model, optim, options=QUICK)
        state = sum(value.nbytes for values in optim.state.values() for value in values.values() if value.dim())
        cut = sum(optim.state[layer.bias]["variance"].nbytes for layer in model)
        for wrapper, steps in (("fsdp2", 4), ("fsdp1", 2)):
            result = fsdp_optim.placement(path, ranks=2, wrapper=wrapper)
            [said] = [rule for rule in result.rules if "another shape" in rule]
            self.assertRegex(said, "^4 values with another shape than the parameter, such as 0.weight:row_var")
            self.assertEqual(result.state[0] + result.state[1], 2 * state - cut + 2 * 4 * steps)

    def test_files_without_an_optimizer_have_an_order_of_their_own(self) -> None:
        path = self.own_folder() / "a"
        fsdp_optim.save(path, mlp(), options=QUICK)
        rules = fsdp_optim.placement(path, ranks=2, wrapper="fairscale").rules
        self.assertIn("in the order of the checkpoint, which may be another", rules[0])


class PlacementPageTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        layers = nn.ModuleList([nn.Linear(40, 700) for _ in range(12)])
        cls.model = nn.ModuleDict({"layers": layers, "head<&": nn.Linear(5, 3, bias=False)})
        optim = torch.optim.Adam(cls.model.parameters())
        for param in cls.model.parameters():
            param.grad = torch.ones_like(param)
        optim.step()
        fsdp_optim.save(cls.root / "a", cls.model, optim, step=4, options=QUICK)

    @parameterized.expand([("fsdp2", 512), ("fsdp1", 512), ("fsdp2", 1), ("hsdp:4x2", 8), ("fairscale", 3)])
    def test_the_map(self, wrapper: str, ranks: int) -> None:
        file = self.own_folder() / "page.html"
        result = fsdp_optim.placement(self.root / "a", ranks=ranks, wrapper=wrapper, html=file)
        text = file.read_text()
        self.assertLess(len(text), 60_000)
        self.assertEqual(text.count('<span title="rank '), min(ranks, 64))
        self.assertIn("layers.0 to 11, each of 12", text)
        self.assertIn("head&lt;&amp;", text)
        for strip in re.findall(r'<div class="ranks">(.*?)</div>', text):
            self.assertEqual(sum(map(int, re.findall(r"flex:(\d+)", strip))), min(ranks, 64))
        self.assertNotIn("<td>step</td>", text)
        for rule in result.rules:
            self.assertTrue(escape(rule) in text, rule)
        for piece in ("http:", "https:", "<script", "<link", "url(", "@import", "head<"):
            self.assertFalse(piece in text, piece)
        tallest = max(
            sum(map(float, re.findall(r"height:([\d.]+)%", bar))) for bar in re.findall(r"<span title.*?</span>", text)
        )
        self.assertAlmostEqual(tallest, 100, delta=0.1)
        self.assertNotIn("<h2>On ", self._page_without_ranks())

    def _page_without_ranks(self) -> str:
        file = self.own_folder() / "page.html"
        fsdp_optim.inspect(self.root / "a", html=file)
        return file.read_text()

    def test_the_command(self) -> None:
        code, out = self._called("inspect", self.root / "a", "--ranks", "4", "--wrapper", "fsdp2")
        self.assertEqual(code, 0)
        result = fsdp_optim.placement(self.root / "a", ranks=4)
        self.assertIn("on 4 ranks under fsdp2\n", out)
        self.assertIn(f"imbalance: {result.imbalance:.4g} (largest / mean)", out)
        self.assertIn("empty:     ranks 3: no element of head<&.weight, which has 3 rows", out)
        self.assertEqual(len(re.findall(r"^ *(?:0\.\.2|3) .*%$", out, re.MULTILINE)), 2)
        every = self._called("inspect", self.root / "a", "--ranks", "40", "--all")[1]
        self.assertEqual(len(re.findall(r"^ *\d+ .*%$", every, re.MULTILINE)), 40)

    def test_the_page_and_json_of_the_command(self) -> None:
        page = self.own_folder() / "page.html"
        given = ("--ranks", "8", "--wrapper", "hsdp:4x2", "--html", page, "--json")
        code, out = self._called("inspect", self.root / "a", *given)
        self.assertEqual(code, 0)
        printed = json.loads(out)["placement"]
        result = fsdp_optim.placement(self.root / "a", ranks=8, wrapper="hsdp:4x2")
        self.assertEqual(printed["nbytes"], list(result.nbytes))
        self.assertEqual(printed["tensors"][0]["runs"][0]["nbytes"], result.tensors[0].runs[0].nbytes)
        self.assertEqual((printed["num_ranks"], printed["imbalance"]), (8, result.imbalance))
        self.assertIn("<h2>On 8 ranks under hsdp:4x2</h2>", page.read_text())
        self.assertEqual(self._called("inspect", self.root / "a", "--ranks", "8", "--wrapper", "no")[0], 2)

    def _called(self, *arguments: Any) -> tuple[int, str]:
        code, out, _ = called(*arguments)
        return code, out
