"""Time paged attention on a GPU: decode, verification and prefill chunks.

Prints one JSON line per cell and dtype of the cache: the median time of a layer, of CUDA graph
replays of many layers. Caches take turns.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from serve_spec.core.caches import PagedCache
from serve_spec.ops.paged_attention import AttentionPlan

PAGE_SIZE, LAYERS, REPEATS = 16, 32, 20
CACHES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def main() -> None:
    """Time all cells."""
    args = _arguments()
    for query_len in args.queries:
        for batch in args.batches:
            for context in args.contexts:
                _report(args, "decode", [(context, query_len)] * batch)
            if batch > 1:
                lengths = [max(args.contexts), *[min(args.contexts)] * (batch - 1)]
                _report(args, "one long", [(context, query_len) for context in lengths])
    for before in args.before:
        _report(args, "chunk", [(before + args.chunk, args.chunk)])


def _report(args: argparse.Namespace, name: str, lengths: list[tuple[int, int]]) -> None:
    """Time requests of (cache entries, query tokens) each."""
    query_len = sum(count for _, count in lengths)
    query = torch.randn(query_len, args.heads, args.width, device="cuda", dtype=torch.bfloat16)
    plan, graphs = _plan(lengths), {}
    kept = []
    for stored_in in args.caches:
        pools = _pools(args, plan, CACHES[stored_in])
        kept.append(pools)
        graphs[stored_in] = _captured(args, query, pools, plan)
    for stored_in, times in _replays(graphs).items():
        seconds = statistics.median(times) / LAYERS
        itemsize = CACHES[stored_in].itemsize
        num_numbers = 2 * sum(kv_len for kv_len, _ in lengths) * args.kv_heads * args.width
        pairs = sum(count * (kv_len - (count - 1) / 2) for kv_len, count in lengths)
        record = {
            "cell": name,
            "batch": len(lengths),
            "query_len": lengths[0][1],
            "context": lengths[0][0],
            "cache": stored_in,
            "us": round(seconds * 1e6, 2),
            "tb_per_s": round(num_numbers * itemsize / seconds / 1e12, 3),
            "tflops": round(4 * pairs * args.heads * args.width / seconds / 1e12, 1),
        }
        print(json.dumps(record), flush=True)


def _plan(lengths: list[tuple[int, int]]) -> AttentionPlan:
    """Return the plan of requests whose pages are scattered."""
    pages = [-(-kv_len // PAGE_SIZE) for kv_len, _ in lengths]
    order = torch.randperm(sum(pages), dtype=torch.int32)
    tables = torch.nn.utils.rnn.pad_sequence(order.split(pages), batch_first=True)
    starts = torch.tensor([0, *(count for _, count in lengths)]).cumsum(0)
    return AttentionPlan(
        tables=tables.cuda(),
        query_starts=starts.int().cuda(),
        kv_lens=torch.tensor([kv_len for kv_len, _ in lengths], dtype=torch.int32).cuda(),
        page_size=PAGE_SIZE,
        groups=((len(lengths), lengths[0][1]),),
    )


def _pools(args: argparse.Namespace, plan: AttentionPlan, dtype: torch.dtype) -> list[Tensor]:
    """Return as many layers' pools as do not fit into the L2 cache together."""
    num_slots = (int(plan.tables.max()) + 1) * PAGE_SIZE
    shape = 2, num_slots, args.kv_heads, args.width
    num_bytes = math.prod(shape) * dtype.itemsize
    num_pools = min(LAYERS, max(2, int(5e8 / num_bytes)))
    return [torch.randn(shape, device="cuda").to(dtype) for _ in range(num_pools)]


def _captured(
    args: argparse.Namespace, query: Tensor, pools: list[Tensor], plan: AttentionPlan
) -> torch.cuda.CUDAGraph:
    """Return the graph of all layers, the plan's preparation included."""
    from serve_spec.ops.paged_attention_triton import paged_attention

    cache = PagedCache(args.kv_heads, args.width, args.width, window=args.window)

    def forward() -> None:
        plan._prepared.clear()
        for layer in range(LAYERS):
            paged_attention(query, *pools[layer % len(pools)], plan, cache)

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return graph


def _replays(graphs: Mapping[str, torch.cuda.CUDAGraph]) -> dict[str, list[float]]:
    """Return seconds per replay of each graph, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPEATS + 3):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 1e3)
    return {name: found[3:] for name, found in times.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    several = {"type": int, "nargs": "*"}
    parser.add_argument("--batches", **several, default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--contexts", **several, default=[256, 1000, 7680, 15000])
    parser.add_argument("--queries", **several, default=[1, 4], help="query tokens of a request")
    parser.add_argument("--before", **several, default=[0, 2048, 4096, 6144])
    parser.add_argument("--chunk", type=int, default=2048, help="query tokens of a prefill chunk")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128, help="head size of keys and values")
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=["bfloat16", "fp8"])
    parser.add_argument("--window", type=int, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
