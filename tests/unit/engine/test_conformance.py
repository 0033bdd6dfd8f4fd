"""Assert that speculation changes nothing that a request asks for, whatever happens meanwhile.

The table is every drafter times event, in chains and in trees by turns. In every cell the requests
of all features run together, and each must get what plain decoding gives it alone: text, finish
reason and log-probabilities. `tests/fuzz` draws scenarios at random.

The engines are driven through public calls and configuration keys alone. To run the table with
another configuration, set its keys in the environment:
`SERVE_SPEC_MODEL__ASYNC_SCHEDULING=true`.
"""

import random
from dataclasses import fields, replace

import pytest

from serve_spec import Grammar, SamplingParams
from serve_spec.adaptive import StepPolicy
from serve_spec.core.draft import DraftShape
from serve_spec.core.request import SpeculativeOptions
from serve_spec.core.round import AS_DRAWN, RoundSteps
from serve_spec.layers.formats import fp16, grouped_int4, scaled
from serve_spec.layers.formats.grouped_int4 import PackedInt4
from serve_spec.layers.formats.scaled import ResidentWeight
from tests.helpers import packed
from tests.helpers import quantized as quantized_checkpoints
from tests.helpers.checkpoints import EOS_ID, VOCAB
from tests.helpers.engines import recorded_plans, recorded_rounds, recorded_steps
from tests.helpers.gguf import write_gguf
from tests.helpers.grammars import PARENTHESES, check_text
from tests.helpers.table import (
    DRAFTING_ROWS,
    NUM_STEPS,
    PLAIN,
    TREE_TOKENS,
    Request,
    Row,
    as_texts,
    compare,
    llm_maker,
    make_checkpoints,
    make_shallow,
    maker_of,
    run,
)

