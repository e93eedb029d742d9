"""What a mount of the kit's shared file system does as network file systems may do it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

LOCKS = ("shared", "local", "none", "nosys")


@dataclass(frozen=True)
class Switches:
    """One mount's behaviour; the defaults are a coherent file system. `parser` says what each of them does."""

    cache_seconds: float = 0.0
    close_to_open: bool = False
    stale: bool = False
    silly_renames: bool = False
    locks: str = "shared"
    sparse: bool = True
    fallocate: bool = True
    links: bool = True
    late_renames: float = 0.0
    clock: float = 0.0


def parser() -> argparse.ArgumentParser:
    """The command line of a mount."""
    made = argparse.ArgumentParser(prog="python -m hosts.shared_fs", description=__doc__)
    made.add_argument("backing", type=Path, help="the folder that all mounts share")
    made.add_argument("mount", type=Path, help="an empty folder that shows it until it is unmounted")
    add = made.add_argument
    add(
        "--cache-seconds", type=float, default=0.0, metavar="S", help="what others change is seen up to S seconds later"
    )
    add("--close-to-open", action="store_true", help="data is seen after the writer's close and the reader's new open")
    add("--stale", action="store_true", help="ESTALE for what is open here when another mount renames or removes it")
    add("--silly-renames", action="store_true", help="a file that is open when it is removed is called .nfs... instead")
    add("--locks", choices=LOCKS, default="shared", help="none: ENOLCK; nosys: ENOSYS; local: in this mount alone")
    add("--no-sparse", dest="sparse", action="store_false", help="files have no holes")
    add("--no-fallocate", dest="fallocate", action="store_false", help="EOPNOTSUPP for fallocate")
    add("--no-links", dest="links", action="store_false", help="EPERM for a second name of a file")
    late = "another mount's rename (give it the switch too) is seen S seconds later"
    add("--late-renames", type=float, default=0.0, metavar="S", help=late)
    add("--clock", type=float, default=0.0, metavar="S", help="times of files are shown S seconds later")
    return made


def parse(arguments: list[str] | None = None) -> tuple[Path, Path, Switches]:
    """The backing folder, the mount point and the switches of a command line."""
    values = vars(parser().parse_args(arguments))
    return values.pop("backing").resolve(), values.pop("mount").absolute(), Switches(**values)
