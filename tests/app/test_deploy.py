"""The examples of deploying: settings that there are, callers who say who they are, and commands that work."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]

from app.dev.embedded import EmbeddedPostgres
from app.runtime.principals import RULES
from app.runtime.settings.config import load_settings
from app.runtime.settings.words import ENV_NOT_SETTINGS
from tests.app.certificates import Authority
from tests.app.service_thread import serving
from tests.tally import Tally, bare_environment, run_tally

ROOT = Path(__file__).parents[2]
COMPOSE = (ROOT / "docker-compose.yml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE)["services"]
REPLICATED: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.replicated.yml").read_text())["services"]
RULES_OF = {
    name: [
        rule
        for group in yaml.safe_load((ROOT / f"deploy/prometheus/{name}.yml").read_text())["groups"]
        for rule in group["rules"]
    ]
    for name in ("alerts", "rules")
}
ALERTS = RULES_OF["alerts"]
BY_DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")


def environment_of(service: str, services: dict[str, dict[str, Any]] = SERVICES) -> dict[str, str]:
    """The environment of a service, where nobody sets what may be set."""
    return {name: BY_DEFAULT.sub(r"\1", value) for name, value in services[service]["environment"].items()}


@pytest.mark.parametrize("service", ["migrate", "tallystick", "tally"])
def test_the_environment_of_each_service_is_one_that_is_taken(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of(service).items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert settings.auth.mode == ("tokens" if service == "tallystick" else "none")
    assert not settings.auth.allow_open


def test_the_page_of_a_machine_has_a_node_ask_for_tokens_and_names_the_python_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/install.md").read_text()
    (oldest,) = re.findall(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert re.findall(r"^python(\S+) -m venv ", page, re.MULTILINE) == [oldest]
    (command,) = [line for line in page.splitlines() if line.startswith("[ -e /etc/tallystick/tally.toml ]")]
    here = command.replace("/etc/tallystick", str(tmp_path)).replace("-g tallystick ", "")
    subprocess.run(["sh", "-c", here], check=True)
    monkeypatch.setenv("TALLY_CONFIG", str(tmp_path / "tally.toml"))
    assert load_settings().auth.mode == "tokens"


@pytest.mark.parametrize("service", ["tallystick", "tallystick-b"])
def test_the_settings_of_each_replicated_node_are_ones_that_are_taken(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment_of(service, REPLICATED).items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert settings.wal.ack_mode.is_replicated
    assert settings.auth.mode == "tokens"
    assert settings.database_url == environment_of("tallystick")["TALLY_DATABASE_URL"]
    members = [each.address.partition(":")[0] for each in settings.replication.members]
    assert members == [name for name in REPLICATED if name.startswith("safekeeper")]
    # Whose name is in the certificate, by the script that makes them, may write the log and is believed to be the host.
    certified = REPLICATED["certificates"]["command"]
    assert {settings.node_id, *members} <= {*certified}
    files = {settings.replication.tls_cert, settings.replication.tls_key}
    assert files == {Path(f"/certificates/{settings.node_id}.{kind}") for kind in ("pem", "key")}


def test_certificates_are_made_that_safekeepers_and_nodes_take(tmp_path: Path) -> None:
    made = tmp_path / "made"
    script = ["sh", str(ROOT / "deploy/certificates.sh"), str(made), "localhost", "node-a"]
    subprocess.run(script, check=True)
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    assert {*before} == {"ca.pem", "localhost.pem", "localhost.key", "node-a.pem", "node-a.key"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in made.iterdir())
    subprocess.run(script, check=True)
    assert {path.name: path.read_bytes() for path in made.iterdir()} == before, "what is there is kept"

    def files(name: str) -> list[str]:
        return ["--tls-cert", f"{made}/{name}.pem", "--tls-key", f"{made}/{name}.key", "--tls-ca", f"{made}/ca.pem"]

    keep = ["safekeeper", "serve", "--dir", str(tmp_path / "kept"), "--listen", "127.0.0.1:0", *files("localhost")]
    with Tally(*keep, env=bare_environment(), stderr=subprocess.PIPE, text=True) as keeper:
        try:
            assert keeper.stderr is not None
            (port,) = re.findall(r'"address": "127.0.0.1:(\d+)"', keeper.stderr.readline())
            asked = run_tally("safekeeper", "status", f"localhost:{port}", *files("node-a"))
            assert (asked.returncode, "0 logs" in asked.stdout) == (0, True), asked.stderr
        finally:
            keeper.terminate()


def test_what_alerts_and_dashboards_ask_for_is_measured() -> None:
    known = (ROOT / "ledger/facts/metrics.py").read_text() + (ROOT / "cli/safekeeper.py").read_text()
    each = [*ALERTS, *RULES_OF["rules"]]
    recorded = {rule["record"] for rule in each if "record" in rule}
    board = json.loads((ROOT / "deploy/grafana/dashboards/tallystick.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    said = [rule["expr"] for rule in each]
    said += [target["expr"] for panel in panels for target in panel.get("targets", ())]
    names = {name for expression in said for name in re.findall(r"\b[a-z]+(?:[_:][a-z0-9_:]+)+", expression)}
    names -= {"group_left", "histogram_quantile", "last_over_time", "min_over_time"}
    measured = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in names - recorded}
    assert len(measured) > 20
    assert not {name for name in measured if f'"{name}"' not in known}


@pytest.mark.parametrize("is_secured", [False, True], ids=["plain", "TLS"])
def test_the_image_asks_the_service_whether_it_is_ready(
    postgres: EmbeddedPostgres, tmp_path: Path, is_secured: bool
) -> None:
    (said,) = re.findall(r"HEALTHCHECK --.*?CMD (\[.*?\])\n", (ROOT / "deploy/Dockerfile").read_text(), re.DOTALL)
    python, option, program = json.loads(said)
    assert (python, option, "127.0.0.1:8080" in program) == ("python", "-c", True)
    pair = Authority(tmp_path / "certificates").issue("service")
    tls = {"cert": str(pair.cert), "key": str(pair.key)} if is_secured else {}
    there = bare_environment() | {f"TALLY_TLS__{name.upper()}": path for name, path in tls.items()}
    with serving(postgres, tmp_path / "node", "health_check", tls=tls) as url:
        asked = [sys.executable, "-c", program.replace("127.0.0.1:8080", url.partition("://")[2])]
        assert subprocess.run(asked, env=there, capture_output=True).returncode == 0
    assert subprocess.run(asked, env=there, capture_output=True).returncode == 1


def test_every_alert_is_in_the_runbook_by_its_name() -> None:
    alerts = re.findall(r"- alert: (\w+)", (ROOT / "deploy/prometheus/alerts.yml").read_text())
    table = (ROOT / "docs/runbook.md").read_text().partition("## Alerts by name")[2]
    assert sorted(re.findall(r"`([A-Z][a-z]\w+)`", table)) == sorted(alerts)


def test_every_check_that_can_fail_is_in_the_runbook_and_wakes_someone(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    with serving(postgres, tmp_path / "node", "every_check") as url:
        checks = {*httpx.get(f"{url}/readyz").json()["checks"]} | {"issuer"}
        measured = set(re.findall(r'readyz_check_failing{check="(\w+)"} 0.0', httpx.get(f"{url}/metrics").text))
    assert {*re.findall(r"^### (\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)} == checks
    # Without these two the node does not answer, or ends: NodeDown says so. There is no issuer here.
    assert measured == checks - {"accepting", "writer", "issuer"}
    alerts = {rule["alert"]: rule["expr"] for rule in ALERTS}
    left_to_others = re.findall(r'check!~"([^"]+)"', alerts["CheckFailing"])[0].split("|")
    needed = re.findall(r'check=~"([^"]+)"', alerts["NotReady"])[0].split("|")
    assert {*left_to_others} - {*needed} == {"breaks", "clock", "exchange", "archive"}
    assert {"ChainBreakOpen", "ClockAhead", "RegionNotImported", "ArchiveNotFilled"} <= {*alerts}, (
        "that have alerts of their own"
    )
    assert {*needed, *left_to_others} <= checks


def test_the_service_logs_in_as_the_role_that_owns_nothing() -> None:
    assert environment_of("tallystick")["TALLY_DATABASE_URL"].startswith("postgresql://tallystick:")


def test_prometheus_shows_a_token_that_is_no_part_of_the_repository() -> None:
    (job,) = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    mounted = "./deploy/prometheus:/etc/prometheus:ro"
    assert mounted in SERVICES["prometheus"]["volumes"]
    shown = job["authorization"]["credentials_file"]
    assert shown == "/etc/prometheus/token"
    assert "deploy/prometheus/token" in (ROOT / ".gitignore").read_text().splitlines()
    assert RULES["GET /metrics"].right == "operate"


def test_the_first_token_is_made_as_the_file_says(tmp_path: Path) -> None:
    commands = re.findall(r"run --rm -T (\w+) (token [^>\\\n]+)", COMPOSE)
    assert [service for service, _ in commands] == ["tallystick", "tally"]
    (_, first), (_, second) = commands
    # As in the container: its settings, and its folder of data.
    there = environment_of("tallystick") | {"TALLY_DATA_DIR": str(tmp_path / "data")}
    made = run_tally(*shlex.split(first), folder=tmp_path, **there)
    assert made.returncode == 0, made.stderr
    assert re.fullmatch(r"tally_[A-Za-z0-9_-]{43}\n", made.stdout)
    assert f"the service whose data is in {tmp_path / 'data'}" in made.stderr
    asked = environment_of("tally") | {"TALLY_URL": "http://127.0.0.1:9", "TALLY_TOKEN": made.stdout.strip()}
    tried = run_tally(*shlex.split(second), folder=tmp_path, **asked)
    assert (tried.returncode, "no answer from http://127.0.0.1:9" in tried.stderr) == (1, True)
    assert not {*environment_of("tally")} - ENV_NOT_SETTINGS
    assert os.listdir(tmp_path / "data")
