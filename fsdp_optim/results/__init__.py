"""The results of the public calls: frozen records, with a representation that fits on a screen and no other code.

calls.py          of saves and loads, and of `thin`
contents.py       what a checkpoint contains: lists, summaries
offline.py        of calls on checkpoints alone: average, merge, verify, prune, copy, diagnose
differences.py    of `diff` and `show`
rank_maps.py      of `placement`: the bytes that each rank would hold
fingerprints.py   of `fingerprint`, and how two are compared
shown.py          parts of representations
"""
