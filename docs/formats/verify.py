#!/usr/bin/env python3
"""Verify a Tallystick bundle, or a receipt: a second implementation, written from the documents beside it and nothing
else.

    verify.py FILE [--keys K] [--checkpoint FILE] [--policy FILE] [--signatures any|both]

K is public keys in a PEM file, a saved /v1/keys answer, or a folder of such files; a policy is a file of policy.md, of
witnesses whose quorum must have cosigned all of FILE; with `both`, checkpoints and snapshots count only if a first key
and a second key signed them (keys.md). Needs Python 3.11 and the package `cryptography`, for ML-DSA-44 one that has
it: without it such keys are passed over, and the exit code with `both` is 3. It does not judge commitments: whether a
proposal was rightly accepted or rejected (commitments.md) is left to the product and the page, and the output says so.
Numbers in brackets are the steps of bundle.md, "Verifying", which has the exit codes too; in the part on receipts, and
there alone, those of receipt.md.
"""

import base64
import json
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NoReturn

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
except ImportError as missing:
    sys.exit(f"verify.py needs the package cryptography: pip install cryptography ({missing})")

try:
    from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PublicKey

    HAS_ML_DSA = True
except ImportError:
    MLDSA44PublicKey = type("MLDSA44PublicKey", (), {})  # No key is one.
    HAS_ML_DSA = False

OK, COULD_NOT_RUN, TAMPERED, INCOMPLETE, UNKNOWN_KEY = range(5)
"""Exit codes."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NUMBER_MAX = 2**53 - 1
TREE_SIZE_MAX = NEVER = 2**63 - 1
SNAPSHOT_LINE_BYTES_MAX = MIB
ROWS_PER_PART_MAX = 10_000

MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError, zlib.error)
"""What Python raises over data of another form than the one that is read."""


def need(holds: object, what: str) -> None:
    """Refuse the file unless something holds."""
    if not holds:
        raise ValueError(what)


# --- Texts and JSON (canonical-json.md) ---

HASH = re.compile("[0-9a-f]{64}")
TENANT = re.compile("_system|[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?")
NODE = re.compile("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
LOG_ORIGIN = re.compile("[!-*,-~]{1,300}")


def canonical(value: Any) -> bytes:
    """Canonical JSON of what bundles hold: texts, integers, null, lists and objects."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def parse_canonical(data: bytes) -> Any:
    value = json.loads(data)
    need(canonical(value) == data, "JSON that is not in canonical form")
    return value


def parse_row(line: bytes, members: dict[str, tuple[type, ...]], tenant_id: str) -> SimpleNamespace:
    """One line of NDJSON: a canonical object with these members of these types, of this tenant."""
    need(line.endswith(b"\n"), "a row has no end, or is too long")
    row = object_of(parse_canonical(line[:-1]), members, "a row")
    need(row.tenant_id == tenant_id, "a row of another tenant")
    return row


def object_of(value: Any, members: dict[str, tuple[type, ...]], what: str) -> SimpleNamespace:
    """An object with exactly these members of these types; its numbers lie in their range."""
    need(type(value) is dict and value.keys() == members.keys(), f"{what} has other members")
    for name, types in members.items():
        need(type(value[name]) in types, f"the member {name} of {what} is of a wrong type")
        if type(value[name]) is int:
            need(0 <= value[name] <= NUMBER_MAX, f"the number {name} of {what} is out of range")
    return SimpleNamespace(**value)


def hashes_of(value: Any, count_max: int, what: str) -> list[bytes]:
    """A list of hashes in hex, as bytes."""
    need(type(value) is list and len(value) <= count_max, f"the number of hashes of {what}")
    need(all(type(text) is str and HASH.fullmatch(text) for text in value), f"the hashes of {what}")
    return [bytes.fromhex(text) for text in value]


def decode_base64(text: str, *, url_safe: bool = False) -> bytes:
    """The bytes of a text in base64, which must be the one spelling of them."""
    alphabet = b"-_" if url_safe and ("-" in text or "_" in text) else b"+/"
    data = base64.b64decode(text, alphabet, validate=True)
    need(base64.b64encode(data, alphabet).decode() == text, "base64 that is not the one spelling of its bytes")
    return data


# --- Keys (keys.md) ---


@dataclass(frozen=True)
class Key:
    """A public key that the caller trusts, and the time in which its signatures count."""

    id: str
    public: Any
    not_before_ms: int
    not_after_ms: int
    revoked_from: tuple[int, int, str]

    @property
    def is_ed25519(self) -> bool:
        return isinstance(self.public, Ed25519PublicKey)

    @property
    def is_second(self) -> bool:
        """Whether a node signs with it only beside another key."""
        return isinstance(self.public, MLDSA44PublicKey)

    @property
    def is_revoked(self) -> bool:
        return self.revoked_from[0] < NEVER

    def signed(self, signature: bytes, message: bytes) -> bool:
        try:
            if isinstance(self.public, Ed25519PublicKey | MLDSA44PublicKey):
                self.public.verify(signature, message)
            else:
                self.public.verify(signature, message, ECDSA(SHA256()))
        except InvalidSignature:
            return False
        return True

    def counts_at(self, hlc: tuple[int, int, str]) -> bool:
        return self.not_before_ms <= hlc[0] <= self.not_after_ms and hlc < self.revoked_from


class Ring(list[Key]):
    """The keys that the caller trusts. With ``needs_both`` a first and a second one must have signed."""

    needs_both = False

    def is_enough(self, signers: list[Key]) -> bool:
        """Whether these keys, whose signatures hold and count, are all that are needed."""
        kinds = {key.is_second for key in signers}
        return kinds == {False, True} if self.needs_both else bool(kinds)


def key_files(path: Path) -> Iterator[tuple[Path, str]]:
    """A file of keys, or all files of a folder, each with its text."""
    for file in [*path.glob("[!.]*.pem"), *path.glob("[!.]*.json")] if path.is_dir() else [path]:
        with open_regular(str(file)) as stream:
            yield file, stream.read().decode()


def load_keys(path: Path, *, needs_both: bool = False) -> Ring:
    """The keys in a file, or in all files of a folder. One that is given twice must hold in both."""
    keys = Ring()
    keys.needs_both = needs_both
    for file, text in key_files(path):
        if text.lstrip().startswith("{"):
            saved = json.loads(text)
            items = saved["keys"] + (saved.get("second_keys", []) if HAS_ML_DSA else [])
        else:
            blocks = re.findall("-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", text, re.DOTALL)
            items = [{"public_key_pem": block} for block in blocks]
        need(items, f"{file} holds no public key")
        keys += [read_key(item) for item in items]
    need(not needs_both or not HAS_ML_DSA or any(key.is_second for key in keys), "none of the keys is of ML-DSA-44")
    return keys


def read_key(item: dict[str, Any]) -> Key:
    """One key of ``/v1/keys``; of a PEM file only ``public_key_pem`` is known."""
    public = load_pem_public_key(item["public_key_pem"].encode())
    key_id = sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()[:16]
    need(item.get("key_id", key_id) == key_id, "a key is not the one that its id names")
    not_before_ms = milliseconds(item["not_before"]) if item.get("not_before") else 0
    not_after_ms = milliseconds(item["not_after"]) if item.get("not_after") else NEVER
    physical, logical, node_id = (item.get("revoked_from_hlc") or f"{NEVER}:0:").split(":")
    key = Key(key_id, public, not_before_ms, not_after_ms, (int(physical), int(logical), node_id))
    is_one = key.is_ed25519 or key.is_second or isinstance(public.curve, SECP256R1)
    need(is_one, "a key is neither Ed25519 nor P-256 nor ML-DSA-44")
    return key


def milliseconds(time: str) -> int:
    """A time of RFC 3339 as milliseconds since 1970."""
    return (datetime.fromisoformat(time) - datetime.fromisoformat("1970-01-01T00:00:00Z")) // timedelta(milliseconds=1)


def hlc_in(text: str) -> tuple[int, int, str]:
    physical, logical, node_id = text.split(":")
    return int(physical), int(logical), node_id


def ids_of(keys: list[Key]) -> set[str]:
    return {key.id for key in keys}


# --- DSSE envelopes around in-toto statements (snapshot.md) ---

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
SIGNATURES_MAX = 16


def open_envelope(
    envelope: dict[str, Any], keys: list[Key], payload_type: str = PAYLOAD_TYPE
) -> tuple[bytes, list[Key]]:
    """The payload, and the held keys that signed it: none when none of those named is held."""
    need(envelope["payloadType"] == payload_type, "the payload type of a DSSE envelope")
    need(1 <= len(envelope["signatures"]) <= SIGNATURES_MAX, "the number of signatures of a DSSE envelope")
    payload = decode_base64(envelope["payload"], url_safe=True)
    message = b"DSSEv1 %d %s %d %s" % (len(payload_type), payload_type.encode(), len(payload), payload)
    tried, signers = 0, []
    for item in envelope["signatures"]:
        key_id, signature = item.get("keyid") or "", decode_base64(item["sig"], url_safe=True)
        for key in keys:
            if key_id in ("", key.id):
                tried += 1
                if key.signed(signature, message):
                    signers.append(key)
                else:
                    need(key_id == "", f"the signature by key {key.id} does not hold")
    need(signers or not tried, "no signature of a held key holds")
    return payload, signers


# --- The Merkle tree (merkle.md) ---


def leaf_hash(link: str) -> bytes:
    return sha256(b"\0" + bytes.fromhex(link)).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return sha256(b"\1" + left + right).digest()


class Tree:
    """A Merkle tree that leaves are appended to, kept as the roots of its perfect subtrees, largest first."""

    def __init__(self, size: int = 0, roots: Sequence[bytes] = ()) -> None:
        """The tree of this size whose perfect subtrees have these roots."""
        sizes = [1 << level for level in reversed(range(size.bit_length())) if size >> level & 1]
        self._subtrees = list(zip(sizes, roots, strict=True))

    def append(self, link: str) -> None:
        self.append_hash(leaf_hash(link))

    def append_hash(self, root: bytes) -> None:
        leaves = 1
        while self._subtrees and self._subtrees[-1][0] == leaves:
            root = node_hash(self._subtrees.pop()[1], root)
            leaves *= 2
        self._subtrees.append((leaves, root))

    def root(self) -> bytes:
        root = self._subtrees[-1][1]
        for _, left in reversed(self._subtrees[:-1]):
            root = node_hash(left, root)
        return root


def roots_of_proof(first: int, second: int, known: bytes | None, proof: list[bytes]) -> tuple[bytes, bytes]:
    """Roots of both sizes that a consistency proof leads to (RFC 9162, 2.1.4.1), read from its end.

    ``known`` is the root of the first size while the subtree looked at is the whole first tree, else None.
    """
    if first == second:
        root = known or proof.pop()
        return root, root
    left_leaves = 1 << (second - 1).bit_length() - 1
    side = proof.pop()
    if first <= left_leaves:
        old, new = roots_of_proof(first, left_leaves, known, proof)
        return old, node_hash(new, side)
    old, new = roots_of_proof(first - left_leaves, second - left_leaves, None, proof)
    return node_hash(side, old), node_hash(side, new)


# --- The index of jobs (job-index.md) ---

BLOCK_ENTRIES, RUNS_MERGED, LEVEL_MAX = 1024, 8, 3
JobLeaf = tuple[int, bytes]
"""Number of entries of a job in a run, and their digest."""


@dataclass
class Run:
    """A run over entries from leaf index ``begin`` on: its root, and its leaves by key while it can be merged."""

    level: int
    begin: int
    leaves: dict[bytes, JobLeaf]
    root: bytes

    @property
    def end(self) -> int:
        return self.begin + run_entries(self.level)


def run_entries(level: int) -> int:
    return BLOCK_ENTRIES * int(RUNS_MERGED**level)


def covering_runs(size: int, begin: int = 0) -> list[tuple[int, int, int]]:
    """Level, first and last leaf index (exclusive) of the runs of an index of leaves ``begin..size - 1``."""
    runs = []
    while begin < size:
        fitting = [n for n in range(1, LEVEL_MAX + 1) if not begin % run_entries(n) and size - begin >= run_entries(n)]
        level = max(fitting, default=0)
        end = min(begin + run_entries(level), size)
        runs.append((level, begin, end))
        begin = end
    return runs


def job_key(job_id: str) -> bytes:
    return sha256(job_id.encode()).digest()


