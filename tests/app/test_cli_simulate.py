"""``tally simulate``: a log through the commitment machine, in memory and in a file that outlives the process."""

from __future__ import annotations

import json
import random
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lab.simulated_state import Taken, stored_state
from ledger import canonical
from ledger.machines.commitments import Commitments
from ledger.machines.promises import RULES, read_proposal, rejected_payload
from tests.app.bundles import bundle_of
from tests.ledger.pruned import pruned_race
from tests.ledger.test_carried import FLOOR, RACE
from tests.tally import run_tally


def drawn(count: int, seed: int = 7) -> list[dict[str, Any]]:
    """Capacities, and proposals of which some must lose."""
    random_ = random.Random(seed)
    log: list[dict[str, Any]] = [{"node": f"n{n}", "capacity": {"cpu_millis": 4}} for n in range(3)]
    for _ in range(count):
        node, amount = f"n{random_.randrange(3)}", {"cpu_millis": random_.randrange(1, 3)}
        commitment: dict[str, Any] = {
            "kind": "Placement", "capsule": f"c{random_.randrange(20)}", "node": node, "reservation": amount
        }  # fmt: skip
        bet: dict[str, Any] = {"kind": "NodeFreeOf", "node": node, "at_least": amount}
        if random_.random() < 0.6:
            commitment = {"kind": "Revocation", "index": random_.randrange(max(1, len(log) - 40), len(log) + 1)}
            bet = {"kind": "None"}
        log.append({"commitment": commitment, "precondition": bet})
    return log


def write(path: Path, log: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in log))
    return path


def simulated(log: Path, *options: object, code: int = 0) -> dict[str, Any]:
    done = run_tally("simulate", log, "--json", *options)
    assert done.returncode == code, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def facts(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in ("log", "duration_s", "entries_per_second")}


def test_a_log_in_parts_with_its_state_in_a_file_comes_to_the_same_as_all_of_it_in_memory(tmp_path: Path) -> None:
    log = drawn(400)
    whole = simulated(write(tmp_path / "whole.ndjson", log))
    assert (whole["accepted"] > 20, whole["rejected"] > 50, whole["capacities"]) == (True, True, 3)
    assert whole["packing"]["cpu_millis"]["capacity"] == 12
    state = tmp_path / "state.sqlite"
    simulated(write(tmp_path / "part.ndjson", log[:150]), "--state", state)
    assert facts(simulated(tmp_path / "whole.ndjson", "--state", state)) == facts(whole)
    assert facts(simulated(tmp_path / "whole.ndjson", "--state", state)) == facts(whole), "all of it was taken"


def test_a_bundle_from_a_floor_on_begins_with_what_is_carried(tmp_path: Path) -> None:
    ledger = pruned_race(RACE, FLOOR)
    whole, rest = tmp_path / "whole.tar", tmp_path / "rest.tar"
    whole.write_bytes(bundle_of(ledger))
    rest.write_bytes(bundle_of(ledger, FLOOR + 1))
    for state in ((), ("--state", tmp_path / "state")):
        of_all, of_rest = simulated(whole), simulated(rest, *state)
        assert (of_rest["different"], of_rest["rules"]) == (0, of_all["rules"])
        assert {name: of_rest[name] for name in ("live", "nodes", "reserved")} == {
            name: of_all[name] for name in ("live", "nodes", "reserved")
        }


def test_the_state_of_another_log_is_refused_and_stays(tmp_path: Path) -> None:
    log, state = drawn(20), tmp_path / "state.sqlite"
    other = [log[0], *drawn(20, seed=8)[1:]]
    before = facts(simulated(write(tmp_path / "log.ndjson", log), "--state", state))
    for wrong in (other, log[:10]):
        done = run_tally("simulate", write(tmp_path / "other.ndjson", wrong), "--state", state)
        assert (done.returncode, "another log" in done.stderr) == (1, True)
    assert facts(simulated(tmp_path / "log.ndjson", "--state", state)) == before


