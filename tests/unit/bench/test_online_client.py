"""Clients and loads of `bench online`: streams, schedules and samples."""

import json
import socket
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise
from math import sqrt
from statistics import fmean, pvariance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.bench.online.client import (
    Clients,
    Target,
    accounts,
    deal,
    events,
    merged,
    new_samples,
    read_stream,
)
from serve_spec.bench.online.load import (
    Bursty,
    ClosedLoop,
    CompletionRequest,
    LoadRun,
    Poisson,
    Ramp,
    Served,
    text_requests,
)
from serve_spec.core.request import SamplingParams
from tests.unit.bench.online_fakes import ScriptedApp, chunk, event, serving

CUTS = {
    "429": "429",
    "error": "error frame",
    "cut": "disconnected",
    "uncounted": "no token count",
    "empty": "no tokens",
}


def requests(*prompts):
    params = SamplingParams(max_tokens=9, temperature=0.5, seed=7, ignore_eos=True)
    return [CompletionRequest(prompt, params) for prompt in prompts]


def run(app, load, prompts, url="", timeout_s=60):
    with (
        nullcontext(url) if url else serving(app) as here,
        Clients(Target(here, "m", "k", timeout_s)) as clients,
    ):
        ended = []
        found = clients.run(load, requests(*prompts), seed=3, on_end=ended.append)
        assert ended == [1] * len(prompts)
        return found


