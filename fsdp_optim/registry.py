"""The registry: adapters, stores and formats, by name, by URL scheme, by entry point, and as a program adds them for a while.

Plug-ins that the core does not need, formats of other libraries and stores of objects, are listed here by their dotted names
alone, `module:attribute`, and imported when a checkpoint, a name or a URL needs them. So this file imports nothing of this
package but its errors. Other packages register by entry points, one group for each kind; a program, by `use_adapters`,
`use_stores` and `use_formats`. `fsdp_optim.plugins` is the public API of it.
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


def named(where: str) -> Any:
    """Return the object that `module:attribute` names. Imports the module if necessary."""
    module, _, attribute = where.partition(":")
    return getattr(import_module(module), attribute)


def imported_when_asked(module: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module whose public names are imported on first access. `where`: as `named` takes it."""

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return named(where[name])

    return get


@functools.cache
def installed_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of all installed packages, looked up once per process because that takes milliseconds."""
    return tuple(sorted(entry_points(group=group), key=lambda point: (point.name, point.value)))


@dataclass(frozen=True)
class PluginKind:
    """One kind of plug-ins.

    Attributes:
        group: the group of entry points by which installed packages add plug-ins.
        error: the exception for an object that cannot be loaded, or is no plug-in.
    """

    group: str
    error: type[FsdpOptimError]
    _added: ContextVar[tuple[tuple[str, Any], ...]]

    def points(self) -> tuple[EntryPoint, ...]:
        """Return the entry points of installed packages, in the order of their names."""
        return installed_points(self.group)

    def load(self, point: EntryPoint, what: str = "") -> Any:
        """Return the object that an entry point names.

        Raises `error` that names the package. `what`: the beginning of the error.
        """
        try:
            return point.load()
        except Exception as error:
            raise self.error(
                f"{what}{self.describe(point)} cannot be loaded: {type(error).__name__}: {error}; repair or uninstall that "
                "package"
            ) from error

    @functools.cache  # noqa: B019  # the kinds are three constants
    def make(self, point: EntryPoint, is_plugin: Callable[[Any], bool]) -> Any:
        """Return the plug-in of an entry point, made once per process.

        The entry point names the plug-in, or a class or a function that returns it.
        """
        loaded = self.load(point)
        if isinstance(loaded, type) or not is_plugin(loaded):
            try:
                loaded = loaded()
            except Exception as error:
                raise self.error(
                    f"{self.describe(point)} cannot be made: {type(error).__name__}: {error}; repair or uninstall that package"
                ) from error
        if not is_plugin(loaded):
            raise self.error(
                f"{self.describe(point)} is a {type(loaded).__name__}, which is not a plug-in of this group"
            )
        return loaded

    def describe(self, point: EntryPoint) -> str:
        """Describe an entry point to users."""
        of = f" of the package {point.dist.name} {point.dist.version}" if point.dist is not None else ""
        return f"the entry point {point.name!r} = {point.value!r} in the group {self.group!r}{of}"

    def added(self) -> tuple[tuple[str, Any], ...]:
        """Return the plug-ins that the program has added, each with its name, the last added before all others."""
        return self._added.get()

    @contextlib.contextmanager
    def use(self, plugins: Iterable[tuple[str, Any]]) -> Iterator[None]:
        """Put these plug-ins before all others inside the block. Threads that are started inside do not inherit them."""
        token = self._added.set((*plugins, *self._added.get()))
        try:
            yield
        finally:
            self._added.reset(token)


CONVERT_ARGUMENTS = "fsdp_optim.offline.conversion.arguments:ConvertArguments"
CONVERT = "fsdp_optim.offline.conversion.convert:convert"
VERIFY = "fsdp_optim.offline.keeping.verifying:verify"
AVERAGE_ARGUMENTS = "fsdp_optim.offline.combining.averaging:AverageArguments"
AVERAGE = "fsdp_optim.offline.combining.averaging:average"
MERGE_ADAPTER = "fsdp_optim.offline.combining.merging:merge_adapter"
INSPECT = "fsdp_optim.offline.looking.inspecting:inspect"
PRUNE = "fsdp_optim.offline.keeping.pruning:prune"
COPY = "fsdp_optim.offline.keeping.copying:copy"
DIAGNOSE = "fsdp_optim.offline.looking.diagnosing:diagnose"
PLACEMENT = "fsdp_optim.offline.looking.placing:placement"
INSPECT_PAGE = "fsdp_optim.offline.pages.inspect_page:write_page"
DIFF_ARGUMENTS = "fsdp_optim.offline.values.diffing:DiffArguments"
DIFF = "fsdp_optim.offline.values.diffing:diff"
SHOW = "fsdp_optim.offline.values.showing:show"
EXTRACT = "fsdp_optim.offline.values.extracting:extract"

# ------------------------------------------------------------------------------------------- adapters

ADAPTERS = PluginKind("fsdp_optim.adapters", WrapperError, ContextVar("adapters", default=()))
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

STORES = PluginKind("fsdp_optim.stores", CheckpointError, ContextVar("stores", default=()))
"""The name of an entry point is a scheme. Its object is called with (url, probe, storage options) and returns a `Store`."""

BUILT_IN_STORES = {"s3": "fsdp_optim.buckets.schemes:open_s3", "": "fsdp_optim.buckets.schemes:open_fsspec"}
"""By scheme, the function that opens a store; "": for every other scheme."""

CACHED_STORE = "fsdp_optim.buckets.cached:cached_in"
"""The function that gives a store a cache in a folder of this machine."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def scheme_of(place: object) -> str | None:
    """Return the scheme of a URL; None for a name that is no URL."""
    matched = _URL.match(place) if isinstance(place, str) else None
    return matched[1].lower() if matched is not None else None


