"""The registry: adapters, stores and formats, by name, by URL scheme, by entry point, and by what a program adds for a while.

What the core does not need is listed here by its dotted name alone, `module:attribute`, and imported when a checkpoint, a name
or a URL needs it: formats of other libraries and stores of objects. So this file imports nothing of this package but its
errors. Other packages register by entry points, one group for each kind; a program, by `use_adapters`, `use_stores` and
`use_formats`. `fsdp_optim.plugins` is the door to all of it.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fsdp_optim.errors import CheckpointError, FsdpOptimError, WrapperError


@functools.cache
def named(where: str) -> Any:
    """The object that `module:attribute` names. Imports the module at the first call."""
    module, _, attribute = where.partition(":")
    return getattr(import_module(module), attribute)


@functools.cache
def installed_points(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of all installed packages, looked up once per process because that takes milliseconds."""
    return tuple(sorted(entry_points(group=group), key=lambda point: (point.name, point.value)))


@dataclass(frozen=True)
class Kind:
    """One kind of plug-ins.

    Attributes:
        group: the group of entry points by which installed packages add theirs.
        error: what is raised where a plug-in cannot be loaded, or is none.
    """

    group: str
    error: type[FsdpOptimError]
    _added: ContextVar[tuple[tuple[str, Any], ...]]

    def points(self) -> tuple[EntryPoint, ...]:
        """The entry points of installed packages, in the order of their names."""
        return installed_points(self.group)

    def load(self, point: EntryPoint, what: str = "") -> Any:
        """The object that an entry point names. Raises `error` that names the package. `what`: the beginning of the error."""
        try:
            return point.load()
        except Exception as error:
            raise self.error(
                f"{what}{self.told(point)} cannot be loaded: {type(error).__name__}: {error}; repair or uninstall that package"
            ) from error

    @functools.cache  # noqa: B019  # the kinds are three constants
    def made(self, point: EntryPoint, is_one: Callable[[Any], bool]) -> Any:
        """The plug-in of an entry point, which names it, or a class or a function that returns it; made once per process."""
        found = self.load(point)
        if isinstance(found, type) or not is_one(found):
            try:
                found = found()
            except Exception as error:
                raise self.error(
                    f"{self.told(point)} cannot be made: {type(error).__name__}: {error}; repair or uninstall that package"
                ) from error
        if not is_one(found):
            raise self.error(f"{self.told(point)} is a {type(found).__name__}, which is no plug-in of this group")
        return found

    def told(self, point: EntryPoint) -> str:
        """An entry point in words for users."""
        of = f" of the package {point.dist.name} {point.dist.version}" if point.dist is not None else ""
        return f"the entry point {point.name!r} = {point.value!r} in the group {self.group!r}{of}"

    def added(self) -> tuple[tuple[str, Any], ...]:
        """The plug-ins that the program has added, each with its name, the last added before all others."""
        return self._added.get()

    @contextlib.contextmanager
    def use(self, plugins: Iterable[tuple[str, Any]]) -> Iterator[None]:
        """A context in which these plug-ins come before all others. Threads that are started inside do not inherit them."""
        token = self._added.set((*plugins, *self._added.get()))
        try:
            yield
        finally:
            self._added.reset(token)


CONVERT = "fsdp_optim.offline.convert:convert"
VERIFY = "fsdp_optim.offline.verifying:verify"
INSPECT = "fsdp_optim.offline.inspecting:inspect"

# ------------------------------------------------------------------------------------------- adapters

ADAPTERS = Kind("fsdp_optim.adapters", WrapperError, ContextVar("adapters", default=()))
"""The name of an entry point is the module whose wrapper the adapter reads: it is loaded when that module is."""

