"""megatron-core's fused layers as Views: of its own classes where it is installed, and of modules with their names."""

from __future__ import annotations

import itertools
import os
import tempfile
import unittest
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from kit.cases import expand, some
from kit.compare import check_same, refused
from kit.megatron import megatron_core, why_not
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

import fsdp_optim
from fsdp_optim import CallOptions, LoadOptions, SaveOptions, View
from fsdp_optim.errors import LayoutError
from fsdp_optim.model_views.megatron_models import views_of_megatron
from fsdp_optim.testing import run_on_ranks

WIDTH, HEADS, GROUPS, SIZE, HIDDEN = 12, 4, 2, 3, 8
QUIET: dict[str, Any] = {"progress": False}


def config_of(**options: Any) -> Any:
    sizes = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": SIZE}
    return SimpleNamespace(**{**sizes, "gated_linear_unit": True, "attention_output_gate": False, **options})


class SelfAttention(nn.Module):
    def __init__(self, config: Any, rows: int = 0, bias: bool = True) -> None:
        super().__init__()
        self.config = config
        per_group = (2 if config.attention_output_gate else 1) * HEADS // GROUPS + 2
        self.linear_qkv = nn.Linear(WIDTH, rows or GROUPS * per_group * SIZE, bias=bias)


class MLP(nn.Module):
    def __init__(self, config: Any, rows: int = 2 * HIDDEN) -> None:
        super().__init__()
        self.config = config
        self.linear_fc1 = nn.Linear(WIDTH, rows, bias=False)


class TEGroupedMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.linear_fc1 = nn.Module()
        for number in range(3):
            self.linear_fc1.register_parameter(f"weight{number}", nn.Parameter(torch.randn(2 * HIDDEN, WIDTH)))


for cls in (SelfAttention, MLP, TEGroupedMLP):
    cls.__module__ = "megatron.core.transformer"  # by which the Views know them


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attention, self.mlp = SelfAttention(config), MLP(config)


def decoder(config: Any) -> nn.Module:
    torch.manual_seed(3)
    return nn.ModuleDict({"decoder": nn.ModuleDict({"layers": nn.ModuleList([Layer(config) for _ in range(2)])})})


