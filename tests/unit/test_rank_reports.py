"""What a rank reports to the leader of a save comes back as it was, whatever the number of its receipts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from fsdp_optim.checkpoint.save.job import decode_written, encode_written
from fsdp_optim.checkpoint.save.trace import Span
from fsdp_optim.formats.base.checksums import rows_of


@pytest.mark.parametrize("receipts", [[], [b""], [b"one", b"", b'{"two": 2}']])
def test_a_report(receipts: list[bytes]) -> None:
    files: Any = [SimpleNamespace(name=name) for name in ("model", "optim")]
    rows = {"model": rows_of([(0, 8, 1), (8, 9, 2**64 - 1)]), "optim": rows_of(())}
    job: Any = SimpleNamespace(extras={"extra/a": b"123"}, writer=SimpleNamespace(info_of=len))
    written: Any = SimpleNamespace(receipts=receipts, rows=rows)
    spans = [Span("training", "write", 17, 4)]
    report = decode_written(files, encode_written(job, written, 1.25, spans))
    assert (report.receipts, report.infos, report.seconds, list(report.spans)) == (
        receipts,
        {"extra/a": 3},
        1.25,
        spans,
    )
    assert list(report.rows) == ["model", "optim"]
    assert all(numpy.array_equal(report.rows[name], rows[name]) for name in rows)