def test_a_request_has_all_that_decides_a_text_and_asks_for_the_count():
    app = ScriptedApp()
    run(app, ClosedLoop(1), ["2 chunks of 3"])
    assert app.bodies == [
        {
            "model": "m",
            "prompt": "2 chunks of 3",
            "max_tokens": 9,
            "temperature": 0.5,
            "seed": 7,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert app.headers[0][b"authorization"] == b"Bearer k"


def test_times_of_chunks_are_those_of_the_server_and_tokens_those_it_counted():
    delay_s = 0.02
    found = run(ScriptedApp(delay_s), ClosedLoop(1), ["3 chunks of 5"])
    assert list(found.samples) == [], "there is no /server_info"
    (served,) = found.served
    assert (served.text, served.num_tokens, served.num_prompt_tokens) == ("0 1 2 ", 15, 4)
    assert len(served.chunk_s) == 3
    assert served.ttft_s >= delay_s
    assert served.e2e_s >= 3 * delay_s
    # 14 tokens in the time of two gaps: a token is not a chunk.
    assert served.tpot_s == pytest.approx(sum(served.chunk_gaps_s) / 14)
    assert served.ended_s >= served.chunk_s[-1]


def test_every_way_to_fail_has_its_name_and_leaves_the_others_alone():
    fine = "2 chunks of 1"
    prompts = [prompt for bad in CUTS for prompt in (bad, fine)]
    served = run(ScriptedApp(), ClosedLoop(3), prompts).served
    assert [s.error for s in served[::2]] == list(CUTS.values())
    assert [(s.error, s.text) for s in served[1::2]] == [(None, "0 1 ")] * len(CUTS)


def test_a_silent_stream_is_given_up_and_a_closed_port_is_no_connection():
    (served,) = run(ScriptedApp(), ClosedLoop(1), ["silent"], timeout_s=0.3).served
    assert (served.error, served.text) == ("timeout", "x")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    served = run(ScriptedApp(), ClosedLoop(2), ["a", "b"], url=url).served
    assert [s.error for s in served] == ["no connection"] * 2


def test_two_clients_together_are_one_load():
    """Scheduled requests are sent whether or not those before them are answered."""
    app = ScriptedApp(hold_until=3)
    asked = requests(*(f"{number} chunks of 2" for number in range(1, 8)))
    ended = []
    with serving(app) as url, Clients(Target(url), 2) as clients:
        closed = clients.run(ClosedLoop(3), asked, on_end=ended.append)
        assert sum(ended) == len(asked)
        assert app.most_open == 3
        assert all(served.due_s == served.sent_s for served in closed.served)
        app.hold_until = len(asked)
        scheduled = clients.run(Poisson(100.0), asked, seed=3)
    assert [s.due_s for s in scheduled.served] == Poisson(100.0).arrivals(7, seed=3)
    assert all(s.sent_s >= s.due_s for s in scheduled.served)
    for run in (closed, scheduled):
        assert [s.num_tokens for s in run.served] == [2 * number for number in range(1, 8)]
    prompts = sorted(request.prompt for request in asked * 2)
    assert sorted(body["prompt"] for body in app.bodies) == prompts


@given(st.integers(1, 20), st.integers(0, 60), st.integers(1, 6))
def test_a_load_is_dealt_out_whole_and_evenly(num_streams, num_requests, num_clients):
    asked = requests(*map(str, range(num_requests)))
    loads = deal(ClosedLoop(num_streams), asked, 0, num_clients)
    assert sum(each.num_streams for each in loads) == num_streams
    assert all(each.num_streams for each in loads if each.requests)
    per_stream = [len(s.requests) / s.num_streams for s in loads if s.num_streams]
    assert max(per_stream) - min(per_stream) <= 1, "clients end at about the same time"
    runs = [LoadRun([Served(0, 0, 0, text=r.prompt) for r in s.requests]) for s in loads]
    back = merged(ClosedLoop(num_streams), runs).served
    assert [served.text for served in back] == [request.prompt for request in asked]


def test_a_client_without_requests_does_not_count_as_the_busiest():
    busy, idle = (
        LoadRun([Served(0, 0, 1)], client_cpu_fraction=0.2),
        LoadRun([], client_cpu_fraction=1.0),
    )
    assert merged(ClosedLoop(1), [busy, idle]).client_cpu_fraction == 0.2


TEXTS = st.text(max_size=12)


@st.composite
def cut(draw, whole):
    ends = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    return [whole[start:end] for start, end in pairwise([0, *ends, len(whole)])]


@settings(max_examples=25)
@given(st.data(), st.lists(TEXTS, max_size=6), st.sampled_from([b"\n", b"\r\n"]))
def test_events_do_not_depend_on_how_the_bytes_were_cut(data, texts, end):
    payloads = [json.dumps(text, ensure_ascii=False) for text in texts]
    lines = b"".join(
        b": a comment" + end + b"data: " + payload.encode() + end + b"id: 3" + end * 2
        for payload in payloads
    )
    arrivals = [(1.0, part) for part in data.draw(cut(lines))]
    assert [event for _, event in events(arrivals)] == payloads


def test_several_data_lines_are_one_event_which_came_when_its_last_byte_came():
    arrivals = [(1.0, b"data: a\ndata:b\n\ndata: c\n"), (2.0, b"\ndata: d\n")]
    assert [*events(arrivals)] == [(1.0, "a\nb"), (2.0, "c")]
    first, second = event(chunk("a")), event(chunk("b"))
    arrivals = [(1.0, first[:9]), (2.0, first[9:] + second[:-1]), (5.0, second[-1:])]
    assert read_stream(arrivals).chunk_s == (2.0, 5.0)


def test_tokens_are_counted_by_usage_else_by_ids_and_never_by_chunks():
    ids, running = chunk("ab", token_ids=[4, 5]), {**chunk("c"), "usage": {"completion_tokens": 9}}
    assert read_stream([(1.0, event(ids) + event(ids))]).num_tokens == 4
    assert read_stream([(1.0, event(ids) + event(running))]).num_tokens == 9
    assert read_stream([(1.0, event(chunk("a")))]).num_tokens == 0
    half_a_character = chunk("", token_ids=[200])
    assert read_stream([(1.0, event(half_a_character))]).chunk_s == (1.0,), "a first token"
    assert read_stream([(1.0, event(chunk("")))]).chunk_s == ()


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (b"data: [DONE]\n", "broken off"),
        (event({"error": {"message": "boom"}}) + b"data: [DONE]\n\n", "error frame"),
        (b"data: {\n\n", "bad frame"),
        (event([1]), "bad frame"),
        (event({"text": "no choices"}), "bad frame"),
    ],
)
def test_only_an_answer_with_its_end_is_complete(last, error):
    answer = read_stream([(1.0, event(chunk("a"))), (2.0, last)])
    assert (answer.error, answer.text) == (error, "a")


def state(replica, age_s, **fields):
    return {"replica": replica, "age_s": age_s, **fields}


def test_an_account_has_the_age_that_the_server_reports():
    info = {"internal_states": [state("a", 0.4, batch_size=3, speculative_num_steps=5)]}
    (account,) = accounts(info, 2.0)
    assert account == {
        "time_s": 1.6, "replica": "a", "batch_size": 3, "num_waiting": None, "num_steps": 5,
    }  # fmt: skip
    assert accounts({"anything": "else"}, 2.0) == []


