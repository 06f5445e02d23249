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
from ledger.verification import COMMITMENT_ACTIONS
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
            yield EntryForm(f"{'good' if is_well_formed else 'bad'}: {name}", columns, is_well_formed)


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
