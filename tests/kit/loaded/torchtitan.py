"""torchtitan's trainer."""

from __future__ import annotations

from kit.torchtitan_cpu import import_torchtitan

import_torchtitan()
