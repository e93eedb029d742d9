"""A folder as a store: a save writes under another name and renames at the end; a reader holds the folder and its files open."""
