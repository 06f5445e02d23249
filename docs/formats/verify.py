#!/usr/bin/env python3
"""Verify a Tallystick bundle: a second implementation, written from the documents beside it and nothing else.

    verify.py BUNDLE [--keys K] [--checkpoint FILE]

K is public keys in a PEM file, a saved /v1/keys answer, or a folder of such files. Needs Python 3.11 and the package
`cryptography`. Numbers in brackets are the steps of bundle.md, "Verifying", which has the exit codes too.
"""

import base64
import json
import re
import sys
import zlib
from datetime import datetime, timedelta
from functools import reduce
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
except ImportError as missing:
    sys.exit(f"verify.py needs the package cryptography: pip install cryptography ({missing})")

MIB, NEVER, HASH, NODE = 1 << 20, 2**63, "[0-9a-f]{64}", "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
IN_TOTO, STATEMENT = "application/vnd.in-toto+json", "https://in-toto.io/Statement/v1"
TAIL = ("snapshots.ndjson", "checkpoint", "anchors.json", "keys.json", "manifest.dsse.json")
SNAPSHOTS, CHECKPOINT, ANCHORS, KEYS, MANIFEST = TAIL
BEHIND = {SNAPSHOTS: [CHECKPOINT], CHECKPOINT: [ANCHORS, KEYS], ANCHORS: [KEYS], KEYS: [MANIFEST], MANIFEST: []}
ANCHOR = {"by": 2048, "checkpoint": NEVER, "kind": 7, "response": NEVER, "time": 64}
CLAIMED = ("entry_count", "from_chain_link", "from_seq", "merkle_root", "snapshot_hlc", "to_chain_link", "to_seq")
SNAPSHOT = dict.fromkeys((*CLAIMED, "tenant_id"), (str,)) | dict.fromkeys(("entry_count", "from_seq", "to_seq"), (int,))
ENTRY = dict.fromkeys(("action", "chain_link", "hlc_node", "job_id", "payload", "payload_digest", "t_hlc"), (str,))
ENTRY |= dict.fromkeys(("hlc_logical", "hlc_physical", "link_version", "seq"), (int,)) | {"tenant_id": (str,)}
ENTRY |= dict.fromkeys(("origin", "prev_chain_link"), (str, type(None)))
ENVELOPE = rb'\{"payload":"[A-Za-z0-9+/]*+={0,2}","payloadType":"application/vnd\.in-toto\+json",'
ENVELOPE += rb'"signatures":\[\{"keyid":"[0-9a-f]{16}","sig":"[A-Za-z0-9+/]{2,254}={0,2}"\}\]\}'
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError, zlib.error)

def need(holds, what):
    if not holds:
        raise ValueError(what)

