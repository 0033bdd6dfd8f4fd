"""Flags with the names of vLLM and SGLang set the keys of the configuration."""

import argparse
import json
import os
import shlex
import subprocess
import sys

import pytest

from serve_spec.config import ConfigError
from serve_spec.config.base import ASSETS
from serve_spec.config.flags import FLAGS, Parser, add_flags, add_model, load_flags
from serve_spec.config.root import leaf_sections
from tests.helpers.hub import add_repository, use_cache

OPTIONS = [(option, flag) for flag in FLAGS for option in flag.options]


def parsed(line):
    parser = Parser(prog="serve-spec")
    add_model(parser, positional=True, default=None)
    add_flags(parser)
    return parser.parse_args(shlex.split(line))


def load(line):
    return load_flags(parsed(line))


def problems(line):
    with pytest.raises(ConfigError) as caught:
        load(line)
    return str(caught.value)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache with the target and the draft of SGLang's lesson."""
    use_cache(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    add_repository(tmp_path, "meta-llama/Llama-2-7b-chat-hf", ASSETS / "tiny/target")
    add_repository(tmp_path, "lmsys/sglang-EAGLE-llama2-chat-7B", ASSETS / "tiny/eagle")
    return tmp_path


LESSON = """--model meta-llama/Llama-2-7b-chat-hf --speculative-algorithm EAGLE
    --speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-7B --speculative-num-steps 5
    --speculative-eagle-topk 8 --speculative-num-draft-tokens 64 --mem-fraction 0.7
    --cuda-graph-max-bs 2 --trust-remote-code --log-level warning --port 30000"""


def test_the_command_of_sglang_s_lesson_means_what_it_says(hub):
    config = load(LESSON)
    speculative = config.speculative
    assert (speculative.speculative_algorithm, speculative.speculative_num_steps) == ("EAGLE", 5)
    assert (speculative.topk, speculative.num_draft_tokens) == (8, 64)
    assert config.model.names == ("meta-llama/Llama-2-7b-chat-hf",)
    assert config.draft_folder.name == config.model.folder.name
    assert (config.cache.memory_fraction, config.router.port) == (0.7, 30000)
    assert config.model.cuda_graph_max_bs == 2


def test_no_option_is_in_the_table_twice_and_every_key_exists():
    options = [option for option, _ in OPTIONS]
    assert len(options) == len(set(options))
    assert {flag.key for flag in FLAGS} <= set(leaf_sections())


@pytest.mark.parametrize(("option", "flag"), OPTIONS, ids=[option for option, _ in OPTIONS])
def test_every_option_sets_its_key(option, flag):
    value = [] if flag.fixed is not None else ["7"]
    switch = argparse.ArgumentParser()
    add_flags(switch)
    try:
        args = switch.parse_args([option, *value])
    except SystemExit:  # a switch takes no value
        args = switch.parse_args([option])
    assert args.flags[flag.key][0] == option


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("--max-model-len 32k", "max_model_len", 32_000),
        ("--context-length 1K", "max_model_len", 1024),
        ("--context-length 1.5k", "max_model_len", 1500),
        ("--tp 2", "tensor_parallel_size", 2),
        ("--dtype half", "dtype", "float16"),
        ("--kv-cache-dtype bf16", "kv_cache_dtype", "bfloat16"),
        ("--kv-cache-dtype fp8_e4m3", "kv_cache_dtype", "fp8_e4m3"),
        ("--served-model-name a 12", "served_model_name", ("a", "12")),
        ("--api-key k1 --api-key 12", "api_keys", ("k1", "12")),
        ("--disable-radix-cache", "prefix_caching", False),
        ("--enforce-eager", "cuda_graphs", False),
        ("--speculative-algorithm ngram --speculative-adaptive", "speculative_adaptive", True),
        ("--speculative-algorithm ngram --no-speculative-adaptive", "speculative_adaptive", False),
        ("--speculative-adaptive-config aggressive", "speculative_adaptive_config", "aggressive"),
        ("--set page_size=4 port=9 --set num_pages=7", "num_pages", 7),
        ("--max-num-seqs 4 --set max_num_seqs=5", "max_num_seqs", 5),
        ("--chunked-prefill-size 2k --enable-chunked-prefill", "chunked_prefill_size", 2000),
        ("--chunked-prefill-size -1 --enable-mixed-chunk", "chunked_prefill_size", None),
        ("--chunked-prefill-size auto", "chunked_prefill_size", "auto"),
        ("--max-inter-token-ms 50", "max_inter_token_ms", 50),
    ],
)
def test_values_are_read_as_vllm_and_sglang_read_them(line, key, value):
    config = load(f"asset:tiny/target {line}")
    assert getattr(getattr(config, leaf_sections()[key]), key) == value


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"method": "eagle3", "model": "asset:tiny/eagle3", "num_speculative_tokens": 2},
            ("EAGLE3", 2, "asset:tiny/eagle3", None),
        ),
        (
            {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 5},
            ("NGRAM", 5, None, None),
        ),
        (
            {"method": "draft_model", "model": "asset:tiny/target"}
            | {"draft_tensor_parallel_size": 1},
            ("STANDALONE", 3, "asset:tiny/target", 1),
        ),
    ],
)
def test_vllm_s_speculative_config_is_understood(given, expected):
    config = load(f"asset:tiny/target --speculative-config {shlex.quote(json.dumps(given))}")
    found = config.speculative
    assert expected == (
        found.speculative_algorithm,
        found.speculative_num_steps,
        found.speculative_draft_model_path,
        found.speculative_draft_tp_size,
    )


