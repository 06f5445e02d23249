"""Merging bundles on Spark: one signed bundle out, which imports to what importing all of them would leave."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pyspark.sql import SparkSession, functions

from app.dev.embedded import EmbeddedPostgres
from ledger.errors import (
    BundleRefusedError,
    InvalidInputError,
    MergeRefusedError,
    NotABundleError,
    SigningUnavailableError,
    UntrustedKeyError,
)
from ledger.exit_code import ExitCode, exit_code_of_bundle
from ledger.hlc import Hlc
from pipeline.cli.copies import _print_refused
from pipeline.merge import SETTINGS, Merged, merge, workplace
from pipeline.merge.deciding import Signers, decided
from pipeline.merge.taking import TakenBundle, _taken, take
from pipeline.spark import MARKER
from signing.bundle.reader import BundleReader
from signing.judging import refuse_unless_trusted, verify_file
from signing.keys import Keyring
from signing.private_keys import FileSigner
from tests.app.bundles import bundle_of, store
from tests.app.importing import fresh, import_all, links, states
from tests.cases.bundles import cases
from tests.conftest import spread
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, build, signer_of
from tests.pipeline.conftest import RunCommand
from tests.pipeline.sites import BEGIN_MS, bundle_of_site, carried, drawn_sites, event

MERGER = signer_of(3)
TRUSTED = Keyring([SIGNER.public_key, MERGER.public_key])
CONTENTS = ("t_hlc", "job_id", "action", "link_version", "payload_digest", "payload", "origin")


@pytest.fixture
def trusted(tmp_path: Path) -> Path:
    """The keys of ``TRUSTED`` in a folder."""
    folder = tmp_path / "trusted"
    folder.mkdir()
    for number, key in enumerate(TRUSTED):
        (folder / f"{number}.pem").write_text(key.public_key_pem)
    return folder


@contextmanager
def settings_of_a_merge(spark: SparkSession) -> Iterator[None]:
    """The session with what a merge wants set, small enough here that batches are cut."""
    before = {name: spark.conf.get(name) for name in SETTINGS}
    for name in SETTINGS:
        spark.conf.set(name, "8192")
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value or "")


def merged(spark: SparkSession, files: list[Path], output: Path, signer: FileSigner = MERGER, **more: Any) -> Merged:
    """The files merged by ``signer``."""
    with settings_of_a_merge(spark):
        return merge(spark, [str(file) for file in files], TRUSTED, output, Signers(signer, signer), **more)


def contents(rows: list[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """What entries say, wherever they stand."""
    return sorted(tuple(row[name] for name in CONTENTS) for row in rows)


def code_of(path: Path) -> int:
    return exit_code_of_bundle(asyncio.run(verify_file(path, TRUSTED)).verdict)


# --- the same as importing all of them ----------------------------------------------------------------


@pytest.mark.parametrize("seed", [1])
def test_importing_the_merged_bundle_leaves_the_rows_that_importing_all_leaves(
    spark: SparkSession, postgres: EmbeddedPostgres, trusted: Path, tmp_path: Path, seed: int
) -> None:
    files = drawn_sites(tmp_path, seed, conflicts=False)
    outcome = merged(spark, files, tmp_path / "merged.tar")
    (one,) = outcome.merged
    with fresh(postgres) as (url, sound):
        (imported,) = import_all(url, trusted, files)
        expected = sound("acme")
    with fresh(postgres) as (url, sound):
        (again,) = import_all(url, trusted, [one.file])
        found = sound("acme")
    assert links(found) == links(expected)
    assert contents(found) == contents(expected)
    assert states(found) == states(expected)
    assert code_of(one.file) == ExitCode.FINE
    assert (outcome.found.placed, outcome.found.duplicates) == (imported.imported, imported.duplicates)
    assert (again.imported, again.duplicates, outcome.found.conflict_count) == (len(expected), 0, 0)


@pytest.mark.parametrize("seed", [3])
def test_of_two_events_that_claim_one_hlc_both_come_out_as_an_import_keeps_them(
    spark: SparkSession, postgres: EmbeddedPostgres, trusted: Path, tmp_path: Path, seed: int
) -> None:
    files = drawn_sites(tmp_path, seed, conflicts=True)
    outcome = merged(spark, files, tmp_path / "merged.tar")
    (one,) = outcome.merged
    with fresh(postgres) as (url, sound):
        (imported,) = import_all(url, trusted, files)
        expected = sound("acme")
    with fresh(postgres) as (url, sound):
        ((again, repeated),) = [import_all(url, trusted, [one.file], files)]
        found = sound("acme")
    assert contents(found) == contents(expected)
    assert states(found) == states(expected)
    assert [row["action"] for row in found].count("CONFLICT") > 0
    assert (again.duplicates, again.conflicts, repeated.imported) == (0, [], 0)
    told = outcome.found
    assert (told.placed, told.duplicates) == (imported.imported, imported.duplicates)
    assert sorted(map(str, told.conflicts)) == sorted(map(str, imported.conflicts))
    with settings_of_a_merge(spark):
        kept = decided(take(spark, [str(file) for file in files], TRUSTED), 3)
        frame = kept.select(functions.inline("conflicts"))
        assert sorted(str(row.asDict()) for row in frame.collect()) == sorted(map(str, told.conflicts))


def test_the_same_bundles_in_any_order_and_named_twice_make_the_same_file(spark: SparkSession, tmp_path: Path) -> None:
    files = drawn_sites(tmp_path, 5, conflicts=True, count=12)[-3:]
    twice = store(tmp_path, files[0].read_bytes(), "another-name.tar")
    found = []
    for number, order in enumerate((files, [*files[::-1], twice])):
        outcome = merged(spark, order, tmp_path / f"merged-{number}.tar")
        assert len(outcome.bundles) == 3
        found.append((outcome.merged[0].file.read_bytes(), outcome.found.placed, outcome.found.duplicates))
    assert found[0] == found[1]


def test_merging_what_was_merged_keeps_where_each_entry_was_first(spark: SparkSession, tmp_path: Path) -> None:
    files = drawn_sites(tmp_path, 6, conflicts=False, count=12)
    (at_once,) = merged(spark, files, tmp_path / "at-once.tar").merged
    halves = [merged(spark, files[half::2], tmp_path / f"half-{half}.tar").merged[0].file for half in (0, 1)]
    (by_halves,) = merged(spark, halves, tmp_path / "by-halves.tar", log_origin="log.archive").merged
    assert carried(by_halves.file) == carried(at_once.file)
    assert by_halves.to_chain_link == at_once.to_chain_link
    assert by_halves.log_origin == "log.archive"
    assert at_once.log_origin.startswith("merge/")


# --- chains of link version 1 -------------------------------------------------------------------------


def test_a_chain_of_version_1_stays_the_beginning_as_it_is(
    spark: SparkSession, postgres: EmbeddedPostgres, trusted: Path, tmp_path: Path
) -> None:
    old = build(12, version_1_until=5, snapshots_to=(12,))
    earlier = store(tmp_path, bundle_of(old, to_seq=7), "earlier.tar")
    files = [store(tmp_path, bundle_of(old), "old.tar"), earlier]
    files.append(bundle_of_site(tmp_path / "new.tar", "new", [event(Hlc(1, 0, "node-n"), 1, 0, 1)]))
    (one,) = merged(spark, files, tmp_path / "merged.tar").merged
    with BundleReader.open(one.file) as reader:
        rows = [row for batch in reader.entry_batches() for row in batch]
    assert [row[7] for row in rows] == [1] * 5 + [2] * 8
    assert [row[9] for row in rows[:5]] == [row["chain_link"] for row in old.entries[:5]]
    assert code_of(one.file) == ExitCode.FINE
    with fresh(postgres) as (url, _sound):
        (imported,) = import_all(url, trusted, files)
        again, repeated = import_all(url, trusted, [one.file], [one.file])
    assert (imported.imported, again.imported, repeated.imported) == (13, 0, 0)


@pytest.mark.parametrize("case", ["a later beginning", "another chain", "two events of one HLC"])
def test_what_an_import_refuses_of_version_1_is_refused_and_nothing_is_written(
    spark: SparkSession, tmp_path: Path, case: str
) -> None:
    old = build(12, version_1_until=5, snapshots_to=(12,))
    files = [store(tmp_path, bundle_of(old), "old.tar")]
    if case == "a later beginning":
        files.append(store(tmp_path, bundle_of(old, from_seq=3), "later.tar"))
    elif case == "another chain":
        other = build(12, version_1_until=5, snapshots_to=(12,), begin_ms=1_704_000_000_000)
        files.append(store(tmp_path, bundle_of(other), "other.tar"))
    else:
        hlc = {name: old.entry(2)[name] for name in ("t_hlc", "hlc_physical", "hlc_logical", "hlc_node")}
        old.entry(4).update(hlc)
        old.relink()
        old.snapshots = []
        files = [store(tmp_path, bundle_of(old), "twice.tar")]
    output = tmp_path / "out" / "merged.tar"
    with pytest.raises((InvalidInputError, MergeRefusedError), match=r"version|HLC") as raised:
        merged(spark, files, output)
    if isinstance(raised.value, MergeRefusedError):
        assert {bundle["exit_code"] for bundle in raised.value.bundles} == {ExitCode.COULD_NOT_RUN}
    assert not output.exists()
    assert list(tmp_path.glob("out/*")) == []


# --- several tenants ----------------------------------------------------------------------------------


def test_bundles_of_several_tenants_make_a_folder_of_bundles_each_as_if_merged_alone(
    spark: SparkSession, tmp_path: Path
) -> None:
    files = []
    for tenant, site in itertools.product(("acme", "zeta"), ("site-a", "site-b")):
        entries = [event(Hlc(BEGIN_MS + n, 0, site), n % 3, 2, n) for n in range(9)]
        files.append(bundle_of_site(tmp_path / f"{tenant}-{site}.tar", site, entries, tenant))
    outcome = merged(spark, files, tmp_path / "merged")
    names = sorted(path.name for path in (tmp_path / "merged").iterdir())
    assert names == ["acme.bundle.tar", "zeta.bundle.tar"]
    assert [(one.tenant_id, one.entry_count) for one in outcome.merged] == [("acme", 18), ("zeta", 18)]
    (alone,) = merged(spark, files[2:], tmp_path / "alone.tar").merged
    assert alone.file.read_bytes() == (tmp_path / "merged" / "zeta.bundle.tar").read_bytes()
    with pytest.raises(InvalidInputError, match="name a folder"):
        merged(spark, files, tmp_path / "alone.tar")


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_every_bundle_gets_the_verdict_that_the_service_gives_and_is_refused_as_an_import_refuses_it(
    tmp_path: Path,
) -> None:
    keyring = Keyring([SIGNER.public_key])
    judged = [case for case in cases() if case.kept is None]
    assert len(judged) > 150
    for case in spread(judged, 60):
        path = store(tmp_path, case.file)
        *_, last = _taken(str(path), 0, keyring, None)
        taken = TakenBundle(**json.loads(last.to_pylist()[0]["about"]))
        try:
            expected = asyncio.run(verify_file(path, keyring))
        except NotABundleError:
            assert taken.refusal, case.name
            assert taken.exit_code == case.code, case.name
            continue
        assert timeless(taken.told) == timeless(expected.to_json()), case.name
        assert taken.exit_code == case.code or taken.refusal, case.name
        try:
            refuse_unless_trusted(path.name, expected)
        except (BundleRefusedError, UntrustedKeyError):
            assert taken.refusal, case.name
            assert taken.exit_code == case.code, case.name


def timeless(told: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if name != "duration_ms"}


def test_one_bundle_that_does_not_hold_leaves_nothing_and_each_such_one_is_told(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = store(tmp_path, bundle_of(build(12, snapshots_to=(12,))), "good.tar")
    cut = store(tmp_path, good.read_bytes()[:-600], "cut.tar")
    theirs = store(tmp_path, bundle_of(build(12, snapshots_to=(12,)), signer=STRANGER), "theirs.tar")
    system = store(tmp_path, bundle_of(build(5, tenant_id="_system", snapshots_to=(5,))), "system.tar")
    missing = tmp_path / "missing.tar"
    output = tmp_path / "out" / "merged.tar"
    with pytest.raises(MergeRefusedError) as raised:
        merged(spark, [good, theirs, cut, system, missing], output)
    told = {Path(bundle["file"]).name: (bundle["exit_code"], bundle["error"]) for bundle in raised.value.bundles}
    assert {name: code for name, (code, _) in told.items()} == {
        "theirs.tar": ExitCode.UNKNOWN_KEY,
        "cut.tar": ExitCode.TAMPERED,
        "system.tar": ExitCode.COULD_NOT_RUN,
        "missing.tar": ExitCode.COULD_NOT_RUN,
    }
    assert all(name in why for name, (_, why) in told.items())
    assert not output.parent.exists()
    _print_refused(raised.value, as_json=True)
    printed = capsys.readouterr()
    assert [bundle["exit_code"] for bundle in json.loads(printed.out)["refused"]] == [4, 2, 1, 1]
    assert printed.err.count("refused:") == 4
    assert printed.err.endswith("nothing was written\n")


def test_a_signer_that_is_away_leaves_what_was_there_before(spark: SparkSession, tmp_path: Path) -> None:
    class AwaySigner(FileSigner):
        def sign(self, message: bytes) -> bytes:
            raise SigningUnavailableError("the key service does not answer")

    good = store(tmp_path, bundle_of(build(12, snapshots_to=(12,))), "good.tar")
    output = store(tmp_path, b"of yesterday", "merged.tar")
    with pytest.raises(SigningUnavailableError):
        merged(spark, [good], output, AwaySigner(MERGER.path, MERGER._private))
    assert output.read_bytes() == b"of yesterday"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.tar", "merged.tar"]


def test_the_merged_bundle_does_not_take_the_place_of_one_of_the_bundles(spark: SparkSession, tmp_path: Path) -> None:
    good = store(tmp_path, bundle_of(build(12, snapshots_to=(12,))), "good.tar")
    with pytest.raises(InvalidInputError, match="let the merged one go elsewhere"):
        merged(spark, [good], good)
    for origin in ("", "a b", "a+b", "x" * 301):
        with pytest.raises(InvalidInputError, match="no origin of a log"):
            merged(spark, [good], tmp_path / "merged.tar", log_origin=origin)


def test_what_stands_in_the_way_is_named_before_the_work_and_nothing_is_written(
    spark: SparkSession, tmp_path: Path
) -> None:
    files = [
        store(tmp_path, bundle_of(build(12, snapshots_to=(12,), tenant_id=tenant)), f"{tenant}.tar")
        for tenant in ("acme", "zeta")
    ]
    output = tmp_path / "out"
    (output / "zeta.bundle.tar").mkdir(parents=True)
    with pytest.raises(InvalidInputError, match=r"out/zeta\.bundle\.tar is there already and no file"):
        merged(spark, files, output)
    assert [path.name for path in output.iterdir()] == ["zeta.bundle.tar"]
    with pytest.raises(InvalidInputError, match=r"acme\.tar is no folder"):
        merged(spark, [tmp_path / "none.tar"], files[0] / "sub" / "merged.tar")


def test_a_run_that_was_killed_leaves_nothing_for_ever_and_one_that_lives_keeps_its_folder(tmp_path: Path) -> None:
    dead = tmp_path / ".merge-dead_123"
    dead.mkdir()
    (dead / MARKER).touch()
    (dead / "acme.bundle.tar").write_bytes(b"half")
    foreign = store(tmp_path, b"", ".merge-file")
    with workplace(tmp_path) as one, workplace(tmp_path) as other:
        assert not dead.exists()
        assert sorted(tmp_path.iterdir()) == sorted([one, other, foreign])
    assert list(tmp_path.iterdir()) == [foreign]
    program = (
        "import os, signal, sys; from pathlib import Path; from pipeline.merge import workplace\n"
        "with workplace(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    assert len(list(tmp_path.glob(".merge-*"))) == 2
    with workplace(tmp_path) as alone:
        assert sorted(tmp_path.iterdir()) == sorted([alone, foreign])


def test_a_file_that_cannot_be_written_is_told_of_the_folder_that_was_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as missing, workplace(tmp_path) as work:
        (work / "none" / "acme.bundle.tar").touch()
    assert missing.value.filename == str(tmp_path)
    with pytest.raises(OSError, match="No space") as full, workplace(tmp_path), Path("/dev/full").open("wb") as file:
        file.write(b"x" * 100_000)
    assert full.value.filename == str(tmp_path)


# --- the command --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("spark")
def test_the_command_merges_and_tells_what_it_did(run_command: RunCommand, tmp_path: Path) -> None:
    files = drawn_sites(tmp_path, 7, conflicts=True, count=12)
    key = tmp_path / "signing.pem"
    key.write_bytes(MERGER._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    key.chmod(0o600)
    trusted = store(tmp_path, SIGNER.public_key_pem.encode(), "trusted.pem")
    output = tmp_path / "merged"
    options = ["--keys", trusted, "--signing-key", f"file:{key}", "-o", f"{output}/", "--json"]
    ran = run_command("merge", *files, *options)
    assert (ran.returncode, ran.stderr) == (0, "")
    told = json.loads(ran.stdout)
    assert told["merged"] + told["duplicates"] == told["entries"]
    assert told["conflict_count"] == len(told["conflicts"]) > 0
    assert (told["bundles"][0]["file"], told["bundles"][0]["entry_count"]) == (
        str(output / "acme.bundle.tar"),
        told["merged"],
    )
    assert {one["file"] for one in told["inputs"]} == set(map(str, files))
    assert code_of(output / "acme.bundle.tar") == ExitCode.FINE