def spell(value):
    """Canonical JSON (canonical-json.md) of what bundles hold: texts, integers, null, lists and objects."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()

def parse(data):
    need(spell(value := json.loads(data)) == data, "JSON that is not in canonical form")
    return value

def rows_of(lines, fields, tenant):
    for line in lines:
        need(line.endswith(b"\n"), "a row has no end, or is too long")
        row = parse(line[:-1])
        need(row.keys() == fields.keys() and row["tenant_id"] == tenant, "a row has other members or another tenant")
        need(all(type(row[name]) in kinds for name, kinds in fields.items()), "a member of a row is of a wrong type")
        need(all(0 <= n < 2**53 for n in row.values() if type(n) is int), "a number is out of range")
        yield SimpleNamespace(**row)

def unbase64(text, url_safe=False):
    alphabet = b"-_" if url_safe and re.search("[-_]", text) else b"+/"
    data = base64.b64decode(text, alphabet, validate=True)
    need(base64.b64encode(data, alphabet).decode() == text, "base64 that is not the one spelling of its bytes")
    return data

def load_keys(path):
    """Public keys (keys.md), each with its time; one that is given twice must hold in both."""
    keys, since = [], datetime.fromisoformat("1970-01-01T00:00:00Z")
    for file in [*path.glob("[!.]*.pem"), *path.glob("[!.]*.json")] if path.is_dir() else [path]:
        text = file.read_text()
        pem = re.findall("-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", text, re.DOTALL)
        items = json.loads(text)["keys"] if text.lstrip()[:1] == "{" else [{"public_key_pem": block} for block in pem]
        need(items, f"{file} holds no public key")
        for item in items:
            public = load_pem_public_key(item["public_key_pem"].encode())
            key = SimpleNamespace(not_before=0, not_after=NEVER, public=public)
            key.id = sha256(key.public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()[:16]
            key.is_ed25519 = isinstance(key.public, Ed25519PublicKey)
            need(key.is_ed25519 or isinstance(key.public.curve, SECP256R1), "a key is neither Ed25519 nor P-256")
            need(item.get("key_id", key.id) == key.id, "a key is not the one that its id names")
            for name in [name for name in ("not_before", "not_after") if item.get(name)]:
                setattr(key, name, (datetime.fromisoformat(item[name]) - since) // timedelta(milliseconds=1))
            physical, logical, node_id = (item.get("revoked_from_hlc") or f"{NEVER}:0:").split(":")
            key.revoked = int(physical), int(logical), node_id
            keys.append(key)
    return keys

def those_of(keys):
    return {key.id for key in keys or ()}

def made(key, signature, message):
    try:
        key.public.verify(signature, message, *(() if key.is_ed25519 else (ECDSA(SHA256()),)))
        return True
    except InvalidSignature:
        return False

def open_envelope(envelope, keys):
    """Payload, and the held keys that signed: none when none of those named is held."""
    need(envelope["payloadType"] == IN_TOTO and 1 <= len(envelope["signatures"]) <= 16, "a DSSE envelope")
    payload = unbase64(envelope["payload"], url_safe=True)
    signatures = [(item.get("keyid") or "", unbase64(item["sig"], url_safe=True)) for item in envelope["signatures"]]
    message = f"DSSEv1 {len(IN_TOTO)} {IN_TOTO} {len(payload)} ".encode() + payload
    tried = [(key, signature) for key_id, signature in signatures for key in keys or [] if key_id in ("", key.id)]
    signers = [key for key, signature in tried if made(key, signature, message)]
    need(signers or not tried, "no signature of a held key holds")
    return payload, signers

def open_snapshot(row, keys):
    """[5] The row with its claim, the digest of what was signed, and the held keys that signed it (snapshot.md)."""
    payload, row.signers = open_envelope(row.dsse_envelope, keys)
    row.digest, statement = sha256(payload).hexdigest(), parse(payload)
    claim = row.claim = SimpleNamespace(**statement["predicate"])
    subject = {"name": f"{row.tenant_id}/{row.from_seq}-{row.to_seq}", "digest": {"sha256": row.merkle_root}}
    kind = (statement["_type"], statement["predicateType"], statement["subject"])
    need(kind == (STATEMENT, "https://tallystick.dev/batch-snapshot/v1", [subject]), "a snapshot's statement")
    need(all(spell(getattr(claim, name)) == spell(getattr(row, name)) for name in CLAIMED), "a snapshot's row")
    need((claim.tenant_id, claim.tree_size) == (row.tenant_id, row.to_seq), "tenant or tree_size of a snapshot")
    need(re.fullmatch(HASH, claim.tree_root) and re.fullmatch(NODE, claim.node_id), "a snapshot's tree or node")
    is_named = claim.key_id not in those_of(keys) - those_of(row.signers)
    need(is_named or not row.signers, "a snapshot's key did not sign it")
    return row

def open_checkpoint(data, keys):
    """[6] Origin, size, root of a checkpoint (checkpoint.md), and whether it counts: not when no held key signed it."""
    text, end, lines = data.decode().rpartition("\n\n")
    origin, size, root, *others = text.split("\n")
    root, signatures = unbase64(root), [re.fullmatch(r"— ([^\s+]+) (\S+)", line) for line in lines.split("\n")[:-1]]
    need(len(data) <= MIB and end and origin and all(others) and lines.endswith("\n"), "a checkpoint's form")
    need(not re.search("[\0-\x09\x0b-\x1f]", data.decode()) and not re.search(r"[\s+]", origin), "a checkpoint's text")
    need(re.fullmatch("0|[1-9][0-9]{0,18}", size) and int(size) < NEVER and len(root) == 32, "a checkpoint's tree")
    need(1 <= len(signatures) <= 100 and all(signatures), "a checkpoint's signature lines")
    signatures = [(match[1], unbase64(match[2])) for match in signatures]
    need(all(len(signature) > 4 for _, signature in signatures), "a checkpoint's signature")
    valid, signed = those_of(keys) - those_of(key for key in keys or () if key.revoked[0] < NEVER), []
    for key in [key for key in keys or () if key.is_ed25519 and key.id in valid]:
        mark = origin, sha256(f"{origin}\n\1".encode() + key.public.public_bytes_raw()).digest()[:4]
        signed += [made(key, each[4:], f"{text}\n".encode()) for name, each in signatures if (name, each[:4]) == mark]
    need(all(signed), "a checkpoint's signature")
    return origin, int(size), root, keys is None or bool(signed)

def link_of(row):
    """The link over an entry's columns (chain-link.md)."""
    if row.link_version == 1:
        texts = (row.t_hlc, row.job_id, row.action, row.prev_chain_link or "genesis", row.payload_digest)
        return sha256("".join(texts).encode()).hexdigest()
    need(row.link_version == 2, f"link version {row.link_version} is not known")
    texts = [text.encode() for text in (row.tenant_id, row.t_hlc, row.job_id, row.action, row.origin or "")]
    links = [bytes.fromhex(text) for text in (row.prev_chain_link or "", row.payload_digest)]
    fields = (texts[0], row.seq.to_bytes(8, "big"), *texts[1:4], *links, texts[4])
    return sha256(b"tallystick.chain-link.v2\n" + b"".join(len(f).to_bytes(4, "big") + f for f in fields)).hexdigest()

