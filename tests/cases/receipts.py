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
from typing import Any

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
from tests.cases.corpus import Case
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, Ledger, build, link_of

LEDGER = example_ledger()
OTHER = build(5)
GOOD = receipt_of(LEDGER, said=[cosigned(LEDGER, 4, SIGNER)], extends=2)
Change = Callable[[Any], object]


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
    yield Case("a job", GOOD, 0, "Three entries of a job, each in the tree that the checkpoint signs.")
    yield Case(
        "a job of another", receipt_of(LEDGER, OTHER_JOB), 0, "The two entries of the other job of the same log."
    )
    entry = receipt_of(LEDGER, rows=rows_of(LEDGER, JOB)[1:2], covers="entry")
    yield Case("one entry", entry, 0, "A receipt may cover one entry of a job that has three.")
    yield Case("a tree of one", receipt_of(_first(1)), 0, "In a tree of one leaf the inclusion proof has no hash.")
    why = "_system is a tenant like any other when it is verified."
    yield Case("the chain of the ledger itself", receipt_of(_example_of("_system")), 0, why)
    large = receipt_of(_LARGE, _LARGE.entry(700)["job_id"])
    yield Case("a large tree", large, 0, "A tree of 1,000 leaves, which is no full one.")
    why = "A link of version 1 binds neither tenant nor seq, so such an entry is proved to be in the tree and no more."
    yield Case("begun with version 1", receipt_of(_OLD, _OLD.entry(1)["job_id"]), 3, why)
    text = receipt_of(_edited(payload='{"error":"Ü 😀 \\u0007","fence_token":1,"type":"JobCompleted"}'))
    yield Case("text beyond ASCII", text, 0, "Texts are UTF-8, and U+0007 alone has an escape.")
    decomposed = receipt_of(_edited(payload='{"error":"U\u0308","fence_token":1,"type":"JobCompleted"}'))
    yield Case(
        "text that is not composed", decomposed, 0, "U and a combining mark stay two characters: nothing is normalized."
    )


ABSENT_JOB = "use1-1704931200000-gate42-00404"
COMPLETE = receipt_of(LEDGER, indexed=indexed(LEDGER))
ABSENT = receipt_of(LEDGER, ABSENT_JOB, rows=[], covers="absent", indexed=indexed(LEDGER, ABSENT_JOB))


