"""Prometheus metrics of the sandboxes of a home."""

from collections import Counter as Counts

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from openk3.sandbox import recovery
from openk3.sandbox.store.home import Home

BUCKETS = (0.01, 0.03, 0.1, 0.2, 0.3, 0.45, 0.65, 1.0, 2.0, 5.0, 15.0, 60.0)


class Metrics:
    """Counters of this server, gauges of the home as it is when asked."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.registry = CollectorRegistry()
        self.boxes = Gauge("k3_sandboxes", "Sandboxes", ["state"], registry=self.registry)
        self.snapshots = Gauge("k3_sandbox_snapshots", "Snapshots", registry=self.registry)
        labels = ["operation", "status"]
        self.requests = Counter(
            "k3_sandbox_requests", "Requests answered", labels, registry=self.registry
        )
        self.seconds = Histogram(
            "k3_sandbox_request_seconds",
            "Seconds until the answer began",
            ["operation"],
            buckets=BUCKETS,
            registry=self.registry,
        )

    def observe(self, operation: str, status: int, seconds: float) -> None:
        self.requests.labels(operation, str(status)).inc()
        self.seconds.labels(operation).observe(seconds)

    def render(self) -> bytes:
        """The exposition text."""
        states = Counts(record.state for record in recovery.records(self.home))
        for state in ("running", "paused", "lost"):
            self.boxes.labels(state).set(states[state])
        self.snapshots.set(len(list(self.home.snapshots.glob("*.json"))))
        return generate_latest(self.registry)
