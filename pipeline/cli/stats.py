"""``tally pipeline stats``: stream what nodes write about running jobs into windows that a report can read."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ledger.errors import ConfigurationError
from pipeline.cli.options import Master
from pipeline.cli.running import InterruptedBySignalError, running
from terminal.counted import counted
from terminal.options import Json
from terminal.outcome import err, out, print_json

if TYPE_CHECKING:
    from pipeline.stats import Summary

_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d{1,6})(s|m|h|d)")
DURATION_MAX_S: Final = 7 * 86400


def stats(
    source: Annotated[str, typer.Option("--source", help="The folder that stats.dir names, of one node or many.")],
    dest: Annotated[str, typer.Option("--dest", help="Folder to write to; the same again goes on where it was.")],
    window: Annotated[str, typer.Option("--window", help="Length of a window.")] = "1m",
    watermark: Annotated[str, typer.Option("--watermark", help="How late a file may bring a report.")] = "10m",
    once: Annotated[
        bool, typer.Option("--once", help="Take what is there and end, as for cron; else run until Ctrl-C.")
    ] = False,
    close: Annotated[
        bool, typer.Option("--close", help="Let this machine's clock close windows when nothing new comes.")
    ] = False,
    every: Annotated[str, typer.Option("--every", help="How often to look for files.")] = "30s",
    master: Master = None,
    as_json: Json = False,
) -> None:
    """Put the reports that nodes write together by tenant, data centre and window of time, exactly once, as Parquet.

    \b
    Exit codes: 0 what is there was taken, or without --once a signal ended
    it; 130 or 143 a signal ended --once; 1 anything else.

    \b
    Examples:
      tally pipeline stats --source var/stats --dest var/stats-windows --once --close
      tally pipeline stats --source /srv/stats --dest /srv/windows --window 5m --watermark 1h
    """
    seconds = {
        name: duration_s(name, text) for name, text in (("window", window), ("watermark", watermark), ("every", every))
    }
    with running("stats", master) as spark:
        from pipeline.stats import Summary, run

        total = Summary()

        def tell(batch: Summary) -> None:
            total.add(batch)
            err.print(told(batch), markup=False)

        try:
            run(
                spark,
                source,
                dest,
                window_s=seconds["window"],
                watermark_s=seconds["watermark"],
                once=once,
                close=close,
                every_s=seconds["every"],
                on_batch=tell,
            )
        except InterruptedBySignalError:
            # A run without an end is ended so; what it was at is done by the next.
            if once:
                raise
    if as_json:
        print_json(asdict(total))
    else:
        out.print(told(total), markup=False)


def told(summary: Summary) -> str:
    """A batch, or a run, in one line."""
    rows = counted(summary.rows, "row")
    parts = [f"{counted(summary.lines, 'line')} read", f"{rows} of closed windows written"]
    parts += [f"{count:,} {name}" for name in ("bad", "ahead", "late") if (count := getattr(summary, name))]
    if summary.late_groups:
        one = "group came after its window was closed and is not in it"
        many = "groups came after their window was closed and are not in it"
        parts.append(counted(summary.late_groups, one, many))
    return ", ".join(parts)


def duration_s(name: str, text: str) -> int:
    """The seconds that ``90s``, ``1m`` or ``2h`` stand for.

    Raises:
        ConfigurationError: ``text`` is no such duration, or out of bounds.
    """
    found = _DURATION.fullmatch(text)
    seconds = int(found[1]) * _UNIT_SECONDS[found[2]] if found else 0
    if not 1 <= seconds <= DURATION_MAX_S:
        raise ConfigurationError(f"--{name} {text}: must be a duration from 1s to 7d, such as 90s, 10m or 1h")
    return seconds
