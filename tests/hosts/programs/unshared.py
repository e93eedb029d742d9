"""A call that writes or reads, on a path behind which the hosts have different folders; and what each rank hears.

unshared.py prepare NAME ROOT [ROOT ...]     saves ROOT/NAME, and resumes from it
unshared.py CALL ROOT                        one of CALLS, for which ROOT/step-1 may be a checkpoint
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from hosts.programs.numbered import QUIET, Numbered
from kit.options import as_options

import fsdp_optim


def save(root: Path, numbered: Numbered) -> None:
    fsdp_optim.save(root / "new", **as_options(fsdp_optim.SaveOptions, **numbered.arguments(2)))


def per_rank_files(root: Path, numbered: Numbered) -> None:
    fsdp_optim.save(
        root / "new", **as_options(fsdp_optim.SaveOptions, **numbered.arguments(2), strategy="per_rank_files")
    )


def save_in_place(root: Path, numbered: Numbered) -> None:
    fsdp_optim.save(root / "new", **as_options(fsdp_optim.SaveOptions, **numbered.arguments(2), strategy="in_place"))


def overwrite(root: Path, numbered: Numbered) -> None:
    fsdp_optim.save(root / "step-1", overwrite=True, **as_options(fsdp_optim.SaveOptions, **numbered.arguments(2)))


def save_dcp(root: Path, numbered: Numbered) -> None:
    fsdp_optim.save(root / "new", format="dcp", **as_options(fsdp_optim.SaveOptions, **numbered.arguments(2)))


def save_to_url(root: Path, numbered: Numbered) -> None:
    fsdp_optim.save(f"file://{root}/new", **as_options(fsdp_optim.SaveOptions, **numbered.arguments(2)))


def async_save(root: Path, numbered: Numbered) -> None:
    fsdp_optim.async_save(root / "new", **as_options(fsdp_optim.SaveOptions, **numbered.arguments(2))).wait()


def async_save_to_url(root: Path, numbered: Numbered) -> None:
    fsdp_optim.async_save(f"file://{root}/new", **as_options(fsdp_optim.SaveOptions, **numbered.arguments(2))).wait()


def manager(root: Path, numbered: Numbered) -> None:
    with fsdp_optim.CheckpointManager(
        root, numbered.model, numbered.optim, **as_options(fsdp_optim.ManagerOptions, **QUIET, signals=())
    ):
        raise AssertionError("a manager was made")


def manager_of_url(root: Path, numbered: Numbered) -> None:
    with fsdp_optim.CheckpointManager(
        f"file://{root}", numbered.model, numbered.optim, **as_options(fsdp_optim.ManagerOptions, **QUIET, signals=())
    ):
        raise AssertionError("a manager was made")


def resume(root: Path, numbered: Numbered) -> None:
    fsdp_optim.resume(root, numbered.model, numbered.optim, **as_options(fsdp_optim.LoadOptions, **QUIET))


def resume_from_url(root: Path, numbered: Numbered) -> None:
    fsdp_optim.resume(f"file://{root}", numbered.model, numbered.optim, **as_options(fsdp_optim.LoadOptions, **QUIET))


def load(root: Path, numbered: Numbered) -> None:
    fsdp_optim.load(root / "step-1", numbered.model, numbered.optim, **as_options(fsdp_optim.LoadOptions, **QUIET))


def convert(root: Path, numbered: Numbered) -> None:
    fsdp_optim.convert(
        root / "step-1", root / "converted", format="dcp", **as_options(fsdp_optim.ConvertOptions, **QUIET)
    )


def convert_here(root: Path, numbered: Numbered) -> None:
    """The source is in a folder that is shared."""
    fsdp_optim.save(f"/bench/source-{root.name}", **as_options(fsdp_optim.SaveOptions, **numbered.arguments(2)))
    fsdp_optim.convert(
        f"/bench/source-{root.name}", root / "converted", format="dcp", **as_options(fsdp_optim.ConvertOptions, **QUIET)
    )


WRITING = (
    save,
    per_rank_files,
    save_in_place,
    overwrite,
    save_dcp,
    save_to_url,
    async_save,
    async_save_to_url,
    convert_here,
)
FINDING = (manager, manager_of_url, resume, resume_from_url)
OPENING = (load, convert)
CALLS = {call.__name__: call for call in (*WRITING, *FINDING, *OPENING)}


def prepare(name: str, *roots: str) -> None:
    """Save in folders, and resume there."""
    numbered = Numbered()
    for root in map(Path, roots):
        fsdp_optim.save(root / name, **as_options(fsdp_optim.SaveOptions, **numbered.arguments(1)))
        restored = fsdp_optim.resume(
            root, numbered.model, numbered.optim, **as_options(fsdp_optim.LoadOptions, **QUIET)
        )
        if restored is None or numbered.numbers() != [1]:
            raise AssertionError(f"{root} has {numbered.numbers()}")


def heard(name: str, root: str) -> dict[str, Any]:
    """The error of a call."""
    numbered = Numbered()
    try:
        CALLS[name](Path(root), numbered)
    except fsdp_optim.CheckpointError as error:
        return {"error": str(error), "numbers": numbered.numbers()}
    return {"error": "", "numbers": numbered.numbers()}


def main(what: str, *arguments: str) -> None:
    dist.init_process_group("gloo")
    if what == "prepare":
        prepare(*arguments)
    else:
        print(json.dumps(heard(what, *arguments)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
