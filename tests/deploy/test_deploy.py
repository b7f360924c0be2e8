"""The manifests in deploy/: their fields are those of KubeRay's resources, and what they run exists here.

The schema below is a subset of KubeRay's `ray.io/v1` resources, written down from its API reference
(docs/reference/api.md) and from ray-operator/config/crd/bases/ray.io_rayjobs.yaml of ray-project/kuberay at commit
00741298: the fields that our manifests use, and no others, so that a wrong name is an error. It is not the CRD itself
(1.1 MB, mostly the schema of a Pod), and no Kubernetes has seen these files. KUBERAY_CRDS=FOLDER names real ones.
"""

import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from ray.serve.schema import ServeDeploySchema

from jobs.generate import parse
from pipeline.config.job import ModelConfig, build_config, load_config
from pipeline.resolve_model import check_model
from pipeline.service.app import DRAIN_S, build_app
from pipeline.service.config import ServeConfig

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "deploy").glob("ray*.yaml"))


def fields(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def items(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1}


TEXT, COUNT, YES = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}  # numbers must be quoted: the CRD has strings here
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[KMGT]i?)?$"}
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}
PORT = fields(["containerPort"], containerPort={"type": "integer", "minimum": 1, "maximum": 65535}, name=TEXT)
SECRET = fields([], secretKeyRef=fields(["name", "key"], name=TEXT, key=TEXT))
VARIABLE = fields(["name"], name=TEXT, valueFrom=SECRET)
SECURITY = fields(
    [], runAsNonRoot=YES, runAsUser=COUNT, allowPrivilegeEscalation=YES, readOnlyRootFilesystem=YES,
    capabilities=fields([], drop=items(TEXT), add=items(TEXT)),
    seccompProfile=fields(["type"], type={"enum": ["RuntimeDefault", "Unconfined", "Localhost"]}),
)  # fmt: skip
CONTAINER = fields(
    ["name", "image"], name=TEXT, image=TEXT, ports=items(PORT), env=items(VARIABLE), securityContext=SECURITY,
    resources=fields([], requests=QUANTITIES, limits=QUANTITIES),
)  # fmt: skip
TOLERATION = fields([], key=TEXT, operator={"enum": ["Exists", "Equal"]}, value=TEXT, effect=TEXT)
POD = fields(
    ["containers"], containers=items(CONTAINER), tolerations=items(TOLERATION), nodeSelector=TEXTS,
    terminationGracePeriodSeconds=COUNT, restartPolicy={"enum": ["Never", "OnFailure", "Always"]},
)  # fmt: skip
TEMPLATE = fields(["spec"], metadata=fields([], annotations=TEXTS, labels=TEXTS), spec=POD)
WORKERS = fields(
    ["groupName", "template"], groupName=TEXT, replicas=COUNT, minReplicas=COUNT, maxReplicas=COUNT, numOfHosts=COUNT,
    rayStartParams=TEXTS, template=TEMPLATE,
)  # fmt: skip
AUTOSCALER = fields(
    [], idleTimeoutSeconds=COUNT, upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
    securityContext=SECURITY,
)  # fmt: skip
AUTHENTICATION = fields(["mode"], mode={"enum": ["disabled", "token"]}, secretName=TEXT)
CLUSTER = fields(
    ["headGroupSpec"], rayVersion=TEXT, authOptions=AUTHENTICATION, enableInTreeAutoscaling=YES,
    autoscalerOptions=AUTOSCALER, headGroupSpec=fields(["template"], rayStartParams=TEXTS, template=TEMPLATE),
    workerGroupSpecs=items(WORKERS),
)  # fmt: skip
SPECS = {
    "RayJob": fields(
        ["entrypoint", "rayClusterSpec"], entrypoint=TEXT, runtimeEnvYAML=TEXT, backoffLimit=COUNT,
        shutdownAfterJobFinishes=YES, ttlSecondsAfterFinished=COUNT, activeDeadlineSeconds=COUNT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]}, rayClusterSpec=CLUSTER,
        submitterPodTemplate=TEMPLATE,
    ),
    "RayService": fields(
        ["serveConfigV2", "rayClusterConfig"], serveConfigV2=TEXT, rayClusterConfig=CLUSTER,
    ),
}  # fmt: skip
SELECTOR = fields(["matchLabels"], matchLabels=TEXTS)
RULE = fields(
    [], **{"from": items(fields([], podSelector=SELECTOR, namespaceSelector={"type": "object"}))},
    ports=items(fields(["protocol", "port"], protocol={"enum": ["TCP", "UDP"]}, port=COUNT)),
)  # fmt: skip
POLICY = fields(
    ["podSelector", "policyTypes"], podSelector=SELECTOR, policyTypes=items({"enum": ["Ingress", "Egress"]}),
    ingress=items(RULE),
)  # fmt: skip