BUILT_IN_ADAPTERS = (
    "fsdp_optim.adapters.fairscale:FairscaleAdapter",
    "fsdp_optim.adapters.fsdp1:FSDP1Adapter",
    "fsdp_optim.adapters.checkpointable:CheckpointableAdapter",
    "fsdp_optim.adapters.dtensor:DTensorAdapter",
    "fsdp_optim.adapters.replicated:ReplicatedAdapter",
)
"""In the order of their calls; the last adapter claims all remaining parameters."""

# ------------------------------------------------------------------------------------------- stores

STORES = Kind("fsdp_optim.stores", CheckpointError, ContextVar("stores", default=()))
"""The name of an entry point is a scheme. Its object is called with (url, probe, storage options) and returns a `Store`."""

BUILT_IN_STORES = {"s3": "fsdp_optim.buckets.schemes:open_s3", "": "fsdp_optim.buckets.schemes:open_fsspec"}
"""By scheme, the function that opens a store; "": of every other scheme."""

CACHED_STORE = "fsdp_optim.buckets.cached:cached_in"
"""The function that gives a store a cache in a folder of this machine."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def scheme_of(place: object) -> str | None:
    """The scheme of a URL; None for a name that is no URL."""
    matched = _URL.match(place) if isinstance(place, str) else None
    return matched[1].lower() if matched is not None else None


@contextlib.contextmanager
def use_stores(stores: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """A context in which URLs of these schemes are opened by these functions, before all others.

    All ranks must use the same ones. Threads that are started inside the context do not inherit them.
    """
    with STORES.use(stores.items()):
        yield


def opener_of(scheme: str) -> Callable[..., Any]:
    """The function that opens URLs of a scheme. Raises CheckpointError for an installed one that cannot be loaded."""
    for name, opener in STORES.added():
        if name.lower() == scheme:
            added: Callable[..., Any] = opener
            return added
    for point in STORES.points():
        if point.name.lower() == scheme:
            installed: Callable[..., Any] = STORES.load(point, f"{scheme}://: ")
            return installed
    built_in: Callable[..., Any] = named(BUILT_IN_STORES.get(scheme, BUILT_IN_STORES[""]))
    return built_in


# ------------------------------------------------------------------------------------------- formats

FORMATS = Kind("fsdp_optim.formats", CheckpointError, ContextVar("formats", default=()))
"""The name of an entry point is the name that users give. Its object is a `Format`, or makes one when it is called."""


@dataclass(frozen=True)
class BuiltInFormat:
    """A format of this package that is written by name.

    Attributes:
        name: the name that users give.
        where: the `Format`, or the class that makes it.
        saves: whether `save` writes it. False: only `convert` does.
        manifest: the name of its manifest.
        traces: a pattern of the names of files that only a save of this format writes; for a format whose checkpoints are listed.
    """

    name: str
    where: str
    saves: bool
    manifest: str
    traces: str = ""


OWN = BuiltInFormat("safetensors", "fsdp_optim.formats.own.format:OURS", True, "fsdp_optim.json")

DCP = BuiltInFormat(
    "dcp",
    "fsdp_optim.foreign.dcp.format:DCP_FOLDER",
    True,
    ".metadata",
    r"(model|optim)(-\d{5}-of-\d{5})?\.distcp|(values|extra|modules|rank-\d{5})\.distcp",
)

_TORCH_FILES = "torch_files.json"

BUILT_IN_FORMATS = (
    OWN,
    DCP,
    BuiltInFormat("torchtitan", "fsdp_optim.foreign.dcp.format:TORCHTITAN_FOLDER", True, DCP.manifest),
    BuiltInFormat("torch", "fsdp_optim.foreign.torch.writer:TORCH_FILES", False, _TORCH_FILES),
    BuiltInFormat("torch_file", "fsdp_optim.foreign.torch.writer:ONE_TORCH_FILE", False, _TORCH_FILES),
    BuiltInFormat("fairscale", "fsdp_optim.foreign.torch.writer:FAIRSCALE_FILES", False, _TORCH_FILES),
    BuiltInFormat(
        "fairscale_shards", "fsdp_optim.foreign.per_rank.fairscale_writer:FairscaleShards", False, _TORCH_FILES
    ),
)

READ_ONLY_FORMATS = (
    "fsdp_optim.foreign.dcp.reader:DCP",
    "fsdp_optim.foreign.deepspeed.reader:DEEPSPEED",
    "fsdp_optim.foreign.per_rank.fairscale_shards:FAIRSCALE_SHARDS",
    "fsdp_optim.foreign.per_rank.olmo_local:OLMO_LOCAL",
    "fsdp_optim.foreign.per_rank.rank_tensors:RANK_TENSORS",
    "fsdp_optim.foreign.torch.reader:TORCH_FILE",
    "fsdp_optim.foreign.hugging_face.reader:HUGGING_FACE",
)
"""The formats of other libraries, in the order in which they are asked whether they recognise the files of a place.

