"""``tally snapshot --all`` signs every chain there is, the ledger's own too, and ``GET /v1/tenants`` lists them."""

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from cli import main, snapshot
from cli.client import LedgerClient
from tests.app.service_thread import serving
from tests.app.starting import checkpoints_blocked
from tests.conftest import execute
from tests.tally import run_tally

TENANTS = ("acme", "beta", "gamma")


@pytest.fixture(scope="module")
def url(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(postgres, tmp_path_factory.mktemp("snapshots"), "snapshot_all") as url:
        for tenant in TENANTS:
            httpx.post(f"{url}/v1/jobs", json={"tenant_id": tenant}, timeout=60).raise_for_status()
        yield url


def signed_to(url: str, tenant: str) -> tuple[int, int]:
    head = httpx.get(f"{url}/v1/chain/head", params={"tenant_id": tenant}, timeout=60).json()
    return head["signed_to_seq"], head["seq"]


def tally(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str, *arguments: str, code: int = 0
) -> str:
    monkeypatch.setattr(sys, "argv", ["tally", "snapshot", "--url", url, *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed: str = capsys.readouterr().out
    assert ended.value.code == code
    return printed


@pytest.mark.parametrize("page", [1000, 2])
def test_every_chain_is_signed_to_its_head(
    url: str, page: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(snapshot, "PAGE_TENANTS", page)
    for tenant in TENANTS:
        httpx.post(f"{url}/v1/jobs", json={"tenant_id": tenant}, timeout=60).raise_for_status()

    made = json.loads(tally(monkeypatch, capsys, url, "--all", "--json"))

    assert [each["tenant_id"] for each in made["snapshots"]] == [*TENANTS, "_system"]
    assert made["problems"] == []
    for tenant in (*TENANTS, "_system"):
        signed, head = signed_to(url, tenant)
        assert signed == head > 0


def test_one_chain_of_the_ledger_itself_can_be_signed(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "snapshot" in tally(monkeypatch, capsys, url, "--tenant", "_system")
    signed, head = signed_to(url, "_system")
    assert signed == head > 0


def test_where_there_is_nothing_new_the_newest_snapshot_is_told_as_such(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    httpx.post(f"{url}/v1/jobs", json={"tenant_id": "beta"}, timeout=60).raise_for_status()
    first = tally(monkeypatch, capsys, url, "-t", "beta")
    again = tally(monkeypatch, capsys, url, "-t", "beta")
    answered = json.loads(tally(monkeypatch, capsys, url, "-t", "beta", "--json"))

    assert re.search(r"^snapshot \d+ of tenant beta signs seq \d+ to \d+, \d+ entr(y|ies)$", first, re.MULTILINE)
    newest = r"^tenant beta: nothing new to sign; newest is snapshot \d+, which signs seq \d+ to \d+, \d+ entr(y|ies)$"
    assert re.search(newest, again, re.MULTILINE)
    assert (answered["is_new"], answered["to_seq"]) == (False, signed_to(url, "beta")[1])


def test_unsigned_snapshots_are_made_and_no_command_takes_them_for_signed(
    postgres: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, receipt, keys = tmp_path / "acme.bundle.tar", tmp_path / "job.receipt.json", tmp_path / "keys.json"

    def run(*arguments: str | Path, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["tally", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert ended.value.code == code, said
        return said.out

    with serving(postgres, tmp_path / "data", "snapshot_none", chain={"sign_snapshots": False}) as url:
        httpx.post(f"{url}/v1/jobs", json={"tenant_id": "acme", "job_id": "a"}, timeout=60).raise_for_status()
        made = httpx.post(f"{url}/v1/snapshots", json={"tenant_id": "acme"}, timeout=60)
        assert (made.status_code, made.json()["to_seq"], made.json()["dsse_envelope"]) == (201, 1, None)
        whole = httpx.get(f"{url}/v1/snapshots/{made.json()['id']}", timeout=60).json()
        assert whole == made.json()
        assert signed_to(url, "acme") == (0, 1)
        assert "unsigned" in run("snapshot", "--url", url, "--all")
        verdict = json.loads(run("verify", "-t", "acme", "--url", url, "--json", code=3))
        assert (verdict["valid"], verdict["verdicts"]["signatures"]) == (True, "not_checked")
        assert (verdict["verdicts"]["snapshots"], verdict["unsigned_entries"]) == ("ok", 1)
        keys.write_text(httpx.get(f"{url}/v1/keys", timeout=60).text)
        # What other keys sign is signed: the manifest of a bundle, and the checkpoint that a receipt stands on.
        run("bundle", "export", "-t", "acme", "--url", url, "-o", bundle)
        verdict = json.loads(run("verify-bundle", bundle, "--keys", keys, "--no-state", "--json", code=3))
        assert verdict["verdicts"]["signatures"] == "not_checked"
        run("prove", "-t", "acme", "--job", "a", "--url", url, "-o", receipt)
        run("verify-proof", receipt, "--keys", keys, "--no-state")
    with serving(postgres, tmp_path / "other", "snapshot_taken", bundle={"trusted_keys": str(keys)}) as url:
        run("bundle", "import", bundle, "--url", url)
        run("snapshot", "-t", "acme", "--url", url)
        run("verify", "-t", "acme", "--url", url, "--no-state")


def test_a_node_that_cannot_sign_says_so_once_for_all_tenants_and_is_waited_for_once(
    postgres: EmbeddedPostgres,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def write(url: str) -> None:
        for tenant in TENANTS:
            httpx.post(f"{url}/v1/jobs", json={"tenant_id": tenant}, timeout=60).raise_for_status()

    with serving(postgres, tmp_path, "snapshot_blocked") as url:
        write(url)
        run_all = ["tally", "snapshot", "--url", url, "--all"]
        tally(monkeypatch, capsys, url, "--all")
        (folder,) = (path for path in (tmp_path / "wal").iterdir() if path.is_dir())
        patience_s = 2.0
        monkeypatch.setattr("cli.client.LedgerClient", partial(LedgerClient, patience_s=patience_s))
        monkeypatch.setattr(sys, "argv", run_all)
        with checkpoints_blocked(folder):
            write(url)
            capsys.readouterr()
            with pytest.raises(SystemExit) as ended:
                main()
            told = capsys.readouterr()
            metrics = httpx.get(f"{url}/metrics", timeout=60).text
    asked = [line for line in metrics.splitlines() if "http_requests_total" in line and "/v1/snapshots" in line]

    assert ended.value.code == 1
    assert told.err.count("signing-unavailable (503)") == 1, told.err
    assert told.err.startswith("tenants acme, beta, gamma")
    refused = sum(float(line.rpartition(" ")[2]) for line in asked if "503" in line)
    assert 0 < refused <= (patience_s + 1) + len(TENANTS), asked


def test_a_tenant_and_all_are_not_asked_for_at_once(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tally(monkeypatch, capsys, url, code=1) == ""
    assert tally(monkeypatch, capsys, url, "--all", "-t", "acme", code=1) == ""


def test_tenants_are_listed_by_name_page_by_page(url: str) -> None:
    listed: list[str] = []
    cursor: str | None = None
    while True:
        asked: dict[str, Any] = {"limit": 3} | ({"cursor": cursor} if cursor else {})
        page = httpx.get(f"{url}/v1/tenants", params=asked, timeout=60).json()
        listed += [item["tenant_id"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break

    assert sorted(listed) == sorted([*TENANTS, "_system"])
    assert httpx.get(f"{url}/v1/tenants", params={"cursor": "AAAA"}, timeout=60).status_code == 422


def test_a_chain_that_cannot_be_signed_is_told_and_the_others_are_signed(
    url: str, postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = "INSERT INTO scheduler.chain_heads (tenant_id, head_seq) VALUES ('begun', 0)"
    asyncio.run(execute(postgres.superuser_url("snapshot_all"), empty))
    httpx.post(f"{url}/v1/jobs", json={"tenant_id": "gamma"}, timeout=60).raise_for_status()

    made = json.loads(tally(monkeypatch, capsys, url, "--all", "--json", code=1))

    assert [item["tenant_id"] for item in made["problems"]] == ["begun"]
    assert "gamma" in [each["tenant_id"] for each in made["snapshots"]]
    assert len(set(signed_to(url, "gamma"))) == 1


def test_no_authority_need_be_readable_where_nobody_speaks_tls(url: str, tmp_path: Path) -> None:
    ran = run_tally("snapshot", "--tenant", "acme", "--url", url, SSL_CERT_FILE=str(tmp_path / "missing"))
    assert ran.returncode == 0, ran.stderr
