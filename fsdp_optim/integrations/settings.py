"""The options of the plug-in for Accelerate and the Trainer."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from fsdp_optim import CallOptions, LoadOptions, SaveOptions, StateError
from fsdp_optim.plugins import OnReplicaMismatch, Prove, Rename, ResumeProver, Strategy


@dataclass(frozen=True)
class Settings:
    """How the plug-in for Accelerate and the Trainer saves and loads.

    Args:
        background, durable, checksums, max_file_size, strategy, on_replica_mismatch, allow_pickle, cast, progress, timeout,
            bucket_nbytes, prove: as for `fsdp_optim.integrations.accelerate.enable`.
    """

    background: bool = False
    durable: bool = True
    checksums: bool = True
    max_file_size: int = 4_000_000_000
    strategy: Strategy = "auto"
    on_replica_mismatch: OnReplicaMismatch = "error"
    allow_pickle: bool = False
    cast: bool = False
    progress: bool | None = None
    timeout: float | timedelta | None = None
    bucket_nbytes: int = SaveOptions.bucket_nbytes
    prove: Prove = False

    def saving(self) -> SaveOptions:
        """The options of a save, and of the steps that all ranks take together."""
        return SaveOptions(
            timeout=self.timeout,
            bucket_nbytes=self.bucket_nbytes,
            on_replica_mismatch=self.on_replica_mismatch,
            strategy=self.strategy,
            max_file_size=self.max_file_size,
            checksums=self.checksums,
            durable=self.durable,
            allow_pickle=self.allow_pickle,
            progress=self.progress,
        )

    def loading(self, rename: Rename | None = None) -> LoadOptions:
        """The options of a load."""
        return LoadOptions(
            timeout=self.timeout,
            bucket_nbytes=self.bucket_nbytes,
            rename=rename,
            cast=self.cast,
            allow_pickle=self.allow_pickle,
            progress=self.progress,
        )

    def prover(self) -> ResumeProver:
        """A prover of resumes, for one run."""
        return ResumeProver(self.prove, options=CallOptions(timeout=self.timeout, bucket_nbytes=self.bucket_nbytes))

    def validate(self) -> None:
        """Raise StateError or CheckpointError for a wrong option."""
        self.saving().validate()
        self.loading().validate()
        for name in ("background", "durable", "checksums", "allow_pickle", "cast"):
            if not isinstance(getattr(self, name), bool):
                raise StateError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.prove not in (False, True, "raise"):
            raise StateError(f'prove must be False, True or "raise", not {self.prove!r}')
