"""DCP folders as a format that is written. `reader.py` reads them, whoever wrote them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from fsdp_optim.foreign.dcp.probe import DCP_PROBE, NAME, summary_of
from fsdp_optim.foreign.dcp.reader import DCP
from fsdp_optim.foreign.dcp.writer import DcpWriter
from fsdp_optim.formats.base.protocols import Format, Reader, Writer
from fsdp_optim.storage.base import Opened


@dataclass(frozen=True)
class DcpFolder(Format):
    """A folder of torch.distributed.checkpoint. `is_flat`: with the weights at the top level, as torchtitan has them."""

    is_flat: bool = False
    probe = DCP_PROBE

    @property
    def name(self) -> str:
        return "torchtitan" if self.is_flat else "dcp"

    def recognises(self, opened: Opened) -> bool:
        return opened.has(NAME)

    def open(self, opened: Opened, *, verify: bool) -> Reader:
        return DCP.open(opened, verify=verify)

    def writer(self) -> Writer:
        return DcpWriter(self.is_flat)

    def sequence_in(self, opened: Opened) -> int:
        with contextlib.suppress(OSError):
            summary = summary_of(opened)
            return summary.sequence if summary is not None else 0
        return 0


DCP_FOLDER, TORCHTITAN_FOLDER = DcpFolder(), DcpFolder(is_flat=True)
