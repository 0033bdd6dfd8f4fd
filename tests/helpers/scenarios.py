"""Random scenarios: an engine of any configuration, and requests that arrive and are aborted."""

import shutil
from dataclasses import dataclass
from typing import Any

import torch

from serve_spec.core.grammar import Grammar
from serve_spec.core.request import SamplingParams, SpeculativeOptions
from tests.helpers.checkpoints import EOS_ID, make_eagle3, read_checkpoint, write_checkpoint
from tests.helpers.engines import llm_maker, make_pair, recorded_plans
from tests.helpers.table import Request, as_texts, compare, run

MAX_MODEL_LEN = 80
HEADS = 4
BEGINNINGS = [[(7 * i + 31 * n) % 256 for i in range(36)] for n in range(3)]
SCHEMA = {"type": "array", "items": {"enum": [1, "é", None]}, "maxItems": 4}
GRAMMARS = [
    Grammar.regex("(ab?|b)*c"),
    Grammar.choice(["yes", "no", "not sure"]),
    Grammar.json_schema(SCHEMA),
]
TREES = [(1, 4), (2, 6), (3, 10), (4, 31)]


@dataclass(frozen=True)
class Arrival:
    """A request, the step it arrives before, and how many steps later it is aborted."""

    request: Request
    arrives: int
    leaves: int | None


@dataclass(frozen=True)
class Scenario:
    """How an engine is built, what is configured before its steps in turn, and who arrives."""

    pair: str
    algorithm: str
    keys: dict[str, Any]
    slot: dict[str, Any]
    depths: list[dict[str, Any]]
    arrivals: list[Arrival]


def any_scenario(rng):
    """Return a scenario drawn at random."""
    algorithm = rng.choice(["EAGLE3", "EAGLE", "STANDALONE", "MEDUSA", "NGRAM"])
    num_steps = HEADS if algorithm == "MEDUSA" else 7
    keys = {
        "num_pages": rng.choice([24, 28, 400]),
        "max_num_seqs": rng.randint(1, 6),
        "max_num_batched_tokens": rng.choice([20, 40, 90]),
        "prefix_caching": rng.random() < 0.7,
    }
    slot = {"candidate_steps": [*range(num_steps + 1)]}
    depths = [{"speculative_num_steps": steps} for steps in (0, 1, 2, 3, num_steps)]
    ngram_first = algorithm != "NGRAM" and rng.random() < 0.3
    if algorithm == "NGRAM" or ngram_first:
        keys["speculative_ngram_min_match_window_size"] = 1
        keys["speculative_ngram_first"] = ngram_first
    if rng.random() < 0.5:
        num_steps, tokens = TREES[-1]
        keys |= {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": tokens}
        slot["candidate_trees"] = TREES
        depths += [
            {"speculative_num_steps": steps, "speculative_num_draft_tokens": tokens}
            for steps, tokens in TREES
        ]
    keys["speculative_num_steps"] = num_steps
    depths = [{"speculative_adaptive": False, **depth} for depth in depths]
    for strategy in ("ema", "per_request"):  # the latter drafts to another depth for every request
        depths.append({"speculative_adaptive": True, "speculative_adaptive_strategy": strategy})
    turns = [rng.choice(depths) for _ in range(rng.randint(2, 9))]
    scenario = Scenario(
        pair=rng.choice(["usual", "usual", "other"]),
        algorithm=algorithm,
        keys=keys,
        slot=slot,
        depths=[*turns, rng.choice(depths[1:])],  # some drafts in every scenario
        arrivals=any_arrivals(rng),
    )
    keys["async_scheduling"] = rng.random() < 0.5
    return scenario


def any_arrivals(rng):
    """Return requests; in some scenarios none keeps steps from being planned ahead."""
    grammars = [None] * 5 + GRAMMARS if rng.random() < 0.4 else [None]
    scored = [None] * 7 + [0] if rng.random() < 0.3 else [None]

    def arrival(key):
        begin = rng.choice(BEGINNINGS)[: rng.randint(0, 36)]
        params = SamplingParams(
            max_tokens=rng.randint(5, 30),
            temperature=rng.choice([0.0, 0.6, 1.0]),
            top_k=rng.choice([0, 0, 12]),
            top_p=rng.choice([1.0, 1.0, 0.8]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            seed=rng.randrange(100),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.9]),
            presence_penalty=rng.choice([0.0, 0.0, -0.6]),
            logit_bias=rng.choice([{}, {}, {9: 4.0, EOS_ID: 3.0}]),
            allowed_token_ids=rng.choice([None, None, None, tuple(range(40, 130))]),
            bad_token_ids=rng.choice([(), (), tuple(range(0, 256, 5))]),
            bad_words=rng.choice([(), (), [(a, b) for a in range(0, 256, 9) for b in (a, 65, 80)]]),
            min_tokens=rng.choice([0, 0, 5]),
            stop_token_ids=rng.choice([(), (), (), tuple(range(0, 256, 17))]),
            stop=rng.choice([(), (), (), ("e", "AB", "~~"), tuple(map(chr, range(60, 90)))]),
            ignore_eos=rng.random() < 0.7,
            include_stop_str_in_output=rng.random() < 0.3,
            skip_special_tokens=rng.random() < 0.7,
            spaces_between_special_tokens=rng.random() < 0.7,
            priority=rng.choice([0, 0, -1, 3]),
            cache_salt=rng.choice([None, None, "salt"]),
            logprobs=rng.choice([None, None, 2]),
            prompt_logprobs=rng.choice(scored),
            grammar=rng.choice(grammars),
            speculative=SpeculativeOptions(
                enabled=rng.random() < 0.85, max_steps=rng.choice([None] * 5 + [0, 2])
            ),
        )
        prompt = [*begin, *(rng.randrange(256) for _ in range(rng.randint(1, 8)))]
        return Arrival(
            Request(key, prompt, params),
            arrives=rng.randint(0, 16),
            leaves=rng.randint(1, 12) if rng.random() < 0.2 else None,
        )

    return [arrival(str(number)) for number in range(rng.randint(4, 9))]


