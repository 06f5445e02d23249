"""Several ledgers in one command: tenants stay apart, rows name their ledger, and one that is away is told."""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from app.dev.embedded import EmbeddedPostgres
from ledger.errors import ConfigurationError, InvalidInputError
from ledger.exit_code import ExitCode
from pipeline.cli.ledgers import (
    FILE_BYTES_MAX,
    named_ledgers,
    opened_pairs,
    opened_with_archives,
    parse_ledger,
    read_ledgers,
    sources,
)
from pipeline.places import OpenPlace, parse_place
from pipeline.places.ledgers import OpenLedgers
from pipeline.places.protocol import ChainName
from pipeline.verify import verify
from signing import private_keys
from tests.app.chain_builder import remove
from tests.conftest import Database, connected_to, fresh_database
from tests.ledger.ledger_in_memory import SIGNER
from tests.pipeline.archived_ledgers import RING, archive_here, days, ledger_of, query, store
from tests.pipeline.conftest import RunCommand
from tests.pipeline.test_report_cli import ledger_of_acts, ledger_of_jobs

AWAY = "postgresql://reader:hunter2@127.0.0.1:1/away"
"""A database that nobody serves."""


class Ledgers(NamedTuple):
    """Two databases that both have a tenant acme: of 10 entries in eu, of 20 in us."""

    eu: Database
    us: Database

    @property
    def options(self) -> tuple[str, ...]:
        """As a command takes them."""
        return "--dsn", f"eu={self.eu.service_url}", "--dsn", f"us={self.us.service_url}"


@pytest.fixture
def ledgers(database: Database, postgres: EmbeddedPostgres, tmp_path: Path) -> Iterator[Ledgers]:
    of_eu, of_us = ledger_of_jobs("acme"), ledger_of("acme", days(20))
    for ledger in (of_eu, of_us):
        ledger.store_jobs()
    (tmp_path / "keys.pem").write_text(SIGNER.public_key_pem)
    private_keys.generate(tmp_path / "key.pem")
    with fresh_database(postgres, name="test_pipeline_us") as us:
        asyncio.run(store(database, of_eu, ledger_of_acts(), log_origin="eu.example"))
        asyncio.run(store(us, of_us, log_origin="us.example"))
        yield Ledgers(database, us)


def chains(told: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["ledger"], each["tenant_id"]) for each in told["tenants"]]


# --- names ----------------------------------------------------------------------------------------


def test_a_ledger_is_named_before_its_url_and_a_url_or_a_folder_with_an_equals_sign_is_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "month=11").mkdir()
    named = parse_ledger("--dsn", "eu=postgresql://reader:secret@db/eu?sslmode=require")
    assert (named.name, str(named)) == ("eu", "eu=postgresql://reader@db/eu")
    assert parse_ledger("--dsn", "postgresql://reader@db/eu?sslmode=require").name is None
    assert str(parse_ledger("--archive", "month=11").place) == str(tmp_path / "month=11")
    assert parse_ledger("--archive", "eu=s3://bucket/eu").name == "eu"


