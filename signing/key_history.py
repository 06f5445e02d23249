"""The keys that the chain of ``_system`` records: which exist, which key admitted each, how long each is valid.

The facts, as payloads of entries (docs/formats/keys.md)::

    KEY_ADDED     key_id, algorithm, public_key_pem, node_id; of the root also root: true
    KEY_ROTATED   the same of the new key, and previous_key_id, not_after: until when the previous key is valid
    KEY_ADMITTED  the facts of KEY_ADDED, of a key that an entry introduced and no key has admitted yet
    KEY_REVOKED   key_id, revoked_from_hlc, reason or none, node_id
    TOKEN_ISSUED, TOKEN_REVOKED  see signing.key_statement
    REGION_RETIRED, REGION_ADMITTED, REGION_KEY_REVOKED  see signing.region_statement
    CALLER_REGISTERED, CALLER_REVOKED, SIGNATURES_REQUIRED  see signing.callers
    LOG_FORKED    any facts: from here on this is another ledger than the one that its first entries come from

All but LOG_FORKED carry ``statement``, the envelope of :mod:`signing.key_statement`. Rules, in the order of the chain::

    1. the first key that is introduced is the root of the ledger
    2. every other change is valid only with a statement by a valid key: it was admitted, and no earlier entry revoked
       or replaced it. The statement names an earlier entry, not before the last fork: a statement made for the
       ledger that was forked is not valid here, even about entries that both share
    3. if a key is revoked from an HLC, its admissions at or after that HLC are void, except those in the chain of
       admissions that leads to the revoking key
    4. an admission admits one key and ends none. A rotation ends the old key only with a statement by a valid key,
       since anyone can write a rotation without a statement
    5. of several ends and several revocations of one key the earliest applies
    6. a token is issued by rules 2 and 3, as a key is admitted; its revocation, which only narrows, needs no statement;
       no statement names an entry about a token
    7. a region is retired, and its keys admitted or revoked, by rules 2 and 3; no statement names an entry about it.
       So are callers registered and revoked, and their signatures required

A second key of a node, of ML-DSA-44, is introduced, admitted, replaced and revoked as any other; it is never the root,
and vouches for nothing. A release that knows no such keys passes over all entries about them, and loses nothing else.

A chain whose root has no ``root: true`` is older than statements. Until its first statement, ends and revocations
without one apply as well, because they only narrow. A key introduced without a statement is not admitted, as elsewhere.

An attacker who can write to a database can write any row there, but no statement by an admitted key. So its rows can
show that a key is not valid. Only keys that the verifier obtained elsewhere can show that a key is valid.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from ledger import rfc3339
from ledger.errors import InvalidInputError
from ledger.facts.events import SYSTEM_TENANT, SystemAction
from ledger.hlc import Hlc
from ledger.verification.entry_check import ENTRY_COLUMNS, EntryRow, holds_together
from signing.callers import CALLER_ACTIONS, CALLER_PREFIX, CallerChange, known_callers, read_change
from signing.key_statement import TOKEN_ACTIONS, TOKEN_PREFIX, Anchor, IssuedToken, given, read_token, voucher_of
from signing.keys import Keyring, KnownCallers, PublicKey
from signing.region_statement import (
    REGION_ACTIONS,
    REGION_PREFIX,
    KnownRegions,
    RegionChange,
    known_regions,
    read_region,
)

SUBJECT_PREFIX = "key:"
"""Prefix of ``job_id`` in an entry about a key; the key's id follows."""
AFTER_SUBJECTS = "key;"
"""The first text, in byte order, after every key's subject."""
FORK_PREFIX, AFTER_FORKS = "fork:", "fork;"
"""The same two for entries about forks of the log, which bound the entries that a statement about a key may name."""

_SEQ, _HLC, _ACTION, _JOB = map(ENTRY_COLUMNS.index, ("seq", "t_hlc", "action", "job_id"))
_PREV, _LINK = map(ENTRY_COLUMNS.index, ("prev_chain_link", "chain_link"))
_PAYLOAD, _ORIGIN = map(ENTRY_COLUMNS.index, ("payload", "origin"))


