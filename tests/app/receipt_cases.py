"""Receipts of every kind, good, incomplete and bad, each with the exit code that docs/formats/receipt.md gives it.

Most of the bad ones are signed by the trusted key: what a dishonest node could do, and what shows that each check
stands by itself.
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

from msgspec import UNSET

from ledger import canonical
from ledger.job_index import key_of
from ledger.merkle.tiles import inclusion_proof
from ledger.verification import ENTRY_COLUMNS
from signing import envelope
from signing.checkpoint import Checkpoint
from tests.app.bundles import checkpoint_of, note_of
from tests.app.receipts import (
    DOCUMENTED_WITNESS,
    JOB,
    OTHER_JOB,
    cosigned,
    example_ledger,
    indexed,
    opened,
    receipt_of,
    rows_of,
    sealed,
    statement_about,
)
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, Ledger, build, link_of

LEDGER = example_ledger()
OTHER = build(5)
GOOD = receipt_of(LEDGER, said=[cosigned(LEDGER, 4, SIGNER)], extends=2)
Change = Callable[[Any], object]


class Case(NamedTuple):
    """A receipt, the exit code it must get, and a checkpoint to hold against it."""

    name: str
    receipt: bytes
    code: int
    kept: str | None = None


@cache
def cases() -> tuple[Case, ...]:
    """All of them, made once: workers are forked from a process that has them."""
    groups = (
        _sound,
        _spellings,
        _statements,
        _said,
        _entries,
        _proofs,
        _checkpoints,
        _anchors,
        _kept,
        _complete,
        _absent,
    )
    return tuple(case for group in groups for case in group())


def changed(change: Change, file: bytes = GOOD) -> bytes:
    """``file`` after ``change`` to what it says, signed again by its node."""
    receipt = opened(file)
    change(receipt)
    return sealed(receipt)


def _sound() -> Iterator[Case]:
    yield Case("a job", GOOD, 0)
    yield Case("a job of another", receipt_of(LEDGER, OTHER_JOB), 0)
    yield Case("one entry", receipt_of(LEDGER, rows=rows_of(LEDGER, JOB)[1:2], covers="entry"), 0)
    yield Case("a tree of one", receipt_of(_first(1)), 0)
    yield Case("the chain of the ledger itself", receipt_of(_example_of("_system")), 0)
    yield Case("a large tree", receipt_of(_LARGE, _LARGE.entry(700)["job_id"]), 0)
    yield Case("begun with version 1", receipt_of(_OLD, _OLD.entry(1)["job_id"]), 3)
    yield Case(
        "text beyond ASCII",
        receipt_of(_edited(payload='{"error":"Ü 😀 \\u0007","fence_token":1,"type":"JobCompleted"}')),
        0,
    )


ABSENT_JOB = "use1-1704931200000-gate42-00404"
COMPLETE = receipt_of(LEDGER, indexed=indexed(LEDGER))
ABSENT = receipt_of(LEDGER, ABSENT_JOB, rows=[], covers="absent", indexed=indexed(LEDGER, ABSENT_JOB))


def _complete() -> Iterator[Case]:
    yield Case("a job without other entries", COMPLETE, 0)
    yield Case("without other entries in the first three", receipt_of(LEDGER, indexed=indexed(LEDGER, size=3)), 0)
    for seq in (1, 5_000, 8_191, 8_300):
        job_id = _IN_RUNS.entry(seq)["job_id"]
        found = receipt_of(_IN_RUNS, job_id, indexed=indexed(_IN_RUNS, job_id))
        yield Case(f"without other entries in several runs, seq {seq}", found, 0)
    stranger = indexed(LEDGER, signer=STRANGER)
    yield Case("an index that a stranger signed", receipt_of(LEDGER, indexed=stranger), 4)
    # What an operator would do.
    yield Case("an entry left out", receipt_of(LEDGER, rows=rows_of(LEDGER, JOB)[:-1], indexed=indexed(LEDGER)), 2)
    yield Case(
        "the first entry left out", receipt_of(LEDGER, rows=rows_of(LEDGER, JOB)[1:], indexed=indexed(LEDGER)), 2
    )
    older, newer = indexed(LEDGER, size=3), indexed(LEDGER)
    yield Case("an older run", receipt_of(LEDGER, indexed=newer._replace(runs=older.runs)), 2)
    yield Case("the index of another snapshot", receipt_of(LEDGER, indexed=newer._replace(envelope=older.envelope)), 2)
    beyond = _LARGE.signed(1, 700, None)["dsse_envelope"]
    yield Case("a snapshot of more than the log", changed(_snapshot_of(beyond), COMPLETE), 2)
    other = OTHER.signed(1, 5, None)["dsse_envelope"]
    yield Case("a snapshot of another history", changed(_snapshot_of(other), COMPLETE), 2)
    of_tenant = _example_of("_system").signed(1, 5, None)["dsse_envelope"]
    yield Case("a snapshot of another tenant", changed(_snapshot_of(of_tenant), COMPLETE), 2)
    bare = LEDGER.signed(1, 5, None, job_index=UNSET)["dsse_envelope"]
    yield Case("a snapshot without an index", changed(_snapshot_of(bare), COMPLETE), 2)
    yield Case("the run of another job", receipt_of(LEDGER, indexed=indexed(LEDGER, OTHER_JOB)), 2)
    yield Case("no run", changed(lambda said: said["completeness"]["runs"].clear(), COMPLETE), 2)
    yield Case("a run twice", changed(lambda said: said["completeness"].update(runs=_runs(said) * 2), COMPLETE), 2)
    yield Case(
        "another consistency", changed(lambda said: said["completeness"]["consistency"].append("00" * 32), COMPLETE), 2
    )
    yield Case("a member more in it", changed(lambda said: said["completeness"].update(note="x"), COMPLETE), 2)
    yield Case("null in its place", changed(lambda said: said.update(completeness=None), COMPLETE), 2)
    yield Case("of version 1", changed(lambda said: said.update(format_version=1), COMPLETE), 2)
    yield Case("of version 2 without it", changed(lambda said: said.update(format_version=2)), 2)
    yield Case(
        "for one entry", changed(lambda said: said.update(covers="entry", entries=said["entries"][:1]), COMPLETE), 2
    )


def _absent() -> Iterator[Case]:
    yield Case("a job without entries", ABSENT, 0)
    for number in range(12):
        job_id = f"absent-{number}"
        yield Case(
            f"a job without entries, {job_id}",
            receipt_of(_IN_RUNS, job_id, rows=[], covers="absent", indexed=indexed(_IN_RUNS, job_id)),
            0,
        )
    # What an operator would do: hide a job by a wrong neighbour.
    hidden = indexed(LEDGER, ABSENT_JOB)
    yield Case("a job that is hidden", receipt_of(LEDGER, JOB, rows=[], covers="absent", indexed=hidden), 2)
    own = indexed(LEDGER, JOB)
    yield Case("a job that is there", receipt_of(LEDGER, JOB, rows=[], covers="absent", indexed=own), 2)
    yield Case("without neighbours", changed(lambda said: _runs(said)[0].update(left=None, right=None), ABSENT), 2)
    for side in ("left", "right"):
        for name, value in {"key": "00" * 32, "count": 9, "digest": "00" * 32, "hashes": ["00" * 32]}.items():
            yield Case(f"a {side} neighbour of another {name}", changed(_neighbour(side, {name: value}), ABSENT), 2)
    yield Case("another place", changed(lambda said: _runs(said)[0].update(at=9), ABSENT), 2)
    yield Case("entries of another job", changed(lambda said: said.update(entries=opened(GOOD)["entries"]), ABSENT), 2)
    yield Case("nothing that proves it", changed(_without_completeness, ABSENT), 2)
    named = receipt_of(LEDGER, "another", rows=[], covers="absent", indexed=indexed(LEDGER, ABSENT_JOB))
    key = key_of("another")
    is_between = _between(key, opened(named))
    yield Case("the proof of another absent job", named, 0 if is_between else 2)


def _whole(said: Any) -> dict[str, Any]:
    found: dict[str, Any] = said["completeness"]
    return found


def _runs(said: Any) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = _whole(said)["runs"]
    return runs


def _neighbour(side: str, change: dict[str, Any]) -> Change:
    def edit(said: Any) -> None:
        for run in _runs(said):
            run[side] = {**(run[side] or _SOMEBODY), **change}

    return edit


_SOMEBODY = {"count": 1, "digest": "11" * 32, "hashes": [], "key": "22" * 32}


def _between(key: bytes, said: Any) -> bool:
    """Whether the neighbours in a proof have this key between them as well."""
    (run,) = _runs(said)
    left = bytes.fromhex(run["left"]["key"]) if run["left"] else b""
    right = bytes.fromhex(run["right"]["key"]) if run["right"] else b"\xff" * 33
    return left < key < right


def _snapshot_of(envelope_json: str) -> Change:
    return lambda said: said["completeness"].update(snapshot=json.loads(envelope_json))


def _without_completeness(said: Any) -> None:
    del said["completeness"]
    said["format_version"] = 1


def _spellings() -> Iterator[Case]:
    yield Case("cut short", GOOD[:-1], 2)
    yield Case("empty", b'{"receipt":', 2)
    yield Case("a newline at the end", GOOD + b"\n", 2)
    yield Case("a space", GOOD.replace(b'"covers":', b'"covers": ', 1), 2)
    yield Case(
        "spelled for people", json.dumps(json.loads(GOOD), indent=1).replace('{\n "receipt"', '{"receipt"').encode(), 2
    )
    yield Case("a name twice", GOOD.replace(b'"covers":"job"', b'"covers":"job","covers":"job"', 1), 2)
    yield Case("a letter escaped", GOOD.replace(b'"covers":"job"', b'"covers":"\\u006aob"', 1), 2)
    yield Case("no UTF-8", GOOD.replace(b'"covers":"job"', b'"covers":"j\xffb"', 1), 2)
    yield Case("too deep", b'{"receipt":' + b"[" * 100_000, 2)
    yield Case("one member more", canonical.encode({**json.loads(GOOD), "more": 1}), 2)
    for name in ("receipt", "statement"):
        yield Case(f"no {name}", canonical.encode({**json.loads(GOOD), name: None}), 2)


def _statements() -> Iterator[Case]:
    said = opened(GOOD)
    yield Case("signed by a stranger", sealed(said, STRANGER), 4)
    good = json.loads(GOOD)
    forged = {**good["statement"], "signatures": sealed_by_stranger(said)}
    yield Case("with the signature of another", canonical.encode({**good, "statement": forged}), 2)
    about = statement_about(said)
    for name, statement in {
        "of another receipt": statement_about({**said, "node_id": "node-2"}),
        "of another tenant": {**about, "subject": [{**about["subject"][0], "name": f"other/{JOB}"}]},
        "of two": {**about, "subject": about["subject"] * 2},
        "of another type": {**about, "predicateType": "https://tallystick.dev/bundle/v1"},
        "with more to say": {**about, "predicate": {**about["predicate"], "more": 1}},
        "that covers otherwise": {**about, "predicate": {**about["predicate"], "covers": "entry"}},
    }.items():
        yield Case(f"a statement {name}", sealed(said, statement=statement), 2)
    two = {**good["statement"], "signatures": good["statement"]["signatures"] * 2}
    yield Case("signed twice", canonical.encode({**good, "statement": two}), 2)
    unsigned = {**good["statement"], "signatures": []}
    yield Case("not signed", canonical.encode({**good, "statement": unsigned}), 2)
    other_type = {**good["statement"], "payloadType": "text/plain"}
    yield Case("a statement of another payload type", canonical.encode({**good, "statement": other_type}), 2)
    url_safe = base64.urlsafe_b64encode(base64.b64decode(good["statement"]["signatures"][0]["sig"])).decode()
    respelled = [{**good["statement"]["signatures"][0], "sig": url_safe}]
    if url_safe != good["statement"]["signatures"][0]["sig"]:
        yield Case("a signature spelled otherwise", _with_statement(good, signatures=respelled), 2)


def _said() -> Iterator[Case]:
    """What is said beside the entries."""
    for name, value in {
        "format_version": 2,
        "tenant_id": "other",
        "job_id": OTHER_JOB,
        "log_origin": "other.example",
        "covers": "entry",
        "node_id": "Node",
        "keys": {},
        "extends": {"consistency": [], "size": 0},
        "anchors": None,
        "checkpoint": "",
        "entries": [],
    }.items():
        yield Case(f"another {name}", changed(lambda said, name=name, value=value: said.update({name: value})), 2)  # type: ignore[misc]
    yield Case("a member more", changed(lambda said: said.update(more=1)), 2)
    yield Case("a member less", changed(lambda said: said.pop("keys")), 2)
    yield Case("a version that is a fraction", changed(lambda said: said.update(format_version=1.5)), 2)
    yield Case("keys of a stranger inside", receipt_of(LEDGER, signer=STRANGER), 4)
    yield Case("a job without a name", changed(_renamed("")), 2)
    yield Case("a job with too long a name", changed(_renamed("j" * 1025)), 2)


def _entries() -> Iterator[Case]:
    def of(change: Change) -> bytes:
        return changed(lambda said: change(said["entries"]))

    yield Case("an entry twice", of(lambda entries: entries.insert(0, entries[0])), 2)
    yield Case("entries turned round", of(lambda entries: entries.reverse()), 2)
    yield Case("an entry of another job", receipt_like(LEDGER, LEDGER.entry(3)), 2)
    yield Case("an entry of another tenant", receipt_like(_example_of("other"), _example_of("other").entry(4)), 2)
    # Nobody can see it, but for the signature: it is the node's word that these are all.
    left_out = json.loads(GOOD)
    del left_out["receipt"]["entries"][1]
    yield Case("an entry left out by who held the receipt", canonical.encode(left_out), 2)
    yield Case("an entry left out by the node", of(lambda entries: entries.pop(1)), 0)
    yield Case("an entry with one member more", of(lambda entries: entries[0]["row"].update(created_at=1)), 2)
    for name, value in {
        "action": "FAIL",
        "chain_link": "ab" * 32,
        "hlc_logical": 9,
        "hlc_node": "node-2",
        "hlc_physical": 1704931200413,
        "job_id": OTHER_JOB,
        "link_version": 1,
        "origin": "{}",
        "payload": "{}",
        "payload_digest": "ab" * 32,
        "prev_chain_link": "ab" * 32,
        "seq": 3,
        "t_hlc": "1704931200413:0:node-7f3a",
        "tenant_id": "other",
    }.items():
        change = lambda entries, name=name, value=value: entries[1]["row"].update({name: value})  # noqa: E731
        yield Case(f"another {name} of an entry", of(change), 2)
        relinked = lambda entries, name=name, value=value: _relink(entries[1]["row"], {name: value})  # noqa: E731
        if name not in ("chain_link",):
            yield Case(f"another {name} of an entry, and the link that it calls for", of(relinked), 2)
    yield Case("a link of an unknown version", of(lambda entries: entries[0]["row"].update(link_version=3)), 2)
    yield Case(
        "a first entry that follows one",
        of(lambda entries: _relink(entries[0]["row"], {"prev_chain_link": "ab" * 32})),
        2,
    )
    yield Case(
        "a later entry that follows none", of(lambda entries: _relink(entries[2]["row"], {"prev_chain_link": None})), 2
    )
    yield Case("neighbours that do not fit", _as_stored(2, prev_chain_link="ab" * 32), 2)
    yield Case("a later entry that follows none, and is in the tree", _as_stored(4, prev_chain_link=None), 2)
    yield Case("a first entry that follows one, and is in the tree", _as_stored(1, prev_chain_link="ab" * 32), 2)
    yield Case("version 1 after version 2", _as_stored(4, link_version=1), 2)
    yield Case("a number as text", of(lambda entries: entries[0]["row"].update(seq="1")), 2)
    yield Case("a truth for a number", of(lambda entries: entries[0]["row"].update(hlc_logical=True)), 2)
    yield Case("a number below zero", of(lambda entries: entries[0]["row"].update(hlc_logical=-1)), 2)


def _proofs() -> Iterator[Case]:
    def of(change: Change) -> bytes:
        return changed(lambda said: change(said["entries"][1]["inclusion"]))

    yield Case("a proof of another entry", changed(_with_proof_of_another), 2)
    yield Case("one hash too few", of(lambda hashes: hashes.pop()), 2)
    yield Case("one hash too many", of(lambda hashes: hashes.append("ab" * 32)), 2)
    yield Case("one hash too many, in front", of(lambda hashes: hashes.insert(0, "ab" * 32)), 2)
    yield Case("another hash", of(lambda hashes: hashes.__setitem__(0, "ab" * 32)), 2)
    yield Case("hashes turned round", of(lambda hashes: hashes.reverse()), 2)
    yield Case("no hash", of(lambda hashes: hashes.clear()), 2)
    yield Case("a hash that is none", of(lambda hashes: hashes.__setitem__(0, "AB" * 32)), 2)
    yield Case("far too many hashes", of(lambda hashes: hashes.extend(["ab" * 32] * 100)), 2)


def _checkpoints() -> Iterator[Case]:
    def of(note: str) -> bytes:
        return changed(lambda said: said.update(checkpoint=note))

    own = checkpoint_of(LEDGER)
    yield Case("a checkpoint by a stranger", of(checkpoint_of(LEDGER, signer=STRANGER)), 4)
    yield Case("a checkpoint by nobody", of(own[: own.index("—")]), 2)
    yield Case("a checkpoint of another log", of(checkpoint_of(LEDGER, log_origin="other.example")), 2)
    yield Case("a checkpoint of a smaller tree", of(checkpoint_of(LEDGER, 3)), 2)
    yield Case("a checkpoint of the same tree, one smaller", of(checkpoint_of(LEDGER, 4)), 2)
    yield Case("a checkpoint of another history", of(checkpoint_of(OTHER)), 2)
    yield Case("a checkpoint whose text was changed", of(own.replace("\n5\n", "\n6\n")), 2)
    yield Case("a checkpoint that is none", of("nothing"), 2)
    witnessed = DOCUMENTED_WITNESS.cosign(own, 1_704_931_300)
    yield Case("a cosigned checkpoint", receipt_of(LEDGER, checkpoint=witnessed), 0)


def _anchors() -> Iterator[Case]:
    """The form alone: what outsiders said is judged by the product only."""

    def of(change: Change) -> bytes:
        return changed(lambda said: change(said["anchors"][0]))

    yield Case("an anchor with one member more", of(lambda anchor: anchor.update(more=1)), 2)
    yield Case("an anchor of another kind", of(lambda anchor: anchor.update(kind="hearsay")), 2)
    yield Case("an anchor whose proof is none", of(lambda anchor: anchor.update(consistency=["ab"])), 2)
    yield Case("an anchor that says nothing", of(lambda anchor: anchor.update(checkpoint="nothing")), 0)
    yield Case("too many anchors", changed(lambda said: said.update(anchors=said["anchors"] * 129)), 2)


def _kept() -> Iterator[Case]:
    def note(size: int, ledger: Ledger = LEDGER, **of: Any) -> str:
        return checkpoint_of(ledger, size, **of)

    forked = _example_of("acme", begin_ms=1)
    yield Case("kept: the same", GOOD, 0, note(5))
    yield Case("kept: the one it extends", GOOD, 0, note(2))
    yield Case("kept: the one of an anchor", GOOD, 0, note(4))
    yield Case("kept: of a size it says nothing of", GOOD, 3, note(3))
    yield Case("kept: a later one", GOOD, 3, checkpoint_of(_longer(), 6))
    yield Case("kept: of another log", GOOD, 3, note(5, log_origin="other.example"))
    yield Case("kept: by a stranger", GOOD, 4, note(5, signer=STRANGER))
    for size in (2, 4, 5):
        yield Case(f"kept: of a history that forked, at {size}", GOOD, 2, note(size, forked))
    yield Case("kept: of a size it says nothing of, of a history that forked", GOOD, 3, note(3, forked))
    wrong = changed(lambda said: said["extends"].update(consistency=["ab" * 32] * 2))
    yield Case("kept: one whose proof does not hold", wrong, 2, note(2))
    yield Case("kept: a smaller one than the receipt's, whose proof nobody needs", wrong, 3, note(3))
    doubtful = changed(lambda said: said["anchors"][0].update(consistency=["ab" * 32]))
    yield Case("kept: the one of an anchor whose proof does not hold", doubtful, 3, note(4))
    yield Case("kept: of a history that forked, at such an anchor", doubtful, 3, note(4, forked))
    root = LEDGER.checkpoint(5).root
    yield Case("kept: of the same tree, said to be smaller", GOOD, 2, note_of(Checkpoint("log.example/acme", 4, root)))
    yield Case("kept: nothing", GOOD, 2, "")


# --- made of others ---------------------------------------------------------------------------------------


def sealed_by_stranger(receipt: dict[str, Any]) -> list[dict[str, str]]:
    """The signatures under a statement about ``receipt``, by a stranger, under the name of the held key."""
    made: Any = envelope.sign(canonical.encode(statement_about(receipt)), STRANGER)["signatures"]
    return [{**made[0], "keyid": SIGNER.key_id}]


def receipt_like(ledger: Ledger, row: dict[str, Any]) -> bytes:
    """The good receipt, with an entry of another chain or job in it, and the proof that it has there."""
    columns = tuple(row[name] for name in ENTRY_COLUMNS)
    other = opened(receipt_of(ledger, row["job_id"], rows=[columns], covers="entry"))

    def change(said: dict[str, Any]) -> None:
        kept = [entry for entry in said["entries"] if entry["row"]["seq"] != row["seq"]]
        said["entries"] = sorted([*kept, *other["entries"]], key=lambda entry: int(entry["row"]["seq"]))

    return changed(change)


def _relink(row: dict[str, Any], change: dict[str, Any]) -> None:
    row.update(change)
    try:
        row["chain_link"] = link_of(row["tenant_id"], row)
    except (ValueError, TypeError):
        row["chain_link"] = "cd" * 32


def _with_proof_of_another(said: dict[str, Any]) -> None:
    said["entries"][0]["inclusion"] = said["entries"][1]["inclusion"]


def _with_statement(good: dict[str, Any], **replaced: Any) -> bytes:
    return canonical.encode({**good, "statement": {**good["statement"], **replaced}})


def _renamed(job_id: str) -> Change:
    def change(said: dict[str, Any]) -> None:
        said["job_id"] = job_id
        for entry in said["entries"]:
            entry["row"]["job_id"] = job_id

    return change


def _first(count: int) -> Ledger:
    ledger = example_ledger()
    del ledger.entries[count:]
    ledger.store_tree()
    return ledger


def _example_of(tenant_id: str, begin_ms: int = 0) -> Ledger:
    ledger = example_ledger()
    ledger.tenant_id = tenant_id
    for row in ledger.entries:
        row["hlc_physical"] += begin_ms
        row["t_hlc"] = f"{row['hlc_physical']}:{row['hlc_logical']}:{row['hlc_node']}"
    ledger.relink()
    ledger.store_tree()
    return ledger


def _longer() -> Ledger:
    ledger = example_ledger()
    ledger.entries.append({**copy.deepcopy(ledger.entries[-1]), "seq": 6})
    ledger.relink()
    return ledger


def _edited(**columns: Any) -> Ledger:
    ledger = example_ledger()
    ledger.entries[3].update(columns)
    ledger.relink()
    ledger.store_tree()
    return ledger


def _as_stored(seq: int, **columns: Any) -> bytes:
    """What a node would sign that looks at no row: the entry at ``seq`` has these columns, and the link and the leaf
    that they call for."""
    ledger = example_ledger()
    row = ledger.entry(seq)
    row.update(columns)
    row["chain_link"] = link_of("acme", row)
    ledger.relink(seq + 1)
    ledger.store_tree()
    own = checkpoint_of(ledger)
    said = opened(receipt_of(example_ledger()))
    said["checkpoint"] = own
    size = len(ledger.entries)
    for entry in said["entries"]:
        stored = ledger.entry(entry["row"]["seq"])
        entry["row"] = {**{name: stored[name] for name in ENTRY_COLUMNS}, "tenant_id": "acme"}
        hashes = inclusion_proof(stored["seq"] - 1, size, lambda level, index: ledger.tiles[level, index])
        entry["inclusion"] = [each.hex() for each in hashes]
    return sealed(said)


_IN_RUNS = build(8_300)
_LARGE = build(1000)
_OLD = build(12, version_1_until=5)
