"""Where DeepSpeed's ZeRO puts the elements of a parameter: runs in the flat tensors of the ranks.

Stages 1 and 2 lay the parameters of a group end to end, and cut that flat tensor in equal parts, one for each rank:

    # flat tensor  | a a a a a b b b c c . . |     the dots are padding, which is never read
    # rank 0       | a a a a |
    # rank 1               | a b b b |
    # rank 2                       | c c . . |

Stage 3 cuts each parameter in equal parts by itself, and lays the parts of a rank end to end:

    # rank 0  | a a a | b b | c |
    # rank 1  | a a . | b . | c |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.protocols import Chunks, StoredTensor
from fsdp_optim.layout import Shape, flat_chunks

Parts = Sequence[StoredTensor]
"""The flat tensor of each rank, in the order of the ranks."""


@dataclass(frozen=True)
class Cut:
    """The place of one parameter in flat tensors that have one part on each rank.

    Attributes:
        flat: which flat tensor.
        start: the element of the whole flat tensor at which the parameter begins.
        chunk: the number of elements of the flat tensor on each rank.
        skipped: the number of elements in a rank's part before the first one that `start` and `chunk` count.
    """

    fqn: str
    shape: Shape
    flat: int
    start: int
    chunk: int
    skipped: int = 0

    def stored(self, key: str, parts: Parts) -> StoredTensor:
        """Return the parameter, or a state value that is cut in the same way, in the parts of the ranks."""
        numel, any_part = prod(self.shape), parts[0]
        if not numel:
            return StoredTensor(key, any_part.dtype, self.shape, any_part.file, any_part.start)
        first = self.start // self.chunk
        last = (self.start + numel - 1) // self.chunk
        ranks = range(first - len(parts), last + 1 - len(parts))  # rank i of n is rank i - n of storage
        placement = flat_chunks(self.shape, self.start - first * self.chunk, self.chunk, (ranks,), own_tensor=True)
        at = {}
        for index, rank in zip(range(first, last + 1), ranks, strict=True):
            part = parts[index]
            offset = max(self.start - index * self.chunk, 0) + self.skipped
            at[rank] = (part.file, part.start + offset * part.itemsize)
        return StoredTensor(key, any_part.dtype, self.shape, "", 0, chunks=Chunks(placement, at))


def cuts_of_flat_groups(
    files: Sequence[str],
    groups: Sequence[Mapping[str, Shape]],
    paddings: Sequence[Sequence[int]],
    flats: Sequence[Parts],
) -> Iterator[Cut]:
    """Stages 1 and 2. `groups`: the shapes in each flat tensor, in its order; `paddings`: the elements after each of these.

    Raises CheckpointError that names the file of a rank whose part is too short or too long.
    """
    for index, (shapes, after, parts) in enumerate(zip(groups, paddings, flats, strict=True)):
        chunk = prod(parts[0].shape)  # all of the flat tensor, where that is less than a full part
        numels = [prod(shape) for shape in shapes.values()]
        total = sum(numels) + sum(after)
        for rank, part in enumerate(parts):
            needed = min(max(total - rank * chunk, 0), chunk)
            if not needed <= prod(part.shape) <= chunk:
                raise CheckpointError(
                    f"{files[rank]}: has {prod(part.shape)} elements of the flat group {index}, but rank {rank} of "
                    f"{len(parts)} has {needed} to {chunk}: it is of another save, or was changed"
                )
        if len(parts) * chunk < total:
            raise CheckpointError(
                f"{files[0]}: {len(parts)} parts of {chunk} elements are too few for the {total} elements of the flat group "
                f"{index}: files of some ranks are missing, or are of another save"
            )
        start = 0
        for (fqn, shape), numel, padding in zip(shapes.items(), numels, after, strict=True):
            yield Cut(fqn, shape, index, start, max(chunk, 1))
            start += numel + padding


def cuts_of_params(files: Sequence[str], shapes: Mapping[str, Shape], flats: Sequence[Parts]) -> Iterator[Cut]:
    """Stage 3. `shapes`: of all parameters, in the order in which the flat tensors have them."""
    world_size = len(files)
    filled = [0] * len(flats)
    flat = 0
    for fqn, shape in shapes.items():
        part = -(-prod(shape) // world_size)
        while flat + 1 < len(flats) and filled[flat] == prod(flats[flat][0].shape) and part:
            flat += 1
        yield Cut(fqn, shape, flat, 0, max(part, 1), filled[flat])
        filled[flat] += part
    for index, parts in enumerate(flats):
        for rank, of_rank in enumerate(parts):
            if prod(of_rank.shape) != filled[index]:
                raise CheckpointError(
                    f"{files[rank]}: has {prod(of_rank.shape)} elements of the flat group {index}, but rank {rank} of "
                    f"{world_size} has {filled[index]}: it is of another save, was changed, or its weights were kept elsewhere "
                    "(NVMe offload)"
                )


def cut_fragments(fqn: str, shape: Shape, fragments: Parts, files: Sequence[str]) -> StoredTensor:
    """Stage 3: a frozen parameter. Each rank has an equal part of it."""
    part = -(-prod(shape) // len(fragments))
    for rank, fragment in enumerate(fragments):
        if prod(fragment.shape) != part:
            raise CheckpointError(
                f"{files[rank]}: {fqn} has {prod(fragment.shape)} elements on rank {rank} of {len(fragments)}, not {part}: it is "
                "of another save, or was changed"
            )
    return Cut(fqn, shape, 0, 0, max(part, 1)).stored(fqn, fragments)
