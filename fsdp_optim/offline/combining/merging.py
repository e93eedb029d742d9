"""Merge of an adapter: writes a checkpoint of a base with a LoRA adapter in its weights, without a model and in bounded memory.

It is a conversion of the base without its optimizer. `lora.py` has the arithmetic, `merged_source.py` the elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

import torch

from fsdp_optim.checkpoint.common.stores import Place, options_of, store_at
from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.formats.base.index import CheckpointIndex
from fsdp_optim.formats.base.protocols import Reader, StoredTensor
from fsdp_optim.formats.own.format import OURS
from fsdp_optim.layout import Shape
from fsdp_optim.move import Key
from fsdp_optim.offline.combining.lora import CONFIG_NAME, MOST_CONFIG_NBYTES, LoraConfig
from fsdp_optim.offline.combining.merged_source import Factors, MergedSource, check_fits
from fsdp_optim.offline.conversion.arguments import ConvertArguments
from fsdp_optim.offline.conversion.convert import opened_on_all, ranks_of_call
from fsdp_optim.offline.conversion.new_files import NewFiles
from fsdp_optim.offline.conversion.source_contents import SourceNaming, name_source
from fsdp_optim.offline.conversion.unit_sources import CheckpointSource
from fsdp_optim.results.offline import AdapterMergeResult
from fsdp_optim.tensors.memory import Budget, dtype_named
from fsdp_optim.transport.agree import all_equal, all_hear, in_turn
from fsdp_optim.transport.base import RankGroup

_IN_PEFT, _BASE_LAYER = "base_model.model.", "base_layer."
_COPIES = ("modules_to_save", "original_module")
_A, _B = ".lora_A.weight", ".lora_B.weight"
_EMBEDDING_A, _EMBEDDING_B = ".lora_embedding_A", ".lora_embedding_B"
_ENDS = (_A, _B, _EMBEDDING_A, _EMBEDDING_B)
_MERGED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def merge_adapter(base: Place, adapter: Place, target: Place, options: ConvertArguments) -> AdapterMergeResult:
    """Merge an adapter into a new checkpoint of this library's own format. Called by all ranks of the process group."""
    group = ranks_of_call(options.call)
    with in_turn(group), all_hear(group):
        options.validate()
        options.refuse_views("merge_adapter")
        with (
            closing(opened_on_all(group, base, options)) as of_base,
            closing(opened_on_all(group, adapter, options)) as of_adapter,
        ):
            config = _config_at(adapter, options)
            return _Merge(group, of_base, of_adapter, config, options).run(target)


def _config_at(adapter: Place, options: ConvertArguments) -> LoraConfig:
    with store_at(adapter, OURS, options_of(adapter, options.storage_options)).open_any() as opened:
        if CONFIG_NAME not in opened.names():
            raise CheckpointError(
                f"{opened.where}: has no {CONFIG_NAME}, which says the scale of an adapter: save it with PEFT's save_pretrained, "
                "or with fsdp_optim.integrations.peft"
            )
        text = opened.read_whole(CONFIG_NAME, most_nbytes=MOST_CONFIG_NBYTES)
        return LoraConfig.parsed(opened.named(CONFIG_NAME), text)


@dataclass(frozen=True)
class _Merge:
    """The merge of an open adapter into an open base."""

    group: RankGroup
    base: Reader
    adapter: Reader
    config: LoraConfig
    options: ConvertArguments

    def run(self, target: Place) -> AdapterMergeResult:
        """Compare base and adapter, and write the new checkpoint. Nothing is written where they do not fit together."""
        options, writer = self.options, OURS.writer()
        if not self.base.index.weights:
            raise CheckpointError(f"{self.base.index.where}: has no weights to merge the adapter into")
        naming = SourceNaming(options.param_names)
        named = name_source(self.base, naming, allow_pickle=options.allow_pickle, with_optim=False)
        fit = _Fit.of(named.index, self.adapter.index, self.config)
        budget = Budget(options.bucket_nbytes, "the elements of a checkpoint that a process merges")
        check_fits(budget, tuple(fit.factors.values()))
        contents = named.contents(writer, allow_pickle=options.allow_pickle)
        source = MergedSource(
            base=CheckpointSource(self.base, contents.stored),
            adapter=CheckpointSource(self.adapter, fit.replaced),
            factors=fit.factors,
            budget=budget,
        )
        new = NewFiles.of(self.group, self.base, contents, OURS, options, writer=writer, source=source)
        compared = f"{self.base.index.identity} {self.adapter.index.identity} {self.config} {new.compared}"
        if not all_equal(self.group, "read", compared.encode()):
            raise StateError(
                f"{self.base.index.where}: the processes that merge it see different checkpoints, or have other options: give "
                "all of them the same paths and options"
            )
        saved = new.run(target)
        return AdapterMergeResult(
            path=saved.path,
            base=self.base.index.where,
            adapter=self.adapter.index.where,
            num_tensors=saved.num_tensors,
            num_merged=len(fit.factors),
            num_replaced=len(fit.replaced),
            nbytes=saved.nbytes,
        )


