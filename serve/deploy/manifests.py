"""Generates the Kubernetes or KServe manifests of a server for ``accel serve REPO --manifest KIND``. The kinds are the
keys of ``KINDS``.

The field names come from the Kubernetes API (apps/v1, v1, autoscaling/v2, policy/v1) and from KServe's API
(serving.kserve.io).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from accel.errors import BadConfig, MissingExtra

# Names of Services and InferenceServices are DNS labels that begin with a letter (RFC 1035).
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
# The metric of a pod that ``docs/how-to/several-machines.md`` tells Prometheus Adapter to make.
QUEUE_METRIC = "accel_queue_milliseconds"
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The server to deploy. ``repository`` is the folder or address of the models, as seen in the container.

    ``claim`` is a PersistentVolumeClaim that is mounted read-only at ``repository``. ``cpu`` and ``memory`` are the
    resources of each replica, written as Kubernetes quantities. ``gpus`` is the number of NVIDIA GPUs of each replica.
    The number of replicas follows the load, from ``min_replicas`` to ``max_replicas``. If ``target_queue_ms`` isn't 0,
    there are so many replicas that a request waits at most so many milliseconds in the queue, on average. Before a
    replica stops, it has ``drain_seconds`` seconds to answer its requests. ``words`` are further command-line arguments
    of ``accel serve``. ``secrets`` maps each Secret's name to the folder at which the Secret is mounted.
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
    target_queue_ms: int = 0
    grpc_port: int = 8001
    http_port: int = 8000
    drain_seconds: int = 30
    words: tuple[str, ...] = ()
    secrets: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not _LABEL.fullmatch(self.name):
            raise BadConfig(
                f"{self.name!r} is no deployment name; start with a letter, and use lower-case letters, digits and '-'"
            )
        if not self.image:
            raise BadConfig("a manifest needs a container image with accel; pass --image NAME:TAG")
        for quantity in (self.cpu, self.memory):
            if not _QUANTITY.fullmatch(quantity):
                raise BadConfig(f"{quantity!r} is not a Kubernetes quantity; write for example 2, 500m or 4Gi")
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise BadConfig(f"replicas {self.min_replicas}..{self.max_replicas} is not a range; give 1 <= min <= max")
        if not 1 <= self.target_cpu_percent <= 100:  # 100% is the whole CPU that the container requests
            raise BadConfig(f"a CPU target of {self.target_cpu_percent}% is out of range; give 1 to 100")
        if "--tls-client-ca" in self.words:
            raise BadConfig("the probes of Kubernetes have no client certificate; leave out --tls-client-ca")


def kubernetes(wanted: Deployment) -> list[dict[str, Any]]:
    """Returns a Deployment with probes, a Service for both ports, an autoscaler, and a budget for disruptions."""
    labels = {"app.kubernetes.io/name": wanted.name, "app.kubernetes.io/managed-by": "accel"}
    selector = {"app.kubernetes.io/name": wanted.name}
    spec: dict[str, Any] = {
        # The grace period includes the preStop pause, in which Kubernetes stops sending requests to the pod.
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
            # An update starts a new replica before stopping an old replica.
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
    autoscaler: dict[str, Any] = {
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
    if wanted.target_queue_ms:
        queue = {
            "metric": {"name": QUEUE_METRIC},
            "target": {"type": "AverageValue", "averageValue": str(wanted.target_queue_ms)},
        }
        # The autoscaler takes the largest number of replicas that a metric asks for.
        autoscaler["spec"]["metrics"].append({"type": "Pods", "pods": queue})
    # The maintenance of machines moves one replica at a time.
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": wanted.name, "labels": labels},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector}},
    }
    return [deployment, service, autoscaler, budget]


def kserve(wanted: Deployment) -> list[dict[str, Any]]:
    """Returns a KServe InferenceService whose predictor is accel's own container. The container serves protocol v2 over
    gRPC.

    The container must be able to read ``repository``, which is an address or a mounted folder. Raises ``BadConfig`` if
    the replicas are to follow the queue, which KServe doesn't support.
    """
    _without_queue(wanted)
    container = _kserve_container(wanted)
    predictor: dict[str, Any] = {**_kserve_scale(wanted), "containers": [container]}
    if volumes := _volumes(wanted):
        predictor["volumes"] = volumes
    return [_inference_service(wanted.name, predictor)]


# KServe copies the model to this folder before the server starts.
_COPIED = "/mnt/models"
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://.+")


def kserve_runtime(wanted: Deployment) -> list[dict[str, Any]]:
    """Returns a KServe ServingRuntime, with which an InferenceService only names its models' address.

    KServe itself copies the models to the server. If ``repository`` is an address, or ``claim`` is set, also returns
    the InferenceService that serves these models. Raises ``BadConfig`` if the replicas are to follow the queue.
    """
    _without_queue(wanted)
    runtime: dict[str, Any] = {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": {"name": wanted.name, "labels": {"app.kubernetes.io/managed-by": "accel"}},
        "spec": {
            # No InferenceService gets this runtime unless it names it, because the models have to be a repository.
            "supportedModelFormats": [{"name": name, "autoSelect": False} for name in ("accel", "onnx")],
            "protocolVersions": ["grpc-v2"],
            "containers": [_kserve_container(replace(wanted, repository=_COPIED, claim=""))],
        },
    }
    if volumes := _volumes(replace(wanted, claim="")):
        runtime["spec"]["volumes"] = volumes
    address = f"pvc://{wanted.claim}" if wanted.claim else wanted.repository
    if not _ADDRESS.fullmatch(address):
        return [runtime]
    model: dict[str, Any] = {"modelFormat": {"name": "accel"}, "runtime": wanted.name, "protocolVersion": "grpc-v2"}
    model["storageUri"] = address
    return [runtime, _inference_service(wanted.name, {**_kserve_scale(wanted), "model": model})]


def _without_queue(wanted: Deployment) -> None:
    if wanted.target_queue_ms:
        raise BadConfig(
            "KServe can't scale by the time in the queue; leave out target-queue-ms, or deploy with kubernetes"
        )


def _kserve_container(wanted: Deployment) -> dict[str, Any]:
    container = _container(wanted) | {"name": "kserve-container"}
    # Knative forbids a container's ``lifecycle`` field. Knative's own proxy already waits until the pod gets no more
    # requests.
    del container["lifecycle"]
    # Knative routes a single port, and treats the port as gRPC if the port's name is h2c.
    container["ports"] = [{"name": "h2c", "containerPort": wanted.grpc_port, "protocol": "TCP"}]
    return container


def _kserve_scale(wanted: Deployment) -> dict[str, Any]:
    return {
        "minReplicas": wanted.min_replicas,
        "maxReplicas": wanted.max_replicas,
        "scaleMetric": "cpu",
        "scaleTarget": wanted.target_cpu_percent,
    }


def _inference_service(name: str, predictor: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": name,
            "labels": {"app.kubernetes.io/managed-by": "accel"},
            # The annotation ``autoscaling.knative.dev/class`` selects the HorizontalPodAutoscaler. Knative's own
            # autoscaler can't scale by CPU, so KServe would refuse to scale by CPU if no other autoscaler is selected.
            "annotations": {"autoscaling.knative.dev/class": "hpa.autoscaling.knative.dev"},
        },
        "spec": {"predictor": predictor},
    }


def _container(wanted: Deployment) -> dict[str, Any]:
    resources: dict[str, str | int] = {"cpu": wanted.cpu, "memory": wanted.memory}
    if wanted.gpus:
        resources["nvidia.com/gpu"] = wanted.gpus
    ports = ["--grpc-port", str(wanted.grpc_port), "--http-port", str(wanted.http_port)]

    def probe(path: str, period: int, failures: int) -> dict[str, Any]:
        get: dict[str, str | int] = {"path": path, "port": wanted.http_port}
        if "--tls-certificate" in wanted.words:
            get["scheme"] = "HTTPS"  # the kubelet doesn't verify the certificate
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
        # Loading models may take minutes, so Kubernetes waits ten minutes for the server to start. After the start,
        # Kubernetes notices a dead server within 30 seconds.
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


KINDS: dict[str, Callable[[Deployment], list[dict[str, Any]]]] = {
    "kubernetes": kubernetes, "kserve": kserve, "kserve-runtime": kserve_runtime,
}  # fmt: skip


def to_yaml(documents: list[dict[str, Any]]) -> str:
    """Returns the documents as YAML for ``kubectl apply -f``."""
    try:
        import yaml
    except ImportError as error:
        raise MissingExtra("pyyaml", "serve") from error
    return str(yaml.safe_dump_all(documents, sort_keys=False))
