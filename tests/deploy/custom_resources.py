"""Schemas of the custom resources that the manifests use: the fields that may be there, and no others.

Owns a narrow form of three kinds, after their published references (Prometheus operator v1, KEDA v1alpha1).
A field that is not listed here is an error, since the API server would drop it without a word.
"""

from __future__ import annotations

from typing import Any

import jsonschema

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
DURATION: Schema = {"type": "string", "pattern": r"^(\d+(ms|s|m|h|d))+$"}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def only(required: str = "", **properties: Schema) -> Schema:
    """An object with these fields; those named in required have to be there."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": {name.rstrip("_"): schema for name, schema in properties.items()},
    }


def many(schema: Schema) -> Schema:
    return {"type": "array", "items": schema, "minItems": 1}


def resource(api_version: str, spec: Schema) -> Schema:
    metadata = only("name", name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS)
    fixed = {"const": api_version}
    return only("apiVersion kind metadata spec", apiVersion=fixed, kind=TEXT, metadata=metadata, spec=spec)


POLICY = only(
    "type value periodSeconds", type={"enum": ["Pods", "Percent"]}, value=COUNT, periodSeconds=COUNT
)
SCALING = only(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    policies=many(POLICY),
    selectPolicy={"enum": ["Max", "Min", "Disabled"]},
)

KINDS = {
    "ServiceMonitor": resource(
        "monitoring.coreos.com/v1",
        only(
            "selector endpoints",
            jobLabel=TEXT,
            selector=only(matchLabels=TEXTS),
            endpoints=many(
                only(
                    "port",
                    port=TEXT,
                    path=TEXT,
                    interval=DURATION,
                    scrapeTimeout=DURATION,
                    scheme={"enum": ["http", "https"]},
                    authorization=only(
                        "credentials", type=TEXT, credentials=only("name key", name=TEXT, key=TEXT)
                    ),
                )
            ),
        ),
    ),
    "PrometheusRule": resource(
        "monitoring.coreos.com/v1",
        only(
            "groups",
            groups=many(
                only(
                    "name rules",
                    name=TEXT,
                    interval=DURATION,
                    rules=many(
                        only(
                            "alert expr labels annotations",
                            alert={"type": "string", "pattern": "^VisionEncoder[A-Za-z]+$"},
                            expr=TEXT,
                            for_=DURATION,
                            labels=only("severity", severity={"enum": ["info", "warning", "critical"]}),
                            annotations=only(
                                "summary description runbook_url",
                                summary=TEXT,
                                description=TEXT,
                                runbook_url=TEXT,
                            ),
                        )
                    ),
                )
            ),
        ),
    ),
    "ScaledObject": resource(
        "keda.sh/v1alpha1",
        only(
            "scaleTargetRef triggers",
            scaleTargetRef=only("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
            pollingInterval=COUNT,
            cooldownPeriod=COUNT,
            minReplicaCount=COUNT,
            maxReplicaCount=COUNT,
            fallback=only("failureThreshold replicas", failureThreshold=COUNT, replicas=COUNT),
            advanced=only(
                horizontalPodAutoscalerConfig=only(behavior=only(scaleUp=SCALING, scaleDown=SCALING))
            ),
            triggers=many(
                only(
                    "type metadata",
                    type={"const": "prometheus"},
                    metricType={"enum": ["AverageValue", "Value"]},
                    metadata=only(
                        "serverAddress query threshold",
                        serverAddress=TEXT,
                        query=TEXT,
                        ignoreNullValues={"enum": ["true", "false"]},
                        threshold={"type": "string", "pattern": r"^\d+(\.\d+)?$"},
                    ),
                )
            ),
        ),
    ),
}


def validate(found: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError."""
    jsonschema.validate(found, KINDS[found["kind"]])
