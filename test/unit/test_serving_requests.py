"""Requests with segments: what reaches the scheduler, and what is refused before."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from sglang_lazy.core.config import ENV_VAR, LazyConfig
from sglang_lazy.core.segments import LAYOUT_PARAM, PromptLayout
from sglang_lazy.policies import get_policy
from sglang_lazy.port.serving.frontend import frontend_of
from sglang_lazy.port.serving.requests import plan_of
from sglang_lazy.port.serving.tokenizer_manager import prepare_request
from sglang_lazy.serving.plans import Plan
from sglang_lazy.serving.prompts import refuse_without_segments


@pytest.fixture(autouse=True)
def _config(monkeypatch):
    monkeypatch.setenv(ENV_VAR, "")
    monkeypatch.setattr(LazyConfig, "from_env", classmethod(lambda cls: cls(max_chunks=3)))


def manager(**more):
    return SimpleNamespace(
        tokenizer=None, preferred_sampling_params=None, model_config=SimpleNamespace(vocab_size=100),
        allow_auto_truncate=False, context_len=32, num_reserved_tokens=0,
        server_args=SimpleNamespace(dp_size=1), **more,
    )  # fmt: skip


def prompts(server=None):
    return frontend_of(server or manager()).prompts


def text(*ids):
    return {"type": "text", "input_ids": list(ids)}


def chunk(*ids):
    return {"type": "chunk", "input_ids": list(ids)}


def plan(chunks, link="block", cache_salt=None):
    return Plan.of(chunks, get_policy(link), cache_salt)


def layout_in(params, prompt_len):
    return PromptLayout.unpack(params["custom_params"][LAYOUT_PARAM], prompt_len)


def test_one_prompt():
    sampling = {"temperature": 0, "custom_params": {"mine": 1}}
    args = prompts().to_generate_args([text(1), chunk(2, 3), text(4)], "tenant", sampling)
    assert args["input_ids"] == [1, 2, 3, 4]
    assert layout_in(args["sampling_params"], 4) == PromptLayout(((1, 3),), "tenant")
    assert args["sampling_params"]["custom_params"]["mine"] == 1 and args["sampling_params"]["temperature"] == 0
    assert sampling == {"temperature": 0, "custom_params": {"mine": 1}}, "the caller's objects must not change"


def test_batch_of_prompts_with_and_without_chunks():
    args = prompts().to_generate_args([[text(1)], [chunk(2)]], [None, "b"], [{"n": 1}, None])
    assert args["input_ids"] == [[1], [2]]
    assert args["sampling_params"][0] == {"n": 1}, "a prompt without chunks is an ordinary request"
    assert layout_in(args["sampling_params"][1], 1) == PromptLayout(((0, 1),), "b")


def test_links_do_not_change_the_tokens():
    block, full, plain = prompts().to_generate_args(
        [[text(1), chunk(2), text(3)]] * 2 + [[text(1)]],
        sampling_params={"n": 1},
        link=["block", "full", "full"],
    )["sampling_params"]
    chunks = ((1, 2),)
    assert layout_in(block, 3) == PromptLayout(chunks) and layout_in(full, 3) == PromptLayout(chunks, link="full")
    assert plain == {"n": 1}, "without chunks there is no layout to send"


def test_the_servers_default_link(monkeypatch):
    monkeypatch.setattr(LazyConfig, "from_env", classmethod(lambda cls: cls(default_link="full")))
    for link, links in ((None, "full"), ("block", "block")):
        args = prompts().to_generate_args([chunk(1), text(2)], link=link)
        assert layout_in(args["sampling_params"], 2).link == links


def test_link_full_has_no_limit_on_chunks():
    args = prompts().to_generate_args([chunk(1)] * 4, link="full")
    assert args["input_ids"] == [1] * 4 and layout_in(args["sampling_params"], 4).link == "full"


def test_the_servers_default_custom_params_still_apply():
    server = manager()
    server.preferred_sampling_params = {"custom_params": {"default": 1}}
    assert prompts(server).with_plan(None, plan(((0, 1),)))["custom_params"]["default"] == 1
    assert "default" not in prompts(server).with_plan({"custom_params": {}}, plan(((0, 1),)))["custom_params"]


@pytest.mark.parametrize(
    "segments, cache_salt, params, reason",
    [
        ([{"type": "text", "text": "x"}], None, None, r"segments\[0\]: this server has no tokenizer"),
        ([text(1), chunk(100)], None, None, r"segments\[1\]: token id 100"),
        ([[text(1)], [chunk(100)]], None, None, r"prompt 1 of the batch: segments\[0\]: token id 100"),
        ([[text(1)], []], None, None, "prompt 1 of the batch: segments is empty"),
        ([[text(1)], text(1)], None, None, "prompt 1 of the batch: segments must be a list"),
        ([chunk(1)] * 4, None, None, "more than the 3 chunks that are allowed"),
        ([chunk(1)], "", None, "cache_salt must be a non-empty string"),
        ([chunk(1)], 7, None, "cache_salt must be a non-empty string"),
        ([[chunk(1)]], ["a", "b"], None, "cache_salt has 2 values for a batch of 1"),
        ([[chunk(1)]], None, [{}, {}], "sampling_params has 2 values for a batch of 1"),
        ([chunk(1)], None, [{}], "sampling_params must be an object"),
        ([chunk(1)], None, {"custom_params": 3}, "custom_params must be an object"),
    ],
)
def test_bad_input(segments, cache_salt, params, reason):
    with pytest.raises(ValueError, match=reason):
        prompts().to_generate_args(segments, cache_salt, params)


def test_links_keep_their_parameters():
    for link, spelled in (("epic:tokens=4", "epic:tokens=4"), ("base+query", "base+query:ratio=0.15")):
        args = prompts().to_generate_args([chunk(1), text(2)], link=link)
        assert layout_in(args["sampling_params"], 2).link == spelled


@pytest.mark.parametrize(
    "link, reason",
    [
        ("epic:tokens=0", "tokens must be at least 1 and at most 1048576, got 0"),
        ("epic:tokens=many", "tokens must be of type int, got 'many'"),
        ("query:ratio=2", "ratio must be above 0 and at most 1, got 2.0"),
        ("query:share=0.1", "policy 'query' takes ratio, static, got 'share=0.1'"),
        ("block:tokens=1", "policy 'block' has no parameters, got 'tokens=1'"),
        ("base:preamble=mine", "preamble must be one of none, neutral, lead, got 'mine'"),
        ("base+full", "full computes no chunks, so a preamble has no effect"),
        ("base+", "link must be one of"),
    ],
)
def test_bad_parameters(link, reason):
    with pytest.raises(ValueError, match=reason):
        prompts().to_generate_args([chunk(1), text(2)], link=link)


@pytest.mark.parametrize("link", ["blok", "", 1, ["block"], {}])
def test_bad_link(link):
    known = "link must be one of 'block', 'full', 'epic'"
    with pytest.raises(ValueError, match=f"{known}|link has 1 values for a batch of 2"):
        prompts().to_generate_args([[chunk(1)]] * 2, link=link)
    with pytest.raises(ValueError, match=known):
        prompts().to_generate_args([chunk(1)], link=link)


def request(**fields):
    params = prompts().with_plan(None, plan(((2, 5), (6, 8))))
    fields = {"input_ids": list(range(10)), "sampling_params": params, **fields}
    return GenerateReqInput(**fields)


def check(obj, server=None):
    prepare_request(server or manager(), obj, obj.input_ids)


def test_chunks_alone_pass():
    check(request())
    assert plan_of(request()).layout == PromptLayout(((2, 5), (6, 8)))


def test_ordinary_requests_are_left_alone():
    for obj in (GenerateReqInput(text="x", lora_path="a", sampling_params={}), EmbeddingReqInput(text="x")):
        prepare_request(manager(), obj, [1])
        assert plan_of(obj) is None


@pytest.mark.parametrize(
    "field, value",
    [("session_params", {"id": "s"}), ("video_data", ["film"]), ("audio_data", ["sound"]), ("mm_hashes", ["ab"])],
)
def test_options_that_exclude_chunks(field, value):
    with pytest.raises(ValueError, match=field):
        check(request(**{field: value}))


@pytest.mark.parametrize("start, fits", [(-1, True), (None, True), (0, False), (7, False), (8, True), (10, True)])
def test_prompt_logprobs_start_after_the_last_chunk(start, fits):
    obj = request(return_logprob=True, logprob_start_len=start)
    check(request(logprob_start_len=start))
    if fits:
        check(obj)
    else:
        with pytest.raises(ValueError, match="must be at least 8"):
            check(obj)


def with_link(link, cache_salt=None):
    return prompts().with_plan(None, plan(((2, 5), (6, 8)), link, cache_salt))


def test_link_full_excludes_nothing():
    session = {"id": "s"}
    check(request(sampling_params=with_link("full"), session_params=session, return_logprob=True, logprob_start_len=0))
    for link in ("block", "copy"):
        with pytest.raises(ValueError, match="session_params"):
            check(request(sampling_params=with_link(link), session_params=session))


@pytest.mark.parametrize("link", ["block", "full", "copy"])
def test_sglang_gets_the_cache_salt(link):
    """So one salt means one namespace on every API, for what is reused as chunks and what is not."""
    salted = request(sampling_params=with_link(link, "tenant"), extra_key="a")
    check(salted)
    assert (salted.cache_salt, salted.extra_key) == ("tenant", "a")
    unsalted = request(sampling_params=with_link(link))
    check(unsalted)
    assert unsalted.cache_salt is None


def test_beam_search_excludes_chunks():
    params = with_link("block")
    for width in (None, 1):
        check(request(sampling_params={**params, "beam_width": width}))
    with pytest.raises(ValueError, match="beam_width"):
        check(request(sampling_params={**params, "beam_width": 2}))


def test_segments_without_chunks_keep_their_cache_salt():
    args = prompts().to_generate_args([text(1), text(2)], "tenant")
    obj = GenerateReqInput(**args)
    check(obj)
    assert obj.cache_salt == "tenant" and plan_of(obj).layout.chunks == ()


@pytest.mark.parametrize("packed", [PromptLayout(((2, 5),), "another's").pack(), None, 3, {}])
def test_a_layout_from_a_client_is_refused(packed):
    """It could name another tenant's salt."""
    for fields in ({"input_ids": [5] * 10}, {"text": "x"}):
        obj = GenerateReqInput(sampling_params={"custom_params": {LAYOUT_PARAM: packed}}, **fields)
        with pytest.raises(ValueError, match="custom_params.sglang_lazy is set by the server"):
            prepare_request(manager(), obj, [5] * 10)


