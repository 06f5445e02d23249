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
from pipeline.archive.reader import ARCHIVE
from pipeline.cli.ledgers import (
    Archives,
    Bundles,
    Dsns,
    LedgersFile,
    MoreBundles,
    Sources,
    codes_of,
    is_alone,
    opened_with_archives,
    sources,
)
from pipeline.cli.options import Keys, Master, Tenants, load_keys
from pipeline.cli.running import is_interrupted, running, shown
from pipeline.java import error_line
from pipeline.places import OpenPlace
from pipeline.places.protocol import ChainName
from signing.anchors import ExternalWitnesses
from signing.checkpoint import JudgedCheckpoint, judge_kept, judge_unvouched, read_kept
from signing.keys import Keyring, demanding
from signing.memory import Memory, Observation, Seen, memory_of, remembering
from terminal.outcome import CommandExit, coloured, counted, err, fail, out, print_json, print_why_incomplete
from terminal.program import Json, NoState, Signatures, State

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import DataFrame, SparkSession

    from pipeline.verify import Verified


def verify(
    more_bundles: MoreBundles = None,
    tenants: Tenants = None,
    dsns: Dsns = None,
    archives: Archives = None,
    ledgers: LedgersFile = None,
    bundles: Bundles = None,
    keys: Keys = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", exists=True, dir_okay=False, help="A checkpoint kept elsewhere.")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            "--policy",
            exists=True,
            dir_okay=False,
            help="A tlog-policy file: exit code 3 below its quorum of witnesses.",
        ),
    ] = None,
    signatures: Signatures = "any",
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

    With --archive beside --dsn, what left a database is verified in its
    archive, and both as one chain from seq 1. Of several, those of one name
    belong together.

    Several ledgers are verified in one Spark job, and each verdict names its
    ledger. One that cannot be reached is named, and the others are verified.

    \b
    Exit codes: 0 whole; 2 tampered; 3 nothing wrong found but not everything
    checked, such as an end that no snapshot signs yet; 4 a key is unknown,
    expired or revoked; 1 could not run, or could not read a ledger or a file.

    \b
    Examples:
      tally pipeline verify --keys trusted-keys.json
      tally pipeline verify --archive s3://ledger-archive/prod --keys trusted/
      tally pipeline verify --dsn postgresql://db/ledger --archive s3://ledger-archive/prod --keys trusted/
      tally pipeline verify --bundle sites/*.tar --keys trusted/ --json
      tally pipeline verify --ledgers ledgers.txt --keys trusted/
      tally pipeline verify --keys trusted/ --policy witnesses.policy
    """
    where = sources(dsns, archives, ledgers, bundles, more_bundles, tenants)
    keyring = demanding(signatures, load_keys(keys) if keys else None)
    kept = read_kept(checkpoint) if checkpoint is not None else None
    memory = memory_of(state, is_off=no_state or keyring is None)
    external = ExternalWitnesses.load([], None, policy)
    run = partial(_worked, master, None if breaks is None else breaks_url(breaks))
    if where.bundles:
        told, codes = _verify_bundles([*map(Path, where.bundles)], keyring, kept, memory, external, run)
    else:
        told, codes = _verify_ledgers(where, tenants, keyring, kept, memory, external, run)
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


def _verify_ledgers(
    where: Sources,
    wanted: Sequence[str] | None,
    keyring: Keyring | None,
    kept: str | None,
    memory: Memory | None,
    external: ExternalWitnesses,
    run: Run,
) -> Told:
    """Verify databases, with their archives or without, or archives.

    Raises:
        TenantNotFoundError: there is nothing to verify.
    """
    with opened_with_archives(where, keyring) as (opened, archives, unread):
        # 1. The chains.
        held = opened.tenants()
        named = held if archives is None else sorted({*held, *archives.tenants()})
        chains = named if wanted is None else [each for each in named if ChainName.parse(each).tenant_id in wanted]
        missing = sorted({*(wanted or ())} - {ChainName.parse(chain).tenant_id for chain in chains})
        if not chains:
            said = f"no tenant {', '.join(map(repr, missing))}" if missing else "nothing to verify"
            raise TenantNotFoundError(f"there is {said} in {opened}")
        # 2. The checkpoints that they are compared with.
        observed = observations(opened, [each for each in chains if each in {*held}], keyring, memory)
        heads = {chain: each.heads for chain, each in observed.items()}
        of_file = {} if kept is None else _kept_of_chains(kept, opened, chains, keyring)
        for chain, given in of_file.items():
            heads[chain] = [*given.heads, *heads.get(chain, ())]
        # 3. The verdicts.
        told, written = run(_work(opened, archives, chains, keyring, heads, external))
        broken = [str(ChainName.of(each)) for each in told["tenants"] if each["verdicts"].get(ARCHIVE) == "broken"]
        told["tables"] = (opened if archives is None else archives).tables(keyring, broken)
        told["tenants"] = [_compared(verdict, observed, of_file, keyring) for verdict in told["tenants"]]
    # 4. What is missing.
    lost = gone(observed, keyring, memory, held) if wanted is None and not opened.is_copy else []
    told["gone"] = [{"log": seen.checkpoint.origin, **seen.to_json()} for seen in lost]
    for seen in lost:
        what = f"{seen.checkpoint.size} entries of log {seen.checkpoint.origin}, verified {seen.seen_at}"
        err.print(f"gone from {opened} are {what}", markup=False)
    for tenant in missing:
        err.print(f"there is no tenant {tenant!r} in {opened}", markup=False)
    if not is_alone(where.ledgers):
        told["unread"] = [each._asdict() for each in unread]
    code_of = exit_code_of_bundle if opened.is_copy else exit_code_of_verdict
    others = [_code_of_table(each) for each in told["tables"]]
    others += [ExitCode.COULD_NOT_RUN] * len(missing) + [ExitCode.TAMPERED] * len(lost) + codes_of(unread)
    return told, [*map(code_of, told["tenants"]), *others, written]


def _work(
    opened: OpenPlace,
    archives: OpenPlace | None,
    chains: Sequence[str],
    keyring: Keyring | None,
    heads: Mapping[str, Sequence[TreeHead]],
    external: ExternalWitnesses,
) -> Work:
    from pipeline.verify import verify as verify_chains
    from pipeline.verify import verify_joined

    def work(spark: SparkSession, passed: Accumulator[int]) -> Verified:
        if archives is None:
            return verify_chains(
                spark, opened, tenants=chains, keyring=keyring, checkpoints=heads, external=external, passed=passed
            )
        return verify_joined(
            *(spark, opened, archives),
            tenants=chains,
            keyring=keyring,
            checkpoints=heads,
            external=external,
            passed=passed,
        )

    return work


def _code_of_table(found: Mapping[str, Any]) -> ExitCode:
    from pipeline.archive.table_reader import CODE_OF_TABLE

    return CODE_OF_TABLE.get(found["verdict"], ExitCode.FINE)


def _compared(
    verdict: dict[str, Any],
    observed: Mapping[str, Observation],
    of_file: Mapping[str, JudgedCheckpoint],
    keyring: Keyring | None,
) -> dict[str, Any]:
    """``verdict`` with what the checkpoints of its chain, remembered and externally kept, say."""
    chain = str(ChainName.of(verdict))
    if chain in of_file:
        judge_unvouched(verdict, of_file[chain].unknown, keyring)
    return observed[chain].with_verdict(verdict) if chain in observed else verdict


def _kept_of_chains(
    text: str, opened: OpenPlace, chains: Sequence[str], keyring: Keyring | None
) -> dict[str, JudgedCheckpoint]:
    """The externally kept checkpoint in ``text``, for each of ``chains`` whose log it covers: one, or that of each
    ledger with that log.

    Raises:
        SignatureError: malformed, not signed by the key it names, or of another log.
    """
    found = judge_kept(text, keyring)
    if found.unknown is not None:
        err.print(f"the checkpoint proves nothing: {found.unknown}", markup=False)
    origin = found.checkpoint.origin
    base, _, tenant_id = origin.rpartition("/")
    named = [(chain, ChainName.parse(chain)) for chain in chains]
    covered = [
        chain
        for chain, name in named
        if name.tenant_id == tenant_id and (name.ledger is None or opened.log_origin(chain) == base)
    ]
    if not covered:
        raise SignatureError(f"the checkpoint is of log {origin!r}, of none of the tenants to be verified")
    return dict.fromkeys(covered, found)


def _verify_bundles(
    files: Sequence[Path],
    keyring: Keyring | None,
    kept: str | None,
    memory: Memory | None,
    external: ExternalWitnesses,
    run: Run,
) -> Told:
    from pipeline.verify import verify_bundles

    told, written = run(
        lambda spark, passed: verify_bundles(
            spark, files, keyring=keyring, kept=kept, memory=memory, external=external, passed=passed
        )
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
        name = _name_of(verdict)
        unsigned = f"{verdict['unsigned_entries']:,}" if "unsigned_entries" in verdict else ""
        table.add_row(escape(name), f"{verdict['entries_checked']:,}", unsigned, state, ", ".join(rest))
    out.print(table)
    for verdict in verdicts:
        if verdict["first_break"] is not None:
            _print_first_break(verdict)
        if (pruned := verdict.get("pruned")) is not None:
            begin, left_to = verdict["verified_from_seq"], pruned["to_seq"]
            out.print(f"{_name_of(verdict)}: verified from seq {begin:,} on; seq 1 to {left_to:,} left", markup=False)
    for found in told.get("tables", ()):
        _print_table(found)
    _print_memory([verdict["memory"] for verdict in verdicts if "memory" in verdict])
    out.print(
        f"{counted(told['entries_checked'], 'entry', 'entries')} of {counted(len(verdicts), 'ledger')} "
        f"in {told['seconds']:.1f} s, "
        f"{told['rows_per_second']:,} entries/s"
    )
    if told["breaks_written"] is not None:
        out.print(f"every break: {told['breaks_written']}", markup=False)


def _print_table(found: Mapping[str, Any]) -> None:
    from pipeline.archive.table_reader import line_of_table

    out.print(line_of_table(found), markup=False)


def _name_of(verdict: Mapping[str, Any]) -> str:
    return verdict.get("file") or ChainName.of(verdict).shown


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
    first, name, counts = verdict["first_break"], _name_of(verdict), verdict["breaks"]
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
    opened: OpenPlace, chains: Sequence[str], keyring: Keyring | None, memory: Memory | None
) -> dict[str, Observation]:
    """The remembered and the current checkpoint of each chain of databases or archives. Without ``keyring`` no
    checkpoint can be verified, and without ``memory`` none compared, so nothing is observed.

    A chain without a checkpoint is compared with every remembered log of its tenant, except those that another of the
    ledgers has."""
    observed: dict[str, Observation] = {}
    if keyring is None or memory is None:
        return observed
    for chain in chains:
        with suppress(ArchiveInvalidError):  # Its verification reports the error.
            newest = next(reversed(opened.sealed(chain)), None)
            note, to_seq = (None, None) if newest is None else (newest.checkpoint, newest.to_seq)
            tenant_id = ChainName.parse(chain).tenant_id
            observed[chain] = Observation.at(
                memory, tenant_id, note, keyring, datetime.now(UTC), to_seq=to_seq, is_file=to_seq is not None
            )
    logs = {each.now.checkpoint.origin for each in observed.values() if each.now is not None}
    for chain, each in observed.items():
        if each.now is None:
            before = [seen for seen in each.before if seen.checkpoint.origin not in logs]
            observed[chain] = each._replace(before=before)
    return observed


def gone(
    observed: Mapping[str, Observation], keyring: Keyring | None, memory: Memory | None, held: Collection[str]
) -> list[Seen]:
    """Remembered checkpoints of tenants that their ledger no longer has; ``held`` are the chains of all ledgers. Only
    logs with the origin of an observed log of that ledger and a signature by a given key are returned."""
    if keyring is None or memory is None:
        return []
    bases: dict[str, set[str | None]] = {}
    for chain, one in observed.items():
        for seen in (one.now, *one.before):
            if seen is not None:
                base = seen.checkpoint.origin.rpartition("/")[0]
                bases.setdefault(base, set()).add(ChainName.parse(chain).ledger)
    there = {*map(ChainName.parse, held)}
    return [
        each
        for (origin, _), each in sorted(memory.logs.items())
        for base, _, tenant_id in (origin.rpartition("/"),)
        if any(ChainName(ledger, tenant_id) not in there for ledger in bases.get(base, ()))
        and judge_kept(each.note, keyring).unknown is None
    ]
