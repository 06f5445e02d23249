"""What a node holds about keys, durably: ``<wal folder>/keys``, one JSON object, replaced whole (docs/formats/keys.md).

::

    configured   uri and key id of signing.key_uri when this was written: as long as the setting says the same,
                 what stands here counts, so a rotation outlives a restart; a changed setting is a rotation itself
    signer       uri, key id and public key of the key that signs snapshots
    log_signer   the same of the Ed25519 key that signs checkpoints: the same key if it is one in a file
    retired      keys whose place another took, and that the ledger may not say so of yet
    root_key_id  the key that the ledger began with, once the node has seen it. Whoever has the database can replace
                 the whole chain of _system by one that begins with a key of his own: nothing that says is believed
    ended        by key id the ends and revocations that the node has seen in the chain. The database may be changed
                 or turned back; what ended stays ended all the same

A name without folder is a file beside the configured key. The public key is kept so that a node starts, and chains,
while an HSM or a key service is away; only a URI never seen before must answer.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import structlog

from app.config import Settings
from app.node import identity
from ledger.errors import ConfigurationError, InvalidInputError, SigningUnavailableError
from ledger.hlc import Clock, Hlc
from signing import key_file, remote_signer
from signing.keys import FileSigner, Keyring, PublicKey, Signer
from signing.private_file import path_of
from wal.segment import store_file, sync_folder

NAME = "keys"
LOG_KEY_NAME = "log-key"
"""What the file of a log key is called that stands beside no key file, without its suffix."""

ROOT_FILE, ENDED_FILE = "root-key", "ended-keys"
"""Where earlier versions kept ``root_key_id`` and ``ended``: read as long as the file of keys lacks them."""

_KEY_ID = re.compile(r"[0-9a-f]{16}")

LocalOrRemote = FileSigner | remote_signer.RemoteSigner

log = structlog.get_logger()


@dataclass(frozen=True)
class Retired:
    """Key ``key_id`` counts up to ``not_after_ms``, an HLC time, and ``successor_id`` took its place.

    ``not_after_ms`` is None until a start that found a changed setting has looked what the key signed last. ``uri`` is
    where the key was, as in the file. ``statement`` is the envelope by which it vouches for the successor, None while
    nothing does.
    """

    key_id: str
    successor_id: str
    successor_pem: str
    not_after_ms: int | None
    uri: str | None = None
    statement: dict[str, Any] | None = None

    @classmethod
    def by(cls, successor: Signer, key_id: str, not_after_ms: int | None, uri: str | None) -> Retired:
        """Key ``key_id`` of ``uri`` gave way to ``successor``."""
        return cls(key_id, successor.key_id, successor.public_key.public_key_pem, not_after_ms, uri)

    def ending(self, not_after_ms: int) -> Retired:
        """The same with its end."""
        return replace(self, not_after_ms=not_after_ms)


class KeyBounds(NamedTuple):
    """The earliest end and the earliest revocation of one key."""

    not_after: datetime | None
    revoked_from_hlc: Hlc | None

    @classmethod
    def from_json(cls, value: Mapping[str, str | None]) -> KeyBounds:
        """As ``to_json`` wrote it; what else it can be raises ValueError, KeyError, TypeError or InvalidInputError."""
        end, revoked = value["not_after"], value["revoked_from_hlc"]
        return cls(datetime.fromisoformat(end) if end else None, Hlc.parse(revoked) if revoked else None)

    def to_json(self) -> dict[str, str | None]:
        """One item of ``ended``."""
        return {
            "not_after": self.not_after.isoformat() if self.not_after else None,
            "revoked_from_hlc": self.revoked_from_hlc.text() if self.revoked_from_hlc else None,
        }


@dataclass
class NodeKeys:
    """The keys of one node. Whoever changes them MUST ``store`` before anything is signed with them.

    What the node has seen of the ledger's keys, its root and what ended, is kept by itself. Belongs to one event loop.
    """

    folder: Path
    configured_uri: str
    configured_key_id: str
    signer: LocalOrRemote
    signer_uri: str
    log_signer: FileSigner
    log_signer_uri: str
    retired: list[Retired] = field(default_factory=list)
    root_key_id: str | None = None
    """None as long as this node has seen no root."""
    ended: Mapping[str, KeyBounds] = field(default_factory=dict)
    """By key id; never changed, only replaced."""

    def __post_init__(self) -> None:
        self._stored: dict[str, Any] | None = None
        """The file as it stands, None while there is none."""
        self._writing = threading.Lock()

    def signers(self) -> list[Signer]:
        """The keys this node signs with, each once."""
        return list({signer.key_id: signer for signer in (self.signer, self.log_signer)}.values())

    def store(self) -> None:
        """Write the file; on return it survives a crash."""
        with self._writing:
            self._write(
                {
                    "configured": {"uri": self.configured_uri, "key_id": self.configured_key_id},
                    "signer": self._described(self.signer_uri, self.signer),
                    "log_signer": self._described(self.log_signer_uri, self.log_signer),
                    "retired": [vars(item) for item in self.retired],
                }
            )

    # --- what was seen of the ledger --------------------------------------------------------------

    def expect_root(self, root: PublicKey | None) -> None:
        """The ledger begins with ``root``, if the settings name one.

        Raises:
            ConfigurationError: it began with another.
        """
        if root is not None and self.root_key_id not in (None, root.key_id):
            raise ConfigurationError(
                f"signing.root_key is key {root.key_id}, but the ledger of this node began with {self.root_key_id}; a "
                "root key never changes"
            )
        self.root_key_id = root.key_id if root is not None else self.root_key_id

    async def learn_root(self, key_id: str) -> None:
        """Keep ``key_id`` as the root, unless one is known."""
        if self.root_key_id is None:
            self.root_key_id = key_id
        await self._remember()

    async def narrowed(self, keys: Mapping[str, PublicKey]) -> dict[str, PublicKey]:
        """``keys`` by id, none of which counts longer than it ever did; how long they do is remembered from now on."""
        narrow = {key_id: self.bounded(key) for key_id, key in keys.items()}
        bounds = {key_id: KeyBounds(key.not_after, key.revoked_from_hlc) for key_id, key in narrow.items()}
        self.ended = {**self.ended, **{key_id: each for key_id, each in bounds.items() if each != (None, None)}}
        await self._remember()
        return narrow

    def bounded(self, key: PublicKey) -> PublicKey:
        """``key``, counting no longer than this node has seen."""
        known = self.ended.get(key.key_id)
        if known is None:
            return key
        bounded = PublicKey.of(key.material, not_after=known.not_after, revoked_from_hlc=known.revoked_from_hlc)
        return key.narrowed(bounded)

    async def _remember(self) -> None:
        """Write what was seen beside the signers of the file. Before there is one, the first ``store`` does."""
        if self._stored is not None and self._stored | self._seen() != self._stored:
            try:
                await asyncio.to_thread(self._write_seen)
            except OSError as error:
                log.error("seen_keys_not_stored", error=str(error))

    def _write_seen(self) -> None:
        with self._writing:
            self._write(self._stored or {})

    def _seen(self) -> dict[str, Any]:
        return {"root_key_id": self.root_key_id, "ended": {name: each.to_json() for name, each in self.ended.items()}}

    def _write(self, signing: dict[str, Any]) -> None:
        value = signing | self._seen()
        _store(self.folder, value)
        self._stored = value

    def _described(self, uri: str, signer: LocalOrRemote) -> dict[str, str]:
        is_beside = (
            uri != self.configured_uri
            and isinstance(signer, FileSigner)
            and not remote_signer.is_remote(self.configured_uri)
            and signer.path.absolute().parent == path_of(self.configured_uri).absolute().parent
        )
        name = signer.path.name if is_beside and isinstance(signer, FileSigner) else uri
        return {"uri": name, "key_id": signer.key_id, "public_key_pem": signer.public_key.public_key_pem}


def last_signed_ms(clock: Clock, now_ms: int, signed_ms: int) -> int:
    """An HLC time by which everything that a key of this node signed was stamped.

    ``signed_ms`` is the highest time that a snapshot in the database names: somebody may have written a later one
    there, so no more is believed than a clock of the ledger may be ahead.
    """
    floor_ms = max(now_ms, clock.last.physical_ms)
    return max(floor_ms, min(signed_ms, floor_ms + clock.max_clock_skew_ms))


def open_keys(folder: Path, settings: Settings) -> NodeKeys:
    """The keys that the node of ``folder`` signs with, as its file or the settings have it; blocks on a new signer.

    Keys that are missing and may be made are made. Nothing is stored.

    Raises:
        ConfigurationError: a key cannot be used, or the file is damaged.
        SigningUnavailableError: a signer that was never used before does not answer.
    """
    configured = settings.signing_key_uri
    pin = settings.signing.read_pin
    kept = _load(folder)
    if kept is None or not _is_as_configured(kept, configured):
        # The first start, or the setting names another key than before, which takes the place of the one that signed.
        signer = open_signer(configured, pin, may_generate=True)
        uri, configured_key_id = _pinned(signer, configured), signer.key_id
        log_signer, log_uri = _log_signer(signer, configured, settings)
    else:
        uri = kept["signer"]["uri"]
        is_configured = uri == kept["configured"]["uri"]
        signer = _reopened(kept["signer"], configured, pin, may_generate=is_configured)
        if is_configured and isinstance(signer, FileSigner):
            uri = configured
        log_uri = kept["log_signer"]["uri"]
        if kept["log_signer"]["key_id"] == kept["signer"]["key_id"]:
            log_signer, log_uri = _log_signer(signer, uri, settings)
        else:
            log_signer = key_file.load_or_generate(str(_path(log_uri, configured)))
        configured_key_id = signer.key_id if is_configured else kept["configured"]["key_id"]
    keys = NodeKeys(folder, configured, configured_key_id, signer, uri, log_signer, log_uri)
    keys.root_key_id, keys.ended = _seen(folder, kept)
    if kept is not None:
        keys._stored = kept
        keys.retired = [Retired(**item) for item in kept["retired"]]
        _retire_replaced(keys, kept)
    return keys


def uri_in_use(settings: Settings) -> str:
    """URI of the key that the node of the settings signs with now, after any rotation; nothing is opened or made.

    Raises:
        ConfigurationError: the node's file of keys is damaged.
        StartRefusedError: who the node is cannot be read.
    """
    configured = settings.signing_key_uri
    node_id = settings.node_id or identity.kept_node_id(settings.wal_dir)
    kept = _load(settings.wal_dir / node_id) if node_id is not None else None
    if kept is None or not _is_as_configured(kept, configured) or kept["signer"]["uri"] == kept["configured"]["uri"]:
        return configured
    uri: str = kept["signer"]["uri"]
    return uri if remote_signer.is_remote(uri) else f"file:{_path(uri, configured).absolute()}"


def key_files(folder: Path, configured: str) -> tuple[FileSigner, FileSigner]:
    """The keys of snapshots and of checkpoints in the file of ``folder``, which MUST exist; none is made or changed.

    Raises:
        ConfigurationError: one is not in a file that can be read, or is another key by now.
    """
    kept = _load(folder)
    assert kept is not None
    found = []
    for name in ("signer", "log_signer"):
        uri = kept[name]["uri"]
        signer = key_file.load(configured if uri == kept["configured"]["uri"] else str(_path(uri, configured)))
        if signer.key_id != kept[name]["key_id"]:
            raise ConfigurationError(f"{signer.path} is not the key that the node of {folder} signs with; name one")
        found.append(signer)
    return found[0], found[1]


def _retire_replaced(keys: NodeKeys, kept: dict[str, Any]) -> None:
    """Note which of the keys that signed before sign no more."""
    present = {signer.key_id for signer in keys.signers()}
    for name, successor in (("signer", keys.signer), ("log_signer", keys.log_signer)):
        key_id = kept[name]["key_id"]
        if key_id not in present | {item.key_id for item in keys.retired}:
            keys.retired.append(Retired.by(successor, key_id, None, kept[name]["uri"]))


def retired_signer(item: Retired, keys: NodeKeys, pin: remote_signer.PinSource) -> LocalOrRemote | None:
    """The key that retired, None where it cannot be had any more. Blocks."""
    if item.uri is None:
        return None
    try:
        if remote_signer.is_remote(item.uri):
            signer = open_signer(item.uri, pin, may_generate=False)
        else:
            signer = key_file.load(str(_path(item.uri, keys.configured_uri)))
    except (ConfigurationError, SigningUnavailableError):
        return None
    return signer if signer.key_id == item.key_id else None


def open_signer(uri: str, pin: remote_signer.PinSource, *, may_generate: bool) -> LocalOrRemote:
    """The signer that ``uri`` names; the public key of one outside of files is fetched, which blocks.

    Raises:
        ConfigurationError: the key cannot be used.
        SigningUnavailableError: the signer does not answer.
    """
    if remote_signer.is_remote(uri):
        return remote_signer.fetch(uri, pin)
    return key_file.load_or_generate(uri) if may_generate else key_file.load(uri)


def new_key_path(configured: str) -> Path:
    """A file for a new key beside the configured one, named by the time."""
    path = path_of(configured)
    return path.with_name(f"{path.stem}-{time.time_ns() // 1_000_000}{path.suffix}")


def log_key_beside(configured: str, settings: Settings) -> Path:
    """A file for a new log key: beside the configured key, else below ``data_dir``."""
    if remote_signer.is_remote(configured):
        folder = settings.data_dir / "keys"
        return folder / f"{LOG_KEY_NAME}-{time.time_ns() // 1_000_000}.pem"
    path = path_of(configured)
    return path.with_name(f"{path.stem}.{LOG_KEY_NAME}-{time.time_ns() // 1_000_000}.pem")


def _log_signer(signer: LocalOrRemote, uri: str, settings: Settings) -> tuple[FileSigner, str]:
    """The key of checkpoints that goes with ``signer``: the same if it can be, else a file of its own."""
    if isinstance(signer, FileSigner):
        log_signer = key_file.log_signer(signer)
        return log_signer, uri if log_signer is signer else str(log_signer.path)
    path = settings.data_dir / "keys" / f"{LOG_KEY_NAME}.pem"
    return key_file.load_or_generate(str(path)), str(path.absolute())


def _pinned(signer: LocalOrRemote, uri: str) -> str:
    return uri if isinstance(signer, FileSigner) else signer.key_uri


def _is_as_configured(kept: dict[str, Any], configured: str) -> bool:
    """Whether the setting names what it named before; a key file that was moved is the same key."""
    if kept["configured"]["uri"] == configured:
        return True
    if remote_signer.is_remote(configured) or not path_of(configured).exists():
        return False
    return bool(key_file.load(configured).key_id == kept["configured"]["key_id"])


def _reopened(
    described: dict[str, str], configured: str, pin: remote_signer.PinSource, *, may_generate: bool
) -> LocalOrRemote:
    """The signer that the node used last."""
    uri = described["uri"]
    if remote_signer.is_remote(uri):
        return remote_signer.RemoteSigner(uri, PublicKey.of(described["public_key_pem"]), pin)
    if may_generate:
        return key_file.load_or_generate(configured)
    return key_file.load(str(_path(uri, configured)))


def _path(uri: str, configured: str) -> Path:
    """The file of ``uri``: a bare name stands beside the configured key."""
    path = path_of(uri)
    if path.parent == Path() and not uri.startswith("file:") and not remote_signer.is_remote(configured):
        return path_of(configured).with_name(path.name)
    return path


def offline_root(settings: Settings) -> PublicKey | None:
    """The root key that the settings name, None when they name none.

    Raises:
        ConfigurationError: it is not in one file, alone.
    """
    if settings.signing.root_key is None:
        return None
    keys = list(Keyring.load(settings.signing.root_key))
    if len(keys) != 1:
        raise ConfigurationError(f"signing.root_key: {settings.signing.root_key} holds {len(keys)} keys, not one")
    return keys[0]


def forget_root(folder: Path) -> None:
    """Let the node of ``folder`` learn the root again: a fork of the log may have lost it."""
    kept = _load(folder)
    _, ended = _seen(folder, kept)
    if kept is not None:
        seen = {"root_key_id": None, "ended": {key_id: bounds.to_json() for key_id, bounds in ended.items()}}
        _store(folder, kept | seen)
    elif (folder / ROOT_FILE).exists():
        (folder / ROOT_FILE).unlink()
        sync_folder(folder)


def _store(folder: Path, value: dict[str, Any]) -> None:
    store_file(folder / NAME, orjson.dumps(value, option=orjson.OPT_INDENT_2))
    for name in (ROOT_FILE, ENDED_FILE):
        (folder / name).unlink(missing_ok=True)


def _load(folder: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = orjson.loads((folder / NAME).read_bytes())
        for name in ("signer", "log_signer"):
            if PublicKey.of(value[name]["public_key_pem"]).key_id != value[name]["key_id"]:
                raise ValueError(f"{name} is another key than its id says")
        for name in ("configured", "signer", "log_signer"):
            if not all(isinstance(value[name][part], str) for part in ("uri", "key_id")):
                raise ValueError(f"{name} has no uri or key id")
        for item in value["retired"]:
            Retired(**item)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, InvalidInputError) as error:
        raise ConfigurationError(
            f"{folder / NAME}, which says with what key this node signs, is damaged ({error}); restore it, or, once "
            "tally verify has found the chain of _system whole, move it away and let signing.key_uri name the key that "
            "signs now"
        ) from error
    return value


def _seen(folder: Path, kept: dict[str, Any] | None) -> tuple[str | None, dict[str, KeyBounds]]:
    """``root_key_id`` and ``ended`` of the file, else as an earlier version kept them.

    Raises:
        ConfigurationError: they cannot be read.
    """
    try:
        if kept is not None and "ended" in kept:
            root_key_id, ended = kept["root_key_id"], kept["ended"]
        else:
            root_key_id, ended = None, {}
            with suppress(FileNotFoundError):
                root_key_id = (folder / ROOT_FILE).read_text().strip()
            with suppress(FileNotFoundError):
                ended = orjson.loads((folder / ENDED_FILE).read_bytes())
        if root_key_id is not None and _KEY_ID.fullmatch(root_key_id) is None:
            raise ValueError("root_key_id is no id of a key")
        return root_key_id, {key_id: KeyBounds.from_json(item) for key_id, item in ended.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, InvalidInputError) as error:
        raise ConfigurationError(
            f"{folder / NAME}, or {ROOT_FILE} or {ENDED_FILE} of an earlier version beside it, is damaged where it "
            f"says what this node has seen of the ledger's keys ({error}); restore it, or move it away once tally "
            "verify has found the chain of _system whole"
        ) from error
