"""The disk cache: hits, misses, races, damage, and disks that are read-only, full or not ours."""

import errno
import io
import json
import logging
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

import pytest
from tiny_plan import TinyPlan, fake_cubin, make_templates

from jitmoe.jit import build, cache, nvrtc, render, store

ROOT = Path(__file__).resolve().parents[2]
PLAN = TinyPlan("sm_90a")
OTHER = TinyPlan("sm_90a", num_rows=3)


@pytest.fixture(scope="session")
def templates(tmp_path_factory):
    return make_templates(tmp_path_factory.mktemp("tiny") / "templates")


class World:
    """A cache directory, and a compiler that counts its calls instead of working."""

    def __init__(self, directory, monkeypatch, templates):
        self.directory, self.monkeypatch = directory, monkeypatch
        self.compiled = []
        monkeypatch.setenv("JITMOE_CACHE_DIR", str(directory))
        monkeypatch.setattr(render, "templates_dir", lambda: templates)
        monkeypatch.setattr(nvrtc, "version", lambda: "12.9.86")
        monkeypatch.setattr(nvrtc, "compile", self.compile)
        self.restart()

    def compile(self, text, arch, name):
        self.compiled.append(name)
        return fake_cubin(text)

    def restart(self):
        """Forget what a new process would not know."""
        self.monkeypatch.setattr(build, "_memo", {})
        self.monkeypatch.setattr(cache, "_said", set())

    def build(self, plan=PLAN):
        """As a new process would."""
        self.restart()
        return build.build(plan)

    def entries(self):
        return sorted(p for p in self.directory.glob("tiny-*"))

    def leftovers(self):
        return [p for p in self.directory.glob(".*") if p.name != ".locks"]


@pytest.fixture
def world(tmp_path, monkeypatch, templates, caplog):
    caplog.set_level(logging.INFO, "jitmoe")
    return World(tmp_path / "cache", monkeypatch, templates)


# Hits and misses


def test_miss_then_disk_then_memory(world, caplog):
    first = world.build()
    assert (first.origin, first.path) == ("compiled", world.entries()[0])
    assert [r.getMessage() for r in caplog.records] == [
        f"compiled {first.name} in 0.2 s (not in {world.directory}) -> {first.path}"
    ]
    caplog.clear()
    second = world.build()
    assert (second.origin, second.path) == ("disk", first.path)
    assert second.cubin == first.cubin  # log and resources too
    assert second.cubin.resources.num_regs == 40
    third = build.build(PLAN)
    assert (third.origin, third.cubin) == ("memory", second.cubin)
    assert len(world.compiled) == 1
    assert not caplog.records
    assert not world.leftovers()


def test_entry_is_readable_by_hand(world):
    path = world.build().path
    names = {"kernel.cu", "kernel.cubin", "plan.json", "ptxas.log", "checksum"}
    assert {file.name for file in path.iterdir()} == names
    facts = json.loads((path / "plan.json").read_text())
    assert (facts["name"], facts["arch"], facts["nvrtc"]) == ("tiny", "sm_90a", "12.9.86")
    assert facts["plan"] == {
        "class": "TinyPlan",
        "arch": "sm_90a",
        "num_rows": 2,
        "bias": -3,
        "big": 5_000_000_000,
    }
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "-c", "checksum"], cwd=path, check=True, capture_output=True)