def job_leaf_hash(key: bytes, leaf: JobLeaf) -> bytes:
    count, digest = leaf
    return sha256(b"\0" + key + count.to_bytes(8, "big") + digest).digest()


def digest_of_entries(entries: list[bytes]) -> JobLeaf:
    """Of the entries of a job in one block, each its leaf index and its leaf hash."""
    return len(entries), sha256(b"\2" + b"".join(entries)).digest()


def digest_of_parts(parts: list[JobLeaf]) -> JobLeaf:
    """Of a job that has leaves in these runs, which are merged."""
    if len(parts) == 1:
        return parts[0]
    data = b"".join(count.to_bytes(8, "big") + digest for count, digest in parts)
    return sum(count for count, _ in parts), sha256(b"\3" + data).digest()


def root_of_run(leaves: dict[bytes, JobLeaf]) -> bytes:
    tree = Tree()
    for key, leaf in sorted(leaves.items()):
        tree.append_hash(job_leaf_hash(key, leaf))
    return tree.root()


class JobIndex:
    """The index of the jobs of a log, which grows by entry. Runs that reach into what is not here are not known."""

    def __init__(self, size: int) -> None:
        """``size`` entries came before, and are not here."""
        self._size = size
        self._runs: list[Run] = []
        self._roots: dict[tuple[int, int, int], bytes] = {}
        """Of all runs that there were, by their places."""
        self._block: dict[bytes, list[bytes]] | None = None if size % BLOCK_ENTRIES else {}
        """The entries of each job behind the full blocks; None while they are not known."""

    def append(self, row: SimpleNamespace) -> None:
        if self._block is not None:
            place = self._size.to_bytes(8, "big") + leaf_hash(row.chain_link)
            self._block.setdefault(job_key(row.job_id), []).append(place)
        self._size += 1
        if self._size % BLOCK_ENTRIES == 0:
            if self._block is not None:
                self._add(0, self._size - BLOCK_ENTRIES, self._leaves_of_block(self._block))
            self._block = {}

    @staticmethod
    def _leaves_of_block(block: dict[bytes, list[bytes]]) -> dict[bytes, JobLeaf]:
        return {key: digest_of_entries(entries) for key, entries in block.items()}

    def _add(self, level: int, begin: int, leaves: dict[bytes, JobLeaf]) -> None:
        """Add a run, and merge the last eight where they are those under one of the next level."""
        kept = leaves if level < LEVEL_MAX else {}
        self._runs.append(Run(level, begin, kept, root_of_run(leaves)))
        self._roots[level, begin, self._runs[-1].end] = self._runs[-1].root
        last = [run for run in self._runs if run.level == level][-RUNS_MERGED:]
        is_group = len(last) == RUNS_MERGED and last[-1].end % run_entries(level + 1) == 0
        if level == LEVEL_MAX or not is_group:
            return
        merged: dict[bytes, list[JobLeaf]] = {}
        for run in last:
            for key, leaf in run.leaves.items():
                merged.setdefault(key, []).append(leaf)
        self._runs = [run for run in self._runs if run not in last]
        self._add(level + 1, last[0].begin, {key: digest_of_parts(parts) for key, parts in merged.items()})

    def check(self, claimed: list[bytes], begin: int, where: str) -> bool:
        """Whether all roots that a snapshot at this size claims are known, of an index that begins at ``begin``. Those
        that are known must be claimed."""
        known = dict(self._roots)
        if self._block:
            behind = self._size - self._size % BLOCK_ENTRIES
            known[0, behind, self._size] = root_of_run(self._leaves_of_block(self._block))
        places = covering_runs(self._size, begin)
        for place, root in zip(places, claimed, strict=True):
            need(known.get(place, root) == root, f"{where}: job_index from entry {place[1] + 1} on")
        return all(place in known for place in places)

    def know(self, kept: "KeptIndex", claim: dict[str, Any]) -> None:
        """Take over what is kept of entries that left, as far as the snapshot at their end claims it."""
        places = covering_runs(self._size, index_begin(claim))
        roots = hashes_of(claim["job_index"], len(places), "job_index of the snapshot at the floor")
        group = self._size - self._size % run_entries(LEVEL_MAX)
        block = kept.block(self._size)
        found = [root_of_run(leaves) for leaves in kept.runs]
        found += [root_of_run(self._leaves_of_block(block))] if block else []
        self._runs = [Run(*place[:2], {}, root) for place, root in zip(places, roots, strict=True) if place[2] <= group]
        if found == roots[len(self._runs) :]:
            behind = zip(places[len(self._runs) :], kept.runs, found, strict=False)
            self._runs += [Run(*place[:2], leaves, root) for place, leaves, root in behind]
            self._block = block
        self._roots = {(run.level, run.begin, run.end): run.root for run in self._runs}


@dataclass(frozen=True)
class KeptIndex:
    """What a bundle has of the index of entries that left before its first one."""

    runs: list[dict[bytes, JobLeaf]]
    keys: bytes
    hashes: bytes

    def block(self, size: int) -> dict[bytes, list[bytes]]:
        """The entries of each job behind the full blocks of the first ``size``."""
        found: dict[bytes, list[bytes]] = {}
        for at in range(0, len(self.keys), 32):
            place = size - len(self.keys) // 32 + at // 32
            found.setdefault(self.keys[at : at + 32], []).append(place.to_bytes(8, "big") + self.hashes[at : at + 32])
        return found


def index_begin(claim: dict[str, Any]) -> int:
    """Leaf index of the first entry of the index that a snapshot claims."""
    return int(claim.get("job_index_from", 1)) - 1


def read_job_index(data: bytes, before: "Before") -> JobIndex:
    """The index of all entries before the first one, as far as it is known."""
    said, index = parse_canonical(data), JobIndex(before.size)
    need(said.keys() == {"hashes", "keys", "payload", "runs"} and type(said["runs"]) is list, JOB_INDEX)
    payload, keys, hashes = (decode_base64(said[name]) for name in ("payload", "keys", "hashes"))
    runs = [decode_base64(text) for text in said["runs"]]
    if sha256(payload).hexdigest() != before.snapshot or "job_index" not in (claim := json.loads(payload)["predicate"]):
        return index
    index.know(KeptIndex([leaves_of_run(run) for run in runs], keys, hashes), claim)
    return index


def leaves_of_run(data: bytes) -> dict[bytes, JobLeaf]:
    """Leaves of 72 bytes by key."""
    leaves = [data[at : at + 72] for at in range(0, len(data), 72)]
    return {leaf[:32]: (int.from_bytes(leaf[32:40], "big"), leaf[40:]) for leaf in leaves}


# --- [1] The container ---

SNAPSHOTS, CHECKPOINT, ANCHORS, JOB_INDEX, KEYS, MANIFEST = (
    "snapshots.ndjson",
    "checkpoint",
    "anchors.json",
    "job_index.json",
    "keys.json",
    "manifest.dsse.json",
)
EVIDENCE = "evidence.dsse.json"
"""Stands where the manifest must in a file that is evidence of a broken chain."""
BEHIND = {
    SNAPSHOTS: [CHECKPOINT],
    CHECKPOINT: [ANCHORS, JOB_INDEX, KEYS],
    ANCHORS: [JOB_INDEX, KEYS],
    JOB_INDEX: [KEYS],
    KEYS: [MANIFEST],
    MANIFEST: [],
}
"""The members that may follow each of the last ones."""
ENTRY_PARTS_MAX = 100_000
ENTRY_PART_BYTES_MAX = 137 * MIB


@dataclass(frozen=True)
class Member:
    """A file of the container: what its manifest must say of it, and where its bytes are."""

    name: str
    size: int
    digest: str
    offset: int


def entries_name(number: int) -> str:
    return f"entries/{number:06d}.ndjson.gz"


def member_bytes_max(name: str, members_before: int) -> int:
    bounds = {
        SNAPSHOTS: 8 * GIB,
        CHECKPOINT: MIB,
        ANCHORS: 16 * MIB,
        JOB_INDEX: 64 * MIB,
        KEYS: 4 * MIB,
        MANIFEST: 64 * KIB + 512 * members_before,
    }
    return bounds.get(name, ENTRY_PART_BYTES_MAX)


def tar_header(name: str, size: int) -> bytes:
    """The one header that a member of this name and size has."""
    front = name.encode().ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + b"%011o\0" % size + b"%011o\0" % 0
    back = b"0".ljust(101, b"\0") + b"ustar\0" + b"00".ljust(249, b"\0")
    checksum = sum(front) + 8 * ord(" ") + sum(back)
    return front + b"%06o\0 " % checksum + back


def read_container(file: BinaryIO) -> dict[str, Member]:
    """The members by name, in the order in which they must stand; each is read once, for its digest."""
    members: dict[str, Member] = {}
    expected = [entries_name(1)]
    while (block := file.read(512)) != bytes(512):
        name, size = block[:100].rstrip(b"\0").decode("ascii"), int(block[124:135], 8)
        need(size >= 0 and block == tar_header(name, size), "a tar header")
        if name == EVIDENCE:
            refuse_evidence(file.read(min(size, member_bytes_max(MANIFEST, len(members)))))
        need(name in expected, f"member {name!r} is out of place")
        need(size <= member_bytes_max(name, len(members)), f"member {name!r} is too long")
        members[name] = read_member(file, name, size)
        if name in BEHIND:
            expected = BEHIND[name]
        else:
            expected = [SNAPSHOTS, entries_name(len(members) + 1)] if len(members) < ENTRY_PARTS_MAX else [SNAPSHOTS]
    need(not expected, "the bundle is not whole")
    need(file.read(513) == bytes(512), "the end of the container is missing, or bytes follow it")
    return members


def refuse_evidence(data: bytes) -> NoReturn:
    """Whoever signed it: nobody needs to be trusted for saying that something is broken."""
    said = json.loads(base64.b64decode(json.loads(data)["payload"]))["predicate"]
    first = said["breaks"][0]
    where = f"{first['kind']} at seq {first['seq']} of tenant {said['tenant_id']}"
    raise ValueError(f"the file is evidence of a broken chain, and no bundle: {where}: {first['detail']}")


def read_member(file: BinaryIO, name: str, size: int) -> Member:
    digest, offset = sha256(), file.tell()
    end = offset + size
    while piece := file.read(min(MIB, end - file.tell())):
        digest.update(piece)
    need(file.tell() == end and file.read(-size % 512) == bytes(-size % 512), f"{name} is cut short or goes on")
    return Member(name, size, digest.hexdigest(), offset)


def bytes_of(file: BinaryIO, member: Member) -> bytes:
    file.seek(member.offset)
    return file.read(member.size)


# --- [2] The manifest ---

BASE64 = rb"[A-Za-z0-9+/]*+={0,2}"
MANIFEST_SPELLING = re.compile(
    rb'\{"payload":"' + BASE64 + rb'","payloadType":"application/vnd\.in-toto\+json",'
    rb'"signatures":\[\{"keyid":"[0-9a-f]{16}","sig":"[A-Za-z0-9+/]{2,254}={0,2}"\}\]\}'
)


@dataclass(frozen=True)
class Manifest:
    """What the manifest says, as it was signed, and by which held keys."""

    payload: bytes
    said: SimpleNamespace
    signers: list[Key]


def read_manifest(data: bytes, members: dict[str, Member], keys: list[Key]) -> Manifest:
    """The manifest, in its one spelling; it lists these members."""
    need(MANIFEST_SPELLING.fullmatch(data), "the manifest is not in its one spelling, with one signature")
    payload, signers = open_envelope(json.loads(data), keys)
    need(len(payload) <= 16 * MIB and payload.count(b",") <= 5 * len(members) + 200, "the manifest's length")
    said = SimpleNamespace(**parse_canonical(payload)["predicate"])
    listed = [member for member in members.values() if member.name != MANIFEST]
    for part, member in zip(said.parts, listed, strict=True):
        found = {"name": member.name, "bytes": member.size, "sha256": member.digest}
        need(part == part | found, f"{member.name} is not the part that the manifest lists")
    need(TENANT.fullmatch(said.tenant_id), "tenant_id of the manifest")
    need(NODE.fullmatch(said.node_id), "node_id of the manifest")
    need(LOG_ORIGIN.fullmatch(said.log_origin), "log_origin of the manifest")
    return Manifest(payload, said, signers)


