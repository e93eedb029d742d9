"""The options of the plug-in for Accelerate and the Trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdp_optim import CallOptions, LoadOptions, SaveOptions, StateError
from fsdp_optim.plugins import Prove, Rename, ResumeProver

_SAVE, _LOAD = SaveOptions(), LoadOptions()
_NOT_HERE = ("process_group", "rename")


@dataclass(frozen=True)
class Settings:
    """How the plug-in for Accelerate and the Trainer saves and loads.

    Args:
        background, prove, save_options, load_options: as for `fsdp_optim.integrations.accelerate.enable`.
    """

    background: bool = False
    prove: Prove = False
    save_options: SaveOptions = _SAVE
    load_options: LoadOptions = _LOAD

    def saving(self) -> SaveOptions:
        """The options of a save, and of the steps that all ranks take together."""
        return self.save_options

    def loading(self, rename: Rename | None = None) -> LoadOptions:
        """The options of a load."""
        return replace(self.load_options, rename=rename) if rename is not None else self.load_options

    def calling(self) -> CallOptions:
        """The options of other calls of all ranks, which see the model as a save does."""
        saving = self.save_options
        return CallOptions(
            timeout=saving.timeout,
            bucket_nbytes=saving.bucket_nbytes,
            name_of=saving.name_of,
            on_replica_mismatch=saving.on_replica_mismatch,
            views=saving.views,
        )

    def prover(self) -> ResumeProver:
        """A prover of resumes, for one run."""
        return ResumeProver(self.prove, options=self.calling())

    def validate(self) -> None:
        """Raise StateError or CheckpointError for a wrong option."""
        for name, kind in (("save_options", SaveOptions), ("load_options", LoadOptions)):
            options = getattr(self, name)
            if not isinstance(options, kind):
                raise StateError(f"{name} must be a {kind.__name__}, not a {type(options).__name__}")
            for option in _NOT_HERE:
                if getattr(options, option) is not None:
                    raise StateError(f"{name} has {option}=..., which is not for this plug-in: leave it out")
            options.validate()
        if not isinstance(self.background, bool):
            raise StateError(f"background must be True or False, not {self.background!r}")
        if self.prove not in (False, True, "raise"):
            raise StateError(f'prove must be False, True or "raise", not {self.prove!r}')
