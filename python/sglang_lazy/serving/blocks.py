"""The text of Anthropic's content blocks that hold a document."""

from collections.abc import Mapping
from typing import Any


def search_result(block: Mapping[str, Any]) -> str:
    """The text of a `search_result` block, formatted as by SGLang."""
    source = block.get("source")
    if isinstance(source, Mapping):
        source = source.get("url") or source.get("text")
    return _titled(block.get("title"), source, _texts(block.get("content")))


def document(block: Mapping[str, Any]) -> str:
    """The text of a `document` block. Raises ValueError for a source that is not text."""
    source = block.get("source")
    if not isinstance(source, Mapping):
        source = {}
    kind = source.get("type")
    if kind == "text":
        content = source["data"] if isinstance(source.get("data"), str) else ""
    elif kind == "content":
        content = source["content"] if isinstance(source.get("content"), str) else _texts(source.get("content"))
    else:
        raise ValueError(f"the source of a document must be of type 'text' or 'content', got {kind!r:.50}")
    return _titled(block.get("title"), None, content, block.get("context"))


def _texts(content: Any) -> str:
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _titled(title: Any, source: Any, content: str, context: Any = None) -> str:
    if not content:
        raise ValueError("the text of a document is empty")
    lines = {"Title": title, "Source": source, "Context": context, "Content": content}
    return "\n".join(f"{name}: {value}" for name, value in lines.items() if value)


BLOCKS = {"search_result": search_result, "document": document}
"""By block type, the function that returns its text."""
