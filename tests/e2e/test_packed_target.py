"""The shipped pair with its target in four bits: real text, real drafts, float32."""

from pathlib import Path

import pytest

import serve_spec
from serve_spec import LLM
from serve_spec.bench.workload import held_out_prompts
from serve_spec.core.request import SamplingParams
from tests.helpers.engines import (
    checked,
    llm_maker,
    make_pair,
    sampled_requests,
    switch_every_round,
    texts,
)
from tests.helpers.packed import repack

TINY = Path(serve_spec.__file__).parent / "assets" / "tiny" / "target"


@pytest.mark.parametrize("name", ["awq", "gptq ordered", "compressed asymmetric"])
def test_texts_are_equal_with_speculation_and_without(tmp_path, name):
    stored, _ = repack(TINY, tmp_path, name)

    def answers(**overrides):
        llm = checked(
            LLM(
                "configs/tiny.yaml",
                device="cpu",
                dtype="float32",
                path=str(stored),
                max_model_len=96,
                speculative_adaptive=False,
                **overrides,
            )
        )
        if not overrides:
            switch_every_round(llm, (0, 7, 1, 3, 0, 0, 7))
        prompts = held_out_prompts(llm.engine.tokenizer.encode, count=4, num_tokens=40)
        params = [
            SamplingParams(max_tokens=24, temperature=(0.0, 0.8)[i % 2], seed=i, ignore_eos=True)
            for i in range(len(prompts))
        ]
        return llm.generate(prompts, params)

    plain = answers(speculative_algorithm="NONE", speculative_num_steps=0)
    drafted = answers()
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert sum(output.speculation.num_correct_drafts for output in drafted) > 0


def test_a_model_in_four_bits_drafts_for_itself(tmp_path):
    pair = make_pair(tmp_path, hidden=128)
    stored, _ = repack(pair.target, tmp_path / "repacked", "awq")
    make, requests = llm_maker(pair, "cpu"), sampled_requests()
    plain = texts(make(path=str(stored)).generate(*requests))
    drafted = {"path": str(stored), "speculative_draft_model_path": str(stored)}
    outputs = make("STANDALONE", 3, **drafted).generate(*requests)
    assert texts(outputs) == plain
    assert sum(output.speculation.num_correct_drafts for output in outputs) > 0
