"""The index of jobs by the book (docs/formats/job-index.md): every run from its entries, with plain recursion."""

from __future__ import annotations

from hashlib import sha256

from tests.ledger import naive_merkle

Entry = tuple[str, bytes]
"""Job id and leaf hash of an entry."""


def leaf_of_job(job_id: str, entries: list[Entry], level: int, begin: int, end: int, block: int) -> tuple[int, bytes]:
    """Count and digest of a job in the run over entries ``begin..end - 1``; 0 where it has none."""
    if level == 0:
        mine = [index for index in range(begin, end) if entries[index][0] == job_id]
        data = b"".join(index.to_bytes(8, "big") + entries[index][1] for index in mine)
        return len(mine), sha256(b"\x02" + data).digest()
    step = block * 8 ** (level - 1)
    parts = [leaf_of_job(job_id, entries, level - 1, at, at + step, block) for at in range(begin, end, step)]
    parts = [(count, digest) for count, digest in parts if count]
    if len(parts) == 1:
        return parts[0]
    data = b"".join(count.to_bytes(8, "big") + digest for count, digest in parts)
    return sum(count for count, _ in parts), sha256(b"\x03" + data).digest()


def leaves(entries: list[Entry], level: int, begin: int, end: int, block: int) -> list[bytes]:
    """The leaves of a run."""
    found = {}
    for job_id in {job_id for job_id, _ in entries[begin:end]}:
        count, digest = leaf_of_job(job_id, entries, level, begin, end, block)
        key = sha256(job_id.encode()).digest()
        found[key] = key + count.to_bytes(8, "big") + digest
    return [found[key] for key in sorted(found)]


def roots(entries: list[Entry], block: int) -> list[bytes]:
    """Roots of the index of all these entries: the largest runs first, each as large as fits."""
    found, begin, level = [], 0, 3
    while begin < len(entries):
        while level and begin + block * 8**level > len(entries):
            level -= 1
        end = min(begin + block * 8**level, len(entries))
        hashes = [sha256(b"\x00" + leaf).digest() for leaf in leaves(entries, level, begin, end, block)]
        found.append(naive_merkle.root(hashes))
        begin = end
    return found
