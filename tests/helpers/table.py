"""What the golden and the conformance tables share: checkpoints, rows, and a loop over steps.

Engines are built from configuration keys and driven through public calls alone, so that the tables
hold for any implementation of a step. Keys in the environment reach every engine:
`SERVE_SPEC_MODEL__ASYNC_SCHEDULING=true`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from serve_spec import SamplingParams
from serve_spec.core.request import TokenLogprob
from serve_spec.core.stats import SpeculationStats
from serve_spec.engine.output import OutputProcessor
from tests.helpers import engines
from tests.helpers.checkpoints import (
    in_sixteen_bits,
    make_eagle,
    make_eagle3,
    make_target,
    make_tokenizer,
    read_checkpoint,
    write_checkpoint,
)
from tests.helpers.engines import Pair

NUM_STEPS = 3
TREE_TOKENS = 9
# Float32 logits of other machines and of reordered sums differ by less.
LOGPROB_TOLERANCE = 3e-4


# Checkpoints. All weights come from fixed seeds.


def make_checkpoints(root, family="qwen3", *, sixteen_bits=False):
    """Write a random target and a draft of every kind, each right about some tokens.

    sixteen_bits: round the weights of the target, so that its products have the same bits in any
    batch.
    """
    target = make_target(root / "target", family=family, layers=4, layer_scale=0.25)
    config, tensors = read_checkpoint(target)
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"] *= 2  # so that sampled texts repeat themselves, too
    write_checkpoint(target, config, tensors)
    heads = {
        "EAGLE3": make_eagle3(root / "eagle3", target, mimic=True),
        "EAGLE": make_eagle(root / "eagle", target, mimic=True),
        "STANDALONE": make_shallow(root / "standalone", target, num_layers=2),
        "MEDUSA": make_medusa(root / "medusa", target, num_heads=NUM_STEPS),
    }
    if sixteen_bits:
        in_sixteen_bits(target)
    return Pair(target, heads)


def make_shallow(directory, target, num_layers):
    """Write the first layers of the target as a model of its own."""
    config, tensors = read_checkpoint(target)
    removed = tuple(
        f"model.layers.{i}." for i in range(num_layers, int(config["num_hidden_layers"]))
    )
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(removed)}
    make_tokenizer(directory)
    return write_checkpoint(directory, {**config, "num_hidden_layers": num_layers}, kept)


def make_medusa(directory, target, num_heads):
    """Write heads that continue the chain of likeliest tokens of a target without layers."""
    tensors = read_checkpoint(target)[1]
    embedding = tensors["model.embed_tokens.weight"]
    head = tensors.get("lm_head.weight", embedding)
    vocab, hidden = embedding.shape
    keys = embedding / embedding.norm(dim=1, keepdim=True)
    following = (keys @ head.T).argmax(dim=1)
    heads = {}
    drafts = following
    for index in range(num_heads):
        drafts = following[drafts]
        output = torch.zeros(vocab, hidden).index_add_(0, drafts, keys)
        heads[f"blocks.{index}.layers.0.weight"] = torch.zeros(hidden, hidden)
        heads[f"blocks.{index}.layers.0.bias"] = torch.zeros(hidden)
        heads[f"lm_heads.{index}.weight"] = output
    return write_checkpoint(directory, {"model_type": "medusa", "num_heads": num_heads}, heads)


# Rows: drafters and shapes.


@dataclass(frozen=True)
class Row:
    """A drafter, and whether it drafts a chain or a tree."""

    algorithm: str
    is_tree: bool = False
    ngram_first: bool = False
    method: str = "coupled"

    @property
    def name(self):
        """Return the key of the row in the file."""
        parts = [self.algorithm.lower(), "tree" if self.is_tree else "chain"]
        parts += ["ngram-first"] if self.ngram_first else []
        parts += [self.method] if self.method != "coupled" else []
        return "none" if self.algorithm == "NONE" else "-".join(parts)

    @property
    def uses_ngrams(self):
        """Return whether drafts come from the text, all or some."""
        return self.ngram_first or self.algorithm == "NGRAM"

    @property
    def keeps_texts(self):
        """Return whether sampled texts are those of decoding without drafts."""
        return self.method == "coupled"

    @property
    def keys(self):
        """Return its configuration keys beside algorithm and depth."""
        keys = {"rejection_sample_method": self.method, "speculative_draft_sharpness": 1.0}
        if self.is_tree:
            keys |= {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": TREE_TOKENS}
        if self.uses_ngrams:
            keys["speculative_ngram_min_match_window_size"] = 1
        if self.ngram_first:
            keys["speculative_ngram_first"] = True
        return keys


PLAIN = Row("NONE")
DRAFT_MODELS = ("EAGLE3", "EAGLE", "MEDUSA", "STANDALONE")
DRAFTING_ROWS = [
    *(Row(name, is_tree) for name in (*DRAFT_MODELS, "NGRAM") for is_tree in (False, True)),
    *(Row("EAGLE3", is_tree, ngram_first=True) for is_tree in (False, True)),
]


def llm_maker(root, device="cpu", drafts=(), family="qwen3", *, sixteen_bits=False):
    """Return a function that builds an engine for a row, which checks itself after every step.

    drafts: (algorithm, folder) of drafts beside those of `make_checkpoints`. family, sixteen_bits:
    see there.
    """
    pair = make_checkpoints(root, family, sixteen_bits=sixteen_bits)
    pair.heads.update(drafts)
    return maker_of(pair, device)


def maker_of(pair, device):
    """Return `llm_maker`'s function for a pair."""
    make_llm = engines.llm_maker(pair, device)

    def make(row, **overrides):
        keys = {"num_pages": 256, "max_num_seqs": 16, "max_num_batched_tokens": 256, **row.keys}
        num_steps = 0 if row == PLAIN else NUM_STEPS
        return make_llm(row.algorithm, num_steps, **{"max_model_len": 64, **keys, **overrides})

    return make


