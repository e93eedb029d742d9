"""An all-gather of reports: every rank gets the report of every rank, over any set of ranks and any backend."""

from __future__ import annotations

from fsdp_optim.transport.agree import all_gather_bytes
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure

_LENGTH = 8  # bytes of a report's length


def exchange_reports(group: RankGroup, content: bytes, error: BaseException | None = None) -> list[bytes]:
    """Return the reports of all ranks, in the order of `group.ranks`. An `error` of any rank is raised on all ranks.

    The lowest rank joins the reports, so the bytes that are read grow with the number of ranks, not with its square.
    """
    result = all_gather_bytes(group, "report", content, error=error)
    joined, failure = b"", Failure()
    if group.rank == group.ranks[0]:
        with failure:
            joined = _join([result.content_of(rank) for rank in group.ranks])
    return _split(all_gather_bytes(group, "all reports", joined, error=failure.error).content_of(group.ranks[0]))


def _join(reports: list[bytes]) -> bytes:
    return b"".join(len(report).to_bytes(_LENGTH, "big") + report for report in reports)


def _split(joined: bytes) -> list[bytes]:
    reports, at = [], 0
    while at < len(joined):
        length = int.from_bytes(joined[at : at + _LENGTH], "big")
        reports.append(joined[at + _LENGTH : at + _LENGTH + length])
        at += _LENGTH + length
    return reports
