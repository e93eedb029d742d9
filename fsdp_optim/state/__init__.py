"""An optimizer's state as plain values. No communication.

values/    one value: its kind, dtype and placement; equality, bit for bit
dicts/     full dicts, in every library's dialect: names, ids, and their order
live/      the optimizer of this rank, and how a full state fits it
merged/    the reports of all ranks, merged into one global state that is equal on every rank
"""
