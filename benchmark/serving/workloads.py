"""The workloads: each turns its parameters and a seed into stages of conversations, the same for every contender.

Lengths are in tokens. Synthetic text consists of random tokens, so nothing is reused by accident.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmark.serving.prompts import chunk, random_tokens, text
from sglang_lazy.verify.prompts import read_json_lines, retrieval_segments

Encode = Callable[[str], list[int]]
"""Text to token ids, without special tokens."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """What a conversation adds to its prompt before an answer, and the length of that answer."""

    segments: list[dict]
    output_len: int


Conversation = list[Turn]
"""A single turn is an ordinary request. Each later turn follows the previous answer and repeats everything so far."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Conversations sent together and reported under a phase's name."""

    phase: str
    conversations: list[Conversation]


def option(help: str, default=dataclasses.MISSING, *, least=None):
    """A field with a command-line flag of the same name, at least `least`. Without a default the flag is required."""
    return dataclasses.field(default=default, metadata={"help": help, "least": least})


def zipf_weights(count: int, alpha: float) -> list[float]:
    """Cumulative weights of ranks 1 to `count`, each rank^-alpha."""
    return list(itertools.accumulate(rank**-alpha for rank in range(1, count + 1)))


def draw_distinct(rng: random.Random, cumulative: list[float], count: int) -> list[int]:
    """`count` distinct indices, drawn by weight without replacement, then shuffled.

    Rejecting repetitions is equivalent to renormalising the remaining weights.
    """
    drawn: dict[int, None] = {}
    while len(drawn) < count:
        drawn[rng.choices(range(len(cumulative)), cum_weights=cumulative)[0]] = None
    order = list(drawn)
    rng.shuffle(order)
    return order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Parameters, each with a flag. Raises ValueError if one is out of range."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), field.metadata["least"]
            if least is not None and value < least:
                raise ValueError(f"{field.name} must be at least {least}, got {value}")

    def stages(self, seed: int, encode: Encode) -> list[Stage]:
        """The traffic, stage by stage, from an empty cache.

        Raises ValueError if there are fewer conversations than requested, or the data are malformed.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic(Workload):
    """Conversations that arrive over time: the first ones (phase `cold`), then those that follow (`steady`)."""

    num_prompts: int = option("conversations measured as steady state", 100, least=1)
    cold_prompts: int = option("conversations before these, from the empty cache", 20, least=0)
    warm: bool = option("then measure the steady conversations a second time, as phase `warm`", False)
    rounds: int = option("parts of the steady conversations, each sent when the one before is done", 1, least=1)

    def conversations(self, rng: random.Random, encode: Encode) -> Iterator[Conversation]:
        raise NotImplementedError

    def stages(self, seed: int, encode: Encode) -> list[Stage]:
        wanted = self.cold_prompts + self.num_prompts
        found = list(itertools.islice(self.conversations(random.Random(seed), encode), wanted))
        if len(found) < wanted:
            raise ValueError(f"{wanted} conversations are requested, there are {len(found)}")
        cold, steady = found[: self.cold_prompts], found[self.cold_prompts :]
        size = -(-len(steady) // self.rounds)
        parts = [steady[begin : begin + size] for begin in range(0, len(steady), size)]
        stages = [Stage("cold", cold)] if cold else []
        for phase in ["steady", "warm"] if self.warm else ["steady"]:
            stages += [Stage(phase, part) for part in parts]
        return stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthetic(Traffic):
    """A pool of chunks; each request has distinct ones, drawn by a Zipf distribution, in random order."""

    pool: int = option("chunks in the pool", 100, least=1)
    chunk_len: int = option("tokens of a chunk", 2048, least=1)
    chunks: int = option("chunks of a request", 5, least=1)
    alpha: float = option("exponent of the Zipf distribution; 0 is uniform", 1.1, least=0)
    question_len: int = option("tokens after the chunks", 32, least=1)
    output_len: int = option("tokens of the answer", 16, least=1)

    def __post_init__(self):
        super().__post_init__()
        if self.chunks > self.pool:
            raise ValueError(f"{self.chunks} distinct chunks cannot be drawn from a pool of {self.pool}")

    def conversations(self, rng: random.Random, encode: Encode) -> Iterator[Conversation]:
        pool = [chunk(random_tokens(rng, self.chunk_len)) for _ in range(self.pool)]
        cumulative = zipf_weights(self.pool, self.alpha)
        while True:
            drawn = [pool[index] for index in draw_distinct(rng, cumulative, self.chunks)]
            yield [Turn([*drawn, text(random_tokens(rng, self.question_len))], self.output_len)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieval(Traffic):
    """Real questions with their documents as chunks, in the order of the file.

    In a chat (`history`), earlier turns are text before the documents, with the file's answers, as chat applications
    send them. Each line is a conversation of one turn: the files do not record the documents of earlier turns.
    """

    data: Path = option("JSON lines, each with `docs` (`title` and `text`), `question` and, in a chat, `history`")
    output_len: int = option("tokens of the answer", 16, least=1)

    def conversations(self, rng: random.Random, encode: Encode) -> Iterator[Conversation]:
        for number, request in read_json_lines(self.data):
            try:
                segments = retrieval_segments(request)
            except ValueError as error:
                raise ValueError(f"{self.data}, line {number}: {error}") from None
            in_tokens = [{"type": segment["type"], "input_ids": encode(segment["text"])} for segment in segments]
            yield [Turn(in_tokens, self.output_len)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace(Traffic):
    """What a retriever returned for a corpus's questions: the documents' identities and lengths, with random text."""

    data: Path = option("JSON lines, each with `dataset`, `requests` (lists of document numbers) and `doc_words`")
    dataset: str = option("which of the file's traces")
    tokens_per_word: float = option("a document of n words gets this many times n tokens", 1.3, least=0)
    question_len: int = option("tokens after the documents", 32, least=1)
    output_len: int = option("tokens of the answer", 16, least=1)

    def conversations(self, rng: random.Random, encode: Encode) -> Iterator[Conversation]:
        traces = {trace.get("dataset"): trace for _, trace in read_json_lines(self.data)}
        if self.dataset not in traces:
            raise ValueError(f"{self.data} has no trace {self.dataset!r}, but {', '.join(map(str, traces))}")
        trace = traces[self.dataset]
        if missing := {"requests", "doc_words"} - trace.keys():
            raise ValueError(f"{self.data}, trace {self.dataset!r}: there is no {', '.join(sorted(missing))}")
        lengths = [max(1, round(words * self.tokens_per_word)) for words in trace["doc_words"]]
        documents: dict[int, dict] = {}
        for request in trace["requests"]:
            for number in request:
                if number not in documents:
                    documents[number] = chunk(random_tokens(rng, lengths[number]))
            retrieved = [documents[number] for number in request]
            yield [Turn([*retrieved, text(random_tokens(rng, self.question_len))], self.output_len)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agent(Traffic):
    """Growing conversations: each turn adds a message and tool outputs that recur within and across conversations."""

    turns: int = option("answers of a conversation", 6, least=1)
    pool: int = option("different tool outputs", 200, least=1)
    chunk_len: int = option("tokens of a tool output", 1024, least=1)
    chunks: int = option("tool outputs of a turn", 1, least=1)
    alpha: float = option("exponent of the Zipf distribution of tool outputs", 1.0, least=0)
    system_len: int = option("tokens of the system prompt, the same for all", 512, least=0)
    message_len: int = option("tokens of a message", 64, least=1)
    output_len: int = option("tokens of an answer", 64, least=1)

    def __post_init__(self):
        super().__post_init__()
        if self.chunks > self.pool:
            raise ValueError(f"{self.chunks} distinct tool outputs cannot be drawn from a pool of {self.pool}")

    def conversations(self, rng: random.Random, encode: Encode) -> Iterator[Conversation]:
        pool = [chunk(random_tokens(rng, self.chunk_len)) for _ in range(self.pool)]
        cumulative = zipf_weights(self.pool, self.alpha)
        system = random_tokens(rng, self.system_len)
        while True:
            conversation = []
            for turn in range(self.turns):
                message = random_tokens(rng, self.message_len)
                outputs = [pool[index] for index in draw_distinct(rng, cumulative, self.chunks)]
                # The prompt ends with text: instructions for what to do with the tools' outputs.
                ending = text(random_tokens(rng, self.message_len))
                segments = [text(message if turn else system + message), *outputs, ending]
                conversation.append(Turn(segments, self.output_len))
            yield conversation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat(Traffic):
    """Plain prompts without chunks, with log-normal lengths similar to ShareGPT's first turns."""

    input_median: int = option("tokens", 90, least=1)
    input_sigma: float = option("standard deviation of the logarithm", 1.4, least=0)
    output_median: int = option("tokens", 120, least=1)
    output_sigma: float = option("standard deviation of the logarithm", 1.0, least=0)
    max_input: int = option("longest prompt, tokens; the shortest has 4", 1024, least=4)
    max_output: int = option("longest answer, tokens; the shortest has 4", 1024, least=4)

    def conversations(self, rng: random.Random, encode: Encode) -> Iterator[Conversation]:
        while True:
            prompt = log_normal(rng, self.input_median, self.input_sigma, self.max_input)
            answer = log_normal(rng, self.output_median, self.output_sigma, self.max_output)
            yield [Turn([text(random_tokens(rng, prompt))], answer)]


