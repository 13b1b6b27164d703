"""KV events of chunks, published like SGLang's events of prefixes (`--kv-events-config`).

SGLang identifies a token's KV by a hash of it and all tokens before it. The KV of a chunk computed alone equals that of
a prompt that begins with it, so its hash is correct. It would be wrong for chunks that are private to a tenant or were
computed after a preamble, and for text after chunks: these have no events.
"""

from typing import Any

from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.events import KVCacheEventMixin
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_lazy.core.keys import Namespace

PLAIN_CHUNKS = Namespace("chunk", None, None, None)


class ChunkEvents(KVCacheEventMixin):
    """Events of a tree that may hold the same KV twice, as a chunk and as the prefix of a plain prompt: it counts as
    stored with the first of them, and as removed with the last."""

    root_node: Any
    enable_kv_cache_events: bool
    kv_event_queue: list[Any]

    def _record_store_event(self, node: Any, medium: StorageMedium | None = None) -> None:
        if not self.enable_kv_cache_events or not _is_public(node):
            return
        if not node.hash_value:  # empty for nodes from storage
            node.hash_value = None
        start = len(self.kv_event_queue)
        super()._record_store_event(node, medium=medium)
        del self.kv_event_queue[start : start + self._num_twice(node, medium)]

    def _record_remove_event(self, node: Any, medium: StorageMedium | None = None) -> None:
        if not self.enable_kv_cache_events or not _is_public(node):
            return
        num_kept = self._num_twice(node, medium)
        if num_kept < len(node.key):
            super()._record_remove_event(node, medium=medium)
            del self.kv_event_queue[-1].block_hashes[:num_kept]

    def _num_twice(self, node: Any, medium: StorageMedium | None) -> int:
        """The number of first tokens of `node` whose KV the tree holds a second time in the same place."""
        namespace = node.key.extra_key
        if namespace not in (None, PLAIN_CHUNKS):
            return 0
        twin = PLAIN_CHUNKS if namespace is None else None
        path = [node]
        while path[-1].parent is not self.root_node:
            path.append(path[-1].parent)
        first = path[-1].key.token_ids[:1]
        if RadixKey(first, twin).child_key() not in self.root_node.children:  # most texts begin like no other
            return 0
        tokens = first[:0]
        for part in reversed(path):
            tokens += part.key.token_ids
        return max(0, self._num_held(RadixKey(tokens, twin), medium) - (len(tokens) - len(node.key)))

    def _num_held(self, key: RadixKey, medium: StorageMedium | None) -> int:
        """The number of first tokens of `key` that are in the place named by `medium`."""
        node, num_held = self.root_node, 0
        while num_held < len(key):
            rest = key[num_held:]
            node = node.children.get(rest.child_key())
            if node is None or not (node.backuped if medium == StorageMedium.CPU else not node.evicted):
                break
            num_same = node.key.match(rest)
            num_held += num_same
            if num_same < len(node.key):
                break
        return num_held


def _is_public(node: Any) -> bool:
    """Whether SGLang's hash of a node is correct. Namespaces chosen by clients are left to SGLang."""
    namespace = node.key.extra_key
    return not isinstance(namespace, Namespace) or namespace == PLAIN_CHUNKS
