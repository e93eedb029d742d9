"""Checkpoints that are damaged, that lie, or that cannot be written: all ranks raise one CheckpointError, and nothing changes.

Lies are sealed: the checksums are made again, so that it is not they which find the lie. The files are edited with the
reader of tests/kit/checkpoint_format.py, which knows the format only from its description.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import tempfile
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from kit.cases import expand
from kit.checkpoint_damage import (
    HEADERS,
    LIES,
    MAKING,
    MANIFESTS,
    MOVING,
    OF_ANOTHER_MODEL,
    READING,
    WRITING,
    entries_of,
    failing,
    flip,
    nth_call,
    packed,
    renamed,
    rewrite,
    seal,
    sys_digits,
)
from kit.checkpoint_format import (
    MANIFEST,
    Buffered,
    Large,
    all_bytes,
    check_folder,
    extra,
    in_order,
    read_manifest,
    read_safetensors,
    read_sums,
    sums_of,
)
from kit.groups import Meeting
from kit.options import as_options, state_for
from kit.wrapping import (
    Differs,
    Trained,
    adam,
    check_refused,
    check_same,
    cpu,
    differences,
    error_text,
    in_fsdp2,
    local_of,
    sgd,
    snapshot,
)
from parameterized import parameterized
from torch.distributed.device_mesh import DeviceMesh

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

WORLD = 2
PATIENCE = 15.0  # seconds; a call that takes them has hung
LIMIT = 45.0  # for a run of ranks that does little
Error = tuple[str, str]

# ------------------------------------------------------------------------------------------- models


def trained(steps: int, wrapper: str = "FSDP2", model: str = "Buffered") -> Trained:
    """Parameters, optimizer and buffers are those of so many steps."""
    made = Trained(wrapper, adam, steps, Buffered) if model == "Buffered" else Trained(wrapper, sgd, steps, Large)
    for name, buffer in made.model.named_buffers():
        if name.endswith("count"):
            buffer.fill_(steps)
    return made


def contents(one: Trained) -> dict[str, Any]:
    """This rank's part of what a checkpoint restores."""
    saved = [in_order(one.optim.state[param]) for param in one.params]
    return {
        "parameters": [local_of(param).detach().clone() for param in one.params],
        "state": [{name: local_of(value).clone() for name, value in values.items()} for values in saved],
        "buffers": {name: buffer.clone() for name, buffer in one.model.named_buffers()},
    }


def everything(one: Trained) -> dict[str, Any]:
    """The values that a refused call must not change, with their identities."""
    buffers = dict(one.model.named_buffers())
    return snapshot(one) | {
        "buffers": {name: buffer.clone() for name, buffer in buffers.items()},
        "buffer identities": [id(buffer) for buffer in buffers.values()],
    }


@dataclasses.dataclass
class Outcome:
    """Of a call on one rank: its error, and what it changed."""

    error: Error
    changed: list[str]


def outcome_of(call: Callable[[], Any], *models: Trained) -> Outcome:
    return outcome_since([everything(one) for one in models], call, *models)


def outcome_since(before: Sequence[Any], call: Callable[[], Any], *models: Trained) -> Outcome:
    """The same, where the caller knows what was before."""
    error = error_text(call)
    changed = [line for one, was in zip(models, before, strict=True) for line in differences(everything(one), was)]
    return Outcome(error, changed)


# ------------------------------------------------------------------------------------------- good checkpoints


def save_good(path: Path, steps: int = 3, wrapper: str = "FSDP2", model: str = "Buffered", **options: Any) -> None:
    with cpu():
        one = trained(steps, wrapper, model)
        mine = {"rank": dist.get_rank(), "rng": torch.arange(5) + dist.get_rank()}
        fsdp_optim.save(
            path,
            one.model,
            one.optim,
            state=state_for(extra(), mine),
            **as_options(fsdp_optim.SaveOptions, **options),
        )


KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "split": {"max_file_size": 100},
    "large": {"model": "Large"},
    "unsummed": {"checksums": False},
}


@functools.cache
def good(kind: str) -> Path:
    """A checkpoint that nobody changes."""
    folder = Path(_root().name) / kind
    run_on_ranks(save_good, WORLD, folder, **KINDS[kind])
    return folder


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fsdp_optim_safety_")


@functools.cache
def good_contents(model: str, rank: int, world_size: int) -> dict[str, Any]:
    """The local tensors that a good checkpoint restores on this rank; they outlive the world that they were made in."""
    return contents(trained(3, model=model))


def load_both_ways(paths: Sequence[Path], right: Path, kind: str, verifies: Sequence[bool]) -> list[list[Outcome]]:
    """On one rank: what comes of loading each of these, with and without checksums; then a good one must load."""
    with cpu():
        model = KINDS[kind].get("model", "Buffered")
        target, found = trained(1, model=model), []
        before = [everything(target)]
        for path in paths:
            found.append([])
            for verify in verifies:
                call = functools.partial(
                    fsdp_optim.load,
                    path,
                    target.model,
                    target.optim,
                    options=fsdp_optim.LoadOptions(verify=verify, timeout=PATIENCE),
                )
                found[-1].append(outcome_since(before, call, target))
                if found[-1][-1].changed:
                    before = [everything(target)]
        fsdp_optim.load(right, target.model, target.optim, options=fsdp_optim.LoadOptions(timeout=PATIENCE))
        wanted = good_contents(model, dist.get_rank(), dist.get_world_size())
        check_same("loaded afterwards", contents(target), wanted)
        return found