MAX_MODEL_LEN = 96
FP8_CACHE = {"kv_cache_dtype": "fp8"}
TOLERANCE = 5e-5
"""Of log-probabilities."""
BASE = {"max_tokens": 24, "temperature": 0.8, "ignore_eos": True}
HOT = {"temperature": 1.5}
SHOWN = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
ABC = {"allowed_token_ids": [*b"abc"], "temperature": 4.0}
PERSON = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 6},
        "b": {"type": "array", "items": {"enum": [1, "é", None]}, "maxItems": 3},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORM = {
    "type": "object",
    "properties": {"first": {"enum": [1, 20, 3]}, "second": {"const": "x"}},
    "required": ["first", "second"],
    "additionalProperties": False,
}
# They decide how a request is served and its tokens are written, not which tokens are drawn.
OF_PYTHON = {"n", "structured_outputs", "truncate_prompt_tokens", "detokenize", "output_kind"}
"""Parameters that are read before or behind the engine: tests/unit/engine/test_llm.py."""
SAME_TOKENS = {
    "speculative", "priority", "cache_salt", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens",
}  # fmt: skip
# Every sampling parameter is in some request.
FEATURES = {
    "plain": [
        {"max_tokens": 31},
        {"temperature": 0.0, "priority": 1},
        {"top_k": 2, "cache_salt": "a", **HOT},
        {"top_p": 0.3, **HOT},
        {"min_p": 0.4, "seed": 3, **HOT},
    ],
    "edits": [
        {"frequency_penalty": 1.8},
        {"presence_penalty": 1.8, "temperature": 0.0},
        {"repetition_penalty": 1.5, "presence_penalty": -0.5},
        {"logit_bias": {9: 4.0, 50: 5.0, 100: -100.0}},
        {"allowed_token_ids": [*range(40, 90)], "frequency_penalty": 0.3},
        {"bad_token_ids": [*range(0, VOCAB, 3)], "temperature": 0.0},
        {"min_tokens": 9, "logit_bias": {EOS_ID: 100.0}, "ignore_eos": False},
    ],
    "words": [
        {"bad_words": ["ab", "ca", [99, 99], "b"], **ABC},
        {"bad_words": ["ac", "bb"], "logprobs": 2, "min_tokens": 9, "stop": "cc", **ABC},
        {"bad_words": ["abc"], "grammar": Grammar.regex("(a|b|c){20}")},
    ],
    "grammar": [
        {"grammar": Grammar.regex("(ab?|b){6,}c"), "temperature": 0.0},
        {"grammar": Grammar.json_schema(PERSON), "repetition_penalty": 1.3, "logprobs": 1},
        {"grammar": Grammar.choice(["yes", "no", "not sure"]), **HOT},
        {"grammar": Grammar.regex("[a-z]{9,}"), "bad_token_ids": [*b"aeiou"], "min_tokens": 12},
        {"grammar": Grammar.regex("(ab?|b)*c"), "stop": "bb"},
        {"grammar": Grammar.ebnf(PARENTHESES), "frequency_penalty": 0.4, "min_tokens": 8},
        {"grammar": Grammar.json_object(), "bad_token_ids": [*b"abcdef"], "logprobs": 2},
    ],
    "logprobs": [
        {"logprobs": 3},
        {"logprobs": 0, "top_k": 20, "temperature": 0.0},
        {"logprobs": 1, "frequency_penalty": 0.4, "stop_token_ids": [*range(0, VOCAB, 17)]},
    ],
    "prompt_logprobs": [{"prompt_logprobs": 2, "logprobs": 1}, {"prompt_logprobs": 0}],
    "stops": [
        {"stop": ["bca", "cc"], "allowed_token_ids": [*b"abc"], "temperature": 4.0},
        {"stop": [chr(c) for c in range(60, 90)], "min_tokens": 3},
        {"stop_token_ids": [*range(0, VOCAB, 7)], "min_tokens": 4},
        {"stop": "b", "include_stop_str_in_output": True, **SHOWN, **ABC},
        {"stop_token_ids": [*range(0, VOCAB, 9)], "temperature": 0.0},
        {"ignore_eos": False, "logit_bias": {EOS_ID: 9.0}},
    ],
    "caps": [
        {"speculative": SpeculativeOptions(enabled=False)},
        {"speculative": SpeculativeOptions(max_steps=1), "temperature": 0.0},
        {"speculative": SpeculativeOptions(max_steps=2)},
    ],
    "forced": [
        {"grammar": Grammar.json_schema(FORM), "temperature": 0.0},
        {"grammar": Grammar.json_schema(FORM), "logprobs": 1, "frequency_penalty": 0.4},
        {"grammar": Grammar.regex("(a|b)second(c|d) third[xyz]{9}"), "stop": "con", **HOT},
        {"grammar": Grammar.regex("(é|e)second(c|d) third{5}[xyz]{9}"), "stop_token_ids": [114]},
        {"grammar": Grammar.regex("([ -~]ab[ -~]c)*"), "temperature": 0.4},
        {"grammar": Grammar.json_schema(FORM), "speculative": SpeculativeOptions(max_steps=1)},
        {"grammar": Grammar.json_schema(FORM), "speculative": SpeculativeOptions(enabled=False)},
    ],
}
# The others decide how the rounds of all requests beside them are launched.
TOGETHER = ("plain", "edits", "logprobs", "stops", "caps")
ALL = tuple(FEATURES)


def requests(features=ALL):
    """Return the requests of some features."""
    return [
        Request(
            f"{feature} #{index}",
            prompt(index + 5 * [*FEATURES].index(feature)),
            SamplingParams(**{**BASE, "seed": 40 + index, **keys}),
        )
        for feature in features
        for index, keys in enumerate(FEATURES[feature])
    ]


