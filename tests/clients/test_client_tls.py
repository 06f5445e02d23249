"""The Python client over TLS: whom it takes for a node."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tallystick_client import Client, UnreachableError
from tests.app.certificates import Authority
from tests.clients.way import way_to


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def url(ledger: str, authority: Authority) -> Iterator[str]:
    """A node over TLS, its address as somebody may write it."""
    pair = authority.issue("node")
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(pair.cert, pair.key)
    with way_to(ledger) as way:
        way.socket = serving.wrap_socket(way.socket, server_side=True)
        yield way.url.replace("http://", "HTTPS://")


def test_a_node_is_believed_by_the_authority_that_is_named(
    url: str, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(url, ca=str(authority.ca_file)) as ledger:
        assert ledger.create_job("acme", {})["job_id"]
    monkeypatch.setenv("TALLY_CA", str(authority.ca_file))
    with Client(url) as ledger:
        assert ledger.create_job("acme", {})["job_id"]


def test_without_one_those_of_the_machine_are_asked(
    url: str, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(url, patience_s=0.0) as ledger, pytest.raises(UnreachableError, match="certificate verify"):
        ledger.create_job("acme", {})
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca_file))
    with Client(url, patience_s=0.0) as ledger:
        assert ledger.create_job("acme", {})["job_id"]


def test_an_authority_that_is_no_file_is_told_even_where_nobody_is_asked_over_tls(ledger: str) -> None:
    with pytest.raises(FileNotFoundError):
        Client(ledger, ca="none.pem")
