"""Bundles of every kind, good, incomplete and bad, each with the exit code that docs/formats/bundle.md gives it.

Most of the bad ones carry a manifest that the trusted key signed: what an insider could do, and what shows that
each check stands by itself.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from ledger import canonical
from ledger.verification.verdict import Break
from signing import envelope
from signing.anchors import BundledAnchor
from signing.checkpoint import Checkpoint
from tests.app.bundles import (
    ENTRIES,
    LOG_ORIGIN,
    bundle_of,
    checkpoint_of,
    consistency_of,
    container,
    evidence_of,
    lines_of,
    members_of,
    note_of,
    reseal,
    rows_of,
    statement_of,
    with_rows,
    with_statement,
    zipped,
)
from tests.app.witness import Witness
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, Ledger, Row, build, origin_of, payload_digest
from tests.ledger.pruned import PRUNED_SEQ, enter, finish, floor_facts, pruned

ANCHORS = "anchors.json"
SNAPSHOTS, CHECKPOINT, KEYS, MANIFEST = "snapshots.ndjson", "checkpoint", "keys.json", "manifest.dsse.json"
LEDGER = build(30, snapshots_to=(10, 20, 30))
OTHER = build(30, snapshots_to=(10, 20, 30), begin_ms=1_704_931_300_000)
GOOD = bundle_of(LEDGER)
EVIDENCE = evidence_of(LEDGER, Break(2, "payload-digest", "the payload of seq 2 is not the one that was chained"))
_UNREADABLE = [("evidence.dsse.json", b"{}")]


class Case(NamedTuple):
    """A bundle, the exit code it must get, and a checkpoint to hold against it."""

    name: str
    bundle: bytes
    code: int
    kept: str | None = None


@cache
def cases() -> tuple[Case, ...]:
    """All of them, made once: workers are forked from a process that has them."""
    groups: tuple[Callable[[], Iterator[Case]], ...] = (
        *(_sound, _containers, _members, _manifests, _rows, _parts, _snapshots, _job_indexes, _checkpoints),
        *(_kept, _anchors),
        *(_pruned, _pruned_wrongly, _pruned_and_kept),
    )
    return tuple(case for group in groups for case in group())


def _sound() -> Iterator[Case]:
    yield Case("whole", GOOD, 0)
    yield Case("one entry", bundle_of(build(1, snapshots_to=(1,))), 0)
    yield Case("the chain of the ledger itself", bundle_of(build(5, tenant_id="_system", snapshots_to=(5,))), 0)
    yield Case("begun with version 1", bundle_of(build(12, version_1_until=5, snapshots_to=(12,))), 0)
    yield Case("an earlier end", bundle_of(LEDGER, to_seq=20), 0)
    yield Case("an end inside a snapshot", bundle_of(LEDGER, to_seq=25), 3)
    yield Case("a later beginning", bundle_of(LEDGER, 11), 3)
    yield Case("a later beginning inside a snapshot", bundle_of(LEDGER, 5), 3)
    yield Case("inside one snapshot", bundle_of(LEDGER, 12, 18), 3)
    yield Case("the last entry", bundle_of(LEDGER, 30), 3)
    yield Case("an unsigned end", bundle_of(build(30, snapshots_to=(10, 20))), 3)
    yield Case("no snapshot", bundle_of(build(30)), 3)
    yield Case("two parts", _in_two_parts(GOOD), 0)


def _containers() -> Iterator[Case]:
    yield Case("nothing", b"", 1)
    yield Case("zeros", bytes(10_240), 1)
    yield Case("text", b"not a bundle\n" * 100, 1)
    yield Case("without its end", GOOD[:-1024], 2)
    yield Case("without half its end", GOOD[:-512], 2)
    yield Case("with a longer end", GOOD + bytes(512), 2)
    yield Case("with a byte behind it", GOOD + b"\n", 2)
    yield Case("twice", GOOD + GOOD, 2)
    yield Case("evidence of a broken chain", EVIDENCE, 2)
    yield Case(
        "evidence of which nothing can be read", container([*members_of(EVIDENCE).items()][:-1] + _UNREADABLE), 2
    )
    yield Case("gzipped", gzip.compress(GOOD), 1)
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        yield Case(f"made by Python, form {form}", _by_python(form), 2)
    yield Case("with global PAX headers", _by_python(tarfile.PAX_FORMAT, pax_headers={"comment": "x"}), 2)
    for at in (1, 511, 512, 513, 600, len(GOOD) // 2, len(GOOD) - 1025, len(GOOD) - 1):
        yield Case(f"cut at byte {at}", GOOD[:at], 2)
    yield Case("a number of bytes beyond the file", GOOD[:124] + b"77777777777" + GOOD[135:], 2)
    yield Case("a number of bytes in base 256", GOOD[:124] + b"\x80" + bytes(10) + GOOD[135:], 2)
    yield Case("a negative number of bytes", GOOD[:124] + b"-0000000001" + GOOD[135:], 2)


def _by_python(form: int, **options: Any) -> bytes:
    """The good members as another program would pack them."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=form, **options) as tar:
        for name, content in members_of(GOOD).items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1_704_931_200
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def _members() -> Iterator[Case]:
    members, other = members_of(GOOD), members_of(bundle_of(OTHER))
    names = list(members)
    for name in names:
        yield Case(f"without {name}", container((each, members[each]) for each in names if each != name), 2)
        yield Case(f"{name} empty", container((members | {name: b""}).items()), 2)
        yield Case(f"{name} twice", container([*members.items(), (name, members[name])]), 2)
        yield Case(f"{name} cut", container((members | {name: members[name][:-1]}).items()), 2)
        if name != KEYS:
            yield Case(f"{name} of another bundle", container((members | {name: other[name]}).items()), 2)
    for at in range(len(names) - 1):
        swapped = [*names[:at], names[at + 1], names[at], *names[at + 2 :]]
        yield Case(f"{names[at]} and {names[at + 1]} swapped", container((n, members[n]) for n in swapped), 2)
    yield Case("in reverse order", container(reversed(members.items())), 2)
    for name in ("../manifest.dsse.json", "/etc/passwd", "entries/../checkpoint", "ENTRIES/000001.ndjson.gz", "x" * 99):
        renamed = [(name if each == CHECKPOINT else each, data) for each, data in members.items()]
        yield Case(f"a member named {name[:24]}", container(renamed), 2)
        yield Case(f"a further member named {name[:24]}", container([(name, b"x"), *members.items()]), 2)
    yield Case("part 2 and no part 1", container([("entries/000002.ndjson.gz", members[ENTRIES]), *_tail()]), 2)
    yield Case("keys of somebody else", reseal(GOOD, {KEYS: canonical.encode({"keys": []})}), 0)
    attacker = reseal(bundle_of(_signed_by_stranger(), signer=STRANGER), {KEYS: _keys_of_stranger()}, signer=STRANGER)
    yield Case("all of it by a stranger, with the key inside", attacker, 4)


