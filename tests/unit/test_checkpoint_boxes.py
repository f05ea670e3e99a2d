"""Boxes of flat ranges, over all small shapes, and the copies between layouts, over all pairs of them."""

import itertools

import numpy as np
import pytest

from megatron_lite.checkpoint.boxes import Box, flat_boxes, intersect, strides
from megatron_lite.checkpoint.layout import Saved, compare_names, gaps, owns, parts, plan, table
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.shard import FlatShard, Piece
from tests.helpers.shards import SHAPES, expected, make_shards, whole_tensor

SMALL = [shape for n in range(4) for shape in itertools.product((1, 2, 3, 4), repeat=n)] + [(2, 3, 1, 4), (3, 2, 2, 2)]


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_every_flat_range_is_at_most_2n_minus_1_boxes_in_order(shape):
    size = int(np.prod(shape, dtype=np.int64))
    numbers = np.arange(size).reshape(shape)
    for start in range(size + 1):
        for stop in range(start, size + 1):
            boxes = flat_boxes(shape, start, stop)
            held = [
                numbers[tuple(slice(a, a + n) for a, n in zip(b.start, b.shape, strict=True))].ravel() for b in boxes
            ]
            assert np.array_equal(np.concatenate([*held, []]), np.arange(start, stop))
            assert len(boxes) <= max(2 * len(shape) - 1, 1)
            assert all(box.numel for box in boxes)


def test_intersections_are_those_of_index_sets():
    boxes = [Box(start, shape) for start in np.ndindex(3, 3) for shape in ((1, 1), (2, 1), (1, 2), (2, 2))]

    def cells(box):
        return (
            set(itertools.product(*[range(a, a + n) for a, n in zip(box.start, box.shape, strict=True)]))
            if box
            else set()
        )

    for a in boxes:
        for b in boxes:
            assert cells(intersect(a, b)) == cells(a) & cells(b)


def test_strides_are_those_of_numpy():
    for shape in SMALL:
        assert strides(shape) == tuple(s // 8 for s in np.ones(shape, np.int64).strides) or 1 in shape


@pytest.mark.req("B02")
def test_offsets_beyond_two_to_the_31_are_exact():
    rows, columns = 3_000_000, 4096
    boxes = flat_boxes((rows, columns), 2**33 + 1, 2**33 + 2 * columns)
    assert boxes == [Box((2**21, 1), (1, columns - 1)), Box((2**21 + 1, 0), (1, columns))]


def _saved(tp, dp):
    """The manifest entries of a layout, and the flat tensors of its files."""
    coordinates, files, data = [], [], {}
    for t in range(tp):
        for d in range(dp):
            shards = make_shards(tp, t, dp, d, filled=True, kinds=("master",))
            if d == 0:
                coordinates.append({"pp": 0, "tp": t, "buckets": table(shards)})
            mine = [shard for shard in shards if owns(shard)]
            files.append({"name": f"{t}-{d}", "pp": 0, "tp": t, "ranges": {s.bucket: [s.lo, s.hi] for s in mine}})
            data.update({(f"{t}-{d}", shard.bucket): shard.tensors["master"].numpy() for shard in mine})
    return Saved(coordinates, files), data


def _fill(shard, saved, data):
    out = np.full(shard.hi - shard.lo, np.nan, np.float32)
    for start, stop in gaps(shard.pieces, shard.lo, shard.hi):
        out[start:stop] = 0
    for part, copies in plan(shard, saved):
        for copy in copies:
            for index in np.ndindex(copy.shape):
                source = copy.source.offset + int(np.dot(index, copy.source.strides))
                target = part.first + copy.target.offset + int(np.dot(index, copy.target.strides))
                assert copy.source.offset <= source < copy.source_stop and part.first <= target < part.stop
                assert np.isnan(out[target]), "an element is filled twice"
                out[target] = data[copy.file, copy.bucket][source]
    return out


LAYOUTS = list(itertools.product((1, 2, 4), (1, 2, 3, 5)))


@pytest.mark.req("M09")
@pytest.mark.parametrize("source", LAYOUTS, ids=lambda s: f"tp{s[0]}dp{s[1]}")
def test_every_layout_fills_every_other_once_and_exactly(source):
    saved, data = _saved(*source)
    assert saved.shapes == SHAPES
    for tp, dp in [(1, 1), (2, 3), (4, 2), (1, 5), (4, 5)]:
        for t, d in itertools.product(range(tp), range(dp)):
            for shard in make_shards(tp, t, dp, d, filled=False, kinds=("master",)):
                assert np.array_equal(_fill(shard, saved, data), expected(shard, "master"))


def test_whole_tensors_come_from_first_copies_only():
    saved, data = _saved(4, 2)
    for name, shape in SHAPES.items():
        piece = Piece(name, shape, (0,) * len(shape), shape)
        shard = FlatShard("export", (piece,), piece.numel, 0, piece.numel, {})
        assert np.array_equal(_fill(shard, saved, data).reshape(shape), whole_tensor(name, "master"))
        for _, copies in plan(shard, saved):
            if "norm" in name:
                assert {copy.file[0] for copy in copies} == {"0"}


def test_a_bucket_of_later_copies_is_not_saved():
    assert [owns(shard) for shard in make_shards(2, 1, 1, 0, filled=False)] == [True, False]


def test_an_element_in_no_file_is_an_error_that_names_the_tensor():
    saved, _ = _saved(1, 2)
    shards = make_shards(1, 0, 1, 0, filled=False)
    coordinates = [{"pp": 0, "tp": 0, "buckets": table(shards)}]
    half = Saved(coordinates, [{"name": "0", "pp": 0, "tp": 0, "ranges": {"decay": [0, 401], "plain": [0, 13]}}])
    with pytest.raises(CheckpointError, match=r"model.q_proj.weight: the checkpoint holds 1 of the 120 elements"):
        list(plan(shards[0], half))
    assert saved.shapes == half.shapes


def test_parts_and_gaps_divide_every_range():
    pieces = (Piece("a", (2, 3), (0, 0), (2, 3), 2), Piece("b", (4,), (1,), (2,), 11))
    for lo in range(16):
        for hi in range(lo, 16):
            taken = [(p.first, p.stop) for p in parts(pieces, lo, hi)] + gaps(pieces, lo, hi)
            assert sorted(x for a, b in taken for x in range(a, b)) == list(range(hi - lo))


def test_names_and_shapes_that_do_not_fit_are_all_listed():
    wrong = compare_names({"a": (2,), "b": (3,)}, {"b": (4,), "c": (5,)})
    assert wrong == [
        "a [2] is not in the checkpoint",
        "c [5] is not in this model",
        "b is [4] in the checkpoint and [3] here",
    ]
