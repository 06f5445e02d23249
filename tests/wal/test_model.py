"""Any sequence of appends, restarts, torn tails and removals, against a list in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.wal.logs import NODE, WAIT_S, LogWriter, hlc_of
from wal.format import BATCH_RECORD_BYTES, RECORD_HEADER_BYTES, SEGMENT_HEADER_BYTES
from wal.inspect import dump, verify
from wal.reader import read
from wal.recovery import recover
from wal.segment import list_segments
from wal.truncation import remove_segments

# Where batches and segments end depends on the writer's thread, so places are drawn as parts of what is there.
FRACTION = st.floats(0, 1, exclude_max=True)


class LogMachine(RuleBasedStateMachine):
    """``model`` holds the payloads of all records that must be there, LSN by LSN."""

    @initialize(entries=st.integers(1, 8), segment_bytes=st.integers(200, 3000))
    def begin(self, entries: int, segment_bytes: int) -> None:
        self.temporary = tempfile.TemporaryDirectory(prefix="wal-model-")
        self.folder = Path(self.temporary.name)
        self.settings = {
            "batch_max_entries": entries,
            "segment_bytes": segment_bytes,
            "batch_timeout_us": 200,
        }
        self.model: list[bytes] = []
        self.epoch = 1
        self.first_lsn = 1
        self.log = LogWriter(self.folder, epoch=1, next_lsn=1, **self.settings)

    @rule(payloads=st.lists(st.binary(max_size=300), min_size=1, max_size=12))
    def append(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            self.model.append(payload)
            assert self.log.append(payload) == len(self.model)

    @rule()
    def sync(self) -> None:
        if self.model and self.log.writer.durable_lsn < len(self.model):
            self.log.wait_durable(len(self.model))
        assert self.log.writer.durable_lsn == len(self.model)

    @rule()
    def restart(self) -> None:
        self.log.close()
        self.reopen(len(self.model))

    @rule(place=FRACTION, mask=st.integers(0, 255), zeros=st.sampled_from((0, 5, 5000)))
    def crash_in_the_last_batch(self, place: float, mask: int, zeros: int) -> None:
        """As if the last batch had never been synced: any part of it may be missing or wrong."""
        self.log.close()
        last = list_segments(self.folder)[-1]
        openings = [item for item in dump(self.folder) if item["segment"] == last.name and item["action"] == "BATCH"]
        if not openings:
            return self.reopen(len(self.model))
        start, first = int(str(openings[-1]["offset"])), int(str(openings[-1]["lsn"]))
        whole = last.path.read_bytes()
        at = start + int(place * (len(whole) - start))
        if mask:
            damaged = whole[:at] + bytes((whole[at] ^ mask,)) + whole[at + 1 :] + bytes(zeros)
        else:
            damaged = whole[:at] + bytes(zeros)
        last.path.write_bytes(damaged)
        survivors = first - 1
        end = start + BATCH_RECORD_BYTES
        while survivors < len(self.model) and damaged.startswith(whole[:end]):
            end += RECORD_HEADER_BYTES + len(self.model[survivors])
            survivors += damaged.startswith(whole[:end])
        del self.model[survivors:]
        return self.reopen(first - 1)

    @rule(place=FRACTION)
    def remove(self, place: float) -> None:
        self.sync()
        upto_lsn = int(place * (len(self.model) + 1))
        now_s = list_segments(self.folder)[-1].path.stat().st_mtime
        if remove_segments(self.folder, upto_lsn, -WAIT_S, now_s, self.log.writer.retire):
            self.first_lsn = list_segments(self.folder)[0].base_lsn
            assert self.first_lsn <= upto_lsn + 1

    def reopen(self, known_durable_lsn: int) -> None:
        found = recover(self.folder, NODE, known_durable_lsn)
        assert found.last_lsn == len(self.model)
        assert found.first_lsn == self.first_lsn
        assert found.last_epoch == self.epoch
        assert found.highest_hlc is None or found.highest_hlc >= hlc_of(len(self.model))
        self.epoch += 1
        self.log = LogWriter(self.folder, epoch=self.epoch, next_lsn=len(self.model) + 1, **self.settings)

    @invariant()
    def the_log_is_the_model(self) -> None:
        durable_lsn = self.log.writer.durable_lsn
        records = [record.payload for record in read(self.folder, self.first_lsn, NODE, durable_lsn)]
        assert records == self.model[self.first_lsn - 1 : durable_lsn]

    def teardown(self) -> None:
        self.log.close()
        assert verify(self.folder)[0].verdict == "ok"
        assert all(segment.path.stat().st_size >= SEGMENT_HEADER_BYTES for segment in list_segments(self.folder))
        self.temporary.cleanup()


TestLogAgainstModel = LogMachine.TestCase
TestLogAgainstModel.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
