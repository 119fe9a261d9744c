"""What must be equal besides the tokens, each component of it; and what an allow-list shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.cache.namespace import ENGINE_PARTS, PUBLIC, Namespace, PublicPrefixes, engine_namespace
from minillm.cache.prefix import RadixPrefixCache
from minillm.cache.prefix_hash import HashPrefixCache
from minillm.errors import MinillmError

PARTS = {
    "weights": "sha256:1", "dtype": "float32", "quantization": "none", "kv_dtype": "auto", "tokenizer": "sha256:2",
    "template": "sha256:3", "attention": {"heads": 4, "theta": 1e6, "window": None},
}  # fmt: skip
OTHERS = {
    "weights": "sha256:9", "dtype": "bfloat16", "quantization": "int8", "kv_dtype": "fp8", "tokenizer": "sha256:8",
    "template": "none", "attention": {"heads": 4, "theta": 1e6, "window": 4096},
}  # fmt: skip


@pytest.mark.parametrize("kind", [RadixPrefixCache, HashPrefixCache])
@pytest.mark.parametrize("changed", [*ENGINE_PARTS, "tenant", "adapter"])
def test_a_change_of_any_one_component_misses(kind, changed):
    cache = kind(4)
    base = Namespace(engine_namespace(**PARTS), "ann", "lora")
    cache.insert(range(12), base, [1, 2, 3])
    if changed in PARTS:
        other = Namespace(engine_namespace(**PARTS | {changed: OTHERS[changed]}), "ann", "lora")
    else:
        other = Namespace(base.engine, *("bob", "lora") if changed == "tenant" else ("ann", ""))
    assert cache.match(range(12), other) == ([], 0)
    same = Namespace(engine_namespace(**dict(reversed(PARTS.items()))), "ann", "lora")
    assert cache.match(range(12), same) == ([1, 2, 3], 12)


@pytest.mark.parametrize("missing", ENGINE_PARTS)
@pytest.mark.parametrize("value", [None, "", ...])
def test_a_part_that_is_missing_is_refused(missing, value):
    parts = {name: part for name, part in PARTS.items() if name != missing}
    if value is not ...:
        parts[missing] = value
    with pytest.raises(MinillmError, match=f"missing: {missing}.*say 'none'"):
        engine_namespace(**parts)


def test_parts_that_cannot_be_named_are_refused():
    with pytest.raises(MinillmError, match="unknown: color"):
        engine_namespace(**PARTS, color="red")
    with pytest.raises(MinillmError, match="strings, numbers"):
        engine_namespace(**PARTS | {"dtype": object()})
    with pytest.raises(MinillmError, match="strings, numbers"):
        engine_namespace(**PARTS | {"attention": float("nan")})


@pytest.mark.parametrize("wrong", [{"tenant": None}, {"adapter": 3}, {"public_tokens": -1}, {"public_tokens": True}])
def test_a_namespace_is_of_strings_and_a_number(wrong):
    with pytest.raises(MinillmError, match=next(iter(wrong))):
        Namespace("engine", **wrong)


def test_scopes():
    namespace = Namespace("engine", "ann", "", public_tokens=9)
    assert [namespace.scope(i, 4) for i in range(4)] == [PUBLIC, PUBLIC, "ann", "ann"]
    assert Namespace("engine").scope(0, 4) == "", "no name is a tenant, too, and not the public"


names = st.sampled_from(["", "a", "b", 'a", "b'])
some = st.builds(Namespace, names, names, names, st.integers(0, 8))


@given(some, some, st.integers(1, 8))
def test_reader_keys_are_equal_exactly_for_the_same_readers(a, b, end):
    same = a.model == b.model and a.scope(0, end) == b.scope(0, end)
    assert (a.reader_key(end) == b.reader_key(end)) == same


@given(st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=9), max_size=3), st.lists(st.integers(0, 1)))
def test_leading_public_tokens(prefixes, tokens):
    found = PublicPrefixes(prefixes, 3).leading(tokens)
    whole = [n for n in range(0, len(tokens) + 1, 3) if any(tokens[:n] == list(p[:n]) for p in prefixes)]
    assert found == max(whole, default=0)


def test_a_public_prefix_shorter_than_a_block_is_refused():
    with pytest.raises(MinillmError, match="3 tokens is shorter than a block of 4"):
        PublicPrefixes([[1, 2, 3]], 4)
    with pytest.raises(MinillmError, match="block_size"):
        PublicPrefixes([], 0)


@pytest.mark.parametrize("kind", [RadixPrefixCache, HashPrefixCache])
def test_tenants_share_what_is_public_and_nothing_else(kind):
    """D7 and D8: two tenants with the same system prompt and, by chance, the same question."""
    system, question = list(range(100, 110)), list(range(200, 210))
    public = PublicPrefixes([system], 4)
    cache = kind(4)
    tokens = system + question

    def who(tenant):
        return Namespace("engine", tenant, "", public.leading(tokens))

    assert cache.insert(tokens, who("ann"), [1, 2, 3, 4, 5]) == [1, 2, 3, 4, 5]
    assert cache.match(tokens, who("bob")) == ([1, 2], 8), "the third block holds two public tokens and two of ann's"
    assert cache.match(tokens, who("ann")) == ([1, 2, 3, 4, 5], 20)
    assert cache.match(tokens, Namespace("engine", "bob")) == ([], 0), "without the allow-list nothing is public"
