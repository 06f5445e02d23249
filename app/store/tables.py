"""The declared schema: what the migrations must have made, said once more and compared by a test.

Triggers, grants, partitions and the view, which this form cannot say, are checked on their own.
``migrations/sql`` has the reasons beside the columns.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSON

SCHEMA = "scheduler"
LOG_PARTITIONS = 8

metadata = MetaData(schema=SCHEMA)


def _bytewise(name: str, *, nullable: bool = False, primary_key: bool = False) -> Column[str]:
    """Text whose order is that of its bytes."""
    return Column(name, Text(collation="C"), nullable=nullable, primary_key=primary_key)


def _number(name: str, *constraints: CheckConstraint, nullable: bool = False) -> Column[int]:
    return Column(name, BigInteger, *constraints, nullable=nullable)


def _time(name: str, *, nullable: bool = False, now: bool = False) -> Column[object]:
    return Column(name, DateTime(timezone=True), nullable=nullable, server_default=text("now()") if now else None)


def _only(table: str) -> Column[bool]:
    """Primary key of a table that has one row."""
    return Column(
        "only",
        Boolean,
        CheckConstraint('"only"', name=f"{table}_one_row"),
        primary_key=True,
        server_default=text("true"),
    )


ledger_identity = Table(
    "ledger_identity",
    metadata,
    _only("ledger_identity"),
    Column("log_origin", Text, nullable=False),
    _time("created_at", now=True),
)

session_secret = Table(
    "session_secret",
    metadata,
    _only("session_secret"),
    Column("secret", LargeBinary, CheckConstraint("length(secret) = 32", name="session_secret_length"), nullable=False),
    _time("created_at", now=True),
)

chain_heads = Table(
    "chain_heads",
    metadata,
    _bytewise("tenant_id", primary_key=True),
    _number("head_seq", CheckConstraint("head_seq >= 0", name="chain_heads_seq")),
    _bytewise("head_chain_link", nullable=True),
    _bytewise("head_hlc", nullable=True),
    _time("updated_at", now=True),
    CheckConstraint("(head_seq = 0) = (head_chain_link IS NULL)", name="chain_heads_link"),
    CheckConstraint("(head_seq = 0) = (head_hlc IS NULL)", name="chain_heads_hlc"),
    postgresql_with={"fillfactor": 50},
)

scheduler_log = Table(
    "scheduler_log",
    metadata,
    Column("id", BigInteger, Identity(always=True, cache=100)),
    _bytewise("tenant_id"),
    _number("seq"),
    _bytewise("t_hlc"),
    _number("hlc_physical"),
    _number("hlc_logical"),
    _bytewise("hlc_node"),
    _bytewise("job_id"),
    _bytewise("action"),
    Column("link_version", SmallInteger, nullable=False),
    _bytewise("prev_chain_link", nullable=True),
    _bytewise("chain_link"),
    _bytewise("payload_digest"),
    Column("payload", JSON, nullable=False),
    Column("origin", JSON),
    _time("created_at", now=True),
    PrimaryKeyConstraint("tenant_id", "seq", name="scheduler_log_pkey"),
    UniqueConstraint(
        "tenant_id",
        "prev_chain_link",
        name="scheduler_log_prev_chain_link",
        postgresql_nulls_not_distinct=True,
    ),
    UniqueConstraint("tenant_id", "hlc_physical", "hlc_logical", "hlc_node", name="scheduler_log_hlc"),
    CheckConstraint("seq >= 1", name="scheduler_log_seq"),
    Index("scheduler_log_job", "tenant_id", "job_id", "seq"),
    postgresql_partition_by="HASH (tenant_id)",
)

batch_snapshot = Table(
    "batch_snapshot",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    _bytewise("tenant_id"),
    _number("from_seq"),
    _number("to_seq"),
    _bytewise("snapshot_hlc"),
    _bytewise("from_chain_link"),
    _bytewise("to_chain_link"),
    _number("entry_count"),
    _bytewise("merkle_root"),
    Column("dsse_envelope", JSON, nullable=False),
    _time("created_at", now=True),
    UniqueConstraint("tenant_id", "from_seq", name="batch_snapshot_from_seq"),
    CheckConstraint("from_seq >= 1 AND to_seq >= from_seq", name="batch_snapshot_range"),
)

merkle_head = Table(
    "merkle_head",
    metadata,
    _bytewise("tenant_id", primary_key=True),
    _number("tree_size", CheckConstraint("tree_size >= 0", name="merkle_head_size")),
    _bytewise("root_hash"),
    Column("checkpoint", Text),
    _time("signed_at", nullable=True),
    postgresql_with={"fillfactor": 50},
)

merkle_tile = Table(
    "merkle_tile",
    metadata,
    _bytewise("tenant_id", primary_key=True),
    Column("level", SmallInteger, primary_key=True, autoincrement=False),
    Column("tile_index", BigInteger, primary_key=True, autoincrement=False),
    Column("hashes", LargeBinary, nullable=False),
)

checkpoint_cosignature = Table(
    "checkpoint_cosignature",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    _bytewise("tenant_id"),
    _bytewise("witness"),
    _number("tree_size", CheckConstraint("tree_size >= 1", name="checkpoint_cosignature_size")),
    _time("cosigned_at"),
    _bytewise("note"),
    _time("created_at", now=True),
    UniqueConstraint("tenant_id", "witness", "tree_size", "cosigned_at", name="checkpoint_cosignature_once"),
    Index("checkpoint_cosignature_size_of", "tenant_id", "tree_size"),
)

checkpoint_timestamp = Table(
    "checkpoint_timestamp",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    _bytewise("tenant_id"),
    _bytewise("authority"),
    _number("tree_size", CheckConstraint("tree_size >= 1", name="checkpoint_timestamp_size")),
    _time("generated_at"),
    _bytewise("note"),
    Column("response", LargeBinary, nullable=False),
    _time("created_at", now=True),
    UniqueConstraint("tenant_id", "authority", "tree_size", name="checkpoint_timestamp_once"),
)

jobs = Table(
    "jobs",
    metadata,
    _bytewise("tenant_id", primary_key=True),
    _bytewise("job_id", primary_key=True),
    _bytewise("status"),
    _number("created_physical", nullable=True),
    _number("created_logical", nullable=True),
    _bytewise("created_node", nullable=True),
    _number("last_seq"),
    Column("seqs", ARRAY(BigInteger), nullable=False),
    _time("updated_at", now=True),
    Index("jobs_newest", "tenant_id", "created_physical", "created_logical"),
    Index("jobs_newest_by_status", "tenant_id", "status", "created_physical", "created_logical"),
    postgresql_with={"fillfactor": 90},
)

follower_positions = Table(
    "follower_positions",
    metadata,
    _bytewise("follower", primary_key=True),
    _bytewise("tenant_id", primary_key=True),
    _number("seq", CheckConstraint("seq >= 0", name="follower_positions_seq")),
    postgresql_with={"fillfactor": 50},
)

idempotency = Table(
    "idempotency",
    metadata,
    _bytewise("tenant_id", primary_key=True),
    Column("route", SmallInteger, primary_key=True, autoincrement=False),
    _bytewise("key", primary_key=True),
    Column("line", Integer, primary_key=True, autoincrement=False),
    Column("body_digest", LargeBinary, nullable=False),
    _number("seq"),
    _number("epoch"),
    _number("lsn"),
    _time("created_at", now=True),
    Index("idempotency_created_at", "created_at"),
)

wal_positions = Table(
    "wal_positions",
    metadata,
    _bytewise("node_id", primary_key=True),
    _bytewise("wal_id"),
    _number("epoch"),
    _number("chained_lsn", CheckConstraint("chained_lsn >= 0", name="wal_positions_chained_lsn")),
    _number("seen_durable_lsn", CheckConstraint("seen_durable_lsn >= 0", name="wal_positions_seen_durable_lsn")),
    _time("updated_at", now=True),
    postgresql_with={"fillfactor": 50},
)

wal_epochs = Table(
    "wal_epochs",
    metadata,
    _bytewise("node_id", primary_key=True),
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    _number("end_lsn"),
)

job_id_claims = Table(
    "job_id_claims",
    metadata,
    _bytewise("region", primary_key=True),
    _bytewise("gate", primary_key=True),
    _bytewise("node_id"),
)

signing_keys = Table(
    "signing_keys",
    metadata,
    _bytewise("key_id", primary_key=True),
    Column("algorithm", Text, nullable=False),
    Column("public_key_pem", Text, nullable=False),
    _time("not_before"),
    _time("not_after", nullable=True),
    _bytewise("revoked_from_hlc", nullable=True),
    _bytewise("node_id"),
    Column("signs_snapshots", Boolean, nullable=False, server_default=text("false")),
    Column("signs_checkpoints", Boolean, nullable=False, server_default=text("false")),
    Column("revocation_reason", Text),
)

heartbeat = Table("heartbeat", metadata, _only("heartbeat"), _time("beat_at"), postgresql_with={"fillfactor": 50})

bundle_import = Table(
    "bundle_import",
    metadata,
    _bytewise("set_digest", primary_key=True),
    _number("bundles"),
    _number("entries"),
    Column("from_seqs", JSON, nullable=False),
    _number("position"),
    _number("imported"),
    _number("duplicates"),
    _number("jobs_changed"),
    Column("conflicts", JSON, nullable=False),
    _bytewise("node_id"),
    _time("began_at", now=True),
    _time("ended_at", nullable=True),
    CheckConstraint(
        "position <= entries AND imported + duplicates = position",
        name="bundle_import_position",
    ),
)

privacy_state = Table(
    "privacy_state",
    metadata,
    _only("privacy_state"),
    _number("revision"),
    _bytewise("master_key_id"),
    Column("wrapped_secret", LargeBinary, nullable=False),
    _time("updated_at", now=True),
    postgresql_with={"fillfactor": 50},
)

private_fields = Table(
    "private_fields",
    metadata,
    _bytewise("tenant_id", primary_key=True),
    Column("fields", JSON, nullable=False),
    _bytewise("subject", nullable=True),
    _number("revision"),
    _time("updated_at", now=True),
)

subject_keys = Table(
    "subject_keys",
    metadata,
    _bytewise("tenant_id", primary_key=True),
    _bytewise("key_id", primary_key=True),
    Column("subject_tag", LargeBinary, nullable=False),
    Column("wrapped_key", LargeBinary),
    _time("created_at", now=True),
    _time("erased_at", nullable=True),
    _number("erased_revision", nullable=True),
    CheckConstraint("(wrapped_key IS NULL) = (erased_at IS NOT NULL)", name="subject_keys_erased"),
    CheckConstraint("(erased_at IS NULL) = (erased_revision IS NULL)", name="subject_keys_erased_revision"),
    Index(
        "subject_keys_living", "tenant_id", "subject_tag", unique=True, postgresql_where=text("wrapped_key IS NOT NULL")
    ),
    Index("subject_keys_subject", "tenant_id", "subject_tag"),
    Index("subject_keys_erased_since", "erased_revision", postgresql_where=text("erased_revision IS NOT NULL")),
)

privacy_records = Table(
    "privacy_records",
    metadata,
    _bytewise("tenant_id", primary_key=True),
    Column("revision", BigInteger, primary_key=True, autoincrement=False),
    _bytewise("action"),
    Column("facts", JSON, nullable=False),
    _bytewise("node_id"),
    _number("seq", nullable=True),
    _time("created_at", now=True),
    Index("privacy_records_open", "node_id", postgresql_where=text("seq IS NULL")),
)
