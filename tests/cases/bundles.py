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
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from ledger import canonical
from ledger.verification.verdict import Break
from signing import envelope
from signing.anchors import BundledAnchor
from signing.checkpoint import Checkpoint
from signing.note import sign as sign_note
from tests.app import bundles
from tests.app.bundles import (
    ENTRIES,
    LOG_ORIGIN,
    anchored,
    checkpoint_of,
    container,
    evidence_of,
    legible,
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
from tests.cases.corpus import Case
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, Ledger, Row, build, origin_of, payload_digest
from tests.ledger.pruned import (
    LONG_FLOOR,
    PRUNED_SEQ,
    enter,
    finish,
    floor_facts,
    index_from,
    index_without,
    pruned,
    pruned_long,
    with_index,
    without,
)

ANCHORS, JOB_INDEX = "anchors.json", "job_index.json"
SNAPSHOTS, CHECKPOINT, KEYS, MANIFEST = "snapshots.ndjson", "checkpoint", "keys.json", "manifest.dsse.json"


def bundle_of(ledger: Ledger, *of_range: int, **options: Any) -> bytes:
    """A bundle whose entries can be read in the corpus."""
    return legible(bundles.bundle_of(ledger, *of_range, **options), options.get("signer", SIGNER))


LEDGER = build(12, snapshots_to=(4, 8, 12))
OTHER = build(12, snapshots_to=(4, 8, 12), begin_ms=1_704_931_300_000)
FORKED = build(30, snapshots_to=(10, 20, 30), begin_ms=1_704_931_300_000)
"""Other entries than those of ``pruned``."""
GOOD = bundle_of(LEDGER)
EVIDENCE = evidence_of(LEDGER, Break(2, "payload-digest", "the payload of seq 2 is not the one that was chained"))
_UNREADABLE = [("evidence.dsse.json", b"{}")]


@cache
def cases() -> tuple[Case, ...]:
    """Those of the corpus, made once: workers are forked from a process that has them."""
    groups: tuple[Callable[[], Iterator[Case]], ...] = (
        *(_sound, _containers, _members, _manifests, _rows, _parts, _snapshots, _job_indexes, _checkpoints),
        *(_notes, _kept, _anchors),
        *(_pruned, _pruned_wrongly, _pruned_and_kept, _pruned_index),
    )
    return tuple(case for group in groups for case in group())


def _sound() -> Iterator[Case]:
    yield Case("whole", GOOD, 0, "All entries from seq 1 on, under signed snapshots up to the last one.")
    compressed = bundles.bundle_of(LEDGER)
    yield Case("whole, compressed", compressed, 0, "The same bundle with its entries deflated, as a ledger writes it.")
    one = bundle_of(build(1, snapshots_to=(1,)))
    yield Case("one entry", one, 0, "A chain of one entry: a tree of one leaf, whose root is the leaf hash.")
    system = bundle_of(build(5, tenant_id="_system", snapshots_to=(5,)))
    yield Case("the chain of the ledger itself", system, 0, "_system is a tenant like any other when it is verified.")
    old = bundle_of(build(8, version_1_until=3, snapshots_to=(8,)))
    yield Case("begun with version 1", old, 0, "Links of version 1 stand before all of version 2, and seq binds them.")
    why = "A range from seq 1 that ends with a snapshot is whole, although the log goes on."
    yield Case("an earlier end", bundle_of(LEDGER, 1, 8), 0, why)
    why = "Entries 9 and 10 are covered by no snapshot in the file: the end is unsigned."
    yield Case("an end inside a snapshot", bundle_of(LEDGER, 1, 10), 3, why)
    why = "What came before seq 5 is not here, and no PRUNED entry says that it left."
    yield Case("a later beginning", bundle_of(LEDGER, 5), 3, why)
    why = "Neither what came before seq 3 nor the snapshot over seq 1 to 4 is here."
    yield Case("a later beginning inside a snapshot", bundle_of(LEDGER, 3), 3, why)
    yield Case("inside one snapshot", bundle_of(LEDGER, 6, 7), 3, "No snapshot lies wholly in the range 6 to 7.")
    yield Case("the last entry", bundle_of(LEDGER, 12), 3, "One entry of twelve is a range like any other.")
    unsigned = bundle_of(build(12, snapshots_to=(4, 8)))
    yield Case("an unsigned end", unsigned, 3, "No snapshot was signed over seq 9 to 12 yet.")
    yield Case("no snapshot", bundle_of(build(12)), 3, "snapshots.ndjson is empty, so all entries are unsigned.")
    yield Case("two parts", _in_two_parts(GOOD), 0, "Entries may be split into parts, numbered from 000001 on.")


def _containers() -> Iterator[Case]:
    yield Case("nothing", b"", 1, "An empty file does not begin like a bundle or a receipt: it is none.")
    yield Case("zeros", bytes(2_048), 1, "A tar archive without members names no member of a bundle.")
    yield Case("text", b"not a bundle\n" * 20, 1, "A text is no bundle, rather than a broken one.")
    yield Case("without its end", GOOD[:-1024], 2, "The two blocks of zeros behind the last member are missing.")
    yield Case("without half its end", GOOD[:-512], 2, "One of the two blocks of zeros at the end is missing.")
    yield Case("with a longer end", GOOD + bytes(512), 2, "A third block of zeros: nothing may follow the second.")
    yield Case("with a byte behind it", GOOD + b"\n", 2, "One byte follows the end of the container.")
    yield Case("twice", GOOD + GOOD, 2, "A second archive follows the end of the first.")
    why = "evidence.dsse.json in place of the manifest: a node says that this chain is broken."
    yield Case("evidence of a broken chain", EVIDENCE, 2, why)
    unreadable = container([*members_of(EVIDENCE).items()][:-1] + _UNREADABLE)
    why = "evidence.dsse.json is no envelope, and a file with it is no bundle all the same."
    yield Case("evidence of which nothing can be read", unreadable, 2, why)
    yield Case(
        "gzipped", gzip.compress(GOOD, mtime=0), 1, "The container itself is not compressed; this is another file."
    )
    for form, name in ((tarfile.USTAR_FORMAT, "ustar"), (tarfile.GNU_FORMAT, "GNU"), (tarfile.PAX_FORMAT, "PAX")):
        why = f"A {name} archive by Python's tarfile has a time, an owner or padding that no header of a bundle has."
        yield Case(f"packed by Python as {name}", _by_python(form), 2, why)
    why = "A global PAX header stands before the first member."
    yield Case("with global PAX headers", _by_python(tarfile.PAX_FORMAT, pax_headers={"comment": "x"}), 2, why)
    for at in (1, 511, 512, 513, 600, len(GOOD) // 2, len(GOOD) - 1025, len(GOOD) - 1):
        why = f"Only the first {at} of {len(GOOD)} bytes are there."
        yield Case(f"cut at byte {at}", GOOD[:at], 2, why)
    for name, digits, why in (
        ("beyond the file", b"77777777777", "The header says a size of 8 GiB, and the file has a few KiB."),
        ("in base 256", b"\x80" + bytes(10), "Sizes are octal digits; base 256 is an extension of GNU tar."),
        ("below zero", b"-0000000001", "A size with a sign is not 11 octal digits."),
        (
            "with spaces",
            b"       0001 ",
            "A size padded with spaces, as old tar programs write it, is another spelling.",
        ),
    ):
        yield Case(f"a number of bytes {name}", GOOD[:124] + digits[:11] + GOOD[135:], 2, why)
    why = "The checksum of the first header is one too high."
    yield Case("a header with another checksum", GOOD[:153] + bytes([GOOD[153] ^ 1]) + GOOD[154:], 2, why)
    yield Case(
        "a header that is executable", GOOD[:100] + b"0000755" + GOOD[107:], 2, "The mode of a member is 0000644."
    )
    why = "The type of the first member is a symbolic link."
    yield Case("a header of a link", GOOD[:156] + b"2" + GOOD[157:], 2, why)
    padded = GOOD.rindex(b"}", 0, len(GOOD) - 1024) + 1
    why = "A byte in the padding behind the manifest is not zero."
    yield Case("padding that is not zero", GOOD[:padded] + b"x" + GOOD[padded + 1 :], 2, why)


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
        left = container((each, members[each]) for each in names if each != name)
        yield Case(f"without {name}", left, 2, f"{name} is missing.")
        empty = container((members | {name: b""}).items())
        yield Case(f"{name} empty", empty, 2, f"{name} has no bytes, and the manifest lists others or is gone.")
        twice = container([*members.items(), (name, members[name])])
        yield Case(f"{name} twice", twice, 2, f"A second {name} follows the manifest, behind which nothing may stand.")
        cut = container((members | {name: members[name][:-1]}).items())
        yield Case(f"{name} cut", cut, 2, f"The last byte of {name} is missing.")
        if name != KEYS:
            replaced = container((members | {name: other[name]}).items())
            yield Case(f"{name} of another bundle", replaced, 2, f"{name} is not the one that the manifest is about.")
    for at in range(len(names) - 1):
        swapped = [*names[:at], names[at + 1], names[at], *names[at + 2 :]]
        why = f"{names[at + 1]} stands before {names[at]}; members have one order."
        yield Case(f"{names[at]} and {names[at + 1]} swapped", container((n, members[n]) for n in swapped), 2, why)
    yield Case("in reverse order", container(reversed(members.items())), 2, "The manifest stands first, not last.")
    for name in ("../manifest.dsse.json", "/etc/passwd", "entries/../checkpoint", "ENTRIES/000001.ndjson.gz", "x" * 99):
        renamed = [(name if each == CHECKPOINT else each, data) for each, data in members.items()]
        why = "A name that no member has stands where checkpoint must."
        yield Case(f"a member named {name[:24]}", container(renamed), 2, why)
        further = container([(name, b"x"), *members.items()])
        why = "A member of another name stands before the entries."
        yield Case(f"a further member named {name[:24]}", further, 2, why)
    second = container([("entries/000002.ndjson.gz", members[ENTRIES]), *_tail()])
    yield Case("part 2 and no part 1", second, 2, "The first entry part has number 000002.")
    foreign = reseal(GOOD, {KEYS: canonical.encode({"keys": []})})
    yield Case("keys of nobody inside", foreign, 0, "keys.json is for people: what it holds verifies nothing.")
    attacker = reseal(bundle_of(_signed_by_stranger(), signer=STRANGER), {KEYS: _keys_of_stranger()}, signer=STRANGER)
    why = "Manifest and snapshots are signed by a key that stands in the bundle alone, which makes it no held key."
    yield Case("all of it by a stranger, with the key inside", attacker, 4, why)


def _tail() -> list[tuple[str, bytes]]:
    return [(name, data) for name, data in members_of(GOOD).items() if name != ENTRIES]


def _signed_by_stranger() -> Ledger:
    ledger = build(12)
    for to_seq in (4, 8, 12):
        ledger.sign(to_seq, STRANGER)
    return ledger


def _keys_of_stranger() -> bytes:
    return canonical.encode({"keys": [STRANGER.public_key.to_json()], "log_verifier_keys": []})


def _manifests() -> Iterator[Case]:
    yield Case("manifest by a stranger", reseal(GOOD, signer=STRANGER), 4, "No held key signed the manifest.")
    held = json.loads(members_of(GOOD)[MANIFEST])
    signature = held["signatures"][0]["sig"]
    for name, changed, why in (
        ("with spaces", json.dumps(held).encode(), "The envelope has spaces between its tokens."),
        ("with a newline", canonical.encode(held) + b"\n", "A newline follows the envelope."),
        ("with a byte order mark", b"\xef\xbb\xbf" + canonical.encode(held), "U+FEFF stands before the envelope."),
        ("with another field", canonical.encode({**held, "note": 1}), "The envelope has a fourth member."),
        (
            "with another field in the signature",
            canonical.encode({**held, "signatures": [{**held["signatures"][0], "cert": ""}]}),
            "The signature has a third member.",
        ),
        (
            "without a key id",
            canonical.encode({**held, "signatures": [{"sig": signature}]}),
            "The signature names no key.",
        ),
        ("with no signature", canonical.encode({**held, "signatures": []}), "The list of signatures is empty."),
        (
            "of another payload type",
            canonical.encode({**held, "payloadType": "application/json"}),
            "payloadType is not that of an in-toto statement; it is signed together with the payload.",
        ),
        ("of text", b"manifest", "The manifest is no JSON."),
        ("of a list", b"[]", "The manifest is a list, and no envelope."),
        (
            "of nulls",
            b'{"payload":null,"payloadType":null,"signatures":null}',
            "The members of the envelope are null.",
        ),
        ("of depth", b"[" * 5_000 + b"]" * 5_000, "The manifest is a list nested 5,000 deep."),
        ("in UTF-16", canonical.encode(held).decode().encode("utf-16"), "The envelope is in UTF-16."),
        (
            "whose payload has no padding",
            canonical.encode({**held, "payload": held["payload"].rstrip("=")}),
            "The base64 of the payload lacks its padding.",
        ),
        (
            "with a signature in the URL-safe alphabet",
            _with_signature(held, sig=base64.urlsafe_b64encode(base64.b64decode(signature)).decode()),
            "The signature is in the other alphabet of base64, which a manifest must not use.",
        ),
        (
            "whose payload has a newline",
            canonical.encode({**held, "payload": held["payload"][:76] + "\n" + held["payload"][76:]}),
            "The base64 of the payload is broken into lines.",
        ),
        (
            "with a letter escaped",
            canonical.encode(held).replace(b'"payload":"e', b'"payload":"\\u0065', 1),
            "A letter of the envelope is escaped, which needs no escape.",
        ),
        (
            "with a signature of stray bits",
            _with_signature(held, sig=_with_stray_bits(signature)),
            "The last letter of the signature carries bits that decode to nothing: base64 with two spellings.",
        ),
        (
            "with a signature of one byte less",
            _with_signature(held, sig=_cut(signature)),
            "The signature has 63 bytes.",
        ),
    ):
        yield Case(f"manifest {name}", _with_manifest(changed), 2, why)
    why = "The signature names a key that is not held, so nobody known vouches for the manifest."
    yield Case(
        "manifest with the key id of a stranger", _with_manifest(_with_signature(held, keyid=STRANGER.key_id)), 4, why
    )
    other = json.loads(members_of(bundle_of(OTHER))[MANIFEST])["signatures"][0]["sig"]
    spoilt = _with_signature(held, sig=other)
    why = "The held key made this signature under another manifest."
    yield Case("manifest with the signature of another", _with_manifest(spoilt), 2, why)
    by_stranger = _signatures_by_stranger()
    for name, signatures, why in (
        (
            "by a stranger and by the held key",
            [*by_stranger, *held["signatures"]],
            "A manifest has one signature, not two.",
        ),
        (
            "by the held key and by a stranger",
            [*held["signatures"], *by_stranger],
            "A second signature follows, though good.",
        ),
        ("by the held key twice", held["signatures"] * 2, "The same signature stands there twice."),
        (
            "with a word of anybody's beside the signature",
            [*held["signatures"], {"keyid": "approved", "sig": "YQ=="}],
            "A second signature that nobody can check says something to people who read it.",
        ),
        (
            "with a longer key id",
            [{**held["signatures"][0], "keyid": SIGNER.key_id + "0"}],
            "A key id has 16 hex digits, and this one 17.",
        ),
        (
            "with a key id in capitals",
            [{**held["signatures"][0], "keyid": SIGNER.key_id.upper()}],
            "The hex digits of a key id are in small letters.",
        ),
        ("with an empty key id", [{**held["signatures"][0], "keyid": ""}], "In a manifest the key id is never empty."),
        (
            "with a signature of any length",
            [{"keyid": STRANGER.key_id, "sig": "A" * 260}],
            "A signature has at most 256 characters.",
        ),
    ):
        changed = canonical.encode({**held, "signatures": signatures})
        yield Case(f"manifest {name}", _with_manifest(changed), 2, why)
    yield from _predicates()
    yield from _statements()


def _with_manifest(manifest: bytes) -> bytes:
    return container((members_of(GOOD) | {MANIFEST: manifest}).items())


def _with_signature(held: dict[str, Any], **changes: str) -> bytes:
    return canonical.encode({**held, "signatures": [{**held["signatures"][0], **changes}]})


def _with_stray_bits(signature: str) -> str:
    """64 bytes leave four bits of the last letter unused."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    last = signature.rstrip("=")[-1]
    return signature.rstrip("=")[:-1] + alphabet[alphabet.index(last) + 1] + "=="


def _cut(signature: str) -> str:
    return base64.b64encode(base64.b64decode(signature)[:-1]).decode()


def _signatures_by_stranger() -> list[dict[str, str]]:
    payload = canonical.encode(statement_of(GOOD))
    signed: Any = envelope.sign(payload, STRANGER)
    return list(signed["signatures"])


def _predicates() -> Iterator[Case]:
    wrong: dict[str, tuple[str, list[Any]]] = {
        "format_version": ("it is 1 where there are no anchors", [2, 0, "1", None, True]),
        "node_id": ("a node is named by small letters, digits and hyphens", ["Node", "", 1, None]),
        "log_origin": ("the checkpoint is of log.example/acme", ["log.example.org", "", "a b", "a+b", 1]),
        "tenant_id": ("the rows are of tenant acme", ["acme2", "_other", "", 1]),
        "from_seq": ("the first row has seq 1", [0, 2, -1, "1", 1.5]),
        "to_seq": ("the last row has seq 12", [11, 13, 2**53 - 1, None]),
        "entry_count": ("there are 12 rows", [11, 13, 10**15, 0]),
        "snapshot_count": ("there are 3 snapshots", [2, 4, -1]),
        "first_hlc": ("the first row has another time", [LEDGER.entry(2)["t_hlc"], "1:2", None]),
        "last_hlc": ("the last row has another time", [LEDGER.entry(11)["t_hlc"], "x:0:n"]),
        "to_chain_link": ("the last row has another link", [LEDGER.entry(11)["chain_link"], "00", None]),
        "tree_size": ("the tree has as many leaves as to_seq says", [11, 13]),
        "tree_root": ("the entries have another root", ["00" * 32, "00", LEDGER.checkpoint(11).root.hex()]),
        "consistency": (
            "manifest and checkpoint are of one size, so no hash is needed",
            [["00" * 32], None, "", ["x"]],
        ),
    }
    for name, (why, values) in wrong.items():
        for value in values:
            shown = "another one" if isinstance(value, str) and len(value) == 64 else repr(value)
            shown = shown if shown != "another one" or value != "00" * 32 else "zeros"
            told = f"The manifest's {name} is {shown}, and {why}."
            yield Case(f"manifest whose {name} is {shown}"[:90], reseal(GOOD, **{name: value}), 2, told)
    ends_early = bundle_of(LEDGER, 1, 10)
    proof = statement_of(ends_early)["predicate"]["consistency"]
    for name, hashes, why in (
        ("is missing", [], "The checkpoint has 12 leaves, the range 10, and no hash leads from one to the other."),
        ("is longer", [*proof, "00" * 32], "A consistency proof has exactly the hashes that are needed."),
        ("is shorter", proof[:-1], "The last hash of the consistency proof is missing."),
        ("is another", proof[::-1], "The hashes of the consistency proof are in reverse order."),
    ):
        yield Case(f"a range whose consistency {name}", reseal(ends_early, consistency=hashes), 2, why)
    later = bundle_of(LEDGER, 5)
    why = "Of a later range the root cannot be computed, but it must be the checkpoint's where sizes are equal."
    yield Case("a later range with another root", reseal(later, tree_root="00" * 32), 2, why)

    def edit(change: Callable[[dict[str, Any]], object], at: int = 0) -> bytes:
        return reseal(GOOD, parts=lambda parts: change(parts[at]) and None)

    for field, value in (
        *(("raw_bytes", 1), ("raw_bytes", 10**12), ("raw_bytes", -1), ("rows", 11), ("rows", 10**9)),
        *(("bytes", 1), ("name", "x"), ("sha256", "00" * 32)),
    ):
        listed = value if field != "sha256" else "zeros"
        why = f"The manifest lists {field} of the entry part as {listed}, which is not so."
        yield Case(
            f"a part whose {field} is {listed}", edit(lambda part, f=field, v=value: part.update({f: v})), 2, why
        )
    why = "The first part is listed with a row less and the second with a row more than they have."
    yield Case("parts whose rows are shifted", reseal(_in_two_parts(GOOD), parts=_shift_rows), 2, why)
    fewer = reseal(GOOD, parts=lambda parts: parts[1].update(rows=2), snapshot_count=2)
    why = "snapshots.ndjson has 3 rows, of which the manifest counts 2."
    yield Case("one snapshot less in the manifest", fewer, 2, why)
    why = "A part of the manifest has a sixth member."
    yield Case("a part with another field", edit(lambda part: part.update(note=1)), 2, why)
    yield Case("rows of the checkpoint", edit(lambda part: part.update(rows=1), at=2), 2, "rows of checkpoint is 0.")
    more = reseal(GOOD, parts=lambda parts: parts.append(parts[-1]))
    yield Case("a part more in the manifest", more, 2, "keys.json is listed twice.")
    less = reseal(GOOD, parts=lambda parts: parts.pop() and None)
    yield Case("a part less in the manifest", less, 2, "keys.json is there and not listed.")
    yield Case("no parts", reseal(GOOD, parts=lambda parts: parts.clear()), 2, "The list of parts is empty.")


def _shift_rows(parts: list[dict[str, Any]]) -> None:
    parts[0]["rows"] -= 1
    parts[1]["rows"] += 1


def _statements() -> Iterator[Case]:
    said = statement_of(GOOD)
    text = canonical.encode(said)
    for name, changed, why in (
        ("another type", {**said, "_type": "https://in-toto.io/Statement/v0.1"}, "_type is that of Statement v0.1."),
        (
            "another predicate type",
            {**said, "predicateType": "https://tallystick.dev/bundle/v2"},
            "predicateType is of a format that this is not.",
        ),
        (
            "another subject",
            {**said, "subject": [{**said["subject"][0], "name": "acme/1-11"}]},
            "The subject names seq 1 to 11, the predicate 1 to 12.",
        ),
        ("two subjects", {**said, "subject": said["subject"] * 2}, "A statement has exactly one subject."),
        ("a field more", {**said, "note": "x"}, "The statement has a fifth member."),
        (
            "a field of the predicate more",
            {**said, "predicate": {**said["predicate"], "note": "x"}},
            "The predicate has a member that no format gives it.",
        ),
        ("no predicate", {**said, "predicate": []}, "The predicate is an empty list."),
    ):
        yield Case(f"statement with {name}", with_statement(GOOD, changed), 2, why)
    for name, payload, why in (
        (
            "a space",
            text.replace(b'"to_seq":', b'"to_seq": ', 1),
            "The signed statement has a space between two tokens.",
        ),
        (
            "a name twice",
            text.replace(b'"to_seq":', b'"to_seq":12,"to_seq":', 1),
            "to_seq stands twice in the signed statement, both times as 12.",
        ),
        (
            "a number with a fraction of zero",
            text.replace(b'"to_seq":12', b'"to_seq":12.0', 1),
            "12.0 is the number 12 in another spelling than the canonical one.",
        ),
        ("an exponent", text.replace(b'"to_seq":12', b'"to_seq":1.2e1', 1), "1.2e1 is no canonical spelling of 12."),
        ("a minus zero", text.replace(b'"rows":0', b'"rows":-0', 1), "-0 is no canonical spelling of 0."),
        ("a letter escaped", text.replace(b'"acme"', b'"\\u0061cme"', 1), "A letter that needs no escape has one."),
        ("a newline at its end", text + b"\n", "A newline follows the signed statement."),
        ("a byte order mark", b"\xef\xbb\xbf" + text, "U+FEFF stands before the signed statement."),
        (
            "its names in another order",
            json.dumps(dict(reversed(said.items())), separators=(",", ":")).encode(),
            "The names of the signed statement are not sorted.",
        ),
    ):
        signed = canonical.encode(envelope.sign(payload, SIGNER))
        yield Case(f"statement with {name}", _with_manifest(signed), 2, why)


def _rows() -> Iterator[Case]:
    edits: dict[str, tuple[Callable[[list[Row]], object], str]] = {
        "a payload edited": (
            lambda rows: rows[5].update(payload='{"type":"JobFailed"}'),
            "payload_digest of seq 6 is that of another payload.",
        ),
        "an action edited": (lambda rows: rows[5].update(action="CANCEL"), "The link of seq 6 binds another action."),
        "a job edited": (lambda rows: rows[5].update(job_id="job-x"), "The link of seq 6 binds another job."),
        "a time edited": (
            lambda rows: rows[5].update(t_hlc="1:0:node-1"),
            "t_hlc of seq 6 is not what its three columns spell.",
        ),
        "a physical time edited": (
            lambda rows: rows[5].update(hlc_physical=1),
            "hlc_physical of seq 6 is not that of t_hlc.",
        ),
        "a node edited": (lambda rows: rows[5].update(hlc_node="node-2"), "hlc_node of seq 6 is not that of t_hlc."),
        "an origin made up": (
            lambda rows: rows[5].update(origin="{}"),
            "The link of seq 6 binds that it has no origin.",
        ),
        "an origin of another type": (lambda rows: rows[5].update(origin=0), "origin is text or null."),
        "a previous link edited": (
            lambda rows: rows[5].update(prev_chain_link="00" * 32),
            "prev_chain_link of seq 6 is not the link of seq 5.",
        ),
        "a previous link removed": (
            lambda rows: rows[5].update(prev_chain_link=None),
            "prev_chain_link is null at seq 1 alone.",
        ),
        "a link edited": (
            lambda rows: rows[5].update(chain_link="00" * 32),
            "chain_link of seq 6 is not that of its columns.",
        ),
        "a link in capitals": (
            lambda rows: rows[5].update(chain_link=rows[5]["chain_link"].upper()),
            "The hex digits of a link are in small letters.",
        ),
        "a digest edited": (
            lambda rows: rows[5].update(payload_digest="00" * 32),
            "payload_digest of seq 6 is not that of its payload.",
        ),
        "a version of 3": (lambda rows: rows[5].update(link_version=3), "Link version 3 is not known."),
        "a version of 1": (
            lambda rows: rows[5].update(link_version=1),
            "A link of version 1 behind one of version 2, and not the link that version 1 calls for.",
        ),
        "a seq edited": (lambda rows: rows[5].update(seq=7), "Behind seq 5 stands seq 7."),
        "a row removed": (lambda rows: rows.pop(5) and None, "seq 6 is missing."),
        "a row twice": (lambda rows: rows.insert(5, rows[5]), "seq 6 stands there twice."),
        "two rows swapped": (lambda rows: rows.insert(5, rows.pop(6)), "seq 7 stands before seq 6."),
        "the first row removed": (
            lambda rows: rows.pop(0) and None,
            "The manifest begins at seq 1, the rows at seq 2.",
        ),
        "a row of another tenant": (lambda rows: rows[5].update(tenant_id="other"), "seq 6 is of tenant other."),
        "a member more": (lambda rows: rows[5].update(id=6), "A row has exactly the members of the format."),
        "a member less": (lambda rows: rows[5].pop("origin"), "seq 6 has no member origin, which may be null."),
        "a number as text": (lambda rows: rows[5].update(seq="6"), "seq is a number, not a text."),
        "a number as true": (lambda rows: rows[0].update(seq=True), "true is no number, though some languages say 1."),
        "a number as fraction": (lambda rows: rows[5].update(hlc_logical=0.5), "hlc_logical is an integer."),
        "a negative number": (lambda rows: rows[5].update(hlc_logical=-1), "Numbers of a row are 0 or more."),
        "null for text": (lambda rows: rows[5].update(payload=None), "payload is never null."),
        "a list for text": (lambda rows: rows[5].update(job_id=["x"]), "job_id is a text."),
    }
    for name, (edit, why) in edits.items():
        rows = rows_of(GOOD)
        edit(rows)
        found = with_rows(GOOD, rows, from_seq=1, to_seq=len(rows), tree_size=len(rows))
        yield Case(f"rows with {name}", found, 2, why)
    why = "Digest and links fit the changed payload; the snapshot over seq 5 to 8 was signed before."
    yield Case("rows edited with all links made to fit", with_rows(GOOD, _relinked(_edited())), 2, why)
    why = "The last snapshot ends behind the last row."
    yield Case("the last rows cut off", with_rows(GOOD, rows_of(GOOD)[:10]), 2, why)
    inside = bundle_of(LEDGER, 6, 7)
    why = "The first row of a later range follows a link, which is not known, but never null."
    yield Case("a later range that follows nothing", with_rows(inside, _relinked(rows_of(inside))), 2, why)
    reverted = rows_of(GOOD)
    for row in reverted[8:]:
        row["link_version"] = 1
    why = "From seq 9 on links have version 1, which stand only before all of version 2."
    yield Case("version 1 after version 2, made to fit", with_rows(GOOD, _relinked(reverted)), 2, why)

    for name, edit, why in (
        (
            "a row removed",
            lambda rows: rows.pop(5),
            "seq 6 is missing, and links, root and checkpoint are those of the rest.",
        ),
        (
            "a row twice",
            lambda rows: rows.insert(5, {**rows[5]}),
            "seq 6 stands there twice, and links, root and checkpoint fit.",
        ),
        (
            "two rows swapped",
            lambda rows: rows.insert(5, rows.pop(6)),
            "seq 7 stands before seq 6, and all the rest fits.",
        ),
        (
            "a first seq of 2",
            lambda rows: rows.pop(0),
            "The first row has seq 2 and follows nothing, and all the rest fits.",
        ),
    ):
        rows = rows_of(GOOD)
        edit(rows)
        yield Case(f"rows with {name}, made to fit", _made_to_fit(rows), 2, why)


def _made_to_fit(rows: list[Row]) -> bytes:
    """The bundle of these rows, linked in their order, without snapshots; its checkpoint is of as many leaves as the
    last seq says, with the root of the rows."""
    ledger, to_seq = Ledger("acme", rows), rows[-1]["seq"]
    ledger.relink()
    root = ledger.checkpoint().root
    said = {
        "from_seq": rows[0]["seq"],
        "to_seq": to_seq,
        "tree_size": to_seq,
        "entry_count": to_seq - rows[0]["seq"] + 1,
        "first_hlc": rows[0]["t_hlc"],
        "last_hlc": rows[-1]["t_hlc"],
        "to_chain_link": rows[-1]["chain_link"],
        "snapshot_count": 0,
        "tree_root": root.hex(),
    }
    note = note_of(Checkpoint(f"{LOG_ORIGIN}/acme", to_seq, root)).encode()
    return reseal(GOOD, {ENTRIES: zipped(lines_of(rows)), SNAPSHOTS: b"", CHECKPOINT: note}, **said)


def _edited() -> list[Row]:
    rows = rows_of(GOOD)
    rows[4]["payload"] = '{"fence_token":2,"type":"JobCreated"}'
    return rows


def _relinked(rows: list[Row]) -> list[Row]:
    ledger = Ledger("acme", rows)
    ledger.relink()
    return ledger.entries


def _parts() -> Iterator[Case]:
    raw = lines_of(rows_of(GOOD))
    first, rest = raw.split(b"\n", 1)
    for name, text, why in (
        ("spaces", first.replace(b'":', b'": ') + b"\n" + rest, "The first row has spaces between its tokens."),
        ("no last newline", raw[:-1], "The last row does not end with a newline."),
        ("an empty line", raw + b"\n", "An empty line follows the last row."),
        ("CRLF", raw.replace(b"\n", b"\r\n"), "Rows end with a carriage return and a newline."),
        ("a byte order mark", b"\xef\xbb\xbf" + raw, "U+FEFF stands before the first row."),
        (
            "a name twice",
            raw.replace(b'{"action"', b'{"action":"CANCEL","action"', 1),
            "action stands twice in the first row: readers differ on which one counts.",
        ),
        ("escaped letters", raw.replace(b"ENQUEUE", b"\\u0045NQUEUE", 1), "A letter that needs no escape has one."),
        ("an exponent", raw.replace(b'"seq":1,', b'"seq":1e0,', 1), "1e0 is no canonical spelling of 1."),
        ("a fraction of zero", raw.replace(b'"seq":1,', b'"seq":1.0,', 1), "1.0 is no canonical spelling of 1."),
        ("a minus zero", raw.replace(b'"hlc_logical":0', b'"hlc_logical":-0', 1), "-0 is no canonical spelling of 0."),
        (
            "2^53",
            raw.replace(b'"hlc_logical":1', b'"hlc_logical":9007199254740992', 1),
            "Numbers of a row end at 2^53 - 1.",
        ),
        (
            "a large number",
            raw.replace(b'"hlc_logical":1', b'"hlc_logical":' + b"9" * 30, 1),
            "A number of 30 digits is beyond 2^53 - 1.",
        ),
        (
            "a very large number",
            raw.replace(b'"hlc_logical":1', b'"hlc_logical":' + b"9" * 5000, 1),
            "A number of 5,000 digits is refused, and does not end the verifier.",
        ),
        (
            "half a surrogate pair",
            raw.replace(b'"job-', b'"\\ud800job-', 1),
            "An escaped half of a surrogate pair is no Unicode text.",
        ),
        ("bytes that are not UTF-8", raw.replace(b'"job-', b'"\xffjob-', 1), "The first job id holds the byte 0xff."),
        (
            "an overlong UTF-8",
            raw.replace(b'"job-', b'"\xc1\xaaob-', 1),
            "The letter j is spelled in two bytes, which UTF-8 forbids.",
        ),
        ("NaN", raw.replace(b'"hlc_logical":1', b'"hlc_logical":NaN', 1), "NaN is no JSON."),
        (
            "a list",
            b"[" + raw.replace(b"\n", b",\n", 11)[:-1] + b"]\n",
            "The rows stand in one JSON list, over 12 lines.",
        ),
        ("depth", b"[" * 5_000 + b"\n" + raw, "The first line is 5,000 brackets."),
        ("nothing but newlines", b"\n" * 12, "Twelve empty lines are no rows."),
    ):
        yield Case(f"a part with {name}", reseal(GOOD, {ENTRIES: zipped(text)}), 2, why)
    good = members_of(GOOD)[ENTRIES]
    for name, data, why in (
        (
            "in two gzip members",
            zipped(first + b"\n") + zipped(rest),
            "The part is two gzip members, one behind the other.",
        ),
        ("with bytes behind it", good + b"x", "A byte follows the gzip member."),
        ("with zeros behind it", good + bytes(8), "Zeros follow the gzip member, which some readers take for padding."),
        ("as zlib", zlib.compress(raw), "The part is a zlib stream, and no gzip member."),
        ("not compressed", raw, "The part is the rows themselves, without gzip."),
        ("cut before its checksum", good[:-8], "Checksum and length of the gzip member are missing."),
        ("with a wrong checksum", good[:-8] + bytes(8), "Checksum and length of the gzip member are zeros."),
        (
            "longer than listed",
            gzip.compress(raw + raw, mtime=0),
            "The part unpacks to twice as much as the manifest lists.",
        ),
        ("shorter than listed", zipped(raw[:-2]), "The part unpacks to two bytes less than the manifest lists."),
    ):
        yield Case(f"a part {name}", _listed(data, raw), 2, why)


def _listed(data: bytes, raw: bytes) -> bytes:
    """The good bundle with this entry part, listed as if it held ``raw``."""
    return reseal(GOOD, {ENTRIES: data}, parts=lambda parts: parts[0].update(raw_bytes=len(raw), rows=12))


def _in_two_parts(bundle: bytes) -> bytes:
    rows, members = rows_of(bundle), members_of(bundle)
    halves = {ENTRIES: zipped(lines_of(rows[:5])), "entries/000002.ndjson.gz": zipped(lines_of(rows[5:]))}
    ordered = {**halves, **{name: data for name, data in members.items() if name not in halves}}
    return reseal(container(ordered.items()))


def _job_indexes() -> Iterator[Case]:
    yield Case("snapshots of before the index of jobs", bundle_of(_indexed(UNSET)), 0, "job_index may be left out.")
    of_all = LEDGER.job_index(12)
    for name, value, why in (
        ("another root", ["00" * 32], "The root of the one run is not that of the jobs of the 12 entries."),
        ("a root more", of_all * 2, "An index of 12 entries has one run, not two."),
        ("no root", [], "An index of 12 entries has one run, not none."),
        ("a root in capitals", [of_all[0].upper()], "Roots are in small hex digits."),
        ("a null", None, "job_index is left out or a list, never null."),
    ):
        yield Case(f"an index of jobs with {name}", bundle_of(_indexed(value)), 2, why)
    for begin in (1, 2, 1025, "1025", None):
        why = "job_index_from is above 1 and up to to_seq, behind a multiple of 1,024 entries."
        yield Case(f"an index of jobs from {begin!r} on", bundle_of(_stating(job_index_from=begin)), 2, why)
    later = _indexed(["00" * 32])
    why = "The run reaches into entries that are not here, so nobody can compute its root; the range begins late."
    yield Case("an index of jobs that nobody can compare", bundle_of(later, 5), 3, why)


def large() -> Iterator[Case]:
    """Bundles with merged runs in their index of jobs; too large for the corpus."""
    merged = build(8_300, snapshots_to=(1_000, 2_048, 8_300))
    yield Case("an index of jobs with merged runs", bundles.bundle_of(merged), 0, "Its runs are those of its entries.")
    why = "It begins inside a block."
    yield Case("an index of jobs that begins inside a block", bundles.bundle_of(merged, 1_001), 3, why)
    roots = merged.job_index(8_300)
    for number in range(len(roots)):
        del merged.snapshots[2:]
        merged.sign(8_300, job_index=[*roots[:number], "00" * 32, *roots[number + 1 :]])
        why = f"The root of run {number} is another."
        yield Case(f"merged runs of which number {number} is another", bundles.bundle_of(merged), 2, why)
        part = bundles.bundle_of(merged, 1_001)
        yield Case(f"run number {number} of a later range is another", part, 2 if number else 3, why)


def _indexed(roots: Any) -> Ledger:
    """The ledger, with this index of jobs in its last snapshot."""
    return _stating(job_index=roots)


def _stating(**changes: Any) -> Ledger:
    """The ledger, whose last snapshot was signed with other fields, or without some."""
    ledger = LEDGER.copy()
    row = ledger.snapshots[-1]
    statement = json.loads(base64.b64decode(json.loads(row["dsse_envelope"])["payload"]))
    said = statement["predicate"] | changes
    statement["predicate"] = {name: value for name, value in said.items() if value is not UNSET}
    row["dsse_envelope"] = json.dumps(envelope.sign(canonical.encode(statement), SIGNER))
    return ledger


def _snapshots() -> Iterator[Case]:
    lines = members_of(GOOD)[SNAPSHOTS].splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]

    def holding(kept: list[Any]) -> bytes:
        text = b"".join(item if isinstance(item, bytes) else canonical.encode(item) + b"\n" for item in kept)
        return reseal(GOOD, {SNAPSHOTS: text}, snapshot_count=text.count(b"\n"))

    yield Case("without the last snapshot", holding(lines[:2]), 3, "Entries 9 to 12 are covered by no snapshot.")
    yield Case("without the first snapshot", holding(lines[1:]), 2, "The first snapshot of a chain begins at seq 1.")
    why = "The third snapshot begins at seq 9, and the one before it ended at 4."
    yield Case("without the middle snapshot", holding([lines[0], lines[2]]), 2, why)
    yield Case(
        "a snapshot twice", holding([*lines[:2], lines[1], lines[2]]), 2, "The second snapshot stands there twice."
    )
    later = reseal(bundle_of(LEDGER, 5), {SNAPSHOTS: b"".join(lines)}, snapshot_count=3)
    yield Case("a snapshot of what came before the range", later, 2, "A snapshot over seq 1 to 4 in a range from 5 on.")
    earlier = reseal(bundle_of(LEDGER, 1, 10), {SNAPSHOTS: b"".join(lines)}, snapshot_count=3)
    yield Case(
        "a snapshot that ends behind the range", earlier, 2, "A snapshot up to seq 12 in a range that ends at 10."
    )
    yield Case("snapshots in reverse", holding(lines[::-1]), 2, "Snapshots stand by from_seq.")
    for name, value in {
        "from_seq": 6,
        "to_seq": 7,
        "entry_count": 3,
        "merkle_root": "00" * 32,
        "to_chain_link": "00" * 32,
        "snapshot_hlc": "1:0:node-1",
        "tenant_id": "other",
    }.items():
        why = f"{name} of the second row is not what the signed statement beside it says."
        yield Case(f"a snapshot whose {name} was edited", holding([rows[0], {**rows[1], name: value}, rows[2]]), 2, why)
    for name, kept, why in (
        ("with a member more", [{**rows[0], "id": 1}, *rows[1:]], "A row of a snapshot has exactly its nine members."),
        ("with a number as text", [{**rows[0], "from_seq": "1"}, *rows[1:]], "from_seq is a number."),
        (
            "with spaces",
            [json.dumps(rows[0]).encode() + b"\n", *lines[1:]],
            "The first row has spaces between its tokens.",
        ),
        ("without an envelope", [{**rows[0], "dsse_envelope": {}}, *rows[1:]], "The envelope has no members."),
    ):
        yield Case(f"a snapshot {name}", holding(kept), 2, why)
    bare = [{**row, "dsse_envelope": None} for row in rows]
    why = "The third snapshot names the digest of the statement that was signed, not of the bare row."
    yield Case("a snapshot whose envelope was removed", holding([rows[0], bare[1], rows[2]]), 2, why)
    why = "An unsigned snapshot signs nothing, so the end is unsigned from seq 9 on."
    yield Case("the last snapshot without its envelope", holding([*rows[:2], bare[2]]), 3, why)
    why = "Unsigned snapshots are what they say of the entries, and leave all of them unsigned."
    yield Case("snapshots that are all unsigned", bundle_of(_covered(4, 8, 12)), 3, why)
    resumed = _covered(4, 8)
    resumed.sign(12)
    why = "A signed snapshot names the unsigned one before it, and so covers what that covers."
    yield Case("unsigned snapshots before a signed one", bundle_of(resumed), 0, why)
    strange = bundle_of(_ledger(_unsigned_then_stranger))
    yield Case(
        "unsigned snapshots before one by a stranger", strange, 4, "The last snapshot is by a key that is not held."
    )
    forged = _covered(4, 8, 12)
    forged.snapshots[1]["merkle_root"] = "00" * 32
    why = "merkle_root of an unsigned snapshot is compared with the entries all the same."
    yield Case("an unsigned snapshot of another root", bundle_of(forged), 2, why)
    edited = _covered(4, 8)
    edited.sign(12)
    edited.snapshots[0]["to_chain_link"] = "00" * 32
    why = "to_chain_link of the first, unsigned snapshot is not the link of seq 4."
    yield Case("an unsigned snapshot edited before a signed one", bundle_of(edited), 2, why)
    text = holding([{**rows[0], "dsse_envelope": ""}, *rows[1:]])
    yield Case("an envelope that is text", text, 2, "dsse_envelope is an object or null.")
    foreign = holding([*lines[:2], _snapshot_lines(OTHER)[2]])
    yield Case("a snapshot of another ledger", foreign, 2, "The held key signed the third snapshot of another chain.")
    spoilt = json.loads(lines[1])
    spoilt["dsse_envelope"]["signatures"][0]["sig"] = rows[0]["dsse_envelope"]["signatures"][0]["sig"]
    why = "The signature under the second snapshot is that under the first."
    yield Case("a snapshot with the signature of another", holding([rows[0], spoilt, rows[2]]), 2, why)
    strange = bundle_of(_ledger(lambda ledger: ledger.sign(12, STRANGER)))
    yield Case("a snapshot by a stranger", strange, 4, "No held key signed the last snapshot.")
    for name, changes, why in (
        ("claims another root", {"merkle_root": "00" * 32}, "The signed merkle_root is not that of the row beside it."),
        ("claims another tree", {"tree_root": "00" * 32}, "The signed tree_root is not that of seq 1 to 12."),
        ("claims a smaller tree", {"tree_size": 29}, "tree_size of a snapshot is its to_seq."),
        ("claims another tenant", {"tenant_id": "other"}, "The signed tenant_id is not that of the row."),
        ("follows another", {"previous_snapshot": "00" * 32}, "previous_snapshot names no snapshot that is here."),
        ("follows none", {"previous_snapshot": None}, "Only the first snapshot of a chain names none before it."),
        ("says less", {"node_id": UNSET}, "The signed predicate names no node."),
        ("says a number with a fraction", {"entry_count": 10.5}, "entry_count is an integer."),
    ):
        yield Case(f"a snapshot that {name}", bundle_of(_stating(**changes)), 2, why)
    why = "A member of the signed predicate that a reader does not know is ignored, as job_index is by older ones."
    yield Case("a snapshot that says more", bundle_of(_stating(note=1)), 0, why)
    why = "The statement names a key that is not held; that a held key signed it is what counts."
    yield Case("a snapshot that names another key", bundle_of(_stating(key_id=STRANGER.key_id)), 0, why)
    why = "Row and statement agree on a merkle_root that is not that of seq 9 to 12."
    yield Case("a snapshot of another root", bundle_of(_ledger(_claiming(merkle_root="00" * 32))), 2, why)
    yield Case(
        "a snapshot that overlaps", bundle_of(_ledger(_overlapping)), 2, "The last snapshot begins at seq 8 again."
    )
    yield from _envelopes()


def _envelopes() -> Iterator[Case]:
    """Envelopes of snapshots, which DSSE lets carry several signatures."""
    good = LEDGER.snapshots[-1]["dsse_envelope"]
    held = json.loads(good)
    own = held["signatures"][0]
    strange: Any = envelope.sign(base64.b64decode(held["payload"]), STRANGER)["signatures"]
    wrong = {**own, "sig": json.loads(LEDGER.snapshots[0]["dsse_envelope"])["signatures"][0]["sig"]}
    for name, signatures, code, why in (
        ("by two keys", [own, *strange], 0, "One of two signatures is by a held key, which suffices."),
        ("by two keys, the stranger first", [*strange, own], 0, "The order of signatures means nothing."),
        (
            "with a wrong signature beside a right one",
            [wrong, own],
            2,
            "A wrong signature by a held key is a break, whatever stands beside it.",
        ),
        (
            "with a signature of no name",
            [{**own, "keyid": ""}],
            0,
            "An empty key id means any key: the held one made it.",
        ),
        ("with a wrong signature alone", [wrong], 2, "The held key is named and did not make this signature."),
        (
            "with a wrong signature of no name",
            [{**wrong, "keyid": ""}],
            2,
            "No held key made a signature that any may have made.",
        ),
        (
            "with a stranger's signature in the held key's name",
            [{**strange[0], "keyid": own["keyid"]}],
            2,
            "The held key is named, and a stranger signed.",
        ),
        (
            "with the held key's signature in a stranger's name",
            [{**own, "keyid": STRANGER.key_id}],
            4,
            "A signature is tried with the key that it names alone, and that one is not held.",
        ),
        ("with no signature", [], 2, "An envelope has at least one signature."),
        ("with 16 signatures", [own] * 16, 0, "An envelope may have 16 signatures."),
        ("with 17 signatures", [own] * 17, 2, "An envelope has at most 16 signatures."),
        (
            "with a signature in base64 of both alphabets",
            [{**own, "sig": "+_" + own["sig"][2:]}],
            2,
            "A text in base64 is of one alphabet or of the other.",
        ),
    ):
        yield Case(f"a snapshot {name}", _enveloped(json.dumps({**held, "signatures": signatures})), code, why)
    url_safe = {**own, "sig": base64.urlsafe_b64encode(base64.b64decode(own["sig"])).decode()}
    why = "An envelope of a snapshot may use either alphabet of base64, as DSSE says."
    yield Case(
        "a snapshot with a signature in URL-safe base64",
        _enveloped(json.dumps({**held, "signatures": [url_safe]})),
        0,
        why,
    )
    unpadded = {**own, "sig": own["sig"].rstrip("=")}
    why = "The base64 of the signature lacks its padding."
    yield Case(
        "a snapshot with a signature without padding",
        _enveloped(json.dumps({**held, "signatures": [unpadded]})),
        2,
        why,
    )
    typed = {**held, "payloadType": "text/plain"}
    why = "payloadType is not that of an in-toto statement."
    yield Case("a snapshot of another payload type", _enveloped(json.dumps(typed)), 2, why)


def _enveloped(text: str) -> bytes:
    ledger = LEDGER.copy()
    ledger.snapshots[-1]["dsse_envelope"] = text
    return bundle_of(ledger)


def _snapshot_lines(ledger: Ledger) -> list[bytes]:
    return members_of(bundle_of(ledger))[SNAPSHOTS].splitlines(keepends=True)


def _ledger(finish: Callable[[Ledger], object]) -> Ledger:
    ledger = build(12, snapshots_to=(4, 8))
    finish(ledger)
    return ledger


def _covered(*to_seqs: int) -> Ledger:
    """A ledger with unsigned snapshots."""
    ledger = build(12)
    for to_seq in to_seqs:
        ledger.cover(to_seq)
    return ledger


def _unsigned_then_stranger(ledger: Ledger) -> None:
    ledger.snapshots.pop()
    ledger.cover(8)
    ledger.sign(12, STRANGER)


def _claiming(**changes: Any) -> Callable[[Ledger], object]:
    return lambda ledger: ledger.sign(12, SIGNER, **changes)


def _overlapping(ledger: Ledger) -> None:
    ledger.snapshots.append(ledger.signed(8, 12, payload_digest(ledger.snapshots[-1])))


def _checkpoints() -> Iterator[Case]:
    head = LEDGER.checkpoint()
    own = f"{LOG_ORIGIN}/acme"
    good = checkpoint_of(LEDGER)
    stranger = checkpoint_of(LEDGER, signer=STRANGER)
    text, smaller = good.split("\n\n")[0], checkpoint_of(LEDGER, 11)
    for name, note, code, why in (
        (
            "of another log",
            note_of(Checkpoint(f"{LOG_ORIGIN}/other", head.size, head.root)),
            2,
            "It is of log.example/other.",
        ),
        (
            "with another root",
            note_of(Checkpoint(own, head.size, b"\1" * 32)),
            2,
            "Its root is not that of the 12 entries.",
        ),
        ("of a smaller tree", smaller, 2, "It covers 11 entries, and the bundle has 12."),
        ("of a larger tree", note_of(Checkpoint(own, 13, head.root)), 2, "No proof leads from 12 leaves to its 13."),
        ("of an empty tree", note_of(Checkpoint(own, 0, head.root)), 2, "It covers no entry."),
        ("by a stranger", stranger, 4, "No held key signed it."),
        (
            "by the held key and a stranger",
            good + stranger.split("\n\n")[1],
            0,
            "One of two signatures is by a held key.",
        ),
        (
            "with a signature that does not hold",
            f"{text}\n\n{smaller.split(chr(10) * 2)[1]}",
            2,
            "The signature is that of another text.",
        ),
        ("without a signature", f"{text}\n\n", 2, "No signature line follows the text."),
        ("without an end", good[:-1], 2, "The last newline is missing."),
        (
            "with a carriage return",
            good.replace("\n", "\r\n"),
            2,
            "Its lines end with CRLF; a note has no control characters.",
        ),
        ("with a zero before its size", good.replace("\n12\n", "\n012\n"), 2, "A size has no leading zero."),
        ("of nothing", "", 2, "The member is empty."),
        ("of text", "checkpoint", 2, "It is no signed note."),
    ):
        yield Case(f"a checkpoint {name}", bundle_of(LEDGER, checkpoint=note), code, why)
    yield Case(
        "a checkpoint that is not UTF-8", reseal(GOOD, {CHECKPOINT: b"\xff\xfe"}), 2, "Two bytes that are no UTF-8."
    )
    more = build(16, snapshots_to=(4, 8, 12, 16))
    why = "It is of 16 entries, and the manifest has no proof that these 12 are the first of them."
    yield Case(
        "a checkpoint of a log that went on elsewhere", bundle_of(LEDGER, checkpoint=checkpoint_of(more)), 2, why
    )


def _notes() -> Iterator[Case]:
    """Forms of the checkpoint that a verifier kept: a malformed one spoils the verdict on a whole file."""
    good, head = checkpoint_of(LEDGER), LEDGER.checkpoint()
    text, line = good.split("\n\n")
    root = text.split("\n")[2]

    def signed(body: str) -> str:
        """A note of this text by the held key, in the name of the log."""
        return sign_note(body, "log.example/acme", SIGNER)

    for name, note, code, why in (
        (
            "with another line",
            signed(f"{text}\nmore\n"),
            0,
            "Lines behind the root are extensions, signed and ignored.",
        ),
        ("with two signatures by the held key", good + line, 0, "The same signature twice is the same signature."),
        ("with 99 lines of others", good + _lines_of_others(99), 0, "A note has at most 100 signature lines."),
        (
            "with 100 lines of others",
            good + _lines_of_others(100),
            2,
            "A note has at most 100 signature lines, and this 101.",
        ),
        (
            "with a wrong signature in the held key's name",
            good + _with_signature_of(line, 7),
            2,
            "A line that names the held key and is not by it spoils the note.",
        ),
        (
            "with a byte order mark",
            "\ufeff" + good,
            4,
            "U+FEFF before the origin makes it the origin of another log, unsigned by it.",
        ),
        ("with a space before its size", good.replace("\n12\n", "\n 12\n"), 2, "A size is digits alone."),
        ("with a plus before its size", good.replace("\n12\n", "\n+12\n"), 2, "A size has no sign."),
        ("with a size in other digits", good.replace("\n12\n", "\n\u0661\u0662\n"), 2, "A size is in ASCII digits."),
        ("with a size of 2^63", signed(f"log.example/acme\n{2**63}\n{root}\n"), 2, "Sizes end at 2^63 - 1."),
        (
            "with a size of 2^63 - 1",
            signed(f"log.example/acme\n{2**63 - 1}\n{root}\n"),
            2,
            "The log went back behind the checkpoint that was kept.",
        ),
        ("with a tab", good.replace("acme\n", "acme\t\n", 1), 2, "A note holds no tab."),
        (
            "with a root of 31 bytes",
            signed(f"log.example/acme\n12\n{_b64(head.root[:-1])}\n"),
            2,
            "A root has 32 bytes.",
        ),
        (
            "with a root of 33 bytes",
            signed(f"log.example/acme\n12\n{_b64(head.root + bytes(1))}\n"),
            2,
            "A root has 32 bytes.",
        ),
        (
            "with a root without padding",
            signed(f"log.example/acme\n12\n{root.rstrip('=')}\n"),
            2,
            "The base64 of the root lacks its padding.",
        ),
        ("with a root in hex", signed(f"log.example/acme\n12\n{head.root.hex()}\n"), 2, "A root is in base64."),
        ("without a root", signed("log.example/acme\n12\n"), 2, "A checkpoint has at least three lines."),
        (
            "with a hyphen for a dash",
            good.replace("\u2014 ", "- "),
            2,
            "A signature line begins with U+2014 and a space.",
        ),
        (
            "with two spaces behind the name",
            good.replace("acme ", "acme  "),
            2,
            "One space stands between name and signature.",
        ),
        (
            "with an empty line among the signatures",
            good.replace("\n\n", "\n\n\n", 1),
            2,
            "An empty line ends the text, and one alone.",
        ),
        (
            "with the signature of a witness alone",
            f"{text}\n\n" + Witness().cosign(good, 1_704_931_300).split("\n\n")[1].split("\n", 1)[1],
            4,
            "A witness cosigned it, and no held key signed it.",
        ),
    ):
        yield Case(f"kept: a note {name}", GOOD, code, why, note)


def _lines_of_others(count: int) -> str:
    line = _b64(bytes(5))
    return "".join(f"\u2014 other{number}.example {line}\n" for number in range(count))


def _with_signature_of(line: str, at: int) -> str:
    """The signature line with another signature under the same name and key hash."""
    name, signature = line[2:].split(" ")
    data = bytearray(base64.b64decode(signature))
    data[at] ^= 1
    return f"\u2014 {name} {_b64(bytes(data))}\n"


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _kept() -> Iterator[Case]:
    ahead = build(16, snapshots_to=(4, 8, 12, 16))
    part = bundle_of(ahead, 1, 12)
    forked = OTHER.checkpoint()
    covering = note_of(Checkpoint(f"{LOG_ORIGIN}/acme", 16, forked.root))
    strange = note_of(Checkpoint(f"{LOG_ORIGIN}/acme", 12, forked.root), STRANGER)
    for name, file, code, note, why in (
        ("the same", GOOD, 0, checkpoint_of(LEDGER), "The kept checkpoint is the one in the bundle."),
        ("an earlier one", GOOD, 0, checkpoint_of(LEDGER, 3), "Its root is that of the first 3 entries."),
        ("one of an empty tree", GOOD, 0, checkpoint_of(LEDGER, 0), "Every log begins with no entry."),
        ("a later one", GOOD, 2, checkpoint_of(ahead), "It covers 16 entries, the bundle's own 12: the log went back."),
        (
            "a later one than the range",
            part,
            3,
            checkpoint_of(ahead, 14),
            "It covers 14 entries; the bundle ends at 12, and its own checkpoint covers 16.",
        ),
        (
            "the one that covers the range",
            part,
            0,
            checkpoint_of(ahead),
            "It is of the size and root of the bundle's own.",
        ),
        ("one of the range's beginning", part, 0, checkpoint_of(ahead, 5), "Its root is that of the first 5 entries."),
        (
            "of a history that forked",
            GOOD,
            2,
            note_of(Checkpoint(f"{LOG_ORIGIN}/acme", 12, forked.root)),
            "The held key signed another tree of 12 entries.",
        ),
        (
            "an earlier one that differs",
            GOOD,
            2,
            note_of(Checkpoint(f"{LOG_ORIGIN}/acme", 3, b"\2" * 32)),
            "The held key signed another tree of 3 entries.",
        ),
        (
            "the one that covers the range, of a history that forked",
            part,
            2,
            covering,
            "It is of the size of the bundle's own, and of another root.",
        ),
        (
            "beside a later range, of a history that forked",
            bundle_of(ahead, 5, 12),
            2,
            covering,
            "It is of the size of the bundle's own, and of another root, whatever range is here.",
        ),
        (
            "of another log",
            GOOD,
            3,
            note_of(Checkpoint(f"{LOG_ORIGIN}/other", 12, LEDGER.checkpoint().root)),
            "It is of log.example/other, so it cannot be compared.",
        ),
        ("by a stranger", GOOD, 4, checkpoint_of(LEDGER, signer=STRANGER), "No held key signed the kept checkpoint."),
        (
            "of a history that forked, by a stranger",
            GOOD,
            4,
            strange,
            "No held key signed the kept checkpoint, so that it differs says nothing.",
        ),
        ("malformed", GOOD, 2, "nothing", "It is no signed note."),
        ("empty", GOOD, 2, "", "It is no signed note."),
        (
            "beside a later range",
            bundle_of(LEDGER, 5),
            3,
            checkpoint_of(LEDGER),
            "It fits; the range begins late all the same.",
        ),
        (
            "later than a later range",
            bundle_of(LEDGER, 5),
            2,
            checkpoint_of(ahead),
            "It covers 16 entries, the bundle's own 12: the log went back.",
        ),
    ):
        yield Case(f"kept: {name}", file, code, why, note)


def _anchored(size: int = 8, **replaced: Any) -> BundledAnchor:
    return anchored(size, LEDGER, **replaced)


def _anchors() -> Iterator[Case]:
    with_anchors = bundle_of(LEDGER, anchors=[_anchored(), _anchored(12)])
    member = members_of(with_anchors)[ANCHORS]
    why = "Statements of witnesses that the verifier does not know count for nothing."
    yield Case("with anchors", with_anchors, 0, why)
    why = "The range begins late, whatever witnesses say."
    yield Case("with anchors and a later range", bundle_of(LEDGER, 5, anchors=[_anchored()]), 3, why)
    nothing = bundle_of(LEDGER, anchors=[_anchored(checkpoint="x", time="")])
    yield Case("with an anchor that is nothing", nothing, 0, "A statement of the right form that says nothing.")
    stamp = bundle_of(LEDGER, anchors=[_anchored(kind="rfc3161", response="?")])
    yield Case("with a stamp that is nothing", stamp, 0, "A time stamp of the right form that says nothing.")
    old = reseal(with_anchors, format_version=1)
    yield Case("anchors in version 1", old, 2, "format_version is 2 where there is anchors.json.")
    yield Case(
        "version 2 without anchors", reseal(GOOD, format_version=2), 2, "format_version is 1 without anchors.json."
    )
    names = [*members_of(with_anchors)]
    behind = [*names[:-3], names[-2], names[-3], names[-1]]
    swapped = container((each, members_of(with_anchors)[each]) for each in behind)
    yield Case("anchors behind the keys", swapped, 2, "anchors.json stands between checkpoint and keys.json.")
    held = json.loads(member)
    first = held["anchors"][0]
    little = {**first, "by": "", "checkpoint": "", "consistency": [], "time": ""}
    for name, changed, why in (
        ("that are none", {"anchors": []}, "anchors.json is left out where there are none."),
        ("of which there are 128", {"anchors": [little] * 128}, ""),
        ("that are too many", {"anchors": [little] * 129}, "There are 129 statements, of at most 128."),
        ("with another member", {**held, "note": 1}, "anchors.json has one member."),
        (
            "without a field",
            {"anchors": [{k: v for k, v in first.items() if k != "by"}]},
            "The statement names nobody.",
        ),
        ("with another field", {"anchors": [{**first, "note": ""}]}, "A statement has six members."),
        ("of another kind", {"anchors": [{**first, "kind": "moon"}]}, "kind is witness or rfc3161."),
        ("by a number", {"anchors": [{**first, "by": 1}]}, "by is a text."),
        ("by a text that is too long", {"anchors": [{**first, "by": "x" * 2049}]}, "by has at most 2,048 characters."),
        ("with a time that is too long", {"anchors": [{**first, "time": "x" * 65}]}, "time has at most 64 characters."),
        ("with a proof of one text", {"anchors": [{**first, "consistency": "0" * 64}]}, "consistency is a list."),
        ("with a proof of no hashes", {"anchors": [{**first, "consistency": ["0"]}]}, "A hash has 64 hex digits."),
        (
            "with a proof of 129 hashes",
            {"anchors": [{**little, "consistency": ["0" * 64] * 129}]},
            "A proof has at most 128 hashes.",
        ),
        ("that are a list", held["anchors"], "anchors.json is an object."),
    ):
        code = 2 if why else 0
        told = why or "There may be 128 statements."
        yield Case(f"anchors {name}", reseal(with_anchors, {ANCHORS: canonical.encode(changed)}), code, told)
    spaced = reseal(with_anchors, {ANCHORS: member + b" "})
    yield Case("anchors with a space", spaced, 2, "A space follows the value of anchors.json.")
    yield Case("anchors that are no JSON", reseal(with_anchors, {ANCHORS: b"anchors"}), 2, "anchors.json is no JSON.")


def _pruned() -> Iterator[Case]:
    """Chains whose first entries left: the bundle begins behind them."""
    ledger = pruned()
    why = "The PRUNED entry at seq 25 says that seq 1 to 10 left: the bundle is whole."
    yield Case("pruned: from the floor on", bundle_of(ledger, 11), 0, why)
    yield Case("pruned: an end inside a snapshot", bundle_of(ledger, 11, 27), 3, "Entries 21 to 27 are unsigned.")
    why = "The PRUNED entry at seq 25 is not in the range 11 to 20, so the range begins late."
    yield Case("pruned: without the entry that says so", bundle_of(ledger, 11, 20), 3, why)
    why = "The bundle begins at 21, and what left ends at 10: 11 to 20 are missing."
    yield Case("pruned: a beginning behind the floor", bundle_of(ledger, 21), 3, why)
    why = "The bundle begins at 6, below the floor, and so without what the PRUNED entry carries."
    yield Case("pruned: a beginning below the floor", bundle_of(ledger, 6), 3, why)
    yield Case(
        "pruned: all that was there before", bundle_of(ledger), 0, "A bundle from seq 1 on is whole, whatever left."
    )
    why = "The statement is of a log with another name; a log that was forked keeps what was signed before."
    yield Case("pruned: before the log was forked", bundle_of(pruned(log="log.before/acme"), 11), 0, why)
    twice = build(30, snapshots_to=(10, 20, 30))
    enter(twice, 15, "PRUNED", floor_facts(twice, 10))
    finish(twice)
    enter(twice, PRUNED_SEQ, "PRUNED", floor_facts(twice, 20, 11) | {"after": _place(twice, 15)})
    finish(twice)
    why = "The newest of two PRUNED entries says that all before seq 21 left."
    yield Case("pruned twice: from the newer floor on", bundle_of(twice, 21), 0, why)
    why = "The newest PRUNED entry in the range says that all before seq 11 left."
    yield Case("pruned twice: from the older floor on, before the newer", bundle_of(twice, 11, 20), 0, why)
    why = "The newest PRUNED entry puts the floor at 21, and the bundle begins at 11: the older one counts no more."
    yield Case("pruned twice: from the older floor on, with the newer", bundle_of(twice, 11), 3, why)


def _pruned_wrongly() -> Iterator[Case]:
    """PRUNED entries in a chain that is linked and signed all the same."""
    other = floor_facts(FORKED, 10)
    tree = {"tree_root": other["tree_root"], "compact_range": other["compact_range"]}
    for name, ledger, code, why in (
        ("by a stranger", pruned(signer=STRANGER), 4, "No held key signed the statement in the PRUNED entry."),
        ("by nobody", pruned(signer=None), 2, "The PRUNED entry has no statement."),
        (
            "with a statement of another log",
            pruned(log="log.example/other"),
            2,
            "The statement is of a log of another tenant.",
        ),
        ("with another link", pruned(chain_link="0" * 64), 2, "chain_link is not what the first entry here follows."),
        ("with another snapshot", pruned(snapshot="0" * 64), 2, "snapshot is not what the first snapshot here names."),
        (
            "with a root that its compact range has not",
            pruned(tree_root="0" * 64),
            3,
            "tree_root is not that of compact_range.",
        ),
        (
            "with the tree of other entries",
            pruned(**tree),
            2,
            "The tree goes on from other entries than the checkpoint's.",
        ),
        (
            "behind no entry",
            pruned(after={"seq": 17, "chain_link": "0" * 64}),
            3,
            "after names an entry that is none about retention.",
        ),
        ("with a wrong count", pruned(entry_count=9), 3, "entry_count of seq 1 to 10 is 10."),
        ("with a period of no length", pruned(period_s=0), 3, "period_s is 1 or more."),
        ("with a list of commitments", pruned(commitments=[]), 3, "commitments is an object, where it is there."),
        (
            "with a text about private fields",
            pruned(private_fields="none"),
            3,
            "private_fields is an object, where it is there.",
        ),
        ("without a place", pruned(after=None), 3, "after says behind which entry about retention this one stands."),
    ):
        yield Case(f"pruned {name}", bundle_of(ledger, 11), code, why)
    edited = build(30, snapshots_to=(10, 20, 30))
    enter(edited, PRUNED_SEQ, "PRUNED", floor_facts(edited, 10), decided_ms=2)
    why = "decided_ms of the entry is not the one that was signed."
    yield Case("pruned with facts that were not signed", bundle_of(finish(edited), 11), 2, why)
    imported = pruned()
    imported.entry(PRUNED_SEQ)["origin"] = origin_of(3)
    imported.relink(PRUNED_SEQ)
    why = "The PRUNED entry was imported, and says nothing of this chain."
    yield Case("pruned by another ledger", bundle_of(finish(imported), 11), 3, why)
    loosened = pruned()
    enter(loosened, 27, "RETENTION_SET", {"period_s": 1, "after": _place(loosened, PRUNED_SEQ)}, signer=None)
    why = "A RETENTION_SET behind it has no statement; all that lets entries leave is signed."
    yield Case("pruned, then loosened by nobody", bundle_of(finish(loosened), 11), 2, why)
    voided = build(30, snapshots_to=(10, 20, 30))
    enter(voided, 23, "HOLD_PLACED", {"hold_id": "0" * 16, "reason": "law"}, signer=None)
    enter(voided, PRUNED_SEQ, "PRUNED", floor_facts(finish(voided), 10) | {"after": {"seq": 0, "chain_link": ""}})
    why = "A hold stands before the PRUNED entry, which names an earlier place: it was decided without that hold."
    yield Case("pruned after a hold that it does not name", bundle_of(finish(voided), 11), 3, why)


def _pruned_and_kept() -> Iterator[Case]:
    ledger = pruned()
    bundle = bundle_of(ledger, 11)
    for size, code, why in (
        (30, 0, "It is of the size and root of the bundle's own."),
        (20, 0, "Its root is that of the tree which goes on from the floor."),
        (10, 0, "Its root is that of the floor."),
        (7, 3, "The entries that it covers have left, and with them its root."),
    ):
        yield Case(f"pruned, kept: of size {size}", bundle, code, why, checkpoint_of(ledger, size))
    for size in (20, 10):
        why = f"The held key signed another tree of {size} entries."
        yield Case(f"pruned, kept: of other entries, of size {size}", bundle, 2, why, checkpoint_of(FORKED, size))


def _pruned_index() -> Iterator[Case]:
    """The index of jobs over entries of which the first left."""
    ledger, first = pruned(), 11
    lacking = with_index(ledger, job_index=index_without(ledger, first))
    why = "The run over entries 1 to 30 lacks entry 11, which is here: job_index.json has what its other entries are."
    yield Case("pruned, an index of jobs that lacks an entry", bundle_of(lacking, first), 2, why)
    unknown = "Of the run over entries 1 to 30 nobody can compute the root, since what was kept of the first 10 "
    yield Case("pruned, without job_index.json", bundle_of(ledger, first, job_index=None), 3, f"{unknown}is not here.")
    kept = ledger.kept_index[10]
    for name, value in (
        ("keys", bytes(len(kept.keys))),
        ("hashes", bytes(len(kept.hashes))),
        ("runs", [b"leaf" * 18]),
        ("payload", b"{}"),
    ):
        other = bundle_of(ledger, first, job_index=replace(kept, **{name: value}))
        yield Case(f"pruned, other {name} in job_index.json", other, 3, f"{unknown}is not what was signed.")
    whole = bundle_of(ledger, first)
    for name, data in (
        ("with a space", members_of(whole)[JOB_INDEX] + b" "),
        ("that is no JSON", b"job_index"),
        ("without runs", b'{"hashes":"","keys":"","payload":""}'),
    ):
        other = reseal(whole, {JOB_INDEX: data})
        yield Case(f"pruned, a job_index.json {name}", other, 2, "It is canonical JSON of four members.")


def large_pruned() -> Iterator[Case]:
    """The same with merged runs, and with an index that begins behind what left; too large for the corpus."""
    ledger, first = pruned_long(), LONG_FLOOR + 1
    yield Case("pruned, with merged runs", bundles.bundle_of(ledger, first), 0, "Its runs are those of its entries.")
    lacking = with_index(ledger, job_index=index_without(ledger, first))
    why = "A merged run lacks an entry that is here."
    yield Case("pruned, merged runs that lack an entry", bundles.bundle_of(lacking, first), 2, why)
    runs = [b"leaf" * 18, *ledger.kept_index[LONG_FLOOR].runs[1:]]
    other = bundles.bundle_of(ledger, first, job_index=replace(ledger.kept_index[LONG_FLOOR], runs=runs))
    yield Case("pruned, other runs kept", other, 3, "What was kept is not what was signed.")
    begun = with_index(ledger, **index_from(ledger, LONG_FLOOR))
    for name, options in (("alone", {"job_index": None}), ("beside one from seq 1", {})):
        bundle = bundles.bundle_of(begun, first, **options)
        yield Case(f"pruned, an index from the floor on, {name}", bundle, 0, "job_index_from says where it begins.")
        lacking = with_index(ledger, **index_from(without(ledger, 5000), LONG_FLOOR))
        bundle = bundles.bundle_of(lacking, first, **options)
        yield Case(f"pruned, an index from the floor on that lacks an entry, {name}", bundle, 2, why)


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
