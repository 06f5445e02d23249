"""Bundles for tests: of ledgers made in memory, taken apart, put together otherwise, and what verifying them says."""

from __future__ import annotations

import base64
import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from ledger import canonical, merkle
from ledger.bundle.format import END, padding_of, tar_header
from ledger.bundle.rows import encode_as_stored
from ledger.exit_code import exit_code_of_bundle
from ledger.merkle.tiles import TileTree, consistency_proof
from ledger.verification import ENTRY_COLUMNS, SNAPSHOT_COLUMNS
from ledger.verification.verdict import Break
from signing import envelope
from signing.anchors import BundledAnchor
from signing.bundle.writer import BundleEnd, BundleWriter
from signing.checkpoint import Checkpoint, sign_checkpoint
from signing.judging import BundleVerdict
from signing.keys import Keyring
from signing.private_keys import FileSigner
from tests.app.witness import Witness
from tests.ledger.ledger_in_memory import SIGNER, Ledger, Row, build

LOG_ORIGIN = "log.example"
ENTRIES = "entries/000001.ndjson.gz"
LEDGER = build(30, snapshots_to=(10, 20, 30))
Members = dict[str, bytes]


def checkpoint_of(
    ledger: Ledger, size: int | None = None, signer: FileSigner = SIGNER, log_origin: str = LOG_ORIGIN
) -> str:
    """The note that the ledger's log would sign at ``size``, by default now."""
    head = ledger.checkpoint(size)
    return note_of(Checkpoint(f"{log_origin}/{ledger.tenant_id}", head.size, head.root), signer)


def note_of(checkpoint: Checkpoint, signer: FileSigner = SIGNER) -> str:
    """A checkpoint as ``signer`` signs it."""
    return sign_checkpoint(checkpoint, signer)


def bundle_of(
    ledger: Ledger,
    from_seq: int = 1,
    to_seq: int | None = None,
    *,
    signer: FileSigner = SIGNER,
    checkpoint: str | None = None,
    log_origin: str = LOG_ORIGIN,
    **replaced: Any,
) -> bytes:
    """The bundle of a range; ``replaced`` are fields of its ``BundleEnd``."""
    to_seq = len(ledger.entries) if to_seq is None else to_seq
    writer = BundleWriter(tenant_id=ledger.tenant_id, node_id="node-1", log_origin=log_origin)
    entries = [row for row in ledger.entries if from_seq <= row["seq"] <= to_seq]
    snapshots = [row for row in ledger.snapshots if from_seq <= row["from_seq"] and row["to_seq"] <= to_seq]
    written = writer.add_entries(_tuples(entries, ENTRY_COLUMNS))
    writer.add_snapshots(_tuples(snapshots, SNAPSHOT_COLUMNS))
    end = BundleEnd(
        tree_root=merkle.root(ledger.leaf_hashes(1, to_seq)).hex(),
        checkpoint=checkpoint_of(ledger, log_origin=log_origin) if checkpoint is None else checkpoint,
        consistency=consistency_of(ledger, to_seq),
        keys=Keyring([SIGNER.public_key]),
        job_index=ledger.kept_index.get(from_seq - 1),
    )
    written += b"".join(writer.finish(end._replace(**replaced), signer))
    writer.close()
    return written


def evidence_of(ledger: Ledger, *breaks: Break) -> bytes:
    """What is stored of the ledger, as evidence that its chain is broken."""
    writer = BundleWriter(tenant_id=ledger.tenant_id, node_id="node-1", log_origin=LOG_ORIGIN)
    written = writer.add_entries(_tuples(ledger.entries, ENTRY_COLUMNS), encode_as_stored)
    writer.add_snapshots(_tuples(ledger.snapshots, SNAPSHOT_COLUMNS))
    end = BundleEnd("", checkpoint_of(ledger), (), Keyring([SIGNER.public_key]))
    written += b"".join(writer.finish_as_evidence(end, breaks, SIGNER))
    writer.close()
    return written


# --- taking apart and putting together ----------------------------------------------------------------


def members_of(bundle: bytes) -> Members:
    """The members of a sound bundle, in order."""
    with tarfile.open(fileobj=io.BytesIO(bundle)) as tar:
        return {name: stream.read() for name in tar.getnames() if (stream := tar.extractfile(name)) is not None}


def container(members: Iterable[tuple[str, bytes]]) -> bytes:
    """A container with these members, whatever they are."""
    return b"".join(tar_header(name, len(data)) + data + bytes(padding_of(len(data))) for name, data in members) + END


def statement_of(bundle: bytes, member: str = "manifest.dsse.json") -> dict[str, Any]:
    """What the manifest of a bundle says."""
    envelope_json = json.loads(members_of(bundle)[member])
    statement: dict[str, Any] = json.loads(base64.b64decode(envelope_json["payload"]))
    return statement


