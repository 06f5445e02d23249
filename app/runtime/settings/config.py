"""Settings of one node: where they come from, what each may be, what stops the start.

Sources, the first that names a setting wins::

    arguments of ``load_settings`` | environment ``TALLY_...`` | the TOML file

The TOML file is the one ``TALLY_CONFIG`` names, else ``tally.toml`` in the working folder when it is there.
In the environment ``__`` stands for nesting: ``wal.segment_bytes`` is ``TALLY_WAL__SEGMENT_BYTES``. Durations
are ``5s``, ``500ms``, ``7d`` or ``00:00:05``; sizes ``64 MiB`` or a plain number of bytes. A setting nobody
knows is refused like a wrong one, so that a typing error cannot pass for a default.
"""

from __future__ import annotations

import os
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from app.runtime.settings.sections import (
    AuthSettings,
    ExchangeSettings,
    LeaseSettings,
    ReplicationSettings,
    WebhookSettings,
)
from app.runtime.settings.types import (
    PATTERNS_MAX,
    ROOT_PATH_MAX,
    AuthorityUrl,
    CommaSeparated,
    DatabaseUrl,
    Duration,
    HostName,
    JobIdPart,
    KeyPlace,
    ListenAddress,
    Network,
    NodeId,
    RootPath,
    Secret,
    Size,
    SpansUrl,
    TenantsPattern,
    TraceUrl,
    Witness,
    between,
    is_loopback,
    parse_size,
    sized,
)
from app.runtime.settings.words import ENV_PREFIX, explain, unknown_variables
from ledger.errors import ConfigurationError, refuse
from ledger.facts.events import EVENT_FIELDS, JOB_EVENTS
from ledger.names import TENANT_ID, anchored
from signing.policy import WITNESSES_MAX
from terminal.outcome import readable
from terminal.program import locale_fault
from wal.format import BATCH_BODY_BYTES_LIMIT, RECORD_BYTES_LIMIT
from wal.replication.configuration import AckMode

DEFAULT_TOML = Path("tally.toml")
TOML_BYTES_MAX = 1 << 20
"""Largest file of settings that is read."""
AUTHORITIES_MAX = 16
FIRST_EVENT_ENTRIES = 2
"""Entries that a tenant's first event makes: itself, and the record in ``_system`` that the tenant began."""
_RECORD_BYTES_MAX, _BATCH_BYTES_MAX = "16 MiB", "64 MiB"

assert parse_size(_RECORD_BYTES_MAX) == RECORD_BYTES_LIMIT, "the WAL takes no longer record"
assert parse_size(_BATCH_BYTES_MAX) == BATCH_BODY_BYTES_LIMIT, "the WAL takes no longer batch"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, arbitrary_types_allowed=True)


class HttpSettings(_Section):
    """``http.*``: where the service listens, which names it answers to and which proxies it believes, how large a body
    it reads, how many connections it holds and how long a client may stand still."""

    listen: ListenAddress = "127.0.0.1:8080"
    hosts: Annotated[CommaSeparated[HostName], Field(max_length=64)] = []
    trusted_proxies: Annotated[CommaSeparated[Network], Field(max_length=64)] = []
    root_path: Annotated[RootPath, Field(max_length=ROOT_PATH_MAX)] = ""
    body_bytes_max: Annotated[Size, sized("1 KiB", "1 GiB")] = 16 << 20
    connections_max: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    header_timeout: Annotated[Duration, between("100ms", "10m")] = timedelta(seconds=10)
    body_timeout: Annotated[Duration, between("100ms", "10m")] = timedelta(seconds=30)

    @property
    def host(self) -> str:
        """Host part of ``listen``, without the brackets of an IPv6 address."""
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Port part of ``listen``; 0 lets the system choose."""
        return int(self.listen.rpartition(":")[2])

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        return is_loopback(self.host)


class TlsSettings(_Section):
    """``tls.*``: PEM files of the service's certificate and its key; without them it speaks plain HTTP."""

    cert: Path | None = None
    key: Path | None = None

    @model_validator(mode="after")
    def _has_both(self) -> TlsSettings:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together: set both, or none")
        return self


