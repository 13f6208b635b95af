"""What keeps a snippet in its place, one function per guard; the standard library and system calls only.

Used by ``sandbox_worker.py`` and ``sandbox_call.py``, which run without this package. Each guard works as root and as
an ordinary user, and raises OSError where the system lacks or forbids it; `works` tries that out in a process that
can be thrown away. Sources: the manual pages pivot_root(2), user_namespaces(7), landlock(7), seccomp(2).
"""

import ctypes
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Sequence

LINUX = sys.platform == "linux"
SCRATCH, SCRATCH_BYTES = "/sandbox", 256 * 2**20
_libc = ctypes.CDLL(None, use_errno=True)


def works(step: Callable[[], object]) -> bool:
    """Whether `step` succeeds in a forked child."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            step()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def _call(function: str, *arguments: int | bytes | None) -> int:
    result = getattr(_libc, function)(*(ctypes.c_ulong(a & 2**64 - 1) if isinstance(a, int) else a for a in arguments))
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")
    return int(result)


# --- namespaces: no network, and a file system of read-only folders and one small scratch folder

_NEW_NS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_NET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
_AT_FDCWD, _AT_RECURSIVE, _ATTR_READ_ONLY, _MOUNT_SETATTR = -100, 0x8000, 1, 442
_PIVOT_ROOT = {"x86_64": 155}


def enter_namespaces(readable: Iterable[str], base: str) -> None:
    """Leave this process with no network and a root of `readable` paths (read-only) and an empty SCRATCH (in memory).

    `base` is any folder that exists; the new root is built on it, seen by this process alone. Where the process may
    not make namespaces itself, a user namespace of its own lets it.
    """
    namespaces = _NEW_NS | _NEW_NET | _NEW_IPC | _NEW_UTS
    user, group = os.geteuid(), os.getegid()
    os.umask(0o022)
    try:
        _call("unshare", namespaces)
    except PermissionError:
        _call("unshare", namespaces | _NEW_USER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    # opened first: the new root may hide some
    sources = {path: os.open(path, os.O_PATH) for path in sorted(set(readable)) if os.path.exists(path)}
    _call("mount", b"tmpfs", os.fsencode(base), b"tmpfs", _MS_NOSUID | _MS_NODEV, b"size=1m,mode=755")
    for path, source in sources.items():
        target = base + path
        if stat.S_ISDIR(os.fstat(source).st_mode):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT, 0o644))
        _call("mount", f"/proc/self/fd/{source}".encode(), os.fsencode(target), None, _MS_BIND | _MS_REC, None)
        os.close(source)
    os.mkdir(base + SCRATCH)
    if not os.path.exists(f"{base}/tmp"):  # it does when libraries lie there
        os.symlink(SCRATCH, f"{base}/tmp")
    attributes = struct.pack("QQQQ", _ATTR_READ_ONLY, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(base), _AT_RECURSIVE, attributes, len(attributes))
    room = f"size={SCRATCH_BYTES},nr_inodes=20000,mode=700"
    _call("mount", b"tmpfs", os.fsencode(base + SCRATCH), b"tmpfs", _MS_NOSUID | _MS_NODEV, room.encode())
    os.chdir(base)
    _call("syscall", _PIVOT_ROOT.get(os.uname().machine, 41), b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


# --- Landlock: the same list of files without a namespace, and no signal to a process outside

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_FOLDER, _WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
_FILE_RIGHTS = 1 << 0 | _READ_FILE | _WRITE_FILE | 1 << 14 | 1 << 15
_RIGHTS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15}  # number of rights; 16 in later versions
_SCOPED = 3  # abstract sockets and signals, since version 6


def landlock_rules(readable: Iterable[str], scratch: str) -> int:
    """A rule set for `restrict_files`: its file descriptor."""
    version = _call("syscall", _CREATE_RULESET, None, 0, 1)
    every = (1 << _RIGHTS_BY_VERSION.get(version, 16)) - 1
    attributes = struct.pack("QQQ", every, 0, _SCOPED if version >= 6 else 0)
    rules = _call("syscall", _CREATE_RULESET, attributes, len(attributes), 0)
    paths = {path: _READ_FILE | _READ_FOLDER for path in readable if os.path.exists(path)}
    paths |= {"/dev/null": _READ_FILE | _WRITE_FILE, scratch: every}
    for path, rights in paths.items():
        source = os.open(path, os.O_PATH)
        allowed = rights if stat.S_ISDIR(os.fstat(source).st_mode) else rights & _FILE_RIGHTS
        _call("syscall", _ADD_RULE, rules, 1, struct.pack("=Qi", allowed, source), 0)
        os.close(source)
    return rules


def restrict_files(rules: int) -> None:
    """From here on, this process opens only what the rule set allows."""
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("syscall", _RESTRICT_SELF, rules, 0)


# --- user id and capabilities

_NO_NEW_PRIVILEGES, _PARENT_DEATH_SIGNAL = 38, 1
_FIRST_UID, _UIDS = 60706, 478  # assigned to nobody by convention (systemd's table), and inside a container's 65,536


def unused_uid() -> int:
    """A user id for this process's snippets; processes that run side by side get different ones."""
    return _FIRST_UID + os.getpid() % _UIDS


