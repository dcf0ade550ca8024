"""What runs inside the sandboxes of code checking: the program of a completion, and the tests, apart from each other.

The tests see the program's functions as `Remote` objects, which call it over a socket. Only plain data crosses, as
JSON, so the program never sees a test, an expected value or the verdict, and nothing that it sends can run in the
judge. Imports only the standard library: `sandbox_child` loads this file by its path.
"""

import ast
import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import json
import socket
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

MAX_MESSAGE_BYTES = 16 * 2**20
MAX_ITEMS = 10**6
LENGTH = struct.Struct("<Q")
PLAIN = (bool, int, str, type(None))
SEQUENCES: dict[str, type[Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
TEXTUAL: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, str, fractions.Fraction),
    "complex": (complex, repr, complex),
    "float": (float, repr, float),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, lambda value: value.hex(), bytearray.fromhex),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
}
ITERATORS = (types.GeneratorType, map, filter, zip, enumerate, reversed)


def candidate(connection: socket.socket) -> None:
    """Run the program, then answer what the judge asks of it."""
    peer = Peer(connection)
    source, name = peer.receive()
    namespace: dict[str, Any] = {"__name__": name, "__builtins__": builtins}
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(namespace)
    namespace = sys.modules[name].__dict__
    try:
        exec(compile(source, "<program>", "exec"), namespace)
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - a program may raise anything, and end by it
        peer.send({"failed": f"{type(error).__name__}: {error}"[:500]})
        return
    peer.send({"names": {key: _kind(value) for key, value in namespace.items() if not key.startswith("__")}})
    peer.serve(namespace)


def program(connection: socket.socket) -> None:
    """Run the program as a script, with the standard streams of this process."""
    peer = Peer(connection)
    source, _ = peer.receive()
    connection.close()
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        exec(compile(source, "<program>", "exec"), module.__dict__)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    finally:
        sys.stdout.flush()


def judge(connection: socket.socket, verdicts: socket.socket) -> None:
    """Run the tests against the program behind the connection; say how they ended where only the check can hear it."""
    source = Peer(verdicts)
    helpers, tests = source.receive()
    peer = Peer(connection)
    started = peer.receive()
    if "failed" in started:
        source.send({"passed": False, "why": str(started["failed"])})
        return
    for number, test in enumerate(tests):
        try:
            namespace = _namespace(peer, started["names"], helpers, _names_read(test))
            exec(compile(test, f"<test {number}>", "exec"), namespace)
        except MemoryError:
            raise
        except EOFError:
            source.send({"lost": True, "why": f"the program ended during test {number}"})
            return
        except BaseException as error:  # noqa: BLE001 - whatever a test raises, it has not passed
            source.send({"passed": False, "why": f"test {number}: {type(error).__name__}: {error}"[:500]})
            return
    source.send({"passed": True, "why": ""})


def _namespace(peer: "Peer", names: dict[str, str], helpers: str, read: set[str]) -> dict[str, Any]:
    """What a test sees: the program's names, but modules and the problem's own helpers stay what they are.

    So do builtins, or a program could pass by another `set` or `sorted`; unless a test reads nothing else of it.
    """
    namespace: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    kept = _run_helpers(helpers, namespace)
    if any(not hasattr(builtins, name) for name in read & set(names)):
        kept |= set(dir(builtins))
    for name, kind in names.items():
        if name in kept or not name.isidentifier():
            continue
        if kind.startswith("module "):
            try:
                namespace[name] = importlib.import_module(kind.removeprefix("module "))
            except ImportError:
                continue
        else:
            namespace[name] = Remote(peer, name)
    return namespace


def _names_read(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def _run_helpers(source: str, namespace: dict[str, Any]) -> set[str]:
    """Run what the problem's own text imports and defines in full; the names. What has no body is to be written."""
    if not source:
        return set()
    tree = ast.parse(source)
    bodies = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    tree.body = [node for node in tree.body if not (isinstance(node, bodies) and _is_stub(node))]
    before = set(namespace)
    exec(compile(tree, "<problem>", "exec"), namespace)
    return set(namespace) - before


def _is_stub(node: Any) -> bool:
    """Whether a body holds nothing but a docstring, imports and `pass`."""
    empty = (ast.Pass, ast.Import, ast.ImportFrom)
    docstring = (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in node.body)
    return all(isinstance(each, empty) or is_text for each, is_text in zip(node.body, docstring, strict=True))


def _kind(value: Any) -> str:
    return f"module {value.__name__}" if isinstance(value, types.ModuleType) else "object"


class Remote:
    """Something that lives on the other side; `==` to anything else is False, whatever that side would say."""

    def __init__(self, peer: "Peer", reference: Any) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_reference", reference)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._peer.ask(self._reference, "call", arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._peer.ask(self._reference, "get", (name,), {})

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask(self._reference, "set", (name, value), {})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Remote):
            return False
        return self._reference == other._reference or self._operator("__eq__", other) is True

    def __hash__(self) -> int:
        return hash(str(self._reference))

    def _operator(self, name: str, *arguments: Any) -> Any:
        return self._peer.ask(self._reference, name, arguments, {})


