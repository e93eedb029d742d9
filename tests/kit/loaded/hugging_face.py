"""transformers with its Trainer, Accelerate and PEFT."""

from __future__ import annotations

from kit.pretrained import transformers

transformers()

import accelerate  # noqa: E402, F401
import peft  # noqa: E402, F401
import transformers.trainer  # noqa: E402