def log_normal(rng: random.Random, median: float, sigma: float, most: int) -> int:
    return min(most, max(4, round(median * rng.lognormvariate(0, sigma))))


PHASES = ("cold", "same order", "reordered")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latency(Workload):
    """One request at a time: chunks not seen before (`cold`), the same again (`same order`), and in another order
    (`reordered`), each time with a new question."""

    chunk_len: int = option("tokens of a chunk", 2048, least=1)
    chunks: int = option("chunks of a request", 5, least=2)
    between_len: int = option("tokens of text before each chunk but the first", 0, least=0)
    question_len: int = option("tokens after the chunks", 32, least=1)
    output_len: int = option("tokens of the answer", 8, least=1)
    num_prompts: int = option("samples of each phase", 10, least=1)
    apart: bool = option("one phase after another: a pool smaller than all prompts has lost a prompt's chunks", False)

    def stages(self, seed: int, encode: Encode) -> list[Stage]:
        rng = random.Random(seed)
        stages = []
        for _ in range(self.num_prompts):
            first = [chunk(random_tokens(rng, self.chunk_len)) for _ in range(self.chunks)]
            # With another first chunk there is no common prefix.
            start = rng.randrange(1, self.chunks)
            rest = first[:start] + first[start + 1 :]
            other = [first[start], *rng.sample(rest, len(rest))]
            between = [text(random_tokens(rng, self.between_len)) for _ in rest] if self.between_len else []
            for phase, chunks in zip(PHASES, (first, first, other), strict=True):
                parts = [chunks[0], *itertools.chain(*zip(between, chunks[1:], strict=True))] if between else chunks
                turn = Turn([*parts, text(random_tokens(rng, self.question_len))], self.output_len)
                stages.append(Stage(phase, [[turn]]))
        return sorted(stages, key=lambda stage: PHASES.index(stage.phase)) if self.apart else stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns(Workload):
    """One conversation at a time: a question behind chunks not seen before, then further questions."""

    chunk_len: int = option("tokens of a chunk", 1024, least=1)
    chunks: int = option("chunks of the first turn", 10, least=1)
    turns: int = option("questions of a conversation", 4, least=2)
    question_len: int = option("tokens of a question", 32, least=1)
    output_len: int = option("tokens of an answer", 64, least=1)
    num_prompts: int = option("conversations", 5, least=1)

    def stages(self, seed: int, encode: Encode) -> list[Stage]:
        rng = random.Random(seed)

        def turn(number: int) -> Turn:
            new = [] if number else [chunk(random_tokens(rng, self.chunk_len)) for _ in range(self.chunks)]
            return Turn([*new, text(random_tokens(rng, self.question_len))], self.output_len)

        return [Stage("turns", [[turn(number) for number in range(self.turns)]]) for _ in range(self.num_prompts)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch(Workload):
    """Requests that decode together: all at once with new chunks (`cold`), then again and again with the same chunks in
    the same order, each time with new questions (`steady`)."""

    batch: int = option("requests at once", 8, least=1)
    group: int = option("requests that have the same chunks", 1, least=1)
    chunk_len: int = option("tokens of a chunk", 1024, least=1)
    chunks: int = option("chunks of a request", 5, least=1)
    question_len: int = option("tokens after the chunks", 32, least=1)
    output_len: int = option("tokens of the answer", 256, least=2)
    rounds: int = option("batches measured as steady state", 5, least=1)

    def stages(self, seed: int, encode: Encode) -> list[Stage]:
        rng = random.Random(seed)
        groups = [
            [chunk(random_tokens(rng, self.chunk_len)) for _ in range(self.chunks)]
            for _ in range(-(-self.batch // self.group))
        ]

        def stage(phase: str) -> Stage:
            questions = [text(random_tokens(rng, self.question_len)) for _ in range(self.batch)]
            prompts = [[*groups[number // self.group], question] for number, question in enumerate(questions)]
            return Stage(phase, [[Turn(prompt, self.output_len)] for prompt in prompts])

        return [stage("cold"), *(stage("steady") for _ in range(self.rounds))]


WORKLOADS: dict[str, type[Workload]] = {
    "synthetic": Synthetic,
    "retrieval": Retrieval,
    "trace": Trace,
    "agent": Agent,
    "chat": Chat,
    "latency": Latency,
    "turns": Turns,
    "batch": Batch,
}
