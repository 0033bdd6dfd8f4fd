"""The Hugging Face hub: a cache as a download would leave it, and a server to download from."""

import hashlib
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def add_repository(cache, name, folder):
    """Put the files of `folder` into `cache` as the branch main of a repository."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return shutil.copytree(folder, repository / "snapshots" / COMMIT)


def use_cache(monkeypatch, cache):
    """Let this process find nothing but what `cache` holds."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


class FakeHub:
    """A hub on this machine: repositories, which are folders, and what clients ask it for."""

    def __init__(self):
        self.repositories = {}
        self.asked = []
        self.commit = COMMIT
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                if self.path == "/api/agent-harnesses":
                    return self.send_error(404)  # asked by the library, for its own statistics
                hub.asked.append(unquote(self.path))
                status, headers, body = hub.answer(unquote(self.path))
                self.send_response(status)
                for header in (headers | {"content-length": str(len(body))}).items():
                    self.send_header(*header)
                self.end_headers()
                return self.wfile.write(body if self.command == "GET" else b"")

            do_GET = do_HEAD

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(0.02,), daemon=True)
        self._thread.start()

    def add(self, name, folder, revisions=("main",), error=None):
        """Serve a folder. error: status and code of every answer, as of gated repositories."""
        self.repositories[name] = Path(folder), revisions, error

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path):
        """Return status, headers and body of an answer, as the API of the hub is documented."""
        found = _FILE.fullmatch(path) or _LIST.fullmatch(path)
        assert found is not None, path
        name, kind, revision, file = found.groups()
        if name not in self.repositories:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        folder, revisions, error = self.repositories[name]
        if error is not None:
            return error[0], {"X-Error-Code": error[1]}, b"{}"
        if revision not in (*revisions, self.commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if kind == "resolve":
            data = (folder / file).read_bytes()
            return 200, {"ETag": f'"{_hash(data)}"', "X-Repo-Commit": self.commit}, data
        files = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*.*")}
        listed = [
            {"type": "file", "path": file, "size": len(data), "oid": _hash(data)}
            for file, data in files.items()
        ]
        if kind == "revision":
            listed = {"id": name, "sha": self.commit, "siblings": [{"rfilename": f} for f in files]}
        return 200, {"content-type": "application/json"}, json.dumps(listed).encode()


_FILE = re.compile(r"/(\w+/\w+)/(resolve)/(\w+)/(.+)")
_LIST = re.compile(r"/api/models/(\w+/\w+)/(revision|tree)/(\w+)(\?.*)?")


def _hash(data):
    return hashlib.sha1(data).hexdigest()
