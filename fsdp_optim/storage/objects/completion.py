"""How processes that save into a bucket in the background learn how the save ends: by notes beside its claim."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fsdp_optim.errors import CheckpointError, RankTimeoutError
from fsdp_optim.storage.base import Completion, Judge
from fsdp_optim.storage.objects.base import Bucket
from fsdp_optim.storage.objects.keys import Place, own_token
from fsdp_optim.storage.objects.opened import open_place

_FIRST_LOOK, _LONGEST = 0.02, 2.0  # seconds between looks, which grow: each look is a request
_FAREWELL = 10.0  # seconds for the others to learn of a failure
_DONE, _FAILED, _SEEN, _OUTCOME = "done-", "failed-", "seen-", "outcome"


T = TypeVar("T")


class ObjectCompletion(Completion):
    """The part of one rank in the end of a save. A process that dies is missed after `timeout` seconds only."""

    def __init__(
        self,
        bucket: Bucket,
        place: Place,
        judge: Judge[Any],
        token: str,
        rank: int,
        ranks: Sequence[int],
        timeout: float,
    ) -> None:
        self._bucket, self._place, self._judge, self._token = bucket, place, judge, token
        self._rank, self._ranks, self._timeout = rank, ranks, timeout
        self._deadline = time.monotonic() + timeout

    def watch(self) -> None:
        self._deadline = time.monotonic() + self._timeout

    def _put(self, note: str, data: bytes) -> None:
        self._bucket.put(self._place.note(self._token, note), data)

    def _read(self, note: str) -> bytes | None:
        key = self._place.note(self._token, note)
        return None if self._bucket.look(key) is None else self._bucket.read(key)[0]

    def _notes(self) -> set[str]:
        """The names of all notes, by one request for many."""
        prefix = self._place.note(self._token)
        return {found.key.removeprefix(prefix) for found in self._bucket.list(prefix)}

    def done(self, content: bytes) -> None:
        self._put(f"{_DONE}{self._rank}", content)

    def failed(self, why: str) -> None:
        with contextlib.suppress(OSError):  # then the leader misses this process after a time
            self._put(f"{_FAILED}{self._rank}", why.encode())

    def wait_for_all(self) -> list[bytes]:
        def look() -> list[bytes] | None:
            notes = self._notes()
            failed = [rank for rank in self._ranks if f"{_FAILED}{rank}" in notes]
            if failed:
                reasons = [(rank, (self._read(f"{_FAILED}{rank}") or b"").decode()) for rank in failed]
                raise CheckpointError("\n".join(f"rank {rank}: {why}" for rank, why in reasons))
            self._missing = [rank for rank in self._ranks if f"{_DONE}{rank}" not in notes]
            if self._missing:
                return None
            return [self._read(f"{_DONE}{rank}") or b"" for rank in self._ranks]

        self._missing = list(self._ranks)
        return self._poll(look, lambda: f"rank {self._missing[0]} did not finish its part", self._deadline)

    def saved(self) -> None:
        """Does nothing, because the manifest announces the checkpoint."""

    def not_saved(self, why: str) -> bool:
        with contextlib.suppress(OSError, RankTimeoutError):
            self._put(_OUTCOME, why.encode())
            seen = {f"{_SEEN}{rank}" for rank in self._ranks[1:]}
            return self._poll(lambda: seen <= self._notes() or None, lambda: "", time.monotonic() + _FAREWELL)
        return False

    def wait_for_end(self, failed: str | None) -> None:
        def look() -> bool | None:
            if self._is_saved():
                return True
            why = self._read(_OUTCOME)
            if why is not None:
                self._put(f"{_SEEN}{self._rank}", b"")
                raise CheckpointError(why.decode())
            if self._bucket.look(self._place.claim(self._token)) is None and not self._is_saved():
                raise CheckpointError(failed or f"{self._place.where}: the save was given up by rank {self._ranks[0]}")
            return None

        deadline = self._deadline + self._timeout + _FAREWELL  # the leader gives up first
        self._poll(look, lambda: f"rank {self._ranks[0]} did not finish it", deadline)

    def _is_saved(self) -> bool:
        """Whether the manifest that is there is of this save."""
        with contextlib.suppress(OSError):
            return own_token(self._judge.token_in(open_place(self._bucket, self._place, self._judge))) == self._token
        return False

    def _poll(self, look: Callable[[], T | None], what: Callable[[], str], deadline: float) -> T:
        """The first result of `look` that is not None. Raises RankTimeoutError with `what` after the deadline."""
        wait = _FIRST_LOOK
        while True:
            found = look()
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise RankTimeoutError(f"{self._place.where}: {what()} within {self._timeout:g} s")
            time.sleep(wait)
            wait = min(wait * 1.5, _LONGEST)

    def close(self) -> None:
        """There is nothing to release."""
