"""A test class for every checkpoint format; `fsdp_optim.formats.base.protocols` has the protocols.

    class TestMyFormat(FormatConformance, unittest.TestCase):
        def make_format(self):
            return MyFormat()

        def make_store(self, format):
            return Folder(self.new_path(), format.probe)       # at a new, empty place, each time that it is called

Everything runs in one process: how ranks share the work is the library's, and the same for all formats.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.description import (
    OPAQUE,
    SCALAR,
    SCALAR_TENSOR,
    TENSOR,
    GroupDescription,
    OptimDescription,
    ParamDescription,
)
from fsdp_optim.formats.base.extents import Extent
from fsdp_optim.formats.base.protocols import (
    Format,
    Half,
    Reader,
    StoredTensor,
    rank_extra_name,
    written,
)
from fsdp_optim.formats.base.saved_optim import description_of
from fsdp_optim.layout import Shape
from fsdp_optim.storage.base import Store
from fsdp_optim.tensors.memory import dtype_name, dtype_named
from fsdp_optim.testing.mix_in import MixIn
from fsdp_optim.testing.saved_sample import EXTRAS, NUM_RANKS, SavedSample, Tensors, bytes_of, save_as

_DTYPES = (
    *(torch.float64, torch.int64, torch.complex64, torch.float32, torch.int32, torch.bfloat16, torch.float16),
    *(torch.int16, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool),
)
_FOREIGN = "nobody-knows.json"
_BIG_NBYTES = 24 << 20


class FormatConformance(MixIn):
    """A mix-in for a `unittest.TestCase`: the promises of a format, one per test."""

    def make_format(self) -> Format:
        """Return the format."""
        raise NotImplementedError

    def make_store(self, format: Format) -> Store:
        """Return a store at a new, empty place, with the format's probe. Its reads go directly into the given memory."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------- the sample

    def _tensors(self) -> dict[Half, Tensors]:
        """Tensors of every dtype, an empty one, a 0-dim one, odd sizes, and a name that is not ASCII."""
        rng, model = random.Random(1), dict[str, torch.Tensor]()
        for dtype in _DTYPES:
            shape = (5, 3) if dtype.itemsize > 1 else (7,)
            data = bytes(rng.randrange(2 if dtype is torch.bool else 256) for _ in range(dtype.itemsize * 15))
            flat = torch.frombuffer(bytearray(data), dtype=dtype)
            model[f"größe.{dtype_name(dtype)}"] = flat[: shape[0] * (shape[1] if len(shape) > 1 else 1)].reshape(shape)
        model["none"] = torch.empty(0, 4)
        model["scalar"] = torch.tensor(-0.0)
        model["large"] = torch.arange(300_000, dtype=torch.float32).reshape(300, 1000)
        state = {"state.large.exp_avg": torch.ones(300, 1000), "state.large.step": torch.tensor(3.0)}
        return {"model": model, "optim": state}

    def _description(self, shape: Shape = (300, 1000)) -> OptimDescription:
        values = (
            ("exp_avg", TENSOR, "state.large.exp_avg"),
            ("step", SCALAR_TENSOR, "state.large.step"),
            (("a", 1), SCALAR, 2**70),
            ("history", OPAQUE, {"x": torch.tensor([1.5, 2.5]), 3: None}),
        )
        return OptimDescription(
            groups=(GroupDescription((("lr", 1e-3), ("betas", (0.9, 0.999)), ("eps", 1e-8)), ("large",)),),
            other_keys={"loss_scale": 2.0},
            params={"large": ParamDescription(shape, values, has_state=True)},
            optimizer_class="Adam",
        )

    def _save(
        self, halves: Mapping[Half, Tensors], description: OptimDescription | None, *, most_nbytes: int = 1 << 40
    ) -> SavedSample:
        format = self.make_format()
        saved = save_as(format, self.make_store(format), halves, description, EXTRAS, most_nbytes=most_nbytes)
        self._case.assertEqual(saved.manifest, written(format).probe.manifest, "the last file is the manifest")
        return saved

    def _put(self, files: Mapping[str, bytes], manifest: str) -> Store:
        """Return the same files at a new place."""
        store = self.make_store(self.make_format())
        staging = store.begin(overwrite=False, durable=False)
        store_writer = store.join(staging.address, durable=False, who="rank 0")
        for name, data in files.items():
            if name != manifest:
                store_writer.put(name, data)
        staging.seal([], [store_writer.finish()], durable=False)
        staging.commit(manifest, files[manifest], durable=False)
        return store

    def _everything(self, store: Store) -> dict[str, Any]:
        """Everything that a reader returns, including elements."""
        with store.open() as opened:
            reader = self.make_format().open(opened, verify=True)
            index, values = reader.index, dict[str, Any](description=None)
            for half, tensors in (("model", index.weights), ("optim", index.optim_tensors)):
                for key, stored in tensors.items():
                    values[f"{half}: {key}"] = _elements_of(reader, stored)
            if index.optim is not None:
                values["description"] = description_of(index.optim.decoded(allow_pickle=False, records={}))
            for name in sorted(index.extras):
                values[f"extra: {name}"] = index.extras[name].decoded(allow_pickle=False)
            values["rest"] = (dict(index.aliases), index.facts.world_size, index.facts.step)
            reader.check_unchanged()
            return values

    # ------------------------------------------------------------------------------------------- promises

    def test_what_was_saved_is_read(self) -> None:
        """Everything is read as it was saved, bit by bit, from one file and from several."""
        halves, description = self._tensors(), self._description()
        for most_nbytes in (1 << 40, 1000):
            actual = self._everything(self._save(halves, description, most_nbytes=most_nbytes).store)
            wanted: dict[str, Any] = {
                f"{half}: {key}": t for half, tensors in halves.items() for key, t in tensors.items()
            }
            wanted |= {"extra: common": {"step": 7, "t": torch.ones(2)}, "description": description}
            wanted |= {f"extra: {rank_extra_name(0)}": [0], f"extra: {rank_extra_name(1)}": [1]}
            wanted["rest"] = ({"other": "large"}, NUM_RANKS, 70)
            self._case.assertEqual(sorted(actual), sorted(wanted))
            for name, value in wanted.items():
                self._case.assertTrue(_same(actual[name], value), f"{name}: {actual[name]!r:.200}, not {value!r:.200}")

    def test_weights_alone(self) -> None:
        """Without an optimizer there is no description."""
        store = self._save({"model": self._tensors()["model"]}, None).store
        with store.open() as opened:
            reader = self.make_format().open(opened, verify=True)
            self._case.assertIsNone(reader.index.optim)
            self._case.assertEqual(dict(reader.index.optim_tensors), {})

    def test_extents_have_every_element_once(self) -> None:
        """No two tensors share bytes, and the ranks of storage have all of a tensor together."""
        saved = self._save(self._tensors(), self._description(), most_nbytes=1000)
        taken: dict[str, list[tuple[int, int]]] = {}
        with saved.store.open() as opened:
            reader = self.make_format().open(opened, verify=True)
            for stored in (*reader.index.weights.values(), *reader.index.optim_tensors.values()):
                placement = stored.placement
                self._case.assertIsNone(placement.gap(), stored.key)
                numels = [placement.numel_on(rank) for rank in placement.ranks]
                self._case.assertEqual(sum(numels), placement.numel, stored.key)
                for rank, numel in zip(placement.ranks, numels, strict=True):
                    self._case.assertLess(rank, 0, f"{stored.key}: a rank of storage is below 0")
                    file, start = stored.place_on(rank)
                    taken.setdefault(file, []).append((start, start + numel * stored.itemsize))
        for file, ranges in taken.items():
            at = 0
            for start, stop in sorted(ranges):
                self._case.assertGreaterEqual(start, at, f"{file}: two tensors share bytes")
                at = stop

    def test_part_of_a_tensor(self) -> None:
        """A range with any beginning and end is read, without a byte around it."""
        halves = self._tensors()
        store = self._save(halves, self._description()).store
        with store.open() as opened:
            reader = self.make_format().open(opened, verify=True)
            file, start = reader.index.weights["large"].place_on(-1)
            wanted = bytes(bytes_of(halves["model"]["large"]))
            for first, stop in ((0, 1), (1, 2), (4095, 70_001), (len(wanted) - 1, len(wanted))):
                memory = bytearray(b"\xaa" * (stop - first + 2))
                reader.read({file: [Extent(start + first, memoryview(memory)[1:-1])]})
                self._case.assertEqual(bytes(memory), b"\xaa" + wanted[first:stop] + b"\xaa")

    def test_every_damage_is_refused(self) -> None:
        """A changed byte, a byte more or less, and a missing file raise a CheckpointError that names the file or the place."""
        small = {"model": {"w": torch.arange(70.0), "flag": torch.tensor([True, False])}, "optim": {}}
        for key in ("state.large.exp_avg", "state.large.step"):
            small["optim"][key] = torch.ones(2) if key.endswith("avg") else torch.tensor(1.0)
        saved = self._save(small, self._description((2,)), most_nbytes=100)  # type: ignore[arg-type]
        self._everything(self._put(saved.files, saved.manifest))
        for name, data in saved.files.items():
            cut = 9 if name == saved.manifest else 1  # the last bytes of a text may say nothing
            damaged = {"longer": data + b"\0", "shorter": data[:-cut], "missing": None}
            for at in {0, len(data) // 2, max(len(data) - 2, 0)} if data else ():
                damaged[f"byte {at}"] = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
            for what, other in damaged.items():
                with self._case.subTest(file=name, damage=what):
                    if (what == "shorter" and not data) or (what == "missing" and name == saved.manifest):
                        continue
                    files = {key: content for key, content in saved.files.items() if key != name}
                    store = self._put(files if other is None else files | {name: other}, saved.manifest)
                    with self._case.assertRaises(CheckpointError) as caught:
                        self._everything(store)
                    self._case.assertIn(store.where, str(caught.exception))

    def test_bools_are_0_or_1(self) -> None:
        """Bytes of bools other than 0 and 1 are refused, even with right checksums."""
        flags = torch.tensor([1, 2, 0], dtype=torch.uint8).view(torch.bool)
        saved = self._save({"model": {"flags": flags}}, None)
        with self._case.assertRaisesRegex(CheckpointError, "flags"):
            self._everything(saved.store)

    def test_what_is_unknown_is_not_recognised(self) -> None:
        """Files of another program are not recognised, and opening them raises a CheckpointError."""
        format = self.make_format()
        store = self._put({_FOREIGN: b"{}", "model.bin": b"1234"}, _FOREIGN)
        try:
            files = store.open()
        except CheckpointError:  # a store that finds a checkpoint by its manifest
            files = store.open_any()
        with files as opened:
            self._case.assertFalse(format.recognises(opened))
            self._case.assertEqual(format.sequence_in(opened), 0)
            with self._case.assertRaises(CheckpointError):
                format.open(opened, verify=True)

    def test_its_own_is_recognised(self) -> None:
        """A checkpoint with a damaged manifest is recognised, so that this format's reader reports the damage."""
        saved = self._save({"model": {"w": torch.ones(2)}}, None)
        damaged = {**saved.files, saved.manifest: saved.files[saved.manifest][:-9]}
        for store, sequence in ((saved.store, 5), (self._put(damaged, saved.manifest), None)):
            with store.open() as opened:
                self._case.assertTrue(self.make_format().recognises(opened))
                if sequence is not None:
                    self._case.assertEqual(self.make_format().sequence_in(opened), sequence)

    def test_two_saves_have_two_identities(self) -> None:
        """Different checkpoints have different identities, which ranks compare."""
        identities = []
        for _ in range(2):
            with self._save({"model": {"w": torch.ones(2)}}, None).store.open() as opened:
                identities.append([self.make_format().open(opened, verify=True).index.identity for _ in range(2)])
        self._case.assertEqual(identities[0][0], identities[0][1])
        self._case.assertNotEqual(identities[0][0], identities[1][0])

    def test_memory_while_reading(self) -> None:
        """A reader needs little memory besides the memory that it fills, also for a part of a large tensor."""
        big = torch.arange(_BIG_NBYTES // 4, dtype=torch.int32)
        store = self._save({"model": {"big": big}}, None).store
        for numel in (16_000, big.numel()):
            target = torch.empty(numel, dtype=torch.int32)
            memory = bytes_of(target)
            tracemalloc.start()
            try:
                with store.open() as opened:
                    reader = self.make_format().open(opened, verify=True)
                    file, start = reader.index.weights["big"].place_on(-1)
                    reader.read({file: [Extent(start, memory)]})
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            self._case.assertTrue(torch.equal(target, big[:numel]))
            self._case.assertLess(peak, _BIG_NBYTES // 2, "bytes at the peak")


def _elements_of(reader: Reader, stored: StoredTensor) -> torch.Tensor:
    """Return a whole tensor, joined from its elements on the ranks of storage."""
    whole = torch.empty(stored.placement.numel, dtype=dtype_named(stored.dtype))
    for rank in stored.placement.ranks:
        part = torch.empty(stored.placement.numel_on(rank), dtype=whole.dtype)
        file, start = stored.place_on(rank)
        reader.read({file: [Extent(start, bytes_of(part))]})
        shard = stored.placement.shard_of(rank)
        for block in stored.placement.blocks(shard) if shard is not None else ():
            index = tuple(slice(o, o + n) for o, n in zip(block.box.offsets, block.box.sizes, strict=True))
            elements = part[block.offset : block.offset + block.box.numel].view(block.box.sizes)
            whole.view(stored.shape)[index] = elements
    return whole.view(stored.shape)


def _same(actual: Any, wanted: Any) -> bool:
    """Return whether two values, and the tensors inside them, are equal bit by bit."""
    if isinstance(wanted, torch.Tensor):
        return (
            isinstance(actual, torch.Tensor)
            and (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
            and bytes(bytes_of(actual.contiguous())) == bytes(bytes_of(wanted.contiguous()))
        )
    if isinstance(wanted, Mapping):
        return actual.keys() == wanted.keys() and all(_same(actual[key], expected) for key, expected in wanted.items())
    if isinstance(wanted, (GroupDescription, OptimDescription, ParamDescription)):
        return type(actual) is type(wanted) and _same(vars(actual), vars(wanted))
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return len(actual) == len(wanted) and all(map(_same, actual, wanted))
    return type(actual) is type(wanted) and bool(actual == wanted)
