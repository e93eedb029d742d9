"""Conversions of transformers on element numbers: of parameters as they are, of small twins, and those that no View has."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from math import prod
from typing import Any
from unittest import mock

import torch
from kit.cases import expand, some
from kit.compare import check_same, refused
from kit.hub_models import build
from kit.pretrained import transformers

from fsdp_optim import View
from fsdp_optim.errors import LayoutError
from fsdp_optim.layout.views import numbers_of_part
from fsdp_optim.model_views import conversion_twins as twins
from fsdp_optim.model_views.conversions import Conversion
from fsdp_optim.model_views.patterns import joined
from fsdp_optim.model_views.transformers_models import views_of_conversion, views_of_transformers

WIDTH, HIDDEN, HEADS = 48, 80, 3


def loading() -> Any:
    transformers()
    import transformers.core_model_loading as module

    return module


def llama(*conversions: Any, **sizes: Any) -> Any:
    """A model without elements, whose files are made by these conversions."""
    package = transformers()
    shape = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": 1}
    config = package.LlamaConfig(**{**shape, "head_dim": 16, "num_hidden_layers": 3, "vocab_size": 31, **sizes})
    with torch.device("meta"):
        model = package.LlamaForCausalLM(config)
    model._weight_conversions = list(conversions)
    return model


def conversion_of(model: Any) -> Conversion:
    return Conversion(model, (), {name: tuple(param.shape) for name, param in model.named_parameters()})


def converter(sources: Any, targets: Any, *operations: Any) -> Any:
    return loading().WeightConverter(sources, targets, operations=list(operations))


def _joined_gates(module: Any, *first: Any) -> Any:
    return converter("mlp.w13.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], *first, module.Chunk(0))


QKV = ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"]
CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "rotary": lambda m: converter("self_attn.wq.weight", "self_attn.q_proj.weight", m.PermuteForRope()),
    "transposed": lambda m: converter("mlp.w2", "mlp.down_proj.weight", m.Transpose(0, 1)),
    "transposed by shape": lambda m: converter(
        "mlp.down_proj.weight", "mlp.down_proj.weight", m.Transpose(0, 1, check_dims=True)
    ),
    "interleaved": lambda m: converter("mlp.inter.weight", "mlp.up_proj.weight", m.Interleave(0)),
    "interleaved columns": lambda m: converter("mlp.inter.weight", "mlp.up_proj.weight", m.Interleave(1)),
    "halves joined": _joined_gates,
    "rows joined alternately": lambda m: _joined_gates(m, m.Interleave(0)),
    "unequal rows joined": lambda m: converter("self_attn.qkv.weight", QKV, m.Split(0)),
    "reshaped": lambda m: converter("conv.weight", "self_attn.o_proj.weight", m.Conv3dToLinear(3, (2, 2, 4))),
    "renamed": lambda m: m.WeightRenaming("decoder.block", "model.layers"),
}


def numbers(views: list[View], model: Any) -> dict[str, Any]:
    """By the name of a part and of its live tensor, the numbers of its elements."""
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    shapes = conversion_of(model).on_shapes()[1] | shapes
    bound = [view.bind(name, shape) for view in views for name, shape in shapes.items() if view.matches(name)]
    return {
        f"{each.name}: {name}": torch.from_numpy(numbers_of_part(part)) for each in bound for name, part in each.parts
    }


class TestTwins(unittest.TestCase):
    @expand(*some(CONVERSIONS, every=1))
    def test_twins_show_what_the_parameters_do(self, name: str) -> None:
        """Every operation, on parameters as they are and on twins of any smaller sizes: the same elements in the same places."""
        model = llama(CONVERSIONS[name](loading()))
        conversion = conversion_of(model)
        exact, by_twins = (views_of_conversion(conversion, few) for few in (1 << 30, 0))
        assert exact or name == "transposed by shape"
        check_same(name, numbers(by_twins, model), numbers(exact, model))
        check_same("one View for all layers", len(joined(exact, conversion.shapes)) <= 9, True)

    def test_the_size_that_grows_is_inferred(self) -> None:
        """Of rows that alternate, the two stay two, and the number of pairs is that of the parameter, without numbering it."""
        model = llama(CONVERSIONS["interleaved"](loading()), intermediate_size=800)
        conversion = conversion_of(model)
        exact = views_of_conversion(conversion, 1 << 30)
        with mock.patch.object(twins, "_MANY", 15_000):  # it has 38,400 elements
            check_same("numbers", numbers(views_of_conversion(conversion, 0), model), numbers(exact, model))

    def test_unequal_ranges_have_the_sizes_of_the_parameters(self) -> None:
        """Rows of q, k and v in one tensor, which is too large to number even with short rows."""
        model = llama(CONVERSIONS["unequal rows joined"](loading()), num_attention_heads=48, head_dim=20)
        conversion = conversion_of(model)
        exact = views_of_conversion(conversion, 1 << 30)
        with mock.patch.object(twins, "_MANY", 20_000):  # it has 48,000 elements
            check_same("numbers", numbers(views_of_conversion(conversion, 0), model), numbers(exact, model))

    def test_a_model_of_gigabytes_is_learned_from_few_numbers(self) -> None:
        """DeepSeek V3 as the hub has it: five twins of one layer are numbered, for all layers."""
        package = transformers()
        with torch.device("meta"):
            model = package.DeepseekV3ForCausalLM(package.DeepseekV3Config())
        assert sum(param.numel() for param in model.parameters()) > 600e9
        nums = list[int]()
        element_maps = twins.element_maps

        def counted(conversion: Any, shapes: Any, renamed: Any) -> Any:
            nums.append(sum(map(prod, shapes.values())))
            return element_maps(conversion, shapes, renamed)

        with mock.patch.object(twins, "element_maps", counted):
            views = views_of_transformers(model)
        assert len(nums) == 5, nums
        assert max(nums) < 1 << 24, nums
        experts = "model.layers.{i}.mlp.experts"
        each = experts + ".{e}"
        check_same(
            "views",
            views,
            [
                View(
                    f"{experts}.gate_up_proj",
                    "e (gate_proj + up_proj) c",
                    {f"{each}.gate_proj.weight": "gate_proj c", f"{each}.up_proj.weight": "up_proj c"},
                ),
                View(f"{experts}.down_proj", "e d c", {f"{each}.down_proj.weight": "d c"}),
            ],
        )

    def test_what_depends_on_sizes_is_not_guessed(self) -> None:
        """A conversion that does something else with large parameters is not that of their twins."""
        module = loading()

        class Large(module.ConversionOps):  # type: ignore[misc,name-defined]
            def convert(self, input_dict: Any, **kwargs: Any) -> Any:
                ((key, (tensor,)),) = input_dict.items()
                return {
                    key: tensor
                    if tensor.shape[0] < HIDDEN
                    else tensor.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
                }

            @property
            def reverse_op(self) -> Any:
                return self

        model = llama(converter("mlp.up_proj.weight", "mlp.up_proj.weight", Large()))
        conversion = conversion_of(model)
        exact, by_twins = (views_of_conversion(conversion, few) for few in (1 << 30, 0))
        check_same("numbers", numbers(by_twins, model), numbers(exact, model))
        with mock.patch.object(twins, "_MANY", 1 << 10):
            refused(
                lambda: views_of_conversion(conversion, 0), LayoutError, "model.layers.0.mlp.up_proj.weight", "sizes"
            )


class TestRefused(unittest.TestCase):
    def setUp(self) -> None:
        module = loading()

        class Computed(module.ConversionOps):  # type: ignore[misc,name-defined]
            """`how`: (tensor) -> tensors by what follows the name."""

            def __init__(self, how: Any) -> None:
                self.how = how

            def convert(self, input_dict: Any, target_patterns: Any, **kwargs: Any) -> Any:
                (tensors,) = input_dict.values()
                return {target_patterns[0] + more: made for more, made in self.how(tensors[0]).items()}

            @property
            def reverse_op(self) -> Any:
                return self

        self.computed = Computed

    def check(self, how: Any, *words: str) -> None:
        model = llama(converter("mlp.stored.weight", "mlp.up_proj.weight", self.computed(how)))
        for few in (1 << 30, 0):
            refused(
                lambda few=few: views_of_conversion(conversion_of(model), few),  # type: ignore[misc]
                LayoutError,
                "model.layers.0.mlp.up_proj.weight",
                "Computed",
                *words,
            )

    def test_a_cast(self) -> None:
        self.check(lambda tensor: {"": tensor.float()}, "computes model.layers.0.mlp.stored.weight (torch.float32)")

    def test_a_product(self) -> None:
        self.check(lambda tensor: {"": tensor * 3}, "computes the elements of model.layers.0.mlp.stored.weight")

    def test_lost_elements(self) -> None:
        self.check(lambda tensor: {"": tensor[:, 1:].contiguous()}, "its element 0", "nowhere")

    def test_repeated_elements(self) -> None:
        self.check(
            lambda tensor: {"": tensor, "_copy": tensor.clone()}, "gives model.layers.0.mlp.stored.weight_copy besides"
        )
        self.check(lambda tensor: {"": tensor + 0, "_copy": tensor + 0}, "its element 0", "several times")

    def test_a_sum_in_place(self) -> None:
        self.check(
            lambda tensor: {"": tensor.add_(1 << 40)}, "computes the elements of model.layers.0.mlp.stored.weight"
        )

    def test_blocks_with_scales(self) -> None:
        """As block quantization writes them."""
        self.check(lambda t: {"": t.to(torch.uint8), "_scales": t.float().mean(1)}, "computes", "torch.")
        self.check(lambda t: {"": t.mean(1)}, "could not infer")

    def test_an_order_that_no_axes_have(self) -> None:
        generator = torch.Generator().manual_seed(1)
        order = torch.randperm(HIDDEN, generator=generator)
        model = llama(converter("mlp.stored.weight", "mlp.up_proj.weight", self.computed(lambda t: {"": t[order]})))
        refused(lambda: views_of_conversion(conversion_of(model)), LayoutError, "model.layers.0.mlp.up_proj.weight")

    def test_parameters_that_are_mixed(self) -> None:
        """Two tensors of the files, each with halves of two parameters."""
        module = loading()

        class Mixed(module.ConversionOps):  # type: ignore[misc,name-defined]
            supports_many_to_many = True

            def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
                halves = [input_dict[source][0].chunk(2) for source in source_patterns]
                return {
                    target: torch.cat(pair)
                    for target, pair in zip(target_patterns, zip(*halves, strict=True), strict=True)
                }

            @property
            def reverse_op(self) -> Any:
                return self

        names = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
        model = llama(converter(["mlp.first.weight", "mlp.second.weight"], names, Mixed()))
        words = ("model.layers.0.mlp.gate_proj.weight", "Mixed", "model.layers.0.mlp.first.weight")
        refused(lambda: views_of_conversion(conversion_of(model)), LayoutError, *words)

    def test_quantized_weights(self) -> None:
        """Which transformers itself cannot convert back."""
        module = loading()
        conversion = converter("mlp.stored.weight", "mlp.up_proj.weight", module.Transpose(0, 1))
        conversion.quantization_operation = module.Transpose(1, 0)
        model = llama(conversion)
        refused(lambda: views_of_transformers(model), LayoutError, "Transpose", "Cannot reverse", "quantization")

    def test_an_error_of_transformers(self) -> None:
        def fails(tensor: Any) -> Any:
            raise RuntimeError("no such kernel")

        model = llama(converter("mlp.stored.weight", "mlp.up_proj.weight", self.computed(fails)))
        refused(lambda: views_of_transformers(model), LayoutError, "LlamaForCausalLM", "no such kernel")


class TestUntouched(unittest.TestCase):
    def test_nothing_of_the_model_is_touched(self) -> None:
        """Its attributes, its elements, its conversions and its config."""
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            build("mixtral").save_pretrained(folder)
            model = transformers().MixtralForCausalLM.from_pretrained(folder)

        def state() -> dict[str, Any]:
            used = [(repr(each), each._was_used) for each in model._weight_conversions]
            attributes = {name: sorted(module.__dict__) for name, module in model.named_modules()}
            places = {name: (id(param), param.data_ptr()) for name, param in model.named_parameters()}
            return {"used": used, "attributes": attributes, "places": places, "config": model.config.to_dict()}

        before, weights = state(), {name: value.clone() for name, value in model.state_dict().items()}
        assert views_of_transformers(model)
        check_same("the model", state(), before)
        check_same("its weights", dict(model.state_dict()), weights)

    def test_numbers_at_other_places(self) -> None:
        """The number of a layer may be elsewhere in the files' names; numbers that are counted otherwise stay as they are."""
        views = [View(f"h.{i}.w", "n", {f"encoder.layer.{i}.w": "n"}) for i in range(2)]
        check_same("elsewhere", joined(views, ["h.0.w", "h.1.w"]), [View("h.{i}.w", "n", {"encoder.layer.{i}.w": "n"})])
        check_same("a third without a View", joined(views, ["h.0.w", "h.1.w", "h.2.w"]), views)
        offset = [View(f"h.{i}.w", "n", {f"q.{i + 1}.w": "n"}) for i in range(2)]
        check_same("counted otherwise", joined(offset, ["h.0.w", "h.1.w"]), offset)
