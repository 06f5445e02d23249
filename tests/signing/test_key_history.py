"""Which keys count, by what the entries of ``_system`` say: admitted, never self-introduced."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from ledger.facts.events import SystemAction
from ledger.hlc import Hlc
from signing import envelope, key_statement, private_keys
from signing.callers import KeyedJudge, RegisteredCaller, RequiredSignatures, RevokedCaller
from signing.key_history import (
    KeyEvent,
    KeyFold,
    KeyHistory,
    added_facts,
    history_of,
    revoked_facts,
    root_facts,
    rotated_facts,
)
from signing.key_statement import FIELD, Anchor
from signing.keys import KnownCallers
from signing.private_keys import FileSigner
from signing.region_statement import ADMITTED_KEYS_MAX, AdmittedKey, RetiredRegion, RevokedKey, known_regions
from tests.ledger.callers import ED25519, P256

ADDED, ADMITTED = SystemAction.KEY_ADDED, SystemAction.KEY_ADMITTED
ROTATED, REVOKED = SystemAction.KEY_ROTATED, SystemAction.KEY_REVOKED
FORKED = SystemAction.LOG_FORKED

Keys = Mapping[str, FileSigner]
Said = dict[str, Any] | None


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """Keys by name."""
    folder = tmp_path_factory.mktemp("keys")
    return {name: private_keys.generate(folder / f"{name}.pem") for name in ("root", "one", "two", "thief", "late")}


class Entries:
    """The entries about keys of one ledger; entry n has the HLC n seconds."""

    def __init__(self, name: str = "ledger") -> None:
        self._name = name
        self.events: list[KeyEvent] = []
        self._fold = KeyFold()

    @classmethod
    def beginning_with(cls, root: FileSigner, name: str = "ledger") -> Entries:
        entries = cls(name)
        entries.add(ADDED, root_facts(root.public_key, "node-0"))
        return entries

    def forked(self) -> Entries:
        """Another ledger that begins with these entries and then says that it is another."""
        fork = Entries(f"{self._name}'s fork")
        fork.events = [*self.events]
        fork.add(FORKED, {"to_origin": "fork.example/log"})
        return fork

    def add(self, action: str, facts: dict[str, Any], by: FileSigner | None = None, said: Said = None) -> KeyEvent:
        """One more entry; ``by`` vouches for it, for what ``said`` says otherwise than the entry."""
        seq = len(self.events) + 1
        if by is not None:
            facts = {**facts, FIELD: self.statement(action, facts, by, said or {})}
        link = hashlib.sha256(f"{self._name}/{seq}".encode()).hexdigest()
        event = KeyEvent(Anchor(seq, link), Hlc(seq * 1000, 0, "n"), action, {"type": action, **facts})
        self.events.append(event)
        return event

    def statement(self, action: str, facts: dict[str, Any], by: FileSigner, said: dict[str, Any]) -> object:
        root_id = said["root_key_id"] if "root_key_id" in said else self.history().root_key_id
        after = said.get("after", self.events[-1].at)
        return key_statement.sign(said.get("action", action), said.get("facts", facts), root_id, after, by)[FIELD]

    def history(self) -> KeyHistory:
        """What all of them add up to, however much of it was asked for before."""
        history = history_of(self.events)
        assert self._fold.history(tuple(self.events)) == history
        return history

    def admitted(self, keys: Keys) -> list[str]:
        """Names of the keys that count."""
        return [name for name, key in keys.items() if key.key_id in self.history().admitted]


def facts_of(key: FileSigner) -> dict[str, Any]:
    return added_facts(key.public_key, "node-1")


def test_the_first_key_is_the_root_and_another_counts_once_the_root_admits_it(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(ADDED, facts_of(keys["one"]))
    assert entries.admitted(keys) == ["root"]
    assert list(entries.history().waiting) == [keys["one"].key_id]

    entries.add(ADMITTED, entries.history().waiting[keys["one"].key_id].facts, keys["root"])

    history = entries.history()
    assert (history.root_key_id, entries.admitted(keys)) == (keys["root"].key_id, ["root", "one"])
    assert history.admitted[keys["one"].key_id].admitted_by == keys["root"].key_id
    assert history.waiting == {}
    assert history.authorities == {keys["root"].key_id, keys["one"].key_id}

    entries.add(ADDED, facts_of(keys["two"]), keys["one"])
    assert entries.admitted(keys) == ["root", "one", "two"]


@pytest.mark.parametrize("by", ["thief", "two"])
def test_a_key_vouches_neither_for_itself_nor_for_another_while_nobody_has_admitted_it(keys: Keys, by: str) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(ADDED, facts_of(keys["two"]))
    entries.add(ADDED, root_facts(keys["thief"].public_key, "node-x"), keys[by])
    entries.add(ADMITTED, facts_of(keys["thief"]), keys[by])
    entries.add(ROTATED, rotated_facts(keys["thief"].public_key, "node-x", keys["root"].key_id, 1), keys[by])
    entries.add(REVOKED, revoked_facts(keys["root"].key_id, "node-x", Hlc(1, 0, "n"), None), keys[by])
    history = entries.history()
    assert entries.admitted(keys) == ["root"]
    assert history.authorities == {keys["root"].key_id}
    root = history.keys()[keys["root"].key_id]
    assert (root.not_after, root.revoked_from_hlc) == (None, None)


def test_what_has_no_statement_neither_admits_nor_ends_nor_revokes(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(ADDED, facts_of(keys["one"]), keys["root"])
    entries.add(ADMITTED, facts_of(keys["thief"]))
    entries.add(ROTATED, rotated_facts(keys["thief"].public_key, "node-x", keys["one"].key_id, 1))
    entries.add(REVOKED, revoked_facts(keys["one"].key_id, "node-x", Hlc(1, 0, "n"), None))
    one = entries.history().keys()[keys["one"].key_id]
    assert (entries.admitted(keys), one.not_after, one.revoked_from_hlc) == (["root", "one"], None, None)


@pytest.mark.parametrize("field", ["key_id", "public_key_pem", "node_id", "algorithm"])
def test_a_statement_about_one_key_does_not_admit_another(keys: Keys, field: str) -> None:
    entries = Entries.beginning_with(keys["root"])
    other = {**facts_of(keys["one"]), "node_id": "another", "algorithm": "other"}
    vouched = {**facts_of(keys["thief"]), field: other[field]}
    entries.add(ADDED, facts_of(keys["thief"]), keys["root"], {"facts": vouched})
    assert entries.admitted(keys) == ["root"]


@pytest.mark.parametrize("said", [{"action": ROTATED}, {"root_key_id": "0" * 16}, {"after": Anchor(1, "ab" * 32)}])
def test_a_statement_counts_for_one_change_in_one_ledger(keys: Keys, said: dict[str, Any]) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(ADDED, facts_of(keys["thief"]), keys["root"], said)
    assert entries.admitted(keys) == ["root"]


def test_a_statement_from_another_ledger_with_the_same_root_key_says_nothing(keys: Keys) -> None:
    other = Entries.beginning_with(keys["root"], "other")
    statement = other.add(ADDED, facts_of(keys["thief"]), keys["root"]).facts[FIELD]
    entries = Entries.beginning_with(keys["root"])
    entries.add(ADDED, {**facts_of(keys["thief"]), FIELD: statement})
    assert (other.admitted(keys), entries.admitted(keys)) == (["root", "thief"], ["root"])


def test_a_statement_under_the_name_of_the_root_is_by_the_root_and_says_what_it_shows(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    facts = facts_of(keys["thief"])
    forged: Any = entries.statement(ADDED, facts, keys["thief"], {})
    forged["signatures"][0]["keyid"] = keys["root"].key_id
    other: Any = entries.statement(ADDED, facts_of(keys["one"]), keys["root"], {})
    shown: Any = entries.statement(ADDED, facts, keys["thief"], {})
    spaced: Any = entries.statement(ADDED, facts, keys["root"], {})
    spaced["payload"] = base64.b64encode(base64.b64decode(spaced["payload"]) + b" ").decode()
    for statement in (forged, {**shown, "signatures": other["signatures"]}, other, spaced):
        entries.add(ADDED, {**facts, FIELD: statement})
        assert entries.admitted(keys) == ["root"]


def test_a_statement_names_no_entry_that_comes_later(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    later = Anchor(3, hashlib.sha256(b"ledger/3").hexdigest())
    entries.add(ADDED, facts_of(keys["thief"]), keys["root"], {"after": later})
    entries.add(ADDED, facts_of(keys["one"]))
    assert entries.admitted(keys) == ["root"]


def test_a_key_that_another_took_the_place_of_admits_nobody_whatever_the_time_of_the_entry(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    ends_ms = 10_000_000
    entries.add(ROTATED, rotated_facts(keys["one"].public_key, "node-0", keys["root"].key_id, ends_ms), keys["root"])
    entries.add(ADDED, facts_of(keys["thief"]), keys["root"])
    assert entries.admitted(keys) == ["root", "one"]
    root = entries.history().keys()[keys["root"].key_id]
    assert root.refusal(Hlc(ends_ms, 0, "n")) is None
    assert "expired" in str(root.refusal(Hlc(ends_ms + 1, 0, "n")))
    entries.add(ADDED, facts_of(keys["two"]), keys["one"])
    assert entries.admitted(keys) == ["root", "one", "two"]


def test_a_revoked_key_admits_nobody_and_what_it_admitted_from_its_revocation_on_is_undone(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(ADDED, facts_of(keys["one"]), keys["root"])
    entries.add(ADDED, facts_of(keys["two"]), keys["one"])
    stolen = entries.add(ADDED, facts_of(keys["thief"]), keys["one"])
    entries.add(REVOKED, revoked_facts(keys["one"].key_id, "node-0", stolen.hlc, "stolen"), keys["root"])
    entries.add(ADDED, facts_of(keys["late"]), keys["one"])
    entries.add(ADDED, facts_of(keys["late"]), keys["thief"])
    assert entries.admitted(keys) == ["root", "one", "two"]
    assert set(entries.history().waiting) == {keys["thief"].key_id, keys["late"].key_id}
    assert entries.history().authorities == {keys["root"].key_id, keys["two"].key_id}

    # What was undone may be admitted again, by one that may.
    entries.add(ADMITTED, entries.history().waiting[keys["thief"].key_id].facts, keys["two"])
    assert keys["thief"].key_id in entries.history().authorities


def test_a_node_that_rotated_may_revoke_its_stolen_key_from_before_and_still_counts(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(ROTATED, rotated_facts(keys["one"].public_key, "node-0", keys["root"].key_id, 9000), keys["root"])
    entries.add(REVOKED, revoked_facts(keys["root"].key_id, "node-0", Hlc(1, 0, "n"), "stolen"), keys["one"])
    assert entries.admitted(keys) == ["root", "one"]
    assert entries.history().authorities == {keys["one"].key_id}
    assert entries.history().keys()[keys["root"].key_id].revoked_from_hlc == Hlc(1, 0, "n")


def test_of_several_revocations_the_earliest_counts_and_none_is_taken_back(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(ADDED, facts_of(keys["one"]), keys["root"])
    for physical_ms in (5000, 3000, 9000):
        facts = revoked_facts(keys["one"].key_id, "node-0", Hlc(physical_ms, 0, "n"), None)
        entries.add(REVOKED, facts, keys["root"])
    entries.add(ADMITTED, facts_of(keys["one"]), keys["root"])
    assert entries.history().keys()[keys["one"].key_id].revoked_from_hlc == Hlc(3000, 0, "n")
    assert entries.history().authorities == {keys["root"].key_id}


def test_who_admits_a_key_ends_no_other_whatever_somebody_wrote_of_it(keys: Keys) -> None:
    """Anybody can write a rotation to a key that waits: from the root, which so would never have counted."""
    entries = Entries.beginning_with(keys["root"])
    forged = rotated_facts(keys["two"].public_key, "node-1", keys["root"].key_id, 1)
    entries.add(ADDED, facts_of(keys["two"]))
    entries.add(ROTATED, forged)
    entries.add(ADMITTED, entries.history().waiting[keys["two"].key_id].facts, keys["root"])
    entries.add(ADMITTED, forged, keys["root"])
    history = entries.history()
    assert history.keys()[keys["root"].key_id].not_after is None
    assert history.authorities == {keys["root"].key_id, keys["two"].key_id}


# --- chains begun before there were statements ----------------------------------------------------------


def old_form(keys: Keys) -> Entries:
    """A ledger as earlier versions left it: one node that rotated, a second one, a revocation."""
    entries = Entries()
    entries.add(ADDED, facts_of(keys["root"]))
    entries.add(ADDED, facts_of(keys["two"]))
    entries.add(ROTATED, rotated_facts(keys["one"].public_key, "node-0", keys["root"].key_id, 5000))
    entries.add(REVOKED, revoked_facts(keys["two"].key_id, "node-0", Hlc(7000, 0, "n"), None))
    return entries


def test_in_an_old_chain_only_the_root_counts_and_ends_and_revocations_hold(keys: Keys) -> None:
    entries = old_form(keys)
    history = entries.history()
    assert (entries.admitted(keys), set(history.waiting)) == (["root"], {keys["one"].key_id, keys["two"].key_id})
    assert history.is_old_form
    assert history.keys()[keys["root"].key_id].not_after is not None


def test_the_root_of_an_old_chain_admits_what_it_knows_though_another_took_its_place_to_sign(keys: Keys) -> None:
    entries = old_form(keys)
    for waiting in entries.history().waiting.values():
        entries.add(ADMITTED, waiting.facts, keys["root"])
    history = entries.history()
    assert (entries.admitted(keys), history.is_old_form) == (["root", "one", "two"], False)
    assert history.keys()[keys["two"].key_id].revoked_from_hlc == Hlc(7000, 0, "n")
    assert keys["one"].key_id in history.authorities
    assert keys["two"].key_id not in history.authorities


def test_from_its_first_statement_on_an_old_chain_takes_no_revocation_without_one(keys: Keys) -> None:
    entries = old_form(keys)
    entries.add(ADMITTED, facts_of(keys["root"]), keys["root"])
    entries.add(REVOKED, revoked_facts(keys["root"].key_id, "node-x", Hlc(1, 0, "n"), None))
    assert entries.history().keys()[keys["root"].key_id].revoked_from_hlc is None


# --- rows that somebody wrote ---------------------------------------------------------------------------


def test_facts_of_any_shape_are_passed_over(keys: Keys) -> None:
    good = facts_of(keys["one"])
    signed = {**good, FIELD: Entries.beginning_with(keys["root"]).statement(ADDED, good, keys["root"], {})}
    statement: Any = signed[FIELD]
    shapes: list[Any] = [None, 1, "x", [], {}, {"payload": 1}, {**statement, "signatures": []}]
    shapes += [{**statement, "signatures": statement["signatures"] * 2}, {**statement, "payloadType": "x"}]
    shapes += [
        envelope.sign(text, keys["root"], payload_type=key_statement.PAYLOAD_TYPE)
        for text in (b"", b"[]", b'{"after":1}')
    ]
    shapes += [{**statement, "signatures": [{"keyid": "", "sig": statement["signatures"][0]["sig"]}]}]
    for shape in shapes:
        entries = Entries.beginning_with(keys["root"])
        for action in (ADDED, ADMITTED, ROTATED, REVOKED):
            entries.add(action, {**good, FIELD: shape})
            entries.add(action, {FIELD: shape})
            entries.add(action, {"key_id": shape, "public_key_pem": shape, "previous_key_id": shape, FIELD: shape})
        assert entries.admitted(keys) == ["root"], shape
    for facts in ({}, {"key_id": "x"}, {**good, "public_key_pem": 5}, {**good, "algorithm": None}):
        entries = Entries()
        entries.add(ADDED, facts)
        assert entries.history().root_key_id is None
        entries.add(ADDED, root_facts(keys["root"].public_key, None))
        assert entries.admitted(keys) == ["root"]


def test_what_was_said_before_a_fork_counts_in_it_and_what_is_said_later_on_either_side_does_not_on_the_other(
    keys: Keys,
) -> None:
    original = Entries.beginning_with(keys["root"])
    original.add(ADDED, facts_of(keys["one"]), keys["root"])
    introduced = original.add(ADDED, facts_of(keys["two"]))
    fork = original.forked()
    assert fork.admitted(keys) == original.admitted(keys) == ["root", "one"]
    assert original.history().waiting[keys["two"].key_id].introduced.at == introduced.at

    # What the original says goes without the fork, whatever of their common beginning it names.
    for by in ("root", "one"):
        for at in [event.at for event in original.events]:
            there = original.add(ADMITTED, facts_of(keys["two"]), keys[by], {"after": at})
            assert original.admitted(keys) == ["root", "one", "two"]
            assert not fork.history().would_count(ADMITTED, there.facts)
            fork.add(ADMITTED, dict(there.facts))
            assert fork.admitted(keys) == ["root", "one"]
            original.events.pop()

    # The fork goes on with the same keys, and names itself or what came later: which the original does not have.
    nameable = fork.history().waiting[keys["two"].key_id].introduced.at
    assert nameable == fork.events[3].at
    assert fork.history().admitted[keys["one"].key_id].introduced.at == nameable
    for after in (nameable, fork.history().newest):
        here = fork.add(ADMITTED, facts_of(keys["two"]), keys["one"], {"after": after})
        assert fork.admitted(keys) == ["root", "one", "two"]
        assert not original.history().would_count(ADMITTED, here.facts)
        original.add(ADMITTED, dict(here.facts))
        assert original.admitted(keys) == ["root", "one"]
        fork.events.pop()

    # And a fork of the fork is one more ledger.
    again = fork.forked()
    late = fork.add(ADMITTED, facts_of(keys["two"]), keys["root"], {"after": nameable})
    again.add(ADMITTED, dict(late.facts))
    assert again.admitted(keys) == ["root", "one"]


# --- tokens -----------------------------------------------------------------------------------------

ISSUED, TOKEN_REVOKED = SystemAction.TOKEN_ISSUED, SystemAction.TOKEN_REVOKED


def token_facts(token_id: str, **changes: Any) -> dict[str, Any]:
    facts = {"token_id": token_id, "name": "ci", "digest": "ab" * 32, "rights": ["read"], "tenants": ["acme"]}
    return {**facts, **changes}


def counting(entries: Entries) -> list[str]:
    return [token.token_id for token in entries.history().tokens.values() if not token.is_revoked]


@pytest.mark.parametrize(
    ("by", "counts"), [("root", True), ("one", True), ("thief", False), ("late", False), (None, False)]
)
def test_a_token_counts_with_the_word_of_a_key_that_counts_there(keys: Keys, by: str | None, counts: bool) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(ADDED, facts_of(keys["one"]), keys["root"])
    entries.add(ADDED, facts_of(keys["late"]))
    entries.add(ISSUED, token_facts("t"), None if by is None else keys[by])
    entries.add(ADMITTED, facts_of(keys["late"]), keys["root"], {"after": entries.events[2].at})
    assert counting(entries) == (["t"] if counts else [])


def test_a_statement_about_a_token_says_nothing_of_another(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    facts = token_facts("t", rights=["admin"])
    entries.add(ISSUED, facts, keys["root"], {"facts": token_facts("t")})
    assert counting(entries) == []
    stated = Entries.beginning_with(keys["root"], "another ledger")
    stated.add(ISSUED, facts, keys["root"], {"after": entries.events[0].at})
    assert counting(stated) == []


def test_what_a_revoked_key_issued_from_then_on_does_not_count(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(ADDED, facts_of(keys["one"]), keys["root"])
    entries.add(ISSUED, token_facts("before"), keys["one"])
    stolen = entries.add(ISSUED, token_facts("after"), keys["one"], {"after": entries.events[1].at})
    revoked = revoked_facts(keys["one"].key_id, "node-1", stolen.hlc, "stolen")
    entries.add(REVOKED, revoked, keys["root"], {"after": entries.events[1].at})
    assert counting(entries) == ["before"]


def test_a_token_is_issued_once_and_revoked_by_anybody_for_good(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(TOKEN_REVOKED, {"token_id": "t"})
    entries.add(ISSUED, token_facts("t"), keys["root"], {"after": entries.events[0].at})
    entries.add(ISSUED, token_facts("t", name="other"), keys["root"], {"after": entries.events[0].at})
    assert [token.name for token in entries.history().tokens.values()] == ["ci"]
    entries.add(TOKEN_REVOKED, {"token_id": "t"})
    entries.add(ISSUED, token_facts("t"), keys["root"], {"after": entries.events[0].at})
    assert counting(entries) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"digest": "ab"},
        {"digest": 7},
        {"token_id": ""},
        {"name": None},
        {"rights": "read"},
        {"tenants": [1]},
        {"expires_at": "soon"},
        {"expires_at": "2026-01-01T00:00:00"},
        {"issued_by": 1},
    ],
)
def test_facts_that_describe_no_token_issue_none(keys: Keys, wrong: dict[str, Any]) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(ISSUED, token_facts("t") | wrong, keys["root"])
    entries.add(ISSUED, token_facts("u"), keys["root"], {"after": entries.events[0].at})
    assert counting(entries) == ["u"]


def test_no_statement_names_an_entry_about_a_token(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(ISSUED, token_facts("t"), keys["root"])
    entries.add(ADDED, facts_of(keys["one"]), keys["root"], {"after": entries.events[1].at})
    assert entries.admitted(keys) == ["root"]
    assert entries.history().newest == entries.events[2].at


def test_of_a_chain_that_grows_only_what_is_new_is_judged(keys: Keys) -> None:
    """With each of many tokens all the others would be verified again, while every request waits."""
    entries = Entries.beginning_with(keys["root"])
    said: Said = {"root_key_id": keys["root"].key_id, "after": entries.events[0].at}
    for number in range(400):
        entries.add(SystemAction.TOKEN_ISSUED, token_facts(f"{number:016x}"), keys["root"], said)
    fold, all_of_them = KeyFold(), tuple(entries.events)
    began_s = time.thread_time()
    fold.history(all_of_them[:-1])
    whole_s = time.thread_time() - began_s
    began_s = time.thread_time()
    grown = fold.history(all_of_them)
    assert time.thread_time() - began_s < whole_s / 10
    assert fold.history(all_of_them) is grown
    assert len(grown.tokens) == 400


def test_a_chain_that_became_another_is_judged_from_its_beginning(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(ADDED, facts_of(keys["one"]), keys["root"])
    fold = KeyFold()
    for events in (entries.events, entries.events[:1], [*entries.events, *entries.events[1:]], []):
        assert fold.history(tuple(events)) == history_of(events)


# --- regions ----------------------------------------------------------------------------------------

RETIRED, REGION_ADMITTED = SystemAction.REGION_RETIRED, SystemAction.REGION_ADMITTED


def retired_facts(number: int, region: str = "eu1", log_origin: str = "eu.example") -> dict[str, Any]:
    return RetiredRegion(f"{number:016x}", region, "burnt down", Hlc(0, 0, "n"), log_origin, 3, "ops").facts()


def region_key_facts(number: int, key: FileSigner, region: str = "eu1") -> dict[str, Any]:
    return AdmittedKey(f"{number:016x}", region, key.public_key, "ops").facts()


def retired(entries: Entries) -> list[str]:
    return list(entries.history().regions.retired)


def trusted(entries: Entries) -> list[str]:
    return [each.key.key_id for each in entries.history().regions.keys]


@pytest.mark.parametrize(("by", "counts"), [("root", True), ("one", True), ("thief", False), (None, False)])
def test_a_region_is_retired_and_its_key_admitted_with_the_word_of_a_key_that_counts(
    keys: Keys, by: str | None, counts: bool
) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(ADDED, facts_of(keys["one"]), keys["root"])
    at = {"after": entries.events[1].at}
    entries.add(RETIRED, retired_facts(1), None if by is None else keys[by], at)
    assert retired(entries) == (["eu1"] if counts else [])
    if counts:
        known = entries.history().regions.retired["eu1"]
        assert (known.reason, known.lag_entries, known.retired_by, known.hlc) == (
            "burnt down",
            3,
            "ops",
            Hlc(3000, 0, "n"),
        )
    entries.add(REGION_ADMITTED, region_key_facts(2, keys["late"], "ap1"), None if by is None else keys[by], at)
    assert trusted(entries) == ([keys["late"].key_id] if counts else [])


def test_an_admission_ends_the_retirement_of_its_region_and_no_copy_of_that_retires_it_again(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    at = {"after": entries.events[0].at}
    first = entries.add(RETIRED, retired_facts(1), keys["root"], at)
    entries.add(RETIRED, retired_facts(2, "ap1", "ap.example"), keys["root"], at)
    entries.add(REGION_ADMITTED, region_key_facts(3, keys["late"]), keys["root"], at)
    entries.add(RETIRED, {name: fact for name, fact in first.facts.items() if name != "type"})
    assert retired(entries) == ["ap1"]
    assert list(entries.history().regions.logs) == ["eu.example", "ap.example"], "the logs are remembered"
    entries.add(RETIRED, retired_facts(4), keys["root"], at)
    assert retired(entries) == ["ap1", "eu1"]
    assert trusted(entries) == [keys["late"].key_id], "what it signed before can still be imported"


def test_a_revoked_key_of_a_region_is_trusted_again_once_it_is_admitted_again(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    at = {"after": entries.events[0].at}
    key_id = keys["late"].key_id
    entries.add(REGION_ADMITTED, region_key_facts(1, keys["late"]), keys["root"], at)
    revoked = RevokedKey(f"{2:016x}", "eu1", key_id, "stolen", "ops").facts()
    entries.add(SystemAction.REGION_KEY_REVOKED, revoked)
    assert trusted(entries) == [key_id], "without a statement it says nothing"
    entries.add(SystemAction.REGION_KEY_REVOKED, revoked, keys["root"], at)
    assert (trusted(entries), list(entries.history().regions.revoked)) == ([], [key_id])
    entries.add(REGION_ADMITTED, region_key_facts(3, keys["late"]), keys["root"], at)
    assert (trusted(entries), entries.history().regions.revoked) == ([key_id], {})


REGISTERED, REQUIRED = SystemAction.CALLER_REGISTERED, SystemAction.SIGNATURES_REQUIRED


def test_callers_are_registered_and_revoked_by_statements_and_no_copy_counts_again(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    at = {"after": entries.events[0].at}
    caller = ED25519.caller
    facts = RegisteredCaller(f"{1:016x}", caller, "ops").facts()
    entries.add(REGISTERED, facts)
    assert entries.history().callers == KnownCallers(), "without a statement it says nothing"
    entries.add(REGISTERED, facts, keys["thief"], at)
    assert entries.history().callers == KnownCallers(), "nor with that of a key that is not admitted"
    first = entries.add(REGISTERED, facts, keys["root"], at)
    assert entries.history().callers.by_key == {ED25519.key_id: caller}
    revoked = RevokedCaller(f"{2:016x}", ED25519.key_id, "1000:0:n", "stolen", "ops").facts()
    entries.add(SystemAction.CALLER_REVOKED, revoked)
    assert entries.history().callers.by_key[ED25519.key_id].key.revoked_from_hlc is None
    entries.add(SystemAction.CALLER_REVOKED, revoked, keys["root"], at)
    later = RevokedCaller(f"{3:016x}", ED25519.key_id, "2000:0:n", "once more").facts()
    entries.add(SystemAction.CALLER_REVOKED, later, keys["root"], at)
    entries.add(REGISTERED, {name: fact for name, fact in first.facts.items() if name != "type"})
    entries.add(REGISTERED, {**facts, "change_id": f"{4:016x}"}, keys["root"], at)
    assert entries.history().callers.by_key[ED25519.key_id].key.revoked_from_hlc == Hlc(1000, 0, "n"), "for good"


def required_facts(number: int, types: list[str], from_hlc: str = "0:0:n") -> dict[str, Any]:
    return RequiredSignatures(f"{number:016x}", "acme", types, from_hlc).facts()


def test_what_must_be_signed_counts_from_the_time_of_its_entry(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    at = {"after": entries.events[0].at}
    first = entries.add(REQUIRED, required_facts(1, ["JobCompleted"]), keys["root"], at)
    second = entries.add(REQUIRED, required_facts(2, []), keys["root"], at)
    entries.add(REQUIRED, {name: fact for name, fact in first.facts.items() if name != "type"})
    malformed = {**required_facts(3, []), "types": ["JobPaused"]}
    entries.add(REQUIRED, malformed, keys["root"], at)
    judge = KeyedJudge(entries.history().callers)
    times = Hlc(1, 0, "n"), first.hlc, second.hlc, Hlc(10**9, 0, "n")
    found = [judge.is_required("acme", "JobCompleted", hlc) for hlc in times]
    assert found == [False, True, False, False], "a copy of an entry says nothing"
    assert not judge.is_required("beta", "JobCompleted", first.hlc)
    entries.add(REQUIRED, required_facts(4, ["JobFailed"], "9000:0:n"), keys["root"], at)
    judge = KeyedJudge(entries.history().callers)
    found = [judge.is_required("acme", "JobFailed", Hlc(ms, 0, "n")) for ms in (8999, 9000)]
    assert found == [False, True], "a node says when, and never before the entry"


def test_a_revoked_key_registers_no_caller_from_then_on(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(ADDED, facts_of(keys["one"]), keys["root"])
    at = {"after": entries.events[1].at}
    early = entries.add(REGISTERED, RegisteredCaller(f"{1:016x}", ED25519.caller).facts(), keys["one"], at)
    stolen = entries.add(REGISTERED, RegisteredCaller(f"{2:016x}", P256.caller).facts(), keys["one"], at)
    assert {*entries.history().callers.by_key} == {ED25519.key_id, P256.key_id}
    entries.add(REVOKED, revoked_facts(keys["one"].key_id, "node-1", stolen.hlc, "stolen"), keys["root"], at)
    assert (early.hlc < stolen.hlc, {*entries.history().callers.by_key}) == (True, {ED25519.key_id})


def test_what_a_revoked_key_revoked_of_callers_from_then_on_is_to_be_revoked_again(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(ADDED, facts_of(keys["one"]), keys["root"])
    at = {"after": entries.events[1].at}
    entries.add(REGISTERED, RegisteredCaller(f"{1:016x}", ED25519.caller).facts(), keys["root"], at)
    gone = RevokedCaller(f"{2:016x}", ED25519.key_id, "1:0:node-1", "left")
    by_stolen = entries.add(SystemAction.CALLER_REVOKED, gone.facts(), keys["one"], at)
    assert entries.history().callers.by_key[ED25519.key_id].key.revoked_from_hlc is not None
    entries.add(REVOKED, revoked_facts(keys["one"].key_id, "node-1", by_stolen.hlc, "stolen"), keys["root"], at)
    assert entries.history().callers.by_key[ED25519.key_id].key.revoked_from_hlc is None
    again = RevokedCaller(f"{3:016x}", gone.key_id, gone.revoked_from_hlc, gone.reason)
    entries.add(SystemAction.CALLER_REVOKED, again.facts(), keys["root"], {"after": entries.history().newest})
    assert entries.history().callers.by_key[ED25519.key_id].key.revoked_from_hlc is not None


def test_what_a_revoked_key_said_of_regions_from_then_on_does_not_count(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(ADDED, facts_of(keys["one"]), keys["root"])
    at = {"after": entries.events[1].at}
    entries.add(RETIRED, retired_facts(1), keys["one"], at)
    stolen = entries.add(RETIRED, retired_facts(2, "ap1"), keys["one"], at)
    entries.add(REGION_ADMITTED, region_key_facts(3, keys["thief"]), keys["one"], at)
    entries.add(REVOKED, revoked_facts(keys["one"].key_id, "node-1", stolen.hlc, "stolen"), keys["root"], at)
    assert (retired(entries), trusted(entries)) == (["eu1"], [])


@pytest.mark.parametrize(
    "wrong",
    [{"change_id": "1"}, {"region": "EU-1"}, {"region": 7}, {"reason": ""}, {"reason": None}, {"lag_entries": -1}],
)
def test_facts_that_describe_no_retirement_retire_nothing(keys: Keys, wrong: dict[str, Any]) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(RETIRED, retired_facts(1) | wrong, keys["root"])
    entries.add(REGION_ADMITTED, region_key_facts(2, keys["late"]) | {"key_id": "0" * 16}, keys["root"])
    assert (retired(entries), trusted(entries)) == ([], [])


def test_no_statement_names_an_entry_about_a_region_and_a_key_counts_once(keys: Keys) -> None:
    entries = Entries.beginning_with(keys["root"])
    entries.add(RETIRED, retired_facts(1), keys["root"])
    entries.add(ADDED, facts_of(keys["one"]), keys["root"], {"after": entries.events[1].at})
    assert entries.admitted(keys) == ["root"]
    changes = [AdmittedKey(f"{number:016x}", "eu1", keys[name].public_key) for number, name in enumerate(keys)]
    assert len(known_regions(changes * ADMITTED_KEYS_MAX).keys) == len(keys)


# Second keys


@pytest.fixture(scope="module")
def second_keys(tmp_path_factory: pytest.TempPathFactory) -> Sequence[FileSigner]:
    folder = tmp_path_factory.mktemp("second")
    return [private_keys.second_signer(f"file:{folder}/{name}.pem", may_generate=True) for name in ("one", "two")]


def test_a_second_key_is_admitted_replaced_and_revoked_as_any_other(
    keys: Keys, second_keys: Sequence[FileSigner]
) -> None:
    one, two = second_keys
    entries = Entries.beginning_with(keys["root"])
    entries.add(ADDED, facts_of(one))
    assert list(entries.history().waiting) == [one.key_id]
    entries.add(ADMITTED, facts_of(one), keys["root"])
    entries.add(ROTATED, rotated_facts(two.public_key, "node-1", one.key_id, 3500), keys["root"])
    entries.add(REVOKED, revoked_facts(two.key_id, "node-1", Hlc(9000, 0, "n"), "stolen"), keys["root"])
    admitted = entries.history().keys()
    assert (admitted[one.key_id].not_after, admitted[two.key_id].revoked_from_hlc) == (
        datetime.fromtimestamp(3.5, UTC),
        Hlc(9000, 0, "n"),
    )


def test_a_second_key_is_no_root_and_vouches_for_nothing(keys: Keys, second_keys: Sequence[FileSigner]) -> None:
    one, two = second_keys
    entries = Entries()
    entries.add(ADDED, root_facts(one.public_key, "node-0"))
    assert entries.history().root_key_id is None
    entries.add(ADDED, root_facts(keys["root"].public_key, "node-0"))
    entries.add(ADDED, facts_of(one), keys["root"])
    assert entries.history().root_key_id == keys["root"].key_id
    entries.add(ADDED, facts_of(two), one)
    entries.add(REVOKED, revoked_facts(keys["root"].key_id, "node-1", Hlc(1, 0, "n"), None), one)
    history = entries.history()
    assert set(history.keys()) == {keys["root"].key_id, one.key_id}
    assert history.authorities == {keys["root"].key_id}
    assert history.keys()[keys["root"].key_id].revoked_from_hlc is None
