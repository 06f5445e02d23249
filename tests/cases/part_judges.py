"""How the product and docs/formats/verify.py judge the parts of a verifier that the corpus has cases of."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ledger import canonical
from ledger.errors import InvalidInputError, ProofError
from ledger.hlc import Hlc
from ledger.merkle import verify_consistency, verify_inclusion
from ledger.verification import ENTRY_COLUMNS
from ledger.verification.entry_check import EntryChecker
from ledger.verification.verdict import Findings
from tests.app.second_verifier import second_verifier

Given = Mapping[str, Any]
ENTRY_KINDS = ("payload-digest", "hlc-columns", "link", "malformed")
"""Breaks of an entry by itself, in the order in which the first is named."""


def _raw(hashes: list[str]) -> list[bytes]:
    return [bytes.fromhex(each) for each in hashes]


# --- the product ----------------------------------------------------------------------------------


def inclusion_by_product(given: Given) -> bool:
    leaf, root = _raw([given["leaf_hash"], given["root_hash"]])
    try:
        verify_inclusion(given["leaf_index"], given["tree_size"], leaf, _raw(given["hashes"]), root)
    except ProofError:
        return False
    return True


def consistency_by_product(given: Given) -> bool:
    one, other = _raw([given["first_root"], given["second_root"]])
    try:
        verify_consistency(given["first"], given["second"], one, other, _raw(given["hashes"]))
    except ProofError:
        return False
    return True


def text_by_product(given: Given) -> str | None:
    try:
        return canonical.encode(canonical.read(given["text"])).decode()
    except (InvalidInputError, ValueError):
        return None


def clock_by_product(given: Given) -> bool | int:
    if "one" in given:
        one, other = Hlc.parse(given["one"]), Hlc.parse(given["other"])
        return (one > other) - (one < other)
    try:
        Hlc.parse(given["hlc"])
    except InvalidInputError:
        return False
    return True


def entry_by_product(given: Given) -> str | None:
    row, findings = given["row"], Findings()
    checker = EntryChecker(row["tenant_id"], findings, first_seq=row["seq"], prev_link=row["prev_chain_link"])
    checker.check_one_by_one([[row[name] for name in ENTRY_COLUMNS]])
    counts = findings.counts()
    return next((kind for kind in ENTRY_KINDS if kind in counts), None)


# --- verify.py ------------------------------------------------------------------------------------


def inclusion_by_verify_py(given: Given) -> bool:
    verifier = second_verifier()
    try:
        leaf, root, *hashes = verifier.hashes_of([given["leaf_hash"], given["root_hash"], *given["hashes"]], 128, "it")
        return bool(verifier.is_leaf(given["leaf_index"], given["tree_size"], leaf, hashes, root))
    except verifier.MALFORMED:
        return False


def consistency_by_verify_py(given: Given) -> bool:
    verifier = second_verifier()
    try:
        names = ("first_root", "second_root")
        first, second, *hashes = verifier.hashes_of([*(given[name] for name in names), *given["hashes"]], 128, "it")
        trees = [SimpleNamespace(size=given["first"], root=first), SimpleNamespace(size=given["second"], root=second)]
        return bool(verifier.leads(trees[0], hashes, trees[1]))
    except verifier.MALFORMED:
        return False


def text_by_verify_py(given: Given) -> str | None:
    verifier = second_verifier()
    try:
        return str(verifier.canonical_text(verifier.parse_json(given["text"])))
    except verifier.MALFORMED:
        return None


def clock_by_verify_py(given: Given) -> bool | int:
    verifier = second_verifier()
    if "one" in given:
        one, other = verifier.hlc_in(given["one"]), verifier.hlc_in(given["other"])
        return (one > other) - (one < other)
    try:
        verifier.check_hlc(given["hlc"], "it")
    except verifier.MALFORMED:
        return False
    return True


def entry_by_verify_py(given: Given) -> str | None:
    verifier = second_verifier()
    try:
        verifier.check_columns(SimpleNamespace(**given["row"]))
    except verifier.MALFORMED as error:
        said = str(error).replace("link version", ": link")
        return next((kind for kind in ENTRY_KINDS if f": {kind}" in said), "malformed")
    return None
