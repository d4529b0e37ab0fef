"""Simulates the Kubernetes autoscaler over days of traffic, on a CPU.

    python -m bench.autoscale

Owns the models of the autoscaler and of the encoders, the traffic, and the policies that are compared. The
speed of an encoder is measured: the device's time per image in results/tower-*, the host's in
results/serve-*. Limits and saturation are the service's own, without decoding threads. All policies get the
same arrivals.

The model is a fluid in steps of STEP_S. An image waits for the event loop of its encoder, is admitted or
refused there, waits for the device, and is encoded first come first served. Repeated images are answered from
the cache and use only the event loop. Counts and latencies cover only images that have to be encoded.

Not modelled: keys that lose their cache when the ring changes, retries of refused calls, nodes without a
free GPU, crashes, and the waits for single batches between idle and saturated.

Shape suffixes: C policies, P places for pods, K image sizes, A arcs of the hash ring, S steps of the busy
window, W scrapes, M metrics, B bins of latency.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.charts import draw_beside
from bench.measurement import RESULTS, describe_environment, write_result
from encoder_service.admin.saturation import BUSY_WINDOW_S, FULL_QUEUE_S
from encoder_service.config import Settings

Array = NDArray[np.float64]

TOWER_RESULT = "tower-nvidia-h200-2026-11-23.json"
SERVE_RESULT = "serve-nvidia-h200-2026-11-24-2.json"
SEEDS = (1, 2)  # one day of traffic each
DAY_S = 86_400
FLOOD_S = 14 * 3600 + 1800
STEP_S = 0.5
# Number of arcs of the hash ring. Contents are spread over the arcs; each arc belongs to one pod.
NUM_ARCS = 512
# The HPA's own constants.
SYNC_S = 15
TOLERANCE = 0.1
SCRAPE_S = 15
# A metric is its maximum over this time, as in the chart's queries.
METRIC_WINDOW_S = 60
# Delays in addition to the start time of a pod: from the metrics through the adapter to a decision,
# scheduling, the period of the readiness probe, and the gateway's DNS refresh.
REACTION_S = 8.0
# An image that takes longer counts as late. bench/serve.py uses the same limit.
LATE_S = 0.3
# Bins of latency. LATE_S is the lower edge of bin LATE_BIN.
BINS_PER_DECADE, NUM_BINS, LATE_BIN = 40, 160, 80
FREE, DRAINING, STARTING, READY = range(4)


@dataclass(frozen=True)
class Policy:
    """The chart's values, and the start time of a pod. Targets are in thousandths, as in the chart. A
    scale-up adds at most the larger of up_percent and up_pods per up_period_s; a scale-down removes at most
    down_pods per down_period_s."""

    saturation: int = 650
    queue: int = 500
    min_replicas: int = 2
    max_replicas: int = 8
    up_percent: int = 100
    up_pods: int = 2
    up_period_s: int = 60
    up_window_s: int = 0
    down_pods: int = 1
    down_period_s: int = 120
    down_window_s: int = 600
    start_s: float = 85.0


def proposed_replicas(values: Sequence[int], num_missing: int, current: int, target: int) -> int:
    """The replicas that one pod metric requires: ``calcPlainMetricReplicas`` of Kubernetes.

    values: of the pods that have the metric, in thousandths. num_missing: number of pods that do not have it
    yet; they count as idle when scaling up, and as on target when scaling down.
    """
    if not values:
        return current
    ratio = sum(values) // len(values) / target
    num_pods, assumed = len(values) + num_missing, target if ratio < 1 else 0
    assumed_ratio = (sum(values) + assumed * num_missing) // num_pods / target
    proposed = math.ceil(assumed_ratio * num_pods)
    is_on_target = 1 - TOLERANCE <= assumed_ratio <= 1 + TOLERANCE
    is_contradictory = len({ratio < 1, assumed_ratio < 1, proposed <= current}) > 1
    return current if is_on_target or is_contradictory else proposed


class Autoscaler:
    """One HorizontalPodAutoscaler with stabilisation windows and scaling policies, as in
    ``horizontal.go``."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._proposals: list[tuple[float, int]] = []
        self._changes: list[tuple[float, int]] = []

    def sync(self, now_s: float, current: int, proposed: int) -> int:
        """The new number of replicas. proposed: the largest number that a metric requires."""
        policy = self.policy
        kept_s = now_s - max(policy.up_window_s, policy.down_window_s)
        self._proposals = [one for one in self._proposals or [(now_s, current)] if one[0] > kept_s]
        self._proposals.append((now_s, proposed))
        least = min([proposed, *since(now_s - policy.up_window_s, self._proposals)])
        most = max([proposed, *since(now_s - policy.down_window_s, self._proposals)])
        wanted = min(max(current, least), most)
        if wanted > current:
            before = current - sum(since(now_s - policy.up_period_s, self._changes))
            limit = max(math.ceil(before * (1 + policy.up_percent / 100)), before + policy.up_pods)
            wanted = min(wanted, max(current, min(limit, policy.max_replicas)))
        elif wanted < current:
            before = current - sum(since(now_s - policy.down_period_s, self._changes))
            wanted = max(wanted, min(current, max(before - policy.down_pods, policy.min_replicas)))
        if wanted != current:
            self._changes.append((now_s, wanted - current))
        return wanted


