"""Merged weights are those of PEFT's own merge_and_unload, bit for bit; what cannot be merged is refused before a write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from kit.imports import Later
from safetensors.torch import load_file, save_file

import fsdp_optim
from fsdp_optim import CheckpointError, ConvertOptions, StateError
from fsdp_optim.cli.app import group

peft, transformers = Later("peft"), Later("transformers")
LOADED = ("kit.loaded.hugging_face",)

SMALL = ConvertOptions(durable=False)


def llama(dtype: torch.dtype = torch.float32, *, tied: bool = False) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=104,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def gpt2() -> Any:
    torch.manual_seed(2)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=80, n_positions=16, n_embd=48, n_layer=2, n_head=4)
    )


def save_adapter(folder: Path, base: Any, **config: Any) -> Path:
    """Save an adapter with random factors on a copy of a base, as PEFT does."""
    import copy

    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(init_lora_weights=False, **config))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.requires_grad and "lora_" not in name:
                param.add_(torch.randn(param.shape).to(param.dtype))
    model.save_pretrained(folder)
    return folder


def save_base(folder: Path, base: Any) -> Path:
    base.save_pretrained(folder)
    return folder


def merged_by_peft(base: Path, adapter: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    merged: dict[str, torch.Tensor] = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    return merged


def stored(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def check_equal(out: Path, wanted: dict[str, torch.Tensor]) -> None:
    got = stored(out)
    assert got
    for name, tensor in got.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor, wanted[name]), (name, (tensor - wanted[name]).abs().max())


ATTENTION = ["q_proj", "v_proj"]
CASES: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 12, "target_modules": ATTENTION},
    "all": {"r": 8, "lora_alpha": 5, "target_modules": "all-linear"},
    "rslora": {"r": 3, "lora_alpha": 7, "use_rslora": True, "target_modules": ATTENTION},
    "patterns": {
        "r": 4,
        "target_modules": [*ATTENTION, "down_proj"],
        "rank_pattern": {"down_proj": 6, "layers.1.self_attn.q_proj": 2, "proj": 5},
        "alpha_pattern": {r"layers\.0\..*": 3, "v_proj": 40},
    },
    "saved modules": {"r": 4, "target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
    "biases": {"r": 4, "target_modules": ATTENTION, "bias": "all"},
    "embedding": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": [*ATTENTION, "embed_tokens"],
        "rank_pattern": {"embed_tokens": 3},
    },
    "embedding alone": {"r": 5, "lora_alpha": 3, "use_rslora": True, "target_modules": ["embed_tokens"]},
}


def replaced_in(case: str, adapter: Path) -> int:
    """PEFT saves the base's own embedding beside its factors."""
    names = load_file(adapter / "adapter_model.safetensors")
    return sum(name.endswith("base_layer.weight") for name in names) if case.startswith("embedding") else 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_equals_peft_bit_for_bit(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    base = save_base(tmp_path / "base", llama(dtype))
    adapter = save_adapter(tmp_path / "adapter", llama(dtype), **CASES[case])
    before = stored(base)
    done = fsdp_optim.merge_adapter(base, adapter, tmp_path / "out", options=SMALL)
    wanted = merged_by_peft(base, adapter, dtype)
    check_equal(tmp_path / "out", wanted)
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, wanted[name])]
    assert len(changed) == done.num_merged + (done.num_replaced if case == "saved modules" else 0)
    assert done.num_tensors == len(before)
    assert done.num_replaced == (1 if case == "saved modules" else replaced_in(case, adapter))
    fsdp_optim.verify(tmp_path / "out")


