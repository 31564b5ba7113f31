"""The files for KubeRay: they have the fields of its resources and no others, and deploy what can be deployed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from draftwise.deploy.plan import IMPORT_PATH, Plan

FOLDER = Path(__file__).parents[2] / "deploy" / "kuberay"

# Fields of ray.io/v1 that are used, as KubeRay's raycluster_types.go and rayservice_types.go name them, and of pods;
# a mapping: fields within; a list: of such; None: a value.
TEXTS: Any = {}  # any names
RESOURCES = {"requests": TEXTS, "limits": TEXTS}
CONTAINER = {
    "name": None,
    "image": None,
    "ports": [{"containerPort": None, "name": None}],
    "env": [{"name": None, "value": None,
             "valueFrom": {"secretKeyRef": {"name": None, "key": None, "optional": None}}}],
    "resources": RESOURCES,
    "volumeMounts": [{"name": None, "mountPath": None, "readOnly": None}],
}  # fmt: skip
POD = {
    "metadata": {"labels": TEXTS, "annotations": TEXTS},
    "spec": {
        "containers": [CONTAINER],
        "volumes": [{"name": None, "emptyDir": {"medium": None, "sizeLimit": None}}],
        "nodeSelector": TEXTS,
    },
}
HEAD = {"serviceType": None, "enableIngress": None, "rayStartParams": TEXTS, "template": POD}
WORKERS = {
    "groupName": None, "replicas": None, "minReplicas": None, "maxReplicas": None, "numOfHosts": None,
    "rayStartParams": TEXTS, "template": POD, "scaleStrategy": {"workersToDelete": [None]},
}  # fmt: skip
CLUSTER = {
    "headGroupSpec": HEAD, "workerGroupSpecs": [WORKERS], "rayVersion": None, "enableInTreeAutoscaling": None,
    "autoscalerOptions": {"idleTimeoutSeconds": None, "upscalingMode": None}, "suspend": None,
}  # fmt: skip
SERVICE = {"serveConfigV2": None, "rayClusterConfig": CLUSTER}
KINDS = {"RayCluster": CLUSTER, "RayService": SERVICE}
NEEDED = ("rayStartParams", "template")


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
        for name, one in value.items():
            assert name in schema, f"{where}.{name} is no field of the resource"
            check(one, schema[name], f"{where}.{name}")
    else:
        assert not isinstance(value, dict | list), where


@pytest.mark.parametrize("name", ["rayservice.yaml", "raycluster.yaml"])
def test_fields_are_those_of_the_resource(name: str) -> None:
    found = yaml.safe_load((FOLDER / name).read_text())
    assert found["apiVersion"] == "ray.io/v1" and found["metadata"]["name"]
    check(found["spec"], KINDS[found["kind"]], name)
    cluster = found["spec"].get("rayClusterConfig", found["spec"])
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(field in group for field in NEEDED)
        mounts = [
            m["name"] for c in group["template"]["spec"]["containers"] for m in c.get("volumeMounts", ())
        ]
        assert set(mounts) == {v["name"] for v in group["template"]["spec"].get("volumes", ())}
    image = (FOLDER / "Dockerfile").read_text()
    assert f"rayproject/ray:{cluster['rayVersion']}-" in image, (
        "pods have the Ray that the operator is told of"
    )


def test_a_field_that_there_is_not_is_found() -> None:
    with pytest.raises(AssertionError, match="numOfHost is no field"):
        check({"workerGroupSpecs": [{"numOfHost": 2}]}, CLUSTER, "spec")


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
