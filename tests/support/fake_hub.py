"""A Hugging Face hub on this machine: as much of its HTTP interface as huggingface_hub uses for data sets.

It answers as the real one does, with the same headers, and can be slow, refuse, or break off.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class FakeHub:
    """Data sets by name and revision.

    Attributes:
        commits: (data set, revision) → a commit's hash and its files.
        requests: method and path of each request.
        refusals: data set → (status, error code) with which all requests for it are refused.
        token: what a refused data set is given for.
        break_after: file → bytes after which its connection ends, as often as the number beside them says.
        is_silent: requests get no answer.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.refusals: dict[str, tuple[int, str]] = {}
        self.token = ""
        self.break_after: dict[str, tuple[int, int]] = {}
        self.is_silent = False
        self._ended = threading.Event()
        self.commits: dict[tuple[str, str], tuple[str, dict[str, bytes]]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="fake hub"
        )

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which commands ask this hub."""
        return {
            "HF_ENDPOINT": f"http://127.0.0.1:{self._server.server_port}",
            "HF_HUB_OFFLINE": "0",
        }

    def publish(self, repo: str, files: Mapping[str, bytes], *, revision: str = "main") -> str:
        """Makes a commit with these files, to which the revision then points; returns its hash."""
        text = json.dumps({name: content.hex() for name, content in files.items()})
        commit = hashlib.sha1(text.encode()).hexdigest()
        for name in (revision, commit):
            self.commits[repo, name] = (commit, dict(files))
        return commit

    def has(self, repo: str) -> bool:
        """Whether there is a data set of the name."""
        return any(known == repo for known, _ in self.commits)

    def wait_until_ended(self) -> None:
        """What a silent hub does with a request."""
        self._ended.wait()


def _handler_of(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            if hub.is_silent:
                hub.wait_until_ended()
                self.close_connection = True
                return
            api = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/revision/(.+)", path)
            file = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            found = api or file
            if found is None:
                return self._refused(404, "RepoNotFound")
            repo, revision = found[1], found[2]
            authorized = self.headers.get("Authorization") == f"Bearer {hub.token}"
            if repo in hub.refusals and not (hub.token and authorized):
                return self._refused(*hub.refusals[repo])
            commit = hub.commits.get((repo, revision))
            if commit is None:
                return self._refused(404, "RevisionNotFound" if hub.has(repo) else "RepoNotFound")
            if api:
                return self._list(repo, *commit)
            return self._give(*commit, found[3])

        def _refused(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _list(self, repo: str, commit: str, files: dict[str, bytes]) -> None:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            answer = json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def _give(self, commit: str, files: dict[str, bytes], name: str) -> None:
            if name not in files:
                return self._refused(404, "EntryNotFound")
            whole = files[name]
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            start = int(wanted[1]) if wanted else 0
            self.send_response(206 if wanted else 200)
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{len(whole) - 1}/{len(whole)}")
            self.send_header("ETag", f'"{hashlib.sha1(whole).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", str(len(whole) - start))
            self.end_headers()
            if self.command == "HEAD":
                return
            limit, times = hub.break_after.get(name, (0, 0))
            if times:
                hub.break_after[name] = (limit, times - 1)
                self.wfile.write(whole[start : start + limit])
                self.close_connection = True
                return
            self.wfile.write(whole[start:])

    return Handler
