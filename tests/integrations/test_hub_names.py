"""The names of transformers' own files, as Views: what a save writes by them is what `save_pretrained` writes."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
from kit.cases import expand, some
from kit.compare import check_same
from kit.hub_models import JOINED, MODELS, all_classes, build, output_of, smaller
from kit.pretrained import transformers
from safetensors.torch import load_file

import fsdp_optim
from fsdp_optim import LoadOptions, SaveOptions, View
from fsdp_optim.layout.views import numbers_of_part
from fsdp_optim.model_views.transformers_models import views_of_transformers

SHARDS = 80
NOT_OPENED = ("JevForDecision",)
"""Classes that `from_pretrained` of transformers 5.23 cannot open from their own folders of small sizes."""
QUIET: dict[str, Any] = {"durable": False, "progress": False}


def saved(model: Any, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What `save_pretrained` writes of a model, and what a save through its Views writes."""
    model.save_pretrained(folder / "hub")
    fsdp_optim.save(folder / "own", model, options=SaveOptions(views=views_of_transformers(model), **QUIET))
    model.config.save_pretrained(folder / "own")
    return load_file(folder / "hub" / "model.safetensors"), load_file(folder / "own" / "model.safetensors")


def seen(model: Any, views: list[View]) -> dict[str, torch.Tensor]:
    """The weights of a model by the names of its files, cut by the numbers of their elements."""
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        matching = [view for view in views if view.matches(name)]
        parts = matching[0].bind(name, tuple(tensor.shape)).parts if matching else ()
        assert len(matching) < 2, name
        weights |= {part: tensor.reshape(-1)[torch.from_numpy(numbers_of_part(place))] for part, place in parts}
        weights |= {} if matching else {name: tensor}
    return weights


def check_seen(model: Any) -> int:
    """Compare what Views make of the weights with what transformers' own conversion makes of them."""
    from transformers.core_model_loading import revert_weight_conversion

    views = views_of_transformers(model)
    viewed = seen(model, views)
    for name, tensor in revert_weight_conversion(model, dict(model.state_dict())).items():
        joined = [view for view in views if name not in viewed and view.matches(name)]
        parts = joined[0].bind(name, tuple(tensor.shape)).parts if joined else ()
        for part, place in parts:
            check_same(
                f"{name}: {part}", viewed.pop(part), tensor.reshape(-1)[torch.from_numpy(numbers_of_part(place))]
            )
        if not joined:
            check_same(name, viewed.pop(name), tensor)
    check_same("more than transformers has", sorted(viewed), [])
    return len(views)


