"""Parts of a verifier by themselves: proofs in the Merkle tree, canonical JSON, clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any, Final

from ledger.merkle import leaf_hash, node_hash
from tests.cases.corpus import Part
from tests.ledger import naive_merkle as naive

LEAVES: Final = [leaf_hash(bytes([number])) for number in range(13)]
OTHER: Final = sha256(b"other")
Change = Callable[[dict[str, Any]], object]


# --- proofs (merkle.md) ---------------------------------------------------------------------------


def _inclusion(index: int, size: int) -> dict[str, Any]:
    hashes = naive.inclusion_path(index, LEAVES[:size])
    return {
        "leaf_index": index,
        "tree_size": size,
        "leaf_hash": LEAVES[index].hex(),
        "hashes": [each.hex() for each in hashes],
        "root_hash": naive.root(LEAVES[:size]).hex(),
    }


def _consistency(first: int, second: int) -> dict[str, Any]:
    return {
        "first": first,
        "second": second,
        "first_root": naive.root(LEAVES[:first]).hex(),
        "second_root": naive.root(LEAVES[:second]).hex(),
        "hashes": [each.hex() for each in naive.consistency_proof(first, LEAVES[:second])],
    }


def inclusions() -> Iterator[Part]:
    """Inclusion proofs (RFC 9162, 2.1.3)."""
    for size in (1, 2, 3, 7, 8, 13):
        for index in sorted({0, size // 2, size - 1}):
            why = f"Leaf {index} of {size} leads to the root by its {len(_inclusion(index, size)['hashes'])} hashes."
            yield Part(f"leaf {index} of {size}", _inclusion(index, size), True, why)
    other = OTHER.hexdigest()
    empty = sha256().hexdigest()
    as_node = node_hash(LEAVES[0], LEAVES[1]).hex()
    changes: dict[str, tuple[Change, str]] = {
        "another leaf": (lambda it: it.update(leaf_hash=other), "The leaf is not the one at this place."),
        "another root": (lambda it: it.update(root_hash=other), "The hashes lead to another root."),
        "another hash": (lambda it: it["hashes"].__setitem__(1, other), "The second hash is another."),
        "a hash too few": (lambda it: it["hashes"].pop(), "The last hash is missing."),
        "a hash too many": (lambda it: it["hashes"].append(other), "A hash follows the last."),
        "a hash too many, in front": (lambda it: it["hashes"].insert(0, other), "A hash stands before the first."),
        "no hash": (lambda it: it["hashes"].clear(), "A leaf of thirteen needs hashes."),
        "hashes turned round": (lambda it: it["hashes"].reverse(), "The hashes stand from the root to the leaf."),
        "the leaf before": (lambda it: it.update(leaf_index=4), "The proof is of leaf 5."),
        "the leaf behind": (lambda it: it.update(leaf_index=6), "The proof is of leaf 5."),
        "the leaf of the last place": (lambda it: it.update(leaf_index=12), "The last leaf has a shorter path."),
        "an index of the size": (lambda it: it.update(leaf_index=13), "Places end at size - 1."),
        "an index beyond the size": (lambda it: it.update(leaf_index=2**40), "Places end at size - 1."),
        "a larger tree": (lambda it: it.update(tree_size=17), "Of seventeen leaves the path would have five hashes."),
        "a smaller tree": (lambda it: it.update(tree_size=8), "Of eight leaves the path would have three hashes."),
        "an empty tree": (lambda it: it.update(tree_size=0), "An empty tree has no leaf."),
        "the node over the leaf": (
            lambda it: it.update(leaf_index=0, leaf_hash=as_node, hashes=_inclusion(0, 13)["hashes"][1:]),
            "A node of the tree stands in the place of a leaf, with the path above it.",
        ),
        "a hash that is short": (
            lambda it: it["hashes"].__setitem__(0, other[:-2]),
            "A hash has 32 bytes, and this 31.",
        ),
        "a leaf that is long": (lambda it: it.update(leaf_hash=other + "00"), "A hash has 32 bytes, and this 33."),
    }
    for name, (change, why) in changes.items():
        given = _inclusion(5, 13)
        change(given)
        yield Part(name, given, False, why)
    why = "The path is that of every size of this form: who signs the root says the size as well."
    yield Part("a size of the same form", {**_inclusion(5, 13), "tree_size": 14}, True, why)
    alone = {**_inclusion(0, 1), "root_hash": empty}
    yield Part("a leaf of one, and the root of none", alone, False, "The root of an empty tree is no leaf's.")
    data = {**_inclusion(0, 1), "leaf_hash": sha256(bytes([0])).hexdigest()}
    yield Part("a leaf hashed without its prefix", data, False, "A leaf hash begins with the byte 0.")
    wrong = sha256(b"\0" + LEAVES[0] + LEAVES[1]).hexdigest()
    why = "The node over two leaves is hashed with the prefix of a leaf."
    yield Part("a node hashed as a leaf", {**_inclusion(0, 2), "root_hash": wrong}, False, why)
    bare = sha256(LEAVES[0] + LEAVES[1]).hexdigest()
    why = "The node over two leaves is hashed without a prefix."
    yield Part("a node hashed without its prefix", {**_inclusion(0, 2), "root_hash": bare}, False, why)
    swapped = node_hash(LEAVES[1], LEAVES[0]).hex()
    why = "The right leaf stands before the left one."
    yield Part("a node of two leaves turned round", {**_inclusion(0, 2), "root_hash": swapped}, False, why)
    padded = node_hash(node_hash(LEAVES[0], LEAVES[1]), node_hash(LEAVES[2], LEAVES[2])).hex()
    twice = {**_inclusion(2, 3), "hashes": [LEAVES[2].hex(), *_inclusion(2, 3)["hashes"]], "root_hash": padded}
    yield Part("a last leaf that stands twice", twice, False, "A tree of three is not filled up with its last leaf.")


def consistencies() -> Iterator[Part]:
    """Consistency proofs (RFC 9162, 2.1.4)."""
    for first, second in ((1, 1), (1, 2), (1, 13), (2, 3), (3, 7), (4, 8), (6, 8), (7, 8), (8, 13), (12, 13), (13, 13)):
        count = len(_consistency(first, second)["hashes"])
        why = f"The tree of {second} begins with that of {first}, by {count} hashes."
        yield Part(f"{first} and {second}", _consistency(first, second), True, why)
    other = OTHER.hexdigest()
    changes: dict[str, tuple[Change, str]] = {
        "another first root": (
            lambda it: it.update(first_root=other),
            "The hashes lead to another root of the first tree.",
        ),
        "another second root": (
            lambda it: it.update(second_root=other),
            "The hashes lead to another root of the second tree.",
        ),
        "another hash": (lambda it: it["hashes"].__setitem__(0, other), "The first hash is another."),
        "a hash too few": (lambda it: it["hashes"].pop(), "The last hash is missing."),
        "a hash too many": (lambda it: it["hashes"].append(other), "A hash follows the last."),
        "no hash": (lambda it: it["hashes"].clear(), "Two sizes need hashes between them."),
        "hashes turned round": (lambda it: it["hashes"].reverse(), "The hashes stand in the other order."),
        "roots turned round": (
            lambda it: it.update(first_root=it["second_root"], second_root=it["first_root"]),
            "Each root stands in the place of the other.",
        ),
        "a first size less": (lambda it: it.update(first=6), "The proof is from seven leaves on."),
        "sizes turned round": (lambda it: it.update(first=13, second=7), "The first tree is the smaller one."),
        "a first size of 0": (lambda it: it.update(first=0), "Of an empty tree nothing is proved."),
        "a hash that is short": (
            lambda it: it["hashes"].__setitem__(0, other[:-2]),
            "A hash has 32 bytes, and this 31.",
        ),
    }
    for name, (change, why) in changes.items():
        given = _consistency(7, 13)
        change(given)
        yield Part(name, given, False, why)
    why = "The hashes are those of every second size of this form: who signs the root says the size as well."
    yield Part("a second size of the same form", {**_consistency(7, 13), "second": 14}, True, why)
    seed = {**_consistency(8, 13)}
    seed["hashes"] = [seed["first_root"], *seed["hashes"]]
    why = "The first tree is a whole subtree, whose root is not among the hashes."
    yield Part("a root that is not needed", seed, False, why)
    same = {**_consistency(8, 8), "hashes": [other]}
    yield Part("one size with a hash", same, False, "Two trees of one size need no hash.")
    forked = {**_consistency(8, 8), "second_root": other}
    yield Part("one size with two roots", forked, False, "Two trees of one size have one root.")
    empty = {
        "first": 0,
        "second": 0,
        "first_root": sha256().hexdigest(),
        "second_root": sha256().hexdigest(),
        "hashes": [],
    }
    yield Part("two empty trees", empty, False, "Of an empty tree nothing is proved, not even itself.")


# --- canonical JSON (canonical-json.md) -----------------------------------------------------------


def texts() -> Iterator[Part]:
    """JSON texts, and their canonical form where they have one."""
    for text, canonical, why in (
        ('{"b":1,"a":2}', '{"a":2,"b":1}', "Names are sorted."),
        (' { "a" : [ 1 , 2 ] } ', '{"a":[1,2]}', "White space between tokens goes."),
        ("[1.0,-0,-0.0,1e2,1E2]", "[1,0,0,100,100]", "Each number has one spelling."),
        (
            "[0.1,1e-7,0.000001,1e21,1e20]",
            "[0.1,1e-7,0.000001,1e+21,100000000000000000000]",
            "Exponents stand below 1e-6 and from 1e21 on.",
        ),
        (
            "[5e-324,1.7976931348623157e308]",
            "[5e-324,1.7976931348623157e+308]",
            "The smallest and the largest binary64.",
        ),
        (
            "[9007199254740991,-9007199254740991]",
            "[9007199254740991,-9007199254740991]",
            "Integers up to 2^53 - 1 are exact.",
        ),
        (
            "[333333333.33333329,4.50,2e-3]",
            "[333333333.3333333,4.5,0.002]",
            "The fewest digits that read back, as in RFC 8785.",
        ),
        (
            '["\\u20ac\\u0024\\u000F\\u000aA\'\\u0042\\u0022\\u005c\\\\\\"\\/"]',
            '["\u20ac$\\u000f\\nA\'B\\"\\\\\\\\\\"/"]',
            "The example of RFC 8785, 3.2.2.2.",
        ),
        ('["\\ud83d\\ude00"]', '["\U0001f600"]', "An escaped surrogate pair is one character."),
        ('{"\\uffff":1,"\\ud83d\\ude00":2}', '{"\U0001f600":2,"\uffff":1}', "Names are sorted by UTF-16 code units."),
        (
            '{"\\u00e9":1,"e\\u0301":2}',
            '{"e\u0301":2,"\u00e9":1}',
            "Composed and decomposed are two names: nothing is normalized.",
        ),
        ('{"":1}', '{"":1}', "The empty name is a name."),
        ('""', '""', "A text alone is JSON."),
        ("null", "null", "null alone is JSON."),
        ('{"a":1,"a":1}', None, "A name stands twice."),
        ('{"a":1,"\\u0061":1}', None, "A name stands twice, once escaped."),
        ("[01]", None, "A number has no leading zero."),
        ("[+1]", None, "A number has no plus."),
        ("[.5]", None, "A number begins with a digit."),
        ("[1.]", None, "Digits follow the point."),
        ("[1e]", None, "Digits follow the e."),
        ("[NaN]", None, "NaN is no JSON."),
        ("[Infinity]", None, "Infinity is no JSON."),
        ("[1e999]", None, "The number is infinite in binary64."),
        ('["\\ud800"]', None, "Half of a surrogate pair is no text."),
        ('["\\udc00\\ud800"]', None, "A surrogate pair that is turned round is no text."),
        ('["\\u0000"]', None, "U+0000 has no form here."),
        ('{"\\u0000":1}', None, "U+0000 has no form here, in a name either."),
        ('["\t"]', None, "A tab in a text needs its escape."),
        ("['a']", None, "Texts stand in quotation marks."),
        ("[1,]", None, "A comma follows the last item."),
        ("[1][2]", None, "A second value follows."),
        ("", None, "An empty text is no JSON."),
        ("\ufeff1", None, "U+FEFF stands before the value."),
        ("[1\u00a0]", None, "U+00A0 is no white space of JSON."),
        ("[1/**/]", None, "JSON has no comments."),
        ('["\\x41"]', None, "JSON has no such escape."),
        ("TRUE", None, "Literals are in small letters."),
        ("[" * 64 + "]" * 64, "[" * 64 + "]" * 64, "64 lists inside each other."),
        ("[" * 65 + "]" * 65, None, "65 lists inside each other are one too many."),
    ):
        name = text if 0 < len(text) <= 24 and text.isascii() and text.isprintable() else why.rstrip(".")
        yield Part(name, {"text": text}, canonical, why)


# --- clocks (hlc.md) ------------------------------------------------------------------------------


def clocks() -> Iterator[Part]:
    """HLCs, and texts that are none; then which of two is earlier."""
    longest = "a" * 63
    for text, is_hlc, why in (
        ("1704585600000:0:scheduler-prod-01", True, "The example of the document."),
        ("0:0:n", True, "The least numbers."),
        (f"{2**63 - 1}:{2**32 - 1}:{longest}", True, "The greatest numbers and the longest node."),
        (f"{2**63}:0:n", False, "Physical parts end at 2^63 - 1."),
        (f"0:{2**32}:n", False, "Logical parts end at 2^32 - 1."),
        (f"0:0:{longest}a", False, "A node has at most 63 characters."),
        ("00:0:n", False, "A number has no leading zero."),
        ("1:01:n", False, "A number has no leading zero."),
        ("+1:0:n", False, "A number has no sign."),
        ("-1:0:n", False, "A number has no sign."),
        ("1.0:0:n", False, "A number is digits alone."),
        ("1e3:0:n", False, "A number is digits alone."),
        ("1_0:0:n", False, "A number is digits alone."),
        (" 1:0:n", False, "No space stands before it."),
        ("1:0:n ", False, "No space follows it."),
        ("1:0:n\n", False, "No newline follows it."),
        ("1:0:n\0", False, "No U+0000 follows it."),
        ("\u0661:0:n", False, "Digits are ASCII."),
        ("\uff11:0:n", False, "Digits are ASCII, and U+FF11 is wide."),
        (":0:n", False, "The physical part is missing."),
        ("1::n", False, "The logical part is missing."),
        ("1:0:", False, "The node is missing."),
        ("1:0", False, "The node is missing, and its colon."),
        ("1:0:n:m", False, "The node has no colon."),
        ("1:0:N", False, "The node is in small letters."),
        ("1:0:-n", False, "The node does not begin with a hyphen."),
        ("1:0:n-", False, "The node does not end with a hyphen."),
        ("1:0:n_1", False, "The node has no underscore."),
        ("1:0:n\u00f6", False, "The node is ASCII."),
        ("", False, "An empty text is no HLC."),
    ):
        yield Part(repr(text)[:60], {"hlc": text}, is_hlc, why)
    for one, other, order, why in (
        ("9:0:n", "10:0:n", -1, "9 is less than 10, though its text is not."),
        ("1:9:n", "1:10:n", -1, "9 is less than 10, though its text is not."),
        ("1:0:a", "1:0:b", -1, "The nodes decide."),
        ("1:0:a", "1:0:a-1", -1, "A node that another begins with is the lesser."),
        ("1:0:a1", "1:0:a-1", 1, "Bytewise a hyphen comes before a digit."),
        ("2:0:a", "1:9:z", 1, "The physical part decides first."),
        ("1:1:a", "1:0:z", 1, "The logical part decides before the node."),
        ("1:1:a", "1:1:a", 0, "They are the same."),
        (f"{2**53}:0:n", f"{2**53 + 1}:0:n", -1, "They differ in what binary64 does not hold."),
    ):
        yield Part(f"{one} and {other}", {"one": one, "other": other}, order, why)
