"""Costs come from a named file, a cached one or a measurement, and are kept apart by their key."""

import json
import logging
import math
import shutil

import pytest
import torch

import serve_spec
from serve_spec.config.cost_table import (
    FORMAT_VERSION,
    CostTable,
    load_cost_table,
    write_cost_table,
)
from serve_spec.core.draft import DraftShape
from serve_spec.profile.measure import CostGrid, MeasuredCosts
from serve_spec.profile.source import CostSource, code_version, cost_key, fingerprint
from tests.helpers.checkpoints import make_eagle3
from tests.helpers.costs import KEY

MEASURED = CostTable(
    version=FORMAT_VERSION,
    key=KEY,
    context=128,
    batch_sizes=(1, 2),
    num_steps=(1,),
    draft_ms=((1.0,), (1.0,)),
    draft_context_ms=0.0,
    num_tokens=(1, 2, 4),
    verify_ms=(7.0, 8.0, 9.0),
    verify_context_ms=0.0,
    sampled_token_ms=0.1,
    extrapolated=((2, 1),),
    measured_s=1.5,
)


class FakeMeasurement:
    """Counts how often it is begun; runs a few rounds, and ends in an error or in costs."""

    def __init__(self, *outcomes, num_rounds=3):
        self.outcomes = outcomes or (MEASURED,)
        self.num_rounds = num_rounds
        self.count = 0
        self.limits = []
        self.spent_s = 0.0

    def __call__(self, clock, longest_run_s):
        outcome = self.outcomes[min(self.count, len(self.outcomes) - 1)]
        self.count += 1
        self.limits.append(longest_run_s)
        return self._rounds(outcome, clock)

    def _rounds(self, outcome, clock):
        started = clock()
        for n in range(self.num_rounds):
            self.spent_s = clock() - started
            yield n / self.num_rounds
        if isinstance(outcome, Exception):
            raise outcome
        return outcome if isinstance(outcome, MeasuredCosts) else MeasuredCosts(outcome, False)


class Time:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def logged(caplog):
    """Return what the package logs, which does not propagate to the root logger."""
    logger = logging.getLogger("serve_spec")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger="serve_spec")
    yield caplog
    logger.removeHandler(caplog.handler)


def warnings_in(logged):
    return [r.getMessage() for r in logged.records if r.levelno == logging.WARNING]


def infos_in(logged):
    return [r.getMessage() for r in logged.records if r.levelno == logging.INFO]


WITH_A_TREE = {DraftShape(1, 4, 4): None}


def source(measure, **changes):
    settings = {"key": KEY, "grid": CostGrid(2, 1), "path": None, "measure": measure}
    return CostSource(**{**settings, **changes})


def obtain(measure, **changes):
    return source(measure, **changes).obtain()


def table(key=KEY, measured_s=99.0):
    return MEASURED.model_copy(update={"key": key, "measured_s": measured_s})


def test_what_was_measured_once_is_read_at_the_next_start(cache, logged):
    measure = FakeMeasurement()
    first, second = obtain(measure), obtain(measure)
    assert measure.count == 1
    assert first == second
    assert first.key == KEY
    assert first.verify_ms == MEASURED.verify_ms
    (file,) = cache.glob("costs/*.json")
    _, measured, read = infos_in(logged)
    assert "measured in 1.5 s, 1 of 4 points extrapolated" in measured
    assert f"cached in {file}" in measured
    assert f"read from {file}" in read
    assert not warnings_in(logged)


def test_each_setting_and_each_grid_is_kept_apart(cache):
    other = KEY.model_copy(update={"threads": 2})
    measure, measure_other = FakeMeasurement(), FakeMeasurement(table(other))
    for _ in range(2):
        obtain(measure)
        obtain(measure_other, key=other)
        obtain(measure, grid=CostGrid(4, 1))
    assert (measure.count, measure_other.count) == (2, 1)
    assert len(list(cache.glob("costs/*.json"))) == 3


def test_a_named_table_wins_over_a_kept_one_and_is_not_copied(tmp_path, cache):
    measure = FakeMeasurement()
    named = tmp_path / "named.json"
    write_cost_table(table(), named)
    found = obtain(measure, path=named)
    assert found.measured_s == 99.0
    assert measure.count == 0
    assert not cache.exists()


@pytest.mark.parametrize(
    ("content", "changes", "why"),
    [
        ("{", {}, "not valid JSON"),
        ('{"version": 7}', {}, "version=7"),
        (
            table(KEY.model_copy(update={"threads": 9})).model_dump_json(),
            {},
            "key.threads=9, but this engine has 1",
        ),
        (table().model_dump_json(), {"grid": CostGrid(2, 3)}, "but 3 is needed"),
        (table().model_dump_json(), {"grid": CostGrid(2, 1, WITH_A_TREE)}, "(1, 4)"),
    ],
)
def test_a_named_table_that_does_not_fit_is_warned_of_once_left_alone_and_measured_anew(
    tmp_path, logged, content, changes, why
):
    measure = FakeMeasurement()
    named = tmp_path / "named.json"
    named.write_text(content)
    found = obtain(measure, path=named, **changes)
    assert found.measured_s == 1.5
    assert measure.count == 1
    assert named.read_text() == content
    (warning,) = warnings_in(logged)
    assert warning.count(str(named)) == 1
    assert why in warning
    assert "serve-spec tune" in warning


def test_a_kept_table_that_was_damaged_is_measured_again_and_replaced(cache, logged):
    measure = FakeMeasurement()
    obtain(measure)
    (file,) = cache.glob("costs/*.json")
    file.write_text(file.read_text()[:-20])
    assert obtain(measure) is not None
    assert measure.count == 2
    assert load_cost_table(file).key == KEY
    assert len(warnings_in(logged)) == 1


