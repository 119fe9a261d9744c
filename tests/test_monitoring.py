"""Dashboard and alerts speak only of metrics that exist, and the alerts say what they are for. C9, and its opposite."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import promql
import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families
from test_server_metrics import fake, serve

from minillm.server.errors import ApiError
from minillm.server.metrics import Metrics
from minillm.server.tracing import Traces

FOLDER = Path(__file__).parents[1] / "docs" / "monitoring"
RULES = yaml.safe_load((FOLDER / "prometheus-rules.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
STEP_S = 30.0  # between scrapes
WHERE = {"job", "instance"}  # labels that a scrape adds
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count"), "counter": ("_total",)}


def everything():
    """A server that knows all that can be known."""
    engine = fake()
    engine.model.device = torch.device("cuda", 0)
    m = Metrics(engine, "small", ready=lambda: True, traces=Traces())
    serve(engine, "a", gaps=(1.0,), hit=4)
    for metric, labels in ((m.preemptions, ["swap"]), (m.tier_hits, ["disk"]), (m.faults, ["gap"]), (m.refused, ["n"])):
        metric.labels("small", *labels).inc(0)
    m.rejected("full")
    m.http("/v1/models", "GET", 200, 0.1)
    engine.events.faults["ValueError"] = 1
    return m


@pytest.fixture(scope="module")
def known():
    """{name as PromQL has it: its labels}, from the text of /metrics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 2))
        patch.setattr(torch.cuda, "utilization", lambda device: 50)
        text = everything().render().decode()
    out = {}
    for f in text_string_to_metric_families(text):
        for suffix in SUFFIXES.get(f.type, ("",)):
            out[f.name + suffix] = {k for s in f.samples if s.name == f.name + suffix for k in s.labels} | WHERE
    return out


def expressions():
    panels = [p for p in DASHBOARD["panels"] if p["type"] != "row"]
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for p in panels:
        for t in p["targets"]:
            yield f"{p['title']} {t['refId']}", t["expr"].replace("$__rate_interval", "5m")


@pytest.mark.parametrize(("where", "text"), list(expressions()), ids=[w for w, _ in expressions()])
def test_every_expression_reads_series_that_exist(where, text, known):
    nodes = promql.walk(promql.parse(text))
    selected = [n for n in nodes if n[0] == "select"]
    assert selected
    labels = set().union(*(known.get(n[1], set()) for n in selected))
    for _, name, matchers, _ in selected:
        assert name in known or name == "up", f"{where}: no metric {name}"
        assert {m[0] for m in matchers} <= known.get(name, WHERE), f"{where}: {name} has no such label"
    for n in nodes:
        if n[0] == "aggregate":
            assert set(n[2]) <= labels, f"{where}: nothing has the labels {n[2]}"


def test_a_name_that_does_not_exist_is_noticed(known):
    with pytest.raises(AssertionError, match="no metric"):
        test_every_expression_reads_series_that_exist(
            "x", "rate(minillm:time_to_first_byte_seconds_sum[5m]) > 0", known
        )
    with pytest.raises(AssertionError, match="no such label"):
        test_every_expression_reads_series_that_exist("x", 'minillm:ready{tenant="a"}', known)
    with pytest.raises(promql.Bad):
        promql.parse("topk(3, minillm:ready)")


def test_readme_names_every_metric_and_no_other(known):
    written = set(re.findall(r"`(minillm:\w+)`", (FOLDER / "README.md").read_text()))
    have = {re.sub(r"_(bucket|sum|count)$", "", n) for n in known if n.startswith("minillm:")}
    assert written == have


# The dashboard ------------------------------------------------------------------------------------------------


