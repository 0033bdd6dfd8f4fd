"""The fleet's metrics by the names of vLLM and SGLang, as dashboards and clients read them."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_spec.config import ServeSpecConfig
from serve_spec.serving.statistics.aliases import Aliases

# What vLLM's published Grafana dashboard and SGLang's draw, as far as there is such a figure.
DRAWN = (
    "vllm:time_to_first_token_seconds_bucket", "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count", "vllm:time_per_output_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_sum", "vllm:time_per_output_token_seconds_count",
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_requests_running",
    "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total", "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum", "vllm:e2e_request_latency_seconds_count",
    "vllm:request_success_total", "vllm:num_preemptions_total",
    "sglang:e2e_request_latency_seconds_bucket", "sglang:num_running_reqs", "sglang:num_queue_reqs",
    "sglang:token_usage", "sglang:cache_hit_rate", "sglang:time_to_first_token_seconds_bucket",
    "sglang:spec_accept_length", "sglang:spec_verify_calls_total",
)  # fmt: skip


def line(name, value, *, application="default", replica="0", worker="w", **labels):
    told = {"WorkerId": worker, "application": application, "replica": replica, **labels}
    inside = ",".join(f'{key}="{text}"' for key, text in told.items())
    return f"ray_serve_spec_{name}{{{inside}}} {value}"


def read(text):
    """Value by name and labels, without `model_name`, which every sample must have."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "tiny"
            key = (sample.name, *sample.labels.values())
            assert key not in found
            found[key] = sample.value
    return found


@pytest.fixture
def aliases():
    return Aliases(ServeSpecConfig.load("configs/tiny.yaml", served_model_name="tiny"), "default")


def test_every_series_exists_with_zero_before_the_first_request(aliases):
    found = read(aliases.render(""))
    assert {name for name, *_ in found} >= set(DRAWN)
    assert found.pop(("sglang:spec_accept_length",)) == 1.0, "a token a step without drafts"
    assert set(found.values()) == {0.0}
    positions = [at for name, *at in found if name.endswith("_per_pos_total")]
    assert positions
    assert positions == [[str(at)] for at in range(len(positions))]


def test_figures_are_summed_over_the_replicas_of_the_application(aliases):
    found = read(aliases.render("\n".join([
        line("draft_tokens_total", 20), line("draft_tokens_total", 10, replica="1"),
        line("draft_tokens_total", 99, application="other"),
        line("correct_drafts_total", 15),
        line("position_drafted_tokens_total", 10, position="1"),
        line("position_accepted_tokens_total", 9, position="1"),
        line("output_tokens_total", 25), line("first_tokens_total", 4, measured_at="engine"),
        line("first_tokens_total", 4, measured_at="router"),
        line("running_seqs", 3), line("running_seqs", 2, replica="1"),
        line("finished_requests_total", 6, measured_at="router", finish_reason="stop"),
        line("preemptions_total", 2),
        line("waiting_seqs", 1), line("queue_len", 6),
        line("kv_pages", 30, state="used"), line("kv_pages", 10, state="free"),
    ])))  # fmt: skip
    assert found["vllm:spec_decode_num_draft_tokens_total",] == 30
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"] == 9
    assert found["vllm:generation_tokens_total",] == 29
    assert found["vllm:num_requests_running",] == found["sglang:num_running_reqs",] == 5
    assert found["vllm:num_requests_waiting",] == 7
    assert found["vllm:request_success_total", "stop"] == 6
    assert found["vllm:request_success_total", "length"] == 0
    assert found["vllm:num_preemptions_total",] == 2
    assert found["vllm:kv_cache_usage_perc",] == found["sglang:token_usage",] == 0.75
    assert found["sglang:spec_accept_rate",] == 0.5
    assert found["sglang:spec_accept_length",] == 2.5


def test_latencies_are_in_seconds_and_those_of_clients(aliases):
    name = "time_to_first_token_ms"
    found = read(aliases.render("\n".join([
        line(f"{name}_bucket", 1, measured_at="router", le="500.0"),
        line(f"{name}_bucket", 2, measured_at="router", le="+Inf"),
        line(f"{name}_bucket", 7, measured_at="engine", le="500.0"),
        line(f"{name}_count", 2, measured_at="router"),
        line(f"{name}_sum", 2900.0, measured_at="router"),
        line("first_token_wait_ms_total", 3000.0, measured_at="router"),
    ])))  # fmt: skip
    name = "vllm:time_to_first_token_seconds"
    assert found[f"{name}_bucket", "0.5"] == 1
    assert found[f"{name}_bucket", "+Inf"] == found[f"{name}_count",] == 2
    assert found[f"{name}_sum",] == 3, "by the counter: Ray rebuilds the sum of a histogram"


def test_a_process_that_ends_takes_its_gauges_but_not_its_counters(aliases):
    old = [line("draft_tokens_total", 20, worker="a"), line("running_seqs", 3, replica="1")]
    new = [line("draft_tokens_total", 5, worker="b")]
    aliases.render("\n".join(old))
    found = read(aliases.render("\n".join(new)))
    assert found["vllm:spec_decode_num_draft_tokens_total",] == 25
    assert found["vllm:num_requests_running",] == 0


def test_the_figures_that_vllms_benchmark_subtracts_are_found_as_it_looks_for_them(aliases):
    """It takes each line's last word, by a part of the name, and the position from its label."""
    text = aliases.render(line("position_accepted_tokens_total", 4, position="1"))
    sums, by_position = {}, {}
    for row in text.splitlines():
        if not row.startswith("vllm:spec_decode") or "_created" in row:
            continue
        value = float(row.split()[-1])
        if "num_accepted_tokens_per_pos" in row:
            by_position[int(re.search(r'position="(\d+)"', row)[1])] = value
            continue
        for part in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            if part in row:
                sums[part] = value
    assert sums == {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    assert by_position[0] == 4


def test_a_name_with_quotes_is_a_valid_label():
    config = ServeSpecConfig.load("configs/tiny.yaml", served_model_name='a"\\b')
    (family, *_) = text_string_to_metric_families(Aliases(config, "default").render(""))
    assert family.samples[0].labels["model_name"] == 'a"\\b'
