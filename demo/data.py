"""Real English text that every CPython brings along: the language reference, as `help()` shows it."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor


class Text:
    """Characters as numbers, and batches of them that depend on the step alone, never on who asks."""

    def __init__(self, context: int, batch_size: int) -> None:
        text = "\n".join(topics.values())
        characters = sorted(set(text))
        index = {character: i for i, character in enumerate(characters)}
        self.vocabulary_size = len(characters)
        self._encoded = torch.tensor([index[character] for character in text])
        self._context = context
        self._batch_size = batch_size

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
        """This rank's equal part of the global batch of one step: characters, and the characters that follow them."""
        if self._batch_size % world_size:
            raise ValueError(f"a batch of {self._batch_size} cannot be shared equally by {world_size} ranks")
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self._encoded) - self._context, (self._batch_size,), generator=generator)
        mine = starts.chunk(world_size)[rank]
        windows = self._encoded[mine[:, None] + torch.arange(self._context + 1)]
        return windows[:, :-1], windows[:, 1:]
