"""Files of other libraries that no program writes: CheckpointError or StateError in time, and never a part of them."""

from __future__ import annotations

import shutil
import signal
import tempfile
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.hostile import BY_BYTES, KINDS, WEIGHTS, Pair, damage, damage_bytes
from kit.options import as_options
from kit.peaks import MIB, Peak
from parameterized import parameterized

import fsdp_optim
from fsdp_optim import FsdpOptimError
from fsdp_optim.foreign.per_rank.torch_shards import DTensorFields, Fields, shards_of

SOON, LATER = 3, 150  # changes of each kind
MOST_MIB, TIMES = 160, 80  # of memory: in all, and for each byte of the files
SECONDS = 60  # far more than any call takes


class TooLongError(BaseException):
    """A call did not end."""


@contextmanager
def in_time() -> Iterator[None]:
    def end(*_: Any) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class HostileTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.place = self.root / "theirs"

    def check(self, what: str) -> None:
        """Every call ends by itself, with a result or with an error of this library, and leaves all or nothing."""
        target = self.root / "ours"
        by_id: dict[str, Any] = {"format": "torch_file", "param_names": ["w", "b"]}
        calls: dict[str, Callable[[], object]] = {
            "verify": lambda: fsdp_optim.verify(self.place, progress=False),
            "inspect": lambda: repr(fsdp_optim.inspect(self.place)),
            "convert": lambda: fsdp_optim.convert(
                self.place, target, options=fsdp_optim.ConvertOptions(progress=False, durable=False)
            ),
            "convert by id": lambda: fsdp_optim.convert(
                self.place, target, **as_options(fsdp_optim.ConvertOptions, **by_id, progress=False, durable=False)
            ),
            "load": self.load,
        }
        for name, call in calls.items():
            failed = False
            try:
                with in_time():
                    call()
            except FsdpOptimError:
                failed = True
            except BaseException as error:
                raise AssertionError(f"{what}: {name}: {type(error).__name__}: {error}") from error
            there = [path for path in self.root.iterdir() if path.name.startswith("ours")]
            self.assertEqual(bool(there), name.startswith("convert") and not failed, f"{what}: {name}")
            for path in there:
                shutil.rmtree(path)

    def load(self) -> None:
        model = Pair()
        optim = torch.optim.Adam(model.parameters())
        try:
            fsdp_optim.load(self.place, model, optim, options=fsdp_optim.LoadOptions(progress=False))
        except FsdpOptimError:
            changed = [name for name, param in model.named_parameters() if not bool((param == 7).all())]
            if changed or optim.state:
                raise AssertionError(f"a part was loaded: {changed}, {dict(optim.state)}") from None
            raise

    def check_some(self, kind: str, seeds: range) -> None:
        KINDS[kind](self.root / "sound")
        fsdp_optim.verify(self.root / "sound", progress=False)
        for seed in seeds:
            shutil.copytree(self.root / "sound", self.place)
            self.check(f"{kind}: {damage(self.place, seed)}")
            shutil.rmtree(self.place)

    @parameterized.expand(KINDS)
    def test_one_value_is_another(self, kind: str) -> None:
        self.check_some(kind, range(SOON))

    @parameterized.expand(KINDS)
    @pytest.mark.slow
    def test_one_value_is_another_often(self, kind: str) -> None:
        self.check_some(kind, range(SOON, LATER))

    def check_bytes(self, kind: str, seeds: range) -> None:
        """As `check`; and no call takes much more memory than the file has bytes."""
        {**KINDS, **BY_BYTES}[kind](self.root / "sound")
        for seed in seeds:
            shutil.copytree(self.root / "sound", self.place)
            what = f"{kind}: {damage_bytes(self.place, seed)}"
            nbytes = sum(path.stat().st_size for path in self.place.rglob("*") if path.is_file())
            with Peak() as peak:
                self.check(what)
            self.assertLess(peak.mib, MOST_MIB + TIMES * nbytes / MIB, what)
            shutil.rmtree(self.place)

    @parameterized.expand([*KINDS, *BY_BYTES])
    def test_bytes_are_others(self, kind: str) -> None:
        self.check_bytes(kind, range(2 * SOON))

    @parameterized.expand([*KINDS, *BY_BYTES])
    @pytest.mark.slow
    def test_bytes_are_others_often(self, kind: str) -> None:
        self.check_bytes(kind, range(2 * SOON, LATER))

    @parameterized.expand(
        [
            ("a key that is no str", {"params": ["w", "b"], True: 0.1}, {}, {}),
            ("a list of 2**40 ids", {"params": range(1 << 40)}, {}, {}),
            ("a tensor of 2**40 ids", {"params": [torch.zeros(1).expand(1 << 40)]}, {}, {}),
            ("a number of 5000 digits", {"params": ["w", "b"], "lr": 10**5000}, {}, {}),
            ("a state of 5000 digits", {"params": ["w", "b"]}, {"w": 10**5000}, {}),
            ("a name that is no Unicode", {"params": ["w", "b"]}, {}, {"\ud800": torch.ones(2)}),
            ("a group without a list", {"params": 3}, {}, {}),
        ]
    )
    def test_what_was_a_crash(self, what: str, group: dict[Any, Any], state: dict[str, Any], more: Any) -> None:
        self.place.mkdir()
        values = {"model": {**WEIGHTS, **more}, "optimizer": {"state": state, "param_groups": [group]}}
        torch.save(values, self.place / "a.pt")
        self.check(what)

    def test_a_long_range_of_the_trainer_is_withheld(self) -> None:
        """It is made by allow_pickle=True; a short one is a plain value."""
        self.place.mkdir()
        torch.save({"model": dict(WEIGHTS), "long": range(1 << 40), "short": range(9)}, self.place / "a.pt")
        restored = fsdp_optim.load(self.place, Pair())
        self.assertEqual(restored.state["short"], range(9))
        with self.assertRaisesRegex(fsdp_optim.CheckpointError, "long has an object of the class builtins.range"):
            restored.state["long"]
        self.assertEqual(
            fsdp_optim.load(self.place, Pair(), options=fsdp_optim.LoadOptions(allow_pickle=True)).state["long"],
            range(1 << 40),
        )


class MeshTest(unittest.TestCase):
    @parameterized.expand(
        [((1 << 20, 1 << 20), "a mesh of more than"), ((2, 2), "more ranks than the 2 of its rank map")]
    )
    def test_a_mesh_of_more_ranks_than_there_are(self, sizes: tuple[int, ...], words: str) -> None:
        """A few numbers in a DTensor would be lists of 2**40."""
        layout = fields(shape=(sizes,), stride=((1, 1),))
        mesh = fields(_rank=0, _flatten_rank_map=(0, 1), _layout=layout, _coordinate_on_dim=None)
        tensor = fields(DTensorFields(), _local_tensor=None)
        tensor.fields["_spec"] = fields(tensor_meta=fields(shape=(2,)), mesh=mesh, placements=())
        with self.assertRaisesRegex(ValueError, words):
            shards_of(tensor, 0, lambda stored: ())


def fields(made: Fields | None = None, **values: Any) -> Fields:
    made = made or Fields()
    made.fields.update(values)
    return made


if __name__ == "__main__":
    unittest.main()
