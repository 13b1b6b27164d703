"""A stand-in for SGLang's storage backends."""

import threading

import torch


class Storage:
    """Stores objects in this process, by key.

    open: calls hang until this event is set.
    broken: the name of the call that raises an error, after moving half of the data.
    """

    def __init__(self):
        self.objects, self.open, self.broken = {}, threading.Event(), None
        self.open.set()

    def exists(self, key):
        self.open.wait()
        self._fail_if_broken("exists")
        return key in self.objects

    def batch_get(self, keys, targets):
        for key, target in zip(keys, targets, strict=True):
            data = self.objects[key]
            self._move("batch_get", data, target)
            if len(data) < len(target):
                raise OSError("short read")
        return targets

    def batch_set(self, keys, values):
        self.open.wait()
        for key, value in zip(keys, values, strict=True):
            stored = torch.zeros_like(value)
            try:
                self._move("batch_set", value, stored)
            finally:
                self.objects[key] = stored  # at once: readers never see an object that is still being written
        return True

    def _move(self, call, source, target):
        num_bytes = min(len(source), len(target))
        half = num_bytes // 2
        target[:half] = source[:half]
        self._fail_if_broken(call)
        target[half:num_bytes] = source[half:num_bytes]

    def _fail_if_broken(self, call):
        if call == self.broken:
            raise ConnectionResetError(call)
