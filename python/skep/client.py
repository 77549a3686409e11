"""The client of a hive: HTTP with retries where a repeat changes nothing."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Union
from urllib.parse import quote, urlencode

import urllib3

from . import __about__
from .errors import KeyRefused, Misuse, Refused, SkepError, Unreachable

log = logging.getLogger("skep")

Body = Union[bytes, bytearray, memoryview, None]

#: Refusals that pass by themselves.
_PASSING = ("busy", "closing", "too_slow")


class Answer(NamedTuple):
    """An answer, read whole."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    def json(self) -> Any:
        return json.loads(self.data)


class Client:
    """Requests to one hive.

    `patience` is how many seconds to go on trying when the hive does not answer. `key`, `pin` and
    `ca` are taken from SKEP_KEY or SKEP_KEY_FILE, SKEP_PIN and SKEP_CA where they are left out.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        pin: str | None = None,
        ca: str | None = None,
        patience: float = 60.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.patience = patience
        #: Asked between attempts; raises to call everything off.
        self.check: Callable[[], None] = lambda: None
        self._settings = {"key": key, "pin": pin, "ca": ca}
        if not self.url.startswith(("http://", "https://")):
            raise Misuse(f"`{url}` is not a hive's address", "such as http://127.0.0.1:29500")
        agent = f"skep-python/{__about__.VERSION}"
        self._headers = {"user-agent": agent}
        key = key or _key_of_environment()
        if key:
            self._headers["authorization"] = f"Bearer {key.strip()}"
        tls: dict[str, Any] = {}
        pin = pin or os.environ.get("SKEP_PIN")
        ca = ca or os.environ.get("SKEP_CA")
        if self.url.startswith("https://"):
            if pin:
                tls = {"assert_fingerprint": _fingerprint(pin), "cert_reqs": "CERT_NONE"}
            elif ca:
                tls = {"ca_certs": ca}
        self._pool = urllib3.connection_from_url(self.url, maxsize=2, retries=False, **tls)

    def another(self, patience: float) -> Client:
        """A client of the same hive with connections of its own, for another thread."""
        return Client(self.url, patience=patience, **self._settings)

    def close(self) -> None:
        self._pool.close()

    def __del__(self) -> None:
        # Where the constructor raised there is no pool.
        pool = getattr(self, "_pool", None)
        if pool is not None:
            pool.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Body = None,
        message: Any = None,
        deadline: float = 120.0,
    ) -> Answer:
        """Asks until there is an answer, a refusal that does not pass, or no more patience.

        Pauses grow from 50 ms to 2 s, with some randomness, so that a crowd does not come back as
        one. `message` is sent as JSON; `deadline` is for one attempt.
        """
        start = time.monotonic()
        pause = 0.05
        told = False
        while True:
            try:
                return self.once(
                    method,
                    path,
                    query=query,
                    headers=headers,
                    body=body,
                    message=message,
                    deadline=deadline,
                )
            except Unreachable as unreachable:
                error: SkepError = unreachable
            except Refused as refused:
                if refused.code not in _PASSING:
                    raise
                error = refused
            elapsed = time.monotonic() - start
            if elapsed + pause > self.patience:
                raise Unreachable(
                    f"{error.message}; tried for {elapsed:.0f} s",
                    "is the hive running there? What it has accepted is not lost: start this "
                    "script again when it is back, or wait longer with patience=SECONDS",
                ) from error
            if not told and elapsed > 1.0:
                told = True
                log.warning("%s; trying again", error.message)
            self.check()
            time.sleep(pause * (0.5 + random.random()))
            self.check()
            pause = min(pause * 2, 2.0)

    def once(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Body = None,
        message: Any = None,
        deadline: float = 120.0,
    ) -> Answer:
        """One attempt."""
        all_headers = dict(self._headers)
        if headers:
            all_headers.update(headers)
        if message is not None:
            body = json.dumps(message).encode()
            all_headers["content-type"] = "application/json"
        if query:
            path = f"{path}?{urlencode(query)}"
        try:
            response = self._pool.urlopen(
                method,
                path,
                # Any buffer will do, whatever the stubs say.
                body=body,  # type: ignore[arg-type]
                headers=all_headers,
                redirect=False,
                timeout=urllib3.Timeout(connect=10.0, read=deadline),
            )
        except urllib3.exceptions.SSLError as error:
            raise SkepError(
                f"cannot trust the hive at {self.url}: {error}",
                "give its certificate's hash with pin= or SKEP_PIN, as its join line has it, or "
                "its authority with ca= or SKEP_CA",
            ) from error
        except urllib3.exceptions.HTTPError as error:
            raise Unreachable(f"cannot reach the hive at {self.url}: {error}") from error
        if response.status in (200, 201, 202, 204, 206, 304):
            return Answer(response.status, response.headers, response.data)
        raise _refusal(response.status, response.data)


def run_path(run: str, rest: str = "") -> str:
    """The route of a run."""
    return f"/v1/runs/{quote(run, safe='')}{rest}"


def _key_of_environment() -> str | None:
    key = os.environ.get("SKEP_KEY")
    path = os.environ.get("SKEP_KEY_FILE")
    if not key and path:
        try:
            with open(path, encoding="ascii") as file:
                return file.read().strip()
        except OSError as error:
            raise Misuse(f"cannot read the key in SKEP_KEY_FILE: {error}") from error
    return key


def _fingerprint(pin: str) -> str:
    digits = pin[len("sha256:") :] if pin.startswith("sha256:") else pin
    if len(digits) != 64 or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
        raise Misuse(f"`{pin}` is not a pin", "it is sha256: and 64 hexadecimal digits")
    return digits


def _refusal(status: int, data: bytes) -> Refused:
    try:
        body = json.loads(data)
        code, message, hint = body["code"], body["message"], body.get("hint", "")
    except (ValueError, KeyError, TypeError):
        code = {401: "unauthorised", 403: "forbidden", 404: "not_found"}.get(status, "internal")
        if status in (502, 503, 504):
            code = "closing"
        message, hint = f"the hive answered {status}", "is this the address of a hive?"
    if code in ("unauthorised", "forbidden"):
        if code == "unauthorised":
            hint = "pass key= or set SKEP_KEY or SKEP_KEY_FILE to a key that `skep key create` made"
        return KeyRefused(code, status, message, hint)
    return Refused(code, status, message, hint)
