"""What BlockManager promises: who owns which block, and calls that change all or nothing."""

import pickle

import numpy as np
import pytest
from block_manager_case import INT32_MAX, INT64_MAX, INT64_MIN, observe, three_sequences

from paged_attn import BlockManager, OutOfBlocks, UnknownSequence

# The tutorial's cases.


def test_block_is_taken_only_when_the_last_is_full():
    manager = BlockManager(num_blocks=10, block_size=4)
    assert manager.allocate(0, num_tokens=6) == 0
    assert manager.num_free_blocks == 8
    for expected_free in (8, 8, 7):
        assert manager.append(0) == []
        assert manager.num_free_blocks == expected_free
    assert manager.num_tokens(0) == 9
    assert len(manager.block_table(0)) == 3


def test_full_prompt_block_then_one_more():
    manager = BlockManager(10, 4)
    manager.allocate(0, num_tokens=4)
    assert manager.num_free_blocks == 9
    manager.append(0)
    assert manager.num_free_blocks == 8


def test_prompt_larger_than_the_pool():
    manager = BlockManager(1, 4)
    with pytest.raises(OutOfBlocks, match="needed 2, free 1 of 1") as caught:
        manager.allocate(0, num_tokens=5)
    assert (caught.value.needed, caught.value.free) == (2, 1)
    assert manager.num_free_blocks == 1
    manager.allocate(0, num_tokens=4)
    assert manager.num_free_blocks == 0


# State and placement.


def test_properties_and_stats():
    manager = three_sequences()
    assert (manager.num_blocks, manager.block_size, manager.num_free_blocks) == (8, 4, 4)
    assert manager.stats() == {
        "used": 4,
        "shared": 0,
        "cached": 0,
        "free": 4,
        "evicted": 0,
        "hit_tokens": 0,
        "utilization": 11 / 16,
    }
    assert BlockManager(3, 2).stats()["utilization"] == 0.0


def test_placement_is_deterministic():
    manager = three_sequences()
    assert [manager.block_table(i).tolist() for i in range(3)] == [[0, 1], [2], [3]]
    manager.free(0)
    manager.free(2)
    # Block 3 came back last, before it 1 and then 0.
    manager.allocate(7, num_tokens=16)
    assert manager.block_table(7).tolist() == [3, 0, 1, 4]
    manager.free(7)
    manager.allocate(8, num_tokens=16)
    assert manager.block_table(8).tolist() == [3, 0, 1, 4]


def test_block_table_is_an_int32_copy():
    manager = three_sequences()
    table = manager.block_table(0)
    assert table.dtype == np.int32
    assert table.flags.writeable
    table[:] = -7
    assert manager.block_table(0).tolist() == [0, 1]
    manager.append(0, num_tokens=3)
    assert len(table) == 2


@pytest.mark.parametrize("seq_id", [0, -1, INT64_MIN, INT64_MAX, np.int64(5), np.uint8(200)])
def test_any_int64_is_a_sequence_id(seq_id):
    manager = BlockManager(4, 2)
    manager.allocate(seq_id, num_tokens=3)
    manager.append(seq_id)
    assert manager.num_tokens(int(seq_id)) == 4
    manager.free(seq_id)
    assert manager.num_free_blocks == 4


def test_freed_ids_can_be_used_again():
    manager = three_sequences()
    manager.free(1)
    assert manager.allocate(1, num_tokens=20) == 0
    assert manager.num_free_blocks == 0


@pytest.mark.parametrize("make", [list, tuple, np.int64, np.uint8])
def test_batch_append(make):
    manager = three_sequences()
    assert manager.append(make([2, 0, 1])) == []
    assert [manager.num_tokens(i) for i in range(3)] == [7, 5, 2]
    assert manager.block_table(1).tolist() == [2, 4]
    assert manager.append(make([1, 2]), num_tokens=make([4, 7])) == []
    # New blocks go to the sequences in the order of the call.
    assert manager.block_table(1).tolist() == [2, 4, 5]
    assert manager.block_table(2).tolist() == [3, 6, 7]
    assert manager.append(make([]), num_tokens=make([])) == []
    manager.check()


