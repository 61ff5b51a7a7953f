"""What stands for NVSHMEM's device library where kernels are only looked at, as that library is in the packages for GPUs alone.

Of each function the one instruction that the rules ask about: a put with a signal is a release of the signal's word, and who calls
it must have ordered what other threads of the program stored, as in front of any release.
"""

import functools
import tempfile
from pathlib import Path

_TEXT = """
define void @nvshmemx_putmem_signal_nbi_block(ptr %to, ptr %from, i64 %bytes, ptr %word, i64 %add, i32 %how, i32 %pe) {
  call void asm sideeffect "red.release.sys.global.add.u64 [$0], $1;", "l,l"(ptr %word, i64 %add)
  ret void
}
define void @nvshmem_quiet() {
  call void asm sideeffect "membar.sys;", ""()
  ret void
}
"""
#: What `ttir.effects` calls a call of each.
KINDS = {"nvshmemx_putmem_signal_nbi_block": "release", "nvshmem_quiet": "asm membar.sys"}


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="fluxlike-lint-")


def library() -> Path:
    """A file that Triton links as it links the library: LLVM reads its IR as text, too."""
    path = Path(_folder().name) / "libnvshmem_device.ll"
    if not path.exists():
        path.write_text(_TEXT)
    return path
