"""Private fields of submitted events: their subject, and the key that seals them.

An event with a value in a field that its tenant declared private must name the subject: in its member ``subject``, else
in the field that the declaration names. Such an event gets a seal or is refused::

    the declaration is not certain      refused, if it has any field that may be private, or names a subject
    the tenant declared nothing         unchanged; refused if it names a subject, so that an event with a subject is
                                        never stored in clear, whatever this node knows
    text or a list where an object      refused: it may hold values of a declared private path
      with private fields should be
    no private field has a value        unchanged, whether or not it names a subject
    otherwise                           sealed with the subject's key, which is durable by then
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from app.runtime.sharing import in_turns
from app.trust.privacy_knowledge import PrivacyKnowledge
from app.trust.subject_keys import Tag
from app.write.pending.requests import Draft, EventLines, FieldSeal, RequestKey
from ledger import canonical, private_fields
from ledger.errors import CanonicalError, InvalidEventError, InvalidInputError
from ledger.private_fields import Declaration, Path

SUBJECT_CHARACTERS_MAX = 256


class Sealing:
    """Gives events of tenants with private fields their seal."""

    def __init__(self, knowledge: PrivacyKnowledge) -> None:
        self._knowledge = knowledge

    def may_have_private(self, draft: Draft) -> bool:
        """Whether ``draft`` may need a seal or a refusal because of private fields; ``prepare`` decides."""
        knowledge = self._knowledge
        return bool(knowledge.doubts) or draft.subject is not None or draft.tenant_id in knowledge.declarations

    async def prepare(self, draft: Draft) -> Draft:
        """``draft``, sealed if need be.

        Raises:
            InvalidInputError: it has private fields and names no subject, or one that is not allowed.
            PrivacyUnavailableError, DatabaseUnavailableError: the key is not available now.
        """
        if (found := self._examine(draft)) is None:
            return draft
        tag, values = found
        keys = await self._knowledge.keys.of_subjects(draft.tenant_id, [tag])
        return draft._replace(seal=FieldSeal(keys[tag], draft.tenant_id, values))

    async def prepare_lines(self, lines: EventLines) -> bool:
        """Seal the lines of one request that need it; returns whether any did.

        Raises:
            InvalidEventError: a line breaks these rules. Otherwise as ``prepare``.
        """
        knowledge, declared = self._knowledge, self._knowledge.declarations
        named = {number for number, draft in lines.drafts.items() if draft.subject is not None}
        if not knowledge.doubts and not named and declared.keys().isdisjoint(lines.tenants):
            return False
        wanted: dict[str, set[Tag]] = defaultdict(set)
        found: dict[int, tuple[Tag, list[tuple[Path, bytes]]]] = {}
        async for number, (tenant_id, _) in in_turns(enumerate(lines.jobs)):
            if not knowledge.doubts and number not in named and tenant_id not in declared:
                continue
            try:
                examined = self._examine(lines[number])
            except InvalidInputError as error:
                raise InvalidEventError(f"line {number + 1}: {error}", number + 1, error.path) from None
            if examined is not None:
                found[number] = examined
                wanted[tenant_id].add(examined[0])
        keys = {tenant: await knowledge.keys.of_subjects(tenant, tags) for tenant, tags in wanted.items()}
        for number, (tag, values) in found.items():
            draft = lines[number]
            lines.put(number, draft._replace(seal=FieldSeal(keys[draft.tenant_id][tag], draft.tenant_id, values)))
        return bool(found)

    def key_of(self, key: RequestKey | None, is_sealed: bool) -> RequestKey | None:
        """``key``; if an event was sealed, with a body digest that does not let an attacker guess private values, also
        where the key is made of that digest."""
        keyed = None if key is None else self._knowledge.keys.body_digest(key.body_digest)
        if key is None or keyed is None:
            return key
        if not is_sealed:
            return key._replace(other_digest=keyed)
        name = keyed.hex() if key.key == key.body_digest.hex() else key.key
        return RequestKey(key.route, name, keyed, key.body_digest)

    def _examine(self, draft: Draft) -> tuple[Tag, list[tuple[Path, bytes]]] | None:
        """The tag of the event's subject, and its private values in canonical form; None if it has none."""
        if self._knowledge.doubts and (draft.subject is not None or private_fields.may_hold_private(draft.fields)):
            self._knowledge.check_certain(draft.tenant_id)
        if (declaration := self._knowledge.declarations.get(draft.tenant_id)) is None and draft.subject is None:
            return None
        if declaration is None:
            raise InvalidInputError(
                f"subject: tenant {draft.tenant_id} has no private fields that this node knows of", ("subject",)
            )
        private_fields.refuse_marks(draft.fields)
        values = []
        for path in declaration.fields:
            private_fields.refuse_hidden(draft.fields, path)
            there, value = private_fields.value_at(draft.fields, path)
            if there:
                values.append((path, _canonical(value, path)))
        return (self._knowledge.keys.tag(draft.tenant_id, _subject_of(draft, declaration)), values) if values else None


def _subject_of(draft: Draft, declaration: Declaration) -> str:
    if draft.subject is not None:
        return draft.subject
    path = declaration.subject or ("subject",)
    there, subject = private_fields.value_at(draft.fields, path) if declaration.subject else (False, None)
    if not there:
        raise InvalidInputError(
            "subject: the event has private fields and does not say whose they are; add this member", ("subject",)
        )
    if not isinstance(subject, str) or not 0 < len(subject) <= SUBJECT_CHARACTERS_MAX:
        raise InvalidInputError(
            f"{'.'.join(path)}: names the subject, so it must be a text of 1 to {SUBJECT_CHARACTERS_MAX} characters",
            path,
        )
    return subject


def _canonical(value: Any, path: Path) -> bytes:
    try:
        return canonical.encode(value)
    except CanonicalError as error:
        raise CanonicalError(str(error), (*path, *error.path)) from None