def _tail() -> list[tuple[str, bytes]]:
    return [(name, data) for name, data in members_of(GOOD).items() if name != ENTRIES]


def _signed_by_stranger() -> Ledger:
    ledger = build(30)
    for to_seq in (10, 20, 30):
        ledger.sign(to_seq, STRANGER)
    return ledger


def _keys_of_stranger() -> bytes:
    return canonical.encode({"keys": [STRANGER.public_key.to_json()], "log_verifier_keys": []})


def _manifests() -> Iterator[Case]:
    yield Case("manifest by a stranger", reseal(GOOD, signer=STRANGER), 4)
    held = json.loads(members_of(GOOD)[MANIFEST])
    for name, changed in {
        "with spaces": json.dumps(held).encode(),
        "with a newline": canonical.encode(held) + b"\n",
        "with another field": canonical.encode({**held, "note": 1}),
        "with another field in the signature": canonical.encode(
            {**held, "signatures": [{**held["signatures"][0], "cert": ""}]}
        ),
        "without a key id": canonical.encode({**held, "signatures": [{"sig": held["signatures"][0]["sig"]}]}),
        "with the key id of a stranger": _with_signature(held, keyid=STRANGER.key_id),
        "with no signature": canonical.encode({**held, "signatures": []}),
        "of another payload type": canonical.encode({**held, "payloadType": "application/json"}),
        "of text": b"manifest",
        "of a list": b"[]",
        "of nulls": b'{"payload":null,"payloadType":null,"signatures":null}',
        "of depth": b"[" * 30_000 + b"]" * 30_000,
        "in UTF-16": canonical.encode(held).decode().encode("utf-16"),
    }.items():
        code = 4 if "stranger" in name else 2
        yield Case(f"manifest {name}", container((members_of(GOOD) | {MANIFEST: changed}).items()), code)
    other = json.loads(members_of(bundle_of(OTHER))[MANIFEST])["signatures"][0]["sig"]
    spoilt = _with_signature(held, sig=other)
    yield Case("manifest with the signature of another", container((members_of(GOOD) | {MANIFEST: spoilt}).items()), 2)
    by_stranger = _signatures_by_stranger(held)
    for name, signatures in {
        "by a stranger and by the held key": [*by_stranger, *held["signatures"]],
        "by the held key and by a stranger": [*held["signatures"], *by_stranger],
        "by the held key twice": held["signatures"] * 2,
        "with a word of anybody's beside the signature": [*held["signatures"], {"keyid": "approved", "sig": "YQ=="}],
        "with a longer key id": [{**held["signatures"][0], "keyid": SIGNER.key_id + "0"}],
        "with an empty key id": [{**held["signatures"][0], "keyid": ""}],
        "with a signature of any length": [{"keyid": STRANGER.key_id, "sig": "A" * 260}],
    }.items():
        changed = canonical.encode({**held, "signatures": signatures})
        yield Case(f"manifest {name}", container((members_of(GOOD) | {MANIFEST: changed}).items()), 2)
    yield from _predicates()
    yield from _statements()


def _with_signature(held: dict[str, Any], **changes: str) -> bytes:
    return canonical.encode({**held, "signatures": [{**held["signatures"][0], **changes}]})