TORCH_FILE recognises any file of torch.save, so formats of which such files are a part come before it.
"""


@contextlib.contextmanager
def use_formats(formats: Iterable[Any]) -> Iterator[None]:
    """A context in which these formats are known by their names, and recognised, before those of installed packages.

    All ranks must use the same formats. Threads that are started inside the context do not inherit them.

    Raises CheckpointError for an object that is not a Format.
    """
    known = list(formats)
    for format in known:
        if not is_format(format):
            raise CheckpointError(
                f"use_formats() was given a {type(format).__name__}, which is not a fsdp_optim.plugins.Format"
            )
    with FORMATS.use([(format.name, format) for format in known]):
        yield


def format_factory(name: str) -> Callable[[], Any] | None:
    """What returns the format of a name: one that the program has added, of this package, or installed; None for no such name.

    Raises CheckpointError, when it is called, for a format that cannot be loaded or that needs options.
    """
    for added, format in FORMATS.added():
        if added == name:
            return lambda: format
    for known in BUILT_IN_FORMATS:
        if known.name == name:
            return functools.partial(_made, known)
    for point in FORMATS.points():
        if point.name == name:
            return functools.partial(FORMATS.made, point, is_format)
    return None


def _made(known: BuiltInFormat) -> Any:
    found = named(known.where)
    if not isinstance(found, type):
        return found
    try:
        return found()
    except TypeError as error:
        raise CheckpointError(
            f"the format {known.name!r} has options of its own that must be given: format={found.__name__}(...), from "
            f"fsdp_optim.plugins: {error}"
        ) from error


def format_names(*, of_save: bool = False) -> list[str]:
    """The names of the formats that are written, without importing them. `of_save`: those that `save` writes."""
    built_in = [known.name for known in BUILT_IN_FORMATS if known.saves or not of_save]
    others = [*(name for name, _ in FORMATS.added()), *(point.name for point in FORMATS.points())]
    return list(dict.fromkeys([*built_in, *others]))


def other_formats() -> list[Any]:
    """The formats that the program has added, and those of installed packages, which this call loads."""
    named_ones = dict[str, Any]()
    for name, format in FORMATS.added():
        named_ones.setdefault(name, format)
    for point in FORMATS.points():
        if point.name not in named_ones:
            named_ones[point.name] = FORMATS.made(point, is_format)
    return list(named_ones.values())


def is_format(value: Any) -> bool:
    """Whether a value has the members of a `Format`."""
    return not isinstance(value, type) and all(
        hasattr(value, name) for name in ("name", "probe", "recognises", "open", "writer")
    )


def manifests_but(own: str) -> tuple[str, ...]:
    """The names of the manifests of all formats but one, whose checkpoints may be beside those of that one, or in their place."""
    probes = [format.probe for format in other_formats()]
    names = [known.manifest for known in BUILT_IN_FORMATS] + [probe.manifest for probe in probes if probe is not None]
    return tuple(name for name in dict.fromkeys(names) if name and name != own)
