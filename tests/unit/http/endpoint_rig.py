"""The endpoint on a pipeline of fakes, asked without sockets."""

from __future__ import annotations

from typing import Any

import httpx
from starlette.types import ASGIApp

from encoder_service.http.answers import rows_answer
from encoder_service.http.endpoint import ROUTE, Access, AnswerForm, EncodeEndpoint
from encoder_service.http.explained import NAMESPACE, explained
from encoder_service.ops.http_server import HttpLimits, RequestLimits
from encoder_service.ops.tokens import NamespaceTokens
from encoder_service.protocols.base import Backend
from encoder_service.rpc.gate import CallGate, CallPermits
from encoder_service.scheduler.admission import Admission
from encoder_service.types import Modality
from tests.unit.service.rig import Rig

MAX_BODY_BYTES = 4096
MAX_QUEUED_BYTES = 4 * MAX_BODY_BYTES


def pipeline_rig() -> Rig:
    """With room for rows beside bodies."""
    return Rig(admission=Admission(max_patches=1366, max_bytes=MAX_QUEUED_BYTES))


class EndpointRig:
    """admission: the pipeline's, in which bodies and rows count."""

    def __init__(
        self,
        rig: Rig,
        form: AnswerForm = rows_answer,
        namespace: str | None = None,
        max_calls: int = 16,
    ) -> None:
        self.admission = rig.pipeline.admission
        gate = CallGate(NamespaceTokens(), CallPermits(max_calls), self.admission, MAX_BODY_BYTES)
        access = Access(gate, namespace, is_prefetch=namespace is not None)
        self.endpoint = EncodeEndpoint(access, form, rig.metrics, "instance", lambda: "starting")
        self._rig = rig

    def attach(self) -> EndpointRig:
        max_file_bytes = dict.fromkeys(Modality, MAX_BODY_BYTES)
        self.endpoint.attach(Backend(self._rig.pipeline, None, None, max_file_bytes))
        return self

    def client(self, app: ASGIApp | None = None) -> httpx.AsyncClient:
        limited = RequestLimits(app or self.endpoint, HttpLimits(16, MAX_BODY_BYTES, 4 * MAX_BODY_BYTES))
        return httpx.AsyncClient(transport=httpx.ASGITransport(limited), base_url="http://encoder")


def playground(rig: Rig) -> EndpointRig:
    """As the composition root makes it."""
    return EndpointRig(rig, explained, NAMESPACE, max_calls=2)


async def post(client: httpx.AsyncClient, *images: bytes, **options: Any) -> httpx.Response:
    return await client.post(ROUTE, files=[("image", image) for image in images], **options)
