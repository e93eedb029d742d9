"""The face of torch.distributed.checkpoint (DCP): its storage classes over this library's files.

writer.py, reader.py  `Writer` and `Reader`, for torch's own `dcp.save(..., storage_writer=)` and `dcp.load(..., storage_reader=)`
planned_boxes.py      what the plans of all ranks say about each tensor: its shape, and which rank writes which box of it
staged_save.py        a save in the store, as the coordinator has it, and what the coordinator tells each rank
box_writing.py        write the boxes of one rank to their bytes in the files, with checksums
saved_values.py       values that are no tensors: from torch's bytes to plain values, and back
torch_metadata.py     the index of a checkpoint as torch's metadata, under the keys that torch would have given

Torch calls, on a save: `set_up_storage_writer` and `prepare_local_plan` on all ranks, `prepare_global_plan` on the coordinator,
`write_data` on all ranks, `finish` on the coordinator. On a load: `read_metadata`, `prepare_local_plan`, `prepare_global_plan`,
`read_data`.
"""

from fsdp_optim.dcp.reader import Reader
from fsdp_optim.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
