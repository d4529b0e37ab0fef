"""What GetServerInfo answers: the model, the limits, the ways of delivery.

Owns the message's contents. They hold for the life of the process.
"""

from __future__ import annotations

import uuid

import torch

from encoder_service import __version__
from encoder_service.config import Settings
from encoder_service.pipeline import ServedModel
from encoder_service.rpc import convert
from encoder_service.transport.shared_memory import SharedMemory
from encoder_service.types import Modality
from vision_encoder.v1 import encoder_pb2 as pb

MODALITY_TO_PROTO = {Modality.IMAGE: pb.MODALITY_IMAGE, Modality.VIDEO: pb.MODALITY_VIDEO}


def server_info(
    settings: Settings, model: ServedModel, shared: SharedMemory | None = None
) -> pb.GetServerInfoResponse:
    """What GetServerInfo answers for the life of the process. The broker tells the same of instance and
    host."""
    tower = model.tower
    transports = [pb.TransportInfo(delivery=pb.DELIVERY_INLINE)]
    if shared is not None:
        transports += [
            pb.TransportInfo(
                delivery=convert.DELIVERY_BY_ARENA[arena.kind],
                broker_path=shared.options.path,
                host_id=shared.options.host_id,
                device_uuid=arena.device_uuid,
            )
            for arena in shared.kinds()
        ]
    return pb.GetServerInfoResponse(
        protocol_version=convert.PROTOCOL_VERSION,
        min_protocol_version=convert.MIN_PROTOCOL_VERSION,
        server_version=__version__,
        instance_id=uuid.uuid4().hex if shared is None else shared.options.instance_id,
        device=torch.cuda.get_device_name(tower.device) if tower.device.type == "cuda" else "cpu",
        models=[
            pb.ModelInfo(
                name=model.name,
                family=model.family,
                model_fingerprint=model.fingerprint,
                preprocess_fingerprint=model.preprocessor.fingerprint,
                dtype=convert.dtype_to_proto(tower.dtype),
                out_width=tower.out_width,
                num_deepstack_levels=tower.num_deepstack_levels,
                width=tower.width,
                patch_size=tower.patch_size,
                spatial_merge_size=tower.merge_size,
                temporal_patch_size=tower.temporal_patch_size,
                patch_dim=tower.patch_dim,
                merges_time=tower.merges_time,
                modalities=[MODALITY_TO_PROTO[modality] for modality in tower.modalities],
            )
        ],
        limits=pb.Limits(
            max_items_per_request=settings.max_items_per_request,
            max_message_bytes=settings.max_message_bytes,
            max_encoded_bytes=settings.max_encoded_bytes,
            max_image_pixels=settings.max_image_pixels,
            max_patches_per_item=settings.max_patches_per_item,
            max_queued_patches=settings.max_queued_patches,
            max_queued_bytes=settings.max_queued_bytes,
            store_bytes=settings.store_bytes if shared is None else shared.store.max_bytes,
            chunk_bytes=settings.chunk_bytes,
            max_clip_bytes=settings.max_clip_bytes,
            max_clip_duration_s=settings.max_clip_duration_s,
            max_clip_frames=settings.max_clip_frames,
            max_clip_patches=settings.max_clip_patches,
        ),
        transports=transports,
    )
