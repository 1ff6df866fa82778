"""Answers kept in memory, on disk and in a real Redis: right, bounded, and never the end of a decode."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mdmi_fast import MIBudget, MIThreshold, PairwiseMIEstimator, Probing, Random, UnsupportedError, decode, ops
from mdmi_fast.cache import Cache, CachedMI, CachedPolicy, DiskStore, MemoryStore, RedisStore, Store
from mdmi_fast.decoding.policies import Shuffled, Step
from mdmi_fast.models import MaskedOutput
from mdmi_fast.models.exact import JointTable


class Counted(JointTable):
    """Four dependent symbols, and how often they were asked about."""

    rows = 0

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        self.rows += len(tokens)
        return super().__call__(tokens)


def counted_model(seed: int = 0) -> Counted:
    return Counted(torch.rand(3, 3, 3, 3, generator=torch.Generator().manual_seed(seed)) ** 8)


STATES = torch.tensor([[3, 3, 3, 3], [3, 0, 3, 3], [0, 3, 3, 1], [3, 3, 3, 3]])


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """The address of a server of our own, and its process."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    folder = tmp_path_factory.mktemp("redis")
    socket = folder / "redis.sock"
    arguments = [binary, "--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", ""]
    server = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while not socket.exists():
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.01)
        yield f"unix://{socket}", server.pid
    finally:
        server.kill()
        server.wait()


