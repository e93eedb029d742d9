"""Checkpoints of DeepSpeed: ZeRO 1, 2 and 3, universal ones, and models without ZeRO. `writer.py` writes universal ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from msgspec import structs

from fsdp_optim.errors import CheckpointError
from fsdp_optim.foreign.archive.torch_archive import TorchArchive
from fsdp_optim.foreign.deepspeed.files import DeepSpeedFiles, find_files, has_deepspeed_files
from fsdp_optim.foreign.deepspeed.manifest import NAME
from fsdp_optim.foreign.deepspeed.model import ModelFiles
from fsdp_optim.foreign.deepspeed.optim import Optimizer, read_optimizer
from fsdp_optim.foreign.deepspeed.trees import mapping, read_files
from fsdp_optim.foreign.deepspeed.universal import read_universal
from fsdp_optim.foreign.reader import ForeignFormat, ForeignReader, Source
from fsdp_optim.foreign.torch.folder import checked_summary
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.index import in_class_of
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.storage.base import Opened

_STAGE_3 = "zero_pp_rank_"


class DeepSpeed(ForeignFormat):
    """The folder of a tag, or the folder above it with the file `latest`.

    The fp32 weights that ZeRO's optimizer holds are the weights; the module's, in 16 bits, are given only where the checkpoint
    has no others.
    """

    name = "deepspeed"

    def recognises(self, opened: Opened) -> bool:
        return has_deepspeed_files(opened)

    def open(self, opened: Opened, *, verify: bool) -> ForeignReader:
        checked_summary(opened, NAME)
        files = find_files(opened)
        if files.folder:
            checked_summary(opened, NAME, files.folder)
        models = ModelFiles(opened, list(files.models.values()))
        optimizer: Optimizer | None
        if files.is_universal or files.optims:
            _check_ranks(files, models)
        if files.is_universal:
            optimizer, more = read_universal(opened, files, models)
        elif files.optims:
            more = read_files(opened, list(files.optims.values()))
            optimizer = read_optimizer(more, models.saved.get("param_shapes"))
        else:
            optimizer, more = _without_zero(files, models), []
        sources: dict[str, Source] = {}
        digest = sha256()
        for archive in (*models.read, *more):
            sources.update(archive.sources)
            digest.update(archive.digest.encode())
        extra = models.extra(optimizer.scaler if optimizer is not None else {})
        return ForeignReader(
            opened,
            self.name,
            model=_weights(models, optimizer, is_cut=_stage_3_models(files)),
            full_dict=optimizer.full_dict if optimizer is not None else None,
            sources=sources,
            aliases=models.aliases,
            extra_values=extra,
            rank_extras=models.rank_extras(),
            module_values=models.module_values,
            pickled=models.pickled(extra),
            world_size=models.num_ranks,
            step=models.step,
            metadata_digest=digest.hexdigest(),
            files=[*files.models.values(), *files.optims.values()],
        )


DEEPSPEED = DeepSpeed()


def _stage_3_models(files: DeepSpeedFiles) -> bool:
    return any(name.rpartition("/")[2].startswith(_STAGE_3) for name in files.models.values())


def _check_ranks(files: DeepSpeedFiles, models: ModelFiles) -> None:
    """Raise CheckpointError that names the first missing file, unless there are files of all ranks, and of no others."""
    kinds = [(files.models, "model")] if _stage_3_models(files) else []
    kinds += [(files.optims, "optim")] if files.optims else []
    for names, kind in kinds:
        wanted = set(range(models.num_ranks or len(names)))
        like = next(iter(names.values())).rpartition("/")[2]
        for rank in sorted(wanted ^ set(names)):
            head, _, tail = like.partition(_STAGE_3)
            name = f"{head}{_STAGE_3}{rank}_{tail.partition('_')[2]}"
            problem = "is left over from another save" if rank in names else "is missing"
            raise CheckpointError(
                f"{files.where}/{name}: {problem}: {models.num_ranks} ranks saved, and {kind} states of {len(names)} are there"
            )


def _weights(models: ModelFiles, optimizer: Optimizer | None, *, is_cut: bool) -> Mapping[str, StoredTensor]:
    """Return all weights and buffers, in fp32 as far as the optimizer has them. `is_cut`: the module has no whole weights."""
    masters = optimizer.masters if optimizer is not None else {}
    aliases, buffers = models.aliases, models.buffers
    module = buffers if is_cut else models.module
    weights = {**module, **models.frozen(), **masters, **buffers}
    return {name: stored for name, stored in weights.items() if name not in aliases or aliases[name] not in weights}


def _without_zero(files: DeepSpeedFiles, models: ModelFiles) -> Optimizer | None:
    """Return the optimizer of a checkpoint without files of ZeRO; None if none was saved, or its files were removed."""
    with as_checkpoint_error(models.file):
        saved = models.saved.get("optimizer")
        if _stage_3_models(files):
            rank = next(iter(files.models.values())).rpartition("/")[2].replace("model_states.pt", "optim_states.pt")
            raise CheckpointError(
                f"{files.where}/{rank}: is missing, and so are those of the other ranks: a checkpoint of ZeRO 3 has no weights "
                "without them"
            )
        if saved is None:
            return None
        tree = mapping(saved, "optimizer")
        if any(name in tree for name in ("fp32_groups", "fp32_groups_flat")):
            raise CheckpointError(
                f"{models.file}: has fp32 weights without names, because DeepSpeed's fp16 and bf16 optimizers without ZeRO do "
                "not save the names: load it with DeepSpeed, and save it with ZeRO 1"
            )
        mapping(tree["state"], "state")
        return Optimizer({}, _with_keys(models.first, tree), {})


def _with_keys(archive: TorchArchive, tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a plain optimizer's dict whose tensors have keys."""
    groups: Any = archive.materialised(tree["param_groups"])
    return {**tree, "state": _keyed(tree["state"], ""), "param_groups": groups}


def _keyed(value: Any, path: str) -> Any:
    join: Callable[[object], str] = lambda name: f"{path}.{name}" if path else str(name)  # noqa: E731
    if isinstance(value, StoredTensor):
        return structs.replace(value, key=path)
    if isinstance(value, dict):
        return in_class_of(value, {name: _keyed(child, join(name)) for name, child in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(_keyed(child, join(index)) for index, child in enumerate(value))
    return value


__all__: Sequence[str] = ("DEEPSPEED", "DeepSpeed")
