"""Greedy answers from a server: turns questions into prompts and sends a few at a time."""

import asyncio
import dataclasses
from collections.abc import Sequence

import aiohttp

from benchmark.serving.client import new_session
from oracle.segments import Segment, chunk, text, token_ids
from research.quality.questions import Question
from sglang_lazy.core.segments import parse_segment
from sglang_lazy.serving.tokenization import SegmentTokenizer
from sglang_lazy.testing import ServerError


class Prompts:
    """Questions as token ids, tokenized as the server tokenizes them."""

    def __init__(self, tokenizer):
        self.tokenizer = SegmentTokenizer(tokenizer)

    def make(self, question: Question, *, bos: bool = True, opening: bool = True) -> list[Segment]:
        """bos: begin with the tokenizer's BOS, if any. opening: include the question's opening, if any."""
        texts = [question.opening] if opening and question.opening else []
        documents = [{"type": "chunk", "text": document} for document in question.chunks]
        values = [*texts, *question.history, *documents, question.closing]
        ids, chunks = self.tokenizer.encode([parse_segment(value) for value in values])
        segments, end = [], 0 if bos else len(self.tokenizer.before)
        for start, stop in [*chunks, (len(ids), len(ids))]:
            segments += [text(ids[end:start])] if end < start else []
            segments += [chunk(ids[start:stop])] if start < stop else []
            end = stop
        return segments


def as_user_message(question: Question, tokenizer) -> Question:
    """The question as a user's message in the tokenizer's chat template, up to where the answer begins."""
    content = "CONTENT"
    message = [{"role": "user", "content": content}]
    chat = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    # `Prompts` prepends what the tokenizer puts before a text; if that is nothing, the template's own BOS stays.
    before, after = chat.removeprefix(tokenizer.decode(tokenizer.encode(""))).split(content)
    return dataclasses.replace(question, opening=before + question.opening, closing=question.closing + after)


@dataclasses.dataclass(frozen=True)
class Ask:
    """A prompt for a server. Without chunks it is sent as plain token ids, which every server accepts."""

    segments: list[Segment]
    max_new_tokens: int

    def body(self) -> dict:
        if any(segment.kind == "chunk" for segment in self.segments):
            prompt = {"segments": [segment.to_request() for segment in self.segments]}
        else:
            prompt = {"input_ids": token_ids(self.segments)}
        return {**prompt, "sampling_params": {"temperature": 0, "max_new_tokens": self.max_new_tokens}}


@dataclasses.dataclass(frozen=True)
class Answered:
    """A server's answer. output_ids do not include the end of sequence."""

    output_ids: list[int]
    prompt_tokens: int
    cached_tokens: int


def ask_all(url: str, asks: Sequence[Ask], concurrency: int) -> list[Answered]:
    """The answers to `asks`, sent in order. Raises ServerError if a request fails."""
    return asyncio.run(_ask_all(url, asks, concurrency))


async def _ask_all(url: str, asks: Sequence[Ask], concurrency: int) -> list[Answered]:
    room = asyncio.Semaphore(concurrency)
    async with new_session() as session:

        async def one(ask: Ask) -> Answered:
            async with room:
                return await _ask(session, url, ask)

        return await asyncio.gather(*map(one, asks))


async def _ask(session: aiohttp.ClientSession, url: str, ask: Ask) -> Answered:
    try:
        async with session.post(f"{url}/generate", json=ask.body()) as response:
            if response.status != 200:
                raise ServerError(f"the server answered {response.status}: {(await response.text())[:500]}")
            answer = await response.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServerError(f"the connection failed: {error!r}") from error
    meta, output_ids = answer["meta_info"], answer["output_ids"]
    reason = meta["finish_reason"]
    if reason["type"] == "stop" and output_ids and output_ids[-1] == reason.get("matched"):
        output_ids = output_ids[:-1]
    return Answered(output_ids, meta["prompt_tokens"], meta["cached_tokens"])
