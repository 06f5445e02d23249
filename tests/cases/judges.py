"""What judges a case: the product, and docs/formats/verify.py."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ledger.errors import InvalidInputError, NotABundleError, SignatureError
from ledger.exit_code import ExitCode, exit_code_of_bundle, exit_code_of_receipt
from signing.anchors import ExternalWitnesses
from signing.checkpoint import judge_kept
from signing.files import HEAD_BYTES, is_like_receipt
from signing.judging import verify_file
from signing.keys import Keyring
from signing.policy import Policy
from signing.receipt_judging import judged

Verdict = dict[str, Any]


def by_product(
    file: bytes,
    folder: Path,
    keyring: Keyring | None,
    kept: str | None = None,
    policy: str | None = None,
    witnesses: Sequence[str] = (),
) -> tuple[int, Verdict]:
    """The exit code of ``tally verify-bundle`` or ``tally verify-proof``, and the verdict; an empty one where nothing
    is judged. A bundle is stored in ``folder``."""
    try:
        asked = None if policy is None else Policy.parse(policy)
        external = ExternalWitnesses.of(ExternalWitnesses.load(witnesses, None).witnesses, (), asked)
    except InvalidInputError:
        return ExitCode.COULD_NOT_RUN, {}
    try:
        checkpoint = judge_kept(kept, keyring) if kept is not None else None
    except SignatureError:
        return ExitCode.TAMPERED, {}
    if is_like_receipt(file[:HEAD_BYTES]):
        verdict = judged(file, keyring, checkpoint, None, external).to_json()
        return exit_code_of_receipt(verdict), verdict
    path = folder / "bundle.tar"
    path.write_bytes(file)
    # In a thread of its own: the caller may have an event loop.
    with ThreadPoolExecutor(1) as thread:
        try:
            found = thread.submit(asyncio.run, verify_file(path, keyring, checkpoint, None, external)).result()
        except NotABundleError:
            return ExitCode.COULD_NOT_RUN, {}
    return exit_code_of_bundle(found.verdict), found.to_json()