@pytest.mark.parametrize(
    "text", ["password=hunter2", "eu=hunter2@db", "host=db password=hunter2", "eu=postgres:hunter2"]
)
def test_no_error_about_the_name_of_a_ledger_repeats_a_password(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_ledger("--dsn", text)
    assert "hunter2" not in str(raised.value)
    (tmp_path / "ledgers").write_text(f"# two\n\neu=postgresql://db/eu\n{text}\n")
    with pytest.raises(ConfigurationError, match=r"ledgers, line 4, names no ledger: write NAME=URL") as raised:
        read_ledgers(tmp_path / "ledgers")
    assert "hunter2" not in str(raised.value)


def test_a_file_of_ledgers_has_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "ledgers"
    file.write_text("# of one region\neu=postgresql://db/eu\r\n\n  s3://ledger-archive/eu\n")
    assert [*map(str, read_ledgers(file))] == ["eu=postgresql://db/eu", "s3://ledger-archive/eu"]
    assert [each.option for each in read_ledgers(file)] == ["--dsn", "--archive"]
    for content, said in (
        (b"# none\n", "names no ledger"),
        (b"\xff", "cannot be read"),
        (b"#" * (FILE_BYTES_MAX + 1), "too much for file of ledgers"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigurationError, match=said):
            read_ledgers(file)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_ledgers(tmp_path)


def test_a_command_reads_so_many_ledgers_and_no_more() -> None:
    with pytest.raises(InvalidInputError, match="at most 256"):
        named_ledgers(["postgresql://db/one"] * 257, None, None)


def test_the_name_of_a_chain_is_the_same_after_it_was_text() -> None:
    for name in (ChainName(None, "acme"), ChainName("eu.example/a b", "acme"), ChainName("eu", "a/b c")):
        assert ChainName.parse(str(name)) == name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["diff"], "name two ledgers as A and B, or many with --dsn, --archive and --ledgers"),
        (["diff", AWAY], "name two ledgers as A and B"),
        (["diff", "--dsn", AWAY], "name two ledgers as A and B"),
        (["diff", AWAY, AWAY, "--dsn", AWAY], "name two ledgers as A and B"),
        (["diff", "--dsn", f"eu={AWAY}", "--dsn", f"eu={AWAY}", "--dsn", f"us={AWAY}"], "give each name twice"),
        (
            ["archive", "--dest", "out", "--ledgers", "ledgers"],
            "ledgers names an archive, and this command reads databases",
        ),
        (["verify", "--ledgers", "ledgers", "--bundle", "t.tar"], "bundles are read alone"),
        (["report", "--dest", "out", "--ledgers", "nowhere"], "--ledgers nowhere cannot be read"),
    ],
)
def test_ledgers_that_do_not_go_together_are_refused_in_one_line(
    run_command: RunCommand, tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "ledgers").write_text("eu=s3://ledger-archive/eu\n")
    refused = run_command(*arguments)
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (ExitCode.COULD_NOT_RUN, "", 1)
    assert said in refused.stderr
    assert "hunter2" not in refused.stderr


# --- pairs ----------------------------------------------------------------------------------------


@pytest.fixture
async def archives(database: Database, tmp_path: Path) -> tuple[Path, Path]:
    """Archives of one ledger, before and after it went on."""
    acme = ledger_of("acme", days(10))
    await store(database, acme, log_origin="eu.example")
    archive_here(database, tmp_path / "older")
    await store(database, ledger_of("acme", days(10, 10), start=acme))
    archive_here(database, tmp_path / "newer")
    return tmp_path / "older", tmp_path / "newer"


def paired(*options: str) -> dict[str | None, tuple[str, str]]:
    """By name, the two places that are compared."""
    texts = [options[at : at + 2] for at in range(0, len(options), 2)]
    dsns, urls = ([text for option, text in texts if option == each] for each in ("--dsn", "--archive"))
    with opened_pairs(named_ledgers(dsns, urls, None)) as (of_a, of_b, unread):
        assert not unread
        return {name: (str(a), str(of_b.ledgers()[name])) for name, a in of_a.ledgers().items()}


def test_each_database_is_compared_with_the_archive_of_its_name_in_whatever_order_they_are_given(
    database: Database, archives: tuple[Path, Path]
) -> None:
    dsn, shown, (older, newer) = database.service_url, str(parse_place(database.service_url)), map(str, archives)
    given = ("--dsn", f"eu={dsn}", "--dsn", f"us={dsn}", "--archive", f"us={older}", "--archive", f"eu={newer}")

    assert paired(*given) == {"eu": (shown, newer), "us": (shown, older)}
    with opened_with_archives(sources([f"eu={dsn}", f"us={dsn}"], [f"us={older}", f"eu={newer}"], *[None] * 4)) as read:
        assert read[1] is not None
        assert {name: str(each) for name, each in read[1].ledgers().items()} == {"eu": newer, "us": older}
    # Without a name it has that of its log.
    assert paired("--dsn", dsn, "--archive", f"eu.example={older}") == {"eu.example": (shown, older)}


