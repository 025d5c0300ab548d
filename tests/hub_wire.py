"""How this machine's Hub and its store of large files talk: bodies, ranges, what goes wrong."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hub_server import HubServer

__all__ = ["Fault", "Handler", "StoreHandler"]


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose "METHOD path" matches.

    status: answer this instead; headers go with it. cut: close the connection after so many bytes
    of the body. body: send this content instead. ignore_range: always send
    the whole. stalls: with cut, hold the connection open until the server ends.
    """

    pattern: str
    times: int = 1
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    stalls: bool = False
    body: bytes | None = None
    ignore_range: bool = False


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet
    disable_nagle_algorithm = True

    @property
    def hub(self) -> HubServer:
        return self.server.hub  # type: ignore[attr-defined, no-any-return]

    def log_message(self, *_: object) -> None:
        pass

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send(
        self,
        body: bytes | dict[str, Any] | list[Any] = b"",
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        fault = self.fault
        if fault is not None and fault.body is not None:
            body = fault.body
        start = 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        total = len(body)
        if asked and status == 200 and not (fault and fault.ignore_range):
            start, status = int(asked[1]), 206
            body = body[start:]
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.cut is not None:
            self.wfile.write(body[: fault.cut])
            self.wfile.flush()
            if fault.stalls:
                self.hub.ended.wait()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self.wfile.write(body)
        self.wfile.flush()

    def refuse(self, status: int, message: str, code: str = "") -> None:
        headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        self.send({"error": message}, status=status, headers=headers)

    def take_fault(self, line: str) -> bool:
        """True when the request was answered by a fault alone."""
        self.fault: Fault | None = None
        for fault in self.hub.faults:
            if fault.times > 0 and re.search(fault.pattern, line):
                fault.times -= 1
                if fault.status:
                    self.send({"error": "trouble"}, status=fault.status, headers=fault.headers)
                    return True
                self.fault = fault
                return False
        return False


class StoreHandler(Handler):
    """Objects by sha256. Addresses are signed, so a token has no business here."""

    def _begin(self) -> bool:
        line = f"{self.command} {self.path}"
        self.hub.store_log.append(f"{line} {self.headers.get('Range', '')}".strip())
        if "Authorization" in self.headers:
            self.hub.leaks.append(line)
        self.body = self.read_body() if self.command in ("PUT", "POST") else b""
        return self.take_fault(line)

    def do_GET(self) -> None:
        if self._begin():
            return
        data = self.hub.objects.get(self.path.split("/")[-1])
        if data is None:
            self.send(status=404)
        else:
            self.send(data)

    def do_PUT(self) -> None:
        if self._begin():
            return
        words = self.path.split("/")
        if words[1] == "part":
            self.hub.parts[words[2], int(words[3])] = self.body
        else:
            self.hub.objects[words[-1]] = self.body
        self.send(headers={"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})
