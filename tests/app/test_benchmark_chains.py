"""The chains that benchmarks measure on are chains that hold."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.chains import ENTRIES_A_SNAPSHOT, build_chain
from benchmarks.verify import Chain, verify_chain
from signing import private_keys
from tests.conftest import Database

ENTRIES = 2 * ENTRIES_A_SNAPSHOT


async def test_a_chain_that_benchmarks_build_holds_with_its_jobs(database: Database, tmp_path: Path) -> None:
    signer = private_keys.generate(tmp_path / "key.pem")
    await build_chain(database.superuser_url, "acme", ENTRIES, signer)
    chain = Chain(database.service_url, "acme", ENTRIES, signer.public_key_pem)
    await asyncio.to_thread(verify_chain, chain, projection=True)
