"""The command line `fsdp-optim`: a skin over the public functions.

app.py                         the table of the commands, each imported when it is called; exit codes
options.py, output.py          what several commands share: their options, their output
failing.py                     an error of the library as one line that names the options of the command
commands/                      a file for each command, with its `command`, which imports torch when it runs
roots.py                       a folder of checkpoints where one checkpoint is wanted
tree.py, units.py              the tree of `inspect`; sizes in words

Exit codes: 0 fine; 1 differs, damaged or unfinished; 2 wrong use, or nothing is there.
"""
