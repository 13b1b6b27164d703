"""Requests to all routes but an operator's, mostly to those that take or show chunks: well-formed ones, and some with
a few errors."""

import copy
import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from hypothesis import strategies as st

from oracle.segments import chunk
from sglang_lazy.core.keys import chunk_id, tokens_digest

MODEL = "fuzz"
KNOWN_CHUNKS = [chunk(range(start, start + 9)) for start in (20, 40, 60)]
"""Registered ahead of use."""
IDS = [chunk_id(tokens_digest(known.ids)) for known in KNOWN_CHUNKS]


class Sent(NamedTuple):
    """One request.  body: bytes to send as they are, or a value to send as JSON; None for no body."""

    method: str
    path: str
    body: Any
    headers: tuple[tuple[str, str], ...]

    @property
    def data(self) -> bytes | None:
        return self.body if self.body is None or isinstance(self.body, bytes) else json.dumps(self.body).encode()

    @property
    def route(self) -> str:
        path = self.path.partition("?")[0]
        return re.sub(r"^(/chunks|/lazy/uses|/v1/responses|/v1/models)/[^/]*", r"\1/{id}", path)


def mostly(usual: st.SearchStrategy, other: st.SearchStrategy, times: int = 7) -> st.SearchStrategy:
    """`usual`, that many times for each `other`. (`one_of` would drop repetitions.)"""
    return st.sampled_from([usual] * times + [other]).flatmap(lambda strategy: strategy)


