"""One file per wrapper, with an `Adapter` that turns a model into Handles. `ModelReader` combines all adapters."""

from fsdp_optim.adapters.base import Adapter
from fsdp_optim.adapters.known import all_adapters, use_adapters
from fsdp_optim.adapters.named_tensors import module_of, reader_of
from fsdp_optim.adapters.reader import ModelReader
from fsdp_optim.adapters.tree import ModuleTree

__all__ = ["Adapter", "ModelReader", "ModuleTree", "all_adapters", "module_of", "reader_of", "use_adapters"]
