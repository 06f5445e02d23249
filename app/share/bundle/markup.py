"""HTML that is escaped by construction: text becomes a part of a page only through ``el`` or ``text``.

A verifier is installed with few packages, and a template engine is none of them.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias


class Html(str):
    """A piece of a page that is markup already."""

    __slots__ = ()


Child: TypeAlias = "str | Iterable[Child] | None"
"""What may stand in an element: text, which is escaped, markup, nothing, or some of these."""

_HIDDEN = "\N{REPLACEMENT CHARACTER}"
_VOID = frozenset({"meta", "br", "hr"})


def el(name: str, /, *children: Child, **attributes: str | None) -> Html:
    """An element; an underscore at the end of an attribute's name, as in ``class_``, is left out, and those that are
    None with it."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{said}>")
    return Html(f"<{name}{said}>{text(*children)}</{name}>")


def text(*children: Child) -> Html:
    """These one after the other. Of text, what is not printable is shown as U+FFFD: nothing in it turns or hides what
    stands around it."""
    pieces: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            pieces.append(child)
        elif isinstance(child, str):
            pieces.append(html.escape("".join(each if each.isprintable() else _HIDDEN for each in child)))
        else:
            pieces.append(text(*child))
    return Html("".join(pieces))
