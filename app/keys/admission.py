"""Which keys of a node count, and what to do about those that do not.

A node cannot introduce itself: its key counts once the root of the ledger, or a key that was admitted before, says so
in the chain of ``_system``. A key that no entry introduces yet counts already when this node itself can write the entry
that will admit it: as the first node of a ledger, or with the word of a key that it signs with or signed with last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from signing.public_key import PublicKey

if TYPE_CHECKING:
    from app.keys.node_keys import NodeKeys
    from app.keys.root_key import RootKey
    from signing.key_history import KeyHistory


def counting_keys(history: KeyHistory, root: RootKey, keys: NodeKeys) -> dict[str, PublicKey]:
    """Every key that counts by id: those admitted, and those of this node that are about to be."""
    own = {signer.key_id: signer.public_key for signer in keys.signers()}
    vouching = {*own, *(item.key_id for item in keys.retired if item.statement is not None)}
    if history.root_key_id is None:
        may_vouch = root.key_id is None or root.key_id in own
    else:
        may_vouch = not vouching.isdisjoint(history.authorities)
    early = {key_id: key for key_id, key in own.items() if may_vouch and key_id not in history.waiting}
    return early | history.keys()


def admission_fault(history: KeyHistory, root: RootKey, keys: NodeKeys) -> str | None:
    """Why the node signs nothing, and what to do; None when its keys count."""
    counting = counting_keys(history, root, keys)
    missing = [signer.key_id for signer in keys.signers() if signer.key_id not in counting]
    if not missing:
        return None
    commands = " && ".join(f"tally keys admit {key_id}" for key_id in missing)
    return (
        f"this node signs nothing: {' and '.join(missing)}, which it would sign with, is not admitted to the ledger. "
        "Compare with what tally keys list says, then run, against a node whose key is admitted or with --root-key "
        f"FILE: {commands}"
    )
