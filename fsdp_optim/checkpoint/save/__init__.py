"""From a live model and optimizer to files. Every rank writes its own bytes; nothing is gathered.

begin.py                      read the shards, agree on the files, begin in the store
file_plan.py, part_ranges.py  which rank writes which range of which file, the same on all ranks
loadable_check.py             proves, before anything is written, that a load would accept this save
writing.py                    write the extents of this rank, with checksums
finish.py                     the remaining files, and the manifest that completes the checkpoint
foreground.py, background.py  `save` and `async_save`
"""
