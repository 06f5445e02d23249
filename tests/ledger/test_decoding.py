"""Types are prepared for msgspec under one lock, whichever threads use them first."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.forked import ROOT

_RACE = """
import sys, threading, types
from ledger.decoding import convert, decode

sys.setswitchinterval(1e-6)
FIELDS = range(12)
lines = ["from __future__ import annotations", "import msgspec"]
for number in range(200):
    lines.append(f"class C{number}(msgspec.Struct, frozen=True):")
    lines += [f"    f{each}: str | None" for each in FIELDS]
module = sys.modules["made"] = types.ModuleType("made")
exec("\\n".join(lines), module.__dict__)
value = {f"f{each}": "x" for each in FIELDS}
data = repr(value).replace("'", '"')
for number in range(200):
    kind, together = getattr(module, f"C{number}"), threading.Barrier(4)

    def use(at):
        together.wait()
        return decode(data, kind) if at % 2 else convert(value, kind)

    threads = [threading.Thread(target=use, args=(at,)) for at in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
"""


def test_threads_that_use_a_type_first_at_the_same_time_do_not_end_the_process() -> None:
    # With msgspec.json.decode in place of decode, two of three runs end by SIGSEGV.
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", _RACE], cwd=ROOT, capture_output=True, check=False, text=True)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_no_module_has_msgspec_prepare_a_type_elsewhere() -> None:
    # A decoder that a module makes as it is imported is made by one thread.
    prepares = re.compile(r"msgspec\.(json\.decode|json\.Decoder|convert)\(|msgpack\.decode\(.*type=")
    folders = ("app", "cli", "clients", "lab", "ledger", "objects", "pipeline", "signing", "terminal", "wal")
    files = [file for each in folders for file in Path(ROOT, each).rglob("*.py")]
    found = [str(file.relative_to(ROOT)) for file in files if prepares.search(file.read_text())]
    assert found == ["ledger/decoding.py"]