def test_what_was_not_stored_is_taken_again(tmp_path: Path) -> None:
    placed = (
        b'{"commitment":{"kind":"Placement","capsule":"%c","node":"n","reservation":{}},"precondition":{"kind":"None"}}'
    )
    with stored_state(tmp_path / "state.sqlite") as stored:
        machine = Commitments(stored.live)
        assert machine.decide(1, read_proposal(placed % b"a")) is None
        stored.commit(Taken(1, b"", b""))
        assert machine.decide(2, read_proposal(placed % b"b")) is None
    with stored_state(tmp_path / "state.sqlite") as stored:
        assert (list(stored.live.active), stored.taken().entries) == ([1], 1)
        assert sorted(stored.live.holders) == ["capsule:a"]
        assert dict(stored.live.neighbours) == {("node:n", 1): (0, 0)}


def test_a_state_from_before_rules_had_versions_goes_on_by_rules_1(tmp_path: Path) -> None:
    with stored_state(tmp_path / "state.sqlite") as stored:
        stored.commit(Taken(1, b"", b""))
    with closing(sqlite3.connect(tmp_path / "state.sqlite")) as file:
        file.executescript("PRAGMA user_version = 0; DROP TABLE rules")
    with stored_state(tmp_path / "state.sqlite") as stored:
        assert dict(stored.live.rules) == {RULES: 1}


def test_proposals_of_ones_own_are_judged_by_the_newest_rules_or_by_those_that_are_asked_for(tmp_path: Path) -> None:
    placed = {"kind": "Placement", "capsule": "a", "node": "n", "reservation": {"cpu_millis": 2}}
    log = write(tmp_path / "log.ndjson", [{"node": "n", "capacity": {"cpu_millis": 1}}, {"commitment": placed}])
    newest = simulated(log)
    assert (newest["rules"], newest["reasons"]) == (2, {"over-capacity": 1})
    assert (simulated(log, "--rules", 1)["accepted"], simulated(log, "--rules", 1)["reasons"]) == (1, {})


def test_entries_that_record_another_verdict_are_told(tmp_path: Path) -> None:
    said = {"commitment": {"kind": "IdentityBind", "capsule": "a", "identity": "x"}, "precondition": {"kind": "None"}}
    machine = Commitments()
    assert machine.decide(1, read_proposal(canonical.encode(said))) is None
    rejection = machine.decide(2, read_proposal(canonical.encode(said)))
    assert rejection is not None
    accepted = {"seq": 1, "action": "PROPOSE_ACCEPTED", "payload": canonical.encode(said).decode(), "origin": None}
    rejected = {**accepted, "seq": 2, "action": "PROPOSE_REJECTED"}
    rejected["payload"] = rejected_payload(canonical.encode(said), rejection).decode()
    created = {"seq": 3, "action": "ENQUEUE", "payload": "{}", "origin": None}
    imported = {**accepted, "seq": 4, "origin": "elsewhere"}
    right = simulated(write(tmp_path / "right.ndjson", [accepted, rejected, created, imported]))
    assert (right["accepted"], right["rejected"], right["different"]) == (1, 1, 0)
    forged = {**accepted, "seq": 2}
    wrong = simulated(write(tmp_path / "wrong.ndjson", [accepted, forged]), code=2)
    assert (wrong["different"], wrong["first_different"]) == (1, 2)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{}",
        "no json",
        '{"commitment": {"kind": "Placed"}}',
        '{"capacity": 1}',
        '{"action": "PROPOSE_ACCEPTED", "seq": 2, "payload": {}}',
    ],
)
def test_a_line_that_is_nothing_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "log.ndjson").write_text(json.dumps({"node": "n", "capacity": {}}) + "\n" + line + "\n")
    done = run_tally("simulate", tmp_path / "log.ndjson")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search(r"line 2|entry 2 of", done.stderr)
    assert "Error(" not in done.stderr


def test_a_state_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"this is no database, and long enough to tell" * 10)
    write(tmp_path / "log.ndjson", drawn(3))
    done = run_tally("simulate", tmp_path / "log.ndjson", "--state", tmp_path / "state")
    assert (done.returncode, "--state" in done.stderr) == (1, True)
