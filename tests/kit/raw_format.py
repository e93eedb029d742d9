"""The format of examples/plugin_package, a second one beside this library's own."""

from __future__ import annotations

from example_plugins.raw_format import INDEX, RAW, Raw, encoded_index, index_in

__all__ = ["INDEX", "RAW", "Raw", "encoded_index", "index_in"]
