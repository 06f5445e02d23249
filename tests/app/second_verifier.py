"""docs/formats/verify.py, run in this process."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

from signing.keys import Keyring

VERIFY_PY = Path(__file__).resolve().parents[2] / "docs" / "formats" / "verify.py"

Twin = Callable[..., int]


@cache
def second_verifier() -> ModuleType:
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("verify_py", VERIFY_PY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_saved(keyring: Keyring) -> dict[str, object]:
    """A ring as a saved answer of ``/v1/keys`` has it."""
    return {**keyring.to_json(), **({} if keyring.callers is None else keyring.callers.to_json())}


def twin_in(folder: Path) -> Twin:
    """What gives its exit code for a file, keys, a checkpoint that was kept, and a policy; it stores all in
    ``folder``."""

    def run(path: Path, keyring: Keyring | None, kept: str | None = None, policy: str | None = None) -> int:
        options = []
        if keyring is not None:
            keys = folder / "trusted-keys.json"
            keys.write_text(json.dumps(as_saved(keyring)))
            options += ["--keys", str(keys), "--signatures", "both" if keyring.needs_both else "any"]
        if kept is not None:
            checkpoint = folder / "kept"
            checkpoint.write_bytes(kept.encode())
            options += ["--checkpoint", str(checkpoint)]
        if policy is not None:
            (folder / "policy").write_text(policy)
            options += ["--policy", str(folder / "policy")]
        code = second_verifier().main(str(path), *options)
        assert isinstance(code, int)
        return code

    return run
