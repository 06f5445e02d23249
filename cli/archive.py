"""``tally archive``: how far the archive is, and a process that fills it beside the nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.runtime.answers.retention import ArchiveAnswer
from app.runtime.settings.config import Settings, load_settings
from app.share.archive import pause_s, store_of
from app.trust.node_keys import uri_in_use
from cli.client import LedgerClient, Service, trusted_keys
from ledger.errors import DatabaseUnavailableError, InvalidInputError, SigningUnavailableError
from ledger.exit_code import ExitCode, gravest
from signing import private_keys
from signing.keys import Keyring, Signer
from terminal.outcome import CommandExit, counted, tell
from terminal.program import Json

if TYPE_CHECKING:
    from pipeline.archiving.continuous import Progress

archive = typer.Typer(no_args_is_help=True, help="The archive that the ledger fills.")


@archive.command("status")
def status(client: Service, as_json: Json = False) -> None:
    """Show how far each tenant is archived, what waits and for how long, what fails, and where the archive is.

    \b
    Exit codes: 0 nothing fails; 2 a tenant's entries or its archive do not
    hold; 1 the place cannot be used, there is none, or the service did not
    answer.

    \b
    Examples:
      tally archive status
      tally archive status --json
    """
    answer = client.get("/v1/archive", ArchiveAnswer)
    tell(answer, *_lines_of_status(answer), as_json=as_json)
    is_any_broken = any(each["error"] for each in answer["tenants"])
    is_away = answer["url"] is None or answer["error"] is not None
    raise CommandExit(gravest([ExitCode.TAMPERED if is_any_broken else ExitCode.FINE, ExitCode(int(is_away))]))


def _lines_of_status(answer: dict[str, Any]) -> Iterator[str]:
    if answer["url"] is None:
        yield "no archive: set archive.url, a folder or s3://bucket/prefix (docs/archive.md)"
        return
    who = "this node fills it" if answer["has_turn"] else "another process fills it, or none"
    lock = "" if answer["lock"] == "none" else f", locked: {answer['lock']}"
    yield f"archive {answer['url']}: {who}{lock}"
    if answer["error"] is not None:
        yield f"fails: {answer['error']}"
    for each in answer["tenants"]:
        waits = (
            f", {counted(each['lag_entries'], 'entry waits', 'entries wait')}, the oldest {each['lag_seconds']:.0f} s"
        )
        yield (
            f"{each['tenant_id']}: archived to seq {each['archived_to_seq']} of {each['signed_to_seq']} signed"
            + (waits if each["lag_entries"] else "")
        )
        if each["error"] is not None:
            yield f"  {each['error']}"
    if (more := answer["tenants_total"] - len(answer["tenants"])) > 0:
        yield f"and {more} tenants more"
    if answer["table_metadata"] is not None:
        yield f"Iceberg table, version {answer['table_version']}: {answer['table_metadata']}"


@archive.command("run")
def run(
    once: Annotated[bool, typer.Option("--once", help="Archive what is signed now, and end.")] = False,
    as_json: Json = False,
) -> None:
    """Archive what is signed, each archive.interval, in a process of its own beside the nodes.

    It uses the settings of the local service: archive.url, the database, and
    the key of signing.key_uri. One process of a ledger archives at a time:
    while a node does, this one waits its turn, and with --once it ends. Where
    PostgreSQL or the signer is away, it tries again; once the node has a new
    key, it signs with that.

    \b
    Exit codes, with --once: 0 all that is signed is archived, or another
    process archives; 2 entries or the archive do not hold; 4 something was
    signed by a key that is not known; 1 anything else.

    \b
    Examples:
      tally archive run --once
      tally archive run
    """
    settings = load_settings()
    if (store := store_of(settings.archive)) is None:
        raise InvalidInputError("name the place of the archive: set archive.url, a folder or s3://bucket/prefix")
    from pipeline.archiving.continuous import Archiver, Progress

    dsn, uri = dsn_of(settings), uri_in_use(settings)
    archiver, signer = Archiver(dsn, store), signer_of(settings, uri)
    while True:
        began_s = time.monotonic()
        try:
            if (now := uri_in_use(settings)) != uri:  # The node has changed its key.
                uri, signer = now, signer_of(settings, now)
            progress = archiver.step(signer, _keyring(dsn, signer))
        except (DatabaseUnavailableError, SigningUnavailableError) as error:
            if once:
                raise
            archiver.close()
            progress = Progress(has_turn=False, error=str(error), at_s=time.monotonic())
        tell(_told(progress), *_lines_of_run(progress), as_json=as_json)
        if once:
            archiver.close()
            raise CommandExit(_code(progress))
        time.sleep(pause_s(progress, settings.archive.interval.total_seconds(), time.monotonic() - began_s))


def dsn_of(settings: Settings) -> str:
    """The database of the settings, else that of the embedded PostgreSQL, which runs."""
    if settings.database_url is not None:
        return settings.database_url
    from cli.serve import embedded_postgres

    return embedded_postgres(settings.data_dir).service_url()


def signer_of(settings: Settings, uri: str | None = None) -> Signer:
    """The signer that ``uri`` names, by default the one that the node of the settings signs with now.

    Raises:
        ConfigurationError, SigningUnavailableError: it cannot be used, or does not answer.
    """
    uri = uri or uri_in_use(settings)
    return private_keys.fetch(uri, settings.signing.read_pin) if private_keys.is_remote(uri) else private_keys.load(uri)


def signer_and_keys(key: str | None, keys: Path | None, client: LedgerClient) -> tuple[Signer, Keyring]:
    """The signer that ``--key`` names, else the node's of the settings; its key and those of ``--keys``, else those
    that the service publishes.

    Raises:
        ConfigurationError, SigningUnavailableError: as ``signer_of``.
    """
    signer, trusted = signer_of(load_settings(), key), trusted_keys(keys, client)
    return signer, Keyring([signer.public_key, *trusted], trusted.log_verifier_keys)


def _keyring(dsn: str, signer: Signer) -> Keyring:
    """The keys that the ledger publishes, and the one that signs."""
    from pipeline.archiving.filing import Ledger

    with Ledger.connected(dsn) as ledger:
        return Keyring([signer.public_key, *ledger.published_keys()])


def _told(progress: Progress) -> dict[str, Any]:
    return {
        "has_turn": progress.has_turn,
        "error": progress.error,
        "files": progress.files,
        "table_version": progress.table_version,
        "tenants": [
            {
                "tenant_id": each.tenant_id,
                "archived_to_seq": each.archived_seq,
                "signed_to_seq": each.signed_seq,
                "lag_entries": each.lag_entries,
                "error": each.error,
            }
            for each in progress.tenants
        ],
    }


def _lines_of_run(progress: Progress) -> Iterator[str]:
    if progress.error is not None:
        yield f"fails: {progress.error}"
    elif not progress.has_turn:
        yield "another process archives: see tally archive status"
    else:
        yield f"{counted(progress.files, 'file')} written, {counted(progress.lag_entries, 'entry', 'entries')} left"
    for each in progress.tenants:
        if each.error is not None:
            yield f"{each.tenant_id}: {each.error}"


def _code(progress: Progress) -> ExitCode:
    from pipeline.archiving.filing import UnjudgedBreak

    found = [each.found for each in progress.tenants if each.found is not None]
    codes = [ExitCode.UNKNOWN_KEY if isinstance(each, UnjudgedBreak) else ExitCode.TAMPERED for each in found]
    return gravest([*codes, ExitCode.FINE if progress.error is None else ExitCode.COULD_NOT_RUN])