def _complete() -> Iterator[Case]:
    yield Case(
        "a job without other entries", COMPLETE, 0, "The index of jobs of a signed snapshot has these three alone."
    )
    first = receipt_of(LEDGER, indexed=indexed(LEDGER, size=3))
    yield Case(
        "without other entries in the first three", first, 0, "The snapshot ends at seq 3, the receipt at seq 4."
    )
    for seq in (1, 5_000, 8_191, 8_300):
        job_id = _IN_RUNS.entry(seq)["job_id"]
        found = receipt_of(_IN_RUNS, job_id, indexed=indexed(_IN_RUNS, job_id))
        why = f"The log of 8,300 entries has two runs; the job of seq {seq} is in one and not in the other."
        yield Case(f"without other entries in several runs, seq {seq}", found, 0, why)
    for seq, why in (
        (1, "The index begins with entry 2049 and says nothing of those before; it has no entry of this job."),
        (5_000, "The index begins with entry 2049, and the entries of this job come behind."),
    ):
        job_id = _IN_RUNS.entry(seq)["job_id"]
        later = indexed(_IN_RUNS, job_id, begin=2_048)
        found = receipt_of(_IN_RUNS, job_id, indexed=later)
        yield Case(f"an index that begins behind what left, seq {seq}", found, 0, why)
    found = receipt_of(_IN_RUNS, job_id, rows=rows_of(_IN_RUNS, job_id)[1:], indexed=later)
    why = "The index, which begins with entry 2049, counts one more entry of the job."
    yield Case("an index that begins behind what left, an entry left out", found, 2, why)
    stranger = receipt_of(LEDGER, indexed=indexed(LEDGER, signer=STRANGER))
    yield Case("an index that a stranger signed", stranger, 4, "No held key signed the snapshot of the proof.")
    # What an operator would do.
    rows, of_all = rows_of(LEDGER, JOB), indexed(LEDGER)
    why = "The index counts three entries of the job, and the last one is not here."
    yield Case("an entry left out", receipt_of(LEDGER, rows=rows[:-1], indexed=of_all), 2, why)
    why = "The index counts three entries of the job, and the first one is not here."
    yield Case("the first entry left out", receipt_of(LEDGER, rows=rows[1:], indexed=of_all), 2, why)
    older, newer = indexed(LEDGER, size=3), indexed(LEDGER)
    why = "The run is that of three entries, the snapshot's root that of five."
    yield Case("an older run", receipt_of(LEDGER, indexed=newer._replace(runs=older.runs)), 2, why)
    why = "The run is that of five entries, the snapshot's root that of three."
    yield Case(
        "the index of another snapshot", receipt_of(LEDGER, indexed=newer._replace(envelope=older.envelope)), 2, why
    )
    for name, ledger, last, why in (
        ("of more than the log", _LARGE, 700, "The snapshot covers 700 entries, the checkpoint 5."),
        ("of another history", OTHER, 5, "The snapshot's tree is not that of the checkpoint."),
        ("of another tenant", _example_of("_system"), 5, "The snapshot is of tenant _system."),
    ):
        other = ledger.signed(1, last, None)["dsse_envelope"]
        yield Case(f"a snapshot {name}", changed(_snapshot_of(other), COMPLETE), 2, why)
    bare = LEDGER.signed(1, 5, None, job_index=UNSET)["dsse_envelope"]
    yield Case(
        "a snapshot without an index", changed(_snapshot_of(bare), COMPLETE), 2, "The snapshot has no job_index."
    )
    other = receipt_of(LEDGER, indexed=indexed(LEDGER, OTHER_JOB))
    yield Case("the run of another job", other, 2, "The run proves the leaf of the other job.")
    runs: dict[str, tuple[Change, str]] = {
        "no run": (lambda said: _runs(said).clear(), "The index has one run, and none is proved."),
        "a run twice": (
            lambda said: _whole(said).update(runs=_runs(said) * 2),
            "The index has one run, and two are proved.",
        ),
        "another consistency": (
            lambda said: _whole(said)["consistency"].append("00" * 32),
            "Snapshot and checkpoint are of one size, so no hash is needed.",
        ),
        "a member more in it": (lambda said: _whole(said).update(note="x"), "completeness has three members."),
        "null in its place": (lambda said: said.update(completeness=None), "completeness is left out or an object."),
        "of version 1": (lambda said: said.update(format_version=1), "A receipt with completeness is of version 2."),
        "an entry whose link is no hash": (
            lambda said: said["entries"][0]["row"].update(chain_link="no hash"),
            "chain_link of the first entry is no hash, so it is no leaf.",
        ),
        "for one entry": (
            lambda said: said.update(covers="entry", entries=said["entries"][:1]),
            "Completeness is about a job, and this receipt covers one entry.",
        ),
        "a run of no jobs": (lambda said: _runs(said)[0].update(jobs=0), "A run has at least one job."),
        "a run of more jobs": (
            lambda said: _runs(said)[0].update(jobs=9),
            "The path has not the length of a run of 9 jobs.",
        ),
        "a run at another place": (
            lambda said: _runs(said)[0].update(at=1 - _runs(said)[0]["at"]),
            "The leaf of the job is the other one of two.",
        ),
        "a run at a place beyond it": (
            lambda said: _runs(said)[0].update(at=2),
            "The run has two jobs, at places 0 and 1.",
        ),
        "a run with a path of nothing": (
            lambda said: _runs(said)[0].update(hashes=[]),
            "The path of one of two leaves has a hash.",
        ),
        "a run with a path that is too long": (
            lambda said: _runs(said)[0]["hashes"].append("00" * 32),
            "The path of one of two leaves has one hash.",
        ),
        "a run with neighbours and a path": (
            lambda said: _runs(said)[0].update(left=_SOMEBODY),
            "Where the job has entries no neighbour stands.",
        ),
    }
    for name, (change, why) in runs.items():
        yield Case(name, changed(change, COMPLETE), 2, why)
    why = "A receipt without completeness is of version 1."
    yield Case("of version 2 without it", changed(lambda said: said.update(format_version=2)), 2, why)


