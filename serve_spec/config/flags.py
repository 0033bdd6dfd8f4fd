"""Flags of the command line: names of vLLM and SGLang, and the configuration keys that they set."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from serve_spec.config import base
from serve_spec.config.base import ConfigError
from serve_spec.config.root import ServeSpecConfig, is_file, leaf_sections, parse_override
from serve_spec.config.speculative import SpeculativeConfig


class Flag(NamedTuple):
    """A flag. `fixed`: the value of a flag that takes none."""

    options: tuple[str, ...]
    key: str
    fixed: object = None


def _named_as(*keys: str) -> list[Flag]:
    return [Flag((f"--{key.replace('_', '-')}",), key) for key in keys]


_DRAFT_RANKS = "speculative_draft_tp_size"

FLAGS = (
    *_named_as("revision"),
    Flag(("--tokenizer-path", "--tokenizer"), "tokenizer_path"),
    *_named_as("download_dir", "load_format", "served_model_name", "chat_template"),
    *_named_as("generation_config", "tool_call_parser", "reasoning_parser", "device", "dtype"),
    Flag(("--quantization", "-q"), "quantization"),
    *_named_as("kv_cache_dtype", "attention_backend"),
    Flag(("--max-model-len", "--context-length"), "max_model_len"),
    Flag(("--tensor-parallel-size", "--tp-size", "--tp", "-tp"), "tensor_parallel_size"),
    Flag(("--num-replicas", "--data-parallel-size", "--dp-size", "--dp", "-dp"), "num_replicas"),
    Flag(
        ("--gpu-memory-utilization", "--mem-fraction-static", "--mem-fraction"), "memory_fraction"
    ),
    Flag(("--page-size", "--block-size"), "page_size"),
    Flag(("--enable-prefix-caching",), "prefix_caching", fixed=True),
    Flag(("--no-enable-prefix-caching", "--disable-radix-cache"), "prefix_caching", fixed=False),
    Flag(("--enforce-eager", "--disable-cuda-graph"), "cuda_graphs", fixed=False),
    *_named_as("cuda_graph_max_bs"),
    Flag(("--enable-torch-compile",), "torch_compile", fixed=True),
    Flag(("--max-num-seqs", "--max-running-requests"), "max_num_seqs"),
    *_named_as("max_num_batched_tokens", "chunked_prefill_size", "max_queued_requests"),
    *_named_as("max_inter_token_ms", "max_step_ratio"),
    *_named_as("host", "port"),
    *_named_as("per_request_spec_decode_metrics"),
    Flag(("--api-key",), "api_keys"),
    *_named_as(*(key for key in SpeculativeConfig.model_fields if key != _DRAFT_RANKS)),
    Flag(("--speculative-draft-tp-size", "--speculative-draft-tensor-parallel-size"), _DRAFT_RANKS),
)
"""Every flag that sets one key, in the order of the help text."""

NO_EFFECT = {
    "--trust-remote-code": "no effect: models are part of serve_spec, and remote code never runs",
    "--enable-auto-tool-choice": "no effect: tools are always accepted; see --tool-call-parser",
    "--torch-compile-max-bs": "no effect: layers are compiled for all batch sizes",
    "--enable-chunked-prefill": "no effect: prompts are split; see --chunked-prefill-size",
    "--enable-mixed-chunk": "no effect: prompts run beside decoding requests",
    "--log-level": "no effect: SERVE_SPEC_LOG_LEVEL sets the level",
}
"""Flags that are accepted because common commands have them."""
_WITHOUT_VALUE = (
    "--trust-remote-code",
    "--enable-auto-tool-choice",
    "--enable-chunked-prefill",
    "--enable-mixed-chunk",
)

SPECULATIVE_CONFIG = {
    "method": "speculative_algorithm",
    "model": "speculative_draft_model_path",
    "num_speculative_tokens": "speculative_num_steps",
    "quantization": "speculative_draft_model_quantization",
    "draft_tensor_parallel_size": _DRAFT_RANKS,
    "rejection_sample_method": "rejection_sample_method",
    "prompt_lookup_min": "speculative_ngram_min_match_window_size",
    "prompt_lookup_max": "speculative_ngram_max_match_window_size",
}
"""Keys of vLLM's --speculative-config."""

