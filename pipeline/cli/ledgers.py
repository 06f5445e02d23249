"""The ledgers that a command reads: named by ``--dsn``, ``--archive`` and ``--ledgers``, opened together.

Each is named as ``NAME=URL``, or by its URL alone; then the origin of its log is its name. A file of ledgers has one a
line. It keeps passwords out of the arguments of a command, which every user of the machine can read::

    # a comment
    eu=postgresql://auditor:secret@eu.example/tallystick
    us=postgresql://auditor:secret@us.example/tallystick

One ledger without a name is read as a place of its own, and its rows name no ledger.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Final, NamedTuple, TypeVar

import typer

from ledger.errors import (
    ArchiveUnavailableError,
    ConfigurationError,
    DatabaseUnavailableError,
    InvalidInputError,
)
from ledger.exit_code import ExitCode
from pipeline.cli.options import ARCHIVE_HELP, DSN_VARIABLE, NO_DSN_VARIABLE
from pipeline.places import NAMED_BY, OpenPlace, Place, parse_place, place_of
from pipeline.places.ledgers import OpenLedgers
from signing.files import read_bounded
from signing.keys import Keyring
from terminal.outcome import err

LEDGERS_MAX: Final = 256
"""Most ledgers of one command; each holds a connection while the command runs."""
FILE_BYTES_MAX: Final = 1 << 20
_NAMED: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,99})=(.+)")
_UNREADABLE: Final = (ArchiveUnavailableError, ConfigurationError, DatabaseUnavailableError)
"""Errors that concern one ledger; the others are read without it."""
Opened = TypeVar("Opened", bound=OpenPlace)

Dsns = Annotated[
    list[str] | None,
    typer.Option(
        "--dsn",
        metavar="[NAME=]URL",
        show_default="the local service's",
        help=f"PostgreSQL of a ledger, else the one in {DSN_VARIABLE}; may be repeated.",
    ),
]
Archives = Annotated[
    list[str] | None, typer.Option("--archive", metavar="[NAME=]URL", help=f"{ARCHIVE_HELP} May be repeated.")
]
"""For commands that read an archive only if it is named."""
LedgersFile = Annotated[
    Path | None,
    typer.Option("--ledgers", metavar="FILE", help="File with one ledger a line, as --dsn and --archive take it."),
]
Bundles = Annotated[list[Path] | None, typer.Option("--bundle", metavar="FILE...", help="Bundle files, any number.")]
MoreBundles = Annotated[list[Path] | None, typer.Argument(hidden=True, metavar="--bundle FILE")]
"""The files after the first in ``--bundle FILE...``, as a shell expands a pattern."""


class NamedLedger(NamedTuple):
    """A ledger to read, and its name if the caller gave one."""

    name: str | None
    place: Place

    @property
    def option(self) -> str:
        """The option that names it."""
        return f"--{self.place.kind}"

    def __str__(self) -> str:
        return str(self.place) if self.name is None else f"{self.name}={self.place}"


class Unread(NamedTuple):
    """A ledger that could not be read, and the reason."""

    ledger: str
    error: str


class Sources(NamedTuple):
    """What a command reads: ledgers of one kind, or bundle files."""

    ledgers: list[NamedLedger]
    bundles: list[str]
    archives: Sequence[NamedLedger] = ()
    """The archives of databases, which have what left these."""

    @property
    def option(self) -> str:
        """``--dsn``, ``--archive`` or ``--bundle``."""
        return "--bundle" if self.bundles else self.ledgers[0].option


# --- names ----------------------------------------------------------------------------------------


def sources(
    dsns: Sequence[str] | None,
    archives: Sequence[str] | None,
    file: Path | None,
    bundles: Sequence[Path] | None,
    more_bundles: Sequence[Path] | None,
    tenants: Sequence[str] | None,
) -> Sources:
    """What these options name; without any, the database of the environment. Archives beside databases are theirs.

    Raises:
        InvalidInputError: they name nothing, bundles beside other places, or tenants of bundles.
        ConfigurationError: a text names no place of its kind, or the file cannot be read.
    """
    if more_bundles and not bundles:
        raise InvalidInputError(f"{str(more_bundles[0])!r} is no option; bundles are named with --bundle FILE...")
    named = named_ledgers(dsns, archives, file)
    if named and bundles:
        raise InvalidInputError("bundles are read alone: leave out --dsn, --archive and --ledgers")
    if {each.option for each in named} == {"--dsn", "--archive"}:
        copies = [each for each in named if each.option == "--archive"]
        return Sources([each for each in named if each.option == "--dsn"], [], copies)
    if bundles and tenants:
        raise InvalidInputError("--tenant goes with --dsn and --archive; a bundle is of one tenant")
    if bundles:
        return Sources([], [str(file) for file in (*bundles, *(more_bundles or ()))])
    return Sources(
        named or [local_ledger("name the ledger: --dsn postgresql://..., --archive URL or --bundle FILE")], []
    )


def databases(dsns: Sequence[str] | None, file: Path | None) -> list[NamedLedger]:
    """The databases that these options name; without any, that of the environment. Raises as ``sources``."""
    named = named_ledgers(dsns, None, file)
    if any(each.option != "--dsn" for each in named):
        raise InvalidInputError(f"{file} names an archive, and this command reads databases")
    return named or [local_ledger("name the ledger: --dsn postgresql://...")]


def named_ledgers(dsns: Sequence[str] | None, archives: Sequence[str] | None, file: Path | None) -> list[NamedLedger]:
    """The ledgers of these options, in their order, those of the file last; raises as ``sources``."""
    named = [parse_ledger("--dsn", text) for text in dsns or ()]
    named += [parse_ledger("--archive", text) for text in archives or ()]
    named += [] if file is None else read_ledgers(file)
    if len(named) > LEDGERS_MAX:
        raise InvalidInputError(f"{len(named)} ledgers are named, and a command reads at most {LEDGERS_MAX}")
    return named


def parse_ledger(option: str, text: str) -> NamedLedger:
    """The ledger in ``NAME=URL`` or ``URL``, the value of ``option``.

    Raises:
        ConfigurationError: there is none of that kind. The error does not repeat a password.
    """
    if (found := _NAMED.fullmatch(text)) is not None:
        try:
            return NamedLedger(found[1], place_of(option, found[2]))
        except ConfigurationError:
            pass  # A folder may have such a name, too. The error about the whole text shows no part of it.
    return NamedLedger(None, place_of(option, text))


def read_ledgers(file: Path) -> list[NamedLedger]:
    """The ledgers in a file, one a line; empty lines and those that start with ``#`` are skipped.

    Raises:
        ConfigurationError: it cannot be read, is too long or empty, or a line names no ledger. The error names the
            line and shows nothing of it.
    """
    try:
        lines = read_bounded(file, FILE_BYTES_MAX, "file of ledgers", ConfigurationError).decode().splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"--ledgers {file} cannot be read: {error}") from error
    found: list[NamedLedger] = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            found.append(_in_line(line, f"--ledgers {file}, line {number},"))
    if not found:
        raise ConfigurationError(f"--ledgers {file} names no ledger")
    return found


def _in_line(line: str, where: str) -> NamedLedger:
    named = _NAMED.fullmatch(line)
    for name, text in ((None, line), *(() if named is None else ((named[1], named[2]),))):
        try:
            place = parse_place(text)
        except ConfigurationError:
            continue
        if place.kind in ("dsn", "archive"):
            return NamedLedger(name, place)
    raise ConfigurationError(
        f"{where} names no ledger: write NAME=URL or URL of {NAMED_BY['dsn']} or {NAMED_BY['archive']}"
    )


def local_ledger(asked: str) -> NamedLedger:
    """The database that the environment names.

    Raises:
        InvalidInputError: it names none; the text is ``asked``, and why the local service has none, if known.
    """
    if dsn := os.environ.get(DSN_VARIABLE):
        return NamedLedger(None, place_of("--dsn", dsn))
    reason = os.environ.get(NO_DSN_VARIABLE)
    raise InvalidInputError(f"{asked} ({reason})" if reason else asked)


# --- opened ---------------------------------------------------------------------------------------


def is_alone(ledgers: Sequence[NamedLedger]) -> bool:
    """Whether it is one ledger without a name, so that no row names it."""
    return len(ledgers) == 1 and ledgers[0].name is None


@contextmanager
def opened_together(
    ledgers: Sequence[NamedLedger], keyring: Keyring | None = None
) -> Iterator[tuple[OpenPlace, list[Unread]]]:
    """All ``ledgers`` as one place, and those that cannot be read; raises as ``opened_each``."""
    with opened_each(ledgers, lambda place: place.open(keyring)) as (opened, unread):
        yield _together(opened), unread


@contextmanager
def opened_with_archives(
    where: Sources, keyring: Keyring | None = None
) -> Iterator[tuple[OpenPlace, OpenPlace | None, list[Unread]]]:
    """As ``opened_together``, the databases and their archives, None where no archive is named. One of each belong
    together; of several, those of one name.

    Raises:
        InvalidInputError: one of several has no counterpart.
    """
    with opened_each(where.ledgers, lambda place: place.open(keyring)) as (found, unread):
        if not where.archives:
            yield _together(found), None, unread
            return
        with opened_each(where.archives, lambda place: place.open(keyring)) as (archives, unread_archives):
            if len(where.ledgers) == len(where.archives) == 1:
                archives = dict.fromkeys(found, *archives.values())
            alone = sorted(map(str, found.keys() ^ archives.keys()))
            if alone and not (unread or unread_archives):
                raise InvalidInputError(
                    f"{alone[0]!r} is the name of a database or of an archive alone: name both alike"
                )
            yield _together(found), _together(archives), unread + unread_archives


@contextmanager
def opened_pairs(ledgers: Sequence[NamedLedger]) -> Iterator[tuple[OpenPlace, OpenPlace, list[Unread]]]:
    """Two places with the ledgers of the same names, to be compared; and the ledgers that cannot be read. They are two
    sets of ledgers, each name once in either; or databases and their archives; or, of one kind, the first and each of
    the others, whose name is that of the pair.

    Raises:
        InvalidInputError: one of two or more has no counterpart.
    """
    some, others = _sides_of(ledgers)
    with _opened(some) as (of_a, unread_a), _opened(others) as (of_b, unread_b):
        unread = unread_a + unread_b
        if len(some) == 1 < len(ledgers) and some[0].option == others[0].option:
            of_a = dict.fromkeys(of_b, *of_a.values())
        alone = _refuse_unpaired(of_a, of_b, unread)
        unread += [Unread(name, "the ledger that it is compared with was not read") for name in alone]
        both = of_a.keys() & of_b.keys()
        if not both:
            raise InvalidInputError("no ledger could be read together with the one that it is compared with")
        yield OpenLedgers({name: of_a[name] for name in both}), OpenLedgers({name: of_b[name] for name in both}), unread


def _sides_of(ledgers: Sequence[NamedLedger]) -> tuple[Sequence[NamedLedger], Sequence[NamedLedger]]:
    """``ledgers`` as those of side a and those of side b; raises as ``opened_pairs``."""
    copies = [each for each in ledgers if each.option == "--archive"]
    originals = [each for each in ledgers if each.option != "--archive"]
    if copies and originals:
        return originals, copies
    times = Counter(each.name for each in ledgers)
    if all(name is None or count == 1 for name, count in times.items()):
        return ledgers[:1], ledgers[1:]
    if odd := [each for each in ledgers if each.name is None or times[each.name] != 2]:
        raise InvalidInputError(
            f"{odd[0]} has no counterpart of its name: to compare two sets of ledgers, give each name twice, first "
            "with the ledger of the one set (a) and then with that of the other (b)"
        )
    firsts = {each.name: each for each in reversed(ledgers)}
    return [*firsts.values()], [each for each in ledgers if each is not firsts[each.name]]


def _refuse_unpaired(
    some: Mapping[str | None, OpenPlace], others: Mapping[str | None, OpenPlace], unread: Sequence[Unread]
) -> list[str]:
    """The names that only one of both has, which is right only where a ledger could not be read."""
    alone = sorted(map(str, some.keys() ^ others.keys()))
    if alone and not unread:
        raise InvalidInputError(f"{alone[0]!r} is the name of a database or of an archive alone: name both alike")
    return alone


def _opened(ledgers: Sequence[NamedLedger]) -> AbstractContextManager[tuple[dict[str | None, OpenPlace], list[Unread]]]:
    return opened_named(ledgers, lambda place: place.open())


def _together(opened: Mapping[str | None, OpenPlace]) -> OpenPlace:
    return opened[None] if None in opened else OpenLedgers(opened)


@contextmanager
def opened_each(
    ledgers: Sequence[NamedLedger], open_place: Callable[[Place], AbstractContextManager[Opened]]
) -> Iterator[tuple[dict[str | None, Opened], list[Unread]]]:
    """As ``opened_named``; one ledger without a name is opened alone, under None."""
    if is_alone(ledgers):
        with open_place(ledgers[0].place) as opened:
            yield {None: opened}, []
        return
    with opened_named(ledgers, open_place) as (named, unread):
        yield named, unread


@contextmanager
def opened_named(
    ledgers: Sequence[NamedLedger], open_place: Callable[[Place], AbstractContextManager[Opened]]
) -> Iterator[tuple[dict[str | None, Opened], list[Unread]]]:
    """The ledgers by name, each held in one state; and those that cannot be read, which are reported.

    Raises:
        ConfigurationError, DatabaseUnavailableError, ArchiveUnavailableError: none can be read; the error is that of
            the last.
        InvalidInputError: two ledgers have one name.
    """
    opened: dict[str | None, Opened] = {}
    unread: list[Unread] = []
    with ExitStack() as stack:
        for name, place in ledgers:
            try:
                each = stack.enter_context(open_place(place))
                found = name or _name_of(each)
            except _UNREADABLE as error:
                if len(unread) + 1 == len(ledgers):
                    raise
                unread.append(Unread(name or str(place), str(error)))
                err.print(f"ledger {unread[-1].ledger} was not read: {error}", markup=False)
                continue
            if found in opened:
                raise InvalidInputError(f"two ledgers are named {found!r}: name each otherwise, as NAME=URL")
            opened[found] = each
        yield opened, unread


def _name_of(opened: OpenPlace) -> str:
    """The origin of the ledger's logs; of a ledger without any, its URL."""
    return next((found for each in opened.tenants()[:1] if (found := opened.log_origin(each))), str(opened))


def codes_of(unread: Sequence[Unread]) -> list[ExitCode]:
    """The exit codes for ledgers that were not read."""
    return [ExitCode.COULD_NOT_RUN] * len(unread)
