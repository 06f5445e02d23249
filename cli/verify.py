"""``tally verify``: verify a chain by the service, or here with rows read from PostgreSQL."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer
from rich.console import RenderableType

from app.runtime.answers.chain import (
    AcknowledgeAnswer,
    ConsistencyProofAnswer,
    TimestampList,
    VerdictAnswer,
    WitnessesAnswer,
)
from app.runtime.answers.retention import ArchiveAnswer
from cli.client import LedgerClient
from cli.options import Url
from cli.verify_proof import TrustOptions
from ledger import rfc3339
from ledger.errors import ProofError, SignatureError, UnknownKeyError
from ledger.exit_code import ExitCode, exit_code_of_verdict
from ledger.merkle import EMPTY_ROOT, verify_consistency
from ledger.text import secret_text
from ledger.verification import Anchor, TreeHead
from ledger.verification.verdict import ASPECTS, rollback, with_break, with_checkpoint
from signing import checkpoint as checkpoints
from signing import note as notes
from signing.anchors import RFC_3161, WITNESS, ExternalWitnesses, StoredAnchor, judge, opener
from signing.checkpoint import FILE, Checkpoint, judge_kept, open_checkpoint
from signing.keys import Keyring, demanding
from signing.memory import MEMORY, Memory, Observation, remembering
from signing.note import cosignatures_of
from tallystick_client import NotTheLedgerError, ProblemError
from terminal.outcome import CommandExit, counted, err, findings, marked, print_why_incomplete, tell, verdict_table
from terminal.program import Json, command_of

if TYPE_CHECKING:
    from pipeline.archive.joined import ArchivedPart

ARCHIVE = "archive"
"""Name of the tree of an archive in ``compared_with``."""


@dataclass(kw_only=True)
class Verify:
    """Verify a tenant's chain: links, payloads, head, snapshots, signatures, tree, job states, checkpoints.

    Exit codes: 0 whole; 2 tampered; 3 nothing wrong found but not everything
    checked, such as an end that no snapshot signs yet; 4 a key is unknown,
    expired or revoked; 1 could not run. A row beside the chain that the node
    found damaged, as of the table of keys, is named and is 2 until it is
    mended; --dsn does not know of it.

    With --dsn everything is computed here from the rows, and signatures are
    good by --keys only. Without it the service verifies; --keys then
    serves to check the signature of --checkpoint.

    The newest checkpoint that was verified of each log is remembered in your
    state folder and compared with ever after: a ledger that was cut or
    rewritten since you looked is a rollback. The first look says that it is
    the first. With --dsn that takes --keys.

    With --witness-key and --tsa-ca, statements of external witnesses are
    judged here, and the log is compared with those that hold. With --policy
    the exit code is 3 unless the quorum of that tlog-policy file has cosigned
    all entries; those that came last are cosigned within seconds. An archive
    has the cosignatures that there were when it was written.

    With --archive all tenants of an archive are verified, and its Iceberg
    table: manifests, files, trees, and that the table names each signed file
    and no other. It needs no ledger and no service.

    With --with-archive the archive is verified too, here, and that the chain
    goes on where it ends: one verdict, from seq 1, whatever has left with a
    prune. The archive is the one that --archive names, else archive.url of
    the service, with --dsn of the local settings. It is read from start to
    end. Its table is verified by --archive alone.

    With --acknowledge the breaks of this tenant that the node has found, now
    or earlier, are recorded in _system with your reason. /readyz and the
    alert report each until it is mended too: until a whole verification at
    that node finds the chain valid.

    \b
    Examples:
      tally verify --tenant acme
      tally verify -t acme --acknowledge "row 17 edited by mistake, ticket 42"
      tally verify -t acme --checkpoint /mnt/elsewhere/acme.checkpoint --keys trusted-keys.json
      tally verify -t acme --tsa-ca authority-ca.pem --witness-key "$(cat w1.vkey)"
      tally verify -t acme --keys trusted-keys.json --policy witnesses.policy
      tally verify -t acme --dsn postgresql://reader@db/tallystick --keys trusted-keys.json --json
      tally verify --archive s3://ledger-archive/prod --keys trusted-keys.json
      tally verify -t acme --with-archive --keys trusted-keys.json
    """

    url: Url
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", "-t", help="Tenant whose chain this is about; of an archive all when not said."),
    ] = None
    archive: Annotated[
        str | None,
        typer.Option("--archive", help="Verify an archive alone: a folder, s3://bucket/prefix.", metavar="URL"),
    ] = None
    with_archive: Annotated[
        bool,
        typer.Option("--with-archive", help="Verify the chain and what left it, in the archive, as one from seq 1."),
    ] = False
    dsn: Annotated[
        str | None,
        typer.Option("--dsn", help="Read straight from this PostgreSQL and trust no service.", metavar="DSN"),
    ] = None
    trust: TrustOptions
    from_seq: Annotated[int | None, typer.Option("--from-seq", min=1, help="First entry.")] = None
    to_seq: Annotated[int | None, typer.Option("--to-seq", min=1, help="Last entry.")] = None
    acknowledge: Annotated[
        str | None,
        typer.Option("--acknowledge", help="Record that somebody has seen what the node found.", metavar="REASON"),
    ] = None
    as_json: Json = False

    def run(self) -> None:
        """Verify, print the verdict, and exit by it."""
        self._refuse_unfit()
        if self.archive is not None and not self.with_archive:
            self._verify_archive(self.archive)
        request = self._request()
        judge = partial(verify_by_service, self.url) if self.dsn is None else partial(_verify_by_rows, self.dsn)
        if self.with_archive:
            request = self._joined(request)
        verdict = judge(request)
        if request.archived is not None and request.archived.ends_before(verdict):
            # These entries were archived, and left, after the archive was read.
            verdict = judge(self._joined(request))
        with remembering(request.memory, [verdict.get("memory")]):
            tell(verdict, *_lines(verdict), as_json=self.as_json)
            if self.acknowledge is not None:
                _acknowledge(self.url, request.tenant, self.acknowledge)
        code = exit_code_of_verdict(verdict)
        if code is ExitCode.INCOMPLETE:
            print_why_incomplete([verdict], is_any_key=self.dsn is None or request.keyring is not None)
        raise CommandExit(code)

    def _refuse_unfit(self) -> None:
        """Refuse options that do not go together."""
        is_range = (self.from_seq, self.to_seq) != (None, None)
        if self.acknowledge is not None and (self.dsn is not None or self.archive is not None or self.with_archive):
            raise typer.BadParameter(
                "it asks the node that found the breaks: leave out --dsn and --archive", param_hint="--acknowledge"
            )
        if self.with_archive and is_range:
            raise typer.BadParameter("it begins at seq 1: leave out seqs", param_hint="--with-archive")
        is_alone = self.archive is not None and not self.with_archive
        if is_alone and (self.dsn is not None or is_range or self.trust.tsa_ca):
            raise typer.BadParameter(
                "an archive is verified whole and has no time stamps: leave out --dsn, seqs and --tsa-ca"
            )

    def _verify_archive(self, archive: str) -> NoReturn:
        # Imported here, because it loads Arrow, which no other verification needs.
        from cli.verify_archive import verify_archive

        trust = self.trust
        keyring = demanding(trust.signatures, trust.keyring)
        memory = trust.memory(is_off=keyring is None)
        verify_archive(archive, self.tenant, keyring, trust.kept, memory, self.as_json, trust.external)

    def _request(self) -> Request:
        if self.tenant is None:
            raise typer.BadParameter("name the tenant whose chain is verified", param_hint="--tenant")
        trust, keyring = self.trust, self.trust.keyring
        if keyring is not None or self.dsn is not None:
            keyring = demanding(trust.signatures, keyring)
        return Request(
            self.tenant,
            self.from_seq,
            self.to_seq,
            keyring=keyring,
            kept=trust.kept,
            external=trust.external,
            signatures=trust.signatures,
            memory=trust.memory(is_off=self.dsn is not None and keyring is None),
        )

    def _joined(self, request: Request) -> Request:
        return _with_archive(self.url, self.archive, request, is_by_service=self.dsn is None)


verify = command_of(Verify)


def _with_archive(url: str, archive: str | None, request: Request, *, is_by_service: bool) -> Request:
    """``request`` with what the archive has of the tenant, verified here; by the keys of the service if it is the
    service that verifies the rest, and no other keys are given."""
    from cli.verify_archive import archived_part_at, local_archive

    keyring = request.keyring
    if is_by_service:
        with LedgerClient(url) as client:
            archive = archive or client.get("/v1/archive", ArchiveAnswer)["url"]
            keyring = keyring if keyring is not None else _served_keys(client, request)
    archived = archived_part_at(archive or local_archive(), request.tenant, keyring)
    return replace(request, archived=archived)


def _acknowledge(url: str, tenant: str, reason: str) -> None:
    """Have the node record that its findings were acknowledged."""
    with LedgerClient(url) as client:
        try:
            answer = client.post(
                "/v1/chain/acknowledge", {"tenant_id": tenant, "reason": reason}, AcknowledgeAnswer, repeatable=True
            )
        except ProblemError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            err.print(str(error), markup=False)
            return
    for each in answer["acknowledged"]:
        err.print(f"acknowledged: {each['kind']} at seq {each['seq']}", markup=False)


# --- through the service ------------------------------------------------------------------------------


def verify_by_service(url: str, request: Request) -> dict[str, Any]:
    """The verdict object of the service on ``request``, with the comparisons made here."""
    tenant, memory = request.tenant, request.memory
    with LedgerClient(url) as client:
        log = _Log(client, tenant)
        # 1. What witnesses said, then the log's present checkpoint, then the verdict: each covers all that was read
        #    before it.
        said = served_statements(log.client, tenant, request.external)
        present, is_any = log.checkpoint()
        # 2. The verdict of the service.
        verdict: dict[str, Any] = client.get(
            "/v1/chain/verify", VerdictAnswer, tenant_id=tenant, from_seq=request.from_seq, to_seq=request.to_seq
        )
        if missing := [aspect for aspect in ASPECTS if aspect not in verdict["verdicts"]]:
            raise NotTheLedgerError(f"the verdict of {url} says nothing of {', '.join(missing)}")
        is_given = request.kept is not None or request.external.are_any
        is_compared = is_given or request.signatures == "both"
        if not is_compared and memory is None and request.archived is None:
            return verdict
        ring = request.keyring if request.keyring is not None else _served_keys(client, request)
        # 3. The caller's checkpoint and witnesses.
        if is_compared and present is None and (is_any or not is_given):
            verdict = with_checkpoint(verdict, "unknown_key", FILE)
        elif is_compared:
            if present is None:
                raise SignatureError(f"there is no checkpoint of tenant {tenant} to compare with what is given")
            verdict = _compared(log, request, verdict, present, ring, said)
        # 4. The archive. What it disputes is not remembered.
        if request.archived is not None:
            verdict = _joined(log, request.archived, verdict, present, ring)
        # 5. The remembered checkpoint.
        if memory is None:
            return verdict
        look = Observation.at(memory, tenant, present, ring, datetime.now(UTC))
        return _looked(log, look, verdict, is_any=is_any)


def _served_keys(client: LedgerClient, request: Request) -> Keyring:
    """The keys that the service lists, with the demand of the request."""
    listed = Keyring.from_json(client.get("/v1/keys"))
    return listed.demanding_both() if request.signatures == "both" else listed


def _joined(
    log: _Log, archived: ArchivedPart, verdict: dict[str, Any], present: str | None, ring: Keyring
) -> dict[str, Any]:
    """``verdict`` joined with that on the archive, with whose tree the log must begin."""
    origin = None
    if present is not None:
        try:
            now = open_checkpoint(present, ring)
        except UnknownKeyError as error:
            err.print(f"the checkpoint proves nothing: {error}", markup=False)
            return archived.joined(with_checkpoint(verdict, "unknown_key", ARCHIVE), None)
        origin = now.origin
        for head in archived.heads:
            if (found_break := log.rollback(Checkpoint(origin, head.size, head.root), now)) is not None:
                verdict = with_break(verdict, found_break)
    elif archived.heads:
        verdict = with_checkpoint(verdict, "unknown_key", ARCHIVE)
    return archived.joined(verdict, origin)


def _compared(
    log: _Log, request: Request, verdict: dict[str, Any], present: str, ring: Keyring, said: Sequence[StoredAnchor]
) -> dict[str, Any]:
    """``verdict`` with the caller's checkpoint and witnesses compared with the log, whose checkpoint is ``present``;
    ``said`` are the served statements of the witnesses."""
    kept, external = request.kept, request.external
    try:
        now = open_checkpoint(present, ring)
        then = open_checkpoint(kept, ring.demanding_one(), origin=now.origin) if kept is not None else None
    except UnknownKeyError as error:
        err.print(f"the checkpoint proves nothing: {error}", markup=False)
        return with_checkpoint(verdict, "unknown_key", FILE)
    # Statements of external witnesses: about this log, and under the kept checkpoint.
    open_note = external.pinned(opener(ring, now.origin))
    anchors = [judge(each, external.witnesses, external.roots, open_note) for each in said]
    anchors += kept_anchors(kept, external) if kept is not None else []
    verdict = _with_anchors(log, verdict, anchors, now, external)
    # The kept checkpoint itself.
    return verdict if then is None else log.compared(verdict, then, now, FILE)


def _looked(log: _Log, look: Observation, verdict: dict[str, Any], *, is_any: bool) -> dict[str, Any]:
    """``verdict`` with the remembered checkpoint compared with the present log, and a note whether this one is to be
    remembered.

    ``is_any`` is whether the log has a checkpoint, by any signer.
    """
    if look.before and look.now is None and is_any:
        return look.with_verdict(with_checkpoint(verdict, "unknown_key", MEMORY))
    for seen in look.before:
        now = look.now.checkpoint if look.now is not None else seen.checkpoint._replace(size=0, root=EMPTY_ROOT)
        verdict = log.compared(verdict, seen.checkpoint, now, MEMORY)
    return look.with_verdict(verdict)


def _with_anchors(
    log: _Log, verdict: dict[str, Any], anchors: list[Anchor], now: Checkpoint, external: ExternalWitnesses
) -> dict[str, Any]:
    """``verdict`` with external witnesses verified here in place of the service's result."""
    judged_here = {kind for kind, given in ((WITNESS, external.witnesses), (RFC_3161, external.roots)) if given}
    found = [each for each in verdict["anchors"] if each["kind"] not in judged_here]
    compared = []
    for anchor in anchors:
        status, detail = anchor.status, anchor.detail
        if status == "ok" and (found_break := log.rollback(Checkpoint(now.origin, anchor.size, anchor.root), now)):
            verdict = with_break(verdict, found_break)
            status, detail = "broken", found_break["detail"]
        compared.append(anchor._replace(status=status, detail=detail))
    found += [each.to_json() for each in compared]
    return external.with_quorum({**verdict, "anchors": found}, compared)


