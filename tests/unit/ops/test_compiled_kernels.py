"""Kernels fit a Hopper GPU, by what its compiler says on any machine."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_attention_spills_four_registers_at_most_and_other_kernels_none():
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.compiled_kernels"]
    root = Path(__file__).parents[3]
    said = subprocess.run(
        command, env=environment, cwd=root, stdout=subprocess.PIPE, text=True, check=True
    )
    kernels = [json.loads(line) for line in said.stdout.splitlines()]
    attention = {"_plan_kernel", "_attend_kernel", "_merge_kernel"}
    admission = {"_survival_kernel", "_last_kernel", "_admit_kernel"}
    exchanges = {"_sum_kernel", "_sum_add_norm_kernel", "_broadcast_kernel", "_gather_kernel"}
    assert {record["kernel"] for record in kernels} == attention | admission | exchanges
    for record in kernels:
        assert record["spills"] <= (16 if record["kernel"] in attention else 0), record
        assert record["shared"] <= 227 * 1024, record
