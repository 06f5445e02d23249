"""Settings: where they come from, what stops the start, and that the text says why."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import pytest

from app.runtime.principals import Grant, Right
from app.runtime.settings.config import load_settings
from app.runtime.settings.words import ENV_OF_PIPELINE
from ledger.errors import ConfigurationError
from pipeline.cli import options, running


@pytest.fixture(autouse=True)
def _only_what_the_test_sets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.upper().startswith("TALLY_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_without_any_source_the_defaults_of_the_interfaces_hold() -> None:
    settings = load_settings()
    assert settings.http.listen == "127.0.0.1:8080"
    assert settings.http.body_bytes_max == 16 * 1024 * 1024
    assert settings.hlc.max_clock_skew_ms == 5000
    assert settings.wal.ack_mode == "LOCAL_GROUP_SYNC"
    assert settings.wal.batch_timeout_microseconds == 500
    assert settings.wal.retain == timedelta(days=7)
    assert settings.chain.checkpoint_interval == timedelta(milliseconds=500)
    assert settings.read.wait == timedelta(seconds=2)
    assert settings.topology.postgres_survives == "process"
    assert settings.region == "local"
    assert settings.wal_dir == Path("var/wal")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5s", 5), ("500ms", 0.5), ("250us", 0.00025), ("1.5s", 1.5), ("1m", 60), ("00:00:05", 5), ("00:00:00.5", 0.5)],
)
def test_a_duration_has_several_spellings(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv("TALLY_READ__WAIT", text)
    assert load_settings().read.wait == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("text", "size"), [("1048576", 1 << 20), ("1 MiB", 1 << 20), ("512KiB", 512 << 10), ("1 GiB", 1 << 30)]
)
def test_a_size_is_bytes_or_has_a_unit(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    monkeypatch.setenv("TALLY_HTTP__BODY_BYTES_MAX", text)
    assert load_settings().http.body_bytes_max == size


def test_the_environment_wins_over_the_file_and_an_argument_over_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tally.toml").write_text('region = "file"\ngate = "gatefile"\nnode_id = "node-file"\n')
    monkeypatch.setenv("TALLY_REGION", "env")
    monkeypatch.setenv("TALLY_GATE", "gateenv")
    settings = load_settings(region="argument")
    assert (settings.region, settings.gate, settings.node_id) == ("argument", "gateenv", "node-file")


def test_the_file_may_be_anywhere_when_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = tmp_path / "elsewhere.toml"
    named.write_text('[wal]\nsegment_bytes = "128 MiB"\nretain = "2d"\n')
    monkeypatch.setenv("TALLY_CONFIG", str(named))
    assert load_settings().wal.segment_bytes == 128 << 20
    assert load_settings().wal.retain == timedelta(days=2)


def test_replicas_are_a_list_or_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().database_replica_urls == []
    wanted = ["postgresql://a/x", "postgres://b/x"]
    assert load_settings(database_replica_urls=wanted).database_replica_urls == wanted
    monkeypatch.setenv("TALLY_DATABASE_REPLICA_URLS", "postgresql://a/x, postgres://b/x")
    assert load_settings().database_replica_urls == wanted
    for wrong in (["mysql://secret@a/x"], ["postgresql://a/x"] * 17):
        with pytest.raises(ConfigurationError, match="database_replica_urls") as refused:
            load_settings(database_replica_urls=wrong)
        assert "secret" not in str(refused.value)


def test_the_port_variable_moves_only_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALLY_PORT", "9000")
    assert (load_settings().http.host, load_settings().listen_port) == ("127.0.0.1", 9000)


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("TALLY_WAL__SEGMENT_BYTES", "64 Mib", ["wal.segment_bytes", "64 MiB"]),
        ("TALLY_WAL__SEGMENT_BYTES", "1 KiB", ["wal.segment_bytes", "64 KiB", "16 GiB"]),
        ("TALLY_WAL__SEGMENT_BYTES", "-5", ["wal.segment_bytes"]),
        ("TALLY_WAL__BATCH_MAX_BYTES", "65 MiB", ["wal.batch_max_bytes", "4 KiB", "64 MiB"]),
        ("TALLY_WAL__ACK_MODE", "SOMETIMES", ["wal.ack_mode", "LOCAL_GROUP_SYNC", "LOCAL_ASYNC"]),
        ("TALLY_WAL__BATCH_MAX_ENTRIES", "0", ["wal.batch_max_entries", "1"]),
        ("TALLY_WAL__BATCH_MAX_ENTRIES", "many", ["wal.batch_max_entries", "integer"]),
        ("TALLY_HLC__MAX_CLOCK_SKEW", "5", ["hlc.max_clock_skew", "500ms", "hh:mm:ss"]),
        ("TALLY_HLC__MAX_CLOCK_SKEW", "2h", ["hlc.max_clock_skew", "1h"]),
        ("TALLY_HLC__MAX_CLOCK_SKEW", "00:00:61", ["hlc.max_clock_skew"]),
        ("TALLY_NODE_ID", "under_score", ["node_id"]),
        ("TALLY_NODE_ID", "-node", ["node_id"]),
        ("TALLY_REGION", "us-east", ["region"]),
        ("TALLY_GATE", "Gate42", ["gate"]),
        ("TALLY_HTTP__LISTEN", "localhost", ["http.listen", "host:port"]),
        ("TALLY_HTTP__LISTEN", "127.0.0.1:99999", ["http.listen"]),
        ("TALLY_PORT", "70000", ["port", "65535"]),
        ("TALLY_LOG__ORIGIN", "has space", ["log.origin"]),
        ("TALLY_LOG__ORIGIN", "has+plus", ["log.origin"]),
        ("TALLY_CHAIN__SIGN_SNAPSHOTS", "perhaps", ["chain.sign_snapshots", "boolean"]),
        ("TALLY_TOPOLOGY__POSTGRES_SURVIVES", "everything", ["topology.postgres_survives", "'node'"]),
        ("TALLY_AUTH__MODE", "magic", ["auth.mode", "'none'"]),
        ("TALLY_CONFIG", "/nowhere/tally.toml", ["TALLY_CONFIG", "/nowhere/tally.toml"]),
        ("TALLY_CONFIG", "/" + "x" * 300, ["the file of settings cannot be read", "xxx"]),
        ("TALLY_WAL", "not json", ["wal"]),
        ("TALLY_WAL__SEGMENT_SIZE", "1", ["TALLY_WAL__SEGMENT_SIZE", "TALLY_WAL__SEGMENT_BYTES"]),
        ("TALLY_WALL__DIR", "x", ["TALLY_WALL__DIR", "TALLY_WAL"]),
        ("TALLY_REGION__X", "x", ["TALLY_REGION__X"]),
        ("TALLY_AUTH__OIDC__ISUER", "x", ["TALLY_AUTH__OIDC__ISUER", "TALLY_AUTH__OIDC__ISSUER"]),
        ("TALLY_AUTH__OIDK__ISSUER", "x", ["TALLY_AUTH__OIDK__ISSUER", "TALLY_AUTH__OIDC__…"]),
        ("TALLY_AUTH__OIDC__ISSUER__X", "x", ["TALLY_AUTH__OIDC__ISSUER__X"]),
        ("TALLY_AUTH__OIDC__ISSUER", "http://id.example.org", ["auth.oidc.issuer", "https://"]),
        ("TALLY_AUTH__OIDC__JWKS_URI", "http://127.0.0.1.example.org/k", ["auth.oidc.jwks_uri", "https://"]),
        ("TALLY_AUTH__OIDC__JWKS_URI", "https://user@id.example.org/k", ["auth.oidc.jwks_uri", "without a user"]),
        ("TALLY_AUTH__OIDC__ALGORITHMS", "RS256,none", ["auth.oidc.algorithms.1", "'RS256'"]),
        ("TALLY_AUTH__OIDC__ALGORITHMS", "HS256", ["auth.oidc.algorithms.0", "'ES256'"]),
        ("TALLY_AUTH__OIDC__ALGORITHMS", ",", ["auth.oidc.algorithms", "at least 1"]),
        ("TALLY_AUTH__OIDC__LEEWAY", "1h", ["auth.oidc.leeway", "5m"]),
        ("TALLY_AUTH__OIDC__REFRESH_INTERVAL", "1h", ["auth.oidc.refresh_interval", "10m"]),
        ("TALLY_AUTH__OIDC__GRANTS", "{", ["auth", "JSON"]),
        ("TALLY_PRIVACY__LOG_READS", "acme,a b", ["privacy.log_reads.1", "must be a tenant", "team-*"]),
        (
            "TALLY_AUTH__OIDC__GRANTS",
            '[{"claim": "groups"}]',
            ["auth.oidc.grants.0.value", "auth.oidc.grants.0.rights"],
        ),
        ("TALLY_TRACING__ENDPOINT", "127.0.0.1:4317", ["tracing.endpoint", "/v1/traces"]),
        ("TALLY_TRACING__ENDPOINT", "https://ada:x@otel.example/v1/traces", ["tracing.endpoint", "without a user"]),
        ("TALLY_CONSOLE__TRACE_URL", "https://jaeger.example/trace/", ["console.trace_url", "{trace_id}"]),
        ("TALLY_CONSOLE__TRACE_URL", "javascript:alert(1)//{trace_id}", ["console.trace_url", "https://"]),
        ("TALLY_CONSOLE__TRACE_URL", "https://{trace_id}/trace", ["console.trace_url", "path"]),
        ("TALLY_CONSOLE__TRACE_URL", "https://ada@jaeger.example/{trace_id}", ["console.trace_url", "without a user"]),
        ("TALLY_AUTH__MODE", "oidc", ["auth.oidc.issuer", "auth.oidc.audience"]),
    ],
)
def test_a_wrong_setting_stops_the_start_with_its_name_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, told: list[str]
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as refused:
        load_settings()
    assert [part for part in told if part not in str(refused.value)] == []


def test_the_variables_of_the_pipeline_are_no_settings_and_all_known(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        value for module in (options, running) for name, value in vars(module).items() if name.endswith("_VARIABLE")
    }
    assert variables == ENV_OF_PIPELINE
    for name in variables:
        monkeypatch.setenv(name, "x")
    load_settings()


def test_an_unknown_setting_in_the_file_is_refused_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "tally.toml").write_text("[chain]\nbatchsize = 5\n[shain]\nx = 1\n")
    with pytest.raises(ConfigurationError, match=r"chain\.batchsize.*BATCH_SIZE"):
        load_settings()


def test_a_broken_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tally.toml").write_text("region = ")
    with pytest.raises(ConfigurationError, match=r"tally\.toml is not TOML"):
        load_settings()


def test_the_smallest_segment_needs_no_other_setting() -> None:
    wal = load_settings(wal={"segment_bytes": "64 KiB"}).wal
    assert (wal.segment_bytes, wal.batch_max_bytes, wal.record_bytes_max) == (1 << 16, 1 << 16, 1 << 16)
    wal = load_settings(wal={"segment_bytes": "64 KiB", "batch_max_bytes": "8 KiB"}).wal
    assert (wal.batch_max_bytes, wal.record_bytes_max) == (8 << 10, 1 << 16)
    assert load_settings().wal.record_bytes_max == 1 << 20


def test_a_record_must_fit_into_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALLY_WAL__SEGMENT_BYTES", "64 KiB")
    monkeypatch.setenv("TALLY_WAL__RECORD_BYTES_MAX", "1 MiB")
    with pytest.raises(ConfigurationError, match="segment_bytes must be at least"):
        load_settings()


def test_the_world_is_served_only_when_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALLY_HTTP__LISTEN", "0.0.0.0:8080")
    with pytest.raises(ConfigurationError, match=r"auth\.allow_open"):
        load_settings()
    monkeypatch.setenv("TALLY_AUTH__ALLOW_OPEN", "true")
    assert load_settings().http.host == "0.0.0.0"


GRANT = {"claim": "groups", "value": "ops", "rights": ["operate", "audit"], "tenants": ["team-*", "acme"]}


def test_an_issuer_is_set_in_the_file_or_in_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tally.toml").write_text(
        """
        [auth]
        mode = "oidc"
        [auth.oidc]
        issuer = "https://id.example.org/realms/main"
        audience = "tallystick"
        [[auth.oidc.grants]]
        claim = "groups"
        value = "ops"
        rights = ["operate", "audit"]
        tenants = ["team-*", "acme"]
        """
    )
    from_file = load_settings().auth
    (tmp_path / "tally.toml").unlink()
    monkeypatch.setenv("TALLY_AUTH__MODE", "oidc")
    monkeypatch.setenv("TALLY_AUTH__OIDC__ISSUER", "https://id.example.org/realms/main")
    monkeypatch.setenv("TALLY_AUTH__OIDC__AUDIENCE", "tallystick")
    monkeypatch.setenv("TALLY_AUTH__OIDC__GRANTS", json.dumps([GRANT]))
    assert load_settings().auth == from_file
    assert (from_file.oidc.audience, from_file.oidc.algorithms) == (["tallystick"], ["RS256", "ES256", "EdDSA"])
    assert from_file.oidc.grants[0].grant == Grant(frozenset({Right.OPERATE, Right.AUDIT}), ("team-*", "acme"))
    monkeypatch.setenv("TALLY_AUTH__OIDC__ALGORITHMS", "PS256, ES384")
    monkeypatch.setenv("TALLY_AUTH__OIDC__AUDIENCE", "one,two")
    assert load_settings().auth.oidc.algorithms == ["PS256", "ES384"]
    assert load_settings().auth.oidc.audience == ["one", "two"]
    monkeypatch.setenv("TALLY_HTTP__LISTEN", "0.0.0.0:8080")
    assert not load_settings().http.is_loopback


@pytest.mark.parametrize(
    "wrong", [{"rights": ["reed"]}, {"tenants": ["Acme"]}, {"rights": []}, {"value": ""}, {"x": 1}]
)
def test_a_grant_that_says_nothing_that_there_is_stops_the_start(wrong: dict[str, object]) -> None:
    load_settings(auth={"oidc": {"grants": [GRANT]}})
    with pytest.raises(ConfigurationError, match=rf"auth\.oidc\.grants\.0\.{next(iter(wrong))}"):
        load_settings(auth={"oidc": {"grants": [{**GRANT, **wrong}]}})


@pytest.mark.parametrize(
    "url",
    [
        "https://id.example.org",
        "https://id.example.org:8443/a/b?c=d",
        "https://xn--strae-oqa.example.org/",
        "http://localhost:8080/",
        "http://127.0.0.1/x",
        "http://[::1]:1/x",
    ],
)
def test_keys_are_fetched_over_https_or_from_this_machine(url: str) -> None:
    assert load_settings(auth={"oidc": {"jwks_uri": url}}).auth.oidc.jwks_uri == url


@pytest.mark.parametrize(
    "url",
    [
        "http://id.example.org",
        "http://localhost.example.org",
        "http://127.0.0.1@id.example.org/",
        "http://127.0.0.1\\@id.example.org/",
        "http://[::2]/",
        "https://id.example.org:99999/",
        "https:///keys",
        "https://xn--a/",
        "https://xn--0.example.org/",
        "https://999.1.1.1/",
        "https://[1:2]/",
        "https://id.example.org/\u00e4",
        "https://id.example.org/ x",
        "ftp://localhost/",
        "file:///keys",
        "",
    ],
)
def test_keys_are_fetched_from_nowhere_else(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"auth\.oidc\.jwks_uri"):
        load_settings(auth={"oidc": {"jwks_uri": url}})


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "127.8.8.8:1", "localhost:1", "[::1]:1"])
def test_every_spelling_of_loopback_needs_no_authentication(monkeypatch: pytest.MonkeyPatch, listen: str) -> None:
    monkeypatch.setenv("TALLY_HTTP__LISTEN", listen)
    assert load_settings().http.is_loopback


@pytest.mark.parametrize(
    "url",
    [
        "mysql://user:secret@host/db",
        "host/secret",
        "postgresql://user:secret@host:port/db",
        "postgresql://user:secret@host:65536/db",
        "postgresql://user:secret@one:5432,two:x/db",
        "postgresql://user:secret@[::1/db",
    ],
)
def test_a_wrong_database_url_is_refused_without_repeating_its_password(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("TALLY_DATABASE_URL", url)
    with pytest.raises(ConfigurationError, match="database_url") as refused:
        load_settings()
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://host/db",
        "postgres://user:p%40ss@host:5432/db?sslmode=require",
        "postgresql://u@[::1]:65535/db",
        "postgresql://one:1,two,three:3/db",
        "postgresql:///db?host=/run/postgresql",
    ],
)
def test_a_database_url_may_be_any_that_the_driver_takes(url: str) -> None:
    assert load_settings(database_url=url).database_url == url


def test_a_name_that_is_no_setting_is_answered_with_names_that_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALLY_COLOUR", "red")
    with pytest.raises(ConfigurationError) as refused:
        load_settings()
    names = str(refused.value).partition("allowed: ")[2].split(", ")
    assert {"TALLY_PORT", "TALLY_HTTP__…", "TALLY_WAL__…"} <= set(names)
    assert "TALLY_HTTP" not in names


def test_a_backlog_too_small_for_a_tenants_first_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALLY_WAL__BACKLOG_MAX_ENTRIES", "1")
    with pytest.raises(ConfigurationError, match=r"wal\.backlog_max_entries: .* 2"):
        load_settings()


def test_members_of_several_regions_are_json_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    said = '[{"address": "127.0.0.1:7010"}, {"address": "[::1]:7010", "region": "eu1"}]'
    monkeypatch.setenv("TALLY_REPLICATION__MEMBERS", said)
    members = load_settings().replication.members
    assert [(each.address, each.region) for each in members] == [("127.0.0.1:7010", None), ("[::1]:7010", "eu1")]
    monkeypatch.setenv("TALLY_REPLICATION__MEMBERS", "[::1]:7010, 127.0.0.1:7010")
    assert [each.address for each in load_settings().replication.members] == ["[::1]:7010", "127.0.0.1:7010"]
    monkeypatch.setenv("TALLY_REPLICATION__MEMBERS", said[:-1])
    with pytest.raises(ConfigurationError, match=r"replication\.members"):
        load_settings()