def test_a_configuration_file_may_be_given_with_another_model(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: 'asset:tiny/eagle'}\ncache: {page_size: 4}\n")
    config = load(f"{file} --model asset:tiny/target")
    assert (config.model.path, config.cache.page_size) == ("asset:tiny/target", 4)
    assert load(f"--config {file}").model.path == "asset:tiny/eagle"
    assert problems("asset:tiny --model asset:tiny/target").startswith(
        "--model='asset:tiny/target'"
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "MODEL: missing; give a hub id"),
        ("asset:tiny --max-running-requests 0", "--max-running-requests=0: "),
        ("asset:tiny --max-model-len many", "--max-model-len='many': "),
        ("asset:tiny --dtype float8", "--dtype='float8': "),
        ("asset:tiny --quantization nf4", "--quantization='nf4': input should be 'auto', 'fp8'"),
        (
            "asset:tiny --kv-cache-dtype fp8_e5m2",
            "--kv-cache-dtype='fp8_e5m2': input should be 'auto', 'fp8', 'fp8_e4m3', 'float32'",
        ),
        (
            "asset:tiny --attention-backend flashinfer",
            "--attention-backend='flashinfer': not supported; leave it out: the package's own",
        ),
        ("asset:tiny --speculative-algorithm DFLASH9", "--speculative-algorithm='DFLASH9': use"),
        ("asset:tiny --speculative-draft-model-path no", "--speculative-draft-model-path='no': "),
        (
            "asset:tiny --speculative-adaptive-config agressive",
            "--speculative-adaptive-config='agressive': no such file; did you mean 'aggressive'?",
        ),
        ("asset:tiny --api-key ' '", "--api-key='': a key is empty"),
        (
            """asset:tiny --speculative-config '{"method": "what"}'""",
            "--speculative-config method='WHAT': use",
        ),
    ],
)
def test_a_wrong_value_is_refused_under_the_name_that_was_typed(line, problem):
    assert problems(line).startswith(problem)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--speculative-config '{'", "not valid JSON"),
        ("""--speculative-config '{"disable_by_batch_size": 4}'""", "disable_by_batch_size"),
        ("--no-such-flag", "--no-such-flag"),
        ("--max-model-length 9", "--max-model-length: did you mean --max-model-len?"),
        ("--speculative-num-stepz=3", "did you mean --speculative-num-steps?"),
        ("--lora-modules a=b", "--lora-modules: not supported; merge the adapter"),
        ("--tp", "--tp"),
    ],
)
def test_a_line_that_makes_no_sense_ends_with_the_usage(line, named, capsys):
    with pytest.raises(SystemExit) as caught:
        parsed(f"asset:tiny {line}")
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("name", ["asset:tny", "tiny", "tinny"])
def test_a_misspelt_model_is_refused_with_the_shipped_one_that_is_near(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert problems(name).endswith("; did you mean 'asset:tiny'?")


def test_the_help_has_a_group_for_each_section_with_its_flags():
    parser = Parser(prog="serve-spec", usage="")
    add_flags(parser)
    _, *sections = parser.format_help().split("keys of ")
    by_name = {text.partition(":")[0]: text for text in sections}
    for option, key in (("--port", "router"), ("--page-size", "cache"), ("--dtype", "model")):
        (found,) = [name for name, text in by_name.items() if f"  {option}" in text]
        assert found == key


def test_a_checkpoint_that_cannot_be_used_is_one_line_and_status_1(hub):
    wrong = add_repository(hub, "ada/wrong", ASSETS / "tiny/target")
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub)}
    for name, status, message in (
        ("meta-llama/Llama-2-7b-chat-hf", 0, ""),
        ("ada/wrong", 1, "config.json"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "serve_spec", "check-config", name],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == status, done.stderr
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == status
