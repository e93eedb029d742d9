"""CheckpointManager: the objects of a trainer that are saved and resumed with the model."""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.catalogs import LOG, CatalogTest
from kit.compare import check_same, refused
from kit.managed import Loader, Run, closing_all, steps_in
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError, StateError
from fsdp_optim.testing import run_on_ranks


class ObjectsTest(CatalogTest):
    def saved(self, **options: Any) -> Run:
        run = Run(self.root, "plain", **options)
        with run.manager:
            run.steps(range(1, 3))
        return run

    def test_load_reads_it_too(self) -> None:
        run = self.saved()
        extra = fsdp_optim.load(self.root / "step-00000002")
        check_same("scheduler", extra.state["scheduler"], run.scheduler.state_dict())
        check_same("scaler", extra.state["scaler"], run.scaler.state_dict())
        self.assertEqual(extra.state["loader"]["num_drawn"], 2)

    def test_schedulers_of_torch(self) -> None:
        """Their states are plain values: no pickle is needed."""
        optim = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.5)
        make = torch.optim.lr_scheduler
        kinds: dict[str, Any] = {
            "lambda": lambda: make.LambdaLR(optim, lambda epoch: 0.9**epoch),
            "steps": lambda: make.MultiStepLR(optim, [2, 4]),
            "cosine": lambda: make.CosineAnnealingWarmRestarts(optim, 3),
            "plateau": lambda: make.ReduceLROnPlateau(optim),
            "sequence": lambda: make.SequentialLR(
                optim, [make.ConstantLR(optim), make.LinearLR(optim), make.ExponentialLR(optim, 0.9)], [1, 3]
            ),
        }
        first, second = ({name: kind() for name, kind in kinds.items()} for _ in range(2))
        for _ in range(3):
            optim.step()
            for name, scheduler in first.items():
                scheduler.step(*([0.5] if name == "plateau" else []))
        wanted = {name: str(scheduler.state_dict()) for name, scheduler in first.items() if name != "sequence"}
        self.saved(state=first)
        run = Run(self.root, "plain", state=second)
        with run.manager:
            run.manager.resume()
        self.assertEqual({name: str(second[name].state_dict()) for name in wanted}, wanted)
        self.assertEqual(second["sequence"].last_epoch, 3)

    def test_other_names_than_the_saved_ones(self) -> None:
        self.saved()
        loader = Loader(5)
        run = Run(self.root, "plain", state={"loader": loader, "new": loader})
        with run.manager:
            before = run.everything()["params"]
            words = (
                "state['average']: only the checkpoint has it",
                "['average', 'loader', 'scaler', 'scheduler']",
                "strict=False",
            )
            refused(run.manager.resume, StateError, *words)
            check_same("unchanged", run.everything()["params"], before)
            with self.assertLogs(LOG, "WARNING") as logs:
                self.assertEqual(run.manager.resume(strict=False), 2)
            self.assertIn("state: average, new, scaler, scheduler is not loaded", "\n".join(logs.output))
            self.assertEqual(loader.num_drawn, 2)
            wanted = {f"state[{name!r}]" for name in ("average", "scaler", "scheduler")}
            assert run.manager.restored is not None
            self.assertEqual(run.manager.restored.missing_keys, ("state['new']",))
            self.assertEqual(set(run.manager.restored.unexpected_keys), wanted)

    def test_a_value_that_cannot_be_saved(self) -> None:
        class Odd(Loader):
            def state_dict(self) -> dict[str, Any]:
                return {"lock": object()}

        run = Run(self.root, "plain", state={"odd": Odd(1)})
        with closing_all(run):
            words = ("state['odd']['lock']", "allow_pickle=True")
            refused(lambda: run.manager.save(1), CheckpointError, *words)

    def test_without_random_states(self) -> None:
        self.saved(rng=False)
        run = Run(self.root, "plain")
        torch.manual_seed(99)
        before = torch.get_rng_state()
        with run.manager, self.assertLogs(LOG, "WARNING") as logs:
            run.manager.resume()
        self.assertIn("has no random states (it was saved with rng=False)", "\n".join(logs.output))
        self.assertTrue(torch.equal(before, torch.get_rng_state()))


def sharded_objects(root: Path) -> None:
    sharded = Run(root / "other", "FSDP2")
    run = Run(root / "run", "FSDP2", state={"average": sharded.model})
    with closing_all(sharded, run):
        run.manager.save(1)
        wanted = {name: param.full_tensor() for name, param in sharded.model.named_parameters()}
        for param in sharded.model.parameters():
            param.data.zero_()
        run.manager.resume()
        for name, param in sharded.model.named_parameters():
            check_same(name, param.full_tensor(), wanted[name])
    both = nn.ModuleDict({"model": run.model, "ema": sharded.model})
    with fsdp_optim.CheckpointManager(
        root / "both", both, run.optim, options=fsdp_optim.ManagerOptions(process_group=dist.group.WORLD)
    ) as manager:
        run.train(1)
        manager.save(1)
    check_same("there", steps_in(root / "both"), [1])


class ShardedObjectsTest(CatalogTest):
    def test_a_sharded_average_belongs_to_the_model(self) -> None:
        run_on_ranks(sharded_objects, 2, self.root)


if __name__ == "__main__":
    unittest.main()
