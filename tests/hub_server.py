"""A stand-in for the Hugging Face Hub that speaks its HTTP API on real sockets.

Two servers: the Hub itself, and the store that large files are sent to and fetched from, on another
port, where no authorization may arrive. huggingface_hub talks to them unmodified.

with HubServer() as hub:
    repo = hub.add_repo("ann/draft", {"config.json": b"{}"}, gated="manual")
    hub.faults.append(Fault(r"^GET .*/resolve/", status=503, times=2))
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, unquote

from hub_repo import Repo, git_hash, pointer_text
from hub_wire import Fault, Handler, StoreHandler

__all__ = ["Fault", "HubServer", "Repo", "pointer_text"]


class HubServer:
    """tokens: token -> user. log: "METHOD path" of each request to the Hub, store_log to the store,
    with the range that was asked for. leaks: requests to the store that carried a token."""

    def __init__(self, *, part_bytes: int | None = None) -> None:
        self.tokens = {"hf_ann": "ann", "hf_judge": "judge", "hf_eve": "eve"}
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.faults: list[Fault] = []
        self.log: list[str] = []
        self.store_log: list[str] = []
        self.leaks: list[str] = []
        self.part_bytes = part_bytes  # objects larger than this are sent in parts
        self.page_items = 3
        self.gates = "all"  # "public": refuses to gate private repositories; "none": does nothing
        self.ended = threading.Event()
        self._hub = _serve(_HubHandler, self)
        self._store = _serve(StoreHandler, self)
        self.url = f"http://127.0.0.1:{self._hub.server_address[1]}"
        self.store_url = f"http://127.0.0.1:{self._store.server_address[1]}"

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for server in (self._hub, self._store):
            server.shutdown()
            server.server_close()

    def add_repo(self, repo_id: str, files: Mapping[str, bytes], **settings: Any) -> Repo:
        repo = Repo(repo_id=repo_id, **settings)
        repo.add(files)
        self.repos[repo_id] = repo
        for data, is_lfs in repo.commits[repo.head].values():
            if is_lfs:
                self.objects[hashlib.sha256(data).hexdigest()] = data
        return repo

    def count(self, pattern: str) -> int:
        return sum(1 for line in self.log + self.store_log if re.search(pattern, line))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's also looks its own name up, which takes long
        self.server_name, self.server_port = "localhost", self.server_address[1]


def _serve(handler: type[BaseHTTPRequestHandler], hub: HubServer) -> ThreadingHTTPServer:
    server = _Server(("127.0.0.1", 0), handler)
    server.hub = hub  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


class _HubHandler(Handler):
    def _begin(self) -> bool:
        self.path, _, query = self.path.partition("?")
        self.query = parse_qs(query)
        line = f"{self.command} {self.path}"
        self.hub.log.append(line)
        self.body = self.read_body() if self.command in ("PUT", "POST") else b""
        if self.take_fault(line):
            return True
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.user = self.hub.tokens.get(token)
        if token and self.user is None:
            self.refuse(401, "Invalid credentials in Authorization header")
            return True
        return False

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self._begin():
            return
        path = unquote(self.path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            self._tree(match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], match[2], match[3])
        else:
            self.refuse(404, "Not found")

    def do_PUT(self) -> None:
        if self._begin():
            return
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/settings", self.path)
        repo = self._repo(match[1], write=True) if match else None
        if repo is None:
            return
        wanted = json.loads(self.body)
        private = wanted.get("visibility", "private" if repo.private else "public") == "private"
        if "gated" in wanted and private and self.hub.gates == "public" and not repo.gated:
            self.refuse(400, "Private repositories cannot be gated")
            return
        if "gated" in wanted and self.hub.gates != "none":
            repo.gated = wanted["gated"]
        repo.private = private
        self.send({"gated": repo.gated, "private": repo.private})

    def do_POST(self) -> None:
        if self._begin():
            return
        path = unquote(self.path)
        if path == "/api/repos/create":
            self._create()
        elif path == "/api/validate-yaml":
            self.send({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", path):
            self._preupload(match[1])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self._batch(match[1])
        elif match := re.fullmatch(r"/api/complete/([0-9a-f]{64})", path):
            self._complete(match[1])
        elif path == "/api/verify":
            wanted = json.loads(self.body)
            good = len(self.hub.objects.get(wanted["oid"], b"")) == wanted["size"]
            self.send(status=200 if good else 404)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", path):
            self._commit(match[1])
        else:
            self.refuse(404, "Not found")

    def _repo(self, repo_id: str, *, write: bool = False) -> Repo | None:
        """The repository, or None when the request has been refused."""
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and self.user != repo.owner):
            self.refuse(404 if self.user else 401, "Repository not found", "RepoNotFound")
            return None
        if write and self.user != repo.owner:
            self.refuse(403, "You don't have the rights to write here")
            return None
        return repo

    def _files(self, repo: Repo, revision: str) -> tuple[str, dict[str, tuple[bytes, bool]]] | None:
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            self.refuse(404, "Invalid rev id", "RevisionNotFound")
            return None
        return commit, repo.commits[commit]

    def _info(self, repo_id: str, revision: str) -> None:
        repo = self._repo(repo_id)
        found = self._files(repo, revision) if repo else None
        if repo is None or found is None:
            return
        commit, files = found
        self.send(
            {
                "_id": "0",
                "id": repo_id,
                "modelId": repo_id,
                "author": repo.owner,
                "sha": commit,
                "private": repo.private,
                "gated": repo.gated,
                "disabled": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "siblings": [{"rfilename": name} for name in sorted(files)],
            }
        )

    def _tree(self, repo_id: str, revision: str) -> None:
        repo = self._repo(repo_id)
        found = self._files(repo, revision) if repo else None
        if repo is None or found is None:
            return
        items: list[dict[str, Any]] = []
        for name, (data, is_lfs) in sorted(found[1].items()):
            stored = pointer_text(data) if is_lfs else data
            item = {"type": "file", "oid": git_hash(stored), "size": len(data), "path": name}
            if is_lfs:
                sha256 = hashlib.sha256(data).hexdigest()
                item["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": len(stored)}
            items.append(item)
        items += repo.odd_items
        first = int(self.query.get("cursor", ["0"])[0])
        last = first + self.hub.page_items
        link = {}
        if last < len(items):
            link["Link"] = f'<{self.hub.url}{self.path}?cursor={last}>; rel="next"'
        self.send(items[first:last], headers=link)

    def _resolve(self, repo_id: str, revision: str, name: str) -> None:
        repo = self._repo(repo_id)
        if repo is None:
            return
        if repo.gated and self.user != repo.owner and self.user not in repo.readers:
            self.refuse(403 if self.user else 401, "Access is restricted", "GatedRepo")
            return
        found = self._files(repo, revision)
        if found is None:
            return
        commit, files = found
        if name not in files:
            self.refuse(404, "Entry not found", "EntryNotFound")
            return
        data, is_lfs = files[name]
        headers = {"X-Repo-Commit": commit}
        if not is_lfs:
            self.send(data, headers={**headers, "ETag": f'"{git_hash(data)}"'})
            return
        sha256 = hashlib.sha256(data).hexdigest()
        headers["X-Linked-Etag"] = f'"{sha256}"'
        headers["X-Linked-Size"] = str(len(data))
        headers["Location"] = f"{self.hub.store_url}/object/{sha256}"
        self.send(status=302, headers=headers)

    def _create(self) -> None:
        wanted = json.loads(self.body)
        repo_id = f"{wanted['organization'] or self.user}/{wanted['name']}"
        url = {"url": f"{self.hub.url}/{repo_id}"}
        if self.user is None:
            self.refuse(401, "Invalid username or password.")
        elif repo_id.split("/")[0] != self.user:
            self.refuse(403, "You don't have the rights to create a model under that namespace")
        elif repo_id in self.hub.repos:
            self.send({**url, "error": "You already created this model repo"}, status=409)
        else:
            is_private = wanted.get("visibility") == "private"
            self.hub.repos[repo_id] = Repo(repo_id=repo_id, private=is_private)
            self.hub.repos[repo_id].add({})
            self.send(url)

    def _preupload(self, repo_id: str) -> None:
        repo = self._repo(repo_id, write=True)
        if repo is None:
            return
        held = repo.commits[repo.head]
        answer = []
        for item in json.loads(self.body)["files"]:
            name = item["path"]
            mode = "lfs" if name.endswith(".safetensors") else "regular"
            row = {"path": name, "uploadMode": mode, "shouldIgnore": False}
            if name in held:
                data, is_lfs = held[name]
                row["oid"] = hashlib.sha256(data).hexdigest() if is_lfs else git_hash(data)
            answer.append(row)
        self.send({"files": answer})

    def _batch(self, repo_id: str) -> None:
        if self._repo(repo_id, write=True) is None:
            return
        objects = []
        for item in json.loads(self.body)["objects"]:
            oid, size = item["oid"], item["size"]
            row: dict[str, Any] = {"oid": oid, "size": size, "authenticated": True}
            if len(self.hub.objects.get(oid, b"")) != size:
                row["actions"] = {
                    "upload": self._upload_action(oid, size),
                    "verify": {"href": f"{self.hub.url}/api/verify"},
                }
            objects.append(row)
        kind = "multipart" if self.hub.part_bytes else "basic"
        self.send({"transfer": kind, "objects": objects})

    def _upload_action(self, oid: str, size: int) -> dict[str, Any]:
        step = self.hub.part_bytes
        if step is None or size <= step:
            return {"href": f"{self.hub.store_url}/object/{oid}", "header": {}}
        num_parts = -(-size // step)
        header = {"chunk_size": str(step)}
        for number in range(1, num_parts + 1):
            header[str(number)] = f"{self.hub.store_url}/part/{oid}/{number}"
        return {"href": f"{self.hub.url}/api/complete/{oid}", "header": header}

    def _complete(self, oid: str) -> None:
        numbers = [part["partNumber"] for part in json.loads(self.body)["parts"]]
        data = b"".join(self.hub.parts[oid, number] for number in numbers)
        if hashlib.sha256(data).hexdigest() != oid:
            self.refuse(422, "The parts do not make up the object")
            return
        self.hub.objects[oid] = data
        self.send({})

    def _commit(self, repo_id: str) -> None:
        repo = self._repo(repo_id, write=True)
        if repo is None:
            return
        files = dict(repo.commits[repo.head])
        for line in self.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header" and value.get("parentCommit") not in (None, repo.head):
                self.refuse(412, "A commit has happened since. Please refresh and try again.")
                return
            if key == "file":
                files[value["path"]] = (base64.b64decode(value["content"]), False)
            elif key == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    self.refuse(400, "LFS pointer to an object that was not uploaded")
                    return
                files[value["path"]] = (self.hub.objects[value["oid"]], True)
            elif key == "deletedFile":
                del files[value["path"]]
        commit = repo.commit(files)
        url = f"{self.hub.url}/{repo_id}/commit/{commit}"
        self.send({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})