def compare_manifest(
    manifest: Manifest, parts: list[dict[str, Any]], entries: "Entries", snapshots: int, *, is_tree_known: bool
) -> None:
    """[2] [4] The manifest says what was found, and nothing else."""
    said, first, last = manifest.said, entries.first, entries.last
    names = [part["name"] for part in parts]
    predicate = {
        # Said by whoever made the bundle; the checkpoint answers for log and tree.
        "node_id": said.node_id,
        "log_origin": said.log_origin,
        "tenant_id": said.tenant_id,
        "consistency": said.consistency,
        # Found.
        "format_version": 3 if JOB_INDEX in names else 2 if ANCHORS in names else 1,
        "from_seq": first.seq,
        "to_seq": last.seq,
        "entry_count": last.seq - first.seq + 1,
        "first_hlc": first.t_hlc,
        "last_hlc": last.t_hlc,
        "to_chain_link": last.chain_link,
        "tree_root": entries.tree_root.hex() if is_tree_known else said.tree_root,
        "tree_size": last.seq,
        "snapshot_count": snapshots,
        "parts": parts,
    }
    digest = sha256(b"".join(bytes.fromhex(part["sha256"]) for part in parts)).hexdigest()
    statement = {
        "_type": STATEMENT_TYPE,
        "predicateType": "https://tallystick.dev/bundle/v1",
        "subject": [{"name": f"{said.tenant_id}/{first.seq}-{last.seq}", "digest": {"sha256": digest}}],
        "predicate": predicate,
    }
    need(canonical(statement) == manifest.payload, "the manifest says something else than was found")


def described_parts(
    members: dict[str, Member], entry_parts: list[dict[str, Any]], snapshots: int
) -> list[dict[str, Any]]:
    """The parts as the manifest must list them; those of entries were described when they were read."""
    parts = list(entry_parts)
    for name in [name for name in BEHIND if name in members and name != MANIFEST]:
        member = members[name]
        rows = snapshots if name == SNAPSHOTS else 0
        parts.append(
            {"name": name, "bytes": member.size, "sha256": member.digest, "raw_bytes": member.size, "rows": rows}
        )
    return parts


# --- [5] Snapshots (snapshot.md) ---

TEXT, NUMBER, TEXT_OR_NULL = (str,), (int,), (str, type(None))
SNAPSHOT_MEMBERS: dict[str, tuple[type, ...]] = {
    "dsse_envelope": (dict, type(None)),
    "entry_count": NUMBER,
    "from_chain_link": TEXT,
    "from_seq": NUMBER,
    "merkle_root": TEXT,
    "snapshot_hlc": TEXT,
    "tenant_id": TEXT,
    "to_chain_link": TEXT,
    "to_seq": NUMBER,
}
CLAIMED = [name for name in SNAPSHOT_MEMBERS if name not in ("dsse_envelope", "tenant_id")]
"""What a snapshot's row and what was signed both say of the entries."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot whose signed claim and row agree. Of an unsigned one the claim is the row."""

    claim: SimpleNamespace
    digest: str
    """What the next snapshot names."""
    signers: list[Key]
    keys: Ring
    """The keys that the caller trusts."""
    is_signed: bool = True


def read_snapshots(
    file: BinaryIO, member: Member, said: SimpleNamespace, keys: Ring, before: "Before"
) -> dict[int, Snapshot]:
    """The snapshots by ``to_seq``; each begins where the one before it ended, and names it."""
    snapshots: dict[int, Snapshot] = {}
    previous: Snapshot | None = None
    file.seek(member.offset)
    for _ in range(said.snapshot_count):
        row = parse_row(file.readline(SNAPSHOT_LINE_BYTES_MAX + 1), SNAPSHOT_MEMBERS, said.tenant_id)
        snapshot = open_snapshot(row, keys)
        need(said.from_seq <= row.from_seq <= row.to_seq <= said.to_seq, "a snapshot reaches beyond the range")
        if previous:
            need(row.from_seq == previous.claim.to_seq + 1, "a snapshot does not begin where the one before ended")
        elif before.is_known:
            need(row.from_seq == said.from_seq, "the first snapshot of a chain does not begin with it")
        if snapshot.is_signed:
            check_previous(snapshot.claim.previous_snapshot, previous, before)
        snapshots[row.to_seq] = previous = snapshot
    need(file.tell() == member.offset + member.size, "the number of snapshots")
    return snapshots


def check_previous(named: str | None, previous: Snapshot | None, before: "Before") -> None:
    """A signed snapshot names the one before it."""
    if previous:
        need(named == previous.digest, "a snapshot follows another one")
    elif before.is_known:
        need(named == before.snapshot, "the first snapshot of a chain follows another one")
    else:
        need(HASH.fullmatch(named), "previous_snapshot is no digest")


def open_snapshot(row: SimpleNamespace, keys: Ring) -> Snapshot:
    if row.dsse_envelope is None:
        columns = {name: getattr(row, name) for name in CLAIMED}
        return Snapshot(row, sha256(canonical(columns)).hexdigest(), [], keys, is_signed=False)
    payload, signers = open_envelope(row.dsse_envelope, keys)
    statement = parse_canonical(payload)
    subject = {"name": f"{row.tenant_id}/{row.from_seq}-{row.to_seq}", "digest": {"sha256": row.merkle_root}}
    need(statement["_type"] == STATEMENT_TYPE, "the type of a snapshot's statement")
    need(statement["predicateType"] == "https://tallystick.dev/batch-snapshot/v1", "a snapshot's predicate type")
    need(statement["subject"] == [subject], "a snapshot's subject")
    claim = SimpleNamespace(**statement["predicate"])
    for name in CLAIMED:
        need(canonical(getattr(claim, name)) == canonical(getattr(row, name)), f"{name} of a snapshot's row")
    need(claim.tenant_id == row.tenant_id and claim.tree_size == row.to_seq, "tenant or tree_size of a snapshot")
    need(HASH.fullmatch(claim.tree_root) and NODE.fullmatch(claim.node_id), "a snapshot's tree or node")
    if "job_index" in statement["predicate"]:
        claim.job_index = read_index_claim(statement["predicate"])
    if signers and claim.key_id not in ids_of(signers):
        need(claim.key_id not in ids_of(keys), "a snapshot's key did not sign it")
    return Snapshot(claim, sha256(payload).hexdigest(), signers, keys)


def read_index_claim(claim: dict[str, Any]) -> list[bytes]:
    """The roots of the index of jobs that a snapshot claims, as many as it must have."""
    begin = index_begin(claim)
    need("job_index_from" not in claim or 0 < begin < claim["to_seq"], "job_index_from of a snapshot")
    need(begin % BLOCK_ENTRIES == 0 and begin + 1 == claim.get("job_index_from", 1), "job_index_from of a snapshot")
    places = covering_runs(int(claim["to_seq"]), begin)
    roots = hashes_of(claim["job_index"], len(places), "job_index of a snapshot")
    need(len(roots) == len(places), "the number of runs in job_index")
    return roots


# --- [3] Entries (chain-link.md) ---

ENTRY_MEMBERS: dict[str, tuple[type, ...]] = {
    "action": TEXT,
    "chain_link": TEXT,
    "hlc_logical": NUMBER,
    "hlc_node": TEXT,
    "hlc_physical": NUMBER,
    "job_id": TEXT,
    "link_version": NUMBER,
    "origin": TEXT_OR_NULL,
    "payload": TEXT,
    "payload_digest": TEXT,
    "prev_chain_link": TEXT_OR_NULL,
    "seq": NUMBER,
    "t_hlc": TEXT,
    "tenant_id": TEXT,
}


@dataclass
class Entries:
    """What reading the entries of a bundle leaves."""

    first: Any = None
    last: Any = None
    tree_root: bytes = b""
    kept_root: bytes | None = None
    """Root of the tree at the size of the checkpoint given, where the entries reach it."""
    signed_to: int = 0
    is_index_known: bool = True
    """Whether the entries say what each index of jobs must be."""
    is_unknown_key: bool = False
    """A snapshot counts for nothing: no held key signed it, or only keys that did not count then."""
    parts: list[dict[str, Any]] = field(default_factory=list)


def read_entries(
    file: BinaryIO,
    members: dict[str, Member],
    said: SimpleNamespace,
    snapshots: dict[int, Snapshot],
    kept_size: int | None,
    before: "Before",
    callers: "Callers",
) -> Entries:
    """[3] [4] The entries follow one another, and are what the snapshots say."""
    found = Entries()
    tree, segment, segment_start = Tree(before.size, before.subtrees), Tree(), None
    job_index = JobIndex(said.from_seq - 1)
    if JOB_INDEX in members and before.size:
        job_index = read_job_index(bytes_of(file, members[JOB_INDEX]), before)
    if before.size and before.size == kept_size:
        found.kept_root = tree.root()
    segment_starts = {snapshot.claim.from_seq for snapshot in snapshots.values()}
    entry_members = [member for member in members.values() if member.name not in BEHIND]
    for part, member in zip(said.parts[: len(entry_members)], entry_members, strict=True):
        lines = unpack_entries(bytes_of(file, member), part)
        raw_bytes = sum(map(len, lines))
        described = {"name": member.name, "bytes": member.size, "sha256": member.digest}
        found.parts.append({**described, "raw_bytes": raw_bytes, "rows": len(lines)})
        for row in rows_of(lines, said.tenant_id):
            check_entry(row, found.last, said.from_seq, before)
            check_signed(row, callers)
            found.first, found.last = found.first or row, row
            if row.seq in segment_starts:
                segment, segment_start = Tree(), row
            tree.append(row.chain_link)
            segment.append(row.chain_link)
            job_index.append(row)
            if row.seq == kept_size:
                found.kept_root = tree.root()
            if row.seq in snapshots:
                snapshot = snapshots[row.seq]
                check_covered(snapshot.claim, segment_start, row, segment.root())
                if snapshot.is_signed:
                    if hasattr(snapshot.claim, "job_index"):
                        begin = index_begin(vars(snapshot.claim))
                        found.is_index_known &= job_index.check(snapshot.claim.job_index, begin, f"seq {row.seq}")
                    if before.is_known:
                        need(snapshot.claim.tree_root == tree.root().hex(), f"seq {row.seq}: tree_root")
                    counting = signers_in_time(snapshot.signers, hlc_of(row))
                    found.is_unknown_key |= not counting
                    if snapshot.keys.is_enough(counting):
                        found.signed_to = row.seq
    found.tree_root = tree.root()
    return found


def unpack_entries(data: bytes, part: dict[str, Any]) -> list[bytes]:
    """The lines of a part, which the manifest says the length of."""
    raw_bytes_max = 136 * MIB if part["rows"] == 1 else 8 * MIB
    need(0 < part["raw_bytes"] <= raw_bytes_max, f"{part['name']} is too long")
    stream = zlib.decompressobj(wbits=31)
    raw = stream.decompress(data, part["raw_bytes"] + 1)
    need(stream.eof and not stream.unused_data, f"{part['name']} is longer than the manifest says, or goes on")
    need(1 <= raw.count(b"\n") <= ROWS_PER_PART_MAX, f"{part['name']}: the number of rows")
    return raw.splitlines(keepends=True)


def rows_of(lines: list[bytes], tenant_id: str) -> Iterator[SimpleNamespace]:
    for line in lines:
        yield parse_row(line, ENTRY_MEMBERS, tenant_id)


def hlc_of(row: SimpleNamespace) -> tuple[int, int, str]:
    return row.hlc_physical, row.hlc_logical, row.hlc_node


def check_entry(row: SimpleNamespace, last: SimpleNamespace | None, from_seq: int, before: "Before") -> None:
    """An entry by itself, and against the one before it."""
    where = f"seq {row.seq}"
    if last:
        need(row.seq == last.seq + 1, f"{where} stands in the wrong place")
        need(row.prev_chain_link == last.chain_link, f"{where}: prev_chain_link")
        need(row.link_version >= last.link_version, f"{where}: version 1 after version 2")
    else:
        need(row.seq == from_seq, f"{where} stands in the wrong place")
        if before.is_known:
            need(row.prev_chain_link == before.chain_link, f"{where}: prev_chain_link")
        else:
            need(HASH.fullmatch(row.prev_chain_link), f"{where}: prev_chain_link")
    check_columns(row)


