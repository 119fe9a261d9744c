"""From the bytes of a body to a JSON object, whatever the bytes are. Lesson 13.

The standard parser accepts more than JSON (NaN, a key twice, half a surrogate pair) and fails in more than one way
(depth, digits). Here every fault is one `ApiError`, with the field's path where there is one. Time is linear in the
bytes, whose number the app bounds.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from minillm.server.errors import ApiError

MAX_DEPTH = 32  # of lists and objects inside each other; a request needs five
MAX_INSIDE = 65_536  # lists and objects: each costs a hundred times its two bytes, in memory and in the loop's time
MAX_COMMAS = 524_288  # outside of strings: token ids of a context many times over
MAX_KEYS = 4096  # of one object; also what bounds the faults that one validation can find
MAX_LOOKED = 100_000  # values that are searched for the place of a fault
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

Place = tuple[Any, str | int] | None  # (the place of the object or list that holds it, key or index)


class _Faulty:
    """Stands where an object cannot be taken, until its path is known. key: the one at fault, if it is one."""

    def __init__(self, message: str, key: str | None = None):
        self.message, self.key = message, key


def load_object(raw: bytes) -> dict[str, Any]:
    """The object that a body holds. Raises ApiError(400)."""
    try:
        text = raw.decode("utf-8-sig")  # RFC 8259 lets a parser ignore a byte-order mark
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not UTF-8 (byte {error.start})") from None
    if not text.strip():
        raise _bad("the body is empty; send a JSON object")
    bare = without_strings(raw)
    if bare.count(b",") > MAX_COMMAS:
        raise _bad(f"the body holds more than {MAX_COMMAS:,} values")
    brackets = bare.translate(None, _NO_BRACKETS)
    if len(brackets) > 2 * MAX_INSIDE:
        raise _bad(f"the body holds more than {MAX_INSIDE:,} lists and objects")
    faults: list[_Faulty] = []

    def take(pairs: list[tuple[str, Any]]) -> Any:
        found = dict(pairs)
        if len(found) == len(pairs) <= MAX_KEYS:
            return found
        if len(pairs) > MAX_KEYS:
            faults.append(_Faulty(f"an object may have {MAX_KEYS} keys, this one has {len(pairs)}"))
        else:
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            faults.append(_Faulty("the key is there twice; send it once", twice))
        return faults[-1]

    try:
        body = json.loads(text, object_pairs_hook=take, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise _bad(f"the body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except ValueError:  # int() refuses thousands of digits
        raise _bad("a number in the body has too many digits") from None
    if deeper_than(MAX_DEPTH, brackets):
        raise _too_deep()
    if faults:
        raise _bad(faults[0].message, _find(body, lambda value: value is faults[0], faults[0].key))
    if _ESCAPED_SURROGATE.search(raw) and _half_a_pair(body):
        where = _find(body, lambda value: isinstance(value, str | dict) and _half_a_pair(value, deep=False))
        raise _bad("the text holds half of a surrogate pair; send valid Unicode", where)
    if not isinstance(body, dict):
        raise _bad(f"the body must be a JSON object, got {kind_of(body)}")
    return body


def deeper_than(depth: int, brackets: bytes) -> bool:
    """Are there more than `depth` brackets inside each other? brackets: those of a body, without its strings.

    Peels one level a pass, at C's speed.
    """
    left = brackets.translate(bytes.maketrans(b"{}", b"[]"))
    for _ in range(depth):
        if not left:
            break
        left = left.replace(b"[]", b"")
    return bool(left)


def without_strings(raw: bytes) -> bytes:
    """Valid JSON without what is inside of its strings. Of other bytes: something."""
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(unescaped.split(b'"')[::2])  # every second piece is a string


def kind_of(value: Any) -> str:
    """A JSON value's type in words; numbers, true, false and null as themselves."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return "a whole number of more than 20 digits"
    return json.dumps(value, default=repr)


def all_finite(value: Any) -> bool:
    """Is no number in it an infinity, which 1e999 is?"""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def path(place: Place, parts: int = 8) -> str:
    """A place as "messages[0].content": the outermost `parts` of it, printable and short enough for a reply."""
    steps = []
    while place is not None:
        place, step = place
        steps.append(f"[{step}]" if isinstance(step, int) else f".{printable(step)}")
    return "".join(steps[::-1][:parts]).lstrip(".")


def printable(key: str) -> str:
    short = key if len(key) <= 64 else f"{key[:64]}..."
    return short if short.isprintable() else ascii(short)[1:-1]


def _find(body: Any, wanted: Callable[[Any], bool], key: str | None = None) -> str:
    """The path of the first such value (of its key, with one); "" if it lies far inside.

    Places are links and not texts: a key of a megabyte with a list of a million items would write a terabyte of paths.
    """
    for place, value in itertools.islice(_walk(body), MAX_LOOKED):
        if wanted(value):
            return path(place if key is None else (place, key))
    return ""


def _walk(body: Any) -> Iterator[tuple[Place, Any]]:
    """A JSON value and all that is inside, in order, without recursion and without looking ahead."""
    yield None, body
    todo: list[Iterator[tuple[Place, Any]]] = [_inside(None, body)]
    while todo:
        for place, value in todo[-1]:
            yield place, value
            if isinstance(value, dict | list):
                todo.append(_inside(place, value))
                break
        else:
            todo.pop()


def _inside(place: Place, value: Any) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, dict):
        return (((place, key), item) for key, item in value.items())
    if isinstance(value, list):
        return (((place, i), item) for i, item in enumerate(value))
    return iter(())


def _half_a_pair(value: Any, deep: bool = True) -> bool:
    """Does a text in it hold half of a surrogate pair? Not deep: the text itself, or an object's own keys."""
    try:
        if deep:
            json.dumps(value, ensure_ascii=False).encode()
        else:
            "".join(value).encode()
    except UnicodeEncodeError:
        return True
    return False


def _refuse_constant(name: str) -> Any:
    raise _bad(f"{name} is not JSON; send a finite number")


def _too_deep() -> ApiError:
    return _bad(f"the body is nested too deeply; {MAX_DEPTH} levels are allowed")


def _bad(message: str, param: str = "") -> ApiError:
    return ApiError(400, f"{param}: {message}" if param else message, param=param or None)
