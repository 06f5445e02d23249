"""Small JSON files that a node keeps beside its WAL, each replaced by temp file, fsync, rename and directory fsync.

    first-token.json    {"name", "digest"}     made by ``tally token new --first``; all rights for all tenants
    tokens.json         {"counting": [ids], "revoked": [ids]}
    fenced.json         how often this node was fenced: a fenced process ends before a scraper can see it
    last_verified.json  {"version": 1, "tenants": {"acme": {"at_s": 1700000000.0, "by": "walk"}}}
    node.json           {"gate", "node_id"}     in ``wal.dir``

The first token is valid while the ledger has none, and is issued as soon as the ledger accepts it. A token that this
node knows as revoked stays revoked, whatever happens to the database.

``last_verified.json`` says when each tenant's chain was last verified from its first entry to its end. ``at_s`` is when
the verification started: it does not cover later changes. ``by`` is ``walk`` for the walk of the node over all chains,
``node`` for another verification of its own, else the id of the caller who asked. A verified chain may be broken:
breaks are in ``breaks.json``. Without the file no chain is taken for verified, which is safe.

``node.json`` says who this node is. A configured value wins over a kept one. An implausible file is refused: another
identity would start another WAL and leave this one unchained. Other files are declared where they are used.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

import msgspec

from app.runtime.logs import log
from ledger.decoding import decode
from ledger.errors import StartRefusedError
from ledger.names import GATE, NODE_ID
from objects import sync_folder
from signing.files import read_regular
from wal.control import CONTROL_NAME
from wal.segment import store_file

Value = TypeVar("Value")


@dataclass(frozen=True)
class KeptFile(Generic[Value]):
    """The file ``name`` of a folder, with a value of ``kind``; the JSON value ``nothing`` is stored as no file."""

    name: str
    kind: Any
    nothing: bytes
    remedy: str
    """What to do about a file that cannot be read, or was altered."""

    def load(self, folder: Path) -> Value:
        """What it holds.

        Raises:
            StartRefusedError: it cannot be read, or is not of its kind.
        """
        path, content = folder / self.name, None
        try:
            with contextlib.suppress(FileNotFoundError):
                content = read_regular(path)
            found: Value = decode(self.nothing if content is None else content, self.kind)
            if found is None and content is not None:
                raise ValueError("it holds null, which is never written")
            return found
        except UnicodeEncodeError:
            raise  # The locale has no name for the folder.
        except (msgspec.MsgspecError, ValueError, OSError) as error:
            raise StartRefusedError(f"{path} cannot be read: {error}; {self.remedy}") from error

    def store(self, folder: Path, value: Value) -> None:
        """Replace the value; durable on return."""
        path, content = folder / self.name, msgspec.json.encode(value, order="deterministic")
        if content != self.nothing:
            store_file(path, content)
        elif path.exists():
            path.unlink()
            sync_folder(folder)


class ByTenant(msgspec.Struct, Generic[Value]):
    """The content of a file with one value for each tenant."""

    version: Literal[1] = 1
    tenants: dict[str, Value] = {}


NO_TENANTS: Final = b'{"version":1,"tenants":{}}'


class KeptByTenant(Generic[Value]):
    """One value for each tenant, in memory and in a file of the WAL folder. Belongs to one event loop."""

    def __init__(self, wal_folder: Path, file: KeptFile[ByTenant[Value]], what: str) -> None:
        """``what`` names the values in the log. A file that cannot be read is ignored."""
        self._folder = wal_folder
        self._file = file
        self._what = what
        self._storing = asyncio.Lock()
        self.by_tenant: dict[str, Value] = {}
        try:
            self.by_tenant = file.load(wal_folder).tenants
        except StartRefusedError as error:
            log.warning(f"{what}_unreadable", error=str(error))

    async def store(self) -> None:
        """Write the file; on return it survives a crash, unless the disk refuses, which is logged."""
        # Verifications may end at the same time.
        async with self._storing:
            content = ByTenant(1, dict(sorted(self.by_tenant.items())))
            try:
                await asyncio.to_thread(self._file.store, self._folder, content)
            except OSError as error:
                log.warning(f"{self._what}_not_stored", error=str(error))


class FirstToken(msgspec.Struct, frozen=True):
    """Whose the first token is, and its SHA-256 in hex."""

    name: str
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class KeptTokens(msgspec.Struct, frozen=True):
    """Ids of tokens: the valid ones when this was written, and all that were ever seen revoked."""

    counting: list[str] = []
    revoked: list[str] = []


FIRST_TOKEN: Final[KeptFile[FirstToken | None]] = KeptFile(
    "first-token.json", FirstToken | None, b"null", "remove it, and make a first token again"
)
KEPT_TOKENS: Final[KeptFile[KeptTokens]] = KeptFile(
    "tokens.json",
    KeptTokens,
    msgspec.json.encode(KeptTokens()),
    "restore it, or move it away: tokens that were revoked then count again if the database was put back",
)


_FENCED: KeptFile[int] = KeptFile("fenced.json", int, b"0", "remove it: it only counts how often this node was fenced")


def times_fenced(folder: Path) -> int:
    """How often the node whose WAL is in ``folder`` was fenced; 0 if the file cannot be read, which stops no start."""
    with contextlib.suppress(StartRefusedError):
        return _FENCED.load(folder)
    return 0


def count_fenced(folder: Path) -> None:
    """Increment the count; does nothing if the disk refuses."""
    with contextlib.suppress(OSError):
        _FENCED.store(folder, times_fenced(folder) + 1)


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``node_id`` is stable and unique; ``gate`` is part of the job ids made here."""

    node_id: Annotated[str, msgspec.Meta(pattern=rf"^({NODE_ID})\Z")]
    gate: Annotated[str, msgspec.Meta(pattern=rf"^({GATE})\Z")]


