"""What needs a CUDA device: skipped without one, run from a wheel by `python -m tests.gpu`."""