def test_strided_arrays_of_ids():
    manager = three_sequences()
    ids = np.array([0, 99, 1, 99, 2, 99])[::2]
    manager.append(ids)
    assert [manager.num_tokens(i) for i in range(3)] == [7, 5, 2]
    assert manager.step_inputs(ids[::-1])[1].tolist() == [2, 5, 7]


def test_keyword_names_of_both_forms_of_append():
    manager = three_sequences()
    manager.append(seq_id=0, num_tokens=2)
    manager.append(seq_ids=[0], num_tokens=1)
    assert manager.num_tokens(0) == 9


# Errors change nothing.


class Unprintable(int):
    def __repr__(self):
        raise AssertionError("an id must be turned into text as a number")


BAD_CALLS = [
    # allocate
    ("allocate", (0,), {"num_tokens": 3}, ValueError, "seq_id must be .*, got 0"),
    ("allocate", (5,), {"num_tokens": 0}, ValueError, "num_tokens must be .*, got 0"),
    ("allocate", (5,), {"num_tokens": -3}, ValueError, "num_tokens must be .*, got -3"),
    ("allocate", (5,), {"num_tokens": 2**31}, ValueError, "num_tokens must be .*, got 2147483648"),
    ("allocate", (5,), {"num_tokens": 2**63}, ValueError, "num_tokens must be .*64 bits"),
    ("allocate", (5,), {"num_tokens": 10**9999}, ValueError, "num_tokens must be .* bits"),
    ("allocate", (5,), {"num_tokens": 2.0}, TypeError, "num_tokens must be an int, got float"),
    ("allocate", (5,), {"num_tokens": [2]}, TypeError, "num_tokens must be an int, got list"),
    ("allocate", (2**63,), {"num_tokens": 3}, ValueError, "seq_id must be an int64"),
    ("allocate", (-(2**63) - 1,), {"num_tokens": 3}, ValueError, "seq_id must .* negative"),
    ("allocate", ("a",), {"num_tokens": 3}, TypeError, "seq_id must be an int, got str"),
    ("allocate", (5,), {"num_tokens": 17}, OutOfBlocks, "needed 5, free 4 of 8"),
    ("allocate", (5,), {"num_tokens": INT32_MAX}, OutOfBlocks, "needed 536870912, free 4"),
    ("allocate", (5,), {}, TypeError, "incompatible function arguments"),
    ("allocate", (5, 3), {}, TypeError, "incompatible function arguments"),
    # append, one sequence
    ("append", (9,), {}, UnknownSequence, "unknown sequence 9"),
    ("append", (0,), {"num_tokens": 0}, ValueError, "num_tokens must be .*, got 0"),
    ("append", (0,), {"num_tokens": -1}, ValueError, "num_tokens must be .*, got -1"),
    ("append", (0,), {"num_tokens": INT32_MAX}, ValueError, "at most 2147483641 for sequence 0"),
    ("append", (0,), {"num_tokens": INT64_MAX}, ValueError, "num_tokens must be"),
    ("append", (0,), {"num_tokens": 2**70}, ValueError, "num_tokens must be an int64"),
    ("append", (0,), {"num_tokens": [1]}, TypeError, "num_tokens must be an int, got list"),
    ("append", (2**64,), {}, ValueError, "seq_id must be an int64"),
    ("append", (None,), {}, TypeError, "seq_id must be an int, got NoneType"),
    ("append", (0,), {"num_tokens": 19}, OutOfBlocks, "needed 5, free 4 of 8"),
    # append, a batch
    ("append", ([0, 1, 9],), {}, UnknownSequence, "unknown sequence 9"),
    ("append", ([0, 1, 0],), {}, ValueError, "seq_ids must be distinct, got sequence 0 twice"),
    ("append", ([0, 1, 2**63],), {}, ValueError, "seq_ids must be an int64"),
    ("append", ([0, 1, "x"],), {}, TypeError, "seq_ids must be an int, got str"),
    ("append", ([0, [1]],), {}, TypeError, "seq_ids must be an int, got list"),
    ("append", ({0, 1},), {}, TypeError, "seq_id must be an int, got set"),
    ("append", ([0, 1],), {"num_tokens": [1]}, ValueError, r"one a sequence \(2.*, got 1"),
    ("append", ([0, 1],), {"num_tokens": [1, 1, 1]}, ValueError, "got 3 of them"),
    ("append", ([0, 1],), {"num_tokens": [1, 0]}, ValueError, "num_tokens must be .*, got 0"),
    ("append", ([0, 1],), {"num_tokens": [1, 2**31]}, ValueError, "got 2147483648"),
    ("append", ([0, 1],), {"num_tokens": [1, 1.0]}, TypeError, "num_tokens must be an int"),
    ("append", ([0, 1, 2],), {"num_tokens": [3, 8, 8]}, OutOfBlocks, "needed 5, free 4"),
    ("append", (np.zeros((1, 2), int),), {}, ValueError, "seq_ids must be a one-dim.* 2 dim"),
    ("append", (np.zeros(2),), {}, ValueError, "seq_ids must be .* got an array of dtype float64"),
    ("append", (np.array([2**63], np.uint64),), {}, ValueError, "seq_ids must be an int64"),
    # free, block_table, num_tokens
    ("free", (9,), {}, UnknownSequence, "BlockManager.free: unknown sequence 9"),
    ("free", (2**63,), {}, ValueError, "seq_id must be an int64"),
    ("free", ([0],), {}, TypeError, "seq_id must be an int, got list"),
    ("block_table", (-1,), {}, UnknownSequence, "block_table: unknown sequence -1"),
    ("block_table", (1.5,), {}, TypeError, "seq_id must be an int, got float"),
    ("num_tokens", (Unprintable(9),), {}, UnknownSequence, "num_tokens: unknown sequence 9"),
    # step_inputs
    ("step_inputs", (0,), {}, TypeError, "seq_ids must be a sequence of ints, got int"),
    ("step_inputs", ([0, 9],), {}, UnknownSequence, "step_inputs: unknown sequence 9"),
    ("step_inputs", ([0, 2**63],), {}, ValueError, "seq_ids must be an int64"),
    ("step_inputs", ([0, 1],), {"query_lens": 5}, ValueError, "length of sequence 1, 4, got 5"),
    ("step_inputs", ([0, 1],), {"query_lens": [1, 5]}, ValueError, "query_lens .* got 5"),
    ("step_inputs", ([0, 1],), {"query_lens": [1, -1]}, ValueError, "query_lens .* got -1"),
    ("step_inputs", ([0, 1],), {"query_lens": [1]}, ValueError, "query_lens .* got 1 of them"),
    ("step_inputs", ([0, 1],), {"query_lens": 1.0}, TypeError, "query_lens must be an int"),
    ("step_inputs", ([],), {"query_lens": -1}, ValueError, "query_lens must be .* got -1"),
    ("step_inputs", ([],), {"query_lens": 2**31}, ValueError, "query_lens must be"),
    ("step_inputs", ([0],), {"query_lens": 2**64}, ValueError, "query_lens must be an int64"),
    ("step_inputs", ([],), {"query_lens": 2**30, "pad_to": 2}, ValueError, "in all, padding"),
    ("step_inputs", ([0, 1],), {"width": 1}, ValueError, "width must be at least .* 2, .* got 1"),
    ("step_inputs", ([],), {"width": -1}, ValueError, "width must be .* got -1"),
    ("step_inputs", ([0],), {"width": 2**31}, ValueError, "width must be .* got 2147483648"),
    ("step_inputs", ([0],), {"width": 2.0}, TypeError, "width must be an int, got float"),
    ("step_inputs", ([0, 1],), {"pad_to": 1}, ValueError, "pad_to must be .* 2, .* got 1"),
    ("step_inputs", ([],), {"pad_to": -1}, ValueError, "pad_to must be .* got -1"),
    ("step_inputs", ([0],), {"pad_to": INT32_MAX}, ValueError, "pad_to must be"),
    ("step_inputs", ([0],), {"pad_to": [2]}, TypeError, "pad_to must be an int, got list"),
]


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "error", "match"),
    BAD_CALLS,
    ids=[f"{i}-{call[0]}" for i, call in enumerate(BAD_CALLS)],
)
def test_wrong_calls_raise_and_change_nothing(method, args, kwargs, error, match):
    manager = three_sequences()
    ids = [0, 1, 2, 5, 9]
    before = observe(manager, ids)
    with pytest.raises(error, match=match) as caught:
        getattr(manager, method)(*args, **kwargs)
    assert caught.type is error
    if "must be" in match or error is OutOfBlocks:
        assert str(caught.value).startswith(f"paged_attn.BlockManager.{method}: ")
    assert observe(manager, ids) == before
    # Whatever the failed call prepared is not left to the next ones.
    manager.append([0, 1, 2])
    assert [manager.num_tokens(i) for i in range(3)] == [7, 5, 2]
    manager.check()