def test_two_sets_of_ledgers_are_compared_by_names_that_are_given_twice(
    database: Database, archives: tuple[Path, Path]
) -> None:
    older, newer = map(str, archives)
    dsn, shown = database.service_url, str(parse_place(database.service_url))

    of_copies = [f"eu={older}", f"us={newer}", f"us={older}", f"eu={newer}"]
    assert paired(*(each for text in of_copies for each in ("--archive", text))) == {
        "eu": (older, newer),
        "us": (newer, older),
    }
    assert paired("--dsn", f"eu={dsn}", "--dsn", f"eu={dsn}") == {"eu": (shown, shown)}
    for odd in ([f"eu={older}", f"eu={newer}", f"us={older}"], [f"eu={older}", f"eu={newer}", f"eu={older}"]):
        with pytest.raises(
            InvalidInputError, match=r"give each name twice, first with the ledger of the one set \(a\)"
        ):
            paired(*(each for text in odd for each in ("--archive", text)))


def test_of_ledgers_of_one_kind_with_names_of_their_own_the_first_is_compared_with_each_other(
    archives: tuple[Path, Path],
) -> None:
    older, newer = map(str, archives)

    found = paired("--archive", f"eu={older}", "--archive", f"us={newer}", "--archive", f"ap={older}")

    assert found == {"us": (older, newer), "ap": (older, older)}


# --- commands -------------------------------------------------------------------------------------


def test_ledgers_are_verified_together_and_one_that_is_away_is_named(
    spark: SparkSession, run_command: RunCommand, ledgers: Ledgers, tmp_path: Path
) -> None:
    asyncio.run(
        query(ledgers.us, "UPDATE scheduler.scheduler_log SET payload = (payload::text || ' ')::json WHERE seq = 7")
    )
    lines = (f"eu={ledgers.eu.service_url}", f"us={ledgers.us.service_url}", f"ap={AWAY}")
    (tmp_path / "ledgers").write_text("\n".join(lines))
    found = run_command(
        *("verify", "--ledgers", "ledgers", "--keys", "keys.pem", "--tenant", "acme"),
        *("--breaks", tmp_path / "breaks", "--json"),
    )
    assert found.returncode == ExitCode.TAMPERED, found.stderr
    told = json.loads(found.stdout)
    assert chains(told) == [("eu", "acme"), ("us", "acme")]
    assert [(each["valid"], each["entries_checked"], each["breaks"]) for each in told["tenants"]] == [
        (True, 10, {}),
        (False, 20, {"payload-digest": 1}),
    ]
    ((away, error),) = [(each["ledger"], each["error"]) for each in told["unread"]]
    assert (away, "does not answer" in error, f"ledger ap was not read: {error}" in found.stderr) == ("ap", True, True)
    assert "hunter2" not in found.stdout + found.stderr
    rows = ds.dataset(str(tmp_path / "breaks"), format="parquet").to_table().to_pylist()
    assert [(row["ledger"], row["tenant_id"], row["seq"]) for row in rows] == [("us", "acme", 7)]

    whole = run_command("verify", "--dsn", f"eu={ledgers.eu.service_url}", "--dsn", AWAY, "--keys", "keys.pem")
    assert whole.returncode == ExitCode.COULD_NOT_RUN, "which is graver than that the others are whole"
    assert "eu/acme" in whole.stdout
    assert "ledger postgresql://reader@127.0.0.1:1/away was not read" in whole.stderr
    none = run_command("verify", "--dsn", f"ap={AWAY}", "--keys", "keys.pem")
    assert (none.returncode, none.stdout) == (ExitCode.COULD_NOT_RUN, "")


