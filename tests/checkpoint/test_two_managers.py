"""Several background saves of one process: an error is raised by a call of the save's owner, and by no other manager."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from unittest import mock

from kit.compare import refused
from kit.managed import Run, steps_in

import fsdp_optim
from fsdp_optim import CheckpointError, SaveHandle, SaveResult
from fsdp_optim.checkpoint.common.pending import Pending
from fsdp_optim.transport import Completion


def failing_in(root: Path) -> mock._patch[object]:
    """Make the saves below a folder fail in the background."""
    from fsdp_optim.checkpoint.save import background

    write = background._write

    def broken(job: object, *args: object) -> SaveResult:
        if str(job.path).startswith(str(root)):  # type: ignore[attr-defined]
            completion = next(arg for arg in args if isinstance(arg, Completion))
            completion.failed("no space left")
            background._clean_up(job)  # type: ignore[arg-type]
            completion.close()
            raise CheckpointError(f"{job.path}: no space left")  # type: ignore[attr-defined]
        return write(job, *args)  # type: ignore[arg-type]

    return mock.patch.object(background, "_write", broken)


class TwoManagersTest(unittest.TestCase):
    def setUp(self) -> None:
        held = tempfile.TemporaryDirectory()
        self.addCleanup(held.cleanup)
        self.a, self.b = Path(held.name, "a"), Path(held.name, "b")
        self.a.mkdir()
        self.b.mkdir()

    def runs(self, name: str = "run") -> tuple[Run, Run]:
        return Run(self.a / name, "plain", every=1), Run(self.b / name, "plain", every=1)

    def test_each_raises_its_own_error_and_the_other_saves(self) -> None:
        for ending in ("wait", "close", "step", "save", "resume", "rollback"):
            with self.subTest(ending):
                first, second = self.runs(ending)
                with failing_in(self.a):
                    first.steps([1])
                    second.steps([1])
                    second.manager.wait()
                    self.assertEqual(steps_in(self.b / ending), [1])
                    calls = {
                        "step": lambda: first.steps([2]),  # noqa: B023
                        "save": lambda: first.manager.save(2),  # noqa: B023
                        "rollback": lambda: first.manager.rollback(to=1),  # noqa: B023
                    }
                    call = calls.get(ending) or getattr(first.manager, ending)
                    refused(call, CheckpointError, f"{self.a}", "no space left")
                    if ending in ("step", "save"):  # this step was saved all the same, which failed too
                        refused(first.manager.close, CheckpointError, "step-00000002", "no space left")
                first.manager.close()  # raised once
                second.manager.close()

    def test_a_resume_of_the_other_does_not_raise_it(self) -> None:
        first, second = self.runs()
        with failing_in(self.a):
            second.steps([1])
            second.manager.wait()
            first.steps([1])
            self.assertEqual(Run(self.b / "run", "plain").manager.resume(), 1)
            refused(first.manager.wait, CheckpointError, f"{self.a}", "no space left")

    def test_a_save_without_a_manager_neither_raises_nor_hides_it(self) -> None:
        first, other = self.runs()
        with failing_in(self.a):
            first.steps([1])
            fsdp_optim.save(self.b / "saved", other.model, other.optim)
            self.assertTrue(fsdp_optim.checkpoints(self.b)[0].complete)
            refused(first.manager.wait, CheckpointError, f"{self.a}", "no space left")

    def test_a_manager_does_not_raise_that_of_async_save(self) -> None:
        other, second = self.runs()
        with failing_in(self.a):
            handle = fsdp_optim.async_save(self.a / "saved", other.model, other.optim)
            second.steps([1])
            second.manager.close()
            self.assertEqual(steps_in(self.b / "run"), [1])
            refused(handle.wait, CheckpointError, f"{self.a}", "no space left")

    def test_wait_raises_what_nobody_has_heard(self) -> None:
        first, second = self.runs()
        with failing_in(self.a):
            first.steps([1])
            second.steps([1])
            second.manager.wait()
            refused(fsdp_optim.wait_for_saves, CheckpointError, f"{self.a}", "no space left")
            first.manager.close()


def test_an_error_without_a_call_of_its_owner_is_raised_at_the_exit() -> None:
    slot, owner = Pending(), object()

    def fails() -> SaveResult:
        raise CheckpointError("no space left")

    with mock.patch("atexit.register") as registered:
        slot.begin(SaveHandle("first", fails, owner=owner))
    slot.settle()
    slot.begin(SaveHandle("second", lambda: SaveResult(Path("second"), 0, 0, 0, ())))
    slot.settle(object())
    refused(registered.call_args.args[0], CheckpointError, "no space left")
    slot.raise_all()


if __name__ == "__main__":
    unittest.main()
