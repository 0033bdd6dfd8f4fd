"""The fleet's metrics by the names of vLLM and SGLang, as dashboards and clients read them."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_spec.config import ServeSpecConfig
from serve_spec.serving.statistics.aliases import Aliases

HISTOGRAMS = (
    "vllm:e2e_request_latency_seconds", "vllm:inter_token_latency_seconds",
    "vllm:request_decode_time_seconds", "vllm:request_generation_tokens",
    "vllm:request_inference_time_seconds", "vllm:request_max_num_generation_tokens",
    "vllm:request_params_max_tokens", "vllm:request_params_n", "vllm:request_prefill_time_seconds",
    "vllm:request_prompt_tokens", "vllm:request_queue_time_seconds",
    "vllm:request_time_per_output_token_seconds", "vllm:time_per_output_token_seconds",
    "vllm:time_to_first_token_seconds", "sglang:e2e_request_latency_seconds",
    "sglang:inter_token_latency_seconds", "sglang:time_to_first_token_seconds",
)  # fmt: skip
# What vLLM's published Grafana dashboards and SGLang's draw, as far as there is such a figure.
DRAWN = (
    *(f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")),
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_requests_running",
    "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:request_success_total", "vllm:num_preemptions_total", "sglang:num_running_reqs",
    "sglang:num_queue_reqs", "sglang:token_usage", "sglang:cache_hit_rate",
    "sglang:spec_accept_length", "sglang:spec_accept_rate", "sglang:spec_block_accept_length",
    "sglang:spec_cap_length", "sglang:spec_num_draft_tokens", "sglang:spec_num_steps",
    "sglang:spec_verify_calls_total",
)  # fmt: skip


def line(name, value, *, application="default", replica="0", worker="w", node="", **labels):
    told = {"NodeAddress": node, "WorkerId": worker, "application": application}
    told |= {"replica": replica, **labels}
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
    with_last = [name for name, *_ in found if re.search("spec.*(_length|draft_tokens)$", name)]
    assert len(with_last) == 4
    assert [found.pop((name,)) for name in with_last] == [1.0] * 4, "a token a step without drafts"
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


HALVES = ("500.0", "+Inf")


@pytest.mark.parametrize(
    ("ours", "sums", "theirs"),
    [
        ("time_to_first_token_ms", "first_token_wait_ms", "time_to_first_token_seconds"),
        ("time_per_output_token_ms", "time_per_output_token_wait_ms",
         "request_time_per_output_token_seconds"),
        ("request_ms", "request_wait_ms", "e2e_request_latency_seconds"),
    ],
)  # fmt: skip
def test_latencies_are_in_seconds_those_of_clients_and_their_sums_exact(
    aliases, ours, sums, theirs
):
    found = read(aliases.render("\n".join([
        *(line(f"{ours}_bucket", i, measured_at="router", le=le) for i, le in enumerate(HALVES, 1)),
        line(f"{ours}_bucket", 7, measured_at="engine", le="500.0"),
        line(f"{ours}_sum", 2900.0, measured_at="router"),
        line(f"{sums}_total", 3000.0, measured_at="router"),
    ])))  # fmt: skip
    name = f"vllm:{theirs}"
    assert found[f"{name}_bucket", "0.5"] == 1
    assert found[f"{name}_bucket", "+Inf"] == found[f"{name}_count",] == 2
    assert found[f"{name}_sum",] == 3, "by the counter: Ray rebuilds the sum of a histogram"


def test_phases_and_gaps_are_those_of_the_router_and_sizes_those_of_all(aliases):
    phase, size = "request_queue_time_seconds", "request_prompt_tokens"
    found = read(aliases.render("\n".join([
        *(line(f"{phase}_bucket_total", i, measured_at="router", le=le)
          for i, le in ((1, "0.3"), (3, "+Inf"))),
        line(f"{phase}_sum_total", 4.5, measured_at="router"),
        line(f"{phase}_sum_total", 9.0, measured_at="engine"),
        line(f"{size}_bucket_total", 2, le="+Inf"), line(f"{size}_sum_total", 30),
    ])))  # fmt: skip
    assert found[f"vllm:{phase}_bucket", "0.3"] == 1
    assert found[f"vllm:{phase}_count",] == 3
    assert found[f"vllm:{phase}_sum",] == 4.5
    assert (found[f"vllm:{size}_count",], found[f"vllm:{size}_sum",]) == (2, 30)


def test_bounds_are_written_as_vllm_writes_them_and_hold_all_of_its_own(aliases):
    """Rules and dashboards select a bound by its text."""
    own = {
        "request_prefill_time_seconds": "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 "
        "50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0 +Inf",
        "inter_token_latency_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 "
        "2.5 5.0 7.5 10.0 20.0 40.0 80.0 +Inf",
        "request_params_n": "1.0 2.0 5.0 10.0 20.0 +Inf",
        "request_prompt_tokens": "1.0 2.0 5.0 10.0 20.0 50.0 100.0 500000.0 +Inf",
    }
    text = aliases.render("")
    for name, wanted in own.items():
        found = re.findall(rf'^vllm:{name}_bucket{{.*le="(.*)"}}', text, re.MULTILINE)
        assert set(wanted.split()) <= set(found), name


def test_a_budget_lowers_the_accepted_length_but_not_that_of_whole_blocks(aliases):
    """Of 10 requests with 2 drafts each, 5 have their second verified; half of each is accepted."""
    counts = {
        "proposed": (10, 10), "drafted": (10, 5), "reached": (10, 2), "accepted": (5, 1),
    }  # fmt: skip
    found = read(aliases.render("\n".join([
        line("draft_tokens_total", 15), line("correct_drafts_total", 6), line("num_steps", 2),
        *(line(f"position_{kind}_tokens_total", count, position=at)
          for kind, found in counts.items() for at, count in enumerate(found, 1)),
    ])))  # fmt: skip
    figures = {name: found[f"sglang:spec_{name}",] for name in (
        "accept_length", "block_accept_length", "cap_length", "num_steps", "num_draft_tokens",
    )}  # fmt: skip
    assert figures == {
        "accept_length": 1.6, "block_accept_length": 1.75, "cap_length": 2.5, "num_steps": 2,
        "num_draft_tokens": 3,
    }  # fmt: skip


def test_a_process_that_ends_takes_its_gauges_but_not_its_counters(aliases):
    """Ray keeps counters of processes that have ended, and evicts gauges."""
    rows = [line("draft_tokens_total", 20, worker="a"), line("draft_tokens_total", 5, worker="b")]
    found = read(aliases.render("\n".join(rows)))
    assert found["vllm:spec_decode_num_draft_tokens_total",] == 25
    assert found["vllm:num_requests_running",] == 0


def test_a_node_that_is_lost_ends_its_series_and_lowers_no_other(aliases):
    rows = [
        line(f"{name}_total", value, node=node, **labels)
        for node, value in (("10.0.0.1", 20), ("10.0.0.2", 5))
        for name, labels in (
            ("draft_tokens", {}),
            ("request_queue_time_seconds_bucket", {"measured_at": "router", "le": "+Inf"}),
        )
    ]
    both, one = read(aliases.render("\n".join(rows))), read(aliases.render("\n".join(rows[:2])))
    for name in ("spec_decode_num_draft_tokens_total", "request_queue_time_seconds_count"):
        assert both[f"vllm:{name}", "10.0.0.1"] == one[f"vllm:{name}", "10.0.0.1"] == 20
        assert both[f"vllm:{name}", "10.0.0.2"] == 5
    assert one.items() <= both.items()
    assert not any("10.0.0.2" in key for key in one)


def test_another_router_answers_the_same(aliases):
    config = ServeSpecConfig.load("configs/tiny.yaml", served_model_name="tiny")
    aliases.render(line("draft_tokens_total", 20, worker="a"))
    now = line("draft_tokens_total", 5, worker="b")
    assert aliases.render(now) == Aliases(config, "default").render(now)


def test_the_figures_that_vllms_benchmark_subtracts_are_found_as_it_looks_for_them(aliases):
    """It adds up each line's last word, by a part of the name, and the position from its label."""
    text = aliases.render(
        "\n".join(
            line("position_accepted_tokens_total", count, position="1", node=node)
            for node, count in (("10.0.0.1", 3), ("10.0.0.2", 1))
        )
    )
    sums, by_position = {}, {}
    for row in text.splitlines():
        if not row.startswith("vllm:spec_decode") or "_created" in row:
            continue
        value = float(row.split()[-1])
        if "num_accepted_tokens_per_pos" in row:
            at = int(re.search(r'position="(\d+)"', row)[1])
            by_position[at] = by_position.get(at, 0) + value
            continue
        for part in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            if part in row:
                sums[part] = sums.get(part, 0) + value
    assert sums == {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    assert by_position[0] == 4


def test_a_name_with_quotes_is_a_valid_label():
    config = ServeSpecConfig.load("configs/tiny.yaml", served_model_name='a"\\b')
    (family, *_) = text_string_to_metric_families(Aliases(config, "default").render(""))
    assert family.samples[0].labels["model_name"] == 'a"\\b'
