"""AdamW's update: torch's in FP32; of codes and BF16 the mean, the zeros and the edges; the kernel to the bit."""

import json

import pytest
import torch
from kernel_checks import REPO, in_another_process, interpreted, needs_triton, same

from octavo.kernels.adamw import (
    BLOCK,
    FIRST,
    SECOND,
    Moment,
    Update,
    _store,
    _values,
    adamw_,
    adamw_reference_,
    random_bits,
    stochastic_bf16,
)
from octavo.rollout.counter import uniform_bits


def update(number, device="cpu", clip=1.0, **changes):
    """An optimiser step, whose flag is new."""
    rule = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.1} | changes
    step = {"clip": torch.tensor(clip, device=device), "broken": torch.zeros((), dtype=torch.int32, device=device)}
    return Update(number=number, **rule, **step)


def new_moments(shape, codes, device="cpu"):
    """Both moments of a parameter before its first update."""
    if not codes:
        return Moment(torch.zeros(shape, device=device)), Moment(torch.zeros(shape, device=device))
    num_blocks = -(-torch.Size(shape).numel() // BLOCK)
    return tuple(
        Moment(torch.zeros(shape, dtype=kind[0], device=device), torch.zeros(num_blocks, device=device))
        for kind in (FIRST, SECOND)
    )


def check_kernel(device, shape, master_dtype, codes, reach=8, weight_decay=0.1, odd=1.0):
    """Three updates by kernel and reference leave the same bits; gradients from 2^-reach to a few, and an odd one."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(shape, generator=generator).to(master_dtype)
    master[:, ::5] = 0.0  # whose updates show to the last bit
    start = [master.to(device).clone(), master.to(device).clone()]
    moments = [new_moments(shape, codes, device) for _ in start]
    for number in (1, 2, 3):
        grad = torch.randn(shape, generator=generator) * 2.0 ** (-reach * torch.rand(shape[-1], generator=generator))
        grad[1:2] = 0.0  # blocks whose largest value is 0
        grad[0, 3] = odd
        for function, p, pair in zip((adamw_, adamw_reference_), start, moments, strict=True):
            step = update(number, device, 0.37, weight_decay=weight_decay)
            function(p, grad.to(device), *pair, step, 2**63 + 11 * number)
            assert step.broken == (odd != odd), odd
    pairs = [("master", *start)]
    for name, mine, wanted in zip(("first", "second"), *moments, strict=True):
        pairs.append((f"{name} values", mine.values, wanted.values))
        if codes:
            pairs.append((f"{name} scale", mine.scale, wanted.scale))
    spoiled = codes and odd != odd and shape[0] == 1  # all of its only blocks
    assert spoiled or start[1].float().nan_to_num(0.0).any() and moments[1][1].values.any()
    wrong = [(name, int((a != b).sum()), a.numel()) for name, a, b in pairs if not same(a.cpu(), b.cpu())]
    assert not wrong, (shape, master_dtype, codes, wrong)


def check_flag(device, master_dtype, codes):
    """Kernel and reference say that a master is no longer finite, and take back no flag."""
    for function in (adamw_, adamw_reference_):
        for shape in ((1, 300), (2, 256)):
            for value, grad, wanted in ((3.2e38, -1.0, 1), (-3.2e38, 1.0, 1), (1.0, 1.0, 0), (1.0, torch.nan, 1)):
                masters, grads = torch.ones(shape, dtype=master_dtype), torch.ones(shape)
                masters[-1, -2], grads[-1, -2] = value, grad
                step = update(1, device, lr=1e38, weight_decay=0.0)
                function(masters.to(device), grads.to(device), *new_moments(shape, codes, device), step, 1)
                assert step.broken == wanted, (function, shape, value, grad)
                whole, still = torch.ones(shape, device=device), torch.zeros(shape, device=device)
                function(whole, still, *new_moments(shape, codes, device), step, 1)
                assert step.broken == wanted, "a step whose masters are finite leaves the flag"


def correlation(a, b):
    """Of two draws, in standard errors."""
    a, b = (x.double() - x.double().mean() for x in (a, b))
    return ((a * b).mean() / (a.std() * b.std())).item() * len(a) ** 0.5


def uneven(bins, count):
    """How far the counts of bins are from equal, in standard errors of chi-square."""
    found = torch.bincount(bins.long(), minlength=count).double()
    wanted = len(bins) / count
    return (((found - wanted) ** 2 / wanted).sum().item() - (count - 1)) / (2 * (count - 1)) ** 0.5


def test_in_fp32_it_is_torchs():
    master = torch.nn.Parameter(torch.randn(30, 40))
    optimizer = torch.optim.AdamW([master], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    mine, moments = master.detach().clone(), new_moments((30, 40), codes=False)
    for number in (1, 2, 3):
        master.grad = torch.randn(30, 40)
        optimizer.step()
        adamw_(mine, master.grad, *moments, update(number), 5)
    torch.testing.assert_close(mine, master.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind, size", [(FIRST, 1.0), (SECOND, 1e-13)])
def test_codes_keep_the_mean_of_what_they_round(kind, size):
    """4,000 roundings of one block, from its largest value down to a millionth of it; 5 standard errors."""
    count = 4000
    x = size * torch.logspace(0, -6, BLOCK, dtype=torch.float32)
    if kind is FIRST:
        x[1::2] *= -1.0
    moment = Moment(torch.zeros(BLOCK * count, dtype=kind[0]), torch.zeros(count))
    part = slice(0, BLOCK * count)
    bits = random_bits(3, 0, BLOCK * count, torch.device("cpu")) & 0xFFFF
    _store(moment, kind, part, x.repeat(count), bits)
    rounded = _values(moment, kind, part).view(count, BLOCK)
    largest, power = kind[1:]
    step = 1.5 * power / largest * size * (x.abs() / size) ** (1.0 - 1.0 / power)  # at least that between two codes
    bound = 5 * step / 2 / count**0.5
    off = (rounded.mean(dim=0) - x).abs()
    assert (off <= bound).all(), (off / bound).max()
    steps = rounded.std(dim=0) / x.abs()
    assert 0.0 < steps[3:60].max() < 0.1, "neighbours of a large value are close"


def test_bf16_keeps_the_mean_of_what_it_rounds():
    x = torch.tensor([0.02, -0.02, 1.0, 3.14159, -1e-20, 0.0])
    draws = random_bits(1, 0, 6 * 20000, torch.device("cpu")) & 0xFFFF
    rounded = stochastic_bf16(x.repeat(20000), draws).double().view(-1, 6)
    assert ((rounded.mean(dim=0) - x.double()).abs() <= 5 * rounded.std(dim=0) / 20000**0.5 + 1e-12 * x.abs()).all()
    assert (rounded[:, 2] == 1.0).all() and (rounded[:, 5] == 0.0).all(), "what BF16 holds stays"
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert same(stochastic_bf16(odd, torch.full((3,), 0xFFFF)), odd.bfloat16())


def test_a_second_moment_follows_gradients_that_grow():
    """In a block whose largest value stands still, all others are to grow to four times; to nearest none would move."""
    grad = torch.full((256,), 1e-3)
    grad[0] = 1.0
    master, (first, second) = torch.zeros(256), new_moments((256,), codes=True)
    exact = grad.square()
    start = Moment(torch.zeros(256, dtype=torch.uint8), torch.zeros(1))
    _store(start, SECOND, slice(0, 256), exact, torch.full((256,), 0x8000))
    second.values.copy_(start.values), second.scale.copy_(start.scale)
    grad[1:] = 2e-3
    for number in range(1, 501):
        adamw_(master, grad, first, second, update(number), uniform_bits(0, number, 0))
        exact = exact * 0.999 + grad.square() * 0.001
    found = _values(second, SECOND, slice(0, 256))
    assert exact[1] > 2.1e-6 and found[0] == pytest.approx(1.0, rel=1e-3)
    assert found[1:].mean().item() == pytest.approx(exact[1].item(), rel=0.05)
    assert (found[1:].sqrt() / exact[1].sqrt()).std() < 0.25


def test_no_second_moment_above_0_gets_code_0():
    grad = torch.cat([torch.ones(1), torch.full((254,), 1e-9), torch.zeros(1)])
    master, (first, second) = torch.zeros(256), new_moments((256,), codes=True)
    adamw_(master, grad, first, second, update(3), 1)
    assert second.values.tolist() == [255] + [1] * 254 + [0] and first.values[255] == 0
    adamw_(master, torch.zeros(256), first, second, update(3), 2)
    assert master.isfinite().all() and master.abs().max() < 0.2 and master[255] == 0.0


def test_gradients_of_zero_leave_everything_as_it_is():
    master, (first, second) = torch.randn(3, 100), new_moments((3, 100), codes=True)
    before = master.clone()
    adamw_(master, torch.zeros(3, 100), first, second, update(3, weight_decay=0.0), 1)
    assert torch.equal(master, before) and not first.values.any() and not second.scale.any()


def test_a_master_that_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match=r"adamw_ wants a contiguous master; got shape \(4, 3\), stride \(1, 4\)"):
        adamw_(torch.zeros(3, 4).T, torch.zeros(4, 3), *new_moments((4, 3), codes=False), update(3), 0)


def test_the_clipping_factor_multiplies_gradients():
    grad, found = torch.randn(4, 256), []
    for clip in (0.25, 1.0):
        master, moments = torch.ones(4, 256), new_moments((4, 256), codes=True)
        adamw_(master, grad * (0.25 / clip), *moments, update(1, clip=clip), 3)
        found.append([master, *(tensor for moment in moments for tensor in (moment.values, moment.scale))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and found[0][1].any()


@pytest.mark.parametrize("codes", [False, True])
def test_a_master_that_is_no_longer_finite_raises_the_flag(codes):
    check_flag("cpu", torch.float32, codes)


@pytest.mark.parametrize("kind", [FIRST, SECOND])
def test_a_code_is_the_number_of_thresholds_below(kind):
    """By trying all of them, on random values, on exact codes and just beside them; none above the largest."""
    dtype, largest, power = kind
    generator = torch.Generator().manual_seed(0)
    codes = torch.arange(BLOCK).clamp(max=largest).float()
    random = torch.rand(400, BLOCK, generator=generator) ** torch.randint(1, 12, (400, 1), generator=generator)
    near = (codes / largest) ** power * torch.tensor([1 - 1e-6, 1 - 1e-7, 1.0, 1 + 1e-7, 1 + 1e-6])[:, None]
    x = torch.cat([random, near.expand(40, 5, BLOCK).reshape(-1, BLOCK)]).flatten()
    bits = torch.randint(2**16, x.shape, generator=generator)
    bits[::3], bits[1::7] = 0, 2**16 - 1
    moment = Moment(torch.zeros(len(x), dtype=dtype), torch.zeros(len(x) // BLOCK))
    _store(moment, kind, slice(0, len(x)), x, bits)
    found = moment.values.long()
    units = x.double() / moment.scale.repeat_interleave(BLOCK).double() * largest**power
    assert found.min() == 0 and found.max() == largest
    u, wrong = bits.double() / 2**16, 0
    for code in range(largest + 1):
        t = code**power * (1 - u) + (code + 1) ** power * u
        sure = (units / t.clamp(min=1e-30) - 1).abs() > 1e-5  # beyond the rounding of FP32
        above = found > code
        wrong += ((above != (units > t)) & sure & ~((code == 0) & (power == 4))).sum().item()
    assert wrong == 0
    assert power == 2 or torch.equal(found == 0, x == 0)


def test_random_bits_fill_their_ranges_and_are_strangers_to_each_other():
    """Of an element, its neighbours, another matrix, another step, and places 2^32 apart: 5 standard errors."""
    count, cpu = 2**17, torch.device("cpu")

    def draws(sequence=3, matrix=2, start=0):
        bits = random_bits(uniform_bits(7, sequence, matrix), start, count, cpu)
        return [(bits >> shift) & 0xFFFF for shift in (0, 16, 32)]

    own = draws()
    for draw in own:
        assert abs(uneven(draw >> 6, 1024)) < 5 and abs(uneven(draw & 1023, 1024)) < 5
    pairs = [(own[0], own[1]), (own[0], own[2]), (own[1], own[2])]
    pairs += [(draw[:-lag], draw[lag:]) for draw in own for lag in (1, 2, 3, 4, 7, 8, 16, 256, 4096)]
    others = [draws(matrix=matrix) for matrix in range(3, 13)] + [draws(sequence) for sequence in range(4, 14)]
    others += [draws(start=2**bit) for bit in (17, 31, 32, 33, 40)]
    pairs += [(a, b) for other in others for a, b in zip(own, other, strict=True)]
    for a, b in pairs:
        assert abs(correlation(a, b)) < 5
        assert abs(uneven((a >> 12) * 16 + (b >> 12), 256)) < 5
    assert abs(correlation(own[0], own[0] + own[1])) > 100 and uneven(own[0] & ~64, 2**16) > 100, "what would not pass"


def test_random_bits_go_by_key_and_place():
    cpu, golden = torch.device("cpu"), 0x9E3779B97F4A7C15
    whole = random_bits(2**63 + 5, 0, 1000, cpu)
    assert torch.equal(random_bits(2**63 + 5, 300, 100, cpu), whole[300:400])
    assert torch.equal(random_bits(5 - 2**63, 0, 1000, cpu), whole), "a key by its 64 bits"
    for key, place in ((0, 1), (2**63 + 5, 77), (12345, 3 * 2**32 + 9)):
        here = (key + (place >> 32) * golden) % 2**64
        x = lowbias32((place ^ here) % 2**32, here >> 32)
        wanted = x | (x * 0x9E3779B1 % 2**32 >> 16) << 32
        assert random_bits(key, place, 1, cpu).item() == wanted, (key, place)


def lowbias32(x, between=0):
    """Wellons' finaliser, with a number put in ahead of the second product."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15 ^ between
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


@needs_triton
def test_the_kernel_compiles_for_hopper():
    found = json.loads(in_another_process(REPO / "tests/kernels/adamw_aot.py"))
    assert len(found) == 4
    for name, counts in found.items():
        assert counts[".local"] == 0 and counts["ld.global.v4"] > 0, (name, counts)


@needs_triton
def test_the_kernel_in_the_interpreter_equals_the_reference():
    """Also where its approximate roots are off by 2^-12."""
    interpreted(
        "import warnings\n"
        "import numpy\n"
        "from triton.runtime.interpreter import InterpreterBuilder, TensorHandle\n"
        "from test_adamw import *\n"
        "warnings.simplefilter('ignore')  # NumPy's, of the random numbers' products\n"
        "check_kernel('cpu', (3, 300), torch.bfloat16, True)\n"
        "check_kernel('cpu', (2, 256), torch.float32, False, weight_decay=0.0)\n"
        "check_kernel('cpu', (1, 2048), torch.float32, True, odd=torch.nan)\n"
        "check_flag('cpu', torch.float32, True)\n"
        "random = numpy.random.default_rng(0)\n"
        "def root(self, x):\n"
        "    error = 1.0 + 2.0**-12 * random.uniform(-1.0, 1.0, x.data.shape)\n"
        "    return TensorHandle((numpy.sqrt(x.data) * error).astype(numpy.float32), x.dtype.scalar)\n"
        "InterpreterBuilder.create_sqrt = root\n"
        "for reach in (1, 20, 140):\n"
        "    check_kernel('cpu', (2, 1024), torch.float32, True, reach)\n"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("reach", [8, 140])
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("master_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 16), (5, 300), (1000, 4100), (1024, 4096)])
def test_the_kernel_on_a_gpu_equals_the_reference(shape, master_dtype, codes, reach):
    check_kernel("cuda", shape, master_dtype, codes, reach, weight_decay=0.0 if reach == 8 else 0.1)
    check_kernel("cuda", shape, master_dtype, codes, reach, odd=torch.nan)


@pytest.mark.gpu
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("master_dtype", [torch.float32, torch.bfloat16])
def test_the_flag_on_a_gpu(master_dtype, codes):
    check_flag("cuda", master_dtype, codes)
