"""Modules that import a trainer's package, for `kit.own_ranks`."""
