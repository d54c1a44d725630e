"""The Triton kernels, interpreted on the CPU: run with TRITON_INTERPRET=1 (`make test` does)."""
