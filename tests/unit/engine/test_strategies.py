"""Every strategy on a real engine: the same text, no state left behind, nothing hidden."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_spec import LLM
from serve_spec.adaptive import AdaptiveController
from serve_spec.bench.simulated_costs import GPU_8B, recorded_table
from serve_spec.core.request import SamplingParams
from serve_spec.engine import build
from serve_spec.worker.graphs import NoRecorder
from tests.helpers.engines import MakeLLM, heard_plans, texts

STRATEGIES: list[dict[str, Any]] = [
    {"speculative_adaptive_strategy": "ema"},
    {"speculative_adaptive_strategy": "per_request"},
    {"speculative_adaptive_strategy": "goodput", "speculative_per_sequence": False},
    {"speculative_adaptive_strategy": "goodput", "speculative_per_sequence": True},
]
TREES: list[dict[str, Any]] = [
    {},
    {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7},
]
PROMPTS = [list(range(i, i + 12)) for i in range(6)]


def params(seed: int) -> SamplingParams:
    temperature = (0.0, 0.8)[seed % 2]
    return SamplingParams(max_tokens=40, temperature=temperature, seed=seed, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(make_llm: MakeLLM) -> list[tuple[int, ...]]:
    outputs = make_llm().generate(PROMPTS, [params(i) for i in range(len(PROMPTS))])
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("trees", TREES, ids=["chains", "trees"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: "-".join(map(str, s.values())))
def test_no_strategy_changes_a_text_or_keeps_a_request(
    make_llm: MakeLLM,
    plain: list[tuple[int, ...]],
    strategy: dict[str, Any],
    trees: dict[str, Any],
) -> None:
    llm = make_llm("EAGLE3", 3, speculative_adaptive=True, max_num_seqs=8, **strategy, **trees)
    outputs = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))])
    assert [output.token_ids for output in outputs] == plain
    snapshot = json.loads(json.dumps(llm.engine.snapshot()))
    assert snapshot["fallback"] is None
    names = {str(tree) for tree in llm.engine.worker.states if not tree.is_chain}
    assert names == set(snapshot.get("candidate_trees", ()))
    assert bool(names) == bool(trees)
    if trees and snapshot["strategy"] != "goodput":  # that one may find that chains are better
        assert names & set(snapshot["rounds_by_num_steps"])
    assert snapshot["strategy"] == strategy["speculative_adaptive_strategy"]
    policy: Any = llm.engine.controller._policy
    if snapshot["strategy"] == "goodput":
        assert policy.survival.num_requests == 0
    if snapshot["strategy"] == "per_request":
        assert not policy._speculators


def test_ema_pads_a_batch_to_the_next_captured_size(
    make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rows are of the slot from 8 on there, also after a live change; four are not."""
    monkeypatch.setattr(build, "_captures_graphs", lambda *args: True)
    monkeypatch.setattr(build, "GraphRecorder", lambda device: NoRecorder())
    slots = tmp_path / "slots.json"
    slots.write_text('{"1": {"candidate_steps": [3]}, "8": {"candidate_steps": [1]}}')
    llm = make_llm(
        "EAGLE3",
        3,
        max_num_seqs=16,
        speculative_adaptive=True,
        speculative_adaptive_strategy="ema",
        speculative_adaptive_config=slots,
    )
    for num_rows in (4, 5):
        llm.engine.reconfigure({"speculative_adaptive_config": slots})
        llm.generate(PROMPTS[:num_rows], [params(0)] * num_rows)
        shown: dict[str, Any] = llm.engine.snapshot()
        assert (shown["slots"]["8"]["num_rounds"] > 0) == (num_rows == 5)
        full = "8" if num_rows == 5 else "1"
        assert shown["slots"][full]["num_rounds"] > 0


SHORT_MATCHES = {"speculative_ngram_min_match_window_size": 1}
DRAFTERS: list[tuple[str, dict[str, Any]]] = [
    *((name, keys) for name in ("EAGLE3", "EAGLE", "MEDUSA", "STANDALONE") for keys in TREES),
    *(("NGRAM", {**keys, **SHORT_MATCHES}) for keys in TREES),
    *(("EAGLE3", {**keys, **SHORT_MATCHES, "speculative_ngram_first": True}) for keys in TREES),
]


def repeating() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts from which a text drafter, too, knows how to go on."""
    prompts = [[5 + i, 7, 9 + i, 11] * 3 + [5 + i, 7] for i in range(3)]
    return prompts, [replace(params(i), max_tokens=64) for i in range(len(prompts))]


@pytest.fixture(scope="module")
def plainly_repeated(make_llm: MakeLLM) -> list[tuple[int, ...]]:
    return texts(make_llm().generate(*repeating()))


@pytest.fixture
def _measured_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs that are not used need not be good."""
    monkeypatch.setitem(build._PROFILE_BUDGET_S, "cpu", 0.05)


def without_a_clock(llm: LLM) -> LLM:
    """The same engine, its policy told costs at which drafts pay, and no times of this machine."""
    settings: Any = llm.engine.controller._settings  # type: ignore[attr-defined]
    costs = recorded_table(GPU_8B, trees=settings.trees)
    controller = AdaptiveController(settings, costs if settings.needs_costs else None)
    learn = controller.on_verify_complete
    controller.on_verify_complete = lambda verified: learn(  # type: ignore[method-assign]
        replace(verified, times=None)
    )
    llm.engine.controller = controller
    return llm


@pytest.mark.usefixtures("_measured_quickly")
@pytest.mark.parametrize(
    ("algorithm", "keys"),
    DRAFTERS,
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} keys",
)
@pytest.mark.parametrize("strategy", ["ema", "per_request", "goodput"])
def test_every_drafter_adapts_stops_and_resumes_under_every_strategy(
    make_llm: MakeLLM,
    plainly_repeated: list[tuple[int, ...]],
    strategy: str,
    algorithm: str,
    keys: dict[str, Any],
) -> None:
    """With the strategy's own candidates, whatever the draft can make; off for some rounds."""
    prompts, asked = repeating()
    adapts = {"speculative_adaptive": True, "speculative_adaptive_strategy": strategy}
    keys = {"max_num_seqs": 3, **adapts, **keys}
    llm = without_a_clock(make_llm(algorithm, 3, **keys))
    plans = heard_plans(llm)
    engine, said = llm.engine, [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        engine.add(engine.new_sequence(str(i), prompt, asked[i]))
    planned = {}
    changes = {5: {"speculative_adaptive": False, "speculative_num_steps": 0}, 9: adapts}
    num_rounds = 0
    while engine.has_work:
        if num_rounds in changes:
            engine.reconfigure(changes[num_rounds])
            planned[num_rounds] = len(plans)
        for delta in engine.step():
            said[int(delta.request_id)] += delta.token_ids
        num_rounds += 1
    assert [tuple(tokens) for tokens in said] == plainly_repeated
    assert engine.controller.snapshot()["fallback"] is None
    drafted = [sum(row.num_steps for row in plan.rows) for plan in plans]
    # A round may have been planned ahead of the change.
    before, off, after = (
        sum(drafted[: planned[5]]),
        sum(drafted[planned[5] + 1 : planned[9]]),
        sum(drafted[planned[9] :]),
    )
    assert min(before, after) > 0 == off
