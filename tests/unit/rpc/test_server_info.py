"""What GetServerInfo says of transports and of pixels in shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from encoder_service import startup
from encoder_service.checkpoints.synthetic import make_checkpoint
from encoder_service.config import Settings, parse_settings
from encoder_service.ingest.pixel_segments import PixelSegments
from encoder_service.rpc.server_info import server_info
from encoder_service.store.embedding_store import open_store
from lm_adapter import convert
from vision_encoder.layout.host import host_id
from vision_encoder.v1 import encoder_pb2 as pb


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    path = tmp_path_factory.mktemp("server_info") / "qwen3_5"
    make_checkpoint(path, "qwen3_5", "tiny", 1)
    return parse_settings(model=path, arena_bytes=1 << 20, broker_path="")


def test_shared_memory_is_announced_where_there_is_a_broker(settings: Settings, tmp_path: Path) -> None:
    model = startup.load_model(settings)
    store = open_store(settings, on_copy_error=lambda error: False)
    answer = server_info(settings, model, store, "instance")
    assert [each.delivery for each in answer.transports] == [pb.DELIVERY_INLINE]
    assert not answer.HasField("pixel_input")
    store.close()

    sharing = settings.model_copy(update={"broker_path": "/run/broker.sock"})
    store = open_store(sharing, on_copy_error=lambda error: False)
    segments = PixelSegments(("gateway-",), max_tensor_bytes=77, folder=str(tmp_path))
    answer = server_info(sharing, model, store, "instance", segments)
    assert answer.instance_id == "instance"
    assert answer.limits.store_bytes == store.max_bytes
    assert list(answer.transports) == [
        pb.TransportInfo(delivery=pb.DELIVERY_INLINE),
        pb.TransportInfo(delivery=pb.DELIVERY_HOST, broker_path="/run/broker.sock", host_id=host_id()),
    ]
    assert answer.pixel_input == pb.PixelInput(
        host_id=host_id(), name_prefixes=["gateway-"], max_tensor_bytes=77
    )
    assert convert.server_info(answer).transports[1].delivery == "host"
    segments.close()
    store.close()
