"""One table of entries with right digests and links: those that a ledger writes or imports, and those that none does.

Every verifier judges all of them, and must judge alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any, Final, NamedTuple

from ledger import canonical
from ledger.chain.conflict import Event, conflict_hlc, conflict_payload
from ledger.chain.form import ORIGIN_BYTES_MAX
from ledger.facts.events import EVENTS_BY_ACTION, TYPE_OF_ACTION
from ledger.verification import COMMITMENT_ACTIONS, ENTRY_COLUMNS
from tests.cases.corpus import Part
from tests.ledger.ledger_in_memory import Ledger, build, origin_of

SEQ: Final = 3
"""Where the entry stands in its chain of four."""
UNKNOWN: Final = "OF_A_LATER_VERSION"
"""An action that this version does not know."""


class EntryForm(NamedTuple):
    """Columns of one entry, and whether a ledger has such an entry."""

    name: str
    columns: Mapping[str, Any]
    is_well_formed: bool
    why: str

    def ledger(self) -> Ledger:
        """A signed chain with this entry at ``SEQ``, linked and signed as if nothing were wrong with it."""
        ledger = build(4, version_1_until=4 if self.columns.get("link_version") == 1 else 0)
        ledger.entry(SEQ).update(self.columns)
        ledger.relink(SEQ)
        ledger.store_head()
        ledger.store_tree()
        ledger.sign(4)
        return ledger


def entry_forms() -> Iterator[EntryForm]:
    """All of them."""
    for is_well_formed, table in ((True, _good), (False, _bad)):
        for name, columns in table().items():
            kind = "good" if is_well_formed else "bad"
            yield EntryForm(f"{kind}: {name}", columns, is_well_formed, _why(name, is_well_formed))


def _hlc(physical: int, logical: int, node: str) -> dict[str, Any]:
    text = f"{physical}:{logical}:{node}"
    return {"t_hlc": text, "hlc_physical": physical, "hlc_logical": logical, "hlc_node": node}


def _payload(text: str) -> dict[str, Any]:
    """An entry of an action that asks nothing of its payload but to be an object in canonical JSON."""
    return {"action": UNKNOWN, "payload": text}


def _said(action: str, **members: Any) -> dict[str, Any]:
    return {"action": action, "payload": canonical.encode(members).decode()}


def _of_action(action: str, **members: Any) -> dict[str, Any]:
    fence = {"fence_token": 1} if action in EVENTS_BY_ACTION else {}
    return _imported(action, **{"type": TYPE_OF_ACTION[action], **fence, **members})


def _imported(action: str, **members: Any) -> dict[str, Any]:
    """As ``_said``; imported where the ledger would judge it once more, as proposals are."""
    return _said(action, **members) | ({"origin": origin_of(1)} if action in COMMITMENT_ACTIONS else {})


def _subject(name: str) -> dict[str, Any]:
    return {**_of_action("PAYLOADS_READ"), "job_id": name}


def _version_1(text: str, **columns: Any) -> dict[str, Any]:
    return {"link_version": 1, "payload": text, **columns}


def _conflict(
    action: str = "COMPLETE",
    payload: str = '{"fence_token":1,"type":"JobCompleted"}',
    job_id: str = "job",
    **edits: str,
) -> dict[str, Any]:
    """A CONFLICT entry that holds an event; ``edits`` are other members of its payload."""
    event = Event("1704931200000:3:node-1", job_id, action, sha256(payload.encode()).hexdigest())
    held = canonical.read(conflict_payload(event, payload, "0" * 64).decode()) | edits
    text = canonical.encode(held).decode()
    return {"action": "CONFLICT", "job_id": job_id, "payload": text, **_hlc(*conflict_hlc(event))}


def _nested(depth: int) -> str:
    return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)


def _good() -> dict[str, dict[str, Any]]:
    return {
        "as it is": {},
        **{f"action {action}": _of_action(action) for action in TYPE_OF_ACTION if action != "CONFLICT"},
        "an action of a later version": _said(UNKNOWN, type="SomethingElse"),
        "an action of a later version without a type": _said(UNKNOWN),
        "an action of 64 characters": {**_said("A" * 64)},
        "a job id of 128 characters": {"job_id": "x" * 128},
        "a job id of a dot": {"job_id": "."},
        "a subject with a slash": {**_of_action("PROPOSED"), "job_id": "module:mission/module"},
        "a subject with spaces": _subject("read:oidc:Jane Doe"),
        "a subject beyond ASCII": _subject("read:oidc:Jörg \U0001f600"),
        "a subject of 255 bytes": _subject("x" * 255),
        "an origin": {"origin": origin_of(1)},
        "an origin with an escape": {"origin": origin_of(1).replace("log.example", 'log\\"\\u001fé')},
        "the longest origin": {
            "origin": origin_of(1).replace("acme", "a" * (ORIGIN_BYTES_MAX - len(origin_of(1)) + len("acme")))
        },
        "the latest HLC of a bundle": _hlc(2**53 - 1, 2**32 - 1, "a" * 63),
        "a node of one digit": _hlc(1_704_931_200_001, 0, "0"),
        "a fence of 0": _of_action("ENQUEUE", fence_token=0),
        "the highest fence": _of_action("ENQUEUE", fence_token=2**53 - 1),
        "no members": _payload("{}"),
        "fractions": _payload('{"a":1.5,"b":-0.25,"c":0.000001,"d":123456789.125}'),
        "sixteen digits": _payload('{"a":0.1234567890123456,"b":2251799813685249.5}'),
        "seventeen digits": _payload('{"a":0.30000000000000004,"b":-12.345678901234567}'),
        "exponents": _payload('{"a":1e-7,"b":1e+21,"c":5e-324,"d":1.7976931348623157e+308}'),
        "whole floats beyond 2^53": _payload('{"a":9007199254740992,"b":100000000000000000,"c":123456789012345680000}'),
        "the highest integers": _payload('{"a":9007199254740991,"b":-9007199254740991}'),
        "the deepest nesting": _payload(_nested(64)),
        "escapes": _payload('{"a":"\\"\\\\\\b\\f\\n\\r\\t\\u0001\\u001f\x7f/\u2028é\U0001f600"}'),
        "names in the order of UTF-16": _payload('{"":1,"Z":1,"a":1,"é":1,"\U0001f600":1,"\uffff":1}'),
        "a name with an escape": _payload('{"a":1,"a\\n":1,"a\\"":1}'),
        "names that scripts know": _payload('{"1":1,"10":1,"2":1,"__proto__":{"a":1},"constructor":1}'),
        "literals and lists": _payload('{"a":[true,false,null,[],{}]}'),
        "a conflict": _conflict(),
        "a conflict of a proposal": _conflict("PROPOSED", '{"type":"CommitmentProposed"}', "module:a/b"),
        "a conflict of an unknown action": _conflict(UNKNOWN, "{}", "any name"),
        "version 1": _version_1("{}"),
        "version 1, no object": _version_1("[1]"),
        "version 1, spelt otherwise": _version_1(' {"b": 1.0, "a": "\\u0041\\/", "c": -0}\n'),
        "version 1, a large integer": _version_1('{"at":1704931200000000001}'),
    }


def _bad() -> dict[str, dict[str, Any]]:
    origin, ms = origin_of(1), 1_704_931_200_001
    return {
        "no node": _hlc(ms, 0, ""),
        "a node in capitals": _hlc(ms, 0, "Node"),
        "a node with a colon": _hlc(ms, 0, "a:b"),
        "a node that begins with a hyphen": _hlc(ms, 0, "-a"),
        "a node that ends with a hyphen": _hlc(ms, 0, "a-"),
        "a node of 64 characters": _hlc(ms, 0, "a" * 64),
        "a node with a newline": _hlc(ms, 0, "a\n"),
        "a node of other digits": _hlc(ms, 0, "a\u0661"),
        "a logical part beyond 32 bits": _hlc(ms, 2**32, "node-1"),
        "no action": {"action": ""},
        "an action in small letters": {"action": "enqueue"},
        "an action of 65 characters": _said("A" * 65),
        "an action with a newline": _said("A\n"),
        "no job id": {"job_id": ""},
        "a job id of 129 characters": {"job_id": "x" * 129},
        "a job id of 2000 characters": {"job_id": "x" * 2000},
        "a job id with a space": {"job_id": "a b"},
        "a job id with a slash": {"job_id": "a/b"},
        "a job id with a newline": {"job_id": "job\n"},
        "a job id beyond ASCII": {"job_id": "jöb"},
        "no subject": _subject(""),
        "a subject of 256 bytes": _subject("ä" * 128),
        "a subject with a newline": _subject("a\nb"),
        "a subject with U+0000": _subject("a\0"),
        "another type": _said("COMPLETE", fence_token=1, type="JobFailed"),
        "no type": _said("COMPLETE", fence_token=1),
        "a type that is no text": _said("COMPLETE", fence_token=1, type=["JobCompleted"]),
        **{f"no type of {action}": _imported(action) for action in TYPE_OF_ACTION if action not in EVENTS_BY_ACTION},
        "the action as the type of a job event": _said("COMPLETE", fence_token=1, type="COMPLETE"),
        "no fence": _said("ENQUEUE", type="JobCreated"),
        "a fence as text": _of_action("ENQUEUE", fence_token="1"),
        "a fence that is true": _of_action("ENQUEUE", fence_token=True),
        "a negative fence": _of_action("ENQUEUE", fence_token=-1),
        "a fence with a fraction": _of_action("ENQUEUE", fence_token=1.5),
        "a fence beyond 2^53 - 1": {"payload": '{"fence_token":9007199254740992,"type":"JobCompleted"}'},
        "no JSON": _payload("not json"),
        "nothing": _payload(""),
        "a list": _payload("[]"),
        "null": _payload("null"),
        "a number": _payload("1"),
        "a text": _payload('"a"'),
        "a name twice": _payload('{"a":1,"a":2}'),
        "a name twice, alike": _payload('{"a":1,"a":1}'),
        "a name twice inside": _payload('{"a":[{"b":1,"b":2}]}'),
        "a name twice, one escaped": _payload('{"a":1,"\\u0061":2}'),
        "a job event with its type twice": {
            "payload": '{"fence_token":1,"type":"JobFailed","type":"JobProgressReported"}',
            "action": "EXECUTE",
        },
        "a space": _payload('{"a": 1}'),
        "a space before": _payload(" {}"),
        "a newline behind": _payload("{}\n"),
        "a byte order mark": _payload("\ufeff{}"),
        "something behind": _payload("{}{}"),
        "a comma behind": _payload('{"a":1,}'),
        "names out of order": _payload('{"b":1,"a":1}'),
        "names in the order of UTF-8": _payload('{"\uffff":1,"\U0001f600":1}'),
        "1.0": _payload('{"a":1.0}'),
        "1e5": _payload('{"a":1e5}'),
        "1E+21": _payload('{"a":1E+21}'),
        "-0": _payload('{"a":-0}'),
        "01": _payload('{"a":01}'),
        "+1": _payload('{"a":+1}'),
        ".5": _payload('{"a":.5}'),
        "5.": _payload('{"a":5.}'),
        "0.50": _payload('{"a":0.50}'),
        "1e-6": _payload('{"a":1e-6}'),
        "0.0000001": _payload('{"a":0.0000001}'),
        "more digits than the number needs": _payload('{"a":0.10000000000000001}'),
        "digits that are not the nearest": _payload('{"a":0.30000000000000005}'),
        "an integer that binary64 lacks": _payload('{"a":9007199254740993}'),
        "a number beyond binary64": _payload('{"a":1e999}'),
        "NaN": _payload('{"a":NaN}'),
        "Infinity": _payload('{"a":-Infinity}'),
        "True": _payload('{"a":True}'),
        "a comment": _payload('{"a":1/**/}'),
        "a letter escaped": _payload('{"a":"\\u0041"}'),
        "a slash escaped": _payload('{"a":"\\/"}'),
        "an escape in capitals": _payload('{"a":"\\u001F"}'),
        "a long escape for a newline": _payload('{"a":"\\u000a"}'),
        "a newline in a text": _payload('{"a":"\n"}'),
        "U+0000": _payload('{"a":"\\u0000"}'),
        "half of a surrogate pair": _payload('{"a":"\\ud800"}'),
        "a surrogate pair escaped": _payload('{"a":"\\ud83d\\ude00"}'),
        "a level too deep": _payload(_nested(65)),
        "many levels too deep": _payload('{"a":' + "[" * 5000 + "]" * 5000 + "}"),
        "an origin that says nothing": {"origin": "{}"},
        "no origin": {"origin": ""},
        "an origin with a name twice": {"origin": origin.replace('"seq":1', '"seq":1,"seq":1')},
        "an origin with a space": {"origin": origin.replace('"seq":1', '"seq": 1')},
        "an origin with a member more": {"origin": origin.replace('"seq":1', '"seq":1,"x":1')},
        "an origin without a node": {"origin": origin.replace('"node_id":"node-2",', "")},
        "an origin at seq 0": {"origin": origin_of(0)},
        "an origin whose seq is text": {"origin": origin.replace('"seq":1', '"seq":"1"')},
        "an origin whose link is none": {"origin": origin.replace(f'k":"{"0" * 64}', f'k":"{"A" * 64}')},
        "an origin that is too long": {"origin": origin.replace("acme", "a" * ORIGIN_BYTES_MAX)},
        "a conflict that holds nothing": _of_action("CONFLICT"),
        "a conflict of another HLC": {**_conflict(), **_hlc(ms, 0, "conflict-" + "0" * 40)},
        "a conflict of another digest": _conflict(digest="0" * 64),
        "a conflict of another payload": _conflict(payload="{}", action=UNKNOWN) | {"job_id": "other"},
        "a conflict whose HLC is none": _conflict(hlc="1:0:Node"),
        "a conflict with a number": {
            **_conflict(),
            "payload": _conflict()["payload"].replace(f'"{"0" * 64}"', "0"),
        },
        "a conflict that holds a malformed payload": _conflict(UNKNOWN, '{"a":1,"a":1}'),
        "a conflict that holds another type": _conflict("FAIL"),
        "a conflict that holds no action": _conflict("fail"),
        "a conflict that holds another job id": _conflict(job_id="a b"),
        "a conflict that holds a conflict": _conflict("CONFLICT", _conflict()["payload"]),
        "version 1, no JSON": _version_1("not json"),
        "version 1, a name twice": _version_1('{"a":1, "a":2}'),
        "version 1, a name twice inside": _version_1('[{"a":1, "a":2}]'),
        "version 1, half of a surrogate pair": _version_1('["\\udfff"]'),
        "version 1, U+0000": _version_1('["\\u0000"]'),
        "version 1, a number beyond binary64": _version_1("[1e999]"),
        "version 1, NaN": _version_1("[NaN]"),
        "version 1, a level too deep": _version_1("[" * 65 + "]" * 65),
        "version 1, an origin": _version_1("{}", origin=origin),
        "version 1, no job id": _version_1("{}", job_id=""),
        "version 1, a node in capitals": _version_1("{}", **_hlc(ms, 0, "Node")),
    }


def _why(name: str, is_well_formed: bool) -> str:
    """Why a ledger has such an entry, or has none."""
    if (said := _WHY.get(name)) is not None:
        return said
    if is_well_formed and name.startswith("action "):
        return f"An entry of action {name.removeprefix('action ')} has the type that belongs to it."
    assert name.startswith("no type of "), name
    return f"The payload of an entry of action {name.removeprefix('no type of ')} says no type."


_WHY: Final = {
    "as it is": "A job event as a ledger writes it.",
    "an action of a later version": "An unknown action asks nothing of its payload but canonical JSON.",
    "an action of a later version without a type": "Only the payloads of known actions must say a type.",
    "an action of 64 characters": "An action has 1 to 64 capitals and underscores.",
    "a job id of 128 characters": "A job id has at most 128 characters.",
    "a job id of a dot": "A job id may be a single dot.",
    "a subject with a slash": "The subject of an entry that is no job event may have a slash.",
    "a subject with spaces": "The subject of an entry that is no job event may have spaces.",
    "a subject beyond ASCII": "The subject of an entry that is no job event may be of any script.",
    "a subject of 255 bytes": "A subject has at most 255 bytes.",
    "an origin": "An imported entry says where it was chained first.",
    "an origin with an escape": "An origin is canonical JSON, with escapes where they are needed.",
    "the longest origin": "An origin has at most 4,096 bytes.",
    "the latest HLC of a bundle": "The highest numbers of a row and of a logical part, and the longest node.",
    "a node of one digit": "A node may be named by one digit.",
    "a fence of 0": "A fence_token is 0 or more.",
    "the highest fence": "A fence_token is at most 2^53 - 1.",
    "no members": "An object without members is canonical JSON.",
    "fractions": "Numbers are printed with the fewest digits, without an exponent from 1e-6 on.",
    "sixteen digits": "Sixteen digits that are the shortest for their binary64.",
    "seventeen digits": "Seventeen digits, where fewer would be another binary64.",
    "exponents": "Exponents below 1e-6 and from 1e+21 on, with the sign and without zeros.",
    "whole floats beyond 2^53": "Whole numbers are printed in plain digits below 1e21, as binary64 holds them.",
    "the highest integers": "Integers from -(2^53 - 1) to 2^53 - 1.",
    "the deepest nesting": "64 objects inside each other.",
    "escapes": "Quotation mark, backslash and U+0000 to U+001F have escapes, and nothing else.",
    "names in the order of UTF-16": "Names stand by their UTF-16 code units: U+1F600 before U+FFFF.",
    "a name with an escape": "Names are sorted by what they are, not by how they are escaped.",
    "names that scripts know": "Names like __proto__ and 10 are names like all others.",
    "literals and lists": "true, false, null, and empty lists and objects.",
    "a conflict": "A CONFLICT entry holds the event that its HLC is named for.",
    "a conflict of a proposal": "A CONFLICT entry may hold a proposal.",
    "a conflict of an unknown action": "A CONFLICT entry may hold an event of an action that is not known.",
    "version 1": "An entry of link version 1, as older ledgers wrote it.",
    "version 1, no object": "The payload of link version 1 may be any JSON.",
    "version 1, spelt otherwise": "The payload of link version 1 need not be canonical.",
    "version 1, a large integer": "The payload of link version 1 may hold integers beyond 2^53.",
    "no node": "The node of an HLC is never empty.",
    "a node in capitals": "Nodes are named in small letters.",
    "a node with a colon": "The node of an HLC has no colon.",
    "a node that begins with a hyphen": "A node does not begin with a hyphen.",
    "a node that ends with a hyphen": "A node does not end with a hyphen.",
    "a node of 64 characters": "A node has at most 63 characters.",
    "a node with a newline": "A newline ends the node, which some patterns let pass at the end.",
    "a node of other digits": "Digits are ASCII, and U+0661 is none.",
    "a logical part beyond 32 bits": "The logical part of an HLC ends at 2^32 - 1.",
    "no action": "An action has at least one character.",
    "an action in small letters": "Actions are in capitals.",
    "an action of 65 characters": "An action has at most 64 characters.",
    "an action with a newline": "A newline ends the action, which some patterns let pass at the end.",
    "no job id": "A job id has at least one character.",
    "a job id of 129 characters": "A job id has at most 128 characters, and this 129.",
    "a job id of 2000 characters": "A job id has at most 128 characters, and this 2,000.",
    "a job id with a space": "A job id has no spaces.",
    "a job id with a slash": "A job id has no slashes.",
    "a job id with a newline": "A newline ends the job id, which some patterns let pass at the end.",
    "a job id beyond ASCII": "A job id is ASCII.",
    "no subject": "The subject of an entry is never empty.",
    "a subject of 256 bytes": "A subject has at most 255 bytes: these are 128 characters of two bytes.",
    "a subject with a newline": "A subject has no control characters.",
    "a subject with U+0000": "No text holds U+0000.",
    "another type": "COMPLETE is a JobCompleted, and the payload says JobFailed.",
    "no type": "The payload of a job event says its type.",
    "a type that is no text": "The type is a text, and no list of one.",
    "the action as the type of a job event": "The type of a job event is not its action.",
    "no fence": "The payload of a job event has a fence_token.",
    "a fence as text": "A fence_token is a number.",
    "a fence that is true": "true is no number, though some languages say 1.",
    "a negative fence": "A fence_token is 0 or more, and this -1.",
    "a fence with a fraction": "A fence_token is an integer.",
    "a fence beyond 2^53 - 1": "A fence_token of 2^53 is one more than binary64 counts to.",
    "no JSON": "The payload is no JSON.",
    "nothing": "The payload is empty.",
    "a list": "The payload is a list, and no object.",
    "null": "The payload is null, and no object.",
    "a number": "The payload is a number, and no object.",
    "a text": "The payload is a text, and no object.",
    "a name twice": "Readers differ on which of two members of one name counts.",
    "a name twice, alike": "A name stands twice, if with one value.",
    "a name twice inside": "A name stands twice in an inner object.",
    "a name twice, one escaped": "a and \\u0061 are one name.",
    "a job event with its type twice": "The type stands twice, once as JobFailed.",
    "a space": "A space stands between two tokens.",
    "a space before": "A space stands before the value.",
    "a newline behind": "A newline follows the value.",
    "a byte order mark": "U+FEFF stands before the value.",
    "something behind": "A second value follows.",
    "a comma behind": "A comma follows the last member.",
    "names out of order": "b stands before a.",
    "names in the order of UTF-8": "U+FFFF stands before U+1F600, which comes first in UTF-16.",
    "1.0": "1.0 is no canonical spelling of 1.",
    "1e5": "1e5 is 100000.",
    "1E+21": "The e of an exponent is small.",
    "-0": "-0 is no canonical spelling of 0.",
    "01": "A number has no leading zero.",
    "+1": "A number has no plus.",
    ".5": "A number begins with a digit.",
    "5.": "Digits follow the point of a number.",
    "0.50": "0.50 is 0.5.",
    "1e-6": "1e-6 is 0.000001.",
    "0.0000001": "0.0000001 is 1e-7.",
    "more digits than the number needs": "0.10000000000000001 is 0.1.",
    "digits that are not the nearest": "0.30000000000000005 is 0.30000000000000004 in binary64.",
    "an integer that binary64 lacks": "2^53 + 1 is 2^53 in binary64.",
    "a number beyond binary64": "1e999 is infinite in binary64.",
    "NaN": "NaN is no JSON.",
    "Infinity": "-Infinity is no JSON.",
    "True": "True is no JSON; true is.",
    "a comment": "JSON has no comments.",
    "a letter escaped": "A letter that needs no escape has one.",
    "a slash escaped": "A slash needs no escape.",
    "an escape in capitals": "The hex digits of an escape are small.",
    "a long escape for a newline": "The escape of a newline is the short one.",
    "a newline in a text": "A text holds a newline that is not escaped.",
    "U+0000": "A text holds U+0000, which has no form here.",
    "half of a surrogate pair": "Half of a surrogate pair is no text.",
    "a surrogate pair escaped": "A character beyond U+FFFF needs no escape.",
    "a level too deep": "65 objects inside each other.",
    "many levels too deep": "5,000 lists inside each other, which must not end the verifier.",
    "an origin that says nothing": "An origin has five members.",
    "no origin": "An origin is null or an object, never empty.",
    "an origin with a name twice": "seq stands twice in the origin.",
    "an origin with a space": "A space stands between two tokens of the origin.",
    "an origin with a member more": "An origin has five members, and this six.",
    "an origin without a node": "An origin names the node that exported the entry.",
    "an origin at seq 0": "A seq is 1 or more.",
    "an origin whose seq is text": "seq of an origin is a number.",
    "an origin whose link is none": "The hex digits of a link are small.",
    "an origin that is too long": "An origin has at most 4,096 bytes, and this more.",
    "a conflict that holds nothing": "A CONFLICT entry holds an event.",
    "a conflict of another HLC": "The HLC of a CONFLICT entry follows from the event that it holds.",
    "a conflict of another digest": "digest is not that of the payload that is held.",
    "a conflict of another payload": "The HLC is named for the event of another job.",
    "a conflict whose HLC is none": "The HLC of the event that is held is none.",
    "a conflict with a number": "The members of a CONFLICT entry's payload are texts.",
    "a conflict that holds a malformed payload": "A name stands twice in the payload that is held.",
    "a conflict that holds another type": "The event that is held is of action FAIL and type JobCompleted.",
    "a conflict that holds no action": "The action of the event that is held is in small letters.",
    "a conflict that holds another job id": "The job id of a job event has no spaces, also where a conflict holds it.",
    "a conflict that holds a conflict": "A CONFLICT entry holds no other one.",
    "version 1, no JSON": "The payload is no JSON, which it is in link version 1 too.",
    "version 1, a name twice": "A name stands twice, in link version 1 too.",
    "version 1, a name twice inside": "A name stands twice in an object inside a list.",
    "version 1, half of a surrogate pair": "Half of a surrogate pair is no text, in link version 1 too.",
    "version 1, U+0000": "U+0000 has no form here, in link version 1 too.",
    "version 1, a number beyond binary64": "1e999 is infinite in binary64, in link version 1 too.",
    "version 1, NaN": "NaN is no JSON, in link version 1 too.",
    "version 1, a level too deep": "65 lists inside each other, in link version 1 too.",
    "version 1, an origin": "Link version 1 does not bind an origin, so there is none.",
    "version 1, no job id": "A job id has at least one character, in link version 1 too.",
    "version 1, a node in capitals": "Nodes are named in small letters, in link version 1 too.",
}


def parts() -> Iterator[Part]:
    """Each as one row, with its right digest and link; then rows with one wrong column each."""
    for form in entry_forms():
        yield Part(form.name, {"row": _row_of(form.ledger())}, None if form.is_well_formed else "malformed", form.why)
    for name, change, kind, why in (
        ("another payload", {"payload": "{}"}, "payload-digest", "payload_digest is that of another payload."),
        ("another digest", {"payload_digest": "0" * 64}, "payload-digest", "The payload has another digest."),
        (
            "a digest in capitals",
            {"payload_digest": "A" * 64},
            "payload-digest",
            "The hex digits of a digest are small.",
        ),
        ("another time", {"hlc_physical": 1}, "hlc-columns", "t_hlc says another physical part."),
        ("another counter", {"hlc_logical": 9}, "hlc-columns", "t_hlc says another logical part."),
        ("another node", {"hlc_node": "node-2"}, "hlc-columns", "t_hlc says another node."),
        ("another job", {"job_id": "job-x"}, "link", "The link binds another job id."),
        ("another action", {"action": "CANCEL"}, "link", "The link binds another action."),
        ("another seq", {"seq": SEQ + 1}, "link", "The link binds another seq."),
        ("another tenant", {"tenant_id": "acme2"}, "link", "The link binds another tenant."),
        ("another link before it", {"prev_chain_link": "0" * 64}, "link", "The link binds another link before it."),
        ("an origin that is not bound", {"origin": origin_of(1)}, "link", "The link binds that there is no origin."),
        ("another link", {"chain_link": "0" * 64}, "link", "chain_link is not that of the columns."),
        ("a link in capitals", {"chain_link": "A" * 64}, "link", "The hex digits of a link are small."),
        ("a link of version 3", {"link_version": 3}, "link", "Link version 3 is not known."),
        ("a link of version 0", {"link_version": 0}, "link", "Link version 0 is not known."),
        ("the link of version 1", {"link_version": 1}, "link", "A link of version 2 is not that of version 1."),
    ):
        yield Part(f"wrong: {name}", {"row": {**_row_of(build(4)), **change}}, kind, why)


def _row_of(ledger: Ledger) -> dict[str, Any]:
    """The entry at ``SEQ``, as a bundle has it."""
    return {**{name: ledger.entry(SEQ)[name] for name in ENTRY_COLUMNS}, "tenant_id": ledger.tenant_id}
