"""Ranges that name stages and layers in profiles, if SERVE_SPEC_TRACE is 1.

torch.profiler shows them, and on GPUs tools that read NVTX. They are put around functions while an
engine is built. A captured stage opens those of itself and its layers while it is captured, never
again: the range of its replay, on the host, is all that a profile of later steps shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from torch.profiler import record_function

from serve_spec.core.draft import DraftShape
from serve_spec.models.decoder import DecoderLayer
from serve_spec.worker.forward import QueryShape, VerifiedTokens
from serve_spec.worker.graphs import StepSize
from serve_spec.worker.stages import StageBodies

P = ParamSpec("P")
R = TypeVar("R")


def named(name: str, run: Callable[P, R]) -> Callable[P, R]:
    """Return `run` within a range of this name; `run` itself unless SERVE_SPEC_TRACE is 1."""
    if not _is_on():
        return run

    @wraps(run)
    def within_range(*args: P.args, **kwargs: P.kwargs) -> R:
        with _range(name):
            return run(*args, **kwargs)

    return within_range


def name_stages(bodies: StageBodies) -> StageBodies:
    """Return stages within ranges such as `verify chain of 4: 8 tokens, 2 requests`.

    The same stages unless SERVE_SPEC_TRACE is 1.
    """
    if not _is_on():
        return bodies
    return _NamedStages(
        bodies.target, bodies.drafter, bodies.buffers, bodies.verifier, bodies.parallel
    )


def name_layers(model: object, owner: str) -> None:
    """Run the parts of all decoder layers of `model` within ranges, in place.

    They are called `{owner} layer {index} {part}`; the index is that in the model's KV pool.
    Nothing changes unless SERVE_SPEC_TRACE is 1.
    """
    if not _is_on():
        return
    assert isinstance(model, nn.Module), "models are made of layers"
    for layer in model.modules():
        if isinstance(layer, DecoderLayer):
            prefix = f"{owner} layer {layer.attention.index}"
            for module, part in (
                (layer, "before_attention"),
                (layer.attention, "attend"),
                (layer, "after_attention"),
            ):
                setattr(module, part, named(f"{prefix} {part}", getattr(module, part)))


class _NamedStages(StageBodies):
    def extend_chunks(self, size: StepSize) -> None:
        with _range(f"extend_chunks: {size}"):
            super().extend_chunks(size)

    def extend(self, length: int, size: StepSize) -> None:
        with _range(f"extend {length}: {size}"):
            super().extend(length, size)

    def draft(self, shape: DraftShape, size: StepSize) -> None:
        with _range(f"draft {shape}: {size}"):
            super().draft(shape, size)

    def admit(self, query: QueryShape, size: StepSize) -> None:
        with _range(f"admit {query}: {size}"):
            super().admit(query, size)

    def verify(self, query: QueryShape, size: StepSize) -> VerifiedTokens:
        with _range(f"verify {query}: {size}"):
            return super().verify(query, size)


def _is_on() -> bool:
    return os.environ.get("SERVE_SPEC_TRACE") == "1"


@contextmanager
def _range(name: str) -> Iterator[None]:
    with record_function(name), torch.cuda.nvtx.range(name) if _has_nvtx() else nullcontext():
        yield


@cache
def _has_nvtx() -> bool:
    return torch.cuda.is_available()