def _signatures_by_stranger(held: dict[str, Any]) -> list[dict[str, str]]:
    payload = canonical.encode(statement_of(GOOD))
    signed: Any = envelope.sign(payload, STRANGER)
    return list(signed["signatures"])


def _predicates() -> Iterator[Case]:
    wrong: dict[str, list[Any]] = {
        "format_version": [2, 0, "1", None, True],
        "node_id": ["Node", "", 1, None],
        "log_origin": ["log.example.org", "", "a b", "a+b", 1],
        "tenant_id": ["acme2", "_other", "", 1],
        "from_seq": [0, 2, -1, "1", 1.5],
        "to_seq": [29, 31, 2**53 - 1, None],
        "entry_count": [29, 31, 10**15, 0],
        "snapshot_count": [2, 4, -1],
        "first_hlc": [LEDGER.entry(2)["t_hlc"], "1:2", None],
        "last_hlc": [LEDGER.entry(29)["t_hlc"], "x:0:n"],
        "to_chain_link": [LEDGER.entry(29)["chain_link"], "00", None],
        "tree_size": [29, 31],
        "tree_root": ["00" * 32, "00", LEDGER.checkpoint(29).root.hex()],
        "consistency": [["00" * 32], None, "", ["x"]],
    }
    for name, values in wrong.items():
        for value in values:
            yield Case(f"manifest whose {name} is {value!r}"[:90], reseal(GOOD, **{name: value}), 2)
    ends_early = bundle_of(LEDGER, to_seq=20)
    yield Case("a range whose consistency is missing", reseal(ends_early, consistency=[]), 2)
    proof = statement_of(ends_early)["predicate"]["consistency"]
    yield Case("a range whose consistency is longer", reseal(ends_early, consistency=[*proof, "00" * 32]), 2)
    yield Case("a range whose consistency is shorter", reseal(ends_early, consistency=proof[:-1]), 2)
    yield Case("a range whose consistency is another", reseal(ends_early, consistency=proof[::-1]), 2)
    later = bundle_of(LEDGER, 11)
    yield Case("a later range with another root", reseal(later, tree_root="00" * 32), 2)

    def edit(change: Callable[[dict[str, Any]], object], at: int = 0) -> bytes:
        return reseal(GOOD, parts=lambda parts: change(parts[at]) and None)

    for field, value in (("raw_bytes", 1), ("raw_bytes", 10**12), ("raw_bytes", -1), ("rows", 29), ("rows", 10**9)):
        yield Case(f"a part whose {field} is {value}", edit(lambda part, f=field, v=value: part.update({f: v})), 2)
    for field, value in (("bytes", 1), ("name", "x"), ("sha256", "00" * 32), ("sha256", "0")):
        replaced = edit(lambda part, f=field, v=value: part.update({f: v})) if value != "0" else None
        if replaced is not None:
            yield Case(f"a part whose {field} is {value!r}"[:60], replaced, 2)
    yield Case("parts whose rows are shifted", reseal(_in_two_parts(GOOD), parts=_shift_rows), 2)
    fewer = reseal(GOOD, parts=lambda parts: parts[1].update(rows=2), snapshot_count=2)
    yield Case("one snapshot less in the manifest", fewer, 2)
    yield Case("a part with another field", edit(lambda part: part.update(note=1)), 2)
    yield Case("rows of the checkpoint", edit(lambda part: part.update(rows=1), at=2), 2)
    yield Case("a part more in the manifest", reseal(GOOD, parts=lambda parts: parts.append(parts[-1])), 2)
    yield Case("a part less in the manifest", reseal(GOOD, parts=lambda parts: parts.pop() and None), 2)
    yield Case("no parts", reseal(GOOD, parts=lambda parts: parts.clear()), 2)


def _shift_rows(parts: list[dict[str, Any]]) -> None:
    parts[0]["rows"] -= 1
    parts[1]["rows"] += 1


def _statements() -> Iterator[Case]:
    said = statement_of(GOOD)
    for name, changed in {
        "another type": {**said, "_type": "https://in-toto.io/Statement/v0.1"},
        "another predicate type": {**said, "predicateType": "https://tallystick.dev/bundle/v2"},
        "another subject": {**said, "subject": [{**said["subject"][0], "name": "acme/1-29"}]},
        "two subjects": {**said, "subject": said["subject"] * 2},
        "a field more": {**said, "note": "x"},
        "a field of the predicate more": {**said, "predicate": {**said["predicate"], "note": "x"}},
        "no predicate": {**said, "predicate": []},
    }.items():
        yield Case(f"statement with {name}", with_statement(GOOD, changed), 2)


