"""Stateless tensor functions. `x.py` is the law; `x_triton.py`, where it exists, its fast twin."""
