"""Examples that run from the repository's root: `python -m examples.<name>`."""
