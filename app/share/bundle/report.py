"""The report on verified bundles for filing: the checks made, their inputs, the checks not made, how to repeat them.

It is JSON, Markdown that is readable as plain text, and one HTML page. The JSON form contains everything in the others.
The templates are ``report.md.j2`` and ``report.html.j2``; every value is escaped where it is output.
"""

from __future__ import annotations

import base64
import html
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Undefined
from markupsafe import Markup

from ledger import rfc3339
from ledger.chain.conflict import held_event
from ledger.exit_code import ExitCode, gravest
from ledger.facts.events import ACTOR, EVENTS_BY_ACTION, VERDICTS, CommitmentAction, SystemAction
from ledger.hlc import Hlc
from ledger.machines import jobs
from ledger.machines.exclusions import NO_STATEMENTS, SUBJECT, log_of, statements_of
from ledger.machines.job_fold import JobFold, JobState
from ledger.verification import ENTRY_COLUMNS, FOLD_COLUMNS
from ledger.verification.verdict import quorum_lines
from signing.bundle.reader import BundleReader
from signing.checkpoint import JudgedCheckpoint
from signing.judging import BUNDLE, BundleVerdict
from signing.keys import Keyring
from signing.manifest import REPORT_SUFFIX
from terminal.outcome import counted

JOBS_MAX: Final = 200_000
"""A bundle with more jobs is reported without counts by status, because each job is held until its last entry."""
ACTORS_MAX: Final = 1000
"""Names that are counted separately, in order of appearance; all others are counted together."""

_PLACES: Final = tuple(map(ENTRY_COLUMNS.index, FOLD_COLUMNS))


@dataclass
class Actors:
    """Numbers of entries by actor: by name, for names beyond ``ACTORS_MAX``, for private names, and for entries without
    an actor."""

    named: Counter[str] = field(default_factory=Counter)
    others: int = 0
    private: int = 0
    unnamed: int = 0

    def add(self, payload: Mapping[str, Any]) -> None:
        """Count the actor of one payload."""
        if (actor := payload.get(ACTOR)) is None:
            self.unnamed += 1
        elif not isinstance(actor, str):
            self.private += 1
        elif actor in self.named or len(self.named) < ACTORS_MAX:
            self.named[actor] += 1
        else:
            self.others += 1

    def to_json(self) -> dict[str, Any]:
        """As plain values, the most frequent names first."""
        return {
            "named": dict(sorted(self.named.items(), key=lambda each: (-each[1], each[0]))),
            "others": self.others,
            "private": self.private,
            "unnamed": self.unnamed,
        }


