"""The files in `deploy`: what they name exists in the server, and they are as safe as they say."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bothways.cli.main import app as cli
from bothways.serving.app import app
from bothways.serving.errors import DEFAULT_LIMITS, STATUS, RequestError
from bothways.serving.exchange import Metrics
from bothways.serving.routes import PROBES, ROUTES
from bothways.serving.run import KEEP_ALIVE_SECONDS
from running_server import running

yaml = pytest.importorskip("yaml", reason="needs PyYAML")
DEPLOY = Path(__file__).parents[2] / "deploy"


def load(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text("utf8")))


DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text("utf8"))
(COMPOSE,) = load("compose.yaml")
RULES = load("prometheus/alerts.yml")[0]["groups"][0]["rules"]
(DEPLOYMENT,) = (each for each in load("kubernetes.yaml") if each["kind"] == "Deployment")
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


METRICS = Metrics(100, lambda: True)
METRICS.loaded("films", 1)
NEW = METRICS.text().decode().splitlines()
"""The rows of a server that has answered nothing."""
METRICS.request("/classify", "films", 200, 0.1)
METRICS.answered("films", 1, 5, 0, 0.1)
METRICS.batch(5, 1, 0.1)
ROWS = METRICS.text().decode().splitlines()


def test_every_metric_that_is_named_exists():
    names = {re.split(r"[{ ]", row)[0] for row in ROWS if not row.startswith("#")}
    files = ["grafana/dashboard.json", "prometheus/alerts.yml", "kubernetes.yaml"]
    for file in files:
        found = set(re.findall(r"\bbothways_\w+", (DEPLOY / file).read_text("utf8")))
        assert found
        assert found <= names, file
    dashboard = (DEPLOY / files[0]).read_text("utf8")
    counted = {re.sub(r"_(total|created|bucket|sum|count)$", "", name) for name in names}
    shown = {name for name in counted if name in dashboard}
    assert counted - shown == {"bothways_batch_sequences"}  # all others are on the dashboard
    # A counter is there before it counts, else its first increase would be missed.
    assert 'bothways_texts_total{model="films"} 0.0' in NEW


def sources() -> dict[str, str]:
    """The files with queries of Prometheus, by name."""
    files = ("grafana/dashboard.json", "prometheus/alerts.yml")
    return {name: (DEPLOY / name).read_text("utf8").replace('\\"', '"') for name in files}


def test_the_labels_that_are_named_exist():
    for source in sources().values():
        # instance and job are Prometheus' own, le belongs to histograms
        labels = set(re.findall(r'[{,]\s*(\w+)(?:=~|!~|!=|=)"', source)) - {"instance", "job"}
        assert {"status", "route"} <= labels
        assert all(any(f'{label}="' in row for row in ROWS) for label in labels), labels


def test_the_dashboard_is_one_that_grafana_reads():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    for n, a in enumerate(places):
        assert a["x"] + a["w"] <= 24
        for b in places[n + 1 :]:
            apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
            assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
    sources = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]}
    assert sources == {load("grafana/datasources.yaml")[0]["datasources"][0]["uid"]}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")


def test_requests_that_are_counted_leave_out_probes_and_nothing_else():
    for file, source in sources().items():
        (pattern,) = set(re.findall(r'route!~"([^"]*)"', source))
        for path in (*PROBES, "/metrics"):
            assert re.fullmatch(pattern, path), (file, path)
        for path in (*ROUTES, "unknown"):
            assert not re.fullmatch(pattern, path), (file, path)


def test_refused_requests_are_divided_by_all_requests():
    """A request that is refused unread has no model, and a probe that fails is no request."""
    (alert,) = (rule["expr"] for rule in RULES if rule.get("alert") == "BothwaysRefuses")
    (panel,) = (p["targets"][0]["expr"] for p in DASHBOARD["panels"] if p["title"] == "Refused")
    for expression in (alert, panel):
        refused, every = (part for part in expression.split(" / "))
        assert re.sub(r"status=~[^,}]*,?", "", refused).count("route!~") == 1
        assert every.count("route!~") == 1
        assert "model" not in every


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_prometheus_takes_the_files_and_fires_the_alerts():
    folder = DEPLOY / "prometheus"
    for words, given in (
        (["check", "config", "--syntax-only", "prometheus.yml"], b""),
        (["check", "rules", "alerts.yml"], b""),
        (["check", "metrics"], METRICS.text()),
        (["test", "rules", "alerts_test.yml"], b""),
    ):
        options: Any = {"cwd": folder, "input": given, "capture_output": True}
        done = subprocess.run(["promtool", *words], check=False, **options)
        assert done.returncode == 0, (words, done.stdout, done.stderr)


def test_every_alert_has_a_case():
    tests = load("prometheus/alerts_test.yml")[0]["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case.get("exp_alerts")}
    quiet = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert fires == quiet == {rule["alert"] for rule in RULES}


def grouping(operand: str) -> str | None:
    """Return the labels by which an operand is summed; None for one that keeps all its labels."""
    found = re.match(r"\(?\s*(?:sum|min|max|avg)(?: by \(([^)]*)\))?\s*\(", operand.strip())
    return found and (found[1] or "")


def test_both_sides_of_a_division_have_the_same_labels():
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    expressions = [*panels, *(rule["expr"] for rule in RULES)]
    divisions = [expression.split(" / ") for expression in expressions if " / " in expression]
    assert len(divisions) >= 5
    for left, right in divisions:  # without a match, the result is empty
        assert grouping(left) == grouping(right), (left, right)


def check_words(words: list[str]) -> dict[str, str]:
    """Parse the arguments of a container as the command does."""
    _, bound, *_ = cli.parse_args(["serve", *words], exit_on_error=False, print_error=False)
    return dict(bound.arguments)


def test_the_commands_of_containers_are_those_of_the_server():
    image = (DEPLOY / "Dockerfile").read_text("utf8")
    assert json.loads(image.split("ENTRYPOINT ")[1].splitlines()[0]) == ["bothways", "serve"]
    default = json.loads(image.split("\nCMD ")[1].splitlines()[0])
    for words in (default, COMPOSE["services"]["bothways"]["command"], CONTAINER["args"]):
        assert check_words(words)["host"] == "0.0.0.0"
        assert str(check_words(words)["api_key_file"]) == "/run/secrets/key"
    delay = float(check_words(CONTAINER["args"])["drain_delay"])
    assert POD["terminationGracePeriodSeconds"] > delay + DEFAULT_LIMITS.drain_seconds
    grace = int(COMPOSE["services"]["bothways"]["stop_grace_period"].removesuffix("s"))
    assert grace > 2 + DEFAULT_LIMITS.drain_seconds
    kinds = ("startup", "readiness", "liveness")
    probes = [CONTAINER[f"{kind}Probe"]["httpGet"]["path"] for kind in kinds]
    assert probes == ["/ready", "/ready", "/live"]


def unit() -> dict[str, str]:
    """The settings of the service of systemd."""
    lines = (DEPLOY / "bothways@.service").read_text("utf8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_the_service_starts_the_server_and_waits_for_its_end(tmp_path):
    program, command, *words = unit()["ExecStart"].replace("%i", "8080").split()
    assert command == "serve"
    delay = float(check_words(words)["drain_delay"])
    assert int(unit()["TimeoutStopSec"]) > delay + DEFAULT_LIMITS.drain_seconds
    if shutil.which("systemd-analyze") is None:
        return
    here = tmp_path / "bothways@8080.service"
    service = (DEPLOY / "bothways@.service").read_text("utf8")
    here.write_text(service.replace(program, sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_proxy_passes_what_the_server_says(tmp_path):
    source = (DEPLOY / "nginx.conf").read_text("utf8")
    size, seconds = re.findall(r"client_max_body_size (\d+)m;|proxy_read_timeout (\d+)s;", source)
    assert int(size[0]) << 20 > DEFAULT_LIMITS.body_bytes
    assert int(seconds[1]) > DEFAULT_LIMITS.deadline_seconds
    # The proxy closes its idle connections first, after 60 s by default: else a request may use one
    # that the server is closing.
    assert "keepalive_timeout" not in source
    assert KEEP_ALIVE_SECONDS > 60
    (command,) = re.findall(r"#   bothways serve (.*)", source)
    (name,) = re.findall(r"server_name (.*);", source)
    assert check_words(command.split())["allow_host"] == (name,)
    (body,) = re.findall(r"return 503 '(.*)';", source)
    assert STATUS[json.loads(body)["error_type"]] == 503
    error = RequestError("not_ready", json.loads(body)["error"]["message"])
    assert json.loads(body) == error.to_json()
    if shutil.which("nginx") is None:
        return
    (tmp_path / "site.conf").write_text(source.replace("listen 80;", "listen 127.0.0.1:8099;"))
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid; events {{}} http {{ access_log off; include {tmp_path}/site.conf; }}"
    )
    words = ["nginx", "-t", "-q", "-e", "stderr", "-p", tmp_path, "-c", tmp_path / "nginx.conf"]
    done = subprocess.run(words, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_health_check_asks_no_proxy(predictors):
    image = (DEPLOY / "Dockerfile").read_text("utf8")
    (words,) = re.findall(r"HEALTHCHECK.*\\\n *CMD (\[.*\])", image)
    # Docker passes the proxies of its configuration on to containers.
    proxies = {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    served = app({"embed": predictors["embed"]})
    with running(served) as url:
        port = url.rpartition(":")[2]
        command = [sys.executable, *(w.replace("8080", port) for w in json.loads(words)[1:])]
        for draining in (False, True):
            served.draining = draining
            done = subprocess.run(command, env=os.environ | proxies, check=False)
            assert done.returncode == int(draining)


def test_containers_are_not_privileged():
    image = (DEPLOY / "Dockerfile").read_text("utf8")
    last = image.rpartition("\nFROM ")[2]
    assert "\nUSER 10001" in last
    assert "HEALTHCHECK" in last
    assert "HF_HUB_OFFLINE=1" in last
    assert "gcc" not in last
    service = COMPOSE["services"]["bothways"]
    assert service["read_only"]
    assert service["volumes"][0].endswith(":ro")
    for each in COMPOSE["services"].values():
        assert each["cap_drop"] == ["ALL"]
        assert all(port.startswith("127.0.0.1:") for port in each["ports"])
    assert POD["securityContext"]["runAsNonRoot"]
    assert POD["automountServiceAccountToken"] is False
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    assert CONTAINER["securityContext"]["allowPrivilegeEscalation"] is False


def test_files_that_are_mounted_and_copied_exist():
    mounted = [v.split(":")[0] for s in COMPOSE["services"].values() for v in s.get("volumes", ())]
    for place in (place for place in mounted if place.startswith("./")):
        assert (DEPLOY / place).exists(), place
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text("utf8").splitlines()
    for place in (line.removeprefix("!") for line in kept if line.startswith("!")):
        assert (DEPLOY.parent / place).exists(), place
    (prometheus,) = load("prometheus/prometheus.yml")
    for file in prometheus["rule_files"]:
        (rules,) = load(f"prometheus/{file}")
        assert all(rule["annotations"]["summary"] for rule in rules["groups"][0]["rules"])


# Of Kubeflow Trainer 2.3: an older one has podSpecOverrides (2.0) or podTemplateOverrides (2.1).
TRAIN_JOB = {"activeDeadlineSeconds", "initializer", "managedBy", "runtimePatches"}
TRAIN_JOB |= {"runtimeRef", "suspend", "trainer"}


def test_a_train_job_has_fields_that_kubeflow_has_and_mounts_its_volumes():
    (job,) = load("training/kubernetes-trainjob.yaml")
    assert set(job["spec"]) <= TRAIN_JOB
    (patch,) = job["spec"]["runtimePatches"]
    assert patch["manager"]  # the field is required
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (node["name"], container["name"]) == ("node", "node")  # the names of the runtime
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert pod["terminationGracePeriodSeconds"] >= 60
