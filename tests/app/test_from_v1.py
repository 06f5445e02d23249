"""The log of a v1 scheduler becomes the beginning of a tenant: every row with its own HLC and link, or none."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import httpx
import pytest

from app.dev.embedded import DATABASE, EmbeddedPostgres
from app.store import v1_log
from cli import main
from ledger.bundle.format import PAYLOAD_BYTES_MAX
from signing.bundle.reader import BundleReader
from signing.private_keys import generate
from tests.app.service_thread import serving
from tests.app.v1_scheduler import (
    BEGAN_MS,
    INSERT_ROW,
    Fact,
    canonical_text,
    create,
    facts,
    jsonb_text,
    linked,
    store,
    v1_database,
)
from tests.conftest import execute

Row = tuple[Any, ...]
PAGE = (Path(__file__).parents[2] / "docs" / "from-v1.md").read_text()


class Old(NamedTuple):
    """A v1 database without constraints, as hostile hands leave it, and a key for bundles."""

    url: str
    key: Path
    trusted: Path


@pytest.fixture(scope="module")
def old(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Old]:
    folder = tmp_path_factory.mktemp("v1")
    signer = generate(folder / "v1.pem")
    (folder / "v1.pub.pem").write_text(signer.public_key_pem)
    with v1_database(postgres, "v1_scheduler") as url:
        asyncio.run(create(url))
        nullable = ", ".join(
            f"ALTER {name} DROP NOT NULL" for name in ("t_hlc", "job_id", "action", "chain_link", "payload")
        )
        asyncio.run(execute(url, f"ALTER TABLE scheduler.scheduler_log {nullable}"))
        asyncio.run(execute(url, "DROP INDEX scheduler.idx_scheduler_log_hlc, scheduler.idx_scheduler_log_tenant_hlc"))
        yield Old(url, folder / "v1.pem", folder / "v1.pub.pem")


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str | Path, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["tally", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert ended.value.code == code, said
        return said.out if code in (0, 3) else said.err

    return run


def from_v1(old: Old, tenant: str, output: Path, *more: str) -> list[str | Path]:
    return ["bundle", "from-v1", "--dsn", old.url, "-t", tenant, "--key", old.key, "-o", output, *more]


def rows_in(path: Path) -> list[Row]:
    with BundleReader.open(path) as reader:
        return [row for batch in reader.entry_batches() for row in batch]


@pytest.fixture(scope="module")
def rows(old: Old) -> list[Row]:
    """The chain of ``Acme Ltd``, a merge of two nodes, so that HLCs go back. Another tenant wrote in between, and
    aborted transactions left gaps."""
    chain = [*facts(90), *facts(60, node="offline-2")[120:]]
    chain = [fact._replace(job_id=f"b-{fact.job_id}") if "offline" in fact.t_hlc else fact for fact in chain]
    rows = linked(chain)
    asyncio.run(_store_among_others(old.url, rows))
    return rows


def test_every_row_becomes_an_entry_with_its_hlc_and_link_and_the_same_rows_give_the_same_bytes(
    old: Old, rows: list[Row], tally: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first.tar", tmp_path / "second.tar"
    made = json.loads(tally(*from_v1(old, "Acme Ltd", first, "--as", "acme", "--json")))
    assert (made["entry_count"], made["payload_form"], made["fault"]) == (480, "canonical", None)
    monkeypatch.setattr(v1_log, "ROWS_A_BATCH", 7)
    tally(*from_v1(old, "Acme Ltd", second, "--as", "acme"))
    assert first.read_bytes() == second.read_bytes()
    assert [(row[1], row[5], row[6], row[8], row[9]) for row in rows_in(first)] == [row[:5] for row in rows]


def test_the_steps_of_the_page_make_a_v1_chain_the_beginning_of_a_tenant(
    postgres: EmbeddedPostgres, old: Old, rows: list[Row], tally: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("V1_DSN", old.url)
    steps = re.findall(r"^   ```(sh|toml)\n(.*?)^   ```", PAGE, re.MULTILINE | re.DOTALL)
    with ExitStack() as stack:
        for language, text in steps:
            if language == "toml":
                settings = tomllib.loads(text)
                url = stack.enter_context(serving(postgres, tmp_path / "data", "from_v1", **settings))
                monkeypatch.setenv("TALLY_URL", url)
                continue
            for line in text.splitlines():
                command, *arguments = map(os.path.expandvars, shlex.split(line))
                if command == "tally":
                    tally(*arguments)
                else:
                    subprocess.run([command, *arguments], check=True)
        assert [language for language, _ in steps] == ["sh", "sh", "toml", "sh"]
        with httpx.Client(base_url=url, timeout=60, params={"tenant_id": "acme"}) as client:
            job = client.get("/v1/jobs/job-0004").json()
            assert (job["status"], job["error"], job["last_hlc"]) == ("FAILED", "exit 1", rows[19][0])
            assert client.get("/v1/jobs/job-0003").json()["status"] == "COMPLETED"
            events = client.get("/v1/jobs/b-job-0030/events").json()["items"]
            assert events[0]["payload"]["n"] == 30
            httpx.post(f"{url}/v1/jobs", json={"tenant_id": "acme", "job_id": "next"}).raise_for_status()
            entries = client.get("/v1/chain/entries", params={"from_seq": 1, "limit": 1000}).json()["items"]
    assert [entry["chain_link"] for entry in entries[:480]] == [row[4] for row in rows]
    assert [entry["link_version"] for entry in entries] == [1] * 480 + [2]
    assert entries[480]["prev_chain_link"] == rows[-1][4]


async def _store_among_others(url: str, rows: list[Row]) -> None:
    other = linked(facts(30))
    connection = await asyncpg.connect(url)
    try:
        for at, row in enumerate(rows):
            await connection.execute(INSERT_ROW, *row, "Acme Ltd")
            if at % 4 == 0:
                await connection.execute("SELECT nextval('scheduler.scheduler_log_id_seq')")
                await connection.execute(INSERT_ROW, *other[at // 4], "other")
        await connection.execute(
            "INSERT INTO scheduler.chain_heads VALUES ($1, $2, $3)", "Acme Ltd", rows[-1][4], rows[-1][0]
        )
    finally:
        await connection.close()


ALIKE: tuple[Any, ...] = ({}, [], "text", 7, None)
"""Payloads whose canonical form is also what PostgreSQL prints."""


@pytest.mark.parametrize("text", [canonical_text, jsonb_text])
def test_the_form_in_which_payloads_were_hashed_is_found_by_the_first_row_that_shows_it(
    text: Callable[[Any], str], old: Old, tally: Any, tmp_path: Path
) -> None:
    tenant, name = text.__name__, text.__name__.removesuffix("_text")
    chain = facts(3)
    alike = [fact._replace(payload=payload) for fact, payload in zip(chain, ALIKE, strict=False)]
    rows = linked([*alike, *chain[len(ALIKE) :]], text)
    asyncio.run(store(old.url, tenant, rows))
    made = json.loads(tally(*from_v1(old, tenant, tmp_path / "b.tar", "--json")))
    assert (made["payload_form"], made["to_chain_link"]) == (name, rows[-1][4])
    tally("verify-bundle", tmp_path / "b.tar", "--keys", old.trusted, "--no-state")


def test_rows_of_both_forms_are_no_chain(old: Old, tally: Any, tmp_path: Path) -> None:
    chain = facts(2)
    rows = linked(chain, lambda payload: jsonb_text(payload) if payload == {"worker": 7} else canonical_text(payload))
    asyncio.run(store(old.url, "both", rows))
    assert "the row was changed" in tally(*from_v1(old, "both", tmp_path / "b.tar"), code=2)


def test_a_long_payload_is_read_by_itself_and_one_beyond_the_bound_is_refused(
    old: Old, tally: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = facts(3)
    chain[4] = chain[4]._replace(payload={"log": "x" * 200_000})
    asyncio.run(store(old.url, "long", linked(chain)))
    tally(*from_v1(old, "long", tmp_path / "b.tar"))
    assert len(rows_in(tmp_path / "b.tar")[4][11]) > 200_000
    monkeypatch.setattr("ledger.bundle.v1.PAYLOAD_BYTES_MAX", 100_000)
    assert "has a payload of 2000" in tally(*from_v1(old, "long", tmp_path / "c.tar"), code=1)
    assert PAYLOAD_BYTES_MAX >= 1 << 20


def _changed(column: str, value: str) -> str:
    return f"UPDATE scheduler.scheduler_log SET {column} = {value} WHERE id = (SELECT id FROM numbered WHERE n = 6)"


BROKEN = {
    "a payload edited": (_changed("payload", """'{"n": 9}'"""), "the row was changed"),
    "a payload that is NULL": (_changed("payload", "NULL"), "payload of row id"),
    "a payload of the other kind of null": (_changed("payload", "'null'"), "the row was changed"),
    "an action edited": (_changed("action", "'FAIL'"), "the row was changed"),
    "an action that is NULL": (_changed("action", "NULL"), "action of row id"),
    "a job edited": (_changed("job_id", "'job-x'"), "the row was changed"),
    "a time edited": (_changed("t_hlc", "'1:0:a'"), "the row was changed"),
    "a time of a megabyte": (_changed("t_hlc", "repeat('1', 1 << 20)"), "the row was changed"),
    "a link edited": (_changed("chain_link", "repeat('0', 64)"), "the row was changed"),
    "a link in capitals": (_changed("chain_link", "upper(chain_link)"), "the row was changed"),
    "a link that is NULL": (_changed("chain_link", "NULL"), "chain_link of row id"),
    "a previous link edited": (_changed("prev_chain_link", "repeat('0', 64)"), "as the link before it"),
    "a previous link removed": (_changed("prev_chain_link", "NULL"), "names None as the link before it"),
    "a row removed": (
        "DELETE FROM scheduler.scheduler_log WHERE id = (SELECT id FROM numbered WHERE n = 6)",
        "before it",
    ),
    "the first row removed": (
        "DELETE FROM scheduler.scheduler_log WHERE id = (SELECT id FROM numbered WHERE n = 1)",
        "and None is there",
    ),
    "the tail cut": (
        "DELETE FROM scheduler.scheduler_log WHERE id IN (SELECT id FROM numbered WHERE n > 10)",
        "rows were removed or added",
    ),
    "the head removed": (
        "DELETE FROM scheduler.chain_heads WHERE tenant_id IN (SELECT tenant_id FROM numbered)",
        "chain_heads has no row",
    ),
    "the head moved": (
        "UPDATE scheduler.chain_heads SET head_hlc = '1:0:a' WHERE tenant_id IN (SELECT tenant_id FROM numbered)",
        "rows were removed or added",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_chain_that_was_changed_is_refused_and_names_the_row(what: str, old: Old, tally: Any, tmp_path: Path) -> None:
    tenant, output = f"broken-{[*BROKEN].index(what)}", tmp_path / "b.tar"
    statement, said = BROKEN[what]
    rows = linked(facts(3))
    asyncio.run(store(old.url, tenant, rows))
    numbered = (
        "WITH numbered AS (SELECT id, tenant_id, row_number() OVER (ORDER BY id) AS n FROM scheduler.scheduler_log"
        f" WHERE tenant_id = '{tenant}') "
    )
    asyncio.run(execute(old.url, numbered + statement))
    assert said in tally(*from_v1(old, tenant, output), code=2)
    assert not output.exists()
    intact = {"the first row removed": 0, "the tail cut": 10, "the head removed": 12, "the head moved": 12}.get(what, 5)
    if intact == 0:
        tally(*from_v1(old, tenant, output, "--up-to-fault"), code=2)
        assert not output.exists()
        return
    made = json.loads(tally(*from_v1(old, tenant, output, "--up-to-fault", "--json"), code=3))
    assert (made["entry_count"], made["to_chain_link"]) == (intact, rows[intact - 1][4])
    assert said in made["fault"]


BEYOND = {
    "an action of no v1": (Fact(f"{BEGAN_MS}:9:a", "job-1", "PROPOSE_ACCEPTED", {}), "has the action"),
    "a time of no form": (Fact("yesterday", "job-1", "ENQUEUE", {}), "is not an HLC"),
    "a node of no form": (Fact(f"{BEGAN_MS}:9:Node_1", "job-1", "ENQUEUE", {}), "is not an HLC"),
    "a job of no form": (Fact(f"{BEGAN_MS}:9:a", "job 1", "ENQUEUE", {}), "is not a job id"),
    "an HLC twice": (Fact(f"{BEGAN_MS}:0:scheduler-prod-01", "job-1", "ENQUEUE", {}), "as an earlier row has"),
}


@pytest.mark.parametrize("what", BEYOND)
def test_a_row_that_no_ledger_can_hold_is_refused_and_named(what: str, old: Old, tally: Any, tmp_path: Path) -> None:
    fact, said = BEYOND[what]
    tenant = f"beyond-{[*BEYOND].index(what)}"
    asyncio.run(store(old.url, tenant, linked([*facts(1), fact, *facts(2)[4:]])))
    assert said in tally(*from_v1(old, tenant, tmp_path / "b.tar"), code=1)
    made = json.loads(tally(*from_v1(old, tenant, tmp_path / "b.tar", "--up-to-fault", "--json"), code=3))
    assert made["entry_count"] == 4


def test_a_number_or_a_text_without_a_canonical_form_is_refused(old: Old, tally: Any, tmp_path: Path) -> None:
    rows = linked(facts(1), jsonb_text)
    asyncio.run(store(old.url, "huge", rows))
    asyncio.run(execute(old.url, "UPDATE scheduler.scheduler_log SET payload = '1e400' WHERE tenant_id = 'huge'"))
    assert "cannot be an entry: its payload" in tally(*from_v1(old, "huge", tmp_path / "b.tar"), code=1)


def test_what_is_no_v1_log_is_refused_by_name(postgres: EmbeddedPostgres, old: Old, tally: Any, tmp_path: Path) -> None:
    output = tmp_path / "b.tar"
    assert "has no row of tenant 'nobody'" in tally(*from_v1(old, "nobody", output), code=1)
    assert "choose one with --as" in tally(*from_v1(old, "Acme Ltd", output), code=1)
    nowhere = old._replace(url="postgresql://127.0.0.1:1/none")
    assert "cannot be read from PostgreSQL" in tally(*from_v1(nowhere, "acme", output), code=1)
    ours = old._replace(url=postgres.superuser_url(DATABASE))
    assert "take tally bundle export" in tally(*from_v1(ours, "acme", output), code=1)
    none = old._replace(url=postgres.superuser_url("postgres"))
    assert "is not there" in tally(*from_v1(none, "acme", output), code=1)
    assert not output.exists()


def test_the_payload_of_the_canonical_form_is_what_is_stored(old: Old, tally: Any, tmp_path: Path) -> None:
    chain = facts(1)
    asyncio.run(store(old.url, "stored", linked(chain)))
    tally(*from_v1(old, "stored", tmp_path / "b.tar"))
    assert [row[11] for row in rows_in(tmp_path / "b.tar")] == [canonical_text(fact.payload) for fact in chain]
