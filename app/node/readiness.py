"""The checks of ``/readyz`` by name; each returns None while nothing is wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from app.node.service import Service
from app.node.start.procedure import StartedNode
from app.read.copies import Replicas
from app.read.readiness import Check
from app.runtime.settings.config import Settings
from app.runtime.state.node import HISTORY_READ, ROWS_LOCKED, Node
from app.share.archive import Archiving
from app.trust.oidc import OidcIssuer
from app.trust.privacy_knowledge import PrivacyKnowledge
from app.trust.tls import ServerTls
from app.write.followers.witnesses import Witnesses
from ledger import rfc3339
from ledger.facts.events import SYSTEM_TENANT
from ledger.text import first_of

TENANTS_NAMED_MAX = 10
"""Damaged tenants that ``/readyz`` names."""


def readiness_checks(service: Service) -> Mapping[str, Check]:
    """The checks that make the node not ready, beside those of every service."""
    leadership = service.leadership
    return {
        "chaining": lambda: service.appender.fault,
        "backlog": service.backlog_fault,
        "quorum": lambda: None if leadership is None else leadership.fault(),
        "system": lambda: _system_fault(service.node),
        "checkpoints": lambda: service.notary.checkpoint_fault or service.upkeep.control_fault,
    }


def reported_checks(
    service: Service,
    started: StartedNode,
    knowledge: PrivacyKnowledge,
    tls: ServerTls | None,
    issuer: OidcIssuer | None,
    replicas: Replicas | None,
    witnesses: Witnesses | None,
    archiving: Archiving | None,
) -> Mapping[str, Check]:
    """The checks of ``/readyz`` that do not stop writes."""
    return {
        "signing": lambda: (
            service.keys.fault or (service.notary.last_error if service.appender.fault is None else None)
        ),
        "admission": lambda: service.keys.not_admitted,
        "keys": service.trust.fault,
        "database_role": lambda: started.role_fault,
        "authentication": lambda: _open_fault(service.settings, len(service.tokens.known)),
        "tls": lambda: _tls_fault(service.settings, tls),
        "scrub": service.scrub.fault,
        "clock": lambda: service.node.wall.fault() or _time_fault(service.node),
        "breaks": service.breaks.fault,
        "lost": service.losses.fault,
        "unchained": service.other_logs.fault,
        "tenants": lambda: _named("quarantined, their chains are damaged", service.node.damaged),
        "locks": lambda: (
            _named("not chained, another session keeps their rows locked", _waiting_for(service.node, ROWS_LOCKED))
            or _named("not chained yet, their commitments are being read", _waiting_for(service.node, HISTORY_READ))
            or _named("not signed, another session keeps their trees locked", service.notary.locked)
            or _named("not in lists, another session keeps their places locked", service.job_table.locked)
        ),
        "privacy": lambda: (
            knowledge.keys.fault
            or _named("taking nothing that may be private, their rows are damaged", knowledge.doubts)
        ),
        "job_table": lambda: service.job_table.last_error,
        "exchange": service.regions.fault,
        "replicas": lambda: None if replicas is None else replicas.fault(),
        "witnesses": lambda: None if witnesses is None else witnesses.fault,
        "archive": lambda: None if archiving is None else archiving.fault(),
        "rows": lambda: _named(
            "signed no further, their rows are broken",
            [tenant_id for tenant_id in service.node.unsigned if service.breaks.open(tenant_id)],
        ),
        "watch": lambda: _named(
            "not watched in their newest entries, which no checkpoint by an admitted key covers: it was changed, or "
            "the node that writes is not admitted, is down, or cannot store checkpoints (signing)",
            service.node.unfollowed,
        ),
        **({} if issuer is None else {"issuer": lambda: issuer.keys.fault}),
    }


def _waiting_for(node: Node, reason: str) -> list[str]:
    """The tenants that are not chained for this reason."""
    return [tenant_id for tenant_id, why in node.waiting.items() if why == reason]


def _system_fault(node: Node) -> str | None:
    """Keys, tokens and acts of operators are entries of ``_system``: while it cannot be chained, they fail."""
    reason = node.damaged.get(SYSTEM_TENANT)
    return None if reason is None else f"the chain of tenant {SYSTEM_TENANT} is damaged and takes no entry: {reason}"


def _time_fault(node: Node) -> str | None:
    ahead_ms = node.clock.offset_ms(node.wall.now_ms())
    if ahead_ms <= node.clock.max_clock_skew_ms:
        return None
    return (
        f"the ledger's time is {ahead_ms} ms ahead of the wall clock, which stood there when events were recorded; "
        f"until the clock comes to {rfc3339.text_of(node.clock.last.physical_ms)} new events carry that time, in their "
        "order, and other ledgers refuse what they are sent of them"
    )


def _open_fault(settings: Settings, tokens: int) -> str | None:
    """The fault of a node that has valid tokens but asks no caller for one; ``auth.allow_open`` says that this is
    intended."""
    if not tokens or settings.auth.mode != "none" or settings.auth.allow_open:
        return None
    return (
        f"tokens of the ledger count ({tokens}) and nobody is asked for one: auth.mode is none, so whoever reaches "
        f"{settings.http.listen} may do everything; set auth.mode to tokens and restart, or revoke the tokens"
    )


def _tls_fault(settings: Settings, tls: ServerTls | None) -> str | None:
    if settings.tokens_in_the_clear:
        return (
            f"tokens travel in the clear: others can reach {settings.http.listen}, and neither tls.cert nor "
            "http.trusted_proxies is set"
        )
    return None if tls is None else tls.fault()


def _named(what: str, tenants: Collection[str]) -> str | None:
    """``what`` with the tenants that it is true of; None when there are none."""
    return f"{what}: {first_of(sorted(tenants), TENANTS_NAMED_MAX)}" if tenants else None
