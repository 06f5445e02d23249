"""What a session with PostgreSQL begins with, whatever its login, its database or its address says."""

from __future__ import annotations

import ast
import ctypes
import re
from pathlib import Path

import asyncpg
import pytest

import app
from app.dev.account import find_package
from app.read import checking
from app.runtime.postgres import NAMES, RELIED_UPON, parse_address
from app.store import chaining, following, reads, sessions
from app.store.jobs.order import ListRange
from app.store.sessions import AT_A_NODE
from ledger.errors import ConfigurationError, StartRefusedError
from pipeline.places import statements
from tests.app.chains import Chains, numbers
from tests.app.conftest import RunNode
from tests.app.starting import assert_no_start, write
from tests.conftest import Database

OTHERWISE = {
    "search_path": "pg_temp",
    "standard_conforming_strings": "off",
    "DateStyle": "'German, DMY'",
    "IntervalStyle": "iso_8601",
    "TimeZone": "'Asia/Kolkata'",
    "bytea_output": "escape",
    "extra_float_digits": "-15",
    "array_nulls": "off",
    "transform_null_equals": "on",
    "quote_all_identifiers": "on",
    "row_security": "on",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "statement_timeout": "'30s'",
    "transaction_timeout": "'30s'",
    "lock_timeout": "'30s'",
    "idle_in_transaction_session_timeout": "'30s'",
    "idle_session_timeout": "'30s'",
    "synchronous_commit": "off",
}
"""Of each setting that the ledger sets, another value."""


ROOT = Path(app.__file__).parents[1]


def test_nothing_but_the_module_of_sessions_opens_a_connection() -> None:
    opening = {
        str(path.relative_to(ROOT))
        for package in ("app", "cli", "objects", "pipeline", "signing", "terminal", "wal")
        for path in (ROOT / package).rglob("*.py")
        if "asyncpg" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in ("asyncpg.connect", "asyncpg.create_pool"))
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "asyncpg"
            and {"connect", "create_pool"} & {each.name for each in node.names}
        )
    }
    assert opening == {"app/store/sessions.py"}


async def for_the_database(superuser: asyncpg.Connection, change: str) -> None:
    name = await superuser.fetchval("SELECT current_database()")
    await superuser.execute(f"ALTER DATABASE {name} {change}")


async def test_a_node_works_whatever_its_database_or_login_sets(
    run_node: RunNode, superuser: asyncpg.Connection, database: Database, chains: Chains
) -> None:
    assert {*OTHERWISE} == {*RELIED_UPON, "synchronous_commit"} - {"session_replication_role"}
    for name, value in OTHERWISE.items():
        await for_the_database(superuser, f"SET {name} = {value}")
    async with run_node() as service:
        await write(service, 1, 2)
    assert numbers(await chains.sound("acme")) == [1, 2]
    opened = (
        await sessions.connect(database.service_url),
        await sessions.connect(database.service_url, AT_A_NODE),
        await chaining.connect(database.service_url, 10, 10),
        await following.connect(database.service_url, 10),
    )
    own = {"lock_timeout", "idle_in_transaction_session_timeout", "synchronous_commit"}
    for connection in opened:
        found = {name: await connection.fetchval(f"SHOW {name}") for name in RELIED_UPON if name not in own}
        assert found == {name: value for name, value in RELIED_UPON.items() if name not in own}
    commits = [await connection.fetchval("SHOW synchronous_commit") for connection in opened]
    assert commits == ["on", "on", "on", "off"], "what is followed is followed again after a crash"
    for connection in opened:
        await connection.close()


async def test_a_session_of_a_node_plans_what_it_reads_once_and_not_for_each_value(database: Database) -> None:
    connection = await sessions.connect(database.service_url, AT_A_NODE)
    for number in range(3):
        await reads.list_jobs(connection, f"tenant-{number}", (), None, ListRange(), 100)
        await reads.job_and_seen(connection, f"tenant-{number}", "job", 0, [], "node")
        await reads.place_and_seen(connection, f"tenant-{number}", [], "node")
    counted = "SELECT generic_plans, custom_plans FROM pg_prepared_statements WHERE generic_plans + custom_plans >= 3"
    assert [tuple(row) for row in await connection.fetch(counted)] == [(3, 0)] * 3
    await connection.close()


async def test_a_setting_that_the_login_may_not_set_is_named_at_once(
    run_node: RunNode, superuser: asyncpg.Connection
) -> None:
    await for_the_database(superuser, "SET session_replication_role = replica")
    said = r'Postgres refuses: .*"session_replication_role".*RESET'
    await assert_no_start(run_node(), StartRefusedError, match=said)


