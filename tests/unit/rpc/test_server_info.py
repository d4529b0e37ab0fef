"""What GetServerInfo says of transports."""

from __future__ import annotations

import pytest

from encoder_service import app
from encoder_service.config import Settings, parse_settings
from encoder_service.rpc.server_info import server_info
from encoder_service.store.partitions import open_host_partitions
from encoder_service.towers.synthetic import make_checkpoint
from encoder_service.transport.shared_memory import share
from lm_adapter import convert
from vision_encoder.v1 import encoder_pb2 as pb


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    path = tmp_path_factory.mktemp("server_info") / "qwen3_5"
    make_checkpoint(path, "qwen3_5", "tiny", 1)
    return parse_settings(model=path)


@pytest.mark.anyio
async def test_shared_memory_is_announced_as_the_broker_tells_it(
    settings: Settings,
) -> None:
    model = app.load_model(settings)
    assert [each.delivery for each in server_info(settings, model).transports] == [pb.DELIVERY_INLINE]
    shared = share(
        settings.model_copy(update={"broker_path": "/run/broker.sock"}),
        open_host_partitions(1 << 16, {"alone": 1 << 16}),
        "instance",
    )
    answer = server_info(settings, model, shared)
    assert answer.instance_id == "instance"
    assert answer.limits.store_bytes == shared.store.max_bytes
    assert list(answer.transports) == [
        pb.TransportInfo(delivery=pb.DELIVERY_INLINE),
        pb.TransportInfo(
            delivery=pb.DELIVERY_HOST_SHM, broker_path="/run/broker.sock", host_id=shared.options.host_id
        ),
    ]
    assert convert.server_info(answer).transports[1].delivery == "host_shm"
    await shared.stop()
