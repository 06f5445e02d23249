"""The bytes that docs/formats/replication.md shows are the ones that are written."""

from __future__ import annotations

import re
from pathlib import Path

from wal.replication import configuration, messages
from wal.replication.configuration import Configuration, Member
from wal.replication.messages import Frame, Greet

PAGE = (Path(__file__).parents[3] / "docs/formats/replication.md").read_text()


def test_the_frame_of_the_example() -> None:
    example = PAGE.split("```text")[1].split("```")[0]
    shown = "".join(
        word * int(times or 1)
        for line in example.splitlines()
        for word, times in re.findall(r"\b((?:[0-9a-f]{2})+)\b(?: \((\d+) times\))?", line[12:33])
    )
    head, body = messages.encode(Frame(Greet("a", "", "1" * 32)))
    assert bytes.fromhex(shown) == head + bytes(body)


def test_the_list_of_members_of_the_example(tmp_path: Path) -> None:
    shown = re.search(r"^\{\"copies\".*$", PAGE, re.MULTILINE)
    assert shown is not None
    configuration.store(tmp_path, Configuration(2, 3, "use1", False, (Member("1" * 32, "use1"),)))
    assert (tmp_path / "members").read_text() == shown[0] + "\n"


def test_every_message_is_in_the_table() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \| ([^|]*)\|", PAGE, re.MULTILINE)
    told = {int(kind): (name, re.findall(r"([a-z_]+)(?= = | \(|,|$)", fields.strip())) for kind, name, fields in rows}
    assert told == {
        kind: (message.__name__, list(message.__struct_fields__)) for kind, message in enumerate(messages._KINDS, 1)
    }
