"""The notes by which a save in parts goes on after a kill.

A store does not give back the parts of an unfinished upload. So a note has the receipt of each part, by which the store verifies
at the end that it has exactly that part, and any data of the writer. Each note is an object of its own.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from fsdp_optim.buckets.objects.base import Bucket
from fsdp_optim.buckets.objects.keys import Place, new_token

KEPT, PARTS = "kept", "parts-"
"""The names, or the beginning of the names, of notes."""


@dataclass
class PartsNotes:
    """The notes of one process. While one is put, the parts that are done wait for the next."""

    bucket: Bucket
    place: Place
    token: str
    _waiting: list[tuple[str, int, str, str]] = field(default_factory=list)
    _is_putting: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, number: int, done: Future[str], data: bytes) -> None:
        """Note a part. A note that cannot be put is no error: the part would be put again."""
        if done.cancelled() or done.exception() is not None:
            return
        with self._lock:
            self._waiting.append((name, number, done.result(), base64.b64encode(data).decode()))
            if self._is_putting:
                return
            self._is_putting = True
        while True:
            with self._lock:
                batch, self._waiting = self._waiting, []
                self._is_putting = bool(batch)
            if not batch:
                return
            with contextlib.suppress(OSError):
                key = self.place.note(self.token, f"{PARTS}{new_token()}")
                self.bucket.put(key, json.dumps(batch).encode())
