"""The unit, the image and the manifests agree with the server: ports, flags, keys, paths, times."""

import configparser
import itertools
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from jaxserve.cli.parser import build_parser
from jaxserve.config import Config, load_config
from jaxserve.server.app import GENERATION
from jaxserve.server.lifecycle import FLUSH_S
from tests.deploy.promql import DEPLOY

CONFIGS: Final = ("systemd", "docker", "kubernetes")
UNIT: Final = DEPLOY / "systemd" / "jaxserve.service"
DOCKERFILE: Final = DEPLOY / "docker" / "Dockerfile"
ROOT: Final = DEPLOY.parent


def read_config(name: str, folder: Path) -> Config:
    """Returns a deployment's configuration, read as the server reads it."""
    if name != "kubernetes":
        return load_config(DEPLOY / name / "jaxserve.toml")
    path = folder / "jaxserve.toml"
    path.write_text(objects("ConfigMap")[0]["data"]["jaxserve.toml"])
    return load_config(path)


def objects(kind: str) -> list[dict[str, Any]]:
    """Returns the manifests of a kind, of the files that the kustomization names."""
    folder = DEPLOY / "kubernetes"
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    files = (yaml.safe_load_all((folder / name).read_text()) for name in names)
    return [item for item in itertools.chain(*files) if item["kind"] == kind]


