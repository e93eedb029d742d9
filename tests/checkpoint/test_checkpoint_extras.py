"""The trainer's values: decoded when they are asked for, those of every rank, and no more memory than the file justifies."""

from __future__ import annotations

import base64
import itertools
import json
import logging
import pickle
import tracemalloc
import unittest
from collections import OrderedDict
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from kit.compare import check_same, error_text
from kit.folders import InFolder
from kit.optimizers import adam
from kit.options import as_options, state_for
from kit.trained import Trained
from kit.wrapping import cpu
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.formats.base.codec import Decoder, Encoder
from fsdp_optim.testing import run_on_ranks

QUIET: dict[str, Any] = {"durable": False, "progress": False}


class Own:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own)

    def __hash__(self) -> int:
        return 0


class Saving(InFolder):
    def save(self, **kwargs: Any) -> None:
        fsdp_optim.save(
            self.path,
            nn.Linear(3, 2),
            **as_options(fsdp_optim.SaveOptions, **QUIET, allow_pickle=True, **kwargs),
        )


class PickledTest(Saving):
    @parameterized.expand([("a dict", {"good": 1, "own": Own()}), ("in order", OrderedDict(good=1, own=[Own()]))])
    def test_only_the_pickled_value_needs_trust(self, _: str, extra: Any) -> None:
        own = {f"own {name}": value for name, value in extra.items()}
        self.save(extra=extra, per_rank_extra=own)
        model = nn.Linear(3, 2)
        for restored in (fsdp_optim.load(self.path, model), fsdp_optim.load(self.path)):
            state = restored.state
            self.assertEqual((state["good"], state.get("good"), "own" in state, len(state)), (1, 1, True, 4))
            self.assertEqual(list(state), ["good", "own", "own good", "own own"])
            asks: list[Callable[[], Any]] = [lambda: state["own"], lambda: state.get("own"), lambda: dict(state)]  # noqa: B023
            asks += [lambda: {**state}, lambda: list(state.values()), lambda: list(state.items()), state.copy]  # noqa: B023
            asks += [lambda: state.pop("own"), lambda: state.setdefault("own", 1), lambda: json.dumps(state)]  # noqa: B023
            for ask in asks:
                kind, text = error_text(ask)
                self.assertEqual(kind, "CheckpointError", text)
                self.assertIn("allow_pickle", text)
                self.assertIn("'own'", text)
            state["own"] = state["own own"] = 3  # his own values in their places
            self.assertEqual(dict(state), {"good": 1, "own": 3, "own good": 1, "own own": 3})
            self.assertEqual(error_text(lambda: restored.all_ranks)[0], "CheckpointError")  # noqa: B023
        trusted = fsdp_optim.load(self.path, model, options=fsdp_optim.LoadOptions(allow_pickle=True))
        check_same("trusted", [trusted.state, trusted.all_ranks], [{**extra, **own}, (own,)])

    @parameterized.expand(
        [("alone", Own()), ("in a list", [1, Own()]), ("as a key", {Own(): 1}), ("in a set", {Own()})]
    )
    def test_where_it_is_all_there_is(self, _: str, extra: Any) -> None:
        self.save(extra=extra, per_rank_extra=extra)
        restored = fsdp_optim.load(self.path, nn.Linear(3, 2))
        for ask in (lambda: restored.state["extra"], lambda: restored.state["per_rank_extra"]):
            kind, text = error_text(ask)
            self.assertEqual(kind, "CheckpointError", text)
            self.assertIn("allow_pickle", text)
        trusted = fsdp_optim.load(self.path, options=fsdp_optim.LoadOptions(allow_pickle=True))
        self.assertEqual(trusted.state, {"extra": extra, "per_rank_extra": extra})

    def test_what_needs_no_trust_is_an_ordinary_dict(self) -> None:
        self.save(extra={"a": 1, "b": (1, 2)}, per_rank_extra={"rng": torch.arange(3)})
        result = fsdp_optim.load(self.path)
        self.assertIs(type(result.state), dict)
        check_same("values", result.state, {"a": 1, "b": (1, 2), "rng": torch.arange(3)})
        self.assertEqual(json.dumps({"a": result.state["a"]}), '{"a": 1}')
        again = pickle.loads(pickle.dumps(result))
        check_same("pickled", [again.state, again.all_ranks], [result.state, ({"rng": torch.arange(3)},)])


# ------------------------------------------------------------------------------------------ of all ranks


