"""The plugin in vLLM's API server: which engine it takes requests for, and the first call for each file.

Owns the hook by which vLLM's configuration reaches the plugin, the checks that stop a start, the ``Prefetch``
by which an encode starts while vLLM still tokenises, and the question whether the encoder answers, for
``metrics``. An image waits for nothing here. A clip's request waits for the encoder's answer, which says
which frames the clip has.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, ClassVar

from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.shared.agreement import Agreement
from lm_adapter.engines.shared.encoder_thread import EncoderThread
from lm_adapter.engines.shared.error_text import message_of, status_of
from lm_adapter.engines.shared.first_contact import ANSWER_S, start_of
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.vllm.api_server.clips import ClipFile
from lm_adapter.engines.vllm.api_server.contact import check_early
from lm_adapter.engines.vllm.api_server.metrics import EncoderMetrics
from lm_adapter.engines.vllm.failures import vllm_error
from lm_adapter.engines.vllm.settings import Settings, given_sizes, has_connector, mark
from lm_adapter.engines.vllm.vllm_types import ModelConfig, VllmConfig
from lm_adapter.errors import EncoderError, InvalidRequest, ItemFailed
from lm_adapter.items import ImageItem

logger = logging.getLogger("vllm.vision_encoder")

MEDIA_CONNECTOR = "vision_encoder"
MAX_PREFETCHES = 256
"""Limit on concurrent prefetches. More are skipped; the scheduler encodes those images later."""

VLLMS_OWN = {"do_normalize", "do_rescale"}
"""Options that vLLM sets for towers that normalise by themselves."""
WITHOUT_CLIPS = {
    *(f"Kimi{name}ForConditionalGeneration" for name in ("K25", "VL", "K3")),
    "Qwen3OmniMoeForConditionalGeneration",
    "BailingMoeV3VLForConditionalGeneration",
}
"""vLLM looks for ``split_video_chunks`` in the processors of Kimi-K2.5 and Qwen3-Omni, which none of them
has; the others take no clips."""
CLIP_PIXELS = {"Glm5NextForConditionalGeneration": 30_000 * 2 * 28**2}
"""vLLM's own limit of a clip, where it is below the checkpoint's: 30,000 tokens."""


WATCH_S = 5.0
"""How often the encoder is asked for ``metrics``, also while no request comes."""
MAX_ANNOUNCED = 1 << 16
"""Number of images that are remembered as announced."""


class Announced:
    """The digests of the images that the encoder has accepted last. Such an image is not sent again: vLLM's
    own cache or the encoder most likely has its rows. Where neither does, the scheduler sends the file.
    Thread-safe."""

    def __init__(self, max_images: int = MAX_ANNOUNCED) -> None:
        self._max_images = max_images
        self._digests: dict[bytes, None] = {}
        self._lock = threading.Lock()

    def add(self, digest: bytes) -> None:
        with self._lock:
            self._digests.pop(digest, None)
            self._digests[digest] = None
            if len(self._digests) > self._max_images:
                del self._digests[next(iter(self._digests))]

    def has(self, digest: bytes) -> bool:
        """The image counts as the latest."""
        with self._lock:
            if digest not in self._digests:
                return False
            self._digests[digest] = self._digests.pop(digest)
            return True


class EncoderThreads:
    """One thread for each encoder that this process sends files to: gRPC does not work on two event loops of
    one process. Thread-safe."""

    def __init__(self) -> None:
        self._threads: dict[Agreement, EncoderThread] = {}
        self._lock = threading.Lock()

    def get(self, agreement: Agreement) -> EncoderThread:
        """Not called before vLLM makes its metrics or the first file arrives: by then vLLM has forked all its
        processes."""
        with self._lock:
            if agreement not in self._threads:
                self._threads[agreement] = EncoderThread(agreement, name="prefetch")
            return self._threads[agreement]


class ApiServer:
    """The engine that this process takes requests for. Several threads of vLLM read media at once.

    clip_sizes: options of clips, by their names at the encoder; None where vLLM takes no clips."""

    current: ClassVar[ApiServer | None] = None
    """Made by ``configure``. None before, and where no engine had this connector."""
    _threads: ClassVar[EncoderThreads] = EncoderThreads()

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Raises InvalidRequest for settings and models that the connector refuses."""
        model_config, transfer = vllm_config.model_config, vllm_config.ec_transfer_config
        assert transfer is not None, "``has_connector`` holds"
        options = model_config.get_multimodal_config().mm_processor_kwargs or {}
        settings = Settings.read(transfer.ec_connector_extra_config)
        self.agreement = Agreement(settings, Geometry.of_model(model_config))
        self._max_tokens = model_config.max_model_len
        # The KV of an image's tokens comes from another instance, as a rule.
        only_consumes_kv = getattr(vllm_config.kv_transfer_config, "kv_role", None) == "kv_consumer"
        # With other options each image has another key, which only the processor knows.
        has_default_keys = not set(options) - VLLMS_OWN
        self._announces_images = has_default_keys and settings.announces and not only_consumes_kv
        self._announced = Announced()
        self._metrics: EncoderMetrics | None = None
        takes_clips = model_config.architecture not in WITHOUT_CLIPS
        cap = CLIP_PIXELS.get(model_config.architecture)
        sizes = {} if cap is None else {"max_pixels": cap}
        self.clip_sizes: Mapping[str, int] | None = sizes | _clip_sizes(options) if takes_clips else None

    def report_to(self, metrics: EncoderMetrics) -> None:
        """Gives these metrics, in place of earlier ones, what this process knows. Can be repeated."""
        is_first, self._metrics = self._metrics is None, metrics
        if is_first:
            self._threads.get(self.agreement).watch(WATCH_S, ANSWER_S, self._asked)

    def _asked(self, error: EncoderError | None) -> None:
        assert self._metrics is not None, "``report_to`` was called"
        self._metrics.asked(error)

    def prefetch(self, image: ImageFile) -> bool:
        """Sends the file, unless it was sent before, and returns whether the encoder gets it or got it. Fire
        and forget: the scheduler's own call reports failures."""
        if not self._announces_images:
            return False
        if self._announced.has(image.digest):
            return True
        thread = self._threads.get(self.agreement)
        thread.completed.clear()
        if thread.num_pending >= MAX_PREFETCHES:
            return False
        item = ImageItem(image.data, digest=image.digest)

        async def call(client: AsyncVisionEncoderClient, left_s: float) -> None:
            with contextlib.suppress(Exception):
                (status,) = await client.prefetch([item], timeout_s=left_s)
                if not isinstance(status, ItemFailed):
                    self._announced.add(image.digest)

        thread.submit(object(), call)
        return True

    def announce(self, clip: ClipFile) -> Future[ClipFile | EncoderError]:
        """Gets the clip with its grid and times, or an EncoderError, within the time limit of an item."""
        geometry = self.agreement.geometry
        call = functools.partial(clip.announced, geometry=geometry, max_tokens=self._max_tokens)
        return self._threads.get(self.agreement).submit_future(call)

    def announced(self, outcome: ClipFile | EncoderError) -> ClipFile:
        """The clip that ``announce`` got. Raises its EncoderError as vLLM answers it."""
        if isinstance(outcome, EncoderError):
            if self._metrics is not None:
                self._metrics.failed(outcome)
            message = message_of(outcome)
            logger.warning("a request is rejected, its clip cannot be read: %s", message)
            raise vllm_error(status_of(outcome), message) from outcome
        return outcome


