"""Who and where: ranks, the symmetric heap, copy engines, the launch of a kernel on either device."""
