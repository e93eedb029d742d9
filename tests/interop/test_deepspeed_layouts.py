"""DeepSpeed's files of any shapes and numbers of ranks, and the promises of their reader."""

from __future__ import annotations

import random
import shutil
import tempfile
import unittest
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.compare import check_same
from kit.zero_checkpoints import BUFFERS, TAG, elements, opened, state_of, unpacked
from kit.zero_files import write_zero
from kit.zero_runs import FROZEN, exact
from parameterized import parameterized
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim import CheckpointError
from fsdp_optim.foreign.deepspeed.reader import DEEPSPEED
from fsdp_optim.formats.own import PROBE
from fsdp_optim.storage.posix import Folder
from fsdp_optim.testing import ReaderConformance, WrittenSample

# ------------------------------------------------------------------------------------------- any shapes, any number of ranks


class Counting(nn.Module):
    """A module that keeps a value besides parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3, bias=False)
        self.count: Any = 0

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def some_groups(rng: random.Random, num: int) -> list[dict[str, Tensor]]:
    groups: list[dict[str, Tensor]] = [{} for _ in range(num)]
    for index in range(rng.randint(num, 9)):
        shape = tuple(rng.choice((1, 1, 2, 3, 5, 8)) for _ in range(rng.randint(0, 3)))
        group = groups[index] if index < num else rng.choice(groups)
        group[f"layer.{index}.weight"] = torch.randn(shape)
    return groups


class TestLayouts(unittest.TestCase):
    """Files of the independent writer: every element of every value is found, and padding is not."""

    @parameterized.expand([(stage, world_size) for stage in (1, 3) for world_size in (1, 2, 3, 5, 8)])
    def test_every_element_is_found(self, stage: int, world_size: int) -> None:
        rng = random.Random(100 * stage + world_size)
        for number in range(6):
            with tempfile.TemporaryDirectory() as folder:
                groups = some_groups(rng, rng.randint(1, 3))
                state = {
                    name: [{fqn: torch.randn(w.shape) for fqn, w in group.items()} for group in groups]
                    for name in ("exp_avg", "buf")
                }
                options: dict[str, Any] = [
                    {"step": torch.tensor(3.0)},
                    {"group_step": 4},
                    {"step": 5, "is_lean": False},
                ][number % 3]
                alignment = rng.choice((1, 1, 4, 8)) if stage == 1 else 1
                write_zero(Path(folder), stage, world_size, groups, state, alignment=alignment, **options)
                with closing(opened(Path(folder))) as reader:
                    full: Any = reader.full_dict
                    for index, group in enumerate(groups):
                        for fqn, weight in group.items():
                            check_same(fqn, elements(reader, fqn), weight)
                            for name, of_groups in state.items():
                                check_same(f"{fqn}.{name}", elements(reader, fqn, name), of_groups[index][fqn])
                            step = full["state"][fqn]["step"]
                            check_same(
                                fqn,
                                step if type(step) is int else step.shape,
                                options.get("group_step", options.get("step")) if type(step) is int else (),
                            )
                        check_same("group", full["param_groups"][index], {"lr": 0.5 + index, "params": list(group)})

    def test_a_state_that_is_cut_otherwise_is_refused(self) -> None:
        """Such as the error feedback of 1-bit Adam: no value is left out silently."""
        with tempfile.TemporaryDirectory() as folder:
            weights = [{"weight": torch.ones(3, 2)}]
            write_zero(Path(folder), 2, 2, weights, {"exp_avg": weights}, step=torch.ones(7))
            with self.assertRaisesRegex(CheckpointError, "the state value step of group 0"):
                opened(Path(folder)).close()

    def test_values_of_modules(self) -> None:
        """The result of `get_extra_state`, an object or a tensor, goes back into the module."""
        with tempfile.TemporaryDirectory() as folder:
            write_zero(Path(folder), 2, 2, [{"inner.weight": torch.ones(3, 2)}], {})
            path = Path(folder) / "mp_rank_00_model_states.pt"
            saved = torch.load(path)
            for extra_state in (3, torch.tensor([4])):
                torch.save({**saved, "module": {**saved["module"], "_extra_state": extra_state}}, path)
                fresh = Counting()
                fsdp_optim.load(folder, fresh)
                check_same("count", fresh.count, extra_state)
                check_same("weight", fresh.inner.weight.detach(), torch.ones(3, 2))

    def test_parts_that_are_too_short(self) -> None:
        for stage in (1, 3):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                weights = [{"a": torch.ones(3, 2), "b": torch.ones(9)}]
                write_zero(folder, stage, 2, weights, {"exp_avg": weights})
                path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
                saved = torch.load(path)
                key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
                saved["optimizer_state_dict"][key][0] = saved["optimizer_state_dict"][key][0][:-1].clone()
                torch.save(saved, path)
                with self.assertRaisesRegex(CheckpointError, f"{path.name}: has .* elements of the flat group 0"):
                    opened(folder).close()


# ------------------------------------------------------------------------------------------- the promises of a reader


class OfRun(ReaderConformance):
    run_name = ""
    order: tuple[str, ...] = ()

    def make_format(self) -> Any:
        return DEEPSPEED

    def open_any(self, folder: Path) -> Any:
        return Folder(folder, PROBE).open_any()

    def write(self, folder: Path) -> WrittenSample:
        with tempfile.TemporaryDirectory() as place:
            oracle = unpacked(Path(place), self.run_name)
            shutil.copytree(Path(place) / self.run_name / TAG, folder, dirs_exist_ok=True)
        weights = {fqn: tensor for fqn, tensor in oracle.items() if not fqn.startswith("state.")}
        weights[FROZEN] = exact((4, 3), len("weight") + 7).bfloat16()
        state = state_of(oracle)
        optim = [state[fqn][name] for fqn in self.order for name in ("step", "exp_avg", "exp_avg_sq")]
        return WrittenSample({**weights, **BUFFERS}, optim)

    @pytest.mark.slow
    def test_damage_is_an_error_and_no_crash(self) -> None:
        super().test_damage_is_an_error_and_no_crash()

    def test_some_damage_is_an_error_and_no_crash(self) -> None:
        folder, _ = self._written()
        rng = random.Random(5)
        for path in sorted(folder.iterdir()):
            data = path.read_bytes()
            for _ in range(5):
                at, bit = rng.randrange(len(data)), rng.randrange(8)
                flipped = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
                self._check_damaged(folder, path, flipped, f"bit {bit} of byte {at}")
                self._check_damaged(folder, path, data[:at], f"cut at byte {at}")


class TestStage2(OfRun, unittest.TestCase):
    run_name = "z2-w3-aligned"
    order = (  # of round robin gradients on three ranks
        *("emb.weight", "body.2.weight", "body.0.weight", "body.3.weight", "body.1.weight"),
        *("body.0.bias", "body.2.bias", "body.1.bias", "body.3.bias", "body.1.gain"),
    )


class TestStage3(OfRun, unittest.TestCase):
    run_name = "z3-w2-groups"
    order = (
        *("emb.weight", "body.0.weight", "body.1.weight", "body.2.weight", "body.3.weight"),
        *("body.0.bias", "body.1.bias", "body.1.gain", "body.2.bias", "body.3.bias"),
    )


if __name__ == "__main__":
    unittest.main()