@given(
    st.lists(st.floats(0.6, 5), min_size=1, max_size=8), st.floats(0.06, 0.5), st.floats(0, 0.04)
)
def test_however_often_it_is_polled_every_account_counts_once(gaps, every_s, jitter_s):
    """Replica "a" reports at the sums of `gaps`, and once before the run."""
    reports = [-0.5]
    for gap in gaps:
        reports.append(reports[-1] + 0.5 + gap)
    end_s = reports[-1] + 2 * every_s
    samples = []
    for poll in range(int(end_s / every_s) + 1):
        now_s = poll * every_s
        reported_at = max(time for time in reports if time <= now_s)
        # The answer arrives a little later than the server computed the age.
        late_s = jitter_s * (poll % 2)
        info = {"internal_states": [state("a", now_s - reported_at, batch_size=1)]}
        samples += new_samples(accounts(info, now_s + late_s), samples)
    assert len(samples) == len(gaps), "none twice, none missed, none from before the run"


RATES = st.floats(0.01, 1000)
COUNTS = st.integers(1, 200)
SEEDS = st.integers(0, 2**32)
OPEN = (
    st.builds(Poisson, RATES)
    | st.builds(Bursty, RATES, st.integers(1, 20))
    | st.builds(Ramp, RATES, RATES)
)
MANY = 20_000


@given(OPEN, COUNTS, SEEDS)
def test_a_schedule_is_a_function_of_its_seed_and_never_goes_back(load, count, seed):
    times = load.arrivals(count, seed)
    assert times == load.arrivals(count, seed)
    assert len(times) == count
    assert times[0] >= 0
    assert all(before <= after for before, after in pairwise(times))


def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential():
    rate = 3.0
    times = Poisson(rate).arrivals(MANY, 0)
    gaps = [after - before for before, after in pairwise([0.0, *times])]
    # The mean of n exponentials has a relative deviation of 1/√n, their variance one of √(8/n).
    assert fmean(gaps) * rate == pytest.approx(1, abs=5 / sqrt(MANY))
    assert pvariance(gaps) * rate**2 == pytest.approx(1, abs=5 * sqrt(8 / MANY))


@given(RATES, st.integers(1, 20), st.integers(1, 300), SEEDS)
def test_bursts_come_whole_at_one_instant_and_are_poisson_themselves(rate, size, count, seed):
    times = Bursty(rate, size).arrivals(count, seed)
    sizes = list(Counter(times).values())
    assert sizes[:-1] == [size] * (len(sizes) - 1)
    assert sizes[-1] == count - size * (len(sizes) - 1) <= size
    bursts = Poisson(rate / size).arrivals(len(sizes), seed)
    assert list(Counter(times)) == bursts


@given(RATES, RATES, COUNTS, SEEDS)
def test_a_ramp_ends_on_time_at_the_mean_of_its_rates(first, last, count, seed):
    load = Ramp(first, last)
    assert load.seconds(count) == pytest.approx(count / ((first + last) / 2))
    assert load.arrivals(count, seed)[-1] <= load.seconds(count) * (1 + 1e-9)


@pytest.mark.parametrize(("first", "last"), [(1, 9), (9, 1), (5, 5), (0.01, 10)])
@pytest.mark.parametrize("part", [0.1, 0.25, 0.5, 0.9])
def test_by_any_part_of_a_ramp_as_many_have_come_as_its_rate_adds_up_to(first, last, part):
    load = Ramp(first, last)
    end = part * load.seconds(MANY)
    fraction = sum(time <= end for time in load.arrivals(MANY, 3)) / MANY
    expected = (first * part + (last - first) * part**2 / 2) / ((first + last) / 2)
    deviation = sqrt(expected * (1 - expected) / MANY)
    assert fraction == pytest.approx(expected, abs=5 * deviation)


def test_every_other_mixed_request_is_shuffled_and_sampled():
    plain, mixed = (
        text_requests(6, prompt_chars=80, output_tokens=7, temperature=0.5, mixed=mixed)
        for mixed in (False, True)
    )
    assert mixed[::2] == plain[::2]
    for hard, easy in zip(mixed[1::2], plain[1::2], strict=True):
        assert hard.prompt != easy.prompt
        assert sorted(hard.prompt.split(" ")) == sorted(easy.prompt.split(" "))
        assert (hard.params.temperature, hard.params.seed) == (1.0, easy.params.seed)