class DamageTest(unittest.TestCase):
    """Has a copy of a good checkpoint to damage."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="fsdp_optim_safety_")
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def copy(self, kind: str = "whole", name: str = "damaged") -> Path:
        return Path(shutil.copytree(good(kind), self.root / name, symlinks=True))

    def check_refused(
        self, folder: Path, *words: str, kind: str = "whole", verifies: Sequence[bool] = (True, False)
    ) -> None:
        """All ranks refuse it alike, in words that have all of these; "a|b" is one of both."""
        self.check_all_refused({folder.name: (folder, words)}, kind, verifies)

    def check_all_refused(
        self,
        cases: Mapping[str, tuple[Path, Sequence[str]]],
        kind: str = "whole",
        verifies: Sequence[bool] = (True, False),
        or_state_error: Sequence[str] = (),
    ) -> None:
        """The same of many folders in one run of ranks. `or_state_error`: what may also be another model's checkpoint."""
        folders = [folder for folder, _ in cases.values()]
        by_rank = run_on_ranks(load_both_ways, WORLD, folders, good(kind), kind, verifies, timeout=LIMIT)
        for (what, (_, words)), *outcomes in zip(cases.items(), *by_rank, strict=True):
            for verify, ranks in zip(verifies, zip(*outcomes, strict=True), strict=True):
                with self.subTest(what, verify=verify):
                    check_outcomes(what, ranks, *words, or_state_error=what in or_state_error)


def check_outcomes(what: str, ranks: Sequence[Outcome], *words: str, or_state_error: bool = False) -> None:
    """Raise unless all ranks raised the same CheckpointError with all these words, and changed nothing."""
    state_error = or_state_error and ranks[0].error[0] == "StateError"
    check_refused(what, [outcome.error for outcome in ranks], "StateError" if state_error else "CheckpointError")
    text = ranks[0].error[1]
    lacking = [word for word in words if not state_error and not any(one in text for one in word.split("|"))]
    if lacking:
        raise Differs(f"{what}: {lacking} not in {text!r}")
    changed = {rank: outcome.changed for rank, outcome in enumerate(ranks) if outcome.changed}
    if changed:
        raise Differs(f"{what}: refused ({text!r}), but changed: {changed}")


# ------------------------------------------------------------------------------------------- flipped bits


