"""The cost table of a sweep's engine: measured with more patience than a starting server has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from serve_spec.config import ConfigError
from serve_spec.config.cost_table import CostKey, load_cost_table, write_cost_table
from serve_spec.core.draft import DraftShape
from serve_spec.engine.costs import as_table, cost_key
from serve_spec.engine.llm import LLM
from serve_spec.engine.profile import finish, measure_costs

BUDGET_S = 300.0
"""Most that is spent; all cells of a small pair take far less."""


def write_costs(
    llm: LLM, path: Path, *, max_steps: int, trees: Sequence[DraftShape], fresh: bool
) -> None:
    """Measures what rounds of the idle engine cost; a table that is there and fits is kept.

    max_steps: of the longest chain. trees: shapes to measure beside chains, ascending.

    Raises:
        ConfigError: texts, pages or the token budget are too small to measure anything.
    """
    key = cost_key(llm.config, llm.engine.worker)
    max_batch_size = llm.config.scheduler.max_num_seqs
    if not fresh and path.exists() and _fits(path, key, max_batch_size, max_steps, trees):
        return
    with tqdm(total=100.0, desc="cost table", unit="%", bar_format="{l_bar}{bar}") as bar:
        try:
            measurement = measure_costs(
                llm.engine.worker,
                page_size=llm.config.cache.page_size,
                num_pages=llm.engine.scheduler.cache.num_pages,
                max_batch_size=max_batch_size,
                max_steps=max_steps,
                max_num_tokens=llm.config.scheduler.max_num_batched_tokens,
                max_model_len=llm.engine.max_model_len,
                budget_s=BUDGET_S,
                trees=dict.fromkeys(trees),
            )
            costs = finish(measurement, progress=lambda share: bar.update(100 * share - bar.n))
        except ValueError as error:
            raise ConfigError(str(error)) from error
    write_cost_table(as_table(key, costs), path)


def _fits(
    path: Path, key: CostKey, max_batch_size: int, max_steps: int, trees: Sequence[DraftShape]
) -> bool:
    """Whether the table speaks of this engine and of all its rounds."""
    try:
        table = load_cost_table(path)
        shapes = [(tree.depth, tree.size) for tree in trees]
        table.refuse_foreign(key, max_steps=max_steps, trees=shapes)
    except ConfigError:
        return False
    return table.batch_sizes[-1] >= max_batch_size
