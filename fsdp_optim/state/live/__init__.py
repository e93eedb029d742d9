"""The optimizer of this rank: its parameters and their state, and whether a full state fits it."""