def test_a_cache_folder_that_cannot_be_written_costs_one_warning(cache, logged):
    cache.write_text("a file where the folder should be")
    found = obtain(FakeMeasurement())
    assert found.measured_s == 1.5
    (warning,) = warnings_in(logged)
    assert "not cached for the next start" in warning
    assert "make $SERVE_SPEC_CACHE writable" in warning
    assert "not cached" in infos_in(logged)[-1]


@pytest.mark.parametrize(
    "error", [ValueError("too busy"), RuntimeError("out of memory"), AssertionError()]
)
def test_a_measurement_that_fails_gives_no_costs_and_one_warning(cache, logged, error):
    found = source(FakeMeasurement(error))
    assert found.obtain() is None
    (warning,) = warnings_in(logged)
    assert type(error).__name__ in warning
    assert str(error) in warning
    assert "tries again when it is idle" in warning
    assert found.report == {"state": "missing", "detail": f"{type(error).__name__}: {error}"}
    assert not found.is_final
    assert not cache.exists()


def test_what_the_start_could_not_measure_is_measured_a_round_at_a_time_when_there_is_time(
    cache, logged
):
    now, measure = Time(), FakeMeasurement(ValueError("too busy"), MEASURED)
    late = source(measure, clock=now)
    assert late.obtain() is None
    assert late.wait_s() == 30.0
    assert late.advance() is None
    assert measure.count == 1, "it is not due yet"
    now.now += 30.0
    for _ in range(measure.num_rounds):
        assert late.wait_s() == 0.0
        assert late.advance() is None
        now.now += 100.0  # requests run meanwhile
    assert measure.spent_s == 0.0, "their time does not count"
    found = late.advance()
    assert measure.limits == [math.inf, 0.5], "no request waits long for a round of these"
    assert late.is_final
    assert late.report["state"] == "measured"
    (file,) = cache.glob("costs/*.json")
    assert load_cost_table(file) == found
    assert obtain(measure) == found
    assert measure.count == 2


def test_attempts_that_fail_grow_rare():
    now = Time()
    late = source(FakeMeasurement(ValueError("too busy")), clock=now)
    assert late.obtain() is None
    waits = []
    for _ in range(7):
        waits.append(late.wait_s())
        now.now += waits[-1]
        while not late.wait_s():
            assert late.advance() is None
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]


def test_rough_costs_serve_until_better_ones_are_measured_and_are_not_kept(cache):
    rough = MeasuredCosts(MEASURED.model_copy(update={"sampled_token_ms": 9.0}), True)
    now = Time()
    late = source(FakeMeasurement(rough, ValueError("too busy"), MEASURED), clock=now)
    first = late.obtain()
    assert first.sampled_token_ms == 9.0
    assert not late.is_final
    assert not cache.exists()
    found = None
    while found is None:
        now.now += late.wait_s()
        found = late.advance()
        assert late.report["state"] == "measured"
    assert found.sampled_token_ms == MEASURED.sampled_token_ms
    assert late.is_final
    assert cache.exists()


def test_a_table_that_another_engine_kept_meanwhile_is_read_instead(cache):
    now, measure = Time(), FakeMeasurement(ValueError("too busy"))
    late = source(measure, clock=now)
    late.obtain()
    kept = obtain(FakeMeasurement())
    now.now += late.wait_s()
    assert late.advance() == kept
    assert measure.count == 1
    assert late.report["state"] == "loaded"


def test_without_a_cache_folder_tables_are_kept_in_the_home(tmp_path, monkeypatch):
    monkeypatch.delenv("SERVE_SPEC_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    obtain(FakeMeasurement())
    assert len(list((tmp_path / "home/.cache/serve_spec/costs").glob("*.json"))) == 1


def test_the_key_names_what_really_runs(make_llm):
    llm = make_llm("EAGLE3", 3, speculative_draft_dtype="bfloat16")
    key = cost_key(llm.config, llm.engine.worker)
    assert key.algorithm == "EAGLE3"
    assert (key.dtype, key.draft_dtype) == ("float32", "bfloat16")
    assert key.threads == torch.get_num_threads()
    assert "cores" in key.hardware
    assert len({key.target, key.draft}) == 2
    assert key.code == code_version()
    assert serve_spec.__version__ in key.code
    assert key.attention_backend == "paged"
    off = make_llm()
    plain = cost_key(off.config, off.engine.worker)
    assert (plain.draft, plain.draft_dtype) == ("", "")
    assert json.loads(key.model_dump_json()) == key.model_dump()


def test_a_fingerprint_follows_the_files_and_not_their_folder(pair, tmp_path):
    copied = shutil.copytree(pair.target, tmp_path / "copy")
    assert fingerprint(copied) == fingerprint(pair.target)
    assert fingerprint(pair.heads["EAGLE"]) != fingerprint(pair.heads["EAGLE3"])
    (copied / "tokenizer.json").write_text("{}")
    assert fingerprint(copied) == fingerprint(pair.target), "no round reads the tokenizer"
    (copied / "config.json").write_text((copied / "config.json").read_text() + " ")
    assert fingerprint(copied) != fingerprint(pair.target)
    narrow = make_eagle3(tmp_path / "narrow", pair.target, draft_vocab=64)
    before = fingerprint(narrow)
    assert before != fingerprint(make_eagle3(tmp_path / "wide", pair.target)), "other shapes"
    (narrow / "model.safetensors").rename(narrow / "model-00001-of-00001.safetensors")
    assert fingerprint(narrow) != before, "split otherwise"
