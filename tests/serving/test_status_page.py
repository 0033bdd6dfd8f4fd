"""The status page: complete, self-contained, and alive in a real browser where there is one."""

import asyncio
import json
import os
import re
import shutil
import subprocess
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import aiohttp
import httpx
import pytest

import serve_spec.serving.statistics
from serve_spec.adaptive.reasons import MEANINGS
from serve_spec.config import ServeSpecConfig
from serve_spec.serving.statistics.fleet_stats import FleetStats
from tests.serving.asgi import Server, listening, send
from tests.serving.cluster import eventually
from tests.serving.fakes import ScriptedFleet

STATIC = Path(serve_spec.serving.statistics.__file__).parent / "static"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NODE = shutil.which("node")
START_S = 1_700_000_000.0


class BusyFleet(ScriptedFleet):
    """Two replicas under load; every look at them is five seconds later than the one before."""

    def __init__(self):
        super().__init__([])
        self.stats_now = FleetStats(stale_after_s=15, history_s=600)
        self.num_looks = 0
        for _ in range(20):
            self._pass_time()

    async def status(self):
        self._pass_time()
        return self.stats_now.status(START_S + 5 * self.num_looks)

    def _pass_time(self):
        self.num_looks += 1
        for rank in (0, 1):
            now = START_S + 5 * self.num_looks
            self.stats_now.report(f"r{rank}", self._snapshot(rank), now)

    def _snapshot(self, rank):
        looks = self.num_looks
        accept_rates = ((0.8, 100.0), (0.7, 100.0), (0.7, 0.0))
        return {
            "pair": "tiny",
            "replica_rank": rank,
            "strategy": "goodput",
            "speculative_num_steps": 1 + (looks // 10 + rank) % 3,
            "candidate_steps": [0, 1, 2, 3],
            "batch_size": 4 + rank,
            "num_running": 4 + rank,
            "num_waiting": 1,
            "avg_spec_accept_length": 2.5,
            "last_reason": "gain" if rank else "<b>steady</b>",
            "synthetic_acceptance": 2.5 if rank else None,
            "switches": {"gain": looks, "kv": 3},
            "decision": "depth 2, 12 of 12 drafts: predicted 1.6 tokens/ms against 1 plain",
            "rounds_by_num_steps": {"0": 2 * looks, "2": 6 * looks},
            "rounds_by_reason": {"guard": 2 * looks, "steady": 6 * looks},
            "slot": "4",
            "slots": {"4": {"guard_rounds_left": 40 * rank, "measured_speedup": 1.25}},
            "prefix_cache": {"query_tokens": 100, "hit_tokens": 25},
            "break_even": {
                "batch_size": 4,
                "draft_ms": 0.4,
                "round_ms": {"0": 4.0, "1": 5.0, "2": 6.0, "3": 10.0},
                "tokens_per_ms": {"0": 1.0, "1": 1.4, "2": 1.6, "3": 1.2},
            },
            "kv": {"free_pages": 90, "total_pages": 100},
            "counters": {"decode_rows": 400 * looks, "decode_tokens": 1000 * looks},
            "acceptance": {
                "positions": [
                    {"position": i, "accept_rate": rate, "trials": trials}
                    for i, (rate, trials) in enumerate(accept_rates, start=1)
                ]
            },
            "speculation": {
                "effective_speedup": 1.5,
                "draft_budget": 12 + rank,
                "window": {
                    "tokens_per_step": 2.5,
                    "busy_s": 5.0,
                    "observed_to_expected_drafts": 0.9 if rank else None,
                    "measured_to_predicted_ms": 1.2,
                    "positions": [
                        {"position": 1, "proposed": 9, "verified": 8, "reached": 8, "accepted": 6},
                        {"position": 2, "proposed": 9, "verified": 5, "reached": 4, "accepted": 3},
                    ],
                },
                "by_batch_size": {
                    "4": {"effective_speedup": 1.5, "tokens_per_ms": {"0": 1.0, "2": 1.5}}
                },
            },
        }


def ask(config, path, root_path=""):
    return send(Server(config, BusyFleet()).app, "GET", path, root_path=root_path)


class Links(HTMLParser):
    """What a page loads, and where it leads."""

    def __init__(self, page):
        super().__init__()
        self.found, self.leads_to = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        found = self.leads_to if tag == "a" else self.found
        found += [v for k, v in attrs if k in ("src", "href") and v and tag != "base"]


@pytest.mark.parametrize(("path", "num_files"), [("/", 5), ("/docs", 3)])
def test_everything_the_pages_load_is_served_here_and_needs_no_key(config, path, num_files):
    config = ServeSpecConfig.load(config, api_keys=["k1"])
    page = ask(config, path)
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "http" not in policy
    links = [link for link in Links(page.text).found if not link.startswith("data:")]
    assert len(links) == num_files
    for link in links:
        answer = ask(config, f"/{link}")
        assert answer.status_code == 200, link
        assert answer.content == (STATIC / link.removeprefix("static/")).read_bytes()


def test_the_status_has_the_meaning_of_every_reason_and_the_routers_requests(config):
    figures = ask(config, "/status.json").json()
    assert figures["reasons"] == {reason.value: text for reason, text in MEANINGS.items()}
    assert {"ttft_ms", "token_gap_ms", "requests", "num_rejected"} <= set(figures["router"])


def test_the_page_leads_to_the_state_the_metrics_the_api_and_rays_dashboard(config):
    app = Server(config, BusyFleet()).app
    links = [f"/{link}" for link in Links(ask(config, "/").text).leads_to]
    assert links == ["/server_info", "/metrics", "/docs"]
    assert set(links) <= {route.path for route in app.routes}
    assert ask(config, "/status.json").json()["ray_dashboard"] is None, "there is no Ray here"


def test_the_figures_need_the_key_and_say_where_acceptance_is_forced(config):
    assert ask(ServeSpecConfig.load(config, api_keys=["k1"]), "/status.json").status_code == 401
    figures = ask(config, "/status.json").json()
    assert figures["model"] == config.model.served_model_name
    forced = [replica["synthetic_acceptance"] for replica in figures["replicas"]]
    assert forced == [None, 2.5]


def test_below_a_route_prefix_links_stay_below_it(config):
    assert '<base href="/llm/">' in ask(config, "/llm/", root_path="/llm").text
    assert '<base href="/&quot;&gt;/">' in ask(config, '/">/', root_path='/">').text


@pytest.mark.skipif(NODE is None, reason="no node here")
def test_the_scripts_are_valid():
    for script in STATIC.glob("*.js"):
        subprocess.run([str(NODE), "--check", script], check=True)


def test_every_name_the_script_looks_up_is_on_the_page():
    script, page = (STATIC / "status.js").read_text(), (STATIC / "status.html").read_text()
    wanted = set(re.findall(r'(?:byId|draw|showTable)\("(\w+)"', script))
    assert wanted <= set(re.findall(r'id="(\w+)"', page))
    assert len(wanted) >= 10


FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-background-networking",
)  # fmt: skip


