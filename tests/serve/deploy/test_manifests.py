"""Proves that the manifests of `accel serve --manifest` are valid under the schemas of the Kubernetes API."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from accel.errors import BadConfig
from accel.serve.deploy.manifests import Deployment, kserve, kserve_runtime, kubernetes, to_yaml
from accel.serve.protocol.inference import ModelStatistics
from accel.serve.transports.metrics import render
from tests.support import ROOT

validate = pytest.importorskip("kubernetes_validate")
yaml = pytest.importorskip("yaml")

PLAIN = Deployment(name="minilm", image="registry.example/accel:0.1")
WHOLE = Deployment(
    name="minilm", image="accel:0.1", claim="models", gpus=1, cpu="500m", min_replicas=2, http_port=9000,
    words=("--tls-certificate", "/tls/c.pem", "--tls-key", "/tls/k.pem"),
    secrets=(("tls", "/tls"), ("tokens", "/tokens")),
)  # fmt: skip


@pytest.mark.parametrize("wanted", [PLAIN, WHOLE])
def test_kubernetes_takes_every_document(wanted: Deployment) -> None:
    """Checks that each document passes the strict validation, which refuses unknown fields and wrong types."""
    documents = list(yaml.safe_load_all(to_yaml(kubernetes(wanted))))
    kinds = ["Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"]
    assert [d["kind"] for d in documents] == kinds
    for document in documents:
        validate.validate(document, validate.latest_version(), strict=True)


def test_replicas_follow_the_queue() -> None:
    """Fails if the autoscaler asks for another metric than the one that the page makes, if the page makes it from a
    metric that the server doesn't have, or if Kubernetes would refuse the autoscaler."""
    wanted = replace(PLAIN, target_queue_ms=50)
    autoscaler = kubernetes(wanted)[2]
    validate.validate(autoscaler, validate.latest_version(), strict=True)
    assert kubernetes(PLAIN)[2]["spec"]["metrics"] == autoscaler["spec"]["metrics"][:1]
    asked = autoscaler["spec"]["metrics"][1]["pods"]
    assert asked["target"] == {"type": "AverageValue", "averageValue": "50"}
    page = (ROOT / "docs/how-to/several-machines.md").read_text()
    (block,) = re.findall(r"```yaml\n(rules:.*?)```", page, re.S)
    (rule,) = yaml.safe_load(block)["rules"]
    assert rule["name"]["as"] == asked["metric"]["name"]
    served = render([("linear", "1", ModelStatistics())]).decode()
    names = set(re.findall(r"accel_\w+", rule["seriesQuery"] + rule["metricsQuery"]))
    assert len(names) == 2
    for name in names:
        assert re.search(rf"^{name}{{", served, re.M), served
    with pytest.raises(BadConfig, match="leave out target-queue-ms"):
        kserve(wanted)


