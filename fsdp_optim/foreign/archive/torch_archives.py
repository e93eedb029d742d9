"""Files of several archives of torch.save one after the other, each with a chunk of a tensor.

Each chunk is some whole rows of its tensor. Its elements lie in the file as in any other format, and the rest of the archive is
frames, which are the same for all tensors of one dtype and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias

from fsdp_optim.foreign.archive.torch_zip import ALIGNMENT, TensorStub, frames_around
from fsdp_optim.formats.base.protocols import PlannedTensor
from fsdp_optim.layout import Shape
from fsdp_optim.tensors.memory import dtype_named

Chunk: TypeAlias = "tuple[Shape, Shape]"
"""The offsets and the sizes of a chunk."""


@dataclass(frozen=True, eq=False)
class TensorKind:
    """What tensors have in common. Kinds are equal to themselves only."""

    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class _Archive:
    """The file of torch.save that has one chunk. `before`, `after`: the bytes around the data; `nbytes`: of all three."""

    num_data: int
    before: bytes
    after: bytes
    nbytes: int


@dataclass(frozen=True)
class KindPlan:
    """The archives of the chunks of each tensor of a kind."""

    kind: TensorKind
    archives: Sequence[_Archive]


@dataclass
class ArchiveFile:
    """The tensors of a file and their chunks, in the order of their bytes.

    Attributes:
        num_data, place: the bytes of the data and of the file up to here.
        starts: the byte of the data at which each tensor begins.
        plans: of each tensor, that of its kind.
        chunk_starts: the byte of the file at which the archive of each chunk begins, of one tensor after the other.
    """

    num_data: int = 0
    place: int = 0
    tensors: list[PlannedTensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    plans: list[KindPlan] = field(default_factory=list)
    chunk_starts: list[int] = field(default_factory=list)
    _frames: list[tuple[int, bytes]] = field(default_factory=list)
    _last: bytes = b""  # the end of the last archive, which is in no frame yet
    _joined: dict[tuple[bytes, int, bytes], bytes] = field(default_factory=dict)

    def add(self, tensor: PlannedTensor, plan: KindPlan) -> None:
        self.tensors.append(tensor)
        self.starts.append(self.num_data)
        self.plans.append(plan)
        for archive in plan.archives:
            gap = -self.place % ALIGNMENT
            between = (self._last, gap, archive.before)
            # Tensors of equal dtype and shape have equal frames, often longer than their data: one object serves all of them.
            content = self._joined.get(between)
            if content is None:
                content = self._joined[between] = self._last + bytes(gap) + archive.before
            self._frames.append((self.num_data, content))
            self._last = archive.after
            self.chunk_starts.append(self.place + gap)
            self.place += gap + archive.nbytes
            self.num_data += archive.num_data

    def place_after(self, plan: KindPlan) -> int:
        """Return the bytes of the file with the chunks of one more tensor, as `add` counts them."""
        place = self.place
        for archive in plan.archives:
            place += -place % ALIGNMENT + archive.nbytes
        return place

    @property
    def frames(self) -> list[tuple[int, bytes]]:
        """All frames, each with the byte of the data before which it stands."""
        return [*self._frames, (self.num_data, self._last)]


def file_plans(
    tensors: Sequence[PlannedTensor], chunks_of: Callable[[Shape, int], Iterable[Chunk]], most_nbytes: int
) -> Iterator[ArchiveFile]:
    """Yield the plan of each file, in order: at most `most_nbytes` with the frames between the data, or one larger tensor.

    `chunks_of`: gives the chunks of a tensor, from its shape and the bytes of an element.
    """

    @cache
    def plan_of(dtype: str, shape: Shape) -> KindPlan:
        chunks = tuple(chunks_of(shape, dtype_named(dtype).itemsize))
        return KindPlan(TensorKind(dtype, shape, chunks), [_archive_of(dtype, sizes) for _, sizes in chunks])

    file = ArchiveFile()
    for tensor in tensors:
        plan = plan_of(tensor.dtype, tensor.shape)
        if file.tensors and file.place_after(plan) > most_nbytes:
            yield file
            file = ArchiveFile()
        file.add(tensor, plan)
    yield file


def _archive_of(dtype: str, sizes: Shape) -> _Archive:
    stub = TensorStub(dtype, sizes, 0)
    before, after = frames_around(stub, [stub])
    return _Archive(stub.nbytes, before, after, len(before) + stub.nbytes + len(after))
