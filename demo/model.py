"""A small decoder-only transformer, how it is wrapped, and its optimizer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_optim.fairscale import FullyShardedDataParallel


class Embeddings(nn.Module):
    def __init__(self, vocabulary_size: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary_size, width)
        self.position = nn.Embedding(context, width)

    def forward(self, characters: Tensor) -> Tensor:
        return self.token(characters) + self.position(torch.arange(characters.shape[1]))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(-2))


class Transformer(nn.Module):
    def __init__(self, vocabulary_size: int, context: int, width: int = 64, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocabulary_size, context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary_size)

    def forward(self, characters: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embeddings(characters))))


def shard(model: Transformer) -> FullyShardedDataParallel:
    """One FSDP unit per block, one for the embeddings, and one, the root, for the rest."""
    model.embeddings = FullyShardedDataParallel(model.embeddings)
    model.blocks = nn.Sequential(*(FullyShardedDataParallel(block) for block in model.blocks))
    return FullyShardedDataParallel(model)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Blocks decay and learn fast; embeddings, last norm and head do not decay.

    A unit's parameters are one flat parameter to the optimizer, so a unit is in one group as a whole. The same lines
    work for the model without FSDP, and give the same groups.
    """
    blocks = [p for name, p in model.named_parameters() if "blocks." in name]
    others = [p for name, p in model.named_parameters() if "blocks." not in name]
    return torch.optim.AdamW(
        [
            {"params": blocks, "lr": 3e-3, "weight_decay": 0.1},
            {"params": others, "lr": 1e-3, "weight_decay": 0.0},
        ]
    )
