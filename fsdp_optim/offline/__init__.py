"""Work on checkpoints without a model and without ranks, in bounded memory.

conversion/    a checkpoint written again: in another format, in other files, under other names
combining/     one new checkpoint of several: averages, and a base with an adapter merged into it
values/        single values by name: figures, files of them, and two checkpoints compared value by value
looking/       what a checkpoint contains, what a path is, which rank would hold how much; no elements are read
keeping/       every byte read: verified, copied; and the checkpoints of a folder that no rule keeps, removed
pages/         pages about these results for a browser, and where files for users go

Imports: combining -> conversion; values -> {conversion, pages}; keeping -> {conversion, values}. `fsdp_optim.registry` has the
dotted names of the calls, which `api` and the command line import when they are made.
"""
