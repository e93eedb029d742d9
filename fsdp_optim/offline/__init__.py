"""Work on checkpoints without a model: convert, verify, inspect, average, copy, diagnose; and prune a folder of them.

convert.py, convert_file.py, source_contents.py    a checkpoint written again, in another format or other files
new_files.py, copy_ranges.py, workers.py           the new files, by ranges of bytes, copied by several threads in bounded memory
unit_sources.py                                    where the elements of these ranges come from
averaging.py, agreement.py, blending.py            one new checkpoint with the averages of several
verifying.py, inspecting.py, inspect_page.py       read every byte, or no elements; a page about the bytes
placing.py, assumed_layouts.py, rank_page.py       which rank would hold how much under a wrapper, and its part of that page
named_values.py, slices.py                         all values of a checkpoint by name, and parts of them
element_windows.py, element_numbers.py             their elements in windows, and figures about these
diffing.py, diff_names.py, diff_page.py            two checkpoints compared, and a page about them
showing.py, extracting.py, output_file.py          single values: figures, files; where files for the user go
copying.py, copied_files.py                        a checkpoint of this library copied byte for byte, and verified meanwhile
diagnosing.py, pruning.py                          what a path is and what is missing there; checkpoints that no rule keeps
"""
