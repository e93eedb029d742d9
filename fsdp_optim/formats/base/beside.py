"""What the probes of all formats of this package have in common: the formats whose checkpoints may be beside their own."""

from __future__ import annotations

from fsdp_optim.formats.base.summary import ManifestSummary
from fsdp_optim.registry import manifests_but
from fsdp_optim.storage.base import CheckpointProbe


class BesideOthers(CheckpointProbe[ManifestSummary]):
    """A probe that takes the manifest of any other known format in its place for a checkpoint."""

    @property
    def others(self) -> tuple[str, ...]:
        return manifests_but(self.manifest)
