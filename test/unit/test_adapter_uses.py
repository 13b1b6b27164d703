"""Which requests use a LoRA adapter, by the states that SGLang's tokenizer manager has of them."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest
from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry

from sglang_lazy.port.repairs import http as repairs


@pytest.fixture
def registry():
    """A registry with the adapters x and y, whose ids are 1 and 2."""
    registry = LoRARegistry([LoRARef(lora_id=str(i), lora_name=name) for i, name in enumerate("xy", 1)])
    manager = SimpleNamespace(lora_registry=registry, rid_to_state={})
    repairs.show_states(None, manager)
    return registry


def acquired(registry, names):
    """What `acquire` answers without waiting for anything, so that no other task runs in between."""
    with pytest.raises(StopIteration) as answer:
        repairs.acquire(inspect.unwrap(LoRARegistry.acquire), registry, names).send(None)
    return answer.value.value


def test_ids_are_looked_up_at_once(registry):
    assert acquired(registry, "x") == "1"
    assert acquired(registry, ["y", None, "x"]) == ["2", None, "1"]
    with pytest.raises(ValueError, match="'z' has just been unloaded"):
        acquired(registry, ["x", "z"])


def test_an_adapter_is_in_use_while_a_request_has_its_id(registry):
    """Whatever becomes of the request, and however often it was looked up or released."""

    async def unload():
        forget = inspect.unwrap(LoRARegistry.wait_for_unload)
        waiting = asyncio.ensure_future(repairs.wait_for_unload(forget, registry, await registry.unregister("x")))
        await asyncio.sleep(3 * repairs.POLL)
        assert not waiting.done()
        del registry.request_states["r"]
        await asyncio.wait_for(waiting, timeout=60)

    for rid, name in {"r": "x", "other": "y"}.items():
        obj = SimpleNamespace(lora_id=acquired(registry, name))
        registry.request_states[rid] = SimpleNamespace(obj=obj)
    acquired(registry, ["x"] * 3)
    asyncio.run(repairs.release(inspect.unwrap(LoRARegistry.release), registry, "1"))
    asyncio.run(unload())
    assert acquired(registry, "y") == "2"


def test_several_workers_keep_their_adapters():
    def change(*_args):
        raise AssertionError("not refused")

    manager = SimpleNamespace(server_args=SimpleNamespace(tokenizer_worker_num=2))
    answer = asyncio.run(repairs.refuse_with_workers(change, manager, None))
    assert not answer.success and "--lora-paths" in answer.error_message