def pod() -> dict[str, Any]:
    (deployment,) = objects("Deployment")
    spec = deployment["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    assert isinstance(only, dict)
    return only


def unit() -> dict[str, list[str]]:
    """Returns the settings of the unit's sections; a setting may be there twice."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def instructions(name: str) -> list[str]:
    """Returns the arguments of a Dockerfile's instruction, each time that it is there."""
    joined = DOCKERFILE.read_text().replace("\\\n", " ")
    return [line.partition(" ")[2] for line in joined.splitlines() if line.startswith(f"{name} ")]


def seconds(text: str) -> float:
    value, scale = re.fullmatch(r"(\d+)(s|m)", text).groups()  # type: ignore[union-attr]
    return float(value) * (60 if scale == "m" else 1)


COMMANDS: Final = {
    "systemd": shlex.split(unit()["ExecStart"][0])[1:],
    "docker": yaml.safe_load(instructions("CMD")[-1]),
    "kubernetes": container()["args"],
}


@pytest.mark.parametrize("name", CONFIGS)
def test_its_command_is_one_of_ours(name: str) -> None:
    options = build_parser().parse_args(COMMANDS[name])
    assert options.log_format == "json"
    assert str(options.config) == "/etc/jaxserve/jaxserve.toml"
    assert options.model in ("/var/lib/jaxserve/model", "/models/model")


@pytest.mark.parametrize("name", CONFIGS)
def test_its_configuration_is_read_and_asks_who_calls(name: str, tmp_path: Path) -> None:
    config = read_config(name, tmp_path)
    assert config.server.host == config.server.http_host == "0.0.0.0"
    assert config.auth.keys_file is not None
    assert not config.auth.allow_open
    assert config.admin.address == "unix:/run/jaxserve/admin.sock"
    assert str(config.runner.cache_dir) == "/var/cache/jaxserve"
    assert (config.server.port, config.server.http_port, config.metrics.port) == (50051, 8000, 9100)
    assert (config.tls.cert_file is None) == (name == "docker")


def test_it_is_really_read() -> None:
    """A key that is not there is an error; the files would be refused by a server too."""
    for name in ("systemd", "docker"):
        written = tomllib.loads((DEPLOY / name / "jaxserve.toml").read_text())
        assert set(written) <= set(Config.model_fields)


def test_the_unit_waits_for_the_drain_and_reloads(tmp_path: Path) -> None:
    config, settings = read_config("systemd", tmp_path), unit()
    assert float(settings["TimeoutStopSec"][0]) > config.server.drain_timeout_s + FLUSH_S
    assert settings["KillSignal"] == ["SIGTERM"]
    assert settings["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert settings["Restart"] == ["on-failure"]  # the end that was asked for is 0
    folders = {"State": "/var/lib", "Cache": "/var/cache", "Runtime": "/run"}
    for kind, parent in folders.items():
        assert f"{parent}/{settings[f'{kind}Directory'][0]}" in UNIT.read_text() + str(config)
    assert settings["UMask"] == ["0077"]


def test_the_unit_may_do_little() -> None:
    settings = unit()
    assert settings["User"] != ["root"]
    assert settings["CapabilityBoundingSet"] == [""]
    assert settings["ProtectSystem"] == ["strict"]
    assert settings["NoNewPrivileges"] == settings["PrivateTmp"] == ["yes"]
    assert "MemoryDenyWriteExecute" not in settings  # XLA compiles while it runs
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]  # names as they are
    parsed.read(UNIT)
    assert parsed.sections() == ["Unit", "Service", "Install"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    program = f"{sys.executable} serve"  # one that is there
    text = UNIT.read_text().replace("/opt/jaxserve/bin/jaxserve serve", program)
    path = tmp_path / UNIT.name
    path.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_image_runs_as_nobody_in_particular() -> None:
    (user,) = instructions("USER")
    assert user == "10001:10001"
    assert pod()["securityContext"]["runAsUser"] == 10001
    assert instructions("ENTRYPOINT") == ['["jaxserve"]']
    assert instructions("STOPSIGNAL") == ["SIGTERM"]
    for image in instructions("FROM"):  # whose registry, is the builder's affair
        assert "/" not in image.split()[0]
        assert "." not in image.split(":")[0]
    assert not re.search(r"https?://|index-url", DOCKERFILE.read_text())


def test_the_image_holds_what_it_names_and_nothing_else() -> None:
    sources = [
        source
        for arguments in instructions("COPY")
        if not arguments.startswith("--from")
        for source in arguments.split()[:-1]
    ]
    assert all((ROOT / source).exists() for source in sources)
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert {source if source != "locks" else "locks/dev.txt" for source in sources} == allowed


def test_the_images_versions_are_the_locks() -> None:
    """The pattern that makes constraints of the lock, as sed reads it."""
    (command,) = [line for line in instructions("RUN") if "sed -n" in line]
    script = re.search(r"sed -n '([^']*)' (\S+)", command)
    assert script is not None
    assert script[2] == "locks/dev.txt"
    done = subprocess.run(
        ["sed", "-n", script[1], script[2]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    locked = re.findall(r"^([a-z0-9._-]+==\S+)", (ROOT / script[2]).read_text(), flags=re.M)
    assert lines == locked
    assert len(lines) > 50
    assert any(line.startswith("jax==") for line in lines)


def test_the_image_is_probed_at_the_port_of_health_alone(tmp_path: Path) -> None:
    config = read_config("docker", tmp_path)
    (check,) = instructions("HEALTHCHECK")
    command = yaml.safe_load(check[check.index("CMD") + 3 :])
    assert command[0] == "jaxserve"
    options = build_parser().parse_args(command[1:])
    assert options.target == f"{config.server.health_host}:{config.server.health_port}"
    times = dict(re.findall(r"--([a-z-]+)=(\d+[sm])", check))
    assert seconds(times["timeout"]) > options.timeout
    ports = {
        config.server.port,
        config.server.http_port,
        config.metrics.port,
        config.server.health_port,
    }
    assert {int(port) for port in instructions("EXPOSE")[0].split()} == ports


def test_kubernetes_asks_for_life_and_readiness_where_it_can(tmp_path: Path) -> None:
    """Its probes have no TLS."""
    config = read_config("kubernetes", tmp_path)
    probes = {name: container()[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert {probe["grpc"]["port"] for probe in probes.values()} == {config.server.health_port}
    assert config.server.health_host == "0.0.0.0"  # the kubelet is outside the pod
    assert probes["liveness"]["grpc"]["service"] == ""
    assert probes["readiness"]["grpc"]["service"] == GENERATION
    assert probes["startup"]["grpc"]["service"] == GENERATION
    patience_s = probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
    assert patience_s >= 600  # a first start compiles


def test_kubernetes_waits_for_the_drain(tmp_path: Path) -> None:
    config = read_config("kubernetes", tmp_path)
    command = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    least_s = float(command[1]) + config.server.drain_timeout_s + FLUSH_S
    assert pod()["terminationGracePeriodSeconds"] > least_s
    strategy = objects("Deployment")[0]["spec"]["strategy"]["rollingUpdate"]
    assert strategy["maxUnavailable"] == 0


def test_the_pod_has_the_paths_of_its_configuration(tmp_path: Path) -> None:
    config = read_config("kubernetes", tmp_path)
    mounts = {mount["mountPath"]: mount for mount in container()["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    assert {mount["name"] for mount in mounts.values()} == set(volumes)
    for path in (config.tls.cert_file, config.tls.key_file, config.auth.keys_file):
        assert path is not None
        mount = mounts[str(path.parent)]
        assert mount["readOnly"]
        assert "secret" in volumes[mount["name"]]
    assert (config.tls.cert_file, config.tls.key_file) == (
        Path("/etc/jaxserve/tls/tls.crt"),  # the names of a secret of the type kubernetes.io/tls
        Path("/etc/jaxserve/tls/tls.key"),
    )
    assert config.admin.address is not None
    for writable in (str(config.runner.cache_dir), str(Path(config.admin.address[5:]).parent)):
        assert not mounts[writable].get("readOnly")
    claims = {claim["metadata"]["name"] for claim in objects("PersistentVolumeClaim")}
    used = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in volumes.values()
        if "persistentVolumeClaim" in volume
    ]
    assert set(used) == claims
    assert volumes["config"]["configMap"]["name"] == objects("ConfigMap")[0]["metadata"]["name"]
    assert objects("Secret") == []  # nobody's secret is in the tree


def test_the_pod_may_do_little() -> None:
    own, all_of_it = container()["securityContext"], pod()["securityContext"]
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert all_of_it["runAsNonRoot"]
    assert all_of_it["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod()["automountServiceAccountToken"] is False


def test_services_and_policies_name_ports_of_the_pod(tmp_path: Path) -> None:
    config = read_config("kubernetes", tmp_path)
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {
        "grpc": config.server.port,
        "http": config.server.http_port,
        "metrics": config.metrics.port,
        "health": config.server.health_port,
    }
    (deployment,) = objects("Deployment")
    template = deployment["spec"]["template"]["metadata"]
    assert int(template["annotations"]["prometheus.io/port"]) == config.metrics.port
    for service in objects("Service"):
        assert service["spec"]["selector"].items() <= template["labels"].items()
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    (policy,) = objects("NetworkPolicy")
    open_to = {
        port["port"]: "from" not in rule
        for rule in policy["spec"]["ingress"]
        for port in rule["ports"]
    }
    assert open_to == {"grpc": True, "http": True, "metrics": False}
