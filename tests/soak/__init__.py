"""Torture of checkpoints: `make soak` runs it for as long as it is told to, `make test` a short part with a fixed seed."""
