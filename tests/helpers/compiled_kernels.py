"""Compile kernels for a Hopper GPU on any machine: `python -m ...` prints JSON.

One line per kernel of every case: registers, bytes of spills and of shared memory.
"""

import json
import re
import subprocess
import tempfile
from contextlib import contextmanager
from itertools import product

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from serve_spec.core.caches import PagedCache
from serve_spec.core.context import Rotation
from serve_spec.ops import (
    admission_triton,
    elementwise_triton,
    int4_gluon,
    int4_linear_triton,
    linear_gluon,
    paged_attention_triton,
    scaled_linear_triton,
    shared_sum_triton,
)
from serve_spec.ops.linear import choose_tiles
from serve_spec.ops.paged_attention import AttentionPlan
from serve_spec.ops.scaled_linear import PER_ROW
from serve_spec.ops.shared_sum import SharedMemory

OPS = (
    admission_triton,
    elementwise_triton,
    int4_gluon,
    int4_linear_triton,
    linear_gluon,
    paged_attention_triton,
    scaled_linear_triton,
    shared_sum_triton,
)
E4M3 = torch.float8_e4m3fn
ATTENTION = {
    "decode, batch 1": {},
    "decode, batch 8": {"batch": 8},
    "decode, batch 64": {"batch": 64},
    "verify, batch 16": {"batch": 16, "query_len": 4},
    "tree": {"query_len": 64, "tree": True},
    "chunk": {"query_len": 2048},
    "window": {"batch": 8, "width": 64, "window": 128},
    "wide heads": {"batch": 8, "width": 256},
    "sinks, softcap": {"batch": 8, "width": 64, "softcap": 30.0, "has_sinks": True},
    "keys wider than values": {"batch": 8, "width": 192, "value_width": 128},
    "chunk, softcap, wide heads": {"query_len": 2048, "width": 256, "softcap": 50.0},
    "decode, fp8": {"dtype": E4M3},
    "decode, batch 8, fp8": {"batch": 8, "dtype": E4M3, "value_scale": 0.5},
    "decode, batch 64, fp8": {"batch": 64, "dtype": E4M3},
    "verify, batch 16, fp8": {"batch": 16, "query_len": 4, "dtype": E4M3},
    "tree, fp8": {"query_len": 64, "tree": True, "dtype": E4M3},
    "chunk, fp8": {"query_len": 2048, "dtype": E4M3},
    "window, fp8": {"batch": 8, "width": 64, "window": 128, "dtype": E4M3},
    "wide heads, fp8": {"batch": 8, "width": 256, "dtype": E4M3},
}
ROTATION = {
    "all of a head": {},
    "pairs of neighbours": {"is_interleaved": True},
    "half of a head": {"rotary_dim": 64, "is_interleaved": True},
    "half of a head, fp8": {"rotary_dim": 64, "stored_in": E4M3},
}
ADMISSION = {
    "chains": {},
    "long chains": {"width": 63, "depth": 63},
    "trees, most slots": {"batch": 256, "width": 63, "tree": True},
}


