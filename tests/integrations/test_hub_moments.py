"""Moments under the names of transformers' files: of a stacked model on some ranks, and of a model whose weights are apart."""

from __future__ import annotations

import tempfile
import unittest
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import check_same, refused_on_ranks, sorted_state
from kit.hub_models import build
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from safetensors.torch import load_file
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim import CallOptions, LoadOptions, SaveOptions
from fsdp_optim.model_views.transformers_models import views_of_transformers
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

LOADED = ("kit.loaded.hugging_face",)
NAMES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
QUIET: dict[str, Any] = {"progress": False}


def stacked(name: str) -> Any:
    model = build(name)
    model.units = ("model.layers.0", "model.layers.1", "")
    return model


def apart(name: str) -> nn.Module:
    """The same weights as transformers' files have them, each a parameter of its own."""
    from transformers.core_model_loading import revert_weight_conversion

    model = build(name)
    weights = dict(model.state_dict())
    stored = revert_weight_conversion(model, weights)
    root = nn.Module()
    params = dict(model.named_parameters())
    for key, tensor in stored.items():
        *path, last = key.split(".")
        module = root
        for text in path:
            if text not in module._modules:
                module.add_module(text, nn.Module())
            module = module._modules[text]  # type: ignore[assignment]
        if key in weights and key not in params:
            module.register_buffer(last, tensor.clone())
        else:
            module.register_parameter(last, nn.Parameter(tensor.clone()))
    return root


def train(model: nn.Module, steps: range) -> torch.optim.Optimizer:
    """Gradients are functions of the elements alone, so that a cut does not change them."""
    optim = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return train_on(model, optim, steps)


def train_on(model: nn.Module, optim: Any, steps: range) -> Any:
    for number in steps:
        for param in model.parameters():
            param.grad = param.detach() * (0.5 + number)
        optim.step()
    return optim


