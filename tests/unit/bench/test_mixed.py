"""`bench mixed`: its traces and prompts, its figures from records, and runs on a tiny pair."""

import argparse
from itertools import count, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.bench import mixed
from serve_spec.bench.command import main
from serve_spec.bench.dataset import Columns, read_dataset
from serve_spec.bench.mixed_report import figures, summary, tables
from serve_spec.bench.online.load import LoadRun, Served
from serve_spec.bench.online.report import Objective
from serve_spec.bench.prompts import ChatEncoder, prompt_pool
from serve_spec.bench.report import read_records
from serve_spec.bench.request_trace import TRACES, PromptPool
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.core.record import StepTimes
from serve_spec.engine.llm import LLM
from tests.helpers.rounds import decode_batch, verified_round
from tests.unit.bench.configs import write_config, write_dataset

SMALL = "--traces mid --num-requests 5 --streams 2 --prompt-tokens 30:90 --output-tokens 6:20"
SMALL += " --random-prompts"
ONCE = "--warm-up 1 --repetitions 1"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("mixed"))


def run(path, extra, expected=0):
    """Run the benchmark; return the record of the run and of every measurement."""
    assert main(f"mixed --json {path} {extra}".split()) == expected
    return read_records(path, "mixed")


@given(st.sampled_from(list(TRACES)), st.floats(0.01, 2), st.integers(0, 99))
def test_lengths_of_a_trace_lie_within_its_scaled_bounds_and_are_those_of_its_seed(
    name, scale, seed
):
    trace = TRACES[name].scaled(scale)
    lengths = trace.lengths(seed)
    assert len(lengths) == trace.num_requests == max(1, round(scale * TRACES[name].num_requests))
    for index, bounds in enumerate((trace.prompt_tokens, trace.output_tokens)):
        assert all(bounds[0] <= each[index] <= bounds[1] for each in lengths)
    assert max(map(sum, lengths)) <= trace.longest
    assert trace.lengths(seed) == lengths
    assert trace.resized(prompt_tokens=(3, 3)).lengths(seed)[0][0] == 3


TEXTS = st.lists(st.lists(st.integers(10, 99), min_size=1, max_size=5), min_size=1, max_size=4)
AROUND = st.lists(st.integers(0, 9), max_size=3)


@given(TEXTS, AROUND, AROUND, st.integers(0, 9), st.integers(1, 40))
def test_a_prompt_of_any_length_is_the_end_of_its_text_after_the_texts_before_it(
    texts, before, after, number, num_tokens
):
    prompt = PromptPool(texts, "", before, after).prompt(number, num_tokens)
    assert len(prompt) == num_tokens
    room = num_tokens - len(before) - len(after)
    if room > 0:
        assert (prompt[: len(before)], prompt[len(before) + room :]) == (before, after)
        inner = prompt[len(before) : len(before) + room]
        backwards = (t for n in count(number, -1) for t in reversed(texts[n % len(texts)]))
        assert inner[::-1] == list(islice(backwards, room))


def pool_of(config, **given):
    names = ("dataset", "column", "category", "random_prompts")
    args = {**dict.fromkeys(names), "category_column": "category", "seed": 0, **given}
    return prompt_pool(argparse.Namespace(**args), ServeSpecConfig.load(config))


def test_a_chat_that_is_as_long_as_wanted_is_rendered_as_any_other(config, tmp_path):
    file, encoder = write_dataset(tmp_path), ChatEncoder(ServeSpecConfig.load(config))
    pool = pool_of(config, dataset=[str(file)])
    chats = [encoder.encode(chat) for chat in read_dataset(str(file), Columns())]
    prompts = [
        pool.prompt(number, len(pool.before) + len(text) + len(pool.after))
        for number, text in enumerate(pool.texts)
    ]
    assert sorted(prompts) == sorted(chats)
    assert pool.about == f"prompts of {file}, joined, as chats"


