"""Full dicts: this library's and other libraries' dialects, the names and ids in them, and the order in which ids count."""
