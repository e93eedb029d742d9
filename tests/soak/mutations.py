"""Changed checkpoints: a load raises one of the library's errors, or gives exactly the saved values.

A load never raises another exception, never gives other values where a checksum covers the changed byte, and never takes memory
or time out of proportion to the size of the files. A refused load changes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kit.checkpoint_format import all_bytes
from kit.compare import Differs, differences
from kit.optimizers import Peculiar, adam, adamw_tensor_lr
from kit.options import as_options
from kit.trained import Trained
from torch import nn

import fsdp_optim
from soak.mutators import BYTES, MUTATORS, Files, by_another_file, repair
from soak.torture import PATIENCE, Torture, temporary

HANGS = int(60 * PATIENCE)  # seconds of one load
MOST_CPU = 5.0  # seconds of one load
MOST_MEMORY = 64 << 20  # bytes of one load, beyond the size of the files


class Tiny(nn.Module):
    """The smallest model with every kind of value, because each of the many loads must be quick."""

    units = ("",)
    tensor_parallel: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 2)
        self.register_buffer("count", torch.tensor(5))


EXTRA = {"step": 7, "list": [1, 2.5, None, True, "größe"], "tuple": (1, {2}), "tensor": torch.tensor([1.5, -0.0])}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of checkpoint to change. `summed`: whether its data have checksums."""

    make: Any = adam
    options: tuple[tuple[str, Any], ...] = ()
    extra: bool = True

    @property
    def summed(self) -> bool:
        return dict(self.options).get("checksums", True)


KINDS = {
    "whole": Kind(),
    "split": Kind(options=(("max_file_size", 20),)),
    "unsummed": Kind(options=(("checksums", False),)),
    "every kind of value": Kind(Peculiar),
    "tensors in groups": Kind(adamw_tensor_lr),
    "no extra": Kind(extra=False),
}


def contents(trained: Trained) -> dict[str, Any]:
    """All values that a checkpoint restores."""
    return {
        "parameters": [param.detach() for param in trained.params],
        "state": [_in_order(trained.optim.state[param]) for param in trained.params],
        "buffers": dict(trained.model.named_buffers()),
        "groups": [_in_order({k: v for k, v in g.items() if k != "params"}) for g in trained.optim.param_groups],
    }


def _in_order(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: values[name] for name in sorted(values, key=repr)}  # a changed checkpoint may have any names


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


class Subject:
    """A good checkpoint, a copy whose files are changed and put back, and a model to load the copy into."""

    def __init__(self, root: Path, kind: Kind) -> None:
        self.kind, self.folder, self.outside = kind, root / "changed", root / "outside"
        trained = Trained("plain", kind.make, 3, Tiny)
        own = {"rng": torch.arange(4)}
        extras = {"extra": EXTRA, "per_rank_extra": own} if kind.extra else {}
        self.extra: Any = {**EXTRA, **own} if kind.extra else {}
        with _without_chance():
            fsdp_optim.save(
                root / "good",
                trained.model,
                trained.optim,
                **as_options(fsdp_optim.SaveOptions, **extras, **dict(kind.options)),
            )
            self.saved = _copied(contents(trained))
            trained.step([3])
            trained.model.get_buffer("count").add_(1)
            fsdp_optim.save(
                root / "other",
                trained.model,
                trained.optim,
                **as_options(fsdp_optim.SaveOptions, **extras, **dict(kind.options)),
            )
        self.good, self.donor = all_bytes(root / "good"), all_bytes(root / "other")
        shutil.copytree(root / "good", self.folder)
        self.target = Trained("plain", kind.make, 1, Tiny)
        self.blank = _copied([dict(self.target.optim.state[param]) for param in self.target.params])
        self.scrambled = self.scramble(1)

    def scramble(self, salt: int) -> dict[str, Any]:
        """Set values that no save has. Returns a copy of them."""
        with torch.no_grad():
            for tensor in tensors_in(contents(self.target)):
                tensor.fill_(salt)
        return _copied(contents(self.target))

    @contextlib.contextmanager
    def changed(self, files: Files) -> Iterator[None]:
        """Make the folder contain exactly these files."""
        names = [name for name, data in files.items() if data is not self.good.get(name)]
        try:
            for name in names:
                _put(self.folder / name, files[name], self.outside)
            yield
        finally:
            for name in names:
                _put(self.folder / name, self.good.get(name), self.outside)

    def renew(self) -> None:
        """Make a new optimizer, because a changed checkpoint may have put anything into the old one."""
        self.target.fresh_optimizer()
        for param, values in zip(self.target.params, _copied(self.blank), strict=True):
            self.target.optim.state[param] = values
        self.scrambled = self.scramble(1)

    def load(self, verify: bool) -> Any:
        return fsdp_optim.load(
            self.folder, self.target.model, self.target.optim, options=fsdp_optim.LoadOptions(verify=verify)
        )


