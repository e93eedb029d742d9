"""The optimizer's description in a checkpoint: what is written is read again, and what nobody writes is refused."""

from __future__ import annotations

import json
import unittest
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.compare import check_same
from parameterized import parameterized

from fsdp_optim import CheckpointError
from fsdp_optim.formats.base import description as description_file
from fsdp_optim.formats.base.codec import Decoder, Encoder
from fsdp_optim.formats.base.description import decoded, decoded_text, encoded, from_plain, to_plain
from fsdp_optim.plugins import GroupDescription, OptimDescription, ParamDescription

WORDS = st.text(max_size=3).filter(lambda text: not any(0xD800 <= ord(letter) < 0xE000 for letter in text))
PLAIN = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.just(2**100),
        st.floats(allow_nan=False),
        WORDS,
        st.binary(max_size=3),
        st.lists(st.integers(0, 255), max_size=3).map(lambda numbers: torch.tensor(numbers, dtype=torch.uint8)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(WORDS, st.tuples(st.integers(), WORDS)), inner, max_size=2),
    ),
    max_leaves=4,
)
NAMES = st.one_of(WORDS, st.integers(), st.tuples(st.integers(), WORDS))
PARAMS = st.builds(
    ParamDescription,
    shape=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    values=st.lists(
        st.tuples(NAMES, st.sampled_from(["tensor", "placed 2 0:1", "scalar", "opaque"]), PLAIN), max_size=3
    ).map(tuple),
    has_state=st.booleans(),
)
GROUPS = st.builds(
    GroupDescription,
    hyperparameters=st.lists(st.tuples(WORDS, PLAIN), max_size=3).map(tuple),
    params=st.lists(WORDS, max_size=3).map(tuple),
)
DESCRIPTIONS = st.builds(
    OptimDescription,
    groups=st.lists(GROUPS, max_size=2).map(tuple),
    other_keys=st.dictionaries(WORDS, PLAIN, max_size=2),
    params=st.dictionaries(WORDS, PARAMS, max_size=3),
    optimizer_class=st.one_of(st.none(), WORDS, st.lists(WORDS, max_size=2)),
)


def _plain(description: OptimDescription) -> list[Any]:
    """Its fields, without the help of what is tested."""
    groups = [[group.hyperparameters, group.params] for group in description.groups]
    params = {fqn: [param.shape, param.values, param.has_state] for fqn, param in description.params.items()}
    return [groups, params, description.other_keys, description.optimizer_class]


def of(*values: Any, shape: Any = (2,), has_state: Any = True, **more: Any) -> dict[str, Any]:
    """The JSON of a parameter."""
    return {"shape": list(shape), "values": list(values), "has_state": has_state, **more}


