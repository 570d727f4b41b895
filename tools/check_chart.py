"""Render the Helm chart as Helm does, and compare it with the schemas of Kubernetes.

python -m tools.check_chart      (in an environment with deploy/requirements.txt: make check-deploy)

The Python package that renders it is Helm's own library in Go; no cluster and no command is needed.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import helm_python
import yaml
from helm_python import Chart

ROOT = Path(__file__).parent.parent
CHART = ROOT / "deploy" / "helm" / "truedraft"
EVERYTHING = {
    "gpus": 1,
    "existingClaim": "models",
    "secretName": "keys",
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "imagePullSecrets": [{"name": "registry"}],
    "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "tlsSecret": "certificate",
    "annotations": {"team": "models"},
    "podAnnotations": {"sidecar": "no"},
    "service": {"annotations": {"internal": "yes"}},
    "ingress": {"enabled": True, "className": "nginx", "host": "llm.example.com", "tlsSecret": "public"},
    "config": {"target": "a/b", "port": 9000, "drain_timeout": 90, "host": "0.0.0.0"},
    "autoscaling": {"enabled": True},
    "monitoring": {"enabled": True},
}
WRONG: list[dict[str, Any]] = [
    {"replicas": 0},
    {"replica": 3},
    {"image": {"tag": ""}},
    {"monitoring": {"interval": "soon"}},
    {"imagePullSecrets": ["registry"]},
    {"env": {"HTTPS_PROXY": "http://proxy:3128"}},
    {"podAnnotations": {"port": 80}},
    {"ingress": {"hosts": ["a"]}},
]
PROBES = ("startup", "readiness", "liveness")


def rendered(values: dict[str, Any], name: str = "truedraft") -> dict[str, Any]:
    """Returns the objects by kind."""
    files = Chart.load(str(CHART)).render(values, name=name, namespace="default", is_install=True)
    objects = [item for text in files.values() for item in yaml.safe_load_all(text) if item]
    return {item["kind"]: item for item in objects}


def check_schemas(objects: dict[str, Any]) -> None:
    """Asks kubernetes-validate, which knows no custom resources."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for kind, item in objects.items():
            if kind != "ServiceMonitor":
                paths.append(Path(folder) / f"{kind}.yaml")
                paths[-1].write_text(yaml.safe_dump(item))
        tool = Path(sys.executable).parent / "kubernetes-validate"
        subprocess.run([tool, "--strict", "--quiet", *paths], check=True)


def check_defaults(objects: dict[str, Any]) -> None:
    """Without values, pods drain before they are killed, are not root, and their image is the CPU's."""
    spec = objects["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    config = yaml.safe_load(objects["ConfigMap"]["data"]["config.yaml"])
    pre_stop = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > config["drain_timeout"] + pre_stop
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["enableServiceLinks"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert (container["image"], container["imagePullPolicy"]) == ("truedraft:cpu", "IfNotPresent")
    asked = [container[f"{name}Probe"]["httpGet"] for name in PROBES]
    assert [probe["path"] for probe in asked] == ["/ready", "/ready", "/health"]
    assert {probe["scheme"] for probe in asked} == {"HTTP"}
    assert "env" not in container
    assert not {"imagePullSecrets", "affinity"} & set(pod)
    assert "Ingress" not in objects
    assert objects["Service"]["spec"]["ports"][0]["port"] == 80
    assert (spec["replicas"], spec["strategy"]["rollingUpdate"]["maxUnavailable"]) == (2, 0)


def check_all_values(objects: dict[str, Any]) -> None:
    """Each value has its effect, and all objects find the pods."""
    spec = objects["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    assert "replicas" not in spec
    assert pod["terminationGracePeriodSeconds"] == 120
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod["containers"][0]["ports"][0]["containerPort"] == 9000
    assert pod["containers"][0]["envFrom"][0]["secretRef"]["name"] == "keys"
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}} in pod["volumes"]
    check_surroundings(objects)
    labels = spec["template"]["metadata"]["labels"].items()
    assert spec["selector"]["matchLabels"].items() <= labels
    assert objects["Service"]["spec"]["selector"].items() <= labels
    service_labels = objects["Service"]["metadata"]["labels"].items()
    assert objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels
    assert objects["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items() <= service_labels
    assert objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == "other"


def check_surroundings(objects: dict[str, Any]) -> None:
    """Private registries, proxies, annotations, an ingress need no fork; with a certificate all speak TLS."""
    deployment, service, ingress = (objects[kind] for kind in ("Deployment", "Service", "Ingress"))
    template = deployment["spec"]["template"]
    pod = template["spec"]
    (container,) = pod["containers"]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["affinity"] == EVERYTHING["affinity"]
    env = {item["name"]: item["value"] for item in container["env"]}
    assert env["HTTPS_PROXY"] == "http://proxy:3128"
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "tls")
    assert env["TRUEDRAFT_SSL_CERTFILE"] == f"{mount['mountPath']}/tls.crt"
    assert env["TRUEDRAFT_SSL_KEYFILE"] == f"{mount['mountPath']}/tls.key"
    assert {"name": "tls", "secret": {"secretName": "certificate"}} in pod["volumes"]
    assert {container[f"{name}Probe"]["httpGet"]["scheme"] for name in PROBES} == {"HTTPS"}
    assert objects["ServiceMonitor"]["spec"]["endpoints"][0]["scheme"] == "https"
    assert deployment["metadata"]["annotations"] == {"team": "models"}
    assert template["metadata"]["annotations"]["sidecar"] == "no"
    assert "checksum/config" in template["metadata"]["annotations"]
    assert service["metadata"]["annotations"] == {"internal": "yes"}
    port = service["spec"]["ports"][0]
    assert port["port"] == 443
    (rule,) = ingress["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert rule["host"] == "llm.example.com"
    assert backend == {"name": service["metadata"]["name"], "port": {"name": port["name"]}}
    assert ingress["spec"]["tls"] == [{"hosts": ["llm.example.com"], "secretName": "public"}]
    assert ingress["spec"]["ingressClassName"] == "nginx"


def main() -> None:
    report = helm_python.lint(str(CHART))
    findings = [message for message in report["messages"] if message["severity"] >= 2]
    if report["errors"] or findings:
        raise SystemExit(json.dumps(report, indent=1))
    plain, full = rendered({}), rendered(EVERYTHING, name="other")
    check_schemas(plain)
    check_schemas(full)
    check_defaults(plain)
    check_all_values(full)
    own = rendered({"config": {"ssl_certfile": "/cache/a.pem", "ssl_keyfile": "/cache/b.pem"}})
    probe = own["Deployment"]["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]
    assert probe["httpGet"]["scheme"] == "HTTPS"
    for values in WRONG:
        try:
            Chart.load(str(CHART)).validate_schema(values)
        except helm_python.HelmError:
            continue
        raise SystemExit(f"FAILED: the chart takes {values}")
    print(f"The Helm chart is valid: {', '.join(sorted(full))}")


if __name__ == "__main__":
    main()
