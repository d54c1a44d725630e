"""The Triton kernels of the CUDA engine, and the command that compiles them ahead of time."""
