"""Hooks on SGLang's HTTP process, where requests with chunks arrive and results leave."""

from sglang_lazy.port.hooks import Hook
from sglang_lazy.port.serving import (
    chat,
    completions,
    http,
    messages,
    page,
    protocol,
    responses,
    shadow,
    shutdown,
    tokenizer_manager,
    workers,
)

_OPENAI = "sglang.srt.entrypoints.openai"
_RESPONSES = f"{_OPENAI}.serving_responses.OpenAIServingResponses"
_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_NEED_IDLE = (
    "flush_cache",
    "release_memory_occupation",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
HOOKS = (
    Hook("sglang.srt.entrypoints.http_server.set_global_state", http.install_routes, "AFTER"),
    Hook("sglang.srt.entrypoints.http_server.set_global_state", workers.share, "AFTER"),
    Hook("sglang.srt.entrypoints.http_server.set_global_state", shadow.attach, "AFTER"),
    Hook("sglang.srt.utils.auth.add_api_key_middleware", page.ask_for_key, "AFTER"),
    Hook(f"{_TOKENIZER_MANAGER}._init_req_state", tokenizer_manager.begin, "BEFORE"),
    Hook(f"{_TOKENIZER_MANAGER}._validate_one_request", tokenizer_manager.prepare_request, "BEFORE"),
    Hook(f"{_TOKENIZER_MANAGER}._validate_one_request", shadow.give_way, "BEFORE"),
    Hook(f"{_TOKENIZER_MANAGER}._tokenize_one_request", tokenizer_manager.tokenize_request, "AROUND"),
    Hook(f"{_TOKENIZER_MANAGER}._tokenize_texts", tokenizer_manager.tokenize_texts, "AROUND"),
    Hook(f"{_TOKENIZER_MANAGER}._wait_one_response", tokenizer_manager.report_chunks, "AROUND"),
    Hook(f"{_TOKENIZER_MANAGER}.sigterm_watchdog", shutdown.close_when_answered, "AROUND"),
    Hook("uvicorn.server.Server.startup", shutdown.keep_server, "BEFORE"),
    Hook(f"{_TOKENIZER_MANAGER}.abort_request", shadow.abort_with_all, "BEFORE"),
    *(Hook(f"{_TOKENIZER_MANAGER}.{control}", shadow.make_idle, "AROUND") for control in _NEED_IDLE),
    Hook(f"{_OPENAI}.serving_chat.OpenAIServingChat._convert_to_internal_request", chat.convert_request, "AROUND"),
    Hook(
        f"{_OPENAI}.serving_completions.OpenAIServingCompletion._convert_to_internal_request",
        completions.convert_request,
        "AROUND",
    ),
    Hook(f"{_RESPONSES}._make_request", responses.make_request, "AROUND"),
    Hook(f"{_RESPONSES}._response_input_history", responses.keep_chunks, "AFTER"),
    Hook(f"{_RESPONSES}._construct_input_messages", responses.refuse_empty, "AFTER"),
    Hook(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._convert_to_chat_completion_request",
        messages.convert_messages,
        "AROUND",
    ),
    Hook(f"{_OPENAI}.protocol.PromptTokensDetails.__init__", protocol.usage_details, "AFTER"),
    Hook(f"{_OPENAI}.utils.cached_tokens_details_from_dict", protocol.cached_tokens_details, "AFTER"),
)
