"""Build, check and try the distributions: `python -m release.build`, `python release/smoke.py`."""
