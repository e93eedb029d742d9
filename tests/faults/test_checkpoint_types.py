"""Every JSON value of a checkpoint in turn replaced by a value of each JSON type, with checksums that agree.

A load raises an error of the library and has changed nothing, or is the same twice: never a raw exception.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kit.checkpoint_damage import brief_of, packed, sealed_brief
from kit.checkpoint_format import MANIFEST, canonical
from kit.compare import Differs, check_same
from kit.optimizers import Peculiar
from kit.trained import Trained
from parameterized import parameterized
from soak.mutations import KINDS, Change, Kind, Subject, Tiny, contents, probe
from soak.mutators import Files, places_in, repair, sealed, split_header
from soak.torture import temporary

import fsdp_optim

OF_EACH_TYPE: tuple[Any, ...] = (None, True, -1, 1.5, "word", [], ["word", "word"], {}, {"word": ["word"]})

CHECKPOINTS = {
    "in the manifest": Kind(Peculiar, extra=False),
    "in a file": KINDS["tensors in groups"],
    "split": KINDS["split"],
}


@dataclasses.dataclass(frozen=True)
class Document:
    """Some JSON of a checkpoint. `put` writes another value in its place, with all checksums that cover it."""

    name: str
    value: Any
    put: Callable[[Files, Any], None]

    def changes(self) -> Iterator[tuple[str, Any]]:
        """A value and its replacement, and the whole value then. Of values that are made alike, the first."""
        for path in places_in(self.value, alike=_made_of):
            for other in OF_EACH_TYPE:
                whole = [copy.deepcopy(self.value)]
                parent: Any = whole
                for key in (0, *path[:-1]) if path else ():
                    parent = parent[key]
                last = path[-1] if path else 0
                if type(parent[last]) is not type(other) or parent[last] != other:
                    parent[last] = other
                    yield f"{self.name}: {'/'.join(map(str, path))} is {json.dumps(other)}", whole[0]


_WORDS = ("tensor", "placed", "scalar tensor", "scalar", "opaque")  # which decide how what is beside them is read


def _made_of(value: Any) -> Any:
    """The types that a value is made of: equal for values that are read in the same way."""
    if isinstance(value, dict):
        return tuple(sorted((key, _made_of(item)) for key, item in value.items()))
    if isinstance(value, list):
        made = [_made_of(item) for item in value]
        return (list, *(made[:1] if all(kind == made[0] for kind in made) else made))
    return value if value in _WORDS else type(value).__name__


def documents(name: str, good: Files) -> Iterator[Document]:
    """Each value once: what the second tensor, file or parameter says is read as what the first one says."""
    manifest = json.loads(_bytes(good, MANIFEST))["checkpoint"]
    summary = manifest["brief"]
    rest = {key: value for key, value in manifest.items() if key != "brief"}
    if name == "in the manifest":
        yield Document("manifest", rest, lambda files, value: _put_manifest(files, value, summary))
        yield Document("brief", summary, lambda files, value: _put_brief(files, {**rest, "brief": value}))
    for file in sorted(good):
        if file.endswith(".index.json") and name == "split":
            yield Document(file, json.loads(_bytes(good, file)), _putter(file, canonical))
        if file.endswith(".safetensors") and name == "in a file" and "rank" not in file:
            header, data = split_header(_bytes(good, file)) or (b"", b"")
            value = json.loads(header)
            yield Document(f"header of {file}", value, _putter(file, packed, data))
            if file.startswith("extra/"):
                text = value["__metadata__"].pop("json")
                yield Document(file, json.loads(text), _put_extra(file, value, data))


def _bytes(files: Files, name: str) -> bytes:
    data = files[name]
    assert isinstance(data, bytes)
    return data


def _put_manifest(files: Files, value: Any, summary: Any) -> None:
    if isinstance(value, dict):
        value = {**value, "brief": brief_of(value, summary)}
    files[MANIFEST] = sealed(value)


def _put_brief(files: Files, value: Any) -> None:
    summary = value["brief"]
    files[MANIFEST] = sealed({**value, "brief": sealed_brief(summary) if isinstance(summary, dict) else summary})


def _putter(file: str, written: Callable[[Any], bytes], data: bytes = b"") -> Callable[[Files, Any], None]:
    def put(files: Files, value: Any) -> None:
        files[file] = written(value) + data
        repair(files)

    return put


def _put_extra(file: str, header: Any, data: bytes) -> Callable[[Files, Any], None]:
    def put(files: Files, value: Any) -> None:
        metadata = {**header["__metadata__"], "json": json.dumps(value)}
        files[file] = packed({**header, "__metadata__": metadata}) + data
        repair(files)

    return put


class TypesTest(unittest.TestCase):
    @parameterized.expand([(name,) for name in CHECKPOINTS])
    def test_values_of_every_type(self, name: str) -> None:
        self.check(name, every=3)

    @parameterized.expand([(name,) for name in CHECKPOINTS])
    @pytest.mark.slow
    def test_every_value_of_every_type(self, name: str) -> None:
        self.check(name, every=1)

    def check(self, name: str, every: int) -> None:
        figures: Counter[str] = Counter()
        wrong = []
        with temporary() as root:
            subject = Subject(root, CHECKPOINTS[name])
            for document in documents(name, dict(subject.good)):
                for said, value in itertools.islice(document.changes(), 0, None, every):
                    files: Files = dict(subject.good)
                    document.put(files, value)
                    try:
                        probe(subject, Change(files, [said], covered=False, verify=True), figures)
                    except Differs as error:
                        wrong.append(str(error))
                        subject.renew()
        print(name, dict(figures))
        self.assertGreater(figures["refused"], 50 // every)
        if wrong:
            raise Differs(f"{len(wrong)} changes:\n" + "\n".join(wrong[:20]))


class StepTest(unittest.TestCase):
    """torch treats what is called `step` in its own way, whatever it is."""

    @parameterized.expand([("word", "seventh"), ("words", ["a", "b"]), ("tensor", torch.tensor(7, dtype=torch.int64))])
    def test_step(self, _: str, step: Any) -> None:
        trained, other = (Trained("plain", Peculiar, 1, Tiny) for _ in range(2))
        for param in trained.params:
            trained.optim.state[param]["step"] = copy.deepcopy(step)
        with temporary() as root:
            fsdp_optim.save(root / "step", trained.model, trained.optim, options=fsdp_optim.SaveOptions(durable=False))
            fsdp_optim.load(root / "step", other.model, other.optim)
        check_same("state", contents(other), contents(trained))