@pytest.fixture(params=["memory", "disk", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "disk":
        return DiskStore(tmp_path / "cache")
    url, _ = request.getfixturevalue("redis_server")
    store = RedisStore(url, timeout=5.0)
    store._client.flushall()
    return store


def test_a_cached_decode_is_the_same_and_asks_the_model_less(store: Store) -> None:
    model = counted_model()
    plain = decode(model, STATES, MIBudget(Probing(), gamma=0.3, entropy_weight=0.0))
    policy = MIBudget(CachedMI(Probing(), model, Cache(store)), gamma=0.3, entropy_weight=0.0)
    asked = []
    for _ in range(2):
        model.rows = 0
        again = decode(model, STATES, policy)
        asked.append(model.rows)
        assert torch.equal(again.tokens, plain.tokens)
        assert torch.equal(again.passes, plain.passes)
    assert asked[1] == int(plain.passes.sum()) < asked[0]  # nothing but the passes themselves


@pytest.mark.parametrize("policy", [MIBudget(Probing(), gamma=0.3, entropy_weight=0.5), MIThreshold(Probing(), 0.1)])
def test_cached_selections_are_the_same_bit_for_bit(store: Store, policy: MIBudget | MIThreshold) -> None:
    model, cache = counted_model(), Cache(store)
    output, mask, step = model(STATES), STATES == 3, Step(0, model=model, tokens=STATES)
    stats = ops.token_stats(output.logits)
    plain = policy.select(stats, output.hidden, mask, step)
    cached = CachedPolicy(policy, model, cache)
    for _ in range(2):
        again = cached.select(stats, output.hidden, mask, step)
        assert torch.equal(again.selected, plain.selected)
        assert torch.equal(again.spent, plain.spent)
    counts = cache.counts[store.name]
    assert counts.hits == len(STATES)
    assert counts.read_bytes > 0
    assert counts.written_bytes > 0
    assert counts.seconds > 0


class Permitting(Counted):
    """Never writes token 2, unless it is asked to."""

    forbidden_tokens: tuple[int, ...] = (2,)

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        logits, hidden = super().__call__(tokens)
        return MaskedOutput(
            logits.index_fill(-1, torch.tensor(self.forbidden_tokens, dtype=torch.int64), -torch.inf), hidden
        )

    def permitting(self, tokens: Sequence[int]) -> Permitting:
        other = Permitting(self.joint)
        other.forbidden_tokens = tuple(token for token in self.forbidden_tokens if token not in tokens)
        return other


def test_what_a_decode_may_write_makes_another_entry() -> None:
    model, cache = Permitting(counted_model().joint), Cache(MemoryStore())
    policy = MIBudget(Probing(), gamma=0.3, entropy_weight=0.0)
    cached = MIBudget(CachedMI(Probing(), model, cache), gamma=0.3, entropy_weight=0.0)
    for options in ({}, {"stop_tokens": [2]}, {}, {"stop_tokens": [1]}, {"stop_tokens": [2]}):
        plain, found = (decode(model, STATES[:2], each, trace=True, **options) for each in (policy, cached))
        assert found.tokens.equal(plain.tokens)
        for one, other in zip(found.trace or [], plain.trace or [], strict=True):
            assert one.spent.equal(other.spent)


def test_every_part_of_the_key_makes_another_entry() -> None:
    seen: dict[str, int] = {}
    for name, model, gamma, states in [
        ("first", counted_model(0), 0.3, STATES[:1]),
        ("other weights", counted_model(1), 0.3, STATES[:1]),
        ("other settings", counted_model(0), 0.4, STATES[:1]),
        ("other tokens", counted_model(0), 0.3, STATES[1:2]),
        ("the first again", counted_model(0), 0.3, STATES[:1]),
    ]:
        store = seen.setdefault("store", MemoryStore())  # type: ignore[arg-type]
        before = len(store._entries)  # type: ignore[attr-defined]
        decode(model, states, CachedPolicy(MIBudget(Probing(), gamma), model, Cache(store)))  # type: ignore[arg-type]
        seen[name] = len(store._entries) - before  # type: ignore[attr-defined]
    assert seen.pop("the first again") == 0
    del seen["store"]
    assert all(new > 0 for new in seen.values()), seen


def test_a_selection_among_other_tokens_is_another_entry() -> None:
    model = counted_model()
    policy, cache = MIBudget(Probing(), gamma=0.9), Cache(MemoryStore())
    cached = CachedPolicy(policy, model, cache)
    decode(model, STATES, cached)
    plain = decode(model, STATES, policy, suppressed=[0, 1])  # every entropy is 0: all fits in one pass
    assert torch.equal(decode(model, STATES, cached, suppressed=[0, 1]).passes, plain.passes)


def test_mutual_information_from_marginals_of_other_tokens_is_another_entry() -> None:
    model, source = counted_model(), PairwiseMIEstimator(counted_model().hidden_size, marginals="entropy")
    cached, mask = CachedMI(source, model, Cache(MemoryStore())), STATES == 3
    output = model(STATES)
    fewer = output.logits.index_fill(-1, torch.tensor([0]), -torch.inf)
    for logits in (output.logits, fewer, fewer):
        step = Step(0, model=model, tokens=STATES, stats=ops.token_stats(logits))
        assert torch.equal(cached(output.hidden, mask, step), source(output.hidden, mask, step))


@pytest.mark.parametrize("attribute", ["layers", "shift"])
def test_another_hidden_state_of_the_same_weights_is_another_entry(attribute: str) -> None:
    model, other, cache = counted_model(), counted_model(), Cache(MemoryStore())
    setattr(model, attribute, (1,))
    setattr(other, attribute, (2,))
    step, mask = Step(0, model=model, tokens=STATES), STATES == 3
    CachedMI(Probing(), model, cache)(model(STATES).hidden, mask, step)
    CachedMI(Probing(), other, cache)(model(STATES).hidden, mask, step)
    assert cache.counts["memory"].misses == 2 * len(STATES)


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_entry_is_dropped_and_computed_again(store: Store, damage: bytes | None) -> None:
    model, cache = counted_model(), Cache(store)
    policy = MIBudget(CachedMI(Probing(), model, cache), gamma=0.3, entropy_weight=0.0)
    plain = decode(model, STATES[:1], policy)
    key = _any_key(store)
    entry = store.get(key)
    assert entry is not None
    store.put(key, bytes([entry[0] ^ 1]) + entry[1:] if damage is None else damage)
    again = decode(model, STATES[:1], policy)
    assert torch.equal(again.tokens, plain.tokens)
    assert cache.counts[store.name].corrupt == 1
    assert store.get(key) == entry


def test_an_entry_of_another_size_is_no_answer() -> None:
    model, store = counted_model(), MemoryStore()
    cache = Cache(store)
    policy = CachedPolicy(MIBudget(Probing(), gamma=0.3, entropy_weight=0.0), model, cache)
    plain = decode(model, STATES[:1], policy)
    cache.put(_any_key(store), b"a well-formed entry of something else")
    assert torch.equal(decode(model, STATES[:1], policy).tokens, plain.tokens)
    assert cache.counts["memory"].corrupt == 1


def _any_key(store: Store) -> str:
    if isinstance(store, MemoryStore):
        return next(iter(store._entries))
    if isinstance(store, DiskStore):
        return next(store.folder.glob("??/*")).name
    assert isinstance(store, RedisStore)
    return next(iter(store._client.keys())).decode().partition(":")[2]


def test_memory_forgets_the_least_recently_used_first() -> None:
    store = MemoryStore(max_bytes=3 * 101)
    for key in "abc":
        store.put(key, bytes(100))
    store.get("a")
    store.put("d", bytes(100))
    assert [key for key in "abcd" if store.get(key) is not None] == ["a", "c", "d"]
    store.put("e", bytes(1000))
    assert store._bytes == 0


def test_the_disk_stays_within_its_bound_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, max_bytes=16_000)
    for number in range(100):
        store.put(f"{number:02d}", bytes(500))
        store.get("00")
    held = list(tmp_path.glob("??/*"))
    assert sum(path.stat().st_size for path in held) <= 16_000
    assert {"00", "99"} <= {path.name for path in held}


def _use_folder(folder: Path) -> None:
    cache = Cache(DiskStore(folder, max_bytes=64_000))
    for turn in range(300):
        key = f"{turn % 40:02d}"
        found = cache.get(key)
        assert found is None or found == key.encode() * 500, key
        cache.put(key, key.encode() * 500)
    assert cache.counts["disk"].corrupt == 0


def test_processes_share_a_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # spawning would import torch again
    running = [context.Process(target=_use_folder, args=(tmp_path,)) for _ in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(timeout=100)
    assert [process.exitcode for process in running] == [0, 0, 0]
    assert sum(path.stat().st_size for path in tmp_path.glob("??/*")) <= 64_000 * 18 // 16


def test_a_folder_that_cannot_be_written_is_said_once_and_decoding_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    model = counted_model()
    policy = MIBudget(
        CachedMI(Probing(), model, Cache(DiskStore(tmp_path / "file" / "cache"))), gamma=0.3, entropy_weight=0.0
    )
    with pytest.warns(UserWarning, match="cannot be used, decoding goes on without it") as said:
        decode(model, STATES, policy)
    assert len(said) == 1


@pytest.mark.parametrize("url", ["redis://host:port:x", "redis://[::1", "redis://host:6379/?db=x", "http://host", ""])
def test_what_is_no_url_of_redis_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValueError, match=f"RedisStore: url must be a URL of Redis, got {re.escape(repr(url))}: "):
        RedisStore(url)


def test_an_unreachable_redis_is_a_miss_and_one_warning(tmp_path: Path) -> None:
    model, cache = counted_model(), Cache(RedisStore(f"unix://{tmp_path}/nobody.sock"))
    plain = decode(model, STATES, MIBudget(Probing(), gamma=0.3, entropy_weight=0.0))
    with pytest.warns(UserWarning, match="Redis does not answer") as said:
        again = decode(model, STATES, MIBudget(CachedMI(Probing(), model, cache), gamma=0.3, entropy_weight=0.0))
    assert len(said) == 1
    assert torch.equal(again.tokens, plain.tokens)
    assert cache.counts["redis"].hits == 0


def test_a_redis_that_hangs_costs_one_timeout_and_is_asked_again_later(redis_server: tuple[str, int]) -> None:
    url, process = redis_server
    # On a machine with other work the server may take a tenth of a second to answer.
    store = RedisStore(url, timeout=0.5, retry_after=1.0)
    cache = Cache(store)
    cache.put("key", b"answer")
    os.kill(process, signal.SIGSTOP)
    try:
        start = time.perf_counter()
        with pytest.warns(UserWarning, match="Redis does not answer"):
            assert cache.get("key") is None
        assert all(cache.get("key") is None for _ in range(100))
        assert time.perf_counter() - start < 1.0  # and not 50 s
    finally:
        os.kill(process, signal.SIGCONT)
    deadline = time.monotonic() + 10
    while cache.get("key") != b"answer":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_slow_store_hands_what_it_has_to_the_faster_one(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path)
    Cache(disk).put("key", b"answer")
    cache = Cache(MemoryStore(), disk)
    assert [cache.get("key"), cache.get("key")] == [b"answer", b"answer"]
    assert (cache.counts["disk"].hits, cache.counts["memory"].hits) == (1, 1)


def test_what_does_not_depend_on_the_context_alone_is_refused() -> None:
    model, cache = counted_model(), Cache(MemoryStore())
    with pytest.raises(TypeError, match="must be MIBudget or MIThreshold, got Random"):
        CachedPolicy(Random(2), model, cache)  # type: ignore[arg-type]
    for source in (Shuffled(Probing()), lambda hidden, mask: hidden):
        with pytest.raises(TypeError, match="cannot tell by its settings"):
            CachedMI(source, model, cache)
    with pytest.raises(ValueError, match="step must be a Step with tokens, got one without or a bare number"):
        CachedMI(Probing(), model, cache)(torch.zeros(1, 4, 1), STATES[:1] == 3, 0)


def test_the_default_folder_is_below_the_cache_folder_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MDMI_CACHE", str(tmp_path))
    assert DiskStore().folder == tmp_path / "mi"
    monkeypatch.delenv("MDMI_CACHE")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(UnsupportedError, match=r"platformdirs is not installed: pip install 'mdmi-fast\[cache\]'"):
        DiskStore()


@pytest.mark.parametrize("package", ["filelock", "redis"])
def test_a_missing_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedError, match=rf"{package} is not installed: pip install 'mdmi-fast\[cache\]'"):
        DiskStore() if package == "filelock" else RedisStore("redis://127.0.0.1")
