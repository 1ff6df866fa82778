"""What the service counts of itself, for Prometheus; guards and caches of its workers are shown beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mdmi_fast.cache import Counts
from mdmi_fast.watch import Collector

if TYPE_CHECKING:
    from mdmi_fast.service.dispatch import Dispatcher, Served
    from mdmi_fast.service.worker import Settings

STATUSES = (200, 400, 404, 405, 408, 413, 415, 422, 500, 503, 504)
"""What a request is answered with."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class WorkerCache:
    """What a worker's cache was asked for since the service started, however often the worker did."""

    def __init__(self, stores: tuple[str, ...]) -> None:
        self.counts = {store: Counts() for store in stores}

    def add(self, counts: Mapping[str, Counts]) -> None:
        for store, more in counts.items():
            held = vars(self.counts[store])
            for name, value in vars(more).items():
                held[name] += value


class Metrics:
    """Counters, and a registry that shows them.

    Args:
        dispatcher: whose queue and workers are shown.
        settings: of its workers.
    """

    def __init__(self, dispatcher: Dispatcher, settings: Settings) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = registry = CollectorRegistry()
        self.requests = Counter("mdmi_requests", "Requests by status.", ["status"], registry=registry)
        for status in STATUSES:  # of a series that begins with its first request, Prometheus sees no increase
            self.requests.labels(status)
        self.request_seconds, self.queue_seconds, self.decode_seconds = (
            Histogram(name, text, registry=registry, buckets=_SECONDS)
            for name, text in (
                ("mdmi_request_seconds", "Seconds from a request for decoding to its answer."),
                ("mdmi_queue_seconds", "Of them, seconds until a worker took it."),
                ("mdmi_decode_seconds", "Of them, seconds that the worker had it, with the rest of its batch."),
            )
        )
        self.batches = Histogram("mdmi_batch_sequences", "Sequences in a batch.", registry=registry, buckets=_SEQUENCES)
        self.tokens = Counter("mdmi_decoded_tokens", "Tokens written for answered requests.", registry=registry)
        self.passes = Counter("mdmi_decoded_passes", "Forward passes of answered requests.", registry=registry)
        self.restarts = Counter("mdmi_worker_restarts", "Workers started anew.", registry=registry)
        for name, text, value in (
            ("mdmi_requests_waiting", "Requests in the queue.", lambda: dispatcher.waiting),
            ("mdmi_requests_waiting_limit", "Requests that the queue takes.", lambda: dispatcher.max_queue),
            ("mdmi_workers", "Workers that can decode.", lambda: len(dispatcher.pids())),
            ("mdmi_workers_wanted", "Workers that there should be.", lambda: dispatcher.workers),
        ):
            Gauge(name, text, registry=registry).set_function(value)
        states = {f"worker-{n}": settings.state_file(n) for n in range(dispatcher.workers)}
        cache = settings.make_cache()
        stores = () if cache is None else tuple(cache.counts)
        self.caches = {f"worker-{n}": WorkerCache(stores) for n in range(dispatcher.workers)} if stores else {}
        registry.register(
            Collector(guards={name: path for name, path in states.items() if path is not None}, caches=self.caches)
        )

    def served(self, served: Served, tokens: int) -> None:
        """Count an answered request of which `tokens` were written."""
        self.queue_seconds.observe(served.queue_seconds)
        self.decode_seconds.observe(served.decode_seconds)
        self.tokens.inc(tokens)
        self.passes.inc(served.answer.passes)
