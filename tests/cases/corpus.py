"""The corpus of cases in docs/formats/cases, which says in its README what the files hold.

A kind of case is one file. Its cases come from a table in this folder; ``python -m tests.cases`` writes the files, and
tests read the files, not the tables. To add a case, add an entry to a table.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Final, NamedTuple

FOLDER: Final = Path(__file__).resolve().parents[2] / "docs" / "formats" / "cases"
WHOLE_BYTES_MAX: Final = 300
"""A shorter file is written whole."""
_ZEROS: Final = re.compile(rb"(\0{8,})")
_TOKEN: Final = re.compile(rb"\0{1,32}|[A-Za-z0-9+/=]{1,32}|[^\0A-Za-z0-9+/=]+", re.DOTALL)


class Case(NamedTuple):
    """A file, what it is held against, and the exit code that it must get."""

    name: str
    file: bytes
    code: int
    why: str
    kept: str | None = None
    """A checkpoint that the verifier kept."""
    keys: str | None = "signer"
    """A name in the kind's ``keys``; None where no keys are given."""
    policy: str | None = None
    signatures: str = "any"
    """Whether one held key is enough, or both must have signed."""


class Part(NamedTuple):
    """The input of one part of a verifier, as JSON, and what it must find."""

    name: str
    given: Mapping[str, Any]
    expected: Any
    why: str


# --- writing --------------------------------------------------------------------------------------


def written(head: Mapping[str, Any], cases: Iterable[Mapping[str, Any]]) -> str:
    """A file of the corpus: a member a line, so that a change of one case is a change of its lines."""
    members = [f" {_json(name)}: {_spread(value)}" for name, value in head.items()]
    listed = ",\n".join(
        "  {\n" + ",\n".join(f"   {_json(name)}: {_value(name, value)}" for name, value in case.items()) + "\n  }"
        for case in cases
    )
    members.append(f' "cases": [\n{listed}\n ]')
    return "{\n" + ",\n".join(members) + "\n}\n"


def spelled(case: Case, first_break: tuple[str, int] | None, files: Files) -> dict[str, Any]:
    """A case as JSON."""
    demanded = None if case.signatures == "any" else case.signatures
    given = {"checkpoint": case.kept, "policy": case.policy, "signatures": demanded}
    return {
        "id": case.name,
        "why": case.why,
        "file": files.spelled(case.name, case.file),
        "keys": case.keys,
        **{name: value for name, value in given.items() if value is not None},
        "exit_code": case.code,
        **({} if first_break is None else {"first_break": dict(zip(("kind", "seq"), first_break, strict=True))}),
    }


def _spread(value: Any) -> str:
    if not isinstance(value, dict):
        return _json(value)
    return "{\n" + ",\n".join(f"  {_json(name)}: {_json(item)}" for name, item in value.items()) + "\n }"


def _json(value: object) -> str:
    return json.dumps(value, separators=(", ", ": "))


def _value(name: str, value: Any) -> str:
    if name == "file" and isinstance(value, dict) and value.get("edits"):
        edits = ",\n".join(f"     {_json(edit)}" for edit in value["edits"])
        return f'{{"like": {_json(value["like"])}, "edits": [\n{edits}\n   ]}}'
    return _json(value)


class Files:
    """Spells files: whole, or as edits of one that was spelled whole before."""

    def __init__(self) -> None:
        self._whole: dict[str, tuple[bytes, list[bytes], Counter[bytes]]] = {}

    def spelled(self, name: str, data: bytes) -> Any:
        """``data``, the file of the case ``name``."""
        whole = _content(data)
        if len(data) <= WHOLE_BYTES_MAX:
            return whole
        tokens = _TOKEN.findall(data)
        counts = Counter(tokens)
        if self._whole:
            like = max(self._whole, key=lambda each: (counts & self._whole[each][2]).total())
            base, base_tokens, _ = self._whole[like]
            edits = {"like": like, "edits": _edits(base_tokens, tokens)}
            assert edited(base, edits["edits"]) == data, name
            if len(_json(edits)) < 0.7 * len(_json(whole)):
                return edits
        self._whole[name] = data, tokens, counts
        return whole


def _content(data: bytes) -> Any:
    """Bytes as text where they can be read, as a number where they are zeros, else in base64."""
    pieces: list[Any] = []
    for number, piece in enumerate(_ZEROS.split(data)):
        if piece:
            pieces.append(len(piece) if number % 2 else _text_or_base64(piece))
    return pieces[0] if len(pieces) == 1 else pieces or ""


def _text_or_base64(data: bytes) -> Any:
    encoded = {"base64": base64.b64encode(data).decode()}
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return encoded
    return text if len(_json(text)) <= 2 * len(data) + 20 else encoded


def _edits(old: Sequence[bytes], new: Sequence[bytes]) -> list[list[Any]]:
    """What makes the new bytes of the old: offset, length and what stands there instead, from the end to the front."""
    offsets = [0]
    for token in old:
        offsets.append(offsets[-1] + len(token))
    found: list[list[Any]] = []
    for tag, begin, end, new_begin, new_end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            text = b"".join(new[new_begin:new_end])
            if found and offsets[begin] - (found[-1][0] + found[-1][1]) <= 8:
                kept = b"".join(old)[found[-1][0] + found[-1][1] : offsets[begin]]
                found[-1] = [found[-1][0], offsets[end] - found[-1][0], found[-1][2] + kept + text]
            else:
                found.append([offsets[begin], offsets[end] - offsets[begin], text])
    return [[offset, length, _content(data)] for offset, length, data in reversed(found)]


# --- reading --------------------------------------------------------------------------------------


def edited(base: bytes, edits: Iterable[Sequence[Any]]) -> bytes:
    """``base`` with other bytes in some places."""
    for offset, length, content in edits:
        base = base[:offset] + content_of(content) + base[offset + length :]
    return base


def content_of(content: Any) -> bytes:
    """The bytes of a text, of so many zeros, of what stands in base64, or of several of these."""
    if isinstance(content, list):
        return b"".join(map(content_of, content))
    if isinstance(content, int):
        return bytes(content)
    return content.encode() if isinstance(content, str) else base64.b64decode(content["base64"], validate=True)


class Found(NamedTuple):
    """A case as the corpus has it."""

    case: Case
    first_break: tuple[str, int] | None
    """Kind and seq of the first break that a verdict must name; None where nothing is broken, or nothing is judged."""


def read_file(kind: str) -> dict[str, Any]:
    """The file of a kind."""
    found: dict[str, Any] = json.loads((FOLDER / f"{kind}.json").read_text())
    return found


def file_cases(kind: str) -> list[Found]:
    """The cases of a kind that are files."""
    files: dict[str, bytes] = {}
    found = []
    for item in read_file(kind)["cases"]:
        spelled = item["file"]
        if isinstance(spelled, dict) and "like" in spelled:
            files[item["id"]] = edited(files[spelled["like"]], spelled["edits"])
        else:
            files[item["id"]] = content_of(spelled)
        given = item.get("checkpoint"), item["keys"], item.get("policy"), item.get("signatures", "any")
        case = Case(item["id"], files[item["id"]], item["exit_code"], item["why"], *given)
        broken = item.get("first_break")
        found.append(Found(case, None if broken is None else (broken["kind"], broken["seq"])))
    return found


def part_cases(kind: str) -> list[Part]:
    """The cases of a kind that are parts of what a verifier does."""
    return [Part(item.pop("id"), item, item.pop("expected"), item.pop("why")) for item in read_file(kind)["cases"]]
