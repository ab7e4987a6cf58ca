"""Kubernetes and KServe manifests of a server: ``accel serve REPO --manifest kubernetes|kserve``.

Field names are those of the Kubernetes API (apps/v1, v1, autoscaling/v2) and of KServe's serving.kserve.io.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from accel.errors import BadConfig, MissingExtra

# A DNS label that begins with a letter (RFC 1035): what the names of Services and InferenceServices have to be.
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What is deployed. ``repository``: the folder or address that ``accel serve`` gets in the container.

    ``claim``: a PersistentVolumeClaim that is mounted read-only at ``repository``. ``cpu`` and ``memory`` are
    Kubernetes quantities for each replica, ``gpus`` whole NVIDIA GPUs; ``min_replicas`` to ``max_replicas`` by load.
    ``drain_seconds``: how long a replica that is stopped answers what it has taken. ``words``: further options of its
    ``accel serve``. ``secrets``: names of Secrets and the folders that they are mounted at.
    """

    name: str
    image: str
    repository: str = "/models"
    claim: str = ""
    cpu: str = "2"
    memory: str = "4Gi"
    gpus: int = 0
    min_replicas: int = 1
    max_replicas: int = 4
    target_cpu_percent: int = 70
    grpc_port: int = 8001
    http_port: int = 8000
    drain_seconds: int = 30
    words: tuple[str, ...] = ()
    secrets: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not _LABEL.fullmatch(self.name):
            raise BadConfig(
                f"{self.name!r} can't name a deployment; use lower-case letters, digits and '-', a letter first"
            )
        if not self.image:
            raise BadConfig("a manifest needs the container image that has accel in it; pass --image NAME:TAG")
        for quantity in (self.cpu, self.memory):
            if not _QUANTITY.fullmatch(quantity):
                raise BadConfig(f"{quantity!r} is no Kubernetes quantity; write it like 2, 500m or 4Gi")
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise BadConfig(f"replicas {self.min_replicas}..{self.max_replicas} is no range; give 1 <= min <= max")
        if not 1 <= self.target_cpu_percent <= 100:  # of what is requested, which is the limit as well
            raise BadConfig(f"a target of {self.target_cpu_percent}% is never reached; give 1 to 100")
        if "--tls-client-ca" in self.words:
            raise BadConfig("the probes of Kubernetes show no certificate; leave --tls-client-ca out, let a mesh ask")


def kubernetes(wanted: Deployment) -> list[dict[str, Any]]:
    """A Deployment with probes, a Service for both ports, and a HorizontalPodAutoscaler."""
    labels = {"app.kubernetes.io/name": wanted.name, "app.kubernetes.io/managed-by": "accel"}
    selector = {"app.kubernetes.io/name": wanted.name}
    spec: dict[str, Any] = {
        # The preStop pause lets the endpoints forget the pod before it stops taking requests.
        "terminationGracePeriodSeconds": wanted.drain_seconds + 10,
        "containers": [_container(wanted)],
    }
    if volumes := _volumes(wanted):
        spec["volumes"] = volumes
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": wanted.name, "labels": labels},
        "spec": {
            "selector": {"matchLabels": selector},
            # A new replica answers before an old one goes.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
    ports = [("grpc", wanted.grpc_port, "kubernetes.io/h2c"), ("http", wanted.http_port, "http")]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": wanted.name, "labels": labels},
        "spec": {
            "selector": selector,
            "ports": [{"name": n, "port": p, "targetPort": n, "appProtocol": a} for n, p, a in ports],
        },
    }
    cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": wanted.target_cpu_percent}}
    autoscaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": wanted.name, "labels": labels},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": wanted.name},
            "minReplicas": wanted.min_replicas,
            "maxReplicas": wanted.max_replicas,
            "metrics": [{"type": "Resource", "resource": cpu}],
        },
    }
    return [deployment, service, autoscaler]


def kserve(wanted: Deployment) -> list[dict[str, Any]]:
    """A KServe InferenceService whose predictor is accel's own container, speaking protocol v2 over gRPC.

    ``repository`` has to be an address or a mounted folder that the container itself can read.
    """
    container = _container(wanted) | {"name": "kserve-container"}
    # Knative lets no container have one: its own proxy waits until the pod gets no more requests.
    del container["lifecycle"]
    # Knative routes one port; h2c is how it knows gRPC.
    container["ports"] = [{"name": "h2c", "containerPort": wanted.grpc_port, "protocol": "TCP"}]
    predictor: dict[str, Any] = {
        "minReplicas": wanted.min_replicas,
        "maxReplicas": wanted.max_replicas,
        "scaleMetric": "cpu",
        "scaleTarget": wanted.target_cpu_percent,
        "containers": [container],
    }
    if volumes := _volumes(wanted):
        predictor["volumes"] = volumes
    return [
        {
            "apiVersion": "serving.kserve.io/v1beta1",
            "kind": "InferenceService",
            "metadata": {
                "name": wanted.name,
                "labels": {"app.kubernetes.io/managed-by": "accel"},
                # Without it KServe takes Knative's own autoscaler, which knows no CPU, and refuses the document.
                "annotations": {"autoscaling.knative.dev/class": "hpa.autoscaling.knative.dev"},
            },
            "spec": {"predictor": predictor},
        }
    ]


def _container(wanted: Deployment) -> dict[str, Any]:
    resources: dict[str, str | int] = {"cpu": wanted.cpu, "memory": wanted.memory}
    if wanted.gpus:
        resources["nvidia.com/gpu"] = wanted.gpus
    ports = ["--grpc-port", str(wanted.grpc_port), "--http-port", str(wanted.http_port)]

    def probe(path: str, period: int, failures: int) -> dict[str, Any]:
        get: dict[str, str | int] = {"path": path, "port": wanted.http_port}
        if "--tls-certificate" in wanted.words:
            get["scheme"] = "HTTPS"  # the kubelet doesn't ask who signed it
        return {"httpGet": get, "periodSeconds": period, "failureThreshold": failures}

    found: dict[str, Any] = {
        "name": "accel",
        "image": wanted.image,
        "command": ["accel", "serve", wanted.repository, "--host", "0.0.0.0", *ports, *wanted.words],
        "ports": [
            {"name": "grpc", "containerPort": wanted.grpc_port},
            {"name": "http", "containerPort": wanted.http_port},
        ],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        # Models may load for minutes: the start has ten of them, after that a dead server is noticed in half a minute.
        "startupProbe": probe("/v2/health/ready", 5, 120),
        "readinessProbe": probe("/v2/health/ready", 5, 2),
        "livenessProbe": probe("/v2/health/live", 10, 3),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
    }
    mounts = [("models", wanted.repository)] if wanted.claim else []
    mounts += [(f"secret-{name}", folder) for name, folder in wanted.secrets]
    if mounts:
        found["volumeMounts"] = [{"name": name, "mountPath": path, "readOnly": True} for name, path in mounts]
    return found


def _volumes(wanted: Deployment) -> list[dict[str, Any]]:
    claim = {"name": "models", "persistentVolumeClaim": {"claimName": wanted.claim, "readOnly": True}}
    secrets = [{"name": f"secret-{name}", "secret": {"secretName": name}} for name, _ in wanted.secrets]
    return [*([claim] if wanted.claim else []), *secrets]


def to_yaml(documents: list[dict[str, Any]]) -> str:
    """The documents as ``kubectl apply -f`` takes them."""
    try:
        import yaml
    except ImportError as error:
        raise MissingExtra("pyyaml", "serve") from error
    return str(yaml.safe_dump_all(documents, sort_keys=False))
