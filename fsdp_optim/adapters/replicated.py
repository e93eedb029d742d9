"""DistributedDataParallel and plain modules, whose parameters are complete on each of their ranks."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_optim.adapters.base import Adapter
from fsdp_optim.adapters.tree import ModuleTree, instances_of
from fsdp_optim.layout import Ranks, Shape, Whole
from fsdp_optim.view import Handle, Original

_DDP_MODULE = "torch.nn.parallel.distributed"


def _ranks(ddp: nn.Module) -> tuple[int, ...]:
    group = ddp.process_group
    return tuple(sorted(dist.get_process_group_ranks(group)))  # type: ignore[arg-type]


class ReplicatedAdapter(Adapter):
    """The adapter of every parameter that no other adapter has claimed.

    A parameter under DistributedDataParallel lives on that wrapper's ranks, which the wrapper keeps equal. Any other parameter
    lives on the ranks that share the rest of the model, and may differ between them.
    """

    name = "DistributedDataParallel"

    def is_present(self) -> bool:
        return True

    def is_wrapper_child(self, module: nn.Module, name: str) -> bool:
        """Return whether a child is the `module` of a DistributedDataParallel or DataParallel, not of another class."""
        return name == "module" and isinstance(module, (_ddp_class(), nn.DataParallel))

    def kind(self, tree: ModuleTree) -> str:
        return "DDP"

    def rank_sets(self, tree: ModuleTree) -> Iterator[Ranks]:
        return map(_ranks, instances_of(tree.modules, _ddp_class()))

    def handles(self, tree: ModuleTree, ranks: tuple[int, ...], claimed: Collection[int]) -> Iterator[Handle]:
        ddp_ranks: dict[int, tuple[int, ...]] = {}
        # By shape, ranks, and whether these keep replicas equal. What depends on a placement is kept by its identity.
        alike: dict[tuple[Shape, tuple[int, ...], bool], tuple[Mapping[str, Any], Whole]] = {}
        for module in instances_of(tree.modules, _ddp_class()):
            ddp_ranks.update(dict.fromkeys(map(id, module.parameters()), _ranks(module)))
        for param, sites in tree.params():
            if id(param) not in claimed:
                kept_equal_on = ddp_ranks.get(id(param))
                shape, where, synchronized = tuple(param.shape), kept_equal_on or ranks, kept_equal_on is not None
                known = alike.get((shape, where, synchronized))
                if known is None:
                    place = Whole(shape, where)
                    known = vars(_handle(param, sites[0], place, synchronized=synchronized)), place
                    alike[shape, where, synchronized] = known
                yield Handle.like(*known, param, sites)


def _handle(param: torch.Tensor, site: tuple[nn.Module, str], place: Whole, *, synchronized: bool) -> Handle:
    return Handle(
        param=param,
        originals=(Original(*site, place),),
        local_shape=place.shape,
        synchronized=synchronized,
        loose=not synchronized,
    )


def _ddp_class() -> type[nn.Module]:
    module = sys.modules.get(_DDP_MODULE)
    return module.DistributedDataParallel if module is not None else _Never


class _Never(nn.Module):
    """A class without instances, for isinstance checks."""
