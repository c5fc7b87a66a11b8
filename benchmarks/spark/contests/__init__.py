"""The contests, in the order in which they are held."""

from benchmarks.spark.contest import Contest
from benchmarks.spark.contests import archives, micro_batches, reads, writes

CONTESTS: tuple[Contest, ...] = (
    *reads.CONTESTS,
    *writes.CONTESTS,
    *micro_batches.CONTESTS,
    *archives.CONTESTS,
)
#: What a smoke test holds.
SMOKE = ("read-100B-none", "write-100B-none", "batches-to-nowhere")
