"""Views that are learned from a model: from its classes, its shapes, and the names that its trainer writes. No collectives.

views_of_transformers(model)     # transformers_models.py: the names of `save_pretrained`, by transformers' own conversion
    conversions.py               # the conversion, called on tensors in place of the weights
    element_maps.py              # called on element numbers: which element of a parameter is where in the files
    twins.py                     # the same on small twins, where the numbers of a parameter would take gigabytes
    layers.py                    # equal layers become one View
views_of_megatron(model)         # megatron_models.py: the layouts of megatron-core
"""
