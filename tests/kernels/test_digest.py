"""Digests by the kernel: those of the definition, whatever the addresses, chunks and grid."""

import pytest
import torch

from tests import digest_oracle

from .launch import run, segment, work_list

WORDS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def bits(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements of any bits."""
    words = torch.iinfo(WORDS[dtype])
    return torch.randint(words.min, words.max, (size,), dtype=WORDS[dtype]).view(dtype)


def digests(tensors: list[torch.Tensor], *, chunk: int = 65536, grid: int = 3) -> list[int]:
    """One launch over tensors of one type, the last two of which get nothing."""
    name = str(tensors[0].dtype).removeprefix("torch.")
    table, owners = work_list([segment(t, number) for number, t in enumerate(tensors)], chunk)
    found = torch.zeros(len(tensors) + 2, dtype=torch.int64)
    turns = torch.zeros(2, dtype=torch.int32)
    run(f"digest_{name}", grid, (table, owners, found, turns, len(owners)))
    assert not turns.any()
    assert not found[-2:].any()
    return [digest % 2**64 for digest in found[:-2].tolist()]


def check(tensors: list[torch.Tensor], **options: int) -> None:
    assert digests(tensors, **options) == [digest_oracle.digest(tensor) for tensor in tensors]


@pytest.mark.parametrize("dtype", WORDS)
class TestDigest:
    def test_many_sizes(self, dtype: torch.dtype) -> None:
        check([bits(size, dtype) for size in (1, 2, 3, 7, 8, 127, 129, 1000, 4099)])

    @pytest.mark.parametrize("chunk", [255, 256, 1000, 1024])
    def test_chunks_that_are_cut(self, dtype: torch.dtype, chunk: int) -> None:
        """Odd chunks begin with the second word of a pair."""
        check([bits(2100, dtype), bits(3001, dtype)], chunk=chunk, grid=2)

    @pytest.mark.parametrize("start", range(1, 10))
    def test_addresses_that_are_aligned_to_the_element_alone(
        self, dtype: torch.dtype, start: int
    ) -> None:
        check([bits(3000, dtype)[start:], bits(9 + start, dtype)[start:]], chunk=2048)

    def test_more_programs_than_chunks(self, dtype: torch.dtype) -> None:
        check([bits(500, dtype)], grid=7)

    def test_zero_bits(self, dtype: torch.dtype) -> None:
        zeros = torch.zeros(1500, dtype=dtype)
        assert digests([zeros, -zeros])[0] == 0 != digests([-zeros])[0]
        check([zeros, -zeros])

    def test_one_flipped_bit(self, dtype: torch.dtype) -> None:
        tensor = bits(1700, dtype)
        seen = {digests([tensor])[0]}
        for place in (0, 1, 2, 767, 768, 1535, 1536, 1698, 1699):
            changed = tensor.clone()
            changed.view(WORDS[dtype])[place] ^= 1 << place % 15
            seen.add(digests([changed])[0])
        assert len(seen) == 10

    def test_words_past_32_bits(self, dtype: torch.dtype) -> None:
        """The last three chunks of a tensor whose beginning is not there."""
        before = 2**32 // 255 + 1
        end, offset = bits(600, dtype), 255 * before
        address = end.data_ptr() - offset * end.element_size()
        length = offset + len(end)
        table = torch.tensor([[address, 1, length, length, 1, 0, -before, 1, before + 3, 255]])
        owners, turns = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        found = torch.zeros(1, dtype=torch.int64)
        name = str(dtype).removeprefix("torch.")
        run(f"digest_{name}", 2, (table, owners, found, turns, len(owners)))
        assert int(found) % 2**64 == digest_oracle.digest(end, offset)
