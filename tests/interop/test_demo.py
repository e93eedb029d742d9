"""The demo: a short one ends well, and a resumed run that is not the same run is told apart."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import math
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
from parameterized import parameterized

pytest.importorskip("matplotlib")

from PIL import Image

import fsdp_optim
from demo import film, looks
from demo.__main__ import main, report_failures
from demo.compare import LOSS_TOLERANCE, Comparison, compare
from demo.data import Text
from demo.report import table
from demo.train import Run

ROOT = Path(__file__).parents[2]


def full_state(value: float) -> dict[str, Any]:
    state = {0: {"step": torch.tensor(3.0), "exp_avg": torch.full((2, 3), value)}}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}


def whole_run() -> Run:
    return Run(0, [4.0, 3.0, 2.0, 1.0], None, full_state(2.0), {"weight": torch.ones(2)}, 1.0)


def resumed_run() -> Run:
    return Run(2, [2.0, 1.0], full_state(1.0), full_state(2.0), {"weight": torch.ones(2)}, 0.5)


def compared(resumed: Run, must_be_bit_exact: bool = True) -> Comparison:
    return compare("somewhere", resumed, whole_run(), full_state(1.0), must_be_bit_exact)


class TestComparison(unittest.TestCase):
    def test_the_same_run(self) -> None:
        self.assertEqual(compared(resumed_run()).failures(), [])
        self.assertEqual(report_failures([compared(resumed_run())]), 0)
        self.assertIn("bit-exact", table([compared(resumed_run())]))

    @parameterized.expand(
        [
            ("loss", {"losses": [2.0, 1.0 + 1e-7]}, "a loss differs"),
            ("loss_is_nan", {"losses": [math.nan, 1.0]}, "a loss differs"),
            ("loaded_value", {"state_at_start": full_state(1.0 + 1e-6)}, "loaded state differs"),
            ("loaded_nan", {"state_at_start": full_state(math.nan)}, "loaded state differs"),
            ("nothing_loaded", {"state_at_start": None}, "by inf"),
            ("final_value", {"state_at_end": full_state(2.1)}, "final state differs"),
            ("final_weights", {"weights_at_end": {"weight": torch.zeros(2)}}, "final weights differ"),
        ]
    )
    def test_another_run(self, name: str, changes: dict[str, Any], message: str) -> None:
        comparison = compared(dataclasses.replace(resumed_run(), **changes))
        self.assertEqual(len(comparison.failures()), 1)
        self.assertIn(message, comparison.failures()[0])
        self.assertEqual(report_failures([compared(resumed_run()), comparison]), 1)
        self.assertIn("FAILED", table([comparison]))

    def test_states_with_other_keys_groups_or_dtypes(self) -> None:
        for edit in (
            lambda full: full["state"][0].pop("step"),
            lambda full: full["state"].update({1: {}}),
            lambda full: full["param_groups"][0].update(lr=0.2),
            lambda full: full["state"][0].update(step=torch.tensor(3)),
        ):
            loaded = copy.deepcopy(full_state(1.0))
            edit(loaded)
            if loaded["state"].get(1) == {}:
                loaded["state"][1] = {"step": torch.tensor(3.0)}
            failures = compared(dataclasses.replace(resumed_run(), state_at_start=loaded)).failures()
            self.assertEqual(failures, ["the loaded state differs from the saved one by inf"])

    def test_other_world_sizes_may_round_differently(self) -> None:
        rounded = dataclasses.replace(resumed_run(), losses=[2.0, 1.0 + LOSS_TOLERANCE / 2])
        self.assertEqual(compared(rounded, must_be_bit_exact=False).failures(), [])
        wrong = dataclasses.replace(resumed_run(), losses=[2.0, 1.0 + LOSS_TOLERANCE * 2])
        self.assertEqual(len(compared(wrong, must_be_bit_exact=False).failures()), 1)


class TestText(unittest.TestCase):
    def test_ranks_share_the_batch_of_one_process(self) -> None:
        text = Text(context=16, batch_size=12)
        whole = text.batch(step=5)
        for world_size in (2, 3, 4):
            for part in (0, 1):
                shared = [text.batch(5, rank, world_size)[part] for rank in range(world_size)]
                self.assertTrue(torch.equal(torch.cat(shared), whole[part]))
        self.assertTrue(torch.equal(whole[0][:, 1:], whole[1][:, :-1]))
        self.assertFalse(torch.equal(whole[0], text.batch(step=6)[0]))

    def test_unequal_parts_are_refused(self) -> None:
        with pytest.raises(ValueError, match="12 cannot be shared equally by 5"):
            Text(16, 12).batch(0, 0, 5)


def run_demo(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """In this process, with the ranks that other tests have started; the exit status, and what was printed."""
    out, err, threads = io.StringIO(), io.StringIO(), torch.get_num_threads()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch.dict(os.environ, COLUMNS="80"):
        try:
            status = main(["--out", str(folder), *arguments])
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            torch.set_num_threads(threads)
    return status, out.getvalue(), err.getvalue()


def check_printed(printed: str, folder: Path) -> None:
    for name in ("4 ranks", "2 ranks", "3 ranks", "1 rank", "without FSDP"):
        [line] = [line for line in printed.splitlines() if line.startswith(f"{name} ")]
        assert line.endswith("bit-exact" if name == "4 ranks" else "equal")
        assert re.match(rf"{name} +1 ", line)  # steps
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_short_demo(tmp_path: Path) -> None:
    status, out, err = run_demo(tmp_path, "--steps", "4", "--save-after", "3")
    assert status == 0, err
    check_printed(out, tmp_path)


@pytest.mark.slow
def test_a_short_demo_by_itself(tmp_path: Path) -> None:
    """As `make demo` runs it."""
    result = subprocess.run(
        [sys.executable, "-m", "demo", "--out", str(tmp_path), "--steps", "4", "--save-after", "3"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert result.returncode == 0, result.stderr
    check_printed(result.stdout, tmp_path)
    assert "Warning" not in result.stderr
    assert "4 ranks resumed" in result.stderr  # a progress bar


def test_the_resume_point_lies_inside_the_run(tmp_path: Path) -> None:
    status, _, err = run_demo(tmp_path, "--steps", "3", "--save-after", "3")
    assert status == 2
    assert "--save-after must lie between 0 and --steps 3, not 3" in err


def test_the_film_shows_what_was_printed(tmp_path: Path) -> None:
    """Frames of runs that are made up: their colours, and how long each is shown."""
    whole = film.Leg(4, [f"step {step}  loss {1 / step:.6f}" for step in range(1, 61)])
    first = film.Leg(4, whole.lines[:34])
    second = film.Leg(3, ["resumed from step 30 on 3 ranks (saved by 4)", *whole.lines[30:]])
    assert min(second.losses()) == 31
    assert second.losses()[40] == pytest.approx(1 / 40, abs=1e-6)
    film.draw(tmp_path / "film.gif", [first, second], whole)
    with Image.open(tmp_path / "film.gif") as made:
        frames = []
        for number in range(made.n_frames):
            made.seek(number)
            frames.append(made.convert("RGB"))
    counted = [
        {name: sum(pixel == to_rgb255(name) for pixel in pixels(frame)) for name in film.COLOURS.values()}
        for frame in (frames[0], frames[-1])
    ]
    assert counted[0][film.COLOURS[4]] == counted[0][film.COLOURS[3]] == 0  # the command alone
    assert counted[-1][film.COLOURS[3]] > 100
    assert counted[-1][film.COLOURS[4]] > 50


def test_a_picture_of_a_terminal(tmp_path: Path) -> None:
    drawn = looks.terminal(["--version"], tmp_path, 40)
    assert fsdp_optim.__version__ in "".join(ElementTree.fromstring(drawn).itertext())
    assert "url(http" not in drawn


def test_a_part_of_a_page_is_xml() -> None:
    page = "<style>body { color: red }</style><h2>A</h2><h2>B</h2><p class=x title='1 < 2'>a &lt; b<br>c</p><h2>C</h2>"
    drawn = looks.framed(page, "<h2>B", "<h2>", 50)
    assert "".join(ElementTree.fromstring(drawn).itertext()).endswith("Ba < bc")
    assert ".body { color: red }" in drawn


def test_the_pictures_of_looking_are_small_and_fetch_nothing() -> None:
    files = sorted((ROOT / "docs").glob("look-*.svg"))
    assert len(files) == 5
    for file in files:
        text = file.read_text()
        assert f"]({file.name})" in (ROOT / "docs" / "looking.md").read_text()
        assert len(text) < 150_000
        addresses = set(re.findall(r"https?://[^\s\"')]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml"}, addresses
        ElementTree.fromstring(text)


def to_rgb255(name: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(name.removeprefix("#")))


def pixels(frame: Image.Image) -> list[tuple[int, ...]]:
    data = frame.tobytes()
    return [tuple(data[at : at + 3]) for at in range(0, len(data), 3)]


def test_the_picture_of_the_first_page_is_small_and_moves() -> None:
    file = ROOT / "docs" / "demo.gif"
    assert f"(docs/{file.name})" in (ROOT / "README.md").read_text()
    assert file.stat().st_size < 400_000
    with Image.open(file) as picture:
        assert picture.n_frames > 20


def test_the_badges_are_those_of_the_package() -> None:
    from demo import badges

    assert badges.FILE.read_text(encoding="utf-8") == badges.drawn(badges.badges()), "run: python -m demo.badges"
    assert [label for label, _ in badges.badges()] == ["version", "Python", "torch", "system", "license"]


def test_the_picture_of_names_is_that_of_real_views() -> None:
    from demo import names

    assert names.FILE.read_text(encoding="utf-8") == names.drawn(), "run: python -m demo.names"
    for layout in names.LAYOUTS:
        numbers = sorted(int(number) for part in names.parts_of(layout).values() for number in part.flatten())
        assert numbers == list(range(len(numbers))), layout.title  # each element has one place
