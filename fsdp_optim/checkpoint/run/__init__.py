"""CheckpointManager: when a run saves, what it keeps, and what it resumes from.

`manager.py` is the public class, `managed_run.py` one run of it, `resuming.py` the choice of a checkpoint to resume from.
"""