def test_directory_is_private(world):
    path = world.build().path
    for directory in (world.directory, path, world.directory / ".locks"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_whatever_changes_the_cubin_changes_the_key(world, monkeypatch):
    keys = {world.build().key, world.build(OTHER).key, world.build(TinyPlan("sm_100a")).key}
    for name in ("JITMOE_LINEINFO",):
        monkeypatch.setenv(name, "1")
        keys.add(world.build().key)
        monkeypatch.delenv(name)
    monkeypatch.setattr(nvrtc, "version", lambda: "12.9.41")
    keys.add(world.build().key)
    assert len(keys) == len(world.compiled) == 5
    parts = [("ab", "c", "d", ()), ("a", "bc", "d", ()), ("ab", "c", "", ("d",)), ("ab", "c", "d")]
    assert len({cache.key(*(*part, ())[:4]) for part in parts[:3]}) == 3


def test_no_cache(world, monkeypatch):
    monkeypatch.setenv("JITMOE_NO_CACHE", "1")
    built = world.build()
    assert (built.origin, built.path) == ("compiled", None)
    assert not world.directory.exists()
    assert build.build(PLAN).origin == "memory"


def test_compile_listeners_hear_of_compiles_only(world, monkeypatch):
    heard = []
    monkeypatch.setattr(build, "compile_listeners", [lambda *call: heard.append(call)])
    first = world.build()
    world.build()
    assert [(built.name, reason) for built, reason in heard] == [
        (first.name, f"not in {world.directory}")
    ]


# Where it is


def test_directories(monkeypatch):
    def directories(**variables):
        for name in ("JITMOE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        first, packs = cache.directories()
        return str(first), [str(pack) for pack in packs]

    assert directories(HOME="/h") == ("/h/.cache/jitmoe", [])
    assert directories(HOME="/h", XDG_CACHE_HOME="/x") == ("/x/jitmoe", [])
    assert directories(HOME="/h", XDG_CACHE_HOME="x") == ("/h/.cache/jitmoe", [])
    assert directories(HOME="/h", JITMOE_CACHE_DIR="~/c:~/p") == ("/h/c", ["/h/p"])
    assert directories(XDG_CACHE_HOME="/x", JITMOE_CACHE_DIR="/a:/b::/c") == ("/a", ["/b", "/c"])
    assert directories(HOME="/h", JITMOE_CACHE_DIR=":/p") == ("/h/.cache/jitmoe", ["/p"])
    assert directories(HOME="/h", JITMOE_CACHE_DIR="c") == (f"{os.getcwd()}/c", [])
    assert directories(HOME="") == ("None", [])
    assert directories()[0] == pwd.getpwuid(os.getuid()).pw_dir.rstrip("/") + "/.cache/jitmoe"


def one_warning(caplog):
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1, warnings
    return warnings[0]


def builds_in_memory(world, caplog):
    """Two kernels, twice: built each time, with one warning a process that names the remedy."""
    for _ in range(2):
        caplog.clear()
        world.restart()
        built = [build.build(PLAN), build.build(OTHER)]
        assert [(b.origin, b.path) for b in built] == [("compiled", None)] * 2
        assert build.build(PLAN).origin == "memory"
        assert "set JITMOE_CACHE_DIR" in (warning := one_warning(caplog))
    assert len(world.compiled) == 4
    return warning


def test_no_home(world, monkeypatch, caplog):
    for name in ("JITMOE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert "HOME is not set" in builds_in_memory(world, caplog)


def test_a_file_in_the_way(world, caplog):
    world.directory.write_text("")
    assert "File exists" in builds_in_memory(world, caplog)
    assert world.directory.read_text() == ""


def test_read_only_file_system(world, monkeypatch, caplog):
    """Without the entry: memory. With it: a hit, and no word."""
    world.build()
    world.compiled.clear()
    kept = world.directory.with_name("kept")
    world.directory.rename(kept)
    world.directory.mkdir()
    with monkeypatch.context() as patch:
        make_read_only(patch, world.directory)
        assert "Read-only file system" in builds_in_memory(world, caplog)
        assert not list(world.directory.iterdir())
    world.directory.rmdir()
    kept.rename(world.directory)
    make_read_only(monkeypatch, world.directory)
    caplog.clear()
    assert world.build().origin == "disk"
    assert not caplog.records


def make_read_only(patch, directory):
    """Whatever would write below `directory` fails as on a read-only mount, for root too."""

    def guard(function, writes):
        def guarded(path, *args, **kwargs):
            if str(path).startswith(str(directory)) and writes(*args):
                raise OSError(errno.EROFS, "Read-only file system", str(path))
            return function(path, *args, **kwargs)

        return guarded

    patch.setattr(os, "open", guard(os.open, lambda flags=0, *_: flags & (os.O_CREAT | os.O_RDWR)))
    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "utime", "chmod"):
        real, always = getattr(os, name), lambda *_: True
        if name == "mkdir":  # what exists is said to exist, as the system does
            patch.setattr(os, name, lambda p, *a, r=real, **k: mkdir(r, p, *a, **k))
        else:
            patch.setattr(os, name, guard(real, always))

    def mkdir(real, path, *args, **kwargs):
        if str(path).startswith(str(directory)) and not os.path.exists(path):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, *args, **kwargs)


READ_ONLY_BY_MODE = """
import os, sys
from pathlib import Path
from tiny_plan import TinyPlan, fake_cubin
from jitmoe.jit import build, nvrtc, render
templates = Path(sys.argv[1])
render.templates_dir = lambda: templates
nvrtc.version = lambda: "12.9.86"
nvrtc.compile = lambda text, arch, name: fake_cubin(text)
render.render(TinyPlan("sm_90a"))  # imports what rendering needs while it may be read
if os.geteuid() == 0:
    os.setgid(65534), os.setgroups([]), os.setuid(65534)
print([build.build(TinyPlan("sm_90a", num_rows=n)).origin for n in (2, 3, 4)])
"""


def test_read_only_by_mode(world, templates, caplog):
    """A directory made by root or by us, without write permission; run as an ordinary user."""
    world.build()
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        shutil.copytree(templates, base / "templates")
        shutil.copytree(world.directory, base / "cache")
        for path in (base, *base.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        try:
            variables = {"JITMOE_CACHE_DIR": str(base / "cache"), "PYTHONPATH": python_path()}
            result = subprocess.run(
                [sys.executable, "-c", READ_ONLY_BY_MODE, str(base / "templates")],
                env=os.environ | variables,
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            for path in (base, *base.rglob("*")):
                path.chmod(0o755)
    assert result.stdout.strip() == "['disk', 'compiled', 'compiled']", result.stderr
    assert result.stderr.count("JITMOE_CACHE_DIR") == 1
    assert "Permission denied" in result.stderr


def python_path():
    return os.pathsep.join([str(ROOT), str(Path(__file__).parent)])


@pytest.mark.parametrize("where", ["lock", "aside", "file", "rename"])
def test_full_disk(world, monkeypatch, caplog, where):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    def half(path, data):
        with open(path, "wb") as file:
            file.write(data[: len(data) // 2])
        full()

    with monkeypatch.context() as patch:
        if where == "lock":
            patch.setattr(os, "open", full)
        elif where == "aside":
            patch.setattr(tempfile, "mkdtemp", full)
        elif where == "file":
            patch.setattr(Path, "write_bytes", half)
        else:
            patch.setattr(os, "rename", full)
        # With no room for a lock file there may still be room for an entry.
        if where == "lock":
            world.build()
            assert "No space left" in one_warning(caplog)
        else:
            assert "No space left" in builds_in_memory(world, caplog)
            assert not world.entries()
        assert not world.leftovers()
    caplog.clear()
    assert world.build(TinyPlan("sm_90a", num_rows=7)).path is not None
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def give_away(path, monkeypatch):
    """Make `path` somebody else's."""
    if os.geteuid() == 0:
        os.chown(path, 4242, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)


def test_somebody_elses_directory_is_refused(world, monkeypatch, caplog):
    world.build()
    world.compiled.clear()
    give_away(world.directory, monkeypatch)
    assert "belongs to user" in builds_in_memory(world, caplog)
    assert len(world.entries()) == 1


def test_somebody_elses_entry_is_refused_and_replaced(world, monkeypatch, caplog):
    """In a directory that others can write, such as /tmp."""
    path = world.build().path
    if os.geteuid():
        pytest.skip("only root can give one entry away")
    give_away(path, monkeypatch)
    caplog.clear()
    assert world.build().origin == "compiled"
    assert "belongs to user" in one_warning(caplog)
    assert path.stat().st_uid == 0
    assert world.build().origin == "disk"


# Packs


def test_pack_is_used_and_not_written(world, monkeypatch):
    first = world.build()
    pack = world.directory.with_name("pack")
    world.directory.rename(pack)
    before = {path: path.stat().st_mtime_ns for path in pack.rglob("*")}
    monkeypatch.setenv("JITMOE_CACHE_DIR", f"{world.directory}:/nowhere:{pack}")
    make_read_only(monkeypatch, pack)
    found = world.build()
    assert (found.origin, found.path) == ("disk", pack / first.name)
    assert not world.directory.exists()  # looking up writes nothing
    assert world.build(OTHER).path.parent == world.directory
    assert before == {path: path.stat().st_mtime_ns for path in pack.rglob("*")}


def test_damaged_pack_entry_is_built_beside_it(world, monkeypatch, caplog):
    path = world.build().path
    pack = world.directory.with_name("pack")
    world.directory.rename(pack)
    (pack / path.name / "kernel.cubin").write_bytes(b"")
    monkeypatch.setenv("JITMOE_CACHE_DIR", f"{world.directory}:{pack}")
    caplog.clear()
    assert world.build().path == path
    assert str(pack) in one_warning(caplog)
    caplog.clear()
    assert world.build().origin == "disk"
    assert not caplog.records


# Damage


def truncate(path):
    (path / "kernel.cubin").write_bytes((path / "kernel.cubin").read_bytes()[:-1])


DAMAGES = {
    "truncated": truncate,
    "empty": lambda path: (path / "kernel.cubin").write_bytes(b""),
    "garbage": lambda path: (path / "kernel.cubin").write_bytes(os.urandom(68)),
    "no cubin": lambda path: (path / "kernel.cubin").unlink(),
    "no checksum": lambda path: (path / "checksum").unlink(),
    "empty checksum": lambda path: (path / "checksum").write_bytes(b""),
    "log": lambda path: (path / "ptxas.log").write_bytes(b"\xff"),
    "plan": lambda path: (path / "plan.json").write_bytes(b"{}"),
    "source": lambda path: (path / "kernel.cu").write_bytes(b"// other"),
    "cubin is a directory": lambda path: [
        (path / "kernel.cubin").unlink(),
        (path / "kernel.cubin").mkdir(),
    ],
    "empty entry": lambda path: [file.unlink() for file in path.iterdir()],
    "entry is a file": lambda path: [shutil.rmtree(path), path.write_text("")],
    "entry is a dangling link": lambda path: [shutil.rmtree(path), path.symlink_to("/nowhere")],
    "whole, but not ours": lambda path: rewrite(path, {"plan.json": b"[]"}),
    "whole, but no text": lambda path: rewrite(path, {"ptxas.log": b"\xff"}),
}


def rewrite(path, changes):
    files = {name: (path / name).read_bytes() for name in cache.FILES} | changes
    for name, data in (files | {"checksum": cache.checksum_of(files)}).items():
        (path / name).write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_a_miss_said_once_and_replaced(world, caplog, damage):
    first = world.build()
    caplog.clear()
    DAMAGES[damage](first.path)
    again = world.build()
    assert (again.origin, again.cubin) == ("compiled", first.cubin)
    if damage != "entry is a dangling link":  # no different from no entry
        assert str(first.path) in one_warning(caplog)
    if "whole" not in damage:
        caplog.clear()
        assert world.build().origin == "disk"
        assert not caplog.records
    assert not world.leftovers()
    assert len(world.entries()) == 1


def test_leftovers_of_the_killed_are_cleared_in_time(world):
    world.build()
    old, new = world.directory / ".aside-old", world.directory / ".aside-new"
    old.mkdir(), new.mkdir()
    os.utime(old, (0, 0))
    world.build(OTHER)
    assert not old.exists()
    assert new.exists()


# Races


def test_threads_compile_once(world, monkeypatch):
    def slow(text, arch, name):
        time.sleep(0.2)
        return world.compile(text, arch, name)

    monkeypatch.setattr(nvrtc, "compile", slow)
    results = []
    threads = [threading.Thread(target=lambda: results.append(build.build(PLAN))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(r.origin for r in results) == ["compiled"] + ["memory"] * 7
    assert len(world.compiled) == 1


PEER = """
import os, signal, sys, time
from pathlib import Path
from tiny_plan import TinyPlan, fake_cubin
from jitmoe.jit import build, nvrtc, render
templates, marks, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
render.templates_dir = lambda: templates

def compile(text, arch, name):
    (marks / f"compiling-{os.getpid()}").touch()
    time.sleep(seconds)
    return fake_cubin(text)

if seconds:
    nvrtc.compile, nvrtc.version = compile, lambda: "12.9.86"
(marks / f"ready-{os.getpid()}").touch()
while not (marks / "go").exists():
    time.sleep(0.001)
built = build.build(TinyPlan("sm_90a"))
print(built.origin, built.cubin.data[:4], built.cubin.resources.num_regs)
"""


class Peers:
    """Processes that build PLAN when told to; `seconds` of a fake compile, 0 for the real one."""

    def __init__(self, num, world, templates, marks, seconds=0.0):
        self.marks = marks
        marks.mkdir(exist_ok=True)
        variables = {"JITMOE_CACHE_DIR": str(world.directory), "PYTHONPATH": python_path()}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", PEER, str(templates), str(marks), str(seconds)],
                env=os.environ | variables,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(num)
        ]
        self.wait("ready-*", num)

    def wait(self, pattern, num):
        deadline = time.monotonic() + 30
        while len(list(self.marks.glob(pattern))) < num:
            assert time.monotonic() < deadline, f"no {pattern}"
            time.sleep(0.01)

    def go(self):
        (self.marks / "go").touch()

    def outputs(self):
        return [process.communicate(timeout=60)[0].split()[0] for process in self.processes]


def test_eight_processes_on_an_empty_cache_compile_once(world, templates, tmp_path):
    """With the real compiler."""
    peers = Peers(8, world, templates, tmp_path / "marks")
    peers.go()
    assert sorted(peers.outputs()) == ["compiled"] + ["disk"] * 7
    assert len(world.entries()) == 1
    assert not world.leftovers()


def test_a_killed_holder_blocks_nobody(world, templates, tmp_path):
    holder = Peers(1, world, templates, tmp_path / "holder", seconds=60)
    holder.go()
    holder.wait("compiling-*", 1)
    others = Peers(2, world, templates, tmp_path / "others", seconds=0.1)
    others.go()
    time.sleep(0.3)
    assert not list(others.marks.glob("compiling-*"))  # they wait for the holder
    holder.processes[0].send_signal(signal.SIGKILL)
    assert sorted(others.outputs()) == ["compiled", "disk"]
    holder.processes[0].communicate()
    assert [p.name for p in (world.directory / ".locks").iterdir()] == [
        f"{world.entries()[0].name}.lock"
    ]


def test_a_stuck_holder_is_outwaited(world, monkeypatch, caplog):
    with cache.locked("tiny", "0" * 16) as held, cache.locked("tiny", "0" * 16, 0.1) as again:
        assert (held, again) == (True, False)
    assert "a peer holds the lock of tiny-0000000000000000" in one_warning(caplog)
    assert "waiting for a peer" in caplog.text
    with cache.locked("tiny", "0" * 16) as held:
        assert held


def test_a_child_forked_while_building_does_not_keep_the_lock(world):
    with cache.locked("tiny", "0" * 16):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        with cache.locked("tiny", "0" * 16, 1.0) as held:
            assert held
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_lock_is_released_after_an_error(world):
    with pytest.raises(RuntimeError), cache.locked("tiny", "0" * 16):
        raise RuntimeError
    with cache.locked("tiny", "0" * 16, 0.1) as held:
        assert held


def test_a_file_system_without_locks_is_no_obstacle(world, monkeypatch):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    assert world.build().path is not None


def test_a_lost_race_uses_its_own_bytes(world, monkeypatch):
    """A peer without the lock is faster: its entry stays, and ours is what we run."""
    peer = world.build()
    kept = world.directory.with_name("kept")
    world.directory.rename(kept)

    def compile(text, arch, name):
        shutil.copytree(kept / peer.name, world.directory / peer.name)
        mine = fake_cubin(text)
        return nvrtc.Cubin(mine.data + b"mine", mine.log, mine.resources, mine.seconds)

    monkeypatch.setattr(nvrtc, "compile", compile)
    built = world.build()
    assert (built.origin, built.path) == ("compiled", peer.path)
    assert built.cubin.data.endswith(b"mine")
    assert world.build().cubin == peer.cubin
    assert not world.leftovers()


# The cache as a whole


def test_info_entries_verify_clear(world):
    assert store.info() == store.Info(world.directory, True, (), 0, 0)
    assert not world.directory.exists()
    paths = [world.build(plan).path for plan in (PLAN, OTHER)]
    info = store.info()
    num_bytes = sum(file.stat().st_size for path in paths for file in path.iterdir())
    assert info == store.Info(world.directory, True, (), 2, num_bytes)
    assert {entry.path for entry in store.entries()} == set(paths)
    assert {entry.facts["plan"]["num_rows"] for entry in store.entries()} == {2, 3}
    assert store.verify() == []
    truncate(paths[0])
    (bad,) = store.verify()
    assert (bad.path, bad.problem) == (paths[0], "its checksum does not fit its files")
    assert store.clear(older_than_s=3600) == 0
    assert store.clear() == 2
    assert not world.entries()
    assert not world.leftovers()
    assert len(list((world.directory / ".locks").iterdir())) == 2  # a peer may hold one
    assert store.clear() == 0
    assert world.build().origin == "compiled"


def test_info_of_a_directory_that_cannot_be_made(world, monkeypatch):
    world.directory.write_text("")
    assert not store.info().is_writable
    monkeypatch.setattr(cache, "directories", lambda: (None, ()))
    assert store.info() == store.Info(None, False, (), 0, 0)
    assert store.clear() == 0


def test_export_and_import(world, tmp_path):
    built = [world.build(plan) for plan in (PLAN, OTHER)]
    damaged = world.build(TinyPlan("sm_90a", num_rows=9))
    truncate(damaged.path)
    pack = tmp_path / "pack.tar.gz"
    assert store.export(pack) == 2
    assert store.clear() == 3
    assert store.import_(pack) == 2
    assert store.import_(pack) == 2  # again: nothing changes
    assert [world.build(plan).cubin for plan in (PLAN, OTHER)] == [b.cubin for b in built]
    assert world.build().origin == "disk"
    assert not list(tmp_path.glob(".pack*"))


def make_pack(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for member, data in members:
            member = tarfile.TarInfo(member) if isinstance(member, str) else member
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def link(name, kind):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    return member


ENTRY = "tiny-0123456789abcdef"


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ("/etc/passwd", "it holds '/etc/passwd'"),
        ("../tiny-0123456789abcdef/kernel.cu", "it holds '../tiny"),
        (f"{ENTRY}/../../kernel.cu", "it holds"),
        (f"{ENTRY}/x/kernel.cu", "it holds"),
        (f"{ENTRY}/other", "it holds"),
        ("tiny-0123/kernel.cu", "it holds"),
        (link(f"{ENTRY}/kernel.cu", tarfile.SYMTYPE), "it holds"),
        (link(f"{ENTRY}/kernel.cu", tarfile.LNKTYPE), "it holds"),
        (link(f"{ENTRY}/kernel.cu", tarfile.CHRTYPE), "it holds"),
        (f"{ENTRY}/kernel.cu", f"is damaged: {ENTRY}: 'checksum'"),
    ],
    ids=range(10),
)
def test_import_refuses_what_is_no_pack(world, tmp_path, member, message):
    good = world.build().path
    files = [(f"{good.name}/{file.name}", file.read_bytes()) for file in good.iterdir()]
    store.clear()
    pack = tmp_path / "pack.tar.gz"
    make_pack(pack, [*files, (member, b"")])
    with pytest.raises(store.CacheError) as caught:
        store.import_(pack)
    assert message in str(caught.value)
    assert not world.entries()  # not even the good one


def test_import_refuses_damage(world, tmp_path):
    path = world.build().path
    pack = tmp_path / "pack.tar.gz"
    store.export(pack)
    whole = pack.read_bytes()
    for data in (b"", b"no archive", whole[: len(whole) // 2], whole[:50] + b"\xff" * 9):
        pack.write_bytes(data)
        with pytest.raises(store.CacheError, match="is no pack of kernels"):
            store.import_(pack)
    make_pack(pack, [(f"{path.name}/{f.name}", f.read_bytes()[:-1]) for f in path.iterdir()])
    with pytest.raises(store.CacheError, match="does not fit"):
        store.import_(pack)
    with pytest.raises(FileNotFoundError):
        store.import_(tmp_path / "none")


def test_import_says_when_it_cannot_write(world, tmp_path, caplog):
    world.build()
    store.export(tmp_path / "pack.tar.gz")
    shutil.rmtree(world.directory)
    world.directory.write_text("")
    with pytest.raises(store.CacheError, match="JITMOE_CACHE_DIR"):
        store.import_(tmp_path / "pack.tar.gz")
