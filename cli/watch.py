"""``tally watch``: a chain as it grows, one line an entry, for as long as somebody looks.

The connection may end at any time: the service stops, a proxy closes it, this side fell behind. It is made again from
where the last one ended, so each entry is printed once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import orjson
import typer

from app.runtime.answers.chain import EntryAnswer
from cli.client import (
    PATIENCE_S,
    TRANSIENT,
    LedgerClient,
    NotTheLedgerError,
    RequestRefusedError,
    UnreachableError,
    say_wait,
    wait_s,
)
from cli.options import Tenant, Url
from ledger.exit_code import ExitCode
from ledger.printable import printable
from terminal.outcome import CommandExit, out

EVENT_BYTES_MAX: Final = 16 << 20
"""Longest event that is read; the longest of the service has a fifth of that."""
PAYLOAD_CHARACTERS: Final = 100
"""How much of a payload a line for people shows."""
SEQ_DIGITS_MAX: Final = 19
_LAGGED: Final = "lagged"


class _Lagged(msgspec.Struct):
    from_seq: int


class _Event(NamedTuple):
    """A server-sent event; ``data`` is None of one that only says how far the service has come."""

    id: int | None
    name: str
    data: bytes | None


def watch(
    tenant: Tenant,
    url: Url,
    actions: Annotated[
        str | None, typer.Option("--actions", metavar="A,…", help="Only entries of these actions.", show_default="all")
    ] = None,
    job: Annotated[str | None, typer.Option("--job", help="Only entries of this job.", show_default="all")] = None,
    dc: Annotated[
        str | None, typer.Option("--dc", help="Only entries that concern this data centre.", show_default="all")
    ] = None,
    from_seq: Annotated[
        int | None, typer.Option("--from-seq", min=1, help="First entry.", show_default="what comes from now on")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each entry as one line of JSON.")] = False,
) -> None:
    """Follow a tenant's chain: print each entry as it comes, until Ctrl-C.

    A connection that ends is made again where it was; no entry is printed twice
    and none is left out.

    \b
    Examples:
      tally watch --tenant acme
      tally watch -t acme --actions CANCEL,CANCEL_ACK --dc use1
      tally watch -t acme --from-seq 1 --json | jq .job_id
    """
    wanted = {"tenant_id": tenant, "actions": actions, "job": job, "dc": dc, "from_seq": from_seq}
    try:
        with LedgerClient(url) as client:
            for entry in _followed(client, wanted):
                line = orjson.dumps(entry).decode() if as_json else _line(entry)
                print(line, file=out.file, flush=True)
    except KeyboardInterrupt:
        raise CommandExit(ExitCode.FINE) from None


def _followed(client: LedgerClient, wanted: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The entries, connection after connection.

    Raises:
        RequestRefusedError: the service refused, and will again.
        UnreachableError: nobody answered at all.
        NotTheLedgerError: whoever answers is no ledger.
    """
    position: int | None = None
    attempt, give_up_at = 0, time.monotonic() + PATIENCE_S
    while True:
        error: UnreachableError | RequestRefusedError = UnreachableError(f"{client.url} ended the stream")
        try:
            with client.events("/v1/watch", last_id=position, **wanted) as lines:
                give_up_at = float("inf")
                for event in _events(client.url, lines):
                    if event.data is None:
                        position = event.id if event.id is not None else position
                    elif event.name == _LAGGED:
                        position = _read(client.url, event.data, _Lagged).from_seq - 1
                    else:
                        position, attempt = _read(client.url, event.data, EntryAnswer)["seq"], 0
                        yield orjson.loads(event.data)
        except UnreachableError as away:
            error = away
        except RequestRefusedError as refused:
            if refused.status not in TRANSIENT:
                raise
            error = refused
        delay_s = wait_s(attempt, None, random.random())  # noqa: S311 (spreads retries, no secret)
        if time.monotonic() + delay_s > give_up_at:
            raise error
        say_wait(error, delay_s)
        time.sleep(delay_s)
        attempt += 1


def _events(url: str, lines: Iterable[bytes]) -> Iterator[_Event]:
    """The events of a stream (HTML Living Standard, server-sent events)."""
    told: int | None = None
    name, data, size = "", list[bytes](), 0
    for line in lines:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        size += len(line)
        if size > EVENT_BYTES_MAX:
            raise NotTheLedgerError(f"an event of {url} does not end after {EVENT_BYTES_MAX:,} bytes")
        if not line:
            if data or told is not None:
                yield _Event(told, name, b"\n".join(data) if data else None)
            told, name, data, size = None, "", [], 0
        elif field == b"id":
            told = int(value) if value.isdigit() and len(value) <= SEQ_DIGITS_MAX else None
        elif field == b"event":
            name = value.decode("utf-8", "replace")
        elif field == b"data":
            data.append(value)


def _read(url: str, data: bytes, shape: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=shape)
    except msgspec.MsgspecError as error:
        raise NotTheLedgerError(f"{url} does not answer as a Tallystick does: {error}") from None


def _line(entry: dict[str, Any]) -> str:
    payload = entry["payload"]
    shown = payload if len(payload) <= PAYLOAD_CHARACTERS else payload[:PAYLOAD_CHARACTERS] + "…"
    when = entry["at"] or entry["t_hlc"]
    return printable(f"{entry['seq']:>8}  {when}  {entry['action']:<17}  {entry['job_id']}  {shown}")
