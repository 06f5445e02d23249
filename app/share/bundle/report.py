"""The report on verified bundles that a person can file: what was checked, against what, what not, how to repeat it.

Markdown that reads as plain text too. It says nothing that the JSON form does not.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from app.share.bundle.counting import JOBS_MAX, Actors, Counts
from ledger.hlc import Hlc
from signing.bundle.judging import BUNDLE, BundleVerdict, tree_head_json
from signing.checkpoint import JudgedCheckpoint
from signing.keys import Keyring
from terminal.counted import counted

OUTCOMES: Final = {
    0: "WHOLE AND SIGNED: all that a bundle can show was checked and holds",
    1: "COULD NOT BE READ",
    2: "TAMPERED WITH OR CORRUPT: do not rely on it",
    3: "INCOMPLETE: nothing wrong was found, not everything could be checked",
    4: "KEY UNKNOWN: a key that signed is not held, had expired or was revoked",
}
"""What an exit code means, for the first line about a file."""

ACTORS_SHOWN_MAX: Final = 20
"""Names that the text shows; of the others it says how often they stand there, and the JSON form has them."""

MEANINGS: Final = {
    BUNDLE: "the file, its parts and the signed manifest that lists them",
    "links": "each entry binds the one before it; none is missing, added or moved",
    "payloads": "each payload is the one that was chained",
    "head": "the chain ends where the manifest says",
    "snapshots": "the signed statements say what the entries say",
    "signatures": "the signatures of those statements",
    "tree": "the Merkle tree over all entries",
    "projection": "verdicts on proposals follow from the entries before them",
    "checkpoint": "checkpoints, of the bundle and kept elsewhere",
}
"""What each aspect of a verdict is."""


@dataclass(frozen=True)
class VerifiedFile:
    """One file and what came of it; ``error`` instead of ``outcome`` when it could not be read."""

    name: str
    exit_code: int
    outcome: BundleVerdict | None = None
    error: str | None = None
    counts: Counts | None = None
    """What the entries add up to, where a report asks for it and they hold."""

    def to_json(self) -> dict[str, Any]:
        """The verdict object with the file's name."""
        if self.outcome is None:
            return {"file": self.name, "exit_code": self.exit_code, "error": self.error}
        counts = {} if self.counts is None else {"counts": self.counts.to_json()}
        return {**self.outcome.to_json(), **counts, "file": self.name, "exit_code": self.exit_code}


@dataclass(frozen=True)
class Against:
    """What the files were verified against: keys and a checkpoint that the caller brought, and where from."""

    keys_from: str | None
    keyring: Keyring | None
    checkpoint_from: str | None
    kept: JudgedCheckpoint | None
    outsiders_from: Sequence[str] = ()
    """The options that named witnesses and authorities, as they stood."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        keys = None if self.keyring is None else [key.to_json() for key in self.keyring]
        kept = None if self.kept is None else {"file": self.checkpoint_from, **tree_head_json(self.kept.checkpoint)}
        return {"keys_from": self.keys_from, "keys": keys, "checkpoint": kept}


def to_json(files: Sequence[VerifiedFile], against: Against, verified_at: datetime, tool: str) -> dict[str, Any]:
    """The report as one JSON object; of a single file its verdict's members stand at the top as well."""
    items = [file.to_json() for file in files]
    return {
        **(items[0] if len(items) == 1 else {}),
        "verified_at": utc(verified_at),
        "verified_by": tool,
        "against": against.to_json(),
        "bundles": items,
    }


def to_markdown(files: Sequence[VerifiedFile], against: Against, verified_at: datetime, tool: str) -> str:
    """The report as text."""
    lines = [
        "# Verification of " + ("a ledger bundle" if len(files) == 1 else f"{len(files)} ledger bundles"),
        "",
        f"Verified {utc(verified_at)} by {tool}, offline, from the files alone.",
        "",
    ]
    for file in files:
        lines += [*_about(file), ""]
    parts = (_keys(against), _checkpoint(against), _times(files), _again(files, against), _sign_off())
    return "\n".join([*lines, *(line for part in parts for line in (*part, ""))])


