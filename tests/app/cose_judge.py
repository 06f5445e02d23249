"""``@transmute/cose``, the library of an author of RFC 9942 and RFC 9943, by npm, which `make torture` needs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).with_suffix(".js")


class CoseJudge(NamedTuple):
    """The library in a folder."""

    folder: Path

    @classmethod
    def installed(cls, folder: Path) -> CoseJudge:
        npm = shutil.which("npm")
        assert npm is not None, "install nodejs and npm: they run the judge of COSE"
        subprocess.run([npm, "install", "--silent", "--prefix", folder, "@transmute/cose@0.2.11"], check=True)
        shutil.copy(SCRIPT, folder)
        return cls(folder)

    def file(self, name: str, content: bytes | str) -> Path:
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def says(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """What the script, which has the arguments, prints."""
        command = ["node", self.folder / SCRIPT.name, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)
