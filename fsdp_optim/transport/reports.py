"""Every rank hears every rank's report, over any set of ranks and any backend."""

from __future__ import annotations

from fsdp_optim.transport.agree import tell
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure

_LENGTH = 8  # bytes of a report's length


def exchange_reports(group: RankGroup, content: bytes, error: Exception | None = None) -> list[bytes]:
    """The reports of all ranks, in the order of `group.ranks`, on all of them; or the `error` of any, on all of them.

    The lowest rank joins them, so that what is read grows with the number of ranks, not with its square.
    """
    told = tell(group, "report", content, error=error)
    joined, failure = b"", Failure()
    if group.rank == group.ranks[0]:
        with failure:
            joined = _join([told.by(rank) for rank in group.ranks])
    return _split(tell(group, "all reports", joined, error=failure.error).by(group.ranks[0]))


def _join(reports: list[bytes]) -> bytes:
    return b"".join(len(report).to_bytes(_LENGTH, "big") + report for report in reports)


def _split(everything: bytes) -> list[bytes]:
    reports, at = [], 0
    while at < len(everything):
        length = int.from_bytes(everything[at : at + _LENGTH], "big")
        reports.append(everything[at + _LENGTH : at + _LENGTH + length])
        at += _LENGTH + length
    return reports
