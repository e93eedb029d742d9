"""Checkpoints seen through Views: stored tensors that are fused as their parts, and parts as the fused tensor that they make.

    seen(reader, views) -> Reader     # reader.py: the same checkpoint, with other names and tensors; nothing is read
        .index                        # names.py finds which names a View is of, and what they become
        .read(extents)                # mapped.py: the elements of a tensor that no file has as it is, from long ranges of files
        optimizer                     # state.py: its state and its param groups, when its parameters have names

Both directions are one mechanism: a tensor is made of Tiles of others (`layout.views`).
"""

from fsdp_optim.checkpoint.views.mapped import MappedFiles
from fsdp_optim.checkpoint.views.names import Seen, Through
from fsdp_optim.checkpoint.views.reader import SeenReader, check_used, reader_inside, seen
from fsdp_optim.checkpoint.views.state import SeenState

__all__ = ["MappedFiles", "Seen", "SeenReader", "SeenState", "Through", "check_used", "reader_inside", "seen"]
