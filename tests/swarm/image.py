"""The image of ops/Dockerfile, built without a registry and without a network, and what stands for images that only registries have.

What costs minutes is kept in a directory of the user's cache ($XDG_CACHE_HOME/infaas/swarm): the base that debootstrap makes, wheels,
and the images of the engine that builds. To build changed code again takes seconds.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.shell.host.process import Lock
from tests.swarm.node import Node, SwarmError
from tests.swarm.nodes import Swarm, share_images

ROOT = Path(__file__).resolve().parents[2]
# Debian's releases by the Python that they have: wheels are made by the Python that runs the tests, and must suit the image's.
SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}
PACKAGES = "python3,python3-venv,ca-certificates,openssl"
LEFT_OUT = (
    "./usr/share/doc/*",
    "./usr/share/man/*",
    "./usr/share/locale/*",
    "./var/cache/*/*",
    "./var/lib/apt/lists/*",
    "./dev/*",
)
EXTRAS = "up,swarm,login"
BUILD = "infaas-test/build"  # of the Dockerfile's first stages: named, so that they stay
COPIED = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "bus", "services", "infaas", "dashboard")

IMAGE, NEXT, BROKEN, DATABASE = (
    "infaas-test/infaas:1",
    "infaas-test/infaas:2",
    "infaas-test/infaas:3",
    "infaas-test/postgres:1",
)
LABEL = "infaas.test.version"
# The next version differs in a file. The broken one cannot serve, as with a fault that only shows at run time.
VERSIONED = (
    "FROM {image}\nUSER root\nRUN echo {version} > /etc/infaas-version\nUSER 10001:10001\nLABEL {label}={version}\n"
)
BREAKING = (
    "FROM {image}\nUSER root\n"
    "RUN echo 'raise SystemExit(\"broken on purpose\")' > $(echo /opt/infaas/lib/python*/site-packages)/services/shell/runtime/serve.py\n"
    "USER 10001:10001\nLABEL {label}=3\n"
)


def missing() -> str | None:
    """Why no image can be built on this machine, or None."""
    if sys.version_info[:2] not in SUITES:
        known = " or ".join(f"{major}.{minor}" for major, minor in SUITES)
        return f"the image is made with Debian's Python: run these tests with Python {known}"
    if shutil.which("debootstrap") is None and not _base_file().exists():
        return "not installed: debootstrap (Debian: debootstrap)"
    return None


def cache() -> Path:
    """The directory in which base, wheels and images are kept between runs."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = home / "infaas" / "swarm"
    place.mkdir(parents=True, exist_ok=True)
    return place


def build(target: Path) -> None:
    """Build IMAGE, NEXT, BROKEN and DATABASE; `target` becomes a directory that engines share their images from."""
    lock = Lock(cache() / "lock", wait=900)
    data = cache() / "engine" / "data"
    try:
        base, wheels = _base(), _wheels()
        with Swarm(0, 0) as scratch, tempfile.TemporaryDirectory(prefix="infaas-context-") as place:
            engine = scratch.boot("build", data=data)
            engine.ready()
            _tell("engine for building")
            if not engine.docker("images", "--quiet", _tag(base)):
                engine.docker("import", base, _tag(base), timeout=300)
                _tell("base imported")
            context = Path(place)
            _fill(context, wheels)
            _build(engine, context, base)
            for version, name in (("1", IMAGE), ("2", NEXT)):
                _variant(engine, name, VERSIONED, image=f"{BUILD}:final", version=version, label=LABEL)
            _variant(engine, BROKEN, BREAKING, image=IMAGE, label=LABEL)
            shutil.copy(Path(__file__).with_name("postgres.py"), context)
            (context / "Dockerfile").write_text(
                f"FROM {IMAGE}\nUSER root\nCOPY postgres.py /usr/local/bin/docker-entrypoint.sh\n"
                "RUN /usr/sbin/useradd --uid 70 --user-group postgres && install -d -o 70 -g 70 -m 0700 /var/lib/postgresql/data\n"
                'USER 70:70\nHEALTHCHECK NONE\nENTRYPOINT ["docker-entrypoint.sh"]\nCMD ["postgres"]\n'
            )
            _docker_build(engine, context, DATABASE, context / "Dockerfile")
            engine.docker("image", "prune", "--force")
            _tell(f"images: {IMAGE}, {NEXT}, {BROKEN}, {DATABASE}")
        share_images(data, target)
    finally:
        lock.release()