def cut(config: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The canonical weights, row by row: of each group its query heads, their gates, its key and its value."""
    made: dict[str, Tensor] = {}
    for name, value in weights.items():
        if ".linear_fc1." in name:
            made |= {
                name.replace("linear_fc1", part): value[at : at + HIDDEN] for part, at in (("gate", 0), ("up", HIDDEN))
            }
            continue
        heads = HEADS // GROUPS
        kinds = ["q"] * heads + (["gate"] * heads if config.attention_output_gate else []) + ["k", "v"]
        rows: dict[str, list[Tensor]] = {}
        for row, (_, kind, _) in zip(value, itertools.product(range(GROUPS), kinds, range(SIZE)), strict=True):
            rows.setdefault(name.replace("linear_qkv", kind), []).append(row)
        made |= {part: torch.stack(some_rows) for part, some_rows in rows.items()}
    return made


def gathered(model: nn.Module, views: list[View]) -> dict[str, Tensor]:
    return dict(fsdp_optim.gather_full_model_state_dict(model, None, options=CallOptions(views=views)))


def tensor_parallel() -> None:
    """On two ranks, as Megatron cuts: `linear_qkv` by groups, declared; `linear_fc1` into [gate; up] of each, as a DTensor."""
    rank, config = dist.get_rank(), config_of()
    whole = decoder(config)
    model = decoder(config)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model["decoder"]["layers"]:
        qkv, fc1 = layer.self_attention.linear_qkv, layer.mlp.linear_fc1
        for name, param in list(qkv.named_parameters()):
            part = param.detach().chunk(2)[rank].clone()
            setattr(qkv, name, nn.Parameter(part))
            offset = (rank * len(part), *(0 for _ in part.shape[1:]))
            fsdp_optim.declare_slice(qkv, name, global_shape=tuple(param.shape), offset=offset)
        gate, up = (half.chunk(2)[rank] for half in fc1.weight.detach().chunk(2))
        placed = [_StridedShard(0, split_factor=2)]
        shape, stride = fc1.weight.shape, fc1.weight.stride()
        fc1.weight = nn.Parameter(DTensor.from_local(torch.cat([gate, up]), mesh, placed, shape=shape, stride=stride))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    apart = cut(config, {name: value.clone() for name, value in whole.state_dict().items()})
    params = {name: nn.Parameter(value.clone()) for name, value in apart.items()}
    wanted = torch.optim.AdamW(params.values(), lr=0.1)
    for number in range(2):
        for param in (*model.parameters(), *params.values()):
            param.grad = param.detach() * (0.5 + number)
        optim.step()
        wanted.step()
    views = views_of_megatron(model)
    check_same("views", views, views_of_megatron(whole))
    check_same("weights", dict(sorted(gathered(model, views).items())), {k: params[k].detach() for k in sorted(params)})
    full = fsdp_optim.gather_full_optim_state_dict(
        model, optim, recipient_rank=None, key_by="name", options=CallOptions(views=views)
    )
    state = {name: dict(wanted.state[params[name]]) for name in sorted(params)}
    check_same("state", {name: dict(full["state"][name]) for name in sorted(full["state"])}, state)


class TestLayouts(unittest.TestCase):
    @expand(*some([(gate, bias) for gate in (False, True) for bias in (False, True)], every=1))
    def test_parts(self, gate: bool, bias: bool) -> None:
        config = config_of(attention_output_gate=gate)
        model = decoder(config)
        for layer in model["decoder"]["layers"] if not bias else ():
            layer.self_attention.linear_qkv.bias = None
        views = views_of_megatron(model)
        check_same("one View for all layers", len(views), 3 if bias else 2)
        check_same("views_for", fsdp_optim.views_for(model), views)
        wanted = cut(config, dict(model.state_dict()))
        check_same("parts", dict(sorted(gathered(model, views).items())), dict(sorted(wanted.items())))

    def test_as_many_groups_as_heads(self) -> None:
        """Without query groups, as older configs are: q, k and v of each head."""
        model = SelfAttention(config_of(num_query_groups=None), rows=HEADS * 3 * SIZE, bias=False)
        rows = model.linear_qkv.weight.detach().view(HEADS, 3, SIZE, WIDTH)
        wanted = {f"{part}.weight": rows[:, at].flatten(0, 1) for at, part in enumerate("qkv")}
        check_same("parts", gathered(model, views_of_megatron(model)), wanted)

    def test_grouped_experts(self) -> None:
        model = TEGroupedMLP(config_of())
        weights = gathered(model, views_of_megatron(model))
        for number in range(3):
            weight = model.linear_fc1.get_parameter(f"weight{number}").detach()
            for part, half in zip(("gate", "up"), weight.chunk(2), strict=True):
                check_same(f"{part} {number}", weights[f"{part}.weight{number}"], half)

    def test_nothing_to_see(self) -> None:
        """No gated unit; a class of this name that is not Megatron's."""
        check_same("no gate", views_of_megatron(MLP(config_of(gated_linear_unit=False))), [])
        other = type("MLP", (MLP,), {"__module__": "elsewhere"})
        other.__mro__[1].__module__ = "elsewhere"
        try:
            check_same("another library's", views_of_megatron(other(config_of())), [])
        finally:
            other.__mro__[1].__module__ = "megatron.core.transformer"

    def test_refused(self) -> None:
        """A shape that is not what the config says, the part of a rank, and rows in an order that is not known."""
        model = SelfAttention(config_of(), rows=GROUPS * (HEADS // GROUPS + 2) * SIZE // 2)
        refused(lambda: views_of_megatron(model), LayoutError, "linear_qkv.weight", "12 rows", "24", "declare_slice")
        model = SelfAttention(config_of(), rows=25)
        refused(lambda: views_of_megatron(model), LayoutError, "linear_qkv.weight", "25 rows", "a View of your own")
        refused(lambda: views_of_megatron(MLP(config_of(), rows=7)), LayoutError, "linear_fc1.weight", "7 rows")
        experts = TEGroupedMLP(config_of(moe_mlp_glu_interleave_size=4))
        refused(lambda: views_of_megatron(experts), LayoutError, "linear_fc1.weight0", "moe_mlp_glu_interleave_size")

    def test_tensor_parallel(self) -> None:
        run_on_ranks(tensor_parallel, 2)

    def test_a_fused_run_goes_on_apart(self) -> None:
        """A checkpoint through these Views loads into a model of the parts, state and all."""
        config = config_of()
        model = decoder(config)
        optim = torch.optim.AdamW(model.parameters())
        for param in model.parameters():
            param.grad = param.detach() * 0.5
        optim.step()
        apart = nn.Module()
        for name in cut(config, dict(model.state_dict())):
            *path, last = name.split(".")
            module = apart
            for text in path:
                if text not in module._modules:
                    module.add_module(text, nn.Module())
                module = module.get_submodule(text)
            shape = cut(config, dict(model.state_dict()))[name].shape
            module.register_parameter(last, nn.Parameter(torch.zeros(shape)))
        second = torch.optim.AdamW(apart.parameters())
        with tempfile.TemporaryDirectory() as folder:
            views = views_of_megatron(model)
            fsdp_optim.save(f"{folder}/step", model, optim, options=SaveOptions(views=views, durable=False, **QUIET))
            fsdp_optim.load(f"{folder}/step", apart, second, options=LoadOptions(compare=True, **QUIET))
        fused = {name: optim.state[param]["exp_avg"] for name, param in model.named_parameters()}
        moments = {name: second.state[param]["exp_avg"] for name, param in apart.named_parameters()}
        check_same("moments", dict(sorted(moments.items())), dict(sorted(cut(config, fused).items())))


def real(**options: Any) -> Any:
    """A model of megatron-core in this process, whose weights are small integers, so that products are exact."""
    with megatron_core(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that it would use on GPUs
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_config import TransformerConfig

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        sizes = {"num_layers": 2, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_query_groups": GROUPS}
        sizes |= {
            "kv_channels": SIZE,
            "ffn_hidden_size": HIDDEN,
            "add_bias_linear": False,
            "use_cpu_initialization": True,
        }
        config = TransformerConfig(
            **sizes, gated_linear_unit=True, activation_func=nn.functional.silu, normalization="RMSNorm", **options
        )
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        model = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=16, max_sequence_length=8)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-4, 5, param.shape))
    return model


def real_classes() -> None:
    """On one rank: what the layers compute is what the canonical weights compute."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randint(-3, 4, (5, 1, WIDTH), generator=generator).float()
    for gate, bias in itertools.product((False, True), repeat=2):
        model = real(attention_output_gate=gate, add_qkv_bias=bias)
        views = views_of_megatron(model)
        check_same("views", len(views), 3 if bias else 2)
        weights = gathered(model, views)
        for number, layer in enumerate(model.decoder.layers):
            at = f"decoder.layers.{number}"
            computed = layer.self_attention.get_query_key_value_tensors(hidden, output_gate=gate)
            for part, value in zip(("q", "k", "v", "gate"), computed, strict=False):
                weight, more = (
                    weights[f"{at}.self_attention.{part}.weight"],
                    weights.get(f"{at}.self_attention.{part}.bias"),
                )
                wanted = nn.functional.linear(hidden, weight, more).unflatten(-1, (-1, SIZE))
                check_same(f"{part}, gate {gate}, bias {bias}", value.detach().contiguous(), wanted)
            first, second = (weights[f"{at}.mlp.{part}.weight"] for part in ("gate", "up"))
            inner = nn.functional.silu(hidden @ first.T) * (hidden @ second.T)
            check_same("mlp", layer.mlp(hidden)[0].detach(), layer.mlp.linear_fc2(inner)[0].detach())


@unittest.skipIf(why_not(), why_not())
class TestRealClasses(unittest.TestCase):
    def test_what_megatron_core_computes(self) -> None:
        """q, k, v and gates of its attention, and its MLP, from the weights of the parts, to the bit."""
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        run_on_ranks(real_classes, 1)