@contextlib.contextmanager
def use_stores(stores: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Open URLs of these schemes by these functions inside the block, before all others.

    All ranks must use the same functions. Threads that are started inside the block do not inherit them.
    """
    with STORES.use(stores.items()):
        yield


def opener_of(scheme: str) -> Callable[..., Any]:
    """Return the function that opens URLs of a scheme. Raises CheckpointError for an installed one that cannot be loaded."""
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

FORMATS = PluginKind("fsdp_optim.formats", CheckpointError, ContextVar("formats", default=()))
"""The name of an entry point is the name that users give. Its object is a `Format`, or makes one when it is called."""


@dataclass(frozen=True)
class BuiltInFormat:
    """A format of this package that is written by name.

    Attributes:
        name: the name that users give.
        where: the `Format`, or the class that makes it.
        saves: whether `save` writes it. False: only `convert` writes it.
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
    BuiltInFormat(
        "deepspeed_universal",
        "fsdp_optim.foreign.deepspeed.writer:DEEPSPEED_UNIVERSAL",
        False,
        "deepspeed_universal.json",
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
    """Register formats inside the block: they are known by name, and recognised, before the formats of installed packages.

    All ranks must use the same formats. Threads that are started inside the block do not inherit them.

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
    """Return a factory for the format of a name; None for an unknown name.

    The format is one that the program has added, one of this package, or an installed one. The factory raises CheckpointError
    for a format that cannot be loaded or that needs options.
    """
    for added, format in FORMATS.added():
        if added == name:
            return lambda: format
    for known in BUILT_IN_FORMATS:
        if known.name == name:
            return functools.partial(_made, known)
    for point in FORMATS.points():
        if point.name == name:
            return functools.partial(FORMATS.make, point, is_format)
    return None


def _made(known: BuiltInFormat) -> Any:
    factory = named(known.where)
    if not isinstance(factory, type):
        return factory
    try:
        return factory()
    except TypeError as error:
        raise CheckpointError(
            f"the format {known.name!r} has options of its own that must be given: format={factory.__name__}(...), from "
            f"fsdp_optim.plugins: {error}"
        ) from error


def format_names(*, of_save: bool = False) -> list[str]:
    """Return the names of the formats that are written, without importing them. `of_save`: only formats that `save` writes."""
    built_in = [known.name for known in BUILT_IN_FORMATS if known.saves or not of_save]
    others = [*(name for name, _ in FORMATS.added()), *(point.name for point in FORMATS.points())]
    return list(dict.fromkeys([*built_in, *others]))


def other_formats() -> list[Any]:
    """Return the formats that the program has added, and the formats of installed packages, which this call loads."""
    by_name = dict[str, Any]()
    for name, format in FORMATS.added():
        by_name.setdefault(name, format)
    for point in FORMATS.points():
        if point.name not in by_name:
            by_name[point.name] = FORMATS.make(point, is_format)
    return list(by_name.values())


def is_format(value: Any) -> bool:
    """Return whether a value has the members of a `Format`."""
    return not isinstance(value, type) and all(
        hasattr(value, name) for name in ("name", "probe", "recognises", "open", "writer")
    )


def manifests_but(own: str) -> tuple[str, ...]:
    """Return the names of the manifests of all other formats, whose checkpoints may be beside or in the place of an own one."""
    probes = [format.probe for format in other_formats()]
    names = [known.manifest for known in BUILT_IN_FORMATS] + [probe.manifest for probe in probes if probe is not None]
    return tuple(name for name in dict.fromkeys(names) if name and name != own)