class _Log(NamedTuple):
    """A tenant's log at a service."""

    client: LedgerClient
    tenant: str

    def checkpoint(self) -> tuple[str | None, bool]:
        """Its present checkpoint, None if no trusted key signed one; and whether there is any."""
        try:
            return self.client.get_text(f"/v1/log/{self.tenant}/checkpoint"), True
        except ProblemError as error:
            if error.kind == "key-conflict":
                err.print(f"the checkpoint proves nothing: {error}", markup=False)
                return None, True
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return None, False

    def compared(self, verdict: dict[str, Any], then: Checkpoint, now: Checkpoint, source: str) -> dict[str, Any]:
        """``verdict`` with the checkpoint ``then`` that ``source`` holds compared with the log at ``now``."""
        found = self.rollback(then, now)
        return with_checkpoint(verdict, "ok" if found is None else "broken", source, found)

    def rollback(self, then: Checkpoint, now: Checkpoint) -> dict[str, Any] | None:
        """The break that the log at ``now`` is not the log at ``then`` with entries added at the end, None if it is."""
        try:
            if then.size > now.size:
                raise ProofError(f"the checkpoint holds {then.size} entries, and the log has {now.size}")
            if then.size == now.size and then.root != now.root:
                raise ProofError(f"the first {then.size} entries are not those of the checkpoint")
            if 0 < then.size < now.size:
                verify_consistency(then.size, now.size, then.root, now.root, self._consistency(then.size, now.size))
        except ProofError as error:
            return rollback(then.size, str(error), then.root.hex(), now.root.hex() if now.size == then.size else None)
        return None

    def _consistency(self, first: int, second: int) -> list[bytes]:
        """The proof of the service that its log of ``second`` entries extends the one of ``first``."""
        try:
            proof = self.client.get(
                "/v1/chain/proof/consistency", ConsistencyProofAnswer, tenant_id=self.tenant, first=first, second=second
            )
        except ProblemError as error:
            if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
            raise ProofError(f"the log cannot prove that it extends the checkpoint: {error}") from error
        return [bytes.fromhex(text) for text in proof["hashes"]]


