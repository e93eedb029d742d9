"""The content of a save as the ranks read it together, before anything is made in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from fsdp_optim.adapters import ModelReader
from fsdp_optim.arguments import text_of_format
from fsdp_optim.checkpoint.common.arguments import SaveArguments
from fsdp_optim.checkpoint.common.contents import LEFT_OUT, RECORDS, HalvesEnd, SavedHalf, read_state, read_weights
from fsdp_optim.checkpoint.common.optim_description import describe, small_values, stored_tensors
from fsdp_optim.checkpoint.common.printing import Place, objects_of, scalars_of
from fsdp_optim.checkpoint.common.run_state import refuse_sharded
from fsdp_optim.checkpoint.common.shared_elements import warn_of_shared_elements
from fsdp_optim.checkpoint.common.trees import read_trees
from fsdp_optim.checkpoint.save.file_plan import FilePlan
from fsdp_optim.checkpoint.save.loadable_check import prove_loadable
from fsdp_optim.checkpoint.save.renaming import SavedNames
from fsdp_optim.errors import StateError
from fsdp_optim.formats.base.index import CheckpointIndex, Facts, KnownExtra, NewTree, StoredExtra, StoredOptim
from fsdp_optim.formats.base.protocols import COMMON, MODULES, Prepared, SavedWeights, Writer, rank_extra_name
from fsdp_optim.formats.base.records import PLANNED
from fsdp_optim.results.fingerprints import ValueFingerprint
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.storage.base import Capabilities
from fsdp_optim.tensors.memory import dtype_name
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.verbs.ends import LiveEnd
from fsdp_optim.verbs.joint_steps import joint_steps

if TYPE_CHECKING:
    from fsdp_optim.checkpoint.common.optim_trees import OptimTree


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
    optim_tree: OptimTree | None = None  # the optimizer, where it is a dict in state=

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
        if options.fingerprint and not writer.keeps_fingerprint:
            raise StateError(
                f"fingerprint=True: the format {text_of_format(options.format)} has no place for a fingerprint: leave it out, or "
                'give format="safetensors"'
            )
        weights = read_weights(
            reader, group, options, options.call, about, which=options.weights, saved_as=options.weights_dtype
        )
        warn_of_shared_elements(weights, group.rank)
        state = None
        if optim is not None:
            state = read_state(reader, optim, group, options, options.call, about, fused_state=options.fused_state)
        if state is not None and state.kept and not writer.keeps_fused_state:
            raise StateError(
                f"fused_state='keep': {state.kept[0]}: the format {text_of_format(options.format)} has no place for the names of "
                'fused parameters whose state cannot be cut: give format="safetensors"'
            )
        names = SavedNames.of(group, options.rename, weights, state)
        weights, state = names.of_half(weights), names.of_half(state) if state is not None else None
        values, own = options.state.saved()  # on every rank: a state_dict() may be a collective call
        common: Mapping[str, Any] = values or {}
        trees, optim_tree = None, None
        if options.state.is_given and writer.writes_trees:  # the same on all ranks
            common, trees, tensors = read_trees(group, common, options, options.call.on_replica_mismatch)
            if options.tree is not None and weights.tensors:
                # Other saves load no module for it.
                from fsdp_optim.checkpoint.common.optim_trees import OptimTree, TreeModel

                shapes = {value.fqn: value.placement.shape for value in weights.tensors}
                optim_tree = OptimTree.of(common, trees, tensors, TreeModel(options.tree.place, shapes, names))
            if optim_tree is not None:
                common = optim_tree.rest_of(common)
                trees = optim_tree.saved(trees) if trees is not None else None
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
            optim_tree=optim_tree,
        )

    @property
    def live(self) -> HalvesEnd:
        """The live tensors as the source of a move."""
        state, trees = (LiveEnd(half.local) if half is not None else None for half in (self.state, self.trees))
        return HalvesEnd(LiveEnd(self.weights.local), state, trees)

    @property
    def absent(self) -> tuple[str, ...]:
        """The parameters without optimizer state."""
        if self.optim_tree is not None:
            return self.optim_tree.absent
        params = self.state.global_state.params.values() if self.state is not None else ()
        return tuple(param.fqn for param in params if param.summary is None)

    def object_prints(self) -> tuple[Mapping[Place, ValueFingerprint], Mapping[str, str]]:
        """Return the fingerprints of values that are not in files, if the save has fingerprints, and the saved names by FQN."""
        if not self.options.fingerprint:
            return {}, {}
        scalars = scalars_of(self.state) if self.state is not None else {}
        of_objects = objects_of(self.weights, self.state, 0)
        of_optim = {place: value for place, value in {**of_objects, **scalars}.items() if place[0] == "optim"}
        renamed = {(half, self.names(fqn), name): value for (half, fqn, name), value in of_optim.items()}
        return {**of_objects, **renamed}, {fqn: self.names(fqn) for fqn in self.weights.global_state.params}

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
        # Read for the last time, and as large as the names of all values.
        prepared = replace(prepared, description=None)
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
        elif self.optim_tree is not None:
            described, tensors = self.optim_tree.stored()
            saved = self.names.of_optim(described)
            optim = StoredOptim(tensors, lambda *_: saved)
        extras: dict[str, StoredExtra] = {}
        if self.common is not None:
            extras[COMMON] = NewTree(self.common) if self.trees is not None else KnownExtra(self.common)
        if self.options.tree is not None:
            extras[PLANNED] = KnownExtra(_places(self.options.tree.place, self.optim_tree))
        if self.weights.module_values:
            extras[MODULES] = KnownExtra(dict(self.weights.module_values))
        which = SavedWeights(self.options.weights, dtype_name(dtype) if dtype is not None else None)
        index = CheckpointIndex(
            where="the new checkpoint",
            weights=stored_tensors(self.weights),
            facts=Facts(
                "",
                world_size,
                self.options.step,
                which,
                models=self.options.models.names,
                views=global_state.views,
                fused_state=tuple(map(self.names, self.state.kept)) if self.state is not None else (),
                joint_steps=joint_steps(self.state.local.optim.classes, self.state.global_state.live)
                if self.state is not None
                else (),
            ),
            aliases={**aliases, **local.module_values.aliases},
            optim=optim,
            extras=extras,
            trees=stored_tensors(self.trees.of("state")) if self.trees is not None else {},
            left_out={fqn: param.placement.shape for fqn, param in global_state.params.items() if fqn in left_out},
        )
        return self.names.of_index(index)


def _places(model: Sequence[str], optim: OptimTree | None) -> dict[str, Any]:
    """Return where the model's and the optimizer's dict were in the state dict that was saved."""
    of_optim = {"optim": list(optim.face.place), "flattened": optim.face.is_flat} if optim is not None else {}
    return {"model": list(model), **of_optim}


def _encode_per_rank(writer: Writer, own: Any, options: SaveArguments, group: RankGroup) -> dict[str, bytes]:
    """Return the values of this rank alone as files. Raises CheckpointError for an unsavable value."""
    if own is None:
        return {}
    return dict([writer.small(rank_extra_name(group.position), own, allow_pickle=options.allow_pickle)])
