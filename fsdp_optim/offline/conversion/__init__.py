"""A checkpoint written again, in another format or in other files. All processes of the call make the same plan.

convert.py            `convert`: open the source, plan, copy, commit; convert_file.py: where the format writes a single file
arguments.py          its arguments, which the processes compare
source_contents.py    the source's contents as a save would produce them; seen_index.py: as Views see them,
                      group_order.py: the parameters of the groups where the optimizer has no names
new_files.py          the new files, planned, written in units, and committed like a save
copy_ranges.py        the units: ranges of the bytes of new files
unit_sources.py       where the elements of a unit come from
workers.py            the threads of one rank, which copy units until its share is done
"""
