"""Every adapter passes AdapterConformance: the built-in adapters, and an adapter of a third party."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kit.masters import MasterOptimizer, Mixed, MixedAdapter
from kit.shards import in_chunks, in_dtensors_of_shards, in_sharded_tensors
from kit.wraps import in_ddp, in_fairscale, in_fsdp1, in_fsdp2, in_hsdp
from msgspec import structs
from parameterized import parameterized
from torch import nn

from fsdp_optim.layout import Whole
from fsdp_optim.testing import AdapterConformance, RanksFailed, run_on_ranks
from fsdp_optim.testing import adapter_conformance as checks


def units(model: Any) -> Any:
    model.units = ("first", "inner", "")
    return model


class TestFairscaleFlat(AdapterConformance, unittest.TestCase):
    num_padded_promised = True

    @staticmethod
    def wrap(module: nn.Module) -> nn.Module:
        return in_fairscale(units(module))


class TestFairscaleNotFlat(TestFairscaleFlat):
    @staticmethod
    def wrap(module: nn.Module) -> nn.Module:
        return in_fairscale(units(module), flatten_parameters=False)


class TestFSDP1Flat(TestFairscaleFlat):
    @staticmethod
    def wrap(module: nn.Module) -> nn.Module:
        return in_fsdp1(units(module))


class TestFSDP1Orig(AdapterConformance, unittest.TestCase):
    @staticmethod
    def wrap(module: nn.Module) -> nn.Module:
        return in_fsdp1(units(module), use_orig_params=True)


class TestFSDP2(AdapterConformance, unittest.TestCase):
    @staticmethod
    def wrap(module: nn.Module) -> nn.Module:
        return in_fsdp2(units(module))


class TestHSDP(AdapterConformance, unittest.TestCase):
    world_sizes = (4,)

    @staticmethod
    def wrap(module: nn.Module) -> nn.Module:
        return in_hsdp(units(module), (2, 2))


class TestDDP(AdapterConformance, unittest.TestCase):
    @staticmethod
    def wrap(module: nn.Module) -> nn.Module:
        return in_ddp(module)


class TestChunkLists(AdapterConformance, unittest.TestCase):
    wrap = staticmethod(in_chunks)


class TestShardedTensors(AdapterConformance, unittest.TestCase):
    wrap = staticmethod(in_sharded_tensors)


class TestDTensorsOfShards(AdapterConformance, unittest.TestCase):
    wrap = staticmethod(in_dtensors_of_shards)


class TestMasters(AdapterConformance, unittest.TestCase):
    make_adapter = MixedAdapter
    wrap = Mixed
    make_optimizer = MasterOptimizer
    num_padded_promised = True


class Wrong(MixedAdapter):
    """An adapter that breaks the promise `how`."""

    how = ""

    def handles(self, tree: Any, ranks: Any, claimed: Any) -> Any:
        for handle in super().handles(tree, ranks, claimed):
            (original,) = handle.originals
            shape = handle.local_shape
            if self.how == "shape":
                handle = replace(handle, originals=(structs.replace(original, placement=Whole((*shape, 1), ranks)),))
            if self.how == "nobody":
                handle = replace(handle, originals=(structs.replace(original, placement=Whole(shape, (7,))),))
            if self.how == "padding":
                handle = replace(handle, num_padded=(3,) * len(ranks))
            if self.how == "changes":
                original.module.train(not original.module.training)
            yield handle

    def masters(self, tree: Any, optims: Any) -> Any:
        for handle in super().masters(tree, optims):
            if self.how == "elsewhere":
                first, second, *rest = handle.originals
                moved = structs.replace(first, placement=replace(first.placement, start=first.placement.start + 1))
                handle = replace(handle, originals=(moved, second, *rest))
            yield handle

    def is_wrapper_child(self, module: nn.Module, name: str) -> bool:
        return self.how != "names" and super().is_wrapper_child(module, name)


def wrong(how: str) -> Callable[[], Wrong]:
    return type(f"Wrong{how}", (Wrong,), {"how": how})


class _OfWrong(AdapterConformance):
    wrap = Mixed
    make_optimizer = MasterOptimizer


def run_wrong(check: Callable[..., Any], how: str) -> Any:
    return checks.run_check(check, type("Of", (_OfWrong,), {"make_adapter": wrong(how)}))


class TestTheSuite(unittest.TestCase):
    @parameterized.expand(
        [
            ("shape", checks.check_elements, "the layout says shape"),
            ("elsewhere", checks.check_elements, "and the parameter has"),
            ("nobody", checks.check_elements, "no rank holds the elements"),
            ("names", checks.check_names, "the order is"),
            ("padding", checks.check_padding, "of padding are described"),
            ("changes", checks.check_unchanged, "reading the model has changed it"),
        ]
    )
    def test_it_finds(self, how: str, check: Callable[..., Any], words: str) -> None:
        """The conformance tests notice every broken promise."""
        with self.assertRaisesRegex((RanksFailed, AssertionError), words):
            checks.compare_elements(run_on_ranks(run_wrong, 2, check, how))


if __name__ == "__main__":
    unittest.main()