def places_in(path: Path) -> dict[str, int]:
    """Where to flip a bit in a safetensors file."""
    file = read_safetensors(path)
    data, length = len(file.header), len(file.header) - 8
    header = {"the header's length": 0, "the header's first byte": 8, "the header's middle": 8 + length // 2}
    places = {"the first": data, "the middle": data + len(file.data) // 2, "the last": data + len(file.data) - 1}
    return header | {f"{name} byte of data": place for name, place in places.items()}


SAVED_FILES = ("model.safetensors", "optim.safetensors", "extra/common.safetensors", "extra/rank-00001.safetensors")
FLIPS = ("the header's length", "the header's first byte", "the header's middle")
FLIPS += tuple(f"the {place} byte of data" for place in ("first", "middle", "last"))


class FlippedBitTest(DamageTest):
    @parameterized.expand([(name,) for name in SAVED_FILES])
    def test_a_file(self, name: str) -> None:
        cases = {}
        for place in FLIPS:
            folder = self.copy(name=place)
            flip(folder / name, places_in(folder / name)[place], bit=3)
            tensors = "|".join(read_safetensors(good("whole") / name).tensors)
            words = (tensors,) if "data" in place and "extra" not in name else ()
            cases[place] = (folder, (name, *words))
        self.check_all_refused(cases, verifies=[True])

    @expand(soon=["last"], later=["first", "middle"])
    def test_one_segment_of_several(self, place: str) -> None:
        """Which only one rank reads, or both."""
        folder = self.copy("large")
        for name in ("model.safetensors", "optim.safetensors"):
            position = places_in(folder / name)[f"the {place} byte of data"]
            flip(folder / name, position, bit=7)
            file = read_safetensors(good("large") / name)
            offset = position - len(file.header)
            ends = [end for end, _ in read_sums(sums_of(good("large") / name))]
            begin, end = max([0, *(e for e in ends if e <= offset)]), min(e for e in ends if e > offset)
            near = [tensor for tensor, (first, last) in file.places.items() if first < end and last > begin]
            self.check_refused(folder, name, "|".join(near), kind="large", verifies=[True])
            shutil.copyfile(good("large") / name, folder / name)

    def test_a_table_of_checksums(self) -> None:
        cases = {}
        for what, position in (("magic", 0), ("end of segment", 8), ("hash", 16), ("last byte", -1)):
            for name in ("model.safetensors", "optim.safetensors"):
                folder = self.copy(name=f"{what} {name}")
                flip(sums_of(folder / name), position, bit=5)
                cases[folder.name] = (folder, [name])
        self.check_all_refused(cases, verifies=[True])

    def test_the_manifest(self) -> None:
        size = (good("whole") / MANIFEST).stat().st_size
        cases = {}
        for position in (0, size // 3, size // 2, size - 1):
            folder = self.copy(name=f"at_{position}")
            flip(folder / MANIFEST, position)
            cases[folder.name] = (folder, [MANIFEST])
        self.check_all_refused(cases, verifies=[True])

    @expand(soon=["whole"], later=["split"])
    def test_anywhere(self, kind: str) -> None:
        """Bits at random of all files that there are."""
        seed = 20251121
        rng = random.Random(seed)  # `make soak` has fresh ones
        files = [name for name, data in all_bytes(good(kind)).items() if data and name != "owner.lock"]
        cases = [
            (name, rng.randrange(1 << 62), rng.randrange(8)) for name in files for _ in range(24 // len(files) + 1)
        ]
        folders = []
        for number, (name, place, bit) in enumerate(cases):
            folders.append(self.copy(kind, f"{number:03}"))
            flip(folders[-1] / name, place % (folders[-1] / name).stat().st_size, bit)
        wrong = []
        by_rank = run_on_ranks(load_both_ways, WORLD, folders, good(kind), kind, [True])
        for (name, place, bit), *outcomes in zip(cases, *by_rank, strict=True):
            try:
                check_outcomes(f"{name}, seed {seed}", [outcome for (outcome,) in outcomes], Path(name).name)
            except Differs as error:
                wrong.append(f"{name}, byte {place % (good(kind) / name).stat().st_size}, bit {bit}: {error}")
        if wrong:
            raise Differs(f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong))


def load_unverified(path: Path, right: Path, name: str) -> list[list[str]]:
    """The differences from the right checkpoint, of the parameters and state, without checksums and with."""
    found = []
    for folder in (path, right):
        target = trained(1)
        fsdp_optim.load(
            folder, target.model, target.optim, options=fsdp_optim.LoadOptions(verify=False, timeout=PATIENCE)
        )
        found.append(contents(target))
    return [list(differences(found[0][what], found[1][what], what)) for what in ("parameters", "state", "buffers")]


class VerifyTest(DamageTest):
    """`verify=False` turns checksums off: what is there is loaded."""

    @parameterized.expand([("model.safetensors", 0), ("optim.safetensors", 1)])
    def test_a_flipped_bit_is_loaded(self, name: str, what: int) -> None:
        folder = self.copy()
        tensor = ("stem.weight", "state.stem.weight.exp_avg")[what]
        file = read_safetensors(folder / name)
        flip(folder / name, len(file.header) + file.places[tensor][0])
        by_rank = run_on_ranks(load_unverified, WORLD, folder, good("whole"), name)
        for rank, found in enumerate(by_rank):
            check_same(
                "parts that differ", [bool(lines) for lines in found], [rank == 0 and what == i for i in range(3)]
            )
        (line,) = by_rank[0][what]
        self.assertIn("1 of 20 elements, at [0]", line)

    def test_a_checkpoint_without_checksums(self) -> None:
        check_same("tables", list(good("unsummed").rglob("*.sums")), [])
        folder = self.copy("unsummed")
        run_on_ranks(load_both_ways, WORLD, [], folder, "unsummed", [True])
        (folder / "model.safetensors").unlink()
        self.check_refused(folder, "model.safetensors", kind="unsummed")


# ------------------------------------------------------------------------------------------- sizes


def cut_by_one(path: Path) -> None:
    """JSON by one that counts: it ends in a line break."""
    os.truncate(path, len(path.read_bytes().rstrip(b"\n")) - 1 if path.suffix == ".json" else path.stat().st_size - 1)


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_to_seven_bytes(path: Path) -> None:
    os.truncate(path, 7)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def one_byte_more(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def much_more(path: Path) -> None:
    os.truncate(path, path.stat().st_size + (1 << 40))


def missing(path: Path) -> None:
    path.unlink()


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


SIZES = (
    cut_by_one,
    cut_in_half,
    cut_to_seven_bytes,
    emptied,
    one_byte_more,
    much_more,
    missing,
    a_folder,
    zeros,
)
EVERY_FILE = [*SAVED_FILES, "model.safetensors.sums", "optim.safetensors.sums", MANIFEST]


class WrongSizeTest(DamageTest):
    @parameterized.expand([(name,) for name in EVERY_FILE])
    def test_a_file(self, name: str) -> None:
        damages = [one for one in SIZES if one is not much_more or name in ("model.safetensors", MANIFEST)]
        # without checksums, nobody needs the tables
        by_checksum = [one for one in damages if name.endswith(".sums") or one is zeros]
        for some, verifies in (
            (by_checksum, [True]),
            ([one for one in damages if one not in by_checksum], [True, False]),
        ):
            cases = {}
            for damage in some:
                folder = self.copy(name=damage.__name__)
                damage(folder / name)
                cases[damage.__name__] = (folder, [Path(name).name])
            if cases:
                self.check_all_refused(cases, verifies=verifies)

    @parameterized.expand([("model.safetensors",), ("extra/common.safetensors",), (MANIFEST,)])
    def test_a_pipe(self, name: str) -> None:
        """Opening one waits for a writer, that never comes."""
        folder = self.copy()
        (folder / name).unlink()
        os.mkfifo(folder / name)
        self.check_refused(folder, Path(name).name)

    def test_parts_and_index(self) -> None:
        names = sorted(path.name for path in good("split").glob("optim*.safetensors"))
        cases = {}
        for name in (names[0], names[-1], "optim.safetensors.index.json"):
            for damage in (cut_by_one, emptied, missing):
                folder = self.copy("split", f"{damage.__name__} {name}")
                damage(folder / name)
                cases[folder.name] = (folder, [name])
        self.check_all_refused(cases, "split")

    def test_what_is_no_checkpoint(self) -> None:
        (self.root / "empty").mkdir()
        (self.root / "file").write_bytes(b"{}")
        names = ("empty", "file", "nothing", "file/below")
        self.check_all_refused({name: (self.root / name, [str(self.root / name)]) for name in names})


# ------------------------------------------------------------------------------------------- lies


VICTIMS = {"model.safetensors": "stem.weight", "optim.safetensors": "state.stem.weight.exp_avg"}


class LyingHeaderTest(DamageTest):
    def test_rewriting_alone_does_no_harm(self) -> None:
        """Otherwise the tests of this class would see their own mistakes refused."""
        folder = self.copy()
        for name in SAVED_FILES:
            rewrite(folder / name, packed(entries_of(folder / name)))
        check_folder(folder)
        if (folder / MANIFEST).read_bytes() == (good("whole") / MANIFEST).read_bytes():
            raise Differs("nothing was written anew")
        run_on_ranks(load_both_ways, WORLD, [], folder, "whole", [True])

    @expand(soon=[("model.safetensors", 1), ("optim.safetensors", 4)], later=[("optim.safetensors", 1)])
    def test_about_a_tensor(self, name: str, every: int) -> None:
        """With every n-th lie, n being `every`."""
        cases, victim = {}, VICTIMS[name]
        spans = read_safetensors(good("whole") / name).places
        begin, end = spans[victim]
        neighbours = [
            n for n, (b, e) in spans.items() if e == begin or b == end
        ]  # a hole, or an overlap, has two sides
        for number, (lie, edit) in enumerate(list(LIES.items())[::every]):
            folder = self.copy(name=f"{number}")
            entries = entries_of(folder / name)
            header = edit(entries, victim)
            rewrite(folder / name, packed(entries if header is None else header))
            named = [*spans] if lie == "overlap" else [victim, *neighbours]
            cases[lie] = (folder, [name] if lie.endswith("twice") else [name, "|".join(named)])
        self.check_all_refused(cases)

    @parameterized.expand([(name,) for name in VICTIMS])
    def test_a_hole_between_tensors_with_data_in_it(self, name: str) -> None:
        folder = self.copy()
        entries, file = entries_of(folder / name), read_safetensors(folder / name)
        last = list(file.places)[-1]
        begin, end = file.places[last]
        entries[last]["data_offsets"] = [begin + 8, end + 8]
        rewrite(folder / name, packed(entries), file.data[:begin] + bytes(8) + file.data[begin:])
        self.check_refused(folder, name, last)

    @parameterized.expand([(name,) for name in VICTIMS])
    def test_data_that_no_tensor_has(self, name: str) -> None:
        folder = self.copy()
        file = read_safetensors(folder / name)
        rewrite(folder / name, packed(entries_of(folder / name)), file.data + bytes(8))
        self.check_refused(folder, name)

    def test_another_shape_or_dtype_of_the_same_size(self) -> None:
        """That is a checkpoint of another model: the error may say that instead."""
        for key, value in (("shape", [5, 7]), ("dtype", "I32")):
            folder, name = self.copy(name=key), "model.safetensors"
            entries = entries_of(folder / name)
            entries["stem.weight"][key] = value
            rewrite(folder / name, packed(entries))
            by_rank = run_on_ranks(load_both_ways, WORLD, [folder], good("whole"), "whole", [True, False])
            for way in (0, 1):
                errors = [outcomes[0][way].error for outcomes in by_rank]
                kind = errors[0][0] if errors[0][0] == "StateError" else "CheckpointError"
                check_refused(f"another {key}", errors, kind, "stem.weight")
                check_same("changed", [outcomes[0][way].changed for outcomes in by_rank], [[], []])


class WrongHeaderTest(DamageTest):
    @expand(
        soon=[("optim.safetensors", 1), ("extra/rank-00001.safetensors", 4)],
        later=[("extra/rank-00001.safetensors", 1)],
    )
    def test_a_header(self, name: str, every: int) -> None:
        """With every n-th wrong header, n being `every`."""
        cases = {}
        for number, (what, edit) in enumerate(list(HEADERS.items())[::every]):
            folder = self.copy(name=f"{number}")
            rewrite(folder / name, edit(read_safetensors(folder / name).header))
            cases[what] = (folder, [Path(name).name])
        self.check_all_refused(cases)

    def test_a_header_of_half_a_gigabyte(self) -> None:
        """It is not read: a sparse file makes one of any size."""
        folder, name, size = self.copy(), "model.safetensors", 1 << 29
        with open(folder / name, "r+b") as file:
            file.write(struct.pack("<Q", size - 16))
            file.truncate(size)
        checkpoint = read_manifest(folder)
        checkpoint["files"][name]["size"] = size
        seal(folder, checkpoint)
        self.check_refused(folder, name)

    def test_a_table_that_lies(self) -> None:
        """The table's own checksum is right, but the table has a segment beyond the end, or ends early, or goes back."""
        tables: dict[str, Callable[[list[tuple[int, int]], int], list[tuple[int, int]]]] = {
            "none": lambda pairs, size: [],
            "beyond": lambda pairs, size: [(size + 4096, pairs[0][1])],
            "2**63": lambda pairs, size: [(2**63, pairs[0][1])],
            "early": lambda pairs, size: [(size - 4, pairs[0][1])],
            "back": lambda pairs, size: [*pairs, (4, 0), (size, 0)],
            "nothing": lambda pairs, size: [*pairs, *pairs],
        }
        cases = {}
        for what, edit in tables.items():
            folder, name = self.copy(name=what), "model.safetensors"
            path, data = sums_of(folder / name), read_safetensors(folder / name).data
            pairs = edit([(len(data), xxhash.xxh3_64_intdigest(data))], len(data))
            path.write_bytes(b"FSOSUMS1" + b"".join(struct.pack("<QQ", *pair) for pair in pairs))
            checkpoint = read_manifest(folder)
            checkpoint["files"][name]["sums_xxh3_64"] = xxhash.xxh3_64_hexdigest(path.read_bytes())
            seal(folder, checkpoint)
            cases[what] = (folder, [name])
        self.check_all_refused(cases, verifies=[True])


# ------------------------------------------------------------------------------------------- links, names, manifests


class OutsideTest(DamageTest):
    """Only files in the folder are read, whatever the folder's files say."""

    def test_a_symlink(self) -> None:
        cases: dict[bool, Any] = {True: {}, False: {}}
        for number, name in enumerate((*EVERY_FILE, "extra")):
            folder, outside = self.copy(name=f"{number}"), self.root / f"elsewhere_{number}"
            (folder / name).rename(outside)
            (folder / name).symlink_to(outside)
            cases[name.endswith(".sums")][name] = (folder, [Path(name).name])
        self.check_all_refused(cases[False])
        self.check_all_refused(cases[True], verifies=[True])

    def test_a_symlink_to_a_file_inside(self) -> None:
        folder = self.copy()
        (folder / "model.safetensors").rename(folder / "weights")
        (folder / "model.safetensors").symlink_to("weights")
        self.check_refused(folder, "model.safetensors")

    def test_a_symlink_to_nothing_and_to_itself(self) -> None:
        for target in ("nothing", "model.safetensors"):
            folder = self.copy(name=target)
            (folder / "model.safetensors").unlink()
            (folder / "model.safetensors").symlink_to(target)
            self.check_refused(folder, "model.safetensors")

    def test_a_name_in_the_manifest(self) -> None:
        was, cases = "optim.safetensors", {}
        names = {
            "above": f"../other/{was}",
            "absolute": str(self.root / "other" / was),
            "around": f"extra/../{was}",
            "inside": f"./{was}",
            "empty": "",
            "dot": "..",
            "NUL": f"{was}\0",
            "long": "a" * 100_000,
        }
        self.copy(name="other")  # what is named is there, and good
        for what, name in names.items():
            folder = self.copy(name=what)
            seal(folder, renamed(read_manifest(folder), was, name))
            cases[what] = (folder, [f"{MANIFEST}|the manifest"])
        self.check_all_refused(cases)

    def test_an_index(self) -> None:
        name, victim, cases = "model.safetensors.index.json", "stem.weight", {}
        index = json.loads((good("split") / name).read_bytes())
        files = index["weight_map"]
        self.copy("split", "other")
        others = {
            "above": f"../other/{files[victim]}",
            "absolute": str(self.root / "other" / files[victim]),
            "missing file": files[victim].replace("-of-", "-of-9"),
            "other file": next(other for other in files.values() if other != files[victim]),
        }
        texts = {what: json.dumps(index | {"weight_map": files | {victim: other}}) for what, other in others.items()}
        texts |= {"a list": "[]", "no map": '{"metadata": {}}', "deep": "[" * 200_000}
        for what, text in texts.items():
            folder = self.copy("split", what)
            (folder / name).write_text(text)
            cases[what] = (folder, [name])
        self.check_all_refused(cases, "split")


class ManifestTest(DamageTest):
    def test_sealing_alone_does_no_harm(self) -> None:
        folder = self.copy()
        seal(folder, read_manifest(folder))
        run_on_ranks(load_both_ways, WORLD, [], folder, "whole", [True])

    def test_a_newer_version_is_refused_by_name(self) -> None:
        cases = {}
        for version in (4, 7, 2**63, 10**30):
            folder = self.copy(name=f"{version}")
            seal(folder, read_manifest(folder) | {"version": version, "files": {}})
            cases[str(version)] = (folder, [MANIFEST, "version", str(version), "fsdp_optim"])
        self.check_all_refused(cases)

    def test_a_newer_version_whose_checksum_this_one_does_not_know(self) -> None:
        folder = self.copy()
        (folder / MANIFEST).write_text(
            json.dumps({"checksum": "other", "checkpoint": {"format": "fsdp_optim", "version": 4}})
        )
        self.check_refused(folder, MANIFEST, verifies=[True])

    def test_a_sealed_manifest(self) -> None:
        cases: dict[bool, Any] = {True: {}, False: {}}
        for number, (what, edit) in enumerate(MANIFESTS.items()):
            folder = self.copy(name=f"{number}")
            limit = sys_digits(0)
            try:
                seal(folder, edit(read_manifest(folder)))
            finally:
                sys_digits(limit)
            cases["hash" in what][what] = (folder, [str(folder)])
        self.check_all_refused(cases[False], or_state_error=OF_ANOTHER_MODEL)
        self.check_all_refused(cases[True], verifies=[True])

    def test_other_bytes(self) -> None:
        texts = {
            "deep lists": b"[" * 200_000,
            "deep, closed": b'{"checksum": "", "checkpoint": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "deep dicts": b'{"checkpoint": ' * 100_000 + b"1" + b"}" * 100_000,
            "digits": b'{"checksum": "", "checkpoint": {"version": ' + b"9" * 100_000 + b"}}",
            "not UTF-8": b'{"checksum": "\xff", "checkpoint": {}}',
            "UTF-16": '{"checksum": "", "checkpoint": {}}'.encode("utf-16"),
            "nothing": b"",
            "a number": b"7",
            "no checksum": b'{"checkpoint": {"format": "fsdp_optim", "version": 1}}',
            "checksum of numbers": b'{"checksum": 7, "checkpoint": {"format": "fsdp_optim", "version": 1}}',
        }
        cases = {}
        for what, text in texts.items():
            folder = self.copy(name=what)
            (folder / MANIFEST).write_bytes(text)
            cases[what] = (folder, [MANIFEST])
        self.check_all_refused(cases)

    def test_a_manifest_of_half_a_gigabyte(self) -> None:
        folder = self.copy()
        os.truncate(folder / MANIFEST, 1 << 29)
        self.check_refused(folder, MANIFEST)

    def test_a_key_twice(self) -> None:
        """Readers that take the first one and readers that take the last one would see two checkpoints."""
        folder = self.copy()
        text = (folder / MANIFEST).read_text()
        (folder / MANIFEST).write_text(text.replace("{", '{"checkpoint": {"format": "fsdp_optim", "version": 1}, ', 1))
        self.check_refused(folder, MANIFEST)


# ------------------------------------------------------------------------------------------- reading that fails


def reading_fails(folder: Path) -> list[tuple[str, Outcome]]:
    """Every call that reads fails once, on each rank in turn."""
    target, meeting, found = trained(1), Meeting(), []
    for rank in range(WORLD):
        for nth in (*range(6), *range(6, 200, 9)):
            functions = READING if rank == dist.get_rank() else []
            with nth_call(functions, nth, failing(errno.EIO)) as calls:
                outcome = outcome_of(
                    lambda: fsdp_optim.load(
                        folder, target.model, target.optim, options=fsdp_optim.LoadOptions(timeout=PATIENCE)
                    ),
                    target,
                )
            if not meeting.tell(calls.reached)[rank]:
                break
            found.append((f"call {nth} on rank {rank}", outcome))
    fsdp_optim.load(folder, target.model, target.optim, options=fsdp_optim.LoadOptions(timeout=PATIENCE))
    check_same("loaded afterwards", contents(target), contents(trained(3)))
    return found


class ReadingFailsTest(unittest.TestCase):
    def test_on_each_rank_in_turn(self) -> None:
        by_rank = run_on_ranks(reading_fails, WORLD, good("whole"))
        if len({what.split()[-1] for what, _ in by_rank[0]}) != WORLD or len(by_rank[0]) < 4 * WORLD:
            raise Differs(f"hardly anything failed: {[what for what, _ in by_rank[0]]}")
        for cases in zip(*by_rank, strict=True):
            check_outcomes(cases[0][0], [outcome for _, outcome in cases], os.strerror(errno.EIO))


# ------------------------------------------------------------------------------------------- saving that fails


class Saver:
    """Saves to one path again and again, and sees what came of it. The same on all ranks."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.options = path, options
        self.model, self.target = trained(3), trained(1)
        self.meeting = Meeting()
        self.number = 0
        self.found: list[str] = []
        self.tried: list[str] = []
        self.save(overwrite=False)
        self.complete = 0

    def save(self, overwrite: bool = True) -> None:
        fsdp_optim.save(
            self.path,
            self.model.model,
            self.model.optim,
            state={"number": self.number},
            overwrite=overwrite,
            **as_options(fsdp_optim.SaveOptions, **self.options, timeout=PATIENCE),
        )

    def attempt(self) -> Outcome:
        """One save over the old one, of other values, on this rank."""
        self.number += 1
        with torch.no_grad():
            for param in self.model.params:
                local_of(param).fill_(self.number)
        return outcome_of(self.save, self.model)

    def probe(self, what: str, mine: Outcome, *words: str, must_fail: bool = True) -> list[Outcome]:
        """What is wrong is noted. Unless it must fail, it may also have succeeded, or failed after the new one stood."""
        outcomes = self.meeting.tell(mine)
        self.tried.append(what)
        try:
            if must_fail or any(outcome.error[0] for outcome in outcomes):
                check_outcomes(what, outcomes, *words)
            numbers = self.meeting.tell(self.number_there())
            allowed = {self.complete}
            if not must_fail:
                allowed = {self.complete, self.number} if outcomes[0].error[0] else {self.number}
            if len(set(numbers)) != 1 or numbers[0] not in allowed:
                raise Differs(f"{what}: {outcomes[0].error}: the path then has save {numbers}, not {allowed}")
            self.complete = numbers[0]
        except Differs as error:
            self.found.append(str(error))
        return outcomes

    def judge_success(self, what: str, mine: Outcome) -> None:
        """Nothing came in the way of this one."""
        errors = self.meeting.tell(mine.error)
        if any(kind for kind, _ in errors):
            self.found.append(f"{what}: {errors}")
        else:
            self.complete = self.number

    def number_there(self) -> Any:
        """Which save the path has, all of it; or what is wrong."""
        try:
            restored = fsdp_optim.load(
                self.path, self.target.model, self.target.optim, options=fsdp_optim.LoadOptions(timeout=PATIENCE)
            )
            number = restored.state["number"]
            wanted = None if number == 0 else float(number)
            values = {float(v) for param in self.target.params for v in local_of(param).detach().flatten()}
            if wanted is not None and values - {wanted}:
                return f"save {number} with values of {sorted(values)[:5]}"
            return number
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def finish(self) -> tuple[list[str], list[str]]:
        """Now nothing fails: the next save works, and no leftover is there. (tried, wrong)."""
        mine = self.attempt()
        errors = self.meeting.tell(mine.error)
        if any(kind for kind, _ in errors):
            self.found.append(f"afterwards: {errors}")
        elif self.number_there() != self.number:
            self.found.append(f"afterwards: {self.number_there()}, not {self.number}")
        self.meeting.tell(0)
        names = sorted(path.name for path in self.path.parent.iterdir() if path.name.startswith(self.path.name))
        if names != [self.path.name]:
            self.found.append(f"leftovers: {names}")
        return self.tried, self.found


def writing_fails(root: Path, group: str, number: int) -> tuple[list[str], list[str]]:
    """Every call of some kind fails once, on each rank in turn."""
    functions = {"writing": WRITING, "making": MAKING, "moving": MOVING}[group]
    saver = Saver(root / "step")
    for rank in range(WORLD):
        for nth in (*range(6), *range(6, 60, 9)):
            mine = functions if rank == dist.get_rank() else []
            with nth_call(mine, nth, failing(number)) as calls:
                outcome = saver.attempt()
            if not saver.meeting.tell(calls.reached)[rank]:
                saver.judge_success(f"nothing failed on rank {rank}", outcome)
                break
            what = f"call {nth} on rank {rank}"
            saver.probe(what, outcome, os.strerror(number), must_fail=group == "writing")
            if len(saver.found) > 5:
                return saver.tried, saver.found
    return saver.finish()


def files_may_not_grow(root: Path, in_background: bool) -> tuple[list[str], list[str]]:
    """The system itself lets one rank write no byte behind the first ones of a file."""
    saver = Saver(root / "step")
    if in_background:

        def save(overwrite: bool = True) -> None:
            handle = fsdp_optim.async_save(
                saver.path,
                saver.model.model,
                saver.model.optim,
                state={"number": saver.number},
                overwrite=overwrite,
                options=fsdp_optim.SaveOptions(timeout=PATIENCE),
            )
            handle.wait(PATIENCE)

        saver.save = save  # type: ignore[method-assign]
    for rank in range(WORLD):
        for most in (0, 9, 200):
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            if dist.get_rank() == rank:
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
            try:
                outcome = saver.attempt()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            saver.probe(f"{most} bytes on rank {rank}", outcome, os.strerror(errno.EFBIG))
    return saver.finish()


PAGE = 4096


def filled_up(root: Path) -> tuple[list[str], list[str]]:
    """A small disk that is full, and has a page more each time, until a save fits."""
    saver = Saver(root / "step")
    filler = root / "filler"
    for pages in (*range(8), *range(8, 400, 5)):
        if dist.get_rank() == 0:
            filler.unlink(missing_ok=True)
            for leftover in root.glob("step.*"):
                shutil.rmtree(leftover)
            free = os.statvfs(root).f_bavail
            filler.write_bytes(bytes(max(0, free - pages) * PAGE))
        saver.meeting.tell(0)
        outcome = saver.attempt()
        if not any(kind for kind, _ in saver.meeting.tell(outcome.error)):
            saver.judge_success(f"{pages} pages", outcome)
            break
        saver.probe(f"{pages} pages", outcome, os.strerror(errno.ENOSPC))
    else:
        saver.found.append("no save fitted")
    saver.meeting.tell(0)
    if dist.get_rank() == 0:
        filler.unlink()
    saver.meeting.tell(0)
    return saver.finish()


def vanishing(root: Path, what: str) -> tuple[list[str], list[str]]:
    """The folder that is written to is removed in the middle, by each rank in turn."""
    saver = Saver(root / "step")

    def vanish() -> None:
        saving = list(root.glob("step.saving-*"))
        for folder in [root] if saving and what == "all" else saving:
            while folder.exists():  # another rank may make a file in it just then
                shutil.rmtree(folder, ignore_errors=True)
            gone.append(folder)

    for rank in range(WORLD):
        for nth in (0, 1, 2, 5, 9, 14):
            gone: list[Path] = []
            functions = [*WRITING, *MAKING] if rank == dist.get_rank() else []
            with nth_call(functions, nth, vanish):
                outcome = saver.attempt()
            if not saver.meeting.tell(bool(gone))[rank]:
                saver.judge_success(f"nothing vanished at call {nth} of rank {rank}", outcome)
                continue
            if what == "saving":
                saver.probe(f"at call {nth} of rank {rank}", outcome, str(saver.path))
            else:
                saver.tried.append(f"at call {nth} of rank {rank}")
                try:
                    check_outcomes(saver.tried[-1], saver.meeting.tell(outcome), str(saver.path))
                except Differs as error:
                    saver.found.append(str(error))
                saver.meeting.tell(0)
                if dist.get_rank() == 0:
                    shutil.rmtree(root, ignore_errors=True)
                    root.mkdir()
                saver.meeting.tell(0)
                saver.number = 0
                saver.save()
                saver.complete = 0
    return saver.finish()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A tmpfs; gives what mounts it again with other options."""

    def mount(options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise unittest.SkipTest(f"mounting is not permitted here: {done.stderr.strip()}")

    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        raise unittest.SkipTest("mounting is not permitted here")
    mount(f"size={size}")
    try:
        yield lambda option: mount(f"remount,{option},size={size}")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def save_errors(path: Path, overwrite: bool = False) -> tuple[Outcome, Error]:
    """Of saving there, and of loading what is there."""
    with cpu():
        one, target = trained(2), trained(1)
        saved = outcome_of(
            lambda: fsdp_optim.save(
                path, one.model, one.optim, overwrite=overwrite, options=fsdp_optim.SaveOptions(timeout=PATIENCE)
            ),
            one,
        )
        return saved, error_text(
            lambda: fsdp_optim.load(path, target.model, target.optim, options=fsdp_optim.LoadOptions(timeout=PATIENCE))
        )


class SavingFailsTest(DamageTest):
    def check_tried(self, found: list[tuple[list[str], list[str]]], at_least: int) -> None:
        for rank, (tried, wrong) in enumerate(found):
            if wrong:
                raise Differs(f"rank {rank}, {len(wrong)} of {len(tried)}:\n" + "\n".join(wrong))
        tried = found[0][0]
        if len(tried) < at_least:
            raise Differs(f"only {len(tried)} failures were tried: {tried}")

    @parameterized.expand([("writing", errno.ENOSPC, 4), ("making", errno.EACCES, 4), ("moving", errno.EROFS, 2)])
    def test_each_call_on_each_rank_in_turn(self, group: str, number: int, at_least: int) -> None:
        self.check_tried(run_on_ranks(writing_fails, WORLD, self.root, group, number), at_least)

    @parameterized.expand([("save", False), ("async_save", True)])
    def test_files_may_not_grow_on_each_rank_in_turn(self, _: str, in_background: bool) -> None:
        self.check_tried(run_on_ranks(files_may_not_grow, WORLD, self.root, in_background), 3 * WORLD)

    def test_a_full_disk(self) -> None:
        with small_disk(self.root / "disk", "1m"):
            self.check_tried(run_on_ranks(filled_up, WORLD, self.root / "disk"), 5)

    @parameterized.expand([("saving",), ("all",)])
    def test_a_folder_vanishes(self, what: str) -> None:
        root = self.root / "run"
        root.mkdir()
        self.check_tried(run_on_ranks(vanishing, WORLD, root, what), WORLD + 1)

    def test_a_read_only_disk(self) -> None:
        with small_disk(self.root / "disk", "1m") as remount:
            folder = self.root / "disk" / "step"
            run_on_ranks(save_good, WORLD, folder)
            was = all_bytes(folder)
            remount("ro")
            for path, overwrite in ((folder, True), (self.root / "disk" / "new", False)):
                found = run_on_ranks(save_errors, WORLD, path, overwrite)
                check_outcomes(path.name, [saved for saved, _ in found], os.strerror(errno.EROFS), str(path))
            check_same("the old one", all_bytes(folder), was)
            run_on_ranks(load_both_ways, WORLD, [], folder, "whole", [True])  # reading writes nothing

    def test_a_file_where_a_folder_should_be(self) -> None:
        (self.root / "file").write_bytes(b"mine")
        for name in ("file", "file/step", "file/run/step"):
            found = run_on_ranks(save_errors, WORLD, self.root / name)
            check_outcomes(name, [saved for saved, _ in found], str(self.root / "file"))
        check_same("the file", all_bytes(self.root), {"file": b"mine"})
        check_same("what is there", [path.name for path in self.root.iterdir()], ["file"])

    def test_an_immutable_folder(self) -> None:
        folder = self.root / "run"
        folder.mkdir()
        if shutil.which("chattr") is None or subprocess.run(["chattr", "+i", str(folder)], check=False).returncode:
            self.skipTest("chattr +i does nothing here")
        try:
            found = run_on_ranks(save_errors, WORLD, folder / "step")
        finally:
            subprocess.run(["chattr", "-i", str(folder)], check=True)
        check_outcomes("immutable", [saved for saved, _ in found], os.strerror(errno.EPERM), str(folder))


# ------------------------------------------------------------------------------------------- over what is there


class OverwriteTest(DamageTest):
    def test_only_on_request(self) -> None:
        folder = self.copy()
        was = all_bytes(folder)
        found = run_on_ranks(save_errors, WORLD, folder)
        check_outcomes("without", [saved for saved, _ in found], str(folder), "overwrite=True")
        check_same("the old one", all_bytes(folder), was)
        check_same("what is there", [path.name for path in self.root.iterdir()], ["damaged"])
        found = run_on_ranks(save_errors, WORLD, folder, True)
        check_same(
            "errors", [(saved.error, saved.changed, loaded) for saved, loaded in found], [(("", ""), [], ("", ""))] * 2
        )
        check_folder(folder)
        if all_bytes(folder) == was:
            raise Differs("it was not overwritten")
        check_same("what is there", [path.name for path in self.root.iterdir()], ["damaged"])

    def test_a_leftover_is_removed_and_a_save_that_runs_is_not(self) -> None:
        folder = self.copy(name="step")
        running, dead = (self.root / f"step.saving-{token}" for token in ("0123456789abcdef", "fedcba9876543210"))
        others = [self.root / name for name in ("step.txt", "step.saving", "step.saving-mine", "other")]
        for leftover in (running, dead):
            leftover.mkdir()
            (leftover / "owner.lock").touch()
            (leftover / "model.safetensors").write_bytes(b"half")
        for other in others:
            other.mkdir()
            (other / "file").write_bytes(b"mine")
        with open(running / "owner.lock", "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = run_on_ranks(save_errors, WORLD, folder, True)
            check_same("a save that runs", all_bytes(running), {"model.safetensors": b"half", "owner.lock": b""})
            if found[0][0].error != ("", ""):  # it may refuse to begin
                check_outcomes("beside a save that runs", [saved for saved, _ in found], str(folder))
            check_folder(folder)
        found = run_on_ranks(save_errors, WORLD, folder, True)
        check_same("errors", [(saved.error, loaded) for saved, loaded in found], [(("", ""), ("", ""))] * 2)
        names = sorted(path.name for path in self.root.iterdir())
        check_same("what is there", names, sorted(["step", *(other.name for other in others)]))
        for other in others:
            check_same(other.name, all_bytes(other), {"file": b"mine"})


def two_jobs(root: Path, overwrite: bool, rounds: int) -> list[tuple[Error, Any]]:
    """Ranks 0 and 1 are one job, ranks 2 and 3 the other; what each round gave, and which job's values were there then."""
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    job = dist.get_rank() // 2
    mesh = meshes[job]
    one, target = (Trained(lambda model: in_fsdp2(model, mesh), adam, steps, Buffered) for steps in (1, 1))
    with torch.no_grad():
        for param in one.params:
            local_of(param).fill_(job)
            for value in one.optim.state[param].values():
                local_of(value).fill_(job + 1)
    meeting, found, group = Meeting(), [], mesh.get_group()
    for number in range(rounds):
        path = root / ("step" if overwrite else f"step-{number}")
        meeting.tell(0)
        error = error_text(
            lambda: fsdp_optim.save(
                path,  # noqa: B023
                one.model,
                one.optim,
                state={"job": job, "number": number},  # noqa: B023
                overwrite=overwrite,
                options=fsdp_optim.SaveOptions(process_group=group, timeout=PATIENCE),
            )
        )
        meeting.tell(0)
        restored = fsdp_optim.load(
            path, target.model, target.optim, options=fsdp_optim.LoadOptions(process_group=group, timeout=PATIENCE)
        )
        values = {float(v) for param in target.params for v in local_of(param).detach().flatten()}
        state = {float(v) for p in target.params for t in target.optim.state[p].values() for v in local_of(t).flatten()}
        found.append((error, (restored.state["job"], restored.state["number"], sorted(values), sorted(state))))
    return found


class TwoJobsTest(DamageTest):
    def test_one_wins_and_the_other_raises(self) -> None:
        by_rank = run_on_ranks(two_jobs, 4, self.root, False, 4)
        for number, cases in enumerate(zip(*by_rank, strict=True)):
            errors = [error for error, _ in cases]
            check_same("both ranks of a job", (errors[0], errors[2]), (errors[1], errors[3]))
            check_same("jobs that raised", sorted(kind for kind, _ in errors[::2]), ["", "CheckpointError"])
            winner = 0 if not errors[0][0] else 1
            self.assertIn(str(self.root / f"step-{number}"), errors[2 - 2 * winner][1])
            wanted = (winner, number, [float(winner)], [float(winner + 1)])
            check_same("what is there", [there for _, there in cases], [wanted] * 4)
            check_folder(self.root / f"step-{number}")
        check_same("what lies beside it", sorted(p.name for p in self.root.iterdir()), [f"step-{i}" for i in range(4)])

    def test_overwriting(self) -> None:
        """One after the other both may win; what is there is all of one of them."""
        by_rank = run_on_ranks(two_jobs, 4, self.root, True, 4)
        for number, cases in enumerate(zip(*by_rank, strict=True)):
            errors = [error for error, _ in cases]
            check_same("both ranks of a job", (errors[0], errors[2]), (errors[1], errors[3]))
            winners = [job for job in (0, 1) if errors[2 * job] == ("", "")]
            if not winners or {kind for kind, _ in errors} - {"", "CheckpointError"}:
                raise Differs(f"round {number}: {errors}")
            winner = cases[0][1][0]
            self.assertIn(winner, winners)
            wanted = (winner, number, [float(winner)], [float(winner + 1)])
            check_same("what is there", [there for _, there in cases], [wanted] * 4)
        check_folder(self.root / "step")