# Requests.


@dataclass(frozen=True)
class Request:
    """A prompt and what is asked for, by a name."""

    key: str
    prompt: list[int]
    params: SamplingParams


@dataclass
class Answer:
    """What an engine returned for a request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def add(self, delta):
        """Append what one step returned."""
        self.token_ids += delta.token_ids
        self.text += delta.text
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.num_cached_tokens += delta.num_cached_tokens
        if delta.finish_reason is not None:
            assert delta.speculation is not None
            self.reason, self.stats = delta.finish_reason.value, delta.speculation


def nothing(llm, num_steps):
    """Do nothing before a step."""


def run(llm, requests, before_step=nothing, *, arrivals=lambda index: 0, answers=None, most=2000):
    """Return the answer to every request, by its key, as far as `most` steps bring it.

    arrivals: the step before which the request at an index arrives.
    answers: what another engine answered of each; this one goes on.
    """
    engine = llm.engine
    outputs = OutputProcessor(engine.tokenizer, engine.abort)
    waiting = [(arrivals(index), request) for index, request in enumerate(requests)]
    answers = answers or {request.key: Answer() for request in requests}
    num_steps = 0
    while (waiting or engine.has_work) and num_steps < most:
        for arrival, request in [*waiting]:
            if arrival <= num_steps:
                waiting.remove((arrival, request))
                emitted = tuple(answers[request.key].token_ids)
                seq = engine.new_sequence(request.key, request.prompt, request.params, emitted)
                engine.add(seq)
                outputs.add(seq)
        before_step(llm, num_steps)
        for delta in outputs.process(engine.step()):
            if delta.request_id in answers:
                answers[delta.request_id].add(delta)
        num_steps += 1
    assert num_steps < 2000, "the engine makes no progress"
    return answers


# Comparing.


def compact(scored, digits):
    """Return token, rank and rounded log-probabilities."""
    if scored is None:
        return None
    top = [part for token, logprob in scored.top for part in (token, round(logprob, digits))]
    return [scored.token_id, scored.rank, round(scored.logprob, digits), *top]


def as_texts(answers, digits=4):
    """Return what does not depend on speculation, ready for a file."""
    texts = {}
    for key, answer in answers.items():
        texts[key] = {"ids": answer.token_ids, "reason": answer.reason}
        for name in ("logprobs", "prompt_logprobs"):
            if (tokens := getattr(answer, name)) is not None:
                texts[key][name] = [compact(scored, digits) for scored in tokens]
    return texts


def compare(answers, texts, *, tolerance=LOGPROB_TOLERANCE, digits=4, ranks=0.0):
    """Assert that answers are those of `as_texts`.

    ranks: by which fraction a rank may differ, where tokens lie closer together than rounding.
    """
    for key, found in as_texts(answers, digits).items():
        wanted = texts[key]
        assert (key, found["ids"]) == (key, wanted["ids"])
        assert (key, found["reason"]) == (key, wanted["reason"])
        for name in ("logprobs", "prompt_logprobs"):
            assert (name in found) == (name in wanted), key
            pairs = zip(found.get(name, ()), wanted.get(name, ()), strict=True)
            for at, (one, other) in enumerate(pairs):
                expected = other and [
                    *(other[0], pytest.approx(other[1], rel=ranks, abs=0)),
                    *(pytest.approx(part, rel=0, abs=tolerance) for part in other[2:]),
                ]
                assert one == expected, f"{key}: {name} at {at}"
