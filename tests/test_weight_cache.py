"""The weight cache: what is mapped equals what is packed, and no file of it can change a text or end a process."""

import ctypes
import errno
import hashlib
import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import lookahead
from gguf_files import ARCHITECTURES, MIXED, write_gguf, write_llama
from lookahead.core import SettingsError
from lookahead.cpu import gguf_blueprint, weight_cache
from lookahead.cpu.load import read_model
from lookahead.cpu.weight_cache import HEADER, MappedPanels
from lookahead.drafters.adaptive import measure
from lookahead.drafters.adaptive.cost import CostCurve
from lookahead.gguf.file import GGUFFile

#: Every block type that is packed, and one that is decoded.
EVERY = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "F32", "Q2_K")
#: Loads a file with the cache, and prints its checksum.
PROGRAM = """
import sys
from lookahead.cpu import weight_cache
from lookahead.cpu.load import read_model
from lookahead.gguf.file import GGUFFile
weight_cache.LEAST = 0
{more}
print(read_model(GGUFFile(sys.argv[1])).checksum(), flush=True)
"""

pytestmark = pytest.mark.filterwarnings("ignore:.*does not support Q2_K:UserWarning")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weight_cache, "LEAST", 0)
    return weight_cache.folder()


@pytest.fixture
def path(tiny_gguf, tmp_path):
    return Path(shutil.copy(tiny_gguf("llama", MIXED), tmp_path / "model.gguf"))


def load(path, cache=True):
    return read_model(GGUFFile(path), cache)


def is_mapped(model):
    return isinstance(model.compiled.memory, MappedPanels)


def one(folder):
    """The only file of the cache."""
    (only,) = folder.glob("*.panels")
    assert sorted(each.name for each in folder.iterdir()) == sorted([only.name, "lock"])
    return only


def in_process(path, more="", **options):
    program = [sys.executable, "-c", PROGRAM.format(more=more), str(path)]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.fixture
def packed(monkeypatch):
    """The number of calls that packed something."""
    calls = []
    honest = gguf_blueprint.pack_panels
    monkeypatch.setattr(
        gguf_blueprint, "pack_panels", lambda *given: calls.append(given[0].name) or honest(*given)
    )
    return calls


# ---------------------------------------------------------------- what is mapped


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_first_and_the_second_start_compute_the_same(architecture, tiny_gguf, packed, folder):
    path = tiny_gguf(architecture, EVERY)
    own = load(path, cache=False)
    assert packed
    assert not folder.exists()
    first = load(path)
    del packed[:]
    second = load(path)
    assert not packed
    assert is_mapped(first)
    assert is_mapped(second)
    assert own.checksum() == first.checksum() == second.checksum()
    assert np.array_equal(own.compiled.memory.used, second.compiled.memory.used)


def test_a_text_from_mapped_weights_is_the_same(path):
    expected = lookahead.load(path, weight_cache=False).generate("the cat", max_new_tokens=20).tokens
    for _ in range(2):
        llm = lookahead.load(path)
        assert is_mapped(llm.model)
        assert llm.generate("the cat", max_new_tokens=20).tokens == expected


def test_a_matrix_is_packed_in_parts(path, monkeypatch, packed):
    expected = load(path, cache=False).checksum()
    count = len(packed)
    monkeypatch.setattr(gguf_blueprint, "CHUNK", 1)
    assert load(path).checksum() == expected
    assert len(packed) > 3 * count


def test_the_layout_has_a_number(tmp_path, folder):
    """If this fails because other bytes are packed, increment ``LAYOUT``, and put the new digest here."""
    write_llama(tmp_path / "model.gguf", EVERY[:-1])
    load(tmp_path / "model.gguf")
    digest = hashlib.sha256(one(folder).read_bytes()[HEADER:]).hexdigest()[:16]
    assert (weight_cache.LAYOUT, digest) == (1, "397e8a5fbf7c84b4")


def test_small_weights_are_not_kept(path, monkeypatch, folder):
    monkeypatch.setattr(weight_cache, "LEAST", 1 << 24)
    assert not is_mapped(load(path))
    assert not folder.exists()


def test_it_can_be_turned_off(path, monkeypatch, folder):
    assert not is_mapped(lookahead.load(path, weight_cache=False).model)
    for value in ("0", "false", "OFF"):
        monkeypatch.setenv(weight_cache.VARIABLE, value)
        assert not is_mapped(load(path))
    assert not folder.exists()
    monkeypatch.setenv(weight_cache.VARIABLE, "maybe")
    with pytest.raises(SettingsError, match="LOOKAHEAD_WEIGHT_CACHE must be 1 or 0, got maybe"):
        load(path)
    monkeypatch.setenv(weight_cache.VARIABLE, "1")
    assert is_mapped(load(path))


