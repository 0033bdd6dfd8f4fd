"""Training of draft heads for a target; `phases.py` lists its phases.

Models are those of `serve_spec.models`; `weights.py` makes them differentiable.
"""
