"""A training by Lightning's Trainer on the ranks that there are, and the same training without Lightning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, Dataset

BATCHES, EPOCHS = 4, 2
WRAPPERS = ("DDP", "FSDP1", "FSDP2")


@contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's warnings about devices, workers and loggers."""
    known = logging.getLogger("lightning.pytorch").level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        try:
            yield
        finally:
            logging.getLogger("lightning.pytorch").setLevel(known)


def data() -> Dataset[Tensor]:
    """The same on all ranks, so that the training does not depend on their number."""
    return torch.randn(2 * BATCHES, 5, generator=torch.Generator().manual_seed(3))  # type: ignore[return-value]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def optimizer_of(model: nn.Module) -> tuple[Any, Any]:
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    return optim, torch.optim.lr_scheduler.MultiStepLR(optim, [1, 3], gamma=0.5)


class Bare(nn.Module):
    """The names of the Lightning module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()


def never_stopped(epochs: int = EPOCHS) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's and the optimizer's dict after a training without Lightning, and without a stop."""
    model = Bare()
    optim, scheduler = optimizer_of(model)
    for _ in range(epochs):
        for batch in DataLoader(data(), batch_size=2):
            loss = model.net(batch).square().mean()
            optim.zero_grad()
            loss.backward()
            optim.step()
        scheduler.step()
    return dict(model.state_dict()), optim.state_dict()


def module(width: int = 7) -> Any:
    """A LightningModule with values of its own in checkpoints; `seen` has the values that it gets back."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = net()
            self.seen: Any = None

        def configure_model(self) -> None:
            mesh = getattr(self.trainer.strategy, "_device_mesh", None)
            if mesh is not None:  # FSDP2. Lightning calls `training_step`, so the root has no forward pass of its own
                for part in (self.net[0], self.net):
                    fully_shard(part, mesh=mesh["data_parallel"])

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = self.net(batch).square().mean()
            self.log("loss", loss)
            return loss

        def test_step(self, batch: Tensor, index: int) -> None:
            self.log("test_loss", self.net(batch).square().mean())

        def configure_optimizers(self) -> Any:
            optim, scheduler = optimizer_of(self)
            return [optim], [scheduler]

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["of the module"] = {"steps": self.global_step, "mean": torch.ones(2), 3: "an int"}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = checkpoint.get("of the module")

    return Module(width)


def strategy(wrapper: str, *, stock: bool = False, **options: Any) -> Any:
    """One of the three strategies: this library's, or Lightning's own."""
    if stock:
        from lightning.pytorch import strategies as of
    else:
        from fsdp_optim.integrations import lightning as of  # type: ignore[no-redef]

    class OnCpu(of.FSDPStrategy):  # type: ignore[misc, name-defined]
        """Lightning gives FSDP1 the index of the device, which the CPU does not have, and FSDP1 refuses None."""

        def _setup_model(self, model: nn.Module) -> nn.Module:
            return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)

    if wrapper == "FSDP1":
        return OnCpu(**options)
    if wrapper == "FSDP2":
        return of.ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1, **options)
    return of.DDPStrategy(**options)


def trainer(of: Any, *, callbacks: Any = (), max_epochs: int = 1, **options: Any) -> Any:
    """A Trainer on the ranks of the world that there is. `of`: its strategy."""
    import lightning
    from lightning.fabric.plugins.environments import ClusterEnvironment

    class Ranks(ClusterEnvironment):
        """The ranks that `run_on_ranks` has started."""

        creates_processes_externally = True  # type: ignore[assignment]
        main_address, main_port = "", 0  # type: ignore[assignment]

        @staticmethod
        def detect() -> bool:
            return True

        def world_size(self) -> int:
            return dist.get_world_size()

        def global_rank(self) -> int:
            return dist.get_rank()

        local_rank = global_rank

        def node_rank(self) -> int:
            return 0

        def set_world_size(self, size: int) -> None: ...

        def set_global_rank(self, rank: int) -> None: ...

    return lightning.Trainer(
        strategy=of,
        accelerator="cpu",
        devices=dist.get_world_size(),
        plugins=[Ranks()],
        callbacks=list(callbacks),
        max_epochs=max_epochs,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": bool(callbacks), **options},
    )


def loader() -> DataLoader[Tensor]:
    return DataLoader(data(), batch_size=2)
