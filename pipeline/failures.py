"""What went wrong inside Spark, in one line: an error of ours that a task raised, or the root of Java's."""

from __future__ import annotations

import re
from typing import Final

from ledger import errors
from ledger.errors import LedgerError
from ledger.exit_code import ExitCode, exit_code_of_error
from pipeline.gateway import SparkEndedError, SparkError

LINE_CHARACTERS_MAX: Final = 600

_RAISED_BY_TASK = re.compile(r"^(?:ledger\.errors\.)(\w+): (.+)$", re.MULTILINE)
_PYTHON_ERROR = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception)): ?(.*)$", re.MULTILINE)


def told(error: Exception) -> tuple[str, ExitCode]:
    """The line for a user and the exit code that an error of Spark, or of a task, ends the command with."""
    text = str(error)
    if isinstance(error, SparkEndedError):
        return text, ExitCode.COULD_NOT_RUN
    raised = _RAISED_BY_TASK.findall(text)
    if raised:
        name, message = raised[-1]
        return message[:LINE_CHARACTERS_MAX], _code_of(name)
    python = _PYTHON_ERROR.findall(text)
    if python and "Traceback" in text:
        return f"{python[-1][0]}: {python[-1][1]}"[:LINE_CHARACTERS_MAX], ExitCode.COULD_NOT_RUN
    kind = error.kind if isinstance(error, SparkError) else type(error).__name__
    first = next((line.strip() for line in text.splitlines() if line.strip()), kind)
    return f"{kind}: {first}"[:LINE_CHARACTERS_MAX], ExitCode.COULD_NOT_RUN


def _code_of(name: str) -> ExitCode:
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, LedgerError)):
        return ExitCode.COULD_NOT_RUN
    return exit_code_of_error(kind.__new__(kind))
