"""Between memory and storage: save, load, convert, and the catalog of a folder."""
