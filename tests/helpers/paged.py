"""Run a model over a paged pool with scattered pages, in any chunks, without an engine."""

from itertools import accumulate

import torch

from serve_spec.core.context import ForwardContext
from serve_spec.kvcache.pool import PagedKVPool
from serve_spec.ops.paged_attention import AttentionPlan
from serve_spec.worker.forward import SlotAttention


class PagedSequences:
    """A pool and several sequences in it; `lengths[b]` entries of sequence b are computed.

    Pages are drawn at random, so neighbours in a sequence are apart in the pool. The pool is
    filled with large values first: what a mask must hide is far from harmless.
    """

    def __init__(
        self, caches, num_sequences, max_len, page_size=4, dtype=torch.float32, seed=0, device="cpu"
    ):
        pages_each = -(-max_len // page_size)
        num_pages = num_sequences * pages_each + 1
        self.pool = PagedKVPool(caches, num_pages, page_size, dtype=dtype, device=device)
        for tensor in self.pool.tensors:
            tensor.fill_(50.0)
        generator = torch.Generator().manual_seed(seed)
        pages = 1 + torch.randperm(num_pages - 1, generator=generator)
        self.pages = pages.view(num_sequences, pages_each)
        self.page_size = page_size
        self.device = device
        self.lengths = [0] * num_sequences

    def extend(self, chunks, asked=None):
        """Return the context of a forward that adds `count` tokens to each (sequence, count).

        asked: for each, whether its last token is asked for; None: all tokens are.
        """
        positions = [self.lengths[b] + i for b, count in chunks for i in range(count)]
        slots = [int(self._slots(b)[self.lengths[b] + i]) for b, n in chunks for i in range(n)]
        counts = [count for _, count in chunks]
        rows = None
        attending = [index for index, _ in chunks]
        for index, count in chunks:
            self.lengths[index] += count
        if asked is not None:
            ends = torch.tensor(counts).cumsum(0) - 1
            rows = ends[torch.tensor(asked).bool()].to(self.device)
            attending = [b for b, is_asked in zip(attending, asked, strict=True) if is_asked]
            counts = [1] * len(attending)
        plan = AttentionPlan(
            self.pages[attending].to(torch.int32).to(self.device),
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=self.device),
            torch.tensor(
                [self.lengths[b] for b in attending], dtype=torch.int32, device=self.device
            ),
            self.page_size,
            ((len(attending), max(counts, default=1)),),
        )
        written = torch.tensor(slots, device=self.device)
        attention = SlotAttention(self.pool, written, plan, rows)
        return ForwardContext(torch.tensor(positions, device=self.device), attention, rows)

    def _slots(self, index):
        offsets = torch.arange(self.page_size)
        return (self.pages[index].unsqueeze(1) * self.page_size + offsets).view(-1)


def run_text(model, ids, capture=None):
    """Return the logits [T, V] of a text, and its features."""
    kind = model.embed_tokens.weight.dtype
    sequence = PagedSequences(model.spec.caches, 1, len(ids), dtype=kind)
    out = model.forward(ids, sequence.extend([(0, len(ids))]), capture)
    return model.logits(out.hidden), out.features