def since(from_s: float, entries: Sequence[tuple[float, int]]) -> list[int]:
    return [number for at_s, number in entries if at_s > from_s]


@dataclass(frozen=True)
class Encoder:
    """The speed and the limits of one encoder. *_K11: one value per image size."""

    patches_K11: Array
    # Device time of an image, in a full batch at the card's power limit, and alone.
    batched_s_K11: Array
    alone_s_K11: Array
    # Host time of an image, without waiting.
    host_s_K11: Array
    # Calls that the event loop handles in a second, and the share of them that the cache answers.
    calls_per_s: float
    hit_share: float
    max_calls: int
    max_queued_patches: int

    @classmethod
    def measured(cls) -> Encoder:
        """One H200 with Qwen3-VL, 448 and 1024 pixels a side, and the service's default limits."""
        tower, serve = (json.loads((RESULTS / name).read_text()) for name in (TOWER_RESULT, SERVE_RESULT))
        held, alone = (
            {one["case"]: one for one in records if (one["family"], one["variant"]) == ("qwen3_vl", "graph")}
            for records in (tower["power"]["records"], tower["records"])
        )
        records = {one["load"]: one for one in serve["records"] if one["mix"] == "448-heavy"}
        # In this mix nine of ten images have the smaller size, and the slowest hundredth has the larger size.
        light, stages = records[0.1], records[0.1]["stages"]
        host_ms = [
            light["overhead_ms"]["p50"] + stages["decode_ms"][part] + stages["resize_ms"][part]
            for part in ("p50", "p99")
        ]
        batched_ms = [held["32x448"]["sustained_ms"] / 32, held["8x1024"]["sustained_ms"] / 8]
        alone_ms = [alone["1x448"]["median_ms"], alone["1x1024"]["median_ms"]]
        limits = {name: field.default for name, field in Settings.model_fields.items()}
        seconds = (np.reshape(one, (-1, 1, 1)) / 1e3 for one in (batched_ms, alone_ms, host_ms))
        batched_s, alone_s, host_s = seconds
        return cls(
            np.reshape([784.0, 4096.0], (-1, 1, 1)),
            batched_s,
            alone_s,
            host_s,
            calls_per_s=records[1.1]["images_per_s"],
            hit_share=serve["settings"]["repeat_share"],
            max_calls=limits["max_calls"],
            max_queued_patches=limits["max_queued_patches"],
        )


