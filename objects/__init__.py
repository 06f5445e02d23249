"""Storage for files that are written once: folders and buckets, by URL. Archives of ledgers and logs are kept there.

``sync_folder`` makes the names in a folder durable, for every package that writes files.
"""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
