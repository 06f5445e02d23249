"""The newest checkpoint of each tenant, kept beside the WAL where a database administrator cannot reach it.

``<wal folder>/checkpoints/<tenant>``, one signed note a file, replaced by temp file, fsync, rename and
directory fsync, many together. A chain that is shorter than its checkpoint or differs from it is never extended.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ledger.errors import InvalidInputError
from ledger.names import is_readable_tenant
from wal.segment import UNNAMED_SUFFIX, store_files, sync_folder


class CheckpointFolder:
    """Reads and writes the checkpoint files of one node."""

    def __init__(self, wal_folder: Path) -> None:
        self._folder = wal_folder / "checkpoints"
        if not self._folder.exists():
            self._folder.mkdir(mode=0o700)
            sync_folder(wal_folder)

    def load(self, tenant_id: str) -> str | None:
        """The tenant's newest note, None before the first."""
        try:
            return self._path(tenant_id).read_text()
        except FileNotFoundError:
            return None

    def size(self, tenant_id: str) -> int:
        """Tree size that the tenant's newest note names in its second line, 0 before the first."""
        note = self.load(tenant_id)
        return 0 if note is None else int(note.split("\n")[1])

    def load_all(self) -> dict[str, str]:
        """Newest notes by tenant."""
        return {path.name: path.read_text() for path in sorted(self._folder.iterdir()) if path.suffix != UNNAMED_SUFFIX}

    def store(self, notes: Mapping[str, str]) -> None:
        """Replace the notes of these tenants; on return they survive a crash. A crash before leaves each old or new."""
        store_files({self._path(tenant_id): note.encode() for tenant_id, note in notes.items()})

    def set_aside(self) -> None:
        """Keep all notes in a folder of their own, and begin with none; nothing is deleted."""
        number = 1
        while (aside := self._folder.with_name(f"checkpoints-{number}")).exists():
            number += 1
        self._folder.rename(aside)
        self._folder.mkdir(mode=0o700)
        sync_folder(self._folder.parent)

    def _path(self, tenant_id: str) -> Path:
        """The tenant's file. The name comes from the database, so it is not believed: it could lead elsewhere."""
        if not is_readable_tenant(tenant_id):
            raise InvalidInputError(f"no tenant can be named {tenant_id!r}; that row was not written by this service")
        return self._folder / tenant_id