TEXTS = mostly(
    st.sampled_from(["The river rises in the hills.", "Who?", "Read: ", "A##b##c"]),
    st.sampled_from(["##", "", " ", "<|user|>", "</s>", "\0"])
    | st.text(max_size=12)
    | st.text(st.characters(categories=["Cs"]), min_size=1, max_size=2),  # lone surrogates, which JSON can carry
)
NUMBERS = st.sampled_from([0, 1, -1, 2, 7, 511, 512, 2**31 - 1, 2**31, 2**63, -(2**63) - 1, 2**70, 0.5, 1e308])
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | st.just(float("nan")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
TOKENS = st.lists(st.integers(6, 511), min_size=1, max_size=20) | st.sampled_from([list(c.ids) for c in KNOWN_CHUNKS])
DOCUMENTS = st.sampled_from(["A railway followed in 1871.", "The library holds books.", "x", "é\n\n"]) | TEXTS
SALTS = mostly(st.sampled_from(["a", "b", "é"]), st.sampled_from(["", "\ud800", "a\0", "a" * 257]))
LINKS = mostly(
    st.sampled_from(
        ["block", "full", "copy", "epic:tokens=2", "query:ratio=0.3", "static", "blend", "base+epic:tokens=1"]
    ),
    st.sampled_from(["base:preamble=lead", "kvlink:tokens=9999999999", "epic:tokens=0", "none", "full:x=1", ""]),
)


def maybe(**fields: st.SearchStrategy) -> st.SearchStrategy:
    """A subset of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


def both(first: st.SearchStrategy, second: st.SearchStrategy) -> st.SearchStrategy:
    """One object with the fields of two."""
    return st.tuples(first, second).map(lambda pair: {**pair[0], **pair[1]})


def objects(more: st.SearchStrategy, **fields: st.SearchStrategy) -> st.SearchStrategy:
    return both(st.fixed_dictionaries(fields), more)


CHUNKS = st.one_of(
    st.fixed_dictionaries({"type": st.just("chunk"), "text": DOCUMENTS}),
    st.fixed_dictionaries({"type": st.just("chunk"), "input_ids": TOKENS}),
    st.fixed_dictionaries(
        {"type": st.just("chunk"), "id": mostly(st.sampled_from(IDS), st.sampled_from(["0" * 16, "zz"]))}
    ),
)
SEGMENTS = st.lists(
    CHUNKS
    | st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS})
    | st.fixed_dictionaries({"type": st.just("text"), "input_ids": TOKENS}),
    max_size=5,
)
OURS = maybe(link=LINKS, cache_salt=SALTS, chunk_separator=st.sampled_from(["##", ""]))
SAMPLING = objects(
    maybe(
        temperature=st.sampled_from([0, 0.5, 1]),
        min_new_tokens=mostly(st.sampled_from([0, 1]), st.just(9)),
        top_p=mostly(st.sampled_from([0.5, 1]), st.just(2)),
        top_k=st.sampled_from([-1, 1, 5]),
        stop=st.sampled_from(["e", ["a", "b"], []]),
        n=st.sampled_from([1, 2]),
        ignore_eos=st.booleans(),
        custom_params=mostly(
            st.fixed_dictionaries({"mine": st.integers(0, 3)}), st.fixed_dictionaries({"sglang_lazy": JUNK})
        ),
    ),
    max_new_tokens=mostly(st.sampled_from([1, 3]), st.just(0)),
)
LOGPROBS = maybe(
    return_logprob=st.booleans(),
    logprob_start_len=st.sampled_from([-1, 0, 2, 30, 10**6]),
    top_logprobs_num=st.sampled_from([0, 1, 2]),
    token_ids_logprob=st.sampled_from([[5], [5, 6]]),
)
STREAM = maybe(stream=st.booleans())
CHAT_CONTENT = TEXTS | st.lists(CHUNKS | st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=4)
INPUT_CONTENT = TEXTS | st.lists(
    CHUNKS | st.fixed_dictionaries({"type": st.just("input_text"), "text": TEXTS}), max_size=4
)
BLOCKS = st.one_of(
    CHUNKS,
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}),
    st.fixed_dictionaries(
        {
            "type": st.just("search_result"),
            "source": TEXTS,
            "title": TEXTS,
            "content": st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": DOCUMENTS}), max_size=2),
        }
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("document"),
            "source": st.fixed_dictionaries(
                {
                    "type": st.sampled_from(["text", "content", "url"]),
                    "data": DOCUMENTS,
                    "media_type": st.just("text/plain"),
                }
            ),
        }
    ),
)


def messages(content: st.SearchStrategy, *roles: str) -> st.SearchStrategy:
    message = st.fixed_dictionaries({"role": st.sampled_from(roles), "content": content})
    return st.lists(message, min_size=1, max_size=3)


OPENAI = both(
    st.fixed_dictionaries(
        {"model": st.just(MODEL), "max_tokens": st.sampled_from([1, 3])},
        optional={"temperature": st.sampled_from([0, 1])},
    ),
    both(OURS, both(STREAM, maybe(n=st.sampled_from([1, 2]), logprobs=st.sampled_from([1, True]), rid=st.just("r")))),
)
ANTHROPIC = objects(
    both(OURS, both(STREAM, maybe(system=TEXTS | st.lists(BLOCKS, max_size=2)))),
    model=st.just(MODEL),
    max_tokens=st.sampled_from([1, 3]),
    messages=messages(TEXTS | st.lists(BLOCKS, max_size=3), "user", "assistant"),
)
CHAT = objects(
    both(OPENAI, maybe(chunk_roles=st.sampled_from([["tool"], ["user"], []]))),
    messages=messages(CHAT_CONTENT, "user", "assistant", "system", "tool"),
)
RESPONSE = "resp_fuzz"
"""The id of responses that later ones continue."""
BODIES: dict[tuple[str, str], st.SearchStrategy] = {
    ("POST", "/generate"): objects(
        both(OURS, both(LOGPROBS, STREAM)),
        segments=SEGMENTS | st.lists(SEGMENTS, min_size=1, max_size=2),
        sampling_params=SAMPLING | st.lists(SAMPLING, max_size=2),
    )
    | objects(
        both(OURS, LOGPROBS),
        text=TEXTS | st.lists(TEXTS, max_size=2),
        sampling_params=SAMPLING | st.lists(SAMPLING, max_size=2),
    )
    | objects(both(OURS, LOGPROBS), input_ids=TOKENS | st.lists(TOKENS, max_size=2), sampling_params=SAMPLING),
    ("POST", "/v1/completions"): objects(OPENAI, segments=SEGMENTS)
    | objects(OPENAI, prompt=TEXTS | TOKENS | st.lists(TEXTS, max_size=2), echo=st.booleans()),
    ("POST", "/v1/chat/completions"): CHAT,
    ("POST", "/invocations"): CHAT,
    ("POST", "/v1/responses"): objects(
        both(OURS, both(STREAM, maybe(store=st.booleans(), previous_response_id=st.just(RESPONSE)))),
        model=st.just(MODEL),
        max_output_tokens=st.sampled_from([3, 4]),  # SGLang subtracts two
        request_id=mostly(st.just(RESPONSE), TEXTS),
        input=messages(INPUT_CONTENT, "user", "assistant", "system") | TEXTS,
    ),
    ("GET", "/v1/responses/{id}"): st.none(),
    ("POST", "/v1/messages"): ANTHROPIC,
    ("POST", "/v1/messages/count_tokens"): ANTHROPIC,
    ("POST", "/chunks"): objects(
        maybe(link=LINKS, cache_salt=SALTS, wait=st.booleans(), pin=st.booleans(), ttl=st.sampled_from([1, 0.5, None])),
        chunks=st.lists(DOCUMENTS | st.fixed_dictionaries({"input_ids": TOKENS}), max_size=4),
    ),
    ("PATCH", "/chunks/{id}"): objects(maybe(ttl=st.sampled_from([1, 0.5, None])), pin=st.booleans()),
    ("GET", "/chunks/{id}"): st.none(),
    ("GET", "/chunks"): st.none(),
    ("DELETE", "/chunks/{id}"): st.none(),
    ("DELETE", "/chunks"): st.none(),
    ("GET", "/lazy_info"): st.none(),
    ("GET", "/lazy"): st.none(),
    ("GET", "/lazy/survey"): st.none(),
    ("GET", "/lazy/uses/{id}"): st.none(),
    ("POST", "/abort_request"): maybe(rid=st.just("r"), abort_all=st.booleans()),
    ("POST", "/v1/tokenize"): st.fixed_dictionaries({"prompt": TEXTS}),
    ("POST", "/v1/detokenize"): st.fixed_dictionaries({"tokens": TOKENS}),
}
"""By route, bodies as they should be, at least in form."""

QUERIES = maybe(
    sort=mostly(st.sampled_from(["hits", "last_use", "tokens", "created"]), st.just("x")),
    order=mostly(st.sampled_from(["asc", "desc"]), st.just("x")),
    limit=mostly(st.sampled_from(["1", "5"]), st.sampled_from(["0", "1001", "x", "9" * 30])),
    cursor=mostly(st.sampled_from(["0:1", "1:2"]), st.sampled_from(["x", "nan:1", "inf:0"]) | TEXTS, 3),
    state=mostly(st.sampled_from(["resident", "host"]), st.just("x")),
    cache_salt=SALTS,
    all=st.sampled_from(["false", "true", "x"]),
    id=mostly(st.sampled_from(IDS), st.lists(st.sampled_from([*IDS, "0" * 16, "zz"]), max_size=3), 3),
)
NAMES = mostly(st.sampled_from(IDS), st.sampled_from(["0" * 16, "0" * 64, "0" * 65, "zz", "%00", "é"]), 3)
HEADERS = mostly(
    st.just(()),
    st.sampled_from([*(("X-Cache-Salt", salt) for salt in ("a", "é", "")), ("Content-Type", "text/plain")]).map(
        lambda header: (header,)
    ),
)


def _places(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths to all values within a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way for key, part in inner for way in [(*path, key), *_places(part, (*path, key))]]


@st.composite
def spoiled(draw: Any, bodies: st.SearchStrategy) -> Any:
    """Bodies with up to three changes."""
    body = copy.deepcopy(draw(bodies))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3]))):
        places = _places(body)
        if not places:
            return draw(JUNK)
        *way, key = draw(st.sampled_from(places))
        parent = body
        for step in way:
            parent = parent[step]
        match draw(st.sampled_from(["junk", "junk", "drop", "wrap", "more", "copy"])):
            case "junk":
                parent[key] = draw(JUNK)
            case "drop":
                del parent[key]
            case "wrap":
                parent[key] = [parent[key]]
            case "more" if isinstance(parent, dict):
                parent[draw(TEXTS)] = draw(JUNK)
            case "copy" if isinstance(parent, list):
                parent.append(copy.deepcopy(parent[key]))
    return body


def values(schema: dict[str, Any], definitions: dict[str, Any], depth: int = 0) -> st.SearchStrategy:
    """Values that fit an OpenAPI JSON schema.  definitions: what its references name."""
    if "$ref" in schema:
        target = definitions[schema["$ref"].rpartition("/")[2]]
        return values(target, definitions, depth + 1) if depth < 3 else JUNK
    if kinds := schema.get("anyOf", schema.get("oneOf")):
        return st.one_of([values(kind, definitions, depth) for kind in kinds])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "object" if properties := schema.get("properties"):
            fields = {name: values(of, definitions, depth) for name, of in properties.items()}
            required = {name: fields.pop(name) for name in schema.get("required", ()) if name in fields}
            return st.fixed_dictionaries(required, optional=fields)
        case "object":
            return st.dictionaries(TEXTS, JUNK, max_size=2)
        case "array":
            return st.lists(values(schema.get("items", {}), definitions, depth), max_size=3)
        case "integer":
            return st.integers(-1, 9) | NUMBERS.filter(lambda number: isinstance(number, int))
        case "number":
            return st.floats(-1, 2) | NUMBERS
        case "boolean":
            return st.booleans()
        case "string":
            return TEXTS
        case "null":
            return st.none()
    return JUNK


def _schema_of(operation: dict[str, Any]) -> dict[str, Any]:
    """Of its body, if that is JSON; else {}."""
    return operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})


def fields_of(api: dict[str, Any]) -> dict[tuple[str, str], dict[str, st.SearchStrategy]]:
    """By route, all fields of its body, from the server's own schema (`/openapi.json`)."""
    definitions, found = api["components"]["schemas"], {}
    for method, path in BODIES:
        reference = _schema_of(api["paths"].get(path, {}).get(method.lower(), {})).get("$ref")
        if reference:
            properties = definitions[reference.rpartition("/")[2]]["properties"]
            found[method, path] = {name: values(schema, definitions) for name, schema in properties.items()}
    return found


class Other(NamedTuple):
    """Bodies and queries of a route that is not in BODIES, as the server's schema has them."""

    bodies: st.SearchStrategy
    queries: st.SearchStrategy


Others = dict[tuple[str, str], Other]
"""By method and path."""


def others_of(api: dict[str, Any], left_out: Collection[str]) -> Others:
    """All routes of the server beside those of BODIES.  left_out: paths."""
    definitions, found = api["components"]["schemas"], {}
    for path, operations in api["paths"].items():
        named = re.sub(r"\{\w+\}", "{id}", path)
        for method, operation in operations.items():
            route = method.upper(), named
            if path not in left_out and route not in BODIES:
                schema = _schema_of(operation)
                bodies = _bodies(schema, definitions) if schema else st.none()
                parameters = [one for one in operation.get("parameters", ()) if one["in"] == "query"]
                queries = {one["name"]: values(one["schema"], definitions) for one in parameters}
                found[route] = Other(bodies, maybe(**queries))
    return found


@st.composite
def _bodies(draw: Any, schema: dict[str, Any], definitions: dict[str, Any]) -> Any:
    """What fits the schema of a body, with few of the fields that need not be there: most of those exclude others."""
    schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if "properties" not in schema:
        return draw(values(schema, definitions))
    required = set(schema.get("required", ()))
    optional = sorted(schema["properties"].keys() - required)
    names = required | set(draw(st.lists(st.sampled_from(optional), max_size=3)) if optional else ())
    return {name: draw(values(schema["properties"][name], definitions)) for name in sorted(names)}


RAW = st.sampled_from([b"", b"{", b"\xff", b"[" * 100_000, b"null", b"[]", b'"x"', b"1e999", b'{"\xff": 1}'])
"""Bodies that are no JSON objects."""


@st.composite
def requests_of(draw: Any, fields: dict[tuple[str, str], dict[str, st.SearchStrategy]], others: Others) -> Sent:
    """A request to one of the routes.  fields: by route, what its body may have besides."""
    method, path = draw(mostly(st.sampled_from(list(BODIES)), st.sampled_from(list(others)), 3))
    if (method, path) in BODIES:
        bodies, queries = BODIES[method, path], QUERIES if method in ("GET", "DELETE", "PATCH") else st.none()
    else:
        bodies, queries = others[method, path]
    if more := fields.get((method, path)):
        names = draw(st.lists(st.sampled_from(list(more)), max_size=2, unique=True))
        bodies = both(bodies, st.fixed_dictionaries({name: more[name] for name in names}))
    body = draw(spoiled(bodies))
    if body is not None:
        body = draw(mostly(st.just(body), RAW, 30))
    names = NAMES if path.startswith(("/chunks", "/lazy")) else mostly(st.just(RESPONSE), NAMES)
    path = path.replace("{id}", quote(draw(names), safe="%"))
    if query := draw(queries):
        path += "?" + urlencode({name: _encodable(value) for name, value in query.items()}, doseq=True)
    return Sent(method, path, body, draw(HEADERS))


def _encodable(value: Any) -> Any:
    return value.encode(errors="surrogatepass") if isinstance(value, str) else value
