"""What stands for NVSHMEM's device library where kernels are only looked at, as that library is in the packages for GPUs alone.

Of each function the one instruction that the rules ask about: a put with a signal is a release of the signal's word, and who calls
it must have ordered what other threads of the program stored, as in front of any release.
"""

from pathlib import Path

#: A file that Triton links as it links the library: LLVM reads its IR as text, too.
LIBRARY = Path(__file__).with_name("libnvshmem_device.ll")
#: What `ttir.effects` calls a call of each.
KINDS = {"nvshmemx_putmem_signal_nbi_block": "release", "nvshmem_quiet": "asm membar.sys"}
