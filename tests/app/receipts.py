"""Receipts for tests: made of ledgers in memory by the code that the service makes them with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.write.intake.caller_signatures import STATEMENT_ROUTE
from ledger import canonical, keyed
from ledger.bundle.rows import encode_entry
from ledger.chain.record import IdempotencyKey
from ledger.job_index import covering, key_of, keys_of, root_of, run_leaves
from ledger.job_index.proof import Directory, pieces_of, prove
from ledger.merkle import tiles
from ledger.positions import Seq, leaf_index_of
from ledger.verification import ENTRY_COLUMNS
from signing import envelope
from signing import receipt as form
from signing.anchors import WITNESS, StoredAnchor
from signing.cose import cose_key, encoded, facts_of, read_statement
from signing.entry_proof import cose_receipt
from signing.keys import Keyring
from signing.private_keys import FileSigner
from signing.receipt import STATED, IndexProof, Material, draft_of, make
from tests.app.bundles import LOG_ORIGIN, checkpoint_of
from tests.app.signed_statements import statement
from tests.app.witness import Witness
from tests.ledger.callers import ED25519
from tests.ledger.ledger_in_memory import SIGNER, Ledger

NODE = "node-7f3a"
JOB, OTHER_JOB = "use1-1704931200000-gate42-00001", "use1-1704931200000-gate42-00002"
DOCUMENTED_SIGNER = FileSigner(
    Path("keys.md"),
    Ed25519PrivateKey.from_private_bytes(
        bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    ),
)
"""The key of docs/formats/keys.md."""
DOCUMENTED_WITNESS = Witness(seed=bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"))
"""The witness of docs/formats/checkpoint.md."""
COSIGNED_AT = datetime(2024, 1, 11, 0, 0, 10, tzinfo=UTC)


def receipt_of(ledger: Ledger, job_id: str = JOB, signer: FileSigner = SIGNER, **replaced: Any) -> bytes:
    """The receipt of a job; ``replaced`` are fields of its ``Material``, or of the draft in that."""
    given: dict[str, Any] = {
        "tenant_id": ledger.tenant_id,
        "log_origin": LOG_ORIGIN,
        "node_id": NODE,
        "covers": "job",
        "job_id": job_id,
        "rows": rows_of(ledger, job_id),
        "checkpoint": checkpoint_of(ledger, signer=signer),
        "said": [],
        "keys": Keyring([signer.public_key]),
    } | replaced
    of_material = {name: given.pop(name) for name in Material._fields if name in given}
    material = Material(draft_of(**given), **of_material)
    return make(material, lambda level, index: ledger.tiles.get((level, index), b""), signer)


def indexed(
    ledger: Ledger, job_id: str = JOB, size: int | None = None, signer: FileSigner = SIGNER, begin: int = 0
) -> IndexProof:
    """The proof of a job by the index of leaves ``begin..size - 1``, which a snapshot of all up to there signs."""
    size, runs, roots = len(ledger.entries) if size is None else size, [], []
    for place in covering(size, begin):
        keys = keys_of([row["job_id"] for row in ledger.entries[place.begin : place.end]])
        leaves = run_leaves(place, keys, b"".join(ledger.leaf_hashes(place.begin + 1, place.end)))
        runs.append(prove(key_of(job_id), Directory.of(leaves), pieces_of(leaves)))
        roots.append(root_of(leaves).hex())
    said = {"job_index": roots, **({"job_index_from": begin + 1} if begin else {})}
    return IndexProof(size, ledger.signed(1, size, None, signer, **said)["dsse_envelope"], runs)


def rows_of(ledger: Ledger, job_id: str) -> Sequence[tuple[Any, ...]]:
    """The job's entries, as the service reads them."""
    return [tuple(row[name] for name in ENTRY_COLUMNS) for row in ledger.entries if row["job_id"] == job_id]


def cosigned(
    ledger: Ledger,
    size: int,
    signer: FileSigner = SIGNER,
    witness: Witness = DOCUMENTED_WITNESS,
    at: datetime = COSIGNED_AT,
) -> StoredAnchor:
    """What ``witness`` said of the first ``size`` entries."""
    note = witness.cosign(checkpoint_of(ledger, size, signer), int(at.timestamp()))
    return StoredAnchor(WITNESS, witness.verifier_key, note, size, at)


def example_receipt(keys: Keyring) -> bytes:
    """docs/formats/example.receipt.json; ``keys`` are those of keys.md."""
    ledger = example_ledger()
    said = [cosigned(ledger, 4, DOCUMENTED_SIGNER)]
    return receipt_of(ledger, JOB, DOCUMENTED_SIGNER, said=said, keys=keys, extends=2)


