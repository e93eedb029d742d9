"""Golden checkpoints: each was made once, and every later version must read it bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from kit.checkpoint_format import all_bytes, check_folder, read_manifest
from kit.compare import check_same


def digest(folder: Path) -> str:
    """A digest of the names and bytes of all files."""
    hashed = hashlib.sha256()
    for name, data in sorted(all_bytes(folder).items()):
        hashed.update(f"{name}\0{len(data)}\0".encode() + data)
    return hashed.hexdigest()


def without(keys: Collection[str], value: Any) -> Any:
    """A manifest, or a part of it, without these keys at any depth."""
    if isinstance(value, dict):
        return {key: without(keys, item) for key, item in value.items() if key not in keys}
    return [without(keys, item) for item in value] if isinstance(value, list) else value


def check_kept(folder: Path, sha256: str, version: int) -> None:
    """Raise unless a golden checkpoint is the one that was made, in that version of the format, and is whole."""
    check_same("digest", digest(folder), sha256)
    check_same("version", read_manifest(folder)["version"], version)
    check_folder(folder)


def check_written_alike(folder: Path, golden: Path, changes: Collection[str]) -> None:
    """Raise unless two checkpoints have the same files, byte for byte, but for what the manifest says under `changes`."""
    check_same("manifest", without(changes, read_manifest(folder)), without(changes, read_manifest(golden)))
    files, kept = all_bytes(folder), all_bytes(golden)
    check_same("names", sorted(files), sorted(kept))
    for name in files:
        if name.endswith(".safetensors"):
            check_same(name, files[name], kept[name])


def make(folder: Path, write: Callable[[Path], object]) -> str:
    """Let `write` make a golden checkpoint. Returns the digest, which the tests must know."""
    if folder.exists():
        raise SystemExit(f"{folder} is there already: it is made once. Move it away to make another.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    write(folder)
    check_folder(folder)
    return digest(folder)
