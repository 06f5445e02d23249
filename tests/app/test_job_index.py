"""What a node remembers of jobs: the newest that it was told, in whatever order it hears of it."""

from __future__ import annotations

import itertools

from app.write.intake.job_checks import ENDED, JobIndex
from ledger.positions import BEFORE_FIRST, Lsn

JOB = ("acme", "job")


def ended_after(*told: tuple[str | None, int, int]) -> str | None:
    """Why the job takes no more events after its end was entered at LSN 3 and the chain was heard of: each time what it
    says, of entries up to which seq, with records up to which LSN."""
    index = JobIndex()
    index.entered(*JOB, 1, Lsn(3), is_end=True)
    for ended, seq, upto_lsn in told:
        index.chained(*JOB, 1, ended, seq, Lsn(upto_lsn))
    known = index.get(*JOB)
    assert known is not None
    return known.ended


def test_what_was_read_of_the_chain_earlier_and_comes_later_changes_nothing() -> None:
    accepted, completed, taken_again = (None, 1, 2), ("has ended", 2, 3), (None, 3, 4)
    for order in itertools.permutations((accepted, completed)):
        assert ended_after(*order) == "has ended"
    for order in itertools.permutations((accepted, completed, taken_again)):
        assert ended_after(*order) is None


def test_an_end_on_its_way_counts_until_the_chain_has_it() -> None:
    assert ended_after() == ended_after((None, 1, 2)) == ENDED
    # The chain has its record: what stands there is an end that counts nothing.
    assert ended_after((None, 2, 3)) is None


def test_a_job_that_is_asked_for_the_first_time_is_known_as_the_chain_has_it() -> None:
    index = JobIndex()
    index.chained(*JOB, 7, "has ended", 5, BEFORE_FIRST, "digest")
    index.chained(*JOB, 6, None, 4, BEFORE_FIRST, "digest")
    known = index.get(*JOB)
    assert known is not None
    assert (known.fence_token, known.ended, known.creation) == (7, "has ended", "digest")
