"""State dicts of models and optimizers in torch's forms, read and set without a step and without a gather.

    options.py                      torch's `StateDictOptions`, read, or refused by name
    model_state.py, optim_state.py  the live model and optimizers: their values stay sharded as they are
    optim_dict.py                   an optimizer's dict as torch nests or flattens it
    initial.py                      the values of an optimizer that has none yet
    flat.py                         the flat parameters of FSDP1, read and filled
    values.py                       a tree of values, unsharded

`dcp/state_dict.py` has the functions. A `set_*` function first brings all values into the form of the live ones, and changes the
live model and optimizers only then.
"""