def test_conv1d_is_transposed_as_peft_does(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", gpt2())
    config: dict[str, Any] = {"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    adapter = save_adapter(tmp_path / "adapter", gpt2(), **config)  # attn.c_proj is square
    fsdp_optim.merge_adapter(base, adapter, tmp_path / "out", options=SMALL)
    check_equal(tmp_path / "out", merged_by_peft(base, adapter, torch.float32))


def test_biases_of_saved_modules(tmp_path: Path) -> None:
    """PEFT saves them three times, and reads those under the module's own name."""
    base = save_base(tmp_path / "base", gpt2())
    config: dict[str, Any] = {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    adapter = save_adapter(tmp_path / "adapter", gpt2(), bias="all", modules_to_save=["c_proj"], **config)
    file = adapter / "adapter_model.safetensors"
    read = load_file(file)
    again = [name for name in read if ".modules_to_save." in name or ".original_module." in name]
    assert len(again) == 8
    save_file({**read, again[0]: read[again[0]] + 1}, file)
    done = fsdp_optim.merge_adapter(base, adapter, tmp_path / "out", options=SMALL)
    check_equal(tmp_path / "out", merged_by_peft(base, adapter, torch.float32))
    assert done.num_replaced == sum("lora_" not in name for name in read) - len(again)
    own_name = again[0].replace(".modules_to_save", "").replace(".original_module", "")
    save_file({name: tensor for name, tensor in read.items() if name != own_name}, file)
    with pytest.raises(StateError, match=f"{again[0]} is in .* is not in "):
        fsdp_optim.merge_adapter(base, adapter, tmp_path / "none", options=SMALL)


def test_own_checkpoint_as_base_keeps_its_aliases_and_loses_its_optimizer(tmp_path: Path) -> None:
    model = llama(tied=True)
    fsdp_optim.save(tmp_path / "base", model, torch.optim.Adam(model.parameters()))
    plain = save_base(tmp_path / "plain", model)
    adapter = save_adapter(tmp_path / "adapter", model, r=2, target_modules=ATTENTION)
    fsdp_optim.merge_adapter(tmp_path / "base", adapter, tmp_path / "out", options=SMALL)
    check_equal(tmp_path / "out", merged_by_peft(plain, adapter, torch.float32))
    summary = fsdp_optim.inspect(tmp_path / "out")
    assert summary.aliases
    assert not summary.has_optim
    shutil.copy(plain / "config.json", tmp_path / "out")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in merged_by_peft(plain, adapter, torch.float32).items():
        assert torch.equal(opened.state_dict()[name], tensor)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_larger_than_a_block(tmp_path: Path, *, transposed: bool) -> None:
    """In blocks of rows the result is that of a product in float64, within the bound of the docstring."""
    torch.manual_seed(3)
    a, b, weight = torch.randn(8, 700), torch.randn(3000, 8), torch.randn(3000, 700)
    weight = weight.T.contiguous() if transposed else weight
    (tmp_path / "adapter").mkdir()
    names = {"base_model.model.fc.lora_A.weight": a, "base_model.model.fc.lora_B.weight": b}
    save_file(names, tmp_path / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "fan_in_fan_out": transposed}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    save_file({"fc.weight": weight}, tmp_path / "base.safetensors")
    options = ConvertOptions(durable=False, bucket_nbytes=16 << 20)
    fsdp_optim.merge_adapter(tmp_path / "base.safetensors", tmp_path / "adapter", tmp_path / "out", options=options)
    exact, size = b.double() @ a.double() * 2, b.double().abs() @ a.double().abs() * 2
    if transposed:
        exact, size = exact.T, size.T
    wanted = weight.double() + exact
    bound = 2 * 8 * torch.finfo(torch.float32).eps * size + torch.finfo(torch.float32).eps * wanted.abs()
    assert ((stored(tmp_path / "out")["fc.weight"].double() - wanted).abs() <= bound).all()


def changed_config(**values: Any) -> Callable[[Path, Path], None]:
    def change(base: Path, adapter: Path) -> None:
        file = adapter / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def changed_adapter(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> Callable[[Path, Path], None]:
    def rewrite(base: Path, adapter: Path) -> None:
        file = adapter / "adapter_model.safetensors"
        save_file(change(load_file(file)), file)

    return rewrite


def quantised(base: Path, adapter: Path) -> None:
    file = base / "model.safetensors"
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"
REFUSED: dict[str, tuple[Callable[[Path, Path], None], type[Exception], str]] = {
    "dora": (changed_config(use_dora=True), CheckpointError, "use_dora=True"),
    "other type": (changed_config(peft_type="LOHA"), CheckpointError, "'LOHA', and only LORA"),
    "pissa": (changed_config(init_lora_weights="pissa"), CheckpointError, "changes the weights of the base too"),
    "unknown": (changed_config(new_option={"x": 1}), CheckpointError, "new_option="),
    "bias of factors": (changed_config(lora_bias=True), CheckpointError, "lora_bias=True"),
    "rank": (changed_config(r=5), StateError, "says rank 5"),
    "no config": (
        lambda base, adapter: (adapter / "adapter_config.json").unlink(),
        CheckpointError,
        "has no adapter_config",
    ),
    "no base": (
        changed_adapter(lambda read: {name.replace("layers.0", "layers.7"): value for name, value in read.items()}),
        StateError,
        r"layers.7.self_attn.[qv]_proj.lora_A.weight is in .*adapter, and model.layers.7.*weight is not in .*base",
    ),
    "shape": (
        changed_adapter(lambda read: {**read, f"{FIRST}.lora_B.weight": torch.zeros(9, 4)}),
        StateError,
        r"shape \[64, 64\] in .* make \[9, 64\]",
    ),
    "half": (
        changed_adapter(lambda read: {name: read[name] for name in read if name != f"{FIRST}.lora_B.weight"}),
        StateError,
        "without model.layers.0.self_attn.q_proj.lora_B.weight",
    ),
    "embedding": (
        changed_adapter(
            lambda read: {**read, "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 96)}
        ),
        StateError,
        "embed_tokens.lora_embedding_B is in .* without|without model.embed_tokens.lora_embedding_B",
    ),
    "embedding of another size": (
        changed_adapter(
            lambda read: {
                **read,
                "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 64),
                "base_model.model.model.embed_tokens.lora_embedding_B": torch.zeros(96, 4),
            }
        ),
        StateError,
        r"embed_tokens.weight: has the shape \[96, 64\] in .* make \[64, 96\]",
    ),
    "magnitude": (
        changed_adapter(lambda read: {**read, f"{FIRST}.lora_magnitude_vector": torch.zeros(64)}),
        StateError,
        "q_proj.lora_magnitude_vector is part of an adapter that cannot",
    ),
    "convolution": (
        changed_adapter(lambda read: {**read, f"{FIRST}.lora_A.weight": torch.zeros(4, 64, 1, 1)}),
        StateError,
        "only matrices of this rank",
    ),
    **{
        name: (changed_config(**{name: value}), CheckpointError, f"has {name}=")
        for name, value in {
            "trainable_token_indices": [1, 2],
            "target_parameters": ["mlp.experts.gate_up_proj"],
            "layer_replication": [[0, 1]],
            "use_qalora": True,
            "megatron_config": {"x": 1},
        }.items()
    },
    "quantised": (quantised, StateError, "float8_e4m3fn in .* not quantised"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_written(tmp_path: Path, case: str) -> None:
    base = save_base(tmp_path / "base", llama())
    adapter = save_adapter(tmp_path / "adapter", llama(), r=4, target_modules=ATTENTION)
    change, error, message = REFUSED[case]
    change(base, adapter)
    with pytest.raises(error, match=message):
        fsdp_optim.merge_adapter(base, adapter, tmp_path / "out", options=SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_tied_weight_is_refused(tmp_path: Path) -> None:
    model = llama(tied=True)
    fsdp_optim.save(tmp_path / "base", model)
    adapter = save_adapter(tmp_path / "adapter", llama(), r=4, target_modules=["lm_head"])
    with pytest.raises(StateError, match="one tensor with two names"):
        fsdp_optim.merge_adapter(tmp_path / "base", adapter, tmp_path / "out")


def test_embedding_that_is_tied_in_the_config_alone(tmp_path: Path) -> None:
    """A folder of Hugging Face has a tied weight once, so the merge changes both of its places, as PEFT's does."""
    base = save_base(tmp_path / "base", llama(tied=True))
    adapter = save_adapter(tmp_path / "adapter", llama(tied=True), r=4, target_modules=["embed_tokens", "q_proj"])
    fsdp_optim.merge_adapter(base, adapter, tmp_path / "out", options=SMALL)
    wanted = merged_by_peft(base, adapter, torch.float32)
    check_equal(tmp_path / "out", wanted)
    assert torch.equal(wanted["lm_head.weight"], stored(tmp_path / "out")["model.embed_tokens.weight"])
    assert "lm_head.weight" not in stored(tmp_path / "out")


def test_command(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", llama())
    adapter = save_adapter(tmp_path / "adapter", llama(), r=4, target_modules=ATTENTION)
    call = ["merge-adapter", str(base), str(adapter), "-o", str(tmp_path / "out"), "--quiet"]
    result = CliRunner().invoke(group, [*call, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["num_merged"] == 4
    check_equal(tmp_path / "out", merged_by_peft(base, adapter, torch.float32))
    result = CliRunner().invoke(group, [*call, "--overwrite"])
    assert "4 of 21 tensors merged" in result.output
