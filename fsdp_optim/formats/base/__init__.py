"""What every checkpoint format shares. The protocols and the order of calls are in protocols.py.

protocols.py      Format, Reader, Writer: recognise, read, write
index.py          CheckpointIndex: all that a checkpoint says, one that is open or one that will be written
some_models.py    an open checkpoint of several models, of which a caller wants some
stored_columns.py the tensors of open safetensors files
records.py        the values that formats and the rest of the library exchange: tensors in files, the files of a save
description.py    the optimizer as writers encode it; saved_optim.py leads from an index to it and back; codec.py encodes values
header.py, header_entries.py, extents.py, checksums.py, frames.py, bools.py   bytes of files: where, and whether intact
summary.py, json_text.py, distrust.py                        the beginning of a manifest, and reading without trust
"""
