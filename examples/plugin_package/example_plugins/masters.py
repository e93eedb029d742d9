"""A mixed-precision wrapper: the model has bf16 parameters, and only its optimizer has their fp32 masters, cut over the ranks.

All masters of a model lie in one flat tensor, padded and cut into equal chunks without regard for the borders of parameters.
Its adapter is written as a third party would write it: it uses what `fsdp_optim.plugins` has, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_optim.plugins import Adapter, FlatChunks, Handle, ModuleTree, Original, Ranks, Whole


def ranks_of_job() -> tuple[int, ...]:
    return tuple(range(dist.get_world_size())) if dist.is_initialized() else (0,)


class Mixed(nn.Module):
    """A wrapper that computes in bf16, and keeps the fp32 values for its optimizer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.fp32 = {name: param.detach().clone() for name, param in module.named_parameters()}
        self.mixed_module = module.to(torch.bfloat16)

    def places(self) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
        for name, param in self.mixed_module.named_parameters():
            path, _, attribute = name.rpartition(".")
            yield name, self.mixed_module.get_submodule(path), attribute, param

    def forward(self, *args: Any) -> Any:
        return self.mixed_module(*args)


class MasterOptimizer:
    """An optimizer that steps this rank's chunk of the masters with Adam, and copies them to the model in bf16."""

    def __init__(self, model: Mixed, lr: float = 0.01) -> None:
        self.model, self.ranks = model, ranks_of_job()
        self.rank = self.ranks.index(dist.get_rank() if dist.is_initialized() else 0)
        self.total = sum(value.numel() for value in model.fp32.values())
        self.chunk = -(-self.total // len(self.ranks))
        self.master = nn.Parameter(self._mine(list(model.fp32.values())))
        self.optimizer = torch.optim.Adam([self.master], lr=lr)

    def _mine(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = torch.zeros(self.chunk * len(self.ranks))
        flat[: self.total] = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
        return flat[self.rank * self.chunk :][: self.chunk].clone()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self) -> None:
        params = [param for *_, param in self.model.places()]
        self.master.grad = self._mine([param.grad for param in params if param.grad is not None])
        self.optimizer.step()
        chunks = [torch.empty_like(self.master.data) for _ in self.ranks]
        if dist.is_initialized():
            dist.all_gather(chunks, self.master.data)
        else:
            chunks = [self.master.data]
        parts = torch.cat(chunks)[: self.total].split([param.numel() for param in params])
        with torch.no_grad():
            for param, part in zip(params, parts, strict=True):
                param.copy_(part.view(param.shape))

    def state_dict(self) -> dict[str, Any]:
        own = self.optimizer.state_dict()
        return {**own, "state": {0: {**own["state"].get(0, {}), "fp32": self.master.detach()}}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = dict(state_dict["state"].get(0, {}))
        if "fp32" in state:
            self.master.data.copy_(state.pop("fp32"))
        self.optimizer.load_state_dict({**state_dict, "state": {0: state} if state else {}})


class WithoutMasters(MasterOptimizer):
    """An optimizer whose own dict lacks the masters."""

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


class MixedAdapter(Adapter):
    name = "Mixed"
    wrapper_parts = frozenset({"mixed_module"})

    def is_present(self) -> bool:
        return True

    def rank_sets(self, tree: ModuleTree) -> Iterator[Ranks]:
        return (ranks_of_job() for module in tree.modules if isinstance(module, Mixed))

    def is_wrapper_child(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, Mixed) and name == "mixed_module"

    def handles(self, tree: ModuleTree, ranks: tuple[int, ...], claimed: Collection[int]) -> Iterator[Handle]:
        for wrapper in tree.modules:
            if isinstance(wrapper, Mixed):
                for _, module, attribute, param in wrapper.places():
                    shape = tuple(param.shape)
                    yield Handle(param, (Original(module, attribute, Whole(shape, ranks_of_job())),), shape)

    def masters(self, tree: ModuleTree, optims: Sequence[Any]) -> Iterator[Handle]:
        for optim in optims:
            if isinstance(optim, MasterOptimizer):
                originals, start = [], 0
                for _, module, attribute, param in optim.model.places():
                    where = FlatChunks(tuple(param.shape), start, optim.chunk, (optim.ranks,))
                    originals.append(Original(module, attribute, where))
                    start += param.numel()
                padded = [
                    min(max((i + 1) * optim.chunk - optim.total, 0), optim.chunk) for i in range(len(optim.ranks))
                ]
                yield Handle(optim.master, tuple(originals), (optim.chunk,), tuple(padded), master="fp32")
