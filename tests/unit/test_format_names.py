"""The formats that callers write by name."""

from __future__ import annotations

import unittest

from fsdp_optim import CheckpointError
from fsdp_optim.checkpoint.common.formats import WRITTEN, FormatChoices, format_named
from fsdp_optim.formats.own import OURS


class FormatNamedTest(unittest.TestCase):
    def test_safetensors_is_our_own_format(self) -> None:
        self.assertEqual(format_named("safetensors"), OURS)
        self.assertEqual(format_named("safetensors", FormatChoices(key_by="name")), OURS)

    def test_an_unknown_name_is_refused_with_all_names(self) -> None:
        for name in ("pickle", "", None, 3, ["dcp"]):
            with self.assertRaises(CheckpointError) as caught:
                format_named(name)  # type: ignore[arg-type]
            for known in WRITTEN:
                self.assertIn(repr(known), str(caught.exception))

    def test_choices_that_our_format_does_not_have(self) -> None:
        with self.assertRaisesRegex(CheckpointError, "world_size is for formats with a part for each rank"):
            format_named("safetensors", FormatChoices(world_size=2))
        with self.assertRaisesRegex(CheckpointError, "leave key_by out"):
            format_named("safetensors", FormatChoices(key_by="id"))
