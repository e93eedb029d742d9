"""A conversion into one file: `out.pt` is that file, and no folder, where the format writes a single file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from fsdp_optim.checkpoint.common.stores import Place
from fsdp_optim.foreign.torch.folder import ONE
from fsdp_optim.foreign.torch.reader import SUFFIXES
from fsdp_optim.foreign.torch.writer import TorchFiles
from fsdp_optim.formats.base.protocols import Format
from fsdp_optim.offline.conversion.arguments import ConvertArguments
from fsdp_optim.registry import scheme_of
from fsdp_optim.results.calls import SaveResult
from fsdp_optim.storage.posix.one_file import file_of, folder_for, is_folder, take_place
from fsdp_optim.transport.agree import agree
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.transport.failure import Failure


def place_of(target: Place, format: Format, options: ConvertArguments) -> tuple[Place, ConvertArguments]:
    """Return the place of the new files and the options there, on the leader: for a file, of the folder in which it is made.

    A path names a file if it ends like a file, and is no folder already. Buckets have folders only.
    """
    is_one = isinstance(format, TorchFiles) and format.one_file
    if not is_one or not isinstance(target, (str, os.PathLike)) or (isinstance(target, str) and scheme_of(target)):
        return target, options
    if not os.fspath(target).endswith(SUFFIXES) or is_folder(target):
        return target, options
    folder = folder_for(target, ONE, overwrite=options.overwrite)
    return folder, replace(options, overwrite=True)  # removes what a killed call has left there


def named(group: RankGroup, saved: SaveResult, *, durable: bool) -> SaveResult:
    """Move the file to its place, if the folder that was written stands for a file; return the result. Called by all ranks."""
    file = file_of(saved.path) if isinstance(saved.path, Path) else None
    if file is None or not isinstance(saved.path, Path):
        return saved
    failure = Failure()
    with failure:
        if group.rank == group.ranks[0]:
            take_place(saved.path, ONE, durable=durable)
    agree(group, "named", failure.error)
    return replace(saved, path=file)
