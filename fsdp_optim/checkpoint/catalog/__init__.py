"""The checkpoints of a folder or a prefix: the list, their order, and the retention rules of a CheckpointManager."""