# --- straight from PostgreSQL -------------------------------------------------------------------------


def _verify_by_rows(dsn: str, request: Request) -> dict[str, Any]:
    # Imported here, because it loads the database driver, which verifying by the service does not need.
    from cli.verify_database import verify_database

    kept = None if request.kept is None else judge_kept(request.kept, request.keyring)
    heads = [] if kept is None else kept.heads
    if kept is not None and kept.unknown is not None:
        err.print(f"the checkpoint proves nothing: {kept.unknown}", markup=False)
    elif kept is not None and not kept.checkpoint.origin.endswith(f"/{request.tenant}"):
        raise SignatureError(f"the checkpoint is of log {kept.checkpoint.origin!r}, not of tenant {request.tenant}")
    anchors = kept_anchors(request.kept, request.external) if request.kept is not None and heads else []
    verdict = asyncio.run(verify_database(secret_text(dsn, "--dsn"), request, heads, anchors))
    return verdict if kept is None or heads else with_checkpoint(verdict, "unknown_key", FILE)


# --- what was found -------------------------------------------------------------------------------------


def _lines(verdict: dict[str, Any]) -> list[RenderableType]:
    state = "[bold green]valid[/]" if verdict["valid"] else "[bold red]NOT VALID[/]"
    if exit_code_of_verdict(verdict) is ExitCode.INCOMPLETE:
        state = "[bold yellow]incomplete[/], nothing wrong found"
    not_mended = verdict.get("not_mended", [])
    if not_mended:
        state = "[bold red]the chain is valid, rows beside it are damaged[/]"
    head, source = verdict["head"], verdict["compared_with"]
    return [
        marked(
            f"tenant {verdict['tenant_id']}: {state}, {counted(verdict['entries_checked'], 'entry', 'entries')} "
            f"(seq {verdict['from_seq']} to {verdict['to_seq']}) in {verdict['duration_ms']:.0f} ms"
        ),
        verdict_table(verdict["verdicts"]),
        *([f"head: seq {head['seq']}, link {head['chain_link']}, HLC {head['hlc']}"] if head["seq"] else ()),
        f"signed to seq {verdict['signed_to_seq']}, "
        f"{counted(verdict['unsigned_entries'], 'entry', 'entries')} after it unsigned",
        "compared with no checkpoint, so a tail cut without trace would not be seen; see --checkpoint"
        if source is None
        else f"compared with the checkpoint kept by: {source}",
        *findings(verdict, verdict.get("memory"), verdict.get("not_checked", ())),
        *(f"not mended: {each['kind']} at seq {each['seq']}: {each['detail']}" for each in not_mended),
    ]