def node(left, right):
    return sha256(b"\1" + left + right).digest()

class Tree(list):
    """A growing Merkle tree (merkle.md): the roots of its perfect subtrees, largest first, as (leaves, root)."""

    def grow(self, link):
        leaves, top = 1, sha256(b"\0" + bytes.fromhex(link)).digest()
        while self and self[-1][0] == leaves:
            leaves, top = 2 * leaves, node(self.pop()[1], top)
        self.append((leaves, top))

    def root(self):
        return reduce(lambda right, left: node(left[1], right), self[-2::-1], self[-1][1])

def proved_roots(first, second, known, path):
    """Roots of both sizes that a consistency proof leads to (RFC 9162, 2.1.4.1); ``known`` is the first, or None."""
    if first == second:
        return (known or path.pop(),) * 2
    half, side = 1 << (second - 1).bit_length() - 1, path.pop()
    if first <= half:
        old, new = proved_roots(first, half, known, path)
        return old, node(new, side)
    old, new = proved_roots(first - half, second - half, None, path)
    return node(side, old), node(side, new)

def read_container(file):
    """[1] The members by name, in order: their size, SHA-256 and place."""
    members, expected = {}, ["entries/000001.ndjson.gz"]
    while (block := file.read(512)) != bytes(512):
        name, size = block[:100].rstrip(b"\0").decode("ascii"), int(block[124:135], 8)
        front = name.encode().ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + b"%011o\0" * 2 % (size, 0)
        back = b"0".ljust(101, b"\0") + b"ustar\0" + b"00".ljust(249, b"\0")
        need(size >= 0 and block == front + b"%06o\0 " % (sum(front) + sum(back) + 8 * 32) + back, "a tar header")
        bounds = dict(zip(TAIL, (8 << 30, MIB, 16 * MIB, 4 * MIB, (64 << 10) + 512 * len(members)), strict=True))
        need(name in expected and size <= bounds.get(name, 137 * MIB), f"member {name!r} is out of place or too long")
        digest, offset, end = sha256(), file.tell(), file.tell() + size
        while piece := file.read(min(MIB, end - file.tell())):
            digest.update(piece)
        need(file.tell() == end and file.read(-size % 512) == bytes(-size % 512), f"{name} is cut short or goes on")
        members[name] = SimpleNamespace(size=size, digest=digest.hexdigest(), offset=offset)
        following = [SNAPSHOTS] + [f"entries/{len(members) + 1:06d}.ndjson.gz"] * (len(members) < 100_000)
        expected = BEHIND.get(name, following)
    need(not expected and file.read(513) == bytes(512), "the bundle is not whole, or bytes follow it")
    return members

def read(file, found):
    file.seek(found.offset)
    return file.read(found.size)

def check_anchors(data):
    """[6] The form of anchors.json; `tally verify-bundle --witness-key --tsa-ca` judges what it holds."""
    anchors = parse(data)
    need(anchors.keys() == {"anchors"} and 1 <= len(anchors["anchors"]) <= 128, "anchors.json")
    for anchor in anchors["anchors"]:
        need(anchor.keys() == {*ANCHOR, "consistency"} and anchor["kind"] in ("rfc3161", "witness"), "an anchor")
        need(all(type(anchor[name]) is str and len(anchor[name]) <= most for name, most in ANCHOR.items()), "an anchor")
        need(not any("\0" in anchor[name] for name in ANCHOR), "an anchor")
        hashes = anchor["consistency"]
        need(type(hashes) is list and len(hashes) <= 128, "an anchor's proof")
        need(all(type(text) is str and re.fullmatch(HASH, text) for text in hashes), "an anchor's proof")

