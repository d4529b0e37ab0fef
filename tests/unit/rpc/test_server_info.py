"""What GetServerInfo says of a precision and of transports; rows of two precisions never share a key."""

from __future__ import annotations

import pytest

from encoder_service import app
from encoder_service.admin.app import info_dict
from encoder_service.config import Settings, parse_settings
from encoder_service.ingest.identity import embedding_key
from encoder_service.pipeline import ServedModel
from encoder_service.rpc.server_info import server_info
from encoder_service.store.partitions import open_host_partitions
from encoder_service.towers.synthetic import make_checkpoint
from encoder_service.transport.shared_memory import share
from encoder_service.types import EncodedFile, Item, Modality
from lm_adapter import ImageItem, convert
from lm_adapter.keys import item_key
from vision_encoder.v1 import encoder_pb2 as pb

DIGEST = b"d" * 32


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    path = tmp_path_factory.mktemp("precision") / "qwen3_5"
    make_checkpoint(path, "qwen3_5", "tiny", 1)
    return parse_settings(model=path)


def served(settings: Settings, precision: str, monkeypatch: pytest.MonkeyPatch) -> ServedModel:
    """The model as ``serve`` loads it. Its tower stays plain here: only what is said of it matters."""
    monkeypatch.setattr(app, "check_fp8_device", lambda device: None)
    return app.load_model(settings.model_copy(update={"precision": precision}))


@pytest.mark.parametrize("precision", ["dtype", "fp8"])
def test_the_precision_is_told(settings: Settings, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = server_info(settings, served(settings, precision, monkeypatch))
    assert answer.models[0].precision == precision
    assert info_dict(answer)["models"][0]["precision"] == precision
    assert convert.server_info(answer).models[0].precision == precision


def test_p11_rows_of_two_precisions_never_share_a_key(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the service nor in what an adapter derives from the service's answer."""
    item = Item(Modality.IMAGE, EncodedFile(b"image"), DIGEST)
    keys = []
    for precision in ("dtype", "fp8"):
        model = served(settings, precision, monkeypatch)
        key = embedding_key(
            item,
            DIGEST,
            namespace="",
            model_fingerprint=model.fingerprint,
            preprocess_fingerprint=model.preprocessor.fingerprint,
            dtype=model.tower.dtype,
        )
        told = convert.server_info(server_info(settings, model)).models[0]
        assert item_key(ImageItem(b"image", digest=DIGEST), told) == key
        keys.append(key)
    assert keys[0] != keys[1]


def test_a_server_that_does_not_tell_has_none_but_dtype() -> None:
    answer = pb.GetServerInfoResponse(models=[pb.ModelInfo(name="old")])
    assert convert.server_info(answer).models[0].precision == "dtype"


@pytest.mark.anyio
async def test_shared_memory_is_announced_as_the_broker_tells_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served(settings, "dtype", monkeypatch)
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