def _rows() -> Iterator[Case]:
    edits: dict[str, Callable[[list[Row]], object]] = {
        "a payload edited": lambda rows: rows[12].update(payload='{"type":"JobFailed"}'),
        "an action edited": lambda rows: rows[12].update(action="CANCEL"),
        "a job edited": lambda rows: rows[12].update(job_id="job-x"),
        "a time edited": lambda rows: rows[12].update(t_hlc="1:0:node-1"),
        "a physical time edited": lambda rows: rows[12].update(hlc_physical=1),
        "a node edited": lambda rows: rows[12].update(hlc_node="node-2"),
        "an origin made up": lambda rows: rows[12].update(origin="{}"),
        "an origin of another type": lambda rows: rows[12].update(origin=0),
        "a previous link edited": lambda rows: rows[12].update(prev_chain_link="00" * 32),
        "a previous link removed": lambda rows: rows[12].update(prev_chain_link=None),
        "a link edited": lambda rows: rows[12].update(chain_link="00" * 32),
        "a link in capitals": lambda rows: rows[12].update(chain_link=rows[12]["chain_link"].upper()),
        "a digest edited": lambda rows: rows[12].update(payload_digest="00" * 32),
        "a version of 3": lambda rows: rows[12].update(link_version=3),
        "a version of 1": lambda rows: rows[12].update(link_version=1),
        "a seq edited": lambda rows: rows[12].update(seq=14),
        "a row removed": lambda rows: rows.pop(12) and None,
        "a row twice": lambda rows: rows.insert(12, rows[12]),
        "two rows swapped": lambda rows: rows.insert(12, rows.pop(13)),
        "the first row removed": lambda rows: rows.pop(0) and None,
        "a row of another tenant": lambda rows: rows[12].update(tenant_id="other"),
        "a member more": lambda rows: rows[12].update(id=13),
        "a member less": lambda rows: rows[12].pop("origin"),
        "a number as text": lambda rows: rows[12].update(seq="13"),
        "a number as true": lambda rows: rows[0].update(seq=True),
        "a number as fraction": lambda rows: rows[12].update(hlc_logical=0.5),
        "a negative number": lambda rows: rows[12].update(hlc_logical=-1),
        "null for text": lambda rows: rows[12].update(payload=None),
        "a list for text": lambda rows: rows[12].update(job_id=["x"]),
    }
    for name, edit in edits.items():
        rows = rows_of(GOOD)
        edit(rows)
        yield Case(f"rows with {name}", with_rows(GOOD, rows, from_seq=1, to_seq=len(rows), tree_size=len(rows)), 2)
    made_to_fit = rows_of(GOOD)
    made_to_fit[12]["payload"] = '{"fence_token":2,"type":"JobCreated"}'
    yield Case("rows edited with all links made to fit", with_rows(GOOD, _relinked(made_to_fit)), 2)
    yield Case("the last rows cut off", with_rows(GOOD, rows_of(GOOD)[:25]), 2)
    inside = bundle_of(LEDGER, 12, 18)
    yield Case("a later range that follows nothing", with_rows(inside, _relinked(rows_of(inside))), 2)
    reverted = rows_of(GOOD)
    for row in reverted[20:]:
        row["link_version"] = 1
    yield Case("version 1 after version 2, made to fit", with_rows(GOOD, _relinked(reverted)), 2)


def _relinked(rows: list[Row]) -> list[Row]:
    ledger = Ledger("acme", rows)
    ledger.relink()
    return ledger.entries


def _parts() -> Iterator[Case]:
    raw = lines_of(rows_of(GOOD))
    first, rest = raw.split(b"\n", 1)
    texts = {
        "spaces": first.replace(b'":', b'": ') + b"\n" + rest,
        "no last newline": raw[:-1],
        "an empty line": raw + b"\n",
        "CRLF": raw.replace(b"\n", b"\r\n"),
        "a byte order mark": b"\xef\xbb\xbf" + raw,
        "a name twice": raw.replace(b'{"action"', b'{"action":"CANCEL","action"', 1),
        "escaped letters": raw.replace(b"ENQUEUE", b"\\u0045NQUEUE", 1),
        "an exponent": raw.replace(b'"seq":1,', b'"seq":1e0,', 1),
        "a large number": raw.replace(b'"hlc_logical":1', b'"hlc_logical":' + b"9" * 30, 1),
        "a very large number": raw.replace(b'"hlc_logical":1', b'"hlc_logical":' + b"9" * 5000, 1),
        "half a surrogate pair": raw.replace(b'"job-', b'"\\ud800job-', 1),
        "bytes that are not UTF-8": raw.replace(b'"job-', b'"\xffjob-', 1),
        "NaN": raw.replace(b'"hlc_logical":1', b'"hlc_logical":NaN', 1),
        "a list": b"[" + raw.replace(b"\n", b",\n", 29)[:-1] + b"]\n",
        "depth": b"[" * 100_000 + b"\n" + raw,
        "nothing but newlines": b"\n" * 30,
    }
    for name, text in texts.items():
        yield Case(f"a part with {name}", reseal(GOOD, {ENTRIES: zipped(text)}), 2)
    good = members_of(GOOD)[ENTRIES]
    deflated = zlib.compress(raw)
    yield Case("a part in two gzip members", reseal(GOOD, {ENTRIES: zipped(first + b"\n") + zipped(rest)}), 2)
    yield Case("a part with bytes behind it", _listed(good + b"x", raw), 2)
    yield Case("a part with zeros behind it", _listed(good + bytes(8), raw), 2)
    yield Case("a part as zlib", _listed(deflated, raw), 2)
    yield Case("a part not compressed", _listed(raw, raw), 2)
    yield Case("a part cut before its checksum", _listed(good[:-8], raw), 2)
    yield Case("a part with a wrong checksum", _listed(good[:-8] + bytes(8), raw), 2)
    yield Case("a part longer than listed", _listed(zipped(raw + raw), raw), 2)
    yield Case("a part shorter than listed", _listed(zipped(raw[:-2]), raw), 2)


