"""The answer of GetServerInfo: the model, the limits, the transports. It does not change while the process
runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from google.protobuf.json_format import MessageToDict

from encoder_service import __version__
from encoder_service.config import Settings
from encoder_service.ingest.pixel_segments import PixelSegments
from encoder_service.pipeline import ServedModel
from encoder_service.rpc import convert
from encoder_service.store.embedding_store import EmbeddingStore
from vision_encoder.layout.host import host_id
from vision_encoder.v1 import encoder_pb2 as pb


def server_info(
    settings: Settings,
    model: ServedModel,
    store: EmbeddingStore,
    instance_id: str,
    segments: PixelSegments | None = None,
    unusable: Mapping[str, str] | None = None,
) -> pb.GetServerInfoResponse:
    """instance_id: that of the broker. segments: None where pixels in shared memory are refused. unusable:
    the optional kernel libraries that cannot be used on this device, with the reason."""
    tower, clips = model.tower, model.preprocessor.clips
    info = pb.GetServerInfoResponse(
        protocol_version=convert.PROTOCOL_VERSION,
        min_protocol_version=convert.MIN_PROTOCOL_VERSION,
        server_version=__version__,
        instance_id=instance_id,
        device=torch.cuda.get_device_name(tower.device) if tower.device.type == "cuda" else "cpu",
        models=[
            pb.ModelInfo(
                name=model.name,
                family=model.family,
                model_fingerprint=model.fingerprint,
                preprocess_fingerprint=model.preprocessor.fingerprint,
                dtype=convert.DTYPE_NUMBERS[tower.dtype],
                out_width=tower.out_width,
                num_deepstack_levels=tower.num_deepstack_levels,
                width=tower.width,
                patch_size=tower.patch_size,
                spatial_merge_size=tower.merge_size,
                temporal_patch_size=tower.temporal_patch_size,
                patch_dim=tower.patch_dim,
                merges_time=tower.merges_time,
                modalities=[convert.MODALITY_NUMBERS[modality] for modality in tower.modalities],
            )
        ],
        limits=pb.Limits(
            max_items_per_request=convert.MAX_ITEMS_PER_REQUEST,
            max_message_bytes=settings.max_message_bytes,
            max_encoded_bytes=settings.max_encoded_bytes,
            max_image_pixels=settings.max_image_pixels,
            max_patches_per_item=settings.max_patches_per_item,
            max_queued_patches=settings.max_queued_patches,
            max_queued_bytes=settings.max_queued_bytes,
            store_bytes=store.max_bytes,
            chunk_bytes=convert.CHUNK_BYTES,
            max_clip_bytes=settings.max_clip_bytes,
            max_clip_duration_s=0 if clips is None else clips.limits.max_duration_s,
            max_clip_frames=0 if clips is None else clips.limits.max_frames,
            max_clip_patches=settings.max_clip_patches,
        ),
        transports=[pb.TransportInfo(delivery=pb.DELIVERY_INLINE), *transports(settings, store)],
        unusable_kernels=unusable,
    )
    if segments is not None:
        info.pixel_input.host_id = host_id()
        info.pixel_input.name_prefixes.extend(segments.prefixes)
        info.pixel_input.max_tensor_bytes = segments.max_tensor_bytes
    return info


def transports(settings: Settings, store: EmbeddingStore) -> list[pb.TransportInfo]:
    """The transports over shared memory: one for each tier whose arenas the broker hands out."""
    if not settings.broker_path:
        return []
    kinds = {arena.kind: arena for _, arena in store.arenas()}
    return [
        pb.TransportInfo(
            delivery=convert.DELIVERY_BY_TIER[kind],
            broker_path=settings.broker_path,
            host_id=host_id(),
            device_uuid=arena.device_uuid,
        )
        for kind, arena in kinds.items()
    ]


def info_dict(message: pb.GetServerInfoResponse) -> dict[str, Any]:
    """GetServerInfo as JSON-ready data, numbers as numbers, bytes as hexadecimal."""
    answer: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for entry, model in zip(answer["models"], message.models, strict=True):
        entry["model_fingerprint"] = model.model_fingerprint.hex()
        entry["preprocess_fingerprint"] = model.preprocess_fingerprint.hex()
    answer["limits"] = {field.name: value for field, value in message.limits.ListFields()}
    return answer
