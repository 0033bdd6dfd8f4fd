"""Short prompts run on lanes beside decoding, and leave what eager rounds leave."""

import random
from typing import Any

import pytest

from serve_spec import LLM
from serve_spec.core.request import SamplingParams
from serve_spec.worker.lane_tiers import WIDE_BACKLOG
from serve_spec.worker.lane_worker import LaneWorker
from tests.helpers.engines import MakeLLM, switch_every_round

RNG = random.Random(5)
# Around the rows of a piece, and such that later ones arrive while others decode.
PROMPTS = [[RNG.randrange(256) for _ in range(n)] for n in (1, 2, 15, 16, 17, 18, 33, 47, 5, 30)]
PARAMS = [
    SamplingParams(max_tokens=12 + 7 * (i % 3), temperature=0.4 * (i % 3), seed=i, ignore_eos=True)
    for i in range(len(PROMPTS))
]
SIZES = {"max_num_seqs": 3, "max_model_len": 128}


def worker_of(llm: LLM) -> LaneWorker:
    worker: Any = llm.engine.worker
    assert isinstance(worker, LaneWorker)
    return worker


def without_the_host(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The same; a round of the eager worker is an error."""
    monkeypatch.setattr(worker_of(llm).eager, "submit", lambda plan: pytest.fail("eager round"))
    return llm


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NONE"])
def test_prompts_that_arrive_while_others_decode_need_no_eager_round(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    num_steps = 0 if algorithm == "NONE" else 3
    llm = make_llm(algorithm, num_steps, execution="lanes", **SIZES)
    if num_steps:
        switch_every_round(llm, (3, 0, 1, 2, 0, 0, 3))
    outputs = without_the_host(llm, monkeypatch).generate(PROMPTS, PARAMS)
    plain = make_llm(execution="eager", **SIZES).generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]


@pytest.mark.parametrize("max_rows", [8, 17, 40])
def test_prompts_longer_than_a_round_are_computed_in_pieces(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, max_rows: int
) -> None:
    """And so are the draft's entries of them."""
    monkeypatch.setattr("serve_spec.worker.lane_worker.MAX_PROMPT_ROWS", max_rows)
    llm = without_the_host(make_llm("EAGLE3", 3, execution="lanes", **SIZES), monkeypatch)
    outputs = llm.generate(PROMPTS, PARAMS)
    eager = make_llm("EAGLE3", 3, execution="eager", **SIZES).generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in eager]
    accepted, expected = (
        [output.speculation.accept_length for output in found] for found in (outputs, eager)
    )
    # Where few rows are left for drafts there are fewer of them, never worse ones.
    assert sum(accepted) <= sum(expected)
    assert sum(accepted) > 0.8 * sum(expected)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE"])
def test_drafts_after_a_prompt_are_kept_as_often_as_after_an_eager_one(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """The features and the tokens a draft conditions on are all there, of every prompt."""
    lanes = make_llm(algorithm, 3, execution="lanes", **SIZES)
    outputs = without_the_host(lanes, monkeypatch).generate(PROMPTS, PARAMS)
    eager = make_llm(algorithm, 3, execution="eager", **SIZES).generate(PROMPTS, PARAMS)
    kept = [output.speculation.num_correct_drafts for output in outputs]
    assert kept == [output.speculation.num_correct_drafts for output in eager]
    assert sum(kept) > 0


def test_newcomers_do_not_make_the_whole_batch_catch_up_wider(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of a prompt's entries is one, and those of the round under way."""
    num_steps = 3
    llm = make_llm("EAGLE3", num_steps, execution="lanes", **SIZES)
    extend_for, widths = worker_of(llm).recorded.extend_for, []

    def noted(backlog: int, batch_size: int) -> Any:
        widths.append(backlog)
        return extend_for(backlog, batch_size)

    monkeypatch.setattr(worker_of(llm).recorded, "extend_for", noted)
    long = [prompt for prompt in PROMPTS if len(prompt) > WIDE_BACKLOG]
    llm.generate(long, PARAMS[: len(long)])
    assert max(widths) <= num_steps + 2


def test_longer_prompts_are_computed_eagerly_and_mix_with_lanes(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_spec.worker.lane_worker.MAX_PROMPT_LENGTH", 24)
    llm = make_llm("EAGLE3", 3, execution="lanes", **SIZES)
    submit, lengths = worker_of(llm).eager.submit, []

    def counted(plan: Any) -> Any:
        lengths.extend(row.length for row in plan.rows if not row.is_decode)
        return submit(plan)

    monkeypatch.setattr(worker_of(llm).eager, "submit", counted)
    outputs = llm.generate(PROMPTS, PARAMS)
    plain = make_llm(execution="eager", **SIZES).generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert max(lengths) == max(map(len, PROMPTS))


@pytest.mark.parametrize("algorithm", ["NGRAM", "NONE"])
@pytest.mark.parametrize("num_left", [0, 1, 2])
def test_a_text_whose_last_token_alone_is_left_to_compute_goes_on_from_it(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, algorithm: str, num_left: int
) -> None:
    """A preempted text of a piece and so many tokens more; one is what decoding begins with."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    plain = make_llm(execution="eager", **SIZES).generate([PROMPTS[2]], params)[0]
    num_rows = 24 - num_left
    sizes = {**SIZES, "max_num_batched_tokens": num_rows}
    engine = make_llm(algorithm, 2, execution="lanes", **sizes).engine
    monkeypatch.setattr(engine, "_plan_ahead", lambda before: None)
    engine.add(seq := engine.new_sequence("a", PROMPTS[2], params))
    said: list[int] = []
    while engine.has_work:
        if len(seq) == 24 and not engine.scheduler.num_preemptions:
            engine.scheduler._preempt(seq)
        said += [token for delta in engine.step() for token in delta.token_ids]
    assert said == list(plain.token_ids)
    assert engine.scheduler.num_preemptions == 1