def _about(file: VerifiedFile) -> Iterator[str]:
    yield f"## {_code(file.name)}"
    yield ""
    yield f"**{OUTCOMES[file.exit_code]}** (exit code {file.exit_code})"
    yield ""
    outcome = file.outcome
    if outcome is None:
        yield f"- {_plain(file.error or '')}"
        return
    yield f"- SHA-256 of the file: {_code(outcome.digest)}, {outcome.size_bytes:,} bytes"
    yield from _contents(outcome)
    yield from _added_up(file.counts)
    yield ""
    yield "| checked | verdict | what it is |"
    yield "|---|---|---|"
    for aspect, verdict in outcome.verdict["verdicts"].items():
        yield f"| {aspect} | {verdict.replace('_', ' ')} | {MEANINGS[aspect]} |"
    yield ""
    first = outcome.verdict["first_break"]
    if first is not None:
        place = f" at seq {first['seq']}" if first["seq"] else ""
        yield f"First break: {_code(first['kind'])}{place}: {_plain(first['detail'])}"
        if first["expected"] is not None or first["actual"] is not None:
            yield f"(expected {_code(str(first['expected']))}, found {_code(str(first['actual']))})"
        yield ""
    yield "Not checked:"
    yield ""
    for text in outcome.not_checked:
        yield f"- {_plain(text)}"
    yield ""
    yield f"Compared with: {_plain(outcome.verdict['compared_with'] or 'no checkpoint')}."
    if outcome.memory is not None:
        yield f"Remembered by whoever verified: {_plain(outcome.memory['says'])}."


def _contents(outcome: BundleVerdict) -> Iterator[str]:
    manifest = outcome.manifest
    if manifest is None:
        return
    yield f"- Tenant {_code(manifest.tenant_id)} of log {_code(manifest.origin)}, exported by {_code(manifest.node_id)}"
    yield f"- Entries seq {manifest.from_seq} to {manifest.to_seq}: {manifest.entry_count:,}"
    yield f"- First entry {_time(manifest.first_hlc)}; last entry {_time(manifest.last_hlc)}"
    yield f"- Link of the last entry: {_code(manifest.to_chain_link)}"
    yield f"- Root of the tree at seq {manifest.tree_size}: {_code(manifest.tree_root)}"
    if outcome.checkpoint is not None:
        yield f"- Checkpoint inside: size {outcome.checkpoint.size}, root {_code(outcome.checkpoint.root.hex())}"
    signed = ", ".join(f"{_code(key)} ({count:,})" for key, count in sorted(outcome.snapshot_keys.items()))
    yield f"- Signed to seq {outcome.verdict['signed_to_seq']}; snapshots by key: {signed or 'none seen'}"
    yield f"- Manifest by key: {', '.join(map(_code, outcome.manifest_keys)) or 'none that is held'}"


def _added_up(counts: Counts | None) -> Iterator[str]:
    if counts is None:
        return
    if counts.jobs is None:
        yield f"- Jobs: more than {JOBS_MAX:,}, not counted by status"
    else:
        by_status = ", ".join(f"{status} {count:,}" for status, count in counts.jobs.items())
        yield f"- Jobs by status, as these entries say: {by_status or 'none'}; {sum(counts.jobs.values()):,} in all"
    yield f"- Events by who sent them: {_actors(counts.senders)}"
    yield f"- Reads of payloads that these entries record, by who read: {_actors(counts.readers)}"
    if any(counts.proposals.values()):
        yield f"- Proposals: {', '.join(f'{count:,} {verdict}' for verdict, count in counts.proposals.items())}"
    if counts.erasures:
        yield (
            f"- Erased: {counted(counts.erasures, 'erasure')} destroyed {counted(counts.erased_keys, 'key')}. What "
            "they protected is in the entries still, as bytes that nobody can read any more; every entry is here"
        )
    else:
        yield "- Erased: nothing, as far as these entries say"


def _actors(counts: Actors) -> str:
    listed = list(counts.named.items())
    shown = [f"{_code(name)} {count:,}" for name, count in listed[:ACTORS_SHOWN_MAX]]
    others = counts.others + sum(count for _, count in listed[ACTORS_SHOWN_MAX:])
    rest = ((others, "others"), (counts.private, "private"), (counts.unnamed, "not said"))
    return ", ".join([*shown, *(f"{what} {count:,}" for count, what in rest if count)]) or "none"


