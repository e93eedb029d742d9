"""The folders of several models in one checkpoint: each has the files of one model, which name its tensors as the model does.

In the index of such a checkpoint a tensor's key has the name of its model before that of the parameter: `actor.layers.0.weight`,
and in the optimizer `state.actor.layers.0.weight.exp_avg`. In the files of the folder `actor` it has not.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from fsdp_optim.arguments import is_model_name
from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.description import GroupDescription, OptimDescription
from fsdp_optim.formats.base.protocols import Half

EXTRAS = "extra/"
"""The beginning of the names of files with values of the trainer and of modules."""

_STATE = "state."  # before all keys of an optimizer


def folder_of(file: str) -> str:
    """Return the name of the model in whose folder a file is; "" for a file of one model, and for those of the trainer."""
    return "" if file.startswith(EXTRAS) else file.rpartition("/")[0]


def in_folder(model: str, file: str) -> str:
    """Return the name of a file in the folder of a model; `model` "": in the checkpoint itself."""
    return f"{model}/{file}" if model else file


def stem_of(file: str) -> str:
    """Return how the name of a file with tensors begins, without what tells the files of a split half apart."""
    folder, slash, name = file.rpartition("/")
    return folder + slash + name.split("-")[0].split(".")[0]


def stems_of(models: Sequence[str], weights_name: str) -> dict[str, Half]:
    """Return the halves of the tensors by the `stem_of` of their files. `models`: empty for one model."""
    stems: dict[str, Half] = {"state": "state"}
    for model in models or ("",):
        stems |= {in_folder(model, weights_name): "model", in_folder(model, "optim"): "optim"}
    return stems


def models_with_optim(models: Sequence[str], files: Collection[str]) -> tuple[str, ...]:
    """Return those of several models that have an optimizer: each has a file of it, even without tensors."""
    stems = set(map(stem_of, files)) if models else ()
    return tuple(model for model in models if in_folder(model, "optim") in stems)


def split_key(half: Half, key: str) -> tuple[str, str]:
    """Return the model of a tensor, and its key in the files of that model.

    Raises CheckpointError for a name that does not begin with a model's.
    """
    before = _STATE if half == "optim" else ""
    model, dot, rest = key.removeprefix(before).partition(".")
    if not dot or not rest or not key.startswith(before):
        raise CheckpointError(f"{key}: is of none of the models, whose names the names of their tensors begin with")
    return model, before + rest


def joined_key(model: str, half: Half, key: str) -> str:
    """Return the key of a tensor from its model and its key in that model's files; the inverse of `split_key`.

    Raises CheckpointError for a key that an optimizer's file cannot have.
    """
    if not model:
        return key
    before = _STATE if half == "optim" else ""
    if not key.startswith(before):
        raise CheckpointError(f"{model}/{half}: has the tensor {key}, whose name does not begin with {before!r}")
    return f"{before}{model}.{key.removeprefix(before)}"


def check_models(where: str, models: Sequence[str], files: Collection[str], names: Collection[str]) -> None:
    """Raise CheckpointError for folders that no save makes.

    Args:
        models: the names in a manifest.
        files: the names of all files.
        names: the names of the parameters and buffers of all models, with those of the models.
    """
    if not all(map(is_model_name, models)) or len({model.lower() for model in models}) < len(models):
        raise CheckpointError(f"{where}: has models of the names {list(models)!r}, which no save gives")
    for file in files:
        if folder_of(file) and folder_of(file) not in models:
            raise CheckpointError(f"{where}: names the file {file}, which is in the folder of no model")
    for name in names if models else ():
        if split_key("model", name)[0] not in models:
            raise CheckpointError(f"{where}: names the parameter {name}, which is of none of its models")


def shared_text(groups: Mapping[str, str | None]) -> str:
    """Return the string by which every rank plans the files of several models.

    `groups`: for each model the param groups for readers without this library; None for a model without an optimizer.
    """
    return json.dumps({"models": groups}, sort_keys=True)


def groups_in(shared: str) -> dict[str, str | None] | None:
    """Return what `shared_text` was given; None for the string of one model, which is a list or empty."""
    groups: dict[str, str | None] | None = json.loads(shared)["models"] if shared.startswith('{"models"') else None
    return groups


def groups_by_model(optim: OptimDescription | None, models: Sequence[str]) -> dict[str, tuple[GroupDescription, ...]]:
    """Return the param groups of each model that has any, with the names in the files of its folder."""
    groups: dict[str, list[GroupDescription]] = {}
    for group in optim.groups if optim is not None else ():
        for model in models:
            params = tuple(name.removeprefix(f"{model}.") for name in group.params if name.startswith(f"{model}."))
            if params:
                groups.setdefault(model, []).append(GroupDescription(group.hyperparameters, params))
    return {model: tuple(listed) for model, listed in groups.items()}
