"""Laws of waves, on a tiny random pair."""

from __future__ import annotations

from itertools import pairwise

import pytest

from serve_spec import LLM
from serve_spec.adaptive import AdaptiveController
from serve_spec.bench.adaptive.arms import make_arms
from serve_spec.bench.waves import Wave, figures, run_wave
from serve_spec.config import ConfigError
from tests.helpers.engines import llm_maker, make_pair

WAVE = Wave(batch_size=3, prompt_tokens=10, output_tokens=60)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    make = llm_maker(make_pair(tmp_path_factory.mktemp("waves")), "cpu")
    how = {"async_scheduling": request.param, "max_num_seqs": 4, "max_model_len": 160}
    return make("EAGLE3", 3, synthetic_acceptance=2.0, **how)


def fixed(llm: LLM, num_steps: int) -> AdaptiveController:
    return make_arms(llm.engine.controller, [num_steps], [])[-1].controller


def test_a_round_is_counted_for_the_arm_whose_turn_it_is_and_only_if_it_is_full(llm: LLM) -> None:
    off, on = fixed(llm, 0), fixed(llm, 3)
    rounds = run_wave(llm.engine, WAVE, off, {"off": [off], "on": [on]})
    for name, num_steps in (("off", 0), ("on", 3)):
        assert rounds[name], f"{name} has had its turn"
        for stats in rounds[name]:
            assert stats.decodes_only
            assert stats.num_draft_tokens == num_steps * WAVE.batch_size
            assert stats.row_steps == (num_steps,) * WAVE.batch_size


def test_the_controllers_of_an_arm_take_turns_every_round(llm: LLM) -> None:
    off, on = fixed(llm, 0), fixed(llm, 3)
    (rounds,) = run_wave(llm.engine, WAVE, off, {"both": [off, on]}).values()
    assert all(a.shape != b.shape for a, b in pairwise(rounds))
    assert {stats.shape.depth for stats in rounds} == {0, 3}


def test_a_wave_leaves_nothing_behind(llm: LLM) -> None:
    engine = llm.engine
    before = engine.controller, engine.metrics
    off = fixed(llm, 0)
    run_wave(engine, WAVE, off, {"off": [off]})
    assert (engine.controller, engine.metrics) == before
    assert not engine.has_work
    cache = engine.scheduler.cache
    assert cache.num_free_pages == cache.num_pages


def test_one_arm_alone_runs_until_the_mean_text_is_long_enough(llm: LLM) -> None:
    on = fixed(llm, 3)
    (rounds,) = run_wave(llm.engine, WAVE, fixed(llm, 0), {"on": [on]}).values()
    tokens = sum(stats.num_output_tokens for stats in rounds) / WAVE.batch_size
    assert 0.6 * WAVE.output_tokens < tokens <= WAVE.output_tokens + 4


def test_a_text_too_short_for_every_arm_is_refused(llm: LLM) -> None:
    off, on = fixed(llm, 0), fixed(llm, 3)
    with pytest.raises(ConfigError, match=r"output_tokens=12: at batch size 3 .* give more"):
        run_wave(llm.engine, Wave(3, 10, 12), off, {"off": [off], "on": [on]})
    assert not llm.engine.has_work


def test_figures_are_those_of_the_rounds(llm: LLM) -> None:
    on = fixed(llm, 3)
    (rounds,) = run_wave(llm.engine, WAVE, fixed(llm, 0), {"on": [on]}).values()
    shown = figures(rounds)
    assert shown["rounds"] == len(rounds)
    assert shown["p10_ms"] <= shown["ms"] <= shown["p90_ms"]
    assert 1 <= shown["accept_length"] <= 4
    ms = sum(stats.step_ms for stats in rounds)
    rows = len(rounds) * WAVE.batch_size
    assert shown["tokens_per_second"] == pytest.approx(rows * shown["accept_length"] / ms * 1e3)
