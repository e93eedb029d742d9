"""The way of a process that has torch imported into a host, where it continues as one that the bench starts.

The process that goes in has a parent outside, which notes how it ends, in the file `<name>.ended` of the run's folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from hosts import launched, namespaces


def run_in_host(pid: int, folder: str, name: str, words: Sequence[str], clock: Mapping[str, str]) -> None:
    """Run a command in the host whose first process is `pid`; returns in the host, where that command has ended.

    `folder`: the run's, outside; `name`: that of the process in it. `words`: a module and its arguments. `clock`:
    variables that a new interpreter must have from its start; without any the command runs in this one.
    """
    notes = os.open(folder, os.O_RDONLY)
    namespaces.enter(pid)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        _note_end(notes, name, os.waitstatus_to_exitcode(status))
    os.close(notes)
    os.setsid()
    os.chdir("/tmp")
    if clock:
        os.environ.update(clock)
        launched.redirect(name)
        launched.announce(name)
        os.execv(sys.executable, [sys.executable, "-m", *words])
    if words[0] == "hosts.launched":
        launched.main(words[1], words[2:])
        return
    launched.redirect(name)
    launched.announce(name)
    from torch.distributed.run import main

    sys.argv[0] = "torchrun"
    main(list(words[1:]))


def _note_end(folder: int, name: str, code: int) -> None:
    new, noted = f"{name}.new-end", f"{name}.ended"
    file = os.open(new, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=folder)
    os.write(file, str(code).encode())
    os.close(file)
    os.rename(new, noted, src_dir_fd=folder, dst_dir_fd=folder)
    os._exit(0)
