"""Triton kernels for a convolution with the 2 x 2 max pooling after it as one, and for the gradient of its images.

A program's rows are windows, and it computes the four outputs of each side by side: the largest of them is found in
registers, and what the convolution alone would write, four times as much, is never in memory. Which of the four it was
is kept in a byte, 4 where a ReLU stopped it; gradients need no more on their way back. Models of a slot that look at
the same images, TOGETHER of them, are one matmul with more outputs. Strides and dilations are 1.
Sums run in a fixed order: no atomics, so the same inputs give the same bits.
"""

import triton
import triton.language as tl

from fedcpsl.engine.kernels import _add_dot


@triton.jit
def _taken(
    x, row_ok, k_ok, top, left, i, j, IN_H: tl.constexpr, IN_W: tl.constexpr,
    INSIDE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """x [windows, columns], pointers; 0 for what lies outside the images that begin at `top` and `left`."""
    ok = row_ok[:, None]
    if not WHOLE:
        ok = ok & k_ok[None, :]
    if not INSIDE:
        h, w = top[:, None] + i[None, :], left[:, None] + j[None, :]
        ok = ok & (h >= 0) & (w >= 0) & (h < IN_H) & (w < IN_W)
    return tl.load(x, mask=ok, other=0.0)


@triton.jit
def _larger(best, which, value, D: tl.constexpr):
    better = (value > best) | (value != value)  # NaN wins, as in PyTorch
    return tl.where(better, value, best), tl.where(better, D, which)


@triton.jit
def _store_largest(
    t0, t1, t2, t3, bias, y, chosen, at, m, o, model, rows, y_place, y_out,
    OUTS: tl.constexpr, TOGETHER: tl.constexpr, PLACES: tl.constexpr,
    HAS_BIAS: tl.constexpr, RELU: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    best, which = _larger(t0, tl.zeros_like(t0).to(tl.int32), t1, 1)
    best, which = _larger(best, which, t2, 2)
    best, which = _larger(best, which, t3, 3)
    o_ok = o < TOGETHER * OUTS
    if HAS_BIAS:  # of two that round to the same number with it, the larger
        best += tl.load(bias + at * (TOGETHER * OUTS) + o, mask=o_ok, other=0.0)[None, :]
    if RELU:
        which = tl.where(best <= 0, 4, which)
        best = tl.where(best < 0, 0.0, best)
    first = (model * rows * OUTS)[None, :]
    ok = (m < rows)[:, None] & o_ok[None, :]
    image = (m // PLACES).to(tl.int64) * (PLACES * OUTS)
    where = (image + (m % PLACES) * y_place)[:, None] + ((o % OUTS) * y_out)[None, :]
    tl.store(y + first + where, best, mask=ok)
    if LEARNS:
        tl.store(chosen + first + (m.to(tl.int64) * OUTS)[:, None] + (o % OUTS)[None, :], which.to(tl.int8), mask=ok)


@triton.jit
def convolve_and_pool(
    x, weight, bias, y, chosen, rows, rows_each, models, ss, sm, sn, sc, sh, sw, y_place, y_out,
    OUTS: tl.constexpr, TOGETHER: tl.constexpr, POOLED_H: tl.constexpr, POOLED_W: tl.constexpr,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, IN_H: tl.constexpr, IN_W: tl.constexpr,
    OFF_H: tl.constexpr, OFF_W: tl.constexpr, INSIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr, RELU: tl.constexpr, LEARNS: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y [slots * models, rows = (n, window), outputs], strides of window and output given; weight as in `convolve`."""
    at = tl.program_id(2)  # of slots * models / TOGETHER
    x += (at * TOGETHER // models).to(tl.int64) * ss + (at * TOGETHER % models).to(tl.int64) * sm
    K: tl.constexpr = KH * KW * C
    WHOLE: tl.constexpr = K % BLOCK_K == 0
    PLACES: tl.constexpr = POOLED_H * POOLED_W
    weight += at.to(tl.int64) * (TOGETHER * OUTS * K)
    m = tl.program_id(0) * rows_each + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok, o_ok = m < rows, o < TOGETHER * OUTS
    n, p = m // PLACES, m % PLACES
    top, left = (p // POOLED_W) * 2 + OFF_H, (p % POOLED_W) * 2 + OFF_W
    corner = x + (n.to(tl.int64) * sn + top * sh + left * sw)[:, None]
    t0 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    t1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    t2 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    t3 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        k_ok = k < K
        i, j = k // (KW * C), (k // C) % KW
        if C % BLOCK_K == 0:  # the whole block is at one offset: said, so that loads are wide
            place = k0 // C
            along = (place // KW) * sh + (place % KW) * sw
            along += (tl.multiple_of(k0 % C, BLOCK_K) + tl.arange(0, BLOCK_K)) * sc
        else:
            along = i * sh + j * sw + (k % C) * sc
        at_0 = corner + along[None, :]
        a0 = _taken(at_0, row_ok, k_ok, top, left, i, j, IN_H, IN_W, INSIDE, WHOLE)
        a1 = _taken(at_0 + sw, row_ok, k_ok, top, left + 1, i, j, IN_H, IN_W, INSIDE, WHOLE)
        a2 = _taken(at_0 + sh, row_ok, k_ok, top + 1, left, i, j, IN_H, IN_W, INSIDE, WHOLE)
        a3 = _taken(at_0 + (sh + sw), row_ok, k_ok, top + 1, left + 1, i, j, IN_H, IN_W, INSIDE, WHOLE)
        ok = o_ok[None, :]
        if not WHOLE:
            ok = ok & k_ok[:, None]
        factors = tl.load(weight + o[None, :] * K + k[:, None], mask=ok, other=0.0)
        t0 = _add_dot(a0, factors, t0, DOT)
        t1 = _add_dot(a1, factors, t1, DOT)
        t2 = _add_dot(a2, factors, t2, DOT)
        t3 = _add_dot(a3, factors, t3, DOT)
    model = (at * TOGETHER + o // OUTS).to(tl.int64)
    _store_largest(
        t0, t1, t2, t3, bias, y, chosen, at, m, o, model, rows, y_place, y_out,
        OUTS, TOGETHER, PLACES, HAS_BIAS, RELU, LEARNS,
    )  # fmt: skip


@triton.jit
def _shifted(
    weight, k, o, o_ok, D: tl.constexpr, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """[k, o]: the weights with which output D of a window takes what the whole window looks at."""
    i, j = k // ((KW + 1) * C) - D // 2, (k // C) % (KW + 1) - D % 2
    ok = (i >= 0) & (i < KH) & (j >= 0) & (j < KW)
    return tl.load(
        weight + o[None, :] * K + ((i * KW + j) * C + k % C)[:, None], mask=ok[:, None] & o_ok[None, :], other=0.0
    )


@triton.jit
def _windows(
    x, m, rows, k, sn, sc, sh, sw, POOLED_H: tl.constexpr, POOLED_W: tl.constexpr,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, IN_H: tl.constexpr, IN_W: tl.constexpr,
    OFF_H: tl.constexpr, OFF_W: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """[m, k]: all that the four outputs of windows m look at, k = (row, column, channel)."""
    p = m % (POOLED_H * POOLED_W)
    top, left = (p // POOLED_W) * 2 + OFF_H, (p % POOLED_W) * 2 + OFF_W
    i, j = k // ((KW + 1) * C), (k // C) % (KW + 1)
    corner = x + ((m // (POOLED_H * POOLED_W)).to(tl.int64) * sn + top * sh + left * sw)[:, None]
    pointers = corner + (i * sh + j * sw + (k % C) * sc)[None, :]
    k_ok = k < (KH + 1) * (KW + 1) * C
    return _taken(pointers, m < rows, k_ok, top, left, i, j, IN_H, IN_W, INSIDE, False)


@triton.jit
def convolve_and_pool_few(
    x, weight, bias, y, chosen, rows, rows_each, models, ss, sm, sn, sc, sh, sw, y_place, y_out,
    OUTS: tl.constexpr, TOGETHER: tl.constexpr, POOLED_H: tl.constexpr, POOLED_W: tl.constexpr,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, IN_H: tl.constexpr, IN_W: tl.constexpr,
    OFF_H: tl.constexpr, OFF_W: tl.constexpr, INSIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr, RELU: tl.constexpr, LEARNS: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `convolve_and_pool` where few channels come in: a window is read once, and the weights stay where they are."""
    at = tl.program_id(2)
    x += (at * TOGETHER // models).to(tl.int64) * ss + (at * TOGETHER % models).to(tl.int64) * sm
    K: tl.constexpr = KH * KW * C
    weight += at.to(tl.int64) * (TOGETHER * OUTS * K)
    o = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_ok = o < TOGETHER * OUTS
    k = tl.arange(0, BLOCK_K)
    w0 = _shifted(weight, k, o, o_ok, 0, C, KH, KW, K)
    w1 = _shifted(weight, k, o, o_ok, 1, C, KH, KW, K)
    w2 = _shifted(weight, k, o, o_ok, 2, C, KH, KW, K)
    w3 = _shifted(weight, k, o, o_ok, 3, C, KH, KW, K)
    model = (at * TOGETHER + o // OUTS).to(tl.int64)
    zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for m0 in range(tl.program_id(0) * rows_each, tl.program_id(0) * rows_each + rows_each, BLOCK_M):
        m = m0 + tl.arange(0, BLOCK_M)
        a = _windows(
            x, m, rows, k, sn, sc, sh, sw, POOLED_H, POOLED_W, C, KH, KW, IN_H, IN_W, OFF_H, OFF_W, INSIDE
        )  # fmt: skip
        t0 = _add_dot(a, w0, zeros, DOT)
        t1 = _add_dot(a, w1, zeros, DOT)
        t2 = _add_dot(a, w2, zeros, DOT)
        t3 = _add_dot(a, w3, zeros, DOT)
        _store_largest(
            t0, t1, t2, t3, bias, y, chosen, at, m, o, model, rows, y_place, y_out,
            OUTS, TOGETHER, POOLED_H * POOLED_W, HAS_BIAS, RELU, LEARNS,
        )  # fmt: skip


@triton.jit
def weigh_pooled(
    x, gradient, chosen, parts, bias_parts, rows, rows_each, models, ss, sm, sn, sc, sh, sw, g_place, g_out,
    OUTS: tl.constexpr, TOGETHER: tl.constexpr, POOLED_H: tl.constexpr, POOLED_W: tl.constexpr,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, IN_H: tl.constexpr, IN_W: tl.constexpr,
    OFF_H: tl.constexpr, OFF_W: tl.constexpr, INSIDE: tl.constexpr, HAS_BIAS: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `weigh`, from the gradient of the windows and which output of each was chosen."""
    share, at = tl.program_id(1), tl.program_id(2)
    K: tl.constexpr = KH * KW * C
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PLACES: tl.constexpr = POOLED_H * POOLED_W
    x += (at * TOGETHER // models).to(tl.int64) * ss + (at * TOGETHER % models).to(tl.int64) * sm
    tile = tl.program_id(0) % TILES
    o = (tl.program_id(0) // TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    k_ok, o_ok = k < K, o < TOGETHER * OUTS
    i, j = k // (KW * C), (k // C) % KW
    along = (i * sh + j * sw + (k % C) * sc)[None, :]
    model = (at * TOGETHER + o // OUTS).to(tl.int64)
    first = (model * rows * OUTS)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, 4 * (rows_each // BLOCK_M)):  # every output of the windows in turn
        d = step % 4
        m = share * rows_each + (step // 4) * BLOCK_M + tl.arange(0, BLOCK_M)
        row_ok = m < rows
        n, p = m // PLACES, m % PLACES
        top, left = (p // POOLED_W) * 2 + OFF_H + d // 2, (p % POOLED_W) * 2 + OFF_W + d % 2
        ok = row_ok[:, None] & o_ok[None, :]
        where = (n.to(tl.int64) * (PLACES * OUTS) + p * g_place)[:, None] + ((o % OUTS) * g_out)[None, :]
        slopes = tl.load(gradient + first + where, mask=ok, other=0.0)
        which = tl.load(chosen + first + (m.to(tl.int64) * OUTS)[:, None] + (o % OUTS)[None, :], mask=ok, other=4)
        slopes = tl.where(which == d, slopes, 0.0)
        corner = x + (n.to(tl.int64) * sn + top * sh + left * sw)[:, None]
        taken = _taken(corner + along, row_ok, k_ok, top, left, i, j, IN_H, IN_W, INSIDE, False)
        total = _add_dot(tl.trans(slopes), taken, total, DOT)
        if HAS_BIAS:
            sums += slopes
    model += share * tl.num_programs(2) * TOGETHER
    where = (model * (OUTS * K) + (o % OUTS) * K)[:, None] + k[None, :]
    tl.store(parts + where, total, mask=o_ok[:, None] & k_ok[None, :])
    if HAS_BIAS and tile == 0:
        tl.store(bias_parts + model * OUTS + o % OUTS, tl.sum(sums, 0), mask=o_ok)


@triton.jit
def spread_back(
    gradient, weight, y, samples,
    OUTS: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, IN_H: tl.constexpr, IN_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y [.., samples, IN_H, IN_W, C] from gradient [.., samples, OUT_H, OUT_W, OUTS] and weight [.., C, (i, j), OUTS].

    A program's rows are samples, and it computes the four places of a 2 x 2 block of theirs: offsets that reach no
    output from there are left out, which near the border are most.
    """
    at = tl.program_id(2).to(tl.int64)
    gradient += at * samples * (OUT_H * OUT_W * OUTS)
    weight += at * (C * KH * KW * OUTS)
    y += at * samples * (IN_H * IN_W * C)
    ACROSS: tl.constexpr = (IN_W + 1) // 2
    BLOCKS: tl.constexpr = ((IN_H + 1) // 2) * ACROSS
    PIECES: tl.constexpr = OUTS // BLOCK_K
    block = tl.program_id(0) % BLOCKS
    n = (tl.program_id(0) // BLOCKS) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_ok, c_ok = n < samples, c < C
    h, w = (block // ACROSS) * 2, (block % ACROSS) * 2
    i_from, i_to = tl.maximum(0, h + PAD_H - OUT_H + 1), tl.minimum(KH, h + PAD_H + 2)
    j_from, j_to = tl.maximum(0, w + PAD_W - OUT_W + 1), tl.minimum(KW, w + PAD_W + 2)
    wide = tl.maximum(j_to - j_from, 0)
    row = gradient + n.to(tl.int64)[:, None] * (OUT_H * OUT_W * OUTS)
    t0 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    t1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    t2 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    t3 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, tl.maximum(i_to - i_from, 0) * wide * PIECES):
        offset = step // PIECES
        k = (step % PIECES) * BLOCK_K + tl.arange(0, BLOCK_K)
        i, j = i_from + offset // wide, j_from + offset % wide
        a, b = h + PAD_H - i, w + PAD_W - j
        up, down = (a >= 0) & (a < OUT_H), (a >= -1) & (a < OUT_H - 1)
        near, far = (b >= 0) & (b < OUT_W), (b >= -1) & (b < OUT_W - 1)
        at_0 = row + (a * OUT_W + b) * OUTS + k[None, :]
        g0 = tl.load(at_0, mask=(n_ok & up & near)[:, None], other=0.0)
        g1 = tl.load(at_0 + OUTS, mask=(n_ok & up & far)[:, None], other=0.0)
        g2 = tl.load(at_0 + OUT_W * OUTS, mask=(n_ok & down & near)[:, None], other=0.0)
        g3 = tl.load(at_0 + (OUT_W + 1) * OUTS, mask=(n_ok & down & far)[:, None], other=0.0)
        factors = tl.load(
            weight + c[None, :] * (KH * KW * OUTS) + (i * KW + j) * OUTS + k[:, None], mask=c_ok[None, :], other=0.0
        )
        t0 = _add_dot(g0, factors, t0, DOT)
        t1 = _add_dot(g1, factors, t1, DOT)
        t2 = _add_dot(g2, factors, t2, DOT)
        t3 = _add_dot(g3, factors, t3, DOT)
    into = y + n.to(tl.int64)[:, None] * (IN_H * IN_W * C) + (h * IN_W + w) * C + c[None, :]
    ok = n_ok[:, None] & c_ok[None, :]
    tl.store(into, t0, mask=ok)
    tl.store(into + C, t1, mask=ok & (w + 1 < IN_W))
    tl.store(into + IN_W * C, t2, mask=ok & (h + 1 < IN_H))
    tl.store(into + (IN_W + 1) * C, t3, mask=ok & (h + 1 < IN_H) & (w + 1 < IN_W))
