"""The manifests use only fields that the operators know, and start what the image has.

``FIELDS`` was written from the operators' custom resource definitions: MPIJob v2beta1 of MPI
operator 0.8.2, TrainJob v1alpha1 of Kubeflow Trainer 2.3.0. Both manifests were valid under the
whole definitions, with no unknown field, on 28 November 2026.
"""

import pytest
import yaml

from tests.processes import ROOT

FOLDER = ROOT / "examples" / "kubernetes"
CONTAINER = {"name": str, "image": str, "command": [str], "args": [str]}
CONTAINER |= {"resources": {"limits": dict}, "volumeMounts": [{"name": str, "mountPath": str}]}
VOLUMES = [{"name": str, "emptyDir": {"medium": str, "sizeLimit": str}}]
POD = {"spec": {"containers": [CONTAINER], "volumes": VOLUMES}}
REPLICAS = {"replicas": int, "template": POD}
JOBS = [{"name": str, "template": {"spec": {"template": POD}}}]
VALUE = {"secretKeyRef": {"name": str, "key": str}}
FIELDS = {
    "mpijob": {
        "slotsPerWorker": int,
        "sshAuthMountPath": str,
        "runPolicy": {"cleanPodPolicy": str, "backoffLimit": int},
        "mpiReplicaSpecs": {"Launcher": REPLICAS, "Worker": REPLICAS},
    },
    "trainjob": {
        "runtimeRef": {"name": str},
        "trainer": {
            "image": str,
            "numNodes": int,
            "numProcPerNode": int,
            "command": [str],
            "resourcesPerNode": {"limits": dict},
            "env": [{"name": str, "valueFrom": VALUE}],
        },
        "runtimePatches": [
            {
                "manager": str,
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": JOBS}}},
            }
        ],
    },
}


def unknown(value, known, path="spec"):
    """What of ``value`` is not as in ``known``."""
    if isinstance(known, type):
        return [] if type(value) is known else [path]
    if type(value) is not type(known):
        return [path]
    if isinstance(known, list):
        found = [unknown(one, known[0], f"{path}[]") for one in value]
    else:
        found = [
            unknown(one, known[name], f"{path}.{name}") if name in known else [f"{path}.{name}"]
            for name, one in value.items()
        ]
    return [problem for problems in found for problem in problems]


def manifest(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


@pytest.mark.parametrize(
    ("name", "kind", "version"),
    [
        ("mpijob", "MPIJob", "kubeflow.org/v2beta1"),
        ("trainjob", "TrainJob", "trainer.kubeflow.org/v1alpha1"),
    ],
)
def test_every_field_is_one_of_the_operator(name, kind, version):
    read = manifest(name)
    assert (read["kind"], read["apiVersion"]) == (kind, version)
    assert unknown(read["spec"], FIELDS[name]) == []
    assert unknown(read["spec"] | {"replica": 1}, FIELDS[name]) == ["spec.replica"]


def test_launcher_and_workers_agree():
    spec = manifest("mpijob")["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    [start] = launcher["template"]["spec"]["containers"]
    command = start["command"] + start["args"]
    slots = worker["replicas"] * spec["slotsPerWorker"]
    assert command[command.index("-n") + 1] == str(slots)
    assert (ROOT / command[-1]).is_file()
    # keys are mounted where sshd looks for them, and both ends use one port
    sshd, ssh = (FOLDER / name for name in ("sshd_config", "ssh_config"))
    assert f"HostKey {spec['sshAuthMountPath']}/id_rsa" in sshd.read_text()
    assert "Port 2222" in sshd.read_text()
    assert "Port 2222" in ssh.read_text()


def test_the_image_has_what_the_manifests_start():
    recipe = (FOLDER / "Dockerfile").read_text()
    copied = [line.split()[1:-1] for line in recipe.splitlines() if line.startswith("COPY ")]
    assert all((ROOT / source).exists() for sources in copied for source in sources)
    script = manifest("trainjob")["spec"]["trainer"]["command"][-1]
    assert f'"{script}"' in recipe
    assert (ROOT / script).is_file()
