"""Division of a packed micro-batch of pairs into two, one for each side."""

from common.data.packing import PackedBatch


def divide(mb: PackedBatch) -> tuple[PackedBatch, PackedBatch]:
    """Return the first and the second samples of a micro-batch of pairs, packed `together`, as two
    micro-batches in the same order. An index is that of the pair. Padding is in both."""
    if not mb.num_samples:
        return mb, mb
    assert mb.compact is None, "pairs with a shared prefix"
    return _every_second(mb, 0), _every_second(mb, 1)


def _every_second(mb: PackedBatch, start: int) -> PackedBatch:
    here_T = mb.sequence_ids_T % 2 == start
    half = PackedBatch(
        mb.input_ids_T[here_T], mb.targets_T[here_T], mb.position_ids_T[here_T],
        mb.lengths[start::2], loss_mask_T=mb.loss_mask_T[here_T],
        index_N=mb.index_N[start::2] // 2, datasets=mb.datasets[start::2],
    )  # fmt: skip
    half.sent = {index // 2: sample for index, sample in mb.sent.items() if index % 2 == start}
    streams_T = {name: x_T[here_T] for name, x_T in vars(mb).items() if name not in vars(half)}
    return half.with_streams(**streams_T)
