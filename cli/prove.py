"""``tally prove``: get the receipt of a job, or of one entry, from the service or an archive, and verify it before it
is stored."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import quote

import typer

from app.runtime.settings.types import Bounds, duration_s, parse_duration
from app.share.archive import require_packages
from cli.archive import signer_and_keys
from cli.client import LedgerClient, Service
from cli.options import CheckpointFile, Key, Keys, PolicyFile, Tenant
from cli.verify_proof import subject_of
from ledger.errors import InvalidInputError, refuse
from ledger.exit_code import ExitCode, below_quorum, exit_code_of_receipt
from ledger.machines.jobs import refused_job_id
from ledger.text import printable
from ledger.verification.verdict import quorum_lines
from objects.store import ArchiveStore
from signing.anchors import ExternalWitnesses
from signing.checkpoint import judge_kept, read_kept
from signing.checkpoint import read as read_checkpoint
from signing.entry_proof import cose_receipt, tlog_proof, verify_cose
from signing.files import whole_file
from signing.keys import Keyring, Signer
from signing.memory import Memory, memory_of
from signing.receipt import ABSENT, ENTRY, JOB, Receipt
from signing.receipt_judging import ReceiptVerdict, judged
from tallystick_client import NotTheLedgerError, ProblemError
from terminal.outcome import CommandExit, fail, tell
from terminal.program import Json, NoState, State, command_of

QUORUM_WAIT: Final = "5s"
QUORUM_WAITS: Final = Bounds("0s", "30s", parse_duration)
_WRITTEN: Final = (ExitCode.FINE, ExitCode.INCOMPLETE)
"""Verdicts on a receipt with which it is written."""


@dataclass(kw_only=True)
class Prove:
    """Get a receipt: one file that proves a job, one entry, or that there is none.

    It is verified alone and offline. That of a job also proves that nothing of
    it is left out, up to the newest snapshot with an index of jobs; with
    --absent, that the job has no entry up to there.

    It holds the entries, a proof for each that a signed checkpoint covers it,
    and what witnesses and time-stamping authorities said of the log. It is
    verified with the ledger's public keys, by tally verify-proof or on
    the page /verify in a browser. Entries that no checkpoint covers yet are
    waited for.

    With --checkpoint, and where a checkpoint of this log is remembered, the
    receipt also proves that the log still begins with that. A receipt that
    does not hold is not written. --seq needs the right audit, --job read.

    With --archive it is made here, of an archive, also of what left the
    database: up to the newest checkpoint whose entries are all archived. The
    archive must be signed by --keys, else by keys that the service publishes,
    which is asked for nothing else. The verifier of the receipt must trust
    the key that signs it.

    With --policy the receipt is made once the quorum of the node's own policy
    has cosigned it, and after --wait in any case. The exit code is 3 while the
    quorum of that tlog-policy file has not cosigned all of it; the receipt is
    written, and a later one may carry more.

    \b
    Examples:
      tally prove --tenant acme --job job-1 -o job-1.receipt.json
      tally prove -t acme --job job-404 --absent -o job-404.absent.json
      tally prove -t acme --seq 4711 -o entry.receipt.json --checkpoint acme.checkpoint
      tally prove -t acme --seq 4711 -o entry.tlog-proof --tlog-proof
      tally prove -t acme --job job-1 -o job-1.receipt.json --archive s3://ledger-archive/prod --keys trusted-keys.json
    """

    tenant: Tenant
    client: Service
    output: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the receipt goes.")]
    job: Annotated[str | None, typer.Option("--job", "-j", help="Prove all that was recorded of this job.")] = None
    seq: Annotated[int | None, typer.Option("--seq", min=1, help="Prove this one entry of the chain.")] = None
    absent: Annotated[bool, typer.Option("--absent", help="Prove that the job of --job has no entries.")] = False
    archive: Annotated[
        str | None,
        typer.Option("--archive", metavar="URL", help="Make it of this archive instead: a folder, s3://bucket/prefix."),
    ] = None
    keys: Keys = None
    key: Key = None
    checkpoint: CheckpointFile = None
    policy: PolicyFile = None
    wait: Annotated[
        str | None,
        typer.Option("--wait", help="With --policy: how long to wait for its quorum.", show_default=QUORUM_WAIT),
    ] = None
    as_tlog_proof: Annotated[
        bool, typer.Option("--tlog-proof", help="With --seq: write a C2SP tlog-proof, for tools of transparency logs.")
    ] = False
    as_cose: Annotated[
        bool, typer.Option("--cose", help="With --seq: write a COSE receipt (RFC 9942), for tools of COSE and SCITT.")
    ] = False
    state: State = None
    no_state: NoState = False
    as_json: Json = False

    def run(self) -> None:
        """Get the receipt, judge it, and write it if it holds."""
        self._refuse_unfit()
        client, archive = self.client, self.archive
        place = _Service.of(client) if archive is None else _Archive.of(archive, self.key, self.keys, client)
        outcome, file = self._proved(place)
        receipt = outcome.receipt
        assert receipt is not None
        if not self.wanted.is_answered_by(receipt):
            raise NotTheLedgerError(f"{place.url} sent a receipt of something else than was asked for")
        form = "tlog-proof" if self.as_tlog_proof else "COSE receipt" if self.as_cose else None
        file = file if form is None else _in_form(form, receipt, place)
        with whole_file(self.output) as written:
            written.write(file)
        outcome = replace(outcome, digest=sha256(file).hexdigest(), size_bytes=len(file))
        _tell(outcome, form, self.output, as_json=self.as_json)
        if below_quorum(outcome.verdict):
            raise CommandExit(ExitCode.INCOMPLETE)

    @property
    def wanted(self) -> Wanted:
        """What a receipt must be of."""
        return Wanted(self.tenant, self.job, self.seq, self.absent)

    def _refuse_unfit(self) -> None:
        """Refuse options that do not go together."""
        is_other_form = self.as_tlog_proof or self.as_cose
        refuse(
            InvalidInputError,
            ((self.job is None) is (self.seq is None), "say what to prove: --job J, or --seq N"),
            (self.absent and self.job is None, "--absent goes with --job"),
            (self.archive is None and (self.keys, self.key) != (None, None), "--keys and --key go with --archive"),
            (self.as_tlog_proof and self.as_cose, "--tlog-proof and --cose are two files: ask for each by itself"),
            (
                self.wait is not None and (self.policy is None or self.archive is not None),
                "--wait goes with --policy, not with --archive",
            ),
            (is_other_form and self.seq is None, "--tlog-proof and --cose prove one entry: name it with --seq"),
        )

    def _proved(self, place: _Service | _Archive) -> tuple[ReceiptVerdict, bytes]:
        """The receipt of ``place``, judged.

        Raises:
            CommandExit: it does not hold.
        """
        memory = memory_of(self.state, is_off=self.no_state)
        kept = judge_kept(read_kept(self.checkpoint), place.keyring) if self.checkpoint is not None else None
        known = (
            _Known("given", kept.checkpoint.size)
            if kept is not None
            else _remembered(memory, self.tenant, place.keyring)
        )
        wait_s = 0.0 if self.policy is None else duration_s("--wait", self.wait or QUORUM_WAIT, QUORUM_WAITS)
        file = place.receipt(self.wanted, known, wait_s)
        outcome = judged(file, place.keyring, kept, memory, ExternalWitnesses.load([], None, self.policy))
        if (code := exit_code_of_receipt(outcome.verdict)) not in _WRITTEN:
            first = outcome.verdict["first_break"]
            raise fail(
                f"the receipt of {place.url} does not hold and is not kept: {first['kind']}: {first['detail']}", code
            )
        return outcome, file


prove = command_of(Prove)


def _in_form(form: str, receipt: Receipt, place: _Service | _Archive) -> bytes:
    if form == "tlog-proof":
        entry = receipt.entries[0].row
        return tlog_proof(entry, *place.inclusion(receipt), receipt.origin, place.keyring).encode()
    file = place.cose(receipt)
    verify_cose(file, bytes.fromhex(receipt.entries[0].row.chain_link), place.keyring)
    return file


class Wanted(NamedTuple):
    """What a receipt is asked for."""

    tenant: str
    job: str | None
    seq: int | None
    is_absent: bool = False

    def is_answered_by(self, receipt: Receipt) -> bool:
        """Whether it is of that."""
        names = (self.job, refused_job_id(self.job or ""))
        if self.job is None:
            is_asked = receipt.covers == ENTRY and receipt.seqs == [self.seq]
        elif self.is_absent:
            is_asked = receipt.covers == ABSENT and receipt.job_id == self.job
        else:
            is_asked = receipt.covers == JOB and receipt.job_id in names
        return is_asked and receipt.tenant_id == self.tenant


class _Known(NamedTuple):
    """How an earlier checkpoint of the log is known, and its size; 0 if there is none."""

    how: str
    size: int


class _Service(NamedTuple):
    """A service that makes receipts."""

    client: LedgerClient
    keyring: Keyring

    @classmethod
    def of(cls, client: LedgerClient) -> _Service:
        return cls(client, Keyring.from_json(client.get("/v1/keys")))

    @property
    def url(self) -> str:
        return self.client.url

    def receipt(self, wanted: Wanted, known: _Known, wait_s: float) -> bytes:
        """The receipt, once the quorum of the node's policy has cosigned it, at the latest after ``wait_s``."""
        tenant, job, seq, is_absent = wanted
        path = "/v1/chain/receipt" if job is None else f"/v1/jobs/{quote(job, safe='')}/receipt"
        how = {"extends": known.size or None, "absent": is_absent or None, "wait_s": wait_s or None}
        params = {"tenant_id": tenant, "seq": seq, **how}
        try:
            reply = self.client.ask("GET", path, params=params)
        except ProblemError as error:
            if error.kind == "seq-out-of-range" and error.members.get("path") == "extends":
                raise fail(
                    f"the log went back behind the checkpoint {known.how}: {error.detail}", ExitCode.TAMPERED
                ) from error
            if error.kind == "archived":
                source = shlex.quote(printable(str(error.members.get("archive") or "URL")))
                raise fail(f"{error}; add --archive {source} to make the receipt from there") from error
            raise
        self.client.json(reply, Any)
        return reply.content

    def inclusion(self, receipt: Receipt) -> tuple[list[bytes], str]:
        """The proof that the entry of ``receipt`` is under a checkpoint, and that checkpoint: the newest one that is
        cosigned, if there is one that covers it."""
        seq, tenant = receipt.seqs[0], receipt.tenant_id
        try:
            reply = self.client.ask("GET", f"/v1/log/{quote(tenant, safe='')}/checkpoint", params={"cosigned": "true"})
        except ProblemError as error:
            if error.kind != "not-found":
                raise
            return _own_inclusion(receipt)
        size = read_checkpoint(note := reply.content.decode()).size
        if size < seq:
            return _own_inclusion(receipt)
        proof = self.client.get("/v1/chain/proof/inclusion", tenant_id=tenant, seq=seq, tree_size=size)
        return [bytes.fromhex(each) for each in proof["hashes"]], note

    def cose(self, receipt: Receipt) -> bytes:
        """The COSE receipt of the entry that ``receipt`` is for."""
        params = {"tenant_id": receipt.tenant_id, "seq": receipt.seqs[0], "form": "cose"}
        return self.client.ask("GET", "/v1/chain/receipt", params=params).content


