"""Modules that change their state_dict() by hooks, as trainers write them, and as they should not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Dict = dict[str, Any]
Change = Callable[[nn.Module, Dict, str], None]


class Hooked(nn.Module):
    """Parameters of these shapes, and hooks. `load` is None for a module that cannot load what it saves."""

    def __init__(self, save: Change, load: Change | None = None, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.num_calls = [0]
        self.register_state_dict_post_hook(_counted(save))
        if load is not None:
            self.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: load(module, state, prefix))


def _counted(save: Change) -> Callable[..., None]:
    def change(module: Any, state: Dict, prefix: str, metadata: Any) -> None:
        module.num_calls[0] += 1
        save(module, state, prefix)

    return change


def halves(module: nn.Module, state: Dict, prefix: str) -> None:
    w13 = state.pop(f"{prefix}w13")
    state[f"{prefix}w1"], state[f"{prefix}w3"] = (half.contiguous() for half in w13.chunk(2))


def joined_halves(module: nn.Module, state: Dict, prefix: str) -> None:
    if f"{prefix}w1" in state:
        state[f"{prefix}w13"] = torch.cat([state.pop(f"{prefix}w1"), state.pop(f"{prefix}w3")])


def alternating(module: nn.Module, state: Dict, prefix: str) -> None:
    w13 = state.pop(f"{prefix}w13")
    state[f"{prefix}w1"], state[f"{prefix}w3"] = (w13[row::2].contiguous() for row in range(2))


def experts(module: nn.Module, state: Dict, prefix: str) -> None:
    stack = state.pop(f"{prefix}stack")
    for number, expert in enumerate(stack):
        state[f"{prefix}{number}.gate"], state[f"{prefix}{number}.up"] = expert.T.chunk(2)


def stacked_experts(module: nn.Module, state: Dict, prefix: str) -> None:
    made: list[Tensor] = []
    while f"{prefix}{len(made)}.gate" in state:
        parts = [state.pop(f"{prefix}{len(made)}.{part}") for part in ("gate", "up")]
        made.append(torch.cat(parts).T)
    state[f"{prefix}stack"] = torch.stack(made)


def heads(module: Any, state: Dict, prefix: str) -> None:
    """Interleaved by groups: `module.queries` heads of queries to one of keys and one of values, each of `module.size` rows."""
    qkv = state.pop(f"{prefix}qkv")
    grouped = qkv.reshape(-1, module.queries + 2, module.size, *qkv.shape[1:])
    state[f"{prefix}q"] = grouped[:, : module.queries].reshape(-1, *qkv.shape[1:])
    state[f"{prefix}k"], state[f"{prefix}v"] = (
        grouped[:, module.queries + at].reshape(-1, *qkv.shape[1:]) for at in (0, 1)
    )


def joined_heads(module: Any, state: Dict, prefix: str) -> None:
    q, k, v = (state.pop(f"{prefix}{part}") for part in "qkv")
    by_group = [part.reshape(-1, n, module.size, *k.shape[1:]) for part, n in ((q, module.queries), (k, 1), (v, 1))]
    state[f"{prefix}qkv"] = torch.cat(by_group, 1).reshape(-1, *k.shape[1:])


class Attention(Hooked):
    """A fused attention without biases."""

    def __init__(self, groups: int, queries: int, size: int, width: int) -> None:
        super().__init__(heads, joined_heads, qkv=(groups * (queries + 2) * size, width))
        self.queries, self.size = queries, size
