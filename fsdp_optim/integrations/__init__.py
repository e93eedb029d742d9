"""Plug-ins for trainers of other packages, one file a package: each is imported by its users only, and imports its package."""
