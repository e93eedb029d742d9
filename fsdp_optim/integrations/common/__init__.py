"""What several plug-ins need of a trainer's package: its names, required (needed.py), and replaced and put back (patches.py)."""
