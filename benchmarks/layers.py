"""Time decoder layers in a row, complete or one rank's part of them, without exchanges.

    python benchmarks/layers.py --config 8b/expanded.yaml --parts 1 2 4 --json layers.jsonl

Weights and cache are random. On a GPU the layers run in one CUDA graph, so that a kernel may start
before the last has ended, as in a step. Every row is printed, and appended to the file of --json,
as soon as it is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.kernels import time_ms
from serve_spec.bench.command import add_configuration, configured
from serve_spec.bench.report import environment, print_record
from serve_spec.core.context import ForwardContext, torch_dtype
from serve_spec.kvcache.pool import PagedKVPool
from serve_spec.layers.module import finish_loading, tensor_defaults
from serve_spec.models.decoder import DecoderLayer
from serve_spec.models.family import read_shape
from serve_spec.models.shape import DecoderShape
from serve_spec.ops.paged_attention import AttentionPlan
from serve_spec.worker.forward import SlotAttention

_PAGE_SIZE = 16


def make_layers(shape: DecoderShape) -> nn.ModuleList:
    """Return layers of random weights, of torch's default dtype and device."""
    layers = nn.ModuleList(DecoderLayer(shape, index) for index in range(shape.num_layers))
    for weight in layers.parameters():
        weight.normal_(std=weight.shape[-1] ** -0.5)
    finish_loading(layers)
    return layers


def make_forward(
    layers: nn.ModuleList, shape: DecoderShape, pool: PagedKVPool, query_len: int, context: int
) -> Callable[[], Tensor]:
    """Return a forward of as many requests as fill the pool, `query_len` tokens each."""
    device, pages = pool.device, -(-(context + query_len) // _PAGE_SIZE)
    num_requests = pool.scratch_page // pages
    tables = torch.arange(num_requests * pages, dtype=torch.int32, device=device)
    entries = torch.arange(num_requests * pages * _PAGE_SIZE, device=device)
    slots = entries.view(num_requests, -1)[:, context : context + query_len].flatten()
    positions = torch.arange(context, context + query_len, device=device).repeat(num_requests)
    starts = torch.arange(num_requests + 1, dtype=torch.int32, device=device) * query_len
    lens = torch.full((num_requests,), context + query_len, dtype=torch.int32, device=device)
    hidden = torch.randn(len(slots), shape.hidden_size, dtype=pool.keys[0].dtype, device=device)
    rope = shape.rotary(context + query_len)

    def forward() -> Tensor:
        groups = ((num_requests, query_len),)
        plan = AttentionPlan(tables.view(num_requests, -1), starts, lens, _PAGE_SIZE, groups)
        attention = SlotAttention(pool, slots, plan)
        ctx, rotation = ForwardContext(positions, attention), rope.at(positions)
        stream, residual = hidden, hidden
        for layer in layers:
            stream, residual = layer(stream, residual, rotation, ctx)
        return stream

    return forward


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the process exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_configuration(parser)
    ranks = "numbers of ranks; one rank's part is timed"
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 2, 4], help=ranks)
    cases = ["1x1", "1x4", "32x1", "32x4"]
    parser.add_argument("--cases", nargs="+", default=cases, help="requests x tokens of each")
    parser.add_argument("--context", type=int, default=350, help="tokens before them")
    parser.add_argument("--num-layers", type=int, default=24, help="layers in a row")
    parser.add_argument("--json", type=Path, help="file to append every row to (JSON lines)")
    args = parser.parse_args(argv)
    config = configured(args)
    on_gpu = torch.cuda.is_available() and config.model.device != "cpu"
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch_dtype("bfloat16" if on_gpu else "float32")
    print_record(args.json, section="environment", **environment(config))
    of_all = read_shape(config.model.folder)
    windows = (None,) * args.num_layers
    of_all = replace(of_all, num_layers=args.num_layers, windows=windows)
    for size in args.parts:
        shape = of_all.on_rank_of(size)
        with tensor_defaults(dtype, device):
            layers = make_layers(shape)
        for case in args.cases:
            num_requests, query_len = map(int, case.split("x"))
            num_pages = num_requests * -(-(args.context + query_len) // _PAGE_SIZE)
            pool = PagedKVPool(shape.caches, num_pages, _PAGE_SIZE, dtype, device)
            with torch.device(device):
                forward = make_forward(layers, shape, pool, query_len, args.context)
            layer_us = time_ms(forward, device) * 1e3 / args.num_layers
            at = {"parts": size, "requests": num_requests, "tokens": query_len}
            print_record(args.json, section="layers", **at, layer_us=layer_us)
    return 0


if __name__ == "__main__":
    sys.exit(main())
