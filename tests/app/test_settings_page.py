"""The page of settings names every setting there is, and no other."""

import re
from pathlib import Path

from pydantic import BaseModel

from app.config import Settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_lists_exactly_the_settings_that_exist():
    exist: set[str] = set()
    for name, field in Settings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            exist |= {f"{name}.{part}" for part in section.model_fields}
        else:
            exist.add(name)
    assert set(re.findall(r"^\| `([a-z_.]+)` \|", PAGE.read_text(), re.M)) == exist
