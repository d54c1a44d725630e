"""The CUDA engine beside torch, a plain float64 pass and a copy: `python -m benches.gpu`."""