def test_the_dashboard_imports():
    """What Grafana's importer and its grid need: ids of their own, nobody over anybody, a data source to choose."""
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["uid"]
    assert DASHBOARD["id"] is None, "an id belongs to one Grafana"
    panels = DASHBOARD["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    taken = set()
    for p in panels:
        g = p["gridPos"]
        cells = {(x, y) for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])}
        assert g["x"] + g["w"] <= 24
        assert not cells & taken, p["title"]
        taken |= cells
    variables = {v["name"]: v for v in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    for p in panels:
        if p["type"] != "row":
            assert p["datasource"]["uid"] == "${datasource}"
            assert p["targets"]
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
    assert used <= set(variables)


@pytest.mark.parametrize(
    "metric",
    [
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
    ],
)
def test_tails_stand_beside_the_mean(metric):
    texts = [[t["expr"] for t in p["targets"]] for p in DASHBOARD["panels"] if p["type"] == "timeseries"]
    (mine,) = [t for t in texts if any(f"0.5, sum by (le) (rate(minillm:{metric}_bucket" in e for e in t)]
    for q in ("0.5", "0.95", "0.99"):
        assert any(e.startswith(f"histogram_quantile({q}, ") and f"{metric}_bucket" in e for e in mine)
    assert any(f"{metric}_sum" in e and f"{metric}_count" in e for e in mine)


# The alerts -----------------------------------------------------------------------------------------------------


SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", re.M)
LABEL = re.compile(r'(\w+)="([^"\\]*)"')


def scraped(metrics, at):
    """A scrape as Prometheus stores it. (No name here needs escaping, so two patterns do, and do it fast.)"""
    series = {}
    for name, labels, value in SAMPLE.findall(metrics.render().decode()):
        where = (("__name__", name), ("job", "minillm"), ("instance", "a:8000"))
        series[frozenset((*where, *LABEL.findall(labels)))] = float(value)
    return at, series


class Server:
    """A fake engine under Metrics, scraped every STEP_S while `happen` happens."""

    def __init__(self):
        self.engine = fake()
        self.engine.core.scheduler.num_waiting, self.engine.core.scheduler.running = 0, []
        self.ready = True
        self.metrics = Metrics(self.engine, "small", ready=lambda: self.ready)

    def play(self, happen, minutes=6):
        scrapes = [scraped(self.metrics, 0.0)]
        for i in range(round(minutes * 60 / STEP_S)):
            happen(self, i)
            scrapes.append(scraped(self.metrics, STEP_S * (i + 1)))
        return scrapes


def alerts(scrapes):
    return {rule["alert"] for rule in RULES if promql.evaluate(rule["expr"], scrapes)}


def waits(*seconds, gap=0.02):
    """Fifty requests each STEP_S, with these times to the first token in turn."""

    def happen(server, i):
        for k in range(50):
            ttft = seconds[(50 * i + k) % len(seconds)]
            gaps = (gap(50 * i + k),) * 3 if callable(gap) else (gap,) * 3
            serve(server.engine, f"{i}-{k}", at=STEP_S * i, wait=ttft / 2, ttft=ttft, gaps=gaps)

    return happen


def setting(**state):
    def happen(server, i):
        waits(0.2)(server, i)
        for name, value in state.items():
            value = value(i) if callable(value) else value
            if name == "ready":
                server.ready = value
            elif name == "live":
                server.engine.cache.num_live = value
            elif name == "running":
                server.engine.core.scheduler.running = [None] * value
            else:
                server.engine.core.scheduler.num_waiting = value

    return happen


def storm(server, i):
    waits(0.2)(server, i)
    log = server.engine.events
    log.record("queued", f"p{i}", prompt_tokens=300)
    log.record("preempted", f"p{i}", how="recompute", computed=300)


def stuck(server, i):
    server.engine.core.scheduler.running = [None]


ROUTE = "/v1/completions"


def turned_away(share, n=1):
    """Of 50 requests with n sequences each, this share gets 429."""

    def happen(server, i):
        away = round(50 * share)
        for k in range(50 * n - away * n):
            serve(server.engine, f"{i}-{k}", at=STEP_S * i, wait=0.1, ttft=0.2, gaps=(0.02,) * 3)
        for k in range(50):
            server.metrics.http(ROUTE, "POST", 429 if k < away else 200, 1.0)
        for _ in range(away):
            server.metrics.failed(ApiError(429, "full", code="queue_full"))
        for _ in range(1000):  # probes
            server.metrics.http("/health", "GET", 200, 0.001)

    return happen


def restarts(server, i):
    """A rolling restart: it drains, what comes goes elsewhere, and the last answers are cut short."""
    waits(0.2)(server, i)
    for _ in range(40):
        server.metrics.http(ROUTE, "POST", 503, 0.01)
        server.metrics.failed(ApiError(503, "to another one", code="draining"))
        server.metrics.failed(ApiError(503, "too late", code="shutting_down"))


def failing(kind):
    def happen(server, i):
        waits(0.2)(server, i)
        server.metrics.failed(kind)

    return happen


def broken(server, i):
    waits(0.2)(server, i)
    server.engine.events.record("nonsense")
    server.metrics._fault("gap", ValueError())


def once(happen):
    """Once in eight minutes of healthy ones; a case is played for six, and for promtool for fourteen."""
    return lambda server, i: happen(server, i) if i % 16 == 8 else waits(0.2)(server, i)


CASES = {
    "healthy": (waits(*([0.2, 0.3, 0.4] * 30)), set()),
    "good mean, bad tail": (waits(*[0.2] * 98, 10.0, 10.0), {"MinillmBusyButSlow"}),
    "everybody slow": (waits(5.0), {"MinillmSlowFirstToken"}),
    "one slow of a thousand": (waits(*[0.2] * 999, 10.0), set()),
    "pauses between tokens": (waits(0.2, gap=lambda k: 2.0 if k % 50 == 0 else 0.02), {"MinillmStreamsStall"}),
    "a queue that grows": (setting(waiting=lambda i: 5 + 2 * i), {"MinillmQueueGrows"}),
    "a queue that stays": (setting(waiting=5), set()),
    "a queue that empties": (setting(waiting=lambda i: max(0, 30 - 6 * i)), set()),
    "not ready": (setting(ready=False), {"MinillmNotReady"}),
    "KV full": (setting(live=12), {"MinillmKVFull"}),
    "KV almost full": (setting(live=11), set()),
    "running": (setting(running=3), set()),
    "stuck": (stuck, {"MinillmStuck"}),
    "some turned away": (turned_away(0.02), set()),
    "many turned away": (turned_away(0.2), {"MinillmTurnsAway"}),
    "many of several sequences turned away": (turned_away(0.2, n=8), {"MinillmTurnsAway"}),
    "a rolling restart": (restarts, set()),
    "a preemption storm": (storm, {"MinillmPreemptionStorm"}),
    "out of memory": (failing("out_of_memory"), {"MinillmErrors"}),
    "out of memory, once": (once(failing("out_of_memory")), {"MinillmErrors"}),
    "the engine has ended": (failing(ApiError(503, "dead", code="engine_dead")), {"MinillmErrors"}),
    "clients' own errors": (failing("format"), set()),
    "a metric that fails": (broken, {"MinillmMetricsFail"}),
    "a metric that failed once": (once(broken), {"MinillmMetricsFail"}),
}


@pytest.mark.parametrize("case", list(CASES))
def test_each_alert_fires_for_what_it_is_for_and_for_nothing_else(case):
    happen, want = CASES[case]
    assert alerts(Server().play(happen)) == want


def test_every_alert_is_tried():
    silent = {"MinillmDown"}  # of `up`, which Prometheus writes itself
    assert set().union(*(want for _, want in CASES.values())) == {r["alert"] for r in RULES} - silent
    down = frozenset({"__name__": "up", "job": "minillm", "instance": "a:8000"}.items())
    assert alerts([(0.0, {down: 0.0})]) == silent
    assert alerts([(0.0, {down: 1.0})]) == set()


def test_the_alert_on_tails_is_not_on_means():
    """C9. The mutation: an alert on the mean alone cannot tell the two apart."""
    tail = Server().play(CASES["good mean, bad tail"][0])
    even = Server().play(waits(0.396))
    mean = "rate(minillm:time_to_first_token_seconds_sum[5m]) / rate(minillm:time_to_first_token_seconds_count[5m])"
    of = lambda text, scrapes: next(iter(promql.evaluate(text, scrapes).values()))
    assert of(mean, tail) == pytest.approx(of(mean, even), rel=1e-6)
    assert alerts(tail) != alerts(even)
    assert promql.evaluate(f"{mean} > 1", tail) == {}


def test_few_requests_have_no_tail():
    def happen(server, i):
        if i == 6:
            for k in range(10):
                serve(server.engine, f"{k}", ttft=5.0 if k == 0 else 0.2)

    assert alerts(Server().play(happen)) == set()


# Against Prometheus itself, where it is installed -------------------------------------------------------------------

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def promtool(*arguments, **options):
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_config_rules_and_every_panel(tmp_path):
    promtool("check", "config", str(FOLDER / "prometheus.yml"))
    panels = [{"record": f"x:y{i}", "expr": text} for i, (_, text) in enumerate(expressions())]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": panels}]}))
    promtool("check", "rules", str(tmp_path / "panels.yml"))


def filled(text, labels):
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda m: labels[m[1]], text)


