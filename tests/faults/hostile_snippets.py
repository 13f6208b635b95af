"""What a snippet can try, and the reason that must come back: bodies of `evaluate(example, response)`.

`example` holds what the attacker is given: "parent" (process id), "key" and "home_key" (paths of files that hold
keys), "project" (a folder), "port" (a server that listens).
"""

HINT = r"\(in the sandbox there is no network, no new process and no file outside the current folder\)"
REFUSED = rf"^(PermissionError|FileNotFoundError|OSError): .*{HINT}"
TIMED_OUT = r"^no result within \d(\.\d)? s$"

# run under every set of guards
ALWAYS = {
    "infinite loop": ("while True: pass", TIMED_OUT),
    "sleep": ("import time\ntime.sleep(100)", TIMED_OUT),
    "catastrophic regex": ("import re\nreturn bool(re.match('(a+)+$', 'a' * 60 + 'b'))", TIMED_OUT),
    "stops itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nreturn 1", TIMED_OUT),
    "ignores signals": (
        "import signal\nfor number in range(1, 60):\n  try: signal.signal(number, signal.SIG_IGN)\n"
        "  except (OSError, ValueError): pass\nwhile True: pass",
        TIMED_OUT,
    ),
    "__str__ that never ends": (
        "class E(Exception):\n  def __str__(self):\n    while True: pass\nraise E",
        TIMED_OUT,
    ),
    "__float__ that never ends": (
        "class F(float):\n  def __float__(self):\n    while True: pass\nreturn F(1)",
        TIMED_OUT,
    ),
    "stdout whose flush never ends": (
        "import sys, time\nclass S:\n  def flush(self): time.sleep(100)\nsys.stdout = S()\nreturn 1",
        TIMED_OUT,
    ),
    "exit": ("import sys\nsys.exit(0)", r"^the snippet called sys\.exit \(line 3 of the snippet\)"),
    "hard exit": ("import os\nos._exit(0)", r"^the snippet ended its process \(status 0\) before evaluate returned$"),
    "abort": ("import os\nos.abort()", r"^the process ended with SIGABRT"),
    "alarm": ("import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\ntime.sleep(9)", r"ended with SIGALRM"),
    "terminates itself": ("import os\nos.kill(os.getpid(), 15)\nreturn 1", r"ended with SIGTERM"),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)\nreturn 1", r"^the process was killed"),
    "crash": ("import ctypes\nctypes.string_at(0)", r"ended with SIGSEGV"),
    "10 GB": ("return len(bytearray(10 * 2**30))", r"^MemoryError: more than 200 MB$"),
    "10 GB that stay": (
        "global kept\nkept = []\nwhile True: kept.append(bytearray(2**20))",
        r"^MemoryError: more than 200 MB$",
    ),
    "10 GB in small pieces": ("kept = []\nwhile True: kept.append([0] * 1000)", r"^MemoryError: more than 200 MB$"),
    "10 GB mapped": ("import mmap\nreturn len(mmap.mmap(-1, 10 * 2**30))", r"^OSError: .*Cannot allocate memory"),
    "10 GB of numbers": ("import numpy\nreturn numpy.ones(10 * 2**27).sum()", r"^MemoryError: more than 200 MB$"),
    "10 GB on disk": (
        "file = open('big', 'wb')\nfor _ in range(10_000): file.write(b'x' * 2**20)\nreturn 1",
        r"^OSError: .*(No space left|File too large)",
    ),
    "many open files": ("kept = [open('f', 'w') for _ in range(100_000)]\nreturn 1", r"^OSError: .*Too many open"),
    "deep recursion": ("def deep(n): return deep(n + 1)\nreturn deep(0)", r"^RecursionError: maximum recursion depth"),
    "deeper recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef deep(n): return deep(n + 1)\nreturn deep(0)",
        r"^(MemoryError|RecursionError|SystemError)|SIGSEGV|no result within",  # differs between versions of Python
    ),
    "prints 1 GB": ("for _ in range(1000): print('x' * 10**6)\nreturn 1", r"^more than 1 MB of output$"),
    "prints 1 GB at once": (
        "import os\nfor _ in range(1000): os.write(2, bytes(10**6))",
        r"^more than 1 MB of output$",
    ),
    "prints and exits": ("import os\nprint(1.0, flush=True)\nos._exit(0)", r"^the snippet ended its process"),
    "prints instead": ("print(1.0)", r"^evaluate returned None \(NoneType\)"),
    "text": ("return '1'", r"^evaluate returned '1' \(str\)"),
    "long text": ("return 'x' * 10**7", r"^evaluate returned 'xx.*xx' \(str\), not a finite number$"),
    "truth": ("return True", r"^evaluate returned True \(bool\)"),
    "complex": ("return 1j", r"^evaluate returned 1j \(complex\)"),
    "NaN": ("return float('nan')", r"^evaluate returned nan"),
    "infinity": ("return float('inf')", r"^evaluate returned inf"),
    "__float__ that lies": ("class F(float):\n  def __float__(self): return '1'\nreturn F(1)", r"^TypeError"),
    "long message": ("raise ValueError('x' * 10**7)", r"^ValueError: x{500} \(line 2 of the snippet\)"),
    "surrogates in the message": ("raise ValueError('\\ud800')", r"^ValueError: \\ud800"),
    "message that fails": (
        "class E(Exception):\n  def __str__(self): raise E\nraise E",
        r"^E: \(its message can't be shown: E\)",
    ),
    "message that exits": (
        "import sys\nclass E(Exception):\n  def __str__(self): sys.exit()\nraise E",
        r"^the snippet ended its process",
    ),
    "name that is long": ("raise type('E' * 10**6, (Exception,), {})", r"^E{999}"),
    "interrupt": ("raise KeyboardInterrupt", r"^KeyboardInterrupt"),
    "group of exceptions": ("raise ExceptionGroup('g', [ValueError()] * 1000)", r"^ExceptionGroup: g \(1000"),
    "closes every file": ("import os\nos.closerange(0, 1000)\nreturn 1", r"before evaluate returned$"),
    "closes every file and goes on": (
        "import os\nos.closerange(0, 1000)\nwhile True: pass",
        r"^the process was killed, or closed the channel",
    ),
    "writes into the channel": (
        "import os\nos.write(3, b'x' * 50)\nreturn 1",
        r"^the snippet wrote into the channel of its result$",
    ),
    "floods the channel": ("import os\nwhile True: os.write(3, bytes(10**5))", r"^the snippet wrote into the channel"),
    "reads the environment": ("import os\nreturn len(os.environ['OPENAI_API_KEY'])", r"^KeyError: 'OPENAI_API_KEY'"),
    "folders without end": (
        "import os\nfor _ in range(1200):\n  os.mkdir('d')\n  os.chdir('d')\nos.mkdir('shut', 0)\nreturn None",
        r"^evaluate returned None",
    ),
}

