"""The models of a checkpoint that a load is asked for by their names, and its fused parameters as its Views see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fsdp_optim.checkpoint.common.arguments import LoadArguments
from fsdp_optim.checkpoint.load.matching import renamer
from fsdp_optim.errors import StateError
from fsdp_optim.formats.base.index import CheckpointIndex
from fsdp_optim.formats.base.protocols import Reader
from fsdp_optim.formats.base.some_models import Choice, SomeModels
from fsdp_optim.layout.views import View


def chosen_models(checkpoint: Reader, options: LoadArguments) -> Reader:
    """Return the checkpoint with what it says about the models of the call alone; of a call with one model, the same.

    Raises StateError where the checkpoint has none of a name, unless `strict` is False.
    """
    asked = options.models
    if not asked.names:
        return checkpoint
    renamed = renamer(options.rename or {})
    if options.strict:
        _check_names(checkpoint.index, asked.names, renamed)
    return SomeModels(checkpoint, Choice(asked.names, asked.with_optim, renamed=renamed))


def seen_by(checkpoint: Reader, options: LoadArguments, views: Sequence[View]) -> tuple[Reader, LoadArguments]:
    """Return a checkpoint as the Views of a load see it, and the options for what has its names from them.

    Raises an error for a View that does not fit a stored shape, and for two parameters of one name.
    """
    if not views:
        return checkpoint, options
    from fsdp_optim.checkpoint.views import SeenReader, seen  # here, because few loads need it

    given = renamer(options.rename or {})

    def renamed(name: str) -> str:
        new = given(name)
        return new if isinstance(new, str) else name  # refused later, for all names alike

    through = seen(checkpoint, views, named=renamed, scratch_nbytes=options.bucket_nbytes)
    if not isinstance(through, SeenReader):
        return checkpoint, options
    names = through.names
    if names.is_empty:
        return through, options
    fused = tuple(names.split)
    if options.rename is None:
        return through, replace(options, fused=fused)
    new = names.names - set(names.split)
    return through, replace(options, fused=fused, rename=lambda name: name if name in new else given(name))


def left_out_models(checkpoint: Reader, options: LoadArguments) -> tuple[str, ...]:
    """Return the names of the models that a checkpoint has, and that a call with names did not ask for."""
    asked = options.models.names
    if not asked:
        return ()
    from fsdp_optim.checkpoint.views import reader_inside  # here, because few loads need it

    checkpoint = reader_inside(checkpoint)
    models = checkpoint.reader.index.facts.models if isinstance(checkpoint, SomeModels) else ()
    return tuple(model for model in models if model not in asked)


def _check_names(index: CheckpointIndex, asked: tuple[str, ...], renamed: Callable[[str], str]) -> None:
    names = map(str, map(renamed, (*index.weights, *(f"{model}." for model in index.facts.models))))
    known = tuple(dict.fromkeys(name.partition(".")[0] for name in names if "." in name))
    missing = [name for name in asked if name not in known]
    if not missing or not index.weights:
        return
    if len(missing) == len(asked) and not index.facts.models:
        raise StateError(
            f"{index.where}: has one model, without a name: give it as model=model, not as a dict with {missing[0]!r}"
        )
    raise StateError(
        f"{index.where}: has no model {', '.join(map(repr, missing))}; it has {', '.join(known)}: give models that it has, or "
        "strict=False, which leaves the others as they are"
    )