async def test_a_start_heeds_what_its_address_says(
    run_node: RunNode, database: Database, superuser: asyncpg.Connection
) -> None:
    said = "connect_timeout=5&application_name=ledger+1&keepalives_idle=77&tcp_user_timeout=9000&gssencmode=prefer"
    url = f"{database.service_url}&{said}&options=-c%20work_mem%3D8MB%20--log-duration=off"
    async with run_node(url=url) as service:
        await write(service, 1)
        names = await superuser.fetch(
            "SELECT DISTINCT application_name FROM pg_stat_activity WHERE usename = $1 AND datname = $2",
            "tallystick",
            database.name,
        )
    assert [row[0] for row in names] == ["ledger+1"], "a plus sign is no space"
    connection = await sessions.connect(url)
    assert await connection.fetchval("SHOW work_mem") == "8MB"
    await connection.close()


class _Option(ctypes.Structure):
    _fields_ = [(name, ctypes.c_char_p) for name in ("keyword", "envvar", "compiled", "val", "label", "dispchar")]
    _fields_ += [("dispsize", ctypes.c_int)]


def parameters_of_libpq() -> set[str]:
    """The parameters that libpq 18 knows, by its own account."""
    (library, *_) = sorted(Path(find_package()).rglob("libpq.so.5*"))
    libpq = ctypes.CDLL(str(library))
    libpq.PQconndefaults.restype = ctypes.POINTER(_Option)
    options = libpq.PQconndefaults()
    names = set()
    for option in options:
        if option.keyword is None:
            return names
        names.add(option.keyword.decode())
    raise AssertionError


def test_every_parameter_of_libpq_is_taken_or_refused_by_name() -> None:
    assert parameters_of_libpq() - NAMES == {"authtype", "tty"} & parameters_of_libpq()
    refused = {}
    for name in NAMES:
        try:
            parse_address(f"postgresql://host/db?{name}=%23value")
        except ConfigurationError as error:
            refused[name] = str(error)
    assert {*refused} > {"require_auth", "channel_binding", "connect_timeout"}
    assert all(name in said and "#value" not in said for name, said in refused.items())


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("connect_timeot=5", "'connect_timeot' is no parameter .*did you mean connect_timeout"),
        ("work_mem=8MB", "'work_mem' is no parameter .*options=-c%20NAME%3DVALUE"),
        ("connect_timeout=soon", "connect_timeout .*whole number"),
        ("channel_binding=require", "channel_binding .*unless it is disable or prefer"),
        ("requirepeer=root", "requirepeer .*does not check"),
        ("options=-c%20standard_conforming_strings%3Doff", "standard_conforming_strings, which the ledger sets"),
        ("options=-B%2016", "may hold -c NAME=VALUE"),
        ("hostaddr=127.0.0.1", "host and hostaddr"),
        ("sslmode", "'sslmode' of the address has no value"),
    ],
)
def test_a_parameter_that_is_not_supported_is_refused_by_name(query: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse_address(f"postgresql://user:secret@host/db?{query}")


def test_what_is_taken_here_does_not_reach_the_driver() -> None:
    address = parse_address("postgresql:///db?hostaddr=::1&connect_timeout=0&ssl=true&keepalives=0&sslcert=a%2Bb+c")
    assert address.url == "postgresql:///db?sslcert=a%2Bb%2Bc&sslmode=require&host=%5B%3A%3A1%5D"
    assert address.connect_timeout_s is None, "no end of the wait is asked for, and the usual one holds"
    assert address.socket_options == {"SO_KEEPALIVE": 0}


def test_the_page_adds_up_how_many_connections_a_node_needs() -> None:
    root = Path(app.__file__).parents[1]
    page = (root / "docs/poolers.md").read_text()
    rows = [int(count) for count in re.findall(r"^\| (\d+) \| ", page, re.MULTILINE)]
    (pooled,) = re.findall(r"^POOL_CONNECTIONS_MAX = (\d+)$", (root / "app/node/wiring.py").read_text(), re.MULTILINE)
    assert rows[0] == int(pooled)
    assert checking.PROCESSES_MAX in rows
    assert f"at most {sum(rows)} connections to the primary" in page
    assert f"{sum(rows)} connections to it for each node" in (root / "docs/install.md").read_text()


def test_sessions_of_the_pipeline_set_what_those_of_the_service_do() -> None:
    wanted = dict(re.findall(r"\('(\w+)', '([^']*)'\)", statements.PREPARE_SESSION))
    own = {"client_encoding", "jit", "enable_sort"}
    # Its one transaction names its isolation and only reads, and only a superuser may set a replication role.
    service_alone = {"session_replication_role", "default_transaction_isolation", "default_transaction_deferrable"}
    assert {*RELIED_UPON} - service_alone == {*wanted} - own
    assert {name for name in {*RELIED_UPON} & {*wanted} if RELIED_UPON[name] != wanted[name]} == {"search_path"}
