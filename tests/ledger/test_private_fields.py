"""Which fields may be private, and the form that takes the place of a private value."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import canonical, private_fields
from ledger.errors import InvalidInputError
from ledger.private_fields import Declaration, SealedValue, declaration_of

NAMES = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
SEALED = st.builds(
    SealedValue, st.binary(min_size=16, max_size=16).map(bytes.hex), st.binary(min_size=12, max_size=12),
    st.binary(min_size=17, max_size=40),
)  # fmt: skip


def test_fields_and_the_parts_of_free_objects_may_be_private() -> None:
    declared = declaration_of(
        ["spec.user", "spec.a.b", "aggregate_metrics", "reason", "requestor", "error"], "spec.user"
    )
    assert declared.fields[:2] == (("spec", "user"), ("spec", "a", "b"))
    assert declared.subject == ("spec", "user")
    assert declaration_of(["spec"], "spec.who.id").subject == ("spec", "who", "id")
    assert declaration_of([], None) == Declaration((), None)


@pytest.mark.parametrize(
    "field",
    [
        *("type", "fence_token", "tenant_id", "job_id", "dc_id", "worker_count", "completed", "failed", "workflow_id"),
        *("assigned_dcs", "final_status", "timeout_type", "last_progress_hlc", "trace_time", "durability", "subject"),
        *(
            "reason.deeper",
            "error.code",
            "",
            ".",
            "spec.",
            ".spec",
            "spec..user",
            "spec." + "x" * 600,
            "spec" + ".a" * 20,
        ),
    ],
)
def test_what_identifies_or_decides_and_what_is_malformed_cannot_be_private(field: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        declaration_of(["reason", field], None)
    assert refused.value.path == ("fields", 1)
    if "." not in field and field:
        assert private_fields.ALLOWED in str(refused.value)


@pytest.mark.parametrize("fields", [["spec", "spec.user"], ["spec.user", "spec"], ["reason", "reason"]])
def test_no_private_field_lies_inside_another(fields: list[str]) -> None:
    with pytest.raises(InvalidInputError, match="inside each other"):
        declaration_of(fields, None)


def test_the_field_that_names_the_subject_is_private_itself() -> None:
    with pytest.raises(InvalidInputError, match="stored in clear"):
        declaration_of(["spec.user.name"], "spec.user")
    with pytest.raises(InvalidInputError, match="at most 64"):
        declaration_of([f"spec.f{number}" for number in range(65)], None)


@given(SEALED)
def test_a_private_value_is_read_as_it_was_written(sealed: SealedValue) -> None:
    assert private_fields.from_json(private_fields.to_json(sealed)) == sealed


@given(SEALED, st.data())
def test_anything_a_little_different_is_no_private_value(sealed: SealedValue, data: st.DataObject) -> None:
    value = private_fields.to_json(sealed)
    parts = value["$private"]
    changed = data.draw(
        st.sampled_from(
            [
                {**value, "more": 1},
                {"$private": {**parts, "more": 1}},
                {"$private": {**parts, "alg": "none"}},
                {"$private": {**parts, "key": parts["key"].upper() + "0"}},
                {"$private": {**parts, "key": 7}},
                {"$private": {**parts, "nonce": parts["nonce"][:-1]}},
                {"$private": {**parts, "nonce": None}},
                {"$private": {**parts, "ciphertext": parts["ciphertext"] + "="}},
                {"$private": {**parts, "ciphertext": "AAAA"}},
                {"$private": {**parts, "ciphertext": "é" * 40}},
                {"$private": []},
                [value],
            ]
        )
    )
    assert private_fields.from_json(changed) is None


@given(st.dictionaries(NAMES.filter(bool), VALUES, min_size=1), st.data(), SEALED)
def test_a_value_is_replaced_where_it_stands_and_nowhere_else(
    fields: dict[str, Any], data: st.DataObject, sealed: SealedValue
) -> None:
    path: tuple[str, ...] = ()
    value: Any = fields
    while isinstance(value, dict) and value and (not path or data.draw(st.booleans())):
        path = (*path, data.draw(st.sampled_from(sorted(value))))
        value = value[path[-1]]
    before = canonical.encode(fields)
    assert private_fields.value_at(fields, path) == (True, value)
    replaced = private_fields.with_value(fields, path, private_fields.to_json(sealed))
    assert canonical.encode(fields) == before
    assert list(private_fields.sealed_values(replaced)) == [sealed]
    seen: list[tuple[SealedValue, tuple[str, ...]]] = []

    def show(found: SealedValue, at: tuple[str, ...]) -> Any:
        seen.append((found, at))
        return value

    assert canonical.encode(private_fields.shown(replaced, (), show)) == before
    assert seen == [(sealed, path)]


def test_a_path_that_leads_nowhere_finds_nothing() -> None:
    fields = {"spec": {"a": None, "list": [{"b": 1}], "text": "b"}}
    assert private_fields.value_at(fields, ("spec", "a")) == (True, None)
    for path in (("spec", "b"), ("spec", "a", "b"), ("spec", "list", "b"), ("spec", "text", "b"), ("error",)):
        assert private_fields.value_at(fields, path) == (False, None)


@pytest.mark.parametrize(
    "value",
    [{"$private": 1}, {"spec": {"a": [{"$erased": True}]}}, {"a": {"$private": {}, "b": 1}}],
)
def test_a_caller_cannot_write_what_reads_like_a_private_value(value: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="kept for private fields"):
        private_fields.refuse_marks(value)
    private_fields.refuse_marks({"spec": {"private": ["$private", {"$": 1}]}})


def test_associated_data_tells_tenant_event_key_and_field_apart() -> None:
    one = private_fields.associated_data("acme", "1:0:n", "k", ("spec", "user"))
    assert one == b'["tallystick.private.v1","acme","1:0:n","k",["spec","user"]]'
    others = [("b", "1:0:n", "k", ("spec", "user")), ("acme", "1:1:n", "k", ("spec", "user"))]
    others += [("acme", "1:0:n", "j", ("spec", "user")), ("acme", "1:0:n", "k", ("spec.user",))]
    assert one not in {private_fields.associated_data(*other) for other in others}
