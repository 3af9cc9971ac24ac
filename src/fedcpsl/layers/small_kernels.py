"""Triton kernels for keyed dropout and for max pooling."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["layer", "least"])  # so that one compilation serves every layer
def drop(
    x, keys, y, count, layer, least, scale,
    INNER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = x / (1 - p) where the number of (key, position) is at least p, else 0: the bits of `keyed_uniform`."""
    sample = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + sample).to(tl.uint64, bitcast=True)
    position = (e // INNER + 1).to(tl.uint64) + (layer.to(tl.uint64) << 40)
    z = key + position * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    kept = (z >> 40).to(tl.int32) >= least
    values = tl.load(x + sample * count + e, mask=e < count)
    tl.store(y + sample * count + e, tl.where(kept, values, values * 0.0) * scale, mask=e < count)


@triton.jit
def pool(
    x, y, chosen, rows, xn, xc, xh, xw, yn, yc, yp,
    OUT_H: tl.constexpr, OUT_W: tl.constexpr, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, RELU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The largest of each window, the first of equals; `chosen` says which, or none where a ReLU stops it."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    n, p = (m // (OUT_H * OUT_W)).to(tl.int64), m % (OUT_H * OUT_W)
    ok = (m < rows)[:, None] & (c < C)[None, :]
    corner = (n * xn + (p // OUT_W) * KH * xh + (p % OUT_W) * KW * xw)[:, None] + (c * xc)[None, :]
    best = tl.full((BLOCK_M, BLOCK_C), float("-inf"), tl.float32)
    which = tl.zeros((BLOCK_M, BLOCK_C), tl.int32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            value = tl.load(x + corner + (i * xh + j * xw), mask=ok, other=0.0)
            better = (value > best) | (value != value)  # NaN wins, as in PyTorch
            best = tl.where(better, value, best)
            which = tl.where(better, i * KW + j, which)
    if RELU:
        which = tl.where(best <= 0, KH * KW, which)
        best = tl.where(best < 0, 0.0, best)
    tl.store(y + (n * yn + p * yp)[:, None] + (c * yc)[None, :], best, mask=ok)
    tl.store(chosen + m.to(tl.int64)[:, None] * C + c[None, :], which.to(tl.int8), mask=ok)


@triton.jit
def unpool(
    gradient, chosen, y, rows, gn, gc, gp, yn, yh, yw,
    OUT_H: tl.constexpr, OUT_W: tl.constexpr, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient of `pool` in its x, channels last; what no window covers is left alone."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    n, p = (m // (OUT_H * OUT_W)).to(tl.int64), m % (OUT_H * OUT_W)
    ok = (m < rows)[:, None] & (c < C)[None, :]
    slopes = tl.load(gradient + (n * gn + p * gp)[:, None] + (c * gc)[None, :], mask=ok, other=0.0)
    which = tl.load(chosen + m.to(tl.int64)[:, None] * C + c[None, :], mask=ok, other=0).to(tl.int32)
    corner = (n * yn + (p // OUT_W) * KH * yh + (p % OUT_W) * KW * yw)[:, None] + c[None, :]
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            tl.store(y + corner + (i * yh + j * yw), tl.where(which == i * KW + j, slopes, 0.0), mask=ok)
