"""A certificate authority of the cluster's own, for servers without a public certificate. The program openssl makes the files."""

import ipaddress
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from infaas.auth.credentials import tls
from infaas.errors import InfaasError
from services.shell.host.process import write_private

CA_DAYS, DAYS = 3650, 825
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-sha256")


class CertificateError(InfaasError):
    """A certificate could not be made. The text says what to do."""


def certify(directory: Path, hosts: Sequence[str]) -> list[Path]:
    """Make server.pem and server.key for these names and addresses, signed by ca.pem. Makes ca.pem and ca.key if they are missing.

    Returns the files. The keys are secret (mode 0600). Raises CertificateError.
    """
    program = shutil.which("openssl")
    if program is None:
        raise CertificateError(
            "certificates need the program openssl: install it, or give the servers other certificates"
        )
    ca, ca_key = directory / "ca.pem", directory / "ca.key"
    with TemporaryDirectory(dir=directory) as name:
        work = Path(name)
        if not ca.exists():
            _run(
                *(program, "req", "-x509", *_CURVE, "-days", str(CA_DAYS), "-subj", "/CN=infaas certificate authority"),
                *("-keyout", str(work / "ca.key"), "-out", str(work / "ca.pem")),
                *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
            )
            write_private(ca_key, (work / "ca.key").read_text())
            ca.write_text((work / "ca.pem").read_text())
        _run(
            *(program, "req", *_CURVE, "-subj", f"/CN={hosts[0][:64]}"),
            *("-keyout", str(work / "server.key"), "-out", str(work / "server.csr")),
        )
        (work / "extensions").write_text(
            "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n"
            "extendedKeyUsage=serverAuth,clientAuth\nauthorityKeyIdentifier=keyid\n"
            f"subjectAltName={','.join(map(_alternative, hosts))}\n"
        )
        _run(
            *(program, "x509", "-req", "-sha256", "-days", str(DAYS), "-in", str(work / "server.csr")),
            *("-CA", str(ca), "-CAkey", str(ca_key), "-CAcreateserial", "-CAserial", str(work / "serial")),
            *("-extfile", str(work / "extensions"), "-out", str(work / "server.pem")),
        )
        write_private(directory / "server.key", (work / "server.key").read_text())
        (directory / "server.pem").write_text((work / "server.pem").read_text())
    config = directory / "nats-tls.conf"
    here = directory.absolute()
    config.write_text(tls(str(here / "server.pem"), str(here / "server.key")))
    return [ca, directory / "server.pem", directory / "server.key", config]


def _alternative(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        if not host or set(host) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._*"):
            raise CertificateError(f"{host!r} is no name or address of a host: correct --tls-host") from None
        return f"DNS:{host}"


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CertificateError(f"openssl failed: {error}") from error
    if done.returncode != 0:
        last = " ".join(done.stderr.split())[-300:]
        raise CertificateError(f"openssl failed: {last or f'exit code {done.returncode}'}")
