"""Launches the kernels of ``recurrent_kernels`` for each recurrence. Importing it imports triton."""

import torch
import triton

from truedraft.engine.cuda import recurrent_kernels
from truedraft.engine.layers.recurrent import Convolution, DeltaRule, Mamba2, Recurrence, ShortConv
from truedraft.engine.memory.batch import StateRows
from truedraft.engine.memory.recurrent_state import CHUNK, NUM_RECORDS, LayerState

# A program convolves this many tokens and channels at a time, and copies this many numbers.
TOKENS, CHANNELS, COPIED = 16, 128, 1024
# A program keeps this many columns of a state in registers.
MIN_COLUMNS, MAX_COLUMNS = 16, 32


def recur(rule: Recurrence, x: torch.Tensor, rows: StateRows, state: LayerState) -> torch.Tensor:
    """Computes as ``LayerRun.recur`` does for the tokens of ``rows``; padding gets finite outputs that nobody
    uses."""
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        match rule:
            case ShortConv():
                return _convolve(rule.convolution, x, 0, x.dtype, rows, state, gated=True)
            case DeltaRule():
                return _delta_rule(rule, x, rows, state)
            case Mamba2():
                return _mamba2(rule, x, rows, state)


def _delta_rule(rule: DeltaRule, x: torch.Tensor, rows: StateRows, state: LayerState) -> torch.Tensor:
    tokens, heads, size = len(x), rule.heads, rule.value_size
    num_keys = rule.key_heads * rule.key_size
    mixed = _convolve(rule.convolution, x, 0, torch.float32, rows, state)
    channels = mixed.shape[1]
    decays = torch.empty(tokens, heads, dtype=torch.float64, device=x.device)
    betas = torch.empty(tokens, heads, dtype=torch.float32, device=x.device)
    recurrent_kernels.prepare_delta[tokens, 2 * rule.key_heads + 1](
        mixed,
        decays,
        betas,
        x,
        rule.decay_rate,
        rule.dt_bias,
        rule.key_size**-0.5,
        X_SIZE=x.shape[1],
        MIXED_SIZE=channels,
        HEADS=heads,
        PADDED_HEADS=triton.next_power_of_2(heads),
        KEY_HEADS=rule.key_heads,
        SIZE=rule.key_size,
        PADDED_SIZE=triton.next_power_of_2(rule.key_size),
        num_warps=1,
    )
    query, key, value = mixed[:, :num_keys], mixed[:, num_keys : 2 * num_keys], mixed[:, 2 * num_keys :]
    added = torch.zeros(tokens, heads, size, dtype=torch.float32, device=x.device)
    answers = _recur(rule, query, key, value, added, decays, betas, rows, state, rule.tiled)
    return _finish(answers, x, channels, mixed, None, rule.norm.weight, rule.norm.eps, size)


