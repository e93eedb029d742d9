"""How much memory a process took at its peak."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

MIB = 1 << 20


class Peak:
    """The most memory that this process used inside the context, beyond what it had at its beginning, in MiB."""

    def __enter__(self) -> Peak:
        gc.collect()
        # Freed memory that the process still has would be reused without showing in the peak.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        self._before = self._read("VmRSS")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.mib = (self._read("VmHWM") - self._before) / 1024

    @staticmethod
    def _read(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
