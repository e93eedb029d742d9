"""One checkpoint that is also a folder of `from_pretrained`: with the configuration of the model, and its tokenizer."""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist
from torch import nn

from fsdp_optim import SaveOptions
from fsdp_optim.integrations.hugging_face.accelerator_state import write_config
from fsdp_optim.plugins import TrainerFolder, absolute

_OUTDATED = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors"
    r"|\.metadata|__\d+_\d+\.distcp"
)


def is_outdated(name: str) -> bool:
    """Whether a file of this name has weights or an optimizer, which are old in a folder that is saved again."""
    return _OUTDATED.fullmatch(name) is not None


def save_folder(
    path: Any, model: Any, optim: Any, options: SaveOptions, *, processor: Any = None, background: bool = False
) -> None:
    """Save a model, and an optimizer or None, into a folder that is there already or not. Called by all ranks.

    Its other files are carried over. `model`: a model, or a list of pipeline stages; the configuration of a model of transformers
    is written. `processor`: a tokenizer, which is written too.
    """
    save = TrainerFolder.begin(str(absolute(path)), options, is_outdated=is_outdated)
    with save.writing():
        if not dist.is_initialized() or dist.get_rank(options.process_group) == 0:
            first = model if isinstance(model, nn.Module) else model[0]
            write_config(getattr(first, "module", first), str(save.files))
            if processor is not None:
                processor.save_pretrained(str(save.files))
    save.commit(model, optim, background=background)
