"""The files for KubeRay: they have the fields of its resources and no others, and deploy what can be deployed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from draftwise.deploy.plan import IMPORT_PATH, Plan

FOLDER = Path(__file__).parents[2] / "deploy" / "kuberay"

# Fields of ray.io/v1 that are used, as KubeRay's raycluster_types.go and rayservice_types.go name and type them, and of
# pods; a mapping: fields within, those with "!" are needed; a list: of such; a type or several: a value of it.
TEXTS: Any = {}  # any names
TEXT, NUMBER, SWITCH = (str,), (int,), (bool,)
QUANTITY = (str, int)
RESOURCES = {
    "requests": {"cpu": QUANTITY, "memory": QUANTITY},
    "limits": {"cpu": QUANTITY, "memory": QUANTITY},
}
CONTAINER = {
    "name!": TEXT,
    "image": TEXT,
    "ports": [{"containerPort!": NUMBER, "name": TEXT}],
    "env": [{"name!": TEXT, "value": TEXT,
             "valueFrom": {"secretKeyRef": {"name": TEXT, "key!": TEXT, "optional": SWITCH}}}],
    "resources": RESOURCES,
    "volumeMounts": [{"name!": TEXT, "mountPath!": TEXT, "readOnly": SWITCH}],
}  # fmt: skip
POD = {
    "metadata": {"labels": TEXTS, "annotations": TEXTS},
    "spec": {
        "containers!": [CONTAINER],
        "volumes": [{"name!": TEXT, "emptyDir": {"medium": TEXT, "sizeLimit": QUANTITY}}],
        "nodeSelector": TEXTS,
    },
}
HEAD = {"serviceType": TEXT, "enableIngress": SWITCH, "rayStartParams!": TEXTS, "template!": POD}
WORKERS = {
    "groupName!": TEXT, "replicas": NUMBER, "minReplicas!": NUMBER, "maxReplicas!": NUMBER, "numOfHosts": NUMBER,
    "rayStartParams!": TEXTS, "template!": POD, "scaleStrategy": {"workersToDelete": [TEXT]},
}  # fmt: skip
CLUSTER = {
    "headGroupSpec!": HEAD, "workerGroupSpecs": [WORKERS], "rayVersion": TEXT, "enableInTreeAutoscaling": SWITCH,
    "autoscalerOptions": {"idleTimeoutSeconds": NUMBER, "upscalingMode": TEXT}, "suspend": SWITCH,
}  # fmt: skip
SERVICE = {"serveConfigV2": TEXT, "rayClusterConfig": CLUSTER}
KINDS = {"RayCluster": CLUSTER, "RayService": SERVICE}


def check(value: Any, schema: Any, where: str) -> None:
    """Raise AssertionError for a field that the resource lacks, or a value of another kind."""
    if isinstance(schema, list):
        assert isinstance(value, list) and value, where
        for i, one in enumerate(value):
            check(one, schema[0], f"{where}[{i}]")
    elif isinstance(schema, dict):
        assert isinstance(value, dict), where
        if not schema:
            assert all(isinstance(one, str) for one in value.values()), f"{where}: all are texts"
            return
        fields = {name.rstrip("!"): kind for name, kind in schema.items()}
        for name, one in value.items():
            assert name in fields, f"{where}.{name} is no field of the resource"
            check(one, fields[name], f"{where}.{name}")
        for name in schema:
            assert not name.endswith("!") or name[:-1] in value, f"{where} lacks {name[:-1]}"
    else:
        assert type(value) in schema, f"{where}: {value!r} is of another type"


@pytest.mark.parametrize("name", ["rayservice.yaml", "raycluster.yaml"])
def test_fields_are_those_of_the_resource(name: str) -> None:
    found = yaml.safe_load((FOLDER / name).read_text())
    assert found["apiVersion"] == "ray.io/v1" and found["metadata"]["name"]
    check(found["spec"], KINDS[found["kind"]], name)
    cluster = found["spec"].get("rayClusterConfig", found["spec"])
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        mounts = [
            m["name"] for c in group["template"]["spec"]["containers"] for m in c.get("volumeMounts", ())
        ]
        assert set(mounts) == {v["name"] for v in group["template"]["spec"].get("volumes", ())}
    image = (FOLDER / "Dockerfile").read_text()
    assert f"rayproject/ray:{cluster['rayVersion']}-" in image, (
        "pods have the Ray that the operator is told of"
    )


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("spec", "workerGroupSpecs", 0, "numOfHost"), 2, "numOfHost is no field"),
        (("spec", "workerGroupSpecs", 0, "replicas"), "2", "replicas: '2' is of another type"),
        (("spec", "workerGroupSpecs", 0, "groupName"), None, r"workerGroupSpecs\[0\] lacks groupName"),
        (("spec", "headGroupSpec", "rayStartParams", "num-cpus"), 0, "rayStartParams: all are texts"),
        (("spec", "headGroupSpec", "enableIngress"), 1, "enableIngress: 1 is of another type"),
    ],
)
def test_what_the_operator_would_refuse_is_found(path: tuple[Any, ...], value: Any, message: str) -> None:
    """None: the field is taken out."""
    file = yaml.safe_load((FOLDER / "raycluster.yaml").read_text())
    holder = file
    for step in path[:-1]:
        holder = holder[step]
    if value is None:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    with pytest.raises(AssertionError, match=message):
        check(file["spec"], CLUSTER, "spec")


def test_the_service_deploys_what_fits_into_its_cluster() -> None:
    spec = yaml.safe_load((FOLDER / "rayservice.yaml").read_text())["spec"]
    config = yaml.safe_load(spec["serveConfigV2"])
    assert config["http_options"] == {"host": "0.0.0.0", "port": 8000}
    (application,) = config["applications"]
    assert application["import_path"] == IMPORT_PATH
    plan = Plan.of(application["args"])
    assert plan.server_config.host == "0.0.0.0"
    (engine, *ranks) = plan.reserves()["placement_group_bundles"]
    (group,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    room = int(worker["resources"]["requests"]["cpu"])
    assert ranks == [{"CPU": 8}] * 2 and engine == {"CPU": 1}
    assert ranks[0]["CPU"] + engine["CPU"] <= room, "a pod has room for a rank and an engine"
    assert group["replicas"] == plan.num_replicas * len(ranks)
