"""Triton kernels for convolutions (an implicit matmul for every slot and model, and the copies of an explicit one),
keyed dropout and max pooling.

Convolutions read a grid at (place of an output) * UP + OFF + (offset in the kernel) * STEP, divided by DOWN where that
leaves no remainder. A convolution has UP = stride, OFF = -padding, STEP = dilation and DOWN = 1; the gradient of its
input is read from the gradient of its output with UP = 1, OFF = padding, STEP = -dilation and DOWN = stride.
Sums run in a fixed order: no atomics, so the same inputs give the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def _gathered(
    x, n, a, b, rows_ok, k0, sn, sc, sh, sw,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, IN_H: tl.constexpr, IN_W: tl.constexpr,
    UP_H: tl.constexpr, UP_W: tl.constexpr, OFF_H: tl.constexpr, OFF_W: tl.constexpr,
    STEP_H: tl.constexpr, STEP_W: tl.constexpr, DOWN_H: tl.constexpr, DOWN_W: tl.constexpr,
    INSIDE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[rows, BLOCK_K]: what the outputs at image n, row a, column b take from x, in the order (i, j, channel)."""
    if C % BLOCK_K == 0:  # the whole block is at one offset
        offset = k0 // C
        c = (tl.multiple_of(k0 % C, BLOCK_K) + tl.arange(0, BLOCK_K))[None, :]  # said, so that loads are wide
        ok = rows_ok[:, None]
    else:
        k = (k0 + tl.arange(0, BLOCK_K))[None, :]
        offset = k // C
        c = k % C
        ok = rows_ok[:, None] & (k < KH * KW * C)
    i = offset // KW
    j = offset % KW
    top = a * UP_H + OFF_H
    left = b * UP_W + OFF_W
    if not INSIDE:
        h = top[:, None] + i * STEP_H
        w = left[:, None] + j * STEP_W
        ok = ok & (h >= 0) & (w >= 0) & (h < IN_H * DOWN_H) & (w < IN_W * DOWN_W)
    if DOWN_H * DOWN_W == 1:  # separable: one addition per element
        row = x + (n.to(tl.int64) * sn + top * sh + left * sw)
        pointers = row[:, None] + (i * STEP_H * sh + j * STEP_W * sw + c * sc)
    else:
        ok = ok & (h % DOWN_H == 0) & (w % DOWN_W == 0)
        row = x + n.to(tl.int64) * sn
        pointers = row[:, None] + ((h // DOWN_H) * sh + (w // DOWN_W) * sw + c * sc)
    return tl.load(pointers, mask=ok, other=0.0)


@triton.jit
def _add_dot(a, b, total, DOT: tl.constexpr):
    if DOT == "bf16":
        total = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    else:
        total = tl.dot(a, b, total, input_precision=DOT)
    return total


@triton.jit
def convolve(
    x, weight, bias, relu_of, y, rows, models, ss, sm, sn, sc, sh, sw,
    OUTS: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, IN_H: tl.constexpr, IN_W: tl.constexpr,
    UP_H: tl.constexpr, UP_W: tl.constexpr, OFF_H: tl.constexpr, OFF_W: tl.constexpr,
    STEP_H: tl.constexpr, STEP_W: tl.constexpr, DOWN_H: tl.constexpr, DOWN_W: tl.constexpr,
    INSIDE: tl.constexpr, HAS_BIAS: tl.constexpr, RELU: tl.constexpr, MASK: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y [slots * models, rows = (n, a, b), outputs] = gathered x times weight [.., outputs, (i, j, channel)]."""
    at = tl.program_id(2)
    x += (at // models).to(tl.int64) * ss + (at % models).to(tl.int64) * sm
    K: tl.constexpr = KH * KW * C
    weight += at.to(tl.int64) * (OUTS * K)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n, a, b = m // (OUT_H * OUT_W), (m // OUT_W) % OUT_H, m % OUT_W
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        taken = _gathered(
            x, n, a, b, m < rows, k0, sn, sc, sh, sw, C, KH, KW, IN_H, IN_W, UP_H, UP_W, OFF_H, OFF_W,
            STEP_H, STEP_W, DOWN_H, DOWN_W, INSIDE, BLOCK_K,
        )  # fmt: skip
        k = k0 + tl.arange(0, BLOCK_K)
        factors = tl.load(weight + o[None, :] * K + k[:, None], mask=(o < OUTS)[None, :] & (k < K)[:, None], other=0.0)
        total = _add_dot(taken, factors, total, DOT)
    if HAS_BIAS:
        total += tl.load(bias + at * OUTS + o, mask=o < OUTS, other=0.0)[None, :]
    if RELU:
        total = tl.where(total < 0, 0.0, total)  # NaN stays NaN
    where = (at.to(tl.int64) * rows + m)[:, None] * OUTS + o[None, :]
    ok = (m < rows)[:, None] & (o < OUTS)[None, :]
    if MASK:
        total = tl.where(tl.load(relu_of + where, mask=ok, other=0.0) <= 0, 0.0, total)
    tl.store(y + where, total, mask=ok)


@triton.jit
def weigh(
    x, gradient, parts, bias_parts, rows, rows_each, models, ss, sm, sn, sc, sh, sw,
    OUTS: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, IN_H: tl.constexpr, IN_W: tl.constexpr,
    UP_H: tl.constexpr, UP_W: tl.constexpr, OFF_H: tl.constexpr, OFF_W: tl.constexpr,
    STEP_H: tl.constexpr, STEP_W: tl.constexpr, DOWN_H: tl.constexpr, DOWN_W: tl.constexpr,
    INSIDE: tl.constexpr, HAS_BIAS: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """parts [share of the rows, slots * models, outputs, (i, j, channel)]: gradient^T times gathered x."""
    share, at = tl.program_id(1), tl.program_id(2)
    K: tl.constexpr = KH * KW * C
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    x += (at // models).to(tl.int64) * ss + (at % models).to(tl.int64) * sm
    gradient += at.to(tl.int64) * rows * OUTS
    o = (tl.program_id(0) // TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(0) % TILES
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    sums = tl.zeros((BLOCK_N,), tl.float32)
    for m0 in range(share * rows_each, share * rows_each + rows_each, BLOCK_M):
        m = m0 + tl.arange(0, BLOCK_M)
        n, a, b = m // (OUT_H * OUT_W), (m // OUT_W) % OUT_H, m % OUT_W
        slopes = tl.load(
            gradient + m[None, :] * OUTS + o[:, None], mask=(m < rows)[None, :] & (o < OUTS)[:, None], other=0.0
        )
        taken = _gathered(
            x, n, a, b, m < rows, tile * BLOCK_K, sn, sc, sh, sw, C, KH, KW, IN_H, IN_W, UP_H, UP_W, OFF_H, OFF_W,
            STEP_H, STEP_W, DOWN_H, DOWN_W, INSIDE, BLOCK_K,
        )  # fmt: skip
        total = _add_dot(slopes, taken, total, DOT)
        if HAS_BIAS:
            sums += tl.sum(slopes, 1)
    at += share * tl.num_programs(2)
    k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    where = at.to(tl.int64) * (OUTS * K) + o[:, None] * K + k[None, :]
    tl.store(parts + where, total, mask=(o < OUTS)[:, None] & (k < K)[None, :])
    if HAS_BIAS and tile == 0:
        tl.store(bias_parts + at * OUTS + o, sums, mask=o < OUTS)


@triton.jit
def add_parts(
    parts, bias_parts, weight_total, bias_total, shares,
    OUTS: tl.constexpr, C: tl.constexpr, PLACES: tl.constexpr, HAS_BIAS: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the parts of `weigh`, in order, to totals [slots * models, outputs, channel, (i, j)] and [.., outputs]."""
    at, count = tl.program_id(0), tl.num_programs(0)
    size: tl.constexpr = OUTS * C * PLACES
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros((AT_ONCE, BLOCK), tl.float32)
    for first in range(0, shares, AT_ONCE):
        share = first + tl.arange(0, AT_ONCE)[:, None]
        pointers = parts + (share * count + at).to(tl.int64) * size + e[None, :]
        found += tl.load(pointers, mask=(share < shares) & (e < size)[None, :], other=0.0)
    o, place, c = e // (PLACES * C), (e // C) % PLACES, e % C
    into = weight_total + at.to(tl.int64) * size + (o * C + c) * PLACES + place
    tl.store(into, tl.load(into, mask=e < size) + tl.sum(found, 0), mask=e < size)
    if HAS_BIAS and tl.program_id(1) * BLOCK < OUTS:
        found = tl.zeros((AT_ONCE, BLOCK), tl.float32)
        for first in range(0, shares, AT_ONCE):
            share = first + tl.arange(0, AT_ONCE)[:, None]
            pointers = bias_parts + (share * count + at) * OUTS + e[None, :]
            found += tl.load(pointers, mask=(share < shares) & (e < OUTS)[None, :], other=0.0)
        into = bias_total + at * OUTS + e
        tl.store(into, tl.load(into, mask=e < OUTS) + tl.sum(found, 0), mask=e < OUTS)


@triton.jit
def copy_patches(
    x, y, rows, sn, sc, sh, sw,
    OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, IN_H: tl.constexpr, IN_W: tl.constexpr,
    UP_H: tl.constexpr, UP_W: tl.constexpr, OFF_H: tl.constexpr, OFF_W: tl.constexpr,
    STEP_H: tl.constexpr, STEP_W: tl.constexpr, DOWN_H: tl.constexpr, DOWN_W: tl.constexpr,
    INSIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y [rows, (i, j, channel)]: what each output of a convolution looks at."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k0 = tl.program_id(1) * BLOCK_K
    n, a, b = m // (OUT_H * OUT_W), (m // OUT_W) % OUT_H, m % OUT_W
    taken = _gathered(
        x, n, a, b, m < rows, k0, sn, sc, sh, sw, C, KH, KW, IN_H, IN_W, UP_H, UP_W, OFF_H, OFF_W,
        STEP_H, STEP_W, DOWN_H, DOWN_W, INSIDE, BLOCK_K,
    )  # fmt: skip
    K: tl.constexpr = KH * KW * C
    k = k0 + tl.arange(0, BLOCK_K)
    tl.store(y + m.to(tl.int64)[:, None] * K + k[None, :], taken, mask=(m < rows)[:, None] & (k < K)[None, :])


@triton.jit
def sum_patches(
    columns, y, rows,
    OUT_H: tl.constexpr, OUT_W: tl.constexpr, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    IN_H: tl.constexpr, IN_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The transpose of `copy_patches`, y [rows = (image, row, column), channel]: every place gathers its copies."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    n, h, w = m // (IN_H * IN_W), (m // IN_W) % IN_H, m % IN_W
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for offset in tl.static_range(KH * KW):
        a = h + PAD_H - (offset // KW) * DILATION_H
        b = w + PAD_W - (offset % KW) * DILATION_W
        ok = (m < rows) & (a >= 0) & (b >= 0) & (a < OUT_H * STRIDE_H) & (b < OUT_W * STRIDE_W)
        ok = ok & (a % STRIDE_H == 0) & (b % STRIDE_W == 0)
        row = (n.to(tl.int64) * OUT_H + a // STRIDE_H) * OUT_W + b // STRIDE_W
        pointers = columns + row[:, None] * (KH * KW * C) + (offset * C + c)[None, :]
        total += tl.load(pointers, mask=ok[:, None] & (c < C)[None, :], other=0.0)
    tl.store(y + m.to(tl.int64)[:, None] * C + c[None, :], total, mask=(m < rows)[:, None] & (c < C)[None, :])


@triton.jit
def multiply(
    a, b, c, M, N, K, k_each, sab, sam, sak, sbb, sbk, sbn, scb, scm, scn,
    ADD: tl.constexpr, DOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """c [batch] = a [batch] b [batch], or added to it; where K is shared among programs, c [share * batch]."""
    share, at = tl.program_id(1), tl.program_id(2)
    tiles = tl.cdiv(N, BLOCK_N)
    m = (tl.program_id(0) // tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    a += at.to(tl.int64) * sab
    b += at.to(tl.int64) * sbb
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(share * k_each, min(share * k_each + k_each, K), BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        left = tl.load(a + m[:, None] * sam + k[None, :] * sak, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(b + k[:, None] * sbk + n[None, :] * sbn, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        total = _add_dot(left, right, total, DOT)
    into = c + (share * tl.num_programs(2) + at).to(tl.int64) * scb + m[:, None] * scm + n[None, :] * scn
    ok = (m < M)[:, None] & (n < N)[None, :]
    if ADD:
        total += tl.load(into, mask=ok, other=0.0)
    tl.store(into, total, mask=ok)


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
