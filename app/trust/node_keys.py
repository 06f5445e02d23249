"""A node's durable state about keys: ``<wal folder>/keys``, one JSON object, replaced whole (docs/formats/keys.md).

::

    configured   uri and key id of signing.key_uri when this was written. While the setting is the same, this file
                 decides, so a rotation outlives a restart; a changed setting is itself a rotation
    signer       uri, key id and public key of the key that signs snapshots
    log_signer   the same of the Ed25519 key that signs checkpoints: the same key if it is one in a file
    second       the same of the ML-DSA-44 key that signs both beside these. Without ``signing.second`` it signs
                 nothing, and its place is kept
    retired      keys that were replaced, which the ledger may not record yet
    root_key_id  the ledger's first key, once the node has seen it. An attacker who controls the database can replace
                 the whole chain of _system by one that begins with his own key: the node rejects that chain
    ended        by key id, the ends and revocations that the node has seen in the chain. They stay in force if the
                 database is edited or set back

A name without folder is a file beside the configured key. The public key is stored so that a node starts, and chains,
while an HSM or a key service is away; only a signer that is used for the first time must answer.

*Keys that a caller names.* A caller may name only keys that ``signing.uris_allowed`` covers. An entry of it is a folder
of key files, a prefix of a URI outside of files that ends with ``:`` or ``/``, or such a URI itself. A file is accepted
if it lies in the folder itself, no link leads out of it, and this user owns it. Every other file gets the same answer,
whether or not it exists and whatever it holds; the log has the reason.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from app.runtime.logs import log
from app.runtime.settings.config import Settings
from app.runtime.state import kept_files
from ledger.decoding import decode
from ledger.errors import ConfigurationError, InvalidInputError, SigningUnavailableError, reported_as
from ledger.hlc import Clock, Hlc
from signing import private_keys
from signing.files import path_of, read_regular
from signing.keys import ALGORITHMS, ML_DSA_44, Keyring, PublicKey, Signer
from signing.private_keys import FileSigner
from wal.segment import store_file

NAME = "keys"


class Retired(msgspec.Struct, frozen=True):
    """Key ``key_id`` is valid up to ``not_after_ms``, an HLC time, and ``successor_id`` replaced it.

    ``not_after_ms`` is None until a start that found a changed setting has read what the key signed last. ``uri`` is
    the place of the key, as in the file. ``statement`` is the envelope in which it vouches for the successor, None
    while there is none.
    """

    key_id: str
    successor_id: str
    successor_pem: str
    not_after_ms: int | None
    uri: str | None = None
    statement: dict[str, Any] | None = None

    @classmethod
    def by(cls, successor: Signer, key_id: str, not_after_ms: int | None, uri: str | None) -> Retired:
        """Key ``key_id`` of ``uri``, replaced by ``successor``."""
        return cls(key_id, successor.key_id, successor.public_key.public_key_pem, not_after_ms, uri)


class KeyBounds(msgspec.Struct, frozen=True):
    """The earliest end and the earliest revocation of one key, as an HLC."""

    not_after: Annotated[datetime, Meta(tz=True)] | None
    revoked_from_hlc: str | None

    @classmethod
    def of(cls, key: PublicKey) -> KeyBounds:
        """The bounds of ``key``."""
        return cls(key.not_after, None if key.revoked_from_hlc is None else key.revoked_from_hlc.text())

    def narrow(self, key: PublicKey) -> PublicKey:
        """``key``, limited to these bounds."""
        revoked = None if self.revoked_from_hlc is None else Hlc.parse(self.revoked_from_hlc)
        return key.narrowed(PublicKey.of(key.material, not_after=self.not_after, revoked_from_hlc=revoked))


class _Configured(msgspec.Struct, frozen=True):
    uri: str
    key_id: str


class _Signer(msgspec.Struct, frozen=True):
    uri: str
    key_id: str
    public_key_pem: str


class _KeysFile(msgspec.Struct, frozen=True):
    """The file."""

    configured: _Configured
    signer: _Signer
    log_signer: _Signer
    retired: list[Retired]
    root_key_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")] | None = None
    ended: dict[str, KeyBounds] = {}
    second: _Signer | None = None

    def signers(self) -> list[_Signer]:
        """All that sign, or signed last."""
        return [self.signer, self.log_signer, *([] if self.second is None else [self.second])]


@dataclass
class NodeKeys:
    """The keys of one node. A caller that changes them MUST ``store`` before anything is signed with them. The root and
    the ended keys that the node has seen in the ledger are stored without a call. Belongs to one event loop.
    """

    folder: Path
    configured_uri: str
    configured_key_id: str
    signer: LocalOrRemote
    log_signer: FileSigner
    second: FileSigner | None = None
    retired: list[Retired] = field(default_factory=list)
    root_key_id: str | None = None
    """None while this node has seen no root."""
    ended: dict[str, KeyBounds] = field(default_factory=dict)
    """By key id; never changed, only replaced."""

    def __post_init__(self) -> None:
        self._stored: _KeysFile | None = None
        """The content of the file, None while there is none."""
        self._writing = threading.Lock()

    @property
    def snapshot_signers(self) -> list[Signer]:
        """The keys that sign snapshots, the first one first."""
        return [self.signer, *([] if self.second is None else [self.second])]

    @property
    def checkpoint_signers(self) -> list[Signer]:
        """The keys that sign checkpoints, the first one first."""
        return [self.log_signer, *([] if self.second is None else [self.second])]

    def signers(self) -> list[Signer]:
        """The keys this node signs with, each once."""
        return list({each.key_id: each for each in (self.signer, *self.checkpoint_signers)}.values())

    def store(self) -> None:
        """Write the file; on return it survives a crash."""
        before = None if self._stored is None else self._stored.second
        self._write(
            _KeysFile(
                configured=_Configured(self.configured_uri, self.configured_key_id),
                signer=self._described(self.signer),
                log_signer=self._described(self.log_signer),
                retired=list(self.retired),
                second=before if self.second is None else self._described(self.second),
            )
        )

    # --- what was seen of the ledger --------------------------------------------------------------

    def expect_root(self, root: PublicKey | None) -> None:
        """Set the ledger's root to ``root``, if the settings name one.

        Raises:
            ConfigurationError: the ledger has another root.
        """
        if root is not None and self.root_key_id not in (None, root.key_id):
            raise ConfigurationError(
                f"signing.root_key is key {root.key_id}, but the ledger of this node began with {self.root_key_id}; a "
                "root key never changes"
            )
        self.root_key_id = root.key_id if root is not None else self.root_key_id

    async def learn_root(self, key_id: str) -> None:
        """Store ``key_id`` as the root, unless one is known."""
        if self.root_key_id is None:
            self.root_key_id = key_id
        await self._remember()

    async def narrowed(self, keys: Mapping[str, PublicKey]) -> dict[str, PublicKey]:
        """``keys`` by id, limited to the bounds seen before; their bounds are remembered."""
        narrow = {key_id: self.bounded(key) for key_id, key in keys.items()}
        bounds = {key_id: KeyBounds.of(key) for key_id, key in narrow.items()}
        self.ended = self.ended | {key_id: each for key_id, each in bounds.items() if each != KeyBounds(None, None)}
        await self._remember()
        return narrow

    def bounded(self, key: PublicKey) -> PublicKey:
        """``key``, limited to the bounds that this node has seen."""
        return self.ended[key.key_id].narrow(key) if key.key_id in self.ended else key

    async def _remember(self) -> None:
        """Write the observed root and bounds beside the signers of the file. If there is no file yet, the first
        ``store`` writes them."""
        stored = self._stored
        if stored is not None and (stored.root_key_id, stored.ended) != (self.root_key_id, self.ended):
            try:
                await asyncio.to_thread(self._write, None)
            except OSError as error:
                log.error("seen_keys_not_stored", error=str(error))

    def _write(self, signing: _KeysFile | None) -> None:
        """Write the file: the signers of ``signing``, if given, and the observed root and bounds."""
        with self._writing:
            signing = signing or self._stored
            assert signing is not None
            file = msgspec.structs.replace(signing, root_key_id=self.root_key_id, ended=self.ended)
            _store(self.folder, file)
            self._stored = file

    def uri_of(self, signer: LocalOrRemote) -> str:
        """The key's name in the file: the setting, a name beside the key of the setting, or its URI."""
        if isinstance(signer, private_keys.RemoteSigner):
            return signer.key_uri
        path = signer.path.absolute()
        if private_keys.is_remote(self.configured_uri):
            return str(path)
        configured = path_of(self.configured_uri).absolute()
        if path == configured:
            return self.configured_uri
        return path.name if path.parent == configured.parent else str(path)

    def _described(self, signer: LocalOrRemote) -> _Signer:
        return _Signer(self.uri_of(signer), signer.key_id, signer.public_key.public_key_pem)