class _Archive(NamedTuple):
    """An archive of which receipts are made here."""

    url: str
    keyring: Keyring
    signer: Signer

    @classmethod
    def of(cls, url: str, key: str | None, keys: Path | None, client: LedgerClient) -> _Archive:
        require_packages("tally prove --archive")
        signer, keyring = signer_and_keys(key, keys, client)
        return cls(url, keyring, signer)

    def receipt(self, wanted: Wanted, known: _Known, _wait_s: float) -> bytes:
        """The receipt, made here."""
        # Imported here, because it loads Arrow.
        from pipeline.archive import receipts
        from pipeline.archive.receipts import archived_receipt

        of, extends = receipts.Wanted(wanted.job, wanted.seq, wanted.is_absent), known.size or None
        return archived_receipt(ArchiveStore(self.url), wanted.tenant, of, extends, self.keyring, self.signer)

    def inclusion(self, receipt: Receipt) -> tuple[list[bytes], str]:
        """The proof in ``receipt``, and its checkpoint."""
        return _own_inclusion(receipt)

    def cose(self, receipt: Receipt) -> bytes:
        """The COSE receipt of the entry that ``receipt`` is for."""
        return cose_receipt(receipt, self.signer)


def _own_inclusion(receipt: Receipt) -> tuple[list[bytes], str]:
    return [bytes.fromhex(each) for each in receipt.entries[0].inclusion], receipt.checkpoint


def _remembered(memory: Memory | None, tenant: str, keyring: Keyring) -> _Known:
    """The newest checkpoint of the tenant's log that was verified before."""
    seen = [] if memory is None else memory.seen_of_tenant(tenant, keyring)
    return _Known("remembered", max((each.checkpoint.size for each in seen), default=0))


def _tell(outcome: ReceiptVerdict, form: str | None, output: Path, *, as_json: bool) -> None:
    assert outcome.receipt is not None
    tell(
        {**outcome.to_json(), "file": str(output)},
        *subject_of(outcome),
        *(
            f"carries the word of {each['kind']} {each['by']} to seq {each['to_seq']}"
            for each in outcome.verdict["anchors"]
        ),
        *quorum_lines(outcome.verdict),
        *(["the log begins with the checkpoint that you had"] if outcome.verdict["compared_with"] is not None else ()),
        f"{output}: {outcome.size_bytes:,} bytes, SHA-256 {outcome.digest}",
        "verify it with: tally verify-proof FILE --keys K, of keys that you trust"
        if form is None
        else f"verify it with a program that reads a {form}, by a key that you trust",
        as_json=as_json,
    )
