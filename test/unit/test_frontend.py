"""The state of an HTTP process, and SGLang's tokenizer manager as the server behind it."""

import asyncio
from types import SimpleNamespace

import pytest
from fastapi import HTTPException
from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry
from test_serving_tokenization import byte_level

from fakes.server import FakeServer, new_frontend
from sglang_lazy.core.overlay import Overlay
from sglang_lazy.port.serving.frontend import frontend_of


def test_a_process_has_one_state():
    manager, other = SimpleNamespace(), SimpleNamespace()
    assert frontend_of(manager) is frontend_of(manager) is frontend_of(Overlay(manager, tokenizer=None))
    assert frontend_of(other) is not frontend_of(manager)


def test_prompts_of_another_tokenizer_are_encoded_by_it():
    server = FakeServer(tokenizer=byte_level())
    prompts = new_frontend(server).prompts
    first = prompts.tokenizer
    assert prompts.tokenizer is first, "it remembers chunks"
    server.tokenizer = byte_level()
    assert prompts.tokenizer.tokenizer is server.tokenizer is not first.tokenizer


def test_what_the_server_says_of_itself_is_not_remembered():
    """Weights can be exchanged, adapters loaded and requests begun at any time."""
    registry = LoRARegistry(None)
    manager = SimpleNamespace(model_path="a", lora_registry=registry, rid_to_state={}, is_pause=False)
    server = frontend_of(manager).server
    assert (server.model_path, server.adapters, server.is_idle) == ("a", {}, True)
    ref = LoRARef(lora_name="adapter", lora_path="x")
    asyncio.run(registry.register(ref))
    manager.model_path, manager.rid_to_state = "b", {"r": None}
    assert (server.model_path, server.adapters, server.is_idle) == ("b", {"adapter": ref.lora_id}, False)
    manager.rid_to_state, manager.is_pause = {}, True
    assert not server.is_idle


def computed(end):
    """What `Server.compute` returns if SGLang's request ends so."""

    async def generate_request(request):
        assert (request.input_ids, request.lora_path, request.log_metrics) == ([1, 2], "adapter", False)
        request.lora_id = "id"
        yield {}
        end()

    manager = SimpleNamespace(generate_request=generate_request)
    return asyncio.run(frontend_of(manager).server.compute([1, 2], {"temperature": 0}, "adapter"))


def test_a_computed_prompt_tells_its_adapter():
    assert computed(lambda: None) == "id"


def test_a_prompt_that_is_aborted_meanwhile_is_an_error_with_its_reason():
    def abort():
        raise HTTPException(503, "the queue was full")

    with pytest.raises(ValueError, match="the queue was full"):
        computed(abort)
