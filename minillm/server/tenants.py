"""Who is asking: API keys, and what each may do, from a TOML file (docs/tenants.md). Lesson 13.

A key is kept as its SHA-256 digest, whether the file has it in clear or as "sha256:...". Keys are long and random, so
a fast hash is enough. Nothing here prints one: errors about the file name the place and the type of what stands there.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError
from minillm.server.errors import ApiError

CLASSES = {"interactive": 0, "batch": 10, "background": 100}  # names for priorities
PRIORITIES = range(-1000, 1001)
FIELDS = (
    "keys", "priority", "requests_per_minute", "tokens_per_minute", "max_streams", "cache_floor", "admin",
)  # fmt: skip
SHORTEST_KEY = 8


@dataclass(frozen=True)
class Tenant:
    """priority: the best place it may have; smaller is served first. None is no bound, of requests and tokens a minute,
    of streams (sequences under way), of the cache floor.

    cache_floor: KV blocks that others cannot evict: a whole number of blocks, or a fraction of all
    (`EngineConfig.cache_floors` takes both).
    """

    name: str = ""
    priority: int = 0
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_streams: int | None = None
    cache_floor: int | float | None = None
    admin: bool = False

    def effective_priority(self, asked: int | None) -> int:
        """The place of a request that asks for one, or does not. Raises ApiError 403 for a better one than the key's.

        403 and not 400: the number is a fine one, and another key may use it.
        """
        if asked is None:
            return self.priority
        if asked < self.priority:
            raise ApiError(
                403, f"priority: {asked} asked for, and this key's requests are served at {self.priority} or later "
                "(smaller is served first); leave it out, or use a larger number", param="priority",
                code="priority_not_allowed",
            )  # fmt: skip
        return asked


class Tenants:
    """Keys and their tenants. Make one with `from_toml`, `single` or `open`."""

    def __init__(self, tenants: Sequence[Tenant], keys: Mapping[bytes, Tenant]):
        self.tenants = tuple(tenants)
        self._keys = {digest: (digest, tenant) for digest, tenant in keys.items()}  # SHA-256

    def __repr__(self) -> str:
        return f"Tenants({', '.join(t.name for t in self.tenants) or 'open'}; {len(self._keys)} keys)"

    @classmethod
    def open(cls, admin_key: str | None = None) -> Tenants:
        """No keys: everybody is the tenant "", whatever key they send. Only the holder of admin_key is admin."""
        return cls([Tenant()], _with_admin({}, admin_key))

    @classmethod
    def single(cls, key: str | Sequence[str], admin_key: str | None = None) -> Tenants:
        """One key, or several, for one tenant "". A key that everybody has is not an admin's: that needs admin_key."""
        tenant, digests = Tenant(), {}
        for i, k in enumerate([key] if isinstance(key, str) else key):
            digests[_digest_of(k, f"the API key number {i + 1}")] = tenant
        if not digests:
            raise MinillmError("no API key was given; give one, or none at all for an open server")
        return cls([tenant], _with_admin(digests, admin_key))

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], admin_key: str | None = None) -> Tenants:
        """Keys of the file, and admin_key beside them. Raises MinillmError naming the entry, never what it says."""
        fault = None
        try:
            document = tomllib.loads(Path(path).read_bytes().decode("utf-8"))
        except OSError as error:
            fault = error.strerror or type(error).__name__
        except UnicodeDecodeError as error:
            fault = f"it is not UTF-8 (byte {error.start})"
        except tomllib.TOMLDecodeError as error:
            where = re.search(r"\(at [^()]*\)$", str(error))
            fault = f"it is not TOML {where.group() if where else ''}".rstrip()
        except RecursionError:
            fault = "it is nested too deeply"
        if fault is not None:  # outside of except: an exception keeps the one it arose from, and that one the text
            raise MinillmError(f"{path}: {fault}")
        tenants, digests = _read(document, str(path))
        return cls(tenants, _with_admin(digests, admin_key))

    @property
    def has_keys(self) -> bool:
        return any(not t.admin or t.name for _, t in self._keys.values())

    def authenticate(self, header: str | None) -> Tenant:
        """The tenant of an Authorization header ("Bearer KEY"). Raises ApiError 401."""
        if not self.has_keys:
            return self.tenants[0]
        return self._of(header)

    def admin(self, header: str | None) -> Tenant:
        """As `authenticate`, for what only an admin may do. Raises ApiError 401, or 403 for somebody else's key."""
        if not any(t.admin for _, t in self._keys.values()):
            raise ApiError(
                403, "this needs an admin key, and the server has none; give it one when it starts", code="no_admin_key"
            )
        tenant = self._of(header)
        if not tenant.admin:
            raise ApiError(403, "this needs an admin key, and this key is not one", code="admin_key_needed")
        return tenant

    def _of(self, header: str | None) -> Tenant:
        if header is None or not header.strip():
            raise ApiError(401, "no API key was sent; send it as 'Authorization: Bearer KEY'", code="invalid_api_key")
        scheme, _, key = header.strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "the Authorization header must read 'Bearer KEY'", code="invalid_api_key")
        digest = _digest(key.strip())
        known, tenant = self._keys.get(digest, (b"", None))  # by digest: how long it takes tells nothing about a key
        if tenant is not None and hmac.compare_digest(known, digest):
            return tenant
        raise ApiError(401, "this API key is not known here", code="invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _digest_of(key: Any, where: str) -> bytes:
    """The digest of a key as configured. Raises MinillmError that does not hold it."""
    if not isinstance(key, str):
        raise MinillmError(f"{where}: expected text, got {type(key).__name__}")
    if not key.strip():
        raise MinillmError(f"{where}: it is empty")
    if key.startswith("sha256:"):
        if not re.fullmatch(r"sha256:[0-9a-fA-F]{64}", key):
            raise MinillmError(f"{where}: after 'sha256:' expected the 64 hexadecimal digits of the key's SHA-256")
        return bytes.fromhex(key[7:])
    if not all("!" <= c <= "~" for c in key):
        raise MinillmError(f"{where}: a key is made of visible ASCII characters, without spaces")
    if len(key) < SHORTEST_KEY:
        raise MinillmError(f"{where}: a key has at least {SHORTEST_KEY} characters; a short one can be guessed")
    return _digest(key)


def _with_admin(digests: dict[bytes, Tenant], key: str | None) -> dict[bytes, Tenant]:
    if key is None:
        return digests
    digest = _digest_of(key, "the admin key")
    if digest in digests:
        raise MinillmError("the admin key is an API key too; give the admin a key of its own")
    return digests | {digest: Tenant(admin=True)}


# The file --------------------------------------------------------------------------------------------------------


def _read(document: dict[str, Any], path: str) -> tuple[list[Tenant], dict[bytes, Tenant]]:
    for name in document:
        if name != "tenants":
            raise MinillmError(f"{path}: {_safe(name)} is not known here; the file has tables [tenants.NAME]")
    tables = document.get("tenants")
    if not isinstance(tables, dict) or not tables:
        raise MinillmError(f"{path}: expected at least one table [tenants.NAME]")
    tenants: list[Tenant] = []
    keys: dict[bytes, Tenant] = {}
    for name, table in tables.items():
        where = f"{path}: tenants.{_safe(name)}"
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) or name.startswith("sk-"):
            raise MinillmError(
                f"{where}: a tenant's name has 1 to 64 letters, digits, '_', '.' and '-', and is not an API key"
            )
        if not isinstance(table, dict):
            raise MinillmError(f"{where}: expected a table, got {type(table).__name__}")
        tenant = _tenant(name, table, where)
        tenants.append(tenant)
        for digest, place in _key_list(table, where):
            if digest in keys:
                whose = "twice" if keys[digest] is tenant else f"tenant {keys[digest].name}'s too"
                raise MinillmError(f"{place}: this key is {whose}; a key belongs to one tenant, once")
            keys[digest] = tenant
    shares = sum(t.cache_floor for t in tenants if isinstance(t.cache_floor, float))
    if shares >= 1:
        raise MinillmError(f"{path}: cache_floor of all tenants together is {shares:g}; below 1 something is left")
    return tenants, keys


