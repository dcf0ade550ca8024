import pytest

pytest.importorskip("verl.trainer", reason="needs verl: make test-verl")

import torch

from octavo.plugins.verl.transfer import FINGERPRINTS, Arrival, fingerprint, stamped


def tensors():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(256, 128, generator=generator).to(torch.float8_e4m3fn)
    norm = torch.randn(7, generator=generator).bfloat16()
    return [("a.weight", codes), ("a.weight_scale_inv", torch.rand(2, 1, generator=generator)), ("norm", norm)]


def test_whole_streams_arrive_in_buckets():
    arrival, stream = Arrival(), list(stamped(tensors(), 3, 17))
    taken = [pair for start in range(0, len(stream), 2) for pair in arrival.take(stream[start : start + 2])]
    assert arrival.complete and arrival.policy_version == 17
    assert [name for name, _ in taken] == ["a.weight", "a.weight_scale_inv", "norm"]
    for (_, came), (_, sent) in zip(taken, tensors(), strict=True):
        assert torch.equal(came.view(torch.uint8), sent.view(torch.uint8))


@pytest.mark.parametrize("place", [0, 1, 20000, 32767])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_is_seen(place, bit):
    stream = list(stamped(tensors(), 3, 17))
    stream[1][1].view(torch.uint8).flatten()[place] ^= 1 << bit
    with pytest.raises(ValueError, match=r"policy_version 17 arrived damaged: 3 of 3 tensors came, 1 of them changed"):
        Arrival().take(stream)


def test_a_lost_tensor_and_an_exchanged_pair_are_seen():
    stream = list(stamped(tensors(), 3, 17))
    with pytest.raises(ValueError, match="2 of 3 tensors came"):
        Arrival().take(stream[:2] + stream[3:])
    with pytest.raises(ValueError, match="2 of them changed"):
        Arrival().take([stream[0], stream[2], stream[1], *stream[3:]])


def test_a_stream_that_stops_is_not_complete():
    arrival = Arrival()
    arrival.take([pair for pair in stamped(tensors(), 3, 17) if pair[0] != FINGERPRINTS])
    assert not arrival.complete


def test_weights_of_another_sender_are_refused():
    with pytest.raises(ValueError, match="begin with 'octavo.header'; got 'a.weight'"):
        Arrival().take(tensors())


def test_a_fingerprint_is_worked_out_by_hand():
    assert fingerprint(torch.tensor([3, 0, 5], dtype=torch.uint8)) == 3 * 1 + 5 * 3
    assert fingerprint(torch.zeros(0)) == 0
    long = torch.zeros((1 << 20) + 1, dtype=torch.uint8)
    long[-1] = 2
    assert fingerprint(long) == 2 * ((1 << 20) + 1)
