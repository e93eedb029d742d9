"""The calls that prove: the fingerprint of a model and an optimizer, and what is known about resumes from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fsdp_optim.boundary.tracebacks import public
from fsdp_optim.checkpoint import fingerprinting
from fsdp_optim.checkpoint.common.run_state import RunState
from fsdp_optim.checkpoint.proof import file as proof_file
from fsdp_optim.options import CallArguments, CallOptions, Model
from fsdp_optim.results.fingerprints import Fingerprint
from fsdp_optim.state.live.local import Optimizers
from fsdp_optim.tensors.memory import ordinary_tensors

_CALL = CallOptions()


@public
@ordinary_tensors()
def fingerprint(
    model: Model,
    optim: Optimizers | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    projections: int = 0,
    options: CallOptions = _CALL,
) -> Fingerprint:
    """Return 128 bits, a norm and the number of NaNs for every value of a model, its optimizer and other state.

    Called by all ranks of the model; without a wrapper, by all ranks of the job.

    The bits are equal for equal values, and only for these, whatever the wrapper, the sharding, the world size and the device:
    each rank adds up its own elements, and only sums are exchanged. Replicas count once, and are compared as a save compares
    them. Padding does not count. Every element is read, none is sampled. Nothing is changed. Two different values have equal
    bits with a probability of less than 2**-96, if nobody has looked for such values on purpose.

    Values of the optimizer's state that belong to a shard and not to its elements (opaque values of a cut parameter) are
    comparable at the same cut only.

    Args:
        model: the root of the model, in any wrapper or none, or a list of the pipeline stages that this rank has.
        optim: its optimizer, or a list of optimizers.
        state: as for `save`: objects with `state_dict()`, and trees of tensors, DTensors and plain values. `per_rank(...)` has a
            fingerprint for each rank.
        projections: for each value, so many sums of its elements with fixed random signs, at most 256.
        options: a `CallOptions`. Besides `bucket_nbytes`, nothing is held.

    Returns:
        A `Fingerprint`, the same on all ranks: `a.differences(b)` names what differs, `to_json` and `from_json` keep it.

    Raises (the same on all ranks):
        StateError: replicas differ, or a value is equal only to itself and has no fingerprint.
        WrapperError, RankError, RankTimeoutError: as `gather_full_optim_state_dict`.
    """
    arguments = fingerprinting.FingerprintArguments(CallArguments.of(options), RunState(state), projections)
    return fingerprinting.fingerprint(model, optim, arguments)


@public
def proof_of(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> str:
    """Return what `CheckpointManager(prove=...)` knows about resumes from a checkpoint. No communication.

    Args:
        path: the folder of a checkpoint, or its URL.
        storage_options: the options of a URL, as for `SaveOptions`.

    Returns:
        "identical" or "rounding": the verdict of the last run that has resumed from it, where it was proven. "recorded": the step
        after it is recorded, and no run has been proven yet. "": nothing is recorded.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    return proof_file.proof_of(path, storage_options)
