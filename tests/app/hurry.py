"""A node that answers a write soon when it does not reach its level, once what comes before was given its time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from app.node.service import Service


@contextmanager
def hurried(service: Service, timeout_s: float = 1.0) -> Iterator[None]:
    """Writes that begin while the context is open wait ``timeout_s`` for their level, as with ``write.timeout``."""
    answers = service.submitter.answers
    patient_s, answers._write_timeout_s = answers._write_timeout_s, timeout_s
    try:
        yield
    finally:
        answers._write_timeout_s = patient_s
