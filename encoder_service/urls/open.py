"""The fetcher that the settings describe, or none, and what operators see of it.

Owns names and texts of its metrics; the figures are counted where things happen.
"""

from __future__ import annotations

import ipaddress
import ssl

from prometheus_client import Histogram

from encoder_service.config import Settings
from encoder_service.errors import ConfigurationError
from encoder_service.metrics import Metrics
from encoder_service.urls.addresses import AddressRules
from encoder_service.urls.allow import AllowList
from encoder_service.urls.fetch import FetchBounds, UrlFetcher

FETCH_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


def open_urls(settings: Settings, metrics: Metrics) -> UrlFetcher | None:
    """None without an allow-list: URL items are refused then. Raises ConfigurationError."""
    if not settings.url_allow:
        return None
    tls = None
    if settings.url_ca is not None:
        try:
            tls = ssl.create_default_context(cafile=settings.url_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(f"url_ca {settings.url_ca}: {error}") from None
    seconds = Histogram(
        "ve_url_fetch_seconds",
        "Seconds of fetching one URL item, waiting for its turn included, by how it ended.",
        ["outcome"],
        buckets=FETCH_BUCKETS_S,
        registry=metrics.registry,
    )
    fetcher = UrlFetcher(
        AllowList(settings.url_allow),
        FetchBounds(
            settings.max_encoded_bytes,
            settings.url_timeout_s,
            settings.url_max_redirects,
            settings.url_max_fetches,
        ),
        rules=AddressRules(map(ipaddress.ip_network, settings.url_networks)),
        tls=tls,
        fetch_ended=lambda elapsed_s, outcome: seconds.labels(outcome).observe(elapsed_s),
    )
    export_urls(metrics, fetcher)
    return fetcher


def export_urls(metrics: Metrics, fetcher: UrlFetcher) -> None:
    """Registers everything but the seconds; once per registry."""
    counters = fetcher.counters
    metrics.counter_view_by(
        "ve_url_fetches",
        "URL items by how fetching them ended: OK, or the failure's reason.",
        "outcome",
        lambda: counters.ended,
    )
    metrics.counter_view(
        "ve_url_fetched_bytes", "Bytes of the bodies that were taken.", lambda: counters.num_bytes
    )
    metrics.gauge_by(
        "ve_url_items",
        "URL items that are being fetched, and that wait for a turn.",
        "state",
        {"fetching": lambda: fetcher.num_fetching, "waiting": lambda: fetcher.num_waiting},
    )
