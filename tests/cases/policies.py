"""Policies over witnesses: files that are none, and what a quorum covers of a receipt or a bundle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from signing.anchors import BundledAnchor
from signing.note import VerifierKey
from signing.policy import WITNESSES_MAX
from tests.app.bundles import LOG_ORIGIN, anchored
from tests.app.receipts import cosigned, receipt_of
from tests.app.witness import Witness
from tests.cases import bundles
from tests.cases.corpus import Case
from tests.cases.receipts import LEDGER, changed
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, Ledger

KEYS: Final = [Witness(f"witness.example/w{number}", number).verifier_key for number in range(1, 41)]
ONE, TWO, THREE = (Witness(f"witness.example/w{number}", number) for number in (1, 2, 3))
W1, W2 = (f"witness w{number} {KEYS[number - 1]} https://w{number}.example/\n" for number in (1, 2))
LOG_KEY: Final = "log.example/acme+8ac34cc3+AddamAGCsQq31Uv+08lkBzoO4XLz2qYjJa8CGmj3B1Ea"
OWN_LOG: Final = VerifierKey.of(f"{LOG_ORIGIN}/{LEDGER.tenant_id}", SIGNER.public_key).text()
STRANGE_LOG: Final = VerifierKey.of(f"{LOG_ORIGIN}/{LEDGER.tenant_id}", STRANGER.public_key).text()
LAST_SEQ: Final = 4
"""Of the receipt; the log has one entry more."""


class Malformed(NamedTuple):
    """A text that is no policy, part of the product's message, and the reason."""

    name: str
    text: str
    said: str
    why: str


MALFORMED: Final[Sequence[Malformed]] = [
    Malformed(
        "empty",
        "",
        "no line quorum",
        "A policy has a line quorum.",
    ),
    Malformed(
        "of a comment", "# quorum none", "no line quorum", "What follows # at the start of a line counts for nothing."
    ),
    Malformed(
        "with two quorums",
        "quorum none\nquorum none",
        "line 2",
        "A policy has one line quorum.",
    ),
    Malformed(
        "whose quorum is not there", "quorum w1", "w1 is not defined above", "No witness and no group is named w1."
    ),
    Malformed(
        "with a comment behind", f"{W1}quorum w1 # comment", "a name, or none", "A comment has a line of its own."
    ),
    Malformed(
        "with a carriage return",
        f"{W1}quorum w1\r\n",
        "is not defined above",
        "The carriage return is a part of the name.",
    ),
    Malformed(
        "with a key cut short",
        "witness w1 " + KEYS[0][:-1] + "\nquorum none",
        "line 1",
        "The verifier key lacks a letter.",
    ),
    Malformed(
        "whose witness has a log's key",
        f"witness w1 {LOG_KEY}\nquorum none",
        "type 4",
        "A witness has a key of type 4, and this is of type 1.",
    ),
    Malformed(
        "whose log has a witness's key",
        f"log {KEYS[0]}\nquorum none",
        "type 1",
        "A log has a key of type 1, and this is of type 4.",
    ),
    Malformed(
        "whose witness is named none", f"witness none {KEYS[0]}\nquorum none", "none is not a name", "none is no name."
    ),
    Malformed(
        "with a name twice", f"{W1}witness w1 {KEYS[1]}\nquorum w1", "is defined already", "w1 is defined twice."
    ),
    Malformed(
        "with a key twice", f"{W1}witness w2 {KEYS[0]}\nquorum w1", "would count twice", "Two witnesses have one key."
    ),
    Malformed(
        "with an FTP address",
        f"witness w1 {KEYS[0]} ftp://w1\nquorum w1",
        "http",
        "An address begins with http:// or https://.",
    ),
    Malformed(
        "with a user in an address",
        f"witness w1 {KEYS[0]} https://u@w1/\nquorum w1",
        "without a user",
        "An address names no user.",
    ),
    Malformed(
        "with more behind an address",
        f"witness w1 {KEYS[0]} https://w1/ more\nquorum w1",
        "what follows",
        "Nothing follows the address.",
    ),
    Malformed(
        "with a threshold of 0", f"{W1}{W2}group g 0 w1 w2\nquorum g", "threshold", "At least one member must hold."
    ),
    Malformed(
        "with a threshold beyond its members",
        f"{W1}{W2}group g 3 w1 w2\nquorum g",
        "threshold",
        "Three of two cannot hold.",
    ),
    Malformed(
        "with a threshold of 02", f"{W1}{W2}group g 02 w1 w2\nquorum g", "threshold", "A number has no leading zero."
    ),
    Malformed(
        "with a threshold in words",
        f"{W1}{W2}group g most w1 w2\nquorum g",
        "threshold",
        "A threshold is any, all or a number.",
    ),
    Malformed(
        "with a group of nobody", f"{W1}group g any\nquorum g", "what follows", "A group has at least one member."
    ),
    Malformed(
        "with a group of itself",
        f"{W1}group g any g\nquorum g",
        "not defined above",
        "A group is not a member of itself.",
    ),
    Malformed(
        "with a member behind its group",
        f"{W1}group g 1 w1 w2\n{W2}quorum g",
        "not defined above",
        "w2 is defined below its use.",
    ),
    Malformed(
        "with a member twice",
        f"{W1}group g 2 w1 w1\nquorum g",
        "would count twice",
        "w1 is a member twice.",
    ),
    Malformed(
        "with a member of two groups",
        f"{W1}{W2}group a any w1\ngroup b all a w1\nquorum b",
        "would count twice",
        "w1 is a member of two groups, one in the other.",
    ),
    Malformed(
        "with a word that is none",
        "wittness w1\nquorum none",
        "line 1",
        "No line begins with wittness.",
    ),
    Malformed(
        "of too many witnesses",
        "".join(f"witness w{n} {key}\n" for n, key in enumerate(KEYS)) + "quorum none",
        f"more than {WITNESSES_MAX}",
        "There are 40 witnesses, of at most 32.",
    ),
    Malformed(
        "with a byte order mark",
        f"\ufeff{W1}quorum w1\n",
        "line 1",
        "U+FEFF makes another word of witness.",
    ),
    Malformed(
        "with a no-break space",
        f"{W1}quorum\u00a0w1\n",
        "line 2",
        "Words stand between spaces and tabs, and U+00A0 is neither.",
    ),
]