def _absent() -> Iterator[Case]:
    yield Case(
        "a job without entries", ABSENT, 0, "Two neighbours in the index have the place of the job between them."
    )
    for number in range(4):
        job_id = f"absent-{number}"
        receipt = receipt_of(_IN_RUNS, job_id, rows=[], covers="absent", indexed=indexed(_IN_RUNS, job_id))
        why = f"In both runs of a log of 8,300 entries the key of {job_id} lies between two neighbours."
        yield Case(f"a job without entries, {job_id}", receipt, 0, why)
    # What an operator would do: hide a job by a wrong neighbour.
    hidden = indexed(LEDGER, ABSENT_JOB)
    why = "The neighbours are those of another absent job; this one's own key is among them."
    yield Case("a job that is hidden", receipt_of(LEDGER, JOB, rows=[], covers="absent", indexed=hidden), 2, why)
    own = indexed(LEDGER, JOB)
    why = "The run proves that the job has entries, and the receipt says that it has none."
    yield Case("a job that is there", receipt_of(LEDGER, JOB, rows=[], covers="absent", indexed=own), 2, why)
    why = "Neither neighbour is named, though the run has two jobs."
    yield Case("without neighbours", changed(lambda said: _runs(said)[0].update(left=None, right=None), ABSENT), 2, why)
    for side in ("left", "right"):
        for name, value in {"key": "00" * 32, "count": 9, "digest": "00" * 32, "hashes": ["00" * 32]}.items():
            why = f"{name} of the {side} neighbour is not that of any leaf of the run."
            yield Case(
                f"a {side} neighbour of another {name}", changed(_neighbour(side, {name: value}), ABSENT), 2, why
            )
    why = "Place 9 is beyond the two jobs of the run."
    yield Case("another place", changed(lambda said: _runs(said)[0].update(at=9), ABSENT), 2, why)
    of_other = changed(lambda said: said.update(entries=opened(GOOD)["entries"]), ABSENT)
    yield Case(
        "entries of another job", of_other, 2, "A receipt of an absent job has entries, and those of another one."
    )
    why = "Without completeness nothing proves that the job has no entries."
    yield Case("nothing that proves it", changed(_without_completeness, ABSENT), 2, why)
    named = receipt_of(LEDGER, "another", rows=[], covers="absent", indexed=indexed(LEDGER, ABSENT_JOB))
    is_between = _between(key_of("another"), opened(named))
    assert is_between
    why = "The key of this job lies between the same neighbours, so the proof holds for it as well."
    yield Case("the proof of another absent job", named, 0, why)


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
    told = json.dumps(json.loads(GOOD), indent=1).replace('{\n "receipt"', '{"receipt"').encode()
    for name, file, why in (
        ("cut short", GOOD[:-1], "The last brace is missing."),
        ("empty", b'{"receipt":', "Behind the first name nothing follows."),
        ("a newline at the end", GOOD + b"\n", "A newline follows the value."),
        ("a space", GOOD.replace(b'"covers":', b'"covers": ', 1), "A space stands between two tokens."),
        ("spelled for people", told, "The file is indented."),
        ("CRLF at the end", GOOD + b"\r\n", "A line end follows the value."),
        (
            "a name twice",
            GOOD.replace(b'"covers":"job"', b'"covers":"job","covers":"job"', 1),
            "covers stands twice, if with one value.",
        ),
        (
            "a letter escaped",
            GOOD.replace(b'"covers":"job"', b'"covers":"\\u006aob"', 1),
            "A letter that needs no escape has one.",
        ),
        ("no UTF-8", GOOD.replace(b'"covers":"job"', b'"covers":"j\xffb"', 1), "A text holds the byte 0xff."),
        (
            "a number with a fraction of zero",
            GOOD.replace(b'"format_version":1', b'"format_version":1.0', 1),
            "1.0 is no canonical spelling of 1.",
        ),
        (
            "a number with an exponent",
            GOOD.replace(b'"format_version":1', b'"format_version":1e0', 1),
            "1e0 is no canonical spelling of 1.",
        ),
        ("a minus zero", GOOD.replace(b'"hlc_logical":0', b'"hlc_logical":-0', 1), "-0 is no canonical spelling of 0."),
        ("too deep", b'{"receipt":' + b"[" * 5_000, "5,000 brackets open, which must not end the verifier."),
        ("one member more", canonical.encode({**json.loads(GOOD), "more": 1}), "The file has a third member."),
        ("no receipt", canonical.encode({**json.loads(GOOD), "receipt": None}), "receipt is null."),
        ("no statement", canonical.encode({**json.loads(GOOD), "statement": None}), "statement is null."),
    ):
        yield Case(name, file, 2, why)
    why = "A byte order mark and more than 64 bytes of spaces stand before the first brace: the file is no receipt."
    yield Case("behind many spaces", b"\xef\xbb\xbf" + b" " * 70 + GOOD, 1, why)
    why = "U+FEFF stands before the first brace of what is a receipt otherwise."
    yield Case("a byte order mark", b"\xef\xbb\xbf" + GOOD, 2, why)