def check_columns(row: SimpleNamespace) -> None:
    """Digest, HLC and link of an entry are those of its columns."""
    where = f"seq {row.seq}"
    need(row.payload_digest == sha256(row.payload.encode()).hexdigest(), f"{where}: payload-digest")
    need(row.t_hlc == f"{row.hlc_physical}:{row.hlc_logical}:{row.hlc_node}", f"{where}: hlc-columns")
    need(row.chain_link == link_of(row), f"{where}: link")
    check_form(row)


def link_of(row: SimpleNamespace) -> str:
    """The link over an entry's columns."""
    if row.link_version == 1:
        previous = row.prev_chain_link or "genesis"
        return sha256((row.t_hlc + row.job_id + row.action + previous + row.payload_digest).encode()).hexdigest()
    need(row.link_version == 2, f"link version {row.link_version} is not known")
    fields = [
        row.tenant_id.encode(),
        row.seq.to_bytes(8, "big"),
        row.t_hlc.encode(),
        row.job_id.encode(),
        row.action.encode(),
        bytes.fromhex(row.prev_chain_link or ""),
        bytes.fromhex(row.payload_digest),
        (row.origin or "").encode(),
    ]
    link = sha256(b"tallystick.chain-link.v2\n")
    for data in fields:
        link.update(len(data).to_bytes(4, "big") + data)
    return link.hexdigest()


# --- [3] The form of an entry (chain-link.md, "The form of an entry") ---

HLC = re.compile("(0|[1-9][0-9]{0,18}):(0|[1-9][0-9]{0,9}):" + NODE.pattern)
LOGICAL_MAX = 2**32 - 1
NESTING_MAX = 64
ACTION = re.compile("[A-Z_]{1,64}")
JOB_ID = re.compile("[A-Za-z0-9._:-]{1,128}")
SUBJECT_BYTES_MAX = 255
ORIGIN_BYTES_MAX = 4 * KIB
ORIGIN_MEMBERS = ["bundle_digest", "chain_link", "log", "node_id", "seq"]
CONFLICT_MEMBERS = ["action", "digest", "hlc", "kept_digest", "payload", "type"]
# generated: actions
JOB_EVENTS = {
    "ENQUEUE": "JobCreated",
    "DEQUEUE": "JobAccepted",
    "EXECUTE": "JobProgressReported",
    "COMPLETE": "JobCompleted",
    "FAIL": "JobFailed",
    "CANCEL": "JobCancellationRequested",
    "CANCEL_ACK": "JobCancellationAcked",
    "TIMEOUT": "JobTimedOut",
    "DISPATCH": "WorkflowDispatched",
    "WORKFLOW_COMPLETE": "WorkflowCompleted",
}
TYPE_OF_ACTION = {
    "ENQUEUE": "JobCreated",
    "DEQUEUE": "JobAccepted",
    "EXECUTE": "JobProgressReported",
    "COMPLETE": "JobCompleted",
    "FAIL": "JobFailed",
    "CANCEL": "JobCancellationRequested",
    "CANCEL_ACK": "JobCancellationAcked",
    "TIMEOUT": "JobTimedOut",
    "DISPATCH": "WorkflowDispatched",
    "WORKFLOW_COMPLETE": "WorkflowCompleted",
    "PROPOSED": "CommitmentProposed",
    "PROPOSE_ACCEPTED": "CommitmentProposed",
    "PROPOSE_REJECTED": "CommitmentProposed",
    "CAPACITY_SET": "CapacitySet",
    "TENANT_CREATED": "TENANT_CREATED",
    "KEY_ADDED": "KEY_ADDED",
    "KEY_ROTATED": "KEY_ROTATED",
    "KEY_REVOKED": "KEY_REVOKED",
    "KEY_ADMITTED": "KEY_ADMITTED",
    "WAL_LOST": "WAL_LOST",
    "REFUSED": "Refused",
    "LOG_FORKED": "LOG_FORKED",
    "BREAK_FOUND": "BREAK_FOUND",
    "BREAK_ACKNOWLEDGED": "BREAK_ACKNOWLEDGED",
    "CONFLICT": "Conflict",
    "SUBJECT_ERASED": "SUBJECT_ERASED",
    "PRIVACY_DECLARED": "PRIVACY_DECLARED",
    "ACT_ALLOWED": "ACT_ALLOWED",
    "ACCESS_REFUSED": "ACCESS_REFUSED",
    "PAYLOADS_READ": "PAYLOADS_READ",
    "EPOCH_START": "EPOCH_START",
    "TOKEN_ISSUED": "TOKEN_ISSUED",
    "TOKEN_REVOKED": "TOKEN_REVOKED",
    "WEBHOOK_ADDED": "WEBHOOK_ADDED",
    "WEBHOOK_REMOVED": "WEBHOOK_REMOVED",
    "WEBHOOK_DEAD_LETTERED": "WEBHOOK_DEAD_LETTERED",
    "REGION_RETIRED": "REGION_RETIRED",
    "REGION_ADMITTED": "REGION_ADMITTED",
    "LOG_EXCLUDED": "LOG_EXCLUDED",
    "LOG_INCLUDED": "LOG_INCLUDED",
    "REGION_KEY_REVOKED": "REGION_KEY_REVOKED",
    "RETENTION_SET": "RETENTION_SET",
    "HOLD_PLACED": "HOLD_PLACED",
    "HOLD_RELEASED": "HOLD_RELEASED",
    "PRUNED": "PRUNED",
    "CALLER_REGISTERED": "CALLER_REGISTERED",
    "CALLER_REVOKED": "CALLER_REVOKED",
    "SIGNATURES_REQUIRED": "SIGNATURES_REQUIRED",
    "STATEMENT_REGISTERED": "STATEMENT_REGISTERED",
}
# generated: end


def check_form(row: SimpleNamespace) -> None:
    """The entry is one that a ledger writes or imports."""
    where = f"seq {row.seq}: malformed"
    check_hlc(row.t_hlc, where)
    check_names(row.action, row.job_id, where)
    if row.link_version == 1:
        need(row.origin is None, where)
        canonical_text(parse_json(row.payload))
        return
    if row.origin is not None:
        check_origin(row.origin, where)
    payload = canonical_object(row.payload, where)
    check_members(row.action, payload, where)
    if row.action == "CONFLICT":
        check_conflict(row, payload, where)


def check_hlc(text: str, where: str) -> None:
    match = HLC.fullmatch(text)
    need(match and int(match[1]) <= NEVER and int(match[2]) <= LOGICAL_MAX, where)


def check_names(action: str, job_id: str, where: str) -> None:
    need(ACTION.fullmatch(action), where)
    if action in JOB_EVENTS:
        need(JOB_ID.fullmatch(job_id), where)
    else:
        need(1 <= len(job_id.encode()) <= SUBJECT_BYTES_MAX and min(job_id) >= " ", where)


def check_origin(text: str, where: str) -> None:
    need(len(text.encode()) <= ORIGIN_BYTES_MAX, where)
    origin = canonical_object(text, where)
    need(sorted(origin) == ORIGIN_MEMBERS, where)
    need(type(origin["log"]) is str and type(origin["node_id"]) is str, where)
    need(all(HASH.fullmatch(origin[name]) for name in ("bundle_digest", "chain_link")), where)
    need(is_count(origin["seq"]) and origin["seq"] >= 1, where)


def check_members(action: str, payload: dict[str, Any], where: str) -> None:
    """What the payload of an entry with this action says in every ledger."""
    if action in TYPE_OF_ACTION:
        need(payload.get("type") == TYPE_OF_ACTION[action], where)
    if action in JOB_EVENTS:
        need(is_count(payload.get("fence_token")), where)


def check_conflict(row: SimpleNamespace, payload: dict[str, Any], where: str) -> None:
    """A CONFLICT entry holds the event that its HLC is named for (bundle.md, "CONFLICT entries")."""
    need(sorted(payload) == CONFLICT_MEMBERS and all(type(value) is str for value in payload.values()), where)
    held = SimpleNamespace(**payload)
    check_hlc(held.hlc, where)
    need(held.digest == sha256(held.payload.encode()).hexdigest(), where)
    event = canonical([held.hlc, row.job_id, held.action, held.digest])
    physical, logical, _ = held.hlc.split(":")
    need(row.t_hlc == f"{physical}:{logical}:conflict-{sha256(event).hexdigest()[:40]}", where)
    check_names(held.action, row.job_id, where)
    need(held.action != "CONFLICT", where)
    check_members(held.action, canonical_object(held.payload, where), where)


def is_count(value: Any) -> bool:
    """Whether it is an integer from 0 to 2^53 - 1."""
    return type(value) is float and value.is_integer() and 0 <= value <= NUMBER_MAX


def canonical_object(text: str, where: str) -> dict[str, Any]:
    """The object that a text in canonical JSON is; all its numbers are floats, as binary64 holds them."""
    value = parse_json(text)
    need(type(value) is dict and canonical_text(value) == text, where)
    return dict(value)


def parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=once_each, parse_int=float, parse_constant=refuse)


def once_each(members: list[tuple[str, Any]]) -> dict[str, Any]:
    need(len(dict(members)) == len(members), "a name stands twice in one JSON object")
    return dict(members)


def refuse(name: str) -> None:
    need(False, f"{name} is not JSON")


def canonical_text(value: Any, depth: int = 0) -> str:
    """Canonical JSON of any value (RFC 8785); raises where it has none."""
    if value is None or type(value) is bool:
        return json.dumps(value)
    if type(value) is str:
        need("\0" not in value, "U+0000 in JSON")
        value.encode()
        return json.dumps(value, ensure_ascii=False)
    if type(value) is float:
        return number_text(value)
    need(depth < NESTING_MAX, "JSON is nested too deep")
    if type(value) is list:
        return "[" + ",".join(canonical_text(item, depth + 1) for item in value) + "]"
    names = sorted(value, key=lambda name: name.encode("utf-16-be"))
    return "{" + ",".join(f"{canonical_text(name)}:{canonical_text(value[name], depth + 1)}" for name in names) + "}"


def number_text(number: float) -> str:
    """A number as ECMAScript prints it (RFC 8785, 3.2.2.3)."""
    need(abs(number) < float("inf"), "a JSON number is too large")
    if number == 0:
        return "0"
    sign = "-" if number < 0 else ""
    mantissa, exponent_text = f"{abs(number)!r}e0".split("e")[:2]
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    point = len(whole) + int(exponent_text) - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0")
    if len(digits) <= point <= 21:
        return sign + digits + "0" * (point - len(digits))
    if 0 < point <= 21:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    behind = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{behind}e{point - 1:+d}"


# --- [3] What callers signed (signed-events.md) ---

SIGNATURE_MEMBERS: dict[str, tuple[type, ...]] = {
    "id": TEXT,
    "key_id": TEXT,
    "not_after_ms": NUMBER,
    "not_before_ms": NUMBER,
    "sig": TEXT,
}
PATH_MEMBERS: dict[str, tuple[type, ...]] = {"index": NUMBER, "path": TEXT, "size": NUMBER}
UNSIGNED_MEMBERS = ("actor", "idempotency", "signature")
SIGNED_ID = re.compile("[!-~]{1,255}")
KEY_ID = re.compile("[0-9a-f]{16}")
WINDOW_MS_MAX = 6 * 86_400_000


@dataclass
class Callers:
    """The callers that a saved ``/v1/keys`` answer names, and what the entries say of them so far."""

    keys: dict[str, tuple[Key, list[str]]] = field(default_factory=dict)
    """By id, a key and the tenants whose events it may sign."""
    required: list[tuple[tuple[int, int, str], str, list[str]]] = field(default_factory=list)
    """From which HLC on, whose events of which types must be signed; ascending."""
    are_known: bool = False
    seen: dict[tuple[str, str, Any, Any], int] = field(default_factory=dict)
    """Seqs of signed entries by key, id, index and log."""
    is_unknown_key: bool = False
    is_unchecked: bool = False


def load_callers(path: Path | None) -> Callers:
    """The callers in the files that ``load_keys`` reads."""
    callers = Callers()
    for _, text in key_files(path) if path else ():
        said = json.loads(text) if text.lstrip().startswith("{") else {}
        if said.get("callers") is None:
            continue
        callers.are_known = True
        for item in said["callers"]:
            key = read_key(item)
            other, tenants = callers.keys.get(key.id, (key, []))
            earlier = min(key, other, key=lambda each: each.revoked_from)
            callers.keys[key.id] = (earlier, [*tenants, *item["tenants"]])
        for item in said.get("signatures_required", []):
            callers.required.append((hlc_in(item["from_hlc"]), item["tenant_id"], item["types"]))
    callers.required.sort()
    return callers


