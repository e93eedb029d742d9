"""The reader of torch.distributed.checkpoint: cuts that overlap or leave gaps, and files that are damaged."""

from __future__ import annotations

import itertools
import os
import random
import unittest
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from kit import oracle
from kit.dcp_files import TALL, DcpFiles, InFolder, fill, opened
from parameterized import parameterized
from torch.distributed.checkpoint import metadata as of_torch

from fsdp_optim import CheckpointError
from fsdp_optim.layout import Block, Box, Boxes, FlatChunks, Whole
from fsdp_optim.plan import Copy, copies_into
from fsdp_optim.testing.foreign_readers import read_elements


def replaced(files: DcpFiles, key: str, **fields: Any) -> None:
    """Change where the first item of a key is said to be."""
    files.info(key).__dict__.update(fields)


class CutsTest(InFolder):
    @parameterized.expand(
        [
            ("a gap", [((0, 0), (4, 7)), ((5, 0), (5, 7))], ["elements [28, 35) of 70"]),
            ("a gap in a row", [((0, 0), (10, 3)), ((0, 4), (10, 3))], ["elements [3, 4) of 70"]),
            ("no chunk", [], ["elements [0, 70) of 70"]),
            ("an overlap", [((0, 0), (6, 7)), ((5, 0), (5, 7))], ["[0, 0]", "[5, 0]", "overlap"]),
            ("an overlap of boxes", [((0, 0), (10, 4)), ((2, 3), (3, 4)), ((0, 4), (10, 3))], ["overlap"]),
            ("the same twice", [((0, 0), (10, 7)), ((0, 0), (10, 7))], ["overlap"]),
            ("outside", [((0, 0), (10, 7)), ((10, 0), (1, 7))], ["[10, 0]", "outside of its shape [10, 7]"]),
            ("dimensions", [((0,), (10,))], ["outside of its shape [10, 7]"]),
        ]
    )
    def test_refused(self, _: str, boxes: Any, words: Sequence[str]) -> None:
        """By the name of the tensor, and before anything is read."""
        files = DcpFiles(self.folder).tensor(["model", "w"], TALL)
        files.metadata.state_dict_metadata["model.w"].chunks = [
            of_torch.ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in boxes
        ]
        item = files.info("model.w")
        files.metadata.storage_data = {of_torch.MetadataIndex("model.w", o): item for o, _ in boxes}
        files.finish()
        self.check_refused("model.w", *words)

    def test_random_cuts_are_read_element_by_element(self) -> None:
        rng = random.Random(5)
        for _ in range(60):
            shape = tuple(rng.randrange(1, 7) for _ in range(rng.randrange(1, 4)))
            boxes = [Box((0,) * len(shape), shape)]
            for _ in range(rng.randrange(12)):
                cut = boxes.pop(rng.randrange(len(boxes)))
                dim = rng.randrange(len(shape))
                at = rng.randrange(cut.sizes[dim] + 1)
                for first, num in ((0, at), (at, cut.sizes[dim] - at)):
                    offsets, sizes = list(cut.offsets), list(cut.sizes)
                    offsets[dim], sizes[dim] = offsets[dim] + first, num
                    boxes.append(Box(tuple(offsets), tuple(sizes)))
            boxes = [box for box in boxes if box.numel]
            by = tuple(range(-1, -1 - len(boxes), -1))
            listed = Boxes(shape, tuple((rank, (Block(box, 0),)) for rank, box in zip(by, boxes, strict=True)))
            self.assertFalse(listed.overlapping)
            self.assertEqual(listed.gap(), None)
            self.assertEqual(listed.numel, sum(listed.numel_on(rank) for rank in by))
            sources = {
                element: (rank, place)
                for rank, places in oracle.held(listed).items()
                for place, element in places.items()
            }
            wholes = [Whole(shape, (0,)), FlatChunks(shape, 0, -(-listed.numel // 3), (range(3),))]
            for target, rank in itertools.product(wholes, range(3)):
                held = oracle.held(target).get(rank, {})
                expected = sorted((*sources[element], place) for place, element in held.items())
                self.assertEqual(elements_of(copies_into(listed, target, rank)), expected)
            if len(boxes) > 1:
                without = Boxes(shape, listed.by_rank[1:])
                self.assertEqual(without.gap(), oracle.first_range(oracle.missing(without)))


def elements_of(copies: Sequence[Copy]) -> list[tuple[int, int, int]]:
    """The rank that sends each element, and where the element is read and written."""
    return sorted((copy.source_rank, *address) for copy in copies for address in oracle.addresses(copy))


class FilesTest(InFolder):
    def test_a_missing_file_is_named_with_a_key(self) -> None:
        fill(DcpFiles(self.folder)).finish()
        (self.folder / "__1_0.distcp").unlink()
        self.check_refused("__1_0.distcp: is missing", "is in it")

    def test_a_short_file_is_named_with_a_key(self) -> None:
        fill(DcpFiles(self.folder)).finish()
        os.truncate(self.folder / "__0_0.distcp", 9000)
        self.check_refused("__0_0.distcp: has 9000 bytes", "ends at byte")

    def test_files_outside_are_not_read(self) -> None:
        for name in ("../secret", "/etc/passwd", "a/../../secret"):
            files = fill(DcpFiles(self.folder))
            replaced(files, "epoch", relative_path=name)
            files.finish()
            self.check_refused("is missing")

    def test_transformed_items_are_refused_by_name(self) -> None:
        files = fill(DcpFiles(self.folder))
        replaced(files, "model.wide", transform_descriptors=["stream.zstd/1"])
        files.finish()
        self.check_refused("model.wide", "stream.zstd/1")

    def test_another_tensor_than_the_metadata_says(self) -> None:
        """Found when its elements are read, and named."""
        files = fill(DcpFiles(self.folder))
        other = files.info("model.wide")
        replaced(files, "model.größe", **other.__dict__)
        files.finish()
        with (
            closing(opened(self.folder)) as reader,
            self.assertRaisesRegex(CheckpointError, r"model.größe: holds a bfloat16 tensor.*float32"),
        ):
            read_elements(reader, reader.model["größe"], 0, 70)

    def test_a_chunk_without_room(self) -> None:
        files = fill(DcpFiles(self.folder))
        replaced(files, "model.cube", length=100)
        files.finish()
        self.check_refused("model.cube: a chunk of the sizes [4, 2, 6] has 384 bytes, but 100")

    def test_several_checkpoints_are_named(self) -> None:
        for step in (10, 20):
            fill(DcpFiles(self.folder / f"step-{step}")).finish()
        self.check_refused("several checkpoints, step-10, step-20")

    def test_one_checkpoint_below(self) -> None:
        fill(DcpFiles(self.folder / "model_and_optim")).finish()
        with closing(opened(self.folder)) as reader:
            self.check_model(reader)

    def test_the_path_of_the_metadata(self) -> None:
        fill(DcpFiles(self.folder)).finish()
        with closing(opened(self.folder / ".metadata")) as reader:
            self.check_model(reader)


if __name__ == "__main__":
    unittest.main()
