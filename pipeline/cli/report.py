"""``tally pipeline report`` and ``stats``: job analytics over a period, and windows of the stats of running jobs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ledger.errors import ConfigurationError, InvalidInputError, NotFoundError
from ledger.exit_code import ExitCode, gravest
from pipeline.cli.ledgers import (
    Archives,
    Bundles,
    Dsns,
    LedgersFile,
    MoreBundles,
    Sources,
    Unread,
    opened_with_archives,
    sources,
)
from pipeline.cli.options import Master, Tenants
from pipeline.cli.running import InterruptedBySignalError, running, shown
from pipeline.page import SECOND_MS, duration_text
from pipeline.places.protocol import ChainName
from pipeline.report import UNITS_MS, Asked, Clock, asked, parse_duration, width_text
from terminal.outcome import CommandExit, counted, err, tell
from terminal.program import Json

if TYPE_CHECKING:
    from pipeline.places import OpenPlace
    from pipeline.report.make import Made
    from pipeline.stats import Summary


FIELDS_MAX: Final = 5
"""Most fields that jobs are counted by."""
PLACES_SHOWN_MAX: Final = 5
"""Most bundles that a report names as its source; the others are counted."""
_FIELD: Final = re.compile(r"spec(\.[^.\x00-\x1f]{1,128}){1,8}")
_SERVICE: Final = re.compile(r"https?://[A-Za-z0-9.:\[\]-]{1,255}/?")


Destination = Annotated[
    Path, typer.Option("--dest", metavar="DIR", help="Folder to write to; a report that is there is replaced.")
]
From = Annotated[str | None, typer.Option("--from", metavar="TIME", help="RFC 3339, an HLC, or seconds of a trace.")]
To = Annotated[str | None, typer.Option("--to", metavar="TIME", help="Up to here, not included.")]
Window = Annotated[
    str | None, typer.Option("--window", show_default="by the period", help="Width of a window, such as 15m or 1d.")
]
OnClock = Annotated[
    Clock | None,
    typer.Option("--time", show_default="trace if all events have one", help="The ledger's clock or a trace's."),
]
StuckAfter = Annotated[
    str | None,
    typer.Option("--stuck-after", show_default="what 99 of 100 jobs took", help="How long a stuck job is silent."),
]
Stats = Annotated[
    str | None, typer.Option("--stats", metavar="URL", help="What tally pipeline stats wrote: adds its counts.")
]
By = Annotated[
    list[str] | None,
    typer.Option("--by", metavar="FIELD", help="Count by this field of the spec, as spec.image; may be repeated."),
]
Console = Annotated[
    str | None, typer.Option("--console", metavar="URL", help="Service to whose console the page's jobs lead.")
]


def report(
    dest: Destination,
    more_bundles: MoreBundles = None,
    start: From = None,
    end: To = None,
    window: Window = None,
    clock: OnClock = None,
    stuck_after: StuckAfter = None,
    stats: Stats = None,
    by: By = None,
    console: Console = None,
    tenants: Tenants = None,
    dsns: Dsns = None,
    archives: Archives = None,
    ledgers: LedgersFile = None,
    bundles: Bundles = None,
    master: Master = None,
    as_json: Json = False,
) -> None:
    """Report on jobs over a period: throughput, times, failures, what is stuck, who did what.

    Writes one page, report.html, that needs nothing else, and its tables as
    Parquet and CSV. A report adds up what the ledger says; whether somebody
    changed it is for verify to tell.

    What left a database with a prune is read from --archive beside --dsn;
    without it the report says from which seq it speaks.

    Of several ledgers each row names its ledger. One that cannot be reached
    is named, and left out.

    \b
    Exit codes: 0 written; 2 the place read from does not hold; 1 anything
    else, such as a ledger that was left out.

    \b
    Examples:
      tally pipeline report --dest reports/november --from 2026-11-01 --to 2026-12-01
      tally pipeline report --dest reports/acme --archive s3://ledger-archive/prod -t acme --by spec.labels.team
      tally pipeline report --dest reports/years --dsn postgresql://db/ledger --archive s3://ledger-archive/prod
      tally pipeline report --dest reports/sites --bundle sites/*.tar --json
      tally pipeline report --dest reports/all --ledgers ledgers.txt
    """
    where = sources(dsns, archives, ledgers, bundles, more_bundles, tenants)
    wanted = asked(clock, start, end, window)
    if stats is not None:
        _refuse_no_stats(stats, wanted)
        wanted = wanted._replace(clock=Clock.HLC)
    stuck_after_ms = None if stuck_after is None else parse_duration("--stuck-after", stuck_after)
    fields = tuple(by or ())
    _refuse_odd(fields, console, len(where.ledgers))
    given = {
        "--from": start,
        "--to": end,
        "--window": window,
        "--time": clock,
        "--stuck-after": stuck_after,
        "--stats": stats,
        "--console": console,
        "--dest": str(dest),
    }
    told = _make(where, wanted, stuck_after_ms, given, fields, tenants or [], dest, master)
    tell(told, *_lines(told, dest), as_json=as_json)
    raise CommandExit(gravest([ExitCode.COULD_NOT_RUN] * len(told["read"]["unread"])))


def _make(
    where: Sources,
    wanted: Asked,
    stuck_after_ms: int | None,
    given: Mapping[str, str | None],
    fields: tuple[str, ...],
    tenants: list[str],
    dest: Path,
    master: str | None,
) -> dict[str, Any]:
    from pipeline.places import place_of
    from pipeline.report.folder import refuse_unfit
    from pipeline.report.jobs import entries, left_of, log_origins, system_entries
    from pipeline.report.make import make
    from pipeline.stats import read as read_stats

    refuse_unfit(dest)
    copies = [place_of("--bundle", name) for name in where.bundles]
    before_ms = wanted.end_ms if wanted.clock is Clock.HLC else None
    with running("report", master) as spark, ExitStack() as stack:
        unread: list[Unread] = []
        opened: list[OpenPlace] = [stack.enter_context(place.open()) for place in copies]
        if where.ledgers:
            together, archives, unread = stack.enter_context(opened_with_archives(where))
            opened = [*_each(together, archives)]
        made = _made(
            where, [*map(str, copies or where.ledgers)], tenants, given, fields, log_origins(opened, tenants)
        )._replace(
            ledgers=[name for each in opened for name in each.ledgers() if name is not None],
            unread=[each._asdict() for each in unread],
            left=[each for place in opened for each in left_of(place, tenants)],
        )
        stack.enter_context(shown(spark, "reporting"))
        rows = entries(spark, opened, tenants, before_ms)
        windows = None if given["--stats"] is None else read_stats(spark, given["--stats"])
        return make(rows, wanted, stuck_after_ms, made, dest, windows, system_entries(spark, opened, before_ms))


def _each(together: OpenPlace, archives: OpenPlace | None) -> Iterator[OpenPlace]:
    """The ledgers one by one, each with its archive if one is named."""
    from pipeline.places.joined import OpenJoined
    from pipeline.places.ledgers import OpenLedgers

    def named(name: str | None, place: OpenPlace) -> OpenPlace:
        return place if name is None else OpenLedgers({name: place})

    of_archives = {} if archives is None else archives.ledgers()
    for name, place in together.ledgers().items():
        archive = of_archives.get(name)
        yield named(name, place) if archive is None else OpenJoined(named(name, place), named(name, archive))


def _refuse_odd(fields: Sequence[str], console: str | None, ledgers: int) -> None:
    for name in fields:
        if not _FIELD.fullmatch(name):
            raise InvalidInputError(f"--by {name[:100]!r} is no field of a spec: write spec.image, or spec.labels.team")
    if len(fields) > FIELDS_MAX or len({*fields}) < len(fields):
        raise InvalidInputError(f"--by names {len(fields)} fields: give at most {FIELDS_MAX}, each once")
    if console is not None and not _SERVICE.fullmatch(console):
        raise InvalidInputError(f"--console {console[:100]!r} is no address of a service: write https://ledger.example")
    if console is not None and ledgers > 1:
        raise InvalidInputError("--console leads to one service: report on its ledger alone")


def _refuse_no_stats(stats: str, wanted: Asked) -> None:
    from pipeline.stats.destination import COMMIT_LOG

    if wanted.clock is Clock.TRACE:
        raise InvalidInputError("--stats is on the ledger's clock: it goes with --time hlc")
    folder = Path(stats)
    if "://" not in stats and not any((*folder.glob("kind=*"), *folder.glob(COMMIT_LOG))):
        raise NotFoundError(f"--stats {stats} holds no windows of tally pipeline stats")


def _made(
    where: Sources,
    names: Sequence[str],
    tenants: Sequence[str],
    given: Mapping[str, str | None],
    fields: tuple[str, ...],
    log_origins: list[str],
) -> Made:
    """The source that the report names, without the password of a database."""
    from pipeline.report.make import Made

    some = names[:PLACES_SHOWN_MAX]
    more = [f"and {len(names) - len(some):,} more"] if len(names) > len(some) else []
    words = [word for tenant in tenants for word in ("--tenant", tenant)]
    read = [where.option, *some] if where.bundles else [word for name in some for word in (where.option, name)]
    read += [word for each in where.archives for word in ("--archive", str(each))]
    ledger = shlex.join([*read, *words]) + (" ..." if more else "")
    by = [word for name in fields for word in ("--by", name)]
    options = shlex.join([*(word for name, value in given.items() if value for word in (name, value)), *by])
    console = given["--console"]
    return Made(
        ", ".join([*some, *more]),
        list(tenants),
        log_origins,
        version("tallystick"),
        datetime.now(UTC),
        f"tally pipeline report {options} {ledger}",
        f"tally pipeline verify --keys KEYS {ledger}",
        fields,
        None if console is None else console.rstrip("/"),
    )


def _lines(told: dict[str, Any], dest: Path) -> tuple[str, ...]:
    counts, at_end, period = told["in_period"], told["at_end"], told["period"]
    entries, tenants = counted(told["read"]["entries"], "entry", "entries"), counted(told["read"]["tenants"], "tenant")
    return (
        f"{period['from']} to {period['to']}, windows of {width_text(period['window_ms'])}",
        f"{counted(counts['created'], 'job')} created, {counts['ended']:,} ended: {counts['completed']:,} completed, "
        f"{counts['failed']:,} failed, {counts['timed_out']:,} timed out, {counts['cancelled']:,} cancelled",
        f"queue time {_times(told['times_s']['queue'])} accepted",
        f"run time {_times(told['times_s']['run'])} accepted and ended",
        f"{at_end['open']:,} open at the end, {at_end['stuck']:,} of them stuck: silent for over "
        f"{duration_text(at_end['stuck_after_s'])}",
        f"from {entries} of {tenants}, not verified",
        *_lines_of_left(told["read"]["left"]),
        f"the page: {dest / 'report.html'}",
    )


def _lines_of_left(left: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for each in left[:PLACES_SHOWN_MAX]:
        name = ChainName.of(each).shown
        yield f"of {name} from seq {each['from_seq']:,} on: what came before left the database, see --archive"
    if len(left) > PLACES_SHOWN_MAX:
        yield f"and of {len(left) - PLACES_SHOWN_MAX:,} tenants more, as report.json says"


def _times(times: dict[str, Any]) -> str:
    told = ", ".join(f"p{each} {duration_text(times[f'p{each}'])}" for each in (50, 90, 99))
    return f"{told}, of {counted(times['jobs'], 'job')}"


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

        def note(batch: Summary) -> None:
            total.add(batch)
            err.print(summary_line(batch), markup=False)

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
                on_batch=note,
            )
        except InterruptedBySignalError:
            # A signal is the normal end of an endless run; the next run repeats the batch under way.
            if once:
                raise
    tell(asdict(total), summary_line(total), as_json=as_json)


def summary_line(summary: Summary) -> str:
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
    """Seconds in a duration such as ``90s``, ``1m`` or ``2h``.

    Raises:
        ConfigurationError: ``text`` is no such duration, or out of bounds.
    """
    found = _DURATION.fullmatch(text)
    seconds = int(found[1]) * UNITS_MS[found[2]] // SECOND_MS if found else 0
    if not 1 <= seconds <= DURATION_MAX_S:
        raise ConfigurationError(f"--{name} {text}: must be a duration from 1s to 7d, such as 90s, 10m or 1h")
    return seconds