def check_signed(row: SimpleNamespace, callers: Callers) -> None:
    """The event of an entry, or in a CONFLICT entry, is what its caller signed."""
    action, hlc, text = row.action, hlc_of(row), row.payload
    if row.link_version == 1:
        return
    if action == "CONFLICT":
        held = parse_json(row.payload)
        action, hlc, text = held["action"], hlc_in(held["hlc"]), held["payload"]
    if action not in JOB_EVENTS:
        return
    where, payload = f"seq {row.seq}: caller-signature", parse_json(text)
    if "signature" not in payload:
        of_tenant = [each for each in callers.required if each[1] == row.tenant_id]
        applying = [types for from_hlc, _, types in of_tenant if from_hlc <= hlc]
        is_required = bool(applying) and TYPE_OF_ACTION[action] in applying[-1]
        need(not is_required or row.origin is not None or row.action == "CONFLICT", where)
        return
    signature = json.loads(text)["signature"]
    need(type(signature) is dict, where)
    is_of_many = not PATH_MEMBERS.keys().isdisjoint(signature)
    said = object_of(signature, SIGNATURE_MEMBERS | (PATH_MEMBERS if is_of_many else {}), where)
    need(SIGNED_ID.fullmatch(said.id) and KEY_ID.fullmatch(said.key_id), where)
    need(0 <= said.not_after_ms - said.not_before_ms <= WINDOW_MS_MAX, where)
    need(said.not_before_ms <= hlc[0] <= said.not_after_ms, where)
    message, raw = signed_message(row, payload, said, is_of_many=is_of_many), decode_base64(said.sig)
    judge_signed(row, hlc, said.key_id, raw, message, callers)
    if row.action != "CONFLICT":
        log = None if row.origin is None else parse_json(row.origin)["log"]
        place = said.key_id, said.id, said.index if is_of_many else None, log
        need(place not in callers.seen, f"{where}: it repeats seq {callers.seen.get(place)}")
        callers.seen[place] = row.seq


def signed_message(row: SimpleNamespace, payload: dict[str, Any], said: SimpleNamespace, *, is_of_many: bool) -> bytes:
    """The bytes that the caller must have signed."""
    names = ("id", "key_id", "not_after_ms", "not_before_ms")
    shared = {name: getattr(said, name) for name in names}
    signed = {name: value for name, value in payload.items() if name not in UNSIGNED_MEMBERS}
    header = canonical({**shared, "job_id": row.job_id, "tenant_id": row.tenant_id})
    message = b"tallystick.signed-event.v1\n" + header + b"\n" + canonical_text(signed).encode()
    if not is_of_many:
        return message
    need(said.index < said.size, f"seq {row.seq}: caller-signature")
    data = decode_base64(said.path)
    need(len(data) % 32 == 0, f"seq {row.seq}: caller-signature")
    path = [data[at : at + 32] for at in range(0, len(data), 32)]
    root = root_of_path(said.index, said.size, sha256(b"\0" + message).digest(), path)
    need(not path, f"seq {row.seq}: caller-signature")
    return b"tallystick.signed-events.v1\n" + canonical({**shared, "root": root.hex(), "size": said.size})


def judge_signed(
    row: SimpleNamespace, hlc: tuple[int, int, str], key_id: str, raw: bytes, message: bytes, callers: Callers
) -> None:
    """A caller that is known signed this, and may; what other ledgers' callers signed is history."""
    if not callers.are_known:
        callers.is_unchecked = True
        return
    key, tenants = callers.keys.get(key_id, (None, []))
    is_allowed = any(each in ("*", row.tenant_id) or is_beginning(each, row.tenant_id) for each in tenants)
    if key is None or not is_allowed or not key.counts_at(hlc):
        callers.is_unknown_key |= row.origin is None
        return
    need(key.signed(raw, message), f"seq {row.seq}: caller-signature")


def is_beginning(pattern: str, tenant_id: str) -> bool:
    return pattern.endswith("*") and tenant_id.startswith(pattern[:-1])


# --- [4] What left before the first entry (retention.md) ---

RETENTION = "retention policy"
"""Job id of the entries about it."""
LOOSENING = ("RETENTION_SET", "HOLD_RELEASED", "PRUNED")
RETENTION_STATEMENT_TYPE = "application/vnd.tallystick.retention-statement+json"
KEPT_S_MAX = 100 * 366 * 86_400
HLC_CHARACTERS_MAX = 200
HASH_MEMBERS = ("chain_link", "tree_root", "snapshot")


@dataclass(frozen=True)
class Before:
    """What is known of the entries before the first one of a bundle."""

    is_known: bool
    """Whether it is: there are none, or they left with a prune."""
    size: int = 0
    """How many left."""
    chain_link: str | None = None
    subtrees: Sequence[bytes] = ()
    snapshot: str | None = None
    is_unknown_key: bool = False


def read_before(file: BinaryIO, members: dict[str, Member], said: SimpleNamespace, keys: list[Key]) -> Before:
    """What the newest PRUNED entry that counts says, if it is about all entries before the first one here."""
    if said.from_seq == 1 or said.tenant_id == "_system":
        return Before(is_known=said.from_seq == 1)
    rows = retention_rows(file, members, said)
    facts = {row.seq: canonical_object(row.payload, f"seq {row.seq}: malformed") for row in rows}
    pruned = [row for row in rows if is_loosening(row) and row.action == "PRUNED"]
    if not any(facts[row.seq].get("to_seq") == said.from_seq - 1 for row in pruned):
        return Before(is_known=False)
    is_unknown_key, newest, last = False, None, None
    for row in rows:
        if is_loosening(row):
            is_unknown_key |= not stated_in_time(row, facts[row.seq], said, keys)
            if row.action == "PRUNED" and is_floor(facts[row.seq], row, last):
                newest = facts[row.seq]
        last = row
    if newest is None or newest["to_seq"] != said.from_seq - 1:
        return Before(is_known=False, is_unknown_key=is_unknown_key)
    subtrees = [bytes.fromhex(text) for text in newest["compact_range"]]
    return Before(True, said.from_seq - 1, newest["chain_link"], subtrees, newest["snapshot"], is_unknown_key)


def retention_rows(file: BinaryIO, members: dict[str, Member], said: SimpleNamespace) -> list[SimpleNamespace]:
    rows: list[SimpleNamespace] = []
    entry_members = [member for member in members.values() if member.name not in BEHIND]
    for part, member in zip(said.parts[: len(entry_members)], entry_members, strict=True):
        lines = unpack_entries(bytes_of(file, member), part)
        rows += [row for row in rows_of(lines, said.tenant_id) if row.job_id == RETENTION]
    return rows


def is_loosening(row: SimpleNamespace) -> bool:
    """Whether an entry can let others leave: the ledger of this chain made it."""
    return row.origin is None and row.action in LOOSENING


def stated_in_time(row: SimpleNamespace, facts: dict[str, Any], said: SimpleNamespace, keys: list[Key]) -> bool:
    """Whether a held key that counted then stated exactly these facts of a log of this tenant."""
    where = f"seq {row.seq}: malformed"
    payload, signers = open_envelope(facts.get("statement") or {}, keys, RETENTION_STATEMENT_TYPE)
    stated = {name: value for name, value in facts.items() if name not in ("statement", "type")}
    log = json.loads(payload)["log"]
    need(type(log) is str and log.rpartition("/")[2] == said.tenant_id, where)
    expected = {"action": row.action, "facts": stated, "log": log}
    need(payload == canonical_text(expected).encode(), where)
    return any(key.counts_at(hlc_of(row)) for key in signers)


def is_floor(facts: dict[str, Any], row: SimpleNamespace, last: SimpleNamespace | None) -> bool:
    """Whether a PRUNED entry is of its form, and follows the entry about retention before it."""
    after = facts.get("after")
    if not is_form_of_floor(facts) or type(after) is not dict:
        return False
    seq, link = after.get("seq"), after.get("chain_link")
    if type(seq) is not float or not seq.is_integer() or type(link) is not str:
        return False
    is_next = (seq, link) == (last.seq, last.chain_link) if last else seq <= facts["to_seq"]
    subtrees = [bytes.fromhex(text) for text in facts["compact_range"]]
    is_whole = facts["entry_count"] == facts["to_seq"] - facts["from_seq"] + 1 and facts["to_seq"] < row.seq
    if not is_whole or int(facts["to_seq"]).bit_count() != len(subtrees):
        return False
    return is_next and Tree(int(facts["to_seq"]), subtrees).root().hex() == facts["tree_root"]


def is_form_of_floor(facts: dict[str, Any]) -> bool:
    """Whether the members of a PRUNED entry are of their types and bounds."""
    hashes = [facts.get(name) for name in HASH_MEMBERS]
    for name in ("compact_range", "manifests"):
        if type(facts.get(name)) is not list:
            return False
        hashes += facts[name]
    counts = [facts.get(name) for name in ("decided_ms", "never_ended")]
    seqs = [facts.get(name) for name in ("from_seq", "to_seq", "entry_count")]
    kept = [facts.get("period_s")] if facts.get("minimum_s") is None else [facts.get("period_s"), facts["minimum_s"]]
    texts = [facts.get(name) for name in ("archive", "highest_hlc")]
    carried = [facts.get(name) for name in ("commitments", "private_fields")]
    return (
        all(value is None or type(value) is dict for value in carried)
        and all(type(text) is str and HASH.fullmatch(text) for text in hashes)
        and all(is_count(number) for number in [*counts, *seqs, *kept])
        and all(number >= 1 for number in [*seqs, *kept])
        and all(number <= KEPT_S_MAX for number in kept)
        and all(type(text) is str for text in texts)
        and len(str(texts[1])) <= HLC_CHARACTERS_MAX
    )


# --- [4] Snapshots and entries ---


def check_covered(claim: SimpleNamespace, first: Any, last: SimpleNamespace, root: bytes) -> None:
    """[4] A snapshot says of its entries what they are."""
    covered = {
        "entry_count": last.seq - first.seq + 1,
        "from_chain_link": first.chain_link,
        "from_seq": first.seq,
        "merkle_root": root.hex(),
        "snapshot_hlc": last.t_hlc,
        "to_chain_link": last.chain_link,
        "to_seq": last.seq,
    }
    need({name: getattr(claim, name) for name in CLAIMED} == covered, f"seq {last.seq}: snapshot-root")


def signers_in_time(signers: list[Key], hlc: tuple[int, int, str]) -> list[Key]:
    """Those of the keys that counted then wherever they were given."""
    too_late = ids_of([key for key in signers if not key.counts_at(hlc)])
    return [key for key in signers if key.id not in too_late]


# --- [6] Checkpoints (checkpoint.md) ---

CHECKPOINT_SIGNATURES_MAX = 100


@dataclass(frozen=True)
class Checkpoint:
    """A signed tree head. ``counts`` is False when keys were given and none of them signed it."""

    origin: str
    size: int
    root: bytes
    counts: bool


def open_checkpoint(data: bytes, keys: Ring | None) -> Checkpoint:
    need(len(data) <= MIB, "a checkpoint's length")
    note = data.decode()
    need(not re.search("[\0-\x09\x0b-\x1f]", note), "a checkpoint holds control characters")
    text, separator, lines = note.rpartition("\n\n")
    need(separator and lines.endswith("\n"), "a checkpoint's form")
    origin, size, root_text, *others = text.split("\n")
    need(origin and not re.search(r"[\s+]", origin) and all(others), "a checkpoint's origin")
    need(re.fullmatch("0|[1-9][0-9]{0,18}", size) and int(size) <= TREE_SIZE_MAX, "a checkpoint's size")
    root = decode_base64(root_text)
    need(len(root) == 32, "a checkpoint's root")
    signatures = [read_signature_line(line) for line in lines.split("\n")[:-1]]
    need(1 <= len(signatures) <= CHECKPOINT_SIGNATURES_MAX, "a checkpoint's signature lines")
    counts = keys is None or signed_note(f"{text}\n".encode(), origin, signatures, keys)
    return Checkpoint(origin, int(size), root, counts)


def read_signature_line(line: str) -> tuple[str, bytes, bytes]:
    """Name, key hash and signature of a line under a signed note."""
    match = re.fullmatch(r"— ([^\s+]+) (\S+)", line)
    if match is None:
        raise ValueError("a checkpoint's signature lines")
    data = decode_base64(match[2])
    need(len(data) > 4, "a checkpoint's signature")
    return match[1], data[:4], data[4:]


