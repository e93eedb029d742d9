"""Claims that this process watches: a claim that does not change for some time, by this process's own clock, is a dead save's.

This shows a dead save where the store does not say when an object was written. Neither the clocks of other machines nor the
store's count.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Iterable

from fsdp_optim.buckets.objects.base import Bucket
from fsdp_optim.buckets.objects.keys import ObjectPlace

BEAT = "beat"
"""In a claim: a word that is new each time that the claim is written. Claims of older versions of this library have none."""


class Watched:
    """The claims of other saves as this process has seen them first, from one save of this process to the next."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, tuple[bytes, float]]] = {}
        self._lock = threading.Lock()

    def silent(self, bucket: Bucket, place: ObjectPlace, tokens: Iterable[str], dead_after: float) -> frozenset[str]:
        """Return the saves in a place, of `tokens`, whose claims have not changed for `dead_after` seconds.

        `tokens`: all other saves there that may be alive. Claims of other tokens are forgotten.
        """
        with self._lock:
            before = self._seen.get(place.where, {})
        seen: dict[str, tuple[bytes, float]] = {}
        silent = set()
        for token in tokens:
            asked = time.monotonic()
            content = _sign_of_life(bucket, place.claim(token))
            if content is None:
                continue
            known = before.get(token)
            seen[token] = known if known is not None and known[0] == content else (content, time.monotonic())
            if asked - seen[token][1] > dead_after:
                silent.add(token)
        with self._lock:
            if seen:
                self._seen[place.where] = seen
            else:
                self._seen.pop(place.where, None)
        return frozenset(silent)


def _sign_of_life(bucket: Bucket, claim: str) -> bytes | None:
    """Return the content of a claim; None where it shows nothing: it is gone, or its writer does not change it at each beat."""
    with contextlib.suppress(OSError, ValueError):
        content, _ = bucket.read(claim)
        fields = json.loads(content)
        return content if isinstance(fields, dict) and BEAT in fields else None
    return None


@functools.cache
def watched() -> Watched:
    """Return the claims that this process watches. Each save opens the bucket anew, so that no bucket can keep them."""
    return Watched()
