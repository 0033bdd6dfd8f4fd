"""What the start of an engine left behind: recorded stages, and the costs it measured."""

from __future__ import annotations

from dataclasses import asdict

from serve_spec.bench.kernels.setting import LeftOut, Row, Section, Setting


def capture(setting: Setting) -> Section:
    """Stages, seconds and bytes of every tier."""
    rows = [asdict(tier) for tier in setting.lane_worker.recorded.report]
    totals = {
        f"total_{name}": sum(row[name] for row in rows)
        for name in ("num_stages", "seconds", "num_bytes")
    }
    on_gpu = setting.device.type == "cuda"
    return Section(rows, totals, left_out=[] if on_gpu else ["bytes of CUDA graphs: need a GPU"])


def costs(setting: Setting) -> Section:
    """The table the engine weighs: drafting and verification by context, batch size and drafts."""
    source = setting.engine.costs
    table = None if source is None else source.load()
    if table is None:
        raise LeftOut("the engine kept no cost table; make $SERVE_SPEC_CACHE writable")
    rows: list[Row] = [
        {
            "context": context,
            "batch_size": size,
            "stage": stage,
            **{f"K={k}": ms for k, ms in zip(table.num_steps, grid[c][b], strict=True)},
        }
        for c, context in enumerate(table.contexts)
        for b, size in enumerate(table.batch_sizes)
        for stage, grid in (("draft", table.draft_ms), ("verify", table.verify_ms))
    ]
    facts = {
        "num_steps": list(table.num_steps),
        "sampled_row_ms": table.sampled_row_ms,
        "measured_s": table.measured_s,
        "extrapolated": len(table.extrapolated),
    }
    return Section(rows, facts)