def signed_note(text: bytes, origin: str, signatures: list[tuple[str, bytes, bytes]], keys: Ring) -> bool:
    """Whether held keys that are not revoked signed a note; a wrong signature under the name of one is refused."""
    revoked = ids_of([key for key in keys if key.is_revoked])
    is_too_long = len(origin.encode()) > COSIGNED_NAME_BYTES_MAX
    signers = []
    for key in keys:
        is_of_notes = key.is_ed25519 or (key.is_second and not is_too_long)
        if not is_of_notes or key.id in revoked:
            continue
        log = note_key(origin, key, ML_DSA_TYPE if key.is_second else LOG_TYPE)
        for name, named_hash, signature in signatures:
            if (name, named_hash) == (origin, log.hash):
                signed_time(text.decode(), signature, log)
                signers.append(key)
    return keys.is_enough(signers)


# --- Signatures under notes (checkpoint.md) ---

LOG_TYPE, COSIGNATURE_TYPE, ML_DSA_TYPE = 1, 4, 6
TIME_BYTES = 8
TIME_MAX_S = 253_402_300_799
"""Last second of the year 9999."""
COSIGNED_NAME_BYTES_MAX = 255
RAW_KEY_BYTES = {LOG_TYPE: 32, COSIGNATURE_TYPE: 32, ML_DSA_TYPE: 1312}
NOTE_SIGNATURE_BYTES = {LOG_TYPE: 64, COSIGNATURE_TYPE: TIME_BYTES + 64, ML_DSA_TYPE: TIME_BYTES + 2420}


@dataclass(frozen=True)
class NoteKey:
    """A verifier key: a public key of a type, and the name and hash by which a signature line identifies it."""

    name: str
    hash: bytes
    key: Key
    type: int


def note_key(name: str, key: Key, key_type: int) -> NoteKey:
    typed = bytes([key_type]) + key.public.public_bytes_raw()
    return NoteKey(name, sha256(name.encode() + b"\n" + typed).digest()[:4], key, key_type)


def signed_time(text: str, signature: bytes, by: NoteKey) -> int:
    """The time that a signature under a note states, in seconds since 1970, 0 where none; raises when it is wrong."""
    need(len(signature) == NOTE_SIGNATURE_BYTES[by.type], "a signature's length")
    if by.type == LOG_TYPE:
        need(by.key.signed(signature, text.encode()), "a checkpoint's signature")
        return 0
    time_s, rest = int.from_bytes(signature[:TIME_BYTES]), signature[TIME_BYTES:]
    need(time_s <= TIME_MAX_S, "a signature's time")
    message = f"cosignature/v1\ntime {time_s}\n{text}".encode()
    if by.type == ML_DSA_TYPE:
        message = tree_head_message(text, by.name.encode(), time_s)
    need(by.key.signed(rest, message), "a signature that states a time")
    return time_s


def tree_head_message(text: str, name: bytes, time_s: int) -> bytes:
    """The bytes that an ML-DSA-44 key of this name signs for a checkpoint."""
    origin, size, root = text.split("\n")[:3]
    log = origin.encode()
    need(max(len(name), len(log)) <= COSIGNED_NAME_BYTES_MAX, "the length of a name that ML-DSA-44 signs")
    signer = bytes([len(name)]) + name + time_s.to_bytes(8)
    start = bytes(8)
    return b"subtree/v1\n\0" + signer + bytes([len(log)]) + log + start + int(size).to_bytes(8) + decode_base64(root)


def check_own_checkpoint(
    checkpoint: Checkpoint, said: SimpleNamespace, entries: Entries, *, is_tree_known: bool
) -> None:
    """[6] The bundle's checkpoint is of this log, and its tree begins with the tree of the manifest."""
    to_seq = entries.last.seq
    need(checkpoint.origin == f"{said.log_origin}/{said.tenant_id}", "the checkpoint's log")
    need(to_seq <= checkpoint.size, "the checkpoint's size")
    need(type(said.consistency) is list and all(map(HASH.fullmatch, said.consistency)), "consistency")
    root = entries.tree_root if is_tree_known else bytes.fromhex(said.tree_root)
    proof = [bytes.fromhex(text) for text in said.consistency]
    roots = roots_of_proof(to_seq, checkpoint.size, root, proof)
    need(roots == (root, checkpoint.root) and not proof, "the checkpoint's log does not begin like this")


CONSISTENCY_HASHES_MAX = 128
ANCHOR_TEXT_LENGTHS_MAX = {"by": 2048, "checkpoint": NEVER, "kind": 7, "response": NEVER, "time": 64}


def read_anchors(data: bytes) -> list[dict[str, Any]]:
    """[6] The statements in anchors.json, of their form; `tally verify-bundle --tsa-ca` judges time stamps."""
    member = parse_canonical(data)
    need(member.keys() == {"anchors"} and member["anchors"], "anchors.json")
    check_statements(member["anchors"])
    return member["anchors"]


def check_statements(anchors: Any) -> None:
    """The form of statements of external witnesses."""
    need(type(anchors) is list and len(anchors) <= 128, "the number of anchors")
    for anchor in anchors:
        need(anchor.keys() == {*ANCHOR_TEXT_LENGTHS_MAX, "consistency"}, "the members of an anchor")
        need(anchor["kind"] in ("rfc3161", "witness"), "the kind of an anchor")
        for name, length_max in ANCHOR_TEXT_LENGTHS_MAX.items():
            text = anchor[name]
            need(type(text) is str and len(text) <= length_max and "\0" not in text, f"{name} of an anchor")
        hashes_of(anchor["consistency"], CONSISTENCY_HASHES_MAX, "an anchor's proof")


# --- Policies over witnesses (policy.md) ---


@dataclass
class Policy:
    """Which witnesses must have cosigned a log."""

    logs: list[NoteKey] = field(default_factory=list)
    witnesses: dict[str, tuple[str, NoteKey]] = field(default_factory=dict)
    """By name, the text of the verifier key, and the key."""
    groups: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    """By name, how many of which members."""
    quorum: str = ""


def read_policy(data: bytes) -> Policy:
    """The policy in a file; refused when a line is none of policy.md."""
    need(len(data) <= 256 * KIB, "the length of a policy")
    policy = Policy()
    for line in data.decode().split("\n"):
        words = re.findall("[^ \t]+", line)
        if words and not words[0].startswith("#"):
            add_line(policy, words[0], words[1:])
    need(policy.quorum, "a policy without a quorum")
    return policy


def add_line(policy: Policy, item: str, words: list[str]) -> None:
    """One line of a policy; what it names is defined above it."""
    names = {*policy.witnesses, *policy.groups}
    if item == "log":
        need(1 <= len(words) <= 2 and len(policy.logs) < 1000, "a line log of a policy")
        policy.logs.append(read_note_key(words[0], LOG_TYPE))
    elif item == "witness":
        need(2 <= len(words) <= 3 and len(policy.witnesses) < 32, "a line witness of a policy")
        need(len(words) == 2 or re.fullmatch("https?://[!-?A-~]{1,2000}", words[2]), "a URL of a policy")
        need(words[0] not in {*names, "none"}, "a name of a policy")
        key = read_note_key(words[1], COSIGNATURE_TYPE)
        need(key.key.id not in {known.key.id for _, known in policy.witnesses.values()}, "a key of a policy")
        policy.witnesses[words[0]] = words[1], key
    elif item == "group":
        need(len(words) >= 3 and len(policy.groups) < 100, "a line group of a policy")
        name, threshold, *members = words
        used = [member for _, others in policy.groups.values() for member in others]
        need(name not in {*names, "none"} and {*members} <= names, "a name of a policy")
        need(len({*members}) == len(members) and not {*members} & {*used}, "a member of two groups of a policy")
        number = {"any": "1", "all": str(len(members))}.get(threshold, threshold)
        need(re.fullmatch("[1-9][0-9]{0,2}", number) and int(number) <= len(members), "a threshold of a policy")
        policy.groups[name] = int(number), members
    else:
        need(item == "quorum" and len(words) == 1 and not policy.quorum, "a line of a policy")
        need(words[0] in {*names, "none"}, "the quorum of a policy")
        policy.quorum = words[0]


def read_note_key(text: str, ed25519_type: int) -> NoteKey:
    """A verifier key, name+hash+base64, of a log or a witness: of this type, or of ML-DSA-44."""
    name, hash_hex, encoded = text.split("+", 2)
    typed = decode_base64(encoded)
    need(name and not re.search(r"[\s\0-\x1f]", name), "the name of a verifier key")
    need(typed[0] in (ed25519_type, ML_DSA_TYPE), "the type of a verifier key")
    need(len(typed) == 1 + RAW_KEY_BYTES[typed[0]], "the length of a verifier key")
    need(typed[0] != ML_DSA_TYPE or len(name.encode()) <= COSIGNED_NAME_BYTES_MAX, "the name of a verifier key")
    if typed[0] == ML_DSA_TYPE:
        if not HAS_ML_DSA:
            raise OSError("a verifier key is of ML-DSA-44, which this version of cryptography does not have")
        public = MLDSA44PublicKey.from_public_bytes(typed[1:])
    else:
        public = Ed25519PublicKey.from_public_bytes(typed[1:])
    key_id = sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()[:16]
    found = note_key(name, Key(key_id, public, 0, NEVER, (NEVER, 0, "")), typed[0])
    need(found.hash.hex() == hash_hex, "the hash of a verifier key")
    return found


def meets_quorum(
    policy: Policy, anchors: list[dict[str, Any]], own: Checkpoint, keys: list[Key] | None, to_seq: int
) -> bool:
    """Whether the quorum has cosigned all entries up to one; raises when a cosigned tree is not one of this log."""
    reached = dict.fromkeys(policy.witnesses, 0)
    for anchor in anchors:
        for name, (text, witness) in policy.witnesses.items():
            if keys is not None and anchor["kind"] == "witness" and anchor["by"] == text:
                reached[name] = max(reached[name], cosigned_size(anchor, witness, policy, own, keys))
    for name, (threshold, members) in policy.groups.items():
        reached[name] = sorted(reached[member] for member in members)[-threshold]
    return policy.quorum == "none" or reached[policy.quorum] >= to_seq


def cosigned_size(anchor: dict[str, Any], witness: NoteKey, policy: Policy, own: Checkpoint, keys: list[Key]) -> int:
    """The size of the tree that a witness cosigned; 0 when it did not, or when no key that counts signed that tree."""
    note = anchor["checkpoint"]
    try:
        time_s = cosigned_time(note, witness)
        counting = [key for key in keys if not key.is_revoked or time_s * 1000 < key.revoked_from[0]]
        said = open_checkpoint(note.encode(), Ring(replace(key, revoked_from=(NEVER, 0, "")) for key in counting))
        milliseconds(anchor["time"])
        decode_base64(anchor["response"])
        is_named = not policy.logs or any(signed_by(note, key) for key in policy.logs if key.name == said.origin)
    except MALFORMED:
        return 0
    if not said.counts or not is_named or said.origin != own.origin or not 1 <= said.size <= own.size:
        return 0
    proof = [bytes.fromhex(text) for text in anchor["consistency"]]
    need(leads(said, proof, own), "the log does not begin with what a witness cosigned")
    return said.size


def cosigned_time(note: str, witness: NoteKey) -> int:
    """When a witness cosigned a note, in seconds since 1970; raises when it did not."""
    text, (signature,) = text_and_signatures(note, witness)
    return signed_time(text, signature, witness)


def signed_by(note: str, log: NoteKey) -> bool:
    """Whether a log signed a note by this very key."""
    text, signatures = text_and_signatures(note, log)
    for signature in signatures:
        signed_time(text, signature, log)
    return bool(signatures)


def text_and_signatures(note: str, key: NoteKey) -> tuple[str, list[bytes]]:
    """What is signed, and the signatures under it that name the key."""
    text, _, lines = note.rpartition("\n\n")
    found = [read_signature_line(line) for line in lines.split("\n")[:-1]]
    return f"{text}\n", [signature for name, key_hash, signature in found if (name, key_hash) == (key.name, key.hash)]


# --- [7] The checkpoint given, and the verdict ---


@dataclass(frozen=True)
class Given:
    """What the caller trusts or kept; None where nothing was given."""

    keys: Ring | None
    kept: Checkpoint | None
    policy: Policy | None


