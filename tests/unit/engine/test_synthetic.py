"""Forced acceptance in an engine: as long as asked, repeatable, and labelled wherever it shows."""

import json
import logging

import yaml

from serve_spec.core.request import SamplingParams, SpeculativeOptions
from serve_spec.engine import llm

PROMPTS = [[i, *range(20, 35)] for i in range(4)]


def params(seed=1, **more):
    return [
        SamplingParams(max_tokens=40, temperature=0, seed=seed + i, ignore_eos=True, **more)
        for i in range(len(PROMPTS))
    ]


def counts(outputs):
    return [output.speculation.as_dict() for output in outputs]


def test_the_same_seeds_give_the_same_rounds_in_any_batch(make_llm):
    llm = make_llm("EAGLE3", 3, synthetic_acceptance=[0.8, 0.6, 0.5])
    together = llm.generate(PROMPTS, params())
    again = make_llm("EAGLE3", 3, synthetic_acceptance=[0.8, 0.6, 0.5], max_num_seqs=2)
    apart = [again.generate([p], [s])[0] for p, s in zip(PROMPTS, params(), strict=True)]
    assert counts(together) == counts(apart)
    assert [o.token_ids for o in together] == [o.token_ids for o in apart]
    assert counts(together) != counts(llm.generate(PROMPTS, params(seed=50)))


def test_requests_that_do_not_draft_have_the_text_of_the_target(make_llm):
    plain = [o.token_ids for o in make_llm().generate(PROMPTS, params())]
    forced = make_llm("EAGLE3", 3, synthetic_acceptance=4)
    off = SpeculativeOptions(enabled=False)
    assert [o.token_ids for o in forced.generate(PROMPTS, params(speculative=off))] == plain
    assert [o.token_ids for o in forced.generate(PROMPTS, params())] != plain
    zero = make_llm("EAGLE3", 0, synthetic_acceptance=4)
    assert [o.token_ids for o in zero.generate(PROMPTS, params())] == plain
    mixed = [*params(speculative=off)[:2], *params()[2:]]
    assert [o.token_ids for o in forced.generate(PROMPTS, mixed)][:2] == plain[:2]


def test_everything_generated_under_forced_acceptance_is_labelled(make_llm, caplog):
    """Even a request that does not draft."""
    llm = make_llm("EAGLE3", 3, synthetic_acceptance=[0.5, 0.25])
    off = SpeculativeOptions(enabled=False)
    outputs = llm.generate(PROMPTS[:2], [params()[0], params(speculative=off)[0]])
    llm.engine.add(llm.engine.new_sequence("a", PROMPTS[0], params()[0]))
    llm.engine.step()
    aborted = llm.engine.abort("a")
    assert aborted is not None
    for speculation in (*(output.speculation for output in outputs), aborted.speculation):
        assert speculation is not None
        assert speculation.synthetic_acceptance
        assert speculation.as_dict()["synthetic_acceptance"] is True
    shown = llm.engine.snapshot()
    assert shown["synthetic_acceptance"] == [0.5, 0.25]
    assert json.loads(json.dumps(shown)) == shown
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len([text for text in warnings if "synthetic_acceptance=" in text]) == 1
    caplog.clear()
    real = make_llm("EAGLE3", 3)
    assert "synthetic_acceptance" not in caplog.text
    assert real.engine.snapshot()["synthetic_acceptance"] is None
    (output,) = real.generate(PROMPTS[:1], params()[:1])
    assert "synthetic_acceptance" not in output.speculation.as_dict()


def test_generate_warns_on_stderr_and_marks_every_accept_length(pair, tmp_path, capsys):
    file = tmp_path / "c.yaml"
    speculative = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(pair.heads["EAGLE3"]),
        "speculative_adaptive": False,
    }
    for forced in (2.5, None):
        settings = {
            "model": {"path": str(pair.target), "device": "cpu", "max_model_len": 128},
            "speculative": {**speculative, "synthetic_acceptance": forced},
            "cache": {"num_pages": 64},
        }
        file.write_text(yaml.safe_dump(settings))
        assert llm.main(["abc", "def", "--config", str(file), "--max-tokens", "20"]) == 0
        printed = capsys.readouterr()
        assert ("2.5: forced, the texts are not real" in printed.err) == (forced is not None)
        assert printed.out.count("(forced)]") == (2 if forced else 0)
