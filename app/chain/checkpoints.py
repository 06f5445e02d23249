"""The newest checkpoint of each tenant, kept beside the WAL where a database administrator cannot reach it.

``<wal folder>/checkpoints/<tenant>``, one signed note a file, replaced by temp file, fsync, rename and
directory fsync, many together. A chain that is shorter than its checkpoint or differs from it is never extended.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ledger.errors import InvalidInputError, SignatureError, StartRefusedError
from ledger.names import is_readable_tenant
from signing import checkpoint, note
from signing.checkpoint import Checkpoint
from wal.segment import store_files, sync_folder


class CheckpointFolder:
    """Reads and writes the checkpoint files of one node."""

    def __init__(self, wal_folder: Path) -> None:
        self._folder = wal_folder / "checkpoints"
        if not self._folder.exists():
            self._folder.mkdir(mode=0o700)
            sync_folder(wal_folder)

    def load(self, tenant_id: str) -> str | None:
        """The tenant's newest note, None before the first.

        Raises:
            SignatureError: the file is no text.
        """
        path = self._path(tenant_id)
        try:
            return path.read_bytes().decode()
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as error:
            raise SignatureError(f"{path} is no checkpoint: {error}") from error

    def size(self, tenant_id: str) -> int:
        """Tree size that the tenant's newest note names in its second line, 0 before the first.

        Raises:
            SignatureError: the file is no checkpoint.
        """
        note = self.load(tenant_id)
        try:
            return 0 if note is None else int(note.split("\n")[1])
        except (IndexError, ValueError) as error:
            raise SignatureError(f"{self._path(tenant_id)} is no checkpoint: {error}") from error

    def newest(self, tenant_id: str) -> Checkpoint | None:
        """What the tenant's newest note says, None before the first: where it is kept vouches for it.

        Raises:
            SignatureError: the file is no checkpoint.
        """
        text = self.load(tenant_id)
        return None if text is None else checkpoint.parse(note.parse(text).text)

    def load_all(self) -> dict[str, str]:
        """Newest notes by tenant. Files whose name is no tenant's are none of our business.

        Raises:
            StartRefusedError: names the first that cannot be read.
        """
        notes = {}
        for path in sorted(self._folder.iterdir()):
            if not is_readable_tenant(path.name):
                continue
            try:
                notes[path.name] = path.read_bytes().decode()
            except (OSError, UnicodeDecodeError) as error:
                raise StartRefusedError(
                    f"{path} cannot be read as the checkpoint of tenant {path.name}: {error}; restore it, or move it "
                    "away once tally verify has found the chain whole"
                ) from error
        return notes

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
