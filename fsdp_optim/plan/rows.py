"""The copies between a block of a matrix and a run of its row-major elements, by arithmetic: without a box for each part."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_optim.layout import Block, Run, Shape
from fsdp_optim.plan.copies import Copy

Part = tuple[int, int, int, int]
"""Rows, elements of each row, and where the first element is in the block's and in the run's local tensor."""


def parts_of(num_columns: int, block: Block, run: Run) -> Iterator[Part]:
    """What a block of a matrix and a run have in common: of the run's first row, of its whole rows, and of its last row.

    These are the boxes that the run consists of (`boxes_of_run`), in their order.
    """
    if run.start >= run.stop:
        return
    (top, left), (height, width) = block.box.offsets, block.box.sizes
    (first, first_column), (last, last_column) = divmod(run.start, num_columns), divmod(run.stop - 1, num_columns)
    if first == last:
        spans = ((first, first + 1, first_column, last_column + 1),)
    else:
        whole_from = first + (first_column > 0)
        whole_to = last + (last_column == num_columns - 1)
        spans = (  # type: ignore[assignment]
            (first, whole_from, first_column, num_columns),
            (whole_from, whole_to, 0, num_columns),
            (whole_to, last + 1, 0, last_column + 1),
        )
    for row, to_row, column, to_column in spans:
        row, to_row = max(row, top), min(to_row, top + height)
        column, to_column = max(column, left), min(to_column, left + width)
        if row < to_row and column < to_column:
            in_block = block.offset + (row - top) * width + column - left
            in_run = run.offset + row * num_columns + column - run.start
            yield to_row - row, to_column - column, in_block, in_run


def copy_of_part(
    part: Part, shape: Shape, block: Block, fqn: str, source_rank: int, target_rank: int, *, is_from_block: bool
) -> Copy:
    """The copy of one part, from the block to the run or the other way."""
    rows, columns, in_block, in_run = part
    if rows == 1 or columns == block.box.sizes[1] == shape[1]:  # in one row, or in whole rows of both
        sizes: Shape = (rows * columns,)
        of_block: Shape = (1,)
        of_run: Shape = (1,)
    elif columns == 1:
        sizes, of_block, of_run = (rows,), (block.box.sizes[1],), (shape[1],)
    else:
        sizes, of_block, of_run = (rows, columns), (block.box.sizes[1], 1), (shape[1], 1)
    if is_from_block:
        return Copy(fqn, source_rank, target_rank, sizes, in_block, of_block, in_run, of_run)
    return Copy(fqn, source_rank, target_rank, sizes, in_run, of_run, in_block, of_block)