class Fleet:
    """The encoders of several policies, simulated side by side: pods, queues, and the outcome of images."""

    def __init__(self, policies: Sequence[Policy], encoder: Encoder, seed: int) -> None:
        self.policies, self.encoder = policies, encoder
        # Terminating pods keep their place and their GPU until their queues are empty.
        num_places = max(policy.max_replicas for policy in policies) + 2
        pods = (len(policies), num_places)
        fewest_C = np.array([policy.min_replicas for policy in policies])
        self.state_CP = np.where(np.arange(num_places) < fewest_C[:, None], READY, FREE)
        self._scores_PA = np.random.default_rng(seed).random((num_places, NUM_ARCS))
        self._route()
        # Images that wait for the event loop, and for the device.
        self.calls_KCP, self.queue_KCP = np.zeros((2, len(encoder.patches_K11), *pods))
        self._created_s_CP, self.busy_CP, self.loop_busy_CP = np.zeros((3, *pods))
        # Of the device, and of the event loop.
        self._busy_S2CP = np.zeros((round(BUSY_WINDOW_S / STEP_S), 2, *pods))
        self._scraped_WMCP = np.full((METRIC_WINDOW_S // SCRAPE_S, 2, *pods), -1.0)
        self.gpu_s_C, self.refused_C = np.zeros((2, len(policies)))
        # Latencies of the admitted images.
        self.histogram_CB = np.zeros((len(policies), NUM_BINS))

    def num_replicas(self, policy: int) -> int:
        """The number of starting and ready pods."""
        return int((self.state_CP[policy] >= STARTING).sum())

    def resize(self, policy: int, replicas: int, now_s: float) -> None:
        """Starts pods, or terminates the newest ones."""
        state_P, created_s_P = self.state_CP[policy], self._created_s_CP[policy]
        change = replicas - self.num_replicas(policy)
        if change > 0:
            places = np.flatnonzero(state_P == FREE)[:change]
            state_P[places], created_s_P[places] = STARTING, now_s
        else:
            wanted = np.flatnonzero(state_P >= STARTING)
            places = wanted[np.argsort(-created_s_P[wanted], kind="stable")][:-change]
            state_P[places] = np.where(state_P[places] == READY, DRAINING, FREE)
        self._route()

    def pass_second(self, now_s: float) -> None:
        """Advances the states of pods by one second, and adds the GPU time."""
        start_s_C = np.array([policy.start_s for policy in self.policies]) + REACTION_S
        has_started_CP = now_s - self._created_s_CP >= start_s_C[:, None]
        became_CP = (self.state_CP == STARTING) & has_started_CP
        is_empty_CP = (self.calls_KCP + self.queue_KCP).sum(0) < 1e-9
        self.state_CP[(self.state_CP == DRAINING) & is_empty_CP] = FREE
        self.gpu_s_C += (self.state_CP != FREE).sum(1)
        if became_CP.any():
            self.state_CP[became_CP] = READY
            self._scraped_WMCP[:, :, became_CP] = -1
            self._route()

    def _route(self) -> None:
        """Assigns every arc of the ring to one ready pod. When a pod comes or goes, few arcs change owner."""
        owner_CA = np.where((self.state_CP == READY)[:, :, None], self._scores_PA, -1.0).argmax(1)
        places_P1 = np.arange(self.state_CP.shape[1])[:, None]
        self._owned_CPA = (owner_CA[:, None, :] == places_P1).astype(np.float32)

    def step(self, arrived_AK: Array) -> None:
        """Simulates STEP_S seconds with these arrivals."""
        encoder = self.encoder
        # The event loop, after the limit on calls in progress. It also handles cache hits.
        miss_share = 1 - encoder.hit_share
        misses_per_s = encoder.calls_per_s * miss_share
        routed = self._owned_CPA.reshape(-1, NUM_ARCS) @ arrived_AK.astype(np.float32)
        offered_KCP = self.calls_KCP + routed.T.reshape(self.calls_KCP.shape)
        calls_KCP = up_to((encoder.max_calls - self.queue_KCP.sum(0)) * miss_share, offered_KCP)
        passed_KCP = up_to(misses_per_s * STEP_S, calls_KCP)
        self.calls_KCP = calls_KCP - passed_KCP
        # Admission by patches.
        room_CP = encoder.max_queued_patches - (self.queue_KCP * encoder.patches_K11).sum(0)
        admitted_KCP = up_to(room_CP, passed_KCP, encoder.patches_K11)
        self.refused_C += (offered_KCP - calls_KCP + passed_KCP - admitted_KCP).sum((0, 2))
        # The device. On an idle device batches are small, so an image costs more.
        extra_s_K11 = encoder.alone_s_K11 - encoder.batched_s_K11
        image_s_KCP = encoder.batched_s_K11 + extra_s_K11 * (1 - self.busy_CP)
        before_s_CP, added_s_CP = ((one * image_s_KCP).sum(0) for one in (self.queue_KCP, admitted_KCP))
        self.queue_KCP = self.queue_KCP + admitted_KCP
        self.queue_KCP -= up_to(STEP_S, self.queue_KCP, image_s_KCP)
        self._busy_S2CP = np.roll(self._busy_S2CP, 1, 0)
        self._busy_S2CP[0, 0] = np.minimum(1.0, (before_s_CP + added_s_CP) / STEP_S)
        self._busy_S2CP[0, 1] = passed_KCP.sum(0) / (misses_per_s * STEP_S)
        self.busy_CP, self.loop_busy_CP = self._busy_S2CP.mean(0)
        wait_s_CP = self.calls_KCP.sum(0) / misses_per_s + before_s_CP
        latency_s_KCP = wait_s_CP + encoder.host_s_K11 + encoder.alone_s_K11
        bins_KCP = np.floor(LATE_BIN + BINS_PER_DECADE * np.log10(latency_s_KCP / LATE_S)).astype(np.int64)
        bins_KCP = bins_KCP.clip(0, NUM_BINS - 1) + NUM_BINS * np.arange(len(self.policies))[:, None]
        counts = np.bincount(bins_KCP.ravel(), admitted_KCP.ravel(), self.histogram_CB.size)
        self.histogram_CB += counts.reshape(-1, NUM_BINS)

    def gauges_MCP(self) -> Array:
        """ve_saturation_ratio (as in ``encoder_service.admin.saturation``) and ve_queued_device_seconds."""
        filled_CP = (self.queue_KCP * self.encoder.patches_K11).sum(0) / self.encoder.max_queued_patches
        queued_s_CP = (self.queue_KCP * self.encoder.batched_s_K11).sum(0)
        shares = [self.busy_CP, self.loop_busy_CP, queued_s_CP / FULL_QUEUE_S, filled_CP]
        return np.stack([np.max(shares, axis=0).clip(0.0, 1.0), queued_s_CP])

    def scrape(self) -> None:
        self._scraped_WMCP = np.roll(self._scraped_WMCP, 1, 0)
        self._scraped_WMCP[0] = np.where(self.state_CP == READY, (self.gauges_MCP() * 1e3).round(), -1)

    def proposed(self, policy: int) -> int:
        """The largest number of replicas that a metric requires, from the ready pods that were scraped."""
        current, own = self.num_replicas(policy), self.policies[policy]
        found_MP = self._scraped_WMCP[:, :, policy, self.state_CP[policy] == READY].max(0)
        proposals = []
        for found_P, target in zip(found_MP, (own.saturation, own.queue), strict=True):
            values = [int(value) for value in found_P if value >= 0]
            proposals.append(proposed_replicas(values, current - len(values), current, target))
        return max(proposals)


def up_to(limit: Array | float, amounts_KCP: Array, costs: Array | float = 1.0) -> Array:
    """The part of the amounts whose cost fits the limit. Takes the same share of each size."""
    total_CP = (amounts_KCP * costs).sum(0)
    return amounts_KCP * (limit / np.maximum(total_CP, 1e-12)).clip(0.0, 1.0)


def day_of_traffic(encoder: Encoder, seed: int, large_share: float = 0.5) -> Array:
    """Images to encode per second, [DAY_S, K]: a day's curve with its peak at 15:00, sixteen bursts, and a
    flood of the larger size by one tenant from 14:30 to 14:45. large_share: the share of the larger size in
    all other images. In device work, the curve is 0.6 to 3.2 GPUs, bursts add up to 0.8 of it, and the flood
    adds 2.5 GPUs.
    """
    generator = np.random.default_rng(seed)
    curve = 0.6 + 2.6 * (0.5 + 0.5 * np.cos((np.arange(DAY_S) / DAY_S - 15 / 24) * 2 * np.pi)) ** 1.5
    bursts = np.zeros(DAY_S)
    for _ in range(16):
        start_s, ramp_s = generator.uniform(0, DAY_S), generator.uniform(5, 60)
        hold_s, height = generator.uniform(90, 900), generator.uniform(0.3, 0.8)
        bursts = np.maximum(bursts, height * pulse(start_s, ramp_s, hold_s))
    batched_s_K, shares_K = encoder.batched_s_K11.ravel(), np.array([1 - large_share, large_share])
    rates = np.outer(curve * (1 + bursts), shares_K / (shares_K @ batched_s_K))
    rates[:, -1] += 2.5 * pulse(FLOOD_S, 5.0, 900.0) / batched_s_K[-1]
    return rates


def pulse(start_s: float, ramp_s: float, hold_s: float) -> Array:
    """The value of a pulse in each second of a day: rises from 0 to 1 in ramp_s, stays 1 for hold_s, and
    falls in 2 * ramp_s."""
    since_s = np.arange(DAY_S) - start_s
    rise, fall = since_s / ramp_s, (ramp_s + hold_s - since_s) / (2 * ramp_s) + 1
    return np.minimum(rise, fall).clip(0.0, 1.0)


def simulate(
    policies: Sequence[Policy], encoder: Encoder, rates: Array, seed: int = 0
) -> tuple[Fleet, dict[str, Array]]:
    """The fleets at the end of the traffic, and a series of values per minute, [minutes, C]."""
    generator = np.random.default_rng([seed, 1])
    fleet = Fleet(policies, encoder, seed)
    autoscalers = [Autoscaler(policy) for policy in policies]
    ready, refused, histograms = [], [], []
    for now_s, rate_K in enumerate(rates):
        fleet.pass_second(now_s)
        for _ in range(round(1 / STEP_S)):
            arrived_AK = generator.poisson(rate_K * STEP_S / NUM_ARCS, (NUM_ARCS, len(rate_K)))
            fleet.step(arrived_AK.astype(np.float64))
        if now_s % SCRAPE_S == SCRAPE_S // 2:
            fleet.scrape()
        if now_s % SYNC_S == SYNC_S - 1:
            for one, autoscaler in enumerate(autoscalers):
                current = fleet.num_replicas(one)
                wanted = autoscaler.sync(now_s, current, fleet.proposed(one))
                if wanted != current:
                    fleet.resize(one, wanted, now_s)
        if now_s % 60 == 59:
            ready.append((fleet.state_CP == READY).sum(1))
            refused.append(fleet.refused_C.copy())
            histograms.append(fleet.histogram_CB.copy())
    by_minute, refused_by_minute = (np.diff(one, axis=0, prepend=0.0) for one in (histograms, refused))
    return fleet, {
        "replicas": np.array(ready),
        "p99_ms": percentile_ms(by_minute, 0.99),
        "refused_percent": 100 * refused_by_minute / (refused_by_minute + by_minute.sum(-1)),
    }


def percentile_ms(histograms_B: Array, part: float) -> Array:
    """The upper edge of the percentile's bin, which is at most 6 % too high."""
    cumulated_B = histograms_B.cumsum(-1)
    bins = (cumulated_B < part * cumulated_B[..., -1:]).sum(-1)
    return np.asarray(LATE_S * 1e3 * 10 ** ((bins + 1 - LATE_BIN) / BINS_PER_DECADE))


def records_of(traffic: str, fleet: Fleet) -> list[dict[str, Any]]:
    """One record per policy."""
    arrived_C = fleet.refused_C + fleet.histogram_CB.sum(1)
    figures = {
        "gpu_hours_a_day": fleet.gpu_s_C / 3600 / len(SEEDS),
        "refused_percent": 100 * fleet.refused_C / arrived_C,
        "late_percent": 100 * fleet.histogram_CB[:, LATE_BIN:].sum(1) / arrived_C,
        "p99_ms": percentile_ms(fleet.histogram_CB, 0.99),
    }
    return [
        {"traffic": traffic, "policy": asdict(policy)}
        | {name: round(float(values[index]), 4) for name, values in figures.items()}
        for index, policy in enumerate(fleet.policies)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    out: Path = parser.parse_args().out
    encoder, chart = Encoder.measured(), Policy()
    starts = [replace(chart, start_s=start_s) for start_s in (85.0, 48.0, 25.0)]
    policies = {
        "mixed": [
            *(replace(one, saturation=target) for one in starts for target in (500, 600, 650, 700, 750, 850)),
            *(replace(chart, queue=one) for one in (250, 1000)),
            *(replace(chart, min_replicas=one) for one in (1, 3)),
            replace(chart, up_percent=50, up_pods=1),
            replace(chart, up_window_s=30),
            *(replace(chart, down_period_s=one) for one in (60, 300)),
            *(replace(chart, down_window_s=one) for one in (300, 1200)),
        ],
        # This work needs more pods: the event loop is its limit, not the device.
        "448 px": [replace(chart, saturation=target, max_replicas=16) for target in (500, 600, 650)],
    }
    mixed, small = (
        np.concatenate([day_of_traffic(encoder, seed, large_share) for seed in SEEDS])
        for large_share in (0.5, 0.0)
    )
    with ProcessPoolExecutor(2) as pool:
        runs = list(pool.map(simulate, policies.values(), repeat(encoder), (mixed, small)))
    work_gpus = (mixed[:DAY_S] @ encoder.batched_s_K11.ravel()).reshape(-1, 60).mean(1)
    result = describe_environment(torch.device("cpu"), None) | {
        "simulation": "figures of a model: nothing was served, and no GPU was used",
        "measured_in": [TOWER_RESULT, SERVE_RESULT],
        "settings": {"seeds": SEEDS, "late_ms": LATE_S * 1e3, "flood_min": FLOOD_S // 60},
        "chart": asdict(chart),
        # Per minute of the first day.
        "work_gpus": np.round(work_gpus, 2).tolist(),
        "starts": {
            f"{one.start_s:g}": {
                name: values[: DAY_S // 60, index].round(1).tolist() for name, values in runs[0][1].items()
            }
            for index, one in enumerate(policies["mixed"])
            if one in starts
        },
        "records": [
            one
            for traffic, (fleet, _) in zip(policies, runs, strict=True)
            for one in records_of(traffic, fleet)
        ],
    }
    path = write_result(out, "autoscale", result)
    print(path, draw_beside("autoscale", result, path), sep="\n")


if __name__ == "__main__":
    main()