@contextmanager
def browser(url, tmp_path, *flags):
    """Yield a function that evaluates an expression in the page, over the DevTools protocol."""
    options = "--remote-debugging-port=0", f"--user-data-dir={tmp_path}"
    # Of the C locale Chromium makes a language that `Intl`, and so the charts, do not know.
    env = {**os.environ, "LC_ALL": "en_US.UTF-8"}
    process = subprocess.Popen(
        [str(CHROMIUM), *FLAGS, *flags, *options, url], stderr=subprocess.DEVNULL, env=env
    )
    try:
        file = tmp_path / "DevToolsActivePort"
        eventually(file.exists, bool)
        port = eventually(file.read_text, bool).split()[0]

        def pages():
            listed = httpx.get(f"http://127.0.0.1:{port}/json/list").json()
            return [page for page in listed if page["type"] == "page"]

        (page,) = eventually(pages, lambda found: len(found) == 1)

        async def evaluate(expression):
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(page["webSocketDebuggerUrl"]) as socket,
            ):
                params = {"expression": expression, "returnByValue": True}
                await socket.send_json({"id": 1, "method": "Runtime.evaluate", "params": params})
                return (await socket.receive_json())["result"]["result"].get("value")

        yield lambda expression: asyncio.run(evaluate(expression))
    finally:
        process.terminate()
        process.wait(timeout=60)


@contextmanager
def open_page(config, tmp_path, path="/", *flags):
    """Yield `evaluate` of a browser that shows a page of a busy fleet."""
    with (
        listening(Server(config, BusyFleet()).app) as port,
        browser(f"http://127.0.0.1:{port}{path}", tmp_path, *flags) as evaluate,
    ):
        yield evaluate


