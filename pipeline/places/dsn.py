"""A database as its user names it: a URL that may hold a password, which nothing shows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from ledger.errors import ConfigurationError
from ledger.secret_text import secret_text

SCHEMES: Final = ("postgresql", "postgres")
_PASSWORD_OPTION: Final = re.compile(r"[?&](?:ssl)?password=([^&]+)")
_AS_URLS_SPELL: Final = re.compile(r"(?:[^%/?#@\[\]:]|%[0-9A-Fa-f]{2})*")
_QUOTED: Final = re.compile(r'"[^"]*"')


@dataclass(frozen=True, slots=True, repr=False)
class Dsn:
    """Where a database is; its password is in ``url`` alone, which nothing shows."""

    url: str

    @classmethod
    def parse(cls, text: str) -> Dsn:
        """The database that ``text`` names.

        Raises:
            ConfigurationError: it is no URL of PostgreSQL. What it says is not shown, for it may hold a password.
        """
        text = secret_text(text, "the URL of the database")
        scheme, separator, _ = text.partition("://")
        if not separator or scheme not in SCHEMES:
            raise ConfigurationError("a database is named as postgresql://USER:PASSWORD@HOST/NAME")
        return cls(text)

    @property
    def shown(self) -> str:
        """The URL without password and without options."""
        scheme, _, rest = self.url.partition("://")
        login, _, place = self._parts(rest)
        user = login.partition(":")[0]
        return f"{scheme}://{f'{user}@' if user else ''}{place}"

    @staticmethod
    def _parts(rest: str) -> tuple[str, str, str]:
        """Login, ``@`` and the place of what stands behind ``://``; whatever is in front of the last ``@`` is login."""
        base, _, _ = rest.partition("?")
        login, at, place = (base if {"@", "/"} & set(base) else rest).rpartition("@")
        return login, at, place.partition("?")[0]

    def __repr__(self) -> str:
        return self.shown

    def hide(self, text: str) -> str:
        """``text`` of the driver in one line, without the URL and anything of the password, should it quote them.

        Where the password is not spelt as URLs spell it, libpq quotes pieces of it, so nothing that it quotes is told.
        """
        rest = self.url.partition("://")[2]
        password = self._parts(rest)[0].partition(":")[2]
        secrets = [self.url, *_PASSWORD_OPTION.findall(rest), password]
        for secret in (*secrets, *map(unquote, secrets)):
            text = text.replace(secret, "…") if secret else text
        if not _AS_URLS_SPELL.fullmatch(password):
            text = _QUOTED.sub('"…"', text)
        return " ".join(text.split())
