"""Every token of the span is scored exactly once, with as much context as its window allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainshort.evaluation.windows import Window, scored_span, windows

SPANS = st.tuples(st.integers(0, 60), st.integers(0, 150)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(span=SPANS, length=st.integers(1, 64), data=st.data())
def test_every_place_is_scored_exactly_once(span: tuple[int, int], length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length))
    first, last = span
    scored = [place for each in windows(first, last, length, stride) for place in range(each.scored, each.end)]
    assert scored == list(range(first, last))


@given(span=SPANS, length=st.integers(1, 64), data=st.data())
def test_windows_are_never_longer_than_their_length_nor_before_the_text(
    span: tuple[int, int], length: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, length))
    for each in windows(*span, length, stride):
        assert 0 <= each.start <= each.scored < each.end
        assert each.size <= length


@given(span=SPANS, length=st.integers(1, 64), data=st.data())
def test_a_sliding_window_gives_each_place_what_context_there_is(
    span: tuple[int, int], length: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, length))
    for each in windows(*span, length, stride):
        for place in range(each.scored, each.end):
            assert place - each.start >= min(place, length - stride)


@given(span=SPANS, length=st.integers(1, 64))
def test_stride_of_the_whole_length_lays_windows_side_by_side(span: tuple[int, int], length: int) -> None:
    first, last = span
    expected = [Window(place, place, min(place + length, last)) for place in range(first, last, length)]
    assert list(windows(first, last, length, length)) == expected


@pytest.mark.parametrize("stride", [0, 5, -1])
def test_a_stride_that_would_leave_tokens_out_is_refused(stride: int) -> None:
    with pytest.raises(ValueError, match="stride must lie in"):
        list(windows(0, 10, 4, stride))


@given(
    tokens=st.integers(0, 400),
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=4),
    limit=st.none() | st.integers(1, 300),
    lead=st.integers(0, 40),
)
def test_the_span_lies_in_the_text_and_fills_the_longest_window(
    tokens: int, lengths: list[int], limit: int | None, lead: int
) -> None:
    count = min(tokens - 1 - lead, tokens if limit is None else limit)
    if count < 1 or lead + count < max(lengths):
        with pytest.raises(ValueError, match="too few" if tokens else "holds no text"):
            scored_span(tokens, lengths, limit=limit, lead=lead)
        return
    first, last = scored_span(tokens, lengths, limit=limit, lead=lead)
    assert first == lead
    assert first < last <= tokens - 1  # the last place predicts the last token
    assert limit is None or last - first <= limit
    assert last >= max(lengths)
    assert last - first < max(lengths) or (last - first) % max(lengths) == 0


def test_the_span_is_as_long_as_can_be() -> None:
    assert scored_span(101, [10, 20]) == (0, 100)
    assert scored_span(100, [10, 20]) == (0, 80)
    assert scored_span(1000, [10, 20], limit=70) == (0, 60)
    assert scored_span(101, [10], lead=5) == (5, 95)