def last_values(page, chart):
    """The last point of every line of a chart."""
    found = re.search(rf'id="{chart}"[^>]*data-last="([^"]*)"', page)
    return json.loads(found[1])


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_in_a_browser_charts_draw_and_values_change_under_load(config, tmp_path):
    def switches(text):
        table = text.index('id="switches"')
        return int(re.search(r"gain</td><td[^>]*>(\d+)", text[table:])[1])

    with open_page(config, tmp_path) as evaluate:

        def text():
            return evaluate("document.documentElement.outerHTML")

        page = eventually(text, lambda found: "updated" in found)
        eventually(text, lambda found: switches(found) > switches(page))
    assert page.count("<canvas") == 13
    points = {
        chart: int(re.search(rf'id="{chart}"[^>]*data-points="(\d+)"', page)[1])
        for chart in (
            "throughput", "batch", "bydepth", "byreason", "length", "positions", "breakeven",
            "needed",
        )
    }  # fmt: skip
    assert points["positions"] == 3
    assert points["breakeven"] == 4
    assert min(points[chart] for chart in ("throughput", "batch", "length")) >= 20
    assert last_values(page, "bydepth") == [0.75, 0.25], "depth 2, then plain rounds"
    assert last_values(page, "byreason") == [0.25, 0.75], "guard, then steady"
    assert last_values(page, "budget") == [12]
    assert last_values(page, "positions") == [None, 1], "no trials: drawn as unknown"
    assert last_values(page, "drafts") == [18, 10, 6], "of both replicas, at the last position"
    assert last_values(page, "calibration") == [None, 0.9]
    assert last_values(page, "steptime") == [1.2, 1.2]
    assert last_values(page, "breakeven") == [pytest.approx(1.2), None, 1]
    # Three drafts take 2.5 times as long as none, and bring 3 tokens: 1 + a + a² + a³.
    assert last_values(page, "needed") == pytest.approx([0.691, 0.811], abs=1e-3)
    assert "<b>400</b><span>output tokens/s" in page
    assert '<b id="forced">' in page, "one replica forces acceptance, so the page warns"
    assert "&lt;b&gt;steady" in page, "a replica's text is not markup"
    assert "12 of 12 drafts: predicted 1.6 tokens/ms against 1 plain" in page
    assert "<b>on at 1 of 2</b><span>guard" in page
    assert "<b>25%</b><span>prefix cache hits" in page
    assert "the policy failed and is built anew" in page, "the glossary of reasons"
    assert "--" not in re.sub(r"<!--.*?-->", "", page), "no legend without values"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_inputs_of_the_what_if_chart_move_its_curve(config, tmp_path):
    with open_page(config, tmp_path) as evaluate:
        answer = "document.getElementById('answer').textContent"
        # As measured: 4 ms, 2 ms more a draft, of which 0.4 ms make it; 81% are accepted.
        measured = eventually(lambda: evaluate(answer), bool)
        assert measured == (
            "fastest: depth 2, 1.23 times plain decoding; "
            "drafts pay above an acceptance rate of 0.50"
        )

        def change(name, value):
            field = f"document.querySelector('#scenario [name={name}]')"
            event = "dispatchEvent(new Event('input', {bubbles: true}))"
            evaluate(f"{field}.value = {value!r}; {field}.{event}")
            return evaluate(answer)

        source = "document.getElementById('source').textContent"
        assert evaluate(source).startswith("predictions of replica 0 at batch 4, taken at ")

        assert change("acceptance", "0.9").startswith("fastest: depth 3, 1.38 times")
        assert change("depth", "1").startswith("fastest: depth 1, 1.27 times")
        assert change("batch", "64").startswith("fastest: no speculation; drafts never pay")
        assert change("acceptance", "2").startswith("acceptance rate: ")
        assert evaluate(source).startswith("edited; the others: predictions of replica 0")
        evaluate("document.getElementById('scenario').reset()")
        assert evaluate(answer) == measured


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_phone_shows_the_page_without_scrolling_sideways(config, tmp_path):
    with open_page(config, tmp_path, "/", "--window-size=390,900") as evaluate:
        eventually(lambda: evaluate("document.getElementById('why').textContent"), bool)
        width, shown = "document.documentElement.scrollWidth", "window.innerWidth"
        assert evaluate(f"{width} <= {shown} && {shown} < 600")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_page_of_the_api_lists_operations_and_their_fields(config, tmp_path):
    with open_page(config, tmp_path, "/docs") as evaluate:
        body = "document.body.textContent"
        page = eventually(lambda: evaluate(body), lambda text: "operations" in text)
        assert "POST /v1/chat/completions" in page
        assert "max_completion_tokens" in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_links_to_what_needs_the_key_show_it_once_the_key_is_given(config, tmp_path):
    config = ServeSpecConfig.load(config, api_keys=["k1"])
    with open_page(config, tmp_path) as evaluate:
        asks = "!document.getElementById('key').hidden"
        eventually(lambda: evaluate(asks), bool)
        evaluate("document.querySelector('#key input').value = 'k1'")
        evaluate("document.getElementById('key').requestSubmit()")
        eventually(lambda: evaluate(asks), lambda asked: not asked)
        evaluate("document.querySelector('a[href=server_info]').click()")
        shown = eventually(
            lambda: evaluate("document.body.innerText"), lambda text: "max_in_flight" in text
        )
        assert "invalid_api_key" not in shown
