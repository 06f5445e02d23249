"""Everything that parses bytes from outside, each with inputs that are whole and with what must hold for any input.

A target calls the parser and asserts. It lets only those errors pass that the parser documents, and where a twin in
Python says what is right, both must agree. Under sanitizers the functions in C also end the process at the first read
or write that is not theirs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import pyarrow as pa
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from app.edge.forms.otlp import records_of
from app.edge.forms.requests import EVENT_FORMS
from app.write.pending.requests import EventLines
from ledger import canonical, hlc, native, rfc3339
from ledger.bundle.rows import EntryLines
from ledger.errors import CanonicalError, InvalidInputError, LedgerError, ProblemError
from ledger.facts.events import JOB_EVENTS
from ledger.hlc import node_hash
from ledger.positions import Epoch, Lsn
from pipeline.arrow import ENTRY_SCHEMA, _buffers, batch_of
from signing import checkpoint, note
from signing import receipt as form
from signing.bundle.reader import BundleReader
from signing.cose import read_statement
from signing.note import VerifierKey
from signing.policy import Policy
from tests.app.otlp_requests import SPAN_ID, TRACE_ID, protobuf_of, record, request_of
from tests.app.signed_statements import statement
from tests.app.test_event_lines import BYTES_MAX, columns_of, plain_members, read_slowly
from tests.app.witness import Witness
from tests.ledger.callers import EVERYBODY
from tests.ledger.ledger_in_memory import SIGNER
from tests.ledger.test_packed_entries import FORMS, WHOLE, by_rows, copied, known_at, lines_of, rows_of
from tests.wal.logs import NODE, WAL_ID, hlc_of
from tests.wal.replication.keepers import Keeper, talking
from tests.wal.replication.quorums import batch
from wal import control, reader
from wal import native as wal_native
from wal.control import Control
from wal.format import BATCH, BATCH_RECORD_BYTES, SEGMENT_HEADER_BYTES
from wal.inspect import verify
from wal.reader import check_each
from wal.replication import messages
from wal.replication.frames import Budget, ConnectionOverError, FrameSocket
from wal.replication.messages import Ack, Append, Frame, Position

LOGS = request_of(
    record("JobCreated", "job-1", at_ns=1, spec={"n": [1, 2.5, True], "by": {"team": "data"}})
    | {"traceId": TRACE_ID, "spanId": SPAN_ID, "flags": 1},
    record("JobCompleted", "job-1", at_ns=2**63),
    service_name="use1",
)
FORMATS = Path(__file__).parents[2] / "docs" / "formats"


@dataclass(frozen=True)
class Target:
    """``seeds`` are whole inputs; ``reseal`` makes the checksums of a damaged one fit, so that what is behind them is
    reached as well."""

    seeds: Sequence[bytes]
    check: Callable[[bytes], None]
    reseal: Callable[[bytes], bytes] | None = None
    in_c: bool = False
    """The functions in C parse it."""


# --- lines of events ------------------------------------------------------------------------------


def _event_seeds() -> list[bytes]:
    members = [plain_members(name) for name in sorted(JOB_EVENTS)]
    return [("{" + ",".join(f'"{name}": {value}' for name, value in each.items()) + "}").encode() for each in members]


def check_event_line(data: bytes) -> None:
    """A line that C reads is one that the slow reader accepts, with the same columns."""
    lines = data.split(b"\n")[:4]
    read = native.event_lines(lines, EVENT_FORMS, BYTES_MAX)
    if read is None:
        return
    for line in lines:
        one = native.event_lines([line], EVENT_FORMS, BYTES_MAX)
        if one is None or one[0][0] is None:
            continue
        slowly = read_slowly(line)
        assert slowly is not None, "C accepts a line that Python refuses"
        fast = EventLines([line], None)
        fast.extend(1, one, {})
        assert columns_of(fast) == columns_of(slowly)


# --- rows: COPY, lines of a bundle, columns of Arrow ----------------------------------------------


def check_copy(data: bytes) -> None:
    """Rows that are read are those that encode to these bytes; a chain that passes is the one that was copied."""
    rows = native.rows_in_copy(FORMS, data)
    assert rows is None or copied([[*row] for row in rows]) in (data, data + b"\xff\xff")
    found = native.entries_in_copy(*known_at(), data)
    assert found is None or rows is not None, "entries pass that are no rows"
    if found is not None and rows:
        assert found[:-1] == by_rows([[*row] for row in rows], known_at())


def check_bundle_lines(data: bytes) -> None:
    """Entries that pass as lines pass as rows, with the same result."""
    found = EntryLines(data, b'"acme"').passed(*known_at())
    if found is None:
        return
    end = found[-1] if found[-1] else len(data)
    rows = EntryLines(data[:end], b'"acme"').unpacked()
    assert not rows or tuple(found)[:-1] == by_rows([[*row] for row in rows], known_at())


_BATCH = batch_of(rows_of(WHOLE), ENTRY_SCHEMA)
_ARROW = [[bytes(part) if part else None for part in _buffers(column)[:3]] for column in _BATCH.columns]


def _arrow_seeds() -> list[bytes]:
    return [part or b"" for column in _ARROW for part in column]


def check_arrow(data: bytes) -> None:
    """Each buffer of a column in turn is ``data``; nothing beyond its end is read."""
    for at, column in enumerate(_ARROW):
        for which in range(3):
            changed = [*column[:which], data, *column[which + 1 :]]
            columns = [changed if number == at else each for number, each in enumerate(_ARROW)]
            given = [(*(None if part is None else pa.py_buffer(part) for part in each), 0) for each in columns]
            native.entries_in_columns(*known_at(), _BATCH.num_rows, given)


# --- canonical JSON -------------------------------------------------------------------------------

JSON = [b'{"a":1,"b":[true,null,"x"],"c":{"d":-5}}', b'{"\\u0007":"\xc3\xa9","k":"' + b"v" * 300 + b'"}', b"{}"]


def check_json(data: bytes) -> None:
    """A value that C encodes, Python encodes to the same bytes."""
    text = data.decode("utf-8", "surrogatepass") if b"\xed" not in data else data.decode("latin-1")
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        written = native.canonical(value)
        with contextlib.suppress(CanonicalError):
            assert written in (None, canonical.encode(value))


def check_text(data: bytes) -> None:
    """Not UTF-8, then none of it is anything."""
    with contextlib.suppress(UnicodeDecodeError):
        check_json(data)


# --- segments and control file --------------------------------------------------------------------

BATCHES = b"".join(batch(first, last) for first, last in ((1, 1), (2, 4), (5, 9)))


def reseal_batches(data: bytes) -> bytes:
    """The CRCs of all records and batches made to fit, as far as their lengths lead."""
    made = bytearray(data)
    at = 0
    while at + BATCH_RECORD_BYTES <= len(made):
        body_bytes = int.from_bytes(made[at + 50 : at + 54], "big")
        end = min(at + BATCH_RECORD_BYTES + body_bytes, len(made))
        record = at + BATCH_RECORD_BYTES
        while record + 8 <= end:
            length = int.from_bytes(made[record + 4 : record + 8], "big")
            if not 8 < length <= end - record:
                break
            made[record : record + 4] = crc32(made[record + 4 : record + length]).to_bytes(4, "big")
            record += length
        made[at + 54 : at + 58] = crc32(made[at + BATCH_RECORD_BYTES : end]).to_bytes(4, "big")
        made[at : at + 4] = crc32(made[at + 4 : at + BATCH_RECORD_BYTES]).to_bytes(4, "big")
        at = end
    return bytes(made)


def check_batches(data: bytes) -> None:
    """C accepts just what the reader of single records accepts."""
    found = wal_native.check_batches(data, Lsn(1), node_hash(NODE))
    try:
        expected = check_each(data, Lsn(1), NODE)
    except InvalidInputError:
        expected = None
    assert found is None or found == expected


def check_segment(data: bytes) -> None:
    """A scan calls nothing sound that lies behind a wrong CRC, length or first LSN of a batch."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(SEGMENT_HEADER_BYTES) + data)
        file.flush()
        found = reader.scan_segment(file.fileno(), Lsn(1), NODE)
        reader.find_batch(file.fileno(), SEGMENT_HEADER_BYTES, Lsn(0), NODE)
        reader.end_of_data(file.fileno(), SEGMENT_HEADER_BYTES)
    assert SEGMENT_HEADER_BYTES <= found.end <= SEGMENT_HEADER_BYTES + sound_bytes(data)
    assert found.damage is not None or not data[found.end - SEGMENT_HEADER_BYTES :].strip(b"\0")


