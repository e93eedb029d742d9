"""From files to a live model and optimizer. Every rank reads and verifies its own bytes.

restore.py                    the call
opening.py                    all ranks open the same checkpoint
chosen_models.py              of several models, those that the call names
targets.py, matching.py       which stored tensor goes where, checked before memory is allocated
stored_state.py               the optimizer of a checkpoint as a `FullState`
reading.py                    the bytes that each rank reads
cast_range.py                 cast=True makes no number infinite
shared_memory.py              live tensors in the same memory get the same elements
compare.py                    compare=True
saved_state.py                the values of the trainer, as one rank has them
loaded_objects.py             the objects in `state=`: check their names, then load them
installing.py                 install into the live objects, on all ranks or on none
"""
