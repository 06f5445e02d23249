"""Secrets from variables, files and options: what ends a line is no part of them, and no message repeats one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, SecretStr
from typer.testing import CliRunner

from app.runtime.settings.config import Settings, load_settings
from app.share.exchange.peer_client import _token_in
from app.trust.console_sessions import _client_secret_in
from cli import Commands, client
from cli import tally as command_line
from ledger.errors import ConfigurationError
from ledger.text import without_login
from pipeline.cli.options import PIN_VARIABLE, _pin
from pipeline.places.postgres import Dsn
from signing import files
from tallystick_client import Client

SECRET = "kept-from-all"
URL = f"postgresql://tally:{SECRET}@127.0.0.1:5432/ledger"
SETTINGS = {"database_url": URL, "migrate_url": URL, "database_replica_urls": URL, "signing.pin": SECRET}
"""Settings whose value is a secret, or has one in it."""
FILES = {"auth.oidc.client_secret_file", "exchange.peers.token_file"}
"""Settings that name a file whose content is a secret."""
WITH_DSN: dict[str, tuple[str, ...]] = {
    "verify": ("-t", "acme", "--any-key"),
    "privacy rotate-master": ("--new", "/nowhere/new.key"),
    "privacy restore": ("-t", "acme"),
    "safekeeper status": ("127.0.0.1:1",),
    "bundle from-v1": ("-t", "acme", "-o", "/nowhere/v1.tar", "--key", "file:/nowhere/key"),
}
"""Commands that have ``--dsn``, with what else they need."""
_SECRET_LIKE = re.compile(r"secret|token|passw|\bpin\b|dsn|database.*url|migrate_url|credential")

Reader = Callable[[str], str]


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every setting by its name, with its annotation; those of tables in a list under the name of the list."""
    for name, field in model.model_fields.items():
        kinds = list(models_in(field.annotation))
        yield f"{prefix}{name}", field.annotation
        for kind in kinds:
            yield from settings_of(kind, f"{prefix}{name}.")


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from models_in(each)


def options_of(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """Every long option of a command and the commands below it, behind the name of its command."""
    for parameter in command.params:
        yield from ((name, option) for option in parameter.opts if option.startswith("--"))
    for each, below in getattr(command, "commands", {}).items():
        yield from options_of(below, f"{name} {each}")


def secret_options() -> set[tuple[str, str]]:
    commands = Commands(name="tally")
    found = (options_of(commands.get_command(None, name), name) for name in commands.list_commands(None))
    return {pair for pairs in found for pair in pairs if _SECRET_LIKE.search(pair[1])}


def test_every_setting_and_option_that_looks_like_a_secret_is_tried_here() -> None:
    found = {
        name
        for name, annotation in settings_of(Settings)
        if _SECRET_LIKE.search(name) or "SecretStr" in str(annotation)
    }
    assert found == SETTINGS.keys() | FILES
    options = secret_options()
    assert {option for _, option in options} == {"--dsn", "--token-file"}
    assert {command for command, option in options if option == "--dsn"} == WITH_DSN.keys()


def test_no_command_repeats_what_a_token_file_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(client, "_token_of_file", None)
    (tmp_path / "token").write_text("kept\nfrom-all")
    commands = {command for command, option in secret_options() if option == "--token-file"}
    for command in commands:
        done = CliRunner().invoke(command_line, [*command.split(), "--token-file", str(tmp_path / "token")])
        said = f"{done.output} {done.exception}"
        assert "holds no token" in said, (command, said)
        assert "from-all" not in said, (command, said)


def variable_of(setting: str) -> str:
    return "TALLY_" + setting.upper().replace(".", "__")


def value_of(settings: Settings, setting: str) -> str:
    found: Any = settings
    for name in setting.split("."):
        found = getattr(found, name)
    if isinstance(found, list):
        (found,) = found
    return found.get_secret_value() if isinstance(found, SecretStr) else str(found)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_end_of_a_line_behind_a_setting_is_no_part_of_it(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for end in ("\n", "\r\n", "\n\n"):
        monkeypatch.setenv(variable_of(setting), SETTINGS[setting] + end)
        assert value_of(load_settings(), setting) == SETTINGS[setting]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("character", "name"), [("\n", "a line feed (U+000A)"), ("\t", "a tab (U+0009)"), ("\x85", "U+0085")]
)
def test_a_control_character_in_a_setting_is_refused_by_name_and_its_value_is_not_shown(
    setting: str, character: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable_of(setting), SETTINGS[setting].replace(SECRET, f"kept{character}-from-all"))
    with pytest.raises(ConfigurationError) as raised:
        load_settings()
    said = str(raised.value)
    assert said.startswith(setting)
    assert name in said
    assert "from-all" not in said
    assert raised.value.__cause__ is None


def token_in_environment(value: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setenv("TALLY_TOKEN", value)
    return client._token()


def token_of_client(value: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setenv("TALLY_TOKEN", value)
    with Client("http://127.0.0.1:9") as ledger:
        return ledger._core._authorization["Authorization"].removeprefix("Bearer ")


def pin_of_pipeline(value: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setenv(PIN_VARIABLE, value)
    return _pin()


def dsn_of_pipeline(value: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    return Dsn.parse(f"postgresql://:{value}").url.removeprefix("postgresql://:")


def token_of_peer(value: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    (folder / "secret").write_text(value, newline="")
    return _token_in(folder / "secret")


def token_of_file(value: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setattr(client, "_token_of_file", None)
    (folder / "secret").write_text(value, newline="")
    client._read_token(None, None, folder / "secret")
    return client._token()


def secret_of_oidc_client(value: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    files.make(folder / "secrets" / str(len(list(folder.glob("secrets/*")))), value.encode())
    return _client_secret_in(max((folder / "secrets").iterdir()))


@pytest.mark.parametrize(
    "read",
    [
        token_in_environment,
        token_of_client,
        pin_of_pipeline,
        dsn_of_pipeline,
        token_of_peer,
        token_of_file,
        secret_of_oidc_client,
    ],
)
def test_a_secret_of_a_file_or_a_variable_ends_before_its_line_does_and_is_not_shown(
    read: Callable[[str, pytest.MonkeyPatch, Path], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert read(f"{SECRET}\n", monkeypatch, tmp_path) == SECRET
    assert read(f"{SECRET}\r\n", monkeypatch, tmp_path) == SECRET
    for inside in ("kept\nfrom-all", "kept\x1bfrom-all"):
        with pytest.raises((ConfigurationError, ValueError), match=r"U\+00(0A|1B)") as raised:
            read(inside, monkeypatch, tmp_path)
        assert "from-all" not in str(raised.value)
        assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    "command",
    [
        *((*name.split(), *rest, "--dsn") for name, rest in WITH_DSN.items()),
        ("jobs", "list", "-t", "acme", "--url"),
    ],
)
def test_an_option_with_a_secret_is_refused_without_it(command: tuple[str, ...]) -> None:
    for value in ("postgresql://tally:kept\nfrom-all@127.0.0.1:1/x", f"http://tally:{SECRET}@[::1"):
        done = CliRunner().invoke(command_line, [*command, value])
        said = f"{done.output} {done.exception}"
        assert done.exit_code != 0
        assert "from-all" not in said, said


def test_a_login_in_an_address_is_left_out_of_messages() -> None:
    assert without_login(f"https://me:{SECRET}@ledger/x?a=b@c") == "https://ledger/x?a=b@c"
    with pytest.raises(ValueError, match="is not an address of a node") as raised:
        Client(f"ftp://me:{SECRET}@ledger")
    assert SECRET not in str(raised.value)