def _statements() -> Iterator[Case]:
    said = opened(GOOD)
    yield Case("signed by a stranger", sealed(said, STRANGER), 4, "No held key signed the statement.")
    good = json.loads(GOOD)
    signature = good["statement"]["signatures"][0]
    forged = {**good["statement"], "signatures": sealed_by_stranger(said)}
    why = "The held key is named, and a stranger signed."
    yield Case("with the signature of another", canonical.encode({**good, "statement": forged}), 2, why)
    about = statement_about(said)
    for name, statement, why in (
        (
            "of another receipt",
            statement_about({**said, "node_id": "node-2"}),
            "The statement is about a receipt of node-2.",
        ),
        (
            "of another tenant",
            {**about, "subject": [{**about["subject"][0], "name": f"other/{JOB}"}]},
            "The subject names tenant other.",
        ),
        ("of two", {**about, "subject": about["subject"] * 2}, "A statement has exactly one subject."),
        (
            "of another type",
            {**about, "predicateType": "https://tallystick.dev/bundle/v1"},
            "predicateType is that of a bundle's manifest.",
        ),
        (
            "with more to say",
            {**about, "predicate": {**about["predicate"], "more": 1}},
            "The predicate has a seventh member.",
        ),
        (
            "that covers otherwise",
            {**about, "predicate": {**about["predicate"], "covers": "entry"}},
            "The statement covers one entry, the receipt a job.",
        ),
        ("with less to say", {**about, "predicate": {}}, "The predicate repeats nothing of the receipt."),
    ):
        yield Case(f"a statement {name}", sealed(said, statement=statement), 2, why)
    url_safe = base64.urlsafe_b64encode(base64.b64decode(signature["sig"])).decode()
    assert url_safe != signature["sig"]
    for name, replaced, why in (
        ("signed twice", {"signatures": [signature] * 2}, "A statement has exactly one signature."),
        ("not signed", {"signatures": []}, "A statement has exactly one signature."),
        (
            "a statement of another payload type",
            {"payloadType": "text/plain"},
            "payloadType is not that of an in-toto statement.",
        ),
        (
            "a signature spelled otherwise",
            {"signatures": [{**signature, "sig": url_safe}]},
            "The signature is in URL-safe base64.",
        ),
        (
            "a signature without padding",
            {"signatures": [{**signature, "sig": signature["sig"].rstrip("=")}]},
            "The base64 lacks its padding.",
        ),
        (
            "a signature with a newline",
            {"signatures": [{**signature, "sig": signature["sig"] + "\n"}]},
            "A newline follows the base64.",
        ),
        (
            "a signature with a certificate",
            {"signatures": [{**signature, "cert": ""}]},
            "The signature has a third member.",
        ),
        (
            "a signature of no name",
            {"signatures": [{**signature, "keyid": ""}]},
            "keyid is the 16 hex digits of a key's id.",
        ),
        (
            "a payload with a space",
            {"payload": " " + good["statement"]["payload"]},
            "A space stands before the base64.",
        ),
    ):
        yield Case(name, _with_statement(good, **replaced), 2, why)
    why = "The signature names a key that is not held."
    yield Case(
        "a signature in the name of a stranger",
        _with_statement(good, signatures=[{**signature, "keyid": STRANGER.key_id}]),
        4,
        why,
    )