def sound_bytes(data: bytes) -> int:
    """Where the first batch begins whose CRCs, length or first LSN are wrong."""
    at, next_lsn = 0, 1
    while len(head := data[at : at + BATCH_RECORD_BYTES]) == BATCH_RECORD_BYTES:
        crc, *_, first_lsn, last_lsn, body_bytes, body_crc = BATCH.unpack(head)
        body = data[at + BATCH_RECORD_BYTES : at + BATCH_RECORD_BYTES + body_bytes]
        if first_lsn != next_lsn or crc32(head[4:]) != crc or len(body) != body_bytes or crc32(body) != body_crc:
            break
        at, next_lsn = at + BATCH_RECORD_BYTES + body_bytes, last_lsn + 1
    return at


def _control_seeds() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        control.store(Path(folder), Control(WAL_ID, NODE, Epoch(3), hlc_of(7), Lsn(7), Lsn(5), Lsn(4), Lsn(6)))
        return [(Path(folder) / control.CONTROL_NAME).read_bytes()]


def reseal_end(data: bytes) -> bytes:
    """A CRC over all before it, at the end."""
    return data[:-4] + crc32(data[:-4]).to_bytes(4, "big")


def check_control(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / control.CONTROL_NAME).write_bytes(data)
        with contextlib.suppress(LedgerError):
            control.load(Path(folder))


