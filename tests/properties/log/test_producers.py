"""The window of five batches compared with a model that keeps everything, with restarts."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.log.helpers import append, flush, open_log

from penstock.log.config import LogConfig
from penstock.protocol.errors import ApiError, ErrorCode

WRAP = 2**31


class Model:
    """One producer: every batch it ever got in, oldest first, as (epoch, first, count, base offset)."""

    def __init__(self):
        self.batches = []
        self.epoch = -1

    def next_sequence(self):
        epoch, first, count, _ = self.batches[-1]
        assert epoch == self.epoch
        return (first + count) % WRAP

    def answer(self, epoch, first, count, end_offset):
        """What the log has to say: an offset, or an error."""
        if not self.batches:
            return self._taken(epoch, first, count, end_offset)
        if epoch < self.epoch:
            return ErrorCode.invalid_producer_epoch
        if epoch > self.epoch:
            return (
                self._taken(epoch, first, count, end_offset)
                if first == 0
                else ErrorCode.out_of_order_sequence_number
            )
        if first == self.next_sequence():
            return self._taken(epoch, first, count, end_offset)
        window = [batch for batch in self.batches if batch[0] == epoch][-5:]
        repeated = [batch for batch in window if batch[1:3] == (first, count)]
        return repeated[0][3] if repeated else ErrorCode.out_of_order_sequence_number

    def _taken(self, epoch, first, count, end_offset):
        self.epoch = epoch
        self.batches.append((epoch, first, count, end_offset))
        return end_offset


moves = st.lists(
    st.one_of(
        st.tuples(st.just("next"), st.integers(0, 2), st.integers(1, 3)),
        st.tuples(st.just("repeat"), st.integers(0, 2), st.integers(0, 7)),
        st.tuples(st.just("skip"), st.integers(0, 2), st.integers(1, 3)),
        st.tuples(st.just("epoch"), st.integers(0, 2), st.integers(-1, 1)),
        st.tuples(st.sampled_from(["close", "crash", "flush"]), st.just(0), st.just(0)),
    ),
    max_size=40,
)


def request(model, kind, number):
    """Epoch, first sequence and count of what the producer sends."""
    if not model.batches:
        return 0, WRAP - 1 - abs(number), 1 + number % 3
    match kind:
        case "repeat":
            epoch, first, count, _ = model.batches[-1 - number % len(model.batches)]
            return epoch, first, count
        case "skip":
            return model.epoch, (model.next_sequence() + number) % WRAP, 1
        case "epoch":
            return max(model.epoch + number, 0), 0, 1
        case _:
            return model.epoch, model.next_sequence(), number


@settings(max_examples=80, deadline=None)
@given(moves)
def test_the_log_answers_as_the_model_does(steps):
    config = LogConfig(segment_bytes=500)
    with tempfile.TemporaryDirectory() as folder:
        log = open_log(Path(folder) / "t-0", config)
        models = [Model(), Model(), Model()]
        for kind, producer, number in steps:
            if kind == "flush":
                flush(log)
            elif kind in ("close", "crash"):
                log.close() if kind == "close" else log.abandon()
                log = open_log(Path(folder) / "t-0", config, clean=kind == "close")
            else:
                epoch, first, count = request(models[producer], kind, number)
                expected = models[producer].answer(epoch, first, count, log.end_offset)
                try:
                    got = append(log, *[b"x" * 50] * count, producer=(producer, epoch, first)).base_offset
                except ApiError as error:
                    got = error.code
                assert got == expected, (kind, producer, epoch, first, count)
        log.abandon()