def verify(file, keys, kept):
    """The exit code for a bundle; raises when something does not hold."""
    members = read_container(file)
    own_checkpoint, manifest = read(file, members[CHECKPOINT]), read(file, members[MANIFEST])
    # [2] The manifest, in its one spelling, lists these members.
    need(re.fullmatch(ENVELOPE, manifest), "the manifest is not in its one spelling, with one signature")
    payload, signers = open_envelope(json.loads(manifest), keys)
    need(len(payload) <= 16 * MIB and payload.count(b",") <= 5 * len(members) + 200, "the manifest's length")
    said = SimpleNamespace(**parse(payload)["predicate"])
    parts = [{"name": name, "bytes": found.size, "sha256": found.digest} for name, found in members.items()][:-1]
    need(said.parts == [part | own for part, own in zip(said.parts, parts, strict=True)], "parts of the manifest")
    need(re.fullmatch("_system|[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?", said.tenant_id), "tenant_id of the manifest")
    need(re.fullmatch(NODE, said.node_id) and re.fullmatch("[!-*,-~]{1,300}", said.log_origin), "names in the manifest")
    # [5] The snapshots follow one another.
    snapshots, starts, begin, digest = {}, set(), 1 if said.from_seq == 1 else None, None
    file.seek(members[SNAPSHOTS].offset)
    lines = (file.readline(MIB + 1) for _ in range(said.snapshot_count))
    for row in rows_of(lines, SNAPSHOT | {"dsse_envelope": (dict,)}, said.tenant_id):
        previous = open_snapshot(row, keys).claim.previous_snapshot
        need(said.from_seq <= row.from_seq <= row.to_seq <= said.to_seq, "a snapshot reaches beyond the range")
        need(begin in (None, row.from_seq), "a snapshot does not begin where the one before ended")
        need(previous == digest if begin else re.fullmatch(HASH, previous), "a snapshot follows another one")
        begin, digest, snapshots[row.to_seq] = row.to_seq + 1, row.digest, row
        starts.add(row.from_seq)
    need(file.tell() == members[SNAPSHOTS].offset + members[SNAPSHOTS].size, "the number of snapshots")
    # [3] [4] The entries follow one another, and are what the snapshots say.
    tree, segment, first, last, start, kept_root, signed_to, unknown = Tree(), Tree(), None, None, None, None, 0, False
    entry_parts = [part for part in parts if part["name"] not in TAIL]
    parts[len(entry_parts)]["rows"] = len(snapshots)
    for part, found in zip(said.parts[: len(entry_parts)], entry_parts, strict=True):
        need(0 < part["raw_bytes"] <= (136 if part["rows"] == 1 else 8) * MIB, f"{part['name']} is too long")
        stream = zlib.decompressobj(31)
        raw = stream.decompress(read(file, members[part["name"]]), part["raw_bytes"] + 1)
        need(stream.eof and not stream.unused_data and 1 <= raw.count(b"\n") <= 10_000, f"{part['name']}: size or rows")
        found |= {"raw_bytes": len(raw), "rows": raw.count(b"\n")}
        for row in rows_of(raw.splitlines(keepends=True), ENTRY, said.tenant_id):
            hlc, digest = (row.hlc_physical, row.hlc_logical, row.hlc_node), sha256(row.payload.encode()).hexdigest()
            need(row.seq == (last.seq + 1 if last else said.from_seq), f"seq {row.seq} stands in the wrong place")
            previous = last.chain_link if last else row.prev_chain_link if row.seq > 1 else None
            need(row.prev_chain_link == previous and (row.seq == 1 or re.fullmatch(HASH, previous)), "prev_chain_link")
            need(row.payload_digest == digest and row.t_hlc == "{}:{}:{}".format(*hlc), f"seq {row.seq}: digest or HLC")
            need(last is None or last.link_version <= row.link_version, f"seq {row.seq}: version 1 after version 2")
            need(row.chain_link == link_of(row), f"seq {row.seq}: link")
            first, last = first or row, row
            segment, start = (Tree(), row) if row.seq in starts else (segment, start)
            tree.grow(row.chain_link)
            segment.grow(row.chain_link)
            kept_root = tree.root() if kept and row.seq == kept[1] else kept_root
            if (claimed := snapshots.get(row.seq)) is not None:
                covered = [row.seq - start.seq + 1, start.chain_link, start.seq, segment.root().hex(), row.t_hlc]
                covered += [row.chain_link, row.seq]
                need([getattr(claimed, name) for name in CLAIMED] == covered, f"seq {row.seq}: snapshot-root")
                need(said.from_seq > 1 or claimed.claim.tree_root == tree.root().hex(), f"seq {row.seq}: tree_root")
                late = [k for k in claimed.signers if not k.not_before <= hlc[0] <= k.not_after or hlc >= k.revoked]
                unknown, signed_to = unknown or not those_of(claimed.signers) - those_of(late), row.seq
    # [2] [4] The manifest says what was found, and nothing else.
    root = tree.root().hex() if said.from_seq == 1 else said.tree_root
    parts = [{"raw_bytes": part["bytes"], "rows": 0} | part for part in parts]
    found = {name: getattr(said, name) for name in ("node_id", "log_origin", "tenant_id", "consistency")}
    found |= {"format_version": 2 if ANCHORS in members else 1}
    found |= {"from_seq": first.seq, "to_seq": last.seq, "entry_count": last.seq - first.seq + 1}
    found |= {"first_hlc": first.t_hlc, "last_hlc": last.t_hlc, "to_chain_link": last.chain_link, "tree_root": root}
    found |= {"snapshot_count": len(snapshots), "tree_size": last.seq, "parts": parts}
    digest = sha256(b"".join(bytes.fromhex(part["sha256"]) for part in parts)).hexdigest()
    subject = {"name": f"{said.tenant_id}/{first.seq}-{last.seq}", "digest": {"sha256": digest}}
    statement = {"_type": STATEMENT, "predicateType": "https://tallystick.dev/bundle/v1", "predicate": found}
    need(spell({**statement, "subject": [subject]}) == payload, "the manifest says something else than was found")
    # [6] What outsiders said is of its form; nothing of it is judged here.
    if ANCHORS in members:
        check_anchors(read(file, members[ANCHORS]))
    # [6] [7] The checkpoints.
    origin, size, own_root, is_known = open_checkpoint(own_checkpoint, keys)
    need(origin == f"{said.log_origin}/{said.tenant_id}" and last.seq <= size, "the checkpoint's log or size")
    need(type(said.consistency) is list and all(re.fullmatch(HASH, text) for text in said.consistency), "consistency")
    path = [bytes.fromhex(text) for text in said.consistency]
    roots = proved_roots(last.seq, size, bytes.fromhex(root), path)
    need(roots == (bytes.fromhex(root), own_root) and not path, "the checkpoint's log does not begin like this")
    unknown |= not is_known or not those_of(signers) - those_of(key for key in signers if key.revoked[0] < NEVER)
    is_part = keys is None or said.from_seq > 1 or signed_to < last.seq
    if kept and kept[3] and kept[0] == origin and not last.seq < kept[1] < size:
        need(kept[1] <= size, "the log went back behind the checkpoint given")
        kept_root = own_root if kept[1] == size else kept_root
        is_here = kept[1] == size or (said.from_seq == 1 and kept[1] > 0)
        need(not is_here or kept_root == kept[2], "the checkpoint given has other entries")
    elif kept:
        unknown, is_part = unknown or not kept[3], True
    return 4 if unknown and keys is not None else 3 if is_part else 0

