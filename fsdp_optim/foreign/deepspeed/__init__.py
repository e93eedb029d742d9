"""Checkpoints of DeepSpeed, read only: ZeRO 1, 2 and 3, universal ones, and models without ZeRO.

`files.py` finds the files, `model.py`, `optim.py` and `universal.py` read them, `cuts.py` says where ZeRO puts each element.
"""
