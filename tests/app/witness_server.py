"""A witness behind HTTP, from the text of c2sp.org/tlog-witness: ``add-checkpoint`` and its answers by the book."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from ledger.errors import LedgerError, ProofError
from ledger.merkle import verify_consistency
from signing.checkpoint import open_checkpoint
from tests.app.witness import Witness

PROOF_LINES_MAX = 63
RETRY_AFTER_S = 2
UNDER_WAY_S = 1.0
"""Requests that come later after a pause began were not under way when it did."""


class Answer(NamedTuple):
    """What a witness answers."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


KeysOf = Callable[[str], Sequence[str]]
"""The verifier keys of the log of an origin, none if the witness does not know it."""


class WitnessServer(Witness):
    """A witness of the logs that ``keys_of`` knows.

    After every ``turn`` requests it serves none for ``RETRY_AFTER_S``; ``lie`` may change what it answers.
    """

    def __init__(self, name: str, seed: int, keys_of: KeysOf, *, is_ml_dsa: bool = False) -> None:
        super().__init__(name, seed, is_ml_dsa=is_ml_dsa)
        self.keys_of = keys_of
        self.url = ""
        self.turn: int | None = None
        self.lie: Callable[[bytes, Answer], Answer] | None = None
        self.answered: list[int] = []
        """The status of each answer."""
        self.served: list[tuple[str, int]] = []
        """Origin and size of each tree that it cosigned."""
        self.refused: list[int] = []
        """Of each pause that it asked for, the requests that came before its end."""
        self.hasty = 0
        """Of these, the requests that were not under way as it began."""
        self._in_turn = 0
        self._pause_ends_s = float("inf")
        self._lock = threading.Lock()

    def answer(self, body: bytes) -> Answer:
        """The answer to a request."""
        with self._lock:
            found = self._limited() or self._added(body)
            found = found if self.lie is None else self.lie(body, found)
            self.answered.append(found.status)
            return found

    def _limited(self) -> Answer | None:
        if self.turn is None:
            return None
        now_s = time.monotonic()
        if now_s >= self._pause_ends_s:
            self._in_turn, self._pause_ends_s = 0, float("inf")
        if self._in_turn < self.turn:
            self._in_turn += 1
            return None
        if self._pause_ends_s == float("inf"):
            self._pause_ends_s = now_s + RETRY_AFTER_S
            self.refused.append(0)
        self.refused[-1] += 1
        self.hasty += now_s > self._pause_ends_s - RETRY_AFTER_S + UNDER_WAY_S
        return Answer(429, b"slower\n", (("Retry-After", str(RETRY_AFTER_S)),))

    def _added(self, body: bytes) -> Answer:
        # 1. the request
        head, gap, note = body.partition(b"\n\n")
        first, *lines = head.decode().split("\n")
        word, _, number = first.partition(" ")
        if not gap or word != "old" or not number.isdigit() or len(lines) > PROOF_LINES_MAX:
            return Answer(400, b"malformed\n")
        old, proof = int(number), [base64.b64decode(line, validate=True) for line in lines]
        # 2. the log, and its signature
        origin = note.decode().split("\n")[0]
        keys = self.keys_of(origin)
        if not keys:
            return Answer(404, b"unknown log\n")
        try:
            checkpoint = open_checkpoint(note, keys, origin=origin)
        except LedgerError:
            return Answer(403, b"no trusted signature\n")
        # 3. the tree that was seen before
        known_size, known_root = self.seen.get(origin, (0, b""))
        if old > checkpoint.size:
            return Answer(400, b"old size is larger\n")
        if old != known_size or (old == checkpoint.size and known_root not in (b"", checkpoint.root)):
            return Answer(409, b"%d\n" % known_size, (("Content-Type", "text/x.tlog.size"),))
        # 4. consistency
        try:
            if old:
                verify_consistency(old, checkpoint.size, known_root, checkpoint.root, proof)
            elif proof:
                raise ProofError("a proof from an empty tree")
        except ProofError as error:
            return Answer(422, f"{error}\n".encode())
        # 5. kept, then signed
        self.seen[origin] = checkpoint.size, checkpoint.root
        self.served.append((origin, checkpoint.size))
        text = note.decode().rpartition("\n\n")[0] + "\n"
        return Answer(200, self.line(text, int(time.time())).encode())


@contextmanager
def serving_witness(witness: WitnessServer, port: int = 0) -> Iterator[WitnessServer]:
    """``witness``, answering at its ``url``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found = witness.answer(body) if self.path == "/add-checkpoint" else Answer(404, b"no such page\n")
            self.send_response(found.status)
            for name, value in (*found.headers, ("Content-Length", str(len(found.body)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(found.body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", port), Handler) as server:
        witness.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield witness
        finally:
            server.shutdown()
            thread.join()


def policy_of(witnesses: Sequence[WitnessServer], path: Path, threshold: int | str = "all", log: str = "") -> Path:
    """A policy file by which so many of these witnesses must cosign."""
    names = [f"w{number}" for number in range(1, len(witnesses) + 1)]
    lines = [f"witness {name} {each.verifier_key} {each.url}" for name, each in zip(names, witnesses, strict=True)]
    path.write_text("\n".join([log, *lines, f"group outside {threshold} {' '.join(names)}", "quorum outside", ""]))
    return path