def _said() -> Iterator[Case]:
    """What is said beside the entries."""
    for name, value, why in (
        ("format_version", 2, "Version 2 has completeness."),
        ("tenant_id", "other", "The entries are of tenant acme."),
        ("job_id", OTHER_JOB, "The entries are of another job."),
        ("log_origin", "other.example", "The checkpoint is of log.example/acme."),
        ("covers", "entry", "Three entries are more than one."),
        ("node_id", "Node", "A node is named by small letters, digits and hyphens."),
        ("keys", {}, "keys has three members."),
        ("extends", {"consistency": [], "size": 0}, "No log extends a tree of no entries: a size is 1 or more."),
        ("anchors", None, "anchors is a list."),
        ("checkpoint", "", "The checkpoint is no signed note."),
        ("entries", [], "A receipt of a job has entries."),
    ):
        yield Case(f"another {name}", changed(lambda said, name=name, value=value: said.update({name: value})), 2, why)  # type: ignore[misc]
    yield Case(
        "a member more", changed(lambda said: said.update(more=1)), 2, "receipt has a member that no format gives it."
    )
    yield Case("a member less", changed(lambda said: said.pop("keys")), 2, "keys is missing, which may be empty.")
    for name, change, why in (
        ("a key with a member more", lambda keys: keys["keys"][0].update(more=1), "A key has six members."),
        ("a key that is no text", lambda keys: keys["keys"][0].update(public_key_pem=1), "public_key_pem is a text."),
        ("a key from a number on", lambda keys: keys["keys"][0].update(not_before=5), "not_before is a text or null."),
        ("a root that is no text", lambda keys: keys.update(root_key_id=1), "root_key_id is a text or null."),
    ):
        yield Case(name, changed(lambda said, change=change: change(said["keys"])), 2, why)  # type: ignore[misc]
    nonsense = changed(lambda said: said["keys"]["keys"][0].update(public_key_pem="nothing", not_after="tomorrow"))
    why = "Nothing in keys is read as a key or a time, as none of it counts."
    yield Case("a key that is none", nonsense, 0, why)
    fraction = changed(lambda said: said.update(format_version=1.5))
    yield Case("a version that is a fraction", fraction, 2, "format_version is an integer.")
    stranger = receipt_of(LEDGER, signer=STRANGER)
    yield Case(
        "keys of a stranger inside", stranger, 4, "The key that signed stands in the receipt alone, so it is not held."
    )
    yield Case("a job without a name", changed(_renamed("")), 2, "A job id has at least one character.")
    yield Case(
        "a job with too long a name", changed(_renamed("j" * 1025)), 2, "A job id has at most 1,024 characters here."
    )


