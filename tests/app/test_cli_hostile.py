"""What answers is not trusted to be a ledger: whatever it is, a command says so in one line, never a trace."""

import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import msgspec
import orjson
import pytest

from app.runtime.answers.chain import ListedSnapshot
from app.runtime.settings.config import load_settings
from cli import main
from cli.client import LedgerClient
from cli.prove import Wanted
from ledger.errors import ConfigurationError
from ledger.verification.verdict import ASPECTS
from signing import receipt as form
from tallystick_client import NotTheLedgerError, UnreachableError, transport
from tests.forked import ROOT
from tests.tally import run_tally_limited

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
PATIENCE_S = 60.0


@contextmanager
def answering(*pieces: bytes, drip: bytes = b"", times: int = 0) -> Iterator[str]:
    """A server that sends every connection ``pieces``, then ``drip`` for ever, ``times`` a second (0: at once)."""
    closed = Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(peer: socket.socket) -> None:
            with peer, suppress(OSError):
                peer.settimeout(PATIENCE_S)
                peer.recv(65536)
                for piece in pieces:
                    peer.sendall(piece)
                while drip and not closed.wait(1 / times if times else 0):
                    peer.sendall(drip)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(65536):
                    pass

        def accept() -> None:
            with suppress(OSError):
                while True:
                    Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

        Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        closed.set()
        listener.shutdown(socket.SHUT_RDWR)


def sized(kind: bytes, body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n%b" % (status, kind, len(body), more, body)


PAGE = sized(b"text/html", b"<html><body>Please log in</body></html>")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (PAGE, "text/html, '<html><body>Please log in"),
        (sized(b"text/html", b"<h1>no", b"404 Not Found"), "status 404, text/html"),
        (sized(b"text/html", b"", b"302 Found", b"Location: https://login/\r\n"), "redirects to https://login/ .302."),
        (sized(b"application/json", b"[" * 100_000 + b"]" * 100_000), "does not answer as a Tallystick does"),
        (sized(b"application/json", b"{nothing"), "does not answer as a Tallystick does"),
        (sized(b"application/json", b"[]"), "does not answer as a Tallystick does"),
        (sized(b"application/json", b'{"id": 7}'), "missing required field"),
        (sized(b"application/json", b'{"id": "7"}'), r"Expected `int`, got `str` - at `\$.id`"),
        (sized(b"application/problem+json", b'{"type": 7}', b"422 Oh"), "does not answer as a Tallystick does"),
    ],
)
def test_an_answer_that_no_ledger_gives_is_told_as_such(answer: bytes, told: str) -> None:
    with (
        answering(answer) as url,
        LedgerClient(url, patience_s=0.0) as asked,
        pytest.raises(NotTheLedgerError, match=told),
    ):
        asked.post("/v1/snapshots", {"tenant_id": "acme"}, ListedSnapshot)


@pytest.mark.parametrize("there", ["http://xn--ls8h-.la/", "javascript:1"])
def test_an_answer_that_leads_to_no_address_is_none(there: str) -> None:
    redirect = sized(b"text/html", b"", b"302 Found", b"Location: %b\r\n" % there.encode())
    with (
        answering(redirect) as url,
        LedgerClient(url, patience_s=0.0) as asked,
        pytest.raises(UnreachableError, match=f"no answer from {url}"),
    ):
        asked.get("/v1/keys")


def test_a_service_whose_name_is_no_host_is_unreachable() -> None:
    with LedgerClient("http://xn--a", patience_s=0.0) as asked, pytest.raises(UnreachableError, match="xn--a"):
        asked.get("/v1/keys")


def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "ANSWER_BYTES_MAX", 1 << 20)
    with (
        answering(JSON + b"\r\n", drip=bytes(65536)) as url,
        LedgerClient(url, patience_s=0.0) as asked,
        pytest.raises(NotTheLedgerError, match="does not end after 1,048,576 bytes"),
    ):
        asked.get("/v1/keys")


@pytest.mark.parametrize(
    "start", [JSON + b"Content-Length: 1000000\r\n\r\n", JSON + b"X-Slow: ", b""], ids=["body", "head", "first byte"]
)
def test_an_answer_that_drips_is_waited_for_no_longer_than_a_whole_one(start: bytes) -> None:
    began = time.monotonic()
    with (
        answering(start, drip=b"x", times=20) as url,
        LedgerClient(url, patience_s=0.0, timeout_s=0.6) as asked,
        pytest.raises(UnreachableError, match=r"no (whole )?answer from"),
    ):
        asked.get("/v1/keys")
    assert time.monotonic() - began < PATIENCE_S


