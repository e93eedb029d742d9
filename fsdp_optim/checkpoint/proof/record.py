"""What the step after a checkpoint led to, as values that every sharding gives alike: the content of `proof.json`."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from fsdp_optim.tensors.memory import dtype_named

VERSION = 1


class Measured(Struct, frozen=True, array_like=True):
    """One tensor of all ranks together.

    Attributes:
        bits: 128 bits that are equal for equal elements, whatever their sharding, as a hexadecimal number.
        dtype: torch's name of the dtype; for a number of Python the name of its type.
        numel: the number of elements.
        norm: the Euclidean norm of the finite elements.
        num_nonfinite: the number of elements that are infinite or no number.
        projections: fixed random projections: sums of the elements, each with a sign that depends on its index.
        has_dims: whether the tensor has dimensions. One without is a step count or the like, and must be equal exactly.
    """

    bits: str
    dtype: str
    numel: int
    norm: float
    num_nonfinite: int
    projections: tuple[float, ...] = ()
    has_dims: bool = True

    def __post_init__(self) -> None:
        if self.has_dims:  # a number of Python has the name of its type
            dtype_named(self.dtype)  # raises TypeError for another word


Values = Mapping[str, Measured]
"""FQN -> the weight or the buffer."""

StateValues = Mapping[str, Mapping[str, Measured]]
"""FQN -> name -> the value of the optimizer's state."""


Groups = tuple[Mapping[str, str], ...]
"""For each param group: name -> hyperparameter, as text."""


class Random(Struct, frozen=True, array_like=True):
    """The digests of the random states of one rank, by the name of the generator.

    `at_start`: after the save or the resume. `at_forward`: before the first forward pass of the step. `at_update`: before the
    optimizer's step.
    """

    at_start: Mapping[str, str] = {}
    at_forward: Mapping[str, str] = {}
    at_update: Mapping[str, str] = {}

    @property
    def drawn_before(self) -> tuple[str, ...]:
        """The generators that gave numbers between the start and the forward pass."""
        return _changed(self.at_start, self.at_forward)

    @property
    def drawn_inside(self) -> tuple[str, ...]:
        """The generators that gave numbers inside the step."""
        return _changed(self.at_forward, self.at_update)


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name in before if name in after and before[name] != after[name])


class Batch(Struct, frozen=True, array_like=True):
    """What one rank was given in one forward pass, or observed.

    `digest`: of all of it. `rows`: a digest of each sample, where all tensors have one first dimension; empty where they have
    not. `row_shapes`: the shapes of one sample, as text.
    """

    digest: str
    rows: tuple[str, ...] = ()
    row_shapes: str = ""


class WentIn(Struct, frozen=True, kw_only=True):
    """The state that went into the step, as it was before the first forward pass.

    `frozen`, `evaluated`: the FQNs of parameters that require no gradient, and of modules in eval mode. `aliases`: other FQNs of
    tied parameters. `trees`: the tensors in plain values of `state=`, by key; those of objects would need their `state_dict()`.
    """

    weights: Values
    moments: StateValues
    frozen: tuple[str, ...] = ()
    evaluated: tuple[str, ...] = ()
    aliases: Mapping[str, str] = {}
    trees: Values = {}


class CameOut(Struct, frozen=True, kw_only=True):
    """The state after the step.

    Attributes:
        weights: the parameters and buffers.
        moments: the optimizer's state.
        buffers: which of `weights` are buffers.
        spread: FQN -> how far an honest weight may be away, as a norm: see `bounds.py`. Empty where nothing is known.
        trees: the tensors of `state=`, by the names on their path.
        objects: name -> path -> what an object of `state=` has there, as text; numbers and digests.
        own_objects: the same for the objects of `per_rank`, for each rank.
    """

    weights: Values
    moments: StateValues
    buffers: tuple[str, ...] = ()
    spread: Mapping[str, float] = {}
    trees: Values = {}
    objects: Mapping[str, Mapping[str, str]] = {}
    own_objects: tuple[Mapping[str, Mapping[str, str]], ...] = ()


class StepRecord(Struct, frozen=True, kw_only=True):
    """One step after a checkpoint, seen by all ranks.

    Attributes:
        version: of this form.
        checkpoint: the token of the checkpoint; empty until the record is written.
        proven: "identical" or "rounding": the verdict of the last run that resumed from the checkpoint and made this step. It
            stands at the beginning of the file, so that it can be read alone.
        saved_step: the step of the checkpoint.
        step: the number of this step.
        world_size: the number of ranks.
        structure: a digest of how everything is cut over ranks: with an equal one the arithmetic is the same.
        rounding: the coarsest relative rounding of a floating dtype in the forward pass: see `bounds.py`.
        went_in: None where no hook saw the step.
        groups: the hyperparameters of each param group in the optimizer's step, as text, on the lowest rank.
        other_groups: the same for the ranks that have others, by their place among the ranks.
        has_updated: whether a hook saw the optimizer's step; one that is left out for an overflow, say, is not seen.
        random: of each rank.
        batches: of each rank, one for each forward pass; empty where nothing was seen.
        is_observed: whether the batches were given to `observe`, instead of being seen by a hook.
        numbers: name -> the values of all ranks for a number that was given to `observe`: "loss", "grad_norm".
        observed: name -> digests of all ranks for what else was given to `observe`.
        gradients: before the optimizer's step; empty where no hook saw them.
        came_out: what the step led to.
        depends_on_ranks: why another number of ranks leads to another step: BatchNorm, say. Empty: it does not.
    """

    version: int = VERSION
    checkpoint: str = ""
    proven: str = ""
    saved_step: int
    step: int
    world_size: int
    structure: str
    rounding: float
    went_in: WentIn | None
    groups: Groups
    other_groups: Mapping[int, Groups] = {}
    has_updated: bool = True
    random: tuple[Random, ...]
    batches: tuple[tuple[Batch, ...], ...]
    is_observed: bool = False
    numbers: Mapping[str, tuple[float, ...]] = {}
    observed: Mapping[str, tuple[str, ...]] = {}
    gradients: Values = {}
    came_out: CameOut
    depends_on_ranks: str = ""

    def __post_init__(self) -> None:
        of_ranks = self.random, self.batches, self.came_out.own_objects, *self.numbers.values(), *self.observed.values()
        if any(len(values) != self.world_size for values in of_ranks):
            raise ValueError(f"some values are not those of {self.world_size} ranks")