class KeyEvent(NamedTuple):
    """An entry about a key, or a fork: its place in the chain, its HLC, action and payload."""

    at: Anchor
    hlc: Hlc
    action: str
    facts: Mapping[str, object]


class KnownKey(NamedTuple):
    """A key that an entry introduced. If it is valid, ``key`` has its end and its revocation. ``facts`` are those of
    the entry that admits it. A key introduced before the chain's first statement is of the old form."""

    key: PublicKey
    introduced: KeyEvent
    """The entry; if it precedes the last fork, at the place of that fork."""
    facts: dict[str, object]
    is_old_form: bool = False
    admitted_by: str | None = None
    """The key that admitted it, None for the root and for a key that waits for admission."""

    @property
    def node_id(self) -> str | None:
        """The node on which it signs, None if its facts name none."""
        node_id = self.introduced.facts.get("node_id")
        return node_id if isinstance(node_id, str) else None


class KeyHistory(NamedTuple):
    """The state of the keys after all entries about them."""

    root_key_id: str | None
    admitted: dict[str, KnownKey]
    """Valid keys by id, in the order in which they were admitted."""
    waiting: dict[str, KnownKey]
    """Keys that no key has admitted."""
    authorities: frozenset[str]
    """Ids of the keys that may change keys now."""
    reasons: dict[str, str]
    """Why keys were revoked, for revocations that give a reason."""
    replaced: frozenset[tuple[str, str]]
    """Pairs of a new key and the key that it replaced, as entries state them, valid or not."""
    anchors: frozenset[Anchor]
    """The entries that a statement may name: the last fork, and entries about keys since."""
    newest: Anchor | None
    """The last of ``anchors``."""
    is_old_form: bool
    """Whether the chain is older than statements and has none yet."""
    tokens: dict[str, IssuedToken]
    """Tokens issued with a statement by a valid key, by id, in the order of the chain."""
    regions: KnownRegions
    """Regions retired, and keys of their ledgers admitted, with a statement by a valid key."""
    callers: KnownCallers
    """Callers registered, and what they must sign, with a statement by a valid key."""

    def keys(self) -> dict[str, PublicKey]:
        """The valid keys, by id."""
        return {key_id: admitted.key for key_id, admitted in self.admitted.items()}

    def would_count(self, action: str, facts: Mapping[str, object]) -> bool:
        """Whether an entry of these facts would be valid as the next one."""
        keys = {key_id: self.admitted[key_id].key for key_id in self.authorities}
        return voucher_of(action, facts, self.root_key_id, keys, self.anchors) is not None


_PREFIXES: Mapping[str, str] = {
    SystemAction.LOG_FORKED: FORK_PREFIX,
    **dict.fromkeys(TOKEN_ACTIONS, TOKEN_PREFIX),
    **dict.fromkeys(REGION_ACTIONS, REGION_PREFIX),
    **dict.fromkeys(CALLER_ACTIONS, CALLER_PREFIX),
}
"""Prefix of ``job_id``, by action; ``SUBJECT_PREFIX`` for all other entries about keys."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_INTRODUCING = (SystemAction.KEY_ADDED, SystemAction.KEY_ROTATED)
_KEY_FACTS = ("key_id", "algorithm", "public_key_pem")
_ADDED_FACTS = (*_KEY_FACTS, "node_id")


def time_of(physical_ms: int) -> datetime:
    """The time that a physical part of an HLC names."""
    return _EPOCH + timedelta(milliseconds=physical_ms)


def root_facts(key: PublicKey, node_id: str | None) -> dict[str, object]:
    """Facts of the KEY_ADDED entry of a ledger's root key; an offline root key has no node."""
    return given(**_facts(key), root=True, node_id=node_id)


def added_facts(key: PublicKey, node_id: str) -> dict[str, object]:
    """Facts of a KEY_ADDED entry."""
    return {**_facts(key), "node_id": node_id}


def rotated_facts(key: PublicKey, node_id: str, previous_key_id: str, not_after_ms: int) -> dict[str, object]:
    """Facts of a KEY_ROTATED entry: ``key`` replaces another, which is valid up to ``not_after_ms``."""
    not_after = rfc3339.written(time_of(not_after_ms), "milliseconds")
    return {**added_facts(key, node_id), "previous_key_id": previous_key_id, "not_after": not_after}