def example_ledger() -> Ledger:
    """The chain whose entries 1, 2 and 4 docs/formats/example.receipt.json proves."""
    ledger = Ledger("acme")
    for seq, (hlc, job_id, action, payload) in enumerate(
        [
            ((1704931200000, 1), JOB, "ENQUEUE", _CREATED),
            ((1704931200412, 0), JOB, "DEQUEUE", _ACCEPTED),
            ((1704931203500, 0), OTHER_JOB, "ENQUEUE", _CREATED.replace("report:1", "report:2")),
            ((1704931207009, 0), JOB, "COMPLETE", _COMPLETED),
            ((1704931207350, 0), OTHER_JOB, "DEQUEUE", _ACCEPTED),
        ],
        start=1,
    ):
        physical, logical = hlc
        ledger.entries.append(
            {
                "seq": seq,
                "t_hlc": f"{physical}:{logical}:{NODE}",
                "hlc_physical": physical,
                "hlc_logical": logical,
                "hlc_node": NODE,
                "job_id": job_id,
                "action": action,
                "link_version": 2,
                "origin": None,
                "payload": payload,
            }
        )
    ledger.relink()
    ledger.store_tree()
    return ledger


class ExampleStatement(NamedTuple):
    """docs/formats/example.statement.cose, .statement-receipt.cose and .scitt-keys.cbor."""

    statement: bytes
    receipt: bytes
    keys: bytes


def example_statement() -> ExampleStatement:
    """A statement that a caller signed, as entry 6 of the chain of the example."""
    ledger, data = example_ledger(), statement(ED25519)
    read = read_statement(data)
    key = IdempotencyKey(STATEMENT_ROUTE, read.id, 0, bytes.fromhex(read.id))
    payload = {"type": "STATEMENT_REGISTERED", **facts_of(read), keyed.MEMBER: keyed.key_digest("acme", key)}
    last = {"t_hlc": f"1704931208000:0:{NODE}", "hlc_physical": 1704931208000, "hlc_logical": 0}
    about = {"job_id": f"statement:{read.id}", "action": payload["type"], "payload": canonical.encode(payload).decode()}
    ledger.entries.append({**ledger.entries[-1], **last, **about, "seq": 6})
    ledger.relink()
    ledger.store_tree()
    rows = [tuple(ledger.entries[-1][name] for name in ENTRY_COLUMNS)]
    file = receipt_of(ledger, about["job_id"], DOCUMENTED_SIGNER, covers="entry", rows=rows)
    keys = encoded([cose_key(DOCUMENTED_SIGNER.public_key)])
    return ExampleStatement(data, cose_receipt(form.read(file)[0], DOCUMENTED_SIGNER), keys)


_CREATED = '{"assigned_dcs":["use1"],"fence_token":1,"spec":{"image":"report:1"},"type":"JobCreated"}'
_ACCEPTED = '{"dc_id":"use1","fence_token":1,"type":"JobAccepted","worker_count":2}'
_COMPLETED = '{"fence_token":1,"final_status":"SUCCEEDED","type":"JobCompleted"}'


def opened(file: bytes) -> dict[str, Any]:
    """The value of ``receipt``, to be changed."""
    value: dict[str, Any] = json.loads(file)["receipt"]
    return value


def statement_about(receipt: dict[str, Any]) -> dict[str, Any]:
    """The statement that a node would sign about ``receipt``."""
    digest = sha256(canonical.encode(receipt)).hexdigest()
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "predicate": {name: receipt[name] for name in STATED},
        "predicateType": "https://tallystick.dev/receipt/v1",
        "subject": [{"digest": {"sha256": digest}, "name": f"{receipt['tenant_id']}/{receipt['job_id']}"}],
    }


def sealed(receipt: dict[str, Any], signer: FileSigner = SIGNER, statement: dict[str, Any] | None = None) -> bytes:
    """The file that a dishonest node makes of ``receipt``, whatever it holds; of the statement, if one is given."""
    about = statement_about(receipt) if statement is None else statement
    return canonical.encode({"receipt": receipt, "statement": envelope.sign(canonical.encode(about), signer)})


def dishonest_receipt(ledger: Ledger, seq: int) -> bytes:
    """The receipt of one entry that a node would sign without a look at that."""
    said = opened(receipt_of(ledger, ledger.entry(1)["job_id"], rows=columns_of(ledger, 1), covers="entry"))
    (columns,) = columns_of(ledger, seq)
    size = len(ledger.entries)
    inclusion = tiles.inclusion_proof(leaf_index_of(Seq(seq)), size, lambda level, at: ledger.tiles[level, at])
    proved = {"inclusion": [each.hex() for each in inclusion], "row": json.loads(encode_entry("acme", columns))}
    return sealed({**said, "entries": [proved], "job_id": ledger.entry(seq)["job_id"]})


def columns_of(ledger: Ledger, seq: int) -> Sequence[tuple[Any, ...]]:
    """One entry, as the service reads it."""
    return [tuple(ledger.entry(seq)[name] for name in ENTRY_COLUMNS)]