def save_of(path: Path) -> None:
    with cpu():
        trained = Trained("FSDP2", adam, steps=1)
        own = {"rank": dist.get_rank(), "rng": torch.arange(3) + dist.get_rank()}
        fsdp_optim.save(
            path,
            trained.model,
            trained.optim,
            state=state_for(None, own),
            **as_options(fsdp_optim.SaveOptions, **QUIET),
        )


def load_of(path: Path) -> tuple[Any, Any, list[tuple[int, str]]]:
    records: list[tuple[int, str]] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("fsdp_optim")
    logger.addHandler(handler)
    try:
        with cpu():
            target = Trained("FSDP2", adam, steps=1)
            restored = fsdp_optim.load(path, target.model, target.optim, options=fsdp_optim.LoadOptions(progress=False))
    finally:
        logger.removeHandler(handler)
    return (restored.state, restored.missing_keys), restored.all_ranks, records


class WithViews(nn.Linear):
    """A module whose extra state has views; `loaded`: what a load has given it."""

    def __init__(self, views: dict[str, torch.Tensor]) -> None:
        super().__init__(3, 2)
        self.views, self.loaded = views, dict[str, torch.Tensor]()

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return self.views

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.loaded = state


class ViewsTest(Saving):
    def test_elements_are_those_that_a_view_shows(self) -> None:
        """torch notes in a view that its elements are conjugated or negated, and leaves the memory as it is."""
        base = torch.tensor([1 + 2j, -3 + 0.5j])
        views = {"conjugated": base.conj(), "negated": base.conj().imag, "transposed": torch.arange(6).view(2, 3).t()}
        wanted = {name: view.tolist() for name, view in views.items()}
        self.assertEqual(wanted["conjugated"], [1 - 2j, -3 - 0.5j])
        model, new = WithViews(views), WithViews({})
        fsdp_optim.save(self.path, model, state=views, options=fsdp_optim.SaveOptions(**QUIET))
        result = fsdp_optim.load(self.path, new)
        for loaded in (result.state, new.loaded):
            self.assertEqual({name: loaded[name].tolist() for name in views}, wanted)