class Counts(NamedTuple):
    """``jobs`` by status, None for more than ``JOBS_MAX``; ``erasures`` are SUBJECT_ERASED entries, which destroyed
    ``erased_keys`` keys; ``senders`` of the events; ``readers`` of payloads, from PAYLOADS_READ entries."""

    jobs: dict[str, int] | None
    erasures: int
    erased_keys: int
    senders: Actors
    readers: Actors
    proposals: dict[str, int]
    """Numbers of ``accepted`` and ``rejected`` proposals, including imported ones."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return self._asdict() | {"senders": self.senders.to_json(), "readers": self.readers.to_json()}


def _told(action: str, job_id: str, text: str) -> str:
    """The action of an entry; for a CONFLICT entry, the action of the event in it."""
    held = held_event(jobs.payload_of(text), job_id) if action == SystemAction.CONFLICT else None
    return action if held is None else held.event.action


def counts_of(reader: BundleReader) -> Counts:
    """The counts of an open bundle whose rows were verified.

    Raises:
        BundleInvalidError: the file has changed since.
    """
    statuses = _Statuses(reader.manifest.origin)
    erased: Counter[str] = Counter()
    erasures = 0
    senders, readers = Actors(), Actors()
    proposals = {"accepted": 0, "rejected": 0}
    for rows in reader.entry_batches():
        for row in rows:
            job_id, _, _, _, _, action, _, text, _ = foldable = [row[place] for place in _PLACES]
            if action == SystemAction.SUBJECT_ERASED:
                erasures += 1
                erased.update(jobs.payload_of(text).get("key_ids", ()))
            elif action == SystemAction.PAYLOADS_READ:
                readers.add(jobs.payload_of(text))
            elif (told := _told(action, job_id, text)) in VERDICTS:
                proposals["accepted" if told == CommitmentAction.PROPOSE_ACCEPTED else "rejected"] += 1
            if (said := jobs.said_of_row(*foldable)) is not None and said[0] in EVENTS_BY_ACTION:
                senders.add(said[1])
            statuses.add(foldable, said)
    return Counts(statuses.counted(), erasures, len(erased), senders, readers, proposals)


class _Statuses:
    """Counts jobs by status. What is excluded is known at the end alone, so each log's facts are folded apart."""

    def __init__(self, own_log: str) -> None:
        self._own_log = own_log
        self._folds: dict[tuple[str, str | None], JobFold] = {}
        self._statements: list[Sequence[Any]] = []

    def add(self, row: Sequence[Any], said: jobs.Said | None) -> None:
        """Add a row of ``FOLD_COLUMNS`` and its fact about its job."""
        job_id, seq, origin = row[0], row[1], row[-1]
        if job_id == SUBJECT:
            self._statements.append(row)
        if said is not None and len(self._folds) <= JOBS_MAX:
            log = self._own_log if origin is None else log_of(origin)
            self._folds.setdefault((job_id, log), JobFold(job_id)).add(*said, seq)

    def counted(self) -> dict[str, int] | None:
        """The numbers of jobs by status, None for more than ``JOBS_MAX``."""
        if len(self._folds) > JOBS_MAX:
            return None
        excluded = statements_of(NO_STATEMENTS, self._statements, self._own_log).exclusions(self._own_log).logs
        jobs_folded: dict[str, JobFold] = {}
        for (job_id, log), fold in self._folds.items():
            state = fold.state()
            if log in excluded:
                state = JobState(job_id, state.last_hlc, state.last_seq, 0, uncounted=state.last_seq)
            jobs_folded.setdefault(job_id, JobFold(job_id)).join(state)
        return dict(sorted(Counter(jobs.status(fold.state()) for fold in jobs_folded.values()).items()))


OUTCOMES: Final = {
    0: "WHOLE AND SIGNED: all that a bundle can show was checked and holds",
    1: "COULD NOT BE READ",
    2: "TAMPERED WITH OR CORRUPT: do not rely on it",
    3: "INCOMPLETE: nothing wrong was found, not everything could be checked",
    4: "KEY UNKNOWN: a key that signed is not held, had expired or was revoked",
}
"""Meaning of an exit code, for the first line about a file."""

ACTORS_SHOWN_MAX: Final = 20
"""Names that the text lists; the others are counted together there, and listed in the JSON form."""

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
"""Description of each aspect of a verdict."""


HEADLINES: Final = {
    0: "Whole and signed",
    1: "Could not be read",
    2: "Tampered with or corrupt",
    3: "Nothing wrong found, not everything checked",
    4: "Not signed by a key that is trusted",
}
"""Meaning of an exit code, as a conclusion."""
VERDICT_WORDS: Final = {
    "ok": "✓ holds",
    "broken": "✗ broken",
    "invalid": "– says nothing",
    "not_checked": "– not checked",
    "unknown_key": "? key unknown",
}
_POLICY: Final = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'sha256-{}'"
_FOLDER: Final = Path(__file__).parent

LIMITS: Final = (
    "Whether what the entries say is true. The ledger shows who said what, in which order, and that nothing of it was "
    "changed since.",
    "Whether the clocks were right. Times of entries are those of the clocks of the nodes that wrote them; the ledger "
    "binds them and orders by them. The time of this verification is that of the clock of the machine that ran it. "
    "Clocks of others stand under the anchors.",
    "What was never recorded.",
)
"""Limits of any bundle, even a whole one."""


