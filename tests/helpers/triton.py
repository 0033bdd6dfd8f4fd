"""Kernels under test: on the GPU where there is one, else under Triton's interpreter on the CPU.

Import this module before any `*_triton` module: Triton decides when a kernel is defined.
"""

import os
from contextlib import contextmanager
from threading import Lock
from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import triton.language as tl
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor, scope):
        # Bounds of loops are arrays of one element there, which newer versions of NumPy do not
        # take for integers.
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_lang_tensor

    _convert = interpreter._convert_float
    # There bfloat16 is uint16, float8 is uint8, and conversions to them cut instead of rounding to
    # nearest.
    _TYPES = {
        tl.float32: torch.float32,
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float8e4nv: torch.float8_e4m3fn,
    }
    _INTEGERS = {2: torch.uint16, 1: torch.uint8}

    def _convert_float(data, source, target, rounding):
        if source in _TYPES and target in _TYPES:
            numbers = torch.from_numpy(np.array(data)).view(_TYPES[source]).to(_TYPES[target])
            if target != tl.float16 and target.primitive_bitwidth // 8 in _INTEGERS:
                numbers = numbers.view(_INTEGERS[target.primitive_bitwidth // 8])
            return numbers.numpy()
        return _convert(data, source, target, rounding)

    interpreter._convert_float = _convert_float

    _multiply = interpreter.InterpreterBuilder.create_dot

    def _create_dot(self, a, b, total, *options):
        # ... and products are those of the integers that stand for it.
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(operand, tl.float32) for operand in (a, b))
        return _multiply(self, a, b, total, *options)

    interpreter.InterpreterBuilder.create_dot = _create_dot


@contextmanager
def kernels_in_threads():
    """Let threads interpret kernels, of one program each, at the same time."""
    patch, scopes, lock = interpreter._patch_lang, [], Lock()

    def keep(function):
        with lock:
            scopes.append(patch(function))
        # A launch that ends would take back what others still need.
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = keep
    try:
        yield
    finally:
        interpreter._patch_lang = patch
        for scope in reversed(scopes):
            scope.restore()


def relative_error(found, expected):
    """|found - expected| / |expected|; NaN where either has one."""
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    return error.item()


def reference(module):
    """Return a copy of `module` whose functions are the references, for tensors on a GPU too."""
    copy = ModuleType(module.__name__)
    for name, value in vars(module).items():
        plain = getattr(value, "__wrapped__", value)
        if isinstance(plain, FunctionType) and plain.__module__ == module.__name__:
            defaults = plain.__kwdefaults__
            # What it calls are references too.
            plain = FunctionType(plain.__code__, vars(copy), name, plain.__defaults__)
            plain.__kwdefaults__ = defaults
        setattr(copy, name, plain)
    return copy