def test_only_the_user_can_read_and_nobody_can_write(path, folder):
    load(path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(one(folder).stat().st_mode) == 0o400


# ---------------------------------------------------------------- files that cannot be used


def damage_body(file):
    content = bytearray(file.read_bytes())
    content[HEADER + 8] ^= 1
    return bytes(content)


DAMAGE = {
    "a bit": damage_body,
    "header": lambda file: bytes(HEADER) + file.read_bytes()[HEADER:],
    "zeros": lambda file: bytes(len(file.read_bytes())),
    "truncated": lambda file: file.read_bytes()[:-1],
    "longer": lambda file: file.read_bytes() + b"\0",
    "empty": lambda file: b"",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_packed_again(damage, path, folder, packed):
    expected = load(path).checksum()
    file = one(folder)
    content = DAMAGE[damage](file)
    file.unlink()
    file.write_bytes(content)
    del packed[:]
    again = load(path)
    assert packed
    assert again.checksum() == expected
    del packed[:]
    assert load(path).checksum() == expected
    assert not packed


def test_another_layout_is_packed_again(path, folder, packed, monkeypatch):
    load(path)
    monkeypatch.setattr(weight_cache, "LAYOUT", 1000)
    del packed[:]
    load(path)
    assert packed
    first, second = folder.glob("*.panels")
    # A file of one name under another is not what its header says.
    os.replace(first, second)
    del packed[:]
    load(path)
    assert packed


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "writable"])
def test_what_others_could_change_is_not_mapped(kind, path, folder, tmp_path, packed):
    expected = load(path).checksum()
    file = one(folder)
    if kind == "writable":
        file.chmod(0o666)
    else:
        file.rename(tmp_path / "elsewhere")
        if kind == "link":
            file.symlink_to(tmp_path / "elsewhere")
        elif kind == "fifo":
            os.mkfifo(file)
        else:
            file.mkdir()
    del packed[:]
    if kind == "folder":
        with pytest.warns(UserWarning, match="must be a writable folder with free disk space"):
            assert load(path).checksum() == expected
        return
    assert load(path).checksum() == expected
    assert packed
    assert one(folder).is_file()
    assert not file.is_symlink()


@pytest.mark.parametrize("kind", ["link", "writable", "foreign"])
def test_a_folder_that_others_could_change_is_not_used(kind, path, folder, tmp_path, monkeypatch):
    load(path)
    if kind == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif kind == "writable":
        folder.chmod(0o777)
    else:  # to another user, it is foreign
        monkeypatch.setattr(weight_cache, "trusted", lambda: (os.geteuid() + 1,))
    with pytest.warns(UserWarning, match=r"must be a writable folder .* \(others can change it\)") as lines:
        assert not is_mapped(load(path))
    assert len(lines) == 1


def test_another_source_of_the_same_size_and_time_is_packed(path, tmp_path):
    first = load(path).checksum()
    times = path.stat()
    other = tmp_path / "other.gguf"
    write_gguf(other, "llama", MIXED, seed=9)
    assert other.stat().st_size == times.st_size
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert load(path).checksum() == load(other, cache=False).checksum() != first


def test_a_source_that_changes_while_it_is_packed_is_not_kept(path, folder, monkeypatch):
    honest = gguf_blueprint.pack_panels

    def change(*given):
        path.touch()
        honest(*given)

    monkeypatch.setattr(gguf_blueprint, "pack_panels", change)
    with pytest.raises(SettingsError, match="must not change while it is read"):
        load(path)
    assert not list(folder.glob("*.panels"))


def test_a_source_that_is_cut_while_it_is_packed_ends_no_process(path, folder):
    """A mapped source would end it with SIGBUS."""
    more = "import os; from lookahead.cpu import gguf_blueprint as g; f = g.pack_panels\n"
    more += "g.pack_panels = lambda *given: (os.truncate(sys.argv[1], 4096), f(*given))"
    process = in_process(path, more)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "it has become shorter" in errors


# ---------------------------------------------------------------- writing


def test_a_full_disk_leaves_the_weights_in_memory(path, folder, monkeypatch):
    expected = load(path, cache=False).checksum()
    honest, room = os.pwrite, [3]

    def full(*given):
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return honest(*given)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.warns(UserWarning, match="No space left on device.*--no-weight-cache omits") as lines:
        model = load(path)
    assert len(lines) == 1
    assert not is_mapped(model)
    assert model.checksum() == expected
    assert [each.name for each in folder.iterdir()] == ["lock"]


def test_a_limit_of_file_size_leaves_the_weights_in_memory(path, folder):
    more = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"
    process = in_process(path, more)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert int(output) == load(path, cache=False).checksum()
    assert "File too large" in errors
    assert [each.name for each in folder.iterdir()] == ["lock"]


