"""Certificates that tests make for themselves."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Files:
    """PEM files of one certificate."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates; ``ca`` is its own file."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(pem(self._sign(self._name, self._key, is_authority=True)))

    def issue(
        self,
        name: str,
        host: str = "encoder.test",
        valid_from: datetime.datetime | None = None,
        valid_until: datetime.datetime | None = None,
    ) -> Files:
        """A certificate for a host and for 127.0.0.1; overwrites the files of the same name. Valid from
        yesterday until tomorrow by default."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName(
            [x509.DNSName(host), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        files = Files(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        files.cert.write_bytes(pem(self._sign(subject, key, names, dates=(valid_from, valid_until))))
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        names: x509.SubjectAlternativeName | None = None,
        *,
        is_authority: bool = False,
        dates: tuple[datetime.datetime | None, datetime.datetime | None] = (None, None),
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(dates[0] or now - DAY)
            .not_valid_after(dates[1] or now + DAY)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        if is_authority:
            usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, critical=True)
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
