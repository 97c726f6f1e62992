"""BlockManager.step_inputs: the tensors of a step, against plain Python."""

import random

import numpy as np
import pytest
from block_manager_case import observe, three_sequences

from paged_attn import BlockManager, UnknownSequence


def plain_step_inputs(manager, seq_ids, query_lens, width, pad_to):
    """step_inputs in plain Python, from block_table and num_tokens."""
    size = manager.block_size
    uniform = isinstance(query_lens, int)
    rows, context_lens, slots, cu_seqlens_q = [], [], [], [0]
    for i, seq_id in enumerate(seq_ids):
        table = manager.block_table(seq_id).tolist()
        length = manager.num_tokens(seq_id)
        query_len = query_lens if uniform else query_lens[i]
        rows.append(table)
        context_lens.append(length)
        slots += [table[p // size] * size + p % size for p in range(length - query_len, length)]
        cu_seqlens_q.append(len(slots))
    for _ in range((pad_to or len(seq_ids)) - len(seq_ids)):
        rows.append([])
        context_lens.append(0)
        slots += [-1] * (query_lens if uniform else 0)
        cu_seqlens_q.append(len(slots))
    if width is None:
        width = max(map(len, rows), default=0)
    tables = np.array([r + [-1] * (width - len(r)) for r in rows], np.int32)
    return (
        tables.reshape(len(rows), width),
        np.array(context_lens, np.int32),
        np.array(slots, np.int64),
        np.array(cu_seqlens_q, np.int32),
    )


def assert_same_arrays(got, expected):
    assert isinstance(got, tuple)
    assert len(got) == 4
    for a, b in zip(got, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)


def random_manager(rng):
    block_size = rng.choice([1, 2, 3, 8, 16])
    manager = BlockManager(400, block_size)
    # Blocks in a scattered order.
    for seq_id in range(40):
        manager.allocate(seq_id, num_tokens=rng.randint(1, 4 * block_size))
    for seq_id in rng.sample(range(40), 25):
        manager.free(seq_id)
    for seq_id in range(100, 120):
        manager.allocate(seq_id, num_tokens=rng.randint(1, 9 * block_size))
    return manager, list(range(100, 120))


@pytest.mark.parametrize("seed", range(40))
def test_step_inputs_against_plain_python(seed):
    rng = random.Random(seed)
    manager, known = random_manager(rng)
    seq_ids = rng.choices(known, k=rng.randint(0, 24))  # with repetitions
    shortest = min((manager.num_tokens(i) for i in seq_ids), default=5)
    if rng.random() < 0.5:
        query_lens = rng.randint(0, min(shortest, 12))
    else:
        query_lens = [rng.randint(0, manager.num_tokens(i)) for i in seq_ids]
    widest = max((len(manager.block_table(i)) for i in seq_ids), default=0)
    width = rng.choice([None, widest, widest + rng.randint(1, 40)])
    pad_to = rng.choice([None, len(seq_ids), len(seq_ids) + rng.randint(1, 9)])
    before = observe(manager, known)

    expected = plain_step_inputs(manager, seq_ids, query_lens, width, pad_to)
    got = manager.step_inputs(seq_ids, query_lens=query_lens, width=width, pad_to=pad_to)
    assert_same_arrays(got, expected)
    arrays = manager.step_inputs(
        np.array(seq_ids, np.int64),
        query_lens=query_lens if isinstance(query_lens, int) else np.array(query_lens, np.int32),
        width=width,
        pad_to=pad_to,
    )
    assert_same_arrays(arrays, expected)

    # The caller's arrays, inside buffers whose margins must stay as they are.
    buffers = [np.full(a.size + 16, 77, a.dtype) for a in expected]
    out = tuple(b[8 : 8 + a.size].reshape(a.shape) for a, b in zip(expected, buffers, strict=True))
    given = manager.step_inputs(seq_ids, query_lens=query_lens, pad_to=pad_to, out=out)
    assert all(a is b for a, b in zip(given, out, strict=True))
    assert_same_arrays(given, expected)
    assert all((b[:8] == 77).all() and (b[-8:] == 77).all() for b in buffers)
    assert observe(manager, known) == before


def test_step_inputs_of_a_padded_decode_step():
    manager = three_sequences()
    tables, context_lens, slots, cu_seqlens_q = manager.step_inputs([2, 0], width=3, pad_to=4)
    assert tables.tolist() == [[3, -1, -1], [0, 1, -1], [-1] * 3, [-1] * 3]
    assert context_lens.tolist() == [1, 6, 0, 0]
    assert slots.tolist() == [12, 5, -1, -1]
    assert cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    ragged = manager.step_inputs([2, 0], query_lens=[1, 3], pad_to=4)
    assert ragged[2].tolist() == [12, 3, 4, 5]
    assert ragged[3].tolist() == [0, 1, 4, 4, 4]


def test_empty_step():
    manager = three_sequences()
    assert_same_arrays(
        manager.step_inputs([]),
        (np.empty((0, 0), np.int32), np.empty(0, np.int32), np.empty(0, np.int64), np.int32([0])),
    )
    assert [a.tolist() for a in manager.step_inputs([], width=2, pad_to=1)] == [
        [[-1, -1]],
        [0],
        [-1],
        [0, 1],
    ]


def test_slot_mapping_may_be_longer_and_is_filled():
    manager = three_sequences()
    out = [np.full(shape, 7, np.int32) for shape in ((2, 5), 2)]
    out += [np.full(9, 7, np.int64), np.full(3, 7, np.int32)]
    manager.step_inputs([0, 1], query_lens=[2, 1], out=out)
    assert out[0].tolist() == [[0, 1, -1, -1, -1], [2, -1, -1, -1, -1]]
    assert out[2].tolist() == [4, 5, 11] + [-1] * 6


def test_torch_memory_through_numpy():
    torch = pytest.importorskip("torch")
    manager = three_sequences()
    dtypes = (torch.int32, torch.int32, torch.int64, torch.int32)
    tensors = [
        torch.full(shape, 7, dtype=dtype)
        for shape, dtype in zip(((2, 3), (2,), (2,), (3,)), dtypes, strict=True)
    ]
    manager.step_inputs([0, 2], out=[t.numpy() for t in tensors])
    assert_same_arrays(tuple(t.numpy() for t in tensors), manager.step_inputs([0, 2], width=3))


def read_only(shape, dtype):
    array = np.full(shape, 7, dtype)
    array.flags.writeable = False
    return array


def unaligned(shape, dtype):
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    array = np.zeros(count + 1, np.uint8)[1:].view(dtype).reshape(shape)
    array[...] = 7
    assert not array.flags.aligned
    return array


BAD_OUT = [
    (0, np.full((2, 3), 7, np.int64), ValueError, "int32 with 2 dimensions, got dtype int64"),
    (0, np.full(6, 7, np.int32), ValueError, r"2 dimensions, got shape \(6,\)"),
    (0, np.full((3, 2), 7, np.int32).T, ValueError, "not C-contiguous"),
    (0, np.full((2, 6), 7, np.int32)[:, :3], ValueError, "not C-contiguous"),
    (0, np.full((2, 1), 7, np.int32), ValueError, r"\(2, at least 2\), got \(2, 1\)"),
    (0, np.full((1, 3), 7, np.int32), ValueError, r"\(2, at least 2\), got \(1, 3\)"),
    (0, np.full((3, 3), 7, np.int32), ValueError, r"\(2, at least 2\), got \(3, 3\)"),
    (0, read_only((2, 3), np.int32), ValueError, "a read-only array"),
    (0, unaligned((2, 3), np.int32), ValueError, "an unaligned array"),
    (0, [[7] * 3] * 2, TypeError, "must be a numpy array, got list"),
    (1, np.full(1, 7, np.int32), ValueError, r"of shape \(2,\), got \(1,\)"),
    (1, np.full(3, 7, np.int32), ValueError, r"of shape \(2,\), got \(3,\)"),
    (1, np.full(2, 7, np.uint32), ValueError, "got dtype uint32"),
    (1, np.full(2, 7, ">i4"), ValueError, "got dtype >i4"),
    (1, np.full(4, 7, np.int32)[::2], ValueError, "not C-contiguous"),
    (2, np.full(1, 7, np.int64), ValueError, r"\(at least 2,\), got \(1,\)"),
    (2, np.full(2, 7, np.int32), ValueError, "int64 with 1 dimension, got dtype int32"),
    (2, np.full((1, 2), 7, np.int64), ValueError, r"1 dimension, got shape \(1, 2\)"),
    (2, np.full(2, 7, np.float64), ValueError, "got dtype float64"),
    (3, np.full(2, 7, np.int32), ValueError, r"of shape \(3,\), got \(2,\)"),
    (3, np.full(4, 7, np.int32), ValueError, r"of shape \(3,\), got \(4,\)"),
    (3, np.full(3, 7, np.int32)[::-1], ValueError, "not C-contiguous"),
    (3, None, TypeError, "must be a numpy array, got NoneType"),
]


def good_out():
    shapes = ((2, 3), (2,), (2,), (3,))
    dtypes = (np.int32, np.int32, np.int64, np.int32)
    return [np.full(s, 7, d) for s, d in zip(shapes, dtypes, strict=True)]


@pytest.mark.parametrize(
    ("index", "array", "error", "match"),
    BAD_OUT,
    ids=[f"{i}-{b[3]}" for i, b in enumerate(BAD_OUT)],
)
def test_wrong_out_raises_and_writes_nothing(index, array, error, match):
    manager = three_sequences()
    out = good_out()
    out[index] = array
    with pytest.raises(error, match=rf"step_inputs: out\[{index}\] .*{match}"):
        manager.step_inputs([0, 1], out=out)
    for item in out:
        if isinstance(item, np.ndarray):
            assert (item == 7).all()


def test_out_as_a_whole():
    manager = three_sequences()
    out = good_out()
    with pytest.raises(ValueError, match=r"out must be a tuple or list of four .*, got 3 items"):
        manager.step_inputs([0, 1], out=out[:3])
    with pytest.raises(TypeError, match=r"out must be a tuple or list .*, got ndarray"):
        manager.step_inputs([0, 1], out=np.zeros((4, 4), np.int32))
    with pytest.raises(ValueError, match=r"of shape \(2, 4\), got \(2, 3\)"):
        manager.step_inputs([0, 1], width=4, out=out)
    with pytest.raises(UnknownSequence):
        manager.step_inputs([0, 9], out=out)
    with pytest.raises(ValueError, match="query_lens must be"):
        manager.step_inputs([0, 1], query_lens=[1, 5], out=out)
    shared = np.full(4, 7, np.int32)
    overlapping = [out[0], shared[:2], out[2], shared[1:]]
    with pytest.raises(ValueError, match=r"do not overlap, got out\[1\] .* out\[3\]"):
        manager.step_inputs([0, 1], out=overlapping)
    assert all((a == 7).all() for a in [*out, shared])
    manager.step_inputs([0, 1], width=3, out=[out[0], shared[:2], out[2], np.empty(3, np.int32)])
