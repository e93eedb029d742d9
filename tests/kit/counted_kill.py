"""Code for a process that dies before its n-th operation on files."""

from __future__ import annotations

from collections.abc import Sequence

_CODE = """
import os, signal
left = [{number}]

def counted(name):
    real = getattr(os, name)

    def call(*args, **options):
        if name != "open" or args[1] & os.O_CREAT:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    setattr(os, name, call)

for name in {operations}:
    counted(name)
"""


def killed_before(number: int, operations: Sequence[str], code: str) -> str:
    """Return `code` for a process that is killed before its operation `number`, from 0.

    `operations`: names of functions of `os`; of calls of `open`, those that create a file count. The code may read `left[0]`,
    the number of operations that are left.
    """
    return f"{_CODE.format(number=number, operations=tuple(operations))}\n{code}"
