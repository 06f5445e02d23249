"""A scheduler's log of before this product, "v1": its rows become the beginning of a chain, unchanged.

A row of v1 has no seq and no payload digest. Its link is SHA-256 over the joined texts of HLC, job id, action, previous
link and payload digest (``ledger.chain.link_v1``), which is link version 1 here. So each row becomes one entry with its
own HLC and link; ``seq`` counts the rows of a tenant in the order of ``id``, and the digest is computed.

PostgreSQL keeps a v1 payload as ``jsonb``, so the bytes that were hashed are gone. Two forms of them can be rebuilt:
canonical JSON (RFC 8785), and the text that PostgreSQL prints. A chain has one form, and each row excludes the one that
it was not hashed in; of ``{}`` both are the same text, so that row excludes none.

A chain is taken whole, or up to its first fault. Invariants::

    seq of the rows taken     1..n without gap
    previous link of row n    link of row n - 1, None for the first
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Final, NamedTuple

from ledger import canonical
from ledger.bundle.format import PAYLOAD_BYTES_MAX
from ledger.bundle.rows import Row
from ledger.chain import form, link_v1
from ledger.errors import InvalidInputError, V1ChainBrokenError
from ledger.hlc import Hlc

VERSION: Final = 1
"""The link version of the entries."""
ACTIONS: Final = frozenset(("ENQUEUE", "DEQUEUE", "EXECUTE", "COMPLETE", "FAIL"))
"""The actions of v1. Any other could be taken for a fact that this ledger records itself, such as a verdict."""


class V1Row(NamedTuple):
    """One row of a v1 log; a column is None where it is NULL."""

    id: int
    t_hlc: str | None
    job_id: str | None
    action: str | None
    prev_chain_link: str | None
    chain_link: str | None
    payload: str | None
    """The text that PostgreSQL prints; None if it is too long as well."""
    payload_bytes: int | None
    """Length of that text."""


class V1Head(NamedTuple):
    """The end of a v1 chain, as its table of heads has it."""

    chain_link: str | None
    t_hlc: str | None


def _canonical(text: str) -> str:
    return canonical.encode(canonical.read(text)).decode()


_FORMS: Final[Mapping[str, Callable[[str], str]]] = {"canonical": _canonical, "jsonb": str}
"""The forms of a payload that may have been hashed, by name."""


class V1Chain:
    """Takes the rows of one tenant's v1 chain, in the order of ``id``."""

    def __init__(self) -> None:
        self.seq = 0
        self.chain_link: str | None = None
        self.t_hlc: str | None = None
        self._forms = tuple(_FORMS)
        """Names of the forms in which all rows so far may have been hashed."""

    @property
    def payload_form(self) -> str:
        """Name of the form in which payloads were hashed; the first of several if no row shows which."""
        return self._forms[0]

    def take(self, row: V1Row) -> Row:
        """The entry of the next row, in the order of ``ENTRY_COLUMNS``, verified.

        Raises:
            V1ChainBrokenError: the row does not follow, or was changed.
            InvalidInputError: the row is in order, and no chain of this ledger can hold it.
        """
        t_hlc, job_id, action, payload, link = _whole(row)
        if row.prev_chain_link != self.chain_link:
            raise V1ChainBrokenError(
                f"{_name(row)} names {row.prev_chain_link} as the link before it, and {self.chain_link} is there"
            )
        payload = self._hashed(row, t_hlc, job_id, action, payload, link)
        if action not in ACTIONS:
            known = ", ".join(sorted(ACTIONS))
            raise InvalidInputError(f"{_name(row)} has the action {action[:100]!r}; v1 has {known}")
        if (fault := form.fault_of(VERSION, t_hlc, job_id, action, payload, None)) is not None:
            raise InvalidInputError(f"{_name(row)} cannot be an entry: {fault}")
        digest, prev = sha256(payload.encode()).hexdigest(), self.chain_link
        self.seq, self.chain_link, self.t_hlc = self.seq + 1, link, t_hlc
        return (self.seq, t_hlc, *Hlc.parse(t_hlc), job_id, action, VERSION, prev, link, digest, payload, None)

    def check_end(self, head: V1Head | None) -> None:
        """Check that the rows end where the table of heads says.

        Raises:
            V1ChainBrokenError: they do not, or the table has no row of the tenant.
        """
        if head is None:
            raise V1ChainBrokenError("chain_heads has no row of the tenant, so nothing shows where its chain ends")
        if head != (self.chain_link, self.t_hlc):
            raise V1ChainBrokenError(
                f"chain_heads says that the chain ends with link {head.chain_link} at {head.t_hlc}, and its last row "
                f"has link {self.chain_link} at {self.t_hlc}: rows were removed or added"
            )

    def _hashed(self, row: V1Row, t_hlc: str, job_id: str, action: str, text: str, link: str) -> str:
        """The payload in the form in which it was hashed."""
        fitting: dict[str, str] = {}
        for name in self._forms:
            try:
                payload = _FORMS[name](text)
            except InvalidInputError as error:
                raise InvalidInputError(f"{_name(row)} cannot be an entry: its payload: {error}") from error
            digest = sha256(payload.encode()).hexdigest()
            if link_v1(t_hlc, job_id, action, self.chain_link, digest).hex() == link:
                fitting[name] = payload
        if not fitting:
            raise V1ChainBrokenError(
                f"the link of {_name(row)} is not that of its columns: the row was changed"
                + (", or its payload was hashed in a form that is not known" if len(self._forms) > 1 else "")
            )
        self._forms = tuple(fitting)
        return fitting[self.payload_form]


def _name(row: V1Row) -> str:
    return f"row id {row.id}"


def _whole(row: V1Row) -> tuple[str, str, str, str, str]:
    """Its HLC, job id, action, payload and link."""
    if row.payload_bytes is not None and row.payload_bytes > PAYLOAD_BYTES_MAX:
        raise InvalidInputError(
            f"{_name(row)} has a payload of {row.payload_bytes} bytes, and an entry takes {PAYLOAD_BYTES_MAX}"
        )
    found = {name: getattr(row, name) for name in ("t_hlc", "job_id", "action", "payload", "chain_link")}
    for name, value in found.items():
        if value is None:
            raise V1ChainBrokenError(f"{name} of {_name(row)} is NULL, which v1 never writes")
    t_hlc, job_id, action, payload, link = found.values()
    return t_hlc, job_id, action, payload, link
