"""The second half of an answer says what the first did not, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serve_spec.config import ServeSpecConfig
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import SamplingParams
from serve_spec.engine.loop import EngineLoop
from serve_spec.serving.continuation import continue_request
from serve_spec.serving.messages import GenerateRequest
from tests.helpers.checkpoints import EOS_ID, make_target

PROMPT = list(b"the prompt")


@pytest.fixture(scope="module")
def engine_loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLoop]:
    target = make_target(tmp_path_factory.mktemp("model"), "llama2", layer_scale=0.3)
    model = {"path": str(target), "device": "cpu", "dtype": "float32", "max_model_len": 64}
    loop = EngineLoop(ServeSpecConfig.load({"model": model, "cache": {"num_pages": 64}}))
    yield loop
    loop.shutdown()


@pytest.mark.parametrize(
    "edits",
    [
        {"frequency_penalty": 2.0, "presence_penalty": 2.0, "temperature": 0.0},
        {"logit_bias": {EOS_ID: 100.0}, "min_tokens": 13},
        {"allowed_token_ids": [97, 98], "stop": "ab", "min_tokens": 9},
        {"grammar": Grammar.regex("([a-z]+ ){3}é{9,}"), "ignore_eos": True},
    ],
    ids=lambda edits: next(iter(edits)),
)
@pytest.mark.parametrize("num_emitted", [1, 5])
async def test_what_another_replica_generated_counts_as_generated(
    engine_loop: EngineLoop, edits: dict[str, object], num_emitted: int
) -> None:
    params = SamplingParams(max_tokens=20, seed=4, **edits)
    stream = await engine_loop.submit(PROMPT, params, "whole")
    whole = [delta async for delta in stream]
    emitted = [token for delta in whole for token in delta.token_ids][:num_emitted]
    request = GenerateRequest("rest", "trace", PROMPT, params, tuple(emitted))
    rest = [delta async for delta in await continue_request(engine_loop, request)]
    tokens, later = ([t for d in deltas for t in d.token_ids] for deltas in (whole, rest))
    assert later == tokens[num_emitted:]
    assert rest[-1].finish_reason == whole[-1].finish_reason
    text = "".join(delta.text for delta in whole)
    assert text.endswith("".join(delta.text for delta in rest))