def compare_kept(kept: Checkpoint, own: Checkpoint, entries: Entries, before: Before) -> bool:
    """Whether a checkpoint kept outside could be compared; raises when the log went back, or is another, since."""
    if not kept.counts or kept.origin != own.origin or entries.last.seq < kept.size < own.size:
        return False
    need(kept.size <= own.size, "the log went back behind the checkpoint given")
    if kept.size == own.size:
        need(own.root == kept.root, "the checkpoint given has other entries")
    elif kept.size < before.size:
        return False
    elif before.is_known and kept.size > 0:
        need(entries.kept_root == kept.root, "the checkpoint given has other entries")
    return True


def verify(file: BinaryIO, given: Given, callers: Callers) -> int:
    """The exit code for a bundle; raises when something does not hold."""
    kept, keys = given.kept, given.keys or Ring()
    members = read_container(file)  # [1]
    manifest = read_manifest(bytes_of(file, members[MANIFEST]), members, keys)  # [2]
    said = manifest.said
    before = read_before(file, members, said, keys)  # [4]
    snapshots = read_snapshots(file, members[SNAPSHOTS], said, keys, before)  # [5]
    entries = read_entries(file, members, said, snapshots, kept.size if kept else None, before, callers)  # [3] [4]
    parts = described_parts(members, entries.parts, len(snapshots))
    compare_manifest(manifest, parts, entries, len(snapshots), is_tree_known=before.is_known)  # [2] [4]
    anchors = read_anchors(bytes_of(file, members[ANCHORS])) if ANCHORS in members else []  # [6]
    own = open_checkpoint(bytes_of(file, members[CHECKPOINT]), given.keys)
    check_own_checkpoint(own, said, entries, is_tree_known=before.is_known)  # [6]
    is_met = given.policy is None or meets_quorum(given.policy, anchors, own, given.keys, entries.last.seq)  # [6]
    is_compared = kept is None or compare_kept(kept, own, entries, before)  # [7]

    revoked_signers = [key for key in manifest.signers if key.is_revoked]
    is_unknown_key = (
        entries.is_unknown_key
        or callers.is_unknown_key
        or before.is_unknown_key
        or not own.counts
        or not ids_of(manifest.signers) - ids_of(revoked_signers)
        or (kept is not None and not kept.counts)
    )
    is_whole = before.is_known and entries.signed_to == entries.last.seq and is_compared and not callers.is_unchecked
    is_whole &= entries.is_index_known
    return verdict_of(given.keys, is_unknown_key=is_unknown_key, is_whole=is_whole and is_met)


def verdict_of(given_keys: Ring | None, *, is_unknown_key: bool, is_whole: bool) -> int:
    """The exit code where everything that was checked holds."""
    if given_keys is None or (given_keys.needs_both and not HAS_ML_DSA):
        return INCOMPLETE
    if is_unknown_key:
        return UNKNOWN_KEY
    return OK if is_whole else INCOMPLETE


# --- Receipts (receipt.md); the numbers in brackets are its steps ---

HEAD_BYTES = 4096
RECEIPT_BYTES_MAX = 64 * MIB
RECEIPT_ENTRIES_MAX = 10_000
INCLUSION_HASHES_MAX = 64
JOB_ID_LENGTH_MAX = 1024
KEYS_MAX = 1000
LIST, OBJECT, OBJECT_OR_NULL = (list,), (dict,), (dict, type(None))
RECEIPT_MEMBERS: dict[str, tuple[type, ...]] = {
    "anchors": LIST,
    "checkpoint": TEXT,
    "covers": TEXT,
    "entries": LIST,
    "extends": OBJECT_OR_NULL,
    "format_version": NUMBER,
    "job_id": TEXT,
    "keys": OBJECT,
    "log_origin": TEXT,
    "node_id": TEXT,
    "tenant_id": TEXT,
}
COMPLETENESS_MEMBERS: dict[str, tuple[type, ...]] = {"consistency": LIST, "runs": LIST, "snapshot": OBJECT}
ENVELOPE_MEMBERS: dict[str, tuple[type, ...]] = {"payload": TEXT, "payloadType": TEXT, "signatures": LIST}
RUN_MEMBERS: dict[str, tuple[type, ...]] = {
    "at": NUMBER,
    "hashes": (list, type(None)),
    "jobs": NUMBER,
    "left": OBJECT_OR_NULL,
    "right": OBJECT_OR_NULL,
}
NEIGHBOUR_MEMBERS: dict[str, tuple[type, ...]] = {"count": NUMBER, "digest": TEXT, "hashes": LIST, "key": TEXT}
RUNS_MAX = 10_000
STATED = ["covers", "format_version", "job_id", "log_origin", "node_id", "tenant_id"]
"""What of a receipt its statement repeats."""
KEY_MEMBERS: dict[str, tuple[type, ...]] = {
    "algorithm": TEXT,
    "key_id": TEXT,
    "not_after": TEXT_OR_NULL,
    "not_before": TEXT_OR_NULL,
    "public_key_pem": TEXT,
    "revoked_from_hlc": TEXT_OR_NULL,
}


@dataclass(frozen=True)
class ReceiptedEntry:
    """An entry of a receipt, and the hashes that lead from its leaf to the root of the checkpoint."""

    row: SimpleNamespace
    inclusion: list[bytes]


@dataclass(frozen=True)
class Receipt:
    """A receipt of its form; ``said`` is its member ``receipt``."""

    said: SimpleNamespace
    entries: list[ReceiptedEntry]
    extends: SimpleNamespace | None
    completeness: SimpleNamespace | None
    signers: list[Key]

    @property
    def last_seq(self) -> int:
        return int(self.entries[-1].row.seq) if self.entries else 0


def read_receipt(data: bytes, keys: list[Key]) -> Receipt:
    """[1] [2] The receipt, in its one spelling, and the held keys that signed the statement about it."""
    need(len(data) <= RECEIPT_BYTES_MAX, "the receipt is too long")
    file = object_of(parse_canonical(data), {"receipt": OBJECT, "statement": OBJECT}, "the file")
    is_whole = "completeness" in file.receipt
    members = RECEIPT_MEMBERS | ({"completeness": OBJECT} if is_whole else {})
    said = object_of(file.receipt, members, "the receipt")
    need(said.format_version == (2 if is_whole else 1), "format_version of the receipt")
    need(TENANT.fullmatch(said.tenant_id), "tenant_id of the receipt")
    need(NODE.fullmatch(said.node_id), "node_id of the receipt")
    need(LOG_ORIGIN.fullmatch(said.log_origin), "log_origin of the receipt")
    need(1 <= len(said.job_id) <= JOB_ID_LENGTH_MAX, "job_id of the receipt")
    need(len(said.checkpoint) <= MIB, "a checkpoint's length")
    check_statements(said.anchors)
    check_published_keys(said.keys)
    signers = check_statement(file.statement, file.receipt, keys)
    return Receipt(said, receipted_entries(said), extends_of(said), completeness_of(said), signers)


def receipted_entries(said: SimpleNamespace) -> list[ReceiptedEntry]:
    """[1] The entries: of this tenant and job, each once, by seq."""
    count, is_whole = len(said.entries), said.format_version == 2
    need(count <= RECEIPT_ENTRIES_MAX, "the number of entries")
    is_job, is_entry = said.covers == "job" and count >= 1, said.covers == "entry" and count == 1 and not is_whole
    need(is_job or is_entry or (said.covers == "absent" and count == 0 and is_whole), "what the receipt covers")
    entries: list[ReceiptedEntry] = []
    last_seq = 0
    for item in said.entries:
        entry = object_of(item, {"inclusion": LIST, "row": OBJECT}, "an entry")
        row = object_of(entry.row, ENTRY_MEMBERS, "a row")
        need((row.tenant_id, row.job_id) == (said.tenant_id, said.job_id), "an entry of another tenant or job")
        need(row.seq > last_seq, "the entries do not stand by seq, each once")
        entries.append(ReceiptedEntry(row, hashes_of(entry.inclusion, INCLUSION_HASHES_MAX, "an inclusion proof")))
        last_seq = row.seq
    return entries


def extends_of(said: SimpleNamespace) -> SimpleNamespace | None:
    """[1] The proof that the log extends an earlier tree, if there is one."""
    if said.extends is None:
        return None
    extends = object_of(said.extends, {"consistency": LIST, "size": NUMBER}, "extends")
    need(extends.size >= 1, "the size that is extended")
    extends.consistency = hashes_of(extends.consistency, CONSISTENCY_HASHES_MAX, "the proof of what is extended")
    return extends


def completeness_of(said: SimpleNamespace) -> SimpleNamespace | None:
    """[1] The proof that there are no other entries, if there is one."""
    if said.format_version == 1:
        return None
    proof = object_of(said.completeness, COMPLETENESS_MEMBERS, "completeness")
    proof.consistency = hashes_of(proof.consistency, CONSISTENCY_HASHES_MAX, "the proof of the snapshot's tree")
    need(len(proof.runs) <= RUNS_MAX, "the number of runs")
    proof.runs = [run_of(item) for item in proof.runs]
    envelope = object_of(proof.snapshot, ENVELOPE_MEMBERS, "the snapshot")
    for item in envelope.signatures:
        object_of(item, {"keyid": TEXT, "sig": TEXT}, "a signature of the snapshot")
    return proof


def run_of(value: Any) -> SimpleNamespace:
    """[1] The place of the job in one run."""
    run = object_of(value, RUN_MEMBERS, "a run")
    need(run.jobs >= 1, "the jobs of a run")
    if run.hashes is not None:
        run.hashes = hashes_of(run.hashes, INCLUSION_HASHES_MAX, "a run")
    for side in ("left", "right"):
        if (neighbour := getattr(run, side)) is not None:
            found = object_of(neighbour, NEIGHBOUR_MEMBERS, "a neighbour")
            found.hashes = hashes_of(found.hashes, INCLUSION_HASHES_MAX, "a neighbour")
            found.key, found.digest = hashes_of([found.key, found.digest], 2, "a neighbour")
            need(found.count >= 1, "the entries of a neighbour")
            setattr(run, side, found)
    return run


def check_published_keys(value: Any) -> None:
    """[1] The form of the keys inside, which are never used."""
    members: dict[str, tuple[type, ...]] = {"keys": LIST, "log_verifier_keys": LIST, "root_key_id": TEXT_OR_NULL}
    published = object_of(value, members, "keys")
    need(max(len(published.keys), len(published.log_verifier_keys)) <= KEYS_MAX, "the number of keys")
    need(all(type(text) is str for text in published.log_verifier_keys), "log_verifier_keys")
    for item in published.keys:
        object_of(item, KEY_MEMBERS, "a key")


def check_statement(envelope: dict[str, Any], receipt: dict[str, Any], keys: list[Key]) -> list[Key]:
    """[2] The statement is about this receipt; the held keys that signed it."""
    members = {"payload": TEXT, "payloadType": TEXT, "signatures": LIST}
    statement = object_of(envelope, members, "the statement")
    need(len(statement.signatures) == 1, "the statement has other than one signature")
    signature = object_of(statement.signatures[0], {"keyid": TEXT, "sig": TEXT}, "the signature")
    need(re.fullmatch("[0-9a-f]{16}", signature.keyid), "keyid of the statement")
    need(len(signature.sig) <= 256, "sig of the statement")
    decode_base64(signature.sig)
    payload = decode_base64(statement.payload)
    expected = {
        "_type": STATEMENT_TYPE,
        "predicateType": "https://tallystick.dev/receipt/v1",
        "subject": [
            {
                "name": f"{receipt['tenant_id']}/{receipt['job_id']}",
                "digest": {"sha256": sha256(canonical(receipt)).hexdigest()},
            }
        ],
        "predicate": {name: receipt[name] for name in STATED},
    }
    need(payload == canonical(expected), "the statement is not about this receipt")
    _, signers = open_envelope(envelope, keys)
    return signers


def check_receipted_entries(entries: list[ReceiptedEntry]) -> None:
    """[3] Each entry by itself, and neighbours together."""
    before: SimpleNamespace | None = None
    for entry in entries:
        row = entry.row
        where = f"seq {row.seq}"
        check_columns(row)
        if row.seq == 1:
            need(row.prev_chain_link is None, f"{where}: prev_chain_link")
        else:
            need(row.prev_chain_link and HASH.fullmatch(row.prev_chain_link), f"{where}: prev_chain_link")
        if before:
            need(row.link_version >= before.link_version, f"{where}: version 1 after version 2")
            if row.seq == before.seq + 1:
                need(row.prev_chain_link == before.chain_link, f"{where}: prev_chain_link")
        before = row


