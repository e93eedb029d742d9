"""A plug-in whose package lacks a name is refused in one line, by one class of errors that is both of those that users catch."""

from __future__ import annotations

import sys
import types
import unittest
from unittest import mock

from parameterized import parameterized

import fsdp_optim
from fsdp_optim.errors import class_name
from fsdp_optim.integrations.common.needed import MissingNameError, needed, refusal

MODULE = types.ModuleType("torch_like")
MODULE.Thing = type("Thing", (), {"act": lambda self: None})  # type: ignore[attr-defined]


class TestNeeded(unittest.TestCase):
    def setUp(self) -> None:
        patch = mock.patch.dict(sys.modules, {"torch_like": MODULE})
        patch.start()
        self.addCleanup(patch.stop)

    def test_the_objects_are_given_by_their_names(self) -> None:
        objects = needed("torch", "9.9.9", {"torch_like": ("Thing", "Thing.act")})
        self.assertEqual(objects, {"Thing": MODULE.Thing, "Thing.act": MODULE.Thing.act})

    @parameterized.expand(
        [
            (
                "names",
                {"torch_like": ("Other", "Thing", "Thing.stop", "Other.act")},
                "torch_like.Other, torch_like.Thing.stop",
            ),
            ("module", {"torch_like.deeper": ("x",)}, "the module torch_like.deeper"),
        ]
    )
    def test_everything_that_is_missing_is_named_in_one_line(self, _: str, names: dict, missing: str) -> None:
        with self.assertRaises(MissingNameError) as caught:
            needed("numpy", "9.9.9", names)
        text = str(caught.exception)
        self.assertRegex(text, r"^numpy \d+\.\d+\S* does not have ")
        self.assertIn(f"does not have {missing}", text)
        self.assertIn("install numpy 9.9.9, which was tested, or save with fsdp_optim.save", text)
        self.assertNotIn("\n", text)

    @parameterized.expand(
        [("no_such_thing", "no_such_thing"), ("transformers", "transformers"), ("lightning", "'lightning>=2.6'")]
    )
    def test_the_command_that_installs_a_package_which_is_missing(self, package: str, wanted: str) -> None:
        from fsdp_optim.integrations.common import needed as module

        with (
            mock.patch.object(module, "version", side_effect=module.PackageNotFoundError),
            self.assertRaises(MissingNameError) as caught,
        ):
            needed(package, "1.0", {"no_such_thing.part": ("x",)})
        self.assertTrue(
            str(caught.exception).endswith(f"needs {package}, which is not installed: pip install {wanted}")
        )

    def test_the_package_that_a_trainer_needs_itself_is_not_blamed_on_the_trainer(self) -> None:
        absent = ModuleNotFoundError("No module named 'torch_li'", name="torch_li")
        with (
            mock.patch("importlib.import_module", side_effect=absent),
            self.assertRaises(ModuleNotFoundError) as caught,
        ):
            needed("numpy", "9.9.9", {"torch_like": ("Thing",)})
        self.assertIs(caught.exception, absent)

    def test_the_error_is_that_of_an_import_and_one_of_this_library(self) -> None:
        error = refusal("numpy", "9.9.9", "a name")
        self.assertIsInstance(error, ImportError)
        self.assertIsInstance(error, fsdp_optim.WrapperError)
        self.assertEqual(class_name(error), "WrapperError")
