"""One half of the files of all ranks with ShardedTensors or DTensors, the model's dicts or the states of the optimizers, as one.

A name that means different parameters on different ranks becomes `name@rank`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from msgspec import structs

from fsdp_optim.errors import LayoutError
from fsdp_optim.foreign.per_rank.rank_files import RankFile, RankFiles, bits_of, in_chunks, in_runs, place_of
from fsdp_optim.foreign.per_rank.torch_shards import DTensorFields, Fields, ShardedTensorFields, TorchShards, shards_of
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.protocols import StoredTensor
from fsdp_optim.layout import Block, Box, Boxes, Shape, bounds_of_box

_SAMPLE = 1024  # elements of each shard that are compared, because copies and other parameters can have the same name

ValuesByRank = Mapping[int, Any]
"""By rank, what its file has."""

Partition = frozenset[frozenset[int]]
"""Groups of ranks, each of which has a tensor of its own under one name."""


def first_shards(tree: Any) -> Fields | None:
    """Return the first ShardedTensor or DTensor in dicts and lists; None if there is none."""
    if isinstance(tree, (ShardedTensorFields, DTensorFields)):
        return tree
    items = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ()
    return next((shards for shards in map(first_shards, items) if shards is not None), None)


def numbers_in(files: RankFiles, rank: int, stored: StoredTensor) -> Sequence[int]:
    """Return the elements of a small tensor of numbers in the file of a rank."""
    numbers: list[int] = files.archives[rank].materialised(stored).flatten().tolist()
    return numbers


class RankHalf:
    """The model's dicts of all ranks, or the states of their optimizers: by rank, by name."""

    def __init__(self, files: RankFiles, values: ValuesByRank) -> None:
        self.files = files
        self.values: dict[int, Mapping[Any, Any]] = dict(values)
        self._known: dict[tuple[int, int], TorchShards] = {}

    def shards(self, rank: int, value: Fields, name: object) -> TorchShards:
        """Return the shards in a stand-in, which is looked at once."""
        known = self._known.get((rank, id(value)))
        if known is None:
            with as_checkpoint_error(f"{self.files.opened.named(self.files.names[rank])}: {name}"):
                known = shards_of(value, rank, partial(numbers_in, self.files, rank))
            if known.rank not in (None, rank):
                raise self.files.damaged(rank, f"was saved by rank {known.rank}: it was renamed")
            if known.world_size not in (0, self.files.num):
                raise self.files.damaged(rank, f"is of a save by {known.world_size} ranks, not by {self.files.num}")
            self._known[rank, id(value)] = known
        return known

    @cached_property
    def _cuts(self) -> dict[Any, dict[Any, dict[int, TorchShards]]]:
        """By name, by cut, the shards of each rank."""
        cuts: dict[Any, dict[Any, dict[int, TorchShards]]] = {}
        for rank, values in self.values.items():
            for name, value in values.items():
                fields = first_shards(value)
                if fields is not None:
                    shards = self.shards(rank, fields, name)
                    cuts.setdefault(name, {}).setdefault(shards.cut, {})[rank] = shards
        return cuts

    @property
    def partitions(self) -> set[Partition]:
        """The ranks that share tensors: for each tensor of one name, the groups of ranks that have it."""
        return {self._partition(name) for name in self._cuts}

    def _partition(self, name: object) -> Partition:
        return frozenset(map(_owners, self._cuts[name].values()))

    def first_difference(self, partition: Partition) -> str:
        """In words, a tensor of which several groups of ranks have no copies; "" if all tensors of these groups are copies.

        Tensors are copies if they have the same cut and the first elements of every shard are equal. HYBRID_SHARD and a mesh
        without the tensor parallel ranks make copies; experts of one name are none.
        """
        for name, cuts in self._cuts.items():
            if len(cuts) > 1 and self._partition(name) == partition:
                seen: dict[tuple[int, Box], tuple[int, bytes]] = {}
                boxes = set()
                for by in cuts.values():
                    pieces = [(rank, at, *piece) for rank in by for at, piece in self._pieces(rank, name)]
                    boxes.add(frozenset((at, box) for _, at, box, _ in pieces))
                    for rank, at, box, stored in pieces:
                        data = self._sample(rank, stored)
                        other, known = seen.setdefault((at, box), (rank, data))
                        if known != data:
                            return f"{name} differs between {self.files.names[other]} and {self.files.names[rank]}"
                if len(boxes) > 1:
                    return f"{name} is cut in different ways"
        return ""

    def _pieces(self, rank: int, name: object) -> Iterator[tuple[int, tuple[Box, StoredTensor]]]:
        """Yield the shards of all values of a name in the file of a rank, each with the number of its value."""
        for at, fields in enumerate(_all_shards(self.values[rank][name])):
            for piece in self.shards(rank, fields, name).boxes:
                yield at, piece

    def _sample(self, rank: int, stored: StoredTensor) -> bytes:
        few = structs.replace(stored, shape=(min(stored.placement.numel, _SAMPLE),))
        return bits_of(self.files.archives[rank].materialised(few))

    def keep_lowest(self, partition: Partition) -> None:
        """Leave out the copies of all groups but the one with the lowest rank."""
        lowest = min(partition, key=min)
        names = {name for name, cuts in self._cuts.items() if len(cuts) > 1 and self._partition(name) == partition}
        self.values = {
            rank: values if rank in lowest else {name: value for name, value in values.items() if name not in names}
            for rank, values in self.values.items()
        }
        self.__dict__.pop("_cuts", None)

    def renames(self) -> dict[int, dict[str, str]]:
        """By rank, new names for names that mean different parameters on different ranks."""
        made: dict[int, dict[str, str]] = {}
        for name, cuts in self._cuts.items():
            if len(cuts) < 2:
                continue
            groups = [_owners(by) for by in cuts.values()]
            if not isinstance(name, str):
                continue  # an id, see has_other_ids
            if sum(map(len, groups)) != len(frozenset().union(*groups)):
                first, second = (next(iter(by)) for by in list(cuts.values())[:2])
                raise self.files.of_another_save(second, first, f"{name} is cut in another way")
            for by, ranks in zip(cuts.values(), groups, strict=True):
                for rank in by:
                    made.setdefault(rank, {})[name] = f"{name}@{min(ranks)}"
        return made

    def renames_of_whole(self, names: Collection[str]) -> dict[int, dict[str, str]]:
        """By rank, new names for parameters that are whole on each of several ranks and differ there.

        Experts on groups of one rank are such parameters, and nothing is sharded in a group of one. Only files in which other
        parameters are shared by several ranks show that the ranks have one model.
        """
        made: dict[int, dict[str, str]] = {}
        if not any(len(_owners(by)) > 1 for cuts in self._cuts.values() for by in cuts.values()):
            return made
        for name in names:
            by = {rank: values[name] for rank, values in self.values.items() if name in values}
            ranks_by_value: dict[object, list[int]] = {}
            for rank, stored in by.items() if all(isinstance(value, StoredTensor) for value in by.values()) else ():
                ranks_by_value.setdefault((stored.shape, stored.dtype, self._sample(rank, stored)), []).append(rank)
            for ranks in ranks_by_value.values() if len(ranks_by_value) > 1 else ():
                for rank in ranks:
                    made.setdefault(rank, {})[name] = f"{name}@{min(ranks)}"
        return made

    @property
    def has_other_ids(self) -> bool:
        """Whether an id is another parameter on another rank."""
        return any(len(cuts) > 1 for key, cuts in self._cuts.items() if isinstance(key, int))

    def renamed(self, renames: Mapping[int, Mapping[str, str]]) -> dict[Any, dict[int, Any]]:
        """By new name, the value of each rank that has it."""
        by_name: dict[Any, dict[int, Any]] = {}
        for rank, values in self.values.items():
            for name, value in values.items():
                by_name.setdefault(renames.get(rank, {}).get(name, name), {})[rank] = value
        return by_name

    def value(self, key: str, by: Mapping[int, Any]) -> Any:
        """Return one value of the optimizer: a tensor, or a plain value that is the same on all ranks."""
        if any(isinstance(value, (Fields, StoredTensor)) for value in by.values()):
            return self.tensor(key, by, strictly=True)
        return self.files.agreed(by, key)

    def tensor(self, key: str, by: Mapping[int, Any], *, strictly: bool) -> StoredTensor:
        """Return one tensor of all ranks.

        `strictly`: a tensor that is not cut must be equal on all ranks; else the lowest rank's counts.
        """
        sharded = {rank: self.shards(rank, value, key) for rank, value in by.items() if isinstance(value, Fields)}
        unsharded = next((rank for rank, value in by.items() if isinstance(value, Fields) != bool(sharded)), None)
        if unsharded is not None:
            raise self.files.damaged(unsharded, f"{key} is not sharded, as in the files of other ranks")
        if sharded:
            return self._joined(key, sharded)
        whole = {rank: value for rank, value in by.items() if isinstance(value, StoredTensor)}
        if strictly and len(whole) == len(by):
            return self.files.scalar(whole, key, key)
        self.files.agreed(by, f"the shape or dtype of {key}")
        return structs.replace(next(iter(whole.values())), key=key)

    def _joined(self, key: str, sharded: Mapping[int, TorchShards]) -> StoredTensor:
        (first, first_shard), *others = sharded.items()
        for rank, other in others:
            if other.cut != first_shard.cut:
                raise self.files.of_another_save(rank, first, f"{key} is cut in another way")
        lacking = sorted(first_shard.ranks - set(sharded))
        if lacking:
            raise self.files.damaged(lacking[0] if lacking[0] < self.files.num else first, f"does not have {key}")
        pieces = [piece for shards in sharded.values() for piece in shards.boxes]
        try:
            return _placed(key, first_shard.shape, pieces)
        except LayoutError as error:
            raise self.files.damaged(first, f"{key}: {error}") from error


