"""One value of optimizer state: its kind, its summary without elements, equality bit for bit, and what cannot be gathered."""

from fsdp_optim.state.values.kinds import Evidence, Kind, Observation, infer_kind, observation_of
from fsdp_optim.state.values.opaque import OpaqueShards, depends_on_cut
from fsdp_optim.state.values.same import Incomparable, fingerprint_of, fold_of, key_of, same
from fsdp_optim.state.values.summary import Scalar, Scalars, Summary

__all__ = [
    "Evidence",
    "Incomparable",
    "Kind",
    "Observation",
    "OpaqueShards",
    "Scalar",
    "Scalars",
    "Summary",
    "depends_on_cut",
    "fingerprint_of",
    "fold_of",
    "infer_kind",
    "key_of",
    "observation_of",
    "same",
]