def load(name: str) -> dict[str, Any]:
    """The resource of KubeRay in that file."""
    return documents(name)[0]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy" / name).read_text(encoding="utf-8")))


def cluster(manifest: dict[str, Any]) -> dict[str, Any]:
    spec = manifest["spec"]
    return spec.get("rayClusterSpec") or spec["rayClusterConfig"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_has_only_fields_that_the_resource_has(path: Path) -> None:
    manifest, policy = documents(path.name)
    name = fields(["name"], name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"})
    for document, version, kinds, spec in (
        (manifest, "ray.io/v1", list(SPECS), SPECS[manifest["kind"]]),
        (policy, "networking.k8s.io/v1", ["NetworkPolicy"], POLICY),
    ):
        top = fields(
            ["apiVersion", "kind", "metadata", "spec"], apiVersion={"const": version}, kind={"enum": kinds},
            metadata=name, spec=spec,
        )  # fmt: skip
        jsonschema.validate(document, top)


@pytest.mark.skipif("KUBERAY_CRDS" not in os.environ, reason="KUBERAY_CRDS names no folder with KubeRay's CRDs")
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_agrees_with_the_crd(path: Path) -> None:
    manifest = load(path.name)
    crd = yaml.safe_load((Path(os.environ["KUBERAY_CRDS"]) / f"ray.io_{manifest['kind'].lower()}s.yaml").read_text())
    version = next(v for v in crd["spec"]["versions"] if v["name"] == "v1")
    jsonschema.validate(manifest, closed(version["schema"]["openAPIV3Schema"]))


def closed(schema: Any) -> Any:
    """Kubernetes drops unknown fields silently; here they are errors."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


def templates(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]


def next_minor(version: str) -> str:
    parsed = Version(version)
    return f"{parsed.major}.{parsed.minor + 1}.0"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_fits_this_project(path: Path) -> None:
    spec = cluster(load(path.name))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ray = next(one for one in map(Requirement, project["dependencies"]) if one.name == "ray")
    assert ray.specifier.contains(spec["rayVersion"])
    assert not ray.specifier.contains(next_minor(spec["rayVersion"])), "the image has the newest Ray of the range"
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        if group["minReplicas"] < group["maxReplicas"]:
            assert spec["enableInTreeAutoscaling"] is True, "nothing else adds nodes"
    images = {container["image"] for template in templates(spec) for container in template["spec"]["containers"]}
    assert len(images) == 1, "head and workers run one image"


RESTRICTED = {
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""What Kubernetes' Pod Security Standard "restricted" asks of a container."""


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_cluster_lets_in_only_who_has_its_token(path: Path) -> None:
    spec = cluster(load(path.name))
    assert spec["authOptions"] == {"mode": "token"}
    assert "operator 1.5.1 or newer" in path.read_text(encoding="utf-8"), "older ones ignore authOptions"
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert "dashboard-host" not in group["rayStartParams"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_containers_have_no_rights_that_they_do_not_need(path: Path) -> None:
    spec = load(path.name)["spec"]
    pods = [*templates(cluster(load(path.name))), *([spec["submitterPodTemplate"]] if "entrypoint" in spec else [])]
    for pod in pods:
        for container in pod["spec"]["containers"]:
            assert container["securityContext"] == RESTRICTED, container["name"]
    assert cluster(load(path.name))["autoscalerOptions"]["securityContext"] == RESTRICTED
    users = re.findall(r"^USER (.*)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert [user.isdigit() and user != "0" for user in users] == [True], "runAsNonRoot needs a number"


@pytest.mark.parametrize(("name", "open_port"), [("rayjob.yaml", 8080), ("rayservice.yaml", 8000)])
def test_others_reach_one_port_of_the_pods(name: str, open_port: int) -> None:
    manifest, policy = documents(name)
    spec = manifest["spec"]
    labels = policy["spec"]["podSelector"]["matchLabels"]
    for pod in [*templates(cluster(manifest)), *([spec["submitterPodTemplate"]] if "entrypoint" in spec else [])]:
        assert pod["metadata"]["labels"] == labels
    own, operator, others = policy["spec"]["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": labels}}]}
    assert operator["ports"] == [{"protocol": "TCP", "port": 8265}], "where it submits jobs and applications"
    (peer,) = operator["from"]
    assert peer["podSelector"] == {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}}
    assert others == {"ports": [{"protocol": "TCP", "port": open_port}]}


