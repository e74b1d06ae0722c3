"""Prometheus metrics under the names that vLLM's dashboards expect, and a few of our own."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from openk3.engine.types import Stats

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
TOKENS = tuple(m * 10**e for e in range(7) for m in (1, 2, 5))

GAUGES = {
    "vllm:num_requests_running": ("Requests that advance", lambda s: s.running),
    "vllm:num_requests_waiting": ("Requests that wait", lambda s: s.waiting),
    "vllm:kv_cache_usage_perc": ("Share of the pages in use, 0 to 1",
                                 lambda s: 1 - s.free_pages / max(s.pages, 1)),
    "k3:longest_wait_seconds": ("Of those that wait, the longest", lambda s: s.wait_seconds),
    "k3:max_context_tokens": ("The longest sequence that fits", lambda s: s.max_context),
    "k3:cached_pages": ("Free pages that hold a reusable prefix", lambda s: s.cached_pages),
    "k3:host_pages": ("Pages in the host tier", lambda s: s.host_pages),
    "k3:min_cacheable_tokens": ("The shortest prefix that is reused", lambda s: s.hash_block),
}  # fmt: skip
COUNTERS = {
    "vllm:prefix_cache_queries": ("Prompt tokens looked up", lambda s: s.prompt_tokens),
    "vllm:prefix_cache_hits": ("Prompt tokens found", lambda s: s.cached_tokens),
    "vllm:num_preemptions": ("Preemptions", lambda s: s.preemptions),
    "vllm:spec_decode_num_drafts": ("Windows of drafted tokens", lambda s: s.drafts),
    "vllm:spec_decode_num_draft_tokens": ("Tokens drafted", lambda s: s.drafted_tokens),
    "vllm:spec_decode_num_accepted_tokens": ("Drafts accepted", lambda s: s.accepted_tokens),
    "k3:computed_tokens": ("Tokens through the model", lambda s: s.computed_tokens),
    "k3:engine_steps": ("Forward passes", lambda s: s.steps),
    "k3:external_puts": ("Pages put into the external store", lambda s: s.external_puts),
    "k3:external_hits": ("Pages brought back from it", lambda s: s.external_hits),
    "k3:host_hits": ("Pages brought back from the host tier", lambda s: s.host_hits),
}


class Metrics:
    """Counters of one server."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.registry = CollectorRegistry()
        self.engine = _EngineStats(model)
        self.registry.register(self.engine)
        self.prompt = self._counter("vllm:prompt_tokens", "Prompt tokens")
        self.generated = self._counter("vllm:generation_tokens", "Generated tokens")
        self.success = self._counter("vllm:request_success", "Ended requests", "finished_reason")
        self.first = self._histogram("vllm:time_to_first_token_seconds", SECONDS)
        self.between = self._histogram("vllm:inter_token_latency_seconds", PER_TOKEN)
        self.per_token = self._histogram("vllm:request_time_per_output_token_seconds", PER_TOKEN)
        self.whole = self._histogram("vllm:e2e_request_latency_seconds", SECONDS)
        self.prompt_sizes = self._histogram("vllm:request_prompt_tokens", TOKENS)
        self.answer_sizes = self._histogram("vllm:request_generation_tokens", TOKENS)
        self.answers = self._counter("k3:http_responses", "Answers", "route", "status")

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        about = name.partition(":")[2].replace("_", " ")
        return Histogram(name, about, ["model_name"], buckets=buckets, registry=self.registry)

    def started(self, num_prompt: int) -> None:
        """A request was admitted."""
        self.prompt.labels(self.model).inc(num_prompt)
        self.prompt_sizes.labels(self.model).observe(num_prompt)

    def ended(self, reason: str, num_generated: int, seconds: float, decoding_s: float) -> None:
        """A choice has ended; `decoding_s` is since its first token."""
        self.success.labels(self.model, reason).inc()
        self.answer_sizes.labels(self.model).observe(num_generated)
        self.whole.labels(self.model).observe(seconds)
        if num_generated > 1:
            self.per_token.labels(self.model).observe(decoding_s / (num_generated - 1))

    def render(self, stats: Stats) -> bytes:
        """The exposition text."""
        self.engine.stats = stats
        return generate_latest(self.registry)


class _EngineStats(Collector):
    """What the engine counts itself."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.stats: Stats | None = None

    def collect(self) -> list[Metric]:
        if self.stats is None:
            return []
        found: list[Metric] = []
        for name, (about, read) in GAUGES.items():
            gauge = GaugeMetricFamily(name, about, labels=["model_name"])
            gauge.add_metric([self.model], read(self.stats))
            found.append(gauge)
        for name, (about, read) in COUNTERS.items():
            counter = CounterMetricFamily(name, about, labels=["model_name"])
            counter.add_metric([self.model], read(self.stats))
            found.append(counter)
        return found
