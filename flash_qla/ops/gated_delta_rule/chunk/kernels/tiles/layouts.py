"""Register and shared-memory layouts that the compiler does not find by itself."""

import tilelang


def swizzled(*buffers):
    """Annotation dict: 128-byte swizzle, free of bank conflicts for ldmatrix/stmatrix and what TMA and wgmma expect.

    A dict in argument order: a set's order would change the generated code and with it the cache key.
    """
    return {buffer: tilelang.layout.make_swizzled_layout(buffer) for buffer in buffers}
