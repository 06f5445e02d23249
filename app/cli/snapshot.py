"""``tally snapshot``: sign what is chained now."""

from __future__ import annotations

from app.cli.answers import Snapshot
from app.cli.client import LedgerClient
from app.cli.options import Tenant, Url
from console.options import Json
from console.outcome import out, print_json


def snapshot(tenant: Tenant, url: Url, as_json: Json = False) -> None:
    """Sign a snapshot of a tenant's chain now, instead of when the batch is full.

    \b
    Examples:
      tally snapshot --tenant acme
      tally snapshot -t acme --json
    """
    with LedgerClient(url) as client:
        answer = client.post("/v1/snapshots", {"tenant_id": tenant}, Snapshot)
    if as_json:
        print_json(answer)
        return
    signed = f"seq {answer['from_seq']} to {answer['to_seq']}, {answer['entry_count']} entries"
    out.print(f"snapshot {answer['id']} of tenant {tenant} signs {signed}", markup=False)
    out.print(f"Merkle root {answer['merkle_root']}, HLC {answer['snapshot_hlc']}", markup=False)
