"""Which fields clients may send: those of each route, none that only the server sets, none that misspell ours."""

import dataclasses

import msgspec
import pytest
from pydantic import BaseModel
from sglang.srt.entrypoints.anthropic import protocol as anthropic
from sglang.srt.entrypoints.ollama import protocol as ollama
from sglang.srt.entrypoints.openai import protocol as openai
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_lazy.port.serving.malformed import DEFAULTS
from sglang_lazy.serving.fields import (
    FIELDS,
    INTERNAL_PARAMS,
    SERVER_FIELDS,
    check_fields,
    nearest,
    refuse_server_fields,
)

CLIENTS_FIELDS = """
audio_data background cache_salt conversation_id custom_labels custom_logit_processor data_parallel_rank dimensions
embed_override_token_id embed_overrides extra_key image_data image_max_dynamic_patch images_config input_embeds
input_ids is_cross_encoder_request log_metrics logprob_start_len lora_path max_dynamic_patch max_thinking_tokens
min_dynamic_patch mm_content_hashes mm_processor_kwargs modalities no_logs priority require_reasoning return_entropy
return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64 return_hidden_states
return_indexer_topk return_logprob return_pooled_hidden_states return_prompt_token_ids return_routed_experts
return_sampling_mask return_text_in_logprobs rid routed_dp_rank routed_experts_start_len routing_key
sampling_logprobs_mode sampling_params session_id session_params stream text token_ids_logprob top_logprobs_num
use_audio_in_video video_config video_data video_max_dynamic_patch watermark
"""
CLIENTS_PARAMS = """
beam_width custom_params ebnf ebnf_full_assistant frequency_penalty ignore_eos json_schema logit_bias max_new_tokens
min_new_tokens min_p n no_stop_trim presence_penalty regex repetition_penalty sampling_seed skip_special_tokens
spaces_between_special_tokens stop stop_regex stop_token_ids stream_interval structural_tag temperature top_k top_p
watermark
"""
OF_CLIENTS, PARAMS_OF_CLIENTS = set(CLIENTS_FIELDS.split()), set(CLIENTS_PARAMS.split())
KNOWN = frozenset(("text", "link", "cache_salt", "chunk_separator", "stream"))


def test_it_is_decided_for_every_field_who_may_set_it():
    """A field of a later SGLang fails here until it is."""
    fields = {field.name for kind in (GenerateReqInput, EmbeddingReqInput) for field in dataclasses.fields(kind)}
    assert fields == OF_CLIENTS | SERVER_FIELDS.keys() and not OF_CLIENTS & SERVER_FIELDS.keys()
    params = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert params == PARAMS_OF_CLIENTS | set(INTERNAL_PARAMS) and not PARAMS_OF_CLIENTS & set(INTERNAL_PARAMS)


@pytest.mark.parametrize("name", SERVER_FIELDS)
def test_the_server_s_fields_are_refused(name):
    for value in ("x", 0, True, [None]):
        with pytest.raises(ValueError, match=f"{name} is set by the server, not by clients: {SERVER_FIELDS[name]}"):
            refuse_server_fields({"text": "a", name: value}, DEFAULTS, has_router=False)
    default = {field.name: field.default for kind in (EmbeddingReqInput, GenerateReqInput)
               for field in dataclasses.fields(kind)}[name]  # fmt: skip
    for value in (None, default):
        refuse_server_fields({"text": "a", name: value}, DEFAULTS, has_router=False)


def test_a_disaggregated_server_s_router_names_peers():
    refuse_server_fields({"bootstrap_host": "h", "bootstrap_room": 5}, DEFAULTS, has_router=True)
    with pytest.raises(ValueError, match="lora_id"):
        refuse_server_fields({"bootstrap_host": "h", "lora_id": "x"}, DEFAULTS, has_router=True)


@pytest.mark.parametrize(
    "name, meant",
    [
        *((name, "link") for name in ("lnik", "links", "Link", "LINK", "lik", "l_ink", "lin")),
        *(
            (name, "chunk_separator")
            for name in ("chunk_seperator", "chunkSeparator", "chunk-separator", "chunk_seprator")
        ),
        *(
            (name, "cache_salt")
            for name in ("cacheSalt", "cache-salt", "cache_slat", "cachesalt", "cache_salts", "salt")
        ),
    ],
)
def test_near_misses_are_refused(name, meant):
    with pytest.raises(ValueError, match=f"unknown field '{name}': did you mean '{meant}'?"):
        check_fields(["text", name], KNOWN)


@pytest.mark.parametrize("name", ["segment", "segements", "chunk_role"])
def test_near_misses_of_other_routes_fields(name):
    with pytest.raises(ValueError, match="is not a field of this route either"):
        check_fields([name], KNOWN)


def test_fields_of_other_routes_are_refused():
    with pytest.raises(ValueError, match="chunk_roles is not a field of this route"):
        check_fields(["chunk_roles"], KNOWN)
    with pytest.raises(ValueError, match="segments are for /generate and /v1/completions"):
        check_fields(["segments"], KNOWN)


def test_others_are_left_to_sglang():
    check_fields(
        [
            *KNOWN,
            "like",
            "line",
            "lint",
            "pink",
            "sink",
            "rank",
            "think",
            "documents",
            "x",
            "",
            "link_to_my_page",
            "l" * 10_000,
        ],
        KNOWN,
    )


def test_no_field_of_any_api_is_like_one_of_ours():
    models = [
        model
        for module in (openai, anthropic, ollama)
        for model in vars(module).values()
        if isinstance(model, type) and issubclass(model, BaseModel)
    ]
    names = {name for model in models for name in model.model_fields} | OF_CLIENTS | PARAMS_OF_CLIENTS
    assert len(names) > 200
    assert {name for name in names if nearest(name)} <= set(FIELDS)