@needs_promtool
@pytest.mark.parametrize("case", list(CASES))
def test_promtool_fires_the_same_alerts(case, tmp_path):
    """The same scrapes, and Prometheus' own evaluation of the same file, `for` included."""
    happen, want = CASES[case]
    scrapes = Server().play(happen, minutes=14)
    series = {}
    for n, (_, values) in enumerate(scrapes):
        for labels, v in values.items():
            series.setdefault(labels, ["_"] * len(scrapes))[n] = f"{v:.10g}"
    rows = []
    for labels, values in series.items():
        inside = ",".join(f"{k}={json.dumps(v)}" for k, v in sorted(labels) if k != "__name__")
        rows.append({"series": f"{dict(labels)['__name__']}{{{inside}}}", "values": " ".join(values)})
    tests = []
    for rule in RULES:
        labels = {"job": "minillm", "instance": "a:8000", "model_name": "small", **rule["labels"]}
        kind = "out_of_memory" if case.startswith("out of memory") else "engine"
        own = {"MinillmErrors": {"kind": kind}, "MinillmMetricsFail": {"where": "gap"}}
        labels |= own.get(rule["alert"], {})
        if rule["alert"] == "MinillmDown":
            labels.pop("model_name")
        notes = {name: filled(text, labels) for name, text in rule["annotations"].items()}
        fires = [{"exp_labels": labels, "exp_annotations": notes}] if rule["alert"] in want else []
        tests.append({"eval_time": "14m", "alertname": rule["alert"], "exp_alerts": fires})
    shutil.copy(FOLDER / "prometheus-rules.yml", tmp_path / "rules.yml")
    whole = {
        "rule_files": ["rules.yml"], "evaluation_interval": "15s",
        "tests": [{"interval": f"{STEP_S:.0f}s", "input_series": rows, "alert_rule_test": tests}],
    }  # fmt: skip
    (tmp_path / "test.yml").write_text(json.dumps(whole))
    promtool("test", "rules", str(tmp_path / "test.yml"), cwd=tmp_path)


