"""Files that appear under their name only once they are whole."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the name ``path`` when the context ends well, durable, and is gone when it does not."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        # What a write or fsync raises names no file.
        if error.errno is not None and error.filename is None:
            raise OSError(error.errno, f"{error.strerror}; nothing of it is kept", str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
