"""Keys, tenants and quotas: every mistake in the file in words, no key anywhere, waits that are exact."""

from __future__ import annotations

import hashlib
import logging
import math
import pickle
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minillm.errors import MinillmError
from minillm.server.app import make_tenants
from minillm.server.buckets import MINUTE_S, SLACK_S, Quota, TokenBucket
from minillm.server.config import ServerConfig
from minillm.server.errors import ApiError
from minillm.server.tenants import CLASSES, FIELDS, Tenant, Tenants

CANARY = "sk-canary-7f3a9e"
DOCS = Path(__file__).parents[1] / "docs"


class Clock:
    def __init__(self, now: float = 1000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def load(tmp_path, text):
    path = tmp_path / "tenants.toml"
    path.write_text(text, encoding="utf-8")
    return Tenants.from_toml(path)


GOOD = f"""
[tenants.web]
keys = ["{CANARY}", "sk-second-key"]
priority = "interactive"
requests_per_minute = 60
tokens_per_minute = 6000
max_streams = 4
cache_floor = 0.25

[tenants.nightly]
keys = ["sha256:{hashlib.sha256(b"sk-nightly-key").hexdigest().upper()}"]
priority = 20
cache_floor = 16

[tenants.ops]
keys = ["sk-ops-key"]
admin = true
"""


# The file --------------------------------------------------------------------------------------------------------


def test_a_file_says_who_may_do_what(tmp_path):
    tenants = load(tmp_path, GOOD)
    web, nightly, ops = tenants.tenants
    assert web == Tenant("web", 0, 60, 6000, 4, 0.25)
    assert (nightly.name, nightly.priority, nightly.cache_floor) == ("nightly", 20, 16)
    for header, tenant in (
        (f"Bearer {CANARY}", web),
        ("bearer  sk-second-key ", web),
        ("Bearer sk-nightly-key", nightly),
    ):
        assert tenants.authenticate(header) == tenant
    assert tenants.admin("Bearer sk-ops-key") == ops


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least one table"),
        ("[tenants]", "at least one table"),
        ("tenants = 3", "at least one table"),
        ("[tenant.a]\nkeys = ['sk-aaaaaaaa']", "tenant is not known here"),
        ("[tenants]\na = 3", "tenants.a: expected a table, got int"),
        ("[tenants.a]", "tenants.a.keys: expected a list with at least one key, got nothing"),
        ("[tenants.a]\nkeys = []", "tenants.a.keys: expected a list"),
        ("[tenants.a]\nkeys = 'KEY'", "tenants.a.keys: expected a list with at least one key, got text"),
        ("[tenants.a.keys]\nKEY = 1", "tenants.a.keys: expected a list with at least one key, got a table"),
        ("[tenants.a]\nkeys = [3]", "tenants.a.keys[0]: expected text, got int"),
        ("[tenants.a]\nkeys = ['KEY', ['KEY2']]", "tenants.a.keys[1]: expected text, got list"),
        ("[tenants.a]\nkeys = ['']", "tenants.a.keys[0]: it is empty"),
        ("[tenants.a]\nkeys = ['KEY', '  ']", "tenants.a.keys[1]: it is empty"),
        ("[tenants.a]\nkeys = ['KEY x']", "without spaces"),
        ("[tenants.a]\nkeys = ['KEYé']", "visible ASCII"),
        ("[tenants.a]\nkeys = ['short']", "at least 8 characters"),
        ("[tenants.a]\nkeys = ['sha256:KEY']", "64 hexadecimal digits"),
        ("[tenants.a]\nkeys = ['KEY', 'KEY']", "tenants.a.keys[1]: this key is twice"),
        ("[tenants.a]\nkeys = ['KEY']\n[tenants.b]\nkeys = ['KEY']", "tenants.b.keys[0]: this key is tenant a's too"),
        (
            "[tenants.a]\nkeys = ['KEY']\n[tenants.b]\nkeys = ['sha256:HASH']",
            "tenants.b.keys[0]: this key is tenant a's",
        ),
        ("[tenants.a]\nkeys = ['KEY']\nquota = 3", "tenants.a.quota is not known; use keys, priority"),
        ("[tenants.a]\nkeys = ['KEY']\nKEY = 3", "tenants.a.(a name of 16 characters) is not known"),
        ("[tenants.a]\nkeys = ['KEY']\npriority = 'KEY'", "tenants.a.priority: expected 'interactive' (0)"),
        ("[tenants.a]\nkeys = ['KEY']\npriority = 1001", "got 1001"),
        ("[tenants.a]\nkeys = ['KEY']\npriority = 1.5", "got 1.5"),
        ("[tenants.a]\nkeys = ['KEY']\npriority = true", "got True"),
        ("[tenants.a]\nkeys = ['KEY']\nadmin = 1", "tenants.a.admin: expected true or false, got 1"),
        ("[tenants.a]\nkeys = ['KEY']\nrequests_per_minute = 0", "requests_per_minute: expected a whole number from 1"),
        ("[tenants.a]\nkeys = ['KEY']\ntokens_per_minute = -5", "tokens_per_minute: expected a whole number from 1"),
        ("[tenants.a]\nkeys = ['KEY']\ntokens_per_minute = inf", "got inf"),
        ("[tenants.a]\nkeys = ['KEY']\nmax_streams = 'KEY'", "max_streams: expected a whole number from 1"),
        ("[tenants.a]\nkeys = ['KEY']\nmax_streams = true", "got True"),
        ("[tenants.a]\nkeys = ['KEY']\ncache_floor = -1", "cache_floor: expected blocks"),
        ("[tenants.a]\nkeys = ['KEY']\ncache_floor = 1.5", "got 1.5"),
        ("[tenants.a]\nkeys = ['KEY']\ncache_floor = 1.0", "from 0.0 to below 1), got 1.0"),
        ("[tenants.a]\nkeys = ['KEY']\ncache_floor = nan", "got nan"),
        ("[tenants.a]\nkeys=['KEY']\ncache_floor=0.6\n[tenants.b]\nkeys=['KEY2']\ncache_floor=0.5", "together is 1.1"),
        ("[tenants.KEY]\nkeys = ['KEY2']", "and is not an API key"),
        ("[tenants.'']\nkeys = ['KEY']", "a tenant's name has 1 to 64"),
        ("[tenants.'a b']\nkeys = ['KEY']", "a tenant's name has 1 to 64"),
        ("[tenants.a]\nkeys = ['KEY'", "it is not TOML (at end of document)"),
        ("[tenants.a]\nkeys = [KEY]", "it is not TOML (at line 2, column 9)"),
        ("KEY\n", "it is not TOML"),
        ("a = " + "[" * 100_000, "tenants.toml"),
    ],
)
def test_a_mistake_in_the_file_is_told_in_words_and_without_the_key(tmp_path, text, words):
    text = text.replace("KEY", CANARY).replace("HASH", hashlib.sha256(CANARY.encode()).hexdigest())
    with pytest.raises(MinillmError) as caught:
        load(tmp_path, text)
    assert words in str(caught.value)
    assert "tenants.toml" in str(caught.value)
    told = "".join(traceback.format_exception(caught.value)) + repr(caught.value.__context__)
    assert "canary" not in told.replace(str(tmp_path), "")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(MinillmError, match="nowhere.toml: No such file"):
        Tenants.from_toml(tmp_path / "nowhere.toml")
    (tmp_path / "bytes.toml").write_bytes(b"[tenants.a]\nkeys = ['\xff']")
    with pytest.raises(MinillmError, match="it is not UTF-8 \\(byte 21\\)"):
        Tenants.from_toml(tmp_path / "bytes.toml")


