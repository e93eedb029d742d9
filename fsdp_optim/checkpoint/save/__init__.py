"""From a live model and optimizer to files. Every rank writes its own bytes, and some of the small values.

begin.py                      inspect, decide, create: the leader begins in the store, and the other ranks follow
save_contents.py              read the shards of all ranks, under the saved names
decision.py                   the record of the leader's decision, and the meeting in which the ranks agree on it
file_plan.py, part_ranges.py  which rank writes which range of which file, computed alike on all ranks
loadable_check.py             a load would accept this save; shown before anything is written
writing.py                    write the extents of this rank, with checksums
finish.py                     the remaining files, and the manifest that completes the checkpoint
foreground.py, background.py  `save` and `async_save`
saved_line.py, trace.py       the line that says what a save has done, and the timeline of its ranks
"""
