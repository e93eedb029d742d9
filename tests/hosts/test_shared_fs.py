"""The kit's shared file system: coherent without switches, and with each of them as bad as it says, and no worse."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from parameterized import parameterized

from hosts.shared_fs import Mount
from hosts.shared_fs.two_mounts import PATIENCE, TwoMounts, error_of

LONG = "1000"  # seconds, longer than a test: what is cached so long is never seen anew
SHORT = "0.3"

libc = ctypes.CDLL(None, use_errno=True)


def fallocate(fd: int, size: int) -> None:
    if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        raise OSError(ctypes.get_errno(), "fallocate")


class TestCoherent(TwoMounts):
    def setUp(self) -> None:
        super().setUp()
        self.one, self.two = self.mount()

    def test_what_one_changes_the_other_sees(self) -> None:
        self.assertFalse((self.two / "a").exists())
        (self.one / "a").write_bytes(b"one")
        self.assertEqual(((self.two / "a").read_bytes(), os.listdir(self.two)), (b"one", ["a"]))
        reader = self.descriptor(self.two / "a")
        with open(self.one / "a", "ab", buffering=0) as file:
            file.write(b" more")
            self.assertEqual((os.fstat(reader).st_size, os.pread(reader, 99, 0)), (8, b"one more"))
        os.truncate(self.two / "a", 2)
        os.chmod(self.two / "a", 0o600)
        os.utime(self.two / "a", ns=(5, 7_000_000_001))
        status = os.stat(self.one / "a")
        self.assertEqual((status.st_size, status.st_mode & 0o777, status.st_mtime_ns), (2, 0o600, 7_000_000_001))
        self.assertEqual(status.st_ino, os.stat(self.two / "a").st_ino)

    def test_names(self) -> None:
        (self.one / "folder/inner").mkdir(parents=True)
        (self.one / "folder/inner/file").write_bytes(b"x")
        reader = self.descriptor(self.two / "folder/inner/file", os.O_RDWR)
        os.rename(self.one / "folder", self.one / "moved")
        self.assertEqual(
            (os.listdir(self.two), os.pwrite(reader, b"yz", 1), os.fstat(reader).st_size), (["moved"], 2, 3)
        )
        os.link(self.two / "moved/inner/file", self.two / "second")
        os.symlink("moved/inner", self.two / "link")
        self.assertEqual((self.one / "link/file").read_bytes(), b"xyz")
        self.assertEqual((os.readlink(self.one / "link"), os.stat(self.one / "second").st_nlink), ("moved/inner", 2))
        self.assertEqual(error_of(lambda: os.rmdir(self.one / "moved")), "ENOTEMPTY")
        shutil.rmtree(self.one / "moved")
        self.assertEqual(os.fstat(reader).st_nlink, 1)
        os.unlink(self.one / "second")
        self.assertEqual((os.fstat(reader).st_nlink, os.pread(reader, 9, 0)), (0, b"xyz"))
        self.assertEqual(os.listdir(self.two), ["link"])

    def test_a_file_that_is_replaced_while_it_is_open(self) -> None:
        (self.one / "a").write_bytes(b"old")
        (self.one / "b").write_bytes(b"newer")
        reader = self.descriptor(self.two / "a")
        os.rename(self.one / "b", self.one / "a")
        self.assertEqual((os.pread(reader, 9, 0), os.fstat(reader).st_size), (b"old", 3))
        self.assertEqual((self.two / "a").read_bytes(), b"newer")

    def test_many_entries(self) -> None:
        names = {f"file-{index:04}-with-a-long-name" for index in range(500)}
        for name in names:
            (self.one / name).touch()
        self.assertEqual(set(os.listdir(self.two)), names)

    def test_appends_of_both(self) -> None:
        files = [self.descriptor(mount / "a", os.O_WRONLY | os.O_CREAT | os.O_APPEND) for mount in (self.one, self.two)]
        for index in range(20):
            os.write(files[index % 2], b"%02d" % index)
        self.assertEqual((self.one / "a").read_bytes(), b"".join(b"%02d" % index for index in range(20)))

    def test_maps_room_and_holes(self) -> None:
        file = self.descriptor(self.one / "a", os.O_RDWR | os.O_CREAT)
        os.ftruncate(file, 1 << 20)
        self.assertEqual(os.fstat(file).st_blocks, 0)
        self.assertEqual(os.lseek(file, 0, os.SEEK_HOLE), 0)
        fallocate(file, 1 << 20)
        self.assertGreaterEqual(os.fstat(file).st_blocks * 512, 1 << 20)
        with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as mapped:
            os.pwrite(self.descriptor(self.two / "a", os.O_WRONLY), b"here", 4096)
            self.assertEqual(mapped[4096:4100], b"here")
        os.fsync(file)
        self.assertGreater(os.statvfs(self.one).f_bavail, 0)

    @parameterized.expand([("here", []), ("in_namespaces", ["unshare", "--pid", "--fork"])])
    def test_a_mount_that_is_cut_off_and_dies(self, _: str, inside: list[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            mount = Mount(self.backing, Path(folder), inside=inside)
            self.addCleanup(mount.close)
            mount.cut_off()
            waits = subprocess.Popen([sys.executable, "-c", f"import os; os.mkdir({folder!r} + '/a')"])
            time.sleep(0.3)
            self.assertIsNone(waits.poll())
            mount.reach_again()
            self.assertEqual((waits.wait(PATIENCE), os.listdir(self.one)), (0, ["a"]))
            mount.kill()
            self.assertEqual(error_of(lambda: os.listdir(folder)), "ENOTCONN")
            mount.close()
            self.assertEqual(os.listdir(folder), [])

    def test_a_signal_unmounts(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            mount = Mount(self.backing, Path(folder))
            self.addCleanup(mount.close)
            mount.process.terminate()
            self.assertEqual((mount.process.wait(PATIENCE), os.path.ismount(folder)), (0, False))


class TestBytes(TwoMounts):
    @parameterized.expand(
        [
            ("coherent", [], True),
            ("cached", ["--cache-seconds", LONG], False),
            ("without_holes", ["--no-sparse"], True),
            ("close_to_open", ["--close-to-open"], False),
            ("all", ["--close-to-open", "--stale", "--silly-renames", "--clock", "5", "--cache-seconds", LONG], False),
        ]
    )
    def test_any_size_at_any_offset(self, _: str, switches: list[str], by_both: bool) -> None:
        """Against a model in memory. Where mounts do not see each other at once, one of them does it alone."""
        chance, model = random.Random(1), bytearray()
        mounts = self.mount(*switches)[: 1 + by_both]
        files = [self.descriptor(mount / "a", os.O_RDWR | os.O_CREAT) for mount in mounts]
        for _step in range(150):
            offset, size = chance.randrange(3 << 20), int(2 ** chance.uniform(0, 22))
            file = chance.choice(files)
            action = chance.choice(["write", "write", "read", "read", "truncate", "fallocate"])
            if action == "write":
                data = chance.randbytes(size)
                self.assertEqual(os.pwrite(file, data, offset), size)
                model.extend(bytes(max(0, offset + size - len(model))))
                model[offset : offset + size] = data
            elif action == "read":
                self.assertEqual(os.pread(file, size, offset), model[offset : offset + size])
            elif action == "truncate":
                os.ftruncate(file, offset)
                model = model[:offset] + bytes(max(0, offset - len(model)))
            else:
                fallocate(file, size)
                model.extend(bytes(max(0, size - len(model))))
            self.assertEqual(os.fstat(file).st_size, len(model))
        for file in files:
            os.fsync(file)
        self.assertEqual((self.backing / "a").read_bytes(), model)


class TestCaches(TwoMounts):
    def changes(self, mount: Path) -> None:
        (mount / "a").write_bytes(b"longer")
        os.rename(mount / "b", mount / "c")
        (mount / "new").touch()

    def seen(self, mount: Path) -> tuple[object, ...]:
        exist = [name for name in ("b", "c", "new") if (mount / name).exists()]
        return os.stat(mount / "a").st_size, exist, sorted(os.listdir(mount))

    def test_the_changes_of_others_are_not_seen(self) -> None:
        first_mount, second_mount = self.mount("--cache-seconds", LONG)
        for name in ("a", "b"):
            (first_mount / name).write_bytes(b"x")
        before = self.seen(second_mount)
        self.changes(first_mount)
        self.assertEqual(self.seen(first_mount), (6, ["c", "new"], ["a", "c", "new"]))
        self.assertEqual(self.seen(second_mount), before)
        (second_mount / "own").touch()
        os.unlink(second_mount / "a")
        self.assertEqual(sorted(os.listdir(second_mount)), ["b", "own"])
        self.assertEqual(error_of(lambda: os.open(second_mount / "new", os.O_CREAT | os.O_EXCL)), "EEXIST")

    def test_they_are_seen_later(self) -> None:
        first_mount, second_mount = self.mount("--cache-seconds", SHORT)
        for name in ("a", "b"):
            (first_mount / name).write_bytes(b"x")
        self.seen(second_mount)
        self.changes(first_mount)
        self.eventually(lambda: self.seen(second_mount) == (6, ["c", "new"], ["a", "c", "new"]))
        self.assertEqual((second_mount / "a").read_bytes(), b"longer")


class TestCloseToOpen(TwoMounts):
    @parameterized.expand([("alone", []), ("with_caches", ["--cache-seconds", LONG])])
    def test_data_is_seen_after_close_and_open(self, _: str, switches: list[str]) -> None:
        first_mount, second_mount = self.mount("--close-to-open", *switches)
        (first_mount / "a").write_bytes(b"first")
        old = self.descriptor(second_mount / "a")
        with open(first_mount / "a", "r+b", buffering=0) as file:
            file.write(b"second")
            self.assertEqual(
                ((first_mount / "a").read_bytes(), (second_mount / "a").read_bytes()), (b"second", b"first")
            )
            os.fsync(file.fileno())
            self.assertEqual((os.pread(old, 99, 0), os.fstat(old).st_size), (b"first", 5))
            self.assertEqual((second_mount / "a").read_bytes(), b"second")
            file.write(b" third")
            self.assertEqual((second_mount / "a").read_bytes(), b"second")
        new = self.descriptor(second_mount / "a")
        self.assertEqual((os.pread(new, 99, 0), os.fstat(new).st_size), (b"second third", 12))
        self.assertEqual(os.pread(old, 99, 0), b"first")

    def test_both_write_parts_of_one_file(self) -> None:
        first_mount, second_mount = self.mount("--close-to-open")
        files = [open(mount / "a", "w+b", buffering=0) for mount in (first_mount, second_mount)]  # noqa: SIM115
        for index, file in enumerate(files):
            file.seek(index * 3)
            file.write(b"%d%d%d" % ((index,) * 3))
        self.assertEqual((self.backing / "a").stat().st_size, 0)
        for file in files:
            file.close()
        self.assertEqual([(mount / "a").read_bytes() for mount in (first_mount, second_mount)], [b"000111"] * 2)
        with (
            open(first_mount / "a", "r+b", buffering=0) as first,
            open(second_mount / "a", "r+b", buffering=0) as second,
        ):
            first.write(b"2")
            second.seek(5)
            second.write(b"3")
            os.fsync(second.fileno())
            self.assertEqual(
                ((first_mount / "a").read_bytes(), (second_mount / "a").read_bytes()), (b"200113", b"200113")
            )


class TestStale(TwoMounts):
    @parameterized.expand(
        [
            ("file_renamed", "f", "rename"),
            ("file_removed", "f", "remove"),
            ("folder_renamed", "", "rename"),
            ("folder_removed", "", "remove"),
        ]
    )
    def test_what_another_mount_takes_away(self, _: str, name: str, what: str) -> None:
        first_mount, second_mount = self.mount("--stale")
        for folder in ("other", "own"):
            (first_mount / folder).mkdir()
            (first_mount / folder / "f").write_bytes(b"x")
            (first_mount / folder / "rest").touch()
        for folder, taker, expected in (("other", first_mount, "ESTALE"), ("own", second_mount, "")):
            fd = self.descriptor(second_mount / folder / name)
            path = taker / folder / name
            if what == "rename":
                os.rename(path, path.with_name(f"{folder}-moved"))
            else:
                os.unlink(path) if name else shutil.rmtree(path)
            read = (lambda fd=fd: os.pread(fd, 1, 0)) if name else (lambda fd=fd: os.listdir(fd))
            self.assertEqual((error_of(read), error_of(lambda fd=fd: os.fstat(fd))), (expected, expected))
            if what == "rename":  # the name is new, and so is its handle; the old one stays stale
                self.assertTrue((second_mount / path.relative_to(taker)).with_name(f"{folder}-moved").exists())
                self.assertEqual(error_of(read), expected)

    def test_a_file_in_a_folder_that_moves(self) -> None:
        first_mount, second_mount = self.mount("--stale", "--cache-seconds", LONG)
        (first_mount / "folder").mkdir()
        (first_mount / "folder/f").write_bytes(b"old")
        fd = self.descriptor(second_mount / "folder/f")
        os.rename(first_mount / "folder", first_mount / "moved")
        self.assertEqual(error_of(lambda: os.pread(fd, 1, 0)), "ESTALE")
        (first_mount / "folder").mkdir()
        (first_mount / "folder/f").write_bytes(b"new")
        self.assertEqual((second_mount / "folder/f").read_bytes(), b"new")


class TestSillyRenames(TwoMounts):
    def test_an_open_file_keeps_a_name(self) -> None:
        first_mount, second_mount = self.mount("--silly-renames")
        (first_mount / "folder").mkdir()
        for name in ("folder/f", "folder/g", "folder/h"):
            (first_mount / name).write_bytes(name.encode())
        removed, replaced = (
            os.open(first_mount / "folder/f", os.O_RDONLY),
            os.open(first_mount / "folder/g", os.O_RDONLY),
        )
        os.unlink(first_mount / "folder/f")
        os.rename(first_mount / "folder/h", first_mount / "folder/g")
        for mount in (first_mount, second_mount):
            silly = [name for name in os.listdir(mount / "folder") if name != "g"]
            self.assertEqual(len(silly), 2)
            for name in silly:
                self.assertRegex(name, "^[.]nfs[0-9a-f]{24}$")
        os.unlink(second_mount / "folder/g")
        self.assertEqual(error_of(lambda: os.rmdir(first_mount / "folder")), "ENOTEMPTY")
        self.assertEqual(error_of(lambda: os.unlink(first_mount / "folder" / silly[0])), "EBUSY")
        self.assertEqual((os.pread(removed, 9, 0), os.pread(replaced, 9, 0)), (b"folder/f", b"folder/g"))
        os.close(removed)
        os.close(replaced)
        self.eventually(lambda: not os.listdir(second_mount / "folder"))
        os.rmdir(first_mount / "folder")


class TestLocks(TwoMounts):
    @parameterized.expand(
        [
            ("shared", ["EAGAIN", "EAGAIN", "EAGAIN"]),
            ("local", ["", "EAGAIN", "EAGAIN"]),
            ("none", ["ENOLCK", "ENOLCK", "ENOLCK"]),
            ("nosys", ["ENOSYS", "ENOSYS", "ENOSYS"]),
        ]
    )
    def test_who_is_kept_out(self, kind: str, expected: list[str]) -> None:
        """By flock: the other mount, another open here. By fcntl: another process here."""
        first_mount, second_mount = self.mount("--locks", kind)
        first, second = (self.descriptor(first_mount / "a", os.O_RDWR | os.O_CREAT) for _ in range(2))
        elsewhere = self.descriptor(second_mount / "a", os.O_RDWR)
        now = fcntl.LOCK_EX | fcntl.LOCK_NB
        held = error_of(lambda: fcntl.flock(first, now))
        errors = [error_of(lambda fd=fd: fcntl.flock(fd, now)) for fd in (elsewhere, second)]
        self.assertEqual((held, errors), ("" if expected[1] == "EAGAIN" else expected[0], expected[:2]))
        self.assertEqual(error_of(lambda: fcntl.lockf(first, now, 10, 5)), held)
        self.assertEqual(error_of(lambda: fcntl.lockf(elsewhere, now, 10, 5)), expected[0])
        self.assertEqual(error_of(lambda: fcntl.lockf(elsewhere, now, 10, 50)), held)
        self.assertEqual(
            self.in_a_process(first_mount / "a", "fcntl.LOCK_EX | fcntl.LOCK_NB").wait(), bool(expected[2])
        )

    def in_a_process(self, path: Path, operation: str) -> subprocess.Popen[bytes]:
        program = f"import fcntl; fcntl.lockf(open({str(path)!r}, 'r+'), {operation}, 10, 5)"
        return subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)

    def test_waiting(self) -> None:
        """The end of a process, also of one that waits, gives its locks back; so does a close."""
        first_mount, second_mount = self.mount()
        fd = self.descriptor(first_mount / "a", os.O_RDWR | os.O_CREAT)
        fcntl.lockf(fd, fcntl.LOCK_EX)
        killed, waits = (self.in_a_process(second_mount / "a", "fcntl.LOCK_EX") for _ in range(2))
        time.sleep(0.3)
        killed.send_signal(signal.SIGKILL)
        self.assertEqual(killed.wait(PATIENCE), -signal.SIGKILL)
        self.assertIsNone(waits.poll())
        os.close(os.open(first_mount / "a", os.O_RDONLY))
        self.assertEqual(waits.wait(PATIENCE), 0)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


class TestOthers(TwoMounts):
    def test_without_room_and_links(self) -> None:
        mount, _ = self.mount("--no-sparse", "--no-fallocate", "--no-links")
        file = self.descriptor(mount / "a", os.O_RDWR | os.O_CREAT)
        os.ftruncate(file, 1 << 20)
        self.assertEqual(os.fstat(file).st_blocks, (1 << 20) // 512)
        self.assertGreaterEqual(os.stat(self.backing / "a").st_blocks * 512, 1 << 20)
        self.assertEqual(os.lseek(file, 0, os.SEEK_HOLE), 1 << 20)
        self.assertEqual(error_of(lambda: fallocate(file, 9)), errno.errorcode[errno.EOPNOTSUPP])
        self.assertEqual(error_of(lambda: os.link(mount / "a", mount / "b")), "EPERM")

    @parameterized.expand([("long", LONG), ("short", SHORT)])
    def test_late_renames(self, _: str, seconds: str) -> None:
        first_mount, second_mount = self.mount("--late-renames", seconds)
        (first_mount / "a").write_bytes(b"x")
        os.rename(first_mount / "a", first_mount / "b")
        self.assertTrue((first_mount / "b").exists())
        if seconds == LONG:
            self.assertEqual(
                ((second_mount / "a").exists(), (second_mount / "b").exists(), os.listdir(second_mount)),
                (False, False, []),
            )
        else:
            self.eventually(lambda: (second_mount / "b").exists() and os.listdir(second_mount) == ["b"])

    @parameterized.expand([("fast", 7.5), ("slow", -7.5)])
    def test_a_server_with_another_clock(self, _: str, shift: float) -> None:
        first_mount, second_mount = self.mount("--clock", str(shift))
        (first_mount / "a").touch()
        shift_ns = round(shift * 1e9)
        for name in ("a", "."):
            true, shown = os.stat(self.backing / name), os.stat(second_mount / name)
            times = (true.st_mtime_ns + shift_ns, true.st_ctime_ns + shift_ns)
            self.assertEqual((shown.st_mtime_ns, shown.st_ctime_ns), times)
        os.utime(first_mount / "a", ns=(10**15, 10**15 + 1))
        self.assertEqual(os.stat(second_mount / "a").st_mtime_ns, 10**15 + 1)

    def test_a_switch_that_there_is_not(self) -> None:
        with tempfile.TemporaryDirectory() as folder, self.assertRaisesRegex(OSError, "(?s)did not mount: .*--sparse"):
            Mount(self.backing, Path(folder), ["--sparse"])
