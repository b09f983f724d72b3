"""Runs rendered pods as processes of this machine, as a kubelet would run their containers.

Taken from the manifests as they are: command, arguments, environment with its references, files of ConfigMaps, volumes
and where they are mounted, ports, probes, grace periods. Mapped, because there is no network and no file system of the
pod's own: every pod has a loopback address, which also replaces wildcard addresses, 127.0.0.1 and the names of
Services; every volume is a folder, whose path replaces the mount's; the image's entry point is this checkout's program.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .object_checks import SET_BY_CONTROLLERS
from .rendering import NAMESPACE, Object, Rendering

_REFERENCE = re.compile(r"\$\$|\$\(([^()]+)\)")
_LABEL = re.compile(r"metadata\.labels\['(.+)'\]")
_LOCAL = ("0.0.0.0", "* -::*", "127.0.0.1")
"""Addresses that mean the pod itself: processes here share one network, so each pod has an address of its own."""
PROGRAM = [sys.executable, "-m", "rollmesh.cli.main"]


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Kubernetes' expansion: $(NAME) if there is such a variable, $$ is a dollar sign, all else stays."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


@dataclass(slots=True)
class Machine:
    """Shared state of the pods of one test: volumes, Secrets, addresses."""

    folder: Path
    network: str
    """First three bytes of the pods' addresses, for example 127.9.8."""
    rendering: Rendering
    secrets: Mapping[str, Mapping[str, str]]
    path: str
    """PATH of the containers."""
    pythons: Mapping[str, str] = field(default_factory=dict)
    """Interpreter behind ``python3``, by the name of a container; this interpreter in all others."""
    image_variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Environment that a container's image has, by the name of a container. Its paths are of this machine."""
    _addresses: dict[str, str] = field(default_factory=dict)

    def address(self, pod: str) -> str:
        """The address of a pod; the same each time."""
        return self._addresses.setdefault(pod, f"{self.network}.{len(self._addresses) + 1}")

    def volume(self, pod: str, volume: Object) -> Path:
        """The folder of a volume: claims are shared by all pods, the rest is the pod's own."""
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        folder = self.folder / "claims" / claim if claim else self.folder / "pods" / pod / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class Pod:
    """One pod: its init containers and sidecars in their order, then its container."""

    def __init__(self, machine: Machine, template: Object, name: str, labels: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._machine = machine
        self._spec = template["spec"]
        self._labels = {**template["metadata"]["labels"], **(labels or {})}
        self.address = machine.address(name)
        (self._container,) = self._spec["containers"]
        self._log = machine.folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._sidecars: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def log(self) -> str:
        """Output of the pod so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def exit_status(self) -> int | None:
        """Exit status of the container; None while it runs."""
        return self._process.poll() if self._process else None

    def start(self) -> None:
        """Run the init containers to their end and sidecars until they have started, then start the container."""
        for container in self._spec.get("initContainers", []):
            if container.get("restartPolicy") == "Always":
                self._start_sidecar(container)
            else:
                self.run_init_container(container["name"])
        self.start_container()

    def start_container(self) -> None:
        """Start the container alone, as if its init containers had ended well."""
        self._process = self._spawn(self._container)

    def run_init_container(self, name: str) -> None:
        """Run one to its end; AssertionError with what it printed when that is not a good one."""
        status = self.init_container_status(name)
        assert status == 0, f"{self.name}: init container {name} ended with {status}\n{self.log}"

    def init_container_status(self, name: str) -> int:
        """Run one to its end; return its exit status."""
        (container,) = [c for c in self._spec["initContainers"] if c["name"] == name]
        return self._spawn(container).wait(240)

    def _start_sidecar(self, container: Object) -> None:
        """Ask the startup probe as long as the manifest says, and as often as a test would like."""
        process = self._sidecars[container["name"]] = self._spawn(container)
        probe = container["startupProbe"]
        end = time.monotonic() + probe["failureThreshold"] * probe["periodSeconds"]
        while not self.sidecar_passes(container["name"], "startupProbe"):
            name = f"{self.name}: sidecar {container['name']}"
            assert process.poll() is None, f"{name} ended with {process.poll()}\n{self.log[-4000:]}"
            assert time.monotonic() < end, f"{name} has not started\n{self.log[-4000:]}"
            time.sleep(1)

    def sidecar_passes(self, name: str, probe: str) -> bool:
        """Tell whether a probe of a sidecar, which is a command, passes now."""
        (container,) = [c for c in self._spec["initContainers"] if c["name"] == name]
        return self._command_passes(container, probe)

    def _command_passes(self, container: Object, probe: str) -> bool:
        asked = {**container, "command": container[probe]["exec"]["command"], "args": []}
        process = self._spawn(asked)
        try:
            return process.wait(container[probe]["timeoutSeconds"]) == 0
        except subprocess.TimeoutExpired:
            _kill_group(process)
            return False

    def stop(self) -> int:
        """SIGTERM, then to the sidecars, and one grace period for all of it; returns the exit status of the container,
        -9 when the time was too short."""
        assert self._process is not None
        end = time.monotonic() + self._spec["terminationGracePeriodSeconds"]
        try:
            for process in (self._process, *reversed(self._sidecars.values())):
                process.send_signal(signal.SIGTERM)
                process.wait(max(0.1, end - time.monotonic()))
            return self._process.returncode
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def kill(self) -> None:
        """End whatever is left of the pod."""
        for process in (self._process, *self._sidecars.values()):
            if process is not None:
                _kill_group(process)

    def passes(self, probe: str) -> bool:
        """Tell whether a probe of the manifest passes now."""
        asked = self._container[probe]
        if "exec" in asked:
            return self._command_passes(self._container, probe)
        ports = {port["name"]: port["containerPort"] for port in self._container["ports"]}
        if "httpGet" in asked:
            get = asked["httpGet"]
            url = f"{get.get('scheme', 'HTTP').lower()}://{self.address}:{ports[get['port']]}{get['path']}"
            try:
                # A kubelet looks at no certificate either.
                return httpx.get(url, timeout=asked["timeoutSeconds"], verify=False).is_success
            except httpx.TransportError:
                return False
        with grpc.insecure_channel(f"{self.address}:{asked['grpc']['port']}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=asked["timeoutSeconds"])
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def get(self, port: str, path: str) -> httpx.Response:
        """Ask a port of the container by its name."""
        ports = {entry["name"]: entry["containerPort"] for entry in self._container["ports"]}
        # Bound to a loopback address, as here alone, the gateway answers to loopback names only.
        headers = {"Host": "localhost"}
        return httpx.get(f"http://{self.address}:{ports[port]}{path}", timeout=60, headers=headers)

    def run(self, *arguments: str) -> str:
        """Return the output of `kubectl exec POD -- rollmesh ARGUMENTS`."""
        # A file of its own: the container writes lines to the pod's log meanwhile.
        output = self._log.with_suffix(".exec")
        output.unlink(missing_ok=True)
        status = self._spawn({**self._container, "command": [], "args": list(arguments)}, output).wait(240)
        printed = output.read_text(errors="replace")
        assert status == 0, f"{self.name}: rollmesh {' '.join(arguments)} ended with {status}\n{printed}"
        return printed

    def _spawn(self, container: Object, output: Path | None = None) -> subprocess.Popen[bytes]:
        mounts = self._mounts(container)
        plain = self._environment(container)
        variables = {name: self._mapped(value, mounts) for name, value in plain.items()}
        image = self._machine.image_variables.get(container["name"], {})
        entry = [expanded(part, plain) for part in container.get("command", [])]
        python = self._machine.pythons.get(container["name"], sys.executable)
        entry = [python if part == "python3" else self._mapped(part, mounts) for part in entry] or PROGRAM
        arguments = [self._mapped(expanded(part, plain), mounts) for part in container.get("args", [])]
        with (output or self._log).open("ab") as log:
            return subprocess.Popen(
                [*entry, *arguments],
                env={"PATH": self._machine.path, "OMP_NUM_THREADS": "1", **image, **variables},
                cwd=mounts["/tmp"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _mounts(self, container: Object) -> dict[str, Path]:
        """Folder by mount path, with the files of ConfigMaps and Secrets in place."""
        volumes = {volume["name"]: volume for volume in self._spec["volumes"]}
        mounts = {}
        for mount in container["volumeMounts"]:
            volume = volumes.get(mount["name"], {"name": mount["name"]})
            mounts[mount["mountPath"]] = self._machine.volume(self.name, volume)
        for mount in container["volumeMounts"]:
            for name, text in self._files(volumes.get(mount["name"], {})).items():
                (mounts[mount["mountPath"]] / name).write_text(self._mapped(text, mounts))
        return mounts

    def _files(self, volume: Object) -> Mapping[str, str]:
        if "configMap" in volume:
            data: Mapping[str, str] = self._machine.rendering.one("ConfigMap", volume["configMap"]["name"])["data"]
            return data
        if "secret" in volume:
            secret = self._machine.secrets[volume["secret"]["secretName"]]
            items = volume["secret"].get("items", [{"key": key, "path": key} for key in secret])
            return {item["path"]: secret[item["key"]] for item in items}
        return {}

    def _environment(self, container: Object) -> dict[str, str]:
        variables: dict[str, str] = {}
        for entry in container.get("env", []):
            if "value" in entry:
                variables[entry["name"]] = expanded(entry["value"], variables)
            else:
                variables[entry["name"]] = self._referenced(entry["valueFrom"])
        return variables

    def _referenced(self, source: Object) -> str:
        if "secretKeyRef" in source:
            return self._machine.secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
        path = source["fieldRef"]["fieldPath"]
        label = _LABEL.fullmatch(path)
        if label:
            return self._labels[label[1]]
        return {"metadata.name": self.name, "metadata.namespace": NAMESPACE, "status.podIP": self.address}[path]

    def _mapped(self, text: str, mounts: Mapping[str, Path]) -> str:
        """Mount paths become folders, wildcards the pod's address, names of Services the address of a pod behind."""
        paths = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
        text = re.sub(rf"(?<![\w/.-])({paths})(?![\w.-])", lambda match: str(mounts[match[1]]), text)
        for local in _LOCAL:
            text = text.replace(local, self.address)
        for name, pod in sorted(service_pods(self._machine.rendering).items(), key=lambda item: -len(item[0])):
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?=:\d)", self._machine.address(pod), text)
        return text


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(30)


def service_pods(rendering: Rendering) -> dict[str, str]:
    """Name of the first pod behind every DNS name that the manifests use."""
    names = {}
    for service in rendering.of_kind("Service"):
        selector = {k: v for k, v in service["spec"]["selector"].items() if k not in SET_BY_CONTROLLERS}
        for kind, template in rendering.pods():
            if selector.items() <= template["metadata"]["labels"].items():
                names[service["metadata"]["name"]] = f"{kind.partition('/')[2]}-0"
    return names


@contextmanager
def pods_of(machine: Machine, replicas: Mapping[str, int]) -> Iterator[dict[str, list[Pod]]]:
    """The pods of every workload, by component, not yet started; whatever is left at the end is killed."""
    pods: dict[str, list[Pod]] = {}
    for kind, template in machine.rendering.pods():
        component = template["metadata"]["labels"]["app.kubernetes.io/component"]
        workload = kind.partition("/")[2]
        pods[component] = [
            Pod(machine, template, f"{workload}-{index}", {"apps.kubernetes.io/pod-index": str(index)})
            for index in range(replicas.get(component, 1))
        ]
    try:
        yield pods
    finally:
        for pod in (pod for group in pods.values() for pod in group):
            pod.kill()
