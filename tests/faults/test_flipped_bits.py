"""A flipped bit anywhere in a checkpoint is refused on all ranks; `verify=False` loads what is there."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from kit.cases import expand
from kit.checkpoint_damage import (
    flip,
)
from kit.checkpoint_format import (
    MANIFEST,
    all_bytes,
    read_safetensors,
    read_sums,
    sums_of,
)
from kit.compare import Differs, check_same, differences
from kit.refused_checkpoints import (
    PATIENCE,
    SAVED_FILES,
    WORLD,
    DamageTest,
    check_outcomes,
    contents,
    good,
    load_both_ways,
    trained,
)
from parameterized import parameterized

import fsdp_optim
from fsdp_optim.testing import run_on_ranks


def places_in(path: Path) -> dict[str, int]:
    """Where to flip a bit in a safetensors file."""
    file = read_safetensors(path)
    data, length = len(file.header), len(file.header) - 8
    header = {"the header's length": 0, "the header's first byte": 8, "the header's middle": 8 + length // 2}
    places = {"the first": data, "the middle": data + len(file.data) // 2, "the last": data + len(file.data) - 1}
    return header | {f"{name} byte of data": place for name, place in places.items()}


FLIPS = ("the header's length", "the header's first byte", "the header's middle")
FLIPS += tuple(f"the {place} byte of data" for place in ("first", "middle", "last"))


class FlippedBitTest(DamageTest):
    @parameterized.expand([(name,) for name in SAVED_FILES])
    def test_a_file(self, name: str) -> None:
        cases, has_data = {}, bool(read_safetensors(good("whole") / name).data)
        for place in FLIPS if has_data else FLIPS[:3]:
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
    loaded = []
    for folder in (path, right):
        target = trained(1)
        fsdp_optim.load(
            folder, target.model, target.optim, options=fsdp_optim.LoadOptions(verify=False, timeout=PATIENCE)
        )
        loaded.append(contents(target))
    return [list(differences(loaded[0][what], loaded[1][what], what)) for what in ("parameters", "state", "buffers")]


class VerifyTest(DamageTest):
    """`verify=False` turns checksums off: what is there is loaded."""

    @parameterized.expand([("model.safetensors", 0), ("optim.safetensors", 1)])
    def test_a_flipped_bit_is_loaded(self, name: str, what: int) -> None:
        folder = self.copy()
        tensor = ("stem.weight", "state.stem.weight.exp_avg")[what]
        file = read_safetensors(folder / name)
        flip(folder / name, len(file.header) + file.places[tensor][0])
        by_rank = run_on_ranks(load_unverified, WORLD, folder, good("whole"), name)
        for rank, parts in enumerate(by_rank):
            check_same(
                "parts that differ", [bool(lines) for lines in parts], [rank == 0 and what == i for i in range(3)]
            )
        (line,) = by_rank[0][what]
        self.assertIn("1 of 20 elements, at [0]", line)

    def test_a_checkpoint_without_checksums(self) -> None:
        check_same("tables", list(good("unsummed").rglob("*.sums")), [])
        folder = self.copy("unsummed")
        run_on_ranks(load_both_ways, WORLD, [], folder, "unsummed", [True])
        (folder / "model.safetensors").unlink()
        self.check_refused(folder, "model.safetensors", kind="unsummed")
