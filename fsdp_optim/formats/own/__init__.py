"""This library's own format: safetensors files, checksums, and the manifest `fsdp_optim.json`, written last.

probe.py       is there a complete checkpoint? Asked before anything is read, replaced or removed
reader.py      the manifest, and the place of every tensor
folders.py     the folders of several models, and the names of tensors in them; one_of_several.py opens one by its path
extras.py      values of the trainer, as JSON and tensors
format.py      the Format, and its writer
"""

from fsdp_optim.formats.own.format import OURS
from fsdp_optim.formats.own.probe import PROBE

__all__ = [
    "OURS",
    "PROBE",
]
