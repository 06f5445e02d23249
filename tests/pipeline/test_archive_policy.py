"""Cosignatures of witnesses in archives: a policy has there the verdict that it has on the ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ledger.exit_code import ExitCode, exit_code_of_bundle, exit_code_of_receipt
from objects.store import ArchiveStore
from pipeline.archive.reader import TenantArchive, verify_tenant
from pipeline.archive.receipts import Wanted, archived_receipt
from signing.anchors import ExternalWitnesses
from signing.policy import Policy
from signing.receipt_judging import judged
from tests.app.witness import Witness
from tests.conftest import Database
from tests.ledger.ledger_in_memory import SIGNER
from tests.pipeline.archived_ledgers import RING, archive_here, checkpoint_of, cosign, days, ledger_of, query, store
from tests.pipeline.test_archive_reading import reseal
from tests.tally import run_tally

ONE, TWO = Witness("witness.example/w1", 1), Witness("witness.example/w2", 2)
ALL_OF = f"witness w1 {ONE.verifier_key}\nwitness w2 {TWO.verifier_key}\ngroup g all w1 w2\nquorum g\n"
EXTERNAL = ExternalWitnesses.of((), (), Policy.parse(ALL_OF))


async def verdict_on(folder: Path) -> dict[str, Any]:
    return await verify_tenant(ArchiveStore(str(folder)), "acme", RING, external=EXTERNAL)


def versions(folder: Path) -> list[int]:
    return [each.manifest.format_version for each in TenantArchive.read(ArchiveStore(str(folder)), "acme", RING).sealed]


async def test_an_archive_has_the_cosignatures_that_there_were(database: Database, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    acme = ledger_of("acme", days(25))
    await store(database, acme)
    await cosign(database, acme, TWO, size=12)
    archive_here(database, folder)
    below = await verdict_on(folder)
    assert (versions(folder), exit_code_of_bundle(below)) == ([2], ExitCode.INCOMPLETE)
    assert below["policy"]["missing"] == [f"w{n}: has cosigned nothing of this log" for n in (1, 2)]

    ledger_of("acme", days(20, 25), start=acme)
    await store(database, acme)
    await cosign(database, acme, ONE, size=45)
    await cosign(database, acme, TWO, size=41)
    archive_here(database, folder)
    met = await verdict_on(folder)
    assert (versions(folder), exit_code_of_bundle(met)) == ([2, 3], ExitCode.FINE)
    assert met["policy"] == {"met": True, "quorum": "g", "quorum_to_seq": 40, "missing": []}
    assert [(each["by"], each["to_seq"], each["status"]) for each in met["anchors"]] == [
        (each.name, 40, "ok") for each in (ONE, TWO)
    ]

    ledger_of("acme", days(10, 45), start=acme)
    await store(database, acme)
    await cosign(database, acme, ONE, size=55)
    archive_here(database, folder)
    behind = await verdict_on(folder)
    assert (behind["to_seq"], behind["policy"]["quorum_to_seq"]) == (50, 40)
    assert behind["policy"]["missing"] == ["w2: has cosigned 40 of 50 entries"]


async def test_a_stored_cosignature_that_does_not_hold_is_left_out_and_stops_nothing(
    database: Database, tmp_path: Path
) -> None:
    acme = ledger_of("acme", days(20))
    await store(database, acme)
    await cosign(database, ledger_of("acme", days(20)[::-1]), ONE)
    await cosign(database, acme, TWO)
    await query(
        database, f"UPDATE scheduler.checkpoint_cosignature SET note = 'x' WHERE witness = '{TWO.verifier_key}'"
    )
    archive_here(database, tmp_path)
    assert (versions(tmp_path), (await verdict_on(tmp_path))["valid"]) == ([2], True)


async def test_a_cosignature_of_another_history_in_a_manifest_is_a_rollback(database: Database, tmp_path: Path) -> None:
    acme, other = ledger_of("acme", days(25)), ledger_of("acme", days(25)[::-1])
    await store(database, acme)
    await cosign(database, acme, ONE, TWO)
    archive_here(database, tmp_path)

    def contradict(said: dict[str, Any]) -> None:
        said["anchors"][0]["checkpoint"] = ONE.cosign(other_note, 1_704_931_300)

    for size in (20, 25):
        other_note = checkpoint_of(other, size=size)
        reseal(tmp_path, 0, contradict)
        found = await verdict_on(tmp_path)
        assert (found["first_break"]["kind"], found["valid"]) == ("rollback", False), size
        assert exit_code_of_bundle(found) == ExitCode.TAMPERED


async def test_a_receipt_of_an_archive_carries_them(database: Database, tmp_path: Path) -> None:
    acme = ledger_of("acme", days(20))
    await store(database, acme)
    await cosign(database, acme, ONE, TWO)
    archive_here(database, tmp_path)
    file = archived_receipt(ArchiveStore(str(tmp_path)), "acme", Wanted("job-1", None), None, RING, SIGNER)
    verdict = judged(file, RING, external=EXTERNAL).verdict
    assert (verdict["policy"]["met"], exit_code_of_receipt(verdict)) == (True, ExitCode.FINE)


async def test_the_command_exits_with_3_below_the_quorum_of_an_archive(database: Database, tmp_path: Path) -> None:
    (tmp_path / "keys.pem").write_text(SIGNER.public_key_pem)
    (tmp_path / "policy").write_text(ALL_OF)
    for tenant, witnesses, code in (("acme", (ONE, TWO), 0), ("beta", (ONE,), 3)):
        ledger = ledger_of(tenant, days(20))
        await store(database, ledger)
        await cosign(database, ledger, *witnesses)
        archive_here(database, tmp_path / "archive")
        command = ("verify", "--archive", tmp_path / "archive", "--keys", tmp_path / "keys.pem", "--no-state", "--json")
        done = run_tally(*command, "--tenant", tenant, "--policy", tmp_path / "policy")
        assert done.returncode == code, done.stderr
        (verdict,) = json.loads(done.stdout)["tenants"]
        assert verdict["policy"]["met"] is (code == 0)
