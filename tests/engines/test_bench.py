"""The bench that compares a vLLM with its own tower and one with an encoder."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest

from bench.epd_images import files_of
from bench.epd_rates import MIXES, Requests
from bench.epd_servers import NO_SPLIT
from tests.engines.epd import check_epd, check_rates, run_epd
from tests.engines.stack import Stack

pytestmark = pytest.mark.timeout(600)


@pytest.mark.extended
def test_epd_compares_both_servers(tmp_path: Path) -> None:
    result = check_epd(tmp_path, 2)
    assert result["groups"][0]["peers"] == ["tower", "beside"]
    tower, beside = result["summary"]
    assert tower["cpu_ms"]["API server"][0] > 0
    assert tower["cpu_ms"]["EngineCore"][0] > 0
    assert beside["encoder"]["images_per_s"][0] == pytest.approx(4 * beside["requests_per_s"][0], rel=0.1)


@pytest.mark.extended
def test_epd_says_why_a_peer_cannot_run_and_measures_the_others(tmp_path: Path) -> None:
    """Without NVIDIA's MPS and vLLM's own split on a CPU."""
    result = check_epd(tmp_path, 1, "--peers", "mps", "split", "tower")
    assert result["left_out"] == {"mps": "MPS needs a GPU", "split": NO_SPLIT}


@pytest.mark.extended
def test_one_encoder_serves_the_images_of_two_further_servers(tmp_path: Path) -> None:
    """By a load generator, while a third is measured; ranks of a tensor-parallel server are one peer."""
    peers = ("--gpus", "2", "--peers", "apart, for three", "tp")
    result = run_epd(tmp_path, "--mixes", "chat=2", "--seconds", "4", *peers)
    measured, tp = result["records"]
    assert measured["others"]["images"] > 0
    assert measured["others"]["failed_requests"] == 0
    own, others = len(measured["requests"]), measured["others"]["images"]
    encoded = round(measured["encoder"]["images_per_s"] * measured["seconds"])
    # The encoder's figures end with the measured requests, others may still be on their way.
    assert own + others / 2 < encoded <= own + others
    assert tp["num_failed"] == 0


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True, scope="session")
def test_epd_compares_a_tower_with_a_running_server(family: str, stack: Stack, tmp_path: Path) -> None:
    """Which saves the start of a second vLLM and of an encoder."""
    check_epd(tmp_path, 2, "--running", "beside", stack.vllm.url)


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True, scope="session")
def test_epd_finds_the_goodput_of_a_running_server(family: str, stack: Stack, tmp_path: Path) -> None:
    """For both names, so that no further server starts."""
    running = [("--running", name, stack.vllm.url) for name in ("tower", "beside")]
    check_rates(tmp_path, *(word for words in running for word in words))


def test_requests_arrive_at_random_times_at_the_rate() -> None:
    sent = Requests(MIXES["tiny"]["chat as text"], "seed").arrivals(20, 50, "1")
    gaps = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(sent)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.1)
    # Of a Poisson process.
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.15)
    assert sent[-1].at_s < 50


def test_peers_get_the_same_kinds_at_the_same_times_and_never_the_same_file() -> None:
    """Peers share encoders and servers: files of another peer would come from their caches."""
    requests = Requests(MIXES["tiny"]["chat"], "seed")
    one, other, again = (
        requests.arrivals(8, 4, part, peer)
        for part, peer in (("1", "apart"), ("1", "apart, for three"), ("2", "apart"))
    )
    assert [sent.at_s for sent in one] == [sent.at_s for sent in other]
    sizes = [[len(body) for body in sent.bodies] for sent in (*one, *other)]
    assert all(abs(a[0] - b[0]) < 40 for a, b in zip(sizes[: len(one)], sizes[len(one) :], strict=True))
    assert [sent.at_s for sent in one] != [sent.at_s for sent in again]
    files = [file for sent in (*one, *other, *again) for file in files_of(sent)]
    assert len(set(files)) == len(files)
