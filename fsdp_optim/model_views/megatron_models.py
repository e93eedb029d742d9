"""The layouts of megatron-core's fused layers as Views, from its modules and their configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fsdp_optim.adapters import ModelReader
from fsdp_optim.errors import LayoutError
from fsdp_optim.layout import Shape
from fsdp_optim.layout.views import View
from fsdp_optim.model_views.patterns import joined
from fsdp_optim.options import Model


def views_of_megatron(model: Model) -> list[View]:
    """Return the Views of the attention and gated MLP layers of megatron-core, from the modules' configs and the live shapes.

    - `linear_qkv` of a SelfAttention: for each group of queries its query heads, its key and its value; with
      `attention_output_gate` the gates of the heads after the query heads. The parts are `q`, `gate`, `k` and `v`.
    - `linear_fc1` of an MLP, a shared expert or grouped experts (`weight0`, `weight1`, ...) with `gated_linear_unit`: the rows of
      the gate, then those of the projection. The parts are `gate` and `up`.

    Nothing is imported: modules are known by the names of their classes and attributes. The shapes must be those of the complete
    parameters. Where tensor parallelism leaves each rank a plain tensor, say which slice of the parameter it is: of `linear_qkv`
    by `declare_slice`; of a gated `linear_fc1`, of which a rank has rows of both halves, by a DTensor with `_StridedShard`.

    Args:
        model: the model, wrapped or not; also a list of pipeline stages.

    Returns:
        The Views; none for a model without such layers.

    Raises:
        LayoutError: a layer has another shape than its config says.
    """
    reader = ModelReader(model)
    shapes = {
        fqn: original.placement.shape
        for named in reader.read().handles
        for fqn, original in zip(named.fqns, named.handle.originals, strict=True)
    }
    views = {view.name: view for path, module in reader.modules() for view in _views_of(path, module, shapes)}
    return joined(list(views.values()), shapes)


def _views_of(path: str, module: nn.Module, shapes: Mapping[str, Shape]) -> Iterator[View]:
    """Yield the Views of the parameters of one module."""
    classes = {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("megatron.")}
    config = getattr(module, "config", None)
    if config is None or not classes:
        return
    if "SelfAttention" in classes:
        for kind in ("weight", "bias"):
            name = _join(path, f"linear_qkv.{kind}")
            if name in shapes:
                yield _view_of_qkv(path, kind, config, shapes[name])
    elif classes & {"MLP", "TEGroupedMLP"} and getattr(config, "gated_linear_unit", False):
        prefix = _join(path, "linear_fc1.")
        for name, shape in shapes.items():
            kind = name.removeprefix(prefix)
            if name != kind and kind.rstrip("0123456789") in ("weight", "bias"):
                yield _view_of_fc1(path, kind, config, shape)


def _view_of_qkv(path: str, kind: str, config: Any, shape: Shape) -> View:
    name = _join(path, f"linear_qkv.{kind}")
    heads, size = config.num_attention_heads, config.kv_channels
    groups = getattr(config, "num_query_groups", None) or heads
    per_group = heads // groups
    sizes = {"q": per_group, "gate": per_group, "k": 1, "v": 1}
    if not getattr(config, "attention_output_gate", False):
        del sizes["gate"]
    rows = groups * sum(sizes.values()) * size
    if shape[0] != rows:
        raise LayoutError(
            f"{name}: has {shape[0]} rows, and its config makes it {rows}: {groups} query groups of {per_group} query heads, "
            f"{size} rows each, as {' + '.join(sizes)}. {_whole(shape[0], rows)}"
        )
    tail = " c" if len(shape) == 2 else ""
    parts = {_join(path, f"{part}.{kind}"): f"(g {part} d){tail}" for part in sizes}
    return View(name, f"(g ({' + '.join(sizes)}) d){tail}", parts, **sizes, d=size)


def _view_of_fc1(path: str, kind: str, config: Any, shape: Shape) -> View:
    name = _join(path, f"linear_fc1.{kind}")
    if getattr(config, "moe_mlp_glu_interleave_size", None):
        raise LayoutError(
            f"{name}: moe_mlp_glu_interleave_size interleaves the rows of the gate and of the projection, and views_of_megatron "
            "knows halves only: give a View of your own"
        )
    if shape[0] % 2:
        raise LayoutError(f"{name}: has {shape[0]} rows, and the two halves of a gated linear unit are an even number")
    tail = " c" if len(shape) == 2 else ""
    parts = {_join(path, f"{part}.{kind}"): f"{part}{tail}" for part in ("gate", "up")}
    return View(name, f"(gate + up){tail}", parts)


def _whole(rows: int, wanted: int) -> str:
    """Return what to do about a parameter that has other rows than its config says."""
    if wanted % rows:
        return "Give a View of your own"
    return (
        f"If tensor parallelism leaves each of {wanted // rows} ranks a part of it, say which: "
        "fsdp_optim.declare_slice(module, name, global_shape, offset)"
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
