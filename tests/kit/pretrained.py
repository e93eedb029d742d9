"""Small models of Hugging Face's transformers, which is imported when they are built and kept away from the network."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_optim import View

CUT_VIEWS = [View("*mlp.down_proj.weight", "(a + b) c", {"*mlp.low.weight": "a c", "*mlp.high.weight": "c b"})]
"""Views of a llama: the upper rows of a weight, and the lower ones transposed, so that both are seen in the files."""


def cut(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a llama as `CUT_VIEWS` show them, by name."""
    seen = {}
    for name, weight in weights.items():
        if not name.endswith("mlp.down_proj.weight"):
            seen[name] = weight
            continue
        stem, half = name.removesuffix("down_proj.weight"), len(weight) // 2
        seen |= {f"{stem}low.weight": weight[:half], f"{stem}high.weight": weight[half:].T.contiguous()}
    return dict(sorted(seen.items()))


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 31}


def transformers() -> Any:
    """The package, without network and without bars."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    package = importlib.import_module("transformers")
    package.utils.logging.set_verbosity_error()
    package.utils.logging.disable_progress_bar()
    return package


def build(name: str) -> Any:
    """The same values at every call; `units`: the modules that get a wrapper of their own."""
    torch.default_generator.manual_seed(7)
    model, layers = _made(transformers(), name)
    model.units = (*layers, "")
    for index, buffer in enumerate(model.buffers()):
        if buffer.is_floating_point() and "resnet" in name:
            buffer.uniform_(0.5, 1.5)
        elif "resnet" in name:
            buffer.fill_(1000 + index)
    return model


def _made(package: Any, name: str) -> tuple[Any, list[str]]:
    """A model, and the paths of its layers."""
    kind = name.partition(",")[0]
    if kind == "llama":
        config = package.LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings="tied" in name)
        model = package.LlamaForCausalLM(config)
        for param in model.parameters() if "bfloat16" in name else ():
            param.data = param.data.bfloat16()  # and not the buffers, which Hugging Face leaves as they are
        return model, _numbered("model.layers")
    if kind == "gpt2":
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        config = package.GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=12, **ends)
        return package.GPT2LMHeadModel(config), _numbered("transformer.h")
    if kind == "t5":
        config = package.T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
        return package.T5ForConditionalGeneration(config), [*_numbered("encoder.block"), *_numbered("decoder.block")]
    if kind == "resnet":
        config = package.ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic")
        return package.ResNetForImageClassification(config), _numbered("resnet.encoder.stages")
    config = package.BertConfig(**SIZES, max_position_embeddings=12)
    cls = package.BertForSequenceClassification if kind == "bert" else package.BertForMaskedLM
    return cls(config), _numbered("bert.encoder.layer")


def _numbered(path: str) -> list[str]:
    return [f"{path}.{number}" for number in range(2)]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by all their names, those that are not persistent too."""
    by_name = {**model.state_dict(), **dict(model.named_buffers())}
    return {name: by_name[name].detach() for name in sorted(by_name)}


def ties_of(model: nn.Module) -> list[list[str]]:
    """Names of one and the same parameter."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return sorted(sorted(some) for some in names.values() if len(some) > 1)
