"""``tally verify --archive``: an archive verified by itself, with its Iceberg table, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import RenderableType

from app.runtime.settings.config import load_settings
from app.share.archive import require_packages
from ledger.errors import InvalidInputError, TenantNotFoundError
from ledger.exit_code import ExitCode, exit_code_of_bundle, gravest
from objects.store import ArchiveStore
from signing.anchors import NOBODY, ExternalWitnesses
from signing.checkpoint import judge_kept, judge_unvouched
from signing.keys import Keyring
from signing.memory import Memory, remembering
from terminal.outcome import CommandExit, counted, err, findings, marked, print_why_incomplete, tell, verdict_table

if TYPE_CHECKING:
    from pipeline.archive.joined import ArchivedPart


def verify_archive(
    url: str,
    tenant: str | None,
    keyring: Keyring | None,
    kept: str | None,
    memory: Memory | None,
    as_json: bool,
    external: ExternalWitnesses = NOBODY,
) -> NoReturn:
    """Verify the tenants of the archive at ``url``, by default all, and its table; prints the verdicts and exits.

    Raises:
        TenantNotFoundError: there is nothing to verify.
        ArchiveUnavailableError, ConfigurationError: the archive cannot be read.
        CommandExit: with the gravest exit code.
    """
    require_packages("tally verify --archive")
    from pipeline.archive.reader import ARCHIVE, verify_tenant
    from pipeline.archive.table_reader import CODE_OF_TABLE, line_of_table, verify_table_of
    from pipeline.cli.verify import observations
    from pipeline.places.archive import ArchivePlace

    store = ArchiveStore(url)
    judged = None if kept is None else judge_kept(kept, keyring)
    with ArchivePlace(url).open(keyring) as place:
        held = place.tenants()
        tenants = held if tenant is None else [tenant] if tenant in held else []
        if not tenants:
            raise TenantNotFoundError(f"there is {f'no tenant {tenant!r}' if tenant else 'nothing to verify'} in {url}")
        observed = observations(place, tenants, keyring, memory)
    verdicts = []
    for name in tenants:
        of_tenant = judged if judged is not None and judged.checkpoint.origin.rpartition("/")[2] == name else None
        heads = [
            *(of_tenant.heads if of_tenant is not None else ()),
            *(observed[name].heads if name in observed else ()),
        ]
        verdict = asyncio.run(verify_tenant(store, name, keyring, heads, external))
        if of_tenant is not None:
            judge_unvouched(verdict, of_tenant.unknown, keyring)
        verdicts.append(observed[name].with_verdict(verdict) if name in observed else verdict)
    broken = [each["tenant_id"] for each in verdicts if each["verdicts"][ARCHIVE] == "broken"]
    table = verify_table_of(store, keyring, broken)
    with remembering(memory, [verdict.get("memory") for verdict in verdicts]):
        told = {"archive": store.url, "tenants": verdicts, "table": table}
        tell(told, *_lines(verdicts), line_of_table(table), as_json=as_json)
    code = gravest([*map(exit_code_of_bundle, verdicts), CODE_OF_TABLE.get(table["verdict"], ExitCode.FINE)])
    if code is ExitCode.INCOMPLETE:
        print_why_incomplete(verdicts, is_any_key=keyring is not None)
        if table["verdict"] == "behind":
            err.print(table["detail"], markup=False)
    raise CommandExit(code)


def archived_part_at(url: str, tenant: str, keyring: Keyring | None) -> ArchivedPart:
    """What the archive at ``url`` has of a tenant, verified.

    Raises:
        ArchiveUnavailableError, ConfigurationError: the archive cannot be read.
    """
    require_packages("tally verify --with-archive")
    from pipeline.archive.joined import archived_part

    return asyncio.run(archived_part(ArchiveStore(url), tenant, keyring))


def local_archive() -> str:
    """The archive of the local settings.

    Raises:
        InvalidInputError: they name none.
    """
    if (url := load_settings().archive.url) is None:
        raise InvalidInputError("name the archive: --archive URL, or set archive.url (docs/archive.md)")
    return url


def _lines(verdicts: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    for verdict in verdicts:
        state = "[bold green]valid[/]" if verdict["valid"] else "[bold red]NOT VALID[/]"
        yield marked(
            f"tenant {verdict['tenant_id']}: {state}, {counted(verdict['entries_checked'], 'entry', 'entries')} "
            f"(seq {verdict['from_seq']} to {verdict['to_seq']}) in {verdict['duration_ms']:.0f} ms"
        )
        yield verdict_table(verdict["verdicts"])
        yield from findings(verdict, verdict.get("memory"))
