"""``tally pipeline unpack``: an archive as bundles, one a tenant."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from ledger.errors import ArchiveInvalidError, InvalidInputError, TenantNotFoundError, UnknownKeyError
from ledger.exit_code import ExitCode, exit_code_of_error, gravest
from pipeline.cli.options import Archive, Keys, SigningKey, Tenants, load_keys
from pipeline.keys import open_signer
from signing.keys import Keyring
from terminal.counted import counted
from terminal.options import Json
from terminal.outcome import CommandExit, fail, out, print_json


def unpack(
    output: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder that the bundles go to.")],
    url: Archive = None,
    tenants: Tenants = None,
    keys: Keys = None,
    signing_key: SigningKey = None,
    as_json: Json = False,
) -> None:
    """Turn an archive into bundles, TENANT.bundle.tar each.

    Every tenant is verified first, against --keys and --signing-key; what does
    not hold, or was signed by another key, is named and not written; the others
    are. A bundle has the rows, links and snapshots of the archive, and a
    manifest that --signing-key signs. It needs no Spark.

    \b
    Exit codes: 0 written; 2 the archive does not hold; 4 a key that signed it
    is not known; 1 anything else.

    \b
    Examples:
      tally pipeline unpack --archive s3://ledger-archive/prod --out bundles/
      tally pipeline unpack --archive /backup/ledger --out . --tenant acme --keys trusted/
    """
    if not url:
        raise InvalidInputError("name the place of the archive: --archive URL, or the setting archive.url")
    from objects.store import ArchiveStore
    from pipeline.archive.reader import tenants_of
    from pipeline.archive.unpack import unpack as unpack_tenant

    signer, store = open_signer(signing_key), ArchiveStore(url)
    held = load_keys(keys or ())
    keyring = Keyring([signer.public_key, *held], held.log_verifier_keys)
    wanted = tenants or tenants_of(store)
    if not wanted:
        raise TenantNotFoundError(f"there is no archive at {url}")
    output.mkdir(parents=True, exist_ok=True)
    written, codes = [], [ExitCode.FINE]
    for tenant_id in wanted:
        try:
            each = asyncio.run(unpack_tenant(store, tenant_id, output, keyring, signer))
        except (ArchiveInvalidError, TenantNotFoundError, UnknownKeyError) as error:
            codes.append(exit_code_of_error(error))
            fail(str(error))
            continue
        written.append(each)
        if not as_json:
            entries, snapshots = counted(each.to_seq, "entry", "entries"), counted(each.snapshots, "snapshot")
            out.print(f"{each.file}: {entries} and {snapshots} of {tenant_id}", markup=False)
    if as_json:
        print_json({"bundles": [{**each._asdict(), "file": str(each.file)} for each in written]})
    raise CommandExit(gravest(codes))
