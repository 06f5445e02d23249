"""Jobs of Kubernetes on record: watches the batch API, and says what becomes of each Job.

    TALLY_URL, TALLY_TOKEN, TALLY_TENANT, TALLY_CLUSTER    the ledger, whose jobs, and how the cluster is called there
    KUBERNETES_API, KUBERNETES_SELECTOR                    [https://kubernetes.default.svc], label selector [all Jobs]

A Job is a job under its uid: created when it is seen, accepted once it has started, then completed or failed as its
conditions say, or failed because it was deleted before. The list of all Jobs comes first, after a restart as well: what
is on record already adds nothing. One watcher a cluster is enough; it needs no spool, since Kubernetes keeps what it
missed, but for Jobs that are deleted while it is away.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tallystick_client import Client, InvalidError, JobEndedError, TallystickError

JOBS = "/apis/batch/v1/jobs"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WATCH_S = 300
PAUSE_S = 5.0


class Gone(Exception):  # noqa: N818 (what the API calls it)
    """The API server no longer knows what came after the last list."""


class Recorder:
    """What was said of each Job; saying it again adds nothing."""

    def __init__(self, ledger: Client, tenant_id: str, cluster: str) -> None:
        self._ledger, self._tenant_id, self._cluster = ledger, tenant_id, cluster
        self._said: dict[str, str] = {}

    def see(self, job: dict[str, Any], deleted: bool = False) -> None:
        """Put on record what is new about a Job."""
        meta, status, uid = job["metadata"], job.get("status", {}), job["metadata"]["uid"]
        containers = job["spec"]["template"]["spec"]["containers"]
        record = self._ledger.job(
            self._tenant_id,
            {"namespace": meta["namespace"], "name": meta["name"], "images": [each["image"] for each in containers]},
            job_id=f"k8s.{uid}",
            dc_id=self._cluster,
        )
        ended = {each["type"]: each for each in status.get("conditions", []) if each["status"] == "True"}
        is_over = deleted or bool(ended.keys() & {"Complete", "Failed"})
        try:
            if uid not in self._said:
                record.create()
                self._said[uid] = "created"
            if self._said[uid] == "created" and status.get("startTime"):
                record.accept()
                self._said[uid] = "accepted"
            if self._said[uid] != "ended" and is_over:
                if "Complete" in ended:
                    record.complete("Complete", {"succeeded": status.get("succeeded", 0)})
                else:
                    failed = ended.get("Failed", {"reason": "Deleted", "message": "before it had ended"})
                    record.fail(f"{failed.get('reason')}: {failed.get('message')}")
                self._said[uid] = "ended"
        except JobEndedError:
            self._said[uid] = "ended"
        except InvalidError as error:
            # One Job that the ledger does not take stops no other.
            print(f"job {meta['namespace']}/{meta['name']} is not on record: {error}", flush=True)
            self._said[uid] = "ended"
        if deleted:
            del self._said[uid]


def watch(api: httpx.Client, recorder: Recorder, selector: str | None) -> None:
    """All Jobs that there are, then every change, until the watch ends.

    Raises:
        Gone: list them again.
        httpx.HTTPError, TallystickError: try again later.
    """
    params: dict[str, str | int] = {} if selector is None else {"labelSelector": selector}
    listed = api.get(JOBS, params=params).raise_for_status().json()
    for job in listed["items"]:
        recorder.see(job)
    version = listed["metadata"]["resourceVersion"]
    while True:
        since = {**params, "watch": 1, "resourceVersion": version, "allowWatchBookmarks": 1, "timeoutSeconds": WATCH_S}
        for event in _events(api, since):
            if event["type"] == "ERROR":
                raise Gone(event["object"].get("message", ""))
            version = event["object"]["metadata"]["resourceVersion"]
            if event["type"] != "BOOKMARK":
                recorder.see(event["object"], deleted=event["type"] == "DELETED")


def _events(api: httpx.Client, params: dict[str, str | int]) -> Iterator[dict[str, Any]]:
    with api.stream("GET", JOBS, params=params, timeout=httpx.Timeout(10.0, read=WATCH_S + 30.0)) as answer:
        if answer.status_code == 410:
            raise Gone
        answer.raise_for_status()
        yield from map(json.loads, answer.iter_lines())


def _authorization() -> dict[str, str]:
    """The header with the token of the service account; none outside of a cluster."""
    file = ACCOUNT / "token"
    token = file.read_text().strip() if file.exists() else ""
    if not token.isprintable():
        raise SystemExit(f"{file} holds no token: it has a control character inside")
    return {"Authorization": f"Bearer {token}"} if token else {}


def main() -> None:
    """Watch until somebody ends the process."""
    address = os.environ.get("KUBERNETES_API", "https://kubernetes.default.svc")
    trusted: Any = str(ACCOUNT / "ca.crt") if (ACCOUNT / "ca.crt").exists() else True
    with Client() as ledger:
        recorder = Recorder(ledger, os.environ["TALLY_TENANT"], os.environ.get("TALLY_CLUSTER", "kubernetes"))
        while True:
            # The token of a service account is replaced every hour.
            try:
                with httpx.Client(base_url=address, headers=_authorization(), verify=trusted) as api:
                    watch(api, recorder, os.environ.get("KUBERNETES_SELECTOR"))
            except Gone:
                continue
            except (httpx.HTTPError, TallystickError) as error:
                print(f"again in {PAUSE_S:g} s: {error}", flush=True)
                time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
