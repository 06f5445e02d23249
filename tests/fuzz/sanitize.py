"""``python -m tests.fuzz.sanitize [--seconds S] [--examples N]``: the modules in C under sanitizers.

1. Each module is compiled with ``-fsanitize=address,undefined`` into ``build/sanitized``.
2. Their tests run on these modules, without the tests of what happens when memory runs out.
3. The fuzzer feeds damaged input to every parser, those in Python too.

The first read or write out of bounds, use after free, or overflow of a signed integer ends the process with a report.
The interpreter itself is not instrumented; ``PYTHONMALLOC=malloc`` gives each object its own guarded allocation.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

from tests.fuzz.instrumented import MODULES, SUFFIX, VARIABLE

ROOT: Final = Path(__file__).parents[2]
BUILT: Final = ROOT / "build" / "sanitized"
FLAGS: Final = ("-shared", "-fPIC", "-O0", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")
"""Without optimizing nothing that a sanitizer would see is left out, and the compiler takes a third of the time."""
SANITIZERS: Final = "-fsanitize=address,undefined"
TESTS: Final = (
    "tests/ledger/test_native.py",
    "tests/ledger/test_packed_entries.py",
    "tests/wal/test_native.py",
    "tests/app/test_event_lines.py",
    "tests/app/test_appended.py",
    "tests/app/test_places.py",
)
LEFT_OUT: Final = "not memory"
"""Tests that bound the memory of their process: a sanitizer reserves terabytes of addresses."""
CRASHED_INPUT: Final = ROOT / "build" / "fuzz-input"


def build() -> None:
    """Compile each module that is older than its sources.

    Raises:
        subprocess.CalledProcessError: the compiler refused; its messages are on stderr.
    """
    compiling = []
    for name in MODULES:
        source = ROOT.joinpath(*name.split(".")).with_suffix(".c")
        made = BUILT.joinpath(*name.split(".")).with_suffix(SUFFIX)
        if made.exists() and all(made.stat().st_mtime > part.stat().st_mtime for part in source.parent.glob("*.[ch]")):
            continue
        made.parent.mkdir(parents=True, exist_ok=True)
        include = f"-I{sysconfig.get_path('include')}"
        command = ["gcc", *FLAGS, SANITIZERS, include, "-o", str(made), str(source), "-ldl"]
        compiling.append((command, subprocess.Popen(command)))
    for command, process in compiling:
        if code := process.wait():
            raise subprocess.CalledProcessError(code, command)


def environment() -> dict[str, str]:
    """That of a process that runs on the modules of ``build``."""
    libraries = (f"lib{name}.so" for name in ("asan", "ubsan"))
    found = [subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in libraries]
    return {
        **os.environ,
        VARIABLE: str(BUILT),
        "LD_PRELOAD": " ".join(found),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.sanitize", description=__doc__)
    parser.add_argument("--seconds", default="30", help="of fuzzing, for each parser")
    parser.add_argument("--seed", default="1", help="of the fuzzer")
    parser.add_argument("--examples", default="25", help="of each property of the tests")
    given = parser.parse_args()
    assert shutil.which("gcc"), "the sanitizers come with gcc: install gcc and libc6-dev"
    build()
    under = environment()
    tests = ["-m", "pytest", "-p", "tests.fuzz.instrumented", "-n", "0", "-q", "-k", LEFT_OUT, *TESTS]
    fuzzer = ["-m", "tests.fuzz", "--seconds", given.seconds, "--seed", given.seed]
    kept = ["--keep", str(CRASHED_INPUT)]
    for arguments in (tests, [*fuzzer, *kept]):
        code = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env={**under, "TEST_EXAMPLES": given.examples}, check=False
        ).returncode
        if code:
            print(f"stopped with {code}; what was parsed last is in {CRASHED_INPUT}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
