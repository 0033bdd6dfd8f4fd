"""`serve-spec bench NAME`: flags of all benchmarks. Their modules are imported after parsing."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from serve_spec.bench.dataset import PACKAGES
from serve_spec.bench.request_trace import TRACES
from serve_spec.bench.variants import ADAPTIVE_VARIANTS
from serve_spec.bench.workload import CLASSES, HELD_OUT_PACKAGES, OUTPUT_TOKENS, STEADY_TOKENS
from serve_spec.config import ServeSpecConfig
from serve_spec.config.flags import Parser, add_flags, add_model, flags_named, load_flags

ADAPTIVE, CLOSED = "adaptive", "closed"
DEPTHS = (0, 1, 2, 3, 5, 7, ADAPTIVE)
"""Drafts of a round that `bench mixed` compares."""
CHUNKS = ("512", "2048", "8192", "auto")
"""Chunk sizes that it compares."""
LATENCIES = ("ttft", "tpot", "e2el")
"""Metrics of --goodput, as of `vllm bench serve`."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter that shows defaults and keeps line breaks of descriptions."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, text = action.default, action.help or ""
        if default in (None, False, argparse.SUPPRESS, []) or "default" in text:
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else default
        return f"{text} (default: {shown})"


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of integers ≥ `least`."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return value

    return integer