def _tenant(name: str, table: dict[str, Any], where: str) -> Tenant:
    for field in table:
        if field not in FIELDS:
            raise MinillmError(f"{where}.{_safe(field)} is not known; use {', '.join(FIELDS)}")
    admin = table.get("admin", False)
    if not isinstance(admin, bool):
        raise MinillmError(f"{where}.admin: expected true or false, got {_shown(admin)}")
    return Tenant(
        name, _priority(table.get("priority", 0), f"{where}.priority"),
        _positive(table, "requests_per_minute", where), _positive(table, "tokens_per_minute", where),
        _positive(table, "max_streams", where), _floor(table.get("cache_floor"), f"{where}.cache_floor"), admin,
    )  # fmt: skip


def _key_list(table: dict[str, Any], where: str) -> list[tuple[bytes, str]]:
    keys = table.get("keys")
    if not isinstance(keys, list) or not keys:
        raise MinillmError(f"{where}.keys: expected a list with at least one key, got {_shown(keys)}")
    return [(_digest_of(key, f"{where}.keys[{i}]"), f"{where}.keys[{i}]") for i, key in enumerate(keys)]


def _priority(value: Any, where: str) -> int:
    if isinstance(value, str) and value in CLASSES:
        return CLASSES[value]
    if isinstance(value, bool) or not isinstance(value, int) or value not in PRIORITIES:
        known = ", ".join(f"{name!r} ({p})" for name, p in CLASSES.items())
        raise MinillmError(f"{where}: expected {known} or a whole number from -1000 to 1000, got {_shown(value)}")
    return value


def _positive(table: dict[str, Any], field: str, where: str) -> Any:
    value = table.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**15:
        raise MinillmError(
            f"{where}.{field}: expected a whole number from 1 to 10^15, got {_shown(value)}; leave it out for no bound"
        )
    return value


def _floor(value: Any, where: str) -> int | float | None:
    if value is None:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**15
    share = isinstance(value, float) and 0 <= value < 1
    if not whole and not share:
        raise MinillmError(
            f"{where}: expected blocks (a whole number, such as 64) or a share of all blocks (with a point, from "
            f"0.0 to below 1), got {_shown(value)}"
        )
    return value


def _safe(name: str) -> str:
    """A name from the file, if it looks like one: somebody may have put a key where a name belongs."""
    return name if re.fullmatch(r"[A-Za-z_][A-Za-z_]{0,39}", name) else f"(a name of {len(name)} characters)"


def _shown(value: Any) -> str:
    """A number as it is; of anything else, which may be a key, the type."""
    if isinstance(value, bool | int | float):
        return f"{value!r:.40}"
    return {str: "text", list: "a list", dict: "a table", type(None): "nothing"}.get(
        type(value), f"a {type(value).__name__}"
    )