def reseal(
    bundle: bytes,
    replaced: Mapping[str, bytes] | None = None,
    *,
    signer: FileSigner = SIGNER,
    parts: Callable[[list[dict[str, Any]]], None] | None = None,
    **predicate: Any,
) -> bytes:
    """The bundle with other members, and a manifest that ``signer`` made to fit them.

    ``predicate`` are other fields of the manifest; ``parts`` edits its list of parts.
    """
    members = members_of(bundle) | dict(replaced or {})
    statement = statement_of(bundle)
    listed = [_part(name, data) for name, data in members.items() if name != "manifest.dsse.json"]
    if parts is not None:
        parts(listed)
    digest = sha256(b"".join(bytes.fromhex(part["sha256"]) for part in listed)).hexdigest()
    said = statement["predicate"] | {"parts": listed, **predicate}
    name = f"{said['tenant_id']}/{said['from_seq']}-{said['to_seq']}"
    statement |= {"predicate": said, "subject": [{"name": name, "digest": {"sha256": digest}}]}
    return with_statement(bundle, statement, members, signer)


def with_statement(
    bundle: bytes, statement: Mapping[str, Any], members: Members | None = None, signer: FileSigner = SIGNER
) -> bytes:
    """The bundle with this statement for a manifest."""
    members = members_of(bundle) if members is None else members
    signed = canonical.encode(envelope.sign(canonical.encode(statement), signer))
    return container((members | {"manifest.dsse.json": signed}).items())


def rows_of(bundle: bytes) -> list[Row]:
    """The entries of a bundle with one part."""
    return [json.loads(line) for line in gzip.decompress(members_of(bundle)[ENTRIES]).splitlines()]


def lines_of(rows: Iterable[Row]) -> bytes:
    """Rows as they stand in a part, uncompressed."""
    return b"".join(canonical.encode(row) + b"\n" for row in rows)


def with_rows(bundle: bytes, rows: Sequence[Row], **predicate: Any) -> bytes:
    """The bundle with these entries instead, and a manifest that fits as far as nothing else is said."""
    fitting = {
        "from_seq": rows[0]["seq"],
        "to_seq": rows[0]["seq"] + len(rows) - 1,
        "entry_count": len(rows),
        "tree_size": rows[0]["seq"] + len(rows) - 1,
        "first_hlc": rows[0]["t_hlc"],
        "last_hlc": rows[-1]["t_hlc"],
        "to_chain_link": rows[-1]["chain_link"],
    }
    return reseal(bundle, {ENTRIES: zipped(lines_of(rows))}, **{**fitting, **predicate})


def zipped(raw: bytes) -> bytes:
    """One gzip member, in which the bytes can be read."""
    return gzip.compress(raw, 0, mtime=0)


def legible(bundle: bytes, signer: FileSigner = SIGNER) -> bytes:
    """The bundle with its one part of entries not deflated."""
    return reseal(bundle, {ENTRIES: zipped(gzip.decompress(members_of(bundle)[ENTRIES]))}, signer=signer)


def _part(name: str, data: bytes) -> dict[str, Any]:
    raw = data
    if name.endswith(".gz"):
        try:
            raw = gzip.decompress(data)
        except (OSError, EOFError):
            raw = b""
    rows = raw.count(b"\n") if "ndjson" in name else 0
    digest = sha256(data).hexdigest()
    return {"name": name, "sha256": digest, "bytes": len(data), "raw_bytes": len(raw), "rows": rows}


# --- verifying ------------------------------------------------------------------------------------------


def store(folder: Path, data: bytes, name: str = "bundle.tar") -> Path:
    """``data`` as a file."""
    path = folder / name
    path.write_bytes(data)
    return path


def exit_code(found: BundleVerdict) -> int:
    """What ``tally verify-bundle`` would exit with."""
    return int(exit_code_of_bundle(found.verdict))


def consistency_of(ledger: Ledger, to_seq: int) -> list[bytes]:
    """The proof that the ledger as it is extends its first entries."""
    size = len(ledger.entries)
    if to_seq == size:
        return []
    tree = TileTree(0, {})
    tree.append_leaf_hashes(ledger.leaf_hashes())
    tiles = tree.changed
    return consistency_proof(to_seq, size, lambda level, index: tiles[level, index])


def anchored(size: int = 20, ledger: Ledger = LEDGER, **replaced: Any) -> BundledAnchor:
    """What a witness that nobody here knows said of the first entries of a ledger; ``replaced`` are other fields."""
    note = Witness().cosign(checkpoint_of(ledger, size), 1_704_931_300)
    hashes, time = [each.hex() for each in consistency_of(ledger, size)], "2024-01-11T00:01:40Z"
    stated = BundledAnchor(Witness().verifier_key, note, hashes, "witness", "", time)
    return msgspec.structs.replace(stated, **replaced)


def _tuples(rows: Sequence[Row], columns: Sequence[str]) -> list[tuple[Any, ...]]:
    return [tuple(row[column] for column in columns) for row in rows]


GOOD = bundle_of(LEDGER)
"""The bundle of ``LEDGER``."""
