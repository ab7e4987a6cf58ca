"""The manifests that `accel serve --manifest` writes, against the schemas of the Kubernetes API itself."""

from __future__ import annotations

from typing import Any

import pytest

from accel.errors import BadConfig
from accel.serve.manifests import Deployment, kserve, kubernetes, to_yaml

validate = pytest.importorskip("kubernetes_validate")
yaml = pytest.importorskip("yaml")

PLAIN = Deployment(name="minilm", image="registry.example/accel:0.1")
WHOLE = Deployment(name="minilm", image="accel:0.1", claim="models", gpus=1, cpu="500m", min_replicas=2, http_port=9000)


@pytest.mark.parametrize("wanted", [PLAIN, WHOLE])
def test_kubernetes_takes_every_document(wanted: Deployment) -> None:
    """Fails if a field is misspelt or of the wrong type: strict validation refuses what the API doesn't know."""
    documents = list(yaml.safe_load_all(to_yaml(kubernetes(wanted))))
    assert [d["kind"] for d in documents] == ["Deployment", "Service", "HorizontalPodAutoscaler"]
    for document in documents:
        validate.validate(document, validate.latest_version(), strict=True)


def test_a_misspelt_field_would_be_found() -> None:
    """Fails if the validation above lets anything through."""
    document = kubernetes(PLAIN)[0]
    document["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(document, validate.latest_version(), strict=True)


@pytest.mark.parametrize("wanted", [PLAIN, WHOLE])
def test_kserve_predictor_is_a_pod(wanted: Deployment) -> None:
    """KServe's predictor takes a PodSpec's fields beside its own: fails if the container isn't a valid one."""
    (document,) = yaml.safe_load_all(to_yaml(kserve(wanted)))
    predictor = dict(document["spec"]["predictor"])
    for own in ("minReplicas", "maxReplicas", "scaleMetric", "scaleTarget"):
        predictor.pop(own)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": document["metadata"], "spec": predictor}
    validate.validate(pod, validate.latest_version(), strict=True)
    assert predictor["containers"][0]["ports"][0]["name"] == "h2c"


def _container(wanted: Deployment) -> dict[str, Any]:
    found: dict[str, Any] = kubernetes(wanted)[0]["spec"]["template"]["spec"]["containers"][0]
    return found


def test_probes_and_ports_are_those_of_the_server() -> None:
    """Fails if a probe asks a port that nobody listens on."""
    container = _container(WHOLE)
    words = container["command"]
    assert words[words.index("--http-port") + 1] == "9000"
    assert {container[p]["httpGet"]["port"] for p in ("startupProbe", "readinessProbe", "livenessProbe")} == {9000}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "Mini_LM"}, "lower-case"),
        ({"image": ""}, "--image"),
        ({"memory": "4 GB"}, "quantity"),
        ({"min_replicas": 5}, "range"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_here(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        Deployment(**({"name": "minilm", "image": "accel:0.1"} | fields))


def test_the_command_prints_what_kubectl_takes(cli: Any) -> None:
    """Fails if anything but the documents is on stdout, or the ports that were asked for aren't in them."""
    ran = cli(
        "serve", "/models", "--manifest", "kubernetes", "--image", "accel:0.1", "--claim", "disk", "--http-port", "9000"
    )
    assert ran.code == 0, ran.stderr
    documents = list(yaml.safe_load_all(ran.stdout))
    assert [port["port"] for port in documents[1]["spec"]["ports"]] == [8001, 9000]
    assert documents[0]["metadata"]["name"] == "models"
    ran = cli("serve", "/models", "--manifest", "kserve")
    assert (ran.code, "--image" in ran.stderr) == (2, True)