def _mamba2(rule: Mamba2, x: torch.Tensor, rows: StateRows, state: LayerState) -> torch.Tensor:
    tokens, heads, inner = len(x), rule.heads, rule.heads * rule.head_size
    of_groups = rule.groups * rule.state_size
    mixed = _convolve(rule.convolution, x, inner, torch.float32, rows, state)
    decays = torch.empty(tokens, heads, dtype=torch.float64, device=x.device)
    added = torch.empty(tokens, heads, rule.head_size, dtype=torch.float32, device=x.device)
    smallest, largest = rule.dt_limits
    recurrent_kernels.prepare_mamba[tokens, heads](
        added,
        decays,
        mixed,
        x,
        rule.decay_rate,
        rule.dt_bias,
        smallest,
        largest,
        X_SIZE=x.shape[1],
        MIXED_SIZE=mixed.shape[1],
        HEADS=heads,
        SIZE=rule.head_size,
        PADDED_SIZE=triton.next_power_of_2(rule.head_size),
        num_warps=1,
    )
    key, query = mixed[:, inner : inner + of_groups], mixed[:, inner + of_groups :]
    answers = _recur(rule, query, key, added.flatten(1), added, decays, None, rows, state, tiled=False)
    if rule.norm is None:
        return _finish(answers, x, 0, mixed, rule, None, 0.0, rule.head_size)
    return _finish(answers, x, 0, mixed, rule, rule.norm.weight, rule.norm.eps, inner // rule.norm_groups)


def _convolve(
    convolution: Convolution,
    x: torch.Tensor,
    first: int,
    dtype: torch.dtype,
    rows: StateRows,
    state: LayerState,
    gated: bool = False,
) -> torch.Tensor:
    """Convolves channels of ``x`` from ``first`` on, and keeps the newest inputs."""
    channels, width = convolution.weight.shape
    num_rows, num_inputs = len(rows.counts), state.inputs.shape[1]
    output = torch.zeros(len(x), channels, dtype=dtype, device=x.device)
    sizes = {"X_SIZE": x.shape[1], "NUM_CHANNELS": channels, "NUM_INPUTS": num_inputs, "GATED": gated}
    sizes |= {"FIRST": first, "TOKENS": TOKENS, "TILE": CHANNELS, "num_warps": 4}
    told = rows.first_tokens, rows.counts, rows.num_stored, rows.slots
    tiles = triton.cdiv(channels, CHANNELS)
    recurrent_kernels.convolve_tokens[num_rows, triton.cdiv(rows.most, TOKENS), tiles](
        output,
        x,
        convolution.weight,
        convolution.weight if convolution.bias is None else convolution.bias,
        state.inputs,
        *told,
        WIDTH=width,
        HAS_BIAS=convolution.bias is not None,
        SILU=convolution.silu,
        **sizes,
    )
    kept = triton.cdiv(min(rows.most, num_inputs), TOKENS)
    recurrent_kernels.keep_inputs[num_rows, kept, tiles](x, state.inputs, *told, **sizes)
    return output


def _recur(
    rule: DeltaRule | Mamba2,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    added: torch.Tensor,
    decays: torch.Tensor,
    betas: torch.Tensor | None,
    rows: StateRows,
    state: LayerState,
    tiled: bool,
) -> torch.Tensor:
    """Returns the states' outputs [tokens, heads, columns] for ``query`` [tokens, key heads * size]. ``key``
    has the same shape, ``value`` is [tokens, heads * columns]; ``added`` receives the values of records."""
    shape, num_rows = rule.state, len(rows.counts)
    answers = torch.zeros_like(added)
    columns = min(MAX_COLUMNS, max(MIN_COLUMNS, int(triton.next_power_of_2(shape.columns))))
    told = rows.first_tokens, rows.counts, rows.num_stored, rows.slots
    log = state.keys, state.values, state.decays
    recurrent_kernels.recur_head[num_rows, shape.heads, triton.cdiv(shape.columns, columns)](
        answers,
        added,
        query,
        key,
        value,
        decays,
        decays if betas is None else betas,
        state.state,
        *log,
        *told,
        rows.num_folded,
        rows.num_folded_after,
        KEY_STRIDE=key.stride(0),
        VALUE_STRIDE=value.stride(0),
        HEADS=shape.heads,
        KEY_HEADS=shape.key_heads,
        SIZE=shape.rows,
        PADDED_SIZE=max(16, triton.next_power_of_2(shape.rows)),
        COLUMNS=shape.columns,
        TILE=columns,
        NUM_RECORDS=NUM_RECORDS,
        CHUNK=CHUNK,
        TILED=tiled,
        IS_DELTA=betas is not None,
        num_warps=4,
        num_stages=1,
    )
    num_keys, num_values = shape.key_heads * shape.rows, shape.heads * shape.columns
    most = triton.cdiv(max(num_keys, num_values), COPIED)
    recurrent_kernels.keep_records[num_rows, min(rows.most, NUM_RECORDS), most](
        key,
        added,
        decays,
        *log,
        *told,
        KEY_STRIDE=key.stride(0),
        NUM_KEYS=num_keys,
        NUM_VALUES=num_values,
        HEADS=shape.heads,
        NUM_RECORDS=NUM_RECORDS,
        TILE=COPIED,
        num_warps=4,
    )
    return answers


def _finish(
    answers: torch.Tensor,
    x: torch.Tensor,
    z_first: int,
    mixed: torch.Tensor,
    skipping: Mamba2 | None,
    weight: torch.Tensor | None,
    eps: float,
    size: int,
) -> torch.Tensor:
    """Gates ``answers`` by the numbers of ``x`` from ``z_first`` on, and norms groups of ``size`` numbers."""
    tokens, _, head_size = answers.shape
    output = torch.empty(tokens, answers[0].numel(), dtype=x.dtype, device=x.device)
    padded_size = triton.next_power_of_2(size)
    recurrent_kernels.finish_heads[tokens, output.shape[1] // size](
        output,
        answers,
        x,
        mixed,
        answers if skipping is None else skipping.skip,
        answers if weight is None else weight,
        eps,
        X_SIZE=x.shape[1],
        Z_FIRST=z_first,
        VALUE_STRIDE=mixed.shape[1],
        SKIP_SIZE=head_size,
        SIZE=size,
        PADDED_SIZE=padded_size,
        HAS_SKIP=skipping is not None,
        HAS_NORM=weight is not None,
        num_warps=min(8, max(1, padded_size // 256)),
    )
    return output
