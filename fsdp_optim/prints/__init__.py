"""The function that gives a value 128 bits which do not depend on how it is cut. No ranks, no models, no files.

coefficients.py   the fixed numbers by which bytes are multiplied, and the contract: the sums, and how likely a collision is
sums.py           the sums over rows of bytes, on the device where they are
rows.py           a rank's elements as rows of bytes of the unsharded value, with zeros where it has none
"""

from fsdp_optim.prints.coefficients import ROW_NBYTES
from fsdp_optim.prints.rows import RowsOfValues
from fsdp_optim.prints.sums import LocalSums, RowSums

__all__ = ["ROW_NBYTES", "LocalSums", "RowSums", "RowsOfValues"]
