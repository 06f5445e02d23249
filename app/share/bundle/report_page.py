"""The report on verified bundles as one page for the file: plain conclusions first, on A4, signed off at its end.

One HTML document that asks for nothing: no script, no request, its style inside and named by digest in its policy. It
says nothing that the JSON form does not, and in its words.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

from app.share.bundle.counting import JOBS_MAX, Actors, Counts
from app.share.bundle.markup import Html, el, text
from app.share.bundle.report import ACTORS_SHOWN_MAX, MEANINGS, Against, VerifiedFile, commands, utc
from ledger import rfc3339
from ledger.exit_code import ExitCode, gravest
from signing.bundle.judging import BUNDLE, BundleVerdict
from signing.bundle.manifest import Manifest
from signing.report_statement import SUFFIX
from terminal.counted import counted

HEADLINES: Final = {
    0: "Whole and signed",
    1: "Could not be read",
    2: "Tampered with or corrupt",
    3: "Nothing wrong found, not everything checked",
    4: "Not signed by a key that is trusted",
}
"""What an exit code means, in the words of a conclusion."""
VERDICTS: Final = {
    "ok": "✓ holds",
    "broken": "✗ broken",
    "invalid": "– says nothing",
    "not_checked": "– not checked",
    "unknown_key": "? key unknown",
}
_STYLE: Final = (Path(__file__).parent / "report.css").read_text("utf-8")
_POLICY: Final = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'sha256-{}'"


class SignedWith(NamedTuple):
    """The key that signs the page, and the name of the page."""

    key_id: str
    algorithm: str
    report: str


def to_html(
    files: Sequence[VerifiedFile], against: Against, verified_at: datetime, tool: str, signer: SignedWith | None
) -> str:
    """The page."""
    code = gravest(ExitCode(file.exit_code) for file in files)
    subject = _subject(files)
    policy = _POLICY.format(base64.b64encode(sha256(_STYLE.encode()).digest()).decode())
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"{HEADLINES[code]}: {subject}"),
        Html(f"<style>{_STYLE}</style>"),
    )
    body = el(
        "body",
        el(
            "header",
            el("p", "Report of a verification", class_="kind"),
            el("h1", subject),
            el("p", f"Verified {_readable(utc(verified_at))} by {tool}, offline, from the files alone.", class_="made"),
        ),
        el(
            "main",
            [_summary(files, code), _section("What none of them shows", *_limits())] if len(files) > 1 else None,
            [el("div", *_about(file, is_alone=len(files) == 1), class_="file") for file in files],
            _section("What it was held against", *_against(against)),
            _section("To check again", *_again(files, against)),
            el("section", el("h2", "Signed off"), *_sign_off(signer), class_="signed-off"),
        ),
    )
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


LIMITS: Final = (
    "Whether what the entries say is true. The ledger shows who said what, in which order, and that nothing of it was "
    "changed since.",
    "Whether the clocks were right. Times of entries are those of the clocks of the nodes that wrote them; the ledger "
    "binds them and orders by them. The time of this verification is that of the clock of the machine that ran it. "
    "Clocks of others stand under the anchors.",
    "What was never recorded.",
)
"""What no bundle shows, however whole it is."""


def _subject(files: Sequence[VerifiedFile]) -> str:
    manifests = [
        file.outcome.manifest for file in files if file.outcome is not None and file.outcome.manifest is not None
    ]
    origins = dict.fromkeys(manifest.origin for manifest in manifests)
    if len(files) == 1:
        return f"Ledger {manifests[0].origin}" if manifests else files[0].name
    return f"{len(files)} bundles of {counted(len(origins), 'ledger')}"


def _section(title: str, *children: Any) -> Html:
    return el("section", el("h2", title), children)


# --- the conclusion ---------------------------------------------------------------------------------------


def _summary(files: Sequence[VerifiedFile], code: int) -> Html:
    rows = [
        el(
            "tr",
            el("th", el("code", file.name), scope="row"),
            el("td", HEADLINES[file.exit_code], class_=f"c{file.exit_code}"),
        )
        for file in files
    ]
    table = el(
        "table",
        el("thead", el("tr", el("th", "file", scope="col"), el("th", "conclusion", scope="col"))),
        el("tbody", rows),
    )
    return el("section", el("h2", f"All together: {HEADLINES[code]}"), table, class_=f"conclusion c{code}")


def _conclusion(file: VerifiedFile, *, is_alone: bool) -> Html:
    return el(
        "section",
        None if is_alone else el("p", file.name, class_="of"),
        el("h2", HEADLINES[file.exit_code]),
        [el("p", sentence) for sentence in _sentences(file)],
        class_=f"conclusion c{file.exit_code}",
    )


def _sentences(file: VerifiedFile) -> Iterator[str]:
    """What a reader who reads nothing else must know."""
    outcome = file.outcome
    if outcome is None:
        yield f"{file.name} could not be read: {file.error}. Nothing is said of what it holds."
        return
    manifest, verdict = outcome.manifest, outcome.verdict
    if manifest is None:
        yield "This is no bundle that can be opened. Do not rely on anything in it."
        return
    what = f"{_entries_of(manifest)} of tenant {manifest.tenant_id}"
    if file.exit_code == ExitCode.TAMPERED:
        yield "Do not rely on this file. It does not hold what was recorded, or was damaged since."
        yield "The first place that was found is named below."
    elif file.exit_code == ExitCode.UNKNOWN_KEY:
        yield f"Nobody who is trusted vouches for {what}."
        yield "A key that signed is not among those given, had expired or was revoked."
    else:
        yield (
            f"{what[0].upper()}{what[1:]} are those that were recorded: none between the first and the last was "
            "changed, removed, added or moved."
        )
        if file.exit_code == ExitCode.FINE:
            yield "Every one of them is covered by a signature whose key is trusted."
        else:
            yield "What could not be checked stands below. Until it is, that much is not proved."
    outside = [each for each in (verdict["compared_with"] or "").split(", ") if each not in ("", "bundle")]
    if outside and verdict["verdicts"]["checkpoint"] == "ok":
        yield "The log still begins with what was known of it before this verification."


def _entries_of(manifest: Manifest) -> str:
    if manifest.entry_count == 1:
        return f"the entry at seq {manifest.from_seq}"
    return f"the {manifest.entry_count:,} entries from seq {manifest.from_seq:,} to {manifest.to_seq:,}"


# --- one file ---------------------------------------------------------------------------------------------


def _about(file: VerifiedFile, *, is_alone: bool) -> Iterator[Html]:
    yield _conclusion(file, is_alone=is_alone)
    outcome = file.outcome
    if outcome is None:
        return
    if outcome.manifest is not None:
        yield _figures(outcome.manifest, outcome, file.counts)
    yield _first_break(outcome)
    if is_alone:
        yield _section("What this does not show", _left_out(outcome), *_limits())
    else:
        yield _section("What was not checked", _left_out(outcome))
    if file.counts is not None:
        yield _section("What the entries add up to", *_added_up(file.counts))
    if outcome.verdict["verdicts"][BUNDLE] != "broken":
        yield _section("Anchors: what outsiders said", *_anchors(outcome))
    if file.counts is not None:
        yield _section("Who did it", *_who(file.counts))
    yield _section("What was verified", _facts(_identity(file.name, outcome)))
    yield _section("What was checked", *_aspects(outcome))


def _left_out(outcome: BundleVerdict) -> Html:
    items = [el("li", _sentence(each)) for each in outcome.not_checked]
    return text(el("p", "Not checked:"), el("ul", items)) if items else el("p", "Nothing was left unchecked.")


def _limits() -> Iterator[Html]:
    yield el("p", "Beyond any check:")
    yield el("ul", [el("li", limit) for limit in LIMITS])


def _figures(manifest: Manifest, outcome: BundleVerdict, counts: Counts | None) -> Html:
    held = sum(each["status"] == "ok" for each in outcome.verdict["anchors"])
    figures = [("entries", f"{manifest.entry_count:,}"), ("signed to seq", f"{outcome.verdict['signed_to_seq']:,}")]
    if counts is not None:
        figures.append(("jobs", "many" if counts.jobs is None else f"{sum(counts.jobs.values()):,}"))
        figures.append(("erasures", f"{counts.erasures:,}"))
    figures.append(("anchors that hold", f"{held} of {len(outcome.verdict['anchors'])}"))
    return el("dl", [el("div", el("dt", name), el("dd", value)) for name, value in figures], class_="figures")


def _first_break(outcome: BundleVerdict) -> Html:
    first = outcome.verdict["first_break"]
    if first is None:
        return Html()
    place = f"At seq {first['seq']:,}: " if first["seq"] else ""
    lines = [el("p", el("strong", place, first["kind"]), text(". ", _sentence(first["detail"])))]
    for name in ("expected", "actual"):
        if first[name] is not None:
            lines.append(el("p", f"{name}: ", el("code", str(first[name])), class_="soft"))
    counts = ", ".join(f"{kind} {count:,}" for kind, count in outcome.verdict["breaks"].items())
    return _section(
        "The first break", el("div", lines, el("p", f"All that was found, by kind: {counts}."), class_="break")
    )


def _identity(name: str, outcome: BundleVerdict) -> Iterator[tuple[str, Any]]:
    yield "file", el("code", name)
    yield "SHA-256 of the file", el("code", outcome.digest)
    yield "size", f"{outcome.size_bytes:,} bytes"
    manifest = outcome.manifest
    if manifest is None:
        return
    yield "tenant and log", text(manifest.tenant_id, ", ", el("code", manifest.origin))
    yield "exported by", el("code", manifest.node_id)
    yield "first entry", _moment(manifest.first_hlc)
    yield "last entry", _moment(manifest.last_hlc)
    yield "link of the last entry", el("code", manifest.to_chain_link)
    yield f"root of the tree at seq {manifest.tree_size:,}", el("code", manifest.tree_root)
    if outcome.checkpoint is not None:
        own = outcome.checkpoint
        yield "checkpoint inside", text(f"of {own.size:,} entries, root ", el("code", own.root.hex()))
    yield "signed by", _codes(outcome.manifest_keys, "no key that is held")
    snapshots = [f"{key} ({count:,})" for key, count in sorted(outcome.snapshot_keys.items())]
    yield "snapshots by key", _codes(snapshots, "none seen")


def _aspects(outcome: BundleVerdict) -> Iterator[Html]:
    rows = [
        (el("strong", aspect), _verdict(verdict), MEANINGS[aspect])
        for aspect, verdict in outcome.verdict["verdicts"].items()
    ]
    yield _table(("what", "verdict", "what it is"), rows, verdict_at=1)
    yield el("p", f"Compared with: {outcome.verdict['compared_with'] or 'no checkpoint'}.")
    if outcome.memory is not None:
        yield el("p", f"Remembered by whoever verified: {outcome.memory['says']}.")


def _added_up(counts: Counts) -> Iterator[Html]:
    if counts.jobs is None:
        yield el("p", f"There are more than {JOBS_MAX:,} jobs; they were not counted by status.")
    elif not counts.jobs:
        yield el("p", "No job.")
    else:
        rows = [(status.replace("_", " ").lower(), f"{count:,}") for status, count in counts.jobs.items()]
        yield _counts_table("Jobs by status, as these entries say", "status", "jobs", rows)
    if any(counts.proposals.values()):
        rows = [(verdict, f"{count:,}") for verdict, count in counts.proposals.items()]
        yield _counts_table("Proposals", "verdict", "proposals", rows)
    if counts.erasures:
        yield el(
            "p",
            f"Erased: {counted(counts.erasures, 'erasure')} destroyed {counted(counts.erased_keys, 'key')}. What they "
            "protected is in the entries still, as bytes that nobody can read any more; every entry is here.",
        )
    else:
        yield el("p", "Erased: nothing, as far as these entries say.")


def _who(counts: Counts) -> Iterator[Html]:
    yield _actors("Events, by who sent them", "events", counts.senders)
    yield _actors("Reads of payloads that these entries record, by who read", "reads", counts.readers)


def _actors(title: str, what: str, actors: Actors) -> Html:
    listed = list(actors.named.items())
    rows: list[tuple[Any, str]] = [(el("bdi", name), f"{count:,}") for name, count in listed[:ACTORS_SHOWN_MAX]]
    others = actors.others + sum(count for _, count in listed[ACTORS_SHOWN_MAX:])
    for name, count in (("others", others), ("private", actors.private), ("not said", actors.unnamed)):
        if count:
            rows.append((el("i", name), f"{count:,}"))
    if not rows:
        return el("p", f"{title}: none.")
    return _counts_table(title, "who", what, rows)


def _anchors(outcome: BundleVerdict) -> Iterator[Html]:
    anchors: Sequence[Mapping[str, Any]] = outcome.verdict["anchors"]
    if not anchors:
        yield el(
            "p", "The bundle carries no word of a witness or of a time-stamping authority, whose clocks are others."
        )
        return
    yield el("p", "Clocks of others, by which the first entries were there:")
    rows = [
        (
            el("bdi", each["by"]),
            {"witness": "witness", "rfc3161": "time stamp"}[each["kind"]],
            _readable(each["time"]),
            f"1 to {each['to_seq']:,}",
            text(
                _verdict(each["status"]), None if each["detail"] is None else el("div", each["detail"], class_="soft")
            ),
        )
        for each in anchors
    ]
    yield _table(("who", "kind", "at", "entries", "verdict"), rows)


# --- what belongs to all files ----------------------------------------------------------------------------


def _against(against: Against) -> Iterator[Html]:
    if against.keyring is None:
        yield el("p", "No key was given. Signatures were not checked.")
    else:
        yield el("p", "Keys from ", el("code", against.keys_from or ""), "; keys inside a bundle are never used.")
        rows = []
        for key in against.keyring:
            told = key.to_json()
            window = f"from {told['not_before'] or 'the beginning'} to {told['not_after'] or 'no end'}"
            revoked = f"revoked from HLC {told['revoked_from_hlc']}" if told["revoked_from_hlc"] else "not revoked"
            rows.append((el("code", key.key_id), key.algorithm, window, revoked))
        yield _table(("key", "algorithm", "counts", "revocation"), rows)
    if against.kept is None:
        yield el(
            "p",
            "No checkpoint was given. A file that was compared with none that is remembered either cannot show whether "
            "its log was longer once and cut before the export.",
        )
        return
    held = against.kept.checkpoint
    yield el(
        "p",
        text("A checkpoint kept elsewhere, ", el("code", against.checkpoint_from or ""), f": log {held.origin}, "),
        text(f"{held.size:,} entries, root ", el("code", held.root.hex()), "."),
    )
    if against.kept.unknown is not None:
        yield el("p", f"It counts for nothing: {against.kept.unknown}.")


def _again(files: Sequence[VerifiedFile], against: Against) -> Iterator[Html]:
    yield el("p", "Whoever has the files and keys named here comes to the same conclusions with these commands:")
    yield el("pre", [el("code", line, Html("\n")) for line in commands(files, against)])
    yield el(
        "p",
        el("code", "verify.py"),
        " is a second program, written from the description of the format alone, and lies beside that in docs/formats.",
        class_="soft",
    )


def _sign_off(signer: SignedWith | None) -> Iterator[Html]:
    if signer is None:
        yield el("p", "This page is not signed. Whoever relies on it relies on who handed it over.", class_="soft")
    else:
        yield el(
            "p",
            text(
                "This page is signed with key ",
                el("code", signer.key_id),
                f" ({signer.algorithm}). The signature lies ",
            ),
            text("beside it, in ", el("code", signer.report + SUFFIX), "; it covers every byte of this file:"),
        )
        yield el("pre", el("code", f"tally verify-report {signer.report} --keys KEYS"))
    yield el("div", [el("div", name) for name in ("Name", "Role", "Place and date", "Signature")], class_="sign")


# --- pieces -----------------------------------------------------------------------------------------------


def _facts(facts: Iterator[tuple[str, Any]]) -> Html:
    return el("table", el("tbody", [el("tr", el("th", name, scope="row"), el("td", value)) for name, value in facts]))


def _table(names: Sequence[str], rows: Sequence[Sequence[Any]], verdict_at: int | None = None) -> Html:
    cells = [
        el("tr", [el("td", value, class_="v" if at == verdict_at else None) for at, value in enumerate(row)])
        for row in rows
    ]
    return el("table", el("thead", el("tr", [el("th", name, scope="col") for name in names])), el("tbody", cells))


def _counts_table(title: str, name: str, what: str, rows: Sequence[tuple[Any, str]]) -> Html:
    cells = [el("tr", el("th", value, scope="row"), el("td", count, class_="n")) for value, count in rows]
    head = el("tr", el("th", name, scope="col"), el("th", what, scope="col", class_="n"))
    return el("table", el("caption", title), el("thead", head), el("tbody", cells))


def _verdict(verdict: str) -> Html:
    return el("span", VERDICTS[verdict], class_=verdict)


def _codes(values: Sequence[str], none: str) -> Html:
    if not values:
        return text(none)
    return text([(", " if at else None, el("code", value)) for at, value in enumerate(values)])


def _moment(hlc: str) -> Html:
    time = rfc3339.time_of(hlc)
    return (
        el("code", hlc)
        if time is None
        else text(_readable(time), " ", el("span", "HLC ", el("code", hlc), class_="soft"))
    )


def _readable(time: str) -> str:
    """A time of RFC 3339 in UTC, as people write it; any other text as it is."""
    try:
        at = datetime.fromisoformat(time).astimezone(UTC)
    except (ValueError, OverflowError):
        return time
    seconds = at.strftime("%Y-%m-%d %H:%M:%S")
    return f"{seconds}.{at.microsecond // 1000:03} UTC" if at.microsecond else f"{seconds} UTC"


def _sentence(said: str) -> str:
    return f"{said[:1].upper()}{said[1:]}{'' if said.endswith('.') else '.'}"
