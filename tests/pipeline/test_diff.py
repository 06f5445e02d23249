"""Two ledgers compared: by their trees where they are one history, else by sets of events, and then made alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from pyspark.sql import SparkSession

from app.dev.embedded import EmbeddedPostgres
from ledger.errors import ChainDamagedError, InvalidInputError, LedgerError, NotFoundError, TenantNotFoundError
from ledger.exit_code import ExitCode, exit_code_of_error
from objects.store import ArchiveStore
from pipeline.archiving.filing import Ledger as PostgresLedger
from pipeline.diff import Diff, diff
from pipeline.places import parse_place
from pipeline.places.postgres import Connection
from signing import private_keys
from signing.keys import Keyring
from tests.app.bundles import bundle_of, checkpoint_of, store
from tests.app.chain_builder import insert
from tests.app.chains import until
from tests.app.importing import fresh, import_all, states
from tests.app.service_thread import serving
from tests.app.test_bundle_merge import forked
from tests.conftest import connected_to, execute, fresh_database
from tests.ledger.ledger_in_memory import SIGNER, Ledger, build, signer_of
from tests.pipeline.archived_ledgers import archive_by, file_here
from tests.pipeline.conftest import RunCommand

REPAIRER = signer_of(7)
LATER_MS = 1_704_931_900_000


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The keys of the ledgers in memory, and of whoever repairs."""
    folder = tmp_path_factory.mktemp("trusted")
    for number, signer in enumerate((SIGNER, REPAIRER)):
        (folder / f"{number}.pem").write_text(signer.public_key_pem)
    return folder


@contextmanager
def stored(postgres: EmbeddedPostgres, *ledgers: Ledger) -> Iterator[tuple[str, Callable[[str], None]]]:
    """URL of a database that holds ``ledgers``, each with a checkpoint; and how to run a statement in it, unguarded."""
    with fresh_database(postgres) as database:
        superuser = database.superuser_url

        async def fill() -> None:
            connection = await asyncpg.connect(superuser)
            await connection.execute("SET session_replication_role = replica")
            for ledger in ledgers:
                await insert(connection, ledger)
                note, tenant = checkpoint_of(ledger), ledger.tenant_id
                await connection.execute(
                    "UPDATE scheduler.merkle_head SET checkpoint = $1 WHERE tenant_id = $2", note, tenant
                )
            await connection.close()

        asyncio.run(fill())
        yield (
            database.service_url,
            lambda each: asyncio.run(execute(superuser, f"SET session_replication_role = replica; {each}")),
        )


def compared(spark: SparkSession, a: str | Path, b: str | Path, **more: Any) -> Diff:
    """``diff`` of the ledgers that two texts name."""
    if "output" in more:
        more = {"signer": REPAIRER, **more}
    with ExitStack() as stack:
        return diff(spark, *(stack.enter_context(parse_place(str(place)).open()) for place in (a, b)), **more)


def told(found: Diff, tenant_id: str = "acme") -> dict[str, Any]:
    """What is told of one tenant."""
    (tenant,) = (each for each in found.to_json()["tenants"] if each["tenant_id"] == tenant_id)
    return tenant


# --- one history ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("from_seq", "to_seq"), [(1, 700), (301, 600)])
def test_a_ledger_and_a_bundle_of_a_range_of_it_are_one_history(
    spark: SparkSession, postgres: EmbeddedPostgres, tmp_path: Path, from_seq: int, to_seq: int
) -> None:
    whole = build(720)
    bundle = bundle_of(whole if to_seq >= from_seq else build(700), *((from_seq, to_seq) if to_seq >= from_seq else ()))
    path = store(tmp_path, bundle, "b.tar")
    with stored(postgres, whole) as (url, _):
        there, back = compared(spark, url, path), compared(spark, path, url)
    count = to_seq - from_seq + 1 or 700
    assert (told(there)["only_in_a"], told(there)["only_in_b"]) == (720 - count, 0)
    assert (told(back)["only_in_a"], told(back)["only_in_b"]) == (0, 720 - count)
    assert {told(each)["compared"] for each in (there, back)} == {"merkle"}
    assert told(there)["first_difference"] is None
    assert there.is_equal is (count == 720)


