"""Masks by grammar, from the host to the tensors of `ops/token_masks.py`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from serve_spec.ops.sending import sent
from serve_spec.structured.masks import RoundMasks


class LaneMasks:
    """Static masks of a round on lanes, for up to R draws over V token ids.

    `places` int32 [R] and `words` int32 [R, ceil(V / 32)]: see `mask_tensors`.
    """

    def __init__(self, num_draws: int, vocab_size: int, device: torch.device) -> None:
        self.places = torch.full((num_draws,), -1, dtype=torch.int32, device=device)
        num_words = -(-vocab_size // 32)
        self.words = torch.zeros(num_draws, num_words, dtype=torch.int32, device=device)
        self._is_clear = True

    def write(self, masks: RoundMasks) -> None:
        """The masks of the round to come, without waiting."""
        self.clear()
        places, words = mask_tensors(masks, self.places.device)
        self.places[: len(places)] = places
        self.words[: len(words)] = words
        self._is_clear = False

    def clear(self) -> None:
        """No draw has a mask."""
        if not self._is_clear:
            self.places.fill_(-1)
            self._is_clear = True


def mask_tensors(masks: RoundMasks, device: torch.device) -> tuple[Tensor, Tensor]:
    """Each draw's place, int32 [R], and the masks, int32 [M, ceil(V / 32)], without waiting."""
    places = torch.tensor(masks.places, dtype=torch.int32)
    words = torch.from_numpy(masks.words.view(np.int32))
    return sent(places, device), sent(words, device)
