"""ML-DSA-44 of the verify page is that of the published library, and judges as the known answers and OpenSSL do."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey, MLDSA44PublicKey
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import Page

from lab.vendored import MODULE, MODULE_SHA256, module
from tests.browser import browsing

REPOSITORY: Final = Path(__file__).resolve().parents[2]
KNOWN_ANSWERS: Final = Path(__file__).with_name("ml_dsa_44.json")
PRIVATE: Final = MLDSA44PrivateKey.from_seed_bytes(b"\x11" * 32)
MESSAGE: Final = b"a message"
SIGNATURE: Final = PRIVATE.sign(MESSAGE)
OMEGA: Final = 80
HINTS: Final = len(SIGNATURE) - OMEGA - 4
"""Where the positions of hints begin: 80 of them in four lists, of which the last four bytes give the ends."""

JUDGE: Final = """([module, cases]) => {
  const ml_dsa44 = new Function(module.replace("export const ml_dsa44 =", "return"))();
  const bytes = (text) => Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  return cases.map((each) => {
    const options = each.context ? { context: bytes(each.context) } : {};
    return ml_dsa44.verify(bytes(each.signature), bytes(each.message), bytes(each.key), options);
  });
}"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browsing() as browser:
        yield browser.new_page()


def judged(page: Page, cases: list[dict[str, Any]]) -> list[bool]:
    found: list[bool] = page.evaluate(JUDGE, [(REPOSITORY / MODULE).read_text(), cases])
    return found


def case(signature: bytes, message: bytes = MESSAGE, key: MLDSA44PublicKey | None = None) -> dict[str, str]:
    raw = (key or PRIVATE.public_key()).public_bytes_raw()
    parts = {"signature": signature, "message": message, "key": raw}
    return {name: base64.b64encode(part).decode() for name, part in parts.items()}


def by_openssl(signature: bytes, message: bytes = MESSAGE) -> bool:
    try:
        PRIVATE.public_key().verify(signature, message)
    except InvalidSignature:
        return False
    return True


def test_the_module_is_as_it_was_made() -> None:
    assert hashlib.sha256((REPOSITORY / MODULE).read_bytes()).hexdigest() == MODULE_SHA256


@pytest.mark.torture
@pytest.mark.foreign
def test_the_module_is_made_of_the_published_packages() -> None:
    """By npm, which `make torture` needs."""
    assert module() == (REPOSITORY / MODULE).read_text()


def test_known_answers_hold_and_hold_for_no_other_context(page: Page) -> None:
    known = json.loads(KNOWN_ANSWERS.read_text())["cases"]
    assert judged(page, known) == [True] * len(known)
    assert judged(page, [{**each, "context": ""} for each in known]) == [False] * len(known)


def test_a_signature_whose_form_is_not_that_of_the_standard_is_refused(page: Page) -> None:
    """What FIPS 204 has a verifier refuse, as Wycheproof lists it."""
    first, ends = SIGNATURE[HINTS:], SIGNATURE[-4:]
    assert ends[0] >= 2
    swapped = bytes((first[1], first[0])) + first[2:]
    repeated = bytes((first[1], first[1])) + first[2:]
    forms = {
        "short": SIGNATURE[:-1],
        "long": SIGNATURE + b"\0",
        "empty": b"",
        "hints in another order": SIGNATURE[:HINTS] + swapped,
        "a hint twice": SIGNATURE[:HINTS] + repeated,
        "padding that is not zero": SIGNATURE[:-5] + b"\1" + ends,
        "more hints than omega": SIGNATURE[:-1] + bytes((OMEGA + 1,)),
        "ends that read beyond the signature": SIGNATURE[:-1] + b"\xff",
        "ends that go back": SIGNATURE[:-4] + bytes((ends[0], ends[0] - 1, *ends[2:])),
        "z at its bound": SIGNATURE[:32] + bytes(2304) + SIGNATURE[HINTS:],
        "all zero": bytes(len(SIGNATURE)),
    }
    assert [by_openssl(each) for each in forms.values()] == [False] * len(forms)
    assert dict(zip(forms, judged(page, [*map(case, forms.values())]), strict=True)) == dict.fromkeys(forms, False)


@given(
    messages=st.lists(st.binary(max_size=300), min_size=3, max_size=3),
    flips=st.lists(st.integers(0, 8 * len(SIGNATURE) - 1), min_size=3, max_size=3),
)
def test_page_and_openssl_agree_on_every_signature_and_on_every_flipped_bit(
    page: Page, messages: list[bytes], flips: list[int]
) -> None:
    signed = [(PRIVATE.sign(message), message) for message in messages]
    for at in flips:
        flipped = bytearray(SIGNATURE)
        flipped[at // 8] ^= 1 << at % 8
        signed.append((bytes(flipped), MESSAGE))
    expected = [by_openssl(*each) for each in signed]
    assert judged(page, [case(*each) for each in signed]) == expected == [True] * 3 + [False] * 3
