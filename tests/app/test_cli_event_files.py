"""Files of events are read the same way every time, and a bad line is named before anything is sent."""

from pathlib import Path

import orjson
import pytest

from lab import event_files
from lab.event_files import EventFile
from ledger.errors import InvalidInputError


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def ndjson(folder: Path, *events: object) -> Path:
    return written(folder, "events.ndjson", "".join(orjson.dumps(event).decode() + "\n" for event in events))


def created(job_id: str) -> dict[str, object]:
    return {"type": "JobCreated", "job_id": job_id, "spec": {"image": "a/b:1"}}


def test_the_tenant_is_filled_in_where_a_line_leaves_it_out(tmp_path: Path) -> None:
    file = EventFile(ndjson(tmp_path, created("j-1")), "acme", "auto", None)

    assert list(file.events()) == [(1, {"tenant_id": "acme", **created("j-1")})]


def test_a_line_of_another_tenant_is_refused(tmp_path: Path) -> None:
    file = EventFile(ndjson(tmp_path, {**created("j-1"), "tenant_id": "other"}), "acme", "auto", None)

    with pytest.raises(InvalidInputError, match="line 1: belongs to tenant 'other'"):
        list(file.events())


def test_csv_cells_become_numbers_json_or_text_by_field_and_blank_ones_are_left_out(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "events.csv",
        'type,job_id,dc_id,worker_count,spec\nJobCreated,1,,,"{""gpu"": 2}"\nJobAccepted,1,7,4,\n',
    )

    events = [event for _, event in EventFile(path, "acme", "auto", None).events()]

    assert events == [
        {"tenant_id": "acme", "type": "JobCreated", "job_id": "1", "spec": {"gpu": 2}},
        {"tenant_id": "acme", "type": "JobAccepted", "job_id": "1", "dc_id": "7", "worker_count": 4},
    ]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("e.ndjson", '{"type": "JobCreated"}\n{oops\n', "line 2: not JSON"),
        ("e.ndjson", "[]\n", "line 1: not a JSON object"),
        ("e.ndjson", '{"type": "JobVanished"}\n', "line 1: type"),
        ("e.ndjson", '\n{"type": "JobCompleted"}\n', "line 2: job_id"),
        ("e.ndjson", '{"type": "JobCreated", "colour": 1}\n', "line 1: colour: there is no such field"),
        ("e.ndjson", '{"type": "JobCreated", "spec": {"a": "\\u0000"}}\n', "line 1: .*U\\+0000"),
        ("e.csv", "job_id\nj-1\n", "line 1: the header lacks type"),
        ("e.csv", "type,type\n", "line 1: the header names type twice"),
        ("e.csv", "type,job_id\nJobCreated\n", "line 2: 1 cells, but the header has 2"),
        ("e.csv", "type,job_id,dc_id,worker_count\nJobAccepted,j,d,many\n", "line 2: worker_count is 'many'"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    file = EventFile(written(tmp_path, name, text), "acme", "auto", None)

    with pytest.raises(InvalidInputError, match=complaint):
        list(file.events())


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ('{"type": "JobCreated", "job_id": "j"}\n', ["JobCreated"]),
        ("type,job_id\nJobCreated,j\n", ["JobCreated"]),
    ],
)
def test_the_form_of_a_file_without_a_telling_name_is_seen_from_its_first_byte(
    tmp_path: Path, text: str, types: list[str]
) -> None:
    file = EventFile(written(tmp_path, "events", text), "acme", "auto", None)

    assert [event["type"] for _, event in file.events()] == types


def test_the_openb_mapping_refuses_ndjson(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="--map openb reads CSV"):
        EventFile(ndjson(tmp_path, created("j")), "acme", "auto", "openb")


def test_chunks_hold_every_event_once_in_order_and_no_more_lines_than_the_bound(tmp_path: Path) -> None:
    count = 2 * event_files.CHUNK_LINES_MAX + 1
    file = EventFile(ndjson(tmp_path, *(created(f"j-{n}") for n in range(count))), "acme", "auto", None)

    chunks = list(file.chunks())

    assert [chunk.number for chunk in chunks] == [0, 1, 2]
    assert [len(chunk.types) for chunk in chunks] == [1000, 1000, 1]
    lines = b"".join(chunk.lines for chunk in chunks).splitlines()
    assert [orjson.loads(line)["job_id"] for line in lines] == [f"j-{n}" for n in range(count)]


def test_chunks_stay_within_their_bytes(tmp_path: Path) -> None:
    large = {**created("j"), "spec": {"blob": "x" * 900_000}}
    file = EventFile(ndjson(tmp_path, *[large] * 9), "acme", "auto", None)

    chunks = list(file.chunks())

    assert sum(len(chunk.types) for chunk in chunks) == 9
    assert all(len(chunk.lines) <= event_files.CHUNK_BYTES_MAX for chunk in chunks)


def test_reading_a_file_again_gives_the_same_chunks(tmp_path: Path) -> None:
    path = ndjson(tmp_path, *(created(f"j-{n}") for n in range(1500)))

    first, second = (list(EventFile(path, "acme", "auto", None).chunks()) for _ in range(2))

    assert first == second
