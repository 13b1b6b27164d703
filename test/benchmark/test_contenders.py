"""Names of contenders and models."""

import pytest

from benchmark.serving.contenders import CONTENDERS, parse_contenders, server_of
from benchmark.serving.models import model_name


def test_order():
    """Contenders of one server are side by side, however they were named."""
    assert parse_contenders("lazy,stock,lazy-plain,lazy") == ["lazy", "lazy-plain", "stock"]


def test_a_second_server_of_a_kind_is_one_of_its_own():
    assert server_of("stock") == server_of("stock") != server_of("stock-again")


def test_unknown_names():
    with pytest.raises(ValueError, match="no contender 'vllm': there are stock"):
        parse_contenders("stock,vllm")
    with pytest.raises(ValueError, match="no model 'llama': give one of llama-3.1-8b"):
        model_name("llama")
    assert model_name("./here") == "./here"


def test_forms():
    """Only servers with chunk reuse are sent chunks."""
    segments = [{"type": "chunk", "input_ids": [1, 2]}, {"type": "text", "input_ids": [3]}]
    for contender in CONTENDERS.values():
        prompt = contender.form(segments)
        assert prompt in ({"input_ids": [1, 2, 3]}, {"segments": segments})
        assert "segments" not in prompt or "lazy" in contender.server.module
