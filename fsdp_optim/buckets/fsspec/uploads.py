"""Objects that one process writes from begin to end, though their parts may come in another order."""

from __future__ import annotations

import contextlib
import io
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_optim.buckets.fsspec.opening import is_seen_at_its_end
from fsdp_optim.errors import CheckpointError


@dataclass
class FileUpload:
    """An object that is being written. A part that comes before its predecessors waits in memory.

    Attributes:
        where: the object, for errors.
        open: opens the file, when its first part comes; None: the object is put whole at the end.
        at: when it was begun, by `time.monotonic`.
    """

    where: str
    key: str
    open: Callable[[], Any | None]
    at: float = field(default_factory=time.monotonic)
    _file: Any = None
    _whole: io.BytesIO | None = None
    _num_written: int = 0
    _waiting: dict[int, bytes] = field(default_factory=dict)
    _receipts: dict[int, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def has_file(self) -> bool:
        """Whether something may be seen under the key because of this upload."""
        return self._file is not None

    def put(self, number: int, data: memoryview) -> str:
        """Write a part, or keep it until its turn; returns its receipt."""
        with self._lock:
            receipt = f"{number} {data.nbytes} {zlib.crc32(data):08x}"
            if number < self._num_written:
                if self._receipts[number] != receipt:
                    raise CheckpointError(f"{self.where}: part {number} is written, so other bytes cannot replace it")
                return receipt
            self._receipts[number] = receipt
            if number > self._num_written:
                self._waiting[number] = bytes(data)
                return receipt
            self._write(data)
            while self._num_written in self._waiting:
                self._write(memoryview(self._waiting.pop(self._num_written)))
            return receipt

    def _write(self, data: memoryview) -> None:
        self._waiting.pop(self._num_written, None)
        if self._file is None and self._whole is None:
            self._file = self.open()
            if self._file is None:
                self._whole = io.BytesIO()
        (self._file if self._whole is None else self._whole).write(data)
        self._num_written += 1

    def check(self, receipts: Sequence[str]) -> None:
        """Raise CheckpointError unless exactly these parts were put."""
        with self._lock:
            put = [self._receipts.get(number) for number in range(len(receipts))]
            if put != list(receipts) or len(self._receipts) != len(receipts) or self._waiting:
                raise CheckpointError(f"{self.where}: a part of it is missing, or is not the one that was put last")

    def end(self) -> bytes | None:
        """Complete the file; returns the content instead where it is to be put whole."""
        with self._lock:
            if self._file is None:
                return self._whole.getvalue() if self._whole is not None else b""
            self._file.close()
            return None

    def drop(self) -> bool:
        """Give the file up; returns whether something is left of it under the key."""
        with self._lock:
            file, self._file = self._file, None
            if file is None:
                return False
            if is_seen_at_its_end(file):
                with contextlib.suppress(Exception):
                    file.discard()
                file.closed = True  # so that nothing completes it
                return False
            with contextlib.suppress(Exception):
                file.close()
            return True
