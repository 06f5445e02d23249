"""Clients that generators make of ``/openapi.json`` compile, write and read: Go, TypeScript and Python."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from tests.app.service_thread import serving

pytestmark = [pytest.mark.torture, pytest.mark.foreign, pytest.mark.timeout(900)]

GENERATOR = "org.openapitools:openapi-generator-cli:7.25.0"
GO = """package main

import (
    "context"
    "fmt"
    "os"

    tally "example.org/tally"
)

func main() {
    configuration := tally.NewConfiguration()
    configuration.Servers = tally.ServerConfigurations{{URL: os.Args[1]}}
    client := tally.NewAPIClient(configuration)
    body := *tally.NewJobRequest("generated")
    var name interface{} = "by go"
    body.Spec = map[string]*interface{}{"name": &name}
    made, _, err := client.JobsAPI.SubmitJob(context.Background()).JobRequest(body).Execute()
    if err != nil {
        panic(err)
    }
    job, _, err := client.JobsAPI.ReadJob(context.Background(), made.JobId).TenantId("generated").Execute()
    if err != nil {
        panic(err)
    }
    fmt.Println(job.Status)
}
"""
TYPESCRIPT = """import { Configuration, JobsApi } from "./client";

async function main() {
  const jobs = new JobsApi(new Configuration({ basePath: process.argv[2] }));
  const made = await jobs.submitJob({
    jobRequest: { tenantId: "generated", spec: { name: "by typescript" } },
  });
  const job = await jobs.readJob({ jobId: made.jobId, tenantId: "generated" });
  console.log(job.status);
}
main();
"""
COMPILER_OPTIONS = {"target": "es2022", "module": "commonjs", "lib": ["es2022", "dom"], "outDir": "out"}
PYTHON = """import sys
import tally
with tally.ApiClient(tally.Configuration(host=sys.argv[1])) as client:
    made = tally.JobsApi(client).submit_job(tally.JobRequest(tenant_id="generated", spec={"name": "by python"}))
    print(tally.JobsApi(client).read_job(made.job_id, tenant_id="generated").status)
"""
SMALL_PYTHON = """import sys
from tallystick_client import Client
from tallystick_client.api.events import submit_events
from tallystick_client.types import File
line = '{"tenant_id":"generated","type":"JobCreated","job_id":"by-lines","spec":{}}'
answer = submit_events.sync_detailed(client=Client(base_url=sys.argv[1]), body=File(payload=line))
print(answer.status_code.value)
"""


def ran(*command: object, folder: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def url(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(postgres, tmp_path_factory.mktemp("generated"), "generated") as url:
        yield url


@pytest.fixture(scope="module")
def document(url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("document") / "openapi.json"
    path.write_text(httpx.get(f"{url}/openapi.json", timeout=60).text)
    return path


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generator, by Maven."""
    folder = tmp_path_factory.mktemp("generator")
    ran("mvn", "-q", "dependency:copy", f"-Dartifact={GENERATOR}", f"-DoutputDirectory={folder}", folder=folder)
    (jar,) = folder.glob("*.jar")
    return jar


def generated(generator: Path, document: Path, language: str, folder: Path, **properties: str) -> None:
    given = ",".join(f"{name}={value}" for name, value in properties.items())
    command = ["java", "-jar", generator, "generate", "-i", document, "-g", language, "-o", folder]
    ran(*command, *(["--additional-properties", given] if given else []), folder=document.parent)


def test_in_go(url: str, document: Path, generator: Path, tmp_path: Path) -> None:
    generated(generator, document, "go", tmp_path / "tally", packageName="tally")
    (tmp_path / "tally" / "go.mod").write_text("module example.org/tally\n\ngo 1.23\n")
    for path in (tmp_path / "tally" / "test").glob("*"):
        path.unlink()
    (tmp_path / "tally" / "cmd").mkdir()
    (tmp_path / "tally" / "cmd" / "main.go").write_text(GO)
    ran("go", "mod", "tidy", folder=tmp_path / "tally")
    ran("go", "vet", "./...", folder=tmp_path / "tally")
    assert ran("go", "run", "./cmd", url, folder=tmp_path / "tally").strip() == "SUBMITTED"


def test_in_typescript(url: str, document: Path, generator: Path, tmp_path: Path) -> None:
    generated(generator, document, "typescript-fetch", tmp_path / "client")
    (tmp_path / "main.ts").write_text(TYPESCRIPT)
    ran("npm", "install", "--silent", "typescript@5", "@types/node@20", folder=tmp_path)
    (tmp_path / "tsconfig.json").write_text(json.dumps({"compilerOptions": COMPILER_OPTIONS, "files": ["main.ts"]}))
    ran("npx", "tsc", folder=tmp_path)
    assert ran("node", "out/main.js", url, folder=tmp_path).strip() == "SUBMITTED"


def test_in_python(url: str, document: Path, generator: Path, tmp_path: Path) -> None:
    generated(generator, document, "python", tmp_path / "client", packageName="tally")
    ran(sys.executable, "-m", "venv", "venv", folder=tmp_path)
    ran("venv/bin/pip", "install", "-q", "./client", folder=tmp_path)
    (tmp_path / "main.py").write_text(PYTHON)
    assert ran("venv/bin/python", "main.py", url, folder=tmp_path).strip().endswith("SUBMITTED")


def test_lines_of_events_in_python_by_the_settings_of_the_docs(url: str, document: Path, tmp_path: Path) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
    settings = docs.split("```yaml\n# openapi-python-client --config\n", 1)[1].split("```")[0]
    (tmp_path / "config.yml").write_text(settings)
    ran(sys.executable, "-m", "venv", "venv", folder=tmp_path)
    ran("venv/bin/pip", "install", "-q", "openapi-python-client", "ruff", "attrs", "httpx", folder=tmp_path)
    command = ("generate", "--path", document, "--config", "config.yml", "--output-path", "client", "--meta", "none")
    (tmp_path / "main.py").write_text(SMALL_PYTHON)
    ran("venv/bin/openapi-python-client", *command, folder=tmp_path)
    (tmp_path / "client").rename(tmp_path / "tallystick_client")
    assert ran("venv/bin/python", "main.py", url, folder=tmp_path).strip() == "200"