def test_two_ledgers_take_as_many_jobs_of_spark_as_one(spark: SparkSession, ledgers: Ledgers) -> None:
    jobs = []
    with parse_place(ledgers.eu.service_url).open() as eu, parse_place(ledgers.us.service_url).open() as us:
        some: list[dict[str | None, OpenPlace]] = [{"eu": eu}, {"eu": eu, "us": us}]
        for number, places in enumerate(some):
            spark.sparkContext.setJobGroup(f"ledgers-{number}", "")
            verified = verify(spark, OpenLedgers(places), keyring=RING)
            assert [each["ledger"] for each in verified.objects if each["tenant_id"] == "acme"] == [*places]
            assert all(each["valid"] for each in verified.objects)
            verified.close()
            jobs.append(len(spark.sparkContext.statusTracker().getJobIdsForGroup(f"ledgers-{number}")))
    spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    assert jobs[0] == jobs[1] > 0


def test_ledgers_without_names_have_those_of_their_logs_and_each_log_is_remembered(
    run_command: RunCommand, spark: SparkSession, ledgers: Ledgers, tmp_path: Path
) -> None:
    (tmp_path / "kept").write_text(asyncio.run(_checkpoint(ledgers.us)))
    options = ("--dsn", ledgers.eu.service_url, "--dsn", ledgers.us.service_url, "--keys", "keys.pem", "--json")
    first = run_command("verify", *options, "--checkpoint", "kept")
    assert first.returncode == ExitCode.FINE, first.stderr
    assert chains(json.loads(first.stdout)) == [
        ("eu.example", "_system"),
        ("eu.example", "acme"),
        ("us.example", "acme"),
    ]
    compared = {each["ledger"]: each["compared_with"] for each in json.loads(first.stdout)["tenants"]}
    assert compared == {"eu.example": None, "us.example": "file"}
    other = ledger_of("other", days(10))
    other.store_jobs()
    asyncio.run(store(ledgers.us, other, log_origin="us.example"))
    asyncio.run(query(ledgers.us, "DELETE FROM scheduler.merkle_head WHERE tenant_id = 'acme'"))
    rest = json.loads(run_command("verify", *options).stdout)
    assert not any(each["breaks"] for each in rest["tenants"]), "acme of us, without a log, is not compared with eu's"
    asyncio.run(_remove_acme(ledgers.us))
    again = run_command("verify", *options)
    assert again.returncode == ExitCode.TAMPERED, again.stderr
    assert [each["log"] for each in json.loads(again.stdout)["gone"]] == ["us.example/acme"], "acme of eu is there"

    twice = run_command("verify", "--dsn", ledgers.eu.service_url, "--dsn", ledgers.eu.service_url)
    assert (twice.returncode, "two ledgers are named 'eu.example'" in twice.stderr) == (1, True), twice.stderr


async def _remove_acme(database: Database) -> None:
    async with connected_to(database.superuser_url) as connection:
        await connection.execute("SET session_replication_role = replica")
        await remove(connection, "acme", "batch_snapshot", "jobs")


async def _checkpoint(database: Database) -> str:
    async with connected_to(database.superuser_url) as connection:
        note: str = await connection.fetchval("SELECT checkpoint FROM scheduler.merkle_head WHERE tenant_id = 'acme'")
        return note


