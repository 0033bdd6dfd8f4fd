"""The parts of a Llama-like model: inference only, few operations per layer.

Every layer names its checkpoint tensors (`tensors()`), so that loading, strictness
and fused storage need no second description of the model.
"""