def test_without_a_dataset_prompts_are_source_files_or_as_wanted_random(config, monkeypatch):
    monkeypatch.setattr("serve_spec.bench.prompts.installed", list)
    pools = pool_of(config), pool_of(config, random_prompts=True)
    assert [pool.about for pool in pools] == [
        "prompts of source files (networkx, aiohttp)",
        "prompts of random tokens",
    ]
    sources, drawn = (len(set(pool.prompt(0, 300))) for pool in pools)
    assert sources < drawn, "source files repeat their characters"


def served(due, chunk_s, token_ids):
    return Served(due, due, chunk_s[-1], tuple(chunk_s), "", len(token_ids), 5, token_ids=token_ids)


TIMES = (StepTimes(1.0, 2.0, 8.0), StepTimes(1.0, 2.0, 20.0))
STEPS = [
    verified_round([1, 3], 2, 3, times=TIMES[0]),
    verified_round([0], 1, 1, times=TIMES[1], num_prefill_tokens=40),
    verified_round([], 0, 0, times=TIMES[1], num_prefill_tokens=500),
]


@given(st.lists(st.floats(0.001, 1), min_size=2, max_size=9), st.floats(1, 1000))
def test_a_gap_is_between_deliveries_however_many_tokens_they_hold(waits, bound):
    times = np.cumsum(waits).tolist()
    texts = [(1, 2, 3) * len(times), (4,)]
    answers = LoadRun([served(0.0, times, texts[0]), served(0.2, [0.5], texts[1])])
    found = figures(answers, STEPS, Objective(e2el_ms=400.0), bound, [texts[0], (5,)])
    gaps = np.diff(times) * 1e3
    assert found["gap_ms"]["p50"] == pytest.approx(np.percentile(gaps, 50), abs=1e-3)
    assert found["gap_ms"]["p99"] == pytest.approx(np.percentile(gaps, 99), abs=1e-3)
    assert found["gaps_within"] == pytest.approx((gaps <= bound).mean())
    seconds = max(times[-1], 0.5)
    assert found["seconds"] == pytest.approx(seconds)
    assert found["tokens_per_second"] == pytest.approx((3 * len(times) + 1) / seconds)
    good = 1 + (times[-1] <= 0.4)
    assert found["goodput_requests_per_second"] == pytest.approx(good / seconds)
    assert (found["same_texts"], found["num_texts"]) == (1, 2)


def test_prompt_tokens_are_counted_in_steps_in_which_requests_decode():
    answers = LoadRun([served(0.0, [0.1], (4,))])
    found = figures(answers, STEPS, Objective(), None, [(4,)])
    assert (found["steps"], found["prompt_tokens"]) == (3, 540)
    assert found["prompt_tokens_per_step"] == 40
    assert (found["decode_step_ms"], found["mixed_step_ms"]) == (8.0, 20.0)
    assert found["accept_length"] == pytest.approx((2 + 4 + 1) / 3)
    assert found["num_steps"] == pytest.approx((3 + 3 + 1) / 3)
    assert (found["gap_ms"], found["gaps_within"]) == (None, None)


VARIANTS = {
    "off, 64": {"depth": "off", "chunk": 64, "is_fixed": True},
    "K=3, 512": {"depth": "K=3", "chunk": 512, "is_fixed": True},
    "adaptive, 64": {"depth": "adaptive", "chunk": 64, "is_fixed": False},
}
HEAD = {
    "prompts": "prompts",
    "traces": ["mid: of a test"],
    "objective": {},
    "inter_token_ms": 30.0,
    "variants": VARIANTS,
    "environment": {"gpu": None, "cpu": "a CPU"},
}


def measured(variant, repetition, seconds, of_capacity=None):
    """All requests take as long as the run, so means of requests are those of runs."""
    answers = LoadRun([served(0.0, [seconds / 2, seconds], (1, 2))])
    found = figures(answers, STEPS, Objective(), 30.0, [(1, 2)])
    place = {"trace": "mid", "load": "closed 2" if of_capacity is None else "poisson 3/s"}
    return {**place, "variant": variant, "repetition": repetition, **found} | {
        "of_capacity": of_capacity
    }


