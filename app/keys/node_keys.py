"""With which keys a node signs, durably: ``<wal folder>/keys``, one JSON object, replaced whole.

::

    configured   uri and key id of signing.key_uri when this was written: as long as the setting says the same,
                 what stands here counts, so a rotation outlives a restart; a changed setting is a rotation itself
    signer       uri, key id and public key of the key that signs snapshots
    log_signer   the same of the Ed25519 key that signs checkpoints: the same key if it is one in a file
    retired      keys whose place another took, and that the ledger may not say so of yet

A name without folder is a file beside the configured key. The public key is kept so that a node starts, and chains,
while an HSM or a key service is away; only a URI never seen before must answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from app.config import Settings
from app.node import identity
from ledger.errors import ConfigurationError, InvalidInputError, SigningUnavailableError
from ledger.hlc import Clock
from signing import key_file, remote_signer
from signing.keys import FileSigner, PublicKey, Signer
from signing.private_file import path_of
from wal.segment import store_file

NAME = "keys"
LOG_KEY_NAME = "log-key"
"""What the file of a log key is called that stands beside no key file, without its suffix."""

LocalOrRemote = FileSigner | remote_signer.RemoteSigner


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


@dataclass
class NodeKeys:
    """The keys of one node. Whoever changes them MUST ``store`` before anything is signed with them."""

    folder: Path
    configured_uri: str
    configured_key_id: str
    signer: LocalOrRemote
    signer_uri: str
    log_signer: FileSigner
    log_signer_uri: str
    retired: list[Retired] = field(default_factory=list)

    def signers(self) -> list[Signer]:
        """The keys this node signs with, each once."""
        return list({signer.key_id: signer for signer in (self.signer, self.log_signer)}.values())

    def store(self) -> None:
        """Write the file; on return it survives a crash."""
        value = {
            "configured": {"uri": self.configured_uri, "key_id": self.configured_key_id},
            "signer": self._described(self.signer_uri, self.signer),
            "log_signer": self._described(self.log_signer_uri, self.log_signer),
            "retired": [vars(item) for item in self.retired],
        }
        store_file(self.folder / NAME, orjson.dumps(value, option=orjson.OPT_INDENT_2))

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
    kept = _load(folder / NAME)
    if kept is None:
        signer = open_signer(configured, pin, may_generate=True)
        log_signer, log_uri = _log_signer(signer, configured, settings)
        return NodeKeys(folder, configured, signer.key_id, signer, _pinned(signer, configured), log_signer, log_uri)
    if not _is_as_configured(kept, configured):
        return _reconfigured(folder, kept, configured, settings)
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
    keys.retired = kept["retired"]
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
    kept = _load(settings.wal_dir / node_id / NAME) if node_id is not None else None
    if kept is None or not _is_as_configured(kept, configured) or kept["signer"]["uri"] == kept["configured"]["uri"]:
        return configured
    uri: str = kept["signer"]["uri"]
    return uri if remote_signer.is_remote(uri) else f"file:{_path(uri, configured).absolute()}"


def key_files(folder: Path, configured: str) -> tuple[FileSigner, FileSigner]:
    """The keys of snapshots and of checkpoints in the file of ``folder``, which MUST exist; none is made or changed.

    Raises:
        ConfigurationError: one is not in a file that can be read, or is another key by now.
    """
    kept = _load(folder / NAME)
    assert kept is not None
    found = []
    for name in ("signer", "log_signer"):
        uri = kept[name]["uri"]
        signer = key_file.load(configured if uri == kept["configured"]["uri"] else str(_path(uri, configured)))
        if signer.key_id != kept[name]["key_id"]:
            raise ConfigurationError(f"{signer.path} is not the key that the node of {folder} signs with; name one")
        found.append(signer)
    return found[0], found[1]


def _reconfigured(folder: Path, kept: dict[str, Any], configured: str, settings: Settings) -> NodeKeys:
    """The setting names another key than before: it takes the place of the one that signed."""
    signer = open_signer(configured, settings.signing.read_pin, may_generate=True)
    log_signer, log_uri = _log_signer(signer, configured, settings)
    keys = NodeKeys(folder, configured, signer.key_id, signer, _pinned(signer, configured), log_signer, log_uri)
    keys.retired = kept["retired"]
    _retire_replaced(keys, kept)
    return keys


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


def _load(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = orjson.loads(path.read_bytes())
        for name in ("signer", "log_signer"):
            if PublicKey.of(value[name]["public_key_pem"]).key_id != value[name]["key_id"]:
                raise ValueError(f"{name} is another key than its id says")
        for name in ("configured", "signer", "log_signer"):
            if not all(isinstance(value[name][part], str) for part in ("uri", "key_id")):
                raise ValueError(f"{name} has no uri or key id")
        value["retired"] = [Retired(**item) for item in value["retired"]]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, InvalidInputError) as error:
        raise ConfigurationError(
            f"{path}, which says with what key this node signs, is damaged ({error}); restore it, or move it away and "
            "let signing.key_uri name the key that signs now"
        ) from error
    return value
