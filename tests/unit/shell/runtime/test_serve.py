"""What every service process does before it serves."""

import os
import platform
import subprocess
import sys

import pytest

COUNT = """
import ctypes, sys, threading
from services.shell.runtime.serve import share_heap
if sys.argv[2:]:
    share_heap()
together = threading.Barrier(4)
def work():
    together.wait()
    kept = [bytes(5000) for _ in range(100)]
    together.wait()
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
libc = ctypes.CDLL(None)
libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
file = libc.fopen(sys.argv[1].encode(), b"w")
libc.malloc_info(0, file)
libc.fclose(file)
print(open(sys.argv[1]).read().count("<heap nr="))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have heaps of their own")
def test_threads_of_a_service_share_one_heap(tmp_path: os.PathLike[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    counts = [
        int(subprocess.check_output([sys.executable, "-c", COUNT, f"{tmp_path}/info", *share], env=environment))
        for share in ([], ["share"])
    ]
    assert counts[1] == 1 < counts[0]
