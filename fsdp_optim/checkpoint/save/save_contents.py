"""The content of a save as the ranks read it together, before anything is made in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from fsdp_optim.adapters import ModelReader
from fsdp_optim.checkpoint.common.arguments import SaveArguments
from fsdp_optim.checkpoint.common.contents import LEFT_OUT, RECORDS, HalvesEnd, SavedHalf, read_state, read_weights
from fsdp_optim.checkpoint.common.optim_description import describe, small_values, stored_tensors
from fsdp_optim.checkpoint.common.run_state import refuse_sharded
from fsdp_optim.checkpoint.common.trees import read_trees
from fsdp_optim.checkpoint.save.file_plan import FilePlan
from fsdp_optim.checkpoint.save.loadable_check import prove_loadable
from fsdp_optim.checkpoint.save.renaming import SavedNames
from fsdp_optim.errors import StateError
from fsdp_optim.formats.base.index import CheckpointIndex, Facts, KnownExtra, NewTree, StoredExtra, StoredOptim
from fsdp_optim.formats.base.protocols import COMMON, MODULES, Prepared, SavedWeights, Writer, rank_extra_name
from fsdp_optim.memory import dtype_name
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.storage.base import Capabilities
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.verbs.ends import LiveEnd


class SaveContents(Struct, frozen=True):
    """The weights and the optimizer state that a rank saves, under the saved names, and its small files."""

    options: SaveArguments
    writer: Writer
    names: SavedNames
    weights: SavedHalf
    state: SavedHalf | None
    trees: SavedHalf | None  # the tensors of state=
    common: Any  # of the values of state=, those that all ranks have in common, with InFile for tensors; None: there are none
    small_files: Mapping[str, bytes]

    @classmethod
    def read(
        cls,
        name: str,
        reader: ModelReader,
        group: RankGroup,
        optim: Optimizers | None,
        options: SaveArguments,
        writer: Writer,
    ) -> SaveContents:
        """Read them, and agree on them with the other ranks. Called by all ranks."""
        about = f"{name!r}, {'an' if optim is not None else 'no'} optimizer"
        if options.weights == "none" and optim is None and not options.state.is_given:
            raise StateError(
                'weights="none" without an optimizer leaves nothing to save: give optim= or state= too, or other weights='
            )
        weights = read_weights(
            reader, group, options, options.call, about, which=options.weights, saved_as=options.weights_dtype
        )
        state = read_state(reader, optim, group, options, options.call, about) if optim is not None else None
        names = SavedNames.of(group, options.rename, weights, state)
        weights, state = names.of_half(weights), names.of_half(state) if state is not None else None
        values, own = options.state.saved()  # on every rank: a state_dict() may be a collective call
        common: Mapping[str, Any] = values or {}
        trees = None
        if options.state.is_given and writer.writes_trees:  # the same on all ranks
            common, trees = read_trees(group, common, options)
        for key, value in common.items():
            refuse_sharded(f"state[{key!r}]", value)
        return cls(
            options=options,
            writer=writer,
            names=names,
            weights=weights,
            state=state,
            trees=trees,
            common=common or None,
            small_files=_encode_per_rank(writer, own, options, group),
        )

    @property
    def live(self) -> HalvesEnd:
        """The live tensors as the source of a move."""
        state, trees = (LiveEnd(half.local) if half is not None else None for half in (self.state, self.trees))
        return HalvesEnd(LiveEnd(self.weights.local), state, trees)

    @property
    def absent(self) -> tuple[str, ...]:
        """The parameters without optimizer state."""
        params = self.state.global_state.params.values() if self.state is not None else ()
        return tuple(param.fqn for param in params if param.summary is None)

    def plan_files(self, ranks: Sequence[int], strategy: str, *, shared: str, capabilities: Capabilities) -> FilePlan:
        """Plan the files, the same on all ranks. `shared`: the string from the leader's `Prepared`."""
        return FilePlan.of(
            self.writer,
            self.options,
            self.weights,
            self.state,
            ranks,
            trees=self.trees,
            strategy=strategy,
            shared=shared,
            capabilities=capabilities,
        )

    def prepare(self, world_size: int) -> tuple[Prepared, Mapping[str, bytes]]:
        """Prepare the save in the format, on the leader. Refuse values that could not be loaded.

        Returns the prepared save, and all small files of the leader: its own, and those of the format.
        """
        index = self.index(world_size)
        prepared = self.writer.prepare(index, allow_pickle=self.options.allow_pickle, records=RECORDS)
        if self.state is not None and index.optim is not None and prepared.description is not None:
            prove_loadable(self.state, index.optim, prepared.description, self.names.given)
        return prepared, {**self.small_files, **prepared.files}

    def index(self, world_size: int) -> CheckpointIndex:
        """Return the index of the new checkpoint, as the leader has it."""
        global_state, local, dtype = self.weights.global_state, self.weights.local, self.options.weights_dtype
        left_out = {fqn for fqn, param in global_state.params.items() if param.group_index == LEFT_OUT}
        aliases = {alias: fqn for alias, fqn in local.view.aliases.items() if fqn not in left_out}
        optim: StoredOptim | None = None
        if self.state is not None:
            tensors = stored_tensors(self.state)
            saved = self.names.of_optim(describe(self.state, tensors))
            optim = StoredOptim(tensors, lambda *_: saved, read=small_values(self.state))
        extras: dict[str, StoredExtra] = {}
        if self.common is not None:
            extras[COMMON] = NewTree(self.common) if self.trees is not None else KnownExtra(self.common)
        if self.weights.module_values:
            extras[MODULES] = KnownExtra(dict(self.weights.module_values))
        which = SavedWeights(self.options.weights, dtype_name(dtype) if dtype is not None else None)
        index = CheckpointIndex(
            where="the new checkpoint",
            weights=stored_tensors(self.weights),
            facts=Facts("", world_size, self.options.step, which, views=tuple(map(repr, self.options.call.views))),
            aliases={**aliases, **local.module_values.aliases},
            optim=optim,
            extras=extras,
            trees=stored_tensors(self.trees) if self.trees is not None else {},
            left_out={fqn: param.placement.shape for fqn, param in global_state.params.items() if fqn in left_out},
        )
        return self.names.of_index(index)


def _encode_per_rank(writer: Writer, own: Any, options: SaveArguments, group: RankGroup) -> dict[str, bytes]:
    """Return the values of this rank alone as files. Raises CheckpointError for an unsavable value."""
    if own is None:
        return {}
    return dict([writer.small(rank_extra_name(group.position), own, allow_pickle=options.allow_pickle)])
