"""Small models of transformers whose files have other names, or other tensors, than the model; each with values of its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from kit.pretrained import SIZES, transformers

_MOE = {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
_ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**SIZES, "num_key_value_heads": 1, "num_local_experts": 3}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**_MOE, "num_experts": 3, "shared_expert_intermediate_size": 12},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_MOE, "num_experts": 4}),
    "olmoe": (
        "OlmoeForCausalLM",
        "OlmoeConfig",
        {**SIZES, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {**_MOE, **_LATENT, **_ROUTED, "head_dim": 4, "num_key_value_heads": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**_MOE, **_LATENT, **_ROUTED, "num_hidden_layers": 3, "head_dim": 4, "num_key_value_heads": 2},
    ),
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", {**_MOE, **_ROUTED}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2},
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**SIZES, "num_key_value_heads": 1, "pad_token_id": 0}),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 3, "intermediate_size_mlp": 12},
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**{k: v for k, v in SIZES.items() if k != "vocab_size"}, "image_size": 8, "patch_size": 4},
    ),
    "gte": ("GteForMaskedLM", "GteConfig", {**SIZES, "pad_token_id": 0}),
    "nomic_bert": ("NomicBertForMaskedLM", "NomicBertConfig", {**SIZES, "head_dim": 8, "pad_token_id": 0}),
}
"""The class of the model, that of its config, and its sizes."""

JOINED = ("gte", "nomic_bert")
"""Models of which the files have several parameters in one tensor: a save keeps the parameters' own names."""

_SMALLER = {
    r"_layers$|^n_layers?$|^depth$|^num_blocks$": 2,
    r"^(num_attention_heads|n_heads?|num_heads|(encoder|decoder)_attention_heads)$": 4,
    r"^num_key_value_heads$": 2,
    r"^(head_dim|d_kv|v_head_dim|qk_nope_head_dim|qk_rope_head_dim|global_head_dim|swa_head_dim)$": 8,
    r"^(q_lora_rank|kv_lora_rank)$": 16,
    r"^(hidden_size|d_model|n_embd|embed_dim|hidden_dim|text_hidden_size|out_hidden_size|projection_dim)$": 32,
    r"(intermediate_size|ffn_dim|d_ff|ffn_hidden_size|mlp_hidden_size)$": 24,
    r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$": 4,
    r"^(num_experts_per_tok|moe_k|moe_topk|top_k_experts)$": 2,
    r"^(n_group|topk_group|n_groups)$": 1,
    r"^(vocab_size|vocab_size_per_layer_input)$": 64,
    r"^image_size$": 16,
    r"^patch_size$": 4,
    r"^max_position_embeddings$": 64,
}
MOST = 30_000_000
"""A model with more elements is not built."""


def with_values(make: Any) -> Any:
    """A model, every saved floating-point element of which has a value of its own."""
    torch.default_generator.manual_seed(5)
    model = make()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape) / 4)
    return model.eval()


def build(name: str, **changes: Any) -> Any:
    package = transformers()
    cls, config, sizes = MODELS[name]
    return with_values(lambda: getattr(package, cls)(getattr(package, config)(**{**sizes, **changes})))


def all_classes() -> Iterator[str]:
    """The classes of models that transformers' Auto classes have, sorted by their model type."""
    package = transformers()
    auto = package.models.auto.modeling_auto
    tables = [name for name in dir(auto) if re.fullmatch(r"MODEL_(FOR_\w+_)?MAPPING_NAMES", name)]
    names: dict[str, None] = {}
    listed = [(kind, value) for table in tables for kind, value in getattr(auto, table).items()]
    for _, classes in sorted(listed, key=lambda entry: entry[0]):
        names |= dict.fromkeys([classes] if isinstance(classes, str) else classes)
    yield from names


def smaller(name: str) -> Any:
    """A model of any class with its default config, whose sizes are made small. Raises what transformers raises."""
    package = transformers()
    cls = getattr(package, name)
    sizes = _smaller(cls.config_class().to_dict())
    left = ("model_type", "architectures", "dtype", "transformers_version")
    config = cls.config_class(**{key: value for key, value in sizes.items() if key not in left})
    with torch.device("meta"):
        numel = sum(param.numel() for param in cls(config).parameters())
    if numel > MOST:
        raise ValueError(f"{numel} elements")
    return with_values(lambda: cls(config))


def _smaller(config: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(config)
    for key, value in config.items():
        if isinstance(value, dict) and "model_type" in value:
            made[key] = _smaller(value)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            made[key] = next((min(value, size) for rule, size in _SMALLER.items() if re.search(rule, key)), value)
        if key in ("layer_types", "mlp_layer_types", "layers_block_type", "attn_type_list") and isinstance(value, list):
            made[key] = [value[0], value[-1]] if len(value) > 1 else value
        if key in ("pad_token_id", "bos_token_id", "eos_token_id") and value is not None:
            made[key] = 0
    return made


def output_of(model: nn.Module) -> torch.Tensor:
    """The first output of a model of `MODELS` on one input."""
    with torch.no_grad():
        if "pixel_values" in inspect.signature(model.forward).parameters:
            return next(iter(model(pixel_values=torch.linspace(-1, 1, 192).view(1, 3, 8, 8)).values()))
        return next(iter(model(input_ids=torch.arange(1, 13).view(2, 6)).values()))