_NODE: Final[KeptFile[Identity | None]] = KeptFile(
    "node.json", Identity | None, b"null", "restore it, or remove it and set node_id and gate"
)


def load_or_make(wal_dir: Path, node_id: str | None, gate: str | None) -> Identity:
    """The node's ids, kept from now on.

    Raises:
        StartRefusedError: the kept file cannot be read, was altered, or is gone while WALs of nodes exist.
    """
    kept = _NODE.load(wal_dir)
    orphans = sorted(path.parent.name for path in wal_dir.glob(f"*/{CONTROL_NAME}")) if node_id is None else []
    held = f"{wal_dir} holds the WAL of {', '.join(orphans)}"
    if kept and orphans and kept.node_id not in orphans:
        raise StartRefusedError(
            f"{wal_dir / _NODE.name} names the node {kept.node_id}, but {held}: restore the file, or set node_id to "
            "the one meant"
        )
    if not kept and orphans:
        raise StartRefusedError(
            f"{held}, but {_NODE.name}, which says which of them is this node, is gone: set node_id to the one meant, "
            "or choose another wal.dir"
        )
    identity = Identity(
        node_id or (kept.node_id if kept else f"node-{secrets.token_hex(4)}"),
        gate or (kept.gate if kept else f"gate{secrets.token_hex(3)}"),
    )
    if identity != kept:
        _NODE.store(wal_dir, identity)
    return identity


def kept_node_id(wal_dir: Path) -> str | None:
    """The node id that was made or stored here; None if no node has run yet.

    Raises:
        StartRefusedError: the kept file cannot be read or was altered.
    """
    kept = _NODE.load(wal_dir)
    return None if kept is None else kept.node_id


def with_new_gate(wal_dir: Path, identity: Identity) -> Identity:
    """The same node with another gate, kept from now on: its own gate is taken by another node."""
    renewed = Identity(identity.node_id, f"gate{secrets.token_hex(3)}")
    _NODE.store(wal_dir, renewed)
    return renewed


WALK: Final = "walk"
NODE: Final = "node"


class Verified(msgspec.Struct, frozen=True):
    """One verification of a whole chain."""

    at_s: float
    by: str


_LAST_VERIFIED: Final = KeptFile[ByTenant[Verified]](
    "last_verified.json", ByTenant[Verified], NO_TENANTS, "it is written again with the next verification"
)


class LastVerified(KeptByTenant[Verified]):
    """The verifications of one node."""

    def __init__(self, wal_folder: Path) -> None:
        super().__init__(wal_folder, _LAST_VERIFIED, "last_verified")

    def note(self, tenant_id: str, verified: Verified) -> None:
        """Record a verification of the tenant's whole chain, unless a later-started one is recorded."""
        known = self.by_tenant.get(tenant_id)
        if known is None or known.at_s < verified.at_s:
            self.by_tenant[tenant_id] = verified

    def of_all(self, tenants: Iterable[str]) -> tuple[Verified | None, int]:
        """The oldest verification of ``tenants``, and how many of them have none."""
        found = [self.by_tenant.get(tenant_id) for tenant_id in tenants]
        oldest = min((each for each in found if each is not None), key=lambda each: each.at_s, default=None)
        return oldest, found.count(None)