def revoked_facts(key_id: str, node_id: str, from_hlc: Hlc, reason: str | None) -> dict[str, object]:
    """Facts of a KEY_REVOKED entry."""
    return given(key_id=key_id, revoked_from_hlc=from_hlc.text(), node_id=node_id, reason=reason)


def history_of(events: Iterable[KeyEvent]) -> KeyHistory:
    """The key history of ``events``, in the order of the chain. An event that breaks a rule changes nothing."""
    return KeyFold().history(tuple(events))


class KeyFold:
    """``history_of`` a growing chain. Each event is judged once, because verifying its statement costs a signature."""

    def __init__(self) -> None:
        self._taken: tuple[KeyEvent, ...] = ()
        self._folding = _Folding()
        self._history = self._folding.history()

    def history(self, events: tuple[KeyEvent, ...]) -> KeyHistory:
        """Their key history; the same object while the events are the same."""
        if events == self._taken:
            return self._history
        if events[: len(self._taken)] != self._taken:
            self._taken, self._folding = (), _Folding()
        for event in events[len(self._taken) :]:
            self._folding.take_event(event)
        self._taken, self._history = events, self._folding.history()
        return self._history


def event_of(row: EntryRow) -> KeyEvent | None:
    """The event in a consistent row: about a key, a token, a region or a fork of the log. None for any other entry, and
    for an imported one, which is about another ledger."""
    if row[_ORIGIN] is not None or not row[_JOB].startswith(_PREFIXES.get(row[_ACTION], SUBJECT_PREFIX)):
        return None
    try:
        facts, hlc = json.loads(row[_PAYLOAD]), Hlc.parse(row[_HLC])
    except (ValueError, RecursionError, InvalidInputError):
        return None
    return KeyEvent(Anchor(row[_SEQ], row[_LINK]), hlc, row[_ACTION], facts) if isinstance(facts, dict) else None


def named_keys(rows: Iterable[EntryRow]) -> Keyring | None:
    """The keys that the rows about keys, in seq order, admit; None without a root.

    A signature that is valid only under these keys is reported as not checked: see ``without_trust``.
    """
    history = history_of(
        [event for row in rows if holds_together(SYSTEM_TENANT, row) and (event := event_of(row)) is not None]
    )
    if history.root_key_id is None:
        return None
    return Keyring(history.keys().values(), root_key_id=history.root_key_id, callers=history.callers)


def without_trust(verdicts: dict[str, str]) -> None:
    """Downgrade signatures from ``ok`` to ``not_checked``: they were judged by keys that the ledger itself names."""
    if verdicts["signatures"] == "ok":
        verdicts["signatures"] = "not_checked"


