"""``tally pipeline verify``: whole ledgers, archives and many bundles, with the verdicts of the service."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from ledger.errors import ArchiveInvalidError, ConfigurationError, SignatureError, TenantNotFoundError
from ledger.exit_code import ExitCode, exit_code_of_bundle, exit_code_of_verdict, gravest
from ledger.verification.tree_check import TreeHead
from pipeline.cli.options import (
    AnyArchive,
    Bundles,
    Dsn,
    Keys,
    Master,
    MoreBundles,
    NamedPlace,
    Tenants,
    load_keys,
    named_place,
)
from pipeline.cli.running import is_interrupted, running, shown
from pipeline.java import error_line
from pipeline.places import OpenPlace
from signing.checkpoint import JudgedCheckpoint, judge_checkpoint, judge_unvouched, read_kept
from signing.keys import Keyring
from signing.memory import Memory, Observation, Seen, memory_of, remembering
from terminal.outcome import CommandExit, coloured, counted, err, fail, out, print_json, print_why_incomplete
from terminal.program import Json, NoState, State

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import DataFrame, SparkSession

    from pipeline.verify import Verified


SOURCE = "file"
"""What ``compared_with`` calls a checkpoint given with ``--checkpoint``."""


def verify(
    context: typer.Context,
    more_bundles: MoreBundles = None,
    tenants: Tenants = None,
    dsn: Dsn = None,
    archive: AnyArchive = None,
    bundles: Bundles = None,
    keys: Keys = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", exists=True, dir_okay=False, help="A checkpoint kept elsewhere.")
    ] = None,
    breaks: Annotated[
        str | None,
        typer.Option("--breaks", metavar="FOLDER", help="Write every break there, as Parquet; must not be there yet."),
    ] = None,
    state: State = None,
    no_state: NoState = False,
    master: Master = None,
    as_json: Json = False,
) -> None:
    """Verify ledgers of any size: links, payloads, heads, snapshots, signatures, trees, job states.

    Each tenant gets the verdict that tally verify gives. Signatures are
    good by --keys only; without, those of a database by keys that nobody
    admitted are told. A checkpoint counts for the log it names. With
    --keys, the newest checkpoint verified of each log is remembered in your
    state folder and compared with ever after.

    \b
    Exit codes: 0 whole; 2 tampered; 3 nothing wrong found but not everything
    checked, such as an end that no snapshot signs yet; 4 a key is unknown,
    expired or revoked; 1 could not run, or could not read a file. The gravest
    of all counts.

    \b
    Examples:
      tally pipeline verify --keys trusted-keys.json
      tally pipeline verify --archive s3://ledger-archive/prod --keys trusted/
      tally pipeline verify --bundle sites/*.tar --keys trusted/ --json
    """
    where = named_place(context, dsn, archive, bundles, more_bundles, tenants)
    keyring = load_keys(keys) if keys else None
    kept = read_kept(checkpoint) if checkpoint is not None else None
    memory = memory_of(state, is_off=no_state or keyring is None)
    run = partial(_worked, master, None if breaks is None else breaks_url(breaks))
    if where.option == "--bundle":
        told, codes = _verify_bundles([*map(Path, where.names)], keyring, kept, memory, run)
    else:
        told, codes = _verify_place(where, tenants, keyring, kept, memory, run)
    with remembering(memory, [verdict.get("memory") for verdict in told["tenants"]]):
        if as_json:
            print_json(told)
        else:
            _print(told)
        if gravest(codes) is ExitCode.INCOMPLETE:
            print_why_incomplete(told["tenants"], is_any_key=keyring is not None)
    raise CommandExit(gravest(codes))


Told = tuple[dict[str, Any], list[ExitCode]]
"""The reported verification, and its exit codes."""
Work = Callable[["SparkSession", "Accumulator[int]"], "Verified"]
Run = Callable[[Work], tuple[dict[str, Any], ExitCode]]


# --- where the ledgers are ----------------------------------------------------------------------------


def _verify_place(
    where: NamedPlace,
    wanted: Sequence[str] | None,
    keyring: Keyring | None,
    kept: str | None,
    memory: Memory | None,
    run: Run,
) -> Told:
    """Verify a database or an archive.

    Raises:
        TenantNotFoundError: there is nothing to verify.
    """
    from pipeline.places import place_of
    from pipeline.verify import verify as verify_ledgers

    place = place_of(where.option, where.names[0])
    with place.open(keyring) as opened:
        held = opened.tenants()
        tenants = held if wanted is None else [each for each in wanted if each in held]
        missing = sorted({*(wanted or ())} - {*held})
        if not tenants:
            said = f"no tenant {', '.join(map(repr, missing))}" if missing else "nothing to verify"
            raise TenantNotFoundError(f"there is {said} in {place}")
        of_log = None if kept is None else _kept_of_tenant(kept, tenants, keyring)
        observed = observations(opened, tenants, keyring, memory)
        heads = {tenant: each.heads for tenant, each in observed.items()}
        if of_log is not None and of_log[1].unknown is None:
            tenant, (head, _) = of_log
            heads[tenant] = [TreeHead(head.size, head.root, SOURCE), *heads.get(tenant, ())]
        told, written = run(
            lambda spark, passed: verify_ledgers(
                spark, opened, tenants=tenants, keyring=keyring, checkpoints=heads, passed=passed
            )
        )
    for verdict in told["tenants"]:
        if of_log is not None and verdict["tenant_id"] == of_log[0]:
            judge_unvouched(verdict, of_log[1].unknown, keyring)
    told["tenants"] = [
        observed[name].with_verdict(verdict) if (name := verdict["tenant_id"]) in observed else verdict
        for verdict in told["tenants"]
    ]
    lost = gone(observed, keyring, memory, held) if wanted is None and not opened.is_copy else []
    told["gone"] = [{"log": seen.checkpoint.origin, **seen.to_json()} for seen in lost]
    for seen in lost:
        what = f"{seen.checkpoint.size} entries of log {seen.checkpoint.origin}, verified {seen.seen_at}"
        err.print(f"gone from {place} are {what}", markup=False)
    for tenant in missing:
        err.print(f"there is no tenant {tenant!r} in {place}", markup=False)
    code_of = exit_code_of_bundle if opened.is_copy else exit_code_of_verdict
    others = [ExitCode.COULD_NOT_RUN] * len(missing) + [ExitCode.TAMPERED] * len(lost)
    return told, [*map(code_of, told["tenants"]), *others, written]


def _kept_of_tenant(text: str, tenants: Sequence[str], keyring: Keyring | None) -> tuple[str, JudgedCheckpoint]:
    """The externally kept checkpoint in ``text``, and the tenant of ``tenants`` whose log it covers.

    Raises:
        SignatureError: malformed, not signed by the key it names, or of another log.
    """
    found = judge_checkpoint(text, keyring)
    if found.unknown is not None:
        err.print(f"the checkpoint proves nothing: {found.unknown}", markup=False)
    origin = found.checkpoint.origin
    if origin.rpartition("/")[2] not in tenants:
        raise SignatureError(f"the checkpoint is of log {origin!r}, of none of the tenants to be verified")
    return origin.rpartition("/")[2], found


def _verify_bundles(
    files: Sequence[Path], keyring: Keyring | None, kept: str | None, memory: Memory | None, run: Run
) -> Told:
    from pipeline.verify import verify_bundles

    told, written = run(
        lambda spark, passed: verify_bundles(spark, files, keyring=keyring, kept=kept, memory=memory, passed=passed)
    )
    # There may be no verdict on a file.
    codes = (
        ExitCode.COULD_NOT_RUN if "error" in verdict else exit_code_of_bundle(verdict) for verdict in told["tenants"]
    )
    return told, [*codes, written]


def _worked(master: str | None, breaks: str | None, work: Work) -> tuple[dict[str, Any], ExitCode]:
    """The report of a verification (verdict objects, rows, rate), and the exit code of writing the breaks to the URL
    ``breaks``."""
    with running("verify", master) as spark:
        began_s, passed = time.perf_counter(), spark.sparkContext.accumulator(0)
        with shown(spark, "verifying", passed):
            verified = work(spark, passed)
            seconds = time.perf_counter() - began_s
            written = ExitCode.FINE if breaks is None else write_breaks(verified.breaks(), breaks)
            if written is ExitCode.FINE:  # Otherwise Spark may have ended.
                verified.close()
    entries = sum(each["entries_checked"] for each in verified.objects)
    return {
        "tenants": verified.objects,
        "entries_checked": entries,
        "seconds": round(seconds, 3),
        "rows_per_second": round(entries / seconds),
        "breaks_written": breaks.removeprefix(_FILE) if breaks and written is ExitCode.FINE else None,
    }, written


# --- what was found -----------------------------------------------------------------------------------


def _print(told: dict[str, Any]) -> None:
    verdicts = told["tenants"]
    table = Table(
        "tenant" if not verdicts or "file" not in verdicts[0] else "file", "entries", "unsigned", "verdict", "not ok"
    )
    for verdict in verdicts:
        state = "[bold green]valid[/]" if verdict["valid"] else "[bold red]NOT VALID[/]"
        rest = [f"{aspect} {coloured(said)}" for aspect, said in verdict["verdicts"].items() if said != "ok"]
        if "error" in verdict:
            state, rest = "[bold red]NOT READ[/]", [escape(verdict["error"])]
        name = verdict.get("file") or verdict["tenant_id"]
        unsigned = f"{verdict['unsigned_entries']:,}" if "unsigned_entries" in verdict else ""
        table.add_row(escape(name), f"{verdict['entries_checked']:,}", unsigned, state, ", ".join(rest))
    out.print(table)
    for verdict in verdicts:
        if verdict["first_break"] is not None:
            _print_first_break(verdict)
    _print_memory([verdict["memory"] for verdict in verdicts if "memory" in verdict])
    out.print(
        f"{counted(told['entries_checked'], 'entry', 'entries')} of {counted(len(verdicts), 'ledger')} "
        f"in {told['seconds']:.1f} s, "
        f"{told['rows_per_second']:,} entries/s"
    )
    if told["breaks_written"] is not None:
        out.print(f"every break: {told['breaks_written']}", markup=False)


def _print_memory(observations: Sequence[Mapping[str, Any]]) -> None:
    if observations:
        first = sum(observed["first_look"] for observed in observations)
        compared = sum(bool(observed["compared"]) for observed in observations)
        out.print(
            f"memory: {counted(compared, 'log')} compared with what was verified before, "
            f"{first:,} looked at for the first time; kept in {observations[0]['state']}",
            markup=False,
        )


def _print_first_break(verdict: dict[str, Any]) -> None:
    first, name, counts = verdict["first_break"], verdict.get("file") or verdict["tenant_id"], verdict["breaks"]
    found = escape(f"{name}: {first['kind']} at seq {first['seq']:,}: {first['detail']}")
    out.print(f"[bold red]broken:[/] {found}")
    out.print(f"  all breaks: {', '.join(f'{count:,} {kind}' for kind, count in counts.items())}", markup=False)


# --- --breaks -------------------------------------------------------------------------------------


_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_FILE: Final = "file://"


def breaks_url(text: str) -> str:
    """The URL of the folder that ``text`` names. A local folder is checked for write access now.

    Raises:
        ConfigurationError: it cannot be written to.
    """
    if _URL.match(text) and not text.startswith(_FILE):
        return text
    folder = Path(text.removeprefix(_FILE)).absolute()
    above = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if above == folder and not folder.is_dir():
        raise ConfigurationError(f"--breaks {folder} is a file: name a folder that is not there yet")
    if not above.is_dir() or not os.access(above, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigurationError(f"--breaks {folder}: {above} is no folder that can be written to")
    if above == folder and any(folder.iterdir()):
        raise ConfigurationError(f"--breaks {folder} is there and not empty: name a folder that is not there yet")
    return f"{_FILE}{folder}"


def write_breaks(breaks: DataFrame, url: str) -> ExitCode:
    """Write ``breaks`` as Parquet. A failure is reported on standard error, and its exit code returned."""
    try:
        # A local folder was found missing or empty; another must not exist.
        breaks.write.mode("append" if url.startswith(_FILE) else "errorifexists").parquet(url)
    except Exception as error:  # Errors of Spark, its Java and its tasks have no common base class.
        if is_interrupted():
            raise
        message, code = error_line(error)
        fail(f"the breaks could not be written to {url.removeprefix(_FILE)}: {message}")
        return code
    return ExitCode.FINE


# --- what the verifier remembers ------------------------------------------------------------------


def observations(
    opened: OpenPlace, tenants: Sequence[str], keyring: Keyring | None, memory: Memory | None
) -> dict[str, Observation]:
    """The remembered and the current checkpoint of each tenant of a database or an archive. Without ``keyring`` no
    checkpoint can be verified, and without ``memory`` none compared, so nothing is observed."""
    observed: dict[str, Observation] = {}
    if keyring is None or memory is None:
        return observed
    for tenant in tenants:
        with suppress(ArchiveInvalidError):  # Its verification reports the error.
            newest = next(reversed(opened.sealed(tenant)), None)
            note, to_seq = (None, None) if newest is None else (newest.checkpoint, newest.to_seq)
            observed[tenant] = Observation.at(
                memory, tenant, note, keyring, datetime.now(UTC), to_seq=to_seq, is_file=to_seq is not None
            )
    return observed


def gone(
    observed: Mapping[str, Observation], keyring: Keyring | None, memory: Memory | None, held: Collection[str]
) -> list[Seen]:
    """Remembered checkpoints of tenants missing from ``held``, the tenants of the ledger. Only logs with the origin of
    an observed log and a signature by a given key are returned."""
    if keyring is None or memory is None:
        return []
    seen = (each for one in observed.values() for each in (one.now, *one.before) if each is not None)
    bases = {each.checkpoint.origin.rpartition("/")[0] for each in seen}
    return [
        each
        for (origin, _), each in sorted(memory.logs.items())
        if origin.rpartition("/")[0] in bases
        and origin.rpartition("/")[2] not in held
        and judge_checkpoint(each.note, keyring).unknown is None
    ]
