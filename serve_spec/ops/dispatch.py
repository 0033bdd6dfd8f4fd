"""Run a function's Triton kernel for tensors on a GPU, and its reference elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

P = ParamSpec("P")
R = TypeVar("R")


def has_kernel(reference: Callable[P, R]) -> Callable[P, R]:
    """Return a function that calls the kernel of `reference` for tensors on a GPU.

    The kernel of a function of `x.py` is the function of the same name in `x_triton.py`, imported
    on first use, because machines without a GPU need no Triton. The first parameter annotated
    `Tensor` decides and must be passed by position. torch's compiler traces the reference.
    """
    position = list(reference.__annotations__.values()).index("Tensor")

    @cache
    def kernel() -> Callable[P, R]:
        module = import_module(f"{reference.__module__}_triton")
        found: Callable[P, R] = getattr(module, reference.__name__)
        return found

    @wraps(reference)
    def choose(*args: P.args, **kwargs: P.kwargs) -> R:
        tensor: Any = args[position]
        if tensor.is_cuda and not is_compiling():
            return kernel()(*args, **kwargs)
        return reference(*args, **kwargs)

    return choose


def reference_of(function: Callable[P, R]) -> Callable[P, R]:
    """Return the reference implementation of a function that `has_kernel`."""
    found: Callable[P, R] = function.__wrapped__  # type: ignore[attr-defined]
    return found


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Return settings of a launch: programmatic dependent launch on Hopper and later GPUs.

    A kernel then starts before the last one has ended, and may read at once what no running kernel
    writes: weights, and results of kernels that end with `dispatch_triton.let_next_read`. Every
    program waits for the previous kernel before it reads or writes anything else, so the end of one
    kernel implies the end of all before it.
    """
    is_dependent = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"DEPENDENT": is_dependent, "launch_pdl": is_dependent}


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return host values, not pinned, on the device."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)