def test_each_ledger_has_its_archive_and_all_pairs_are_compared(
    run_command: RunCommand, spark: SparkSession, ledgers: Ledgers, tmp_path: Path
) -> None:
    keys = ("--keys", "keys.pem", "--keys", "key.pem")
    archive = ("archive", "--dest", "archives", "--signing-key", str(tmp_path / "key.pem"), "--keys", "keys.pem")
    done = run_command(*archive, *ledgers.options, "--dsn", f"ap={AWAY}", "--tenant", "acme", "--json")
    assert (done.returncode, done.stdout != "") == (ExitCode.COULD_NOT_RUN, True), done.stderr
    told = json.loads(done.stdout)
    assert [(each["ledger"], each["tenant_id"], each["to_seq"]) for each in told["tenants"]] == [
        ("eu", "acme", 10),
        ("us", "acme", 20),
    ]
    assert [each["ledger"] for each in told["unread"]] == ["ap"]
    assert sorted(path.name for path in (tmp_path / "archives").iterdir()) == ["eu", "us"]
    archives = ("--archive", "eu=archives/eu", "--archive", "us=archives/us")
    verified = run_command("verify", *archives, *keys, "--no-state", "--json")
    assert verified.returncode == ExitCode.FINE, verified.stderr
    assert chains(json.loads(verified.stdout)) == [("eu", "acme"), ("us", "acme")]

    same = run_command("diff", *ledgers.options, *archives, "--tenant", "acme", "--json")
    assert same.returncode == ExitCode.FINE, same.stderr
    assert [each["ledger"] for each in json.loads(same.stdout)["ledgers"]] == ["eu", "us"]
    swapped = ("--dsn", f"us={ledgers.eu.service_url}", "--dsn", f"eu={ledgers.us.service_url}")
    sets = json.loads(run_command("diff", *ledgers.options, *swapped, "--tenant", "acme", "--json").stdout)
    assert chains(sets) == [("eu", "acme"), ("us", "acme")]
    assert [(each["only_in_a"], each["only_in_b"]) for each in sets["tenants"]] == [(10, 20), (20, 10)]
    regions = run_command("diff", *ledgers.options, "-t", "acme", "--out", "to", "--signing-key", "key.pem", "--json")
    assert regions.returncode == ExitCode.INCOMPLETE, regions.stderr
    told = json.loads(regions.stdout)
    ((pair,), (acme,)) = told["ledgers"], told["tenants"]
    assert (pair["ledger"], pair["a"], pair["b"]) == ("us", *(f"postgresql://{url}" for url in _shown(ledgers)))
    assert (acme["ledger"], acme["only_in_a"], acme["only_in_b"]) == ("us", 10, 20)
    assert sorted(path.parent.name for path in (tmp_path / "to").rglob("*.tar")) == ["us", "us"]
    odd = run_command("diff", *ledgers.options, "--archive", "eu=archives/eu")
    assert (odd.returncode, "'us' is the name of a database or of an archive alone" in odd.stderr) == (1, True)


def _shown(ledgers: Ledgers) -> list[str]:
    return [str(parse_place(each.service_url)).removeprefix("postgresql://") for each in ledgers]


def test_a_report_on_ledgers_names_the_ledger_in_every_row(
    run_command: RunCommand, spark: SparkSession, ledgers: Ledgers, tmp_path: Path
) -> None:
    made = run_command("report", "--dest", "out", *ledgers.options, "--dsn", f"ap={AWAY}", "--json")
    assert made.returncode == ExitCode.COULD_NOT_RUN, made.stderr
    told = json.loads(made.stdout)
    assert (told["read"]["ledgers"], [each["ledger"] for each in told["read"]["unread"]]) == (["eu", "us"], ["ap"])
    assert (told["read"]["tenants"], told["read"]["entries"]) == (2, 30)
    rows = {
        name: list(csv.DictReader((tmp_path / "out" / "csv" / f"{name}.csv").open()))
        for name in ("ledger", "tenants", "acts", "longest")
    }
    assert [(row["ledger"], row["tenant_id"], row["entries"]) for row in rows["ledger"]] == [
        ("eu", "acme", "10"),
        ("us", "acme", "20"),
    ]
    assert [(row["ledger"], row["tenant_id"], row["created"]) for row in rows["tenants"]] == [("eu", "acme", "4")]
    assert [(row["ledger"], row["tenant_id"], row["acts"]) for row in rows["acts"]] == [("eu", "acme", "2")]
    assert {(row["ledger"], row["tenant_id"]) for row in rows["longest"]} == {("eu", "acme")}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "eu/acme" in page
    assert "us/acme" in page
    assert "hunter2" not in page + made.stdout + made.stderr
    refused = run_command("report", "--dest", "out", *ledgers.options, "--console", "https://eu.example")
    assert "--console leads to one service" in refused.stderr
