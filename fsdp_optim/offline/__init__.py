"""Work on checkpoints without a model: convert, verify, inspect.

convert.py, convert_file.py, source_contents.py    a checkpoint written again, in another format or other files
copy_ranges.py, workers.py                         byte ranges of the new files, copied by several threads in bounded memory
verifying.py, inspecting.py                        read every byte, or no elements
"""