def last_signed_ms(clock: Clock, now_ms: int, signed_ms: int) -> int:
    """An HLC time that is not before that of anything a key of this node signed.

    ``signed_ms`` is the highest time that a snapshot in the database names. An attacker may have written a later one,
    so it is capped by the allowed clock skew of the ledger.
    """
    floor_ms = max(now_ms, clock.last.physical_ms)
    return max(floor_ms, min(signed_ms, floor_ms + clock.max_clock_skew_ms))


def open_keys(folder: Path, settings: Settings) -> NodeKeys:
    """The keys that the node of ``folder`` signs with, by its file or the settings. Missing keys are made if that is
    allowed. Nothing is stored. Blocks on a new signer.

    Raises:
        ConfigurationError: a key cannot be used, or the file is damaged.
        SigningUnavailableError: a signer that was never used before does not answer.
    """
    configured = settings.signing_key_uri
    pin = settings.signing.read_pin
    if (kept := _load(folder)) is None or not _is_as_configured(kept, configured):
        # The first start, or the setting names a new key, which replaces the one that signed.
        signer = open_signer(configured, pin, may_generate=True)
        configured_key_id = signer.key_id
        log_signer = log_signer_of(signer, settings)
    else:
        is_configured = kept.signer.uri == kept.configured.uri
        signer = _reopened(kept.signer, configured, pin, may_generate=is_configured)
        if kept.log_signer.key_id == kept.signer.key_id:
            log_signer = log_signer_of(signer, settings)
        else:
            log_signer = private_keys.load_or_generate(str(file_of(kept.log_signer.uri, configured)))
        configured_key_id = signer.key_id if is_configured else kept.configured.key_id
    second = None if settings.signing.second is None else _second_signer(kept, settings)
    keys = NodeKeys(folder, configured, configured_key_id, signer, log_signer, second)
    if kept is not None:
        keys.root_key_id, keys.ended, keys.retired = kept.root_key_id, kept.ended, list(kept.retired)
        keys._stored = kept
        # Keys that no longer sign.
        replaced: list[tuple[_Signer, Signer]] = [(kept.signer, signer), (kept.log_signer, log_signer)]
        if kept.second is not None and second is not None:
            replaced.append((kept.second, second))
        held = {each.key_id for each in keys.signers()} | {each.key_id for each in keys.retired}
        for old, successor in replaced:
            if old.key_id not in held:
                held.add(old.key_id)
                keys.retired.append(Retired.by(successor, old.key_id, None, old.uri))
    return keys