def test_a_plan_needs_the_prompt_that_it_describes():
    params = prompts().with_plan(None, plan(((0, 11),)))
    with pytest.raises(ValueError, match="needs the input_ids"):
        prepare_request(manager(), GenerateReqInput(text="x", sampling_params=params), [1] * 11)


def test_chunks_are_limited_however_a_request_has_got_its_plan():
    many = prompts().with_plan(None, plan(tuple((i, i + 1) for i in range(4))))
    with pytest.raises(ValueError, match="more than the 3 chunks that are allowed"):
        check(request(sampling_params=many))


def test_a_prompt_with_chunks_is_not_truncated():
    server = manager()
    server.allow_auto_truncate = True
    check(request(), server)
    with pytest.raises(ValueError, match="is not truncated"):
        check(request(input_ids=list(range(40))), server)


@pytest.mark.parametrize("link", ["block", "base+query:ratio=0.3", "full"])
def test_segments_without_a_chunk_may_have_a_link(link):
    """They are the same request as without it; the link's name is checked."""
    alone = prompts().to_generate_args([text(5, 6), text(7)])
    assert prompts().to_generate_args([text(5, 6), text(7)], link=link) == alone
    assert alone == {"input_ids": [5, 6, 7], "sampling_params": {}}
    with pytest.raises(ValueError, match="link must be one of"):
        prompts().to_generate_args([text(5, 6)], link="blok")


def test_a_link_needs_segments():
    refuse_without_segments(None)
    with pytest.raises(ValueError, match="link needs a prompt given as segments"):
        refuse_without_segments("full")


def test_only_a_sessions_prompt_may_be_empty():
    """Its history may be all there is; SGLang's scheduler refuses the others."""
    prepare_request(manager(), GenerateReqInput(input_ids=[], session_params={"id": "s"}), [])
    with pytest.raises(ValueError, match="the prompt is empty"):
        prepare_request(manager(), GenerateReqInput(input_ids=[]), [])
