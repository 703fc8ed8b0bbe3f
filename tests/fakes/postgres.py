"""A PostgreSQL server of the tests' own: made in a temporary folder, on a socket there, stopped and gone afterwards.

PostgreSQL refuses to run as root, so for root it runs as an unprivileged user. Its collation is that of a
person's language, as most servers' is, and not that of bytes.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg

from provenance.store import database

PORT = 5432  # names the socket; no port is opened
SETTINGS = ("listen_addresses=''", "max_connections=40", "shared_buffers=32MB", "log_min_messages=fatal")


class Server:
    """One server. ``stop`` and ``start`` are for the tests that take it down under a writer."""

    def __init__(self, *options: str) -> None:
        """Make the cluster and start it, with more settings such as ``fsync=off``."""
        self.tools = tools()
        self.folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
        self.user = unprivileged()
        if self.user is not None:
            os.chown(self.folder, self.user.pw_uid, self.user.pw_gid)
        self.folder.chmod(0o755)
        self.data = self.folder / "data"
        self.options = " ".join(
            f"-c {item}" for item in (*SETTINGS, f"unix_socket_directories={self.folder}", *options)
        )
        self.number = 0
        self.templated = False
        self.run("initdb", "-D", str(self.data), "-U", "owner", "--auth=trust", "--encoding=UTF8", "--no-sync",
                 "--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=en-US")  # fmt: skip
        self.start()

    def run(self, tool: str, *arguments: str) -> None:
        """Run one of PostgreSQL's tools as the server's user."""
        me = {} if self.user is None else {"user": self.user.pw_uid, "group": self.user.pw_gid, "extra_groups": []}
        done = subprocess.run(
            [str(self.tools / tool), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            cwd=self.folder, timeout=120, check=False, **me,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        """Start, and wait until it answers."""
        log = str(self.folder / "log")
        self.run("pg_ctl", "start", "-w", "-D", str(self.data), "-l", log, "-o", self.options)

    def stop(self, mode: str = "fast") -> None:
        """Stop: ``fast`` politely, ``immediate`` as a crash, without a word to anybody."""
        self.run("pg_ctl", "stop", "-w", "-D", str(self.data), "-m", mode)

    def remove(self) -> None:
        """Stop and delete everything."""
        try:
            self.stop("immediate")
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, name: str = "postgres", user: str = "owner", password: str = "") -> str:
        """Return the URL of a database of this server."""
        login = f"{user}:{password}" if password else user
        return f"postgresql://{login}@/{name}?host={self.folder}&port={PORT}"

    def empty(self) -> str:
        """Make a database without a table and return its URL."""
        self.number += 1
        self.execute(f"create database store_{self.number}")
        return self.url(f"store_{self.number}")

    def fresh(self) -> str:
        """Make a database with the schema, nothing in it, and return its URL: a copy, since migrations take half a second."""
        if not self.templated:
            self.execute("create database fresh")
            engine = database.writing(self.url("fresh"), None)
            database.upgrade(engine)
            engine.dispose()
            self.templated = True
        self.number += 1
        self.execute(f"create database store_{self.number} template fresh strategy file_copy")
        return self.url(f"store_{self.number}")

    def execute(self, sql: str, name: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement as the server's owner."""
        with psycopg.connect(self.url(name), autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []


def tools() -> Path:
    """Return the folder of the server's programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    if not found and on_path is None:
        raise AssertionError("no PostgreSQL server is installed; run: apt-get install -y postgresql")
    return found[-1].parent if found else Path(str(on_path)).parent


def unprivileged() -> Any:
    """Return a user to run the server as, or None where this user will do."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return next(user for user in pwd.getpwall() if user.pw_uid >= 1000)