def _entries() -> Iterator[Case]:
    def of(change: Change) -> bytes:
        return changed(lambda said: change(said["entries"]))

    yield Case("an entry twice", of(lambda entries: entries.insert(0, entries[0])), 2, "seq 1 stands there twice.")
    yield Case("entries turned round", of(lambda entries: entries.reverse()), 2, "Entries stand by seq, ascending.")
    yield Case("an entry of another job", receipt_like(LEDGER, LEDGER.entry(3)), 2, "seq 3 is of another job.")
    other = _example_of("other")
    yield Case("an entry of another tenant", receipt_like(other, other.entry(4)), 2, "seq 4 is of tenant other.")
    left_out = json.loads(GOOD)
    del left_out["receipt"]["entries"][1]
    why = "The statement has the digest of the receipt with all three entries."
    yield Case("an entry left out by its holder", canonical.encode(left_out), 2, why)
    why = "The node signed a receipt of two of three entries: without completeness that is its word alone."
    yield Case("an entry left out by the node", of(lambda entries: entries.pop(1)), 0, why)
    more = of(lambda entries: entries[0]["row"].update(created_at=1))
    yield Case("an entry with one member more", more, 2, "A row has exactly the columns of the format.")
    for name, value, why in (
        ("action", "FAIL", "the action was COMPLETE or another"),
        ("chain_link", "ab" * 32, "the link is that of the columns"),
        ("hlc_logical", 9, "t_hlc says 0"),
        ("hlc_node", "node-2", "t_hlc says node-7f3a"),
        ("hlc_physical", 1704931200413, "t_hlc says 1704931200412"),
        ("job_id", OTHER_JOB, "the receipt is of another job"),
        ("link_version", 1, "its link is one of version 2"),
        ("origin", "{}", "the entry was not imported, and {} says nothing"),
        ("payload", "{}", "payload_digest is that of another"),
        ("payload_digest", "ab" * 32, "the payload has another digest"),
        ("prev_chain_link", "ab" * 32, "seq 1 has another link"),
        ("seq", 3, "the entry is the second of its log"),
        ("t_hlc", "1704931200413:0:node-7f3a", "hlc_physical says 1704931200412"),
        ("tenant_id", "other", "the receipt is of tenant acme"),
    ):
        change = lambda entries, name=name, value=value: entries[1]["row"].update({name: value})  # noqa: E731
        told = f"{name} of seq 2 was changed, and its link was left: {why}."
        yield Case(f"another {name} of an entry", of(change), 2, told)
        relinked = lambda entries, name=name, value=value: _relink(entries[1]["row"], {name: value})  # noqa: E731
        if name != "chain_link":
            told = f"{name} of seq 2 was changed, and its link made to fit: no tree that is signed has that leaf."
            yield Case(f"another {name} of an entry, and the link that it calls for", of(relinked), 2, told)
    unknown = of(lambda entries: entries[0]["row"].update(link_version=3))
    yield Case("a link of an unknown version", unknown, 2, "Link version 3 is not known.")
    first = of(lambda entries: _relink(entries[0]["row"], {"prev_chain_link": "ab" * 32}))
    yield Case("a first entry that follows one", first, 2, "prev_chain_link is null at seq 1.")
    later = of(lambda entries: _relink(entries[2]["row"], {"prev_chain_link": None}))
    yield Case("a later entry that follows none", later, 2, "prev_chain_link is null at seq 1 alone.")
    for name, file, why in (
        (
            "neighbours that do not fit",
            _as_stored(2, prev_chain_link="ab" * 32),
            "seq 2 is in the tree as it is, and does not follow seq 1.",
        ),
        (
            "a later entry that follows none, and is in the tree",
            _as_stored(4, prev_chain_link=None),
            "seq 4 is in the tree and follows nothing.",
        ),
        (
            "a first entry that follows one, and is in the tree",
            _as_stored(1, prev_chain_link="ab" * 32),
            "seq 1 is in the tree and follows something.",
        ),
        (
            "version 1 after version 2",
            _as_stored(4, link_version=1),
            "seq 4 is in the tree with a link of version 1, behind links of version 2.",
        ),
        ("a number as text", of(lambda entries: entries[0]["row"].update(seq="1")), "seq is a number, not a text."),
        (
            "a truth for a number",
            of(lambda entries: entries[0]["row"].update(hlc_logical=True)),
            "true is no number, though some languages say 1.",
        ),
        (
            "a number below zero",
            of(lambda entries: entries[0]["row"].update(hlc_logical=-1)),
            "Numbers of a row are 0 or more.",
        ),
        ("seq 0", of(lambda entries: entries[0]["row"].update(seq=0)), "seq is 1 or more."),
    ):
        yield Case(name, file, 2, why)


