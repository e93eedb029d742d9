"""Modules that import a trainer's package, for `kit.forked`."""
