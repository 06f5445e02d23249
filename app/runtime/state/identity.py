"""Who this node is: ids that were configured, else made once and kept in the WAL directory.

``<wal.dir>/node.json`` holds ``{"gate", "node_id"}`` and nothing else. A configured value wins over a kept one. What
cannot have been written here is refused: another identity would begin another WAL and leave this one unchained.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Final

import msgspec

from app.runtime.state.kept_file import KeptFile
from ledger.errors import StartRefusedError
from ledger.names import GATE, NODE_ID
from wal.control import CONTROL_NAME


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``node_id`` is stable and unique; ``gate`` stands in the job ids made here."""

    node_id: Annotated[str, msgspec.Meta(pattern=rf"^({NODE_ID})\Z")]
    gate: Annotated[str, msgspec.Meta(pattern=rf"^({GATE})\Z")]


_FILE: Final[KeptFile[Identity | None]] = KeptFile(
    "node.json", Identity | None, b"null", "restore it, or remove it and set node_id and gate"
)


def load_or_make(wal_dir: Path, node_id: str | None, gate: str | None) -> Identity:
    """The node's ids, kept from now on.

    Raises:
        StartRefusedError: the kept file cannot be read, was altered, or is gone while WALs of nodes are still there.
    """
    kept = _FILE.load(wal_dir)
    orphans = _nodes_with_wal(wal_dir) if node_id is None else []
    held = f"{wal_dir} holds the WAL of {', '.join(orphans)}"
    if kept and orphans and kept.node_id not in orphans:
        raise StartRefusedError(
            f"{wal_dir / _FILE.name} names the node {kept.node_id}, but {held}: restore the file, or set node_id to "
            "the one meant"
        )
    if not kept and orphans:
        raise StartRefusedError(
            f"{held}, but {_FILE.name}, which says which of them is this node, is gone: set node_id to the one meant, "
            "or choose another wal.dir"
        )
    identity = Identity(
        node_id or (kept.node_id if kept else f"node-{secrets.token_hex(4)}"),
        gate or (kept.gate if kept else f"gate{secrets.token_hex(3)}"),
    )
    if identity != kept:
        _FILE.store(wal_dir, identity)
    return identity


def kept_node_id(wal_dir: Path) -> str | None:
    """The node id that was made or stored here, None where no node has run yet.

    Raises:
        StartRefusedError: the kept file cannot be read or was altered.
    """
    kept = _FILE.load(wal_dir)
    return None if kept is None else kept.node_id


def _nodes_with_wal(wal_dir: Path) -> list[str]:
    return sorted(path.parent.name for path in wal_dir.glob(f"*/{CONTROL_NAME}"))


def with_new_gate(wal_dir: Path, identity: Identity) -> Identity:
    """The same node with another gate, kept from now on: the one it made belongs to somebody else."""
    renewed = Identity(identity.node_id, f"gate{secrets.token_hex(3)}")
    _FILE.store(wal_dir, renewed)
    return renewed
