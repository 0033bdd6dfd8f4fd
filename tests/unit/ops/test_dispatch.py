"""Tensors on a GPU go to a kernel that fits it; others, and compiled code, go to the reference."""

from types import SimpleNamespace

import torch

from serve_spec.ops import acceptance, dispatch, elementwise
from tests.helpers.triton import DEVICE, reference

from serve_spec.ops import draft_tree, draft_tree_triton, elementwise_triton  # isort: skip

import json
import os
import subprocess
import sys
from pathlib import Path

ON_GPU = SimpleNamespace(is_cuda=True)


def kernel(*args, **kwargs):
    return "kernel", args, kwargs


def plain(x, weight, eps):
    return "reference"


plain.__module__, plain.__name__ = elementwise.__name__, "rms_norm"
plain.__annotations__ = elementwise.rms_norm.__annotations__


def test_the_kernel_gets_the_arguments_as_they_are_and_the_compiler_sees_the_reference(monkeypatch):
    monkeypatch.setattr(elementwise_triton, "rms_norm", kernel)
    choose = dispatch.has_kernel(plain)
    assert choose(ON_GPU, 1, eps=2) == ("kernel", (ON_GPU, 1), {"eps": 2})
    assert choose(torch.ones(1), 1, 2) == "reference"
    assert dispatch.reference_of(choose) is plain
    monkeypatch.setattr(dispatch, "is_compiling", lambda: True)
    assert choose(ON_GPU, 1, 2) == "reference"


def test_the_first_tensor_decides_and_not_a_list_of_them(monkeypatch):
    from serve_spec.ops import acceptance_triton

    monkeypatch.setattr(acceptance_triton, "move_accepted", kernel)
    choose = dispatch.has_kernel(dispatch.reference_of(acceptance.move_accepted))
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


def test_attention_spills_four_registers_at_most_and_other_kernels_none():
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.compiled_kernels"]
    root = Path(__file__).parents[3]
    run = subprocess.run(
        command, env=environment, cwd=root, stdout=subprocess.PIPE, text=True, check=True
    )
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    attention = {"_plan_kernel", "_attend_kernel", "_merge_kernel"}
    admission = {"_survival_kernel", "_last_kernel", "_admit_kernel"}
    exchanges = {"_sum_kernel", "_sum_add_norm_kernel", "_broadcast_kernel", "_gather_kernel"}
    products = {
        "_product_kernel", "_int4_product_kernel", "_int4_kernel", "_dequantize_kernel",
    }  # fmt: skip
    others = admission | exchanges | products | {"_rotate_and_store_kernel"}
    assert {record["kernel"] for record in kernels} == attention | others
    for record in kernels:
        assert record["spills"] <= (16 if record["kernel"] in attention else 0), record
        assert record["shared"] <= 227 * 1024, record
