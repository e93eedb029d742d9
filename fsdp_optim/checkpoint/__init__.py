"""The calls between memory and storage: save, load and convert, and the catalog of the checkpoints in a folder."""
