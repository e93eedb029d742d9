"""`CheckpointManager(prove=...)`: the record beside a checkpoint, the verdict of a run that resumes, and what must not change."""

from __future__ import annotations

import json
import logging
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from click.testing import CliRunner
from kit.compare import check_same
from kit.folders import SharedFolder
from kit.wraps import WRAPPERS
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointManager, ManagerOptions, ResumeProof, StateError
from fsdp_optim.checkpoint.proof.file import read_proof, write_proof
from fsdp_optim.cli.commands import ls
from fsdp_optim.testing import RanksFailed, run_on_ranks

QUICK = ManagerOptions(durable=False, signals=(), progress=False)


def batch_of(step: int) -> torch.Tensor:
    samples = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
    return samples.chunk(dist.get_world_size())[dist.get_rank()]


class Sliced(nn.Module):
    """Each rank has its rows of a stack of experts, and the same samples of every batch go through all of them."""

    def __init__(self) -> None:
        super().__init__()
        rows, rank = 4 // dist.get_world_size(), dist.get_rank()
        full = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
        self.experts = nn.Parameter(full[rank * rows : (rank + 1) * rows].clone())
        fsdp_optim.declare_slice(self, "experts", global_shape=full.shape, offset=(rank * rows, 0))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        share = (
            len(self.experts) / 4
        ) ** 0.5  # the mean of squares is that of all experts then, on any number of ranks
        return samples[:1] * 0 + self.experts.tanh() * share


class Run:
    """A training with a manager, on each rank."""

    def __init__(self, root: Path, wrapper: str = "FSDP2", prove: Any = True, every: int = 2) -> None:
        torch.manual_seed(3)
        plain = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
        self.model = Sliced() if wrapper == "slices" else WRAPPERS[wrapper](plain)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optim, 2, 0.5)
        root.mkdir(parents=True, exist_ok=True)
        self.manager = CheckpointManager(
            root, self.model, self.optim, state={"scheduler": self.scheduler}, every=every, prove=prove, options=QUICK
        )

    def step(self, number: int) -> None:
        loss = self.model(batch_of(number)).square().mean()
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        self.scheduler.step()
        if not isinstance(self.model, Sliced):  # whose losses are those of each rank's experts
            self.manager.observe(loss=loss)
        self.manager.step(number)

    def train(self, last: int) -> Run:
        for number in range(self.manager.resume() + 1, last + 1):
            self.step(number)
        self.manager.close()
        return self

    @property
    def proof(self) -> ResumeProof | None:
        return self.manager.proof

    @property
    def everything(self) -> dict[str, Any]:
        return {
            "weights": fsdp_optim.gather_full_model_state_dict(self.model, recipient_rank=None),
            "state": fsdp_optim.gather_full_optim_state_dict(self.model, self.optim, recipient_rank=None),
            "random": torch.get_rng_state(),
            "hooks": (len(self.model._forward_pre_hooks), len(self.optim._optimizer_step_pre_hooks)),  # type: ignore[attr-defined]
        }


def train(root: Path, last: int, wrapper: str = "FSDP2", prove: Any = True) -> tuple[str, str]:
    proof = Run(root, wrapper, prove).train(last).proof
    return (proof.outcome, str(proof)) if proof is not None else ("none", "")


def records(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob("*/proof.json"))


# ------------------------------------------------------------------------------------------ cases


def proving_changes_nothing(root: Path) -> None:
    with_proofs = Run(root / "proven").train(5).everything
    without = Run(root / "not", prove=False).train(5).everything
    check_same("a run with proofs", with_proofs, without)
    if dist.get_rank() == 0:
        check_same(
            "records", (records(root / "proven"), records(root / "not")), (["step-00000002", "step-00000004"], [])
        )


