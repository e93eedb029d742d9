"""Headers and their tensors as columns: what objects say, and the memory of an open checkpoint for each tensor."""

from __future__ import annotations

import gc
import json
import random
import tempfile
import tracemalloc
import unittest
from contextlib import closing
from pathlib import Path

import torch
from parameterized import parameterized
from safetensors.torch import save_file
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.checkpoint.common.formats import open_checkpoint
from fsdp_optim.checkpoint.common.stores import store_at
from fsdp_optim.formats.base.header import parse_header
from fsdp_optim.formats.base.header_entries import Entries, HeaderEntry
from fsdp_optim.formats.base.stored_columns import StoredColumns, StoredEntries

CODES = {"F32": 4, "BOOL": 1, "BF16": 2, "F4": 1}


def any_tensors(num: int) -> list[HeaderEntry]:
    """Tensors end to end, of some kinds, some of them empty."""
    rng, at, entries = random.Random(num), 0, []
    for number in range(num):
        code = rng.choice([*CODES])
        shape = tuple(rng.choice([1, 2, 3, 0]) for _ in range(rng.randrange(4)))
        if code == "F4" and not shape:
            code = "F32"
        nbytes = CODES[code]
        for size in shape:
            nbytes *= size
        entries.append(HeaderEntry(f"t.{number}", code, shape, at, at + nbytes))
        at += nbytes
    return entries


def text_of(entries: list[HeaderEntry]) -> bytes:
    listed = {}
    for entry in entries:
        shape = [*entry.shape[:-1], 2 * entry.shape[-1]] if entry.code == "F4" else list(entry.shape)
        listed[entry.key] = {"dtype": entry.code, "shape": shape, "data_offsets": [entry.start, entry.stop]}
    return json.dumps(listed).encode()


class EntriesTest(unittest.TestCase):
    @parameterized.expand([(0,), (1,), (50,)])
    def test_as_objects(self, num: int) -> None:
        """In the order of their bytes, however a header lists them."""
        entries = any_tensors(num)
        nbytes = entries[-1].stop if entries else 0
        for order in (entries, entries[::-1]):
            header = parse_header("here", text_of(order), nbytes)
            self.assertIsInstance(header.entries, Entries)
            self.assertEqual([*header.entries], sorted(order, key=lambda entry: (entry.start, entry.stop)))
            self.assertEqual([header.entries[at] for at in range(-num, num)], 2 * [*header.entries])
            self.assertEqual(header.entries[1:-1], [*header.entries][1:-1])
            for code in CODES:
                self.assertEqual(header.entries.of_code(code), [e for e in header.entries if e.code == code])

    @parameterized.expand(["gap", "overlap", "length", "end", "dtype", "odd", "huge"])
    def test_what_is_wrong_is_said(self, what: str) -> None:
        entries = [HeaderEntry("a", "F32", (2,), 0, 8), HeaderEntry("b", "F4", (3,), 8, 11)]
        text = text_of(entries).decode()
        changed, words = {
            "gap": (text.replace("[8, 11]", "[9, 12]"), "leaves a gap"),
            "overlap": (text.replace("[8, 11]", "[7, 10]"), "overlaps the tensor before"),
            "length": (text.replace("[0, 8]", "[0, 7]"), "8 bytes, but has the bytes"),
            "end": (text, "its tensors end at byte 11, but its data at byte 12"),
            "dtype": (text.replace("F32", "F99"), "the dtype 'F99'"),
            "odd": (text.replace("[6]", "[5]"), "bytes have two numbers each"),
            "huge": (text.replace("[2]", f"[{1 << 61}, {1 << 61}]"), "bytes, but has the bytes"),
        }[what]
        with self.assertRaisesRegex(CheckpointError, words):
            parse_header("here", changed.encode(), 12 if what in ("end", "gap") else 11)


class ColumnsTest(unittest.TestCase):
    def test_of_several_files(self) -> None:
        columns, wanted = StoredColumns(77), {}
        for number in range(3):
            entries = any_tensors(5 + number)
            header = parse_header("here", text_of(entries), entries[-1].stop)
            keys = [f"{number}.{key}" for key in header.entries.keys]
            self.assertIsNone(columns.add(StoredEntries(f"file{number}", keys, header.entries, 10 * number, 3)))
            wanted |= {key: (f"file{number}", e) for key, e in zip(keys, header.entries, strict=True)}
        self.assertEqual([*columns], [*wanted])
        self.assertEqual([*columns.items()], [(key, columns[key]) for key in columns])
        self.assertEqual([*columns.values()], [*map(columns.__getitem__, columns)])
        self.assertEqual(columns.file_of_each(), {key: file for key, (file, _) in wanted.items()})
        for key, (file, entry) in wanted.items():
            stored = columns[key]
            self.assertEqual((stored.key, stored.file, columns.file_of(key)), (key, file, file))
            self.assertEqual((stored.dtype, stored.shape), (entry.dtype, entry.shape))
            self.assertEqual(stored.start, entry.start + 10 * int(file[-1]))
            self.assertEqual((stored.short_nbytes, stored.request_nbytes), (3, 77))
        self.assertEqual(columns.add(StoredEntries("again", ["x", "1.t.3"], header.entries)), "1.t.3")
        self.assertNotIn("x", columns)


def ours(path: Path, num: int, form: str = "safetensors") -> None:
    model = nn.ModuleDict({f"layer{number}": nn.Linear(2, 3, bias=False) for number in range(num // 4)})
    optim = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    fsdp_optim.save(path, model, optim, format=form)


def hugging_face(path: Path, num: int) -> None:
    path.mkdir()
    names = [f"model.layers.{number}.mlp.experts.weight" for number in range(num)]
    for number in range(10):
        part = {name: torch.ones(2, 3) for name in names[number::10]}
        save_file(part, path / f"model-{number + 1:05}-of-00010.safetensors")


class MemoryTest(unittest.TestCase):
    """What a rank keeps for each further tensor of a checkpoint that is open, in bytes. An object alone takes 120."""

    @parameterized.expand([("ours", 300), ("safetensors", 200), ("dcp", 1000)])
    def test_an_open_checkpoint_keeps_little(self, kind: str, most: int) -> None:
        kept = []
        with tempfile.TemporaryDirectory() as folder:
            for num in (400, 2400):
                path = Path(folder) / f"{kind}{num}"
                hugging_face(path, num) if kind == "safetensors" else ours(
                    path, num, "dcp" if kind == "dcp" else "safetensors"
                )
                open_checkpoint(store_at(path), verify=True).close()
                gc.collect()
                tracemalloc.start()
                try:
                    with closing(open_checkpoint(store_at(path), verify=True)) as checkpoint:
                        self.assertTrue(checkpoint.index.identity)
                        gc.collect()
                        kept.append(tracemalloc.get_traced_memory()[0])
                finally:
                    tracemalloc.stop()
        each = (kept[1] - kept[0]) / 2000
        self.assertLess(each, most, kind)
        self.assertGreater(each, most / 2, f"{kind}: lower the bound")


if __name__ == "__main__":
    unittest.main()
