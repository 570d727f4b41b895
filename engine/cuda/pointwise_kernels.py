"""Has the kernels of a decoder's layer that look at one token at a time, in Triton: rotary embedding with the
write to the cache, RMSNorm, and the MLP's gate. Importing this module imports triton."""

import torch
import triton
import triton.language as tl

from truedraft.engine.cuda.multiprocessors import NORMED_BY_A_WARP

# One warp turns this many numbers of a head.
TURNED_BY_A_WARP = 256
# One program gates this many numbers of the MLP.
GATE_TILE = 1024


@triton.jit(do_not_specialize=("slots",))
def rotate_and_store_head(
    query_key,  # [tokens, heads + kv heads, size], QUERY_STRIDE numbers from one token to the next
    value,  # [tokens, kv heads, size], VALUE_STRIDE from one to the next, if there are programs for it
    cos,  # [tokens, ROTATED]: the first ROTATED numbers of a head are turned
    sin,  # likewise, negative in the first half
    slots,  # int64 [tokens]
    keys,  # [slots, kv heads, size]
    values,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
):
    # Tokens times their numbers may not fit into 32 bits.
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tl.arange(0, PADDED_SIZE)
    is_number = number < SIZE
    if head < HEADS + KV_HEADS:
        start = query_key + token * QUERY_STRIDE + head * SIZE
        x = tl.load(start + number, mask=is_number, other=0.0).to(tl.float32)
        is_turned = number < ROTATED
        half: tl.constexpr = ROTATED // 2
        other_half = tl.where(number < half, number + half, number - half)
        swapped = tl.load(start + other_half, mask=is_turned, other=0.0).to(tl.float32)
        c = tl.load(cos + token * ROTATED + number, mask=is_turned, other=1.0).to(tl.float32)
        s = tl.load(sin + token * ROTATED + number, mask=is_turned, other=0.0).to(tl.float32)
        rotated = (x * c + swapped * s).to(query_key.dtype.element_ty)
        if head < HEADS:
            # Other threads of the program may still have to read what is overwritten.
            tl.debug_barrier()
            tl.store(start + number, rotated, mask=is_number)
        else:
            slot = tl.load(slots + token)
            place = keys + (slot * KV_HEADS + head - HEADS) * SIZE
            tl.store(place + number, rotated, mask=is_number)
    else:
        kv_head = head - HEADS - KV_HEADS
        slot = tl.load(slots + token)
        v = tl.load(value + token * VALUE_STRIDE + kv_head * SIZE + number, mask=is_number)
        tl.store(values + (slot * KV_HEADS + kv_head) * SIZE + number, v, mask=is_number)


def rotate_and_store(
    query_key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Rotates the queries of ``query_key`` [tokens, heads + kv heads, size] in place, and writes its rotated
    keys and ``value`` [tokens, kv heads, size] to ``slots`` int64 [tokens] of ``keys`` and ``values`` [slots,
    kv heads, size]; without heads of values only keys are written. ``cos`` and ``sin`` [tokens, n] are as in
    ``Rotary``, and the first n numbers of each head are rotated. Sums are in float32; heads and numbers of
    the first two tensors are contiguous, the other tensors wholly."""
    tokens, heads, size = query_key.shape
    kv_heads = keys.shape[1]
    padded_size = triton.next_power_of_2(size)
    with torch.cuda.device_of(query_key):  # type: ignore[no-untyped-call]
        rotate_and_store_head[tokens, heads + value.shape[1]](
            query_key,
            value,
            cos,
            sin,
            slots,
            keys,
            values,
            HEADS=heads - kv_heads,
            KV_HEADS=kv_heads,
            SIZE=size,
            PADDED_SIZE=padded_size,
            ROTATED=cos.shape[1],
            QUERY_STRIDE=query_key.stride(0),
            VALUE_STRIDE=value.stride(0),
            num_warps=max(1, padded_size // TURNED_BY_A_WARP),
        )


@triton.jit
def gated_silu_part(output, gate_up, SIZE: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0)
    number = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_number = number < SIZE
    start = gate_up + token.to(tl.int64) * 2 * SIZE
    gate = tl.load(start + number, mask=is_number, other=0.0).to(tl.float32)
    up = tl.load(start + SIZE + number, mask=is_number, other=0.0).to(tl.float32)
    gated = gate / (1 + tl.exp(-gate)) * up
    place = output + token.to(tl.int64) * SIZE + number
    tl.store(place, gated.to(output.dtype.element_ty), mask=is_number)


def gated_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up, [tokens, size], of ``gate_up`` [tokens, 2 * size]; computes in float32."""
    gate_up = gate_up.contiguous()
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    grid = tokens, triton.cdiv(size, GATE_TILE)
    with torch.cuda.device_of(gate_up):  # type: ignore[no-untyped-call]
        gated_silu_part[grid](output, gate_up, SIZE=size, TILE=GATE_TILE, num_warps=4)
    return output


@triton.jit
def rms_norm_row(
    output,  # [tokens, heads, size]
    x,  # [tokens, heads, size], X_STRIDE numbers from one token to the next
    weight,  # [heads, size]
    residual,  # like output, if HAS_RESIDUAL
    eps,
    X_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tl.arange(0, PADDED_SIZE)
    is_number = number < SIZE
    row = tl.load(x + token * X_STRIDE + head * SIZE + number, mask=is_number, other=0.0).to(tl.float32)
    scale = tl.load(weight + head * SIZE + number, mask=is_number, other=0.0).to(tl.float32)
    normed = row * tl.rsqrt(tl.sum(row * row, 0) / SIZE + eps) * scale
    place = (token * HEADS + head) * SIZE + number
    if HAS_RESIDUAL:
        normed += tl.load(residual + place, mask=is_number, other=0.0).to(tl.float32)
    tl.store(output + place, normed.to(output.dtype.element_ty), mask=is_number)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the RMSNorm of ``x`` [tokens, size], contiguous, by ``weight`` [size], or of [tokens, heads,
    size], heads and numbers contiguous, by [heads, size]; plus ``residual``, if there is one, contiguous and
    of the same shape. Sums are in float32."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, size = len(x), x.shape[-1]
    heads = weight.numel() // size
    padded_size = triton.next_power_of_2(size)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        rms_norm_row[tokens, heads](
            output,
            x,
            weight,
            x if residual is None else residual,
            eps,
            X_STRIDE=heads * size if x.dim() == 2 else x.stride(0),
            HEADS=heads,
            SIZE=size,
            PADDED_SIZE=padded_size,
            HAS_RESIDUAL=residual is not None,
            num_warps=min(8, max(1, padded_size // NORMED_BY_A_WARP)),
        )
    return output
