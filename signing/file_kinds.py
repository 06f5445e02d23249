"""Whether a file is meant to be a bundle or a receipt, by its first bytes, and what it looks like where it is neither.

A damaged bundle is judged, and called so; a picture that somebody named instead of a bundle is not. So little is asked
of a file that no damage to a few bytes makes another kind of it::

    bundle     begins with the name of the first member, but for at most 4 of its 24 bytes; or is a tar archive whose
               first 4096 bytes name a member of a bundle
    receipt    has "receipt" or "anchors" among its first bytes, as JSON names them
"""

from __future__ import annotations

import re
from typing import Final

from ledger.bundle.format import EVIDENCE, TAIL_ANCHORED, entries_name

HEAD_BYTES: Final = 4096
"""How much of the beginning of a file is read."""

_FIRST_MEMBER: Final = entries_name(1).encode()
_MAGIC: Final = slice(257, 262)
_DAMAGED_MAX: Final = 4
"""Bytes of the first name that may be others."""
_MEMBERS: Final = (_FIRST_MEMBER, *(name.encode() for name in (*TAIL_ANCHORED, EVIDENCE)))
_TAR: Final = b"ustar"
_RECEIPT_NAMES: Final = (b'{"receipt"', b'"receipt":', b'{"anchors":')
_RECEIPT_HEAD: Final = 64

_MAGIC_BYTES: Final = (
    (b"\x89PNG", "a picture"),
    (b"\xff\xd8\xff", "a picture"),
    (b"GIF8", "a picture"),
    (b"%PDF-", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a file compressed with gzip; decompress it first"),
    (b"\x28\xb5\x2f\xfd", "a file compressed with zstd; decompress it first"),
    (b"PAR1", "a Parquet file, such as an archive has: tally pipeline verify --archive verifies that"),
    (b"\x7fELF", "a program"),
)
_TEXTS: Final = (
    (re.compile(rb"-----BEGIN "), "a PEM file, such as a key"),
    (re.compile(rb"<!doctype html|<html", re.IGNORECASE), "a page (HTML), such as a report of a verification"),
    (re.compile(rb"# "), "a text in Markdown, such as a report of a verification"),
    (re.compile(rb"[^\n]+\n[0-9]+\n[A-Za-z0-9+/]+=*\n"), "a checkpoint: give it with --checkpoint"),
    (re.compile(rb'\{\s*"payload(Type)?"'), "a signature in a DSSE envelope, such as that of a report"),
    (re.compile(rb'\{\s*"keys"'), "a list of keys: give it with --keys"),
    (re.compile(rb"[\[{]"), "JSON, such as a report of a verification"),
)


def is_like_bundle(head: bytes) -> bool:
    """Whether a file that begins so is a bundle, whole or damaged."""
    if head and _FIRST_MEMBER.startswith(head):
        return True
    same = sum(found == wanted for found, wanted in zip(head, _FIRST_MEMBER, strict=False))
    if same >= len(_FIRST_MEMBER) - _DAMAGED_MAX:
        return True
    return head[_MAGIC] == _TAR and any(name in head for name in _MEMBERS)


def is_like_receipt(head: bytes) -> bool:
    """Whether a file that begins so is a receipt, whole or damaged."""
    return any(name in head[:_RECEIPT_HEAD] for name in _RECEIPT_NAMES)


def looks_like(head: bytes) -> str:
    """What a file that begins so looks like, in words."""
    if not head:
        return "an empty file"
    if is_like_bundle(head):
        return "a bundle: tally verify-bundle verifies that"
    if is_like_receipt(head):
        return "a receipt: tally verify-proof verifies that"
    for magic, name in _MAGIC_BYTES:
        if head.startswith(magic):
            return name
    if head[_MAGIC] == _TAR:
        return "a tar archive of something else"
    beginning = head.lstrip()
    for form, name in _TEXTS:
        if form.match(beginning):
            return name
    return "text" if _is_text(head) else "binary data"


def _is_text(head: bytes) -> bool:
    if b"\0" in head:
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        # The last character may be cut.
        return error.start >= len(head) - 3
    return True
