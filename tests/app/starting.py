"""What tests of starts share: the folder of a WAL, and starts that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import pytest

from app.node.service import Service
from app.runtime.settings.config import Settings
from app.write.followers import checkpoints
from app.write.followers.checkpoints import CheckpointJournal
from ledger.errors import LedgerError
from tests.app.conftest import RunNode
from tests.app.drafts import created
from wal import control as wal_control

Kinds = type[Exception] | tuple[type[Exception], ...]


def wal_folder(settings: Settings) -> Path:
    """The WAL folder of the one node that lives below ``settings.data_dir``."""
    (folder,) = [path for path in settings.wal_dir.iterdir() if path.is_dir()]
    return folder


def kept_size(settings: Settings) -> int:
    """Size of the checkpoint of tenant acme beside the WAL, 0 when there is none."""
    return CheckpointJournal(wal_folder(settings)).size("acme")


def forget_checkpoint(folder: Path, tenant_id: str) -> str:
    """Remove the checkpoint of a tenant from the journal in a WAL folder; its note."""
    notes = CheckpointJournal(folder).load_all()
    note = notes.pop(tenant_id)
    (folder / checkpoints.NAME).unlink()
    CheckpointJournal(folder).store(notes)
    return note


@contextmanager
def checkpoints_blocked(folder: Path) -> Iterator[None]:
    """No checkpoint can be kept in this WAL folder."""
    in_the_way = folder / f"{checkpoints.NAME}.tmp"
    in_the_way.mkdir()
    (folder / checkpoints.NAME).unlink()
    yield
    in_the_way.rmdir()


def changed_control(settings: Settings, **changes: object) -> None:
    """Change what the control file says, well formed."""
    folder = wal_folder(settings)
    known = wal_control.load(folder)
    assert known is not None
    wal_control.store(folder, known._replace(**changes))  # type: ignore[arg-type]


async def write(service: Service, *ns: int, tenant_id: str = "acme") -> None:
    """Chain one job a number."""
    for n in ns:
        await service.submitter.submit(created(tenant_id, n), key=None)


async def assert_no_start(start: AbstractAsyncContextManager[object], kind: Kinds, match: str | None = None) -> None:
    """The node or server does not start, and says why."""
    with pytest.raises(kind, match=match):
        async with start:
            pass


async def assert_refused(
    run_node: RunNode,
    settings: Settings,
    kind: type[LedgerError],
    match: str,
    *,
    url: str | None = None,
    accept_lost_wal: bool = False,
) -> None:
    """The start is refused, and whatever node lived here can start again: nothing was locked or changed for good."""
    before = {path: path.read_bytes() for path in sorted(wal_folder(settings).glob("*.wal"))}
    await assert_no_start(run_node(settings, url=url, accept_lost_wal=accept_lost_wal), kind, match)
    assert {path: path.read_bytes() for path in sorted(wal_folder(settings).glob("*.wal"))} == before
