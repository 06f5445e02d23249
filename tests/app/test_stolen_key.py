"""The story of a stolen key, told with the commands that an operator and an auditor have."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace

from app.dev.embedded import EmbeddedPostgres
from signing import private_keys
from signing.keys import Keyring
from signing.snapshot import open_snapshot, sign_snapshot
from tests.app.second_verifier import second_verifier
from tests.app.service_thread import serving
from tests.conftest import connected_to
from tests.tally import run_tally

DEADLINE_S = 60


class Ledger:
    """A running service, its folder and database, and commands that talk to it."""

    def __init__(self, url: str, folder: Path, superuser_url: str) -> None:
        self.url = url
        self.folder = folder
        self.superuser_url = superuser_url

    def tally(self, *arguments: str, code: int = 0) -> Any:
        """What a command reports, once it has ended with ``code``."""
        done = run_tally(*arguments, "--json", TALLY_URL=self.url, TALLY_DATA_DIR=str(self.folder))
        assert done.returncode == code, done.stderr + done.stdout
        return json.loads(done.stdout)

    def sign_jobs(self, count: int) -> dict[str, Any]:
        """Chain that many entries and sign them; the snapshot."""
        for _ in range(count):
            job = {"tenant_id": "acme", "durability": "GLOBAL"}
            httpx.post(f"{self.url}/v1/jobs", json=job, timeout=DEADLINE_S).raise_for_status()
        answer = httpx.post(f"{self.url}/v1/snapshots", json={"tenant_id": "acme"}, timeout=DEADLINE_S)
        answer.raise_for_status()
        return answer.json()

    def save_keys(self) -> Path:
        """What an auditor saved of ``/v1/keys``."""
        path = self.folder / "saved-keys.json"
        path.write_text(httpx.get(f"{self.url}/v1/keys", timeout=DEADLINE_S).text)
        return path

    def export(self, name: str) -> Path:
        """A bundle of all that is signed."""
        path = self.folder / name
        self.tally("bundle", "export", "-t", "acme", "-o", str(path))
        return path

    def put_in_place_of(self, snapshot: dict[str, Any], thief: private_keys.FileSigner) -> None:
        """What the thief puts into the table as a superuser: the same claim, signed with the stolen key."""
        ring = Keyring.from_json(json.loads(self.save_keys().read_text()))
        claim = open_snapshot(json.dumps(snapshot["dsse_envelope"]), ring).claim
        envelope, _ = sign_snapshot(replace(claim, key_id=thief.key_id), thief)
        asyncio.run(self._edit(snapshot["id"], json.dumps(envelope)))

    async def _edit(self, snapshot_id: int, envelope: str) -> None:
        async with connected_to(self.superuser_url) as connection:
            await connection.execute("SET session_replication_role = replica")
            await connection.execute(
                "UPDATE scheduler.batch_snapshot SET dsse_envelope = $2 WHERE id = $1", snapshot_id, envelope
            )


def second_opinion(bundle: Path, keys: Path) -> int:
    """Exit code of the other implementation of the verifier."""
    code: int = second_verifier().main(str(bundle), "--keys", str(keys))
    return code


def test_a_stolen_key_is_rotated_its_forgery_named_and_then_revoked(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    folder, dsn = tmp_path / "node", postgres.superuser_url("stolen_key")
    with serving(postgres, folder, "stolen_key") as url:
        ledger = Ledger(url, folder, dsn)
        honest = [ledger.sign_jobs(2), ledger.sign_jobs(2)]
        stolen = private_keys.load(str(folder / "keys" / "signing.pem"))

        # Rotated: what was signed stays valid, and the new key signs.
        rotation = ledger.tally("keys", "rotate")
        assert rotation["previous"]["key_id"] == stolen.key_id
        later = ledger.sign_jobs(2)
        keys = ledger.save_keys()
        whole = ledger.export("whole.tar")
        ledger.tally("verify-bundle", str(whole), "--keys", str(keys))
        assert second_opinion(whole, keys) == 0

        # The thief signs later rows with the old key, and has a superuser's hand in the database.
        ledger.put_in_place_of(later, stolen)
        for by_rows in ((), ("--dsn", dsn, "--keys", str(keys))):
            verdict = ledger.tally("verify", "-t", "acme", *by_rows, code=4)
            first = verdict["first_break"]
            assert (first["kind"], first["seq"], first["actual"]) == ("snapshot-signature", 6, stolen.key_id)
        forged = ledger.export("forged.tar")
        ledger.tally("verify-bundle", str(forged), "--keys", str(keys), code=4)
        assert second_opinion(forged, keys) == 4

        # Revoked from the second honest snapshot on: that one is named as well, the first stays valid.
        revoked = ledger.tally(
            "keys", "revoke", stolen.key_id, "--from-hlc", honest[1]["snapshot_hlc"], "--reason", "laptop stolen"
        )
        assert (revoked["revoked_from_hlc"], revoked["revocation_reason"]) == (
            honest[1]["snapshot_hlc"],
            "laptop stolen",
        )
        verdict = ledger.tally("verify", "-t", "acme", code=4)
        assert (verdict["first_break"]["kind"], verdict["first_break"]["seq"]) == ("snapshot-signature", 4)
        keys = ledger.save_keys()
        named = ledger.export("named.tar")
        assert second_opinion(named, keys) == 4
        up_to = folder / "first.tar"
        ledger.tally("bundle", "export", "-t", "acme", "--to-seq", "2", "-o", str(up_to))
        assert second_opinion(up_to, keys) == 0

        # What the list says.
        listed = {key["key_id"]: key for key in ledger.tally("keys", "list")["keys"]}
        assert listed[stolen.key_id]["revoked_from_hlc"] == honest[1]["snapshot_hlc"]
        assert listed[rotation["key"]["key_id"]]["signs_snapshots"]