@dataclass(frozen=True)
class VerifiedFile:
    """One file and its outcome; ``error`` instead of ``outcome`` if it could not be read."""

    name: str
    exit_code: int
    outcome: BundleVerdict | None = None
    error: str | None = None
    counts: Counts | None = None
    """Counts of the entries, if a report asks for them and the entries are valid."""

    def to_json(self) -> dict[str, Any]:
        """The verdict object with the file's name."""
        if self.outcome is None:
            return {"file": self.name, "exit_code": self.exit_code, "error": self.error}
        return {
            **self.outcome.to_json(),
            **({} if self.counts is None else {"counts": self.counts.to_json()}),
            "file": self.name,
            "exit_code": self.exit_code,
        }


@dataclass(frozen=True)
class Against:
    """The inputs of the verification: the caller's keys and checkpoint, and their sources."""

    keys_from: str | None
    keyring: Keyring | None
    checkpoint_from: str | None
    kept: JudgedCheckpoint | None
    external_from: Sequence[str] = ()
    """The options that named witnesses and authorities, as given."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "keys_from": self.keys_from,
            "keys": None if self.keyring is None else [key.to_json() for key in self.keyring],
            "checkpoint": None
            if self.kept is None
            else {"file": self.checkpoint_from, **self.kept.checkpoint.to_json()},
        }


class SignedWith(NamedTuple):
    """The key that signs the page, and the name of the page."""

    key_id: str
    algorithm: str
    report: str


def to_json(files: Sequence[VerifiedFile], against: Against, verified_at: datetime, tool: str) -> dict[str, Any]:
    """The report as one JSON object; for a single file the members of its verdict are at the top level as well."""
    items = [file.to_json() for file in files]
    return {
        **(items[0] if len(items) == 1 else {}),
        "verified_at": rfc3339.written(verified_at, "seconds"),
        "verified_by": tool,
        "against": against.to_json(),
        "bundles": items,
    }


def to_markdown(files: Sequence[VerifiedFile], against: Against, verified_at: datetime, tool: str) -> str:
    """The report as text."""
    judged = [(file, file.outcome.verdict) for file in files if file.outcome is not None]
    anchors = [(file, each) for file, verdict in judged for each in verdict["anchors"]]
    quorums = [(file, line) for file, verdict in judged for line in quorum_lines(verdict)]
    shown = {"anchors": anchors, "quorums": quorums, "outcomes": OUTCOMES}
    text = _rendered("report.md.j2", files, against, verified_at, tool, **shown)
    return text.rstrip("\n") + "\n\n"


def to_html(
    files: Sequence[VerifiedFile], against: Against, verified_at: datetime, tool: str, signer: SignedWith | None
) -> str:
    """The report as one A4 page for filing: plain conclusions first, a sign-off at the end.

    The page is self-contained: no script, no request, its style inline and allowed by digest in its policy.
    """
    style = (_FOLDER / "report.css").read_text("utf-8")
    return _rendered(
        "report.html.j2",
        files,
        against,
        verified_at,
        tool,
        signer=signer,
        suffix=REPORT_SUFFIX,
        subject=_subject(files),
        is_alone=len(files) == 1,
        code=gravest(ExitCode(file.exit_code) for file in files),
        style=style,
        policy=_POLICY.format(base64.b64encode(sha256(style.encode()).digest()).decode()),
    )


def _rendered(
    template: str, files: Sequence[VerifiedFile], against: Against, verified_at: datetime, tool: str, **more: object
) -> str:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        finalize=_escaped if template.endswith(".html.j2") else _on_one_line,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= _FILTERS
    environment.globals |= _GLOBALS
    return environment.get_template(template).render(
        files=files,
        against=against,
        verified_at=rfc3339.written(verified_at, "seconds"),
        tool=tool,
        commands=list(_commands(files, against)),
        **more,
    )


def _subject(files: Sequence[VerifiedFile]) -> str:
    manifests = [
        file.outcome.manifest for file in files if file.outcome is not None and file.outcome.manifest is not None
    ]
    if len(files) == 1:
        return f"Ledger {manifests[0].origin}" if manifests else files[0].name
    return f"{len(files)} bundles of {counted(len({manifest.origin for manifest in manifests}), 'ledger')}"


def _commands(files: Sequence[VerifiedFile], against: Against) -> Iterator[str]:
    """The commands that repeat the verification."""
    brought = {"--keys": against.keys_from, "--checkpoint": against.checkpoint_from}
    options = [text for option, name in brought.items() if name is not None for text in (option, name)]
    names = [file.name for file in files]
    yield shlex.join(["sha256sum", *names])
    yield shlex.join(["tally", "verify-bundle", *names, *options, *against.external_from])
    for name in names:
        repeated = ["python3", "verify.py", name, *options]
        yield f"{shlex.join(repeated)}  # docs/formats/verify.py, a second implementation"


# --- text and values in templates ---------------------------------------------------------------------


def _printable(text: str) -> str:
    """``text`` with U+FFFD for unprintable characters, so that text from a file cannot reverse or hide its context."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def _escaped(value: object) -> object:
    """A value as text of the HTML page."""
    return value if isinstance(value, Markup | Undefined) else Markup(html.escape(_printable(str(value))))  # noqa: S704