_NONE: tuple[object, ...] = (None, False, 0, {}, [], ())
_ONE_MODEL = "merge the adapter into the checkpoint"
_TEXT = "leave it out; models read text only"
UNSUPPORTED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "tokenizer_mode": (("auto", "hf", "slow"), "leave it out; tokenizer names another tokenizer"),
    "skip_tokenizer_init": (_NONE, "leave it out, and set detokenize=False in SamplingParams"),
    "tokenizer_revision": (_NONE, "write tokenizer='ORG/NAME@REVISION'"),
    "code_revision": (_NONE, "leave it out; code of checkpoints never runs"),
    "runner": (("auto", "generate"), "leave it out; models generate text only"),
    "task": (("auto", "generate"), "leave it out; models generate text only"),
    "convert": (("auto", "none", None), "leave it out; models generate text only"),
    "hf_overrides": (_NONE, "edit config.json in a copy of the checkpoint"),
    "hf_token": (_NONE, "set HF_TOKEN in the environment"),
    "pipeline_parallel_size": ((None, 1), "use tensor_parallel_size"),
    "enable_expert_parallel": (_NONE, "use tensor_parallel_size"),
    "distributed_executor_backend": ((None, "mp"), "leave it out; serve-spec serve uses Ray"),
    "cpu_offload_gb": (_NONE, "use a smaller or quantized model, or more tensor_parallel_size"),
    "kv_transfer_config": (_NONE, "leave it out; prompts and texts share an engine"),
    "calculate_kv_scales": (_NONE, "leave it out; export a checkpoint with k_scale and v_scale"),
    "quantization_param_path": (_NONE, "export a checkpoint with k_scale and v_scale"),
    "kv_cache_memory_bytes": (_NONE, "use gpu_memory_utilization, or num_pages"),
    "num_gpu_blocks_override": (_NONE, "use num_pages"),
    "compilation_config": (_NONE, "use enable_torch_compile, enforce_eager or cuda_graph_max_bs"),
    "enable_lora": (_NONE, _ONE_MODEL),
    "lora_modules": (_NONE, _ONE_MODEL),
    "logits_processors": (_NONE, "use logit_bias, allowed_token_ids or bad_words of a request"),
    "logprobs_mode": (("processed_logprobs",), "log-probabilities are vLLM's processed_logprobs"),
    "scheduling_policy": (
        (None, "priority", "fcfs"),
        "requests have a priority",
    ),
    "override_generation_config": (_NONE, "set the parameters of requests"),
    "structured_outputs_config": (_NONE, "leave it out; grammars are always compiled"),
    "limit_mm_per_prompt": (_NONE, _TEXT),
    "mm_processor_kwargs": (_NONE, _TEXT),
    "allowed_local_media_path": ((*_NONE, ""), _TEXT),
    "pooler_config": (_NONE, "leave it out; models generate text only"),
    "swap_space": ((None, 0, 4), "leave it out; preempted requests are computed anew"),
    "disable_log_stats": ((None, False, True), ""),
    "disable_custom_all_reduce": (_NONE, "leave it out; ranks of one host add in shared memory"),
    "enable_chunked_prefill": ((None, True), "use chunked_prefill_size=null"),
    "long_prefill_token_threshold": ((None, 0), "use chunked_prefill_size, or max_inter_token_ms"),
    "max_num_partial_prefills": ((None, 1), "leave it out; prompts share the steps"),
    "max_long_partial_prefills": ((None, 1), "leave it out; short prompts pass long ones"),
    "max_prefill_tokens": (_NONE, "use max_num_batched_tokens"),
}
"""Arguments of vLLM's engine that have no flag here: values that change nothing, and a remedy."""

_LIST_KEYS = ("served_model_name", "api_keys")
_WORDS = {
    "chunked_prefill_size": {"-1": "null"},
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"bf16": "bfloat16"},
    "speculative_algorithm": {"DRAFT_MODEL": "STANDALONE", "NEXTN": "MTP"},
}
"""Other names of values, by key."""
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}

_MODEL_HELP = "hub id ORG/NAME[:GGUF][@REVISION], folder, GGUF or YAML file, or asset:NAME"


def _field(key: str) -> FieldInfo:
    section = base.section_model(ServeSpecConfig.model_fields[leaf_sections()[key]])
    assert section is not None, "keys are in sections"
    return section.model_fields[key]


class Parser(argparse.ArgumentParser):
    """A parser that says of an unknown flag which one is meant, or why there is none."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit."""
        _, _, unknown = message.partition("unrecognized arguments: ")
        flags = [word.partition("=")[0] for word in unknown.split() if word.startswith("--")]
        super().error(message + "".join(map(_about_unknown, flags)))


def _about_unknown(option: str) -> str:
    _, fix = UNSUPPORTED.get(option[2:].replace("-", "_"), ((), ""))
    if fix:
        return f"; {option}: not supported; {fix}"
    known = [name for flag in FLAGS for name in flag.options]
    close = difflib.get_close_matches(option, [*known, "--speculative-config"], 1)
    return f"; {option}: did you mean {close[0]}?" if close else ""


