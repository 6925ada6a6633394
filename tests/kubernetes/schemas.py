"""Schemas of the used custom resources, with the fields that their operators document.

As strict as those of Kubernetes: a name that is not listed is an error until it is looked up and added.
"""

from typing import Any, Final

Schema = dict[str, Any]


def _object(required: str = "", /, **properties: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


_TEXT: Final[Schema] = {"type": "string", "minLength": 1}
_WHOLE: Final[Schema] = {"type": "integer", "minimum": 0}
_TEXTS: Final[Schema] = {"type": "object", "additionalProperties": _TEXT}
_DURATION: Final[Schema] = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}
_ANY: Final[Schema] = {"type": "object"}
_METADATA: Final = _object("name", name=_TEXT, namespace=_TEXT, labels=_TEXTS, annotations=_TEXTS)

_RULE: Final = _object(
    "alert expr labels annotations",
    alert=_TEXT,
    expr=_TEXT,
    **{"for": _DURATION},
    labels=_object("severity", severity={"enum": ["page", "ticket"]}),
    annotations=_object("summary description runbook_url", summary=_TEXT, description=_TEXT, runbook_url=_TEXT),
)

_ENDPOINT: Final = _object("port path", port=_TEXT, path=_TEXT, interval=_DURATION, scrapeTimeout=_DURATION)

_SPARK_POD: Final = {
    "cores": {"type": "integer", "minimum": 1},
    "memory": {"type": "string", "pattern": "^[0-9]+[mg]$"},
    "serviceAccount": _TEXT,
    "labels": _TEXTS,
    "envFrom": _list(_ANY),
    "podSecurityContext": _ANY,
    "securityContext": _ANY,
    "volumeMounts": _list(_ANY),
}
_RUNS: Final = {"successfulRunHistoryLimit": _WHOLE, "failedRunHistoryLimit": _WHOLE}

_PORT: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": 65535}
_HOST: Final[Schema] = {"type": "string", "pattern": "^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"}
# Of Strimzi's API `v1`.
_OPERATIONS: Final = (
    "All Alter AlterConfigs ClusterAction Create Delete Describe DescribeConfigs IdempotentWrite Read Write"
)
_ACL: Final = _object(
    "resource operations",
    type={"enum": ["allow", "deny"]},
    host=_TEXT,
    resource=_object(
        "type name patternType",
        type={"enum": ["topic", "group", "transactionalId"]},
        name=_TEXT,
        patternType={"enum": ["literal", "prefix"]},
    ),
    operations={**_list({"enum": _OPERATIONS.split()}), "uniqueItems": True},
)

CUSTOM: Final[dict[tuple[str, str], Schema]] = {
    ("kafka.strimzi.io/v1", "KafkaTopic"): _object(
        "partitions replicas config",
        topicName=_TEXT,
        partitions={"type": "integer", "minimum": 1},
        replicas={"type": "integer", "minimum": 1, "maximum": 32767},
        config={"type": "object", "additionalProperties": {"type": ["string", "integer"]}},
    ),
    ("kafka.strimzi.io/v1", "KafkaUser"): _object(
        "authentication authorization",
        authentication=_object("type", type={"enum": ["scram-sha-512", "tls", "tls-external"]}),
        authorization=_object("type acls", type={"const": "simple"}, acls=_list(_ACL)),
    ),
    ("gateway.networking.k8s.io/v1", "Gateway"): _object(
        "gatewayClassName listeners",
        gatewayClassName=_TEXT,
        listeners=_list(
            _object(
                "name port protocol",
                name=_TEXT,
                port=_PORT,
                protocol={"enum": ["HTTP", "HTTPS", "TLS", "TCP", "UDP"]},
                hostname=_HOST,
                tls=_object(
                    "",
                    mode={"enum": ["Terminate", "Passthrough"]},
                    certificateRefs=_list(_object("name", group=_TEXT, kind=_TEXT, name=_TEXT, namespace=_TEXT)),
                ),
                allowedRoutes=_object(
                    "", namespaces=_object("", **{"from": {"enum": ["All", "Selector", "Same"]}}, selector=_ANY)
                ),
            )
        ),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _object(
        "parentRefs rules",
        parentRefs=_list(
            _object("name", group=_TEXT, kind=_TEXT, name=_TEXT, namespace=_TEXT, sectionName=_TEXT, port=_PORT)
        ),
        hostnames=_list(_HOST),
        rules=_list(
            _object(
                "backendRefs",
                matches=_list(
                    _object(
                        "",
                        path=_object(
                            "",
                            type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                            value={"type": "string", "pattern": "^/"},
                        ),
                    )
                ),
                backendRefs=_list(_object("name port", group=_TEXT, kind=_TEXT, name=_TEXT, port=_PORT, weight=_WHOLE)),
            )
        ),
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _object(
        "selector endpoints",
        selector=_object("matchLabels", matchLabels=_TEXTS),
        fallbackScrapeProtocol={"enum": ["PrometheusText0.0.4", "PrometheusText1.0.0", "OpenMetricsText1.0.0"]},
        endpoints=_list(_ENDPOINT),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _object(
        "groups", groups=_list(_object("name rules", name=_TEXT, rules=_list(_RULE)))
    ),
    ("sparkoperator.k8s.io/v1beta2", "ScheduledSparkApplication"): _object(
        "schedule concurrencyPolicy template",
        schedule=_TEXT,
        timeZone=_TEXT,
        concurrencyPolicy={"enum": ["Allow", "Forbid", "Replace"]},
        **_RUNS,
        template=_object(
            "type mode sparkVersion image mainApplicationFile driver executor",
            type={"const": "Python"},
            pythonVersion={"const": "3"},
            mode={"const": "cluster"},
            sparkVersion=_TEXT,
            image=_TEXT,
            mainApplicationFile={"type": "string", "pattern": "^local:///"},
            arguments=_list(_TEXT),
            restartPolicy=_object("type", type={"enum": ["Never", "OnFailure", "Always"]}),
            timeToLiveSeconds=_WHOLE,
            sparkConf=_TEXTS,
            volumes=_list(_ANY),
            driver=_object("cores memory serviceAccount", **_SPARK_POD),
            executor=_object("cores memory instances", instances=_WHOLE, **_SPARK_POD),
        ),
    ),
}


def of_custom(api_version: str, kind: str) -> Schema:
    """Return the whole schema of a custom resource. KeyError for an unknown one."""
    return _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=_METADATA,
        spec=CUSTOM[api_version, kind],
    )