SECONDS = st.fixed_dictionaries(
    dict.fromkeys(VARIANTS, st.lists(st.floats(0.1, 9), min_size=3, max_size=3))
)


@given(SECONDS, st.sampled_from([None, 0.8]))
def test_the_best_pair_is_of_those_held_fixed_and_repetitions_that_some_lack_do_not_count(
    seconds, of_capacity
):
    records = [
        measured(name, repetition, each, of_capacity)
        for name, mine in seconds.items()
        for repetition, each in enumerate(mine)
    ]
    rows = {f"{row['depth']}, {row['chunk']}": row for row in summary(HEAD, records)}
    medians = {name: float(np.median(mine)) for name, mine in seconds.items()}
    best = min(medians["off, 64"], medians["K=3, 512"])
    for name, row in rows.items():
        assert row["seconds"] == pytest.approx(medians[name])
        assert row["over_best_fixed"] == pytest.approx(best / medians[name], rel=1e-3)
        assert row["same_texts"] == row["num_texts"] == 3
    assert rows["adaptive, 64"]["best_fixed"] in ("off, 64", "K=3, 512")
    late = measured("off, 64", 3, 0.01, of_capacity)
    assert tables(HEAD, [*records, late]) == tables(HEAD, records)
    assert "no repetition is complete" in tables(HEAD, [late])


def test_every_variant_serves_the_same_texts_and_a_file_shows_what_was_printed(
    config, tmp_path, capsys
):
    file, plot = tmp_path / "r.jsonl", tmp_path / "r.png"
    head, *found = run(
        file,
        f"""--config {config} {SMALL} --warm-up 2 --repetitions 2 --depths 0 3 adaptive --chunks 8
        64 --loads closed 0.5 --goodput ttft:60000 tpot:60000 --inter-token-ms 60000
        --plot {plot}""",
    )
    names = [f"{depth}, {chunk}" for depth in ("off", "K=3", "adaptive") for chunk in (8, 64)]
    assert list(head["variants"]) == names
    assert len(found) == 2 * 2 * len(names)
    assert len({each["texts"] for each in found}) == 1
    rates = {}
    for each in found:
        assert each["same_texts"] == each["num_texts"] == 5
        assert each["goodput_requests_per_second"] == each["requests_per_second"]
        assert each["gaps_within"] == 1.0
        rates.setdefault(each["of_capacity"], []).append(each)
    closed, half = rates[None], rates[0.5]
    assert {each["load"] for each in closed} == {"closed 2"}
    assert len({each["load"] for each in half}) == 1, "the same arrivals for all"
    by_name = {each["variant"]: each for each in closed}
    assert by_name["off, 8"]["prompt_tokens_per_step"] <= 8
    assert 8 < by_name["off, 64"]["prompt_tokens_per_step"] <= 64
    assert by_name["off, 8"]["accept_length"] == 1.0 < by_name["K=3, 8"]["accept_length"]
    printed = capsys.readouterr().out
    assert "x best" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(["mixed", "--from-json", str(file)]) == 0
    assert capsys.readouterr().out == printed


def test_a_bound_holds_for_chunks_that_follow_it_and_every_variant_has_its_own(
    config, tmp_path, capsys
):
    head, *found = run(
        tmp_path / "r.jsonl",
        f"""--config {config} {SMALL} {ONCE} --depths 0 3 adaptive --chunks 8 auto auto:50000
        --loads closed --max-inter-token-ms 60000""",
    )
    assert [each["is_fixed"] for each in head["variants"].values()] == [
        *([True, False, False] * 2),
        *([False] * 3),
    ]
    assert head["inter_token_ms"] == 60000
    assert all(each["gaps_within"] == 1.0 for each in found)
    assert "gaps <= 60000" in capsys.readouterr().out