def stacked_moments(name: str, state: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """The first moments of the stacked parameters of a layer, from those of the experts."""
    at, gate, up, down = {
        "mixtral": ("model.layers.1.block_sparse_moe.experts", "w1", "w3", "w2"),
        "qwen3_moe": ("model.layers.1.mlp.experts", "gate_proj", "up_proj", "down_proj"),
        "deepseek_v3": ("model.layers.1.mlp.experts", "gate_proj", "up_proj", "down_proj"),
    }[name]
    experts = range(sum(key.startswith(f"{at}.") and key.endswith(f"{gate}.weight") for key in state))
    pairs = [[state[f"{at}.{e}.{part}.weight"]["exp_avg"] for part in (gate, up)] for e in experts]
    return {
        "model.layers.1.mlp.experts.gate_up_proj": torch.stack([torch.cat(pair) for pair in pairs]),
        "model.layers.1.mlp.experts.down_proj": torch.stack(
            [state[f"{at}.{e}.{down}.weight"]["exp_avg"] for e in experts]
        ),
    }


def resumed(folder: str, wrapper: str, names: tuple[str, ...]) -> None:
    """On one rank: state of unstacked training goes into the stacked model, which trains on, and its save goes back."""
    with cpu(), fairscale_on_cpu():
        for name in names:
            model = WRAPPERS[wrapper](stacked(name))
            group = dist.group.WORLD if wrapper in ("DDP", "plain") else None
            views = views_of_transformers(model)
            optim = torch.optim.AdamW(model.parameters(), lr=0.5)
            options = LoadOptions(views=views, process_group=group, compare=True, **QUIET)
            fsdp_optim.load(f"{folder}/{name}", model, optim, options=options)
            seen = CallOptions(views=views, process_group=group)
            check_oracle(f"{name}, loaded", name, model, optim, seen, 2)
            if name != "gpt_oss":
                full = fsdp_optim.gather_full_optim_state_dict(
                    model, optim, recipient_rank=None, key_by="name", options=CallOptions(process_group=group)
                )
                wanted = stacked_moments(name, oracle(name, 2)[1])
                check_same(f"{name}, stacked", {key: full["state"][key]["exp_avg"] for key in wanted}, wanted)
            train_on(model, optim, range(2, 4))
            check_oracle(f"{name}, trained on", name, model, optim, seen, 4)
            fsdp_optim.save(
                f"{folder}/{name}, on",
                model,
                optim,
                options=SaveOptions(views=views, process_group=group, durable=False, **QUIET),
                overwrite=True,
            )


def oracle(name: str, steps: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The weights and the state of unstacked training without the library."""
    model = apart(name)
    optim = train(model, range(steps))
    return dict(model.state_dict()), {key: dict(optim.state[param]) for key, param in model.named_parameters()}


def check_oracle(what: str, name: str, model: Any, optim: Any, options: CallOptions, steps: int) -> None:
    weights, state = oracle(name, steps)
    full = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None, key_by="name", options=options)
    check_same(f"{what}, state", sorted_state(full["state"]), sorted_state(state))
    gathered = fsdp_optim.gather_full_model_state_dict(model, None, options=options)
    check_same(f"{what}, weights", dict(sorted(gathered.items())), dict(sorted(weights.items())))


def learned(wrappers: tuple[str, ...]) -> None:
    """Views are learned of shards as of the plain model, and by one rank alone: no other rank is asked."""
    with cpu(), fairscale_on_cpu():
        for name, layers in (("mixtral", "model.layers"), ("vit", "vit.layers")):
            wanted = views_of_transformers(build(name))
            for wrapper in wrappers:
                model = build(name)
                model.units = (f"{layers}.0", f"{layers}.1", layers.partition(".")[0], "")
                model = WRAPPERS[wrapper](model)
                if dist.get_rank() == 0:
                    check_same(f"{name}, {wrapper}", views_of_transformers(model), wanted)


class TestMoments(unittest.TestCase):
    @expand(
        *some([("FSDP2", 1), ("FSDP2", 2), ("FSDP2", 3), ("FSDP1 flat", 2), ("FSDP1 orig", 3), ("DDP", 2)], every=1)
    )
    def test_state_under_the_names_of_the_hub(self, wrapper: str, world_size: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name in NAMES:
                model = apart(name)
                optim = train(model, range(2))
                fsdp_optim.save(f"{folder}/{name}", model, optim, options=SaveOptions(durable=False, **QUIET))
            run_on_ranks(resumed, world_size, folder, wrapper, NAMES)
            for name in NAMES:
                model = apart(name)
                optim = torch.optim.AdamW(model.parameters())
                fsdp_optim.load(f"{folder}/{name}, on", model, optim, options=LoadOptions(compare=True, **QUIET))
                check_oracle(f"{name}, apart again", name, model, optim, CallOptions(), 4)

    def test_views_are_learned_without_other_ranks(self) -> None:
        run_on_ranks(learned, 2, ("FSDP2", "FSDP1 flat", "FSDP1 orig", "DDP"))

    def test_the_word_hub_is_the_same_in_every_call(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(by_the_word, 2, folder)
            files = [load_file(f"{folder}/{how}/model.safetensors") for how in ("word", "list")]
            check_same("files", *files)
            self.assertEqual(*(fsdp_optim.inspect(f"{folder}/{how}").about["views"] for how in ("word", "list")))
            self.assertIn("model.layers.1.block_sparse_moe.experts.0.w3.weight", files[0])


def by_the_word(folder: str) -> None:
    """Saves by `views="hub"` and by the list, and a load by the word into fresh weights; and what the word cannot do."""
    with cpu():
        model = WRAPPERS["FSDP2"](stacked("mixtral"))
        optim = train_on(model, torch.optim.AdamW(model.parameters(), lr=0.01), range(2))
        for how, views in (("word", "hub"), ("list", views_of_transformers(model))):
            fsdp_optim.save(f"{folder}/{how}", model, optim, options=SaveOptions(views=views, durable=False, **QUIET))
        other = WRAPPERS["FSDP2"](stacked("mixtral"))
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        other_optim = torch.optim.AdamW(other.parameters())
        fsdp_optim.load(f"{folder}/word", other, other_optim, options=LoadOptions(views="hub", compare=True, **QUIET))
        wanted, loaded = (
            (
                fsdp_optim.gather_full_model_state_dict(a, None, options=CallOptions(views="hub")),
                fsdp_optim.gather_full_optim_state_dict(a, b, None, "name", options=CallOptions(views="hub")),
            )
            for a, b in ((model, optim), (other, other_optim))
        )
        check_same("loaded", loaded, wanted)
        seen = CallOptions(views="hub")
        if fsdp_optim.fingerprint(model, optim, options=seen) != fsdp_optim.fingerprint(
            other, other_optim, options=seen
        ):
            raise AssertionError("the fingerprints of equal models differ")
        refused_on_ranks(
            "names of their own",
            lambda: fsdp_optim.gather_full_model_state_dict(
                model, options=CallOptions(views="hub", name_of=lambda fqn, rank: fqn)
            ),
            "StateError",
            "views='hub' has the names of transformers' files, and name_of= gives parameters others",
        )
        plain = nn.Linear(2, 2)
        own = fsdp_optim.gather_full_model_state_dict(
            plain, None, options=CallOptions(views="hub", process_group=dist.group.WORLD)
        )
        check_same("no model of transformers", sorted(own or {}), ["bias", "weight"])