def _listed(data: bytes, raw: bytes) -> bytes:
    """The good bundle with this entry part, listed as if it held ``raw``."""
    return reseal(GOOD, {ENTRIES: data}, parts=lambda parts: parts[0].update(raw_bytes=len(raw), rows=30))


def _in_two_parts(bundle: bytes) -> bytes:
    rows, members = rows_of(bundle), members_of(bundle)
    halves = {ENTRIES: zipped(lines_of(rows[:11])), "entries/000002.ndjson.gz": zipped(lines_of(rows[11:]))}
    ordered = {**halves, **{name: data for name, data in members.items() if name not in halves}}
    return reseal(container(ordered.items()))


def _job_indexes() -> Iterator[Case]:
    yield Case("snapshots of before the index of jobs", bundle_of(_indexed(UNSET)), 0)
    of_all = LEDGER.job_index(30)
    for name, value in {
        "another root": ["00" * 32],
        "a root more": of_all * 2,
        "no root": [],
    }.items():
        yield Case(f"an index of jobs with {name}", bundle_of(_indexed(value)), 2)
    later = _indexed(["00" * 32])
    yield Case("an index of jobs that nobody can compare", bundle_of(later, 11), 3)
    merged = build(8_300, snapshots_to=(1_000, 2_048, 8_300))
    yield Case("an index of jobs with merged runs", bundle_of(merged), 0)
    yield Case("an index of jobs that begins inside a block", bundle_of(merged, 1_001), 3)
    roots = merged.job_index(8_300)
    for number in range(len(roots)):
        del merged.snapshots[2:]
        merged.sign(8_300, job_index=[*roots[:number], "00" * 32, *roots[number + 1 :]])
        yield Case(f"merged runs of which number {number} is another", bundle_of(merged), 2)
        yield Case(f"run number {number} of a later range is another", bundle_of(merged, 1_001), 2 if number else 3)


def _indexed(roots: Any) -> Ledger:
    """The ledger, with this index of jobs in its last snapshot."""
    ledger = LEDGER.copy()
    row = ledger.snapshots[-1]
    statement = json.loads(base64.b64decode(json.loads(row["dsse_envelope"])["payload"]))
    if roots is UNSET:
        del statement["predicate"]["job_index"]
    else:
        statement["predicate"]["job_index"] = roots
    row["dsse_envelope"] = json.dumps(envelope.sign(canonical.encode(statement), SIGNER))
    return ledger


def _snapshots() -> Iterator[Case]:
    lines = members_of(GOOD)[SNAPSHOTS].splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]

    def holding(kept: list[Any]) -> bytes:
        text = b"".join(item if isinstance(item, bytes) else canonical.encode(item) + b"\n" for item in kept)
        return reseal(GOOD, {SNAPSHOTS: text}, snapshot_count=text.count(b"\n"))

    yield Case("without the last snapshot", holding(lines[:2]), 3)
    yield Case("without the first snapshot", holding(lines[1:]), 2)
    yield Case("without the middle snapshot", holding([lines[0], lines[2]]), 2)
    yield Case("a snapshot twice", holding([*lines[:2], lines[1], lines[2]]), 2)
    later = reseal(bundle_of(LEDGER, 11), {SNAPSHOTS: b"".join(lines)}, snapshot_count=3)
    yield Case("a snapshot of what came before the range", later, 2)
    earlier = reseal(bundle_of(LEDGER, to_seq=25), {SNAPSHOTS: b"".join(lines)}, snapshot_count=3)
    yield Case("a snapshot that ends behind the range", earlier, 2)
    yield Case("snapshots in reverse", holding(lines[::-1]), 2)
    for name, value in {
        "from_seq": 12,
        "to_seq": 19,
        "entry_count": 9,
        "merkle_root": "00" * 32,
        "to_chain_link": "00" * 32,
        "snapshot_hlc": "1:0:node-1",
        "tenant_id": "other",
    }.items():
        yield Case(f"a snapshot whose {name} was edited", holding([rows[0], {**rows[1], name: value}, rows[2]]), 2)
    yield Case("a snapshot with a member more", holding([{**rows[0], "id": 1}, *rows[1:]]), 2)
    yield Case("a snapshot with a number as text", holding([{**rows[0], "from_seq": "1"}, *rows[1:]]), 2)
    yield Case("a snapshot with spaces", holding([json.dumps(rows[0]).encode() + b"\n", *lines[1:]]), 2)
    yield Case("a snapshot without an envelope", holding([{**rows[0], "dsse_envelope": {}}, *rows[1:]]), 2)
    bare = [{**row, "dsse_envelope": None} for row in rows]
    yield Case("a snapshot whose envelope was removed", holding([rows[0], bare[1], rows[2]]), 2)
    yield Case("the last snapshot without its envelope", holding([*rows[:2], bare[2]]), 3)
    yield Case("snapshots that are all unsigned", bundle_of(_covered(10, 20, 30)), 3)
    resumed = _covered(10, 20)
    resumed.sign(30)
    yield Case("unsigned snapshots before a signed one", bundle_of(resumed), 0)
    yield Case("unsigned snapshots before one by a stranger", bundle_of(_ledger(_unsigned_then_stranger)), 4)
    forged = _covered(10, 20, 30)
    forged.snapshots[1]["merkle_root"] = "00" * 32
    yield Case("an unsigned snapshot of another root", bundle_of(forged), 2)
    edited = _covered(10, 20)
    edited.sign(30)
    edited.snapshots[0]["to_chain_link"] = "00" * 32
    yield Case("an unsigned snapshot edited before a signed one", bundle_of(edited), 2)
    yield Case("an envelope that is text", holding([{**rows[0], "dsse_envelope": ""}, *rows[1:]]), 2)
    yield Case("a snapshot of another ledger", holding([*lines[:2], _snapshot_lines(OTHER)[2]]), 2)
    spoilt = json.loads(lines[1])
    spoilt["dsse_envelope"]["signatures"][0]["sig"] = rows[0]["dsse_envelope"]["signatures"][0]["sig"]
    yield Case("a snapshot with the signature of another", holding([rows[0], spoilt, rows[2]]), 2)
    yield Case("a snapshot by a stranger", bundle_of(_ledger(lambda ledger: ledger.sign(30, STRANGER))), 4)
    yield Case("a snapshot that claims another root", bundle_of(_ledger(_claiming(merkle_root="00" * 32))), 2)
    yield Case("a snapshot that claims another tree", bundle_of(_ledger(_claiming(tree_root="00" * 32))), 2)
    yield Case("a snapshot that follows another", bundle_of(_ledger(_claiming(previous_snapshot="00" * 32))), 2)
    yield Case("a snapshot that overlaps", bundle_of(_ledger(_overlapping)), 2)