# need one of namespaces, Landlock
FILES = {
    f"reads {name}": (f"return len(open({path}).read())", REFUSED)
    for name, path in {
        "a key in the project": "example['key']",
        "a key in the home folder": "example['home_key']",
        "this file": "example['project'] + '/README.md'",
        "its environment": "'/proc/self/environ'",
        "the worker's environment": "f'/proc/{__import__(\"os\").getppid()}/environ'",
        "the parent's environment": "f'/proc/{example[\"parent\"]}/environ'",
        "the first process's environment": "'/proc/1/environ'",
        "passwords": "'/etc/shadow'",
        "users": "'/etc/passwd'",
    }.items()
} | {
    "lists the project": ("import os\nreturn len(os.listdir(example['project']))", REFUSED),
    "writes into the project": ("open(example['project'] + '/poison', 'w')\nreturn 1", REFUSED),
    "empties the key": ("import os\nos.truncate(example['key'], 0)\nreturn 1", REFUSED),
    "deletes the key": ("import os\nos.unlink(example['key'])\nreturn 1", REFUSED),
    "moves the key": ("import os\nos.rename(example['key'], 'key')\nreturn 1", REFUSED),
    "writes beside the libraries": ("import json\nopen(json.__file__ + '2', 'w')\nreturn 1", rf"{HINT}"),
    "imports the project": ("import trl\nreturn 1", r"^(ModuleNotFound|Import)Error: No module named 'trl'"),
}

_LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
_CHECK = "raise OSError(ctypes.get_errno(), 'refused')"

