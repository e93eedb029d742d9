"""A folder as a store: written aside under another name, then renamed; opened so that nothing can be swapped under a reader."""
