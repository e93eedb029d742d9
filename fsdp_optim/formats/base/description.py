"""The description of an optimizer in a checkpoint: all but the elements of tensors. It is written and read as JSON here.

`to_plain` and `from_plain` are inverse, and so are `encoded` and `decoded`, which lead on to JSON and the tensors beside it: a
hyperparameter may be a tensor, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.codec import Decoder, Encoder
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.json_text import DOUBTFUL, decoded_at_once, parse_json

TENSOR = "tensor"
"""The kind of a stored tensor that has the shape of its parameter and is cut like it."""

SCALAR_TENSOR = "scalar tensor"
"""The kind of a stored tensor without dimensions."""

PLACED = "placed"
"""The kind of a stored tensor that was cut in another way than its parameter. The cut follows this word, if it is known."""

SCALAR, OPAQUE = "scalar", "opaque"
"""The kinds of values that the description itself contains: numbers and strings; all other values."""


@dataclass(frozen=True)
class ParamDescription:
    """The state of one parameter.

    `values`: for each value its name, its kind (one of the constants above), and the key of a stored tensor or the value itself.
    """

    shape: tuple[int, ...]
    values: tuple[tuple[Any, str, Any], ...]
    has_state: bool


_NUM_FIELDS = len(fields(ParamDescription))


@dataclass(frozen=True)
class GroupDescription:
    """One param group: its hyperparameters and the names of its parameters."""

    hyperparameters: tuple[tuple[str, Any], ...]
    params: tuple[str, ...]


@dataclass(frozen=True)
class OptimDescription:
    """The description of an optimizer.

    Attributes:
        groups: the param groups, each with its parameters in the order in which the optimizer counts them.
        other_keys: the entries of its state_dict() besides "state" and "param_groups".
        params: the state of each parameter, by FQN.
        optimizer_class: the name of its class, or a name for each group if they differ; None if unknown.
    """

    groups: tuple[GroupDescription, ...]
    other_keys: dict[str, Any]
    params: dict[str, ParamDescription]
    optimizer_class: str | list[str] | None = None


def to_plain(description: OptimDescription) -> dict[str, Any]:
    """Return the description as dicts and lists of unencoded values."""
    return {
        "optimizer_class": description.optimizer_class,
        "groups": [
            {"hyperparameters": [list(pair) for pair in group.hyperparameters], "params": list(group.params)}
            for group in description.groups
        ],
        "extra": description.other_keys,
        "params": {fqn: _plain_param(param) for fqn, param in description.params.items()},
    }


def _plain_param(param: ParamDescription) -> dict[str, Any]:
    return {"shape": list(param.shape), "values": list(map(list, param.values)), "has_state": param.has_state}


def is_text_alone(param: ParamDescription) -> bool:
    """Return whether a parameter's description is its own JSON: names and keys of stored tensors, in ASCII, as nearly always."""
    for name, _, content in param.values:
        if type(name) is not str or type(content) is not str or not name.isascii() or not content.isascii():
            return False
    return True


class _Plain(msgspec.Struct, frozen=True):
    """The schema of `to_plain`."""

    groups: tuple[GroupDescription, ...]
    extra: dict[str, Any]
    params: dict[str, ParamDescription]
    optimizer_class: str | list[str] | None = None


def from_plain(where: str, plain: Any) -> OptimDescription:
    """The inverse of `to_plain`. Raises CheckpointError if a value has the wrong type."""
    with as_checkpoint_error(where):
        values = msgspec.convert(plain, _Plain)
        description = OptimDescription(values.groups, values.extra, values.params, values.optimizer_class)
        for param in description.params.values():
            hash(tuple(name for name, _, _ in param.values))  # a name may be any hashable value, not only a str
        return description


def encoded(
    where: str, description: OptimDescription, *, allow_pickle: bool, records: Mapping[str, type]
) -> tuple[Any, list[torch.Tensor]]:
    """Return the description as JSON values, and its tensors. Raises CheckpointError that names a value which cannot be saved.

    Parameters that are all described by text alone are there as they are, which msgspec writes as the same JSON.
    """
    try:
        return _encoded(where, description, allow_pickle=allow_pickle, records=records)
    except CheckpointError:
        encoder = Encoder(allow_pickle=allow_pickle, records=records)
        for name, value in _named_values(description):
            encoder.encode(name, value)  # raises the error that has the value's own name
        raise