class AlignedTest(Saving):
    def test_every_tensor_begins_at_a_multiple_of_its_element(self) -> None:
        """So that a reader that maps the file needs no copy, whatever the order of the values is."""
        dtypes = (torch.int8, torch.float64, torch.bfloat16, torch.int8, torch.float32)
        values = {f"value {index}": torch.ones(3, dtype=dtype) for index, dtype in enumerate(dtypes)}
        self.save(state={name: fsdp_optim.per_rank(value) for name, value in values.items()})
        data = (self.path / "extra" / "rank-00000.safetensors").read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        entries = [(entry["data_offsets"], entry["shape"]) for name, entry in header.items() if name != "__metadata__"]
        sizes = [(first, (last - first) // prod(shape)) for (first, last), shape in entries]
        self.assertEqual(sorted(size for _, size in sizes), sorted(dtype.itemsize for dtype in dtypes))
        self.assertEqual([(first, size) for first, size in sizes if (start + first) % size], [])


class AllRanksTest(Saving):
    def test_a_rank_that_did_not_exist(self) -> None:
        run_on_ranks(save_of, 2, self.path)
        saved = [{"rank": rank, "rng": torch.arange(3) + rank} for rank in range(2)]
        by_rank = run_on_ranks(load_of, 3, self.path)
        for rank, (restored, everybody, records) in enumerate(by_rank):
            missing = () if rank < 2 else ("state['rank']", "state['rng']")
            check_same(f"rank {rank}", restored, (saved[rank] if rank < 2 else {}, missing))
            check_same("of all", everybody, tuple(saved))
            told = [text for level, text in records if level == logging.WARNING and " new: " in text]
            self.assertEqual(len(told), int(rank == 0), records)  # one line of the lowest rank
            self.assertTrue(all("rank 2" in text and "all_ranks" in text and "2 ranks" in text for text in told), told)

    def test_none_and_replaced(self) -> None:
        self.save(extra={"a": 1})
        self.assertEqual(fsdp_optim.load(self.path).all_ranks, ())
        self.save(per_rank_extra=7, overwrite=True)
        first, second = fsdp_optim.load(self.path), fsdp_optim.load(self.path)
        self.assertEqual((first.all_ranks, first.state), (({"per_rank_extra": 7},), {"per_rank_extra": 7}))
        self.save(per_rank_extra=8, overwrite=True)
        self.assertEqual(first.all_ranks, ({"per_rank_extra": 7},))
        kind, text = error_text(lambda: second.all_ranks)
        self.assertEqual(kind, "CheckpointError")
        self.assertIn("replaced", text)

    def test_damage_after_the_load(self) -> None:
        self.save(per_rank_extra={"rng": torch.arange(100)})
        restored, unverified = (
            fsdp_optim.load(self.path),
            fsdp_optim.load(self.path, options=fsdp_optim.LoadOptions(verify=False)),
        )
        (file,) = (self.path / "extra").iterdir()
        data = bytearray(file.read_bytes())
        data[-9] ^= 1
        file.write_bytes(data)
        kind, text = error_text(lambda: restored.all_ranks)
        self.assertEqual(kind, "CheckpointError")
        self.assertIn(file.name, text)
        self.assertEqual(len(unverified.all_ranks), 1)


# ------------------------------------------------------------------------------------------ what is short in the file

SHORT: dict[str, Any] = {
    "a tuple of a range": {"$tuple": {"$range": [0, 1 << 22, 1]}},
    "a set of a range": {"$set": {"$range": [0, 1 << 22, 1]}},
    "a frozenset of a range": {"$frozenset": {"$range": [0, 1 << 22, 1]}},
    "a size of a range": {"$size": {"$range": [0, 1 << 22, 1]}},
    "a complex of a range": {"$complex": {"$range": [0, 1 << 22, 1]}},
    "a dict of a range": {"$dict": {"$range": [0, 1 << 22, 1]}},
    "a counter of words": {"$counter": {"ab": 1}},
    "one tensor in many places": [{"$tensor": 0}] * 64,
    "one array in many places": [{"$ndarray": 0}] * 64,
    "a tensor from the end": {"$tensor": -1},
    "a tensor that is true": {"$tensor": True},
    "a record of many ranks": {"$record": ["Whole", {"full_shape": [1], "on": {"$range": [0, 1 << 23, 1]}}]},
    "a record of many ranks, inside": {
        "$record": [
            "FlatChunks",
            {"full_shape": [1], "start": 0, "chunk_numel": 1, "replicas": [{"$range": [0, 1 << 23, 1]}]},
        ]
    },
}


class MemoryTest(unittest.TestCase):
    @parameterized.expand(SHORT)
    def test_is_not_long_in_memory(self, case: str) -> None:
        from fsdp_optim.checkpoint.common.contents import RECORDS

        tensor = torch.zeros(1 << 16)
        tracemalloc.start()
        try:
            decoder = Decoder("a file", (tensor,), records=RECORDS)
            kind, text = error_text(lambda: decoder.decode(json.loads(json.dumps(SHORT[case]))))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        self.assertEqual(kind, "CheckpointError", text)
        self.assertIn("a file", text)
        self.assertLess(peak, 1 << 20)

    def test_what_is_saved_is_loaded(self) -> None:
        shared = torch.arange(3)
        value = [range(10**12), range(5, -5, -2), (1, (2,)), {3, 4}, shared, shared, torch.Size([2, 3]), 1 + 2j]
        encoder = Encoder()
        said = json.loads(json.dumps(encoder.encode("value", value)))
        check_same("value", Decoder("a file", encoder.tensors).decode(said), value)

    def test_numbers_of_numpy_stay_numbers_and_arrays_arrays(self) -> None:
        for value in (numpy.float32(0.5), numpy.int8(-3), numpy.array(0.5, numpy.float32), numpy.bool_(True)):
            encoder = Encoder()
            said = json.loads(json.dumps(encoder.encode("value", value)))
            loaded = Decoder("a file", encoder.tensors).decode(said)
            self.assertIs(type(loaded), type(value))
            self.assertEqual((loaded.dtype, loaded), (value.dtype, value))

    def test_a_pickle_is_not_read(self) -> None:
        said = {"$pickle": base64.b64encode(pickle.dumps(1)).decode()}
        for at, nest in itertools.product((0, 3), (lambda v: [v], lambda v: {"a": v}, lambda v: {"$tuple": [v]})):
            value: Any = said
            for _ in range(at):
                value = nest(value)
            self.assertIn("allow_pickle", error_text(lambda: Decoder("a file", ()).decode(value))[1])  # noqa: B023


if __name__ == "__main__":
    unittest.main()