class HlcSettings(_Section):
    """``hlc.*``: the hybrid logical clock."""

    max_clock_skew: Annotated[Duration, between("1ms", "1h")] = timedelta(seconds=5)
    persistence_interval: Annotated[Duration, between("100ms", "1d")] = timedelta(seconds=60)

    @property
    def max_clock_skew_ms(self) -> int:
        """``max_clock_skew`` in milliseconds, as the clock takes it."""
        return int(self.max_clock_skew / timedelta(milliseconds=1))


class WalSettings(_Section):
    """``wal.*``: the write-ahead log. ``dir`` is ``<data_dir>/wal`` when not said.

    A bound on batches or records that is not said is that of a segment where that is less.
    """

    dir: Path | None = None
    ack_mode: AckMode = AckMode.LOCAL_GROUP_SYNC
    batch_timeout_microseconds: Annotated[int, Field(ge=0, le=1_000_000)] = 500
    batch_max_entries: Annotated[int, Field(ge=1, le=100_000)] = 1000
    batch_max_bytes: Annotated[Size, sized("4 KiB", _BATCH_BYTES_MAX)] = 1 << 20
    segment_bytes: Annotated[Size, sized("64 KiB", "16 GiB")] = 64 << 20
    record_bytes_max: Annotated[Size, sized("4 KiB", _RECORD_BYTES_MAX)] = 1 << 20
    backlog_max_entries: Annotated[int, Field(ge=FIRST_EVENT_ENTRIES, le=10_000_000)] = 100_000
    retain: Annotated[Duration, between("0s", "3650d")] = timedelta(days=7)
    scrub_interval: Annotated[Duration, between("1s", "365d")] = timedelta(days=7)

    @model_validator(mode="after")
    def _fits_segment(self) -> WalSettings:
        for name in {"batch_max_bytes", "record_bytes_max"} - self.model_fields_set:
            object.__setattr__(self, name, min(getattr(self, name), self.segment_bytes))
        if max(self.batch_max_bytes, self.record_bytes_max) > self.segment_bytes:
            raise ValueError("segment_bytes must be at least batch_max_bytes and record_bytes_max")
        return self


class ChainSettings(_Section):
    """``chain.*``: when batch snapshots and checkpoints are made, and whether snapshots are signed."""

    batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    batch_interval: Annotated[Duration, between("100ms", "1d")] = timedelta(minutes=5)
    checkpoint_interval: Annotated[Duration, between("1ms", "1h")] = timedelta(milliseconds=500)
    sign_snapshots: bool = True


class AuthoritySettings(_Section):
    """One of ``log.timestamp_authorities``: its address, and a PEM file of certificates that it must be traced to."""

    url: AuthorityUrl
    ca_file: Path | None = None


