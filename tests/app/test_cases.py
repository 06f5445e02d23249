"""The corpus in docs/formats/cases is what its tables say, and the product and docs/formats/verify.py judge it so."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import pytest

from signing.keys import Keyring
from tests.app.second_verifier import twin_in
from tests.cases import bundles
from tests.cases.corpus import FOLDER, Case, read_file
from tests.cases.judges import by_product
from tests.cases.kinds import FILE_KINDS, KINDS, PART_KINDS, FileKind, PartKind, readme
from tests.ledger.ledger_in_memory import SIGNER

CASES_MIN = 1_200
BYTES_MAX = 2_200_000


@pytest.mark.parametrize("kind", PART_KINDS, ids=lambda kind: kind.name)
def test_product_and_second_implementation_judge_every_part_as_the_corpus_says(kind: PartKind) -> None:
    assert kind.written() == (FOLDER / f"{kind.name}.json").read_text()
    assert (kind.by_verify_py is None, kind.in_page is None) == tuple(
        name in kind.not_judged for name in ("verify.py", "the page")
    )
    for case in kind.found():
        for judge in (kind.by_product, kind.by_verify_py):
            assert judge is None or judge(case.given) == case.expected, f"{case.name}: {case.why}"


@pytest.mark.parametrize("kind", FILE_KINDS, ids=lambda kind: kind.name)
def test_a_file_of_the_corpus_is_what_its_table_makes(kind: FileKind, tmp_path: Path) -> None:
    """``make cases`` writes it."""
    for made, found in zip_longest(kind.made(tmp_path), kind.found()):
        assert made == found
    head = {name: value for name, value in read_file(kind.name).items() if name != "cases"}
    assert head == kind.head()


def test_the_corpus_is_large_enough_and_small_enough_and_gives_a_reason_for_every_verdict() -> None:
    names = {path.stem for path in FOLDER.glob("*.json")}
    assert names == {kind.name for kind in KINDS}
    cases = [case for name in sorted(names) for case in json.loads((FOLDER / f"{name}.json").read_text())["cases"]]
    assert len(cases) >= CASES_MIN
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < BYTES_MAX
    for case in cases:
        assert re.fullmatch(r"[^\n]{10,200}\.", case["why"]), case["id"]
    for name in names:
        ids = [case["id"] for case in json.loads((FOLDER / f"{name}.json").read_text())["cases"]]
        assert [each for each, count in Counter(ids).items() if count > 1] == [], name


@pytest.mark.parametrize("kind", FILE_KINDS, ids=lambda kind: kind.name)
def test_the_product_judges_every_file_as_the_corpus_says(kind: FileKind, tmp_path: Path) -> None:
    for case, first_break in kind.found():
        code, verdict = by_product(case.file, tmp_path, kind.ring(case), case.kept, case.policy)
        first = verdict.get("first_break")
        found = (code, None if first is None else (first["kind"], first["seq"]))
        assert found == (case.code, first_break), f"{case.name}: {case.why}"


@pytest.mark.parametrize("kind", FILE_KINDS, ids=lambda kind: kind.name)
def test_the_second_implementation_judges_every_file_as_the_corpus_says(kind: FileKind, tmp_path: Path) -> None:
    judge, path = twin_in(tmp_path), tmp_path / "file"
    for case, _ in kind.found():
        path.write_bytes(case.file)
        assert judge(path, kind.ring(case), case.kept, case.policy) == case.code, f"{case.name}: {case.why}"


@pytest.mark.parametrize("case", [*bundles.large(), *bundles.large_pruned()], ids=lambda case: case.name)
def test_both_judge_bundles_with_merged_runs_alike(case: Case, tmp_path: Path) -> None:
    ring, path = Keyring([SIGNER.public_key]), tmp_path / "file"
    path.write_bytes(case.file)
    assert by_product(case.file, tmp_path, ring)[0] == case.code, case.why
    assert twin_in(tmp_path)(path, ring) == case.code, case.why


SEEN_BY_KEYS_ALONE = {
    "manifest with a signature of one byte less",
    "manifest with the signature of another",
    "a snapshot with the signature of another",
    "a snapshot with a wrong signature alone",
    "a snapshot with a wrong signature beside a right one",
    "a snapshot with a wrong signature of no name",
    "a snapshot with a stranger's signature in the held key's name",
    "a checkpoint with a signature that does not hold",
    "kept: a note with a wrong signature in the held key's name",
    "with the signature of another",
    "a cosignature of another tree",
    "a checkpoint whose text was changed",
}
BROKEN_WITHOUT_KEYS = {"kept: of a history that forked, by a stranger"}
"""With keys the signature is by nobody known; without, the root alone counts, and it differs."""


@pytest.mark.parametrize("kind", FILE_KINDS[:3], ids=lambda kind: kind.name)
def test_without_keys_the_same_is_broken_but_for_signatures_and_the_rest_incomplete(
    kind: FileKind, tmp_path: Path
) -> None:
    judge, path = twin_in(tmp_path), tmp_path / "file"
    for case, _ in kind.found():
        path.write_bytes(case.file)
        is_broken = case.code == 2 and case.name not in SEEN_BY_KEYS_ALONE
        code = 2 if is_broken or case.name in BROKEN_WITHOUT_KEYS else 1 if case.code == 1 else 3
        found = by_product(case.file, tmp_path, None, case.kept, case.policy)[0]
        assert (found, judge(path, None, case.kept, case.policy)) == (code, code), case.name


def test_the_readme_lists_the_kinds_and_shows_a_case() -> None:
    text = (FOLDER / "README.md").read_text()
    assert text == readme(text)
    (shown,) = (json.loads(each) for each in re.findall(r"```json\n(.*?)```", text, re.DOTALL))
    whole = next(case for case in read_file("bundles")["cases"] if case["id"] == shown["id"])
    assert shown["file"].pop("edits") == [each for each in whole["file"].pop("edits") if each[0] in (3604, 124)]
    assert shown == whole


def test_the_readme_runs_the_second_implementation_on_a_kind_as_it_says(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    own = script.replace('["python3", "../verify.py"]', repr([sys.executable, "../verify.py"]), 1)
    assert own != script
    assert " ".join(f"{kind.name}.json" for kind in FILE_KINDS) in own

    def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, "short.json"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)

    cases = tmp_path / "cases"
    cases.mkdir()
    (tmp_path / "verify.py").write_bytes((FOLDER.parent / "verify.py").read_bytes())
    corpus = json.loads((FOLDER / "receipts.json").read_text())
    whole = corpus["cases"][0]
    like_it = [case for case in corpus["cases"] if "like" in case["file"] and case["file"]["like"] == whole["id"]]
    corpus["cases"] = [whole, *like_it[:3], like_it[-1]]
    (cases / "short.json").write_text(json.dumps(corpus))
    done = run(own, cases)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    done = run(own.replace("../verify.py", "/dev/null"), cases)
    assert done.returncode == 1
    assert done.stdout.endswith(": 0, not 2. A receipt without completeness is of version 1.\n")
