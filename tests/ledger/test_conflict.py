"""CONFLICT entries: named by what they hold, read back only when they hold it, folded as the event itself."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import orjson
import pytest

from ledger import canonical
from ledger.chain.conflict import Event, conflict_hlc, conflict_payload, held_event
from ledger.errors import InvalidInputError
from ledger.hlc import Hlc
from ledger.machines import jobs

PAYLOAD = canonical.encode({"type": "JobCompleted", "fence_token": 2, "final_status": "ok"}).decode()
DIGEST = sha256(PAYLOAD.encode()).hexdigest()
EVENT = Event("1704931200000:3:node-1", "job-1", "COMPLETE", DIGEST)
KEPT = "ab" * 32
PAGE = Path(__file__).parents[2] / "docs" / "formats" / "bundle.md"


def test_the_documented_example() -> None:
    hlc, page = conflict_hlc(EVENT), PAGE.read_text()
    assert {f"`{text}`" in page for text in (hlc, PAYLOAD, DIGEST)} == {True}
    assert Hlc.parse(hlc.text()) == hlc
    spelt = canonical.encode(["1704931200000:3:node-1", "job-1", "COMPLETE", DIGEST])
    assert hlc.node_id == "conflict-" + sha256(spelt).hexdigest()[:40]


def test_every_part_of_the_event_is_in_its_name() -> None:
    others = [
        EVENT._replace(t_hlc="1704931200000:3:node-2"),
        EVENT._replace(job_id="job-2"),
        EVENT._replace(action="FAIL"),
        EVENT._replace(payload_digest=KEPT),
    ]
    assert len({conflict_hlc(event) for event in (EVENT, *others)}) == 5


def test_an_event_without_a_valid_hlc_has_no_conflict() -> None:
    with pytest.raises(InvalidInputError):
        conflict_hlc(EVENT._replace(t_hlc="yesterday"))


def test_what_is_held_is_read_back_and_nothing_else() -> None:
    stored = orjson.loads(conflict_payload(EVENT, PAYLOAD, KEPT))
    held = held_event(stored, "job-1")
    assert held is not None
    assert (held.event, held.payload, held.kept_digest, held.hlc) == (EVENT, PAYLOAD, KEPT, Hlc.parse(EVENT.t_hlc))
    for changed in ({"digest": KEPT}, {"hlc": "x"}, {"payload": PAYLOAD + " "}, {"action": 1}, {"more": "x"}):
        assert held_event({**stored, **changed}, "job-1") is None, changed
    assert held_event({}, "job-1") is None


def test_a_conflict_says_of_its_job_what_the_event_would() -> None:
    stored = orjson.loads(conflict_payload(EVENT, PAYLOAD, KEPT))
    hlc = conflict_hlc(EVENT)
    digest = sha256(conflict_payload(EVENT, PAYLOAD, KEPT)).hexdigest()
    said = jobs.said_of_job("CONFLICT", stored, hlc, digest, "job-1")
    assert said == ("COMPLETE", orjson.loads(PAYLOAD), Hlc.parse(EVENT.t_hlc), DIGEST)
    refused = EVENT._replace(action="REFUSED")
    about_no_job = orjson.loads(conflict_payload(refused, PAYLOAD, KEPT))
    assert jobs.said_of_job("CONFLICT", about_no_job, hlc, digest, "job-1") is None
    assert jobs.said_of_job("CONFLICT", {"payload": []}, hlc, digest, "job-1") is None