def _on_one_line(value: object) -> object:
    """A value as text of Markdown: nothing in it can begin a heading, a list or a row."""
    return value if isinstance(value, Markup | Undefined) else Markup(_printable(str(value)).replace("|", "¦"))  # noqa: S704


def _code(text: str) -> str:
    """Any text as Markdown code."""
    return f"`{text.replace('`', chr(39))}`"


def _moment(hlc: str) -> str:
    """An HLC with its wall-clock time, as Markdown."""
    try:
        wall = datetime.fromtimestamp(Hlc.parse(hlc).physical_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return _code(hlc)
    return f"{rfc3339.written(wall, 'milliseconds')} (HLC {_code(hlc)})"


def _readable(time: str) -> str:
    """An RFC 3339 time in UTC, in readable form; any other text unchanged."""
    try:
        at = datetime.fromisoformat(time).astimezone(UTC)
    except (ValueError, OverflowError):
        return time
    seconds = at.strftime("%Y-%m-%d %H:%M:%S")
    return f"{seconds}.{at.microsecond // 1000:03} UTC" if at.microsecond else f"{seconds} UTC"


def _shown(actors: Actors) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The listed names, and the groups of all others, each with a count."""
    listed = list(actors.to_json()["named"].items())
    others = actors.others + sum(count for _, count in listed[ACTORS_SHOWN_MAX:])
    rest = (("others", others), ("private", actors.private), ("not said", actors.unnamed))
    return listed[:ACTORS_SHOWN_MAX], [(name, count) for name, count in rest if count]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "by_status": lambda jobs: [(status.replace("_", " ").lower(), count) for status, count in jobs.items()],
    "code": _code,
    "count": "{:,}".format,
    "counted": counted,
    "keys": lambda keyring: [key.to_json() for key in keyring],
    "moment": _moment,
    "readable": _readable,
    "sentence": _sentence,
    "shown": _shown,
    "snapshots_by_key": lambda outcome: [f"{key} ({count:,})" for key, count in sorted(outcome.snapshot_keys.items())],
    "time_of": rfc3339.time_of,
}
_GLOBALS: Final[dict[str, object]] = {
    "quorum_lines": quorum_lines,
    "ExitCode": ExitCode,
    "bundle": BUNDLE,
    "headlines": HEADLINES,
    "jobs_max": JOBS_MAX,
    "limits_of_bundles": LIMITS,
    "meanings": MEANINGS,
    "verdicts": VERDICT_WORDS,
}