def add_model(parser: argparse.ArgumentParser, *, positional: bool, default: str | None) -> None:
    """Add MODEL as --model and, if `positional`, as an argument; `read_flags` joins them."""
    if positional:
        parser.add_argument("config", nargs="?", metavar="MODEL", help=_MODEL_HELP)
    parser.add_argument(
        *("--model", "--model-path", "--config"),
        dest="model" if positional else "config",
        default=None if positional else default,
        metavar="MODEL",
        help=_MODEL_HELP + (f" (default: {default})" if default else ""),
    )


def add_flags(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """Add a flag for every row of `FLAGS`, --speculative-config and --set."""
    parser.set_defaults(flags={})
    parser.usage = parser.usage or "%(prog)s [options]"  # else pages of it before each error
    sections = list(dict.fromkeys(leaf_sections()[flag.key] for flag in FLAGS))
    groups = {name: parser.add_argument_group(f"keys of {name}") for name in sections}
    for flag in FLAGS:
        options = [option for option in flag.options if option not in without]
        if options:
            groups[leaf_sections()[flag.key]].add_argument(*options, **_settings(flag))
    group = parser.add_argument_group("other keys, and flags of common commands")
    group.add_argument(
        "--speculative-config",
        action=_SpeculativeConfig,
        metavar="JSON",
        help=f"vLLM's object of speculative settings; keys: {', '.join(SPECULATIVE_CONFIG)}",
    )
    for option, text in NO_EFFECT.items():
        nargs = 0 if option in _WITHOUT_VALUE else None
        group.add_argument(
            option, action=_Ignore, nargs=nargs, dest=argparse.SUPPRESS, metavar="VALUE", help=text
        )
    if "--set" not in without:
        group.add_argument(
            "--set",
            action="extend",
            nargs="+",
            default=[],
            metavar="KEY=VALUE",
            help="any key of docs/configuration.md, value in YAML",
        )


def _settings(flag: Flag) -> dict[str, Any]:
    field = _field(flag.key)
    text = (field.description or "").replace("%", "%%").rstrip(".")
    default = json.dumps(field.default)
    settings: dict[str, Any] = {"action": _Set, "key": flag.key, "dest": argparse.SUPPRESS}
    if flag.fixed is not None:
        return {**settings, "nargs": 0, "const": flag.fixed, "help": f"{flag.key}={flag.fixed}"}
    settings["help"] = f"{text} (default: {default})"
    if field.annotation is bool:
        return {**settings, "nargs": 0, "const": True, "is_switch": True}
    if flag.key in _LIST_KEYS:
        settings["nargs"] = "+"
    return {**settings, "metavar": _metavar(field)}


def _metavar(field: FieldInfo) -> str:
    kinds = {field.annotation, *get_args(field.annotation)}
    if Path in kinds:
        return "FILE"
    if int in kinds or float in kinds:
        return "N"
    if bool in kinds:
        return "{true,false}"
    words = [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    words += get_args(field.annotation) if get_origin(field.annotation) is Literal else []
    return "{" + ",".join(dict.fromkeys(words)) + "}" if words else "NAME"


class _Set(argparse.Action):
    """Keep the value of a key and the option that gave it."""

    def __init__(
        self,
        option_strings: list[str],
        dest: str,
        *,
        key: str,
        is_switch: bool = False,
        **rest: Any,
    ) -> None:
        self._key = key
        self._negations = [f"--no-{name[2:]}" for name in option_strings if is_switch]
        super().__init__([*option_strings, *self._negations], dest, **rest)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        option = str(option_string)
        if self.nargs == 0:
            value = False if option in self._negations else self.const
        elif self._key in _LIST_KEYS:
            value = [*namespace.flags.get(self._key, ("", []))[1], *values]
        else:
            value = read_value(self._key, values, option)
        namespace.flags = {**namespace.flags, self._key: (option, value)}


class _Ignore(argparse.Action):
    def __call__(self, *_: Any) -> None:
        """Do nothing."""


class _SpeculativeConfig(argparse.Action):
    """Read vLLM's --speculative-config into our keys."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        try:
            given = speculative_keys(values)
        except ConfigError as error:
            parser.error(str(error))
        added = {key: (f"{option_string} {name}", value) for key, (name, value) in given.items()}
        namespace.flags = {**namespace.flags, **added}


def speculative_keys(
    given: str | Mapping[str, Any], option: str = "--speculative-config"
) -> dict[str, tuple[str, Any]]:
    """Return, by our key, vLLM's name and the value in its speculative config.

    option: its name in messages. Raises ConfigError for a key without a counterpart.
    """
    if isinstance(given, str):
        try:
            given = base.parse_json_object(given, "the speculative config")
        except ConfigError as error:
            raise ConfigError(*(f"{option}: {problem}" for problem in error.problems)) from None
    found = {}
    for name, value in given.items():
        if name not in SPECULATIVE_CONFIG:
            known = ", ".join(SPECULATIVE_CONFIG)
            raise ConfigError(f"{option} {name}: not supported; use {known}, or a flag of ours")
        key = SPECULATIVE_CONFIG[name]
        found[key] = name, read_value(key, value, option) if isinstance(value, str) else value
    if "prompt_lookup_max" in given and "method" not in given:
        found["speculative_algorithm"] = "method", "NGRAM"
    return found


def engine_keys(place: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return our leaf keys for vLLM's engine arguments; see `named_engine_keys`."""
    return {key: value for key, (_, value) in named_engine_keys(place, given).items()}


def named_engine_keys(place: str, given: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return, by our leaf key, the name and value of vLLM's engine arguments.

    They are the flags without dashes, or keys of ours. place: prefix of names in messages.
    Raises ConfigError for arguments that are unknown, or mean something that serve_spec lacks.
    """
    options = {option[2:].replace("-", "_"): flag for flag in FLAGS for option in flag.options}
    found: dict[str, tuple[str, Any]] = {}
    unknown = []
    for name, value in given.items():
        if name == "speculative_config":
            keys = {} if value is None else speculative_keys(value, place + name)
            found |= {key: (f"{name} {theirs}", value) for key, (theirs, value) in keys.items()}
        elif name in leaf_sections():
            is_word = isinstance(value, str) and name in _WORDS
            found[name] = name, read_value(name, value, place + name) if is_word else value
        elif name in options:
            key, fixed = options[name].key, options[name].fixed
            read = read_value(key, value, place + name) if isinstance(value, str) else value
            found[key] = name, read if fixed is None else fixed is bool(value)
        elif name in UNSUPPORTED:
            neutral, fix = UNSUPPORTED[name]
            if value not in neutral:
                unknown.append(f"{place}{name}={repr(value)[:80]}: not supported; {fix}")
        elif f"--{name.replace('_', '-')}" not in NO_EFFECT:
            unknown.append(base.unknown_key(place + name, [place + option for option in options]))
    if unknown:
        raise ConfigError(*unknown)
    return found


def read_value(key: str, text: str, name: str) -> Any:
    """Return the value that a text means for a key; raise ConfigError with `name` if not YAML."""
    field = _field(key)
    kinds = {field.annotation, *get_args(field.annotation)}
    if key == "speculative_algorithm":
        text = text.upper()
    text = _WORDS.get(key, {}).get(text, text)
    if int in kinds and (found := _LENGTH.fullmatch(text)):
        return int(float(found[1]) * _UNITS[found[2]])
    is_word = any(get_origin(kind) is Literal for kind in kinds) and not kinds & {int, float}
    is_text = (is_word or kinds & {str, Path}) and text != "null" and not text.startswith("[")
    return text if is_text else base.parse_yaml(text, name)


def flag_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the leaf keys that the flags set, without --set and MODEL."""
    values = {key: value for key, (_, value) in args.flags.items()}
    names = values.get("served_model_name", ())
    return {**values, "served_model_name": names[0]} if len(names) == 1 else values


def read_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the leaf keys that flags set, and move the MODEL given into `args.config`.

    Raises ConfigError for two models.
    """
    values = flag_values(args)
    model = getattr(args, "model", None)
    if model is not None and args.config is None:
        args.config, args.model = model, None
    elif model is not None:
        if not is_file(args.config):
            raise ConfigError(f"--model={model!r}: {args.config!r} is given too; leave one out")
        values["path"] = model
    return {**values, **dict(map(parse_override, args.set))}


def load_flags(args: argparse.Namespace, **defaults: Any) -> ServeSpecConfig:
    """Return the configuration of the command line, over `defaults`, or raise ConfigError."""
    given = {**defaults, **read_flags(args)}
    if args.config is None:
        raise ConfigError(f"MODEL: missing; give a {_MODEL_HELP}")
    with flags_named(args):
        return ServeSpecConfig.load(args.config, **given)


@contextmanager
def flags_named(args: argparse.Namespace) -> Iterator[None]:
    """Name the flag as typed, instead of its key, in a ConfigError of the body."""
    with keys_named({key: option for key, (option, _) in getattr(args, "flags", {}).items()}):
        yield


@contextmanager
def keys_named(typed: Mapping[str, str]) -> Iterator[None]:
    """Name keys in a ConfigError of the body as they were given."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(_with_option(problem, typed) for problem in error.problems)) from None


def _with_option(problem: str, typed: Mapping[str, str]) -> str:
    found = re.match(r"(?:\w+\.)?(\w+)(?:\.\d+)?=", problem)
    if found is None or found[1] not in typed:
        return problem
    return f"{typed[found[1]]}={problem[found.end() :]}"