def stale(root: Path) -> list[str]:
    """A record of a checkpoint that another one has replaced is not that one's."""
    first = Run(root).train(3)
    assert first.proof is None
    again = Run(root)
    again.manager.resume()
    again.manager.rollback(2)
    for number in (3, 4):
        again.step(number)
    again.manager.close()
    verdicts = [str(again.proof)]
    copied = root / "step-00000004"
    if dist.get_rank() == 0:
        (copied / "proof.json").write_bytes((root / "step-00000002/proof.json").read_bytes())
    dist.barrier()
    after = Run(root).train(5)
    return [*verdicts, str(after.proof)]


def raised(root: Path) -> str:
    Run(root).train(3)
    run = Run(root, prove="raise")
    run.manager.resume()
    run.optim.param_groups[0]["lr"] = 1.0
    try:
        run.step(3)
    except StateError as error:
        run.manager.close()
        return str(error)
    return ""


def ends_with_a_hook_that_fails(root: Path, place: str) -> tuple[bool, list[str]]:
    """A value that cannot be read must not stop the training."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_optim").addHandler(handler)
    run = Run(root)
    run.manager.resume()
    run.step(1)
    run.step(2)
    with mock.patch(f"fsdp_optim.checkpoint.proof.{place}", side_effect=RuntimeError("no dims here")):
        run.step(3)
    run.manager.close()
    logging.getLogger("fsdp_optim").removeHandler(handler)
    return not records(root), lines


def evaluates_between(root: Path) -> str:
    """An evaluation without gradients before the step is no batch of it."""
    run = Run(root)
    run.manager.resume()
    for number in (1, 2):
        run.step(number)
    run.model.eval()
    with torch.no_grad():
        run.model(batch_of(77))
    run.model.train()
    run.step(3)
    run.manager.close()
    return str(Run(root).train(3).proof)


def with_critic(root: Path, fault: bool = False) -> ResumeProof | None:
    """Two models and their optimizers in one checkpoint, trained until the step after it."""
    torch.manual_seed(0)
    models = {"actor": nn.Linear(4, 4), "critic": nn.Linear(4, 1)}
    optims = {name: torch.optim.AdamW(model.parameters(), lr=0.1) for name, model in models.items()}
    with CheckpointManager(root, models, optims, every=2, prove=True, options=QUICK) as manager:
        for number in range(manager.resume() + 1, 4):
            if fault:
                optims["critic"].state[models["critic"].weight]["exp_avg"].zero_()
            samples = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
            models["critic"](models["actor"](samples)).square().mean().backward()
            for optim in optims.values():
                optim.step()
                optim.zero_grad()
            manager.step(number)
        return manager.proof


def resumes_beside_each_damaged_record(root: Path) -> None:
    """Each damage of the record ends the proof, and neither the training nor with a verdict that the run differs."""
    train(root, 3, "plain")
    path = root / "step-00000002/proof.json"
    whole = path.read_bytes()
    came_out, went_in = whole.index(b'"came_out"'), whole.index(b'"went_in"')
    dtype, digit = whole.index(b"float32", came_out) + 6, whole.index(b'["', went_in) + 5
    damages = {
        "a bit of a dtype": whole[:dtype] + bytes([whole[dtype] ^ 1]) + whole[dtype + 1 :],
        "a digit": whole[:digit] + (b"0" if whole[digit : digit + 1] != b"0" else b"1") + whole[digit + 1 :],
        "deep": b"[" * 100000,
        "a bit of the version": whole.replace(b'"version": 1', b'"version": 3'),
        "cut": whole[:-40],
    }
    for what, damaged in damages.items():
        path.write_bytes(damaged)
        outcome, line = train(root, 3, "plain", "raise")
        check_same(f"{what}: {line}", outcome, "unknown")
        check_same(f"{what}: the record", path.read_bytes(), damaged)


def resumes_beside_records_without_a_checksum(root: Path) -> None:
    """A record without a checksum is compared; what is not written as it should be in it ends the proof."""
    train(root, 3, "plain")
    path = root / "step-00000002/proof.json"
    record = json.loads(path.read_bytes())
    del record["xxh3_64"]
    path.write_text(json.dumps(record))
    check_same("whole", train(root, 3, "plain", "raise")[0], "identical")
    for old, new in (('"float32"', '"float33"'), ('"world_size": 1', '"world_size": 2')):
        path.write_text(json.dumps(record).replace(old, new))
        outcome, line = train(root, 3, "plain", "raise")
        check_same(f"{new}: {line}", outcome, "unknown")
    path.write_text(json.dumps(record))
    with mock.patch("fsdp_optim.checkpoint.proof.proving.verdict", side_effect=RuntimeError("no verdict here")):
        outcome, line = train(root, 3, "plain", "raise")
    check_same(line, (outcome, "RuntimeError: no verdict here" in line), ("unknown", True))


def proof_of_a_folder_with_another_name(root: Path) -> str:
    """The token of a checkpoint begins with the name of its folder."""
    plain = Run(root, "plain")
    named = root / 'né "new"'
    fsdp_optim.save(named, plain.model, plain.optim)
    train(root / "other", 3, "plain")
    record = read_proof(root / "other/step-00000002")
    assert record is not None
    write_proof(named, record)
    return fsdp_optim.proof_of(named)


class ManagerProofTest(SharedFolder):
    def test_the_same_run_is_bit_identical(self) -> None:
        root = self.root / "same"
        self.assertEqual(run_on_ranks(train, 2, root, 3), [("none", "")] * 2)
        self.assertEqual(records(root), ["step-00000002"])
        self.assertEqual(fsdp_optim.proof_of(root / "step-00000002"), "recorded")
        for outcome, line in run_on_ranks(train, 2, root, 5):
            self.assertEqual(outcome, "identical", line)
            self.assertRegex(line, r"resume proven: step 3 is bit-identical \(\d+ values\)")
        self.assertEqual(records(root), ["step-00000002", "step-00000004"])
        record = json.loads((root / "step-00000004/proof.json").read_text())
        self.assertEqual((record["saved_step"], record["step"], record["world_size"]), (4, 5, 2))
        self.assertTrue(fsdp_optim.verify(root / "step-00000004").has_checksums)
        listed = CliRunner().invoke(ls.command, [str(root)]).output.splitlines()
        self.assertEqual([line.split("  ")[-1] for line in listed[-2:]], ["ok, not proven yet", "ok, proven"])
        self.assertEqual(
            [fsdp_optim.proof_of(root / f"step-0000000{step}") for step in (2, 4)], ["identical", "recorded"]
        )

    def test_a_damaged_record_stops_nothing(self) -> None:
        root = self.root / "damaged"
        run_on_ranks(train, 2, root, 3)
        path = root / "step-00000002/proof.json"
        for text in ("{", '{"version": 1}', path.read_text().replace('"step": 3', '"step": "three"')):
            path.write_text(text)
            self.assertEqual(fsdp_optim.proof_of(root / "step-00000002"), "recorded" if "three" in text else "")
            outcome, line = run_on_ranks(train, 2, root, 3)[0]
            self.assertEqual(outcome, "unknown")
            self.assertRegex(line, "proof.json: is not what was saved|proof.json: is not written as it should be")
        self.assertEqual(fsdp_optim.load(root / "step-00000002").step, 2)

    def test_no_changed_byte_of_a_record_stops_a_run_or_makes_it_differ(self) -> None:
        run_on_ranks(resumes_beside_each_damaged_record, 1, self.root / "each")

    def test_a_record_of_an_earlier_version_has_no_checksum(self) -> None:
        run_on_ranks(resumes_beside_records_without_a_checksum, 1, self.root / "old")

    def test_damage_before_the_token_is_no_record(self) -> None:
        root = self.root / "token"
        run_on_ranks(train, 1, root, 3)
        path = root / "step-00000002/proof.json"
        whole = path.read_bytes()
        for damaged in (
            whole.replace(b'"checkpoint": "step', b'"checkpoint": "\xf3tep'),
            whole.replace(b'"proven": ""', b'"proven": "idontical"'),
        ):
            self.assertNotEqual(damaged, whole)
            path.write_bytes(damaged)
            self.assertEqual(fsdp_optim.proof_of(root / "step-00000002"), "")
            result = CliRunner().invoke(ls.command, [str(root)])
            self.assertEqual((result.exit_code, result.output.rstrip().split("  ")[-1]), (0, "ok"))

    def test_the_name_of_a_folder_may_have_any_character(self) -> None:
        self.assertEqual(run_on_ranks(proof_of_a_folder_with_another_name, 1, self.root / "names"), ["recorded"])

    def test_other_world_sizes_and_wrappers(self) -> None:
        root = self.root / "others"
        run_on_ranks(train, 4, root, 3)
        for world_size, wrapper in ((2, "FSDP2"), (3, "DDP"), (2, "FSDP1 flat"), (1, "plain")):
            outcome, line = run_on_ranks(train, world_size, root, 3, wrapper)[0]
            self.assertEqual(outcome, "rounding", f"{wrapper} on {world_size}: {line}")

    def test_parameters_of_which_each_rank_knows_its_own_part(self) -> None:
        root = self.root / "slices"
        run_on_ranks(train, 2, root, 3, "slices")
        self.assertEqual(run_on_ranks(train, 2, root, 3, "slices")[0][0], "identical")
        outcome, line = run_on_ranks(train, 1, root, 3, "slices")[0]
        self.assertIn(outcome, ("identical", "rounding"), line)

    def test_a_run_without_a_record_says_so(self) -> None:
        root = self.root / "none"
        run_on_ranks(train, 2, root, 2)
        self.assertEqual(records(root), [])
        outcome, line = run_on_ranks(train, 2, root, 3)[0]
        self.assertEqual(outcome, "unknown")
        self.assertIn("the saving run has recorded no step after this checkpoint; this run has now", line)
        self.assertEqual(records(root), ["step-00000002"])
        self.assertEqual(run_on_ranks(train, 2, root, 3)[0][0], "identical")

    def test_proving_changes_nothing(self) -> None:
        run_on_ranks(proving_changes_nothing, 2, self.root / "nothing")

    def test_the_record_of_another_checkpoint_does_not_count(self) -> None:
        first, second = run_on_ranks(stale, 2, self.root / "stale")[0]
        self.assertIn("bit-identical", first)
        self.assertIn("recorded no step after this checkpoint", second)

    def test_raise_stops_all_ranks(self) -> None:
        for text in run_on_ranks(raised, 2, self.root / "raise"):
            self.assertIn("the param groups: lr of param group 0 was 0.005, and is 1.0", text)
            self.assertIn("prove=True says so without an error", text)

    @parameterized.expand([("watch.batch_of",), ("proving.texts_of",)])
    def test_what_fails_inside_does_not_stop_the_training(self, place: str) -> None:
        for is_unproven, lines in run_on_ranks(ends_with_a_hook_that_fails, 2, self.root / place, place):
            self.assertTrue(is_unproven)
            self.assertTrue([line for line in lines if "cannot be watched" in line and "no dims here" in line], lines)

    def test_an_evaluation_between_save_and_step(self) -> None:
        self.assertIn("bit-identical", run_on_ranks(evaluates_between, 2, self.root / "evaluation")[0])

    def test_several_models(self) -> None:
        root = self.root / "several"
        root.mkdir()
        self.assertIsNone(with_critic(root))
        proof, broken = with_critic(root), with_critic(root, fault=True)
        self.assertEqual(proof.outcome if proof is not None else "", "identical")
        self.assertIn("the loaded state: critic.weight: exp_avg: had the norm", str(broken))

    def test_wrong_values(self) -> None:
        with self.assertRaisesRegex(RanksFailed, "prove must be False, True or 'raise', not 'yes'"):
            run_on_ranks(train, 2, self.root / "wrong", 1, "FSDP2", "yes")


if __name__ == "__main__":
    unittest.main()
