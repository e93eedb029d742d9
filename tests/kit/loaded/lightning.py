"""Lightning with the strategies of its plug-in here."""

from __future__ import annotations

import lightning.pytorch  # noqa: F401

import fsdp_optim.integrations.lightning  # noqa: F401
