"""Checkpoints of other libraries. Nothing in the core imports this package: formats are found through the registry.

archive/         files of torch.save, read without executing anything in them
torch/           plain torch files: a model and an optimizer in one file, or in a folder
dcp/             folders of torch.distributed.checkpoint, read and written
deepspeed/       ZeRO 1 to 3, and universal checkpoints, read and written
per_rank/        one file per rank: sharded state dicts, OLMo, fairscale's shards
hugging_face/    folders of safetensors files without an optimizer
reader.py        the reader that they share: what a checkpoint contains, as one value
"""
