"""verl's FSDP engine."""

from __future__ import annotations

from kit.verl_cpu import import_verl

import_verl()

from transformers import AutoModelForImageTextToText  # noqa: E402

AutoModelForImageTextToText._model_mapping.keys()  # verl asks for them, which imports the configurations of all models