def test_equal_history_costs_as_many_reads_of_a_long_ledger_as_of_a_short_one(
    spark: SparkSession, postgres: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    batches = Connection.batches

    def counted(self: Connection, query: str) -> Any:
        asked.append(query)
        return batches(self, query)

    monkeypatch.setattr(Connection, "batches", counted)
    counts = []
    for length in (40, 4_000):
        ledger = build(length)
        path = store(tmp_path, bundle_of(ledger), f"{length}.tar")
        early = store(tmp_path, bundle_of(ledger, 1, length - 3), f"{length}-early.tar")
        with stored(postgres, ledger) as (url, _), stored(postgres, ledger) as (copy, _):
            for other, lacking in ((copy, 0), (path, 0), (early, 3)):
                asked.clear()
                assert told(compared(spark, url, other))["only_in_a"] == lacking
                counts.append(len(asked))
    assert counts[:2] == counts[3:5]
    assert max(counts) <= 16


@pytest.mark.parametrize("seq", [513])
def test_a_rewritten_history_is_found_with_the_seq_at_which_it_begins(
    spark: SparkSession, postgres: EmbeddedPostgres, tmp_path: Path, seq: int
) -> None:
    path = store(tmp_path, bundle_of(build(700)), "kept.tar")
    rewritten = build(720)
    rewritten.entry(seq)["payload"] = rewritten.entry(seq)["payload"][:-1] + ',"zz":"rewritten"}'
    rewritten.relink()
    rewritten.store_head()
    rewritten.store_tree()
    with stored(postgres, rewritten) as (url, _):
        found = told(compared(spark, url, path))
    assert found["first_difference"]["seq"] == seq
    assert found["first_difference"]["a"] == rewritten.entry(seq)["chain_link"]
    assert (found["compared"], found["only_in_a"], found["only_in_b"]) == ("hlc-ranges", 21, 1)
    assert found["conflicts"] == [{"hlc": rewritten.entry(seq)["t_hlc"], "seq_a": seq, "seq_b": seq}]


def test_an_edited_row_is_found_by_rows_where_the_tree_says_nothing(
    spark: SparkSession, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    ledger = build(300)
    path = store(tmp_path, bundle_of(ledger), "kept.tar")
    with stored(postgres, ledger) as (url, run):
        run("UPDATE scheduler.scheduler_log SET payload = payload::text::json WHERE seq = 200")
        assert compared(spark, url, path, by_rows=True).is_equal
        for seq, edit in ((257, "payload = '{\"x\":1}'"), (256, "job_id = 'another'"), (2, "hlc_logical = 9")):
            run(f"UPDATE scheduler.scheduler_log SET {edit} WHERE seq = {seq}")
            assert compared(spark, url, path).is_equal
            assert told(compared(spark, url, path, by_rows=True))["first_difference"]["seq"] == seq


def test_tenants_that_one_side_lacks_are_missing_there_and_others_can_be_left_out(
    spark: SparkSession, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    path = store(tmp_path, bundle_of(build(30)), "acme.tar")
    with stored(postgres, build(30), build(12, tenant_id="other"), build(5, tenant_id="_system")) as (url, _):
        found = compared(spark, url, path)
        assert compared(spark, url, path, tenants=["acme"]).is_equal
        with pytest.raises(TenantNotFoundError, match="nobody"):
            compared(spark, url, path, tenants=["nobody"])
    assert [each["tenant_id"] for each in found.to_json()["tenants"]] == ["acme", "other"]
    assert (told(found, "other")["only_in_a"], told(found, "other")["only_in_b"]) == (12, 0)
    assert not found.is_equal


# --- other histories ------------------------------------------------------------------------------


def test_ledgers_that_conflict_are_alike_once_each_has_what_the_other_had(
    spark: SparkSession, postgres: EmbeddedPostgres, trusted: Path, tmp_path: Path
) -> None:
    one, other = build(12, snapshots_to=(12,)), forked(9, fence_token=5)
    other.store_head()
    other.store_tree()
    with stored(postgres, one) as (a, _), stored(postgres, other) as (b, _):
        found = compared(spark, a, b, output=tmp_path)
        assert (told(found)["only_in_a"], told(found)["only_in_b"], told(found)["conflict_count"]) == (1, 1, 1)
        assert told(found)["first_difference"]["seq"] == 9
        files = {each.lacking: each.file for each in found.written}
        assert {lacking: file.relative_to(tmp_path) for lacking, file in files.items()} == {
            "a": Path("to-a/acme-9-9.bundle.tar"),
            "b": Path("to-b/acme-9-9.bundle.tar"),
        }
        for url, lacking in ((a, "a"), (b, "b")):
            (outcome,) = import_all(url, trusted, [files[lacking]])
            assert (outcome.imported, len(outcome.conflicts)) == (1, 1)
        again = compared(spark, a, b)
    assert again.is_equal
    assert told(again)["first_difference"]["seq"] == 9


def test_two_histories_of_one_log_are_told_and_no_bundle_is_made_of_them(
    spark: SparkSession, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    one, other = build(12, snapshots_to=(12,)), forked(9, fence_token=5)
    other.store_head()
    other.store_tree()
    away = [build(9, tenant_id="away"), build(4, tenant_id="away")]
    with stored(postgres, one, away[0]) as (a, run_a), stored(postgres, other, away[1]) as (b, run_b):
        for run in (run_a, run_b):
            run("INSERT INTO scheduler.ledger_identity VALUES (true, 'log.example')")
        found = compared(spark, a, b, output=tmp_path)
        assert (told(found)["forked_log"], found.exit_code) == ("log.example", ExitCode.TAMPERED)
        assert [(each.tenant_id, each.lacking) for each in found.written] == [("away", "b")]
        assert told(found, "away")["forked_log"] is None
        assert compared(spark, a, b, tenants=["away"]).exit_code == ExitCode.INCOMPLETE


def test_a_folder_that_holds_no_archive_is_not_compared_as_one_that_lacks_everything(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("no archive")
    with pytest.raises(NotFoundError, match="there is no archive in"):
        compared(spark, tmp_path, tmp_path)


def test_bundles_are_not_laid_beside_those_of_another_comparison(spark: SparkSession, tmp_path: Path) -> None:
    a = store(tmp_path, bundle_of(build(12)), "a.tar")
    (tmp_path / "out" / "to-b").mkdir(parents=True)
    assert compared(spark, a, a, output=tmp_path / "out").is_equal
    (tmp_path / "out" / "to-b" / "old.tar").touch()
    with pytest.raises(InvalidInputError, match="out/to-b is there already"):
        compared(spark, a, a, output=tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "to-a").touch()
    with pytest.raises(InvalidInputError, match="other/to-a is there already"):
        compared(spark, a, a, output=tmp_path / "other")


def test_a_tenant_whose_tree_is_not_stored_yet_is_compared_by_its_rows(
    spark: SparkSession, postgres: EmbeddedPostgres
) -> None:
    with stored(postgres, build(300)) as (a, _), stored(postgres, build(310)) as (b, run):
        run("DELETE FROM scheduler.merkle_tile; DELETE FROM scheduler.merkle_head")
        for each, counts in ((compared(spark, a, b), (0, 10)), (compared(spark, b, a), (10, 0))):
            assert (told(each)["only_in_a"], told(each)["only_in_b"], told(each)["compared"]) == (*counts, "merkle")


def test_what_a_range_of_another_log_lacks_comes_out_in_few_bundles(
    spark: SparkSession, postgres: EmbeddedPostgres, trusted: Path, tmp_path: Path
) -> None:
    early, late = build(2_600, snapshots_to=(1_000, 2_000)), build(40, begin_ms=LATER_MS, snapshots_to=(40,))
    known = store(tmp_path, bundle_of(early, 3, 1_400), "known.tar")
    with stored(postgres, early) as (a, _), stored(postgres, late) as (b, _):
        import_all(b, trusted, [known])
        found = compared(spark, a, b, output=tmp_path / "out")
        assert (told(found)["only_in_a"], told(found)["only_in_b"]) == (1_202, 40)
        assert [(each.lacking, each.from_seq, each.to_seq) for each in found.written] == [
            ("b", 1, 2),
            ("b", 1_401, 2_600),
            ("a", 1, 40),
        ]
        for url, lacking in ((a, "a"), (b, "b")):
            import_all(url, trusted, [each.file for each in found.written if each.lacking == lacking])
        assert compared(spark, a, b).is_equal


def test_rows_that_do_not_hold_leave_nowhere(spark: SparkSession, postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    edits = {
        "payload-digest at seq 30": "UPDATE scheduler.scheduler_log SET payload = '{}' WHERE seq = 30",
        "gap at seq 20": "DELETE FROM scheduler.scheduler_log WHERE seq = 20",
        "does not lead to its checkpoint": "DELETE FROM scheduler.merkle_tile WHERE level = 0",
    }
    for said, edit in edits.items():
        with stored(postgres, build(40)) as (a, run), stored(postgres, build(9, begin_ms=LATER_MS)) as (b, _):
            run(edit)
            with pytest.raises(ChainDamagedError, match=said) as refused:
                compared(spark, a, b, output=tmp_path / said.partition(" ")[0])
        assert exit_code_of_error(refused.value) is ExitCode.TAMPERED
        assert not list(tmp_path.glob("*/to-b/*"))


def test_a_history_made_to_fit_under_an_old_tree_leaves_nowhere(
    spark: SparkSession, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    forged = build(40)
    forged.entry(40)["payload"] = forged.entry(40)["payload"][:-1] + ',"zz":"forged"}'
    forged.relink()
    fitting = forged.copy()
    fitting.store_tree()
    note = checkpoint_of(build(40)).replace("'", "''")
    with stored(postgres, forged) as (a, run), stored(postgres, build(9, begin_ms=LATER_MS)) as (b, _):
        run(f"UPDATE scheduler.merkle_head SET checkpoint = '{note}'")
        with pytest.raises(ChainDamagedError, match="tree at seq 40"):
            compared(spark, a, b, output=tmp_path)
        for level, index in forged.tiles:
            where = f"level = {level} AND tile_index = {index}"
            run(f"UPDATE scheduler.merkle_tile SET hashes = '\\x{fitting.tiles[level, index].hex()}' WHERE {where}")
        with pytest.raises(ChainDamagedError, match="tree does not lead to its checkpoint"):
            compared(spark, a, b, output=tmp_path)
        with pytest.raises(InvalidInputError, match="key"):
            compared(spark, a, b, output=tmp_path, signer=None)


def test_entries_that_no_checkpoint_covers_yet_are_told_and_stay_behind(
    spark: SparkSession, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    ledger = build(40)
    ledger.store_tree(30)
    with stored(postgres, ledger) as (a, run), stored(postgres, build(9, begin_ms=LATER_MS)) as (b, _):
        note = checkpoint_of(ledger, 30).replace("'", "''")
        run(f"UPDATE scheduler.merkle_head SET checkpoint = '{note}'")
        found = compared(spark, a, b, output=tmp_path)
    assert [each.to_seq for each in found.written] == [30, 9]
    assert told(found)["unsigned"] == 10


# --- archives -------------------------------------------------------------------------------------


def archived(url: str, folder: Path) -> Path:
    """All that is signed in a database, archived."""
    with PostgresLedger.connected(url) as ledger:
        keyring = Keyring([SIGNER.public_key])
        archive_by(ledger, ArchiveStore(str(folder)), SIGNER, keyring, file_here(url, str(folder)))
    return folder


def test_a_ledger_and_its_archive_are_one_history_until_somebody_rewrites_it(
    spark: SparkSession, postgres: EmbeddedPostgres, trusted: Path, tmp_path: Path
) -> None:
    early, late = build(600, snapshots_to=(300, 600)), build(650, snapshots_to=(300, 600, 640))
    identity = "INSERT INTO scheduler.ledger_identity VALUES (true, 'log.example')"
    with stored(postgres, early) as (url, run):
        run(identity)
        folder = archived(url, tmp_path / "archive")
        assert compared(spark, url, folder).is_equal
        assert compared(spark, url, folder, by_rows=True).is_equal
        run("UPDATE scheduler.scheduler_log SET payload = '{}' WHERE seq = 411")
        assert told(compared(spark, url, folder, by_rows=True))["first_difference"]["seq"] == 411
    with stored(postgres, late) as (url, run):
        run(identity)
        assert (told(compared(spark, folder, url))["only_in_b"], archived(url, folder)) == (50, folder)
    rewritten = build(700)
    rewritten.entry(333)["job_id"] = "another"
    rewritten.relink()
    rewritten.store_head()
    rewritten.store_tree()
    with stored(postgres, rewritten) as (url, _), stored(postgres) as (fresh_url, _):
        found = compared(spark, url, folder, output=tmp_path / "out")
        assert told(found)["first_difference"]["seq"] == 333
        assert (told(found)["only_in_a"], told(found)["only_in_b"]) == (61, 1)
        # What leaves an archive ends where a manifest ends.
        (repair,) = [each.file for each in found.written if each.lacking == "a"]
        assert repair.name == "acme-333-600.bundle.tar"
        (outcome,) = import_all(fresh_url, trusted, [repair])
        assert outcome.imported == 268


def test_an_archive_whose_rows_are_not_those_of_its_checkpoint_gives_nothing(
    spark: SparkSession, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    ledger = build(40, snapshots_to=(40,))
    with stored(postgres, ledger) as (url, run):
        run("INSERT INTO scheduler.ledger_identity VALUES (true, 'log.example')")
        folder = archived(url, tmp_path / "archive")
    (parquet,) = folder.glob("entries/**/*.parquet")
    data = parquet.read_bytes()
    parquet.write_bytes(data[:-200] + bytes(100) + data[-100:])
    with stored(postgres, build(9, begin_ms=LATER_MS)) as (url, _), pytest.raises(LedgerError) as refused:
        compared(spark, folder, url, output=tmp_path / "out")
    assert exit_code_of_error(refused.value) is ExitCode.TAMPERED
    assert not list(tmp_path.glob("out/*/*.tar"))


# --- three services -------------------------------------------------------------------------------


EVENTS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("cancel", {"reason": "no longer needed", "requestor": "a"}),
    ("events", {"type": "JobCompleted", "final_status": "ok"}),
    ("events", {"type": "JobFailed", "error": "disk", "fence_token": 7}),
)


def work(client: httpx.Client, number: int, jobs: int) -> None:
    """What one region writes of jobs that all of them know."""
    route, fields = EVENTS[number]
    for job in range(jobs):
        name = f"job-{job}"
        made = {"tenant_id": "acme", "job_id": name, "spec": {"made_by": number}}
        client.post("/v1/jobs", json=made).raise_for_status()
        if job % 3 != number:
            last = {"tenant_id": "acme", "durability": "GLOBAL", **fields}
            if route == "cancel":
                del last["durability"]
            client.post(f"/v1/jobs/{name}/{route}", json=last).raise_for_status()


def is_signed(client: httpx.Client) -> bool:
    """Whether the newest checkpoint covers all that is chained."""
    client.post("/v1/snapshots", json={"tenant_id": "acme"}).raise_for_status()
    head = client.get("/v1/chain/head", params={"tenant_id": "acme"}).raise_for_status().json()
    note = client.get("/v1/log/acme/checkpoint")
    seq = head["seq"] if "seq" in head else head["head_seq"]
    return note.status_code == 200 and int(note.text.split("\n")[1]) == seq


def test_three_regions_repaired_pair_by_pair_have_the_job_states_of_one_import(
    spark: SparkSession, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    signers = [private_keys.generate(tmp_path / f"signing-{number}.pem") for number in range(3)]
    for signer in (*signers, REPAIRER):
        (keys / f"{signer.key_id}.pem").write_text(signer.public_key_pem)
    with ExitStack() as stack:
        clients = []
        for number, signer in enumerate(signers):
            url = stack.enter_context(
                serving(
                    postgres,
                    tmp_path / f"data-{number}",
                    f"region_{number}",
                    signing={"key_uri": f"file:{signer.path}"},
                    bundle={"trusted_keys": keys},
                )
            )
            clients.append(stack.enter_context(httpx.Client(base_url=url, timeout=60, trust_env=False)))
            work(clients[number], number, 6)
        bundles = [
            store(tmp_path, client.post("/v1/bundles/export", json={"tenant_id": "acme"}).content, f"{number}.tar")
            for number, client in enumerate(clients)
        ]
        with fresh(postgres) as (url, sound):
            import_all(url, keys, bundles)
            expected = states(sound("acme"))
        urls = [postgres.service_url(f"region_{number}") for number in range(3)]
        for at, (a, b) in enumerate(((0, 1), (1, 2), (0, 2))):
            for number in (a, b):
                asyncio.run(until(lambda number=number: is_signed(clients[number]), "it is signed", 60))
            found = compared(spark, urls[a], urls[b], tenants=["acme"], output=tmp_path / str(at))
            assert not found.is_equal
            for lacking, number in (("a", a), ("b", b)):
                files = [each.file for each in found.written if each.lacking == lacking]
                if files:
                    sent = [("file", (file.name, file.read_bytes())) for file in files]
                    clients[number].post("/v1/bundles/import", files=sent).raise_for_status()
            again = compared(spark, urls[a], urls[b], output=tmp_path / f"{at}-again")
            assert again.is_equal
            assert again.written == []
        for number in range(3):
            assert folded(postgres, f"region_{number}") == expected
        assert compared(spark, urls[0], urls[1]).is_equal


def folded(postgres: EmbeddedPostgres, name: str) -> dict[str, Any]:
    """The states of the jobs of ``acme`` in a database."""

    async def rows() -> list[Any]:
        async with connected_to(postgres.superuser_url(name)) as connection:
            return list(
                await connection.fetch("SELECT * FROM scheduler.scheduler_log WHERE tenant_id = 'acme' ORDER BY seq")
            )

    return states(asyncio.run(rows()))


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("spark")
def test_the_command_tells_what_differs_and_writes_what_is_lacking(run_command: RunCommand, tmp_path: Path) -> None:
    a = store(tmp_path, bundle_of(build(30)), "a.tar")
    b = store(tmp_path, bundle_of(forked(9, fence_token=5), log_origin="other.example"), "b.tar")
    private_keys.generate(tmp_path / "key.pem")
    done = run_command("diff", a, b, "--json", "--out", "out", "--signing-key", f"file:{tmp_path / 'key.pem'}")

    assert done.returncode == ExitCode.INCOMPLETE, done.stderr
    found = json.loads(done.stdout)
    (tenant,) = found["tenants"]
    assert (found["equal"], tenant["only_in_a"], tenant["only_in_b"], tenant["conflict_count"]) == (False, 19, 1, 1)
    assert (tmp_path / "out/to-b/acme-1-30.bundle.tar").read_bytes() == a.read_bytes()
    assert (tmp_path / "out/to-a/acme-1-12.bundle.tar").read_bytes() == b.read_bytes()