@pytest.mark.parametrize("bad", [0, -1, 2**31, 2**63, -(2**63), -(2**70)])
@pytest.mark.parametrize("argument", ["num_blocks", "block_size"])
def test_constructor_refuses_sizes(argument, bad):
    with pytest.raises(ValueError, match=f"^paged_attn.BlockManager: {argument} must be"):
        BlockManager(**{"num_blocks": 4, "block_size": 4, argument: bad})
    with pytest.raises(TypeError, match=f"{argument} must be an int, got str"):
        BlockManager(**{"num_blocks": 4, "block_size": 4, argument: "4"})


def test_double_free():
    manager = three_sequences()
    manager.free(1)
    before = observe(manager, range(3))
    with pytest.raises(UnknownSequence):
        manager.free(1)
    assert observe(manager, range(3)) == before


def test_large_blocks_do_not_overflow():
    manager = BlockManager(3, INT32_MAX)
    manager.allocate(0, num_tokens=INT32_MAX)
    manager.allocate(1, num_tokens=INT32_MAX - 1)
    manager.allocate(2, num_tokens=3)
    manager.append(1)
    with pytest.raises(ValueError, match="num_tokens must be at most 0 for sequence 0"):
        manager.append([2, 0, 1])
    _, context_lens, slots, _ = manager.step_inputs([1, 2], query_lens=2)
    assert context_lens.tolist() == [INT32_MAX, 3]
    start = 2 * INT32_MAX
    assert slots.tolist() == [start - 2, start - 1, start + 1, start + 2]
    manager.check()


def test_exceptions_keep_their_bases_text_and_pickle():
    assert issubclass(OutOfBlocks, RuntimeError)
    assert issubclass(UnknownSequence, KeyError)
    manager = BlockManager(1, 4)
    with pytest.raises(UnknownSequence) as unknown:
        manager.free(3)
    assert str(unknown.value) == "paged_attn.BlockManager.free: unknown sequence 3"
    with pytest.raises(OutOfBlocks) as out:
        manager.allocate(0, num_tokens=9)
    copy = pickle.loads(pickle.dumps(out.value))
    assert (type(copy), copy.needed, copy.free, str(copy)) == (OutOfBlocks, 3, 1, str(out.value))


def test_arguments_that_change_the_manager_while_they_are_read():
    class Frees:
        def __index__(self):
            manager.free(1)
            ids.clear()
            return 0

    for call in ("append", "step_inputs"):
        manager = three_sequences()
        ids = [1, Frees(), 2]
        with pytest.raises(UnknownSequence, match="unknown sequence 1"):
            getattr(manager, call)(ids)
        assert observe(manager, range(3))[1] is None
        assert [manager.num_tokens(i) for i in (0, 2)] == [6, 1]
