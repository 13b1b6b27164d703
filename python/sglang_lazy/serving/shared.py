"""State shared by several tokenizer workers: objects in the process that started them, which each calls by proxy."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import AuthenticationError, current_process
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

Opened = Mapping[str, Any]
"""Objects by name. If an object has a method `close`, it is called when the worker has ended."""


class ObjectServer:
    """Calls methods of objects on behalf of other processes of this user, one call at a time.

    opened: returns the objects for a new worker; called when it connects.
    """

    def __init__(self, opened: Callable[[], Opened]):
        self._opened, self._lock = opened, threading.Lock()
        # In a folder that is this user's alone, and with a key that spawned processes inherit.
        self._listener = Listener(family="AF_UNIX", backlog=64, authkey=bytes(current_process().authkey))
        self.address = str(self._listener.address)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except (AuthenticationError, EOFError, OSError):
                continue  # not a worker, or one that has ended
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection:
            objects = self._opened()
            try:
                while True:
                    name, method, arguments = connection.recv()
                    connection.send(self._call(objects[name], method, arguments))
            except (EOFError, OSError):
                for one in objects.values():
                    if hasattr(one, "close"):
                        self._call(one, "close", ())

    def _call(self, target: Any, method: str, arguments: tuple) -> tuple[Any, Exception | None]:
        with self._lock:
            try:
                return getattr(target, method)(*arguments), None
            except Exception as error:
                return None, error


class Calls:
    """Calls methods of the objects of an `ObjectServer` over one connection."""

    def __init__(self, connection: Connection):
        self._connection, self._lock = connection, threading.Lock()

    def __call__(self, name: str, method: str, *arguments: Any) -> Any:
        with self._lock:
            self._connection.send((name, method, arguments))
            result, error = self._connection.recv()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        self._connection.close()


class Proxy:
    """Forwards method calls to the object with this name."""

    def __init__(self, calls: Calls, name: str):
        self._calls, self._name = calls, name

    def __getattr__(self, method: str) -> Callable:
        return partial(self._calls, self._name, method)


def connect(address: str) -> Calls:
    """A connection to the `ObjectServer` there. Only for processes spawned by that server's process."""
    return Calls(Client(address, "AF_UNIX", authkey=bytes(current_process().authkey)))
