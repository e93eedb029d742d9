"""One new checkpoint of several. Both calls are conversions (`offline/conversion`) whose units have elements of several sources.

averaging.py        `average`: the sources are opened, compared and written as one
agreement.py        the names and shapes that must agree, and the rest that may differ
blending.py         the elements: added in float64 and rounded once
merging.py          `merge_adapter`: the base and the adapter are opened, matched and written as one
lora.py             what an adapter's configuration says, and the product of two factors in blocks of rows
merged_source.py    the elements: of the base, of the adapter, and products that are added
"""
