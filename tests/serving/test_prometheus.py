"""Several nodes' metrics as one text that Prometheus accepts."""

from serve_spec.serving.ray_metrics import ours

NODE = """\
# HELP ray_node_cpu CPU
# TYPE ray_node_cpu gauge
ray_node_cpu{{node="{node}"}} 1.0
# HELP ray_serve_spec_rounds_total Rounds.
# TYPE ray_serve_spec_rounds_total counter
ray_serve_spec_rounds_total{{node="{node}"}} 7.0
# HELP ray_serve_spec_step_ms Time.
# TYPE ray_serve_spec_step_ms histogram
ray_serve_spec_step_ms_bucket{{node="{node}",le="1.0"}} 2.0
ray_serve_spec_step_ms_count{{node="{node}"}} 2.0
"""


def test_each_metric_is_declared_once_and_its_samples_stand_together():
    lines = ours([NODE.format(node="a"), NODE.format(node="b")]).splitlines()
    assert lines == [
        "# HELP ray_serve_spec_rounds_total Rounds.",
        "# TYPE ray_serve_spec_rounds_total counter",
        'ray_serve_spec_rounds_total{node="a"} 7.0',
        'ray_serve_spec_rounds_total{node="b"} 7.0',
        "# HELP ray_serve_spec_step_ms Time.",
        "# TYPE ray_serve_spec_step_ms histogram",
        'ray_serve_spec_step_ms_bucket{node="a",le="1.0"} 2.0',
        'ray_serve_spec_step_ms_count{node="a"} 2.0',
        'ray_serve_spec_step_ms_bucket{node="b",le="1.0"} 2.0',
        'ray_serve_spec_step_ms_count{node="b"} 2.0',
    ]


def test_a_node_without_an_answer_takes_nothing_from_the_others():
    alone = ours([NODE.format(node="a")])
    assert ours(["", NODE.format(node="a")]) == alone
    assert ours([]) == ""
