"""The bytes of a checkpoint: `base` has the protocols of every format, `own` this library's format (docs/format.md).

Formats of other libraries are in `fsdp_optim.foreign`, behind the same protocols.
"""