class Scenarios:
    """Engines that live, and plain ones to compare with."""

    def __init__(self, folder):
        """Write a usual pair, and one whose target has windows in some layers, biases and yarn.

        Its drafts do not know every token.
        """
        window = {"sliding_window": 9, "layer_types": ["sliding_attention"]}
        yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
        windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
        other = make_pair(folder / "other", family="qwen2", rope_scaling=yarn, **windows)
        other.heads["EAGLE3"] = make_eagle3(
            folder / "few", other.target, mimic=True, draft_vocab=200, **window
        )
        other.heads["STANDALONE"] = with_vocabulary(other, folder / "short", 250)
        pairs = {"usual": make_pair(folder / "usual"), "other": other}
        self._makers = {name: llm_maker(pair, "cpu") for name, pair in pairs.items()}
        sizes = {"max_model_len": MAX_MODEL_LEN, "prefix_caching": False}
        self._alone = {name: make(**sizes) for name, make in self._makers.items()}

    def check(self, scenario):
        """Assert that every request gets what it gets alone; return what the scenario met."""
        llm = self._makers[scenario.pair](
            scenario.algorithm,
            slots={"1": scenario.slot},
            max_model_len=MAX_MODEL_LEN,
            **scenario.keys,
        )
        plans, aborted = recorded_plans(llm), set[str]()

        def before_step(llm, num_steps):
            for one in scenario.arrivals:
                is_leaving = one.leaves is not None and one.arrives + one.leaves == num_steps
                if is_leaving and llm.engine.abort(one.request.key) is not None:
                    aborted.add(one.request.key)
            llm.engine.reconfigure(scenario.depths[num_steps % len(scenario.depths)])

        requests = [one.request for one in scenario.arrivals]
        answers = run(
            llm, requests, before_step, arrivals=lambda index: scenario.arrivals[index].arrives
        )
        for request in requests:
            found = answers[request.key]
            assert (not found.reason) == (request.key in aborted), "every request ends once"
            if found.reason:
                expected = run(self._alone[scenario.pair], [request])
                compare({request.key: found}, as_texts(expected, 6), tolerance=5e-5, digits=6)
                assert found.text == expected[request.key].text
        ahead = {"steps planned ahead"} if any(plan.follows for plan in plans) else set()
        return met(llm, scenario.keys["num_pages"]) | ahead


def met(llm, num_pages):
    """Return what happened to the requests of an engine, which has none left."""
    snapshot = llm.engine.snapshot()
    assert snapshot["kv"]["free_pages"] == num_pages
    assert snapshot["num_running"] == snapshot["num_waiting"] == 0
    assert snapshot["fallback"] is None
    counts = {
        "accepted drafts": snapshot["counters"]["correct_drafts"],
        "preemptions": snapshot["num_preemptions"],
        "prefix hits": snapshot["prefix_cache"]["hit_tokens"],
        "evictions": snapshot["prefix_cache"]["evicted_pages"],
        "trees": sum(n for name, n in snapshot["rounds_by_num_steps"].items() if "x" in name),
    }
    return {name for name, count in counts.items() if count}


def with_vocabulary(pair, directory, size):
    """Write the target with more rows for unused ids, or without its last ones."""
    config, tensors = read_checkpoint(pair.target)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            rows = tensors[name][:size]
            more = torch.ones(size - len(rows), rows.shape[1])
            tensors[name] = torch.cat([rows, more])
    write_checkpoint(directory, {**config, "vocab_size": size}, tensors)
    shutil.copy(pair.target / "tokenizer.json", directory)
    return directory
