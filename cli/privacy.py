"""``tally privacy`` and ``tally erase``: which fields are private, and forgetting a person without rewriting."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.runtime.answers.node import ErasureAnswer, PrivacyAnswer
from app.runtime.settings.config import load_settings
from app.share.archive import require_packages
from cli.archive import dsn_of
from cli.client import Service, given, trusted_keys
from cli.options import Keys, Tenant
from ledger.errors import DatabaseUnavailableError, InvalidInputError, reported_as
from ledger.facts.events import SystemAction
from ledger.machines.carried import read_private_fields
from ledger.machines.retention import retention_of
from ledger.text import secret_text
from ledger.verification import ENTRY_COLUMNS
from objects.store import ArchiveStore
from signing import retention_statement
from signing.keys import Keyring
from terminal.outcome import counted, tell
from terminal.program import Json

if TYPE_CHECKING:
    from app.store.privacy import PrivacyEntry

CONNECT_TIMEOUT_S = 10.0
FROM_STANDARD_INPUT = "-"
SUBJECT_CHARACTERS_MAX = 4096
"""How much of standard input is read; the service accepts less."""

privacy = typer.Typer(no_args_is_help=True, help="Private fields: encrypted in the log, under a key for each person.")


@privacy.command("set")
def set_fields(
    tenant: Tenant,
    client: Service,
    fields: Annotated[
        list[str] | None,
        typer.Option("--field", "-f", help="A field of payloads, such as spec.user; again for each. None: no more."),
    ] = None,
    subject: Annotated[
        str | None, typer.Option("--subject-field", help="The private field whose value names the person.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Declare a tenant's private fields, instead of those declared before.

    They are encrypted from now on. What was recorded before stays as it is.

    \b
    Examples:
      tally privacy set -t acme -f spec.user -f requestor --subject-field spec.user
    """
    body = {"fields": fields or [], "subject": subject}
    _show(client.send("PUT", f"/v1/tenants/{tenant}/privacy", body, PrivacyAnswer), as_json)


@privacy.command("show")
def show(tenant: Tenant, client: Service, as_json: Json = False) -> None:
    """Show a tenant's private fields.

    \b
    Examples:
      tally privacy show -t acme --json
    """
    _show(client.get(f"/v1/tenants/{tenant}/privacy", PrivacyAnswer), as_json)


def _show(answer: dict[str, Any], as_json: bool) -> None:
    tell(
        answer,
        f"private fields of tenant {answer['tenant_id']}: {', '.join(answer['fields']) or 'none'}",
        *([f"the person is named by {answer['subject']}"] if answer["subject"] is not None else ()),
        *([f"on record at seq {answer['seq']}; {answer['covers']}"] if answer["seq"] is not None else ()),
        as_json=as_json,
    )


