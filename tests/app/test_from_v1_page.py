"""The page on coming from v1 names everything that v1 has, and only what exists here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
import yaml  # type: ignore[import-untyped]

from app.dev.embedded import DATABASE, EmbeddedPostgres
from cli import Commands
from ledger.bundle import v1
from ledger.facts.events import JOB_EVENTS
from ledger.facts.metrics import METRICS, Kind
from tests.app.test_openapi import OPERATIONS
from tests.app.test_settings_page import fields
from tests.app.v1_scheduler import SCHEMA
from tests.conftest import connected_to

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-v1.md").read_text()

OF_V1 = {
    "Settings": {
        *(f"hlc.{name}" for name in ("enabled", "nodeId", "maxClockSkew", "persistenceInterval")),
        *(f"chain.{name}" for name in ("enabled", "batchSize", "batchInterval", "signSnapshots", "keyId")),
    },
    "Tables and columns": {
        f"{table}.{column}"
        for table, columns in re.findall(r"CREATE TABLE scheduler\.(\w+) \((.*?)^\);", SCHEMA, re.MULTILINE | re.DOTALL)
        for column in re.findall(r"^  (\w+) ", columns, re.MULTILINE)
    },
    "Actions": set(v1.ACTIONS),
    "Metrics, alert, dashboard": {
        *("hlc_ticks_total", "hlc_clock_skew_rejections_total", "hlc_physical_offset_seconds"),
        *(f"scheduler_chain_{name}_total" for name in ("entries", "verifications", "verification_failures")),
        *("scheduler_batch_snapshots_total", "HlcClockSkewExceeded", "hlc-queue-metrics.json"),
    },
    "Commands and routes": {
        "stella scheduler chain verify --tenant-id T",
        "GET /api/v1/scheduler/chain/verify?tenantId=T",
        "export of an offline node's job log",
        "import on a connected node",
        "verification on startup and periodically",
    },
}


def rows(heading: str) -> dict[str, str]:
    """What the page says of each name of v1."""
    part = PAGE.partition(f"### {heading}\n")[2].partition("\n##")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(each) == 3 for each in cells)
    assert all(note for _, here, note in cells if here == "left out"), "the page says why"
    return {name.strip("`"): here for name, here, _ in cells}


def named(heading: str) -> set[str]:
    """The names of things here."""
    return {name for here in rows(heading).values() for name in re.findall(r"`([^`]+)`", here)}


@pytest.mark.parametrize("heading", OF_V1)
def test_every_name_of_v1_has_its_place_or_is_left_out_with_a_reason(heading: str) -> None:
    assert rows(heading).keys() == OF_V1[heading]
    assert len(OF_V1[heading]) >= 5
    assert all(here == "left out" or "`" in here for here in rows(heading).values())


def test_the_settings_exist() -> None:
    assert named("Settings") <= fields().keys()


async def test_the_columns_exist(postgres: EmbeddedPostgres) -> None:
    async with connected_to(postgres.superuser_url(DATABASE)) as connection:
        found = await connection.fetch(
            "SELECT table_name || '.' || column_name FROM information_schema.columns WHERE table_schema = 'scheduler'"
        )
    assert named("Tables and columns") <= {row[0] for row in found}


def test_the_actions_are_those_of_the_events_that_the_page_names() -> None:
    assert {JOB_EVENTS[here.strip("`")].action: here for here in rows("Actions").values()} == rows("Actions")


def test_the_metrics_the_alert_and_the_dashboard_exist() -> None:
    metrics = {f"{name}_total" if metric.kind is Kind.COUNTER else name for name, metric in METRICS.items()}
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    files = {name for name in named("Metrics, alert, dashboard") if (ROOT / name).is_file()}
    assert len(files) == 1
    assert named("Metrics, alert, dashboard") <= metrics | alerts | files


def test_the_commands_routes_and_settings_exist() -> None:
    routes = {f"{method} {path}" for method, path in OPERATIONS}
    for name in named("Commands and routes"):
        if name.startswith("tally "):
            _, command, *more = name.split()
            found = Commands().get_command(
                typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None))), command
            )
            while (inner := getattr(found, "commands", None)) is not None:
                found = inner[more.pop(0)]
            options = {option for parameter in found.params for option in parameter.opts}
            assert {word for word in more if word.startswith("--")} <= options
        else:
            assert name in routes | fields().keys()


def test_the_events_that_the_scheduler_sends_exist() -> None:
    part = PAGE.partition("## What stays with the scheduler\n")[2]
    names = {name for name in re.findall(r"`(\w+)`", part) if name[0].isupper()}
    assert names == JOB_EVENTS.keys()
