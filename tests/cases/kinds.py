"""The kinds of cases: one file each, and what judges it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from signing.keys import Keyring, demanding
from tests.app.second_verifier import as_saved
from tests.cases import bundles, callers, cose, entries, part_judges, parts, policies, receipts, second, windows
from tests.cases.corpus import Case, Files, Found, Part, file_cases, part_cases, spelled, written
from tests.cases.judges import by_product
from tests.ledger.ledger_in_memory import SIGNER

EVERYBODY: Final[Mapping[str, str]] = {}
NO_RECEIPTS: Final = {"Spark": "it verifies bundles; receipts are verified one by one"}
NO_PARTS: Final = {"Spark": "it calls the product for these"}
NO_CBOR: Final = dict.fromkeys(("verify.py", "the page", "Spark"), "it reads no CBOR")
SIGNER_ALONE: Final = {"signer": Keyring([SIGNER.public_key])}


class FileKind(NamedTuple):
    """Cases that are files, as ``tally verify-bundle`` and ``tally verify-proof`` judge them."""

    name: str
    about: str
    cases: Callable[[], Iterable[Case]]
    keys: Mapping[str, Keyring] = SIGNER_ALONE
    not_judged: Mapping[str, str] = EVERYBODY
    """By verifier, why it judges none of these."""

    def ring(self, case: Case) -> Keyring | None:
        """The keys that a case is judged by."""
        return demanding(case.signatures, None if case.keys is None else self.keys[case.keys])

    def head(self) -> dict[str, Any]:
        """What stands before the cases."""
        return {"about": self.about, "keys": {name: as_saved(ring) for name, ring in self.keys.items()}}

    def made(self, folder: Path) -> list[Found]:
        """The cases as the table makes them; of each the first break is the one that the product names."""
        return [Found(case, first_break(case, self.ring(case), folder)) for case in self.cases()]

    def found(self) -> list[Found]:
        """The cases as they are checked in."""
        return file_cases(self.name)

    def written(self) -> str:
        """The file that is checked in."""
        files = Files()
        with tempfile.TemporaryDirectory() as folder:
            cases = [spelled(case, broken, files) for case, broken in self.made(Path(folder))]
        return written(self.head(), cases)


class PartKind(NamedTuple):
    """Cases of one part of a verifier, with what it must find."""

    name: str
    about: str
    expected: str
    """What ``expected`` means."""
    cases: Callable[[], Iterable[Part]]
    by_product: Callable[[Mapping[str, Any]], Any]
    by_verify_py: Callable[[Mapping[str, Any]], Any] | None
    in_page: str | None
    """A function of the page's modules and what is given, in script."""
    not_judged: Mapping[str, str] = NO_PARTS

    def written(self) -> str:
        """The file that is checked in."""
        spelled = ({"id": each.name, "why": each.why, **each.given, "expected": each.expected} for each in self.cases())
        return written({"about": self.about, "expected": self.expected}, spelled)

    def found(self) -> list[Part]:
        """The cases as they are checked in."""
        return part_cases(self.name)


def first_break(case: Case, keyring: Keyring | None, folder: Path) -> tuple[str, int] | None:
    """Kind and seq of the first break, as the product names it; None where nothing is broken or judged."""
    _, verdict = by_product(case.file, folder, keyring, case.kept, case.policy)
    first = verdict.get("first_break")
    return None if first is None else (first["kind"], first["seq"])


