"""The wrapper of examples/plugin_package, whose optimizer holds masters that are not parameters of the model."""

from __future__ import annotations

from example_plugins.masters import MasterOptimizer, Mixed, MixedAdapter, WithoutMasters

__all__ = ["MasterOptimizer", "Mixed", "MixedAdapter", "WithoutMasters"]
