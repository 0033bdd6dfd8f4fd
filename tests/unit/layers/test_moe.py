"""Experts: a token's result is its own, and both ways to multiply agree."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats.onednn import onednn_works
from serve_spec.layers.module import finish_loading, tensor_defaults
from serve_spec.layers.moe import Experts, Router, Routing, check_device
from serve_spec.models.registry import find_family
from tests.helpers.checkpoints import target_config
from tests.helpers.mixtures import ARCHITECTURES, NUM_EXPERTS

# Wide enough that the matrices of a shared expert are packed, as in a real model.
HIDDEN = 256
ROUTERS = {
    "softmax": Router(3),
    "softmax of all": Router(3, renormalises=False),
    "sigmoid": Router(3, is_sigmoid=True, scale=2.5),
    "groups": Router(2, is_sigmoid=True, num_groups=3, num_kept_groups=1),
}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sparse_mlp(family_name):
    """The MLP of the second layer of a family, with random weights."""
    family, config = find_family(target_config(family_name, HIDDEN, 2, 288))
    shape = family.layer_shape(config, family.shape(config), 1)
    mlp = family.layer(config, shape, 1).mlp
    for index, weight in enumerate(mlp.parameters()):
        weight.copy_(random(*weight.shape, seed=index) * weight.shape[-1] ** -0.5)
    return mlp


def filled_experts(dtype=torch.float32, device="cpu"):
    with tensor_defaults(dtype, device):
        experts = Experts(NUM_EXPERTS, 64, 32)
    for index, weight in enumerate(experts.parameters()):
        weight.copy_(random(*weight.shape, seed=index) * weight.shape[-1] ** -0.5)
    return experts


@pytest.mark.skipif(not onednn_works(torch.float32), reason="needs oneDNN")
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_tokens_result_has_the_same_bits_in_any_batch(family):
    """Or a text would depend on the drafts and requests that are verified with it."""
    mlp = sparse_mlp(family)
    finish_loading(mlp)
    x = random(130, HIDDEN, seed=99)
    together = mlp(x)
    assert torch.equal(torch.cat([mlp(row) for row in x.split(1)]), together)
    for size in (2, 3, 7, 31):
        assert torch.equal(torch.cat([mlp(rows) for rows in x.split(size)]), together)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert torch.equal(mlp(x[order]), together[order])
    alike = torch.cat((x[:1].expand(40, -1), x[1:9]))
    assert torch.equal(mlp(alike)[[0, 39, 40, 47]], together[[0, 0, 1, 8]])


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_packed_and_grouped_products_are_those_of_the_loaded_experts(family):
    mlp = sparse_mlp(family)
    x = random(20, HIDDEN, seed=99)
    loaded = mlp(x)
    ids = torch.tensor([0] * 9 + [2] * 8 + [5] * 3)  # experts without tokens, too
    ends = torch.tensor([9, 9, 17, 17, 17, 20], dtype=torch.int32)
    grouped = mlp.experts.grouped(x, ids, ends)
    finish_loading(mlp)
    torch.testing.assert_close(mlp(x), loaded, rtol=1e-4, atol=1e-5)
    alone = torch.cat([*mlp.experts._by_expert(x, ends.tolist())])
    torch.testing.assert_close(grouped, alone, rtol=1e-4, atol=1e-5)
    assert not sum(weight.numel() for weight in (mlp.experts.gate_up, mlp.experts.down))
    mlp.finish()
    torch.testing.assert_close(mlp(x), loaded, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_a_router_chooses_distinct_experts_for_every_token_by_itself(router):
    logits, correction = random(50, NUM_EXPERTS), random(NUM_EXPERTS, seed=1)
    ids, weights, _ = router.choose(logits, correction)
    assert all(len(set(row)) == router.num_chosen for row in ids.tolist())
    if router.renormalises:
        expected = torch.full((50,), router.scale)
        torch.testing.assert_close(weights.sum(dim=1), expected)
    each = [router.choose(row, correction) for row in logits.split(1)]
    assert torch.equal(torch.cat([row.ids for row in each]), ids)
    assert torch.equal(torch.cat([row.weights for row in each]), weights)


def test_only_the_best_groups_are_chosen_from_and_the_correction_does_not_weigh():
    router = replace(ROUTERS["groups"], renormalises=False)
    logits = torch.tensor([[3.0, -3.0, 1.0, 1.0, 0.0, 0.0]])
    ids = router.choose(logits, torch.zeros(6)).ids
    assert set(ids[0].tolist()) == {2, 3}, "the best expert is in another group"
    ids, weights, _ = router.choose(logits, torch.tensor([0.0, 2.0, 0.0, 0.0, 0.0, 0.0]))
    assert dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True)) == {
        index: logits[0, index].sigmoid().item() for index in (0, 1)
    }


@pytest.mark.parametrize(
    ("dtype", "capability", "width", "words"),
    [
        (torch.float16, (9, 0), 32, r"dtype=float16: .*set dtype: bfloat16"),
        (torch.bfloat16, (8, 0), 32, r"device=cuda: .*9\.0"),
        (torch.bfloat16, (9, 0), 36, r"36 columns on a rank: .* 8; use another tensor_parallel"),
    ],
)
def test_what_a_gpu_cannot_multiply_in_groups_is_refused(
    monkeypatch, dtype, capability, width, words
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    weight = SimpleNamespace(
        device=torch.device("cuda"), dtype=dtype, shape=(NUM_EXPERTS, 64, width)
    )
    with pytest.raises(CheckpointError, match=words):
        check_device(weight)


@pytest.mark.gpu
def test_a_gpu_computes_and_captures_what_the_cpu_computes():
    of_cpu, of_gpu = (filled_experts(torch.bfloat16, device) for device in ("cpu", "cuda"))
    for num_tokens in (1, 4, 128, 700):
        x = random(num_tokens, 64).bfloat16()
        routing = Router(2).choose(random(num_tokens, NUM_EXPERTS, seed=1))
        expected = of_cpu(x, routing)
        inputs = x.cuda(), Routing(routing.ids.cuda(), routing.weights.cuda())
        found = of_gpu(*inputs)
        torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=2e-2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = of_gpu(*inputs)
        graph.replay()
        assert torch.equal(captured, found)