@pytest.mark.parametrize("depth", [0, 3, "adaptive"])
def test_a_variant_with_a_bound_plans_its_steps_within_it(config, depth):
    llm = LLM(config, speculative_adaptive=True, max_num_seqs=4)
    bounds = {}
    for text in ("64", "auto", "auto:5"):
        controller = mixed._variant(llm.engine, depth, mixed._chunk(text)).controller
        bounds[text] = controller.settings.prompts.config.max_inter_token_ms
        assert controller.choose_steps(decode_batch(2)).shape.depth <= 7
    assert bounds == {"64": None, "auto": None, "auto:5": 5}
    llm.shutdown()


def test_forced_acceptance_has_the_wanted_length_and_no_texts_to_compare(config, tmp_path, capsys):
    head, *found = run(
        tmp_path / "r.jsonl",
        f"""--config {config} {SMALL} {ONCE} --output-tokens 35 --depths 3 --chunks 64
        --loads closed --acceptance 1.0 1.0""",
    )
    assert head["environment"]["synthetic_acceptance"] == [1.0, 1.0]
    assert head["prompts"] == "prompts of random tokens"
    assert found[0]["accept_length"] > 3.5
    assert "synthetic_acceptance=(1.0, 1.0)" in capsys.readouterr().out.splitlines()[0]


def test_a_target_without_drafts_compares_chunks_and_its_capacity_may_be_given(config, tmp_path):
    head, *found = run(
        tmp_path / "r.jsonl",
        f"""--config {config} {SMALL} {ONCE} --speculative-algorithm NONE --chunks 8 64
        --loads 0.5 --capacity 40""",
    )
    assert list(head["variants"]) == ["off, 8", "off, 64"]
    assert {each["load"] for each in found} == {"poisson 20/s"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--loads 0.5", "--loads=0.5: are fractions of an unknown capacity; add closed or"),
        ("--traces mid chat --capacity 3", "--capacity=3: is the capacity of one trace; give one"),
        ("--chunks null", "--chunks=null: give a number of tokens, auto, or auto:MS with a bound"),
        ("--chunks auto 0", "--chunks=0: give a number of tokens"),
        ("--chunks auto:x", "--chunks=auto:x: give a number of tokens"),
        ("--chunked-prefill-size 9", "--chunked-prefill-size=9: every variant has its own; give"),
        ("--depths 40", "drafts of 40: not built at start; use some of"),
        ("--prompt-tokens 500", "--traces=mid: a request has up to 520 tokens, max_model_len=128"),
        (
            "--depths 0 3 --speculative-algorithm NONE",
            "--depths=3: speculative_algorithm=NONE drafts nothing; give 0, or name a draft",
        ),
        (
            "--acceptance 2.5 --synthetic-acceptance 2",
            "--acceptance=2.5: --synthetic-acceptance is given, too; leave one",
        ),
        ("--dataset x", "--random-prompts=True: chooses no prompts of --dataset"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(config, flags, message):
    with pytest.raises(ConfigError) as refused:
        main(f"mixed --config {config} {SMALL} --chunks 64 {flags}".split())
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("bounds", ["9:3", "0:4"])
def test_bounds_of_lengths_are_in_order(bounds, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["mixed", "--prompt-tokens", bounds])
    assert f"{bounds!r}: give LOW:HIGH, 1 <= LOW <= HIGH" in capsys.readouterr().err


def test_an_interrupted_run_keeps_its_records(config, tmp_path, monkeypatch):
    measure = mixed._Bench.measure

    def interrupted(bench, trace):
        yield next(measure(bench, trace))
        raise KeyboardInterrupt

    monkeypatch.setattr(mixed._Bench, "measure", interrupted)
    file = tmp_path / "r.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(file, f"--config {config} {SMALL} {ONCE} --depths 0 --chunks 8 64 --loads closed")
    assert [each["section"] for each in read_records(file, "mixed")] == ["run", "measurement"]
