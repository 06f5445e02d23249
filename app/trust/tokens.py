"""The ledger's tokens: followed from the chain of ``_system``, and issued and revoked there.

A token is valid while the chain says so in entries signed by an admitted key (signing.key_history). A change made on
another node takes effect here within ``FOLLOW_INTERVAL_S``, one made on this node at once. While Postgres is away the
tokens known last stay valid, except those that this node revokes. If ``_system`` is damaged, only proved tokens are
valid. A revocation that this node saw is kept beside the data and never forgotten.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from app.runtime.logs import log
from app.runtime.principals import EVERY_TENANT, Principal, Right, grant_of
from app.runtime.state.kept_files import FIRST_TOKEN, KEPT_TOKENS, KeptTokens
from app.runtime.tasks import repeat
from app.trust import callers
from app.trust.callers import KnownTokens
from app.trust.key_changes import FOLLOW_INTERVAL_S, Facts, KeyChanges
from ledger.errors import DurabilityTimeoutError, ForbiddenError, NotFoundError
from ledger.facts.events import SystemAction
from ledger.hlc import Hlc
from signing.key_statement import TOKEN_PREFIX, IssuedToken

FIRST_INTERVAL_S: Final = 0.05
"""Pause between two checks for the file of a first token, while no token is valid."""
FIRST_ID: Final = "first"
"""Id of the first token, until the ledger has issued it."""
_NOT_ISSUED: Final = Hlc(0, 0, "new")


@dataclass(kw_only=True, eq=False)
class Tokens:
    """Follows and changes the ledger's tokens for one node, whose data is in ``folder``. Belongs to one event loop."""

    known: KnownTokens
    keys: KeyChanges
    folder: Path

    def __post_init__(self) -> None:
        self._kept, self._is_stored = KeptTokens(), True
        self._issued: dict[str, IssuedToken] = {}
        self._had_first = False
        """Whether the file of a first token was there when the chain was last read."""
        self._issuing_first = asyncio.Lock()
        self._keeping = asyncio.Lock()
        """Orders the writes of the file, so that an older state never comes last."""

    async def start(self) -> None:
        """Read the tokens before the first request is served.

        Raises:
            StartRefusedError: the file beside the data cannot be read. DatabaseUnavailableError, or one of
            ``DATABASE_FAULTS``: Postgres does not say.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._kept = await asyncio.to_thread(KEPT_TOKENS.load, self.folder)
        await self.refresh()

    async def run(self) -> None:
        """Follow the chain until cancelled."""
        await repeat(self._follow, 0.0, "tokens_not_followed")

    async def _follow(self) -> None:
        await self._pause()
        await self.refresh()
        if self.keys.recorded.is_set():
            await self._issue_first()

    async def _pause(self) -> None:
        """Wait for the next read of the chain; it comes at once after a first token was made."""
        until_s = time.monotonic() + FOLLOW_INTERVAL_S
        while time.monotonic() < until_s:
            await asyncio.sleep(FOLLOW_INTERVAL_S if self.counting() else FIRST_INTERVAL_S)
            if self._has_first() and not self._had_first:
                return

    async def refresh(self) -> None:
        """Take over the tokens that the chain now says are valid.

        Raises:
            DatabaseUnavailableError: Postgres cannot be reached.
            StartRefusedError: the file of the first token cannot be read; all others are known by then.
        """
        self._had_first = self._has_first()
        self._issued = (await self.keys.history()).tokens
        first = None
        try:
            if not {each.token_id for each in self.counting()} - {*self._kept.revoked}:
                first = await asyncio.to_thread(self._first)
        finally:
            # Not before that file is read: a token may be revoked meanwhile.
            revoked = sorted(
                {*self._kept.revoked, *(each.token_id for each in self._issued.values() if each.is_revoked)}
            )
            counting = [each.token_id for each in self.counting() if each.token_id not in revoked]
            more = [] if first is None or self._is_issued(first) else [first]
            self.known.learn([*self._issued.values(), *more], frozenset(revoked))
            await self._keep(KeptTokens(counting, revoked))

    async def _keep(self, kept: KeptTokens) -> None:
        """Remember the state, even while the disk fails; the write is retried with the next read of the chain."""
        if kept == self._kept and self._is_stored:
            return
        self._kept, self._is_stored = kept, False
        async with self._keeping:
            while not self._is_stored:
                kept = self._kept
                try:
                    await asyncio.to_thread(KEPT_TOKENS.store, self.folder, kept)
                except OSError as error:
                    log.error("tokens_not_kept", error=str(error))
                    return
                self._is_stored = kept == self._kept

    def counting(self) -> list[IssuedToken]:
        """Tokens that are neither revoked nor expired, in the order in which they were issued."""
        now = datetime.now(UTC)
        return [
            each
            for each in self._issued.values()
            if not each.is_revoked and (each.expires_at is None or now < each.expires_at)
        ]

    def issued(self, by: Principal) -> list[IssuedToken]:
        """Every token, newest first, that the caller may issue."""
        return [each for each in reversed(self._issued.values()) if _may_issue(by, each.tenants)]

    async def issue(
        self,
        name: str,
        rights: Collection[str],
        tenants: Collection[str],
        expires_at: datetime | None,
        by: Principal,
    ) -> tuple[IssuedToken, str]:
        """A new token and its text, which cannot be read again.

        Raises:
            InvalidInputError: there is no such right, or no such pattern of tenants. ForbiddenError: ``by`` may not
            administer all these tenants, or those of another who has the name. KeyConflictError: no key of this node
            may vouch for it. NotReadyError: the start of the node is not recorded yet. DatabaseUnavailableError:
            Postgres cannot be reached; nothing has changed. DurabilityTimeoutError: not chained in time; it may still
            be, and no caller has this token. ChainDamagedError: the chain of ``_system`` takes nothing.
        """
        grant = grant_of(rights, tenants)
        if not _may_issue(by, grant.tenants):
            raise ForbiddenError(
                f"{by.name} has not the right {Right.ADMIN} for all tenants of {', '.join(grant.tenants)}"
            )
        if any(each.name == name and not _may_issue(by, each.tenants) for each in self._issued.values()):
            raise ForbiddenError(f"somebody whose tenants {by.name} does not administer is called {name}")
        made = callers.new_token()
        ordered = tuple(str(right) for right in Right if right in grant.rights)
        token = IssuedToken(
            secrets.token_hex(8), name, made.digest, ordered, grant.tenants, _NOT_ISSUED, expires_at, by.id
        )
        await self.keys.check_recorded()
        await self._issue_first()
        await self._enter_issued(token)
        return token, made.text

    async def revoke(self, token_id: str, by: Principal) -> IssuedToken:
        """Revoke the token: on this node at once, on the others once the entry is chained.

        Raises:
            NotFoundError: there is none of this id that the caller may issue.
            DatabaseUnavailableError: this node does not know the token, and Postgres cannot be reached.
            DurabilityTimeoutError: not chained in time; it still will be.
            ChainDamagedError: the chain of ``_system`` takes nothing.
        """
        if token_id not in self._issued:
            await self.refresh()
        if (token := self._issued.get(token_id)) is None or not _may_issue(by, token.tenants):
            raise NotFoundError(f"there is no token {token_id}")
        if not token.is_revoked:
            facts: Facts = {"token_id": token_id, **({} if by.id is None else {"revoked_by": by.id})}
            revoked = sorted({*self._kept.revoked, token_id})
            self.known.learn(self._issued.values(), frozenset(revoked))
            await self._keep(KeptTokens([each for each in self._kept.counting if each != token_id], revoked))
            await self._enter(SystemAction.TOKEN_REVOKED, token_id, facts)
            log.info("token_revoked", token_id=token_id, by=by.id)
        return token._replace(is_revoked=True)

    async def _enter_issued(self, token: IssuedToken) -> None:
        facts = await self.keys.vouched_here(SystemAction.TOKEN_ISSUED, token.facts(), await self.keys.history())
        await self._enter(SystemAction.TOKEN_ISSUED, token.token_id, facts)
        log.info("token_issued", token_id=token.token_id, name=token.name, by=token.issued_by)

    async def _enter(self, action: SystemAction, token_id: str, facts: Facts) -> None:
        await self.keys.in_time(
            self.keys.write_entry(action, f"{TOKEN_PREFIX}{token_id}", facts),
            DurabilityTimeoutError(f"{action} of token {token_id} is in this node's log, and not in the chain yet"),
        )
        await self.refresh()

    def _has_first(self) -> bool:
        return (self.folder / FIRST_TOKEN.name).exists()

    def _first(self) -> IssuedToken | None:
        """The first token, if there is one. Blocks."""
        if (first := FIRST_TOKEN.load(self.folder)) is None:
            return None
        return IssuedToken(
            FIRST_ID,
            first.name,
            bytes.fromhex(first.digest),
            tuple(map(str, Right)),
            (EVERY_TENANT,),
            _NOT_ISSUED,
            None,
            None,
        )

    async def _issue_first(self) -> None:
        """Issue the first token from its file beside the data, unless the ledger has tokens."""
        async with self._issuing_first:
            if (first := await asyncio.to_thread(self._first)) is None:
                return
            if not self._is_issued(first):
                if not self.counting():
                    await self._enter_issued(first._replace(token_id=secrets.token_hex(8)))
                else:
                    log.error("first_token_refused", error="the ledger has tokens; whoever holds one may issue more")
            try:
                await asyncio.to_thread(FIRST_TOKEN.store, self.folder, None)
            except OSError as error:
                log.error("first_token_not_removed", error=str(error))

    def _is_issued(self, token: IssuedToken) -> bool:
        """Whether the ledger has issued a token of this digest, under any id, valid or not."""
        return token.digest in {each.digest for each in self._issued.values()}


def _may_issue(by: Principal, tenants: Collection[str]) -> bool:
    return all(by.may(Right.ADMIN, pattern) for pattern in tenants)