# --- frames ---------------------------------------------------------------------------------------

_APPEND = Append(Epoch(1), Position(Epoch(0), Lsn(0)), Epoch(1), Lsn(0), Lsn(0))
FRAMES = [b"".join(messages.encode(Frame(*said))) for said in ((_APPEND, BATCHES), (Ack(Epoch(1), Lsn(9)), b""))]


def reseal_frames(data: bytes) -> bytes:
    """The CRC of the first frame, and its length, made to fit all that is there."""
    inner = reseal_tail(data[8:])
    return struct.pack(">II", 4 + len(inner), crc32(inner)) + inner


def reseal_tail(inner: bytes) -> bytes:
    """The batches that a frame carries."""
    at = 5 + int.from_bytes(inner[1:5], "big")
    return inner[:at] + reseal_batches(inner[at:]) if at <= len(inner) else inner


def check_frames(data: bytes) -> None:
    """What is read from a socket is what the bytes say, one frame behind the other."""
    ours, theirs = socket.socketpair()
    with contextlib.closing(FrameSocket(ours, Budget(1 << 22))) as reader, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            theirs.send(data)
        theirs.shutdown(socket.SHUT_WR)
        at = 0
        with contextlib.suppress(InvalidInputError, ConnectionOverError):
            while True:
                found = reader.next(1.0)
                length = messages.length_of(data[at:])
                expected = messages.decode(data[at : at + length])
                assert (found.message, bytes(found.body)) == (expected.message, bytes(expected.body))
                at += length


_epochs = itertools.count(1)
_keepers: list[tuple[Keeper, tempfile.TemporaryDirectory[str]]] = []


def check_stream(data: bytes) -> None:
    """A member that takes batches in C keeps nothing that is not sound, whatever follows a whole append."""
    if not _keepers:
        folder = tempfile.TemporaryDirectory()
        _keepers.append((Keeper(Path(folder.name) / "keeper"), folder))
    keeper = _keepers[0][0]
    with talking(keeper.port) as peer:
        peer.elect(next(_epochs))
        peer.append()
        head = Append(peer.epoch, peer.tail, peer.epoch, Lsn(0), Lsn(0))
        body = data if data[:1] == b"\0" else batch(peer.tail.lsn + 1, peer.tail.lsn + 2)
        prefix, _ = messages.encode(Frame(head, body))
        peer.spoken._socket.setblocking(True)
        with contextlib.suppress(OSError):
            peer.spoken._socket.sendall(prefix + bytes(body) + data)
            peer.spoken._socket.shutdown(socket.SHUT_WR)
            while peer.spoken._socket.recv(1 << 16):
                pass
    report = verify(keeper.folder / NODE)[-1]
    assert report.verdict == "ok", report


# --- signed files ---------------------------------------------------------------------------------

_CHECKPOINT = checkpoint.sign_checkpoint(checkpoint.Checkpoint("example.org/log/acme", 7, bytes(range(32))), SIGNER)


_POLICY = "\n".join(
    [f"log {VerifierKey.of('example.org/log/acme', SIGNER.public_key).text()}"]
    + [f"witness {name} {Witness(name, seed).verifier_key} https://{name}" for seed, name in enumerate("ab")]
    + ["group g 1 a b", "quorum g"]
)


