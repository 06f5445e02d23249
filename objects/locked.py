"""Puts that lock what they write: Object Lock of S3, by which nobody can change or remove an object for a time.

``obstore`` sends no such headers, so these puts go through ``boto3``. It finds credentials where ``obstore`` does, and
beyond: in the environment, in profiles, from the machine's role.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from ledger.errors import ArchiveUnavailableError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

_LOCK: Final = re.compile(r"(governance|compliance):([1-9][0-9]{0,4})d")
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")


@dataclass(frozen=True, slots=True)
class ObjectLock:
    """How long, and how firmly, each new object is locked."""

    mode: str
    """``GOVERNANCE``, which some users may lift, or ``COMPLIANCE``, which nobody may."""
    days: int

    @classmethod
    def parse(cls, text: str) -> ObjectLock | None:
        """Of the forms ``none``, ``governance:400d`` and ``compliance:400d``.

        Raises:
            ConfigurationError: it is of none.
        """
        if text == "none":
            return None
        if (found := _LOCK.fullmatch(text)) is None:
            raise ConfigurationError(f"{text!r} is no lock: write none, governance:400d or compliance:400d")
        return cls(found[1].upper(), int(found[2]))

    def headers(self, now: datetime) -> dict[str, Any]:
        """The parameters of a put that locks what it writes."""
        return {"ObjectLockMode": self.mode, "ObjectLockRetainUntilDate": now + timedelta(days=self.days)}


class LockedBucket:
    """Locked puts below ``s3://bucket/prefix``. Safe for threads."""

    def __init__(self, url: str, lock: ObjectLock) -> None:
        """
        Raises:
            ConfigurationError: the URL is none of S3, or ``boto3`` is not installed.
        """
        parts = urlsplit(url)
        if parts.scheme != "s3":
            raise ConfigurationError(f"archive.lock needs an archive in S3, s3://bucket/prefix, and {url} is none")
        self._bucket, self._prefix, self._lock = parts.netloc, parts.path.strip("/"), lock
        self._client: Any = None
        self._make: Callable[[], Any] = _client_maker()

    def create(self, name: str, data: bytes) -> bool:
        """Write ``data`` under ``name``, locked, unless the name is taken; whether it was free.

        Raises:
            ArchiveUnavailableError: it cannot be written.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        self._client = self._client or self._make()
        key = f"{self._prefix}/{name}" if self._prefix else name
        try:
            self._client.put_object(
                Bucket=self._bucket,
                Key=key,
                Body=data,
                IfNoneMatch="*",
                ChecksumAlgorithm="SHA256",
                **self._lock.headers(datetime.now(UTC)),
            )
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == HTTPStatus.PRECONDITION_FAILED:
                return False
            raise ArchiveUnavailableError(f"{name} of the archive cannot be written, locked: {error}") from error
        except BotoCoreError as error:
            raise ArchiveUnavailableError(f"{name} of the archive cannot be written, locked: {error}") from error
        return True


def _client_maker() -> Callable[[], Any]:
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise ConfigurationError("archive.lock needs the package boto3: pip install 'tallystick[archive]'") from error
    endpoint = next((os.environ[each] for each in _ENDPOINTS if os.environ.get(each)), None)
    region = next((os.environ[each] for each in _REGIONS if os.environ.get(each)), None)
    style = {"addressing_style": "auto" if endpoint is None else "path"}
    config = Config(s3=style, retries={"max_attempts": 3}, connect_timeout=5, read_timeout=60)
    return lambda: boto3.client("s3", endpoint_url=endpoint, region_name=region, config=config)