def in_order(partition: Partition) -> list[list[int]]:
    """Return the groups as lists, by which partitions are sorted."""
    return sorted(map(sorted, partition))


def _owners(by: Mapping[int, TorchShards]) -> frozenset[int]:
    """Return the ranks that share a tensor; those whose shard is empty are not among its shards. `by`: its shards by rank."""
    return frozenset(by) | next(iter(by.values())).ranks


def _all_shards(tree: Any) -> Iterator[Fields]:
    if isinstance(tree, (ShardedTensorFields, DTensorFields)):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _all_shards(value)


def _placed(key: str, shape: Shape, pieces: Sequence[tuple[Box, StoredTensor]]) -> StoredTensor:
    """Return a tensor of boxes in several files. Raises LayoutError for elements in no box, or in two."""
    if not pieces:
        raise LayoutError("its elements are in no file")
    full = [(box, tensor) for box, tensor in pieces if box.numel]
    bounds = [bounds_of_box(shape, box) for box, _ in full]
    if all(stop - start == box.numel for (start, stop), (box, _) in zip(bounds, full, strict=True)):
        parts = [RankFile(start, stop, tensor) for (start, stop), (_, tensor) in zip(bounds, full, strict=True)]
        return in_runs(key, shape, parts, pieces[0][1])
    dtypes = {tensor.dtype for _, tensor in full}
    if len(dtypes) > 1:
        raise LayoutError(f"the ranks have it in different dtypes, {' and '.join(sorted(dtypes))}")
    at = {-1 - index: place_of(tensor, 0) for index, (_, tensor) in enumerate(full)}
    placement = Boxes(shape, tuple((-1 - index, (Block(box, 0),)) for index, (box, _) in enumerate(full)))
    if placement.gap() is not None or placement.overlapping:
        raise LayoutError("elements are in no file, or in two")
    return in_chunks(key, placement, at, full[0][1])
