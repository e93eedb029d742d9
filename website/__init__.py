"""The docs site: `python -m website` builds it into build/docs/site; CONTRIBUTING.md says how."""
