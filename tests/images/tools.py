"""Builds images with buildah on a base of mmdebstrap, and runs containers with runc, without Docker or a registry."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from deploy import places

WANTED: Final = ("buildah", "mmdebstrap", "runc")
SUITE: Final = "bookworm"
BASE: Final = "fencepost-test-base"
# The packages that the Dockerfile expects in its base.
PACKAGES: Final = "ca-certificates,python3,python3-venv"
_AUTHORITIES: Final = Path("/usr/local/share/ca-certificates")
_SECCOMP: Final = Path("/usr/share/containers/seccomp.json")


def lacking() -> str:
    """Return why images cannot be built and run here; "" if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "buildah and runc need root on Linux here"
    if missing := [name for name in WANTED if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)} (on Debian: apt-get install {' '.join(missing)})"
    return ""


def run(command: Sequence[str | Path], *, check: bool = True, timeout_s: float = 1500) -> str:
    """Run a command; returns its standard output."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, timeout=timeout_s
    )
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


class Builder:
    """Builds and mounts images. The cache keeps layers, so that only the first build is slow."""

    def __init__(self) -> None:
        self.folder = places.cache() / "images"
        self.folder.mkdir(parents=True, exist_ok=True)

    def buildah(self, *arguments: str | Path) -> str:
        stores = ["--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run")]
        return run(["buildah", *stores, *arguments]).strip()

    def ensure_base(self) -> None:
        """Build Debian with Python, from this machine's package sources; it trusts this machine's CAs."""
        if BASE in self.buildah("images", "--format", "{{.Name}}"):
            return
        tar = self.folder / "base.tar"
        hooks = [f"--customize-hook=copy-in {path} {_AUTHORITIES}" for path in sorted(_AUTHORITIES.glob("*.crt"))]
        if hooks:
            hooks.append('--customize-hook=chroot "$1" update-ca-certificates')
        run(["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", *hooks, SUITE, tar])
        container = self.buildah("from", "scratch")
        self.buildah("add", "--quiet", container, tar, "/")
        self.buildah("commit", "--quiet", "--rm", container, BASE)
        tar.unlink()

    def build(self, target: str) -> str:
        """Build a target of the Dockerfile, and return the image's name."""
        name = f"fencepost-test-{target}"
        options = ["--isolation=chroot", "--network=host", "--layers", f"--build-arg=BASE=localhost/{BASE}"]
        self.buildah("build", *options, f"--target={target}", f"--tag={name}", places.ROOT)
        return name

    def size(self, image: str) -> int:
        """Sum up the bytes of all layers."""
        manifest = json.loads(json.loads(self.buildah("inspect", "--type=image", image))["Manifest"])
        return sum(layer["size"] for layer in manifest["layers"])

    def config(self, image: str) -> dict[str, Any]:
        """Read the image's configuration: user, environment, entry point."""
        inspected = json.loads(self.buildah("inspect", "--type=image", image))
        return inspected["OCIv1"]["config"]  # type: ignore[no-any-return]

    @contextmanager
    def root_of(self, image: str) -> Iterator[Path]:
        """Mount the image's file system; writes to it are discarded."""
        container = self.buildah("from", image)
        try:
            yield Path(self.buildah("mount", container))
        finally:
            self.buildah("rm", container)


