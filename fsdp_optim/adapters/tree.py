"""The module tree of a wrapped model, with the names and the order of the unwrapped model."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from msgspec import Struct
from torch import nn

from fsdp_optim.errors import WrapperError

IsWrapperChild = Callable[[nn.Module, str], bool]
"""(module, name of a child) -> whether the child is the wrapped module, so that the name is not part of an FQN."""

StandIns = Callable[[Collection[nn.Module]], Mapping[tuple[nn.Module, str], torch.Tensor]]
"""modules -> (module, attribute) -> live parameter, where another tensor is registered temporarily."""

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

_TRANSPARENT = {
    "_orig_mod": ("torch._dynamo.eval_frame", "OptimizedModule"),
    "_checkpoint_wrapped_module": (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
    ),
}
"""Where torch.compile and activation checkpointing put the model, one level deeper: name -> module and name of the class."""

TRANSPARENT_CHILDREN = frozenset(_TRANSPARENT)


def is_transparent(module: nn.Module, name: str) -> bool:
    """Return whether a child is the module inside torch.compile's or activation checkpointing's wrapper, not the user's own."""
    return name in _TRANSPARENT and is_loaded_class(module, *_TRANSPARENT[name])


def is_loaded_class(module: nn.Module, place: str, name: str) -> bool:
    """Return whether a module is an instance of a class, without importing the module `place` that has the class."""
    cls = getattr(sys.modules.get(place), name, None)
    return cls is not None and isinstance(module, cls)


def instances_of(modules: Collection[nn.Module], cls: type[M]) -> list[M]:
    """Return the modules of a class, in their order. Each class is asked once: a model has many modules of few classes."""
    classes = {kind for kind in {module.__class__ for module in modules} if issubclass(kind, cls)}
    return [module for module in modules if module.__class__ in classes] if classes else []


class _Site(Struct, frozen=True):
    index: int
    path: str