def _keys(against: Against) -> Iterator[str]:
    yield "## Keys"
    yield ""
    if against.keyring is None:
        yield "None was given. Signatures were not checked."
        return
    yield f"From {_code(against.keys_from or '')}; keys inside a bundle are never used."
    yield ""
    for key in against.keyring:
        told = key.to_json()
        window = f"from {told['not_before'] or 'the beginning'} to {told['not_after'] or 'no end'}"
        revoked = f", revoked from HLC {told['revoked_from_hlc']}" if told["revoked_from_hlc"] else ""
        yield f"- {_code(key.key_id)} {key.algorithm}, valid {window}{revoked}"


def _checkpoint(against: Against) -> Iterator[str]:
    yield "## Checkpoint kept elsewhere"
    yield ""
    if against.kept is None:
        yield (
            "None was given. A file that was compared with none that is remembered either cannot show whether its "
            "log was longer once and cut before the export."
        )
        return
    held = against.kept.checkpoint
    yield (
        f"{_code(against.checkpoint_from or '')}: log {_code(held.origin)}, size {held.size}, "
        f"root {_code(held.root.hex())}"
    )
    if against.kept.unknown is not None:
        yield f"It counts for nothing: {_plain(against.kept.unknown)}"


def _times(files: Sequence[VerifiedFile]) -> Iterator[str]:
    yield "## Whose clock the times are"
    yield ""
    yield (
        "Times of entries are those of the clocks of the nodes that wrote them. The ledger binds them and orders by "
        "them; it does not prove them. The time of this verification is that of the clock of the machine that ran it."
    )
    yield ""
    said = [(file, each) for file in files if file.outcome is not None for each in _anchors(file.outcome)]
    if not said:
        yield "No bundle carries a word of a witness or of a time-stamping authority, whose clocks are others."
        return
    yield "Clocks of others, by which the first entries were there:"
    yield ""
    for file, each in said:
        name = f"{_code(file.name)}: " if len(files) > 1 else ""
        detail = "" if each["detail"] is None else f" ({_plain(each['detail'])})"
        yield (
            f"- {name}seq 1 to {each['to_seq']} at {_plain(each['time'])}, said {each['kind']} {_code(each['by'])}: "
            f"{each['status'].replace('_', ' ')}{detail}"
        )


def _anchors(outcome: BundleVerdict) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = outcome.verdict["anchors"]
    return found


def _sign_off() -> Iterator[str]:
    yield "## Signed off"
    yield ""
    for what in ("Name", "Date", "Signature"):
        yield f"{what}: {'_' * 40}"
        yield ""


def _again(files: Sequence[VerifiedFile], against: Against) -> Iterator[str]:
    yield "## To check again"
    yield ""
    yield "```sh"
    yield from commands(files, against)
    yield "```"


def commands(files: Sequence[VerifiedFile], against: Against) -> Iterator[str]:
    """What to run to verify the same again."""
    options = []
    if against.keys_from is not None:
        options += ["--keys", against.keys_from]
    if against.checkpoint_from is not None:
        options += ["--checkpoint", against.checkpoint_from]
    names = [file.name for file in files]
    yield shlex.join(["sha256sum", *names])
    yield shlex.join(["tally", "verify-bundle", *names, *options, *against.outsiders_from])
    for name in names:
        command = shlex.join(["python3", "verify.py", name, *options])
        yield f"{command}  # docs/formats/verify.py, a second implementation"


def _time(hlc: str) -> str:
    """An HLC with the wall-clock time it stands for."""
    try:
        wall = datetime.fromtimestamp(Hlc.parse(hlc).physical_ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return _code(hlc)
    return f"{wall.replace('+00:00', 'Z')} (HLC {_code(hlc)})"


def utc(time: datetime) -> str:
    """RFC 3339, to the second."""
    return time.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _code(text: str) -> str:
    """Text as Markdown code, on one line, whatever it holds."""
    return f"`{_plain(text).replace('`', chr(39))}`"


def _plain(text: str) -> str:
    """Text from a file on one line: nothing in it can begin a heading, a list or a row."""
    return "".join(character if character.isprintable() else "�" for character in text).replace("|", "¦")