@dataclass
class Container:
    """One container of a pod, run by runc as its manifest says, in the machine's network."""

    root: Path
    image: Mapping[str, Any]
    pod: Mapping[str, Any]
    name: str
    folder: Path
    env: Mapping[str, str]
    binds: Mapping[str, Path] = field(default_factory=dict)
    runtime: subprocess.Popen[bytes] | None = None

    @property
    def spec(self) -> Mapping[str, Any]:
        (container,) = self.pod["containers"]
        return container  # type: ignore[no-any-return]

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        """Start the container, without waiting until it runs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(self.bundle()))
        with self.log.open("wb") as log:
            self.runtime = subprocess.Popen(
                ["runc", "run", "--bundle", str(self.folder), self.name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self, timeout_s: float) -> int:
        """Wait for the end; returns the exit code."""
        assert self.runtime is not None
        return self.runtime.wait(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        run(["runc", "kill", self.name, str(number.value)])

    def exec(self, *command: str) -> str:
        """Run a command in the container; returns standard output and error."""
        done = subprocess.run(
            ["runc", "exec", self.name, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=30,
        )
        return done.stdout.strip()

    def remove(self) -> None:
        """Kill the container if it still runs."""
        if self.runtime is not None and self.runtime.poll() is None:
            run(["runc", "kill", self.name, "KILL"], check=False)
            self.runtime.wait(10)
        run(["runc", "delete", "--force", self.name], check=False)

    def bundle(self) -> dict[str, Any]:
        """Make the configuration of the runtime from image and manifest, as a kubelet does."""
        of_pod, own = self.pod["securityContext"], self.spec["securityContext"]
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
        command = self.spec.get("command", self.image.get("Entrypoint", []))
        arguments = self.spec.get("args", self.image.get("Cmd", []) if "command" not in self.spec else [])
        environment = dict(each.split("=", 1) for each in self.image["Env"]) | dict(self.env)
        memory = int(self.spec["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
        return {
            "ociVersion": "1.0.2",
            "process": {
                "terminal": False,
                "user": {"uid": of_pod["runAsUser"], "gid": of_pod["runAsGroup"]},
                "args": [*command, *arguments],
                "env": [f"{name}={value}" for name, value in environment.items()],
                "cwd": self.image.get("WorkingDir") or "/",
                "capabilities": {},
                "noNewPrivileges": not own["allowPrivilegeEscalation"],
            },
            "root": {"path": str(self.root), "readonly": own["readOnlyRootFilesystem"]},
            "hostname": self.name,
            "mounts": [*_MOUNTS, *self._volumes()],
            "linux": {
                "resources": {"devices": [{"allow": False, "access": "rwm"}], "memory": {"limit": memory}},
                "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")],
                "maskedPaths": ["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
                "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
                "seccomp": _seccomp(),
            },
        }

    def _volumes(self) -> Iterator[dict[str, Any]]:
        volumes = {volume["name"]: volume for volume in self.pod["volumes"]}
        for mount in self.spec["volumeMounts"]:
            place = mount["mountPath"]
            # A mount needs its folder, which a kubelet creates; here it is created in a layer that is discarded.
            (self.root / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
            if place in self.binds:
                options = ["rbind", "ro" if mount.get("readOnly") else "rw"]
                yield {"destination": place, "type": "bind", "source": str(self.binds[place]), "options": options}
            else:
                # A kubelet mounts an empty folder in place of an optional secret that does not exist.
                volume = volumes[mount["name"]]
                assert "emptyDir" in volume or volume["secret"]["optional"], place
                options = ["nosuid", "nodev", "mode=1777", "ro" if mount.get("readOnly") else "rw"]
                yield {"destination": place, "type": "tmpfs", "source": "tmpfs", "options": options}
        # A kubelet writes a pod's name into its hosts file: Java looks it up.
        hosts = self.folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost {self.name}\n")
        for file, source in (("/etc/hosts", str(hosts)), ("/etc/resolv.conf", "/etc/resolv.conf")):
            (self.root / file.lstrip("/")).touch()
            yield {"destination": file, "type": "bind", "source": source, "options": ["bind", "ro"]}


_MOUNTS: Final[list[dict[str, Any]]] = [
    {"destination": "/proc", "type": "proc", "source": "proc"},
    {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=65536k"]},
    {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "nodev", "mode=1777"]},
    {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
]


def _seccomp() -> dict[str, Any]:
    """Return the profile that container runtimes use by default, for a process without capabilities."""
    profile = json.loads(_SECCOMP.read_text())
    arch = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    calls = []
    for rule in profile["syscalls"]:
        includes, excludes = rule.get("includes", {}), rule.get("excludes", {})
        if includes.get("caps") or arch not in includes.get("arches", [arch]) or arch in excludes.get("arches", []):
            continue
        kept = {name: rule[name] for name in ("names", "action", "errnoRet", "args") if rule.get(name)}
        calls.append(kept)
    machine = {"amd64": "SCMP_ARCH_X86_64", "arm64": "SCMP_ARCH_AARCH64"}[arch]
    return {"defaultAction": profile["defaultAction"], "architectures": [machine], "syscalls": calls}


def wait_for(what: str, holds: Any, timeout_s: float, every_s: float = 0.1) -> None:
    """Poll until the condition holds; TimeoutError names it."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(every_s)