def _second_signer(kept: _KeysFile | None, settings: Settings) -> FileSigner:
    """The second key, made if there is none. The place of the last one stays, wherever the first key is now."""
    configured = settings.signing_key_uri
    if kept is None or kept.second is None:
        return private_keys.second_signer(str(second_key_beside(configured, settings)), may_generate=True)
    path = file_of(kept.second.uri, configured if _is_as_configured(kept, configured) else kept.configured.uri)
    if not path.exists():
        log.error("second_key_lost", key_id=kept.second.key_id, path=str(path), done="another one takes its place")
    return private_keys.second_signer(str(path), may_generate=True)


def uri_in_use(settings: Settings) -> str:
    """URI of the key that the node of the settings signs with now, after any rotation; nothing is opened or made.

    Raises:
        ConfigurationError: the node's file of keys is damaged.
        StartRefusedError: the identity of the node cannot be read.
    """
    configured = settings.signing_key_uri
    node_id = settings.node_id or kept_files.kept_node_id(settings.wal_dir)
    kept = _load(settings.wal_dir / node_id) if node_id is not None else None
    if kept is None or not _is_as_configured(kept, configured) or kept.signer.uri == kept.configured.uri:
        return configured
    uri = kept.signer.uri
    return uri if private_keys.is_remote(uri) else f"file:{file_of(uri, configured).absolute()}"