def policy_text(threshold: int | str = 2, log: str = "") -> str:
    """So many of three witnesses."""
    witnesses = "\n".join(f"witness w{n} {each.verifier_key}" for n, each in enumerate((ONE, TWO, THREE), 1))
    return f"{f'log {log}' if log else ''}\n{witnesses}\ngroup outside {threshold} w1 w2 w3\nquorum outside\n"


def stated(by: Witness, size: int, ledger: Ledger = bundles.LEDGER) -> BundledAnchor:
    """What ``by`` said of the first entries of a ledger that is bundled."""
    said = anchored(size, ledger)
    note = by.cosign(said.checkpoint.rpartition("\u2014")[0], 1_704_931_300)
    return msgspec.structs.replace(said, by=by.verifier_key, checkpoint=note)


def cases() -> Iterator[Case]:
    """All of them."""
    receipt = receipt_of(LEDGER)
    for each in MALFORMED:
        yield Case(f"a policy {each.name}", receipt, 1, each.why, policy=each.text)
    for name, file, code, policy, why, *keys in _receipts():
        yield Case(name, file, code, why, policy=policy, keys=keys[0] if keys else "signer")
    last_seq = len(bundles.LEDGER.entries)
    for name, said, code, why in (
        (
            "that two witnesses cosigned",
            [stated(ONE, last_seq), stated(TWO, last_seq)],
            0,
            "Two of three cosigned all 12 entries.",
        ),
        ("that one cosigned in part", [stated(ONE, last_seq), stated(TWO, 8)], 3, "The quorum covers 8 of 12 entries."),
        ("that nobody cosigned", [], 3, "The quorum covers no entry."),
    ):
        yield Case(f"a bundle {name}", bundles.bundle_of(bundles.LEDGER, anchors=said), code, why, policy=policy_text())


