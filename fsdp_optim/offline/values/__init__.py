"""The values of open checkpoints by the names that users give them, and their elements in windows.

named_values.py       all values of a checkpoint by name
slices.py             parts of them, as text between brackets
element_windows.py    their elements, read in windows of bounded size
element_numbers.py    figures about these elements, chunk by chunk

showing.py            `show`: figures about one value, and a histogram
extracting.py         `extract`: some values as a file of numpy, safetensors or torch
diffing.py            `diff`: two checkpoints, value by value; diff_names.py: which values are the same value
stored_prints.py      fingerprints in checkpoints, compared with the bytes of the files and with each other
"""