def _proofs() -> Iterator[Case]:
    def of(change: Change) -> bytes:
        return changed(lambda said: change(said["entries"][1]["inclusion"]))

    other = changed(_with_proof_of_another)
    yield Case("a proof of another entry", other, 2, "The inclusion proof of seq 1 is that of seq 2.")
    changes: dict[str, tuple[Change, str]] = {
        "one hash too few": (lambda hashes: hashes.pop(), "The last of three hashes is missing."),
        "one hash too many": (
            lambda hashes: hashes.append("ab" * 32),
            "A leaf of five has three hashes, and this four.",
        ),
        "one hash too many, in front": (
            lambda hashes: hashes.insert(0, "ab" * 32),
            "A hash more stands before the three.",
        ),
        "another hash": (lambda hashes: hashes.__setitem__(0, "ab" * 32), "The first hash is another."),
        "hashes turned round": (lambda hashes: hashes.reverse(), "The hashes stand from the root to the leaf."),
        "no hash": (lambda hashes: hashes.clear(), "A leaf of five has three hashes, and this none."),
        "a hash that is none": (lambda hashes: hashes.__setitem__(0, "AB" * 32), "Hashes are in small hex digits."),
        "far too many hashes": (
            lambda hashes: hashes.extend(["ab" * 32] * 100),
            "An inclusion proof has at most 64 hashes.",
        ),
    }
    for name, (change, why) in changes.items():
        yield Case(name, of(change), 2, why)


def _checkpoints() -> Iterator[Case]:
    def of(note: str) -> bytes:
        return changed(lambda said: said.update(checkpoint=note))

    own = checkpoint_of(LEDGER)
    for name, note, code, why in (
        ("by a stranger", checkpoint_of(LEDGER, signer=STRANGER), 4, "No held key signed it."),
        ("by nobody", own[: own.index("\u2014")], 2, "No signature line follows its text."),
        ("of another log", checkpoint_of(LEDGER, log_origin="other.example"), 2, "It is of other.example/acme."),
        (
            "of a smaller tree",
            checkpoint_of(LEDGER, 3),
            2,
            "It covers three entries, and the receipt goes up to seq 4.",
        ),
        (
            "of the same tree, one smaller",
            checkpoint_of(LEDGER, 4),
            2,
            "The inclusion proofs lead to the tree of five.",
        ),
        ("of another history", checkpoint_of(OTHER), 2, "It is of five other entries."),
        (
            "whose text was changed",
            own.replace("\n5\n", "\n6\n"),
            2,
            "Its size was changed, which the signature covers.",
        ),
        ("that is none", "nothing", 2, "It is no signed note."),
    ):
        yield Case(f"a checkpoint {name}", of(note), code, why)
    witnessed = DOCUMENTED_WITNESS.cosign(own, 1_704_931_300)
    why = "A witness cosigned it as well, which takes nothing from it."
    yield Case("a cosigned checkpoint", receipt_of(LEDGER, checkpoint=witnessed), 0, why)


