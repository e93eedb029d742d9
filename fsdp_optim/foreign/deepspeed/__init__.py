"""Checkpoints of DeepSpeed: ZeRO 1, 2 and 3, models without ZeRO, and universal checkpoints, which are written too.

`files.py` finds the files, `model.py`, `optim.py` and `universal.py` read them, `cuts.py` says where ZeRO puts each element.
`writer.py` writes universal checkpoints, `universal_state.py` says what they can have, `added.py` what this library adds to them.
"""
