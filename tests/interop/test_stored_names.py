"""Models that transformers 5 stores under other names than `state_dict()` has: the error says why, and its way out works."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_same, error_text, refused_on_ranks
from kit.folders import SharedFolder
from kit.options import as_options
from kit.pretrained import transformers
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from safetensors.torch import load_file, save_file

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.hugging_face",)
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}

# The class, its config, the layers, and for its error: a pair of names, a name of the file, and one of the model.
MODELS: dict[str, tuple[str, str, dict[str, Any], str, tuple[str, str, str]]] = {
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {"vocab_size": 31, "num_key_value_heads": 1, "num_local_experts": 3},
        "model.layers",
        (
            "block_sparse_moe -> mlp",
            "model.layers.0.block_sparse_moe.experts.0.w1.weight is in the checkpoint",
            "model.layers.0.mlp.experts.gate_up_proj: the model has it",
        ),
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"vocab_size": 31, "num_key_value_heads": 1, "num_experts": 3, "moe_intermediate_size": 8, "head_dim": 8},
        "model.layers",
        (
            "mlp.experts.*.gate_proj.weight and mlp.experts.*.up_proj.weight -> mlp.experts.gate_up_proj",
            "model.layers.0.mlp.experts.0.down_proj.weight is in the checkpoint",
            "model.layers.0.mlp.experts.down_proj: the model has it",
        ),
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {"image_size": 8, "patch_size": 4},
        "vit.layers",
        (
            "attention.query -> q_proj",
            "vit.encoder.layer.0.attention.attention.key.bias is in the checkpoint",
            "vit.layers.0.attention.k_proj.weight: the model has it",
        ),
    ),
}


def build(name: str, seed: int) -> Any:
    package = transformers()
    torch.default_generator.manual_seed(seed)
    cls, config, options, layers, _ = MODELS[name]
    model = getattr(package, cls)(getattr(package, config)(**SIZES, **options))
    model.units = (f"{layers}.0", f"{layers}.1", "")
    return model


def refuse_and_load(root: Path) -> None:
    """On two ranks."""
    for name, (cls, _, _, _, words) in MODELS.items():
        for wrapper in ("FSDP2", "FSDP1 orig", "DDP"):
            with cpu():
                model = WRAPPERS[wrapper](build(name, 2))
                options: dict[str, Any] = {"progress": False}
                options |= {"process_group": dist.group.WORLD} if wrapper == "DDP" else {}
                before = fsdp_optim.gather_full_model_state_dict(model, recipient_rank=None)
                asked = partial(fsdp_optim.load, root / name, model, **as_options(fsdp_optim.LoadOptions, **options))
                always = (
                    f"transformers 5 stores a {cls} under other names",
                    "views=fsdp_optim.views_for(model)",
                    "save_original_format=False",
                    "strict=False",
                )
                refused_on_ranks(f"{name}, {wrapper}", asked, "StateError", *always, *words)
                asked = partial(
                    fsdp_optim.load,
                    root / f"{name} only",
                    model,
                    strict=False,
                    **as_options(fsdp_optim.LoadOptions, **options),
                )
                refused_on_ranks(
                    f"{name}, none", asked, "StateError", "no weight would be loaded", always[0], always[1]
                )
                check_same(
                    "nothing was loaded", fsdp_optim.gather_full_model_state_dict(model, recipient_rank=None), before
                )
                fsdp_optim.load(
                    root / f"{name} new", model, **as_options(fsdp_optim.LoadOptions, **options, compare=True)
                )
                weights = fsdp_optim.gather_full_model_state_dict(model, recipient_rank=None) or {}
                check_same(
                    f"{name}, {wrapper}",
                    dict(sorted(weights.items())),
                    dict(sorted(build(name, 1).state_dict().items())),
                )


def write(root: Path) -> None:
    package = transformers()
    for name, (cls, _, _, _, _) in MODELS.items():
        build(name, 1).save_pretrained(root / name)
        # as the error says
        getattr(package, cls).from_pretrained(root / name).save_pretrained(
            root / f"{name} new", save_original_format=False
        )
        wanted = set(build(name, 1).state_dict())
        stored = load_file(root / name / "model.safetensors")
        (root / f"{name} only").mkdir()
        only = {key: value for key, value in stored.items() if key not in wanted}
        save_file(only, root / f"{name} only" / "model.safetensors")


class StoredNamesTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        write(cls.root)

    def test_refused_and_the_way_out(self) -> None:
        run_on_ranks(refuse_and_load, 2, self.root)

    def test_other_differences_are_not_explained_so(self) -> None:
        """Of a model that transformers stores as it is; of another library's; and where only one side has names."""
        package = transformers()
        llama = package.LlamaForCausalLM(package.LlamaConfig(**SIZES, vocab_size=31))
        llama.save_pretrained(self.root / "llama")
        kind, text = error_text(
            partial(fsdp_optim.load, self.root / "llama", llama.model, options=fsdp_optim.LoadOptions(progress=False))
        )
        self.assertEqual((kind, "transformers 5" in text), ("StateError", False))
        kind, text = error_text(
            partial(
                fsdp_optim.load,
                self.root / "mixtral",
                torch.nn.Linear(2, 2),
                options=fsdp_optim.LoadOptions(progress=False),
            )
        )
        self.assertEqual((kind, "transformers 5" in text), ("StateError", False))
        model = build("mixtral", 1)
        fsdp_optim.save(self.root / "own", model, options=fsdp_optim.SaveOptions(progress=False, durable=False))
        wider = torch.nn.ModuleDict({"model": model.model, "lm_head": model.lm_head, "more": torch.nn.Linear(2, 2)})
        kind, text = error_text(
            partial(fsdp_optim.load, self.root / "own", wider, options=fsdp_optim.LoadOptions(progress=False))
        )
        self.assertEqual((kind, "transformers 5" in text), ("StateError", False))
