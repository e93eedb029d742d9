"""What saves and loads share: the contents of a checkpoint, its files, formats and stores, progress, and results."""
