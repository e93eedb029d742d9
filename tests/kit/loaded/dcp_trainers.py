"""NeMo Automodel's Checkpointer and LLaMA-Factory's distributed plug-ins."""

from __future__ import annotations

from kit.pretrained import transformers

transformers()

import nemo_automodel.components.checkpoint.checkpointing  # noqa: E402, F401
