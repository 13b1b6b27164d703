"""The salt, the client's own key and the adapter: what becomes of them on the way to the cache never makes two the
same."""

import json
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from starlette.datastructures import Headers

from sglang_lazy.chunks.catalog import tenant_of
from sglang_lazy.core.keys import Namespace, TenantKey, tenant_key
from sglang_lazy.core.segments import PromptLayout
from sglang_lazy.port.serving.tenants import compute_extra_key, send_plain, take_salt
from sglang_lazy.serving.requests import check_cache_salt, keep_apart, salt_of

pytestmark = pytest.mark.usefixtures("sglang_context")
repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=500)

# Few letters, some of them those of the encoding, so that joined strings would often be equal.
names = st.none() | st.text('a0[]",:\\', min_size=1, max_size=4)
adapters = st.none() | st.sampled_from(["a", "0", "a0", "null]", '"]'])
identities = st.tuples(names, names, adapters)


def request_of(salt, extra_key, adapter):
    """As the scheduler makes it, after which SGLang has appended the adapter."""
    params = SamplingParams()
    params.normalize(None)
    return Req("r", "", [1], params, vocab_size=9, extra_key=tenant_key(salt, extra_key), lora_id=adapter)


@repeatable
@given(identities, identities)
def test_distinct_tenants_share_nothing(one, other):
    """Neither text (SGLang's key in its tree) nor chunks."""
    keys = [request_of(*identity).extra_key for identity in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)
    places = [RadixKey([1, 2], key).child_key() for key in keys]
    assert (places[0] == places[1]) == (one == other)
    chunks = [
        Namespace("chunk", key, salt, None, adapter) for key, (salt, _, adapter) in zip(keys, (one, other), strict=True)
    ]
    assert (chunks[0] == chunks[1]) == (one == other)
    stored = [(chunk.own_key, chunk.adapter) for chunk in chunks]  # objects in storage have these in their names
    assert (stored[0] == stored[1]) == (one == other)


@repeatable
@given(identities)
def test_a_key_says_what_it_is_made_of(identity):
    salt, extra_key, adapter = identity
    chunk = Namespace("chunk", request_of(*identity).extra_key, salt, None, adapter)
    assert chunk.own_key == tenant_key(salt, extra_key)
    assert chunk.own_key is None or json.loads(chunk.own_key) == [salt, extra_key]
    assert tenant_of(chunk) == (salt if extra_key is None else (chunk.own_key, salt))


def test_an_empty_key_is_none():
    assert tenant_key(None, "") is None and tenant_key("a", "") == tenant_key("a", None)


@pytest.mark.parametrize("salt, key", [("t10", None), ("t1", "0"), (None, "t10"), (None, '["t10",null]')])
def test_no_client_s_key_reads_like_a_tenant_s(salt, key):
    others = {("t10", None), ("t1", "0"), (None, "t10"), (None, '["t10",null]')} - {(salt, key)}
    assert keep_apart(salt, key) not in {keep_apart(*other) for other in others}


def test_on_openai_s_routes():
    def extra_key(**fields):
        request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "a"}], **fields)
        return compute_extra_key(None, None, request)

    assert extra_key(cache_salt="t1", extra_key="0") == tenant_key("t1", "0") != tenant_key("t10", None)
    assert extra_key(cache_salt="t1") == tenant_key("t1", None)
    unsalted = extra_key(extra_key="0")
    assert unsalted == "0" and not isinstance(unsalted, TenantKey), "a layout may add the salt"
    for bad in ("a\nb", "\ud800", "a" * 257, ["a"]):
        with pytest.raises(ValueError, match="extra_key must be"):
            extra_key(extra_key=bad)
    for bad in ("", "a\nb", "\ud800", "a" * 257):
        with pytest.raises(ValueError, match="cache_salt must be"):
            extra_key(cache_salt=bad)


def headers(*salts):
    return Headers(raw=[(b"x-cache-salt", salt.encode("latin-1")) for salt in salts])


def test_the_header_holds_on_every_route():
    def salted(*salts, **fields):
        obj = GenerateReqInput(**{"text": "Who?", **fields})
        obj.normalize_batch_and_arguments()
        take_salt(None, obj, types.SimpleNamespace(headers=headers(*salts)) if salts else None)
        return obj.extra_key

    assert salted("a") == tenant_key("a", None) and salted("a", extra_key="k") == tenant_key("a", "k")
    assert salted() is None and salted(extra_key="k") == "k"
    assert salted("a", extra_key=tenant_key("a", "k")) == tenant_key("a", "k"), "a surface has applied it already"
    assert salted("a", text=["x", "y"]) == [tenant_key("a", None)] * 2
    assert salted("a", text=["x", "y"], sampling_params={"n": 2}) == [tenant_key("a", None)] * 4
    assert salted("a", text=["x", "y"], extra_key=["k", "l"]) == [tenant_key("a", "k"), tenant_key("a", "l")]
    with pytest.raises(ValueError, match="X-Cache-Salt is given twice"):
        salted("a", "a")


def test_the_salt_of_body_and_header():
    assert salt_of("a", headers()) == "a" and salt_of(None, headers()) is None and salt_of(3, headers()) == 3
    assert salt_of(None, headers("a")) == salt_of("a", headers("a")) == salt_of([None, "a"], headers("a")) == "a"
    for body in ("b", ["a", "b"], 3):
        with pytest.raises(ValueError, match="cache_salt and X-Cache-Salt disagree"):
            salt_of(body, headers("a"))
    for salts in (("",), ("é",), ("a", "a"), ("a", "b"), ("a" * 257,), ("a\tb",)):
        with pytest.raises(ValueError, match="X-Cache-Salt (must be a non-empty|is given twice)"):
            salt_of(None, headers(*salts))


@pytest.mark.parametrize("salt", ["", 7, ["a"], "\ud800", "a\0b", "a\nb", "a" * 257])
def test_salts_are_printable(salt):
    with pytest.raises(ValueError, match="cache_salt must be a non-empty string of at most 256 printable characters"):
        check_cache_salt(salt)
    assert check_cache_salt("é 東" + "x" * 253) and check_cache_salt(None) is None


def test_messages_to_the_scheduler_have_plain_strings():
    """msgpack knows no others."""
    packed = PromptLayout(((0, 1),)).pack()
    params = SamplingParams(custom_params={"sglang_lazy": packed, "mine": 1})
    sent = send_plain(types.SimpleNamespace(extra_key=tenant_key("a", None), sampling_params=params))
    assert type(sent.extra_key) is str and sent.extra_key == tenant_key("a", None)
    assert type(sent.sampling_params.custom_params["sglang_lazy"]) is str
    assert sent.sampling_params.custom_params == {"sglang_lazy": str(packed), "mine": 1}