def key_files(folder: Path, configured: str) -> tuple[FileSigner, FileSigner]:
    """The keys of snapshots and of checkpoints in the file of ``folder``, which MUST exist; none is made or changed.

    Raises:
        ConfigurationError: one is not in a readable file, or the file now holds another key.
    """
    kept = _load(folder)
    assert kept is not None
    found = []
    for each in (kept.signer, kept.log_signer):
        signer = private_keys.load(
            configured if each.uri == kept.configured.uri else str(file_of(each.uri, configured))
        )
        if signer.key_id != each.key_id:
            raise ConfigurationError(f"{signer.path} is not the key that the node of {folder} signs with; name one")
        found.append(signer)
    return found[0], found[1]


def retired_signer(item: Retired, keys: NodeKeys, pin: private_keys.PinSource) -> LocalOrRemote | None:
    """The retired key, None if it is no longer available. Blocks."""
    if item.uri is None:
        return None
    try:
        if private_keys.is_remote(item.uri):
            signer = open_signer(item.uri, pin, may_generate=False)
        else:
            signer = private_keys.load(str(file_of(item.uri, keys.configured_uri)))
    except (ConfigurationError, SigningUnavailableError):
        return None
    return signer if signer.key_id == item.key_id else None


def _is_as_configured(kept: _KeysFile, configured: str) -> bool:
    """Whether the setting names what it named before; a key file that was moved is the same key."""
    return kept.configured.uri == configured or (
        not private_keys.is_remote(configured)
        and path_of(configured).exists()
        and bool(private_keys.load(configured).key_id == kept.configured.key_id)
    )


def _reopened(described: _Signer, configured: str, pin: private_keys.PinSource, *, may_generate: bool) -> LocalOrRemote:
    """The signer that the node used last."""
    uri = described.uri
    if private_keys.is_remote(uri):
        return private_keys.RemoteSigner(uri, PublicKey.of(described.public_key_pem), pin)
    return (
        private_keys.load_or_generate(configured) if may_generate else private_keys.load(str(file_of(uri, configured)))
    )


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
    """Let the node of ``folder`` learn the root again, as a fork of the log may have lost it."""
    if (kept := _load(folder)) is not None:
        _store(folder, msgspec.structs.replace(kept, root_key_id=None))


def _store(folder: Path, file: _KeysFile) -> None:
    store_file(folder / NAME, msgspec.json.format(msgspec.json.encode(file)))


def _load(folder: Path) -> _KeysFile | None:
    try:
        file = decode(read_regular(folder / NAME), _KeysFile)
        for each in file.signers():
            if PublicKey.of(each.public_key_pem).key_id != each.key_id:
                raise InvalidInputError(f"key {each.key_id} is another key than its id says")
        for bounds in file.ended.values():
            Hlc.parse(bounds.revoked_from_hlc or "0:0:n")
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeError, InvalidInputError) as error:
        raise ConfigurationError(
            f"{folder / NAME}, which says with what key this node signs, is damaged ({error}); restore it, or, once "
            "tally verify has found the chain of _system whole, move it away and let signing.key_uri name the key that "
            "signs now"
        ) from error
    return file


LOG_KEY_NAME, SECOND_KEY_NAME = "log-key", ML_DSA_44
"""File names, without suffix, of a log key and a second key that lie beside no key file."""

LocalOrRemote = FileSigner | private_keys.RemoteSigner


def open_signer(uri: str, pin: private_keys.PinSource, *, may_generate: bool) -> LocalOrRemote:
    """The signer that ``uri`` names. Blocks if the key is not in a file, while its public key is fetched.

    Raises:
        ConfigurationError: the key cannot be used.
        SigningUnavailableError: the signer does not answer.
    """
    if private_keys.is_remote(uri):
        return private_keys.fetch(uri, pin)
    return private_keys.load_or_generate(uri) if may_generate else private_keys.load(uri)