def check_files(model: Any) -> None:
    """Load what `save_pretrained` writes through the Views, and open by `from_pretrained` what a save through them writes."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        saved(model, Path(folder))
        for tensor in model.state_dict().values():
            tensor.zero_()
        fsdp_optim.load(f"{folder}/hub", model, options=LoadOptions(views=views_of_transformers(model), progress=False))
        check_same(f"{type(model).__name__}, loaded", dict(model.state_dict()), wanted)
        if type(model).__name__ not in NOT_OPENED:
            again = type(model).from_pretrained(f"{folder}/own").state_dict()
            check_same(f"{type(model).__name__}, opened", {k: again[k].to(wanted[k].dtype) for k in again}, wanted)


class TestFiles(unittest.TestCase):
    @expand(*some(MODELS, every=1))
    def test_a_save_has_the_names_and_values_of_the_hub(self, name: str) -> None:
        """Where the hub joins parameters, their own names are kept. transformers opens both, to the same output."""
        model = build(name)
        with tempfile.TemporaryDirectory() as folder:
            hub, own = saved(model, Path(folder))
            if name in JOINED:
                joined = {key for key in hub if key not in own}
                assert joined
                assert all("qkv" in key or "up_gate" in key for key in joined), joined
                check_same(
                    name,
                    {key: own[key] for key in sorted(hub.keys() & own.keys())},
                    {k: hub[k] for k in sorted(hub) if k in own},
                )
            else:
                check_same(name, dict(sorted(own.items())), dict(sorted(hub.items())))
            again = type(model).from_pretrained(Path(folder, "own")).eval()
            check_same("weights", dict(again.state_dict()), dict(model.state_dict()))
            check_same("output", output_of(again), output_of(model))

    @expand(*some(MODELS, every=1))
    def test_the_hub_s_files_load(self, name: str) -> None:
        """What `save_pretrained` has written is loaded through the Views, without transformers."""
        model, other = build(name), build(name)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            model.save_pretrained(folder)
            for tensor in other.state_dict().values():
                tensor.zero_()
            fsdp_optim.load(folder, other, options=LoadOptions(views=views_of_transformers(other), compare=True))
            check_same(name, dict(other.state_dict()), dict(model.state_dict()))

    def test_a_loaded_model_keeps_the_prefixes_of_its_files(self) -> None:
        """A base model that is opened from the folder of a larger one, and one that was made from its config."""
        package = transformers()
        with tempfile.TemporaryDirectory() as folder:
            build("mixtral").save_pretrained(folder)
            base = package.MixtralModel.from_pretrained(folder)
            check_seen(base)
            with tempfile.TemporaryDirectory() as other:
                hub, own = saved(base, Path(other))
                check_same("names", sorted(own), sorted(hub))

    def test_tied_names(self) -> None:
        """`save_pretrained` drops one of the two names, and a save too."""
        model = build("mixtral", tie_word_embeddings=True)
        with tempfile.TemporaryDirectory() as folder:
            hub, own = saved(model, Path(folder))
            assert "lm_head.weight" not in own
            check_same("mixtral, tied", dict(sorted(own.items())), dict(sorted(hub.items())))

    def test_a_tied_name_that_is_changed(self) -> None:
        """A View for each name of a parameter of which transformers changes one."""
        from transformers.core_model_loading import WeightRenaming

        model = build("mixtral", tie_word_embeddings=True)
        model._weight_conversions = [WeightRenaming("model.wte", "model.embed_tokens")]
        views = {view.name: dict(view.parts) for view in views_of_transformers(model)}
        check_same(
            "views",
            views,
            {
                "model.embed_tokens.weight": {"model.wte.weight": "d0 d1"},
                "lm_head.weight": {"lm_head.weight": "d0 d1"},
            },
        )
        with tempfile.TemporaryDirectory() as folder:
            fsdp_optim.save(folder + "/own", model, options=SaveOptions(views=views_of_transformers(model), **QUIET))
            assert "model.wte.weight" in load_file(folder + "/own/model.safetensors")

    def test_adapters(self) -> None:
        """transformers gives the weights of a model with adapters no other names."""
        model = build("mixtral")
        adapter = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
        model.model.layers[0].mlp.gate.lora_A = adapter(2, 2)
        check_same("views", views_of_transformers(model), [])

    def test_a_model_inside_another(self) -> None:
        """Names begin with the path of the transformers model, and other parts of the model have no View."""
        model = torch.nn.ModuleDict({"policy": build("mixtral"), "critic": torch.nn.Linear(3, 2)})
        views = views_of_transformers(model)
        assert views
        assert all(view.name.startswith("policy.model.") for view in views), views
        assert all(part.startswith("policy.model.") for view in views for part, _ in view.parts), views
        check_same("views_for", fsdp_optim.views_for(model), views)
        check_same("no transformers model", views_of_transformers(torch.nn.Linear(2, 2)), [])
        llama = transformers().LlamaForCausalLM
        with torch.device("meta"):
            check_same("no other names", views_of_transformers(llama(llama.config_class())), [])


class TestEveryClass(unittest.TestCase):
    @expand(*some(range(SHARDS), every=SHARDS, first=26))
    def test_views_are_what_transformers_does(self, shard: int) -> None:
        """For every class of a model that can be built from its default config with smaller sizes."""
        why, numbers = dict[str, str](), dict[str, int]()
        for name in list(all_classes())[shard::SHARDS]:
            try:
                model = smaller(name)
            except (
                Exception
            ) as error:  # of any kind: a package that is not installed, sizes that do not fit one another
                why[name] = f"{type(error).__name__}: {error}"
                continue
            numbers[name] = check_seen(model)
            if numbers[name]:
                check_files(model)
        if not any(numbers.values()):
            self.skipTest(f"none of these is built and has other names: {sorted(numbers)}, {why}")

    @expand([], range(SHARDS))
    def test_models_of_full_size_are_learned(self, shard: int) -> None:
        """From shapes alone, of hundreds of gigabytes too: names and shapes are compared with those of transformers."""
        why, numbers = dict[str, str](), dict[str, int]()
        for name in list(all_classes())[shard::SHARDS]:
            try:
                cls = getattr(transformers(), name)
                with torch.device("meta"):
                    model = cls(cls.config_class())
            except Exception as error:
                why[name] = f"{type(error).__name__}: {error}"
                continue
            numbers[name] = len(views_of_transformers(model))
        if not any(numbers.values()):
            self.skipTest(f"none of these is built and has other names: {sorted(numbers)}, {why}")
