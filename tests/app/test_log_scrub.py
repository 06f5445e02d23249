"""A node at work reads its own log again: damage at rest is a fault that it reports, and serves on."""

from __future__ import annotations

import re
import time
from pathlib import Path

from tests.app.chains import until
from tests.app.conftest import MakeSettings, RunServer
from wal.segment import list_segments

JOB = {"tenant_id": "acme", "spec": {}, "assigned_dcs": ["use1"]}


async def test_a_bit_that_flips_in_an_old_segment_is_found_while_the_node_runs(
    make_settings: MakeSettings, run_server: RunServer, tmp_path: Path
) -> None:
    settings = make_settings(node_id="node-a", wal={"scrub_interval": "1s", "segment_bytes": "64 KiB"})
    async with run_server(settings) as client:

        async def metric(name: str) -> float:
            (value,) = re.findall(rf"^{name} (\S+)$", (await client.get("/metrics")).text, re.MULTILINE)
            return float(value)

        async def fault() -> str | None:
            checks = (await client.get("/readyz")).json()["checks"]
            return str(checks["scrub"]["detail"] or "")

        segments = list_segments(tmp_path / "node" / "wal" / "node-a")
        while len(segments) < 3:
            posted = await client.post("/v1/jobs", json=JOB | {"spec": {"text": "x" * 10_000}})
            assert posted.status_code == 201
            segments = list_segments(tmp_path / "node" / "wal" / "node-a")
        began_s = time.time()

        async def round_ended() -> bool:
            return await metric("wal_scrub_round_end_seconds") > began_s

        await until(round_ended, "all was read again")
        assert await fault() == ""
        whole = segments[1].path.read_bytes()
        with segments[1].path.open("r+b") as file:
            file.seek(1000)
            file.write(bytes([whole[1000] ^ 1]))
        found = await until(fault, "it is found")
        assert segments[1].name in found
        assert await metric("wal_scrub_damaged_segments") == 1
        assert 'readyz_check_failing{check="scrub"} 1.0' in (await client.get("/metrics")).text
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.post("/v1/jobs", json=JOB)).status_code == 201
        with segments[1].path.open("r+b") as file:
            file.write(whole)

        async def is_well() -> bool:
            return await fault() == ""

        await until(is_well, "a round that finds it whole again ends the fault")
