"""Stateless tensor functions. `x.py` is the reference; `x_triton.py` holds its kernels."""
