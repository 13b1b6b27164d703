"""Hooks on SGLang's HTTP process, where requests with chunks arrive and results leave."""

from sglang_lazy.port.hooks import feature, repair, required
from sglang_lazy.port.serving import (
    chat,
    completions,
    http,
    messages,
    protocol,
    responses,
    scopes,
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
    required(
        "sglang.srt.entrypoints.http_server.set_global_state",
        http.install_routes,
        "AFTER",
        "http",
        "routes take prompts with chunks",
    ),
    required(
        "sglang.srt.entrypoints.http_server.set_global_state",
        workers.share,
        "AFTER",
        "http",
        "tokenizer workers share what they know of chunks",
    ),
    feature(
        "sglang.srt.entrypoints.http_server.set_global_state",
        shadow.attach,
        "AFTER",
        "a shadow compares answers with full prefill",
    ),
    feature(
        "sglang.srt.utils.auth.add_api_key_middleware",
        scopes.check_scopes,
        "AFTER",
        "the page of chunks asks for a key, and keys of applications have scopes",
    ),
    required(
        f"{_TOKENIZER_MANAGER}._init_req_state",
        tokenizer_manager.begin,
        "BEFORE",
        "tokenizer",
        "requests are prepared before they have a state",
    ),
    required(
        f"{_TOKENIZER_MANAGER}._validate_one_request",
        tokenizer_manager.prepare_request,
        "BEFORE",
        "tokenizer",
        "prompts with chunks are checked",
    ),
    required(
        f"{_TOKENIZER_MANAGER}._validate_one_request",
        shadow.give_way,
        "BEFORE",
        "tokenizer",
        "a shadow gives way to users",
    ),
    required(
        f"{_TOKENIZER_MANAGER}._tokenize_one_request",
        tokenizer_manager.tokenize_request,
        "AROUND",
        "tokenizer",
        "chunks keep their tokens",
    ),
    feature(
        f"{_TOKENIZER_MANAGER}._tokenize_texts",
        tokenizer_manager.tokenize_texts,
        "AROUND",
        "long prompts are tokenized in threads",
    ),
    required(
        f"{_TOKENIZER_MANAGER}._wait_one_response",
        tokenizer_manager.report_chunks,
        "AROUND",
        "tokenizer",
        "answers report reused chunks",
    ),
    repair(
        f"{_TOKENIZER_MANAGER}.sigterm_watchdog",
        shutdown.close_when_answered,
        "AROUND",
        "a server that ends answers everybody, or closes its port",
        "SGLang closes the port first",
    ),
    repair(
        "uvicorn.server.Server.startup",
        shutdown.keep_server,
        "BEFORE",
        "a server that ends can close its port",
        "SGLang closes the port first",
    ),
    feature(
        f"{_TOKENIZER_MANAGER}.abort_request",
        shadow.abort_with_all,
        "BEFORE",
        "a shadow ends when everything is aborted",
    ),
    *(
        feature(
            f"{_TOKENIZER_MANAGER}.{control}",
            shadow.make_idle,
            "AROUND",
            "a shadow ends before what needs an idle server",
        )
        for control in _NEED_IDLE
    ),
    feature(
        f"{_OPENAI}.serving_chat.OpenAIServingChat._convert_to_internal_request",
        chat.convert_request,
        "AROUND",
        "chats with chunks",
    ),
    feature(
        f"{_OPENAI}.serving_completions.OpenAIServingCompletion._convert_to_internal_request",
        completions.convert_request,
        "AROUND",
        "completions with chunks",
    ),
    feature(f"{_RESPONSES}._make_request", responses.make_request, "AROUND", "responses with chunks"),
    feature(f"{_RESPONSES}._response_input_history", responses.keep_chunks, "AFTER", "chunks of earlier turns"),
    repair(
        f"{_RESPONSES}._construct_input_messages",
        responses.refuse_empty,
        "AFTER",
        "responses without input are refused",
        "SGLang refuses them with a 400",
    ),
    feature(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._convert_to_chat_completion_request",
        messages.convert_messages,
        "AROUND",
        "Anthropic messages with chunks",
    ),
    feature(
        f"{_OPENAI}.protocol.PromptTokensDetails.__init__",
        protocol.usage_details,
        "AFTER",
        "usage tells tokens of reused chunks",
    ),
    feature(
        f"{_OPENAI}.utils.cached_tokens_details_from_dict",
        protocol.cached_tokens_details,
        "AFTER",
        "usage tells tokens of reused chunks",
    ),
)
