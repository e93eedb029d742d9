"""Where every element of every original parameter lives: Box, Block, Placement. No torch, no processes, no files.

A `Placement` describes where one parameter lives: arithmetic on a few integers gives the Blocks of any rank. A Layout is one
Placement per parameter. All numbers count elements; rank numbers are global ranks.
"""

from fsdp_optim.layout.boxes import (
    Block,
    Box,
    Run,
    Shape,
    bounds_of_box,
    boxes_of_run,
    row_major_strides,
)
from fsdp_optim.layout.chunks import FlatChunks, flat_chunks
from fsdp_optim.layout.flat_runs import FlatRuns
from fsdp_optim.layout.listed import Boxes
from fsdp_optim.layout.mesh import MeshBoxes, OnMesh, cut_named, cut_of
from fsdp_optim.layout.placement import Placement, RankSet, Whole, whole_on
from fsdp_optim.layout.ranks import STORAGE, Ranks, number_array, ranks_in_order, sorted_ranks
from fsdp_optim.layout.strided import StridedBoxes, contiguous_order
from fsdp_optim.layout.tables import BoxTable, Columns, Mask, Numbers, along, at

__all__ = [
    "STORAGE",
    "Block",
    "Box",
    "BoxTable",
    "Boxes",
    "Columns",
    "FlatChunks",
    "FlatRuns",
    "Mask",
    "MeshBoxes",
    "Numbers",
    "OnMesh",
    "Placement",
    "RankSet",
    "Ranks",
    "Run",
    "Shape",
    "StridedBoxes",
    "Whole",
    "along",
    "at",
    "bounds_of_box",
    "boxes_of_run",
    "contiguous_order",
    "cut_named",
    "cut_of",
    "flat_chunks",
    "number_array",
    "ranks_in_order",
    "row_major_strides",
    "sorted_ranks",
    "whole_on",
]
