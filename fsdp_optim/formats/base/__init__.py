"""What every checkpoint format shares. The protocols and the order of calls are in protocols.py.

protocols.py      Format, Reader, FormatWriter: recognise, read, write
records.py        the values that formats and the rest of the library exchange: tensors in files, the files of a save
description.py    the optimizer without the elements of its tensors; codec.py encodes its plain values exactly
header.py, extents.py, checksums.py, frames.py, bools.py     bytes of files: where they are, and whether they are intact
summary.py, json_text.py, distrust.py                        the beginning of a manifest, and reading without trust
"""