def test_a_disk_that_would_be_half_full_is_left_alone(path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.warns(UserWarning, match="No space left on device"):
        assert not is_mapped(load(path))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_read_only_disk_leaves_the_weights_in_memory(number, path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.warns(UserWarning, match=os.strerror(number)) as lines:
        assert not is_mapped(load(path))
    assert len(lines) == 1


@pytest.mark.usefixtures("measured_curves")
def test_where_nothing_can_be_written_one_line_says_so(path, folder, monkeypatch, capsys):
    """The cost curve is not kept either, which needs no second line."""
    folder.parent.parent.write_text("a file where the folder should be")
    monkeypatch.setattr(measure, "measure", lambda target: (CostCurve.assumed(False), True))
    with pytest.warns(UserWarning, match="must be a writable folder") as lines:
        llm = lookahead.load(path)
    assert len(lines) == 1
    llm.generate("the cat", max_new_tokens=5)
    assert llm.model.state["curves"]
    assert capsys.readouterr().err == ""


def test_a_cache_on_a_read_only_disk_is_mapped(path, folder, monkeypatch):
    load(path)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("utime", "mkdir", "replace"):
        monkeypatch.setattr(os, name, refuse)
    assert is_mapped(load(path))


def test_a_process_killed_before_the_file_has_its_name_leaves_nothing_to_map(path, folder):
    more = "import os; os.replace = lambda *_: os.kill(os.getpid(), 9)"
    process = in_process(path, more)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    (left,) = folder.glob("*.new")
    assert not list(folder.glob("*.panels"))
    expected = load(path, cache=False).checksum()
    assert load(path).checksum() == expected
    assert one(folder) != left


def test_processes_that_start_at_once_pack_once(path, folder):
    more = "from lookahead.cpu import gguf_blueprint as g; f = g.pack_panels\n"
    more += (
        "import time; g.pack_panels = lambda *given: (time.sleep(0.1), print('packs', flush=True), f(*given))"
    )
    processes = [in_process(path, more) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    assert len({lines[-1] for lines in outputs}) == 1
    assert sorted(bool(lines[:-1]) for lines in outputs) == [False, False, True]
    assert is_mapped(load(path))


def test_threads_that_load_at_once_share_a_file(path, folder):
    found = []
    threads = [threading.Thread(target=lambda: found.append(load(path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({model.checksum() for model in found}) == 1
    assert all(map(is_mapped, found))
    one(folder)


def test_a_process_that_packs_for_too_long_is_not_waited_for(path, folder, monkeypatch):
    from filelock import FileLock

    folder.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(weight_cache, "PATIENCE", 0.1)
    with FileLock(folder / "lock"), pytest.warns(UserWarning, match="could not be acquired"):
        assert not is_mapped(load(path))


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_weights_that_are_mapped_stay(how, path, folder):
    llm = lookahead.load(path)
    expected = llm.generate("the cat", max_new_tokens=20).tokens
    file = one(folder)
    if how == "removed":
        file.unlink()
    else:
        other = file.with_name("other")
        other.write_bytes(b"")
        os.replace(other, file)
    assert llm.generate("the cat", max_new_tokens=20).tokens == expected
    assert llm.model.checksum() == lookahead.load(path, weight_cache=False).model.checksum()


def pages_in_memory(path):
    """How many pages of a file the system holds in memory, by mincore(2)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
        held = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), held) == 0
        return sum(byte & 1 for byte in held)


@pytest.mark.skipif(sys.platform != "linux", reason="for Linux' page cache")
def test_written_pages_are_read_again(path, folder, tmp_path, monkeypatch):
    other = tmp_path / "other"
    with other.open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages_in_memory(other):
        pytest.skip("a file system in memory")
    replace, found = os.replace, []

    def look(new, to):
        found.append(pages_in_memory(new))
        replace(new, to)

    monkeypatch.setattr(os, "replace", look)
    load(path)
    assert found[0] < one(folder).stat().st_size / mmap.PAGESIZE / 10


def test_the_least_recently_used_file_is_removed_first(tmp_path, folder, monkeypatch):
    paths = [tmp_path / f"{number}.gguf" for number in range(3)]
    for number, path in enumerate(paths):
        write_gguf(path, "llama", MIXED, seed=number)
    load(paths[0])
    size = one(folder).stat().st_size
    monkeypatch.setattr(weight_cache, "LIMIT", 2 * size + 1)
    time.sleep(0.02)
    load(paths[1])
    time.sleep(0.02)
    load(paths[0])  # used again
    time.sleep(0.02)
    load(paths[2])
    names = [weight_cache.path_of(GGUFFile(each)) for each in paths]
    assert [name.exists() for name in names] == [True, False, True]
    assert [each.path for each in weight_cache.kept()] == [names[0], names[2]]
    monkeypatch.setattr(weight_cache, "LIMIT", size - 1)
    with pytest.warns(UserWarning, match="more than the limit of"):
        load(paths[1])
    assert [name.exists() for name in names] == [True, False, True]
