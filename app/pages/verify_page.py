"""``/verify``: one HTML file that verifies bundles and receipts in a browser alone, joined of the files of ``verify``.

The sources are modules of script, which say what they take from each other. Joined, each stands in a function of its
own that answers what it exports, so that the page is one file that opens from disk. Nothing else is done to them: what
somebody reads in the page is what stands here. ``ENGINE`` runs in a worker, ``PAGE`` beside it.
``ml_dsa.js`` alone is a library (``lab.vendored``).

The Content-Security-Policy allows this script and this style by their digests, a worker made of the page's own text,
and nothing else: no network at all.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

from app.pages import PageFile, page_file

ENGINE: Final = (
    "sha256.js",
    "encoding.js",
    "json.js",
    "hlc.js",
    "merkle.js",
    "job_index.js",
    "ml_dsa.js",
    "keys.js",
    "dsse.js",
    "note.js",
    "policy.js",
    "container.js",
    "manifest.js",
    "facts.js",
    "form.js",
    "entries.js",
    "findings.js",
    "callers.js",
    "verdicts.js",
    "snapshots.js",
    "kept_index.js",
    "bundle.js",
    "floor.js",
    "anchors.js",
    "proposals.js",
    "commitments.js",
    "judging.js",
    "receipt.js",
    "jobs.js",
    "worker.js",
)
"""Each behind those that it takes from."""
PAGE: Final = ("words.js", "facts.js", "element.js", "given.js", "timeline.js", "report.js", "engine.js", "page.js")

_IMPORT: Final = re.compile(r'^import (\{[^}]*\}) from "\./([a-z0-9_]+\.js)";$', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export (?=(?:async )?(?:class|const|function) (\w+))", re.MULTILINE)
_ENDS_MARKUP: Final = re.compile(r"</?script|</?style|<!--", re.IGNORECASE)


class VerifyPage(NamedTuple):
    """The page as one file, and the policy that whoever serves it sends along; the page carries its own too."""

    file: PageFile
    policy: str


@cache
def verify_page() -> VerifyPage:
    """The page, joined from its sources."""
    style, engine, page = _source("verify.css"), _joined(ENGINE), _joined(PAGE)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_digest(page)}",
            f"style-src {_digest(style)}",
            "worker-src blob:",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types tallystick-verify",
        )
    )
    parts = {"policy": policy, "style": style, "engine": engine, "page": page}
    html = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _source("verify.html"))
    return VerifyPage(page_file(html.encode(), ".html"), f"{policy}; frame-ancestors 'none'")


def _joined(names: tuple[str, ...]) -> str:
    """These modules as one script, each after those that it takes from."""
    texts = []
    for at, name in enumerate(names):
        source = _source(name)
        assert {taken for _, taken in _IMPORT.findall(source)} <= {*names[:at]}, (
            f"{name} stands before what it takes from"
        )
        exported = ", ".join(_EXPORT.findall(source))
        body = _EXPORT.sub("", _IMPORT.sub(r'const \1 = modules["\2"];', source)).strip()
        texts.append(f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();\n')
    script = '"use strict";\nconst modules = {};\n' + "\n".join(texts)
    assert _ENDS_MARKUP.search(script) is None, "a script holds what would end it in a page"
    return script


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _source(name: str) -> str:
    return (files("app") / "pages" / "verify" / name).read_text("utf-8")
