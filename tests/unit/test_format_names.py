"""The formats that callers write: by name, and with options of their own."""

from __future__ import annotations

import unittest
from typing import Any

from kit.installed import installed
from kit.raw_format import RAW, Raw
from parameterized import parameterized

from fsdp_optim import CheckpointError, StateError
from fsdp_optim.checkpoint.common.formats import format_of_option
from fsdp_optim.formats.own import OURS
from fsdp_optim.offline.conversion.arguments import ConvertArguments
from fsdp_optim.plugins import DcpFolder, FairscaleShards, TorchFiles, use_formats
from fsdp_optim.registry import BUILT_IN_FORMATS, FORMATS, READ_ONLY_FORMATS, format_names, named

SAVED, WRITTEN = format_names(of_save=True), format_names()


class FormatNamesTest(unittest.TestCase):
    def test_safetensors_is_our_own_format(self) -> None:
        self.assertIs(format_of_option("safetensors"), OURS)
        self.assertEqual(SAVED, ["safetensors", "dcp", "torchtitan"])

    def test_a_name_and_a_format_with_its_options(self) -> None:
        self.assertEqual(format_of_option("torch"), TorchFiles())
        self.assertEqual(format_of_option("torch_file"), TorchFiles(one_file=True))
        self.assertEqual(format_of_option("fairscale"), TorchFiles(for_fairscale=True))
        self.assertEqual(format_of_option("torchtitan", of_save=True), DcpFolder(is_flat=True))
        for format in (TorchFiles(key_by="name"), FairscaleShards(8), RAW, OURS):
            self.assertIs(format_of_option(format), format)

    def test_what_the_registry_says_is_so(self) -> None:
        """Names, manifests and traces stand there so that the format need not be imported for them."""
        for known in BUILT_IN_FORMATS:
            format = named(known.where)
            format = format(2) if isinstance(format, type) else format
            self.assertEqual(format.name, known.name if known.name != "safetensors" else "fsdp_optim")
            self.assertEqual((format.saves, format.probe.manifest), (known.saves, known.manifest), known.name)
        self.assertEqual([named(where).probe for where in READ_ONLY_FORMATS], [None] * len(READ_ONLY_FORMATS))
        self.assertEqual([known.name for known in BUILT_IN_FORMATS if known.traces], ["dcp"])

    @parameterized.expand([(False, WRITTEN), (True, SAVED)])
    def test_an_unknown_name_is_refused_with_all_names(self, of_save: bool, names: list[str]) -> None:
        with installed(FORMATS, raw="kit.raw_format:RAW"):
            for name in ("pickle", "", None, 3, ["dcp"], TorchFiles):
                with self.assertRaises(CheckpointError) as caught:
                    format_of_option(name, of_save=of_save)
                for known in (*names, "raw"):
                    self.assertIn(repr(known), str(caught.exception))

    def test_what_only_convert_writes(self) -> None:
        for format in ("torch", TorchFiles(one_file=True), FairscaleShards(2)):
            with self.assertRaisesRegex(CheckpointError, "save does not write the format .*convert writes"):
                format_of_option(format, of_save=True)

    def test_what_is_only_read(self) -> None:
        with self.assertRaisesRegex(CheckpointError, "can be read, but not written"):
            format_of_option(named(READ_ONLY_FORMATS[0]))

    def test_a_format_that_needs_options(self) -> None:
        with self.assertRaisesRegex(CheckpointError, r"fairscale_shards.*format=FairscaleShards\(\.\.\.\).*world_size"):
            format_of_option("fairscale_shards")

    def test_an_installed_format_and_one_that_a_program_adds(self) -> None:
        for where in ("RAW", "Raw"):  # the object, and the class
            with installed(FORMATS, mine=f"kit.raw_format:{where}"):
                self.assertIsInstance(format_of_option("mine", of_save=True), Raw)
        with (
            installed(FORMATS, mine="kit.raw_format:INDEX"),
            self.assertRaisesRegex(CheckpointError, "kit.raw_format:INDEX"),
        ):
            format_of_option("mine")
        with use_formats([RAW]):
            self.assertIs(format_of_option("raw"), RAW)
        with self.assertRaisesRegex(CheckpointError, "use_formats.. was given a str"), use_formats(["raw"]):
            pass

    @parameterized.expand(
        [
            ("key_by", CheckpointError, lambda: TorchFiles(key_by="number")),  # type: ignore[arg-type]
            ("calls parameters by id", CheckpointError, lambda: TorchFiles("name", for_fairscale=True)),
            ("world_size must be at least 1", CheckpointError, lambda: FairscaleShards(0)),
            ("units must be a dict", StateError, lambda: FairscaleShards(2, ["a"])),  # type: ignore[arg-type]
            ("units must be a dict", StateError, lambda: FairscaleShards(2, {"a": "b"})),
        ]
    )
    def test_wrong_options(self, words: str, kind: type[Exception], make: Any) -> None:
        with self.assertRaisesRegex(kind, words):
            make()

    def test_ranks_compare_formats_with_their_options(self) -> None:
        def text(format: object) -> str:
            return ConvertArguments(format=format).compared_text()

        self.assertEqual(text(TorchFiles()), text(TorchFiles()))
        self.assertNotEqual(text(TorchFiles()), text(TorchFiles(key_by="name")))
        raw, other = Raw(), Raw()  # without a repr of their own
        self.assertEqual(text(raw), text(other))
        self.assertNotEqual(text(Raw()), text("raw"))


if __name__ == "__main__":
    unittest.main()