def _named_values(description: OptimDescription) -> Iterator[tuple[str, Any]]:
    """Yield the values of param groups and of parameters, each with its name for users."""
    for index, group in enumerate(description.groups):
        yield from ((f"param group {index}: {name}", value) for name, value in group.hyperparameters)
    for fqn, param in description.params.items():
        yield from ((f"{fqn}: {name!r} of its state", value) for name, _, value in param.values)


def _encoded(
    where: str, description: OptimDescription, *, allow_pickle: bool, records: Mapping[str, type]
) -> tuple[Any, list[torch.Tensor]]:
    encoder = Encoder(allow_pickle=allow_pickle, records=records)
    if not all(fqn.isascii() and not fqn.startswith("$") for fqn in description.params):
        return encoder.encode(where, to_plain(description)), encoder.tensors
    values = encoder.encode(where, to_plain(replace(description, params={})))
    if all(map(is_text_alone, description.params.values())):
        return {**values, "params": description.params}, encoder.tensors
    values["params"] = {
        fqn: _plain_param(param)
        if is_text_alone(param)
        else encoder.encode(f"{where}['params'][{fqn!r}]", _plain_param(param))
        for fqn, param in description.params.items()
    }
    return values, encoder.tensors


def decoded(
    where: str, values: Any, tensors: Sequence[torch.Tensor], *, allow_pickle: bool, records: Mapping[str, type]
) -> OptimDescription:
    """The inverse of `encoded`. Raises CheckpointError for other JSON values, and for a pickle unless pickles are allowed."""
    decoder = Decoder(where, tensors, allow_pickle=allow_pickle, records=records)
    params = _as_they_are(values)
    if params is None:
        return from_plain(where, decoder.decode(values))
    return replace(from_plain(where, decoder.decode({**values, "params": {}})), params=params)


class _Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The schema of `encoded` text whose parameters have names and leaves alone."""

    groups: msgspec.Raw
    extra: msgspec.Raw
    params: dict[str, ParamDescription]
    optimizer_class: msgspec.Raw


def decoded_text(where: str, text: bytes, *, allow_pickle: bool, records: Mapping[str, type]) -> OptimDescription:
    """Return the description of a JSON text without tensors, as `decoded` does, in a fraction of the memory."""
    params, rest = _params_apart(text) or (None, text)
    description = decoded(where, parse_json(where, rest), (), allow_pickle=allow_pickle, records=records)
    return description if params is None else replace(description, params=params)


def _params_apart(text: bytes) -> tuple[dict[str, ParamDescription], bytes] | None:
    """Return the parameters of a text, and the text without them; None where a value is encoded, or something may be wrong."""
    values = decoded_at_once(text, _Text)
    if values is DOUBTFUL or not _are_text_alone(values.params):
        return None
    return values.params, msgspec.json.encode(msgspec.structs.replace(values, params={}))


_LEAVES = frozenset({str, int, float, bool, type(None)})


def _as_they_are(values: Any) -> dict[str, ParamDescription] | None:
    """Return the parameters whose JSON is their description, as nearly always: all of them have names and leaves alone.

    None where a value is encoded, or wrong: then each is decoded, which says what is wrong.
    """
    encoded = values.get("params") if isinstance(values, dict) else None
    if not isinstance(encoded, dict):
        return None
    try:
        params = msgspec.convert(encoded, dict[str, ParamDescription])
    except (msgspec.MsgspecError, RecursionError):
        return None
    return params if {*map(len, encoded.values())} <= {_NUM_FIELDS} and _are_text_alone(params) else None


def _are_text_alone(params: Mapping[str, ParamDescription]) -> bool:
    """Return whether all values of parameters have names and leaves alone."""
    if any(fqn[:1] == "$" for fqn in params):
        return False
    kinds = {(type(name), type(content)) for param in params.values() for name, _, content in param.values}
    return all(name is str and content in _LEAVES for name, content in kinds)