class DescriptionTest(unittest.TestCase):
    @settings(deadline=None, max_examples=100)
    @given(DESCRIPTIONS)
    def test_what_is_written_is_read(self, description: OptimDescription) -> None:
        """By way of JSON text, and of the tensors beside it."""
        values, tensors = encoded("here", description, allow_pickle=False, records={})
        restored = decoded("there", json.loads(msgspec.json.encode(values)), tensors, allow_pickle=False, records={})
        check_same("read", _plain(restored), _plain(description))
        self.assertEqual(type(restored), OptimDescription)

    @settings(deadline=None, max_examples=100)
    @given(DESCRIPTIONS)
    def test_texts_are_written_as_everything_else_is(self, description: OptimDescription) -> None:
        """The same JSON, and the same tensors in the same order, as of an encoder that looks at each value."""
        encoder = Encoder()
        wanted = encoder.encode("here", to_plain(description))
        values, tensors = encoded("here", description, allow_pickle=False, records={})
        self.assertEqual(json.dumps(msgspec.to_builtins(values)), json.dumps(wanted))
        check_same("tensors", tensors, encoder.tensors)

    @parameterized.expand(
        (
            ("leaves", {"w": of(["a", "tensor", "k"], ["b", "scalar", 1.5], ["c", "opaque", None])}),
            ("no state", {"w": of(has_state=False), "v": of(shape=[])}),
            ("a tuple", {"w": of(["a", "opaque", {"$tuple": [1, "x"]}])}),
            ("a tag far inside", {"w": of(), "v": of(["a", "opaque", [0, {"x": {"$float": "inf"}}]])}),
            ("a pickle", {"w": of(["a", "opaque", {"$pickle": "gASVBAAAAAAAAABLAS4="}])}),
            ("a name that is a tuple", {"w": of([{"$tuple": [1, 2]}, "scalar", 1])}),
            ("a name that is a list", {"w": of([[1], "scalar", 1])}),
            ("a tag for a name", {"$w": of()}),
            ("pairs", {"$dict": [["$w", of()]]}),
            ("another field", {"w": of(more=1)}),
            ("a pickle in another field", {"w": of(more={"$pickle": "gASVBAAAAAAAAABLAS4="})}),
            ("a wrong shape", {"w": of(shape=[2.0])}),
            ("too few fields", {"w": {"shape": [], "values": []}}),
            ("no parameter", {"w": None}),
            ("no dict", [of()]),
        )
    )
    def test_leaves_alone_are_read_as_everything_else_is(self, _: str, params: Any) -> None:
        """What needs no decoding is not decoded: with the values, and the errors, of a decoder that looks at each value."""
        values = {"optimizer_class": "SGD", "groups": [], "extra": {"x": {"$tuple": [1]}}, "params": params}

        def outcome(read: Callable[[], OptimDescription]) -> Any:
            try:
                return _plain(read())
            except CheckpointError as error:
                return str(error)

        wanted = outcome(lambda: from_plain("here", Decoder("here", ()).decode(values)))
        read = outcome(lambda: decoded("here", values, (), allow_pickle=False, records={}))
        check_same("read", read, wanted)
        for text in (json.dumps(values), json.dumps(values, indent=1)):
            of_text = outcome(lambda: decoded_text("here", text.encode(), allow_pickle=False, records={}))  # noqa: B023
            check_same("read from text", of_text, wanted)

    def test_which_parameters_are_read_from_the_text(self) -> None:
        """Those that have leaves alone, as nearly always; not where a key is there twice, or a character as its number."""
        params = {"w": of(["a", "tensor", "k"], ["b", "scalar", 1.5], ["c", "opaque", None]), "é:": of(has_state=False)}
        values = {"optimizer_class": "SGD", "groups": [], "extra": {"x": {"$tuple": [1]}}, "params": params}
        text = json.dumps(values, ensure_ascii=False)
        apart = description_file._params_apart(text.encode())
        assert apart is not None
        check_same(
            "params", _plain(OptimDescription((), {}, apart[0]))[1], _plain(from_plain("", {**values, "extra": {}}))[1]
        )
        self.assertEqual(json.loads(apart[1]), {**values, "params": {}})
        for old, new in (
            ('"extra"', '"groups": [], "extra"'),
            ('"has_state": true', '"has_state": false, "has_state": true'),
            ('"é:"', '"w"'),
            ('"é:"', '"\\u00e9:"'),
            ('"k"', '{"$tuple": []}'),
            ('"w"', '"$w"'),
            ('"optimizer_class": "SGD", ', ""),
        ):
            self.assertIn(old, text)
            self.assertIsNone(description_file._params_apart(text.replace(old, new, 1).encode()), new)

    @parameterized.expand(
        (
            ("no groups", {"groups": None}, "groups"),
            ("no list of groups", {"groups": {}}, "groups"),
            ("a shape", {"params": {"w": {"shape": [2.0], "values": [], "has_state": True}}}, "shape"),
            ("a flag", {"params": {"w": {"shape": [2], "values": [], "has_state": 1}}}, "has_state"),
            (
                "two of three",
                {"params": {"w": {"shape": [2], "values": [["a", "scalar"]], "has_state": True}}},
                "values",
            ),
            (
                "a list as a name",
                {"params": {"w": {"shape": [], "values": [[[], "scalar", 1]], "has_state": True}}},
                "",
            ),
            ("no pair", {"groups": [{"hyperparameters": [["lr"]], "params": []}]}, "hyperparameters"),
            ("a number for a name", {"groups": [{"hyperparameters": [[1, 2]], "params": []}]}, "hyperparameters"),
            ("a number for a parameter", {"groups": [{"hyperparameters": [], "params": [1]}]}, "params"),
            ("a class", {"optimizer_class": [1]}, "optimizer_class"),
            ("other keys", {"extra": []}, "extra"),
        )
    )
    def test_other_types_are_refused_by_name(self, _: str, values: dict[str, Any], word: str) -> None:
        plain = {"optimizer_class": "SGD", "groups": [], "extra": {}, "params": {}}
        from_plain("here", plain)
        with self.assertRaisesRegex(CheckpointError, f"^here: is not written as it should be.*{word}"):
            from_plain("here", plain | values)

    def test_nothing_may_be_left_out(self) -> None:
        plain: dict[str, Any] = {"groups": [], "extra": {}, "params": {}}
        self.assertEqual(from_plain("here", plain), OptimDescription((), {}, {}))
        for key in plain:
            with self.assertRaisesRegex(CheckpointError, key):
                from_plain("here", {name: value for name, value in plain.items() if name != key})


if __name__ == "__main__":
    unittest.main()
