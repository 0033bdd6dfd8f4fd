"""An engine that is started again continues from what its policy knew, and from no other file."""

import json
import logging
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive import AdaptiveController, PolicySettings, StepPolicy
from serve_spec.config import SpeculativeConfig
from serve_spec.core.draft import DraftShape
from serve_spec.core.request import SamplingParams
from serve_spec.core.round import RoundSteps
from serve_spec.engine import build
from serve_spec.engine.policy_cache import PolicyCache, policy_file
from serve_spec.profile.measure import MeasuredCosts
from tests.helpers.engines import texts
from tests.helpers.rounds import decode_batch
from tests.helpers.simulated_costs import GPU_8B, recorded_table

PROMPTS = [[5 + i, 7, 9 + i, 11] * 3 for i in range(3)]
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


class Remembering(StepPolicy):
    """Counts accepted drafts across restarts."""

    def __init__(self, context):
        self.shapes = (DraftShape.chain(2),)
        self.num_accepted = 0

    def choose(self, batch):
        return RoundSteps(self.shapes[0])

    def observe(self, record):
        self.num_accepted += sum(record.correct_per_req)

    def snapshot(self):
        return {"num_accepted": self.num_accepted}

    def state(self):
        return {"num_accepted": self.num_accepted}

    def restore(self, state):
        self.num_accepted = 0 + state["num_accepted"]


class Unwritable(Remembering):
    """Returns a state that is not JSON."""

    def state(self):
        return {"num_accepted": {self.num_accepted}}


def strategy(policy):
    return f"{__name__}:{policy.__name__}"


ADAPTS = {
    "speculative_adaptive": True,
    "speculative_adaptive_strategy": strategy(Remembering),
    "max_num_seqs": 3,
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(build._PROFILE_BUDGET_S, "cpu", 0.3)
    return tmp_path / "cache"


@pytest.fixture
def logged(caplog):
    """Return what the package logs, which does not propagate to the root logger."""
    logger = logging.getLogger("serve_spec")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger="serve_spec")
    yield caplog
    logger.removeHandler(caplog.handler)


def about_policies(logged, level=logging.WARNING):
    told = [r.getMessage() for r in logged.records if r.levelno == level]
    assert not [line for line in told if "\n" in line]
    return [line for line in told if line.startswith("policy: ")]


def run(make_llm, **overrides):
    """Start an engine, run requests and end it; return snapshots before and after, and texts."""
    llm = make_llm("EAGLE3", 2, **{**ADAPTS, **overrides})
    before = llm.engine.snapshot()
    outputs = llm.generate(PROMPTS, PARAMS)
    after = llm.engine.snapshot()
    llm.shutdown()
    return before, after, texts(outputs)


def measured(key, worker, grid, *rest):
    """Measure costs at which drafts pay."""
    steps = range(grid.max_steps + 1)
    table = recorded_table(GPU_8B, (1, 2, 4), tuple(steps), trees=sorted(grid.trees))
    return MeasuredCosts(table.model_copy(update={"key": key}), False)
    yield


def test_goodput_continues_with_rates_calibration_and_costs(make_llm, cache, logged, monkeypatch):
    monkeypatch.setattr(build, "measure_costs", measured)
    llms = []
    for _ in range(2):
        llms.append(make_llm("EAGLE3", 2, **ADAPTS | {"speculative_adaptive_strategy": "goodput"}))
        kept = llms[-1].engine.controller.state()
        if len(llms) == 1:
            said = texts(llms[0].generate(PROMPTS, PARAMS))
            learned = llms[0].engine.controller.state()
            llms[0].shutdown()
    assert kept == learned
    assert sum(learned["learned"]["drafts"]["recent"]["0"]["chains"]["trials"]) > 0
    assert texts(llms[1].generate(PROMPTS, PARAMS)) == said
    (file,) = cache.glob("policies/*.json")
    assert about_policies(logged, logging.INFO) == [f"policy: continues from {file}"]
    assert not about_policies(logged)


def test_a_policy_of_another_package_continues_by_its_own_hooks(make_llm, cache):
    _, first, _ = run(make_llm)
    second, last, _ = run(make_llm)
    assert second["num_accepted"] == first["num_accepted"] > 0
    assert run(make_llm)[0]["num_accepted"] == last["num_accepted"]


@pytest.mark.parametrize(
    "change",
    [
        {"speculative_adaptive_cache": False},
        {"speculative_adaptive_strategy": "static"},
        {"speculative_adaptive": False},
    ],
    ids=str,
)
def test_nothing_is_kept_if_it_is_turned_off_or_there_is_nothing(make_llm, cache, change):
    run(make_llm, **change)
    assert not list(cache.glob("policies/*"))


@pytest.mark.parametrize(
    "change",
    [{"speculative_draft_sharpness": 0.5}, {"synthetic_acceptance": 2.0}, {"page_size": 8}],
    ids=str,
)
def test_other_settings_of_drafts_have_a_file_of_their_own(make_llm, cache, change):
    run(make_llm)
    before, _, _ = run(make_llm, **change)
    is_the_same = "page_size" in change
    assert (before["num_accepted"] > 0) == is_the_same
    assert len(list(cache.glob("policies/*.json"))) == 2 - is_the_same


def following():
    """Return a controller that follows accepted drafts."""
    return AdaptiveController(PolicySettings(DraftShape.chain(3), strategy="ema"))