@privacy.command("rotate-master")
def rotate_master(
    new: Annotated[Path, typer.Option("--new", help="File of the new master key; made if there is none.")],
    old: Annotated[
        str | None, typer.Option("--old", help="The present master key; privacy.master_key_uri when not said.")
    ] = None,
    dsn: Annotated[
        str | None, typer.Option("--dsn", metavar="DSN", help="The ledger's PostgreSQL; database_url when not said.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Wrap all living keys by a new master key, so that the old one can be destroyed.

    Then put the new file in the old one's place on every node, and destroy the
    old one and its copies: only that takes erased keys out of old backups of
    the database. Until a node has the new file it refuses private fields.

    \b
    Examples:
      tally privacy rotate-master --new /etc/tallystick/master-2.key
      tally privacy rotate-master --new new.key --dsn "$(tally db-url)"
    """
    settings = load_settings()
    url = secret_text(dsn, "--dsn") if dsn else settings.database_url
    if url is None:
        raise InvalidInputError("say which database with --dsn or TALLY_DATABASE_URL")
    rewrapped, old_id, new_id = asyncio.run(_rotate(url, old or settings.privacy_master_key_uri, str(new.absolute())))
    tell(
        {"keys": rewrapped, "old_master_key_id": old_id, "master_key_id": new_id, "path": str(new)},
        f"{rewrapped} keys are wrapped by master key {new_id} in {new}",
        f"put it in the place of {old_id} on every node, then destroy that and its copies",
        as_json=as_json,
    )


async def _rotate(url: str, old_uri: str, new_uri: str) -> tuple[int, str, str]:
    from app.runtime.postgres import DATABASE_FAULTS
    from app.store import sessions
    from app.trust import subject_keys as keys
    from signing.private_keys import MasterKey

    old, new = MasterKey.load(old_uri), MasterKey.load_or_generate(new_uri)
    with reported_as(DatabaseUnavailableError, "nothing was changed, PostgreSQL failed", *DATABASE_FAULTS):
        connection = await sessions.connect_alone(url, timeout_s=CONNECT_TIMEOUT_S)
        try:
            return await keys.rotate_master(connection, old, new), old.master_key_id, new.master_key_id
        finally:
            await connection.close()


@privacy.command("restore")
def restore(
    tenant: Tenant,
    client: Service,
    archive: Annotated[
        str | None,
        typer.Option("--archive", metavar="URL", help="The archive; the one that the prune names when not said."),
    ] = None,
    keys: Keys = None,
    dsn: Annotated[
        str | None, typer.Option("--dsn", metavar="DSN", help="The ledger's PostgreSQL; database_url when not said.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Bring back the records of erasures that left with a prune, from the archive.

    Where they are missing, or were edited, a node cannot tell which keys were
    destroyed: it shows no private value of the tenant and takes none. The
    archive must be signed by --keys, else by keys that the service publishes,
    and its erasures must be those of which the prune carries the digest. A
    node that runs goes on within seconds.

    \b
    Examples:
      tally privacy restore --tenant acme
      tally privacy restore -t acme --archive s3://ledger-archive/prod --dsn "$(tally db-url)" --keys trusted-keys.json
    """
    require_packages("tally privacy restore")
    url = secret_text(dsn, "--dsn") if dsn else dsn_of(load_settings())
    changed, seq, place = asyncio.run(_bring_back(url, tenant, archive, trusted_keys(keys, client)))
    tell(
        {"tenant_id": tenant, "archive": place, "to_seq": seq, "changed": changed},
        f"tenant {tenant}: {counted(changed, 'record')} of erasures up to seq {seq} brought back from {place}",
        as_json=as_json,
    )


async def _bring_back(url: str, tenant: str, archive: str | None, keyring: Keyring) -> tuple[int, int, str]:
    """How many records were changed, the floor of the tenant, and the archive."""
    from app.runtime.postgres import DATABASE_FAULTS
    from app.store import node, sessions
    from app.store.exclusions import own_log
    from app.store.retention import retention_rows
    from app.trust.privacy_agreement import bring_back_erasures
    from app.trust.retention import FieldsAtFloor

    with reported_as(DatabaseUnavailableError, "nothing was changed, PostgreSQL failed", *DATABASE_FAULTS):
        connection = await sessions.connect_alone(url, timeout_s=CONNECT_TIMEOUT_S)
        try:
            log = own_log(await node.log_origin(connection), tenant) or ""
            judge = partial(retention_statement.judge, log, keyring)
            floor = retention_of(await retention_rows(connection, tenant), judge).floor
            if floor is None:
                raise InvalidInputError(f"nothing left tenant {tenant} with a prune that these keys signed")
            place = archive or floor.archive
            fields = FieldsAtFloor(floor.to_seq, read_private_fields(floor.private_fields))
            erasures = await asyncio.to_thread(_archived_erasures, place, tenant, keyring, floor.to_seq)
            return await bring_back_erasures(connection, tenant, fields, erasures), floor.to_seq, place
        finally:
            await connection.close()


def _archived_erasures(url: str, tenant: str, keyring: Keyring, to_seq: int) -> list[tuple[str, PrivacyEntry]]:
    """The erasures of the ledger itself up to a seq in its archive, each after its node."""
    from app.store.privacy import PrivacyEntry
    from pipeline.archive.reader import TenantArchive

    archive = TenantArchive.signed(ArchiveStore(url), tenant, keyring)
    rows = (dict(zip(ENTRY_COLUMNS, row, strict=True)) for rows in archive.entry_batches(None, to_seq) for row in rows)
    return [
        (row["hlc_node"], PrivacyEntry(tenant, row["seq"], row["job_id"], row["payload"], row["hlc_physical"]))
        for row in rows
        if row["action"] == SystemAction.SUBJECT_ERASED and row["origin"] is None
    ]


def erase(
    tenant: Tenant,
    client: Service,
    subject: Annotated[
        str, typer.Option("--subject", help="The person, as events name them; - reads one line of standard input.")
    ],
    reason: Annotated[str | None, typer.Option("--reason", help="Goes on record as it is.")] = None,
    as_json: Json = False,
) -> None:
    """Destroy the key of a person's private fields, for good.

    What was encrypted with it can never be read again; everything still
    verifies, and the chain says that it was done.

    \b
    Examples:
      tally erase -t acme --subject alice@example.org --reason "request 4711"
      tally erase -t acme --subject - < person.txt
    """
    if subject == FROM_STANDARD_INPUT:
        subject = sys.stdin.readline(SUBJECT_CHARACTERS_MAX).rstrip("\r\n")
    answer = client.post(
        f"/v1/tenants/{tenant}/erasures", given({"subject": subject, "reason": reason}), ErasureAnswer, repeatable=True
    )
    tell(
        answer,
        f"erased: {', '.join(answer['key_ids'])}, on record at seq {answer['seq']} of tenant {answer['tenant_id']}",
        as_json=as_json,
    )
