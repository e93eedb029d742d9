"""The files of a DeepSpeed checkpoint: which folder `latest` names, and which file is whose."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_optim.errors import CheckpointError, shortened
from fsdp_optim.foreign.deepspeed.manifest import NAME
from fsdp_optim.storage.base import Opened, check_inside

LATEST = ("latest", "latest_universal")
"""The files that name the newest tag, in the order in which they are asked."""

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_OTHER = re.compile(r"((layer|expert)_.*|mp_rank_\d+_\d+_)model_states\.pt|expp_rank_.*_optim_states\.pt")
_UNIVERSAL = re.compile(r"zero/(.+)/fp32\.pt")
_MOST_TAG_NBYTES = 4096


@dataclass(frozen=True)
class DeepSpeedFiles:
    """The files of one tag.

    Attributes:
        where: the name of the folder, for errors.
        folder: the beginning of the names of all files: "", or the tag with a "/".
        names: the names of all files, without the folder.
        models: the files with the model and the trainer's values, by data parallel rank.
        optims: the files with the optimizer, by data parallel rank.
        params: the names of the parameters that a universal checkpoint has; empty for the others.
    """

    where: str
    folder: str
    names: frozenset[str]
    models: Mapping[int, str]
    optims: Mapping[int, str]
    params: Sequence[str]

    @property
    def is_universal(self) -> bool:
        return bool(self.params)


def has_deepspeed_files(opened: Opened) -> bool:
    """Return whether a place has files of DeepSpeed, at its top or in the folder of a tag, or has lost them. Raises nothing."""
    if opened.selected:
        return False
    try:
        names = opened.names()
    except CheckpointError:
        return False
    return NAME in names or any(_is_state(name) for name in names)


def find_files(opened: Opened) -> DeepSpeedFiles:
    """Return the files of the checkpoint in a place: of the place itself, of the tag that `latest` names, or of the only tag."""
    names = opened.names()
    folder = _folder(opened, names)
    inside = frozenset(name[len(folder) :] for name in names if name.startswith(folder))
    where = opened.named(folder.rstrip("/")) if folder else opened.where
    params = sorted(matched[1] for name in inside if (matched := _UNIVERSAL.fullmatch(name)))
    others = sorted(name for name in inside if _OTHER.fullmatch(name))
    if others and not params:
        raise CheckpointError(
            f"{where}/{others[0]}: a checkpoint with pipeline stages or experts in files of their own cannot be read: convert it "
            "with deepspeed.checkpoint.ds_to_universal"
        )
    models = _by_rank(where, folder, inside, _MODEL, is_universal=bool(params))
    optims = _by_rank(where, folder, inside, _OPTIM, is_universal=bool(params))
    if not models:
        raise CheckpointError(
            f"{where}: has no *_model_states.pt, which names the parameters: the checkpoint is incomplete"
        )
    return DeepSpeedFiles(where, folder, inside, models, {} if params else optims, params)


def _is_state(name: str) -> bool:
    last = name.rpartition("/")[2]
    return bool(_MODEL.fullmatch(last) or _OPTIM.fullmatch(last))


def _folder(opened: Opened, names: Sequence[str]) -> str:
    """Return the folder of the tag to read, with a "/" at its end; "" for the place itself."""
    if any(_is_state(name) and "/" not in name for name in names):
        return ""
    for latest in LATEST:
        if latest in names:
            text = opened.read_whole(latest, most_nbytes=_MOST_TAG_NBYTES)
            tag = check_inside(opened.named(latest), text.decode("utf-8", "replace").strip())
            if not any(name.startswith(f"{tag}/") and _is_state(name) for name in names):
                raise CheckpointError(
                    f"{opened.named(latest)}: names the tag {tag!r}, and the folder of that name has no files of DeepSpeed: give "
                    "the path of the tag to load"
                )
            return f"{tag}/"
    tags = sorted({name.rpartition("/")[0] for name in names if _is_state(name)})
    if len(tags) > 1:
        raise CheckpointError(
            f"{opened.where}: has no file latest, and several tags: give the path of one of them: {shortened(tags)}"
        )
    return f"{tags[0]}/"


def _by_rank(
    where: str, folder: str, inside: frozenset[str], pattern: re.Pattern[str], *, is_universal: bool
) -> dict[int, str]:
    """Return the files that match a pattern, by data parallel rank."""
    by_rank: dict[int, str] = {}
    for name in sorted(inside):
        matched = pattern.fullmatch(name)
        if matched is None:
            continue
        if int(matched[2]) and is_universal:
            continue  # the parameters are whole in their own files; the rest is equal on all of these ranks
        if int(matched[2]):
            raise CheckpointError(
                f"{where}/{name}: a checkpoint of several tensor or pipeline parallel ranks cannot be read, because its files do "
                "not say how parameters were cut: convert it with deepspeed.checkpoint.ds_to_universal"
            )
        rank = int(matched[1] or 0)
        if rank in by_rank and is_universal and NAME in inside:
            continue  # this library has written the values again without tensors, where stage 3 looks for them
        if rank in by_rank:
            raise CheckpointError(
                f"{where}: {by_rank[rank].rpartition('/')[2]} and {name} are both of rank {rank}, so the folder has files of two "
                "saves: remove those of the older one"
            )
        by_rank[rank] = f"{folder}{name}"
    return dict(sorted(by_rank.items()))
