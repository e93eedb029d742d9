"""The calls between memory and storage.

    common/     what saves and loads share: contents, files, formats, stores, results
    catalog/    the checkpoints of a folder: lists, order, retention
    save/       from live tensors to files: begin, write, finish; in the foreground and in the background
    load/       from files to live tensors: open, match, read, install
    run/        CheckpointManager: when to save, what to resume from
    trainers/   folders that a trainer fills with files of its own

`save` uses two checks of `load`, so that what is saved is known to load; `run` uses all others.
"""
