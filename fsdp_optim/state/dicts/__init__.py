"""Full dicts: this library's and other libraries' dialects, the names and ids in them, and the order in which ids count."""

from fsdp_optim.state.dicts.dialects import normalize
from fsdp_optim.state.dicts.full import NON_PARAM_STATE, RESERVED_KEYS, FullState
from fsdp_optim.state.dicts.names import Names

__all__ = ["NON_PARAM_STATE", "RESERVED_KEYS", "FullState", "Names", "normalize"]