OPERATORS = (
    "__len__ __getitem__ __setitem__ __delitem__ __contains__ __iter__ __next__ __str__ __repr__ __lt__ __le__ __gt__ "
    "__ge__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __floordiv__ __mod__ __pow__ __neg__ "
    "__abs__ __enter__ __exit__ __int__ __float__ __index__"
).split()
for _name in OPERATORS:
    setattr(Remote, _name, lambda self, *arguments, _name=_name: self._operator(_name, *arguments))
ALLOWED = frozenset(["call", "get", "set", "__eq__", *OPERATORS])


class RemoteError(Exception):
    """An exception of the program that is no builtin one."""


class Peer:
    """One end of the conversation: sends requests, answers those of the other end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.exported: dict[str, Any] = {}

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a value of {len(data)} bytes is too large")
        self.connection.sendall(LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise EOFError("too long a message")
        return json.loads(self._read(length))

    def _read(self, length: int) -> bytes:
        parts = []
        while length:
            part = self.connection.recv(min(length, 1 << 20))
            if not part:
                raise EOFError("the other side is gone")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def ask(self, reference: Any, operation: str, arguments: tuple, keywords: dict) -> Any:
        """Do something to an object of the other side; arguments that it changes in place are changed here too."""
        given = {"with": self.encode(list(arguments)), "named": self.encode(keywords)}
        self.send({"of": reference, "do": operation, **given})
        while True:
            reply = self.receive()
            if "do" not in reply:
                break
            self.send(self.answer(reply, {}))
        if "raised" in reply:
            kind = getattr(builtins, str(reply["raised"]), None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                raise kind(str(reply["text"]))
            raise RemoteError(str(reply["text"]))
        for old, new in zip(arguments, self.decode(reply["changed"]), strict=False):
            _change(old, new)
        return self.decode(reply["value"])

    def serve(self, namespace: dict[str, Any]) -> None:
        """Answer requests until the other end hangs up."""
        while True:
            try:
                request = self.receive()
            except EOFError:
                return
            self.send(self.answer(request, namespace))

    def answer(self, request: dict, namespace: dict[str, Any]) -> dict:
        """The reply to a request; what goes wrong is part of it."""
        try:
            target = namespace[request["of"]] if request["of"] in namespace else self.exported[request["of"]]
            arguments, keywords = self.decode(request["with"]), self.decode(request["named"])
            value = _do(target, request["do"], arguments, keywords)
            return {"value": self.encode(value), "changed": self.encode([_mutable(each) for each in arguments])}
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001 - what the program raises is the judge's to see
            if isinstance(error, SystemExit):
                return {"raised": "SystemError", "text": "the program called exit"}
            return {"raised": type(error).__name__, "text": str(error)[:500]}

    def encode(self, value: Any) -> Any:
        """Plain data as JSON, by exact type where equality depends on it; a reference to anything else."""
        if type(value) in PLAIN and not (type(value) is int and value.bit_length() > 4000):
            return value
        if type(value) is int:
            return {"int": hex(value)}
        if isinstance(value, Remote):
            return {"yours": value._reference}
        for name, (kind, written, _) in TEXTUAL.items():
            if type(value) is kind:
                return {name: written(value)}
        for name, sequence in SEQUENCES.items():
            if isinstance(value, sequence):
                return {name: [self.encode(each) for each in value]}
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(each)] for key, each in value.items()]}
        if isinstance(value, ITERATORS):
            return {"iterator": [self.encode(each) for _, each in zip(range(MAX_ITEMS), value, strict=False)]}
        if isinstance(value, range):
            return {"range": [value.start, value.stop, value.step]}
        if isinstance(value, (bool, int, float, str)):  # a subclass, as of an enumeration
            return self.encode(next(base(value) for base in (int, float, str) if isinstance(value, base)))
        name = getattr(value, "__name__", "")
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            return {"builtin": name}
        reference = f"#{id(value)}"
        self.exported[reference] = value
        return {"mine": reference}

    def decode(self, data: Any) -> Any:
        """The inverse of `encode`."""
        if not isinstance(data, dict):
            return data
        ((name, inner),) = data.items()
        if name in TEXTUAL:
            return TEXTUAL[name][2](inner)
        if name in SEQUENCES:
            return SEQUENCES[name](self.decode(each) for each in inner)
        if name == "int":
            return int(inner, 16)
        if name == "dict":
            return {self.decode(key): self.decode(each) for key, each in inner}
        if name == "iterator":
            return iter([self.decode(each) for each in inner])
        if name == "range":
            return range(*inner)
        if name == "builtin":
            return getattr(builtins, inner)
        if name == "yours":
            return self.exported[inner]
        if name == "mine":
            return Remote(self, inner)
        raise ValueError(f"no such kind of value: {name!r}")


def _do(target: Any, operation: str, arguments: list, keywords: dict) -> Any:
    if operation == "call":
        return target(*arguments, **keywords)
    if operation == "get" and not arguments[0].startswith("_"):
        return getattr(target, arguments[0])
    if operation == "set" and not arguments[0].startswith("_"):
        return setattr(target, *arguments)
    if operation in ALLOWED:
        return getattr(target, operation)(*arguments)
    raise AttributeError(operation)


def _mutable(value: Any) -> Any:
    return value if type(value) in (list, dict, set, bytearray) else None


def _change(old: Any, new: Any) -> None:
    """Make a list, dict or set what the other side made of it."""
    if type(old) is not type(new) or old == new:
        return
    if isinstance(old, list):
        old[:] = new
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray):
        old[:] = new
