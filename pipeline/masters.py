"""The master that Spark runs under: what ``--master`` may say, and whether one of a standalone cluster is there."""

from __future__ import annotations

import os
import re
import socket
from typing import Final

from ledger.errors import ConfigurationError

LOCAL_MASTER: Final = "local[*]"
CONNECT_TIMEOUT_S: Final = 5.0
"""How long each master of a standalone cluster may take to accept a connection."""

_LOCAL: Final = re.compile(r"local(?:\[(\*|[1-9]\d{0,3})(?:,\d{1,3})?\])?")
_ADDRESS: Final = r"(?:\[[0-9a-fA-F:.]+\]|[^\s,:/\[\]]+):\d{1,5}"
_STANDALONE: Final = re.compile(rf"spark://{_ADDRESS}(?:,{_ADDRESS})*")
_OTHER: Final = re.compile(r"k8s://\S+|yarn|local-cluster\[\d+,\d+,\d+\]")


def refuse_unless_master(master: str) -> None:
    """Look at how ``master`` is spelled.

    Raises:
        ConfigurationError: it is none.
    """
    if not any(form.fullmatch(master) for form in (_LOCAL, _STANDALONE, _OTHER)):
        raise ConfigurationError(
            f"--master {master}: must be local[*], local[N] for N cores of this machine, spark://HOST:PORT, yarn or "
            "k8s://HOST:PORT"
        )


def refuse_unless_there(master: str) -> None:
    """Connect to the masters of a standalone cluster until one accepts; of others nothing is asked.

    Spark itself would ask one that is not there for a minute.

    Raises:
        ConfigurationError: none of them does.
    """
    if not _STANDALONE.fullmatch(master):
        return
    reasons = []
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        except UnicodeError:  # Of the encoding of names, which looks at their labels.
            reasons.append(f"{address}: no host can have that name")
        except (OSError, OverflowError) as error:
            reasons.append(f"{address}: {getattr(error, 'strerror', None) or error}")
        else:
            return
    raise ConfigurationError(f"--master {master}: no Spark master is there ({'; '.join(reasons)})")


def is_local(master: str) -> bool:
    """Whether tasks run in the driver's own Java."""
    return _LOCAL.fullmatch(master) is not None


def local_cores(master: str) -> int:
    """The cores that a local master takes."""
    local = _LOCAL.fullmatch(master)
    assert local is not None, f"{master} is local"
    named = local[1] or "1"
    return len(os.sched_getaffinity(0)) if named == "*" else int(named)
