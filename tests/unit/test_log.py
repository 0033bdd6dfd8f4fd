"""One line per record, with the request it is about."""

import json
import logging
import re
import subprocess
import sys

from serve_spec.log import TRACE_ID, JSONFormatter, get_logger, stage

PROGRAM = """
from serve_spec.log import TRACE_ID, get_logger
TRACE_ID.set("req-7")
try:
    raise ValueError("two\\nlines")
except ValueError:
    get_logger("serving").exception("broke: %s", "off")
"""


def logged(log_format):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"SERVE_SPEC_LOG_FORMAT": log_format},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stderr


def test_a_failure_is_one_line_of_json_or_text_that_names_its_request():
    (line,) = logged("json").splitlines()
    record = json.loads(line)
    assert record["x_request_id"] == "req-7"
    assert record["message"] == "broke: off"
    assert record["level"] == "ERROR"
    assert record["logger"] == "serve_spec.serving"
    assert record["error"].endswith("ValueError: two\nlines")
    assert "[req-7]: broke: off" in logged("text")


def test_a_record_from_elsewhere_is_formatted_as_well_and_has_no_id():
    record = logging.LogRecord("x", logging.INFO, "f", 1, "a %d", (1,), None)
    assert json.loads(JSONFormatter().format(record))["message"] == "a 1"
    assert TRACE_ID.get() == "-"
    assert get_logger("serve_spec.engine").name == "serve_spec.engine"


def test_a_part_of_the_start_is_told_with_its_time_where_a_server_wants_it(monkeypatch):
    told = []
    progress = get_logger("serve_spec.progress")
    monkeypatch.setattr(progress, "handle", lambda record: told.append(record.getMessage()))
    with stage("loading"):
        pass
    assert told == []
    progress.setLevel(logging.INFO)
    try:
        with stage("loading"):
            pass
    finally:
        progress.setLevel(logging.NOTSET)
    began, done = told
    assert began == "loading ..."
    assert re.fullmatch(r"loading: done in \d+\.\d s", done)