def _build(engine: Node, context: Path, base: Path) -> None:
    arguments = {"BASE_IMAGE": _tag(base), "EXTRAS": EXTRAS, "PIP_NO_INDEX": "1"}
    for stage in ("dependencies", "environment", None):
        name = f"{BUILD}:{stage or 'final'}"
        _docker_build(engine, context, name, context / "ops" / "Dockerfile", arguments, stage)
        _tell(f"ops/Dockerfile: {stage or 'all of it'}")


def _variant(engine: Node, name: str, dockerfile: str, **values: str) -> None:
    with tempfile.TemporaryDirectory(prefix="infaas-context-") as place:
        file = Path(place, "Dockerfile")
        file.write_text(dockerfile.format(**values))
        _docker_build(engine, Path(place), name, file)


def _docker_build(
    engine: Node,
    context: Path,
    name: str,
    file: Path,
    arguments: Mapping[str, str] | None = None,
    stage: str | None = None,
) -> None:
    """With the older builder, which every client has; nothing can be fetched from anywhere."""
    words = [word for key, value in (arguments or {}).items() for word in ("--build-arg", f"{key}={value}")]
    words += ["--target", stage] if stage else []
    engine.docker(
        *("build", "--quiet", "--network", "none", "--tag", name, "--file", file, *words, context),
        timeout=600,
        environ={"DOCKER_BUILDKIT": "0"},
    )


def _fill(context: Path, wheels: Path) -> None:
    """What the Dockerfile copies: this checkout's files as they are now, and the wheels in their place."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, context / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, context / name)
    (context / "ops" / "wheels").mkdir(parents=True)
    for name in ("Dockerfile", "requirements.py"):
        shutil.copy(ROOT / "ops" / name, context / "ops" / name)
    for wheel in wheels.glob("*.whl"):
        shutil.copy(wheel, context / "ops" / "wheels")


def _base_file() -> Path:
    suite = SUITES[sys.version_info[:2]]
    return cache() / f"base-{suite}-{_digest(PACKAGES, *LEFT_OUT)}.tar"


def _tag(base: Path) -> str:
    return f"infaas-test/{base.stem}"


def _base() -> Path:
    """A Debian with Python, as one tar file."""
    file = _base_file()
    if file.exists():
        return file
    _tell("debootstrap, a minute or two; only this once")
    with tempfile.TemporaryDirectory(prefix="infaas-base-") as place:
        root = Path(place, "root")
        suite = SUITES[sys.version_info[:2]]
        _run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, root], timeout=900)
        (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        new = file.with_suffix(".new")
        left_out = [f"--exclude={pattern}" for pattern in LEFT_OUT]
        _run(["tar", "--create", "--numeric-owner", *left_out, "--file", new, "--directory", root, "."])
        new.replace(file)
    _tell(f"base: {file.stat().st_size / 1e6:.0f} MB")
    return file


def _wheels() -> Path:
    """All packages that the image holds, of the versions in constraints.txt, and what builds ours."""
    listing = [sys.executable, ROOT / "ops" / "requirements.py", ROOT / "pyproject.toml", EXTRAS]
    needs = [*_run(listing).split("\n"), "hatchling"]
    constraints = ROOT / "constraints.txt"
    place = cache() / f"wheels-{_digest(*needs, constraints.read_text(), sys.version)}"
    if place.exists():
        return place
    _tell("wheels of all packages; only once for these versions")
    for old in cache().glob("wheels-*"):
        shutil.rmtree(old)
    new = place.with_suffix(".new")
    _run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "-c", constraints, "-w", new, *filter(None, needs)],
        timeout=900,
    )
    new.replace(place)
    return place


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:10]


def _run(command: Sequence[str | Path], timeout: float = 120) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        raise SwarmError(f"{' '.join(map(str, command))}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


_started = time.monotonic()


def _tell(text: str) -> None:
    print(f"[{time.monotonic() - _started:6.1f} s] {text}", file=sys.stderr, flush=True)
