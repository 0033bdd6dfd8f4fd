"""Tensors on a GPU go to a function's kernel, all others and torch's compiler to its reference."""

from types import SimpleNamespace
from typing import Any

import torch

from serve_spec.ops import acceptance, dispatch, elementwise
from tests.helpers.triton import DEVICE, reference

from serve_spec.ops import draft_tree, draft_tree_triton, elementwise_triton  # isort: skip

ON_GPU: Any = SimpleNamespace(is_cuda=True)


def kernel(*args, **kwargs):
    return "kernel", args, kwargs


def plain(x, weight, eps):
    return "reference"


plain.__module__, plain.__name__ = elementwise.__name__, "rms_norm"
plain.__annotations__ = elementwise.rms_norm.__annotations__


def test_the_kernel_gets_the_arguments_as_they_are(monkeypatch):
    monkeypatch.setattr(elementwise_triton, "rms_norm", kernel)
    choose = dispatch.has_kernel(plain)
    assert choose(ON_GPU, 1, eps=2) == ("kernel", (ON_GPU, 1), {"eps": 2})  # type: ignore[arg-type]
    assert choose(torch.ones(1), 1, 2) == "reference"  # type: ignore[arg-type]
    assert dispatch.reference_of(choose) is plain


def test_the_compiler_sees_the_reference(monkeypatch):
    monkeypatch.setattr(elementwise_triton, "rms_norm", kernel)
    monkeypatch.setattr(dispatch, "is_compiling", lambda: True)
    choose = dispatch.has_kernel(plain)
    assert choose(ON_GPU, 1, 2) == "reference"  # type: ignore[arg-type]


def test_the_first_tensor_decides_and_not_a_list_of_them(monkeypatch):
    from serve_spec.ops import acceptance_triton

    monkeypatch.setattr(acceptance_triton, "move_accepted", kernel)
    choose: Any = dispatch.has_kernel(dispatch.reference_of(acceptance.move_accepted))
    assert choose([], ON_GPU, 1, 2, 3)[0] == "kernel"


def test_trees_too_large_for_the_kernels_are_grown_and_chosen_by_the_reference():
    scores = -torch.rand(1, 1, 1100, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    token_ids = torch.arange(1100, device=DEVICE).view(1, 1, -1)
    counts = torch.tensor([1], dtype=torch.int32, device=DEVICE), torch.tensor([8], device=DEVICE)
    found = []
    for way in (reference(draft_tree), draft_tree_triton):
        level, beam = way.grow_beam(draft_tree.root_beam(1, DEVICE), token_ids, scores, 0)
        found.append([*level, *beam, *way.choose_drafts([level], *counts, 8)])
    assert all(map(torch.equal, *found))
