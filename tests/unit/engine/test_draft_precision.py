"""What a draft computes in, and that nothing of the target's is rounded for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serve_spec.engine import draft_precision
from serve_spec.engine.draft_precision import draft_dtype, keeps_eight_bit
from serve_spec.layers.linear import Linear
from serve_spec.models import load_draft, load_target
from tests.helpers.engines import make_pair

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_eight_bits_are_taken_by_themselves_only_where_they_are_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_hopper in (True, False):
        monkeypatch.setattr(draft_precision, "is_hopper", lambda _, answer=is_hopper: answer)
        assert keeps_eight_bit("auto", GPU) == is_hopper
        assert not keeps_eight_bit("none", GPU)
        assert not keeps_eight_bit("auto", CPU)


def test_eight_bits_asked_for_where_they_bring_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"quantization='fp8': .* this is cpu; use 'auto'"):
        keeps_eight_bit("fp8", CPU)


def test_a_draft_beside_eight_bit_weights_computes_in_float16_unless_told_otherwise() -> None:
    assert draft_dtype("auto", torch.bfloat16, GPU, eight_bit=True) == torch.float16
    assert draft_dtype("auto", torch.bfloat16, GPU, eight_bit=False) == torch.bfloat16
    assert draft_dtype("bfloat16", torch.bfloat16, GPU, eight_bit=True) == torch.bfloat16


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_every_matrix_of_a_draft_is_kept_in_eight_bits_and_none_of_the_target(
    algorithm: str, tmp_path: Path
) -> None:
    pair = make_pair(tmp_path)
    target = load_target(pair.target, torch.float32, CPU)
    head = load_draft(pair.heads[algorithm], target, algorithm, eight_bit=True)
    shared = set(target.modules())
    own = [m for m in head.modules() if isinstance(m, Linear) and m not in shared]
    assert own
    assert all(layer.eight_bit is not None for layer in own)
    assert all(m.eight_bit is None for m in shared if isinstance(m, Linear))