def check_inclusion(entry: ReceiptedEntry, own: Checkpoint) -> None:
    """[5] The proof leads from the entry's leaf to the root of the checkpoint."""
    hashes = list(entry.inclusion)
    root = root_of_path(entry.row.seq - 1, own.size, leaf_hash(entry.row.chain_link), hashes)
    need(root == own.root and not hashes, f"seq {entry.row.seq}: tree")


def root_of_path(index: int, size: int, leaf: bytes, path: list[bytes]) -> bytes:
    """The root that an inclusion proof leads to (RFC 9162, 2.1.3.1), read from its end."""
    if size == 1:
        return leaf
    left_leaves = 1 << (size - 1).bit_length() - 1
    side = path.pop()
    if index < left_leaves:
        return node_hash(root_of_path(index, left_leaves, leaf, path), side)
    return node_hash(side, root_of_path(index - left_leaves, size - left_leaves, leaf, path))


def check_completeness(receipt: Receipt, own: Checkpoint, keys: Ring) -> tuple[list[Key], int]:
    """[8] There are no other entries up to the end of the snapshot. The keys that signed it and counted then, and the
    seq of that end."""
    proof = receipt.completeness
    assert proof is not None
    payload, signers = open_envelope(proof.snapshot, keys)
    statement = parse_canonical(payload)
    claim = SimpleNamespace(**statement["predicate"])
    subject = {"name": f"{claim.tenant_id}/{claim.from_seq}-{claim.to_seq}", "digest": {"sha256": claim.merkle_root}}
    need(statement["_type"] == STATEMENT_TYPE, "the type of the snapshot's statement")
    need(statement["predicateType"] == "https://tallystick.dev/batch-snapshot/v1", "the snapshot's predicate type")
    need(statement["subject"] == [subject], "the snapshot's subject")
    need(claim.tenant_id == receipt.said.tenant_id, "the snapshot's tenant")
    need(1 <= claim.tree_size == claim.to_seq <= own.size, "the snapshot's size")
    tree = Checkpoint(own.origin, claim.tree_size, bytes.fromhex(claim.tree_root), own.counts)
    need(leads(tree, proof.consistency, own), "the checkpoint's tree does not extend the snapshot's")
    places, roots = covering_runs(claim.to_seq, index_begin(vars(claim))), read_index_claim(vars(claim))
    need(len(places) == len(proof.runs), "the number of runs")
    entries = [(entry.row.seq - 1, leaf_hash(entry.row.chain_link)) for entry in receipt.entries]
    key = job_key(receipt.said.job_id)
    for (level, begin, end), root, run in zip(places, roots, proof.runs, strict=True):
        inside = [(index, leaf) for index, leaf in entries if begin <= index < end]
        if inside:
            check_presence(key, run, leaf_of_job(level, begin, end, inside), root)
        else:
            check_absence(key, run, root)
    if signers and claim.key_id not in ids_of(signers):
        need(claim.key_id not in ids_of(keys), "the snapshot's key did not sign it")
    return signers_in_time(signers, hlc_in(claim.snapshot_hlc)), claim.to_seq


def leaf_of_job(level: int, begin: int, end: int, entries: list[tuple[int, bytes]]) -> JobLeaf:
    """The leaf of a job in a run, from its entries there: each its leaf index and its leaf hash."""
    if level == 0:
        return digest_of_entries([index.to_bytes(8, "big") + leaf for index, leaf in entries])
    step, parts = run_entries(level - 1), []
    for at in range(begin, end, step):
        inside = [(index, leaf) for index, leaf in entries if at <= index < at + step]
        if inside:
            parts.append(leaf_of_job(level - 1, at, at + step, inside))
    return digest_of_parts(parts)


def check_presence(key: bytes, run: SimpleNamespace, leaf: JobLeaf, root: bytes) -> None:
    """[8] The leaf of the job, made from its entries, is in the run."""
    need(run.hashes is not None and run.left is None and run.right is None, "a run with entries of the job")
    need(is_leaf(run.at, run.jobs, job_leaf_hash(key, leaf), run.hashes, root), "a run has other entries of the job")


def check_absence(key: bytes, run: SimpleNamespace, root: bytes) -> None:
    """[8] Two neighbours in the run have the place of the job between them."""
    at, jobs, left, right = run.at, run.jobs, run.left, run.right
    need(run.hashes is None and at <= jobs, "a run without entries of the job")
    need((left is None) == (at == 0) and (right is None) == (at == jobs), "the neighbours in a run")
    need(left is None or left.key < key, "the left neighbour in a run")
    need(right is None or key < right.key, "the right neighbour in a run")
    if left is not None:
        leaf = job_leaf_hash(left.key, (left.count, left.digest))
        need(is_leaf(at - 1, jobs, leaf, left.hashes, root), "the left neighbour is not in the run")
        leaves = at & -at
        jobs, root = min(leaves, jobs - at), left.hashes[leaves.bit_length() - 1] if right is not None else root
    if right is not None:
        leaf = job_leaf_hash(right.key, (right.count, right.digest))
        need(is_leaf(0, jobs, leaf, right.hashes, root), "the right neighbour is not in the run")


def is_leaf(index: int, size: int, leaf: bytes, path: list[bytes], root: bytes) -> bool:
    """Whether an inclusion proof leads from a leaf to a root."""
    hashes = list(path)
    return 0 <= index < size and root_of_path(index, size, leaf, hashes) == root and not hashes


def compare_kept_with_receipt(kept: Checkpoint, own: Checkpoint, receipt: Receipt) -> bool:
    """[7] Whether a checkpoint kept outside could be compared; raises when the log has another beginning."""
    if not kept.counts or kept.origin != own.origin:
        return False
    if kept.size == own.size:
        need(kept.root == own.root, "the checkpoint given has other entries")
        return True
    extends = receipt.extends
    if extends and extends.size == kept.size:
        need(leads(kept, extends.consistency, own), "the log does not begin with the checkpoint given")
        return True
    for anchor in receipt.said.anchors:
        said = tree_head_of(anchor["checkpoint"])
        proof = [bytes.fromhex(text) for text in anchor["consistency"]]
        if said and said.size == kept.size and leads(said, proof, own):
            need(kept.root == said.root, "the checkpoint given has other entries")
            return True
    return False


def leads(first: Checkpoint, proof: list[bytes], own: Checkpoint) -> bool:
    """Whether a consistency proof leads from one tree to the other."""
    if not 1 <= first.size <= own.size:
        return False
    hashes = list(proof)
    try:
        roots = roots_of_proof(first.size, own.size, first.root, hashes)
    except IndexError:
        return False
    return roots == (first.root, own.root) and not hashes


def tree_head_of(note: str) -> Checkpoint | None:
    """What a note says, whoever signed it; None when it is no checkpoint."""
    try:
        return open_checkpoint(note.encode(), None)
    except MALFORMED:
        return None


def verify_receipt(data: bytes, given: Given, callers: Callers) -> int:
    """The exit code for a receipt; raises when something does not hold."""
    kept = given.kept
    receipt = read_receipt(data, given.keys or [])  # [1] [2]
    said = receipt.said
    check_receipted_entries(receipt.entries)  # [3]
    for entry in receipt.entries:
        check_signed(entry.row, callers)  # [3]
    own = open_checkpoint(said.checkpoint.encode(), given.keys)  # [4]
    need(own.origin == f"{said.log_origin}/{said.tenant_id}", "the checkpoint's log")
    need(receipt.last_seq <= own.size, "the checkpoint's size")
    for entry in receipt.entries:
        check_inclusion(entry, own)  # [5]
    policy = given.policy
    keys = given.keys or Ring()
    counting, whole_to = (None, 0) if receipt.completeness is None else check_completeness(receipt, own, keys)  # [8]
    to_seq = max(receipt.last_seq, whole_to)
    is_met = policy is None or meets_quorum(policy, said.anchors, own, given.keys, to_seq)  # [6]
    is_compared = kept is None or compare_kept_with_receipt(kept, own, receipt)  # [7]

    revoked_signers = [key for key in receipt.signers if key.is_revoked]
    is_unknown_key = (
        not own.counts
        or callers.is_unknown_key
        or counting == []
        or not ids_of(receipt.signers) - ids_of(revoked_signers)
        or (kept is not None and not kept.counts)
    )
    is_linked = all(entry.row.link_version == 2 for entry in receipt.entries)
    is_enough = counting is None or keys.is_enough(counting)
    is_whole = is_compared and is_linked and is_met and is_enough and not callers.is_unchecked
    return verdict_of(given.keys, is_unknown_key=is_unknown_key, is_whole=is_whole)


def main(path: str, *options: str) -> int:
    """Verify one file and say what was found; options are name, value, name, value."""
    given = dict(zip(options[::2], options[1::2], strict=True))
    code_of_error = COULD_NOT_RUN
    try:
        keys_path = Path(given["--keys"]) if "--keys" in given else None
        needs_both = {"any": False, "both": True}[given.get("--signatures", "any")]
        need(keys_path or not needs_both, "--signatures both takes --keys")
        keys = load_keys(keys_path, needs_both=needs_both) if keys_path else None
        callers = load_callers(keys_path)
        kept_bytes = read_start(given["--checkpoint"]) if "--checkpoint" in given else None
        policy = read_policy(read_start(given["--policy"])) if "--policy" in given else None
        with open_regular(path) as file:
            code_of_error = TAMPERED
            # One that was kept counts against a log and never for it, so one signature is enough.
            kept = open_checkpoint(kept_bytes, Ring(keys) if keys else keys) if kept_bytes is not None else None
            code, found = verify_either(file, Given(keys, kept, policy), callers), "nothing wrong was found"
    except (OSError, MemoryError, UnsupportedAlgorithm) as error:
        code = code_of_error if isinstance(error, UnsupportedAlgorithm) else COULD_NOT_RUN
        found = str(error) or "it is too large"
    except MALFORMED as error:
        code, found = code_of_error, str(error) or "it is too large"
    print(f"{path}: {found}; commitments: not judged; exit code {code}")
    return code


def verify_either(file: BinaryIO, given: Given, callers: Callers) -> int:
    """The exit code for a bundle, or for a receipt, whichever it is."""
    head = file.read(HEAD_BYTES)
    file.seek(0)
    if is_like_bundle(head):
        return verify(file, given, callers)
    if is_like_receipt(head):
        return verify_receipt(file.read(RECEIPT_BYTES_MAX + 1), given, callers)
    raise OSError("it is neither a bundle nor a receipt")


def is_like_bundle(head: bytes) -> bool:
    """Whether a file that begins so is a bundle, whole or damaged (bundle.md, "Verifying")."""
    first = entries_name(1).encode()
    if head and first.startswith(head):
        return True
    if sum(found == wanted for found, wanted in zip(head, first, strict=False)) >= len(first) - 4:
        return True
    return head[257:262] == b"ustar" and any(name.encode() in head for name in (entries_name(1), *BEHIND, EVIDENCE))


def is_like_receipt(head: bytes) -> bool:
    """Whether a file that begins so is a receipt, whole or damaged (receipt.md, "Verifying")."""
    return any(name in head[:64] for name in (b'{"receipt"', b'"receipt":', b'{"anchors":'))


def read_start(path: str) -> bytes:
    """A file, as far as a checkpoint may be long."""
    with open_regular(path) as file:
        return file.read(MIB)


def open_regular(path: str) -> BinaryIO:
    """A file, open for reading; a pipe or a device in its place could be waited for without end."""
    if Path(path).exists() and not Path(path).is_file():
        raise OSError(f"{path} is not a regular file")
    return open(path, "rb")


def run(arguments: list[str]) -> int:
    """The exit code for a command line; the usage is not an error when it was asked for."""
    if "-h" in arguments or "--help" in arguments:
        print(__doc__)
        return OK
    files, options = arguments[:1], arguments[1:]
    is_usage = files and not files[0].startswith("-") and len(options) % 2 == 0
    if not is_usage or not {*options[::2]} <= {"--keys", "--checkpoint", "--policy", "--signatures"}:
        print(__doc__, file=sys.stderr)
        return COULD_NOT_RUN
    return main(files[0], *options)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
