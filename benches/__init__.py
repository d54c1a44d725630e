"""Side-by-side benchmarks, run from the root of the tree as `python -m benches.NAME`."""