def _snapshot_lines(ledger: Ledger) -> list[bytes]:
    return members_of(bundle_of(ledger))[SNAPSHOTS].splitlines(keepends=True)


def _ledger(finish: Callable[[Ledger], object]) -> Ledger:
    ledger = build(30, snapshots_to=(10, 20))
    finish(ledger)
    return ledger


def _covered(*to_seqs: int) -> Ledger:
    """A ledger with unsigned snapshots."""
    ledger = build(30)
    for to_seq in to_seqs:
        ledger.cover(to_seq)
    return ledger


def _unsigned_then_stranger(ledger: Ledger) -> None:
    ledger.snapshots.pop()
    ledger.cover(20)
    ledger.sign(30, STRANGER)


def _claiming(**changes: Any) -> Callable[[Ledger], object]:
    return lambda ledger: ledger.sign(30, SIGNER, **changes)


def _overlapping(ledger: Ledger) -> None:
    ledger.snapshots.append(ledger.signed(20, 30, payload_digest(ledger.snapshots[-1])))


def _checkpoints() -> Iterator[Case]:
    head = LEDGER.checkpoint()
    own = f"{LOG_ORIGIN}/acme"
    good = checkpoint_of(LEDGER)
    notes = {
        "of another log": (note_of(Checkpoint(f"{LOG_ORIGIN}/other", head.size, head.root)), 2),
        "with another root": (note_of(Checkpoint(own, head.size, b"\1" * 32)), 2),
        "of a smaller tree": (checkpoint_of(LEDGER, 29), 2),
        "of a larger tree": (note_of(Checkpoint(own, 31, head.root)), 2),
        "of an empty tree": (note_of(Checkpoint(own, 0, head.root)), 2),
        "by a stranger": (checkpoint_of(LEDGER, signer=STRANGER), 4),
        "by the held key and a stranger": (good + checkpoint_of(LEDGER, signer=STRANGER).split("\n\n")[1], 0),
        "with a signature that does not hold": (
            good.split("\n\n")[0] + "\n\n" + checkpoint_of(LEDGER, 29).split("\n\n")[1],
            2,
        ),
        "without a signature": (good.split("\n\n")[0] + "\n\n", 2),
        "without an end": (good[:-1], 2),
        "with a carriage return": (good.replace("\n", "\r\n"), 2),
        "with a zero before its size": (good.replace("\n30\n", "\n030\n"), 2),
        "of nothing": ("", 2),
        "of text": ("checkpoint", 2),
    }
    for name, (text, code) in notes.items():
        yield Case(f"a checkpoint {name}", bundle_of(LEDGER, checkpoint=text), code)
    yield Case("a checkpoint that is not UTF-8", reseal(GOOD, {CHECKPOINT: b"\xff\xfe"}), 2)
    more = build(40, snapshots_to=(10, 20, 30, 40))
    yield Case("a checkpoint of a log that went on elsewhere", bundle_of(LEDGER, checkpoint=checkpoint_of(more)), 2)