def test_a_misspelt_field_would_be_found() -> None:
    """Fails if the strict validation accepts an unknown field or a wrong type."""
    document = kubernetes(PLAIN)[0]
    document["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(document, validate.latest_version(), strict=True)


@pytest.mark.parametrize("wanted", [PLAIN, WHOLE])
def test_kserve_predictor_is_a_pod(wanted: Deployment) -> None:
    """Fails if KServe's predictor has an invalid container, a field outside KServe's API, or a metric that KServe's
    autoscaler doesn't support. The predictor adds its own fields to the fields of a PodSpec."""
    (document,) = yaml.safe_load_all(to_yaml(kserve(wanted)))
    assert (document["apiVersion"], document["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(document["spec"]) == {"predictor"}
    predictor = dict(document["spec"]["predictor"])
    own = {name: predictor.pop(name) for name in ("minReplicas", "maxReplicas", "scaleMetric", "scaleTarget")}
    assert own == {
        "minReplicas": wanted.min_replicas, "maxReplicas": wanted.max_replicas,
        "scaleMetric": "cpu",  # KServe supports cpu, memory, concurrency and rps
        "scaleTarget": wanted.target_cpu_percent,
    }  # fmt: skip
    assert all(type(own[name]) is int for name in ("minReplicas", "maxReplicas", "scaleTarget"))
    # For the metrics cpu and memory, KServe's webhook requires the autoscaler class hpa and a target of 1 to 100.
    # Knative's own autoscaler supports the metrics concurrency and rps.
    assert document["metadata"]["annotations"]["autoscaling.knative.dev/class"] == "hpa.autoscaling.knative.dev"
    assert 1 <= own["scaleTarget"] <= 100
    (container,) = predictor["containers"]
    assert not set(container) & {
        "lifecycle",
        "stdin",
        "stdinOnce",
        "tty",
        "volumeDevices",
    }  # Knative refuses containers with a lifecycle, stdin, a tty or volume devices
    assert len(container["ports"]) == 1
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": document["metadata"], "spec": predictor}
    validate.validate(pod, validate.latest_version(), strict=True)
    assert predictor["containers"][0]["ports"][0]["name"] == "h2c"


@pytest.mark.parametrize("wanted", [PLAIN, WHOLE, replace(PLAIN, repository="s3://bucket/models")])
def test_kserve_runtime(wanted: Deployment) -> None:
    """Fails if the runtime has a field outside KServe's API, if its container is none that Kubernetes takes, if the
    server reads the models elsewhere than KServe copies them to, or if the InferenceService doesn't fit the runtime."""
    runtime, *services = yaml.safe_load_all(to_yaml(kserve_runtime(wanted)))
    assert (runtime["apiVersion"], runtime["kind"]) == ("serving.kserve.io/v1alpha1", "ServingRuntime")
    assert set(runtime) == {"apiVersion", "kind", "metadata", "spec"}
    spec = dict(runtime["spec"])
    formats, protocols = spec.pop("supportedModelFormats"), spec.pop("protocolVersions")
    assert all(set(one) == {"name", "autoSelect"} and type(one["autoSelect"]) is bool for one in formats)
    assert set(protocols) <= {"v1", "v2", "grpc-v1", "grpc-v2"}
    assert set(spec) <= {"containers", "volumes"}  # of a pod, a runtime takes these and a few more
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": runtime["metadata"], "spec": spec}
    validate.validate(pod, validate.latest_version(), strict=True)
    (container,) = spec["containers"]
    assert container["name"] == "kserve-container"  # the container that KServe adds the model to
    assert container["command"][:3] == ["accel", "serve", "/mnt/models"]
    assert not {"/mnt/models", "/models"} & {one["mountPath"] for one in container.get("volumeMounts", [])}
    assert {one["name"] for one in spec.get("volumes", [])} == {f"secret-{name}" for name, _ in wanted.secrets}
    if wanted is PLAIN:
        assert not services
        return
    (service,) = services
    predictor = service["spec"]["predictor"]
    assert predictor.pop("model") == {
        "modelFormat": {"name": formats[0]["name"]},
        "runtime": runtime["metadata"]["name"],
        "protocolVersion": protocols[0],
        "storageUri": "pvc://models" if wanted.claim else "s3://bucket/models",
    }
    (whole,) = kserve(wanted)
    assert {name: whole["spec"]["predictor"][name] for name in predictor} == predictor
    assert service["metadata"] == whole["metadata"]


def test_the_runtime_of_the_command(cli: Any) -> None:
    """Fails if the command doesn't print a runtime, or gives it options that KServe can't follow."""
    words = ["serve", "s3://bucket/models", "--manifest", "kserve-runtime", "--image", "accel:0.1"]
    ran = cli(*words)
    assert ran.code == 0, ran.stderr
    assert [one["kind"] for one in yaml.safe_load_all(ran.stdout)] == ["ServingRuntime", "InferenceService"]
    ran = cli(*words, "--deploy", "target-queue-ms=50")
    assert (ran.code, "leave out target-queue-ms" in ran.stderr) == (2, True)


def _container(wanted: Deployment) -> dict[str, Any]:
    found: dict[str, Any] = kubernetes(wanted)[0]["spec"]["template"]["spec"]["containers"][0]
    return found


def test_probes_and_ports_are_those_of_the_server() -> None:
    """Checks that each probe uses a port on which the server listens."""
    container = _container(WHOLE)
    words = container["command"]
    assert words[words.index("--http-port") + 1] == "9000"
    assert {container[p]["httpGet"]["port"] for p in ("startupProbe", "readinessProbe", "livenessProbe")} == {9000}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "Mini_LM"}, "lower-case"),
        ({"name": "3d"}, "start with a letter"),
        ({"target_cpu_percent": 0}, "1 to 100"),
        ({"target_cpu_percent": 101}, "1 to 100"),
        ({"image": ""}, "--image"),
        ({"memory": "4 GB"}, "quantity"),
        ({"min_replicas": 5}, "range"),
        ({"words": ("--tls-client-ca", "/ca.pem")}, "--tls-client-ca"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_here(fields: dict[str, Any], words: str) -> None:
    """Checks that accel refuses values that Kubernetes would refuse, including values that the schemas of the
    Kubernetes API accept."""
    with pytest.raises(BadConfig, match=words):
        Deployment(**({"name": "minilm", "image": "accel:0.1"} | fields))


def test_the_command_prints_what_kubectl_takes(cli: Any) -> None:
    """Fails if the command prints anything but YAML documents to stdout, or if the documents lack the requested
    ports."""
    ran = cli(
        "serve", "/models", "--manifest", "kubernetes", "--image", "accel:0.1", "--claim", "disk", "--http-port", "9000"
    )
    assert ran.code == 0, ran.stderr
    documents = list(yaml.safe_load_all(ran.stdout))
    assert [port["port"] for port in documents[1]["spec"]["ports"]] == [8001, 9000]
    assert documents[0]["metadata"]["name"] == "models"
    ran = cli("serve", "/models", "--manifest", "kserve")
    assert (ran.code, "--image" in ran.stderr) == (2, True)


@pytest.mark.parametrize(
    ("repository", "name"),
    [
        ("/srv/My_Models.v2/", "my-models-v2"),
        ("s3://bucket/2024", "accel-2024"),
        ("/", "accel"),
        ("/" + "a" * 62 + "_b", "a" * 62),
    ],
)
def test_names_are_taken_from_the_repository(cli: Any, repository: str, name: str) -> None:
    """Checks that accel derives a valid Kubernetes name from the repository if the folder's name is invalid."""
    ran = cli("serve", repository, "--manifest", "kubernetes", "--image", "accel:0.1")
    assert ran.code == 0, ran.stderr
    assert {document["metadata"]["name"] for document in yaml.safe_load_all(ran.stdout)} == {name}


def test_the_options_reach_the_container(cli: Any) -> None:
    """Fails if the container lacks an option of the command line, or has an option that wasn't passed. Also checks that
    the probes of a TLS server use TLS, and that each file that the server reads is mounted."""
    words = ["--mode", "poll", "--processes", "2", "--drain", "45.5", "--tokens", "/secrets/t.toml", "--insecure"]
    words += ["--rate-limit-resource", "A:1", "--rate-limit-resource", "B:2"]
    words += ["--tls-certificate", "/tls/c.pem", "--tls-key", "/tls/k.pem"]
    deploy = ["cpu=500m", "memory=1Gi", "gpus=1", "min-replicas=2", "max-replicas=8", "target-cpu-percent=50"]
    deploy += ["secret=accel-tokens:/secrets", "secret=accel-tls:/tls"]
    deployed = [word for text in deploy for word in ("--deploy", text)]
    ran = cli("serve", "/models", "--manifest", "kubernetes", "--image", "accel:0.1", *words, *deployed)
    assert ran.code == 0, ran.stderr
    deployment, _, autoscaler, _ = yaml.safe_load_all(ran.stdout)
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    command = container["command"]
    assert command[: command.index("8000") + 1] == [
        "accel", "serve", "/models", "--host", "0.0.0.0", "--grpc-port", "8001", "--http-port", "8000",
    ]  # fmt: skip
    options = [word for word in command[command.index("8000") + 1 :] if word.startswith("--")]
    assert sorted(options) == sorted(word for word in words if word.startswith("--"))
    for name, value in (("--mode", "poll"), ("--processes", "2"), ("--drain", "45.5"), ("--tokens", "/secrets/t.toml")):
        assert command[command.index(name) + 1] == value
    assert [b for a, b in pairwise(command) if a == "--rate-limit-resource"] == ["A:1", "B:2"]
    assert spec["terminationGracePeriodSeconds"] == 57
    assert container["resources"]["limits"] == {"cpu": "500m", "memory": "1Gi", "nvidia.com/gpu": 1}
    assert (autoscaler["spec"]["minReplicas"], autoscaler["spec"]["maxReplicas"]) == (2, 8)
    assert {container[p]["httpGet"]["scheme"] for p in ("startupProbe", "readinessProbe", "livenessProbe")} == {"HTTPS"}
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    found = {mounted[volume["name"]]: volume["secret"]["secretName"] for volume in spec["volumes"]}
    assert found == {"/secrets": "accel-tokens", "/tls": "accel-tls"}
    for wrong in ("gpus=many", "secret=x", "disk=1", "cpu="):
        ran = cli("serve", "/models", "--manifest", "kserve", "--image", "accel:0.1", "--deploy", wrong)
        assert (ran.code, wrong in ran.stderr) == (2, True)
    ran = cli("serve", "/models", "--manifest", "kserve", "--image", "accel:0.1", "--no-http")
    assert (ran.code, "--no-http" in ran.stderr) == (2, True)
