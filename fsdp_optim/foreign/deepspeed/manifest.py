"""Folders of universal checkpoints that this library has written: their manifest, and the names of their files."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_optim.foreign.torch.folder import TorchFilesProbe
from fsdp_optim.storage.base import Opened

NAME = "deepspeed_universal.json"

MODEL = "mp_rank_00_model_states.pt"
"""The model and the trainer's values, as stages 1 and 2 of ZeRO look for them."""

MODEL_OF_STAGE_3 = f"zero_pp_rank_0_{MODEL}"
"""The same for stage 3, without tensors."""

LATEST = "latest_universal"
COMMON_STATE = "zero/optimizer_state.pt"

OURS = "fsdp_optim"
"""The key in the files with the model of what this library adds: `{"added": [names], "kinds": [...], "step": number}`.

`added`: the values that DeepSpeed needs and the source does not have; `kinds`: as `foreign.archive.safe_values` writes them;
`step`: that of the source, or None.
"""


def file_of(fqn: str, value: str) -> str:
    """Return the name of the file with one value of a parameter."""
    return f"zero/{fqn}/{value}.pt"


class UniversalProbe(TorchFilesProbe):
    """The `CheckpointProbe` of universal checkpoints of DeepSpeed."""

    manifest = NAME

    def is_own(self, opened: Opened | None) -> Callable[[str], bool]:
        own = (NAME, MODEL, MODEL_OF_STAGE_3, LATEST, "zero")
        return lambda name: name in own or name.startswith("zero/")
