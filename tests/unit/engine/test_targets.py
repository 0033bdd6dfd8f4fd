"""Every family of targets says with drafts what it says without: biases, norms, windows, sizes."""

import pytest

from serve_spec.core.draft import MAX_TREE_TOKENS
from serve_spec.core.request import SamplingParams
from tests.helpers.engines import llm_maker, make_pair, texts

NARROW, WIDE = 12, MAX_TREE_TOKENS
TARGETS = {
    "llama2": {"family": "llama2"},
    "mistral with a narrow window": {"family": "mistral", "sliding_window": NARROW},
    "mistral with a wide window": {"family": "mistral", "sliding_window": WIDE},
    "qwen2": {"family": "qwen2"},
    "qwen2 with a window in some layers": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WIDE,
        "max_window_layers": 3,
    },
    "qwen3": {"family": "qwen3"},
    "llama2 with yarn": {
        "family": "llama2",
        "mlp_bias": True,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
}
TREE = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 12}


def requests():
    """Some texts go far beyond a window; some prompts come in pieces beside others' drafts."""
    lengths = (4, 25, 60, 90)
    prompts = [[(31 * i + 7 * j) % 256 for j in range(n)] for i, n in enumerate(lengths)]
    params = [
        SamplingParams(max_tokens=24, temperature=(0.0, 0.8)[i % 2], seed=i, ignore_eos=True)
        for i in range(4)
    ]
    return prompts, params


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_of_any_family_says_the_same_with_drafts(tmp_path, name):
    make_llm = llm_maker(make_pair(tmp_path, **TARGETS[name]), "cpu")
    plain = texts(make_llm().generate(*requests()))
    for algorithm, shape in (("EAGLE3", TREE), ("STANDALONE", {})):
        keys = {"max_num_seqs": 3, "max_num_batched_tokens": 48}
        keys |= {} if "narrow" in name else shape
        outputs = make_llm(algorithm, 4, **keys).generate(*requests())
        assert texts(outputs) == plain, algorithm
        assert sum(output.speculation.num_correct_drafts for output in outputs) > 0


def test_trees_that_may_not_lie_within_a_window_are_refused(tmp_path):
    window = {"family": "mistral", "sliding_window": WIDE - 1}
    make_llm = llm_maker(make_pair(tmp_path, **window), "cpu")
    with pytest.raises(
        ValueError, match=r"topk=3.*sliding_window=63; use speculative_eagle_topk=1"
    ):
        make_llm("EAGLE3", 4, **TREE)
