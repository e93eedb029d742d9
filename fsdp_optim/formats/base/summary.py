"""The summary at the beginning of a manifest: the facts that order the checkpoints of a folder and group them into series.

A reader can read the summary without the rest of the manifest, which is large for models with many parameters. No content is
trusted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from fsdp_optim.errors import CheckpointError
from fsdp_optim.formats.base.checksums import hex_of
from fsdp_optim.formats.base.distrust import as_checkpoint_error
from fsdp_optim.formats.base.json_text import without_duplicates
from fsdp_optim.storage.base import check_name

MOST_NBYTES = 1 << 20
"""The most bytes of a summary. If a summary does not end within them, the whole manifest is read."""

Nbytes = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""The size of a file in bytes. No file system has a larger one."""

TimeNs = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""A time in nanoseconds since 1970, as a signed number of 64 bits: the years 1677 to 2262, which `datetime` can represent."""

# "brief" sorts before all other keys, so that the manifest begins with the summary.
_BEGINS = re.compile(r'\{"checksum":"[0-9a-f]{16}","checkpoint":\{"brief":')


class ManagerRecord(Struct, frozen=True):
    """The record that a `CheckpointManager` adds to each of its checkpoints.

    Attributes:
        after: the step of the checkpoint that the run had loaded or saved before; -1 if there was none. Earlier checkpoints
            with a higher step were left behind when the run went back to this step.
        metric: the metric by which the best checkpoints are kept.
    """

    after: Annotated[int, Meta(ge=-1)]
    metric: float | None


class SavedRoles(Struct, frozen=True, omit_defaults=True):
    """What the parts of a checkpoint are, where its files have the form of another library, in which only names say it.

    Attributes:
        model, optim: the keys that lead to the model's dict and to the optimizer's; empty: it is the top level; None: there is
            none.
        state: the names of the trainer's values at the top level, as `ascii` shows them, where the model's dict is there too.
    """

    model: list[str] | None = None
    optim: list[str] | None = None
    state: list[str] = []


class ManifestSummary(Struct, frozen=True, omit_defaults=True):
    """The summary of a manifest.

    Attributes:
        version: the version of the format.
        sequence: a number above that of every earlier checkpoint of the folder; 0 if an older version of the library saved.
        step: the argument of `save`.
        keep_last: a number only in checkpoints of older versions, whose `save` had such an argument.
        created_ns: the time on the clock of the machine that saved, in nanoseconds since the epoch.
        token: a string that no other save has.
        content: a string that is equal for two checkpoints of the same parameters that have the same of these: which weights,
            and whether an optimizer.
        files: the size of each file in bytes.
        manager: the record of a `CheckpointManager`; None for all other saves.
        weights: which weights were saved: "all", "trainable" or "none".
        weights_dtype: torch's name of the dtype to which floating weights were cast; None: they were saved as they were.
        thinned_from: the `content` before `thin` removed the optimizer; None if it did not.
        wrapper: what wrapped the model that was saved, for users; empty for a plain model, and where an older version saved.
        roles: which parts of the files are the model's and the optimizer's; None in formats whose files say so, where an older
            version saved, and where a save knew neither model nor optimizer.
    """

    version: int
    sequence: Annotated[int, Meta(ge=0)]
    step: int | None
    keep_last: int | None
    created_ns: TimeNs
    token: str
    content: str
    world_size: int
    files: dict[str, Nbytes]
    manager: ManagerRecord | None = None
    weights: str = "all"
    weights_dtype: str | None = None
    thinned_from: str | None = None
    wrapper: str = ""
    roles: SavedRoles | None = None

    @property
    def series(self) -> str:
        """The `content` as it was saved, by which a manager knows its own checkpoints, thin or not."""
        return self.content if self.thinned_from is None else self.thinned_from

    @property
    def is_stand_in(self) -> bool:
        """Whether this summary stands in for a checkpoint whose writer left none: such a checkpoint is not listed."""
        return not self.world_size

    @property
    def order(self) -> tuple[int, int, int, str]:
        """The key that sorts checkpoints of one folder by age, the oldest first."""
        return self.sequence, -1 if self.step is None else self.step, self.created_ns, self.token

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON values, with its checksum."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values | {"xxh3_64": hex_of(_canonical(values))}

    @classmethod
    def from_json(cls, where: str, values: Any) -> ManifestSummary:
        """The inverse of `to_json`. Raises CheckpointError if the checksum or a type is wrong."""
        with as_checkpoint_error(where):
            rest = {name: value for name, value in values.items() if name != "xxh3_64"}
            if hex_of(_canonical(rest)) != values["xxh3_64"]:
                raise CheckpointError(f"{where}: is not what was saved: the checksum of its brief differs")
            summary = msgspec.convert(rest, cls)
            for name in summary.files:
                check_name(where, name)
            return summary


def content_of(
    names: Collection[str], *, has_optim: bool, weights: str = "all", weights_dtype: str | None = None
) -> str:
    """Return a hash of the names of a model's parameters, of whether a checkpoint has an optimizer, and of its weights."""
    of_weights = [value for value, default in ((weights, "all"), (weights_dtype, None)) if value != default]
    return hex_of(_canonical([sorted(names), has_optim, *of_weights]))


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def summary_in(where: str, beginning: bytes) -> ManifestSummary | None:
    """Return the summary in the first bytes of a manifest; None if these bytes hold no whole summary."""
    text = beginning.decode(errors="replace")  # the bytes may be cut inside a character
    begins = _BEGINS.match(text)
    if begins is None:
        return None
    try:
        values, _ = json.JSONDecoder(object_pairs_hook=without_duplicates).raw_decode(text, begins.end())
    except (ValueError, RecursionError, MemoryError):
        return None
    return ManifestSummary.from_json(where, values)