def check_note(data: bytes) -> None:
    """A note that is read is written as the same bytes; a checkpoint in it too."""
    with contextlib.suppress(LedgerError):
        parsed = note.parse(data)
        assert parsed.encode().encode() == data
        found = checkpoint.read(data)
        assert parsed.text.startswith(checkpoint.body(found))


def check_statement(data: bytes) -> None:
    """A signed statement that is read is the one in its registered form, which is read as itself."""
    with contextlib.suppress(InvalidInputError):
        found = read_statement(data)
        assert read_statement(found.registered) == found
        assert found.issuer
        assert found.subject


def check_log_records(data: bytes) -> None:
    """As many log records are read in either encoding as the library of OpenTelemetry reads, if it reads the body."""
    with contextlib.suppress(InvalidInputError, ProblemError):
        count = sum(record is not None for record in records_of(data, is_protobuf=True))
        with contextlib.suppress(DecodeError):
            read = ExportLogsServiceRequest.FromString(data)
            assert count == sum(len(each.log_records) for logs in read.resource_logs for each in logs.scope_logs)
    with contextlib.suppress(InvalidInputError, ProblemError):
        list(records_of(data, is_protobuf=False))


def check_policy(data: bytes) -> None:
    """A policy that is read is judged, whatever was cosigned."""
    with contextlib.suppress(LedgerError):
        policy = Policy.parse(data.decode("utf-8", "replace"))
        sizes = {key.text(): 3 + number for number, key in enumerate(policy.keys)}
        assert policy.judge(sizes, 2).is_met
        assert policy.judge({}, 2).is_met == (policy.quorum == "none")


def reseal_tar(data: bytes) -> bytes:
    """The checksums of the headers made to fit."""
    made = bytearray(data)
    for at in range(0, len(made) - 511, 512):
        if made[at + 257 : at + 262] == b"ustar":
            made[at + 148 : at + 156] = b" " * 8
            made[at + 148 : at + 156] = b"%06o\0 " % sum(made[at : at + 512])
    return bytes(made)


def check_bundle(data: bytes) -> None:
    """It is opened and read to its end, or refused as no bundle."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with contextlib.suppress(LedgerError), BundleReader.open(file.name) as reader:
            for number in range(len(reader.manifest.entry_parts)):
                reader.read_part(number)


def check_receipt(data: bytes) -> None:
    """Read in its one spelling, or refused."""
    with contextlib.suppress(LedgerError):
        form.read(data)


def check_times(data: bytes) -> None:
    """An HLC has one text; a time is one or is refused."""
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(LedgerError):
        assert str(hlc.Hlc.parse(text)) == text
    with contextlib.suppress(LedgerError):
        rfc3339.milliseconds_of(text)


TARGETS: dict[str, Target] = {
    "event_lines": Target(_event_seeds(), check_event_line, in_c=True),
    "copy_rows": Target([copied(rows_of(WHOLE)[:5]), copied(rows_of(WHOLE)[30:])], check_copy, in_c=True),
    "bundle_lines": Target([lines_of(rows_of(WHOLE)[:5])._lines], check_bundle_lines, in_c=True),
    "arrow_columns": Target(_arrow_seeds(), check_arrow, in_c=True),
    "json": Target(JSON, check_text, in_c=True),
    "batches": Target([BATCHES], check_batches, reseal_batches, in_c=True),
    "frames": Target(FRAMES, check_frames, reseal_frames, in_c=True),
    "stream": Target([*FRAMES, BATCHES], check_stream, reseal_frames, in_c=True),
    "segments": Target([BATCHES], check_segment, reseal_batches),
    "control": Target(_control_seeds(), check_control, reseal_end),
    "notes": Target([_CHECKPOINT.encode()], check_note),
    "statements": Target([statement(signing) for signing in EVERYBODY], check_statement),
    "log_records": Target([protobuf_of(LOGS), json.dumps(LOGS).encode()], check_log_records),
    "policies": Target([_POLICY.encode()], check_policy),
    "bundles": Target([(FORMATS / "example.bundle.tar").read_bytes()], check_bundle, reseal_tar),
    "receipts": Target([(FORMATS / "example.receipt.json").read_bytes()], check_receipt),
    "times": Target([b"1704585600000:0:scheduler-prod-01", b"2026-11-22T02:10:00.125Z"], check_times),
}


def close() -> None:
    """Stop what the targets started."""
    while _keepers:
        keeper, folder = _keepers.pop()
        keeper.close()
        folder.cleanup()