def become(uid: int, needed: Iterable[str] = ()) -> None:
    """Take the user and group id `uid`; PermissionError where it can't read one of the folders `needed`."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    for path in needed:
        if not os.access(path, os.R_OK | os.X_OK):
            raise PermissionError(f"user id {uid} can't read {path}")


def drop_capabilities() -> None:
    """No capability is left, whatever the user id, and none can come back."""
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))


def die_with(parent: int) -> None:
    """Be killed when `parent`, which started this process, ends. After `become`: new ids cancel it."""
    _call("prctl", _PARENT_DEATH_SIGNAL, 9, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


# --- seccomp: system calls that are refused

_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "riscv64": 0xC00000F3}
# name: (number on x86_64, number on the newer architectures, which share one table)
_STARTS_PROCESSES = {"fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281)}
_LEAVES_GROUP = {"setsid": (112, 157), "setpgid": (109, 154)}
_NETWORK = {"socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "io_uring_setup": (425, 425)}
_OTHER_PROCESSES = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip
_KERNEL = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "fsopen": (430, 430), "open_tree": (428, 428), "move_mount": (429, 429),
    "mount_setattr": (442, 442), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "open_by_handle_at": (304, 265),
}  # fmt: skip
_OUTLIVES_PROCESS = {  # or memory that no limit counts
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
}  # fmt: skip
_METADATA = {  # Landlock knows nothing of these
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "lchown": (94, None),
    "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
_REFUSED = _STARTS_PROCESSES | _LEAVES_GROUP | _NETWORK | _OTHER_PROCESSES | _KERNEL | _OUTLIVES_PROCESS | _METADATA
_CLONE, _CLONE3, _CLONE_THREAD = (56, 220), (435, 435), 0x10000
_KILL, _TGKILL, _PRLIMIT, _PRCTL, _FCNTL, _IOCTL, _SOCKETPAIR = (
    (62, 129), (234, 131), (302, 261), (157, 167), (72, 25), (16, 29), (53, 199)
)  # fmt: skip
_STREAMS = [1 | flags for flags in (0, 0x800, 0x80000, 0x80800)]  # SOCK_STREAM; a datagram pair can be redirected
_SET_OWNER = [8, 15], [0x8901, 0x8902]  # of fcntl and ioctl: has a signal sent to another process
_FIRST_UNKNOWN = 452  # system calls newer than this list

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _NO_PERMISSION, _UNKNOWN = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_Instruction = tuple[int, int, int, int]  # operation, jump if true, jump if false, operand


def _by_argument(number: int, index: int, values: Sequence[int], listed: int, other: int) -> list[_Instruction]:
    """Verdict `listed` when the call's argument is one of `values` (their low 32 bits), else `other`."""
    code = [(_EQUAL, 0, 2 * len(values) + 2, number), (_LOAD, 0, 0, 16 + 8 * index)]
    for value in values:
        code += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, listed)]
    return [*code, (_RETURN, 0, 0, other)]


def refuse_system_calls() -> None:
    """From here on: threads but no new process or program, no socket, no namespace, no signal but to itself."""
    machine, pid = os.uname().machine, os.getpid()
    if machine not in _ARCHITECTURE:
        raise OSError(f"no list of system calls for {machine}")
    column = 0 if machine == "x86_64" else 1
    refused = [numbers[column] for numbers in _REFUSED.values()]
    code: list[_Instruction] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _ARCHITECTURE[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),  # another architecture's table of calls on this one
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, _FIRST_UNKNOWN),
        (_RETURN, 0, 0, _UNKNOWN),
        (_EQUAL, 0, 1, _CLONE3[column]),  # its flags lie in memory, out of a filter's sight; callers fall back on clone
        (_RETURN, 0, 0, _UNKNOWN),
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, 16),
        (_ANY_BIT, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _NO_PERMISSION),
    ]
    for number in refused:
        if number is not None:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _NO_PERMISSION)]
    code += _by_argument(_KILL[column], 0, [pid], _ALLOW, _NO_PERMISSION)
    code += _by_argument(_TGKILL[column], 0, [pid], _ALLOW, _NO_PERMISSION)
    code += _by_argument(_PRLIMIT[column], 0, [0, pid], _ALLOW, _NO_PERMISSION)
    code += _by_argument(_SOCKETPAIR[column], 1, _STREAMS, _ALLOW, _NO_PERMISSION)
    code += _by_argument(_PRCTL[column], 0, [_PARENT_DEATH_SIGNAL], _NO_PERMISSION, _ALLOW)
    code += _by_argument(_FCNTL[column], 1, _SET_OWNER[0], _NO_PERMISSION, _ALLOW)
    code += _by_argument(_IOCTL[column], 1, _SET_OWNER[1], _NO_PERMISSION, _ALLOW)
    code.append((_RETURN, 0, 0, _ALLOW))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in code))
    filter_ = struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("prctl", 22, 2, filter_, 0, 0)