# --- what external witnesses said ----------------------------------------------------------------------------

LISTED_MAX = 1000
"""Newest time stamps that are read."""


@dataclass(frozen=True, slots=True)
class Request:
    """A tenant's chain, whole or a range, and the caller's trusted keys and witnesses."""

    tenant: str
    from_seq: int | None
    to_seq: int | None
    keyring: Keyring | None
    """None when no keys were given: then no signature is trusted."""
    kept: str | None
    """Text of a checkpoint kept elsewhere."""
    external: ExternalWitnesses
    signatures: str = "any"
    """Whether any held key is enough, or both must have signed."""
    memory: Memory | None = None
    """Checkpoints verified before, None when nothing is to be remembered."""
    archived: ArchivedPart | None = None
    """What the archive has of the tenant, None when the chain is verified alone."""

    @property
    def archived_heads(self) -> list[TreeHead]:
        """The tree of the archive, with which that of the chain must begin."""
        return [] if self.archived is None else self.archived.heads


def served_statements(client: LedgerClient, tenant: str, external: ExternalWitnesses) -> list[StoredAnchor]:
    """The service's newest statement of each external witness, not verified."""
    said: list[StoredAnchor] = []
    if external.witnesses:
        known = {witness.text() for witness in external.witnesses}
        said += [
            StoredAnchor(
                WITNESS, each["witness"], each["note"], each["tree_size"], datetime.fromisoformat(each["time"])
            )
            for each in client.get(f"/v1/log/{tenant}/witnesses", WitnessesAnswer)["witnesses"]
            if each["witness"] in known and each["note"] is not None
        ]
    if external.roots:
        items = client.get(f"/v1/log/{tenant}/anchors", TimestampList, limit=LISTED_MAX)["items"]
        said += [
            StoredAnchor(
                RFC_3161,
                each["authority"],
                each["checkpoint"],
                each["tree_size"],
                datetime.fromisoformat(each["time"]),
                base64.b64decode(each["response"]),
            )
            for each in _newest(items)
        ]
    return said


def kept_anchors(kept: str, external: ExternalWitnesses) -> list[Anchor]:
    """The cosignatures under a kept checkpoint; the caller checks the log's signature. For a policy that names logs
    they do not count: which key signed is not compared.

    Raises:
        SignatureError: one of a known witness is invalid.
    """
    note = notes.parse(kept)
    checkpoint = checkpoints.parse(note.text)
    does_count = external.policy is None or not external.policy.logs
    return [
        Anchor(
            WITNESS,
            each.witness.name,
            rfc3339.written(each.time),
            checkpoint.size,
            checkpoint.root,
            key=each.witness.text() if does_count else "",
        )
        for each in cosignatures_of(note, external.witnesses)
    ]


def _newest(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest stamp of each authority."""
    newest = {item["authority"]: item for item in sorted(items, key=lambda item: (item["tree_size"], item["time"]))}
    return [newest[name] for name in sorted(newest)]