def test_a_compressed_answer_is_not_unpacked() -> None:
    packed = sized(b"application/json", b"\x1f\x8b\x08\x00", more=b"Content-Encoding: gzip\r\n")
    with answering(packed) as url, LedgerClient(url) as asked, pytest.raises(NotTheLedgerError):
        asked.get("/v1/keys")


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999", "http://a b", "ftp://x", "http://", "x"])
def test_an_address_that_is_none_is_told(url: str) -> None:
    with pytest.raises(UnreachableError), LedgerClient(url, patience_s=0.0) as asked:
        asked.get("/v1/node")


# --- the commands ---------------------------------------------------------------------------------------


def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> str:
    """The one line with which a command of this process ended."""
    monkeypatch.setattr(sys, "argv", ["tally", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == code, said
    line: str = said.splitlines()[-1]
    assert "error: " in line
    return line


def test_commands_say_in_one_line_that_no_ledger_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = tmp_path / "events.ndjson"
    events.write_text('{"type": "JobCreated", "job_id": "j"}\n')
    commands = (
        ("run", "-t", "acme", "--", "touch", str(tmp_path / "touched")),
        ("replay", str(events), "-t", "acme"),
        ("verify", "-t", "acme"),
        ("snapshot", "-t", "acme"),
        ("keys", "list"),
        ("keys", "rotate"),
        ("keys", "revoke", "06e3fd8fda29bb60"),
        ("bundle", "export", "-t", "acme", "-o", str(tmp_path / "acme.tar")),
        ("bundle", "import", str(Path(__file__).parents[2] / "docs" / "formats" / "example.bundle.tar")),
        ("privacy", "show", "-t", "acme"),
        ("erase", "-t", "acme", "--subject", "alice"),
        ("witness", "list", "-t", "acme"),
    )
    with answering(PAGE) as url:
        monkeypatch.setenv("TALLY_URL", url)
        for command in commands:
            line = told(monkeypatch, capsys, *command, code=125 if command[0] == "run" else 1)
            assert "does not answer as a Tallystick does" in line
    assert list(tmp_path.iterdir()) == [events]


def test_arguments_that_are_no_utf_8_are_told_in_one_line_and_names_of_files_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TALLY_URL", "http://127.0.0.1:9")
    commands = (
        ("verify", "-t", "\udcff"),
        ("jobs", "-t", "acme", "\udcff"),
        ("watch", "-t", "\udcff"),
        ("snapshot", "-t", "\udcff"),
        ("token", "revoke", "\udcff"),
        ("erase", "-t", "acme", "--subject", "\udcff"),
        ("privacy", "set", "-t", "acme", "-f", "\udcff"),
    )
    for command in commands:
        assert "not valid UTF-8" in told(monkeypatch, capsys, *command)
    run = ("run", "-t", "acme", "--dc", "\udcff", "--", "touch", str(tmp_path / "touched"))
    assert "must be UTF-8" in told(monkeypatch, capsys, *run, code=125)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(sys, "argv", ["tally", "keys", "new", str(tmp_path / "key-\udcff"), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, orjson.loads(capsys.readouterr().out)["path"]) == (0, str(tmp_path / "key-\\xff"))


def test_a_receipt_of_something_else_than_was_asked_for_is_none() -> None:
    of_job = form.read((ROOT / "docs" / "formats" / "example.receipt.json").read_bytes())[0]
    of_entry = msgspec.structs.replace(of_job, covers=form.ENTRY, entries=of_job.entries[:1])
    tenant, job_id = of_job.tenant_id, of_job.job_id
    assert Wanted(tenant, job_id, None).is_answered_by(of_job)
    assert Wanted(tenant, None, of_entry.seqs[0]).is_answered_by(of_entry)
    for receipt, job, seq in (
        (of_entry, job_id, None),
        (of_job, None, of_job.seqs[0]),
        (of_job, "another", None),
        (of_entry, None, of_entry.seqs[0] + 1),
    ):
        assert not Wanted(tenant, job, seq).is_answered_by(receipt)
    assert not Wanted("another", job_id, None).is_answered_by(of_job)


def test_a_bundle_without_end_leaves_nothing_on_a_disk_that_it_filled(tmp_path: Path) -> None:
    file = tmp_path / "acme.tar"
    with answering(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-tar\r\n\r\n", drip=bytes(65536)) as url:
        _assert_nothing_kept(1 << 19, file, "bundle", "export", "-t", "acme", "-o", file, "--url", url)


@pytest.mark.parametrize(
    ("name", "before"),
    [("v.html", ["verify-page", "-o"]), ("r.html", ["verify-bundle", "--no-state", "nowhere.tar", "--report"])],
)
def test_a_page_that_the_disk_does_not_take_is_named_and_leaves_nothing(
    tmp_path: Path, name: str, before: list[str]
) -> None:
    file = tmp_path / name
    _assert_nothing_kept(2048, file, *before, file)


def _assert_nothing_kept(bytes_max: int, file: Path, *command: str | Path) -> None:
    """The command may write files of so many bytes: it names its file, and leaves none."""
    done = run_tally_limited(bytes_max, *command)
    assert done.returncode == 1
    assert done.stderr == f"error: [Errno 27] File too large; nothing of it is kept: '{file}'\n"
    assert list(file.parent.iterdir()) == []


@contextmanager
def one_answer_a_connection(*answers: bytes) -> Iterator[str]:
    """A server that sends its next answer to each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)

        def serve() -> None:
            with suppress(OSError):
                for answer in answers:
                    with listener.accept()[0] as peer:
                        peer.recv(65536)
                        peer.sendall(answer)

        serving = Thread(target=serve)
        serving.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        serving.join()


@pytest.mark.parametrize(
    ("verdicts", "code", "said"),
    [
        ({}, 1, "says nothing of links, payloads, head, snapshots, signatures, tree, projection, checkpoint"),
        (dict.fromkeys(ASPECTS, "broken"), 2, "nonsense"),
    ],
)
def test_a_verdict_of_a_shape_that_no_ledger_gives_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verdicts: dict[str, str],
    code: int,
    said: str,
) -> None:
    numbers = dict.fromkeys(("entries_checked", "from_seq", "to_seq", "signed_to_seq", "unsigned_entries"), 1)
    first_break = {"seq": 1, "kind": "nonsense", "detail": "of a kind of its own", "expected": None, "actual": None}
    verdict = numbers | {
        "tenant_id": "acme",
        "valid": False,
        "head": {"seq": 1, "chain_link": None, "hlc": None},
        "verdicts": verdicts,
        "first_break": first_break,
        "breaks": {"nonsense": 1},
        "compared_with": None,
        "anchors": [],
        "duration_ms": 1.0,
    }
    close = b"Connection: close\r\n"
    none_yet = sized(b"application/problem+json", b'{"type":"t/x","detail":"no checkpoint"}', b"404 Not Found", close)
    found = sized(b"application/json", json.dumps(verdict).encode(), more=close)
    with one_answer_a_connection(none_yet, found) as url:
        monkeypatch.setattr(sys, "argv", ["tally", "verify", "-t", "acme", "--url", url, "--no-state"])
        with pytest.raises(SystemExit) as ended:
            main()
    told = capsys.readouterr()
    assert ended.value.code == code, told
    assert said in told.out + told.err
    assert "Traceback" not in told.err


def test_files_without_end_are_not_read_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = tmp_path / "endless"
    with endless.open("wb") as file:
        file.truncate(1 << 34)
    example = str(Path(__file__).parents[2] / "docs" / "formats" / "example.bundle.tar")
    zero = "/dev/zero"
    commands = (
        (("replay", zero, "-t", "acme"), "is not a regular file"),
        (("replay", str(endless), "-t", "acme", "--format", "csv"), "line 1: longer than"),
        (("replay", str(endless), "-t", "acme", "--format", "ndjson"), "line 1: longer than"),
        (("verify-bundle", example, "--keys", zero), "it is not a regular file"),
        (("verify-bundle", example, "--checkpoint", zero), "not a regular file"),
        (("verify", "-t", "acme", "--dsn", "postgresql://127.0.0.1:9/x", "--keys", zero), "it is not a regular file"),
        (("bundle", "import", zero), "is not a regular file"),
    )
    for command, complaint in commands:
        assert complaint in told(monkeypatch, capsys, *command)
    monkeypatch.setenv("TALLY_CONFIG", str(endless))
    with pytest.raises(ConfigurationError, match="too many for settings"):
        load_settings()