# The evaluator ------------------------------------------------------------------------------------------------------


def test_the_evaluator_by_hand():
    key = lambda **labels: frozenset(labels.items())
    scrapes = [
        (0.0, {key(__name__="c", a="x"): 1.0, key(__name__="c", a="y"): 5.0}),
        (60.0, {key(__name__="c", a="x"): 7.0, key(__name__="c", a="y"): 2.0}),  # y began again
    ]
    assert promql.evaluate("rate(c[5m])", scrapes) == {key(a="x"): 0.1, key(a="y"): pytest.approx(2 / 60)}
    assert promql.evaluate("sum(c) + 1", scrapes) == {key(): 10.0}
    assert promql.evaluate('c{a=~"x|z"} > 3', scrapes) == {key(__name__="c", a="x"): 7.0}
    assert promql.evaluate("c > 3 and c < 5", scrapes) == {}
    assert promql.evaluate("1 - 2 - 3", scrapes) == -4.0
    assert promql.evaluate("min_over_time(c[1m])", scrapes) == {key(a="x"): 1.0, key(a="y"): 2.0}
    assert promql.evaluate("deriv(c[1m]) > 0", scrapes) == {key(a="x"): 0.1}


def test_quantiles_are_within_a_bucket_of_the_truth():
    rng = random.Random(0)
    server, waited = Server(), [rng.lognormvariate(-1, 1) for _ in range(2000)]

    def happen(s, i):
        for k, ttft in enumerate(waited[200 * i : 200 * i + 200]):
            serve(s.engine, f"{i}-{k}", ttft=ttft)

    scrapes = server.play(happen)
    for q in (0.5, 0.95, 0.99):
        text = f"histogram_quantile({q}, sum by (le) (rate(minillm:time_to_first_token_seconds_bucket[5m])))"
        (got,) = promql.evaluate(text, scrapes).values()
        true = sorted(waited)[int(q * len(waited))]
        assert true / 1.67 < got < true * 1.67  # the widest bucket goes from 3 to 5