def _anchors() -> Iterator[Case]:
    """The form alone: nobody here knows the witness."""

    def of(change: Change) -> bytes:
        return changed(lambda said: change(said["anchors"][0]))

    for name, change, code, why in (
        (
            "an anchor with one member more",
            lambda anchor: anchor.update(more=1),
            2,
            "A statement of a witness has six members.",
        ),
        (
            "an anchor by too long a name",
            lambda anchor: anchor.update(by="w" * 2049),
            2,
            "by has at most 2,048 characters.",
        ),
        ("an anchor of another kind", lambda anchor: anchor.update(kind="hearsay"), 2, "kind is witness or rfc3161."),
        (
            "an anchor whose proof is none",
            lambda anchor: anchor.update(consistency=["ab"]),
            2,
            "A hash has 64 hex digits.",
        ),
        (
            "an anchor that says nothing",
            lambda anchor: anchor.update(checkpoint="nothing"),
            0,
            "It has the form of a statement, and says nothing.",
        ),
    ):
        yield Case(name, of(change), code, why)
    little = {**opened(GOOD)["anchors"][0], "by": "", "checkpoint": "", "consistency": [], "time": ""}
    why = "There are at most 128 statements, and these are 129."
    yield Case("too many anchors", changed(lambda said: said.update(anchors=[little] * 129)), 2, why)


def _kept() -> Iterator[Case]:
    def note(size: int, ledger: Ledger = LEDGER, **of: Any) -> str:
        return checkpoint_of(ledger, size, **of)

    forked = _example_of("acme", begin_ms=1)
    wrong = changed(lambda said: said["extends"].update(consistency=["ab" * 32] * 2))
    doubtful = changed(lambda said: said["anchors"][0].update(consistency=["ab" * 32]))
    as_smaller = note_of(Checkpoint("log.example/acme", 4, LEDGER.checkpoint(5).root))
    for name, file, code, kept, why in (
        ("the same", GOOD, 0, note(5), "The kept checkpoint is the one in the receipt."),
        ("the one it extends", GOOD, 0, note(2), "extends proves that the log goes on from these two entries."),
        (
            "the one of an anchor",
            GOOD,
            0,
            note(4),
            "The statement of a witness proves that the log goes on from these four entries.",
        ),
        ("of a size it says nothing of", GOOD, 3, note(3), "The receipt has no proof from three entries on."),
        ("a later one", GOOD, 3, checkpoint_of(_longer(), 6), "A receipt says nothing of what came after it."),
        (
            "of another log",
            GOOD,
            3,
            note(5, log_origin="other.example"),
            "It is of other.example/acme, so it cannot be compared.",
        ),
        ("by a stranger", GOOD, 4, note(5, signer=STRANGER), "No held key signed the kept checkpoint."),
        *(
            (
                f"of a history that forked, at {size}",
                GOOD,
                2,
                note(size, forked),
                f"The held key signed another tree of {size} entries.",
            )
            for size in (2, 4, 5)
        ),
        (
            "of a size it says nothing of, of a history that forked",
            GOOD,
            3,
            note(3, forked),
            "Without a proof from three entries on nothing shows that it differs.",
        ),
        ("one whose proof does not hold", wrong, 2, note(2), "The proof of extends does not lead to the checkpoint."),
        (
            "a smaller one than the receipt's, whose proof nobody needs",
            wrong,
            3,
            note(3),
            "The proof of extends does not hold, and nobody asked for it.",
        ),
        (
            "the one of an anchor whose proof does not hold",
            doubtful,
            3,
            note(4),
            "A proof beside a witness's statement that does not hold compares nothing.",
        ),
        (
            "of a history that forked, at such an anchor",
            doubtful,
            3,
            note(4, forked),
            "The proof that would show the fork does not hold itself.",
        ),
        (
            "of the same tree, said to be smaller",
            GOOD,
            2,
            as_smaller,
            "The root of five entries, signed as one of four.",
        ),
        ("nothing", GOOD, 2, "", "It is no signed note."),
    ):
        yield Case(f"kept: {name}", file, code, why, kept)


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