def test_the_job_runs_a_command_that_exists_with_a_configuration_that_loads() -> None:
    spec = load("rayjob.yaml")["spec"]
    shell, flag, script = shlex.split(spec["entrypoint"])
    assert (shell, flag) == ("bash", "-c")
    folder, command = script.split(" && ")
    assert folder == "cd /app"
    python, dash_m, verb, *words = shlex.split(command)
    assert (python, dash_m, verb) == ("python", "-m", "jobs.generate")
    arguments = parse(words)
    config = load_config(ROOT / arguments.config, arguments.overrides)
    assert config.output.if_exists == "resume", "backoffLimit submits it again"
    assert spec["backoffLimit"] <= 1, "each try is a cluster of GPUs, and exit code 2 is tried again too"
    model = ROOT / config.model.source.removeprefix("/app/")
    assert config.model.source.startswith("/app/"), "the image is all that the pods have"
    notes: list[str] = []
    checked = check_model(config.model_copy(update={"model": ModelConfig(source=str(model))}), notes.append)
    assert checked.config.num_hidden_layers > 0
    assert config.actors.num_actors == (1, spec["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplicas"])
    assert yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["PYTHONPATH"] == "/app"


def test_the_service_has_a_configuration_that_ray_serve_takes() -> None:
    schema = ServeDeploySchema.model_validate(yaml.safe_load(load("rayservice.yaml")["spec"]["serveConfigV2"]))
    (application,) = schema.applications
    assert application.import_path == f"{build_app.__module__}:{build_app.__name__}"
    config = build_config(ServeConfig, application.args)
    assert (ROOT / config.model.source.removeprefix("/app/") / "config.json").is_file()
    (deployment,) = application.deployments
    assert deployment.name == "Completions"
    scaling, (group,) = deployment.autoscaling_config, cluster(load("rayservice.yaml"))["workerGroupSpecs"]
    assert scaling["max_replicas"] * deployment.ray_actor_options.num_gpus <= group["maxReplicas"], "one GPU a node"


def test_kubernetes_waits_for_the_last_answers() -> None:
    found = load("rayservice.yaml")["spec"]
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(found["serveConfigV2"])).applications
    assert build_config(ServeConfig, application.args).limits.request_timeout_s <= DRAIN_S
    for template in templates(found["rayClusterConfig"]):
        assert template["spec"]["terminationGracePeriodSeconds"] > DRAIN_S
