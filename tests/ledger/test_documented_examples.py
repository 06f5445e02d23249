"""The examples in docs/formats are real: they are read from the documents and come out as printed there."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from ledger import canonical, chain, job_index, merkle
from ledger.hlc import Hlc
from ledger.job_index.proof import RunProof, verify_job

FORMATS = Path(__file__).resolve().parents[2] / "docs" / "formats"


def examples(document: str) -> list[str]:
    """The fenced blocks of a document, in order."""
    return re.findall(r"^```\w+\n(.*?)\n```$", (FORMATS / document).read_text(), re.DOTALL | re.MULTILINE)


def unhex(answer: dict[str, Any]) -> dict[str, Any]:
    hashes = {name: bytes.fromhex(value) for name, value in answer.items() if isinstance(value, str)}
    return answer | hashes | {"hashes": [bytes.fromhex(each) for each in answer["hashes"]]}


def test_the_hlc_example_packs_as_shown() -> None:
    text, packed = (line.split(maxsplit=1)[1] for line in examples("hlc.md")[0].splitlines())
    assert Hlc.parse(text).pack() == bytes.fromhex(packed)


def test_the_canonical_json_example_comes_out_as_shown() -> None:
    given, expected = examples("canonical-json.md")
    assert canonical.encode(json.loads(given)) == expected.encode()


def test_the_chain_link_example_hashes_the_bytes_shown_to_the_link_shown() -> None:
    entry, fields, link = examples("chain-link.md")
    hashed = bytes.fromhex("".join(line.split(maxsplit=1)[1] for line in fields.splitlines()))
    assert sha256(hashed).hexdigest() == link
    columns = json.loads(entry)
    assert (columns.pop("prev_chain_link"), columns.pop("origin")) == (None, None)
    digest = bytes.fromhex(columns.pop("payload_digest"))
    assert chain.link(**columns, prev_chain_link=b"", payload_digest=digest).hex() == link


def test_the_index_of_jobs_shown_is_that_of_the_log_shown_and_its_proofs_hold() -> None:
    leaves, root, *proofs = examples("job-index.md")
    jobs = [f"use1-1704931200000-gate42-0000{number}" for number in (1, 2, 1)]
    hashes = merkle.leaf_hashes([bytes([byte]) * 32 for byte in (0x11, 0x22, 0x33)])
    made = job_index.block_leaves(0, job_index.keys_of(jobs), b"".join(hashes))
    assert made == bytes.fromhex("".join(leaves.split()))
    assert job_index.root_of(made) == bytes.fromhex(root)
    present, absent = (msgspec.json.decode(each, type=RunProof) for each in proofs)
    roots, entries = [bytes.fromhex(root)], [(0, hashes[0]), (2, hashes[2])]
    verify_job(jobs[0], 3, roots, entries, [present])
    verify_job("use1-1704931200000-gate42-00003", 3, roots, [], [absent])


def test_the_merkle_proofs_shown_hold() -> None:
    inclusion, consistency = (unhex(json.loads(each)) for each in examples("merkle.md"))
    assert inclusion["leaf_hash"] == merkle.leaf_hash(b"\x22" * 32)
    merkle.verify_inclusion(
        inclusion["leaf_index"],
        inclusion["tree_size"],
        inclusion["leaf_hash"],
        inclusion["hashes"],
        inclusion["root_hash"],
    )
    merkle.verify_consistency(
        consistency["first"],
        consistency["second"],
        consistency["first_root"],
        consistency["second_root"],
        consistency["hashes"],
    )
