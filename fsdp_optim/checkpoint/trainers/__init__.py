"""Checkpoint folders of trainers: their files and ours appear together, when all of them are complete."""
