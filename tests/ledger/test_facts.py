"""What follows from the declared facts and is checked in is what they say."""

from pathlib import Path

from lab.facts import PARTLY, generated
from ledger.facts.events import JOB_EVENTS, TYPE_OF_ACTION, Part
from ledger.facts.statuses import REACHED, STATUS_OF_END

ROOT = Path(__file__).parents[2]


def test_the_generated_files_are_what_the_facts_say() -> None:
    made = generated({path: (ROOT / path).read_text() for path in PARTLY})
    assert {path: (ROOT / path).read_text() for path in made} == made, "make facts writes them again"


def test_no_two_events_share_an_action_or_a_record_type() -> None:
    assert len({event.record_type for event in JOB_EVENTS.values()}) == len(JOB_EVENTS)
    assert len({TYPE_OF_ACTION[event.action] for event in JOB_EVENTS.values()}) == len(JOB_EVENTS)


def test_every_event_that_ends_a_job_or_raises_a_part_of_its_own_leads_to_a_status() -> None:
    ends = {event.action for event in JOB_EVENTS.values() if event.part is Part.END}
    assert ends == STATUS_OF_END.keys()
    ruled = {Part.CREATION, Part.ACCEPTANCE, Part.PROGRESS, Part.WORKFLOW, Part.CANCELLATION, Part.ACKNOWLEDGEMENT}
    raised = {event.part for event in JOB_EVENTS.values()} - ruled - {Part.END}
    assert {part for part, _ in REACHED} == raised | {Part.RUN}
