"""Manifests for Kubernetes and units for systemd: what a cluster and a machine take, and settings that there are."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]
from typer.main import get_command

from app.runtime.settings.config import load_settings
from cli import safekeeper
from signing.private_keys import MasterKey
from tests.app.test_deploy import REPLICATED, environment_of

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "deploy/kubernetes"
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
INSTALL = (ROOT / "docs/install.md").read_text()
(ONE_POOL,) = re.findall(r"\| local \| `GET ([^`]+)`", (ROOT / "docs/load-balancing.md").read_text())
"""What a balancer with one pool asks."""
OFFERED_MAX = 2.0
"""What ``systemd-analyze security`` says of the units at most: 10 is everything open."""


def objects_of(folder: str) -> list[dict[str, Any]]:
    """Every object that stands in the files that the kustomization of ``folder`` lists."""
    listed = yaml.safe_load((MANIFESTS / folder / "kustomization.yaml").read_text())
    names = [name for name in listed["resources"] if not name.startswith("..")]
    assert {*names} | {each["path"] for each in listed.get("patches", ())} | {"kustomization.yaml"} == {
        path.name for path in (MANIFESTS / folder).iterdir()
    }
    return [each for name in names for each in yaml.safe_load_all((MANIFESTS / folder / name).read_text())]


BASE, WITH_SAFEKEEPERS = objects_of("base"), objects_of("replicated")
NODE = BASE[0]["spec"]["template"]["spec"]
PATCH = yaml.safe_load((MANIFESTS / "replicated/nodes.yaml").read_text())["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    "described", [*BASE, *WITH_SAFEKEEPERS], ids=lambda each: f"{each['kind']}-{each['metadata']['name']}"
)
def test_a_cluster_takes_each_object(described: dict[str, Any]) -> None:
    kubernetes_validate.validate(described, kubernetes_validate.latest_version(), strict=True)


def variables(container: dict[str, Any]) -> dict[str, str]:
    """The environment of a container in the pod ``tallystick-0``."""
    given = {each["name"]: each.get("value", "tallystick-0") for each in container["env"]}
    return {
        name: value.replace("$(TALLY_NODE_ID)", given.get("TALLY_NODE_ID", "tallystick-0"))
        for name, value in given.items()
    }


def test_the_settings_of_a_node_are_ones_that_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(NODE["containers"][0]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TALLY_DATABASE_URL", "postgresql://tallystick:secret@postgres:5432/tallystick")
    settings = load_settings()
    assert (settings.node_id, settings.auth.mode) == ("tallystick-0", "tokens")
    assert settings.data_dir == Path(NODE["containers"][0]["volumeMounts"][0]["mountPath"])
    names = [each["metadata"]["name"] for each in BASE if each["kind"] == "Service"]
    headless = BASE[0]["spec"]["serviceName"]
    assert names == ["tallystick", headless]
    namespaces = ["", ".tallystick", ".tallystick.svc", ".tallystick.svc.cluster.local"]
    called = [f"{name}{more}" for name in ("tallystick", f"tallystick-0.{headless}") for more in namespaces]
    assert [*settings.http.hosts] == called
    assert settings.shutdown_grace.total_seconds() + 5 < NODE["terminationGracePeriodSeconds"]


def test_the_settings_of_a_replicated_node_are_ones_that_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**variables(NODE["containers"][0]), **variables(PATCH["containers"][0])}.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    # A variable is only known to those after it, and what is merged stands before what it is merged into.
    assert PATCH["containers"][0]["env"][0] == NODE["containers"][0]["env"][0]
    keepers = WITH_SAFEKEEPERS[0]
    names = [f"{keepers['metadata']['name']}-{ordinal}.{keepers['spec']['serviceName']}" for ordinal in range(3)]
    assert keepers["spec"]["replicas"] == 3
    assert [each.address for each in settings.replication.members] == [f"{name}:7010" for name in names]
    assert settings.wal.ack_mode.is_replicated
    assert settings.replication.tls_cert == Path("/certificates/tallystick-0.pem")
    made = (MANIFESTS / "replicated/kustomization.yaml").read_text()
    assert "certificates.sh made tallystick-0 tallystick-1 safekeeper-{0,1,2}.safekeepers" in made


def test_a_pod_has_its_own_certificate_and_nodes_alone_the_master_key(tmp_path: Path) -> None:
    for folder in ("secret", "privacy"):
        (tmp_path / folder).mkdir()
    keepers = [f"safekeeper-{n}.safekeepers" for n in range(3)]
    for name in ("tallystick-0", "tallystick-1", *keepers):
        for suffix in ("pem", "key"):
            (tmp_path / "secret" / f"{name}.{suffix}").touch()
    (tmp_path / "secret" / "ca.pem").touch()
    (tmp_path / "privacy" / "privacy-master.key").touch()
    had = {}
    for pod, name in ((PATCH, "tallystick-1"), (WITH_SAFEKEEPERS[0]["spec"]["template"]["spec"], "safekeeper-2")):
        (copies,) = (each for each in pod["initContainers"] if each["name"] == "certificates")
        (there := tmp_path / name).mkdir()
        command = [part.replace(f"$({copies['env'][0]['name']})", name) for part in copies["command"]]
        mounts = {each["mountPath"]: tmp_path / each["mountPath"][1:] for each in copies["volumeMounts"]}
        mounts["/certificates"] = there
        for path, at in mounts.items():
            command = [re.sub(f"^{path}(?=/|$)", str(at), part) for part in command]
        subprocess.run(command, check=True)
        had[name] = {path.name for path in there.iterdir()}
        assert not {each["name"] for each in pod["containers"][0]["volumeMounts"]} & {"secret", "privacy"}
    assert had["tallystick-1"] == {"ca.pem", "tallystick-1.pem", "tallystick-1.key", "privacy-master.key"}
    assert had["safekeeper-2"] == {"ca.pem", "safekeeper-2.safekeepers.pem", "safekeeper-2.safekeepers.key"}


def test_the_command_for_the_master_key_makes_one(tmp_path: Path) -> None:
    text = (MANIFESTS / "replicated/kustomization.yaml").read_text()
    (command,) = re.findall(r"^#   (.*openssl rand .*)$", text, re.MULTILINE)
    subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, check=True)
    (made,) = tmp_path.iterdir()
    assert made.stat().st_mode & 0o777 == 0o600
    assert MasterKey.load(str(made))
    used = variables(PATCH["containers"][0])["TALLY_PRIVACY__MASTER_KEY_URI"]
    assert Path(used.removeprefix("file:")).name == made.name
    assert f"tallystick-privacy --from-file={made.name}" in text


def test_the_first_token_is_nobody_elses_to_read_wherever_it_is_made() -> None:
    pages = [
        *(ROOT / "docs").rglob("*.md"),
        *MANIFESTS.rglob("*.yaml"),
        ROOT / "README.md",
        ROOT / "docker-compose.yml",
    ]
    lines = [line for page in pages for line in page.read_text().splitlines() if "root --first >" in line]
    assert len(lines) == 8
    assert [line for line in lines if not re.search(r"\(umask 077; .* --first > \S*root\.token\)", line)] == []


def test_prometheus_finds_the_nodes_of_a_cluster_and_shows_a_token() -> None:
    (example,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", INSTALL, re.DOTALL)
    (job,) = yaml.safe_load(example)["scrape_configs"]
    (ours,) = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert (job["job_name"], job["authorization"]) == (ours["job_name"], ours["authorization"])
    (found,) = job["dns_sd_configs"]
    assert found["names"] == [f"{BASE[0]['spec']['serviceName']}.tallystick.svc.cluster.local"]
    assert "annotations" not in BASE[0]["spec"]["template"]["metadata"], "whoever follows them has no token"


def test_the_commands_of_safekeepers_are_ones_that_there_are() -> None:
    options = {name for each in get_command(safekeeper.safekeeper).commands["serve"].params for name in each.opts}  # type: ignore[attr-defined]
    group, command, *given = WITH_SAFEKEEPERS[0]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert (group, command) == ("safekeeper", "serve")
    assert {each.partition("=")[0] for each in given} <= options
    assert {each for each in REPLICATED["safekeeper-1"]["command"] if each.startswith("--")} == {
        each.partition("=")[0] for each in given
    }


def test_a_node_runs_without_any_right_and_asks_the_routes_that_there_are() -> None:
    for pod in (NODE, WITH_SAFEKEEPERS[0]["spec"]["template"]["spec"]):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
    probes = {name: each["httpGet"]["path"] for name, each in NODE["containers"][0].items() if name.endswith("Probe")}
    assert probes == {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": ONE_POOL}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_takes_each_unit_and_gives_it_little(unit: Path, tmp_path: Path) -> None:
    here = shutil.copy(unit, tmp_path)
    text = unit.read_text().replace("/opt/tallystick/bin/tally", str(Path(sys.executable).with_name("tally")))
    Path(here).write_text(text)
    judged = subprocess.run(["systemd-analyze", "verify", "--man=no", here], capture_output=True, text=True)
    assert (judged.returncode, judged.stderr) == (0, "")
    if "Type=exec" in text:
        offered = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", "--no-pager", here], capture_output=True, text=True
        ).stdout
        (level,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", offered)
        assert float(level) <= OFFERED_MAX, offered


def test_the_unit_of_the_service_sets_what_is_a_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unit = (ROOT / "deploy/systemd/tallystick.service").read_text()
    (given,) = re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)
    settings = dict(each.split("=", 1) for each in shlex.split(given))
    config = settings.pop("TALLY_CONFIG")
    assert f"install -m 0640 -g tallystick /dev/stdin {config}\n" in INSTALL
    assert f"install -d -m 0700 -o tallystick -g tallystick {settings['TALLY_DATA_DIR']}\n" in INSTALL
    for name, value in (*settings.items(), *environment_of("tallystick").items()):
        monkeypatch.setenv(name, value)
    loaded = load_settings()
    assert loaded.data_dir == Path("/var/lib/tallystick")
    (grace,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert loaded.shutdown_grace.total_seconds() + 5 < int(grace)
