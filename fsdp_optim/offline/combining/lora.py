"""LoRA adapters as PEFT stores them: what `adapter_config.json` says, and the product of two factors in blocks of rows.

    W (out, in) += (B (out, r) @ A (r, in)) * scale        a layer that computes x @ W.T
    W (in, out) += (B (out, r) @ A (r, in)).T * scale      a layer with fan_in_fan_out, as GPT-2's; an embedding

A block has a multiple of 64 rows, so that the product has the bits of the undivided one wherever the matrix multiplication takes
its rows in such groups.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from fsdp_optim.arguments import is_integer
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.json_text import parse_json
from fsdp_optim.layout import Shape

CONFIG_NAME, MOST_CONFIG_NBYTES = "adapter_config.json", 4 << 20

_MERGED_OPTIONS = frozenset(
    {
        "r",
        "lora_alpha",
        "use_rslora",
        "fan_in_fan_out",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
        "peft_type",
    }
)
_OTHER_OPTIONS = frozenset(
    {
        "alora_target_modules",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "modules_to_save",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
"""Options without influence on a merge: they say what was trained, which the names in the file say too."""

_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
"""The values of `init_lora_weights` that leave the weights of the base as they are."""

_ROWS = 64

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class LoraConfig:
    """What a configuration says about the scale and the direction of the factors. `where`: the path of the file."""

    where: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parsed(cls, where: str, text: bytes) -> LoraConfig:
        """Parse the file. Raises CheckpointError for one that is damaged, or asks for what cannot be merged exactly."""
        given = parse_json(where, text)
        if not isinstance(given, dict):
            raise CheckpointError(f"{where}: is not a configuration of PEFT: give the folder that PEFT has saved")
        if given.get("peft_type") != "LORA":
            raise CheckpointError(f"{where}: has the type {given.get('peft_type')!r}, and only LORA can be merged here")
        for name, value in sorted(given.items()):
            if value and name not in _MERGED_OPTIONS | _OTHER_OPTIONS:
                raise CheckpointError(
                    f"{where}: has {name}={value!r}, which cannot be merged here: merge it with PEFT's merge_and_unload()"
                )
        begin = given.get("init_lora_weights", True)
        if begin not in _PLAIN_BEGINNINGS:
            raise CheckpointError(
                f"{where}: has init_lora_weights={begin!r}, which changes the weights of the base too: merge it with PEFT's "
                "merge_and_unload()"
            )
        patterns = {name: given.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
        config = cls(
            where=where,
            r=given.get("r", 8),
            lora_alpha=given.get("lora_alpha", 8),
            use_rslora=bool(given.get("use_rslora")),
            fan_in_fan_out=bool(given.get("fan_in_fan_out")),
            **patterns,
        )
        config._check()
        return config

    def _check(self) -> None:
        for name in ("rank_pattern", "alpha_pattern"):
            if not isinstance(getattr(self, name), dict):
                raise CheckpointError(
                    f"{self.where}: {name} is not an object of names with numbers: the file is damaged"
                )
        for rank in (self.r, *self.rank_pattern.values()):
            if not is_integer(rank) or rank <= 0:
                raise CheckpointError(f"{self.where}: has the rank {rank!r}, which is not an integer above 0")
        for alpha in (self.lora_alpha, *self.alpha_pattern.values()):
            if not (is_integer(alpha) or isinstance(alpha, float)) or not math.isfinite(alpha):
                raise CheckpointError(f"{self.where}: has the alpha {alpha!r}, which is not a finite number")
        for pattern in (*self.rank_pattern, *self.alpha_pattern):
            try:
                re.compile(pattern)
            except re.error as error:
                raise CheckpointError(f"{self.where}: {pattern!r} is not a pattern of layer names: {error}") from error

    def rank_of(self, layer: str) -> int:
        """Return the rank of a layer of the base model."""
        return _matched(self.rank_pattern, layer, self.r)

    def scale_of(self, layer: str) -> float:
        """Return the number by which the product of a layer is multiplied."""
        alpha, rank = _matched(self.alpha_pattern, layer, self.lora_alpha), self.rank_of(layer)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _matched(patterns: Mapping[str, Number], layer: str, default: Number) -> Number:
    """Return the number of the first pattern that matches the end of a layer's name, at the begin of a part of it."""
    for pattern, number in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return number
    return default


def compute_dtype_of(weight: torch.dtype) -> torch.dtype:
    """Return the dtype of the product for a weight: PEFT keeps the factors of shorter weights in float32."""
    return torch.float64 if weight == torch.float64 else torch.float32


class BlockMemory:
    """Memory for a block and its transposed copy, used again and again: new blocks would come from new places of the heap."""

    def __init__(self) -> None:
        self._parts = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]

    def of(self, part: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Return one of both parts as a matrix; its elements are arbitrary."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self._parts[part].numel() < nbytes:
            self._parts[part] = torch.empty(0, dtype=torch.uint8)  # first, so that never both are held
            self._parts[part] = torch.empty(nbytes, dtype=torch.uint8)
        return self._parts[part][:nbytes].view(dtype).view(shape)


@dataclass(frozen=True)
class LoraProduct:
    """The product of a layer: `a` (r, in), `b` (out, r), both of the dtype of the product."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    is_transposed: bool

    @property
    def shape(self) -> Shape:
        """The shape of the weight."""
        num_out, num_in = self.b.shape[0], self.a.shape[1]
        return (num_in, num_out) if self.is_transposed else (num_out, num_in)

    def rows_in(self, most_nbytes: int) -> int:
        """Return how many rows of the weight a block of at most `most_nbytes` has; at least one."""
        num, row_nbytes = self.shape[0], self.shape[1] * self.a.element_size()
        fitting = max(most_nbytes // row_nbytes, 1)
        return num if fitting >= num else fitting // _ROWS * _ROWS or fitting

    def block(self, first: int, stop: int, memory: BlockMemory) -> torch.Tensor:
        """Return the rows [first, stop) of what is added to the weight, flat, until the next block in the same memory."""
        num, (num_out, num_in) = stop - first, (self.b.shape[0], self.a.shape[1])
        if self.is_transposed:
            product = memory.of(0, (num_out, num), self.a.dtype)
            torch.mm(self.b, self.a[:, first:stop], out=product).mul_(self.scale)
            return memory.of(1, (num, num_out), self.a.dtype).copy_(product.T).view(-1)
        product = memory.of(0, (num, num_in), self.a.dtype)
        return torch.mm(self.b[first:stop], self.a, out=product).mul_(self.scale).view(-1)