def _kept() -> Iterator[Case]:
    ahead = build(40, snapshots_to=(10, 20, 30, 40))
    part = bundle_of(ahead, to_seq=30)
    forked = OTHER.checkpoint()
    yield Case("kept: the same", GOOD, 0, checkpoint_of(LEDGER))
    yield Case("kept: an earlier one", GOOD, 0, checkpoint_of(LEDGER, 7))
    yield Case("kept: one of an empty tree", GOOD, 0, checkpoint_of(LEDGER, 0))
    yield Case("kept: a later one", GOOD, 2, checkpoint_of(ahead))
    yield Case("kept: a later one than the range", part, 3, checkpoint_of(ahead, 35))
    yield Case("kept: the one that covers the range", part, 0, checkpoint_of(ahead))
    yield Case("kept: one of the range's beginning", part, 0, checkpoint_of(ahead, 12))
    yield Case("kept: of a history that forked", GOOD, 2, note_of(Checkpoint(f"{LOG_ORIGIN}/acme", 30, forked.root)))
    yield Case("kept: an earlier one that differs", GOOD, 2, note_of(Checkpoint(f"{LOG_ORIGIN}/acme", 7, b"\2" * 32)))
    covering = note_of(Checkpoint(f"{LOG_ORIGIN}/acme", 40, forked.root))
    yield Case("kept: the one that covers the range, of a history that forked", part, 2, covering)
    yield Case("kept: beside a later range, of a history that forked", bundle_of(ahead, 11, 30), 2, covering)
    yield Case(
        "kept: of another log", GOOD, 3, note_of(Checkpoint(f"{LOG_ORIGIN}/other", 30, LEDGER.checkpoint().root))
    )
    yield Case("kept: by a stranger", GOOD, 4, checkpoint_of(LEDGER, signer=STRANGER))
    strange = note_of(Checkpoint(f"{LOG_ORIGIN}/acme", 30, forked.root), STRANGER)
    yield Case("kept: of a history that forked, by a stranger", GOOD, 4, strange)
    yield Case("kept: malformed", GOOD, 2, "nothing")
    yield Case("kept: beside a later range", bundle_of(LEDGER, 11), 3, checkpoint_of(LEDGER))
    yield Case("kept: later than a later range", bundle_of(LEDGER, 11), 2, checkpoint_of(ahead))


def anchored(size: int = 20, **replaced: Any) -> BundledAnchor:
    """What a witness that nobody here knows said of the ledger's first entries; ``replaced`` are other fields."""
    note = Witness().cosign(checkpoint_of(LEDGER, size), 1_704_931_300)
    proof = consistency_of(LEDGER, size)
    hashes, time = [each.hex() for each in proof], "2024-01-11T00:01:40Z"
    stated = BundledAnchor(Witness().verifier_key, note, hashes, "witness", "", time)
    return msgspec.structs.replace(stated, **replaced)


def _anchors() -> Iterator[Case]:
    with_anchors = bundle_of(LEDGER, anchors=[anchored(), anchored(30)])
    member = members_of(with_anchors)[ANCHORS]
    yield Case("with anchors", with_anchors, 0)
    yield Case("with anchors and a later range", bundle_of(LEDGER, 11, anchors=[anchored()]), 3)
    yield Case("with an anchor that is nothing", bundle_of(LEDGER, anchors=[anchored(checkpoint="x", time="")]), 0)
    yield Case("with a stamp that is nothing", bundle_of(LEDGER, anchors=[anchored(kind="rfc3161", response="?")]), 0)
    yield Case("anchors in version 1", reseal(with_anchors, format_version=1), 2)
    yield Case("version 2 without anchors", reseal(GOOD, format_version=2), 2)
    names = [*members_of(with_anchors)]
    behind = [*names[:-3], names[-2], names[-3], names[-1]]
    yield Case("anchors behind the keys", container((each, members_of(with_anchors)[each]) for each in behind), 2)
    held = json.loads(member)
    for name, changed in {
        "that are none": {"anchors": []},
        "that are too many": {"anchors": held["anchors"] * 65},
        "with another member": {**held, "note": 1},
        "without a field": {"anchors": [{k: v for k, v in held["anchors"][0].items() if k != "by"}]},
        "with another field": {"anchors": [{**held["anchors"][0], "note": ""}]},
        "of another kind": {"anchors": [{**held["anchors"][0], "kind": "moon"}]},
        "by a number": {"anchors": [{**held["anchors"][0], "by": 1}]},
        "with a proof of one text": {"anchors": [{**held["anchors"][0], "consistency": "0" * 64}]},
        "with a proof of no hashes": {"anchors": [{**held["anchors"][0], "consistency": ["0"]}]},
        "that are a list": held["anchors"],
    }.items():
        yield Case(f"anchors {name}", reseal(with_anchors, {ANCHORS: canonical.encode(changed)}), 2)
    yield Case("anchors with a space", reseal(with_anchors, {ANCHORS: member + b" "}), 2)
    yield Case("anchors that are no JSON", reseal(with_anchors, {ANCHORS: b"anchors"}), 2)


