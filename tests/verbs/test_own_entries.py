"""Tensors that modules put into state_dict() by themselves go through a full model dict and back into the modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import check_refused, check_same, error_text
from kit.wrapping import cpu
from kit.wraps import in_ddp, in_fairscale, in_fsdp1, in_fsdp2
from torch import nn

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

WRAPS = (in_ddp, in_fairscale, in_fsdp1, in_fsdp2)


class Blocks(nn.Module):
    """`needs_version`: it loads no entries of another version of its code."""

    _version = 3

    def __init__(self, *, needs_version: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.needs_version = needs_version
        self.blocks = torch.zeros(5, dtype=torch.uint8)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "blocks"] = self.blocks

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *lists: Any
    ) -> None:
        if self.needs_version and local_metadata.get("version") != self._version:
            raise ValueError(f"version {local_metadata.get('version')}")
        self.blocks = state_dict.pop(prefix + "blocks", self.blocks)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)


class Deep(nn.Module):
    units = ("",)
    tensor_parallel: dict[str, Any] = {}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 3), Blocks(**kwargs))
        self.tied = self.inner[1]


def filled(number: int, **kwargs: Any) -> Deep:
    model = Deep(**kwargs)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(number)
    model.inner[1].blocks = torch.arange(5, dtype=torch.uint8) + number
    return model


def there_and_back() -> None:
    for wrap in WRAPS:
        saved, target = filled(1), filled(2)
        wrapped, loaded = wrap(saved), wrap(target)
        full = fsdp_optim.gather_full_model_state_dict(wrapped, recipient_rank=1)
        result = fsdp_optim.scatter_full_model_state_dict(loaded, full, source_rank=1)
        check_same(f"{wrap.__name__}: nothing is left", (result.missing_keys, result.unexpected_keys), ((), ()))
        again = fsdp_optim.gather_full_model_state_dict(loaded, recipient_rank=None)
        check_same(wrap.__name__, dict(sorted((again or {}).items())), dict(sorted(filled(1).state_dict().items())))
        check_same(wrap.__name__, target.inner[1].blocks, saved.inner[1].blocks)


def versions() -> list[tuple[str, str]]:
    """The versions of a module's code that state_dict() has beside its entries; without them, the module refuses."""
    errors = []
    for given in (filled(1).state_dict(), dict(filled(1).state_dict())):
        target = filled(2, needs_version=True)
        loaded = in_fsdp2(target)
        full = given if dist.get_rank() == 0 else None
        errors.append(error_text(partial(fsdp_optim.scatter_full_model_state_dict, loaded, full)))
        expected = 2 if errors[-1][0] else 1
        check_same("blocks", target.inner[1].blocks, filled(expected).inner[1].blocks)
    return errors


def on_ranks() -> list[tuple[str, str]]:
    with cpu():
        there_and_back()
        return versions()


def test_entries_of_modules() -> None:
    accepted, refused = zip(*run_on_ranks(on_ranks, 2), strict=True)
    assert accepted == (("", ""),) * 2
    check_refused("without versions", refused, "StateError", "version None")
