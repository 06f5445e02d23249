"""Another master key: every living key is wrapped anew in one transaction, so that the old master key can be destroyed.

That is what takes erased keys out of reach in backups of the database too: what a backup holds is wrapped by a master
key that is gone. Nodes go on with the new key as soon as their ``privacy.master_key_uri`` leads to it; until then they
refuse what is private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.store import privacy as store
from app.trust.privacy.keys import context_of_key, context_of_secret
from ledger.errors import PrivacyUnavailableError

if TYPE_CHECKING:
    from app.store import Connection
    from signing.data_keys import MasterKey


async def rotate_master(connection: Connection, old: MasterKey, new: MasterKey) -> int:
    """Wrap all living keys by ``new`` instead of ``old``; returns how many. All of them, or nothing changes.

    Raises:
        PrivacyUnavailableError: ``old`` is not the master key of this ledger, or it has none.
        PrivateValueError: a key does not open with ``old``: somebody changed the table.
    """
    async with connection.transaction():
        state = await store.lock_state(connection)
        if state is None:
            raise PrivacyUnavailableError("this ledger has no private fields, so there is no master key to rotate")
        if state.master_key_id != old.master_key_id:
            raise PrivacyUnavailableError(
                f"the keys of this ledger are wrapped by master key {state.master_key_id}, and {old.path} holds "
                f"{old.master_key_id}"
            )
        rewrapped, last = 0, ("", "")
        while keys := await store.living_keys_after(connection, *last):
            wrapped = []
            for tenant_id, key_id, by_old in keys:
                context = context_of_key(tenant_id, key_id)
                wrapped.append((tenant_id, key_id, new.wrap(old.unwrap(by_old, context), context)))
            await store.rewrap(connection, wrapped)
            rewrapped, last = rewrapped + len(keys), keys[-1][:2]
        context = context_of_secret()
        secret = new.wrap(old.unwrap(state.wrapped_secret, context), context)
        await store.replace_master(connection, new.master_key_id, secret)
    return rewrapped