@dataclass(frozen=True)
class _Fit:
    """What an adapter adds to, and replaces in, the weights of a base."""

    factors: Mapping[Key, Factors]
    replaced: Mapping[Key, StoredTensor]

    @classmethod
    def of(cls, base: CheckpointIndex, adapter: CheckpointIndex, config: LoraConfig) -> _Fit:
        """Pair the names of both. Raises StateError that names what does not fit."""
        layers: dict[str, dict[str, StoredTensor]] = {}
        replaced: dict[Key, StoredTensor] = {}
        for name, tensor in adapter.weights.items():
            inner = name.removeprefix(_IN_PEFT)
            end = next((end for end in _ENDS if inner.endswith(end)), None)
            if end is not None:
                layers.setdefault(inner.removesuffix(end), {})[end] = tensor
                continue
            if "lora_" in inner:
                raise StateError(
                    f"{adapter.where}: {name} is part of an adapter that cannot be merged here, such as a bias or a "
                    "magnitude of DoRA: merge it with PEFT's merge_and_unload()"
                )
            fqn = inner.replace(f".{_BASE_LAYER}", ".")
            if fqn not in base.weights and _is_again(name, adapter):
                continue
            if _weight_of(base, adapter, fqn, name).shape != tensor.shape:
                raise StateError(
                    f"{name}: has the shape {list(tensor.shape)} in {adapter.where}, and {fqn} has "
                    f"{list(base.weights[fqn].shape)} in {base.where}: give the base that the adapter was trained on"
                )
            replaced[False, fqn, ""] = tensor
        if not layers:
            raise StateError(f"{adapter.where}: has no LoRA factors (names that end in {_A} and {_B}) to merge")
        pairs = {layer: _pair(base, adapter, layer, factors, config) for layer, factors in layers.items()}
        _check_directions(pairs, adapter, config)
        return cls({(False, pair.name, ""): pair for pair in pairs.values()}, replaced)


def _is_again(name: str, adapter: CheckpointIndex) -> bool:
    """Return whether a tensor of a module of `modules_to_save` is in the adapter under the module's own name too.

    With bias="all" PEFT saves the biases of such a module three times: also those of the copy and of the original in the wrapper
    of the module, which it does not read.
    """
    again = (name.replace(f".{part}.", ".", 1) for part in _COPIES if f".{part}." in name)
    return any(other in adapter.weights for other in again)


def _weight_of(base: CheckpointIndex, adapter: CheckpointIndex, fqn: str, name: str) -> StoredTensor:
    """Return a weight of the base. Raises StateError where there is none, or where it has several names."""
    tied = next((pair for pair in base.aliases.items() if fqn in pair), None)
    if tied is not None:
        raise StateError(
            f"{name} in {adapter.where} changes {fqn}, which is one tensor with two names in {base.where}, {tied[0]} and "
            f"{tied[1]}: the merged model could not have both values; untie them first"
        )
    if fqn not in base.weights:
        raise StateError(
            f"{name} is in {adapter.where}, and {fqn} is not in {base.where}: give the base that the adapter was trained on, "
            "with the names that its model has"
        )
    return base.weights[fqn]


def _pair(
    base: CheckpointIndex,
    adapter: CheckpointIndex,
    layer: str,
    factors: Mapping[str, StoredTensor],
    config: LoraConfig,
) -> Factors:
    """Return the factors of a layer. Raises StateError if they do not fit."""
    name, is_embedding = f"{layer}.weight", not {_EMBEDDING_A, _EMBEDDING_B}.isdisjoint(factors)
    end_a, end_b = (_EMBEDDING_A, _EMBEDDING_B) if is_embedding else (_A, _B)
    for end, other in ((end_a, end_b), (end_b, end_a)):
        if end not in factors:
            raise StateError(f"{layer}{other} is in {adapter.where} without {layer}{end}: the adapter is damaged")
    a, b = factors[end_a], factors[end_b]
    weight = _weight_of(base, adapter, name, a.key)
    dtype = dtype_named(weight.dtype)
    if dtype not in _MERGED_DTYPES:
        raise StateError(
            f"{name}: is {weight.dtype} in {base.where}, to which nothing can be added exactly: give a base that is not quantised"
        )
    rank = config.rank_of(layer)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise StateError(
            f"{layer}: its factors have the shapes {list(a.shape)} and {list(b.shape)} in {adapter.where}, and {config.where} "
            f"says rank {rank}: only matrices of this rank can be merged"
        )
    ways: dict[Shape, bool] = {(b.shape[0], a.shape[1]): False, (a.shape[1], b.shape[0]): True}
    if is_embedding:  # A has a column for each token, as the weight has a row, whatever fan_in_fan_out says
        ways = {(a.shape[1], b.shape[0]): True}
    if tuple(weight.shape) not in ways:
        raise StateError(
            f"{name}: has the shape {list(weight.shape)} in {base.where}, and its factors in {adapter.where} make "
            f"{list(next(iter(ways)))}: give the base that the adapter was trained on"
        )
    is_square = a.shape[1] == b.shape[0]
    is_transposed = config.fan_in_fan_out if is_square and not is_embedding else ways[tuple(weight.shape)]
    return Factors(name, a, b, config.scale_of(layer), is_transposed, dtype, is_embedding=is_embedding)


def _check_directions(pairs: Mapping[str, Factors], adapter: CheckpointIndex, config: LoraConfig) -> None:
    """Raise StateError for a square matrix where other ones show that the configuration is not true for all layers."""
    pairs = {layer: pair for layer, pair in pairs.items() if not pair.is_embedding}
    square = next((layer for layer, pair in pairs.items() if pair.a.shape[1] == pair.b.shape[0]), None)
    wrong = next((layer for layer, pair in pairs.items() if pair.is_transposed != config.fan_in_fan_out), None)
    if square is not None and wrong is not None:
        raise StateError(
            f"{square}: is square, and {wrong} contradicts fan_in_fan_out={config.fan_in_fan_out} of {config.where}, so that "
            f"{adapter.where} does not say whether to transpose it: merge it with PEFT's merge_and_unload()"
        )
