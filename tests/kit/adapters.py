"""An adapter of a test's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from fsdp_optim.layout import Whole
from fsdp_optim.plugins import Adapter, Handle, Original


class Claiming(Adapter):
    """An adapter that claims all parameters of modules of one class, each complete on all ranks, with Handles of one class."""

    name = "Claiming"

    def __init__(self, modules: type[nn.Module] = nn.Module, handle: type[Handle] = Handle) -> None:
        self._modules, self._handle = modules, handle

    def is_present(self) -> bool:
        return True

    def rank_sets(self, tree: Any) -> Iterable[Any]:
        return ()

    def handles(self, tree: Any, ranks: Any, claimed: Any) -> Iterable[Handle]:
        for param, ((module, attribute), *_) in tree.params():
            if isinstance(module, self._modules):
                shape = tuple(param.shape)
                yield self._handle(param, (Original(module, attribute, Whole(shape, ranks)),), shape, loose=True)
