"""What a writer of files for another library may ask of a conversion."""

from __future__ import annotations


class TakesScalars:
    """A `FormatWriter` whose `prepare` gets, in a conversion, the 0-dim tensors of the state themselves, as values of the kind
    SCALAR, because the metadata in its files depend on their elements.
    """
