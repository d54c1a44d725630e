"""Examples that run from the root of the tree, as `python -m examples.NAME`."""
