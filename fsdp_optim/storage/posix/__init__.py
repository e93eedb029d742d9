"""A folder as a store: a save writes under another name and renames at the end; a reader holds the folder and its files open."""

from fsdp_optim.storage.posix.beacon import beacon_above
from fsdp_optim.storage.posix.claim import LOCK, is_held
from fsdp_optim.storage.posix.directory import FolderDirectory
from fsdp_optim.storage.posix.filesystem import this_host
from fsdp_optim.storage.posix.folder import FolderStaging
from fsdp_optim.storage.posix.opened import OpenFiles, OpenFolder
from fsdp_optim.storage.posix.path_status import names_in
from fsdp_optim.storage.posix.store import Folder
from fsdp_optim.storage.posix.writer import FolderWriter

__all__ = [
    "LOCK",
    "Folder",
    "FolderDirectory",
    "FolderStaging",
    "FolderWriter",
    "OpenFiles",
    "OpenFolder",
    "beacon_above",
    "is_held",
    "names_in",
    "this_host",
]