@contextlib.contextmanager
def _without_chance() -> Iterator[None]:
    """Make saves write the same bytes in every run, so that a seed determines a case."""
    words, times = itertools.count(), itertools.count(10**18)
    with (
        mock.patch("secrets.token_hex", side_effect=lambda nbytes: f"{next(words):0{2 * nbytes}x}"),
        mock.patch("time.time_ns", side_effect=lambda: next(times)),
    ):
        yield


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _put(path: Path, what: bytes | str | None, outside: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    if isinstance(what, bytes):
        path.write_bytes(what)
    elif what == "folder":
        path.mkdir()
    elif what == "link":
        outside.write_bytes(b"{}")
        path.symlink_to(outside)
    elif what == "pipe":
        os.mkfifo(path)


# ------------------------------------------------------------------------------------------- one case


@dataclasses.dataclass
class Change:
    """A change in words. `covered`: whether a checksum covers all of it, so that a load may give the saved values only."""

    files: Files
    said: list[str]
    covered: bool
    verify: bool


def change(rng: random.Random, subject: Subject) -> Change:
    files: Files = dict(subject.good)
    said, covered = [], True
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        weights, mutators = zip(*MUTATORS, strict=True)
        if rng.random() < 0.1:
            text, lies = by_another_file(rng, files, subject.donor)
        else:
            text, lies = rng.choices(mutators, weights)[0](rng, files)
        said.append(text)
        covered = covered and not lies
    if not subject.kind.summed:  # without checksums, changed data do not show
        covered = covered and not any(
            word in text for text in said for word in ("data of", "another save", *_BYTES_CHANGED)
        )
    if rng.random() < 0.55:
        tables = rng.random() < 0.8
        repair(files, tables=tables)
        said.append("checksums repaired" if tables else "checksums repaired but for the tables")
        covered = False
    verify = rng.random() < 0.85
    return Change(files, said, covered and verify, verify)


_BYTES_CHANGED = tuple(how.__name__ + " " for how in BYTES)


def probe(subject: Subject, change: Change, figures: Any) -> None:
    """Load the changed checkpoint. Raises Differs if the load breaks a promise."""
    what = f"{', '.join(change.said)}, verify={change.verify}"
    with subject.changed(change.files):
        outcome = _watched(what, lambda: subject.load(change.verify))
        now = contents(subject.target)
        if isinstance(outcome, Exception):
            figures["refused"] += 1
            _check_error(what, outcome)
            _compare(f"{what}: refused, but changed", now, subject.scrambled)
            return
        figures["loaded"] += 1
        if change.covered:
            _compare(f"{what}: loaded what was not saved", now, subject.saved)
            _compare(f"{what}: loaded an extra that was not saved", dict(outcome.state), subject.extra)
            subject.scrambled = subject.scramble(1)
            return
        first = _copied(now)
        subject.scramble(2)
        again = _watched(what, lambda: subject.load(change.verify))
        if isinstance(again, Exception):
            raise Differs(f"{what}: was loaded, and then refused: {again}")
        _compare(f"{what}: another load gives other values", _comparable(contents(subject.target)), _comparable(first))
    subject.renew()


def _comparable(value: Any) -> Any:
    """A value in a form that equals itself, also with NaN outside tensors and with bools whose bytes are neither 0 nor 1."""
    if isinstance(value, torch.Tensor):
        return value.view(torch.uint8) != 0 if value.dtype is torch.bool else value
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_comparable(item) for item in value])
    return repr(value) if value != value else value


