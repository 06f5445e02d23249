"""Output of a command, as text or JSON, and its exit.

Results go to standard output, everything else (progress, warnings, errors) to standard error, so that
``--json`` output can be piped.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import orjson
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.text import Text

from ledger.exit_code import OWN_SOURCES, ExitCode, unchecked, without_jobs
from ledger.text import printable
from ledger.verification.verdict import quorum_lines


class CommandExit(SystemExit):
    """The end of a command with a code of its own choosing; typer's own exits are translated."""

    def __init__(self, code: int) -> None:
        super().__init__(int(code))


class PlainConsole(Console):
    """A console that shows every text unchanged, in tables too: no emoji, no control sequences."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True, emoji=False)

    def render_str(self, text: str, **more: Any) -> Text:
        """As in rich, with control characters escaped."""
        return super().render_str(printable(text), **more)


class ErrorConsole(PlainConsole):
    """Standard error. Text that cannot be written there is lost, and the command continues: a full disk under its log
    must not stop it."""

    wait_max_s: float | None = None
    """Longest wait for a blocked reader; None is for ever, as with a pager."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def print(self, *said: Any, **how: Any) -> None:
        """As in rich, unless the reader is blocked."""
        if self.wait_max_s is not None and not _is_taken_within(self.wait_max_s):
            lose("stderr")
        try:
            super().print(*said, **how)
        except OSError:
            lose("stderr")

    def on_broken_pipe(self) -> None:
        """Treat it as any other write error; rich would end the command."""
        lose("stderr")


def _is_taken_within(seconds: float) -> bool:
    """Whether standard error becomes writable within ``seconds``."""
    waiting = select.poll()
    waiting.register(2, select.POLLOUT)
    return bool(waiting.poll(seconds * 1000))


out = PlainConsole()
err = ErrorConsole()


def lose(stream: Literal["stdout", "stderr"]) -> None:
    """Drop buffered and later output of this stream, which has no reader.

    Python would retry at exit, and exit with its own code. Commands that we run keep the stream unchanged.
    """
    setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115 (for as long as we run)


def print_json(value: object) -> None:
    """Print one JSON document on standard output; file names and paths in it go through ``readable``."""
    try:
        document = orjson.dumps(value, option=orjson.OPT_INDENT_2, default=os.fspath)
    except orjson.JSONEncodeError:
        document = orjson.dumps(_readable_within(value), option=orjson.OPT_INDENT_2)
    print(document.decode(), file=out.file)


def readable(named: object) -> str:
    """The text of a file's name, or of an error with one; bytes of it that are no UTF-8 are escaped."""
    return str(named).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _readable_within(value: Any) -> Any:
    if isinstance(value, str | os.PathLike):
        return readable(value)
    if isinstance(value, Mapping):
        return {name: _readable_within(each) for name, each in value.items()}
    return [_readable_within(each) for each in value] if isinstance(value, list | tuple) else value


def tell(value: object, *lines: RenderableType, as_json: bool) -> None:
    """Print the result of a command: ``value`` as one JSON document, else ``lines`` for people, unchanged."""
    if as_json:
        print_json(value)
        return
    for line in lines:
        out.print(line, markup=not isinstance(line, str))


def fail(message: str, code: ExitCode = ExitCode.COULD_NOT_RUN) -> CommandExit:
    """Print on standard error why the command ends; returns the exit to raise."""
    err.print("[bold red]error:[/] ", end="")
    err.print(message, markup=False)
    return CommandExit(code)


# --- words and verdicts -----------------------------------------------------------------------------


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 line``, ``1,200 lines``; ``many`` is the plural if it is not ``one`` and an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


_COLOURS: Final = {"ok": "green", "not_checked": "yellow", "unknown_key": "magenta", "broken": "red"}


def coloured(verdict: str) -> str:
    """The verdict on one aspect as markup."""
    return f"[{_COLOURS[verdict]}]{verdict}[/]"


def marked(text: str) -> RenderableType:
    """A line whose markup is rendered."""
    return out.render_str(text, markup=True)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines whose columns are aligned. Their texts are whole, so that they can be copied."""
    lines = [[printable(text) for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def verdict_table(verdicts: Mapping[str, str]) -> RenderableType:
    """One row for each aspect that was checked."""
    from rich.table import Table  # 15 ms, which most commands do without

    table = Table("checked", "verdict")
    for aspect, result in verdicts.items():
        table.add_row(aspect, coloured(result))
    return table


def findings(
    verdict: Mapping[str, Any], memory: Mapping[str, Any] | None, not_checked: Sequence[str] = ()
) -> list[RenderableType]:
    """The comparisons, the statements of external witnesses, the omitted checks, and the first break."""
    lines: list[RenderableType] = [] if memory is None else [f"memory: {memory['says']}"]
    lines += [
        f"anchored to seq {anchor['to_seq']} by {anchor['kind']} {anchor['by']} at {anchor['time']}: "
        + " ".join(filter(None, (anchor["status"], anchor["detail"])))
        for anchor in verdict["anchors"]
    ]
    lines += quorum_lines(verdict)
    if (pruned := verdict.get("pruned")) is not None:
        lines.append(
            f"verified from seq {verdict['verified_from_seq']} on: entries up to seq {pruned['to_seq']} left for the "
            f"archive at {pruned['at']}, under manifest {pruned['manifest']}"
        )
    lines += [f"not checked: {text}" for text in not_checked]
    if (first := verdict["first_break"]) is not None:
        place = f"seq {first['seq']}, " if first["seq"] else ""
        lines.append(marked(f"[bold red]first break:[/] {place}{first['kind']}: {escape(first['detail'])}"))
        if (first["expected"], first["actual"]) != (None, None):
            lines.append(f"  expected {first['expected']}\n  actual   {first['actual']}")
    return lines


def print_why_incomplete(verdicts: Sequence[Mapping[str, Any]], *, is_any_key: bool) -> None:
    """Print on standard error what ``verdicts`` leave unchecked; ``is_any_key`` is whether keys were given."""
    err.print(f"exit code 3, not everything is checked: {'; '.join(_reasons(verdicts, is_any_key))}", markup=False)


def _reasons(verdicts: Sequence[Mapping[str, Any]], is_any_key: bool) -> list[str]:
    # The verdict object that decided the exit code: archives and bundles hold no job states.
    left = [
        unchecked(without_jobs(verdict) if {*OWN_SOURCES} & {*verdict["verdicts"]} else verdict)
        for verdict in verdicts
        if "error" not in verdict
    ]
    aspects = dict.fromkeys(aspect for each in left for aspect in each.aspects)
    unchecked_here = [f"not checked: {', '.join(aspects)}"] if aspects else []
    reasons = unchecked_here if is_any_key else ["no --keys are given, so no signature is judged"]
    for found, where in (
        ([each.unsigned_entries for each in left if each.unsigned_entries], "that no snapshot signs yet"),
        ([each.entries_before for each in left if each.entries_before], "before the first one here"),
    ):
        if found:
            entries, ledgers = counted(sum(found), "entry", "entries"), counted(len(found), "ledger")
            reasons.append(f"{entries} of {ledgers} {where}")
    if below := sum(bool(each.below_quorum) for each in left):
        reasons.append(f"{counted(below, 'ledger')} below the quorum of the policy")
    return reasons
