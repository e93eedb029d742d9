"""The known formats: looked up by name, by the files of a checkpoint, and for listings.

A checkpoint of this library's own format is recognised first, and nothing else is imported for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Protocol

from fsdp_optim.arguments import is_model_name
from fsdp_optim.errors import CheckpointError, ReplacedError, wrong_use
from fsdp_optim.formats.base.beside import BesideOthers
from fsdp_optim.formats.base.protocols import Format, OpenedAs, Reader, SeenAs, WrittenFormat, replaced_error, written
from fsdp_optim.formats.base.summary import ManifestSummary
from fsdp_optim.formats.own.format import OURS
from fsdp_optim.formats.own.one_of_several import OneOfSeveral
from fsdp_optim.registry import (
    BUILT_IN_FORMATS,
    READ_ONLY_FORMATS,
    BuiltInFormat,
    format_factory,
    format_names,
    is_format,
    named,
    other_formats,
)
from fsdp_optim.storage.base import CheckpointProbe, CheckpointStatus, Opened, Store, is_sure_that_not


def format_of_option(format: object, *, of_save: bool = False) -> WrittenFormat:
    """Return the format that a caller gives as a name, or as a `Format` with its own options. `of_save`: it is for `save`.

    Raises CheckpointError for an unknown name, for a format that is only read, and for one that `save` does not write.
    """
    known = format
    if isinstance(format, str):
        factory = format_factory(format)
        known = factory() if factory is not None else None
    if not is_format(known):
        names = ", ".join(map(repr, format_names(of_save=of_save)))
        raise wrong_use(f"format must be one of {names}, or a Format of fsdp_optim.plugins, not {format!r}")
    given: Format = known  # type: ignore[assignment]  # is_format has looked at its members
    if of_save and not given.saves:
        names = ", ".join(map(repr, format_names(of_save=True)))
        raise CheckpointError(
            f"save does not write the format {given.name!r}: format must be one of {names}; convert writes {given.name!r} from a "
            "saved checkpoint"
        )
    return written(given)


class HasSequence(Protocol):
    """A format, as far as the numbers of checkpoints need it."""

    def sequence_in(self, opened: Opened) -> int: ...


class ListedFormat(HasSequence, Protocol):
    """A format whose checkpoints are listed, as far as listings need it."""

    @property
    def name(self) -> str: ...
    @property
    def probe(self) -> CheckpointProbe[ManifestSummary]: ...


def listed_formats() -> list[ListedFormat]:
    """Return the formats whose checkpoints in one folder are listed, and numbered, together: one for each manifest.

    The formats of this package are imported when a manifest of theirs is there. Raises CheckpointError for an installed format
    that cannot be loaded, because its checkpoints would be skipped.
    """
    built_in = [_NotYetLoaded(known) for known in BUILT_IN_FORMATS if known.traces]
    others = [format for format in other_formats() if format.probe is not None]
    return [OURS, *built_in, *others]


@dataclass(frozen=True)
class _NotYetLoaded(ListedFormat):
    """A format of this package by what the registry says about it."""

    known: BuiltInFormat

    @property
    def name(self) -> str:
        return self.known.name

    @cached_property
    def probe(self) -> CheckpointProbe[ManifestSummary]:
        return _ProbeNotYetLoaded(self.known)

    def sequence_in(self, opened: Opened) -> int:
        number: int = named(self.known.where).sequence_in(opened) if opened.has(self.known.manifest) else 0
        return number


class _ProbeNotYetLoaded(BesideOthers):
    """The probe of a format of this package, which is imported only when the bytes of a checkpoint are needed."""

    def __init__(self, known: BuiltInFormat) -> None:
        self._known, self.manifest = known, known.manifest
        self._traces = re.compile(known.traces)

    @property
    def _loaded(self) -> CheckpointProbe[ManifestSummary]:
        probe: CheckpointProbe[ManifestSummary] = named(self._known.where).probe
        return probe

    def status_in(self, opened: Opened, *, whole: bool) -> CheckpointStatus[ManifestSummary]:
        return self._loaded.status_in(opened, whole=whole)

    def token_in(self, opened: Opened) -> str | None:
        return self._loaded.token_in(opened)

    def is_trace(self, name: str) -> bool:
        return self._traces.fullmatch(name) is not None

    def is_own(self, opened: Opened | None) -> Callable[[str], bool]:
        return self._loaded.is_own(opened)


def format_of(opened: Opened) -> Format | None:
    """Return the format that recognises files that any program may have written; None if no format does.

    The formats of this package are asked first. Each is imported when it is asked.
    """
    installed = (format for format in other_formats() if format.opens_any)
    return next(
        (format for format in chain(map(named, READ_ONLY_FORMATS), installed) if format.recognises(opened)), None
    )


def open_checkpoint(store: Store, *, verify: bool, format: OpenedAs = None) -> Reader:
    """Open the checkpoint in a store. `format` None: it is recognised.

    Raises CheckpointError that names the damaged file; ReplacedError if another save replaces the checkpoint meanwhile, for
    `retry_if_replaced`.
    """
    opened, recognised = _opened(store, format)
    try:
        return recognised.open(opened, verify=verify)
    except BaseException as error:
        try:
            # Files of two saves do not fit together, which looks like damage: ask the store before that is reported.
            was_replaced = isinstance(error, CheckpointError) and _is_replaced(opened)
        finally:
            opened.close()
        if was_replaced and not isinstance(error, ReplacedError):
            raise replaced_error(opened.where) from error
        raise


def _is_replaced(opened: Opened) -> bool:
    """Return whether another checkpoint has taken the place. False where the store cannot tell: the first error is raised."""
    try:
        return opened.was_replaced()
    except OSError:
        return False


def _opened(store: Store, format: OpenedAs) -> tuple[Opened, Format]:
    """Open the files of a store, and find their format. If no format recognises them, the own format names missing files."""
    if isinstance(format, SeenAs):
        opened, recognised = _opened(store, None)
        return opened, format.view(recognised)
    if format is not None:
        return (store.open_any() if format.opens_any else store.open()), format
    try:
        opened = store.open()
    except CheckpointError as error:  # there may be a file, or objects of another format
        other = _of_another_format(store) if is_sure_that_not(error) else None
        if other is None:
            raise
        return other
    try:
        other = _of_another_format(store) if not OURS.recognises(opened) else None
    except BaseException:
        opened.close()
        raise
    if other is None:
        return opened, OURS
    try:
        opened.close()
    except BaseException:
        other[0].close()
        raise
    return other


def _one_of_several(store: Store) -> tuple[Opened, Format] | None:
    """Open the checkpoint in which a place is the folder of one of several models; None if it is not that."""
    above = store.above()
    if above is None or not is_model_name(above[1]):
        return None
    place, model = above
    return _recognised(place.open, partial(_if_recognised, OneOfSeveral(model)))


def _of_another_format(store: Store) -> tuple[Opened, Format] | None:
    """Open the files of a checkpoint in a format that is not this library's own, and find it; None if none recognises them."""
    for format in other_formats():
        if not format.opens_any and format.probe is not None:
            recognised = _recognised(store.with_probe(format.probe).open, partial(_if_recognised, format))
            if recognised is not None:
                return recognised
    return _one_of_several(store) or _recognised(store.open_any, format_of)


def _if_recognised(format: Format, opened: Opened) -> Format | None:
    return format if format.recognises(opened) else None


def _recognised(
    open: Callable[[], Opened], format_of: Callable[[Opened], Format | None]
) -> tuple[Opened, Format] | None:
    """Call `open`, and find the format of the files; None if there are no files, or if no format recognises them."""
    try:
        opened = open()
    except CheckpointError as error:
        if is_sure_that_not(error):
            return None
        raise
    try:
        known = format_of(opened)
    except BaseException:
        opened.close()
        raise
    if known is None:
        opened.close()
        return None
    return opened, known
