"""The manifests are valid under the operators' own schemas, and start what the image has.

``mpijob_schema.yaml`` and ``trainjob_schema.yaml`` are parts of the published custom resource
definitions; each names its version and source.
"""

import re

import pytest
import yaml

from tests.processes import ROOT

FOLDER = ROOT / "examples" / "kubernetes"
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
LIMITS = {
    "enum": lambda value, allowed: value in allowed,
    "pattern": lambda value, pattern: re.search(pattern, str(value)) is not None,
    "required": lambda value, names: set(names) <= set(value),
    "minimum": lambda value, least: value >= least,
    "minLength": lambda value, least: len(value) >= least,
    "maxLength": lambda value, most: len(value) <= most,
    "maxItems": lambda value, most: len(value) <= most,
    "minProperties": lambda value, least: len(value) >= least,
}


def problems(value, schema, path="spec"):
    """Where ``value`` is not as ``schema`` says, and why. A field that it does not name is one: so
    says the server to ``kubectl apply``.
    """
    kinds = [one["type"] for one in schema.get("anyOf", [schema]) if "type" in one]
    if kinds and type(value) not in [TYPES[kind] for kind in kinds]:
        return [f"{path}: not of type {' or '.join(kinds)}"]
    found = []
    for keyword, limit in schema.items():
        if keyword in LIMITS and not LIMITS[keyword](value, limit):
            found.append(f"{path}: {keyword} {limit}")
        elif keyword == "items":
            for number, one in enumerate(value):
                found += problems(one, limit, f"{path}[{number}]")
        elif keyword == "additionalProperties":
            for name, one in value.items():
                found += problems(one, limit, f"{path}.{name}")
        elif keyword == "properties":
            for name, one in value.items():
                inner = f"{path}.{name}"
                found += (
                    problems(one, limit[name], inner) if name in limit else [f"{inner}: unknown"]
                )
        else:
            assert keyword in (*LIMITS, "type", "anyOf", "x-kubernetes-int-or-string"), keyword
    return found


def schema(name):
    return yaml.safe_load((ROOT / "tests" / "engines" / f"{name}_schema.yaml").read_text())


def manifest(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


@pytest.mark.parametrize(
    ("name", "kind", "version"),
    [
        ("mpijob", "MPIJob", "kubeflow.org/v2beta1"),
        ("trainjob", "TrainJob", "trainer.kubeflow.org/v1alpha1"),
    ],
)
def test_manifests_are_valid(name, kind, version):
    read = manifest(name)
    assert (read["kind"], read["apiVersion"]) == (kind, version)
    assert problems(read["spec"], schema(name)) == []


def test_mistakes_in_a_manifest_are_found():
    spec = manifest("mpijob")["spec"]
    spec |= {"mpiImplementation": "LAM", "slotsPerWorker": "2", "replicas": 1}
    [container] = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    container["resources"]["limits"]["memory"] = "8 GB"
    del container["volumeMounts"][0]["name"]
    found = " ".join(problems(spec, schema("mpijob")))
    for mistake in ("slotsPerWorker: not of", "mpiImplementation: enum", "replicas: unknown"):
        assert f"spec.{mistake}" in found
    for mistake in ("resources.limits.memory: pattern", "volumeMounts[0]: required"):
        assert f"Worker.template.spec.containers[0].{mistake}" in found


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
