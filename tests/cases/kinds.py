"""The kinds of cases: one file each, and what judges it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from signing.keys import Keyring
from tests.app.second_verifier import as_saved
from tests.cases import bundles, callers, policies, receipts, windows
from tests.cases.corpus import Case, Files, Found, file_cases, spelled, written
from tests.cases.judges import by_product
from tests.ledger.ledger_in_memory import SIGNER

EVERYBODY: Final[Mapping[str, str]] = {}
NO_RECEIPTS: Final = {"Spark": "it verifies bundles; receipts are verified one by one"}
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
        return None if case.keys is None else self.keys[case.keys]

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
)
KINDS: Final = (*FILE_KINDS,)


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
