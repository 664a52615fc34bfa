"""Every feature of attention at sizes that the interpreter can take: two or three tiles a side, few heads."""

from __future__ import annotations

import torch

from tests.ops.cases import left_padding, right_padding

STEEP = torch.tensor([0.9, 0.4])
STEEP_BY_ROW = torch.tensor([[0.9, 0.1], [0.02, 0.6]])


def small(**features) -> dict:
    return {"batch": 1, "heads": 2, "queries": 150, "dim": 16} | features


def bucket(**features) -> dict:
    return small(bias="bucket", num_buckets=8, max_distance=40) | features


def symmetric(**features) -> dict:
    return small(causal=False) | features


FEATURES: dict[str, dict] = {
    "causal": small(),
    "causal_steep": small(slopes=STEEP, queries=330),
    "symmetric": symmetric(),
    "symmetric_steep": symmetric(slopes=STEEP, queries=330),
    "one_sided": symmetric(heads=3, sees=("past", "past", "future")),
    "future_only": symmetric(slopes=STEEP, sees=("future", "future")),
    "left_right_slopes": symmetric(slopes=STEEP, future=STEEP.flip(0)),
    "left_right_slopes_by_row": symmetric(batch=2, queries=140, slopes=STEEP, future=STEEP_BY_ROW),
    "offset": symmetric(offset=0.5),
    "offset_future_and_sight": symmetric(
        heads=3,
        offset=1.0,
        slopes=torch.tensor([0.9, 0.4, 0.05]),
        future=torch.tensor([0.05, 0.4, 0.9]),
        sees=("both", "future", "past"),
    ),
    "slopes_by_row": small(batch=2, queries=140, slopes=STEEP_BY_ROW),
    "slopes_by_row_symmetric": symmetric(batch=2, queries=140, slopes=STEEP_BY_ROW),
    "float64_slopes": small(queries=140, slopes=STEEP.double()),
    "half_slopes": small(queries=140, slopes=STEEP.half()),
    "no_bias": small(bias="none"),
    "no_bias_symmetric": symmetric(bias="none"),
    "no_bias_query_start": small(queries=40, keys=150, bias="none", query_start=120),
    "no_bias_padded": small(batch=2, queries=140, bias="none", key_padding_mask=left_padding(140, 33, length=140)),
    "bucket": bucket(),
    "bucket_symmetric": bucket(causal=False, bidirectional=True),
    "bucket_causal_from_both": bucket(bidirectional=True),
    "bucket_symmetric_from_causal": bucket(causal=False),
    "bucket_odd_count": bucket(num_buckets=6, max_distance=20),
    "bucket_wide": bucket(max_distance=170),
    "bucket_far": bucket(max_distance=3000, queries=140),
    "bucket_grouped": bucket(heads=4, queries=140),
    "bucket_padded": bucket(batch=2, queries=140, key_padding_mask=left_padding(120, 33, length=140)),
    "bucket_packed": bucket(cu_seqlens=torch.tensor([0, 77, 150])),
    "bucket_query_start": bucket(queries=40, keys=150, query_start=100),
    "one_key_head": small(heads=4, kv_heads=1),
    "grouped": small(heads=4, kv_heads=2),
    "grouped_symmetric": symmetric(heads=4, kv_heads=2, queries=140),
    "grouped_one_sided": symmetric(heads=4, kv_heads=2, queries=140, sees=("past", "future", "past", "both")),
    "grouped_slopes_by_row": small(
        batch=2, heads=4, kv_heads=2, queries=140, slopes=torch.tensor([[0.9, 0.1, 0.3, 0.5], [0.02, 0.6, 0.2, 0.1]])
    ),
    "three_heads": small(heads=3, queries=140),
    "five_heads_symmetric": symmetric(heads=5, queries=130),
    "six_heads_two_key_heads": small(heads=6, kv_heads=2, queries=100),
    "six_heads_three_key_heads": small(heads=6, kv_heads=3, queries=100),
    "twelve_heads_four_key_heads": small(heads=12, kv_heads=4, queries=70),
    "six_heads_one_key_head_symmetric": symmetric(heads=6, kv_heads=1, queries=100),
    "fewer_queries": small(queries=70, keys=300),
    "fewer_queries_symmetric": symmetric(queries=70, keys=300),
    "one_query": small(queries=1, keys=200),
    "one_query_symmetric": symmetric(queries=1, keys=200),
    "one_key": small(queries=100, keys=1),
    "more_queries": small(queries=300, keys=100),
    "more_queries_symmetric": symmetric(queries=300, keys=100),
    "query_start": small(queries=50, keys=300, query_start=200),
    "query_start_zero": small(queries=100, keys=300, query_start=0),
    "query_start_symmetric": symmetric(queries=100, keys=300, query_start=30),
    "query_start_beyond_the_keys": small(queries=40, keys=150, query_start=900, slopes=STEEP / 100),
    "query_start_beyond_symmetric": symmetric(queries=40, keys=150, query_start=400, slopes=STEEP / 100),
    "query_start_before_the_keys": small(queries=150, keys=150, query_start=-70),
    "query_start_before_symmetric": symmetric(queries=100, keys=150, query_start=-70),
    "query_start_all_before": small(queries=50, keys=100, query_start=-50),
    "query_start_by_row": small(batch=2, queries=50, keys=300, query_start=torch.tensor([200, 7])),
    "query_start_by_row_int32": small(
        batch=2, queries=50, keys=200, query_start=torch.tensor([-20, 170], dtype=torch.int32)
    ),
    "query_start_by_row_symmetric": symmetric(batch=2, queries=90, keys=200, query_start=torch.tensor([300, -7])),
    "left_padding": small(batch=2, key_padding_mask=left_padding(150, 100, length=150)),
    "left_padding_whole_blocks": small(batch=2, key_padding_mask=left_padding(10, 0, length=150)),
    "right_padding": small(batch=2, key_padding_mask=right_padding(150, 100, length=150)),
    "right_padding_symmetric": symmetric(batch=2, key_padding_mask=right_padding(170, 1, length=150)),
    "left_padding_symmetric": symmetric(batch=2, key_padding_mask=left_padding(150, 31, length=150)),
    "padding_and_fewer_queries": small(
        batch=2, queries=60, keys=150, key_padding_mask=left_padding(150, 25, length=150)
    ),
    "padding_and_query_start": small(
        batch=2,
        queries=60,
        keys=150,
        query_start=torch.tensor([120, 60]),
        key_padding_mask=torch.stack((torch.arange(150) >= 20, (torch.arange(150) >= 3) & (torch.arange(150) < 100))),
    ),
    "packed": small(queries=300, cu_seqlens=torch.tensor([0, 1, 150, 151, 300])),
    "packed_int32": small(cu_seqlens=torch.tensor([0, 60, 150], dtype=torch.int32)),
    "packed_symmetric": symmetric(queries=300, cu_seqlens=torch.tensor([0, 128, 140, 300])),
    "packed_empty_documents": small(cu_seqlens=torch.tensor([0, 0, 77, 77, 77, 150, 150])),
    "packed_grouped": small(heads=4, kv_heads=2, cu_seqlens=torch.tensor([0, 130, 150])),
    "packed_one_sided": symmetric(sees=("past", "future"), cu_seqlens=torch.tensor([0, 130, 150])),
    "packed_steep": small(queries=400, slopes=STEEP, cu_seqlens=torch.tensor([0, 20, 390, 400])),
    "packed_many": small(queries=150, heads=1, cu_seqlens=torch.arange(0, 151, 15)),
    "scale": small(queries=130, scale=1.0),
    "scale_zero": small(queries=130, scale=0.0),
    "scale_negative": small(queries=130, scale=-0.7),
}