def hook_config(architecture: str) -> None:
    """Has ``configure`` called with the configuration of every engine of this architecture."""
    vllms_hook = MODELS_CONFIG_MAP.get(architecture)
    if getattr(vllms_hook, "is_vision_encoder", False):
        return

    class Hook:
        is_vision_encoder = True

        @staticmethod
        def verify_and_update_config(vllm_config: VllmConfig) -> None:
            if vllms_hook is not None:
                vllms_hook.verify_and_update_config(vllm_config)
            configure(vllm_config)

        @staticmethod
        def verify_and_update_model_config(model_config: ModelConfig) -> None:
            if vllms_hook is not None:
                vllms_hook.verify_and_update_model_config(model_config)

    MODELS_CONFIG_MAP[architecture] = Hook


@start_of(Settings.ENGINE, logger)
def configure(vllm_config: VllmConfig) -> None:
    """Called in the process that makes the configuration: an API server, or an offline ``LLM``. Raises
    InvalidRequest for options of vLLM that exclude each other, and as ``check_early``."""
    if not has_connector(vllm_config):
        if os.environ.get("VLLM_MEDIA_CONNECTOR") == MEDIA_CONNECTOR:
            # Set by an earlier engine in this process.
            del os.environ["VLLM_MEDIA_CONNECTOR"]
        return
    _check_options(vllm_config)
    server = ApiServer(vllm_config)
    check_early(server.agreement)
    os.environ["VLLM_MEDIA_CONNECTOR"] = MEDIA_CONNECTOR
    mark(vllm_config.model_config.get_multimodal_config())
    ApiServer.current = server


def _check_options(vllm_config: VllmConfig) -> None:
    """Raises InvalidRequest for options that cannot work with this connector."""
    mm_config = vllm_config.model_config.get_multimodal_config()
    if mm_config.mm_processor_cache_type == "shm":
        raise InvalidRequest(
            "--mm-processor-cache-type is shm, which hides files from the scheduler: use lru"
        )
    if mm_config.is_multimodal_pruning_enabled():
        raise InvalidRequest("video pruning is on, and the encoder gives the rows of whole clips")
    if getattr(vllm_config.compilation_config, "cudagraph_mm_encoder", False):
        raise InvalidRequest("cudagraph_mm_encoder is on, and there is no vision tower to capture")
    connector = os.environ.get("VLLM_MEDIA_CONNECTOR", MEDIA_CONNECTOR)
    if connector not in (MEDIA_CONNECTOR, "http"):
        raise InvalidRequest(
            f"VLLM_MEDIA_CONNECTOR is {connector}, this plugin has its own, {MEDIA_CONNECTOR}"
        )


def _clip_sizes(options: Mapping[str, Any]) -> dict[str, int]:
    """As vLLM resolves ``--mm-processor-kwargs``: options for videos override options for all media."""
    return given_sizes({**options, **(options.get("videos_kwargs") or {})})