def log_signer_of(signer: LocalOrRemote, settings: Settings) -> FileSigner:
    """The key of checkpoints for ``signer``: the same if possible, else one in its own file."""
    if isinstance(signer, FileSigner):
        return private_keys.log_signer(signer)
    return private_keys.load_or_generate(str(settings.data_dir / "keys" / f"{LOG_KEY_NAME}.pem"))


def new_key_path(configured: str) -> Path:
    """Path for a new key beside the configured one, named by the time."""
    path = path_of(configured)
    return path.with_name(f"{path.stem}-{time.time_ns() // 1_000_000}{path.suffix}")


def new_key_beside(configured: str, settings: Settings, name: str) -> Path:
    """Path for a new log key or second key, as ``name`` says: beside the configured key, else below ``data_dir``."""
    if private_keys.is_remote(configured):
        return settings.data_dir / "keys" / f"{name}-{time.time_ns() // 1_000_000}.pem"
    path = path_of(configured)
    return path.with_name(f"{path.stem}.{name}-{time.time_ns() // 1_000_000}.pem")


def second_key_beside(configured: str, settings: Settings) -> Path:
    """Path of the first second key: beside the configured key, else below ``data_dir``."""
    if private_keys.is_remote(configured):
        return settings.data_dir / "keys" / f"{SECOND_KEY_NAME}.pem"
    path = path_of(configured)
    return path.with_name(f"{path.name}.{SECOND_KEY_NAME}.pem")


def file_of(uri: str, configured: str) -> Path:
    """The file of ``uri``; a bare name is beside the configured key."""
    path = path_of(uri)
    if path.parent == Path() and not uri.startswith("file:") and not private_keys.is_remote(configured):
        return path_of(configured).with_name(path.name)
    return path


# --- named by a caller ----------------------------------------------------------------------------


def open_named(
    uri: str, allowed: Sequence[str], pin: private_keys.PinSource, algorithms: Collection[str] = ALGORITHMS
) -> LocalOrRemote:
    """The signer that a caller named by ``uri``; if it is in a file, of one of ``algorithms``. Blocks.

    Raises:
        InvalidInputError: it may not be named, or there is no such key.
        SigningUnavailableError: it may be named, but the signer does not answer.
    """
    if private_keys.is_remote(uri):
        if not any(_covers(entry, uri) for entry in allowed):
            raise _refused()
        with reported_as(partial(InvalidInputError, path=("new_key_uri",)), "new_key_uri", ConfigurationError):
            return open_signer(uri, pin, may_generate=False)
    try:
        return private_keys.load(str(_named_file(uri, allowed)), algorithms)
    except (ConfigurationError, OSError, RuntimeError) as error:
        log.warning("new_key_refused", uri=uri, reason=str(error))
        raise _refused() from None


def _covers(entry: str, uri: str) -> bool:
    """Whether the entry is this URI outside of files, or a prefix of it."""
    entry, uri = (scheme.lower() + ":" + rest for scheme, _, rest in (each.partition(":") for each in (entry, uri)))
    return uri == entry or (entry.endswith((":", "/")) and uri.startswith(entry))


def _named_file(uri: str, allowed: Sequence[str]) -> Path:
    """The file that the URI names.

    Raises:
        ConfigurationError: the caller may name no such file.
        OSError, RuntimeError: it cannot be checked.
    """
    path = Path(os.path.abspath(path_of(uri)))
    folders = [Path(os.path.abspath(path_of(entry))) for entry in allowed if not private_keys.is_remote(entry)]
    if path.parent not in folders:
        raise ConfigurationError("it lies in no folder of signing.uris_allowed")
    real = path.resolve(strict=True)
    if real.parent != path.parent.resolve():
        raise ConfigurationError(f"it leads to {real}")
    if real.stat().st_uid != os.geteuid():
        raise ConfigurationError(f"user {real.stat().st_uid} owns it, not this service's")
    return real


def _refused() -> InvalidInputError:
    return InvalidInputError(
        "new_key_uri: signing.uris_allowed leaves no such key to be named; its folder needs the key in a file of this "
        "service's user, mode 0600; the log says more",
        ("new_key_uri",),
    )
