"""The keys of subjects: made once, stored in Postgres wrapped by the master key, cached here for a while.

Invariants::

    a key is durable in Postgres before anything is sealed with it
    a cached key was living TRUSTED_S seconds ago or later
    a key that this node knows to be destroyed is not used again, whatever its row says
    no secret leaves this module but inside a DataKey

A key that was read before it was destroyed must not be cached after this node learned of the erasure. So a key that is
read while erasures are applied (``erasures`` rises) is used once and not cached.

*Another master key*: every living key is rewrapped in one transaction, so that the old master key can be destroyed.
Erased keys in backups of the database are then lost too, because their master key is gone. Nodes use the new key as
soon as their ``privacy.master_key_uri`` leads to it; until then they reject private values.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic

from app.runtime.logs import log
from app.runtime.tasks import keep_newest
from app.store import Connection
from app.store import privacy as store
from app.store.privacy import PrivacyState, SubjectKey
from app.store.reading import Pool, reading, run_in
from ledger import canonical
from ledger.errors import (
    ConfigurationError,
    PrivacyDamagedError,
    PrivacyUnavailableError,
    PrivateValueError,
    reported_as,
)
from signing.private_keys import DataKey, MasterKey, new_key_id, new_secret

KEYS_HELD_MAX = 20_000
"""Keys cached in memory; the least recently used is evicted first."""
TRUSTED_S = 60.0
"""How long cached keys may be used without reading the erasures from Postgres."""
LOOKUP_TIMEOUT_S = 5.0
"""Longest that finding or making keys for one request may take."""
ATTEMPTS_MAX = 3
"""Attempts to find or make a key while other callers erase it again."""
DESTROYED_MAX = 50_000
"""Destroyed keys that are remembered, about 200 bytes each; the oldest is evicted first."""
SUBJECTS_AT_ONCE = 5000
"""Keys found or made in one statement."""


Tag = bytes
"""Keyed hash of a subject; the database never has the name itself."""


class SubjectKeys:
    """Finds, makes and evicts keys. Belongs to one event loop."""

    def __init__(self, pool: Pool, master_key_uri: str) -> None:
        self._pool = pool
        self._uri = master_key_uri
        self._master: MasterKey | None = None
        self._secret: bytes | None = None
        self.fault: str | None = None
        """Why this node can use no key; None if it can, or needs none."""
        self._by_tag: OrderedDict[tuple[str, Tag], DataKey] = OrderedDict()
        self._by_id: OrderedDict[tuple[str, str], DataKey | None] = OrderedDict()
        """None: the key was destroyed."""
        self._destroyed: OrderedDict[tuple[str, str], None] = OrderedDict()
        """Keys that a chain or a row said are destroyed: a restored backup may bring such a row back."""
        self._erasures = 0
        self._trusted_until_s = 0.0

    # --- the master key ---------------------------------------------------------------------------

    async def begin(self, connection: Connection) -> None:
        """Load the master key; make one if the ledger has none yet and there is no file.

        Raises:
            PrivacyUnavailableError: the file is not that of the ledger's master key, or cannot be used.
            PrivacyDamagedError: the ledger had one, but the record that names it is gone.
        """
        asked_s = monotonic()
        if (state := await store.read_state(connection)) is None:
            if self._secret is None and await store.any_living_key(connection):
                raise PrivacyDamagedError(
                    "the row of privacy_state is gone, and without it nobody can tell whose keys are whose; bring it "
                    "back from a backup"
                )
            self.trust(asked_s)
            with reported_as(PrivacyUnavailableError, "privacy.master_key_uri", ConfigurationError):
                master = MasterKey.load_or_generate(self._uri)
            state = await store.begin(
                connection, master.master_key_id, master.wrap(self._secret or new_secret(), context_of_secret())
            )
        self.use(state)
        self.check_usable()

    def use(self, state: PrivacyState) -> None:
        """Load the master key that the ledger uses, unless it is loaded."""
        if self._master is not None and self._master.master_key_id == state.master_key_id:
            return
        try:
            master = MasterKey.load(self._uri)
            if master.master_key_id != state.master_key_id:
                raise ConfigurationError(
                    f"{master.path} holds master key {master.master_key_id}, and the keys of this ledger are wrapped "
                    f"by {state.master_key_id}: bring that one here, or name it in privacy.master_key_uri"
                )
            self._secret = master.unwrap(state.wrapped_secret, context_of_secret())
            self._master, self.fault = master, None
        except (ConfigurationError, PrivateValueError) as error:
            self.lose(str(error))
        self.forget_all()

    def lose(self, fault: str) -> None:
        """Drop the master key: the record that names it cannot be trusted."""
        if self.fault != fault:
            log.error("privacy_keys_unavailable", error=fault)
        self._master, self.fault = None, fault
        self.forget_all()

    def check_usable(self) -> None:
        """Return if this node has the master key.

        Raises:
            PrivacyUnavailableError: it has not; private values are rejected.
        """
        if self._master is None:
            raise PrivacyUnavailableError(f"private fields cannot be encrypted on this node: {self.fault}")

    @property
    def is_usable(self) -> bool:
        """Whether the ledger has a master key and this node has loaded it."""
        return self._master is not None

    # --- keyed hashes -----------------------------------------------------------------------------

    def tag(self, tenant_id: str, subject: str) -> Tag:
        """The tag of the subject in the database.

        Raises:
            PrivacyUnavailableError: this node does not have the ledger's secret.
        """
        return self.derived(canonical.encode(["tallystick.subject-tag.v1", tenant_id, subject]))

    def body_digest(self, digest: bytes) -> bytes | None:
        """A digest of a request body that reveals nothing without the ledger's secret; None if this node lacks the
        secret."""
        return None if self._secret is None else _keyed(self._secret, b"tallystick.body-digest.v1\n" + digest)

    def derived(self, context: bytes) -> bytes:
        """A secret of 32 bytes, derived from the ledger's own and ``context``. No other use has a context that begins
        like this one.

        Raises:
            PrivacyUnavailableError: this node does not have the ledger's secret.
        """
        self.check_usable()
        assert self._secret is not None
        return _keyed(self._secret, context)

    # --- keys -------------------------------------------------------------------------------------

    async def of_subjects(self, tenant_id: str, tags: Iterable[Tag]) -> dict[Tag, DataKey]:
        """The living key of each subject, made where there is none; durable when this returns.

        Raises:
            PrivacyUnavailableError, DatabaseUnavailableError: not possible now; nothing may be stored.
        """
        self.check_usable()
        self._distrust()
        wanted = list(tags)
        found = {tag: self._by_tag[tenant_id, tag] for tag in wanted if (tenant_id, tag) in self._by_tag}
        for tag in found:
            self._by_tag.move_to_end((tenant_id, tag))
        missing = [tag for tag in wanted if tag not in found]
        for first in range(0, len(missing), SUBJECTS_AT_ONCE):
            found.update(await self._find_or_make(tenant_id, missing[first : first + SUBJECTS_AT_ONCE]))
        return found

    async def _find_or_make(self, tenant_id: str, tags: Sequence[Tag]) -> dict[Tag, DataKey]:
        erasures, found = self._erasures, dict[Tag, DataKey]()
        async with reading(self._pool, timeout_s=LOOKUP_TIMEOUT_S) as connection:
            for _ in range(ATTEMPTS_MAX):
                for row in await store.living_keys(connection, tenant_id, tags):
                    if self._is_back(tenant_id, row):
                        raise PrivacyDamagedError(
                            f"{_back(tenant_id, row.key_id)}; restart the node, which destroys it"
                        )
                    if (key := self._opened(tenant_id, row)) is None:
                        raise PrivacyUnavailableError("the key of a subject cannot be opened on this node")
                    found[row.subject_tag] = key
                if not (missing := [tag for tag in tags if tag not in found]):
                    break
                await self._make(connection, tenant_id, missing)
        if len(found) < len(tags):
            raise PrivacyUnavailableError("the keys of these subjects are being replaced; try again")
        if erasures == self._erasures:
            for tag, key in found.items():
                keep_newest(self._by_tag, (tenant_id, tag), key, KEYS_HELD_MAX)
                keep_newest(self._by_id, (tenant_id, key.key_id), key, KEYS_HELD_MAX)
        return found

    async def _make(self, connection: Connection, tenant_id: str, tags: Sequence[Tag]) -> None:
        self.check_usable()
        assert self._master is not None
        named = [(new_key_id(), tag) for tag in tags]
        keys = [
            (key_id, tag, self._master.wrap(new_secret(), context_of_key(tenant_id, key_id))) for key_id, tag in named
        ]
        await store.add_keys(connection, tenant_id, keys, self._master.master_key_id)

    async def by_id(self, tenant_id: str, key_ids: Iterable[str]) -> Mapping[str, DataKey | None]:
        """The keys that this ledger made and this node can open; None for a destroyed one.

        Raises:
            DatabaseUnavailableError: keys that are not cached cannot be read.
        """
        self._distrust()
        wanted = list(key_ids)
        found = {key_id: self._by_id[tenant_id, key_id] for key_id in wanted if (tenant_id, key_id) in self._by_id}
        for key_id in found:
            self._by_id.move_to_end((tenant_id, key_id))
        if missing := [key_id for key_id in wanted if key_id not in found]:
            erasures = self._erasures
            rows = await run_in(reading(self._pool, timeout_s=LOOKUP_TIMEOUT_S), store.find_keys, tenant_id, missing)
            for row in rows:
                is_back = self._is_back(tenant_id, row)
                key = None if is_back else self._opened(tenant_id, row)
                if key is None and row.wrapped_key is not None and not is_back:
                    continue
                found[row.key_id] = key
                if key is None or erasures == self._erasures:
                    keep_newest(self._by_id, (tenant_id, row.key_id), key, KEYS_HELD_MAX)
        return found

    def _opened(self, tenant_id: str, row: SubjectKey) -> DataKey | None:
        """The key in ``row``; None if it was destroyed, or cannot be opened here."""
        if row.wrapped_key is None or self._master is None:
            return None
        try:
            return DataKey(row.key_id, self._master.unwrap(row.wrapped_key, context_of_key(tenant_id, row.key_id)))
        except PrivateValueError as error:
            log.error("subject_key_unreadable", tenant_id=tenant_id, key_id=row.key_id, error=str(error))
            return None

    # --- forgetting -------------------------------------------------------------------------------

    def trust(self, asked_s: float) -> None:
        """Record that all erasures in Postgres at ``asked_s`` (monotonic) were applied."""
        self._trusted_until_s = asked_s + TRUSTED_S

    def destroyed(self, keys: Iterable[tuple[str, str]]) -> None:
        """Record that a chain says these keys (tenant, key id) are destroyed."""
        for key in keys:
            keep_newest(self._destroyed, key, None, DESTROYED_MAX)

    def _is_back(self, tenant_id: str, row: SubjectKey) -> bool:
        """Whether the key was destroyed and its row was restored."""
        if row.wrapped_key is None or (tenant_id, row.key_id) not in self._destroyed:
            return False
        log.error("erased_key_is_back", tenant_id=tenant_id, key_id=row.key_id, error=_back(tenant_id, row.key_id))
        return True

    def forget(self, tenant_id: str, key_id: str, tag: Tag) -> None:
        """Drop a key that was destroyed."""
        self.destroyed([(tenant_id, key_id)])
        self._erasures += 1
        self._by_tag.pop((tenant_id, tag), None)
        self._by_id.pop((tenant_id, key_id), None)

    def forget_all(self) -> None:
        """Drop all cached keys."""
        self._erasures += 1
        self._by_tag.clear()
        self._by_id.clear()

    def _distrust(self) -> None:
        if self._by_id and monotonic() > self._trusted_until_s:
            log.warning("privacy_keys_forgotten", reason=f"Postgres was not heard of for {TRUSTED_S:g} s")
            self.forget_all()


def _keyed(secret: bytes, message: bytes) -> bytes:
    return hmac.digest(secret, message, hashlib.sha256)


def context_of_key(tenant_id: str, key_id: str) -> bytes:
    """The context to which the wrapped key of a subject is bound."""
    return canonical.encode(["tallystick.subject-key.v1", tenant_id, key_id])


def context_of_secret() -> bytes:
    """The context to which the wrapped secret of the ledger is bound."""
    return canonical.encode(["tallystick.ledger-secret.v1"])


def _back(tenant_id: str, key_id: str) -> str:
    return f"key {key_id} of tenant {tenant_id} was destroyed, and somebody brought its row in subject_keys back"


async def rotate_master(connection: Connection, old: MasterKey, new: MasterKey) -> int:
    """Rewrap all living keys from ``old`` to ``new``; returns how many. All are rewrapped, or none.

    Raises:
        PrivacyUnavailableError: ``old`` is not the master key of this ledger, or it has none. PrivateValueError: a key
        does not open with ``old``: the table was edited.
    """

    def rewrapped(by_old: bytes, context: bytes) -> bytes:
        return new.wrap(old.unwrap(by_old, context), context)

    async with connection.transaction():
        if (state := await store.read_state(connection, is_locked=True)) is None:
            raise PrivacyUnavailableError("this ledger has no private fields, so there is no master key to rotate")
        if state.master_key_id != old.master_key_id:
            raise PrivacyUnavailableError(
                f"the keys of this ledger are wrapped by master key {state.master_key_id}, and {old.path} holds "
                f"{old.master_key_id}"
            )
        count, last = 0, ("", "")
        while keys := await store.living_keys_after(connection, *last):
            await store.rewrap(
                connection,
                [
                    (tenant_id, key_id, rewrapped(by_old, context_of_key(tenant_id, key_id)))
                    for tenant_id, key_id, by_old in keys
                ],
            )
            count, last = count + len(keys), keys[-1][:2]
        secret = rewrapped(state.wrapped_secret, context_of_secret())
        await store.replace_master(connection, new.master_key_id, secret)
    return count
