"""What becomes of merged entries: in pieces, however they are cut, the same as an import decides of all at once."""

from __future__ import annotations

from hashlib import sha256

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger import canonical
from ledger.bundle.merge import Incoming, MergeKey, decide, encode_incoming
from ledger.chain.conflict import Event, conflict_hlc, conflict_payload
from ledger.errors import InvalidInputError
from ledger.hlc import Hlc
from pipeline.merge import deciding
from pipeline.merge.deciding import decode_placed, partitions_of


def entry(rank: int, physical: int, logical: int, node: str, told: int, log: str, seq: int) -> Incoming:
    """An entry as ``incoming_entries`` gives it."""
    hlc = Hlc(physical, logical, node)
    key = MergeKey(1, *hlc, log, seq, "00") if rank else MergeKey(0, 0, 0, "", log, seq, "00")
    payload = canonical.encode({"told": told}).decode()
    digest = sha256(payload.encode()).hexdigest()
    return Incoming(
        key, "acme", hlc.text(), "j", "EXECUTE", digest, payload, "{}", 1 + rank, 0 if rank else seq, "", None
    )


def held(kept: Incoming, log: str, seq: int) -> Incoming:
    """The CONFLICT entry that holds the event of an entry, as another ledger chained it."""
    of = Event(kept.t_hlc, kept.job_id, kept.action, kept.payload_digest)
    hlc, payload = conflict_hlc(of), conflict_payload(of, kept.payload, "00" * 32)
    key, digest = MergeKey(1, *hlc, log, seq, "01"), sha256(payload).hexdigest()
    return Incoming(key, "acme", hlc.text(), "j", "CONFLICT", digest, payload.decode(), "{}", 2, 0, "", None)


PLAIN = st.builds(
    entry,
    st.integers(0, 1),
    st.integers(1, 3),
    st.integers(0, 1),
    st.sampled_from(["a", "b"]),
    st.integers(0, 2),
    st.sampled_from(["log-1/acme", "log-2/acme"]),
    st.integers(1, 9),
)
ENTRIES = st.lists(
    PLAIN | st.builds(held, PLAIN.filter(lambda each: each.key.rank == 1), st.just("log-3/acme"), st.integers(1, 9)),
    max_size=40,
)


def arrow(entries: list[Incoming]) -> pa.RecordBatch:
    """Rows as Spark hands them over, sorted."""
    hlcs = [Hlc.parse(each.t_hlc) for each in entries]
    columns = {
        "tenant_id": [each.tenant_id for each in entries],
        "physical_ms": [hlc.physical_ms for hlc in hlcs],
        "logical": [hlc.logical for hlc in hlcs],
        "entry": [encode_incoming(each) for each in entries],
    }
    return pa.RecordBatch.from_pydict(columns)


def place_in_spark(each: Incoming) -> tuple[object, ...]:
    """What ``deciding.decided`` sorts by."""
    hlc, key = Hlc.parse(each.t_hlc), each.key
    return (hlc.physical_ms, hlc.logical, key.rank, key.hlc_node, key.log, key.seq, encode_incoming(each))


@given(ENTRIES, st.lists(st.integers(1, 7), min_size=1, max_size=5))
@settings(deadline=None)
def test_entries_decided_in_pieces_come_out_as_entries_decided_at_once(
    entries: list[Incoming], cuts: list[int]
) -> None:
    at_once = decide(sorted(entries, key=lambda each: (each.key, encode_incoming(each))), {"acme": {}})
    in_pieces, at = sorted(entries, key=place_in_spark), 0
    batches = []
    while at < len(in_pieces):
        size = cuts[len(batches) % len(cuts)]
        batches.append(arrow(in_pieces[at : at + size]))
        at += size
    rows = [row for batch in deciding._decide(batches) for row in batch.to_pylist()]
    kept = sorted((row for row in rows if row["rank"] == 0), key=lambda row: (row["log"], row["seq"], row["placed"]))
    placed = [each for row in (*kept, *(row for row in rows if row["rank"])) for each in decode_placed(row["placed"])]
    assert placed == at_once.placed
    assert sum(row["duplicates"] for row in rows) == at_once.duplicates
    told = [conflict for row in rows for conflict in row["conflicts"]]
    assert sorted(map(str, told)) == sorted(map(str, at_once.conflicts))
    assert sum(row["placed_count"] for row in rows) == len(placed)


def test_more_events_of_one_time_than_a_task_keeps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deciding, "EVENTS_OF_ONE_TIME_MAX", 10)
    crowd = [entry(1, 5, 0, f"node-{n}", 0, "log/acme", n + 1) for n in range(11)]
    assert list(deciding._decide([arrow(crowd[:10])]))
    with pytest.raises(InvalidInputError, match="more than 10 events have the time 5:0"):
        list(deciding._decide([arrow(crowd[:6]), arrow(crowd[6:])]))


def test_ranges_are_as_many_as_their_bytes_need() -> None:
    assert partitions_of(0, 0) == 1
    assert partitions_of(1, 4) == 4
    assert partitions_of(10 * deciding.PARTITION_BYTES + 1, 4) == 11
    assert partitions_of(1 << 60, 4) == deciding.PARTITIONS_MAX
