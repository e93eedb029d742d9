"""Frames between the bytes of tensors, beside an oracle of one byte at a time."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_optim.formats.base.frames import Frames, joined
from fsdp_optim.plugins import PlannedFile


@st.composite
def frames_of_files(draw: st.DrawFn) -> Frames:
    nbytes = draw(st.integers(0, 30))
    at = sorted(draw(st.lists(st.integers(0, nbytes), max_size=6)))
    given = [(byte, bytes([100 + index]) * draw(st.integers(1, 9))) for index, byte in enumerate(at)]
    head, between = joined(given, bytes([99]) * draw(st.integers(0, 5)))
    plan = PlannedFile("file", "model", head, (), (), nbytes, 0, lambda start, stop: "", between)
    assert plan.nbytes == plan.frames.nbytes
    return plan.frames


def bytes_of(frames: Frames) -> list[int | bytes]:
    """The file: for each byte, the byte of the data that it is, or the content of a frame or of the head."""
    contents = dict(zip(frames.at, frames.contents, strict=True))
    file: list[int | bytes] = [b"?"] * frames.head_nbytes
    for byte in range(frames.data_nbytes + 1):
        file += [bytes([content_byte]) for content_byte in contents.get(byte, b"")]
        file += [byte] if byte < frames.data_nbytes else []
    return file


@settings(max_examples=300)
@given(frames_of_files())
def test_places(frames: Frames) -> None:
    """Where each byte of the data is, how many are before a byte of the file, and how long the file is."""
    file = bytes_of(frames)
    assert frames.nbytes == len(file)
    for byte in range(frames.data_nbytes):
        assert frames.place_of(byte) == file.index(byte)
    for place in range(len(file) + 1):
        assert frames.data_before(place) == sum(isinstance(entry, int) for entry in file[:place])


@settings(max_examples=300)
@given(frames_of_files(), st.data())
def test_writes_of_any_cut_fill_the_file(frames: Frames, data: st.DataObject) -> None:
    """Each byte of a frame is written once, by the write of its neighbours, and each write is one range of the file."""
    wanted = [entry[0] if isinstance(entry, bytes) else entry for entry in bytes_of(frames)]
    cuts = sorted({0, frames.data_nbytes, *data.draw(st.lists(st.integers(0, frames.data_nbytes), max_size=4))})
    file: dict[int, int] = {}
    data_alone: dict[int, int] = {}
    for start, stop in itertools.pairwise(cuts):
        border = data.draw(st.integers(start, stop))
        pieces = [memoryview(bytes(range(*ends))) for ends in ((start, border), (border, stop))]
        place, joint = frames.with_frames(pieces, start)
        for number, byte in enumerate(b"".join(joint)):
            assert place + number not in file, "written twice"
            file[place + number] = byte
        for place, parts in frames.without_frames(pieces, start):
            data_alone |= {place + number: byte for number, byte in enumerate(b"".join(parts))}
    if frames.data_nbytes:
        assert [file.get(place) for place in range(frames.head_nbytes, len(wanted))] == wanted[frames.head_nbytes :]
    assert data_alone == {frames.place_of(byte): byte for byte in range(frames.data_nbytes)}
