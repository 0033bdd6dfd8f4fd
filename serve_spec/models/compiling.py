"""torch.compile over what decoder layers do between their attention calls."""

from __future__ import annotations

import torch
from torch import nn

from serve_spec.models.decoder import DecoderLayer
from serve_spec.models.draft import DraftHead
from serve_spec.models.eagle3 import Eagle3FirstLayer
from serve_spec.models.llama import Llama

_REGIONS = ("before_attention", "after_attention")

# Of one region's code, over all models of a process; torch's own limit of 8 is too few for a target
# and a draft. Past it a region runs as it is written, on our kernels.
_MAX_COMPILED = 64


def compile_layers(model: Llama | DraftHead, backend: str = "inductor") -> None:
    """Leaves the regions of all decoder layers of `model` to torch's compiler, in place.

    A region is everything before a layer's attention, or everything after it; the compiler sees
    the plain laws of `ops`. It is compiled when it first runs: once for one row and once for any
    larger number (each again for inputs made outside inference mode), and layers that are alike
    share these. No CUDA graphs are made here, so that a stage can be recorded around the compiled
    code. backend: of torch.compile; inductor can not take in what `Linear` does on CPUs.
    """
    assert isinstance(model, nn.Module), "models are made of layers"
    torch._dynamo.config.recompile_limit = _MAX_COMPILED
    # An epsilon is a constant; `dynamic` is meant for rows, and would make it an input.
    torch._dynamo.config.specialize_float = True
    for layer in model.modules():
        if isinstance(layer, DecoderLayer | Eagle3FirstLayer):
            for region in _REGIONS:
                written = getattr(layer, region)
                setattr(layer, region, torch.compile(written, dynamic=True, backend=backend))
