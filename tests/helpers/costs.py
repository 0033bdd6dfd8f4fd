"""What a cost table under test was measured on."""

from serve_spec.config.cost_table import CostKey

KEY = CostKey(
    hardware="a processor",
    threads=1,
    target="0",
    draft="1",
    algorithm="EAGLE3",
    dtype="float32",
    draft_dtype="float32",
    tensor_parallel_size=1,
    attention_backend="torch",
    code="1",
)
