"""Training of draft heads for a target: `serve-spec train`.

Models are those of `serve_spec.models`; `weights.py` makes them differentiable. The corpus,
tokenizer and target of the shipped pair are made by `recipes/tiny/` of a source checkout.
"""
