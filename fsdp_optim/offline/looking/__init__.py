"""What can be known of a checkpoint without reading elements.

inspecting.py         `inspect`: the content of a checkpoint of any format
diagnosing.py         `diagnose`: what a path is, what is missing there, and the line of Python that loads it
placing.py            `placement`: which rank would hold how much under a wrapper
assumed_layouts.py    the Layout that this wrapper would give, from names and shapes alone
"""