def _pruned() -> Iterator[Case]:
    """Chains whose first entries left: the bundle begins behind them."""
    ledger = pruned()
    yield Case("pruned: from the floor on", bundle_of(ledger, 11), 0)
    yield Case("pruned: an end inside a snapshot", bundle_of(ledger, 11, 27), 3)
    yield Case("pruned: without the entry that says so", bundle_of(ledger, 11, 20), 3)
    yield Case("pruned: a beginning behind the floor", bundle_of(ledger, 21), 3)
    yield Case("pruned: a beginning below the floor", bundle_of(ledger, 6), 3)
    yield Case("pruned: all that was there before", bundle_of(ledger), 0)
    yield Case("pruned: before the log was forked", bundle_of(pruned(log="log.before/acme"), 11), 0)
    twice = build(30, snapshots_to=(10, 20, 30))
    enter(twice, 15, "PRUNED", floor_facts(twice, 10))
    finish(twice)
    enter(twice, PRUNED_SEQ, "PRUNED", floor_facts(twice, 20, 11) | {"after": _place(twice, 15)})
    finish(twice)
    yield Case("pruned twice: from the newer floor on", bundle_of(twice, 21), 0)
    yield Case("pruned twice: from the older floor on, before the newer", bundle_of(twice, 11, 20), 0)
    yield Case("pruned twice: from the older floor on, with the newer", bundle_of(twice, 11), 3)


def _pruned_wrongly() -> Iterator[Case]:
    """PRUNED entries in a chain that is linked and signed all the same."""
    yield Case("pruned by a stranger", bundle_of(pruned(signer=STRANGER), 11), 4)
    yield Case("pruned by nobody", bundle_of(pruned(signer=None), 11), 2)
    yield Case("pruned with a statement of another log", bundle_of(pruned(log="log.example/other"), 11), 2)
    edited = build(30, snapshots_to=(10, 20, 30))
    enter(edited, PRUNED_SEQ, "PRUNED", floor_facts(edited, 10), decided_ms=2)
    yield Case("pruned with facts that were not signed", bundle_of(finish(edited), 11), 2)
    yield Case("pruned with another link", bundle_of(pruned(chain_link="0" * 64), 11), 2)
    yield Case("pruned with another snapshot", bundle_of(pruned(snapshot="0" * 64), 11), 2)
    yield Case("pruned with a root that its compact range has not", bundle_of(pruned(tree_root="0" * 64), 11), 3)
    other = floor_facts(OTHER, 10)
    tree = {"tree_root": other["tree_root"], "compact_range": other["compact_range"]}
    yield Case("pruned with the tree of other entries", bundle_of(pruned(**tree), 11), 2)
    yield Case("pruned behind no entry", bundle_of(pruned(after={"seq": 17, "chain_link": "0" * 64}), 11), 3)
    yield Case("pruned with a wrong count", bundle_of(pruned(entry_count=9), 11), 3)
    yield Case("pruned with a period of no length", bundle_of(pruned(period_s=0), 11), 3)
    yield Case("pruned with a list of commitments", bundle_of(pruned(commitments=[]), 11), 3)
    yield Case("pruned with a text about private fields", bundle_of(pruned(private_fields="none"), 11), 3)
    yield Case("pruned without a place", bundle_of(pruned(after=None), 11), 3)
    imported = pruned()
    imported.entry(PRUNED_SEQ)["origin"] = origin_of(3)
    imported.relink(PRUNED_SEQ)
    yield Case("pruned by another ledger", bundle_of(finish(imported), 11), 3)
    loosened = pruned()
    enter(loosened, 27, "RETENTION_SET", {"period_s": 1, "after": _place(loosened, PRUNED_SEQ)}, signer=None)
    yield Case("pruned, then loosened by nobody", bundle_of(finish(loosened), 11), 2)
    voided = build(30, snapshots_to=(10, 20, 30))
    enter(voided, 23, "HOLD_PLACED", {"hold_id": "0" * 16, "reason": "law"}, signer=None)
    enter(voided, PRUNED_SEQ, "PRUNED", floor_facts(finish(voided), 10) | {"after": {"seq": 0, "chain_link": ""}})
    yield Case("pruned after a hold that it does not name", bundle_of(finish(voided), 11), 3)


def _pruned_and_kept() -> Iterator[Case]:
    ledger = pruned()
    bundle = bundle_of(ledger, 11)
    for size, code in ((30, 0), (20, 0), (10, 0), (7, 3)):
        yield Case(f"pruned, kept: of size {size}", bundle, code, checkpoint_of(ledger, size))
    forked = OTHER.copy()
    for size in (20, 10):
        yield Case(f"pruned, kept: of other entries, of size {size}", bundle, 2, checkpoint_of(forked, size))


def _place(ledger: Ledger, seq: int) -> dict[str, Any]:
    return {"seq": seq, "chain_link": ledger.entry(seq)["chain_link"]}


FLOOR_MEMBERS = (
    *("from_seq", "entry_count", "chain_link", "tree_root", "compact_range", "snapshot", "highest_hlc", "archive"),
    *("manifests", "decided_ms", "never_ended", "period_s", "minimum_s", "after"),
)
"""Members of a PRUNED entry but ``to_seq``, without which it is about nothing."""


def other_members_of_a_prune() -> list[tuple[str, Any]]:
    """Members of a PRUNED entry with values of another type, or out of bounds."""
    return [(name, value) for name in FLOOR_MEMBERS for value in (None, "0" * 64, 0, [], {"seq": 0}, 2**53 - 1)]
