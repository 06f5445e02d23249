"""Spark judges the bundles of the corpus in docs/formats/cases as the corpus says, all in one job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from ledger.errors import InvalidInputError, SignatureError
from ledger.exit_code import exit_code_of_bundle
from pipeline.source import over_numbers
from pipeline.verify import verdict_rows
from pipeline.verify.tasks import DDL, VERDICT, batched
from signing.anchors import NOBODY, ExternalWitnesses
from signing.checkpoint import JudgedCheckpoint, judge_kept
from signing.keys import Keyring
from signing.policy import Policy
from tests.app.bundles import bundle_of
from tests.cases.corpus import Case, Found
from tests.cases.entries import SEQ, entry_forms
from tests.cases.kinds import FILE_KINDS

TASKS = 8
Against = tuple[Keyring | None, JudgedCheckpoint | None, None, ExternalWitnesses]


def against(case: Case, keyring: Keyring | None) -> Against | None:
    """What a bundle is held against; None where that is refused before any bundle is read."""
    try:
        policy = None if case.policy is None else Policy.parse(case.policy)
        kept = None if case.kept is None else judge_kept(case.kept, keyring)
    except (InvalidInputError, SignatureError):
        return None
    return keyring, kept, None, ExternalWitnesses.of((), (), policy)


def bundled_entries() -> Iterator[Found]:
    """The forms of an entry, each in the bundle of a chain of four that is signed as if nothing were wrong."""
    for form in entry_forms():
        case = Case(form.name, bundle_of(form.ledger()), 0 if form.is_well_formed else 2, form.why)
        yield Found(case, None if form.is_well_formed else ("malformed", SEQ))


def test_spark_judges_every_bundle_as_the_corpus_says(spark: SparkSession, tmp_path: Path) -> None:
    kinds = [kind for kind in FILE_KINDS if "Spark" not in kind.not_judged]
    found = [(each, against(each.case, kind.ring(each.case))) for kind in kinds for each in kind.found()]
    judged = [(each, given) for each, given in found if given is not None and b'"receipt"' not in each.case.file[:64]]
    judged += [(each, (FILE_KINDS[0].keys["signer"], None, None, NOBODY)) for each in bundled_entries()]
    for number, (each, _) in enumerate(judged):
        (tmp_path / f"{number}.tar").write_bytes(each.case.file)
    folder, all_given = str(tmp_path), [given for _, given in judged]

    def check(task: int) -> Iterator[pa.RecordBatch]:
        for number in range(task, len(all_given), TASKS):
            yield from batched(verdict_rows(f"{folder}/{number}.tar", number, all_given[number]))

    found_rows = over_numbers(spark, TASKS, check, DDL)
    rows = found_rows.filter(found_rows.kind == VERDICT).orderBy("number").collect()
    assert len(rows) == len(judged) > 700
    for ((case, first_break), _), row in zip(judged, rows, strict=True):
        verdict = json.loads(bytes(row.data))
        code = verdict["exit_code"] if "error" in verdict else exit_code_of_bundle(verdict)
        first = verdict["first_break"]
        assert (code, first and (first["kind"], first["seq"])) == (case.code, first_break), f"{case.name}: {case.why}"