def _compare(what: str, got: Any, wanted: Any) -> None:
    unequal = list(differences(got, wanted))
    if unequal:
        raise Differs(f"{what}: {unequal[:3]}")


def _check_error(what: str, error: Exception) -> None:
    if not isinstance(error, fsdp_optim.FsdpOptimError):
        raise Differs(f"{what}: a raw {type(error).__name__}: {error}") from error
    if len(str(error)) > 20_000:
        raise Differs(f"{what}: an error of {len(str(error))} characters: {str(error)[:200]}")


def _watched(what: str, call: Callable[[], Any]) -> Any:
    """The result or the error of a call. Raises Differs if the call takes too long or too much memory."""

    def hang(*_: Any) -> None:
        raise Differs(f"{what}: not over after {HANGS} s")

    was = signal.signal(signal.SIGALRM, hang)
    signal.alarm(HANGS)
    before, begin = _memory(reset=True), time.process_time()
    try:
        outcome = call()
    except Differs:
        raise
    except Exception as error:
        outcome = error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, was)
    took, more = time.process_time() - begin, _memory(reset=False) - before
    if took > MOST_CPU:
        raise Differs(f"{what}: took {took:.1f} s of a processor")
    if more > MOST_MEMORY:
        raise Differs(f"{what}: took {more >> 20} MiB of memory")
    return outcome


def _memory(*, reset: bool) -> int:
    """The resident bytes of the process, or the most since the last reset; 0 where the system does not report them."""
    try:
        if reset:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        with open("/proc/self/status", "rb") as file:
            text = file.read()
        line = text[text.index(b"VmRSS:" if reset else b"VmHWM:") :]
        return int(line.split(None, 2)[1]) << 10
    except (OSError, ValueError):
        return 0


def run(torture: Torture) -> None:
    """Change a file, load, and put the file back, again and again."""
    torch.set_num_threads(1)
    with temporary() as root:
        subjects: dict[str, Subject] = {}
        for number in torture.numbers():
            rng = torture.rng(number)
            name = rng.choice(list(KINDS))
            if name not in subjects:
                (root / name).mkdir()
                subjects[name] = Subject(root / name, KINDS[name])
            subject = subjects[name]
            with torture.case(number, name):
                made = change(rng, subject)
                torture.figures["mutations"] += 1
                try:
                    probe(subject, made, torture.figures)
                    if number % 7 == 0:
                        _look(subject, made, torture.figures)
                except BaseException:
                    subject.renew()
                    raise


def _look(subject: Subject, change: Change, figures: Any) -> None:
    """Check that `latest` works whatever the files contain, and that the extras alone load or are refused."""
    figures["looks"] += 1
    with subject.changed(change.files):
        newest = _watched(f"latest: {change.said}", lambda: fsdp_optim.latest(subject.folder.parent))
        if isinstance(newest, Exception) or newest not in (subject.folder, *_others(subject)):
            raise Differs(f"{change.said}: latest gives {newest!r}")
        extra = _watched(
            f"extras alone: {change.said}",
            lambda: fsdp_optim.load(subject.folder, options=fsdp_optim.LoadOptions(verify=change.verify)),
        )
        if isinstance(extra, Exception):
            _check_error(f"extras alone: {change.said}", extra)
        elif change.covered:
            _compare(f"extras alone: {change.said}", dict(extra.state), subject.extra)


def _others(subject: Subject) -> list[Path]:
    return [subject.folder.with_name("good"), subject.folder.with_name("other")]
