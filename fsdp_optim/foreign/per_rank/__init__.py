"""Formats with one file per rank: sharded state dicts of FSDP1, OLMo's local checkpoints, and fairscale's shards.

`rank_files.py` has what they share; `rank_halves.py` joins the ranks' dicts; `fairscale_writer.py` writes fairscale's files.
"""