def _authority(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


class LogSettings(_Section):
    """``log.*``: the tenants' logs, for external readers.

    ``origin`` is the first part of every checkpoint's origin; made once and kept in the database when not said.
    ``policy`` is a tlog-policy file: checkpoints are pushed to its witnesses. ``witnesses`` are verifier keys of more
    whose cosignatures are taken when they are handed in; in the environment separated by commas.
    ``timestamp_authorities`` (RFC 3161) are addresses, or tables of ``url`` and ``ca_file``; in the environment JSON.
    """

    origin: Annotated[str, Field(pattern=r"^[!-*,-~]{1,200}$")] | None = None
    policy: Path | None = None
    witnesses: Annotated[CommaSeparated[Witness], Field(max_length=WITNESSES_MAX)] = []
    timestamp_authorities: Annotated[
        list[Annotated[AuthoritySettings, BeforeValidator(_authority)]], Field(max_length=AUTHORITIES_MAX)
    ] = []
    timestamp_interval: Annotated[Duration, between("1s", "365d")] = timedelta(hours=1)


class SigningSettings(_Section):
    """``signing.key_uri``: ``file:PATH`` or a signer of securesystemslib; a file beside the data when not said.

    ``second`` is the algorithm of a second key, in a file beside it, that signs snapshots and checkpoints too.
    ``root_key`` is the public key, in PEM, that the ledger begins with; this node's own when not said.
    ``uris_allowed`` are folders and beginnings of URIs that a rotation over HTTP may name a key of.
    """

    key_uri: Annotated[str, Field(min_length=1, max_length=2048)] | None = None
    second: Literal["ml-dsa-44"] | None = None
    root_key: Path | None = None
    uris_allowed: Annotated[CommaSeparated[KeyPlace], Field(max_length=32)] = []
    pin: Secret | None = None

    def read_pin(self) -> str:
        """The PIN of an HSM.

        Raises:
            ConfigurationError: there is none.
        """
        if self.pin is None:
            raise ConfigurationError("signing.pin is not set, and the HSM that holds the signing key asks for it")
        return self.pin.get_secret_value()


class BundleSettings(_Section):
    """``bundle.*``: whose bundles may be imported, a PEM file, a folder of them or saved ``/v1/keys`` JSON; how much
    one import may upload, and how much of the WAL's disk imports leave to the WAL."""

    trusted_keys: Path | None = None
    import_bytes_max: Annotated[Size, sized("1 KiB", "1024 GiB")] = 8 << 30
    disk_reserve_bytes: Annotated[Size, sized("0 B", "1024 GiB")] = 1 << 30


class ArchiveSettings(_Section):
    """``archive.*``: the archive that the node fills, how often, and whether its objects are locked.

    ``tally pipeline archive`` and ``tally restore --from archive`` find the archive at ``url`` as well.
    """

    url: Annotated[str, Field(min_length=1, max_length=2048)] | None = None
    interval: Annotated[Duration, between("1s", "1d")] = timedelta(seconds=60)
    lock: Annotated[str, Field(pattern=r"^(none|(governance|compliance):[1-9][0-9]{0,4}d)$")] = "none"

    @model_validator(mode="after")
    def _locks_a_bucket(self) -> ArchiveSettings:
        if self.lock != "none" and not (self.url or "").startswith("s3://"):
            raise ValueError("lock needs an archive in S3: set archive.url to s3://bucket/prefix, or lock to none")
        return self


class RetentionSettings(_Section):
    """``retention.period``, ``retention.minimum``: the policy of tenants that begin at this node; none if not said."""

    period: Annotated[Duration, between("1s", "36500d")] | None = None
    minimum: Annotated[Duration, between("1s", "36500d")] | None = None


class PrivacySettings(_Section):
    """``privacy.master_key_uri``: ``file:PATH``, the only kind today; a file beside the data when not said.

    ``log_reads`` are patterns of the tenants in whose chains reads of their payloads are entries.
    """

    master_key_uri: Annotated[str, Field(min_length=1, max_length=2048)] | None = None
    log_reads: Annotated[CommaSeparated[TenantsPattern], Field(max_length=PATTERNS_MAX)] = []


class VerifySettings(_Section):
    """``verify.*``: when the node verifies its own chains."""

    on_start: bool = True
    interval: Annotated[Duration, between("1s", "365d")] = timedelta(hours=1)
    full_interval: Annotated[Duration, between("1s", "365d")] = timedelta(hours=24)


class WriteSettings(_Section):
    """``write.timeout``: how long a write waits for the level it asked for."""

    timeout: Annotated[Duration, between("1ms", "10m")] = timedelta(seconds=10)


class ReadSettings(_Section):
    """``read.wait``: how long a read waits to become as fresh as it was asked to be."""

    wait: Annotated[Duration, between("0s", "1m")] = timedelta(seconds=2)


class StatsSettings(_Section):
    """``stats.*``: the files of ``POST /v1/stats``. ``dir`` is ``<data_dir>/stats`` when not said."""

    dir: Path | None = None
    bytes_max: Annotated[Size, sized("2 MiB", "1024 GiB")] = 1 << 30
    file_bytes: Annotated[Size, sized("64 KiB", "16 GiB")] = 16 << 20
    file_age: Annotated[Duration, between("100ms", "1d")] = timedelta(minutes=1)
    queue_bytes: Annotated[Size, sized("64 KiB", "1 GiB")] = 16 << 20

    @model_validator(mode="after")
    def _has_room_for_files(self) -> StatsSettings:
        if 2 * self.file_bytes > self.bytes_max:
            raise ValueError("bytes_max must be at least twice file_bytes")
        return self


class QuotaSettings(_Section):
    """``quota.*``: how much of the service one caller, or one tenant, gets. A rate that is not said has no bound.

    Requests and bytes are a second's, and what ``burst`` brings of them may come at once; new tenants are an hour's.
    """

    principal_requests: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    principal_bytes: Annotated[Size, sized("1 KiB", "64 GiB")] | None = None
    tenant_requests: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    tenant_bytes: Annotated[Size, sized("1 KiB", "64 GiB")] | None = None
    burst: Annotated[Duration, between("1s", "1h")] = timedelta(seconds=10)
    new_tenants: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    exports: Annotated[int, Field(ge=1, le=1000)] = 1
    imports: Annotated[int, Field(ge=1, le=1000)] = 1
    verifications: Annotated[int, Field(ge=1, le=1000)] = 1
    watches: Annotated[int, Field(ge=1, le=1_000_000)] = 500


QUOTAS: Final = tuple(name for name in QuotaSettings.model_fields if name != "burst")
"""The quotas there are, by their settings in ``quota.*``."""


class LineageSettings(_Section):
    """``lineage.*``: whose the runs are that OpenLineage tells of, by the namespace of their job."""

    tenants: Annotated[
        dict[Annotated[str, Field(min_length=1, max_length=1024)], Annotated[str, Field(pattern=anchored(TENANT_ID))]],
        Field(max_length=PATTERNS_MAX),
    ] = {}


_MappedField: Any = Literal[("type", *EVENT_FIELDS)]
_EventName: Any = Literal[tuple(JOB_EVENTS)]
_AttributeName = Annotated[str, Field(min_length=1, max_length=256)]


class OtlpSettings(_Section):
    """``otlp.*``: what attributes of log records of OpenTelemetry mean."""

    attributes: dict[_MappedField, _AttributeName] = {}
    types: Annotated[
        dict[Annotated[str, Field(min_length=1, max_length=256)], _EventName], Field(max_length=PATTERNS_MAX)
    ] = {}


class ConsoleSettings(_Section):
    """``console.trace_url``: where the console's links to traces lead, with ``{trace_id}`` for the id."""

    trace_url: TraceUrl | None = None


class TracingSettings(_Section):
    """``tracing.endpoint``: where spans of requests are sent by OTLP/HTTP; nothing is traced when not said."""

    endpoint: SpansUrl | None = None


class TopologySettings(_Section):
    """``topology.*``: what the operator says of the machines below, since the service cannot see it."""

    postgres_survives: Literal["process", "node", "region"] = "process"


class Settings(BaseSettings):
    """Every setting of one node, checked. Immutable."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        validate_default=True,
    )

    data_dir: Path = Path("var")
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Moves the port of ``http.listen``; what ``make run`` uses."""
    node_id: NodeId | None = None
    gate: JobIdPart | None = None
    region: JobIdPart = "local"
    shutdown_grace: Annotated[Duration, between("0s", "10m")] = timedelta(seconds=20)
    database_url: DatabaseUrl | None = None
    migrate_url: DatabaseUrl | None = None
    database_replica_urls: Annotated[CommaSeparated[DatabaseUrl], Field(max_length=16)] = []
    """Hot standbys of ``database_url`` that reads may go to; in the environment separated by commas."""
    database_allow_any_role: bool = False
    http: HttpSettings = HttpSettings()
    tls: TlsSettings = TlsSettings()
    auth: AuthSettings = AuthSettings()
    hlc: HlcSettings = HlcSettings()
    wal: WalSettings = WalSettings()
    chain: ChainSettings = ChainSettings()
    log: LogSettings = LogSettings()
    signing: SigningSettings = SigningSettings()
    bundle: BundleSettings = BundleSettings()
    archive: ArchiveSettings = ArchiveSettings()
    retention: RetentionSettings = RetentionSettings()
    privacy: PrivacySettings = PrivacySettings()
    verify: VerifySettings = VerifySettings()
    write: WriteSettings = WriteSettings()
    read: ReadSettings = ReadSettings()
    stats: StatsSettings = StatsSettings()
    quota: QuotaSettings = QuotaSettings()
    topology: TopologySettings = TopologySettings()
    replication: ReplicationSettings = ReplicationSettings()
    lease: LeaseSettings = LeaseSettings()
    exchange: ExchangeSettings = ExchangeSettings()
    webhooks: WebhookSettings = WebhookSettings()
    lineage: LineageSettings = LineageSettings()
    otlp: OtlpSettings = OtlpSettings()
    console: ConsoleSettings = ConsoleSettings()
    tracing: TracingSettings = TracingSettings()

    @model_validator(mode="after")
    def _fit_together(self) -> Settings:
        is_open = self.auth.mode == "none" and not self.auth.allow_open
        no_authentication = (
            "and there is no authentication: set auth.mode to tokens or oidc, listen on 127.0.0.1 without a proxy, or "
            "set auth.allow_open to true"
        )
        refuse(
            ValueError,
            (
                is_open and not self.http.is_loopback,
                f"http.listen is {self.http.listen}, which others can reach, {no_authentication}",
            ),
            (
                is_open and bool(self.http.trusted_proxies),
                f"http.trusted_proxies names a proxy, through which others can reach the service, {no_authentication}",
            ),
            (
                self.wal.ack_mode.is_replicated and not self.replication.members,
                f"wal.ack_mode is {self.wal.ack_mode}: set replication.members to the safekeepers",
            ),
            (
                bool(self.exchange.peers) and self.bundle.trusted_keys is None,
                "exchange.peers needs bundle.trusted_keys: the keys with which the peers sign",
            ),
            (
                self.region in {peer.region for peer in self.exchange.peers},
                f"exchange.peers has a ledger of region {self.region}, which is this one's",
            ),
            (
                self.auth.client_ca is not None and self.tls.cert is None,
                "auth.client_ca needs tls.cert and tls.key: certificates are shown over TLS only",
            ),
        )
        return self

    @model_validator(mode="after")
    def _has_names_that_are_text(self) -> Settings:
        named = (self.data_dir, self.wal_dir, self.stats_dir, self.signing_key_uri, self.privacy_master_key_uri)
        for each in map(str, named):
            if readable(each) != each:
                raise ValueError(
                    f"the folder or key {readable(each)} cannot be written down: "
                    f"{locale_fault() or 'it is not valid UTF-8'}"
                )
        return self

    @property
    def tokens_in_the_clear(self) -> bool:
        """Whether others can reach the service and nothing says that what they send is encrypted."""
        return not (self.auth.mode == "none" or self.http.is_loopback or self.tls.cert or self.http.trusted_proxies)

    @property
    def listen_port(self) -> int:
        """Port to listen on; 0 lets the system choose."""
        return self.http.port if self.port is None else self.port

    @property
    def event_bytes_max(self) -> int:
        """Longest body that describes one event."""
        return min(self.http.body_bytes_max, self.wal.record_bytes_max)

    @property
    def wal_dir(self) -> Path:
        """Folder that holds one WAL folder a node."""
        return self.wal.dir or self.data_dir / "wal"

    @property
    def stats_dir(self) -> Path:
        """Folder that holds one folder of stats files a node."""
        return self.stats.dir or self.data_dir / "stats"

    @property
    def signing_key_uri(self) -> str:
        """Where the signing key is; a file that is made on the first start when nothing was said."""
        return self.signing.key_uri or f"file:{self.data_dir / 'keys' / 'signing.pem'}"

    @property
    def privacy_master_key_uri(self) -> str:
        """Where the master key is; a file that is made when private fields are first declared, if nothing was said."""
        return self.privacy.master_key_uri or f"file:{self.data_dir / 'keys' / 'privacy-master.key'}"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then environment, then the TOML file; nothing else."""
        sources, toml = (init_settings, env_settings), _toml_path()
        return sources if toml is None else (*sources, TomlConfigSettingsSource(settings_cls, toml))


def load_settings(**overrides: object) -> Settings:
    """Settings from arguments, environment and file.

    Raises:
        ConfigurationError: one is wrong or unknown; the text names each such setting and what it may be.
    """
    if unknown := unknown_variables(Settings):
        raise ConfigurationError("; ".join(unknown))
    try:
        return Settings(**overrides)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ConfigurationError("; ".join(explain(error, Settings))) from None
    except SettingsError as error:
        raise ConfigurationError(
            f"the environment cannot be read: {error}: tables, and lists of them, are JSON there ({error.__cause__})"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{_toml_path()} is not TOML: {error}") from None
    except OSError as error:
        raise ConfigurationError(f"the file of settings cannot be read: {error}") from None


def _toml_path() -> Path | None:
    named = os.environ.get("TALLY_CONFIG")
    if not named and not DEFAULT_TOML.is_file():
        return None
    path = Path(named or DEFAULT_TOML)
    if not path.is_file():
        raise ConfigurationError(f"TALLY_CONFIG names {named}, which is not a file")
    if path.stat().st_size > TOML_BYTES_MAX:
        raise ConfigurationError(f"{path} has more than {TOML_BYTES_MAX} bytes, too many for settings")
    return path