def _receipts() -> Iterator[tuple[Any, ...]]:
    both = [cosigned(LEDGER, LAST_SEQ, witness=each) for each in (ONE, TWO)]
    by_both = receipt_of(LEDGER, said=both)
    by_one = receipt_of(LEDGER, said=both[:1])
    unlike = receipt_of(LEDGER, said=[both[0], cosigned(LEDGER, LAST_SEQ - 1, witness=TWO)])
    yield "two of three", by_both, 0, policy_text(), "Two of three witnesses cosigned up to the last entry."
    yield "all of three", by_both, 3, policy_text("all"), "The third witness cosigned nothing."
    yield "any of three", by_one, 0, policy_text("any"), "One of three is enough."
    yield "one of the two that are asked for", by_one, 3, policy_text(), "The second witness cosigned nothing."
    yield "two of three, unlike", unlike, 3, policy_text(), "The second witness cosigned three of four entries."
    yield "any of three, unlike", unlike, 0, policy_text("any"), "The first witness cosigned all four."
    yield "nobody", receipt_of(LEDGER), 3, policy_text(), "The receipt carries no statement of a witness."
    yield "a quorum of none", receipt_of(LEDGER), 0, "quorum none\n", "quorum none asks for nothing."
    yield (
        "tabs and spaces",
        by_both,
        0,
        f"\t{W1}# a comment\n\n{W2}\tquorum  w2 ",
        "Words stand between any spaces and tabs.",
    )
    strangers = receipt_of(
        LEDGER,
        said=[cosigned(LEDGER, LAST_SEQ, witness=Witness(each.name, 8 + n)) for n, each in enumerate((ONE, TWO))],
    )
    yield "strangers under the names of witnesses", strangers, 3, policy_text(), "The keys are not those of the policy."
    twice = receipt_of(LEDGER, said=[cosigned(LEDGER, size, witness=ONE) for size in (LAST_SEQ - 1, LAST_SEQ)])
    yield "two statements of one witness", twice, 3, policy_text(), "One witness counts once."
    yield "no keys", by_both, 3, policy_text(), "Without keys no cosigned checkpoint is known to be of this log.", None
    yield (
        "a log by its key",
        by_both,
        0,
        policy_text(log=OWN_LOG),
        "The key of the log line signed the cosigned checkpoints.",
    )
    strange = "Another key than that of the log line signed the cosigned checkpoints."
    yield "a log by another key", by_both, 3, policy_text(log=STRANGE_LOG), strange
    forked = receipt_of(LEDGER, said=[*both, cosigned(LEDGER, LAST_SEQ - 1, witness=THREE)])
    forged = changed(lambda said: said["anchors"][2].update(consistency=["ab" * 32]), forked)
    why = "The log does not begin with what the third witness cosigned, whatever the quorum says."
    yield "a cosignature of another tree", forged, 2, policy_text(), why
    other = changed(lambda said: said["anchors"][0].update(by=TWO.verifier_key), by_one)
    yield (
        "a cosignature in another's name",
        other,
        3,
        policy_text("any"),
        "by names the second witness, and the first cosigned.",
    )
    spoilt = changed(
        lambda said: said["anchors"][0].update(checkpoint=said["anchors"][0]["checkpoint"][:-6] + "AAA=\n"), by_one
    )
    yield (
        "a cosignature that does not hold",
        spoilt,
        3,
        policy_text("any"),
        "The cosignature is by nobody, and says nothing.",
    )
    for name, member in (
        ("without a time", {"time": "yesterday"}),
        ("without a time zone", {"time": "2024-01-11T00:00:10"}),
        ("with a stamp that is none", {"response": "?"}),
    ):
        yield (
            f"a cosignature {name}",
            changed(lambda said, member=member: said["anchors"][0].update(member), by_one),
            3,
            policy_text("any"),
            "The statement is malformed, and says nothing.",
        )
    stamp = changed(lambda said: said["anchors"][0].update(kind="rfc3161"), by_one)
    yield (
        "a cosignature as a time stamp",
        stamp,
        3,
        policy_text("any"),
        "kind says that it is a time stamp, which no quorum counts.",
    )
    groups = f"{W1}{W2}witness w3 {KEYS[2]}\ngroup a any w1 w2\ngroup b all a w3\nquorum b\n"
    yield "a group in a group", by_both, 3, groups, "The group a holds, and b asks for w3 as well."
    of_all = receipt_of(LEDGER, said=[cosigned(LEDGER, LAST_SEQ, witness=each) for each in (ONE, THREE)])
    yield "a group in a group, held", of_all, 0, groups, "One of w1 and w2, and w3."
