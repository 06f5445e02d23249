"""Bundles of sites that worked apart and exchanged some of what they had, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from ledger import canonical
from ledger.bundle.merge import incoming_entries
from ledger.hlc import Hlc
from signing.bundle.reader import BundleReader
from signing.bundle.writer import OwnChainBundle, OwnEntry
from tests.ledger.ledger_in_memory import SIGNER

BEGIN_MS = 1_704_931_200_000
_KINDS = (("JobCreated", "ENQUEUE"), ("JobAccepted", "DEQUEUE"), ("JobProgressReported", "EXECUTE"))


def bundle_of_site(path: Path, site: str, entries: Sequence[OwnEntry], tenant_id: str = "acme") -> Path:
    """A whole bundle of the site's own log, at ``path``."""
    bundle = OwnChainBundle(
        tenant_id=tenant_id, node_id=site, log_origin=f"log.{site}", signer=SIGNER, log_signer=SIGNER
    )
    with closing(bundle):
        path.write_bytes(bundle.append(list(entries)) + b"".join(bundle.finish()))
    return path


def event(hlc: Hlc, job: int, kind: int, told: int) -> OwnEntry:
    """One event of a job; ``told`` is what sets it apart from others of its kind."""
    name, action = _KINDS[kind]
    payload: dict[str, object] = {"type": name, "fence_token": 1, "dc_id": "use1"}
    payload |= {"spec": {"told": told}} if kind == 0 else {"completed": told, "failed": 0, "worker_count": told}
    return OwnEntry(hlc, f"job-{job}", action, canonical.encode(payload))


def carried(path: Path) -> list[OwnEntry]:
    """The entries of a bundle as an importer of it chains them: each with where it was first."""
    with BundleReader.open(path) as reader:
        incoming = incoming_entries(reader.source, reader.entry_batches())
        return [
            OwnEntry(Hlc.parse(each.t_hlc), each.job_id, each.action, each.payload.encode(), each.origin)
            for each in incoming
        ]


def drawn_sites(folder: Path, seed: int, *, conflicts: bool, count: int = 40) -> list[Path]:
    """Bundles of three sites that recorded events at nearly the same times, each in its own order, and then took over
    what another had; and some of these bundles again, exported later with more. With ``conflicts`` some events of
    different sites claim one HLC."""
    draw = random.Random(seed)
    paths: list[Path] = []
    for number, site in enumerate(("site-a", "site-b", "site-c")):
        own: dict[Hlc, OwnEntry] = {}
        for _ in range(count):
            node = "node-x" if conflicts and draw.random() < 0.3 else site
            hlc = Hlc(BEGIN_MS + draw.randrange(12), draw.randrange(3), node)
            told = draw.randrange(3) if node == "node-x" else number
            own[hlc] = event(hlc, draw.randrange(6), draw.randrange(3), told)
        entries = list(own.values())
        draw.shuffle(entries)
        half = entries[: len(entries) // 2]
        paths.append(bundle_of_site(folder / f"{seed}-{site}-early.tar", site, half))
        taken = [each for each in carried(draw.choice(paths[:-1])) if each.hlc not in own] if number else []
        paths.append(bundle_of_site(folder / f"{seed}-{site}.tar", site, [*entries, *taken]))
    return paths
