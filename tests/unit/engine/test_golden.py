"""Compare token ids, log-probabilities and accepted drafts with values frozen in a file.

The table is every drafter in chains and in trees, times temperature and feature. Texts do not
depend on drafter and shape, so tests/data/golden.json holds one text per request. Two things depend
on the drafter, and are frozen for each: how many drafts were accepted, and the texts of sampled
requests whose drafts are verified by rejection sampling. `test_conformance.py` shows that neither
preemption, aborts, changes of depth nor prefix hits change a text.

The engines are driven through public calls and configuration keys alone. To run the table with
another configuration, set its keys in the environment, e.g.
`SERVE_SPEC_MODEL__ASYNC_SCHEDULING=true`. A difference is a bug of the code under test. To replace
the file when a change of results is meant: `python -m tests.unit.engine.test_golden --write`.

Engines that plan a round before the one before it has ended find n-gram drafts one round later, so
the file holds two counts for drafters that use those, and either is right.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from serve_spec import Grammar, SamplingParams
from tests.helpers.checkpoints import EOS_ID
from tests.helpers.table import (
    DRAFT_MODELS,
    DRAFTING_ROWS,
    NUM_STEPS,
    PLAIN,
    Request,
    Row,
    as_texts,
    compare,
    llm_maker,
    run,
)

GOLDEN = Path(__file__).parents[2] / "data" / "golden.json"
TEMPERATURES = (0.0, 0.8)
ROWS = [
    PLAIN,
    *DRAFTING_ROWS,
    # These verify chains only.
    *(Row(name, method=method) for name in DRAFT_MODELS for method in ("standard", "block")),
]


# Requests: two of each feature and temperature.

FEATURES = {
    "plain": [{}, {"top_k": 40, "top_p": 0.95, "min_p": 0.001}],
    "edits": [
        {
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.6,
            "presence_penalty": 0.3,
            "logit_bias": {7: 2.0, 100: -100.0, 200: 1.5},
        },
        {
            "allowed_token_ids": [*range(0, 180), EOS_ID],
            "bad_token_ids": [*range(0, 180, 5)],
            "logit_bias": {EOS_ID: 9.0},
            "min_tokens": 12,
            "repetition_penalty": 1.1,
            "ignore_eos": False,
        },
    ],
    "grammar": [
        {"grammar": Grammar.regex("(ab?|b){9,}c")},
        {
            "grammar": Grammar.json_schema(
                {
                    "type": "object",
                    "properties": {
                        "a": {"type": "string", "maxLength": 8},
                        "b": {"type": "array", "items": {"enum": [1, None]}, "maxItems": 3},
                    },
                    "required": ["a", "b"],
                    "additionalProperties": False,
                }
            ),
            "repetition_penalty": 1.2,
        },
    ],
    "logprobs": [{"logprobs": 2}, {"logprobs": 0, "top_k": 20, "frequency_penalty": 0.4}],
    "prompt_logprobs": [{"logprobs": 1, "prompt_logprobs": 1}, {"prompt_logprobs": 0}],
}
# Features that run in one batch. Grammars and the log-probabilities of prompts run by themselves:
# in one batch with others they decide how its rounds are launched.
BATCHES = (("plain", "edits", "logprobs"), ("grammar",), ("prompt_logprobs",))
MAX_TOKENS = 28
# Of requests whose drafts are verified by rejection sampling the last tokens are not compared:
# there the text depends on how deep the last rounds draft.
NUM_REJECTION_TOKENS = MAX_TOKENS - 2 * NUM_STEPS - 2


def requests(batch):
    """Return the requests of some features, with prompts that repeat themselves or do not."""
    return [
        Request(
            f"{feature} T={temperature} #{index}",
            prompt(5 + 3 * [*FEATURES].index(feature), index),
            SamplingParams(
                **{
                    "max_tokens": MAX_TOKENS,
                    "temperature": temperature,
                    "seed": 70 + index,
                    "ignore_eos": True,
                    **FEATURES[feature][index],
                }
            ),
        )
        for feature in batch
        for temperature in TEMPERATURES
        for index in range(2)
    ]


def prompt(base, index):
    """Return token ids that repeat themselves in two ways, or that do not."""
    if index == 0:
        return [base, 7, 9, base, 7, 11] * 2 + [base, 7]
    return [(base + 37 * i * i + 11 * i) % 256 for i in range(17)]


def answers_of(make, row, **keys):
    """Run every batch by itself, without a prefix cache."""
    llm = make(row, prefix_caching=False, **keys)
    answers = {}
    for batch in BATCHES:
        answers |= run(llm, requests(batch))
    return answers


# The file.


def golden_counts(answers):
    """Return rounds and accepted drafts of every request."""
    return {key: [a.stats.num_rounds, a.stats.num_correct_drafts] for key, a in answers.items()}


def rejection_texts(answers):
    """Return the beginnings of the sampled texts of a row that verifies by rejection sampling."""
    return {
        key: answer.token_ids[:NUM_REJECTION_TOKENS]
        for key, answer in answers.items()
        if f"T={TEMPERATURES[0]}" not in key
    }


def write_golden(make):
    """Write the file, a line for each key."""
    golden = {"texts": as_texts(answers_of(make, PLAIN))}
    golden |= {"counts": {}, "counts_ahead": {}, "rejection": {}}
    for row in ROWS[1:]:
        answers = answers_of(make, row)
        if row.keeps_texts:
            golden["counts"][row.name] = golden_counts(answers)
        else:
            golden["rejection"][row.name] = rejection_texts(answers)
        if row.uses_ngrams:
            ahead = answers_of(make, row, async_scheduling=True)
            golden["counts_ahead"][row.name] = golden_counts(ahead)
    lines = []
    for name, part in golden.items():
        rows = [f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in part.items()]
        lines.append(f"{json.dumps(name)}:{{\n" + ",\n".join(rows) + "}")
    GOLDEN.write_text("{" + ",\n".join(lines) + "}\n")


# The tests.


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    return llm_maker(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_results_are_the_frozen_ones(make, golden, row):
    answers = answers_of(make, row)
    assert set(answers) == set(golden["texts"])
    if row.keeps_texts:
        compare(answers, golden["texts"])
    else:
        compare({key: a for key, a in answers.items() if "T=0.0" in key}, golden["texts"])
        assert rejection_texts(answers) == golden["rejection"][row.name]
    if row.name in golden["counts"]:
        counts = golden_counts(answers)
        if counts != golden["counts_ahead"].get(row.name):
            assert counts == golden["counts"][row.name]


def test_the_frozen_drafts_are_accepted_and_rejected(golden):
    """The counts can fall only if drafts are accepted, and texts matter only if some are not."""
    assert set(golden["counts"]) == {r.name for r in ROWS[1:] if r.keeps_texts}
    assert set(golden["rejection"]) == {r.name for r in ROWS if not r.keeps_texts}
    for name, counts in golden["counts"].items():
        for temperature in TEMPERATURES:
            of_temperature = [c for key, c in counts.items() if f"T={temperature}" in key]
            rounds, accepted = (sum(column) for column in zip(*of_temperature, strict=True))
            assert 0 < accepted < NUM_STEPS * rounds, f"{name} at T={temperature}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.unit.engine.test_golden --write")
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        write_golden(llm_maker(Path(folder)))