class _Recorder:
    """Stands for a kernel and compiles what it would be launched with."""

    def __init__(self, case, kernel):
        self._case, self._kernel = case, kernel

    def __getitem__(self, grid):
        return self._compile

    def _compile(self, *args, **settings):
        names = self._kernel.arg_names
        options = {name: settings.pop(name) for name in list(settings) if name not in names}
        values = dict(zip(names, args, strict=False)) | settings
        signature, constants, attributes = {}, {}, {}
        for index, name in enumerate(names):
            value = values[name]
            if isinstance(value, Tensor):
                signature[name] = "*" + triton.runtime.jit.mangle_type(value)[1:]
                attributes[(index,)] = [["tt.divisibility", 16]]
            elif isinstance(value, TensorDescriptor):
                signature[name] = triton.runtime.jit.mangle_type(value)
            elif isinstance(value, tuple):
                signature[name] = tuple("*" + triton.runtime.jit.mangle_type(t)[1:] for t in value)
                attributes |= {(index, i): [["tt.divisibility", 16]] for i in range(len(value))}
            elif name in settings or value is None:
                signature[name], constants[name] = "constexpr", value
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if name == "query_stride":
                    attributes[(index,)] = [["tt.divisibility", 16]]
        options |= {name: values[name] for name in ("num_warps",) if name in names}
        make_source = GluonASTSource if self._kernel.is_gluon() else ASTSource
        source = make_source(self._kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        record = {"case": self._case, "kernel": self._kernel.__name__}
        record |= _resources(compiled.asm["ptx"])
        print(json.dumps(record | {"shared": compiled.metadata.shared}), flush=True)


def _resources(ptx):
    """Return the resources of a kernel by ptxas."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        ptxas = triton.knobs.nvidia.ptxas.path
        command = [ptxas, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = {"registers": r"Used (\d+) registers", "spills": r"(\d+) bytes spill stores"}
    return {name: int(re.search(pattern, output)[1]) for name, pattern in found.items()}


@contextmanager
def recorded(op, case):
    """Compile what the kernels of `op` would be launched with."""
    kernels = {name: kernel for name, kernel in vars(op).items() if name.endswith("_kernel")}
    vars(op).update({name: _Recorder(case, kernel) for name, kernel in kernels.items()})
    yield
    vars(op).update(kernels)


def compile_attention(
    case, batch=1, query_len=1, width=128, value_width=None, tree=False, **settings
):
    """Compile what 32 query heads and 8 kv heads launch for so many requests, in bfloat16."""
    numbers = torch.zeros(batch + 1, dtype=torch.int32)
    query = torch.zeros(batch * query_len, 32, width, dtype=torch.bfloat16)
    cache = PagedCache(8, width, value_width or width, **settings)
    keys, values = (
        torch.zeros(64, 8, wide, dtype=cache.dtype or torch.bfloat16)
        for wide in (width, cache.value_dim)
    )
    sinks = torch.zeros(32) if cache.has_sinks else None
    plan = AttentionPlan(
        tables=torch.zeros(batch, 4, dtype=torch.int32),
        query_starts=numbers,
        kv_lens=numbers[:batch],
        page_size=16,
        groups=((batch, query_len),),
        tree_mask=torch.zeros(len(query), dtype=torch.int64) if tree else None,
    )
    with recorded(paged_attention_triton, case):
        paged_attention_triton.paged_attention(query, keys, values, plan, cache, sinks)


def compile_rotation(case, rotary_dim=128, is_interleaved=False, stored_in=torch.bfloat16):
    """Compile what 32 query heads and 8 kv heads launch, in bfloat16, from partial sums."""
    numbers = torch.zeros(4, dtype=torch.int64)
    table = torch.zeros(64, 1, rotary_dim)
    rotation = Rotation(table, table, numbers, is_interleaved)
    pool = torch.zeros(64, 8, 128, dtype=stored_in)
    heads = torch.zeros(3, 4, 48, 128)
    with recorded(elementwise_triton, case):
        elementwise_triton.rotate_and_store(
            heads, rotation, numbers, pool, pool, 32, torch.bfloat16
        )


def compile_admission(case, batch=8, width=7, depth=7, tree=False):
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


def compile_exchanges(case, rank, size):
    """Compile what this rank of so many launches, in bfloat16."""
    numbers, flags = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    memory = SharedMemory(
        rank,
        slots=(numbers,) * size,
        flags=(flags,) * size,
        gathered=(torch.zeros(64),) * size,
        counts=flags,
        released=flags,
    )
    weight = torch.zeros(4096, dtype=torch.bfloat16)
    with recorded(shared_sum_triton, case):
        for num_rows in (1, 128, 256):
            x = torch.zeros(num_rows, 4096, dtype=torch.bfloat16)
            shared_sum_triton.sum_over_ranks(x, memory)
            shared_sum_triton.sum_add_norm(x, x, weight, 1e-5, memory)
        for source in range(size):
            shared_sum_triton.broadcast_words(flags, source, memory)
        shared_sum_triton.gather_columns(torch.zeros(1, 8), 8 * rank, 8 * size, memory)


def compile_product(case, num_rows, num_outputs, gated, kind):
    """Compile what a layer of an 8B model, or a part of it, launches, in bfloat16."""
    x = torch.zeros(num_rows, 4096, dtype=torch.bfloat16)
    fp8, unit = kind != "floats", (128, 128) if kind == "blocks" else PER_ROW
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    weight = torch.zeros(num_outputs * (2 if gated else 1), 4096, dtype=dtype)
    out = torch.zeros(num_rows, num_outputs, dtype=torch.bfloat16)
    scale = torch.zeros(-(-len(weight) // unit[0]), 32) if fp8 else None
    tiles = choose_tiles(num_outputs, 4096, num_rows, gated, 8 * weight.itemsize)
    with recorded(linear_gluon, case):
        linear_gluon.multiply(x, weight, scale, unit, None, out, tiles, gated)


def compile_int4_product(
    case, num_rows, num_outputs, group, zeros_dtype=torch.uint8, has_factors=False
):
    """Compile what a layer of an 8B model in four bits launches, in bfloat16."""
    x = torch.zeros(num_rows, 4096, dtype=torch.bfloat16)
    scale = torch.zeros(4096 // group, num_outputs, dtype=torch.float16)
    codes = torch.zeros(num_outputs, 512, dtype=torch.int32)
    zeros, factors = scale.to(zeros_dtype), None
    if has_factors:
        factors, scale = scale.new_zeros(2, len(scale) // 8, num_outputs), zeros
    with recorded(int4_linear_triton, case):
        int4_linear_triton.small_int4_partials(x, codes, scale, zeros, factors)
        int4_linear_triton.dequantized(codes, scale, zeros, 4096, x.dtype, factors)
    for gated in (False, True):
        out = torch.zeros(num_rows, num_outputs // (2 if gated else 1), dtype=torch.bfloat16)
        tiles = choose_tiles(out.shape[1], 4096, num_rows, gated, bits=4)
        with recorded(int4_gluon, f"{case} gated={gated}"):
            int4_gluon.multiply(x, codes, scale, zeros, factors, None, out, tiles)


def compile_grouped_int8_product(case, num_rows, columns, scale_dtype):
    """Compile what a layer of an 8B model in eight bits launches.

    columns: of a scale, which a row has for itself.
    """
    x = torch.zeros(num_rows, 4096, dtype=torch.bfloat16)
    values = torch.zeros(4096, 4096, dtype=torch.int8)
    scale = torch.zeros(4096, 4096 // columns, dtype=scale_dtype)
    with recorded(scaled_linear_triton, case):
        scaled_linear_triton.scaled_linear(x, values, scale, (1, columns))


if __name__ == "__main__":
    for op in OPS:
        op.dependent_launch = lambda device: {"DEPENDENT": True, "launch_pdl": True}
    paged_attention_triton._num_multiprocessors = lambda device: 132
    scaled_linear_triton.sum_splits = lambda parts, bias, out: None
    paged_attention_triton._is_gpu = lambda device: True
    for case, settings in ATTENTION.items():
        compile_attention(case, **settings)
    for case, settings in ROTATION.items():
        compile_rotation(case, **settings)
    for case, settings in ADMISSION.items():
        compile_admission(case, **settings)
    for rank, size in ((0, 2), (1, 4)):
        compile_exchanges(f"rank {rank} of {size}", rank, size)
    kinds = ("floats", "rows", "blocks")
    for shape in product((1, 16, 32, 64, 128), (3584, 14336), (False, True), kinds):
        compile_product("rows={} outputs={} gated={} {}".format(*shape), *shape)
    for shape in product((1, 32, 64, 128), (4096,), (32, 4096)):
        compile_int4_product("rows={} outputs={} group={}".format(*shape), *shape)
    compile_int4_product("rows=32 outputs=4096 group=32 offsets", 32, 4096, 32, torch.float16)
    for num_rows in (1, 64):
        case = f"rows={num_rows} outputs=4096 group=32 factors"
        compile_int4_product(case, num_rows, 4096, 32, has_factors=True)
    for shape in product((1, 64), (16, 32), (torch.float16, torch.float32)):
        compile_grouped_int8_product("rows={} columns={} {}".format(*shape), *shape)
