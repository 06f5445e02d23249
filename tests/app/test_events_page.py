"""The page on events says what the code does: every event, field, action, level, status and read level."""

import re
from pathlib import Path

from app.edge.forms import requests
from app.read.consistency import ReadLevel
from ledger.facts.events import COMMON_FIELDS, JOB_EVENTS
from ledger.facts.statuses import ENDED, STATUSES

PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
COMMON = {"tenant_id", "job_id", "fence_token", "trace_time", "subject", "traceparent", "type"}


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    part = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_event_stands_there_with_its_action_level_and_fields() -> None:
    listed = {}
    for name, _, fields, action, level in rows("Events"):
        listed[name.strip("`")] = (
            action.strip("`"),
            level,
            set(re.findall(r"`(\w+)`", fields)),
            set(re.findall(r"\*\*`(\w+)`\*\*", fields)),
        )
    lines = requests.EVENT_LINE.json_schema()["$defs"]
    expected = {}
    for name, event in JOB_EVENTS.items():
        line = lines[f"{name}Line"]
        own = set(line["properties"]) - COMMON
        expected[name] = (event.action, event.durability.name, own, set(line["required"]) & own)
    assert listed == expected


def test_the_fields_that_every_event_may_have_are_named() -> None:
    assert all(f"`{field.name}`" in PAGE for field in COMMON_FIELDS)


def test_every_status_and_every_read_level_stands_there() -> None:
    assert {row[0].strip("`"): row[1] == "yes" for row in rows("Status")} == {name: name in ENDED for name in STATUSES}
    assert [row[0].strip("`") for row in rows("Reads")] == [level.value for level in ReadLevel]