# need the refused system calls
SYSTEM_CALLS = {
    "fork loop": ("import os\nwhile True: os.fork()", REFUSED),
    "fork loop that insists": ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", TIMED_OUT),
    "daemon": (
        "import os\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    while True: pass\n"
        "  os._exit(0)\nreturn 1",
        REFUSED,
    ),
    "leaves its session": ("import os\nos.setsid()\nreturn 1", REFUSED),
    "leaves its group": ("import os\nos.setpgid(0, 0)\nreturn 1", REFUSED),
    "runs a program": ("import subprocess\nreturn len(subprocess.check_output(['/bin/ls', '/']))", REFUSED),
    "becomes a program": ("import os\nos.execv('/bin/sleep', ['sleep', '100'])", REFUSED),
    "shell": ("import os\nif os.system('sleep 100') != 0: raise OSError('no shell')", rf"^OSError: no shell {HINT}"),
    "multiprocessing": ("import multiprocessing\nwith multiprocessing.Pool(2) as pool: return 1", REFUSED),
    "fork by ctypes": (f"{_LIBC}if libc.fork() == -1: {_CHECK}\nreturn 1", REFUSED),
    "clone by number": (f"{_LIBC}if libc.syscall(56, 17, 0, 0, 0, 0) == -1: {_CHECK}\nwhile True: pass", REFUSED),
    "clone3 by number": (
        f"{_LIBC}if libc.syscall(435, bytes(64), 64) == -1: {_CHECK}\nwhile True: pass",
        rf"^OSError: .*{HINT}",
    ),
    "fork by the x32 table": (f"{_LIBC}if libc.syscall(0x40000039) == -1: {_CHECK}\nwhile True: pass", REFUSED),
    "namespace": (f"{_LIBC}if libc.unshare(0x10000000) == -1: {_CHECK}\nreturn 1", REFUSED),
    "traces the worker": (f"{_LIBC}if libc.ptrace(16, os.getppid(), 0, 0) == -1: {_CHECK}\nreturn 1", REFUSED),
    "survives the worker": (f"{_LIBC}if libc.prctl(1, 0, 0, 0, 0) == -1: {_CHECK}\nreturn 1", REFUSED),
    "kills the worker": (
        "import os\nos.kill(os.getppid(), 9)\nreturn 1",
        REFUSED.replace("FileNot", "ProcessLookup|F"),
    ),
    "kills the parent": ("import os\nos.kill(example['parent'], 9)\nreturn 1", REFUSED),
    "kills all": ("import os\nos.kill(-1, 9)\nreturn 1", REFUSED),
    "limits the parent": (
        "import resource\nresource.prlimit(example['parent'], resource.RLIMIT_CPU, (0, 0))\nreturn 1",
        REFUSED,
    ),
    "signals by a file": (
        "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, example['parent'])\nreturn 1",
        REFUSED,
    ),
    "shared memory": (f"{_LIBC}if libc.shmget(0, 10 * 2**30, 0o1600) == -1: {_CHECK}\nreturn 1", REFUSED),
    "memory files": ("import os\nfd = os.memfd_create('m')\nreturn fd", REFUSED),
    "makes the key public": ("import os\nos.chmod(example['key'], 0o666)\nreturn 1", REFUSED),
    "more limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))\nreturn 1",
        r"^ValueError: not allowed to raise maximum limit",
    ),
    "uses other cores": ("import os\nos.sched_setaffinity(0, range(os.cpu_count()))\nreturn 1", REFUSED),
    "network": ("import socket\nsocket.create_connection(('127.0.0.1', example['port']), 1)\nreturn 1", REFUSED),
    "network by name": ("import urllib.request\nurllib.request.urlopen('http://example.com', timeout=1)", HINT),
    "network by ctypes": (f"{_LIBC}if libc.socket(2, 1, 0) == -1: {_CHECK}\nreturn 1", REFUSED),
    "a local socket": ("import socket\nsocket.socket(socket.AF_UNIX)\nreturn 1", REFUSED),
    "a pair turned elsewhere": (
        "import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].connect('/dev/log')\nreturn 1",
        REFUSED,
    ),
}

# a body that takes `example` and `response` from the call, and `evaluate` from the text of the response
RUNNER = """
def evaluate(example, response):
    lines = ["def evaluate(example, response):", *response["parts"][0]["text"].splitlines()]
    scope = {}
    exec(compile("\\n  ".join(lines), "<snippet>", "exec"), scope)
    return scope["evaluate"](example, response)
"""