FILE_KINDS: Final[Sequence[FileKind]] = (
    FileKind("bundles", "[bundles](../bundle.md), some with a checkpoint that was kept", bundles.cases),
    FileKind(
        *("receipts", "[receipts](../receipt.md), some with a checkpoint that was kept", receipts.cases),
        not_judged=NO_RECEIPTS,
    ),
    FileKind("policies", "[policies](../policy.md), with a receipt or a bundle each", policies.cases),
    FileKind(
        *("callers", "[events that callers signed](../signed-events.md), in bundles and receipts", callers.cases),
        keys=callers.KEYS,
    ),
    FileKind(
        "windows", "bundles and receipts by [keys](../keys.md) that count at other times", windows.cases, windows.KEYS
    ),
    FileKind(
        "second", "[second signatures](../keys.md#second-keys), and witnesses of ML-DSA-44", second.cases, second.KEYS
    ),
)
HOLDS: Final = "whether the proof holds"
PART_KINDS: Final[Sequence[PartKind]] = (
    PartKind(
        *(
            "entries",
            "rows of [entries](../chain-link.md), one each",
            "the kind of the first break, or null",
        ),
        *(entries.parts, part_judges.entry_by_product, part_judges.entry_by_verify_py),
        in_page="""({entries, findings}, {row}) => {
            const found = new findings.Findings();
            new entries.EntryChecker(found, row.seq, row.prev_chain_link).check(row);
            const kinds = ["payload-digest", "hlc-columns", "link", "malformed"];
            return kinds.find((kind) => found.counts.has(kind)) ?? null;
        }""",
        not_judged=EVERYBODY,
    ),
    PartKind(
        *("inclusion", "[inclusion proofs](../merkle.md)", HOLDS, parts.inclusions),
        *(part_judges.inclusion_by_product, part_judges.inclusion_by_verify_py),
        in_page="""({merkle, encoding}, given) => holds(merkle.ProofError, () => merkle.verifyInclusion(
            given.leaf_index, given.tree_size, encoding.fromHex(given.leaf_hash),
            given.hashes.map(encoding.fromHex), encoding.fromHex(given.root_hash)))""",
    ),
    PartKind(
        *("consistency", "[consistency proofs](../merkle.md)", HOLDS, parts.consistencies),
        *(part_judges.consistency_by_product, part_judges.consistency_by_verify_py),
        in_page="""({merkle, encoding}, given) => holds(merkle.ProofError, () => merkle.verifyConsistency(
            given.first, given.second, encoding.fromHex(given.first_root), encoding.fromHex(given.second_root),
            given.hashes.map(encoding.fromHex)))""",
    ),
    PartKind(
        *(
            "json",
            "texts in JSON",
            "their [canonical form](../canonical-json.md), null where they have none",
            parts.texts,
        ),
        *(part_judges.text_by_product, part_judges.text_by_verify_py),
        in_page="""({json, encoding}, {text}) => {
            try { return json.canonical(json.parseJson(text, "it")); }
            catch (error) { if (error instanceof encoding.Malformed) return null; throw error; }
        }""",
    ),
    PartKind(
        *(
            "hlc",
            "[clocks](../hlc.md)",
            "whether it is an HLC; of two, -1, 0 or 1 as one is earlier, the same, or later",
        ),
        *(parts.clocks, part_judges.clock_by_product, part_judges.clock_by_verify_py),
        in_page="""({hlc, encoding}, given) => "one" in given
            ? hlc.compareHlcs(hlc.parseHlc(given.one), hlc.parseHlc(given.other))
            : holds(encoding.Malformed, () => hlc.parseHlc(given.hlc))""",
    ),
    PartKind(
        *("cose", "[COSE receipts](../receipt.md#in-the-forms-of-other-programs) of one entry"),
        *("holds, refused, or unknown key", cose.parts, cose.judge, None, None),
        not_judged=NO_CBOR,
    ),
)
KINDS: Final = (*FILE_KINDS, *PART_KINDS)


def table() -> str:
    """The kinds, as the README lists them."""
    lines = ["| file | cases | are | not judged by |", "|---|---|---|---|"]
    for kind in KINDS:
        left = "; ".join(f"{who}: {why}" for who, why in kind.not_judged.items())
        lines.append(f"| [{kind.name}.json]({kind.name}.json) | {len([*kind.cases()])} | {kind.about} | {left} |")
    return "\n".join(lines)


def readme(text: str) -> str:
    """The README with the table of the kinds as they are."""
    before, begin, rest = text.partition("<!-- kinds -->\n")
    _, end, after = rest.partition("\n<!-- end -->")
    return f"{before}{begin}{table()}{end}{after}"
