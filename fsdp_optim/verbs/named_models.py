"""Several models by their names, `{"actor": actor, "critic": critic}`, as one model whose parts have these names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from fsdp_optim.errors import WrapperError
from fsdp_optim.options import Model
from fsdp_optim.state.live.local import OptimizersOfModels
from fsdp_optim.verbs.arguments import check_models, check_optimizers


@dataclass(frozen=True)
class ModelNames:
    """The names of the models of a call, sorted; empty for a call with one model, which has none.

    Attributes:
        with_optim: those that have an optimizer in the call.
    """

    names: tuple[str, ...] = ()
    with_optim: tuple[str, ...] = ()


class NamedModels(NamedTuple):
    """The models and optimizers of a call as the rest of the library takes them.

    Attributes:
        model: the model or, for several, one that has them as its parts. A wrong argument stays as it is, so that
            `check_model` raises its error on all ranks.
        optim: the optimizer, or a list; None if there is none.
        wrong: what is wrong with `optim`, for an error on all ranks; else empty.
    """

    model: Any
    optim: Any
    names: ModelNames = ModelNames()
    wrong: str = ""


class ModelsByName(nn.Module):
    """A module of some parts. Unlike in an nn.ModuleDict, a part may have the name of a method."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(parts)


def named_models(model: Any, optim: Any) -> NamedModels:
    """Return the arguments of a call, in which `model` may be a dict of models, and `optim` then a dict of optimizers.

    Changes none of them, and raises nothing: the ranks have not met yet.
    """
    if not isinstance(model, Mapping):
        return NamedModels(model, optim)
    try:
        check_models(model)
        joined = _joined(dict(sorted(model.items())))
    except Exception:  # the call raises the same error, on all ranks
        return NamedModels(model, optim)
    names = tuple(sorted(model))
    if not isinstance(optim, Mapping):
        return NamedModels(joined, optim, ModelNames(names, names if optim is not None else ()))
    wrong = _why_wrong(optim, names)
    if wrong:
        return NamedModels(joined, None, ModelNames(names), wrong)
    given = {name: optim[name] for name in names if optim.get(name) is not None}
    optims = OptimizersOfModels(given)
    return NamedModels(joined, optims if optims else None, ModelNames(names, tuple(given)))


def _joined(models: Mapping[str, Model]) -> Model:
    """Return one model of all, or its pipeline stages where a model is a list of stages."""
    stages: list[dict[str, nn.Module]] = [{}]
    for name, model in models.items():
        for number, stage in enumerate([model] if isinstance(model, nn.Module) else model):
            if number == len(stages):
                stages.append({})
            stages[number][name] = stage
    parts = [ModelsByName(stage) for stage in stages]
    return parts[0] if all(isinstance(model, nn.Module) for model in models.values()) else parts


def _why_wrong(optims: Mapping[Any, Any], names: tuple[str, ...]) -> str:
    """Return why these are no optimizers of models of these names; "" if they are."""
    unknown = [name for name in optims if name not in names]
    if unknown:
        listed = ", ".join(names)
        return (
            f"optim has an optimizer for {unknown[0]!r}, and the models are called {listed}: give it its model's name"
        )
    for name, optim in optims.items():
        if optim is not None:
            try:
                check_optimizers(optim)
            except WrapperError as error:
                return f"the optimizer of {name!r}: {error}"
    return ""
