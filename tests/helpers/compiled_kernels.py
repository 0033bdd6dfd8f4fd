"""Compiling attention and admission for a Hopper GPU on any machine: `python -m ...` prints JSON.

One line per kernel of every case: registers, bytes of spills and of shared memory.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from serve_spec.ops import admission_triton, paged_attention_triton
from serve_spec.ops.paged_attention import AttentionKind, AttentionPlan

ATTENTION: dict[str, dict[str, Any]] = {
    "decode, batch 1": {},
    "decode, batch 8": {"batch": 8},
    "decode, batch 64": {"batch": 64},
    "verify, batch 16": {"batch": 16, "query_len": 4},
    "tree": {"query_len": 64, "tree": True},
    "chunk": {"query_len": 2048},
    "window": {"batch": 8, "width": 64, "window": 128},
    "wide heads": {"batch": 8, "width": 256},
}
ADMISSION: dict[str, dict[str, Any]] = {
    "chains": {},
    "long chains": {"width": 63, "depth": 63},
    "trees, most slots": {"batch": 256, "width": 63, "tree": True},
}


class _Recorder:
    """Stands for a kernel and compiles what it would be launched with."""

    def __init__(self, case: str, kernel: Any) -> None:
        self._case, self._kernel = case, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._compile

    def _compile(self, *args: Any, **settings: Any) -> None:
        names = self._kernel.arg_names
        options = {name: settings.pop(name) for name in list(settings) if name not in names}
        values = dict(zip(names, args, strict=False)) | settings
        signature, constants, attributes = {}, {}, {}
        for index, name in enumerate(names):
            value = values[name]
            if isinstance(value, Tensor):
                signature[name] = "*" + triton.runtime.jit.mangle_type(value)[1:]
                attributes[(index,)] = [["tt.divisibility", 16]]
            elif name in settings or value is None:
                signature[name], constants[name] = "constexpr", value
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if name == "query_stride":
                    attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self._kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        record = {"case": self._case, "kernel": self._kernel.__name__}
        record |= _resources(compiled.asm["ptx"])
        print(json.dumps(record | {"shared": compiled.metadata.shared}), flush=True)


def _resources(ptx: str) -> dict[str, int]:
    """Return what ptxas says of a kernel."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        ptxas = triton.knobs.nvidia.ptxas.path
        command = [ptxas, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = {"registers": r"Used (\d+) registers", "spills": r"(\d+) bytes spill stores"}
    return {name: int(re.search(pattern, said)[1]) for name, pattern in found.items()}  # type: ignore[index]


@contextmanager
def recorded(op: ModuleType, case: str) -> Iterator[None]:
    """Compile what the kernels of `op` would be launched with."""
    kernels = {name: kernel for name, kernel in vars(op).items() if name.endswith("_kernel")}
    vars(op).update({name: _Recorder(case, kernel) for name, kernel in kernels.items()})
    yield
    vars(op).update(kernels)


def compile_attention(
    case: str,
    batch: int = 1,
    query_len: int = 1,
    width: int = 128,
    window: int | None = None,
    tree: bool = False,
) -> None:
    """Compile what 32 query heads and 8 kv heads launch for so many requests, in bfloat16."""
    numbers = torch.zeros(batch + 1, dtype=torch.int32)
    query = torch.zeros(batch * query_len, 32, width, dtype=torch.bfloat16)
    pool = torch.zeros(64, 8, width, dtype=torch.bfloat16)
    plan = AttentionPlan(
        tables=torch.zeros(batch, 4, dtype=torch.int32),
        query_starts=numbers,
        kv_lens=numbers[:batch],
        page_size=16,
        groups=((batch, query_len),),
        tree_mask=torch.zeros(len(query), dtype=torch.int64) if tree else None,
    )
    with recorded(paged_attention_triton, case):
        kind = AttentionKind(window=window)
        paged_attention_triton.paged_attention(query, pool, pool, plan, kind)


def compile_admission(
    case: str,
    batch: int = 8,
    width: int = 7,
    depth: int = 7,
    tree: bool = False,
) -> None:
    """Compile what chains or trees of so many requests, drafts and levels launch."""
    numbers, slots = torch.zeros(batch, dtype=torch.int32), torch.zeros(batch, width)
    with recorded(admission_triton, case):
        admission_triton.admit_drafts(
            slots,
            *[numbers] * 3,
            calibration=torch.zeros(2, depth, 2),
            budget=numbers[:1],
            drafts=slots.long() if tree else None,
            parents=slots.int() if tree else None,
        )


if __name__ == "__main__":
    admission_triton.dependent_launch = lambda device: {"DEPENDENT": True, "launch_pdl": True}
    paged_attention_triton.dependent_launch = lambda device: {"DEPENDENT": True, "launch_pdl": True}
    paged_attention_triton._num_multiprocessors = lambda device: 132  # type: ignore[assignment]
    for case, settings in ATTENTION.items():
        compile_attention(case, **settings)
    for case, settings in ADMISSION.items():
        compile_admission(case, **settings)
