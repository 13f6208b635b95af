"""Put on PYTHONPATH, this refuses and writes down every attempt of a process to reach another machine.

Audit hooks see what Python code does with sockets, in every thread, and can't be removed. Not covered: connections that
compiled code opens by itself.
"""

import os
import sys

_LOCAL = ("localhost", "127.0.0.1", "::1", "", None)


def _guard(event, arguments):
    if event == "socket.connect":
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None  # a path: a local socket
    elif event == "socket.getaddrinfo":
        host = arguments[0]
    else:
        return
    if host not in _LOCAL:
        with open(os.environ["NETWORK_ATTEMPTS"], "a") as file:
            file.write(f"{event} {host}\n")
        raise OSError(f"no network in this test: {event} {host}")


sys.addaudithook(_guard)
