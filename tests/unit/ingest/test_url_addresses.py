"""Addresses: what is refused, and that connections go to what was checked and nowhere else."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

import httpcore
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_service.errors import UrlRefused, UrlUnreachable
from encoder_service.ingest.urls import CheckedBackend, check_address

REFUSED = [
    "127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1", "172.31.255.255",
    "192.168.1.1", "169.254.169.254", "169.254.0.1", "100.64.0.1", "100.100.100.200", "168.63.129.16",
    "192.0.0.192", "192.0.2.1", "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1", "239.255.255.255",
    "240.0.0.1", "255.255.255.255",
    "::", "::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::7f00:1", "64:ff9b::7f00:1", "64:ff9b::808:808",
    "64:ff9b:1::1", "fe80::1", "fe80::1%eth0", "2606:4700::1%eth0", "fec0::1", "fc00::1", "fd00:ec2::254",
    "fd20:ce::254", "ff02::1", "2001::1", "2001:db8::1", "2002:7f00:1::", "3fff::1", "100::1", "4000::1",
    "no address", "", "1.2.3", "0x7f.1", "2130706433",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "1.1.1.1", "151.101.1.69", "2606:4700:4700::1111", "2a00:1450:4001::1"]


@pytest.mark.parametrize("text", REFUSED)
def test_addresses_that_are_not_public_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UrlRefused) as caught:
        check_address(text, ())
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_pass(text: str) -> None:
    assert check_address(text, ()) == text


@given(st.ip_addresses(v=4) | st.ip_addresses(v=6))
def test_nothing_passes_that_the_standard_library_calls_not_global(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    try:
        check_address(str(address), ())
    except UrlRefused:
        return
    assert address.is_global
    assert not any((address.is_multicast, address.is_reserved, address.is_link_local, address.is_loopback))


def test_a_network_can_be_allowed_but_never_where_credentials_are_given_out() -> None:
    allowed = [ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("0.0.0.0/0")]
    assert check_address("10.1.2.3", allowed) == "10.1.2.3"
    for text in ("169.254.169.254", "168.63.129.16", "100.100.100.200", "::ffff:10.1.2.3"):
        with pytest.raises(UrlRefused):
            check_address(text, allowed)


class Recorder(httpcore.AsyncNetworkBackend):
    """Connects nowhere; knows where to. failing: addresses that nobody answers at."""

    def __init__(self, failing: Iterable[str] = ()) -> None:
        self.connected: list[str] = []
        self._failing = set(failing)

    async def connect_tcp(
        self, host: str, port: int, *rest: object, **more: object
    ) -> httpcore.AsyncNetworkStream:
        self.connected.append(host)
        if host in self._failing:
            raise httpcore.ConnectError("refused")
        return httpcore.AsyncMockStream([])


def backend(
    *answers: Sequence[str], failing: Iterable[str] = ()
) -> tuple[CheckedBackend, Recorder, list[str]]:
    """A backend whose names resolve to each of the answers in turn."""
    left, asked, recorder = list(answers), list[str](), Recorder(failing)

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return left.pop(0)

    return CheckedBackend((), resolve, recorder), recorder, asked


pytestmark = pytest.mark.anyio


async def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    """A name that leads inside at the second look is looked at once."""
    checked, recorder, asked = backend(["8.8.8.8"], ["127.0.0.1"])
    await checked.connect_tcp("images.test", 443)
    assert asked == ["images.test"]
    assert recorder.connected == ["8.8.8.8"]
    with pytest.raises(UrlRefused):
        await checked.connect_tcp("images.test", 443)
    assert recorder.connected == ["8.8.8.8"]


async def test_one_bad_address_among_good_ones_refuses_the_name() -> None:
    for answer in (["8.8.8.8", "10.0.0.1"], ["10.0.0.1", "8.8.8.8"], ["::1", "8.8.8.8"]):
        checked, recorder, _ = backend(answer)
        with pytest.raises(UrlRefused):
            await checked.connect_tcp("images.test", 443)
        assert recorder.connected == []


async def test_addresses_are_tried_in_turn() -> None:
    checked, recorder, _ = backend(["8.8.8.8", "1.1.1.1"], failing=["8.8.8.8"])
    await checked.connect_tcp("images.test", 443)
    assert recorder.connected == ["8.8.8.8", "1.1.1.1"]
    checked, recorder, _ = backend(["8.8.8.8"], failing=["8.8.8.8"])
    with pytest.raises(httpcore.ConnectError):
        await checked.connect_tcp("images.test", 443)


async def test_names_without_addresses_and_unix_sockets() -> None:
    checked, _, _ = backend([])
    with pytest.raises(UrlUnreachable):
        await checked.connect_tcp("images.test", 443)
    with pytest.raises(UrlRefused):
        await checked.connect_unix_socket("/run/docker.sock")