class ModuleTree:
    """The modules in the order of `model.modules()`, with their paths in the unwrapped model."""

    def __init__(
        self,
        *roots: nn.Module,
        is_wrapper_child: IsWrapperChild,
        stand_ins: StandIns = lambda modules: {},
    ) -> None:
        """`roots`: the model, or the pipeline stages of this rank, which have the FQNs of the complete model."""
        self.root = roots[0]
        self._is_wrapper_child = is_wrapper_child
        # Whether the name of a child is in no FQN, by the class of its parent and the name.
        self._inside: dict[tuple[type[nn.Module], str], bool] = {}
        self._sites: dict[nn.Module, _Site] = {}
        self._other_paths: list[tuple[str, nn.Module]] = []
        self._known: dict[tuple[int, ...], tuple[tuple[object, ...], Any]] = {}
        self._listed: dict[Callable[[ModuleTree], Any], Any] = {}
        self._first_of_root = []
        for root in roots:
            self._first_of_root.append(len(self._sites))
            self._visit(root, "")
        self.stand_ins = stand_ins(self._sites)
        self._sites_of_params: dict[torch.Tensor, list[tuple[nn.Module, str]]] = {}
        for module in self._sites:
            for attribute, registered in module._parameters.items():
                param = self.stand_ins.get((module, attribute), registered)
                if param is not None:
                    self._sites_of_params.setdefault(param, []).append((module, attribute))

    def _visit(self, module: nn.Module, path: str) -> None:
        if module in self._sites:  # the parameters of a module in two places are tied
            self._other_paths.append((path, module))
        else:
            self._sites[module] = _Site(len(self._sites), path)
        for name, child in module._modules.items():
            if child is None:
                continue
            kind = module.__class__, name  # the class that isinstance() sees, also of a proxy
            is_inside = self._inside.get(kind)
            if is_inside is None:
                is_inside = self._inside[kind] = is_transparent(module, name) or self._is_wrapper_child(module, name)
            self._visit(child, path if is_inside else join(path, name))

    def root_of(self, module: nn.Module) -> int:
        """Return the number of the root, in the order in which the roots were given, that has a module."""
        if len(self._first_of_root) == 1:
            return 0
        return bisect.bisect_right(self._first_of_root, self._sites[module].index) - 1

    def once(self, read: Callable[..., T], *things: object) -> T:
        """Return `read(*things)`, computed once in the life of this tree, which is one call.

        Units and parameters share meshes and process groups, which take long to read. The things are compared by identity.
        """
        key = (id(read), *map(id, things))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = ((read, *things), read(*things))  # references that keep the ids unique
        result: T = known[1]
        return result

    def listed(self, read: Callable[[ModuleTree], T]) -> T:
        """Return `read(tree)`, computed once in the life of this tree."""
        if read not in self._listed:
            self._listed[read] = read(self)
        result: T = self._listed[read]
        return result

    @property
    def modules(self) -> Collection[nn.Module]:
        return self._sites.keys()

    def path(self, module: nn.Module) -> str:
        return self._sites[module].path

    def fqn(self, module: nn.Module, attribute: str) -> str:
        return self.named(module, attribute)[0]

    def named(self, module: nn.Module, attribute: str) -> tuple[str, int]:
        """Return the FQN of a parameter, and the index of its module."""
        site = self._sites.get(module)
        if site is None:
            raise WrapperError(
                f"parameter {attribute!r} of a {type(module).__name__} is in a flat parameter, but its module is not "
                "in the model any more: was a submodule replaced after wrapping?"
            )
        return join(site.path, attribute), site.index

    @property
    def has_other_paths(self) -> bool:
        """Whether a module is in several places."""
        return bool(self._other_paths)

    def other_fqns(self, module: nn.Module, attribute: str) -> Iterable[str]:
        """Return the names of a parameter by other paths to the same module."""
        if not self._other_paths:
            return ()
        return (join(path, attribute) for path, other in self._other_paths if other is module)

    def other_paths(self, module: nn.Module) -> Iterator[str]:
        """Return the other paths to a module."""
        return (path for path, other in self._other_paths if other is module)

    def every_path(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield each path and its module: all modules, and then the other paths to them. A wrapper comes before its module."""
        yield from ((site.path, module) for module, site in self._sites.items())
        yield from self._other_paths

    def index(self, module: nn.Module) -> int:
        return self._sites[module].index

    def params(self) -> Iterator[tuple[torch.Tensor, list[tuple[nn.Module, str]]]]:
        """Return every registered parameter once, with every (module, attribute) that refers to it, first place first."""
        return iter(self._sites_of_params.items())

    def buffers(self) -> Iterable[tuple[str, torch.Tensor, list[str]]]:
        """Return (first FQN, buffer, other FQNs) of each persistent buffer."""
        named: dict[int, tuple[str, torch.Tensor, list[str]]] = {}
        for module, site in self._sites.items():
            for name, value in module._buffers.items():
                if value is not None and name not in module._non_persistent_buffers_set:
                    fqn = join(site.path, name)
                    first, _, others = named.setdefault(id(value), (fqn, value, []))
                    others += [fqn] if fqn != first else []
                    others += self.other_fqns(module, name)
        return named.values()

    def unsaved_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers with persistent=False, which are in no state_dict(), by their first FQN."""
        named: dict[int, tuple[str, torch.Tensor]] = {}
        for module, site in self._sites.items():
            for name, value in module._buffers.items():
                if value is not None and name in module._non_persistent_buffers_set:
                    named.setdefault(id(value), (join(site.path, name), value))
        return dict(named.values())

    def sites_of(self, param: torch.Tensor) -> list[tuple[nn.Module, str]]:
        return self._sites_of_params.get(param, [])


def join(path: str, name: str) -> str:
    """Return the FQN of `name` inside the module at `path`."""
    return f"{path}.{name}" if path else name


def summoned(fqn: str, wrapper: str) -> WrapperError:
    """Return the error of a call inside `summon_full_params()`."""
    return WrapperError(
        f"{fqn}: {wrapper} has replaced this parameter by a full copy, because the call is made inside "
        "summon_full_params(): leave that context first; no function of this library needs it"
    )