def prompt(number):
    """Return token ids: of texts that repeat themselves, and of texts that do not."""
    if number % 2:
        return ([5 + number, 7, 9, 5 + number, 7, 11] * 3)[: 20 - number % 3]
    length = (1, 2, 15, 33, 47)[number // 2 % 5]
    return [(number + 37 * i * i + 11 * i) % 256 for i in range(length)]


# Events.


def without_event(make, row):
    """Run on a fresh engine, without a prefix cache."""
    llm = make(row, prefix_caching=False)
    return run(llm, requests())


def with_preemption(make, row):
    """Run with a pool that holds few requests."""
    llm = make(row, num_pages=36, max_num_batched_tokens=64)
    answers = run(llm, requests())
    assert llm.engine.snapshot()["num_preemptions"] > 0, "the pool is too large to preempt"
    return answers


def with_aborts(make, row):
    """Run beside requests that arrive and are aborted between steps."""
    llm = make(row)
    arrivals, aborts = {0: "a", 1: "b", 4: "c"}, {1: "a", 5: "b", 6: "c"}
    longest = {"max_tokens": 48, "ignore_eos": True, "seed": 1}
    asks = [{}, {"grammar": Grammar.regex("[ab]*")}, {"prompt_logprobs": 1}]

    def arrive_or_abort(llm, num_steps):
        if num_steps in arrivals:
            params = SamplingParams(**longest, **asks[len(arrivals) - 1 - num_steps // 2])
            name = arrivals[num_steps]
            llm.engine.add(llm.engine.new_sequence(name, prompt(1 + 2 * num_steps), params))
        if num_steps in aborts:
            delta = llm.engine.abort(aborts[num_steps])
            assert delta is not None, "the request must not have ended when it is aborted"
            assert delta.finish_reason == "abort"

    return run(llm, requests(), arrive_or_abort)


def with_depth_switches(make, row):
    """Run with another speculation depth, tree or strategy every step or every other."""
    llm, depths = adaptive(make, row)
    strategies = set()

    def switch(llm, num_steps):
        strategies.add(llm.engine.snapshot()["strategy"])
        if num_steps % 5 < 3:
            llm.engine.reconfigure(depths[(3 * (num_steps // 5) + num_steps % 5) % len(depths)])

    answers = run(llm, requests(), switch)
    used = {depth for a in answers.values() for depth in a.stats.rounds_by_num_steps}
    assert used == set(range(NUM_STEPS + 1))
    assert strategies == {"static", "ema", "per_request", f"{__name__}:{OwnPolicy.__name__}"}
    assert llm.engine.snapshot()["fallback"] is None
    return answers


class OwnPolicy(StepPolicy):
    """A policy of this file: another depth for every request and round."""

    def __init__(self, context):
        self.shapes = tuple(DraftShape.chain(k) for k in range(context.max_steps + 1))
        self.num_rounds = 0

    def choose(self, batch):
        self.num_rounds += 1
        steps = [(self.num_rounds + i) % len(self.shapes) for i in range(batch.size)]
        return RoundSteps(self.shapes[max(steps)], steps)

    def snapshot(self):
        return {"num_rounds": self.num_rounds}


def adaptive(make, row):
    """Return an engine that has every depth, and what to configure to choose each."""
    slot = {"candidate_steps": [*range(NUM_STEPS + 1)]}
    depths = [{"speculative_num_steps": n} for n in (1, 3, 0, 2, 3)]
    if row.is_tree:
        slot["candidate_trees"] = [(NUM_STEPS, TREE_TOKENS), (2, 5), (1, 3)]
        depths += [
            {"speculative_num_steps": steps, "speculative_num_draft_tokens": tokens}
            for steps, tokens in slot["candidate_trees"]
        ]
    depths = [{"speculative_adaptive": False, **depth} for depth in depths]
    for strategy in ("ema", "per_request", f"{__name__}:{OwnPolicy.__name__}"):
        adapts = {"speculative_adaptive": True, "speculative_adaptive_strategy": strategy}
        depths.insert(3, adapts)
    return make(row, slots={"1": slot}), depths


def with_budgets(make, row):
    """Run with another budget of verified drafts every step, and random probabilities."""
    llm = make(row)
    rng = random.Random(row.name)
    choose_steps = llm.engine.controller.choose_steps

    def choose(batch):
        steps = choose_steps(batch)
        kinds = [
            tuple((rng.uniform(-1, 2), rng.gauss(0, 2)) for _ in range(rng.randint(1, 4)))
            for _ in AS_DRAWN
        ]
        most = batch.size * steps.shape.size
        budget = rng.choice([None, 0, 1, rng.randint(0, most), most])
        return replace(steps, budget=budget, calibration=tuple(kinds))

    llm.engine.controller.choose_steps = choose
    plans = recorded_plans(llm)
    records = recorded_steps(llm)
    # The masks of trees are laid out by the host: a step with a grammar verifies all drafts.
    run(llm, requests(TOGETHER))
    assert {plan.budget for plan in plans} >= {0, 1, None}
    answers = run(llm, requests())
    for record in records:
        if record.budget is not None:
            assert record.num_draft_tokens + record.num_stale_drafts <= record.budget
            assert sum(record.drafted_per_req) >= sum(record.steps_per_req) or row.is_tree
    return answers


def with_prefix_hits(make, row):
    """Run twice on one engine, in two orders, and return the second answers."""
    llm = make(row, num_pages=1024)
    run(llm, requests())
    answers = run(llm, requests()[::-1])
    for request in requests():
        # The log-probabilities of a prompt need all of it to be computed.
        is_known = len(request.prompt) > 4 and request.params.prompt_logprobs is None
        assert (answers[request.key].num_cached_tokens > 0) == is_known
    return answers


def with_chunks(make, row):
    """Run in a small batch, with prompts that take several steps, one arrival a step."""
    llm = make(row, max_num_seqs=5, max_num_batched_tokens=19)
    return run(llm, requests(), arrivals=lambda index: index)


def with_late_arrivals(make, row):
    """Run with requests that arrive while others are at any place of their texts.

    Rounds are planned while another runs, and pages are scarce.
    """
    llm = make(row, max_num_batched_tokens=48, num_pages=48, async_scheduling=True)
    plans = recorded_plans(llm)
    answers = run(llm, requests(TOGETHER), arrivals=lambda index: 2 * index)
    ahead = [plan for plan in plans if plan.follows]
    mixed = [plan for plan in ahead if not all(req.is_decode for req in plan.requests)]
    drafting = [plan for plan in mixed if any(req.num_steps for req in plan.requests)]
    assert row.algorithm in ("NONE", "NGRAM") or drafting, "no step drafts beside a prompt"
    assert ahead
    return answers


def with_resumption(make, row):
    """Run what is left on another engine after a few steps, as if the first had failed."""
    first, second = (make(row, max_num_seqs=40, num_pages=512) for _ in range(2))
    answers = run(first, requests(), most=7)
    left = [request for request in requests() if not answers[request.key].reason]
    return run(second, left, answers=answers)


EVENTS = {
    "none": without_event,
    "preemption": with_preemption,
    "abort": with_aborts,
    "depth": with_depth_switches,
    "budget": with_budgets,
    "prefix": with_prefix_hits,
    "chunks": with_chunks,
    "late": with_late_arrivals,
    "resumption": with_resumption,
}


# The tests.


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    return table_maker(tmp_path_factory, "cpu")


def table_maker(factory, device, drafts=(), family="qwen3", **settings):
    """Return a function that builds the engines of the table.

    drafts, family: see `llm_maker`. settings: keys of all engines.
    """
    is_fp8 = settings == FP8_CACHE
    root = factory.mktemp("conformance")
    make = llm_maker(root, device, drafts, family, sixteen_bits=is_fp8)
    return lambda row, **keys: make(row, **{"max_model_len": MAX_MODEL_LEN, **settings, **keys})


@pytest.fixture(scope="module")
def alone(make):
    """Return what plain decoding gives every request by itself."""
    return decode_alone(make)


def decode_alone(make):
    """Decode every request without drafts, beside no other."""
    llm = make(PLAIN, max_num_seqs=1, prefix_caching=False)
    answers = {}
    for request in requests():
        answers |= run(llm, [request])
    return answers


def cells(events, *, is_full=True):
    """Return rows with events; unless full, drafters take turns in chains and trees."""
    drafters = list(dict.fromkeys((row.algorithm, row.ngram_first) for row in DRAFTING_ROWS))

    def is_in(row, at):
        if row == PLAIN:
            return events[at] not in ("depth", "budget")  # it has one depth
        drafter = row.algorithm, row.ngram_first
        is_turn = (drafters.index(drafter) + at) % 2 == row.is_tree and events[at] != "none"
        return is_full or is_turn

    events = list(events)
    return [
        pytest.param(row, event, id=f"{row.name}-{event}")
        for row in (PLAIN, *DRAFTING_ROWS)
        for at, event in enumerate(events)
        if is_in(row, at)
    ]


@pytest.mark.parametrize(("row", "event"), cells(EVENTS, is_full=False))
def test_answers_are_those_of_plain_decoding_alone(make, alone, row, event):
    answers = EVENTS[event](make, row)
    check(answers, alone, row, event)


AROUND = [
    *(
        Row(name, is_tree)
        for name in ("EAGLE3", "STANDALONE", "NGRAM")
        for is_tree in (False, True)
    ),
    Row("EAGLE3", ngram_first=True),
]


@pytest.mark.parametrize("row", AROUND, ids=lambda row: row.name)
def test_drafts_stand_behind_grammar_drafts_and_grammar_drafts_behind_a_models(make, alone, row):
    llm = make(row)
    records = recorded_steps(llm)
    rounds = recorded_rounds(llm)
    answers = run(llm, requests(("plain", "forced")))
    compare(answers, as_texts({key: alone[key] for key in answers}, digits=6), tolerance=5e-5)
    behind = [req for req, _ in rounds if req.num_grammar_drafts and req.guessed_steps > 0]
    assert behind, "no drafts stand behind grammar drafts"
    assert all(req.num_grammar_drafts <= req.num_steps for req, _ in rounds)
    runs = [len(record.grammar_drafts) for record in records]
    firsts = [sum(map(bool, record.first_per_req)) for record in records]
    by_model = row.algorithm != "NGRAM" and not row.is_tree
    assert any(n > m for n, m in zip(runs, firsts, strict=True)) or not by_model


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_draft_that_is_the_target_is_right_behind_grammar_drafts(tmp_path, is_tree):
    """What it drafts without a grammar is drawn, if the grammar allows it."""
    target = make_checkpoints(tmp_path / "pair").target
    same = make_shallow(tmp_path / "same", target, num_layers=4)
    llm = llm_maker(tmp_path, drafts={"STANDALONE": same})(Row("STANDALONE", is_tree))
    records = recorded_steps(llm)
    grammar = Grammar.regex("([ -~]{2}a)*")
    params = [{**BASE, "seed": seed, "grammar": grammar} for seed in range(12)]
    run(
        llm,
        [
            Request(str(n), prompt(2 * n + 1), SamplingParams(**keys))
            for n, keys in enumerate(params)
        ],
    )
    drafts = [
        (steps, correct)
        for r in records
        if r.first_per_req
        for first, steps, correct in zip(
            r.first_per_req, r.steps_per_req, r.correct_per_req, strict=True
        )
        if first and steps
    ]
    assert sum(correct for _, correct in drafts) > 5
    assert is_tree or all(steps == correct for steps, correct in drafts)


# Mixtures of experts, decoders of transformers, and caches in FP8.
OTHERS = [
    ("gemma2", {}, Row("NGRAM"), "prefix"),
    ("olmo2", {}, Row("EAGLE3"), "chunks"),
    ("phi3", {}, Row("NGRAM"), "late"),
    ("qwen3_moe", {}, Row("NGRAM"), "none"),
    ("qwen3_moe", {}, Row("EAGLE3"), "late"),
    ("gpt_oss", {}, Row("EAGLE3"), "chunks"),
    ("glm4_moe", {}, Row("STANDALONE"), "resumption"),
    ("mixtral", {}, Row("NGRAM"), "preemption"),
    ("minimax_m2", {}, Row("EAGLE3"), "prefix"),
    ("gpt_oss", FP8_CACHE, Row("STANDALONE"), "preemption"),
    ("qwen3", FP8_CACHE, PLAIN, "late"),
    ("qwen3", FP8_CACHE, Row("EAGLE3", is_tree=True), "chunks"),
    ("qwen3", FP8_CACHE, Row("EAGLE"), "prefix"),
    ("qwen3", FP8_CACHE, Row("NGRAM", is_tree=True), "resumption"),
]


@pytest.mark.parametrize(("family", "keys", "row", "event"), OTHERS)
def test_other_models_and_caches_answer_as_plain_decoding_alone(
    tmp_path_factory, monkeypatch, family, keys, row, event
):
    """With a cache in FP8 bit for bit, else keys would be rounded to other numbers."""
    make = table_maker(tmp_path_factory, "cpu", family=family, **keys)
    tolerance = 0.0 if keys == FP8_CACHE else TOLERANCE
    if keys == FP8_CACHE:  # products as of larger matrices
        monkeypatch.setattr(fp16, "_MIN_ELEMENTS", 1)
    check(EVENTS[event](make, row), decode_alone(make), row, event, tolerance=tolerance)


@pytest.fixture(scope="module", params=["fp8 blocks", "awq", "Q4_1"])
def quantized(request, tmp_path_factory):
    """Return the engines of a quantized target, whose weights stay so as on a GPU, and `alone`."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("quantized")
        patch.setenv("SERVE_SPEC_CACHE", str(root / "cache"))
        patch.setattr(scaled, "fits_kernel", lambda *_: True)
        patch.setattr(grouped_int4, "stays_packed", lambda *_: True)
        make = quantized_maker(root, request.param)
        layers = make(PLAIN).engine.worker.target.model.layers
        assert all(isinstance(each.mlp.down.format, PackedInt4 | ResidentWeight) for each in layers)
        yield make, decode_alone(make)


def quantized_maker(root, name, device="cpu"):
    """Return `table_maker`'s function for a target in a format, or a type of GGUF."""
    pair = make_checkpoints(root)
    if name in quantized_checkpoints.FORMATS:
        target, _ = quantized_checkpoints.repack(pair.target, root, name)
    elif name in packed.FORMATS:
        target, _ = packed.repack(pair.target, root, name)
    else:
        target = write_gguf(root / "target.gguf", pair.target, name)
    make = maker_of(replace(pair, target=target), device)
    return lambda row, **keys: make(row, **{"max_model_len": MAX_MODEL_LEN, **keys})


@pytest.mark.parametrize(
    ("row", "event"),
    [
        (Row("EAGLE3"), "chunks"),
        (Row("EAGLE3", is_tree=True), "preemption"),
        (Row("NGRAM"), "prefix"),
    ],
)
def test_quantized_targets_answer_as_plain_decoding_alone(quantized, row, event):
    make, alone = quantized
    check(EVENTS[event](make, row), alone, row, event)


def check(answers, alone, row, event, *, tolerance=TOLERANCE, tree_tokens=TREE_TOKENS, ranks=0.0):
    """Assert that answers are the expected ones, and that their counts are consistent."""
    assert event == "late" or set(answers) == set(alone)
    compare(answers, as_texts(alone, digits=6), tolerance=tolerance, digits=6, ranks=ranks)
    caps = {request.key: request.params.speculative for request in requests()}
    for key, answer in answers.items():
        if event != "resumption":  # each engine shows its part of the text
            assert (key, answer.text) == (key, alone[key].text)
        stats, options = answer.stats, caps[key]
        cap = min(NUM_STEPS if options.max_steps is None else options.max_steps, NUM_STEPS)
        cap = cap if options.enabled and row != PLAIN else 0
        depths = stats.rounds_by_num_steps
        most = sum(steps * count for steps, count in depths.items())
        assert max(depths, default=0) <= cap, key
        assert sum(depths.values()) == stats.num_rounds
        assert 0 <= stats.num_correct_drafts <= most <= stats.num_draft_tokens
        assert row.is_tree or most == stats.num_draft_tokens, key
        most = (tree_tokens - 1 if row.is_tree else cap) * stats.num_rounds
        assert stats.num_draft_tokens <= most
        assert options.enabled or not stats.num_grammar_tokens, key
    by_grammar = sum(answer.stats.num_grammar_tokens for answer in answers.values())
    assert by_grammar > 0 or event == "late", "forced text was not drafted"
    kept = sum(answer.stats.num_correct_drafts for answer in answers.values())
    drafted = sum(answer.stats.num_draft_tokens for answer in answers.values())
    assert row == PLAIN or 0 < kept < drafted, "the test needs kept and rejected drafts"


def test_every_parameter_is_in_the_table_and_changes_an_answer(make, alone):
    names = {field.name for field in fields(SamplingParams)} - OF_PYTHON
    plain = SamplingParams(**BASE, seed=99)
    by_name = {name: [] for name in names}
    for request in requests():
        feature, index = request.key.split(" #")
        for name in {*FEATURES[feature][int(index)], "seed"}:
            params = replace(request.params, **{name: getattr(plain, name)})
            by_name[name].append(replace(request, key=request.key, params=params))
    assert all(by_name.values()), "a parameter is in no request"
    llm = make(PLAIN)
    texts = as_texts(alone)
    unchanged = set()
    for name, changed in by_name.items():
        without = as_texts(run(llm, changed))
        if all(without[request.key] == texts[request.key] for request in changed):
            unchanged.add(name)
    assert unchanged == SAME_TOKENS


def test_the_table_has_texts_that_end_in_every_way(alone):
    stopped = {key for key, answer in alone.items() if answer.reason == "stop"}
    assert {key for key in alone if key.startswith("stops")} <= stopped
    assert len([key for key in stopped if key.startswith("grammar")]) >= 2
    assert len(stopped) < len(alone) / 2


def test_texts_by_a_grammar_are_of_it(alone):
    for request in requests(("grammar",)):
        answer, grammar = alone[request.key], request.params.grammar
        assert grammar is not None
        check_text(answer.token_ids, grammar)
        bad = request.params.bad_token_ids
        assert "[a-z]" not in grammar.text or not {*answer.token_ids} & {*bad}