def test_the_example_of_the_documentation_can_be_read():
    tenants = Tenants.from_toml(DOCS / "tenants.example.toml")
    assert len(tenants.tenants) >= 3
    assert any(t.admin for t in tenants.tenants)


# Keys ------------------------------------------------------------------------------------------------------------


def test_who_shows_no_key_or_an_unknown_one_gets_401(tmp_path):
    tenants = load(tmp_path, GOOD)
    for header in (
        None,
        "",
        "  ",
        "Bearer",
        "Bearer ",
        CANARY,
        f"Basic {CANARY}",
        f"Bearer {CANARY}x",
        "Bearer \udcff",
    ):
        for ask in (tenants.authenticate, tenants.admin):
            with pytest.raises(ApiError) as caught:
                ask(header)
            assert caught.value.status == 401
            assert caught.value.code == "invalid_api_key"
            assert caught.value.body()["error"]["type"] == "authentication_error"
            assert "canary" not in str(caught.value.body())


def test_a_digest_is_no_key(tmp_path):
    """Whoever reads the file, which may hold digests only, cannot use what stands there."""
    tenants = load(tmp_path, GOOD)
    digest = hashlib.sha256(b"sk-nightly-key").hexdigest()
    for key in (digest, f"sha256:{digest}"):
        with pytest.raises(ApiError, match="not known"):
            tenants.authenticate(f"Bearer {key}")


def test_a_key_that_is_not_an_admins_may_not_drain(tmp_path):
    tenants = load(tmp_path, GOOD)
    with pytest.raises(ApiError) as caught:
        tenants.admin(f"Bearer {CANARY}")
    assert (caught.value.status, caught.value.code) == (403, "admin_key_needed")


