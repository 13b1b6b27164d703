"""The host tier: copies in host memory of KV that the device holds, and KV that only the host holds.

Nodes only on the host are below those on the device; none has a copy whose parent has none.
"""

import functools
import itertools
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch

from sglang_lazy.cache.copies import Copies
from sglang_lazy.cache.device import Device
from sglang_lazy.cache.eviction import Evictable
from sglang_lazy.cache.host_copy import HostCopy, HostWatcher, Transfer, above_kept
from sglang_lazy.cache.host_memory import HostMemory, Piece
from sglang_lazy.cache.host_states import HostStates
from sglang_lazy.cache.node import Node, Order
from sglang_lazy.cache.numbers import KnownSlots, joined
from sglang_lazy.cache.parts import Part
from sglang_lazy.cache.transfers import Ticket, Transfers
from sglang_lazy.cache.tree import RadixTree
from sglang_lazy.core.keys import of_chunks


class HostKV(Part):
    """The copies of one tree's nodes.

    order: of eviction, one of `ORDERS`.
    min_hits: how often a node must have been used to be copied: 0 for write_through, 2 for write_through_selective.
    agree: returns the smallest of each of these numbers among all tensor-parallel ranks, which make the same calls.
    watchers: told of what happens on the host; may be added to.
    states: of recurrent layers, if there are any.
    """

    def __init__(
        self,
        tree: RadixTree,
        device: Device,
        memory: HostMemory,
        transfers: Transfers,
        order: Order,
        *,
        min_hits: int = 0,
        agree: Callable[[list[int]], list[int]] = lambda numbers: numbers,
        watchers: Iterable[HostWatcher] = (),
        states: HostStates | None = None,
    ):
        self.memory, self.states = memory, states
        self._tree, self._device, self._transfers, self._order = tree, device, transfers, order
        if states is not None:
            states.make_room = functools.partial(self.evict, 1)
        self._min_hits, self._agree, self.watchers = min_hits, agree, [*watchers]
        self._start_anew()

    def _start_anew(self) -> None:
        self._copies = Copies(self._tree.next_leaves, self._device.size)
        self._leaves = Evictable(self._order)  # nodes that are only on the host, without children
        self._under_way: list[list[Transfer]] = [[], []]  # back-ups and loads, in order
        self._known = KnownSlots(self._transfers.numbers)

    def reset(self) -> None:
        """Waits for copies under way."""
        for transfer in itertools.chain(*self._under_way):
            transfer.ticket.finish()
        self.memory.slots.clear()
        if self.states is not None:
            self.states.memory.slots.clear()
        self._start_anew()

    # To the host

    def back_up(self, nodes: Iterable[Node]) -> None:
        """Copy what the write policy wants of `nodes` and their ancestors, and what is about to leave the device, in
        one go. Passes launched so far compute the KV of all these.

        Text is not copied: a linked request finds it only on the device.
        """
        nodes, copied = list(nodes), dict[Node, HostCopy]()
        for node in itertools.chain(filter(self._copies.wanted, nodes), self._copies.to_copy()):
            path = []
            while not node.is_root and node.host is None:
                path.append(node)
                node = node.parent
            for node in reversed(path):
                is_wanted = of_chunks(node.namespace) and node.hits >= self._min_hits
                if not is_wanted or (slots := self._room_below(node.parent, len(node))) is None:
                    break
                node.host = copied[node] = HostCopy(slots)
        with_states = [node for node in dict.fromkeys([*copied, *nodes]) if self._take_state(node, node in copied)]
        made = list(dict.fromkeys([*copied, *with_states]))
        if not made:
            return
        pieces = [Piece(copy.slots, n.slots, self._known.of(n)) for n, copy in copied.items()]
        ticket = self._transfers.back_up(pieces, self._state_pieces(with_states))
        transfer = self._begin(made, self._ends(made, with_states), ticket, loads=False)
        for node in made:
            node.host.transfer = transfer
        for node in copied:
            self._copies.copied(node)
            for watcher in self.watchers:
                watcher.stored(node)

    def _take_state(self, node: Node, is_new: bool) -> bool:
        """Give the copy of `node` a slot for the state at its end, if the device has one and there is room.

        is_new: whether the copy is about to be made. Another one can be dropped when it is complete again.
        """
        if self.states is None or not self.states.lacks(node) or node.host.transfer is not None:
            return False
        self._copies.gone(node)
        node.host.state = self.states.alloc()
        if node.host.state is None and not is_new:
            self._copies.came(node)
        return node.host.state is not None

    def _state_pieces(self, nodes: Sequence[Node]) -> list[Piece]:
        return [] if self.states is None else self.states.pieces(nodes)

    def _room_below(self, parent: Node, num_tokens: int) -> torch.Tensor | None:
        """Slots of the host for a child; making room does not take its parent's copy."""
        if parent.is_root:
            return self.alloc(num_tokens)
        parent.host.readers += 1
        slots = self.alloc(num_tokens)
        parent.host.readers -= 1
        return slots

    def _ends(self, nodes: Sequence[Node], with_states: Sequence[Node]) -> list[Node]:
        """Those of `nodes` below which there are no others of them; and those with states, which locks below them do
        not keep."""
        parents = {node.parent for node in nodes}.difference(with_states)
        return [node for node in nodes if node not in parents]

    def _begin(self, nodes: list[Node], ends: list[Node], ticket: Ticket, loads: bool) -> Transfer:
        for node in ends:
            self._tree.lock(node)
        transfer = Transfer(nodes, ends, ticket, loads)
        self._under_way[loads].append(transfer)
        return transfer

    # To the device

    def load(self, nodes: Iterable[Node]) -> bool:
        """Load `nodes` and those of their ancestors that are only on the host, in one go, for passes launched from now
        on; they are locked until it is done.

        Evicts from the device only what is lacking, and nothing if that would not suffice; then returns False and
        changes nothing.
        """
        nodes = list(nodes)
        to_load = self._only_on_host(nodes)
        if not to_load:
            return True
        wanted = set(nodes)  # of those above nobody reads the state, and it might be one too many
        with_states = [] if self.states is None else self.states.copied(node for node in to_load if node in wanted)
        if (state_slots := self._state_room(to_load, len(with_states))) is None:
            return False
        if (pieces := self._room_for(to_load)) is None:
            return False
        slots = torch.cat([piece.device for piece in pieces])
        for node, own in zip(to_load, slots.split([len(node) for node in to_load]), strict=True):
            node.slots = own.clone()  # a part would keep all of `slots`
            self._leaves.discard(node)
        self._known.came(to_load, slots)
        self._tree.came(to_load)
        if self.states is not None:
            self.states.come(with_states, state_slots)
        ticket = self._transfers.load(pieces, self._state_pieces(with_states))
        transfer = self._begin(to_load, self._ends(to_load, with_states), ticket, loads=True)
        for node in to_load:
            node.host.transfer = transfer
            for watcher in self.watchers:
                watcher.loaded(node)
        return True

    def _only_on_host(self, nodes: Iterable[Node]) -> list[Node]:
        """Those of `nodes` and their ancestors that are only on the host, parents first."""
        found: dict[Node, None] = {}
        for node in nodes:
            path = []
            while not node.is_root and node.slots is None and node not in found:
                path.append(node)
                node = node.parent
            found.update(dict.fromkeys(reversed(path)))
        return list(found)

    def _state_room(self, to_load: Sequence[Node], count: int) -> list[int] | None:
        """So many slots of the device for states; None, and nothing evicted, unless there is room for the KV as well.
        What stands before `to_load` keeps its slots."""
        if self.states is None or not count:
            return []
        with above_kept(self._tree, to_load):
            if sum(map(len, to_load)) > self._device.available_size() + self._device.evictable_size():
                return None
            return self.states.states.for_loading(count)

    def _room_for(self, to_load: Sequence[Node]) -> list[Piece] | None:
        """Slots of both sides for nodes, in their order. What stands before them keeps its slots on the device.

        Evicted slots are used as they are: it is known which they are, and where chunks are as long as those that they
        replace, which is the rule, they are runs if those were.
        """
        host = torch.cat([node.host.slots for node in to_load])
        taken, known = self._take(len(host) - self._device.available_size(), to_load)
        self._device.free(taken[len(host) :])
        taken = taken[: len(host)]
        count = len(taken)
        rest = self._device.alloc(len(host) - count)
        if rest is None:
            self._device.free(taken)
            return None
        pieces = [Piece(host[:count], taken, None if known is None else known[:count]), Piece(host[count:], rest, None)]
        return [piece for piece in pieces if len(piece.host)]

    def _take(self, num_lacking: int, to_load: Sequence[Node]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Slots of evicted nodes, on the device and, if they are known, on the CPU; none if there are too few."""
        slots, known = torch.empty(0, dtype=torch.int64, device=self.memory.device), None
        if num_lacking <= 0:
            return slots, known
        with above_kept(self._tree, to_load):
            if num_lacking <= self._device.evictable_size():
                with self._known.leaving() as numbers:
                    slots = self._device.take(num_lacking)
                known = joined(numbers)
        return slots, known

    def loading(self, node: Node) -> bool:
        """Whether the KV of `node` is being loaded."""
        return node.host is not None and node.host.transfer is not None and node.host.transfer.loads

    # The ends of copies

    @property
    def is_copying(self) -> bool:
        return any(self._under_way)

    def poll(self) -> None:
        """Take note of copies that have ended on all ranks. To be called now and then by all ranks alike."""
        if not self.is_copying:
            return
        ended = [sum(itertools.takewhile(bool, (each.ticket.done for each in some))) for some in self._under_way]
        self._end(self._agree(ended))

    def finish(self) -> None:
        """Wait until all copies under way have ended: they lock what they read or write."""
        for transfer in itertools.chain(*self._under_way):
            transfer.ticket.finish()
        self._end([len(some) for some in self._under_way])

    def _end(self, counts: list[int]) -> None:
        ended = [each for some, count in zip(self._under_way, counts, strict=True) for each in some[:count]]
        self._under_way = [some[count:] for some, count in zip(self._under_way, counts, strict=True)]
        for transfer in ended:
            for node in transfer.ends:
                self._tree.unlock(node)
            for node in transfer.nodes:
                node.host.transfer = None
                self._copies.came(node)
            if not transfer.loads:
                for node in transfer.nodes:
                    for watcher in self.watchers:
                        watcher.copied(node)

    # Room

    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """Slots of the host, int64 on the CPU; makes room if need be. None if it cannot make enough."""
        free = self.memory.slots
        if free.num_free < num_tokens:
            self.evict(num_tokens - free.num_free)
        return free.alloc(num_tokens)

    def free(self, slots: torch.Tensor) -> None:
        """Take back slots that no node has."""
        self.memory.slots.free(slots)

    def evict(self, num_tokens: int) -> bool:
        """Free so many slots of the host, or fewer if there are no more: first of copies whose nodes are on the device,
        too, then of leaves that are only on the host, which leave the tree. Returns whether it freed any."""
        before = self.memory.slots.num_free
        for node in self._copies.give_up(num_tokens):
            for watcher in self.watchers:
                watcher.gave_up(len(node))
            self._drop_copy(node)
        protected = []
        while self.memory.slots.num_free < before + num_tokens and (leaf := self._leaves.pop()) is not None:
            if leaf.host.readers:
                protected.append(leaf)
            else:
                self._tree.drop(leaf)
        for leaf in protected:
            self._leaves.add(leaf)
        return self.memory.slots.num_free > before

    def _drop_copy(self, node: Node) -> None:
        for watcher in self.watchers:
            watcher.removed(node)
        if self.states is not None:
            self.states.free(node)
        self.memory.slots.free(node.host.slots)
        node.host = None

    # What the tree tells

    def split(self, above: Node, node: Node) -> None:
        self._copies.split(above, node)
        self._known.split(above, node)
        if (copy := node.host) is None:
            return
        count = len(above)
        above.host = HostCopy(copy.slots[:count].clone(), copy.transfer)
        copy.slots = copy.slots[count:].clone()
        if copy.transfer is not None:
            nodes = copy.transfer.nodes
            nodes.insert(nodes.index(node), above)

    def added(self, end: Node, slots: torch.Tensor, num_present: int, start: int) -> torch.Tensor:
        """Some of it may have been only on the host."""
        num_new, node, new = len(slots) - num_present, end, []
        while num_new > 0:
            new.append(node)
            num_new -= len(node)
            node = node.parent
        for node in reversed(new):
            if node.host is not None:
                self._leaves.discard(node)
                self._copies.came(node)
        if new:
            self._known.came(new[::-1], slots[num_present:])
        return super().added(end, slots, num_present, start)

    def left_device(self, node: Node) -> bool:
        self._known.left(node)
        self._copies.left(node, len(node))
        if node.host is not None and not node.children:
            self._leaves.add(node)
        return node.host is not None

    def holds(self, node: Node) -> bool:
        return node.host is not None and node.host.readers > 0

    def left_tree(self, node: Node) -> None:
        self._copies.gone(node)
        self._leaves.discard(node)
        if node.host is not None:
            self._drop_copy(node)
        if (parent := node.parent).slots is None and len(parent.children) == 1:  # the one that leaves
            self._leaves.add(parent)

    # What storage asks

    def slots_to(self, node: Node) -> torch.Tensor:
        """The host's slots from the root to the end of `node`, which has a copy."""
        return torch.cat([each.host.slots for each in node.path()])

    def is_complete(self, node: Node) -> bool:
        """Whether `node` and all before it have copies that need no copying any more, and can be read."""
        return all(each.host is not None and not self._being_made(each) for each in node.path()) and self.reads(node)

    def reads(self, node: Node) -> bool:
        """Whether the copies up to `node` suffice to read up to there: with the state at its end, if there are any."""
        return self.states is None or node.host.state is not None

    def _being_made(self, node: Node) -> bool:
        return node.host.transfer is not None and not node.host.transfer.loads

    def protect(self, node: Node) -> None:
        """Keep the copy of `node`, and of all before it, until `release` has been called as often."""
        node.host.readers += 1  # those before it stay as long as it does

    def release(self, node: Node) -> None:
        """Undo a `protect`."""
        node.host.readers -= 1

    def adopt(
        self, tokens: array, namespace: Hashable, slots: torch.Tensor, state: torch.Tensor | None = None
    ) -> Node | None:
        """Put KV into the tree, and the state at its end, that have come to these slots of the host by other ways;
        returns where it ends. Slots of what the tree has on the host already are freed.

        Returns None and takes nothing if the tree has a beginning of `tokens` without a copy.
        """
        node, num_present, leaf = self._tree.grow(tokens, namespace)
        if not node.is_root and node.host is None:
            if leaf is not None:
                self._tree.drop(leaf)
            return None
        self.free(slots[:num_present])
        if leaf is not None:
            self._leaves.discard(node)
            leaf.host = HostCopy(slots[num_present:].clone())
            self._leaves.add(leaf)
            for watcher in self.watchers:
                watcher.stored(leaf)
            node = leaf
        if self.states is not None and state is not None:
            self.states.adopt(node, state)
        return node
