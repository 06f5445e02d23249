"""Who this node is: ids that were configured, else made once and kept in the WAL directory.

``<wal.dir>/node.json`` holds ``{"gate", "node_id"}`` and nothing else. A configured value wins over a kept one. What
cannot have been written here is refused: another identity would begin another WAL and leave this one unchained.
"""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from ledger.errors import StartRefusedError
from ledger.names import GATE, NODE_ID
from wal.control import CONTROL_NAME
from wal.segment import store_file

NAME = "node.json"
_GRAMMAR = {"node_id": NODE_ID, "gate": GATE}


class Identity(NamedTuple):
    """``node_id`` is stable and unique; ``gate`` stands in the job ids made here."""

    node_id: str
    gate: str


def load_or_make(wal_dir: Path, node_id: str | None, gate: str | None) -> Identity:
    """The node's ids, kept from now on.

    Raises:
        StartRefusedError: the kept file cannot be read, was altered, or is gone while WALs of nodes are still there.
    """
    kept = _load(wal_dir / NAME)
    orphans = _nodes_with_wal(wal_dir) if node_id is None else []
    if kept and orphans and kept["node_id"] not in orphans:
        raise StartRefusedError(
            f"{wal_dir / NAME} names the node {kept['node_id']}, but {wal_dir} holds the WAL of {', '.join(orphans)}: "
            "restore the file, or set node_id to the one meant"
        )
    if not kept and orphans:
        raise StartRefusedError(
            f"{wal_dir} holds the WAL of {', '.join(orphans)}, but {NAME}, which says which of them is this node, is "
            "gone: set node_id to the one meant, or choose another wal.dir"
        )
    identity = Identity(
        node_id or kept.get("node_id") or f"node-{secrets.token_hex(4)}",
        gate or kept.get("gate") or f"gate{secrets.token_hex(3)}",
    )
    if identity._asdict() != kept:
        store(wal_dir, identity)
    return identity


def kept_node_id(wal_dir: Path) -> str | None:
    """The node id that was made or stored here, None where no node has run yet.

    Raises:
        StartRefusedError: the kept file cannot be read or was altered.
    """
    return _load(wal_dir / NAME).get("node_id")


def _load(path: Path) -> dict[str, str]:
    try:
        kept = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise StartRefusedError(f"{path} cannot be read: {error}; remove it and set node_id and gate") from error
    if not isinstance(kept, dict) or kept.keys() != _GRAMMAR.keys():
        raise StartRefusedError(f"{path} does not hold node_id and gate alone; remove it and set both")
    for name, grammar in _GRAMMAR.items():
        if not isinstance(kept[name], str) or re.fullmatch(grammar, kept[name]) is None:
            raise StartRefusedError(
                f"{path} holds a {name} that does not match {grammar}, it was altered: restore it, or remove it and "
                "set node_id and gate"
            )
    return kept


def _nodes_with_wal(wal_dir: Path) -> list[str]:
    return sorted(path.parent.name for path in wal_dir.glob(f"*/{CONTROL_NAME}"))


def with_new_gate(wal_dir: Path, identity: Identity) -> Identity:
    """The same node with another gate: the one it made belongs to somebody else."""
    renewed = identity._replace(gate=f"gate{secrets.token_hex(3)}")
    store(wal_dir, renewed)
    return renewed


def store(wal_dir: Path, identity: Identity) -> None:
    """Keep ``identity``; on return it survives a crash."""
    store_file(wal_dir / NAME, json.dumps(identity._asdict(), sort_keys=True).encode() + b"\n")