class _Folding:
    """The fold behind ``KeyFold``."""

    def __init__(self) -> None:
        self.anchors: set[Anchor] = set()
        self.newest: Anchor | None = None
        self._fork: Anchor | None = None
        self._root: str | None = None
        self._is_old_form = False
        self._introduced: dict[str, KnownKey] = {}
        self._admitted: dict[str, list[_Admission]] = {}
        self._authorities: set[str] = set()
        self._replaced_ids: set[str] = set()
        """Keys that a valid statement replaced."""
        self._spared: dict[str, set[str]] = {}
        """By revoked key, the keys whose admission by it stays valid."""
        self._ends: dict[str, datetime] = {}
        self._revoked: dict[str, Hlc] = {}
        self._reasons: dict[str, str] = {}
        self._replaced: set[tuple[str, str]] = set()
        self._tokens: dict[str, tuple[IssuedToken, str]] = {}
        """By id, with the key that vouches for it."""
        self._regions: dict[str, tuple[RegionChange, Hlc, str]] = {}
        """Changes of regions by id, each with its HLC and the key that vouches for it."""
        self._callers: dict[str, tuple[CallerChange, Hlc, str]] = {}
        """The same of callers."""

    def take_event(self, event: KeyEvent) -> None:
        """Apply the next entry."""
        if event.action in TOKEN_ACTIONS:
            with suppress(InvalidInputError):
                self.take_token(event)
            return
        if event.action in REGION_ACTIONS:
            with suppress(InvalidInputError):
                change = read_region(event.action, event.facts, event.hlc)
                if (signer_id := self._signer_of(event)) is not None:
                    self._regions.setdefault(change.change_id, (change, event.hlc, signer_id))
            return
        if event.action in CALLER_ACTIONS:
            with suppress(InvalidInputError):
                caller_change = read_change(event.action, event.facts)
                if (signer_id := self._signer_of(event)) is not None:
                    self._callers.setdefault(caller_change.change_id, (caller_change, event.hlc, signer_id))
            return
        with suppress(InvalidInputError, ValueError, OverflowError):
            self.take(event)
        self.anchors.add(event.at)
        self.newest = event.at

    def take_token(self, event: KeyEvent) -> None:
        """Apply an entry about a token. Any entry revokes a token; only a statement by a valid key issues one.

        Raises:
            InvalidInputError: it holds no such facts.
        """
        if event.action == SystemAction.TOKEN_REVOKED:
            if (token_id := str(event.facts.get("token_id"))) in self._tokens:
                token, signer_id = self._tokens[token_id]
                self._tokens[token_id] = token._replace(is_revoked=True), signer_id
            return
        vouching, token = self._signer_of(event), read_token(event.facts, event.hlc)
        if vouching is not None:
            self._tokens.setdefault(token.token_id, (token, vouching))

    def take(self, event: KeyEvent) -> None:
        """Apply one entry about a key or a fork.

        Raises:
            InvalidInputError, ValueError, OverflowError: it holds no such facts.
        """
        if event.action == SystemAction.LOG_FORKED:
            self._fork = event.at
            self.anchors.clear()
            return
        if self._root is None:
            if event.action == SystemAction.KEY_ADDED and not (root := _key(event)).is_second:
                self._root = root.key_id
                self._is_old_form = event.facts.get("root") is not True
                self._admit(root, event, None)
                self._authorities = {self._root}
            return
        signer_id = self._signer_of(event)
        if event.action in (*_INTRODUCING, SystemAction.KEY_ADMITTED):
            self._introduce(event, signer_id)
        if signer_id is None and not self._is_old_form:
            return
        # Ends and revocations: with a statement, or in a chain without statements so far.
        if event.action == SystemAction.KEY_REVOKED:
            key_id, from_hlc = str(event.facts.get("key_id")), Hlc.parse(str(event.facts.get("revoked_from_hlc")))
            self._spared[key_id] = self._line_of(signer_id)
            self._revoked[key_id] = min(from_hlc, self._revoked.get(key_id, from_hlc))
            if isinstance(reason := event.facts.get("reason"), str):
                self._reasons[key_id] = reason
        elif event.action == SystemAction.KEY_ROTATED and "previous_key_id" in event.facts:
            previous_id, end = str(event.facts["previous_key_id"]), _time(event.facts.get("not_after"))
            self._ends[previous_id] = min(end, self._ends.get(previous_id, end))
            if signer_id is not None:
                self._replaced_ids.add(previous_id)
        self._is_old_form = self._is_old_form and signer_id is None
        may_vouch = {key_id for key_id in self._in_force() if not self._introduced[key_id].key.is_second}
        self._authorities = may_vouch - self._revoked.keys() - self._replaced_ids

    def _signer_of(self, event: KeyEvent) -> str | None:
        """Id of the authorized key that vouches for the entry, None if none does."""
        keys = {key_id: self._introduced[key_id].key for key_id in self._authorities}
        return voucher_of(event.action, event.facts, self._root, keys, self.anchors)

    def _introduce(self, event: KeyEvent, signer_id: str | None) -> None:
        key = _key(event)
        if isinstance(previous_id := event.facts.get("previous_key_id"), str):
            self._replaced.add((key.key_id, previous_id))
        if signer_id is not None:
            self._admit(key, event, signer_id)
        elif event.action in _INTRODUCING and key.key_id not in self._admitted:
            self._introduced[key.key_id] = _known(key, event)._replace(is_old_form=self._is_old_form)

    def _admit(self, key: PublicKey, event: KeyEvent, signer_id: str | None) -> None:
        self._introduced[key.key_id] = self._introduced.get(key.key_id, _known(key, event))._replace(is_old_form=False)
        admissions = self._admitted.setdefault(key.key_id, [])
        if signer_id not in [admission.signer_id for admission in admissions]:
            admissions.append(_Admission(signer_id, event.hlc))

    def history(self) -> KeyHistory:
        """The facts of all events."""
        known = dict(self._introduced)
        for key_id, each in known.items():
            if self._fork is not None and each.introduced.at not in self.anchors:
                # A statement may not name the entry itself.
                known[key_id] = each._replace(introduced=each.introduced._replace(at=self._fork))
        admitted = {}
        for key_id, admission in self._in_force().items():
            end, revoked_from = self._ends.get(key_id), self._revoked.get(key_id)
            key = replace(known[key_id].key, not_after=end, revoked_from_hlc=revoked_from)
            admitted[key_id] = known[key_id]._replace(key=key, admitted_by=admission.signer_id)
        return KeyHistory(
            root_key_id=self._root,
            admitted=admitted,
            waiting={key_id: each for key_id, each in known.items() if key_id not in admitted},
            authorities=frozenset(self._authorities),
            reasons=dict(self._reasons),
            replaced=frozenset(self._replaced),
            anchors=frozenset(self.anchors),
            newest=self.newest,
            is_old_form=self._is_old_form,
            tokens={
                token_id: token
                for token_id, (token, signer_id) in self._tokens.items()
                if self._could_vouch(signer_id, token.issued_hlc, admitted)
            },
            regions=known_regions(
                change
                for change, hlc, signer_id in self._regions.values()
                if self._could_vouch(signer_id, hlc, admitted)
            ),
            callers=known_callers(
                (change, hlc)
                for change, hlc, signer_id in self._callers.values()
                if self._could_vouch(signer_id, hlc, admitted)
            ),
        )

    def _could_vouch(self, signer_id: str, hlc: Hlc, admitted: Mapping[str, KnownKey]) -> bool:
        """Whether the key still vouches for a token, a region or a caller at ``hlc``."""
        return signer_id in admitted and (signer_id not in self._revoked or hlc < self._revoked[signer_id])

    def _in_force(self) -> dict[str, _Admission]:
        """By key the first admission that no revocation undoes: that of the root, and those by keys in force."""
        found: dict[str, _Admission] = {}
        while more := {
            key_id: admission
            for key_id, admissions in self._admitted.items()
            if key_id not in found
            for admission in reversed(admissions)
            if self._is_in_force(key_id, admission, found)
        }:
            found |= more
        return found

    def _is_in_force(self, key_id: str, admission: _Admission, found: Mapping[str, _Admission]) -> bool:
        signer_id, hlc = admission
        if signer_id is None or signer_id not in found:
            return signer_id is None
        is_before = signer_id not in self._revoked or hlc < self._revoked[signer_id]
        return is_before or key_id in self._spared[signer_id]

    def _line_of(self, key_id: str | None) -> set[str]:
        """``key_id`` and the keys by which it was admitted, up to the root."""
        admissions, line = self._in_force(), set()
        while key_id is not None and key_id not in line:
            line.add(key_id)
            key_id = admissions[key_id].signer_id if key_id in admissions else None
        return line


class _Admission(NamedTuple):
    """The admission of a key: the key that signed it, None for the root, and its HLC."""

    signer_id: str | None
    hlc: Hlc


def _known(key: PublicKey, introduced: KeyEvent) -> KnownKey:
    return KnownKey(
        key, introduced, {name: introduced.facts[name] for name in _ADDED_FACTS if name in introduced.facts}
    )


def _facts(key: PublicKey) -> dict[str, object]:
    return {name: getattr(key, name) for name in _KEY_FACTS}


def _key(event: KeyEvent) -> PublicKey:
    return PublicKey.from_json({name: event.facts.get(name) for name in _KEY_FACTS})


def _time(text: object) -> datetime:
    """The same time in UTC; raises ValueError or OverflowError unless ``text`` is one with a zone."""
    time = datetime.fromisoformat(str(text))
    if time.tzinfo is None:
        raise ValueError("a time without a zone")
    return time.astimezone(UTC)
