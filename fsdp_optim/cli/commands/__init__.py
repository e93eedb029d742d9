"""The commands, one a file. Each file has `command`, and imports torch and the library's functions only when it runs."""