def corrupt(change):
    def write(file):
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return write


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda file: file.write_text(file.read_text()[:-9]), "not valid JSON"),
        (lambda file: file.write_bytes(b"\xff\x00"), "utf-8"),
        (lambda file: file.write_text("[]"), "is a JSON object"),
        (lambda file: file.write_text('{"a": NaN}'), "NaN is not a number"),
        (corrupt(lambda content: content.update(version=0)), "version=0, but 1"),
        (corrupt(lambda content: content.update(setting="other")), "setting='other', but"),
        (corrupt(lambda content: content.update(state=3)), "state=3: no mapping"),
        (corrupt(lambda content: content["state"].update(version=7)), "'version': 7"),
        (corrupt(lambda content: content["state"].update(learned={})), "1=None: no mapping"),
        (lambda file: (file.unlink(), file.mkdir()), "directory"),
    ],
)
def test_a_damaged_foreign_or_older_file_is_ignored_with_one_line(tmp_path, logged, damage, why):
    file = tmp_path / "name.json"
    saved, fresh = following(), following()
    before = fresh.snapshot()
    PolicyCache(saved, file).close()
    assert not file.exists(), "no round has run"
    kept = PolicyCache(saved, file)
    saved.choose_steps(decode_batch(2))
    kept.close()
    damage(file)
    PolicyCache(fresh, file).restore()
    assert fresh.snapshot() == before
    (warning,) = about_policies(logged)
    assert str(file) in warning
    assert why in warning


def test_an_engine_starts_anew_if_its_file_is_damaged(make_llm, cache, logged):
    run(make_llm)
    (file,) = cache.glob("policies/*.json")
    file.write_text(file.read_text()[:-9])
    before, after, _ = run(make_llm)
    assert before["num_accepted"] == 0
    assert len(about_policies(logged)) == 1
    assert run(make_llm)[0]["num_accepted"] == after["num_accepted"], "the file was replaced"


def test_a_folder_that_cannot_be_written_costs_one_warning_and_no_text(make_llm, cache, logged):
    _, _, said = run(make_llm)
    folder = cache / "policies"
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    folder.write_text("a file where the folder should be")
    llm = make_llm("EAGLE3", 2, **ADAPTS)
    llm.engine.policy_cache._due_s = 0.0
    assert texts(llm.generate(PROMPTS, PARAMS)) == said
    llm.generate(PROMPTS, PARAMS)
    llm.shutdown()
    (warning,) = about_policies(logged)
    assert "is not kept for the next start" in warning
    assert "make $SERVE_SPEC_CACHE writable" in warning


def test_a_state_that_is_not_json_costs_one_warning(make_llm, cache, logged):
    run(make_llm, speculative_adaptive_strategy=strategy(Unwritable))
    (warning,) = about_policies(logged)
    assert "TypeError" in warning
    assert not list(cache.glob("policies/*"))


class Time:
    now = 1000.0

    def __call__(self):
        return self.now


class FakeController:
    """A controller whose state is the number of its rounds."""

    num_rounds = 0
    restored = None

    def state(self):
        return {"rounds": self.num_rounds}

    def restore(self, state):
        self.restored = state


def test_it_is_saved_every_few_minutes_if_rounds_have_run(tmp_path):
    now, controller, file = Time(), FakeController(), tmp_path / "policies" / "name.json"
    kept = PolicyCache(controller, file, now)
    saved = Counter()
    for controller.num_rounds in [0] * 10 + [5] * 10 + [7] * 5:
        now.now += 100.0
        kept.save_if_due()
        kept._writer.submit(int).result()  # what was handed over before is written
        if file.exists():
            saved[json.loads(file.read_text())["state"]["rounds"]] += 1
            file.unlink()
    assert saved == {5: 1, 7: 1}
    controller.num_rounds = 9
    kept.close()
    restarted = FakeController()
    PolicyCache(restarted, file, now).restore()
    assert restarted.restored == {"rounds": 9}
    assert [path.name for path in file.parent.iterdir()] == [file.name], "no draft is left"


def test_an_engine_without_work_saves_as_well(make_llm, cache):
    llm = make_llm("EAGLE3", 2, **ADAPTS)
    llm.generate(PROMPTS, PARAMS)
    llm.engine.policy_cache._due_s = 0.0
    llm.engine.use_idle_time()
    llm.engine.policy_cache._writer.shutdown()
    assert len(list(cache.glob("policies/*.json"))) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
)
HEAD = {"version": 1, "setting": "name"}
STATES = st.dictionaries(st.sampled_from(["policy", "version", "learned"]), JSON)


@given(
    st.binary(max_size=64)
    | JSON.map(lambda value: json.dumps(value).encode())
    | STATES.map(lambda state: json.dumps({**HEAD, "state": state}).encode())
)
def test_whatever_bytes_a_file_holds_the_policy_starts_anew(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "name.json"
    file.write_bytes(content)
    controller = following()
    before = controller.snapshot()
    PolicyCache(controller, file).restore()
    assert controller.snapshot() == before


def test_the_name_of_the_file_depends_on_costs_and_drafts_and_on_no_folder(tmp_path):
    draft = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 2}

    def name(stem, **keys):
        config = SpeculativeConfig(**{**draft, **keys})
        return policy_file(tmp_path / "costs" / f"{stem}.json", config)

    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    one, two = (
        name("a", speculative_draft_model_path=str(tmp_path / folder)) for folder in ("one", "two")
    )
    assert one == two
    other = name("a", speculative_draft_model_path=str(tmp_path / "one"), min_dwell_rounds=1)
    assert other != one
    assert one.parent == tmp_path / "policies"
    assert re.fullmatch(r"a-[0-9a-f]{16}\.json", one.name)
