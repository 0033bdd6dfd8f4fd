"""Masks by grammar, from the host to the tensors of `ops/token_masks.py`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from serve_spec.structured.masks import RoundMasks


def mask_tensors(masks: RoundMasks, device: torch.device) -> tuple[Tensor, Tensor]:
    """Each draw's place, int32 [R], and the masks, int32 [M, ceil(V / 32)]; the host does not wait."""
    places = torch.tensor(masks.places, dtype=torch.int32)
    words = torch.from_numpy(masks.words.view(np.int32))
    if device.type == "cuda":
        places, words = places.pin_memory(), words.pin_memory()
    return places.to(device, non_blocking=True), words.to(device, non_blocking=True)