def positive(text: str) -> float:
    """Parse a positive number."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def output_file(text: str) -> Path:
    """Parse the name of a file to write, in a folder that exists."""
    file = Path(text)
    if file.is_dir() or not file.parent.is_dir():
        why = "is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise argparse.ArgumentTypeError(f"{text}: {why}; name a file in one that exists")
    return file


def output_folder(text: str) -> Path:
    """Parse the name of a folder to write to; make it if there is none."""
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}; name another folder") from None
    return folder


def rate_range(text: str) -> tuple[float, float]:
    """Parse FROM:TO."""
    first, _, last = text.partition(":")
    return positive(first), positive(last)


def tree_size(text: str) -> tuple[int, int]:
    """Parse LEVELSxDRAFTS of a tree, such as 4x15, without the root."""
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give LEVELSxDRAFTS, such as 4x15")
    return int(found[1]), int(found[2])


def size_range(text: str) -> tuple[int, int]:
    """Parse LOW:HIGH, two counts in order; or one for both."""
    first, _, last = text.partition(":")
    low, high = int(first), int(last or first)
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"{text!r}: give LOW:HIGH, 1 <= LOW <= HIGH")
    return low, high


def depth(text: str) -> int | str:
    """Parse a number of drafts, or adaptive."""
    return text if text == ADAPTIVE else at_least(0)(text)


def load_fraction(text: str) -> float | str:
    """Parse a fraction of the capacity, or closed."""
    return text if text == CLOSED else positive(text)


def latency_bound(text: str, metric: str = "") -> tuple[str, float]:
    """Parse METRIC:MS of --goodput, such as ttft:500; with a metric, MS."""
    if not metric:
        metric, _, text = text.partition(":")
    try:
        if metric in LATENCIES:
            return metric, positive(text)
    except (ValueError, argparse.ArgumentTypeError):
        pass  # the message below says what is right
    fix = f"give METRIC:MS, such as ttft:500, METRIC one of {', '.join(LATENCIES)}"
    raise argparse.ArgumentTypeError(f"'{metric}:{text}': {fix}")


_COUNT = at_least(1)


class Benchmark(NamedTuple):
    """A command: its flags, and the module of this package, if other, whose `run` takes them."""

    summary: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    about: str = ""
    module: str | None = None


def configured(args: argparse.Namespace, **defaults: Any) -> ServeSpecConfig:
    """Return the configuration of the command line over `defaults`, or raise ConfigError.

    The prefix cache is off by default: variants run the same prompts, and one would fill it for
    the next.
    """
    return load_flags(args, **{"prefix_caching": False, **defaults})


def command_parser(prog: str = "serve-spec bench") -> Parser:
    """Return the parser of all benchmarks."""
    parser = Parser(prog=prog, description="Measure a pair on this machine.")
    commands = parser.add_subparsers(dest="bench", metavar="BENCHMARK", required=True)
    for name, benchmark in BENCHMARKS.items():
        about = f"{benchmark.summary[0].upper()}{benchmark.summary[1:]}.\n\n{benchmark.about}"
        command = commands.add_parser(
            name, help=benchmark.summary, description=about, formatter_class=HelpFormatter
        )
        benchmark.add_flags(command)
    return parser


def main(argv: list[str], prog: str = "serve-spec bench") -> int:
    """Run one benchmark and return the exit status; raise ConfigError for a wrong argument."""
    args = command_parser(prog).parse_args(argv)
    module = BENCHMARKS[args.bench].module or args.bench
    with flags_named(args):
        return int(import_module(f"serve_spec.bench.{module}").run(args))


# fmt: off
def add_configuration(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """Add MODEL, also as an argument if `positional`, and the flags of the configuration."""
    add_model(parser, positional=positional, default=None if positional else "asset:tiny")
    add_flags(parser)


def _add_dataset(parser: argparse._ActionsContainer, *, has_model: bool = True) -> None:
    add = parser.add_argument
    add("--dataset", nargs="+", metavar="FILE", help="prompts: files of JSON lines with a field "
        "messages, turns, conversations or prompt, or names of installed datasets: "
        f"{', '.join(PACKAGES)} (default: installed ones if the model has a chat template)")
    add("--column", metavar="FIELD", help="field of a file's lines that holds the prompt as text")
    add("--category", nargs="+", metavar="NAME", help="categories to use (default: all)")
    add("--category-column", metavar="FIELD", default="category", help="field of a file's lines "
        "that names the category; without it the file's name does")
    if has_model:
        add("--max-prompt-tokens", type=_COUNT, default=1024, metavar="N",
            help="most tokens of a dataset's prompt; longer ones are left out")
        add("--seed", type=int, default=0, help="seed of the sample of a dataset's prompts")


def _add_goodput(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--goodput", type=latency_bound, nargs="+", action="extend", default=[],
        metavar="METRIC:MS", help="bounds of a good request, as of vllm bench serve: time to first "
        "token (ttft), per output token after it (tpot), to the last token (e2el), in ms")


def _add_outputs(parser: argparse._ActionsContainer, *, compares: bool = True) -> None:
    add = parser.add_argument
    if compares:
        add("--allow-differences", action="store_true",
            help="exit with 0 even if texts differ, as they may in bfloat16")
    add("--json", type=output_file, metavar="FILE",
        help="file to append every record to, as JSON lines while the benchmark runs")
    add("--plot", type=output_file, metavar="FILE", help="PNG file to draw")


def _adaptive(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_configuration(parser)
    add("--batch-sizes", type=_COUNT, nargs="+", metavar="N", help="requests of each phase, in "
        "order (default: 1 4 16 64 16 4 1 on a CPU, 1 8 32 64 128 256 and back on a GPU)")
    add("--classes", nargs="+", choices=CLASSES, help="classes of text in source files (default: "
        "all)")
    _add_dataset(parser)
    add("--temperatures", type=float, nargs="+", metavar="T",
        help="temperatures of every class (default: those of the class; 0 and 1 for a dataset)")
    add("--cells", "--steady-batches", action="store_true", help="steady-state batches instead of "
        "phases: requests start together, every measurement has a fresh policy, and only steps "
        "without prompt tokens count")
    add("--seconds-per-phase", type=positive, default=5.0, metavar="S",
        help="seconds of plain decoding per phase")
    add("--prompt-tokens", type=_COUNT, metavar="N",
        help="tokens per prompt from source files (default: 64)")
    add("--output-tokens", type=_COUNT, metavar="N", help="mean output tokens per request "
        f"(default: {OUTPUT_TOKENS}; {STEADY_TOKENS} with --cells)")
    add("--num-steps", type=at_least(0), nargs="+", default=[1, 2, 3, 5, 7], metavar="K",
        help="fixed depths to compare with, besides off")
    add("--variants", "--arms", nargs="*", choices=ADAPTIVE_VARIANTS, metavar="NAME",
        default=["ema", "goodput"], help=f"adaptive policies: {', '.join(ADAPTIVE_VARIANTS)}")
    add("--repetitions", type=_COUNT, default=3, metavar="N", help="runs of every phase")
    add("--trial-ms", "--turn-ms", type=positive, metavar="MS", help="length of a trial in ms of "
        "plain decoding (default: 100 on a CPU, 400 on a GPU)")
    _add_outputs(parser)
    add("--from-json", type=Path, metavar="FILE",
        help="file whose last run is shown instead of a new one")


def _offline(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_configuration(parser)
    add("--num-steps", type=at_least(0), nargs="+", default=[1, 3, 7], metavar="K",
        help="fixed depths to compare with, besides off")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0], metavar="T",
        help="sampling temperatures")
    add("--batch-sizes", type=_COUNT, nargs="+", default=[1], metavar="N",
        help="requests that start together")
    add("--num-prompts", type=_COUNT, default=8, metavar="N",
        help="prompts per run and category, at least one batch")
    _add_dataset(parser)
    add("--packages", nargs="+", metavar="NAME", help="installed packages whose source files are "
        f"the prompts (default: {' '.join(HELD_OUT_PACKAGES)})")
    add("--prompt-tokens", type=_COUNT, metavar="N",
        help="tokens per prompt from source files (default: 128)")
    add("--output-tokens", type=_COUNT, default=128, metavar="N", help="output tokens per request")
    add("--repetitions", type=_COUNT, default=3, metavar="N", help="runs of every variant")
    add("--replay", type=Path, metavar="FILE", help="file for the answers of off, which are then "
        "drafted instead of the configured drafts: what is lost to off is the engine's overhead")
    _add_outputs(parser)


def _online(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", help="base URL of a running server")
    source.add_argument("--deploy", metavar="MODEL",
        help="hub id, folder, asset:NAME, configuration or Serve file to start")
    source.add_argument("--from-json", type=Path, metavar="FILE",
        help="file whose last run is shown instead of a new one")
    _online_server(parser.add_argument_group("server and clients"))
    _online_loads(parser.add_argument_group("loads (default: --closed 1 8)"))
    _online_requests(parser.add_argument_group("requests"))
    _online_report(parser.add_argument_group("report"))
    add_flags(parser, without=("--port", "--set"))


def _online_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--port", type=_COUNT, help="HTTP port of the server that --deploy starts")
    add("--variants", "--arms", nargs="+", default=[], metavar="KEY=VALUE[,KEY=VALUE...]",
        help="settings of --deploy to compare, a server each, such as num_replicas=1 "
        "num_replicas=2,routing_policy=balanced")
    add("--clients", type=_COUNT, default=1, metavar="N", help="processes that share a load")
    add("--client-cores", type=at_least(0), default=0, metavar="N",
        help="last cores, reserved for clients; the server of --deploy gets the others")
    add("--model", help="model name in requests (default: none is sent)")


def _online_loads(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--closed", type=_COUNT, nargs="+", default=[], metavar="STREAMS",
        help="closed loops: streams with one request at a time each")
    add("--per-replica", action="store_true", help="STREAMS of --closed for each replica")
    add("--poisson", type=positive, nargs="+", default=[], metavar="RATE",
        help="requests per second with exponential gaps")
    add("--bursty", type=positive, nargs="+", default=[], metavar="RATE",
        help="requests per second in bursts")
    add("--burst-size", type=_COUNT, default=8, metavar="N", help="requests per burst")
    add("--ramp", type=rate_range, nargs="+", default=[], metavar="FROM:TO",
        help="requests per second that rise or fall linearly")
    add("--num-requests", type=_COUNT, default=32, metavar="N", help="requests per load")
    add("--requests-per-stream", type=_COUNT, default=1, metavar="N",
        help="least requests per stream of closed loops")
    add("--repetitions", type=_COUNT, default=3, metavar="N", help="runs of every load")
    add("--warm-up", type=at_least(0), default=16, metavar="N", help="requests before measuring")
    add("--seed", type=int, default=0, help="seed of schedules, prompts and texts")


def _online_requests(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    _add_dataset(group, has_model=False)
    add("--max-prompt-chars", type=_COUNT, default=4000, metavar="N",
        help="most characters of a dataset's prompt; longer ones are left out")
    add("--prompt-chars", type=_COUNT, metavar="N",
        help="characters per prompt from source files (default: 400)")
    add("--output-tokens", type=_COUNT, default=64, metavar="N", help="output tokens per request")
    add("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature")
    add("--mixed", action="store_true", default=None,
        help="every other prompt hard to draft: shuffled words, T = 1")
    add("--packages", nargs="+", metavar="NAME", help="installed packages whose source files are "
        f"the prompts (default: {' '.join(HELD_OUT_PACKAGES)})")
    add("--timeout-s", type=positive, default=600.0, metavar="S", help="seconds per request")


def _online_report(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    _add_goodput(group)
    for metric in ("ttft", "tpot"):
        add(f"--slo-{metric}-ms", dest="goodput", action="append", metavar="MS",
            type=partial(latency_bound, metric=metric),
            help=f"short for --goodput {metric}:MS")
    add("--poll-s", type=positive, default=0.5, metavar="S",
        help="seconds between reads of /server_info")
    add("--compare-offline", metavar="CONFIG",
        help="configuration of an engine without HTTP, to compare with")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE",
        help="override of a key of --compare-offline")
    _add_outputs(group)


def _mixed(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_configuration(parser)
    add("--traces", nargs="+", choices=TRACES, default=list(TRACES), metavar="NAME",
        help=f"traces of requests: {', '.join(TRACES)}")
    add("--scale", type=positive, default=1.0, metavar="X",
        help="factor of the traces' counts and lengths; 0.1 suits a CPU")
    add("--num-requests", type=_COUNT, metavar="N", help="requests of each trace")
    add("--prompt-tokens", type=size_range, metavar="LOW:HIGH", help="tokens of the prompts")
    add("--output-tokens", type=size_range, metavar="LOW:HIGH", help="tokens of the outputs")
    add("--streams", type=_COUNT, metavar="N", help="requests that run at a time")
    add("--depths", type=depth, nargs="+", metavar="K", help="drafts of a round to compare, 0: off,"
        f" or {ADAPTIVE} (default: {' '.join(map(str, DEPTHS))})")
    add("--chunks", nargs="+", default=list(CHUNKS), metavar="SIZE",
        help="values of chunked_prefill_size to compare with every depth; auto:MS: auto with that "
        "max_inter_token_ms")
    add("--loads", type=load_fraction, nargs="+", default=[CLOSED, 0.5, 0.8, 0.95], metavar="LOAD",
        help=f"{CLOSED}: the next request arrives as one ends; or a fraction of the capacity, which"
        " arrives at random, at the same times for all variants")
    add("--capacity", type=positive, metavar="RATE", help="requests per second of which --loads are"
        f" fractions (default: of the fastest variant in the {CLOSED} loop)")
    _add_dataset(parser, has_model=False)
    add("--random-prompts", action="store_true", default=None, help="prompts of random tokens")
    add("--acceptance", type=float, nargs="+", metavar="X", help="force an accept length above 1, "
        "or the rate of each draft: synthetic_acceptance")
    add("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature")
    add("--seed", type=int, default=0, help="seed of lengths, prompts and arrivals")
    add("--repetitions", type=_COUNT, default=3, metavar="N", help="runs of every variant and load")
    add("--warm-up", type=at_least(0), default=8, metavar="N",
        help="requests of every variant and trace before measuring")
    add("--inter-token-ms", type=positive, metavar="MS",
        help="bound of which the fraction of gaps within it is shown (default: the first that"
        " a variant keeps)")
    _add_goodput(parser)
    _add_outputs(parser)
    add("--from-json", type=Path, metavar="FILE",
        help="file whose last run is shown instead of a new one")


def _trace(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_configuration(parser)
    add("--num-steps", type=_COUNT, default=7, metavar="K", help="depth to record")
    add("--trees", type=tree_size, nargs="*", default=[], metavar="LEVELSxDRAFTS",
        help="trees to record besides, the root not counted")
    add("--topk", type=_COUNT, default=4, metavar="N", help="children of a token in trees")
    add("--num-requests", type=_COUNT, default=12, metavar="N", help="requests per kind of text")
    add("--num-tokens", type=_COUNT, default=96, metavar="N", help="tokens per text")
    add("--prompt-tokens", type=_COUNT, default=64, metavar="N", help="tokens per prompt")
    add("--json", type=output_file, metavar="FILE", required=True,
        help="file to write the traces to")


def _tune(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_configuration(parser, positional=True)
    add("--output-dir", type=output_folder, required=True, metavar="DIR",
        help="folder of the results")
    add("--batch-sizes", type=_COUNT, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N",
        help="requests that decode together")
    add("--num-steps", type=at_least(0), nargs="+", default=[0, 1, 2, 3, 5, 7], metavar="K",
        help="depths; 0 is always measured")
    add("--trees", type=tree_size, nargs="+", metavar="LEVELSxDRAFTS", help="trees, the root not "
        "counted, if speculative_eagle_topk is above 1 (default: those a policy may draft)")
    _add_dataset(parser)
    add("--num-prompts", type=_COUNT, default=8, metavar="N", help="prompts, in full batches")
    add("--prompt-tokens", type=_COUNT, metavar="N",
        help="tokens per prompt from source files (default: 128)")
    add("--output-tokens", type=_COUNT, default=128, metavar="N", help="output tokens per request")
    add("--repetitions", type=_COUNT, default=3, metavar="N", help="runs of every measurement")
    add("--fresh", action="store_true", help="measure again what DIR already holds")


def _breakeven(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--accept-rate", type=float, nargs="+", required=True, metavar="RATE",
        help="probability that a draft is accepted if those before it were, 0 to 1")
    given = parser.add_argument_group("given times").add_argument
    given("--draft-ms", type=float, metavar="MS", help="ms of a draft step of the batch")
    given("--target-ms", type=float, metavar="MS", help="ms of a step without drafts")
    given("--verify-ms-per-row", type=float, metavar="MS",
        help="ms that each drafted token adds to verification (default: 0)")
    given("--batch-size", type=int, metavar="N", help="requests of the batch (default: 1)")
    measured = parser.add_argument_group("measured times").add_argument
    measured("--cost-table", type=Path, metavar="FILE", help="cost table that `tune` wrote")
    measured("--context", type=int, metavar="N",
        help="context tokens per request (default: the shortest of the table)")
    measured("--sampled", action="store_true", help="requests with a temperature above 0")
    add("--max-steps", type=int, metavar="K", help="deepest K (default: 8, or the table's)")
    _add_outputs(parser, compares=False)

# fmt: on


BENCHMARKS = {
    "adaptive": Benchmark(
        "adaptive policies against off and every fixed depth, by load and text",
        _adaptive,
        "In every phase each variant runs a closed loop of the same requests in short trials that\n"
        "take turns. A policy keeps what it learned through all phases, as in a server.",
    ),
    "offline": Benchmark(
        "off, fixed depths and the configured policy on held-out prompts", _offline
    ),
    "online": Benchmark(
        "load over HTTP, on a running server or on one that is started",
        _online,
        "  serve-spec bench online --deploy deploy/tiny.yaml --closed 1 8 --poisson 4\n"
        "  serve-spec bench online --url http://127.0.0.1:8000 --ramp 1:20 --goodput ttft:200\n\n"
        "Every load has the same requests. The API key is $SERVE_SPEC_API_KEY.",
        "online.command",
    ),
    "mixed": Benchmark(
        "prompts that arrive while others decode, by depth and chunk size",
        _mixed,
        "  serve-spec bench mixed --scale 0.1 --traces mid --chunks 64 auto --depths 0 adaptive\n"
        "  serve-spec bench mixed --config 8b/expanded.yaml --traces mid long --acceptance 2.5\n\n"
        "Traces: 192 requests with prompts of 256 to 3,840 tokens (mid), 48 of 6,000 to 14,000\n"
        "(long), and 512 short chats (chat). Every variant is a depth and a chunk size.",
    ),
    "trace": Benchmark("accepted drafts at every position of a text, for the simulator", _trace),
    "tune": Benchmark(
        "measurement of a pair: cost table, depths and trees per batch size, report",
        _tune,
        "DIR receives\n"
        "  adaptive.json    depths and trees by batch size: speculative_adaptive_config\n"
        "  cost_table.json  cost of steps on this machine: speculative_cost_table\n"
        "  report.md        tables of all measurements; tune.png (needs matplotlib), tune.json\n"
        "  cells.jsonl      finished measurements, from which an interrupted run continues",
    ),
    "breakeven": Benchmark(
        "break-even accept rate by the throughput equation",
        _breakeven,
        "  serve-spec breakeven --accept-rate 0.7 --draft-ms 1.2 --target-ms 10\n"
        "  serve-spec breakeven --accept-rate 0.5 0.7 0.9 --cost-table DIR/cost_table.json",
    ),
}
