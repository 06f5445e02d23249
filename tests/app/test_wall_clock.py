"""What of the wall clock a node believes: as far as its own running time and Postgres bear it out."""

from __future__ import annotations

from structlog.testing import capture_logs

from app.runtime.state.wall_clock import Reading, WallClock, read_clocks
from ledger.hlc import Hlc
from tests.app.chains import Chains, until
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.drafts import created

SKEW_MS = 5000
YEAR_MS = 365 * 86_400_000
BEGIN_MS = 1_700_000_000_000


class Clocks:
    """Clocks that the test sets."""

    def __init__(self) -> None:
        self.wall_ms = BEGIN_MS
        self.running_ms = 1_000_000
        self.wall = WallClock(SKEW_MS, lambda: Reading(self.wall_ms, self.running_ms))

    def run(self, ms: int) -> int:
        """Time passes; what the node then takes it to be."""
        self.wall_ms += ms
        self.running_ms += ms
        return self.wall.now_ms()

    def leap(self, ms: int) -> int:
        self.wall_ms += ms
        return self.wall.now_ms()

    def look(self, database_ms: int) -> None:
        self.wall.compare(Reading(self.wall_ms, self.running_ms), database_ms)


def test_a_leap_ahead_is_not_adopted_time_goes_on_as_it_runs_and_the_fault_lasts_until_it_is_set_back() -> None:
    clocks = Clocks()
    assert clocks.run(1000) == BEGIN_MS + 1000
    assert clocks.leap(YEAR_MS) == BEGIN_MS + 1000
    assert clocks.run(7000) == BEGIN_MS + 8000
    clocks.look(BEGIN_MS + 8000)
    assert clocks.run(10) == BEGIN_MS + 8010
    assert f"{YEAR_MS} ms ahead" in (clocks.wall.fault() or "")
    assert clocks.leap(-YEAR_MS) == BEGIN_MS + 8010
    clocks.look(BEGIN_MS + 8010)
    assert clocks.wall.fault() is None


def test_a_leap_that_postgres_agrees_with_is_adopted() -> None:
    clocks = Clocks()
    assert clocks.leap(3 * SKEW_MS) == BEGIN_MS
    clocks.look(BEGIN_MS + 3 * SKEW_MS)
    assert clocks.run(10) == BEGIN_MS + 3 * SKEW_MS + 10
    assert clocks.wall.fault() is None


def test_a_clock_that_gains_a_little_again_and_again_gets_no_further_than_postgres_allows() -> None:
    clocks = Clocks()
    for _ in range(100):
        clocks.leap(SKEW_MS - 1)
        clocks.look(BEGIN_MS)
    assert clocks.wall.now_ms() <= BEGIN_MS + 2 * SKEW_MS
    assert clocks.wall.fault() is not None


def test_a_slow_drift_and_a_clock_that_goes_back_are_adopted() -> None:
    clocks = Clocks()
    for _ in range(100):
        clocks.run(1000)
        assert clocks.leap(1000) == clocks.wall_ms
        clocks.look(clocks.wall_ms)
    assert clocks.leap(-YEAR_MS) == clocks.wall_ms
    assert clocks.wall.fault() is None


def test_a_clock_ahead_of_postgres_is_told_though_it_never_leapt() -> None:
    clocks = Clocks()
    clocks.look(BEGIN_MS - SKEW_MS - 1)
    assert "ahead of that of Postgres" in (clocks.wall.fault() or "")


async def test_a_ledger_whose_time_is_ahead_of_all_clocks_says_so(
    run_node: RunNode, run_server: RunServer, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    async with run_node(settings) as service:
        service.node.clock.observe(Hlc(read_clocks().wall_ms + YEAR_MS, 0, service.node.node_id))
        await service.submitter.submit(created("acme", 1), key=None)
    with capture_logs() as logs:
        async with run_server(settings) as client:
            ready = await client.get("/readyz")
    check = ready.json()["checks"]["clock"]
    assert (ready.status_code, check["ok"]) == (200, False)
    assert "ahead of the wall clock" in check["detail"]
    assert [each["ahead_ms"] // YEAR_MS for each in logs if each["event"] == "ledger_time_ahead"] in ([0], [1])


async def test_after_a_clock_was_years_ahead_a_node_of_another_name_records_the_right_time(
    run_node: RunNode, run_server: RunServer, make_settings: MakeSettings, chains: Chains
) -> None:
    """As docs/runbook.md says under *clock*."""
    settings = make_settings(node_id="node-a")
    async with run_node(settings) as service:
        service.node.clock.observe(Hlc(read_clocks().wall_ms + YEAR_MS, 0, service.node.node_id))
        await service.submitter.submit(created("acme", 1), key=None)
    job_id = (await chains.entries("acme"))[0]["job_id"]
    async with run_server(make_settings(node_id="node-b")) as client:
        checks = (await client.get("/readyz")).json()["checks"]
        for name in ("clock", "admission", "signing", "unchained"):
            assert checks[name]["ok"], checks[name]
        accepted = {"tenant_id": "acme", "type": "JobAccepted", "dc_id": "use1", "worker_count": 1}
        answer = await client.post(f"/v1/jobs/{job_id}/events", json=accepted | {"durability": "GLOBAL"})
        assert answer.status_code == 201, answer.text
        assert abs(Hlc.parse(answer.json()["hlc"]).physical_ms - read_clocks().wall_ms) < SKEW_MS
        job = (await client.get(f"/v1/jobs/{job_id}?tenant_id=acme")).json()
        assert job["status"] == "ACCEPTED"
        verdict = (await client.get("/v1/chain/verify?tenant_id=acme")).json()
        assert verdict["valid"], verdict["first_break"]

        async def is_signed() -> bool:
            head = (await client.post("/v1/snapshots", json={"tenant_id": "acme"})).json()
            return bool(head["to_seq"] == 2)

        await until(is_signed, "the whole chain is signed")
