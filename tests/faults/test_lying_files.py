"""Files of a wrong size, and headers that lie: all ranks raise one CheckpointError, and nothing changes.

Lies are sealed: the checksums are made again, so that it is not they which find the lie.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import xxhash
from kit.cases import expand
from kit.checkpoint_damage import (
    HEADERS,
    LIES,
    entries_of,
    packed,
    rewrite,
    seal,
)
from kit.checkpoint_format import (
    MANIFEST,
    check_folder,
    read_manifest,
    read_safetensors,
    sums_of,
)
from kit.compare import Differs, check_refused, check_same
from kit.refused_checkpoints import EVERY_FILE, SAVED_FILES, WORLD, DamageTest, good, load_both_ways
from parameterized import parameterized

from fsdp_optim.testing import run_on_ranks

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


class WrongSizeTest(DamageTest):
    @parameterized.expand([(name,) for name in EVERY_FILE])
    def test_a_file(self, name: str) -> None:
        damages = [
            candidate for candidate in SIZES if candidate is not much_more or name in ("model.safetensors", MANIFEST)
        ]
        # without checksums, nobody needs the tables
        by_checksum = [candidate for candidate in damages if name.endswith(".sums") or candidate is zeros]
        for some, verifies in (
            (by_checksum, [True]),
            ([candidate for candidate in damages if candidate not in by_checksum], [True, False]),
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