def main(bundle, *options):
    code = 1
    try:
        given = dict(zip(options[::2], options[1::2], strict=True))
        keys = load_keys(Path(given["--keys"])) if "--keys" in given else None
        with open(bundle, "rb") as file, open(given.get("--checkpoint", bundle), "rb") as kept:
            code = 2
            checkpoint = open_checkpoint(kept.read(MIB), keys) if "--checkpoint" in given else None
            code, found = verify(file, keys, checkpoint), "nothing wrong was found"
    except (OSError, MemoryError, UnsupportedAlgorithm, *MALFORMED) as error:
        code, found = 1 if isinstance(error, OSError | MemoryError) else code, str(error) or "it is too large"
    print(f"{bundle}: {found}; exit code {code}")
    return code

def asked(arguments):
    """The exit code for a command line; the usage is not an error when it was asked for."""
    if "-h" in arguments or "--help" in arguments:
        print(__doc__)
        return 0
    bundles, options = arguments[:1], arguments[1:]
    if not bundles or bundles[0].startswith("-") or len(options) % 2 or {*options[::2]} - {"--keys", "--checkpoint"}:
        print(__doc__, file=sys.stderr)
        return 1
    return main(*bundles, *options)

if __name__ == "__main__":
    sys.exit(asked(sys.argv[1:]))
