"""The grammar of the names of tenants, nodes, callers, gates and jobs; declared only here.

Each is a regular expression for the whole name, without anchors, in the syntax that Python, Rust and JSON Schema share.
"""

import re

NODE_ID = "[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
"""A node; it is the last part of an HLC, so it has no colon."""

REPORT_ID = f"({NODE_ID})-[0-9a-f]{{32}}"
"""A report: the node that keeps it, and a text that nobody guesses."""

TENANT_ID = "[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9])?"
"""A tenant that may be written to."""

READABLE_TENANT_ID = f"_system|{TENANT_ID}"
"""A tenant, or the one whose chain records what happens to the ledger itself."""

TENANTS = rf"{READABLE_TENANT_ID}|\*|[a-z0-9][a-z0-9_-]{{0,61}}\*"
"""A pattern of tenants: a name, a prefix and ``*``, or ``*`` for all."""

NEWS_CURSOR = f"[0-9a-f]{{16}}:[0-9]{{1,18}}(:({READABLE_TENANT_ID}))?"
"""What one ledger told another: the run of a node, the number of its last change, and a tenant while all are listed."""

PRINCIPAL = "[A-Za-z0-9][A-Za-z0-9._@-]{0,127}"
"""A caller that the ledger itself names; an id from an external issuer has a colon."""

GATE = "[a-z0-9]{1,32}"
"""Region and gate of a job id that a node makes."""

_JOB_CHARACTER = "[A-Za-z0-9._:-]"
JOB_ID = (
    f"[A-Za-z0-9_:-]{_JOB_CHARACTER}{{0,127}}"
    rf"|\.[A-Za-z0-9_:-]{_JOB_CHARACTER}{{0,126}}"
    rf"|\.\.{_JOB_CHARACTER}{{1,126}}"
)
"""A job: 1 to 128 characters, but neither ``.`` nor ``..``, which no URL can name."""

PROMISE_NAME = "[A-Za-z0-9_:-][A-Za-z0-9._:-]{0,119}"
"""A capsule, gang, node, mission or module: two of them and a few words fit into the name of an entry."""

SPAN = "[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"
"""A span as ``traceparent`` of W3C Trace Context names it; its second part is its trace."""

_is_readable_tenant = re.compile(READABLE_TENANT_ID).fullmatch


def is_readable_tenant(name: str) -> bool:
    """Whether a tenant can have this name; another name is in Postgres only if someone edited it."""
    return _is_readable_tenant(name) is not None


def anchored(grammar: str) -> str:
    """``grammar`` for matchers that search anywhere in a text, such as JSON Schema."""
    return f"^({grammar})$"
