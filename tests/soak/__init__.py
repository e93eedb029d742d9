"""Tortures of checkpoints: `make soak` runs them for SOAK_SECONDS seconds, `make test-all` a short part with a fixed seed."""
