"""Time a pair on 1, 2, 4, ... ranks: exchanges between ranks, and rounds by number of ranks.

    python benchmarks/parallel.py --config configs/tiny.yaml --sizes 1 2 --json parallel.jsonl

Every row is printed, and appended to the file of --json, as soon as it is measured.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn

from benchmarks.steady import SteadyLoad, figures, run_variants, with_room
from serve_spec.bench.command import add_configuration, configured
from serve_spec.bench.report import environment, print_record
from serve_spec.bench.variants import make_variants
from serve_spec.config import ServeSpecConfig
from serve_spec.core.context import torch_dtype
from serve_spec.core.record import StepRecord
from serve_spec.engine.llm import LLM
from serve_spec.models.family import read_shape
from serve_spec.models.shape import DecoderShape
from serve_spec.parallel.channel import LOOPBACK, Address
from serve_spec.parallel.device_group import join, store_server
from serve_spec.parallel.group import SINGLE, TensorParallel

Exchanges = Mapping[str, Callable[[], object]]


def time_exchanges(
    rank: int, size: int, store_port: int, shape: DecoderShape, args: argparse.Namespace
) -> None:
    """Time collectives by number of rows. Every rank runs this; rank 0 writes.

    add_norm_us: a sum with the addition and norm that follow it; norm_us: those two alone.
    nccl_us, one_shot_us, two_shot_us: the same sum by NCCL and by torch's symmetric memory.
    flashinfer_us: as add_norm_us, by FlashInfer's kernel, if it is installed.
    """
    # NVLink multicast is not needed.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    on_gpus = args.device != "cpu"
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    dtype = torch_dtype(args.dtype or ("bfloat16" if on_gpus else "float32"))
    if on_gpus:
        torch.cuda.set_device(device)
        store = dist.PrefixStore("torch", dist.TCPStore(LOOPBACK, store_port))
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
    group = join(rank, size, device, Address(LOOPBACK, 0, store_port, b""))
    for count in args.rows:
        x = torch.zeros(count, shape.hidden_size, dtype=dtype, device=device)
        norm = torch.zeros_like(x), x.new_ones(shape.hidden_size), 1e-5
        logits = torch.zeros(count, shape.vocab_size // size, device=device)
        ids = torch.zeros(count, dtype=torch.int64, device=device)
        exchanges: dict[str, Callable[[], object]] = {
            "sum_us": partial(group.all_reduce, x),
            "add_norm_us": partial(group.add_norm, x, *norm),
            "norm_us": partial(SINGLE.add_norm, x, *norm),
            "logits_us": partial(group.gather_columns, logits, size * logits.shape[1]),
            "draws_us": partial(group.broadcast, ids),
            **(_sums_of_torch(x) if on_gpus else {}),
            **(_sum_of_flashinfer(x, *norm) if on_gpus and find_spec("flashinfer") else {}),
        }
        us = {name: time_us(group, run, device) for name, run in exchanges.items()}
        # Two sums of each layer are followed by a norm; one more is that of the embeddings.
        of_layers = 2 * shape.num_layers * (us["add_norm_us"] - us["norm_us"])
        forward_ms = (of_layers + us["sum_us"] + us["logits_us"] + us["draws_us"]) / 1e3
        if rank == 0:
            row = {"tensor_parallel_size": size, "rows": count, **us, "forward_ms": forward_ms}
            print_record(args.json, section="exchanges", **row)
    group.close()


def _sums_of_torch(x: torch.Tensor) -> Exchanges:
    import torch.distributed._symmetric_memory as symm_mem

    assert dist.group.WORLD is not None, "init_process_group ran"
    name = dist.group.WORLD.group_name
    shared = symm_mem.empty(*x.shape, dtype=x.dtype, device=x.device)
    symm_mem.rendezvous(shared, name)
    shared.zero_()
    return {
        "nccl_us": partial(dist.all_reduce, x),
        "one_shot_us": partial(torch.ops.symm_mem.one_shot_all_reduce, shared, "sum", name),
        "two_shot_us": partial(torch.ops.symm_mem.two_shot_all_reduce_, shared, "sum", name),
    }


def _sum_of_flashinfer(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Exchanges:
    import flashinfer.comm as comm

    workspace = comm.create_allreduce_fusion_workspace(
        backend="trtllm",
        world_size=dist.get_world_size(),
        rank=dist.get_rank(),
        max_token_num=len(x),
        hidden_dim=x.shape[1],
        dtype=x.dtype,
    )
    run = partial(
        comm.allreduce_fusion,
        x,
        workspace,
        comm.AllReduceFusionPattern.kARResidualRMSNorm,
        launch_with_pdl=True,
        residual_in=residual,
        residual_out=torch.empty_like(x),
        norm_out=torch.empty_like(x),
        rms_gamma=weight,
        rms_eps=eps,
    )
    return {"flashinfer_us": run}


def time_us(group: TensorParallel, run: Callable[[], object], device: torch.device) -> float:
    """Return the median time, on a GPU in a CUDA graph of many, as the engine launches them.

    Unlike in `do_bench_cudagraph` the counts are fixed, because all ranks must run the same number.
    """
    run()
    count, repeat = (256, 20) if device.type == "cuda" else (4, 5)

    def many() -> None:
        for _ in range(count):
            run()

    work: Callable[[], object] = many
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        work = graph.replay
    times = []
    for _ in range(repeat + 1):
        group.smallest(0)  # ranks start together
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e6 / count)
    group.smallest(0)  # no rank may still run the graph when it is freed
    return median(times[1:])


def time_rounds(config: ServeSpecConfig, args: argparse.Namespace) -> None:
    """Time rounds by number of ranks, interleaved; `scaling` is speed per rank over that of one.

    With --draft-on a row tells how the ranks hold the draft.
    """
    layouts = [
        (size, where) for size in args.sizes for where in (args.draft_on if size > 1 else ["all"])
    ]
    llms = {
        (size, where): LLM(
            config,
            tensor_parallel_size=size,
            speculative_draft_tp_size={"each": 1, "all": size}.get(where),
        )
        for size, where in layouts
    }
    for batch_size in args.batch_sizes:
        measured: dict[tuple[str, int, str], list[StepRecord]] = {}
        for seed in range(-1, args.repetitions):  # -1: warm-up
            load = SteadyLoad(batch_size, args.prompt_tokens, args.output_tokens, seed)
            for size, where in random.Random(seed).sample(layouts, len(layouts)):
                llm = llms[size, where]
                steps = [args.num_steps] if args.num_steps else []
                variants = make_variants(llm.engine.controller, steps, [])
                plain = variants[0].controller
                controllers = {each.name: [each.controller] for each in variants}
                found = run_variants(llm.engine, load, plain, controllers)
                for name, rounds in found.items():
                    kept = measured.setdefault((name, size, where), [])
                    kept.extend(rounds if seed >= 0 else [])
        speeds = {key: figures(rounds) for key, rounds in sorted(measured.items())}
        for (name, size, where), row in speeds.items():
            one = speeds.get((name, 1, "all"))
            if one is not None:
                row["scaling"] = row["tokens_per_second"] / one["tokens_per_second"] / size
                row["verify_scaling"] = one["verify_ms"] / row["verify_ms"] / size
            at = {"tensor_parallel_size": size, "draft_on": where, "batch_size": batch_size}
            at["variant"] = name
            print_record(args.json, section="rounds", **at, **row)
    for llm in llms.values():
        llm.shutdown()


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the process exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_configuration(parser)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 32], help="requests")
    parser.add_argument("--num-steps", type=int, default=3, help="depth besides off; 0: off only")
    parser.add_argument(
        "--draft-on",
        nargs="+",
        choices=["default", "each", "all"],
        default=["default"],
        help="whole draft on each rank, one shared by all, or as speculative_draft_tp_size=null",
    )
    parser.add_argument("--prompt-tokens", type=int, default=256, help="tokens per prompt")
    parser.add_argument("--output-tokens", type=int, default=128, help="mean tokens per request")
    parser.add_argument("--repetitions", type=int, default=3, help="batches of every variant")
    parser.add_argument(
        "--acceptance", type=float, default=0.69, help="forced probability per draft"
    )
    rows = [1, 8, 32, 128, 256]
    parser.add_argument("--rows", type=int, nargs="+", default=rows, help="rows of exchanges")
    parser.add_argument("--json", type=Path, help="file to append every row to (JSON lines)")
    args = parser.parse_args(argv)
    longest = SteadyLoad(max(args.batch_sizes), args.prompt_tokens, args.output_tokens)
    # Pages for the batches alone: engines of all sizes share the first GPU.
    num_tokens = args.prompt_tokens + longest.max_tokens + 2 * (args.num_steps + 1)
    config = ServeSpecConfig.load(configured(args), num_pages=1, max_model_len=num_tokens)
    config = with_room(config, longest, args.num_steps)
    args.device = config.model.device if torch.cuda.is_available() else "cpu"
    args.dtype = None if config.model.dtype == "auto" else config.model.dtype
    if config.speculative.enabled and args.num_steps:
        config = ServeSpecConfig.load(
            config,
            speculative_adaptive=False,
            speculative_num_steps=args.num_steps,
            synthetic_acceptance=(args.acceptance,),
        )
    else:
        args.num_steps = 0
    print_record(args.json, section="environment", **environment(config))
    shape = read_shape(config.model.folder)
    for size in args.sizes:
        if size > 1:
            store = store_server()
            spawn(time_exchanges, args=(size, store.port, shape, args), nprocs=size)
    time_rounds(config, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
