"""Prompts of any length begin beside texts that decode, and cost their rounds little."""

import pytest

from serve_spec.core.request import SamplingParams


def test_newcomers_do_not_make_the_whole_batch_catch_up_wider(make_llm, monkeypatch):
    """What is left of a prompt's entries is one, and those of the round under way."""
    num_steps = 3
    llm = make_llm("EAGLE3", num_steps, async_scheduling=True, max_num_seqs=3)
    worker = llm.engine.worker
    extend_for, widths = worker.captured.extend_for, []

    def noted(num_missing, batch_size):
        widths.append(num_missing)
        return extend_for(num_missing, batch_size)

    monkeypatch.setattr(worker.captured, "extend_for", noted)
    prompts = [[(37 * i * i + n) % 256 for i in range(n)] for n in (17, 18, 33, 47, 30)]
    assert min(map(len, prompts)) > worker.captured.max_extend
    params = [
        SamplingParams(max_tokens=12 + 7 * (i % 3), temperature=0.4 * (i % 3), seed=i)
        for i in range(len(prompts))
    ]
    llm.generate(prompts, params)
    assert max(widths) <= num_steps + 2


@pytest.mark.parametrize("algorithm", ["NGRAM", "NONE"])
@pytest.mark.parametrize("num_left", [0, 1, 2])
def test_a_text_whose_last_token_alone_is_left_to_compute_goes_on_from_it(
    make_llm, algorithm, num_left
):
    """A preempted text of a piece and so many tokens more; one is what decoding begins with."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    prompt = [(37 * i * i) % 256 for i in range(15)]
    plain = make_llm().generate([prompt], params)[0]
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 24 - num_left}
    engine = make_llm(algorithm, 2, async_scheduling=False, **sizes).engine
    engine.add(seq := engine.new_sequence("a", prompt, params))
    said = []
    while engine.has_work:
        if len(seq) == 24 and not engine.scheduler.queue.num_preemptions:
            engine.scheduler.queue.preempt(seq)
        said += [token for delta in engine.step() for token in delta.token_ids]
    assert said == list(plain.token_ids)
    assert engine.scheduler.queue.num_preemptions == 1
