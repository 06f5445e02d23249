"""Where ``--breaks`` writes, and that a failure there costs no verdict."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ledger.errors import ConfigurationError
from ledger.exit_code import ExitCode
from pipeline.cli.running import is_interrupted
from pipeline.gateway import told
from terminal.outcome import CommandExit, fail

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_FILE: Final = "file://"


class BreaksFolder(NamedTuple):
    """A folder that the breaks of a verification go to."""

    shown: str
    """What a user knows it by: an absolute path, or its URL."""
    url: str
    """What Spark knows it by."""
    is_there: bool
    """Whether it is there already, with nothing in it."""

    @classmethod
    def named(cls, text: str) -> BreaksFolder:
        """The folder that ``text`` names. Of one on this machine it is known now whether it can be written.

        Raises:
            ConfigurationError: it cannot.
        """
        if _URL.match(text) and not text.startswith(_FILE):
            return cls(text, text, is_there=False)
        folder = Path(text.removeprefix(_FILE)).absolute()
        above = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
        if above == folder and not folder.is_dir():
            raise ConfigurationError(f"--breaks {folder} is a file: name a folder that is not there yet")
        if not above.is_dir() or not os.access(above, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigurationError(f"--breaks {folder}: {above} is no folder that can be written to")
        if above == folder and any(folder.iterdir()):
            raise ConfigurationError(f"--breaks {folder} is there and not empty: name a folder that is not there yet")
        return cls(str(folder), f"{_FILE}{folder}", is_there=above == folder)

    def write(self, breaks: DataFrame) -> ExitCode:
        """Write ``breaks`` as Parquet; what keeps that from being done is said on standard error, and the code for it
        returned."""
        try:
            breaks.write.mode("append" if self.is_there else "errorifexists").parquet(self.url)
        except Exception as error:  # Errors of Spark, of its Java and of its tasks have no root of their own.
            if isinstance(error, CommandExit) or is_interrupted():
                raise
            message, code = told(error)
            fail(f"the breaks could not be written to {self.shown}: {message}")
            return code
        return ExitCode.FINE
