"""An archive in a bucket, over HTTP: the same objects as in a folder, written once, whatever the network does."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ledger.errors import ArchiveUnavailableError, ConfigurationError
from objects.locked import ObjectLock
from objects.store import ArchiveStore
from pipeline.archive.reader import tenants_of, verify_tenant
from pipeline.archiving.continuous import Archiver
from tests.conftest import Database
from tests.ledger.ledger_in_memory import SIGNER
from tests.pipeline.archived_ledgers import RING, archive_at, archive_here, content_of, days, ledger_of, store
from tests.pipeline.bucket_server import BucketServer, bucket_server

URL = "s3://bucket/some/where"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    """An empty bucket, which the environment names as it does any other."""
    with bucket_server() as server:
        for name, value in (
            ("AWS_ENDPOINT_URL", server.url),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_ACCESS_KEY_ID", "id"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        yield server


def objects_of(bucket: BucketServer) -> dict[str, bytes]:
    return {key.removeprefix("some/where/"): data for key, data in bucket.objects.items()}


async def test_a_bucket_holds_what_a_folder_would_and_is_verified_as_one(
    database: Database, bucket: BucketServer, tmp_path: Path
) -> None:
    ledger = ledger_of("acme", days(33))
    await store(database, ledger, ledger_of("other", days(10)))
    for grown in (ledger, ledger_of("acme", days(30, 33), start=ledger)):
        await store(database, grown)
        archive_at(database, URL)
        archive_here(database, tmp_path)
    assert objects_of(bucket) == content_of(tmp_path)
    assert tenants_of(ArchiveStore(URL)) == ["acme", "other"]
    verdict = await verify_tenant(ArchiveStore(URL), "acme", RING)
    assert (verdict["valid"], verdict["verdicts"]["archive"], verdict["to_seq"]) == (True, "ok", 60)
    again = archive_at(database, URL)
    assert [each.files for each in again] == [0, 0]


async def test_lost_answers_and_cut_connections_leave_every_object_once_and_whole(
    database: Database, bucket: BucketServer, tmp_path: Path
) -> None:
    await store(database, ledger_of("acme", days(33)))
    archive_here(database, tmp_path)
    bucket.cut_answers, bucket.cut_bodies = {1, 4, 7}, {2, 5, 8}
    archive_at(database, URL)
    assert objects_of(bucket) == content_of(tmp_path)
    assert bucket.puts > 8


async def test_what_stands_in_a_bucket_is_not_overwritten(database: Database, bucket: BucketServer) -> None:
    await store(database, ledger_of("acme", days(20)))
    archive_at(database, URL)
    whole = dict(bucket.objects)
    for name in whole:
        bucket.objects = {name: b"somebody's"} | {key: data for key, data in whole.items() if "/manifests/" not in key}
        bucket.objects[name] = b"somebody's"
        (acme,) = archive_at(database, URL)
        assert acme.first_break is not None
        assert acme.first_break.kind == "archive"
        assert bucket.objects[name] == b"somebody's"


async def test_a_bucket_that_refuses_is_told_in_one_line(database: Database, bucket: BucketServer) -> None:
    await store(database, ledger_of("acme", days(20)))
    bucket.is_closed = True
    with pytest.raises(ArchiveUnavailableError, match="s3://bucket/some/where") as raised:
        archive_at(database, URL)
    assert "\n" not in str(raised.value)


async def test_each_new_object_of_a_locked_archive_asks_for_its_lock_and_the_hint_does_not(
    database: Database, bucket: BucketServer
) -> None:
    await store(database, ledger_of("acme", days(20)))
    archiver = Archiver(database.service_url, ArchiveStore(URL, ObjectLock("COMPLIANCE", 400)))
    try:
        progress = archiver.step(SIGNER, RING)
        again = archiver.step(SIGNER, RING)
    finally:
        archiver.close()

    assert (progress.error, progress.failures, again.files) == (None, 0, 0)
    assert (await verify_tenant(ArchiveStore(URL), "acme", RING))["valid"]
    unlocked = {name for name, headers in bucket.locks.items() if not headers}
    assert unlocked == {"some/where/metadata/version-hint.text"}
    due = datetime.now(UTC) + timedelta(days=400)
    for mode, until in (headers for headers in bucket.locks.values() if headers):
        assert mode == "COMPLIANCE"
        assert abs(datetime.fromisoformat(until) - due) < timedelta(minutes=5)


async def test_a_locked_put_takes_no_name_that_is_taken(bucket: BucketServer) -> None:
    place = ArchiveStore(URL, ObjectLock("GOVERNANCE", 1))
    assert place.create("a", io.BytesIO(b"first"))
    assert not place.create("a", io.BytesIO(b"second"))
    assert place.read("a", 10) == b"first"


async def test_a_bucket_that_refuses_a_locked_put_is_told_in_one_line(bucket: BucketServer) -> None:
    bucket.is_closed = True
    with pytest.raises(ArchiveUnavailableError, match=r"cannot be written, locked: .*AccessDenied"):
        ArchiveStore(URL, ObjectLock("GOVERNANCE", 1)).create("a", io.BytesIO(b"first"))


def test_only_a_bucket_of_s3_can_be_locked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs an archive in S3"):
        ArchiveStore(str(tmp_path), ObjectLock("GOVERNANCE", 1))


@pytest.mark.parametrize("text", ["", "governance", "compliance:0d", "compliance:4h", "Compliance:4d"])
def test_a_lock_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is no lock"):
        ObjectLock.parse(text)
