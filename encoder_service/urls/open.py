"""The fetcher that the settings describe, or none."""

from __future__ import annotations

import ipaddress
import ssl

from encoder_service.config import Settings
from encoder_service.errors import ConfigurationError
from encoder_service.urls.addresses import AddressRules
from encoder_service.urls.allow import AllowList
from encoder_service.urls.fetch import FetchBounds, UrlFetcher


def open_urls(settings: Settings) -> UrlFetcher | None:
    """None without an allow-list: URL items are refused then. Raises ConfigurationError."""
    if not settings.url_allow:
        return None
    tls = None
    if settings.url_ca is not None:
        try:
            tls = ssl.create_default_context(cafile=settings.url_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(f"url_ca {settings.url_ca}: {error}") from None
    return UrlFetcher(
        AllowList(settings.url_allow),
        FetchBounds(
            settings.max_encoded_bytes,
            settings.url_timeout_s,
            settings.url_max_redirects,
            settings.url_max_fetches,
        ),
        rules=AddressRules(map(ipaddress.ip_network, settings.url_networks)),
        tls=tls,
    )