@pytest.mark.parametrize("header", [None, "", "Bearer EMPTY", f"Bearer {CANARY}", "nonsense"])
def test_without_keys_everybody_is_the_nameless_tenant_and_nobody_admin(header):
    tenants = Tenants.open()
    assert tenants.authenticate(header) == Tenant()
    assert not tenants.has_keys
    with pytest.raises(ApiError) as caught:
        tenants.admin(header)
    assert (caught.value.status, caught.value.code) == (403, "no_admin_key")


def test_an_open_server_may_have_an_admin_key():
    tenants = Tenants.open(admin_key=CANARY)
    assert tenants.authenticate(None) == Tenant()
    assert tenants.admin(f"Bearer {CANARY}").admin
    with pytest.raises(ApiError, match="not known"):
        tenants.admin("Bearer sk-somebody")


def test_a_file_of_tenants_may_have_an_admin_key_beside_it(tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text(GOOD, encoding="utf-8")
    tenants = make_tenants(ServerConfig(tenants=path, admin_key="adm-beside-the-file"))
    assert tenants.tenants == load(tmp_path, GOOD).tenants
    assert tenants.admin("Bearer adm-beside-the-file").admin
    with pytest.raises(ApiError, match="is not one"):
        tenants.admin(f"Bearer {CANARY}")
    with pytest.raises(MinillmError, match="a key of its own") as caught:
        Tenants.from_toml(path, CANARY)
    assert "canary" not in str(caught.value)


def test_single_keys():
    tenants = Tenants.single(["sk-first-key", CANARY], admin_key="sk-admin-key")
    assert tenants.authenticate(f"Bearer {CANARY}") == Tenant() == tenants.authenticate("Bearer sk-first-key")
    assert tenants.authenticate("Bearer sk-admin-key").admin
    assert tenants.admin("Bearer sk-admin-key").admin
    with pytest.raises(ApiError, match="an admin key"):
        tenants.admin(f"Bearer {CANARY}")
    with pytest.raises(ApiError, match="no API key"):
        tenants.authenticate(None)
    with pytest.raises(ApiError, match="the server has none"):
        Tenants.single(CANARY).admin(f"Bearer {CANARY}")
    for bad in ("", [], [CANARY, ""], "short", "a key with spaces", f"{CANARY}é"):
        with pytest.raises(MinillmError) as caught:
            Tenants.single(bad)
        assert "canary" not in str(caught.value)
    with pytest.raises(MinillmError, match="a key of its own"):
        Tenants.single(CANARY, admin_key=CANARY)


def test_no_key_is_left_anywhere(tmp_path, caplog):
    """Not in repr, str, attributes, pickles, or the log."""
    caplog.set_level(logging.DEBUG)
    for tenants in (load(tmp_path, GOOD), Tenants.single(CANARY), Tenants.open(admin_key=CANARY)):
        told = [repr(tenants), str(tenants), repr(vars(tenants)), repr(tenants.tenants), repr(pickle.dumps(tenants))]
        assert not any("canary" in text for text in told)
    assert "canary" not in caplog.text


# Priorities ------------------------------------------------------------------------------------------------------


@given(own=st.integers(-1000, 1000), asked=st.none() | st.integers(-1000, 1000))
def test_a_request_may_be_served_later_than_its_key_allows_and_never_earlier(own, asked):
    tenant = Tenant("a", own)
    if asked is None or asked >= own:
        assert tenant.effective_priority(asked) == (own if asked is None else asked)
    else:
        with pytest.raises(ApiError) as caught:
            tenant.effective_priority(asked)
        assert (caught.value.status, caught.value.param) == (403, "priority")


# Buckets ---------------------------------------------------------------------------------------------------------

RATES = st.integers(1, 10**7)
TIMES = st.floats(0, 1e9)


@given(rate=RATES, start=TIMES, takes=st.lists(st.tuples(st.floats(0, 200), st.floats(0, 1.5)), max_size=30))
@settings(max_examples=300)
def test_waiting_as_long_as_told_is_exactly_enough(rate, start, takes):
    """Alone, after the wait, the request passes; a hundredth of it (or a millisecond) earlier it does not."""
    bucket, now = TokenBucket(rate), start
    for pause, share in takes:
        now += pause
        amount = share * rate
        if bucket.take(amount, now):
            continue
        wait = bucket.wait(amount, now)
        if math.isinf(wait):
            assert amount > bucket.capacity
            continue
        assert 0 < wait <= MINUTE_S * 1.001
        early = now + wait - max(0.01 * wait, 1e-3)
        assert early <= now or bucket.wait(amount, early) > 0
        now += wait
        assert bucket.take(amount, now)


class WaitsTooLittle(TokenBucket):
    """The mutant: it tells the time to fill what is missing of a full bucket's amount at twice the rate."""

    def wait(self, amount, now):
        wait = super().wait(amount, now)
        return wait if math.isinf(wait) else wait / 2


def test_a_wait_that_is_half_as_long_is_found_out():
    bucket = WaitsTooLittle(60)
    assert bucket.take(60, 0.0)
    wait = bucket.wait(30, 0.0)
    assert wait > 0
    assert not bucket.take(30, wait)
    honest = TokenBucket(60)
    assert honest.take(60, 0.0)
    assert honest.take(30, honest.wait(30, 0.0))


class BucketMachine(RuleBasedStateMachine):
    """Against plain arithmetic: a level that is added to as time goes by, and never leaves 0 to capacity."""

    @initialize(rate=RATES, burst=st.none() | st.integers(1, 10**7))
    def start(self, rate, burst):
        self.bucket = TokenBucket(rate, burst)
        self.capacity = self.level = float(rate if burst is None else burst)
        self.rate, self.now, self.held = rate / 60, 0.0, []
        self.slack = self.rate * SLACK_S * 4 + self.capacity * 1e-9

    @rule(seconds=st.floats(0, 300))
    def wait(self, seconds):
        self.now += seconds
        self.level = min(self.capacity, self.level + seconds * self.rate)

    @rule(share=st.floats(0, 1.2))
    def take(self, share):
        amount = share * self.capacity
        taken = self.bucket.take(amount, self.now)
        if taken:
            assert amount <= self.level + self.slack
            self.level = max(0.0, self.level - amount)
            self.held.append(amount)
        else:
            assert amount > self.level - self.slack

    @precondition(lambda self: self.held)
    @rule(share=st.floats(0, 1))
    def refund(self, share):
        amount = self.held.pop() * share
        self.bucket.give(amount)
        self.level = min(self.capacity, self.level + amount)

    @invariant()
    def same_level(self):
        if hasattr(self, "bucket"):
            level = self.bucket.level(self.now)
            assert 0 <= level <= self.capacity
            assert abs(level - self.level) <= self.slack


TestBucketMachine = BucketMachine.TestCase
TestBucketMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_quota_takes_both_or_none():
    clock = Clock()
    quota = Quota(requests_per_minute=10, tokens_per_minute=100, clock=clock)
    assert quota.take(1, 80) is None
    short = quota.take(1, 50)
    assert (short.which, short.asked, short.retry_after_s) == ("tokens", 50, pytest.approx(18))
    assert quota.level("requests") == pytest.approx(9)
    clock.now += short.retry_after_s
    assert quota.take(1, 50) is None
    assert quota.level("tokens") == pytest.approx(0, abs=1e-3)


def test_a_quota_tells_the_longest_wait_and_first_what_can_never_pass():
    quota = Quota(requests_per_minute=1, tokens_per_minute=60, clock=Clock())
    assert quota.take(1, 60) is None
    assert quota.take(1, 10).which == "requests"
    never = quota.take(1, 61)
    assert (never.which, never.retry_after_s) == ("tokens", math.inf)


def test_what_a_request_holds_counts_for_it_and_what_is_too_much_comes_back():
    quota = Quota(tokens_per_minute=100, clock=Clock())
    assert quota.take(1, 60) is None
    assert quota.take(0, 90, held=60) is None
    assert quota.level("tokens") == pytest.approx(10)
    assert quota.take(0, 20, held=90) is None
    assert quota.level("tokens") == pytest.approx(80)
    assert quota.take(0, 101, held=20).retry_after_s == math.inf


def test_without_bounds_everything_passes():
    quota = Quota()
    assert quota.take(10**9, 10**12) is None
    assert quota.level("requests") is None
    quota.give(1, 1)


def test_a_quota_in_many_threads_gives_out_no_more_than_it_has():
    quota, got = Quota(tokens_per_minute=1000, clock=Clock()), []

    def work():
        got.extend(quota.take(1, 3) is None for _ in range(200))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sum(got) == 333


# The documentation -----------------------------------------------------------------------------------------------


def test_the_documented_command_makes_a_key_and_its_digest(tmp_path):
    command = next(line for line in (DOCS / "tenants.md").read_text().splitlines() if line.startswith("python -c "))
    code = command.removeprefix('python -c "').removesuffix('"')
    key, digest = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    tenants = load(tmp_path, f'[tenants.a]\nkeys = ["{digest}"]')
    assert tenants.authenticate(f"Bearer {key}").name == "a"


def test_the_documentation_has_every_entry_and_every_class():
    text = (DOCS / "tenants.md").read_text()
    assert all(f"| `{field}` |" in text for field in FIELDS)
    assert all(f'`"{name}"` ({place})' in text for name, place in CLASSES.items())


def test_none_of_this_needs_a_web_framework():
    code = """
import sys
for name in ("fastapi", "starlette", "uvicorn", "prometheus_client", "pydantic"):
    sys.modules[name] = None
import minillm.server.admission, minillm.server.byte_bounds, minillm.server.door, minillm.server.tenants
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=DOCS.parent)
