"""Attention over encoded operands: accuracy, what a consumer must refuse, and the adapter to SageAttention.

The library itself needs a GPU; here a stand-in checks its operands as it does and computes with the emulation.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from comm_core import _cuda
from comm_core.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from comm_lowp import UlyssesQKV, emulated_attention, reference_attention, sage_attention, sageattention
from comm_lowp.consumer import dequantize
from comm_lowp.sage2.grid import LAYOUTS, SM89_SM120, SM90
from comm_lowp.testing.cases import Case, make, simulate

BF16, F16 = torch.bfloat16, torch.float16
BOTH = sorted(LAYOUTS)


def encode(case: Case, inputs: Any = None) -> UlyssesQKV:
    """Return rank 0's operands."""
    run = simulate(case, make(case) if inputs is None else inputs)
    q, k, v, q_scale, k_scale, v_scale = run.outputs[0]
    return UlyssesQKV(q, k, v, q_scale, k_scale, v_scale, case.layout, case.sequence, case.used, case.dtype)


def exact(inputs: Any, used: int, heads: int) -> torch.Tensor:
    q, k, v = (x[:, :used, :heads].transpose(1, 2).double() for x in inputs)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def errors(out: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Return cosine and relative L2."""
    live = out[:, : want.shape[1]].double()
    cosine = torch.nn.functional.cosine_similarity(live.flatten(), want.flatten(), dim=0)
    return float(cosine), float((live - want).norm() / want.norm())


def inputs_of(kind: str, d: int, dtype: torch.dtype = BF16, s: int = 512, used: int | None = None) -> Any:
    """Return the inputs of the published table of accuracies."""
    random = torch.Generator().manual_seed(11)
    shape = (1, s, 2, d)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random)

    q, k, v = normal(*shape), normal(*shape), normal(*shape)
    bias = normal(1, 1, 2, d)
    if kind == "biased":
        k, v = k + 6.0 * bias, v + 6.0 * normal(1, 1, 2, d)
    if kind == "sharp":
        q, k = 3.0 * q, 2.0 * k
    if kind == "outliers":
        q[..., 3] *= 8.0
        k[..., 5] += 30.0
        v[..., 7] *= 20.0
    if kind == "two_peaks":
        k = 30.0 * torch.sign(bias) + 0.5 * k
    for x in (q, k, v):
        x[:, used or s :] = 0.0
    return tuple(x.to(dtype) for x in (q, k, v))


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("kind", "used", "least", "most"),
    [
        ("normal", 512, 0.999, 0.045),
        ("normal", 451, 0.999, 0.045),
        ("biased", 512, 0.9995, 0.010),
        ("sharp", 512, 0.998, 0.050),
        ("outliers", 512, 0.997, 0.075),
        ("two_peaks", 50, 0.998, 0.060),
    ],
)
def test_the_emulated_consumer_is_within_the_gates(layout, d, kind, used, least, most):
    """The published accuracies, with their margins; the exact consumer is never worse."""
    case = Case(1, 1, 2, 512, used, d, BF16, layout)
    inputs = inputs_of(kind, d, used=used)
    encoded, want = encode(case, inputs), exact(inputs, used, 2)
    cosine, l2 = errors(emulated_attention(encoded), want)
    assert cosine >= least and l2 <= most, (cosine, l2)
    better = errors(reference_attention(encoded), want)
    assert better[1] <= l2 * 1.05
    assert l2 > 0.002  # it is not the unquantized result


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize(("kind", "least", "most"), [("normal", 0.999, 0.045), ("biased", 0.9995, 0.010)])
@pytest.mark.parametrize("used", [65_536, 199_999])
def test_long_sequences_are_as_accurate_as_short_ones(layout, kind, least, most, used):
    """K7: the statistics, scales and operands of two ranks keep the gates; on rows from all over the sequence."""
    rows = -(-used // 2)
    q, k, v = inputs_of(kind, 64, s=2 * rows, used=used)
    # Every other 32 rows are twice as large, where the mean hides it: scales of the next group would be seen.
    step = 1 + (torch.arange(2 * rows) // 32 % 2 if kind == "biased" else torch.zeros(2 * rows)).view(1, -1, 1, 1)
    inputs = ((q * step).to(BF16), (k * step).to(BF16), v)
    encoded = encode(Case(2, 1, 1, rows, used, 64, BF16, layout), inputs)
    some = torch.linspace(0, used - 1, 48).long()
    q, k, v = (x[:, :used, :1].transpose(1, 2).double() for x in inputs)
    want = torch.nn.functional.scaled_dot_product_attention(q[:, :, some], k, v)
    q, k, v = (x.transpose(1, 2).double() for x in dequantize(encoded))
    cosine, l2 = errors(torch.nn.functional.scaled_dot_product_attention(q[:, :, some], k, v), want)
    assert cosine >= least and 1e-4 < l2 <= most, (cosine, l2)  # 0 would be the unquantized result


def test_what_accuracy_would_be_without_the_mean_of_k():
    """K1: smoothing is what makes a biased K accurate, and it cancels in the softmax."""
    inputs = inputs_of("two_peaks", 64, used=512)
    case = Case(1, 1, 2, 512, 512, 64, BF16, "sage2_sm90")
    want = exact(inputs, 512, 2)
    smooth = errors(emulated_attention(encode(case, inputs)), want)[1]
    run = simulate(case, inputs, mean=torch.zeros(1, 2, 64, dtype=BF16))
    q8, k8, v8, *scales = run.outputs[0]
    plain = UlyssesQKV(q8, k8, v8, scales[0], scales[1], scales[2], case.layout, 512, 512, BF16)
    assert errors(emulated_attention(plain), want)[1] > 1.3 * smooth


@pytest.mark.parametrize("layout", BOTH)
def test_a_wrong_order_of_v_or_a_wrong_grid_would_be_seen(layout):
    """The gates can fail: V in natural order, or scales shifted by one group."""
    case = Case(1, 1, 2, 512, 512, 64, BF16, layout)
    inputs = inputs_of("normal", 64)
    graded = tuple((x.float() * (1 + torch.arange(512).view(1, -1, 1, 1) // 32)).to(BF16) for x in inputs[:2])
    inputs = (*graded, inputs[2])
    encoded, want = encode(case, inputs), exact(inputs, 512, 2)
    natural = encoded.v.view(torch.uint8).roll(1, dims=3).view(torch.float8_e4m3fn)
    assert errors(emulated_attention(encoded._replace(v=natural)), want)[0] < 0.9
    shifted = encoded._replace(k_scale=encoded.k_scale.roll(1, dims=2).contiguous())
    assert errors(emulated_attention(shifted), want)[1] > 2 * errors(emulated_attention(encoded), want)[1]


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("data", ["tiny", "constant_k", "zeros", "outlier", "zero_channels", "zero_v", "extreme"])
def test_finite_inputs_give_finite_outputs(layout, data):
    """K3: zero and tiny channels, constant K, one huge outlier, denormals, the largest fp16."""
    for dtype in (BF16, F16):
        case = Case(1, 1, 2, 130, 129, 64, dtype, layout, data)
        inputs = make(case)
        encoded = encode(case, inputs)
        for attend in (reference_attention, emulated_attention):
            out = attend(encoded)
            assert torch.isfinite(out).all() and not out[:, 129:].any()
            if data in ("zero_v", "zeros"):
                assert not out.any()


def test_larger_values_would_overflow_the_fp16_accumulator():
    """Why V is scaled to 2.25 there: to 448 the emulation, like the kernel, ends in infinities."""
    case = Case(1, 1, 1, 128, 128, 64, F16, "sage2_sm89_sm120", "normal")
    q, k, v = make(case)
    encoded = encode(case, (torch.zeros_like(q), k, torch.ones_like(v)))
    assert torch.isfinite(emulated_attention(encoded)).all()
    wide = encoded._replace(v=(encoded.v.float() / 2.25 * 448).to(torch.float8_e4m3fn))
    assert not torch.isfinite(emulated_attention(wide)).all()


@pytest.mark.parametrize("layout", BOTH)
def test_dequantized_operands_are_the_inputs_up_to_the_codes(layout):
    case = Case(1, 2, 2, 70, 61, 64, F16, layout, "graded")
    inputs = make(case)
    run = simulate(case, inputs)
    q, k, v = dequantize(encode(case, inputs))
    live = [x[:, :61].float() for x in inputs]
    live[1] = live[1] - run.mean.float().unsqueeze(1)
    for mine, want in zip((q, k), live[:2], strict=True):
        step = want.abs().amax() / 127
        assert (mine - want).abs().max() <= step * 0.51
    relative = (v - live[2]).abs() / live[2].abs().amax(dim=1, keepdim=True).clamp(min=1e-9)
    assert relative.max() <= 2**-4 * 1.01  # half a step of the three bits of mantissa


# Refusals


def change(encoded: UlyssesQKV, name: str, value: Any) -> UlyssesQKV:
    return encoded._replace(**{name: value})


def test_operands_that_do_not_fit_each_other_are_refused():
    """K5: producer and consumer must mean the same layout and lengths; a kernel would compute garbage."""
    good = encode(Case(1, 1, 2, 520, 511, 64, BF16, "sage2_sm90"))
    for broken, text in (
        (change(good, "layout", "sage2_sm89_sm120"), "sage2_sm89_sm120"),
        (change(good, "layout", "other"), "layout must be one of"),
        (change(good, "used_sequence", 520), "q_scale"),
        (change(good, "used_sequence", 521), "used_sequence=521"),
        (change(good, "logical_sequence", 512), "logical_sequence=512"),
        (change(good, "q_scale", good.q_scale[..., :-1]), "q_scale"),
        (change(good, "k", good.k.float()), "encoded.k"),
        (change(good, "v", good.v[..., :512]), "encoded.v"),
        (change(good, "v", good.v.view(torch.uint8)), "encoded.v"),
        (change(good, "v_scale", good.v_scale.transpose(1, 2)), "v_scale"),
    ):
        for attend in (reference_attention, emulated_attention, sage_attention):
            with pytest.raises(ArgumentValueError, match=text):
                attend(broken)
    with pytest.raises(ArgumentTypeError, match="UlyssesQKV"):
        reference_attention((good.q, good.k))
    with pytest.raises(ArgumentValueError, match="finite"):
        reference_attention(good, float("inf"))


def test_the_softmax_scale_belongs_to_the_call():
    case = Case(1, 1, 1, 70, 70, 64, F16, "sage2_sm90", "normal")
    inputs = make(case)
    encoded = encode(case, inputs)
    doubled = (inputs[0] * 2, *inputs[1:])
    want = reference_attention(encode(case, doubled), 0.125)
    assert torch.allclose(reference_attention(encoded, 0.25).float(), want.float(), atol=2e-3)
    assert torch.equal(reference_attention(encoded), reference_attention(encoded, 64**-0.5))


# SageAttention


class Library:
    """Stands in for an installed SageAttention: checks operands as it does, and computes with the emulation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, encoded: UlyssesQKV, **entries: Any) -> None:
        self.encoded = encoded
        self.calls: list[float] = []
        package = ModuleType("sageattention")
        package.__path__ = []
        monkeypatch.setitem(sys.modules, "sageattention", package)
        for name in ("_qattn_sm90", "_qattn_sm89", "sm90_compile", "sm89_compile"):
            module = ModuleType(f"sageattention.{name}")
            if name in entries:
                setattr(module, entries[name], self.kernel)
            monkeypatch.setitem(sys.modules, f"sageattention.{name}", module)

    def kernel(self, q, k, v, o, q_scale, k_scale, v_scale, layout, causal, granularity, scale, lse):
        consumer = LAYOUTS[self.encoded.layout]
        b, n, h, d = q.shape
        assert (layout, causal, granularity, lse) == (0, 0, 2, 0)
        assert (
            q.dtype == k.dtype == torch.int8
            and v.dtype == torch.float8_e4m3fn
            and o.dtype == self.encoded.input_dtype
        )
        assert k.shape == o.shape == (b, n, h, d) and v.is_contiguous()
        assert v.shape[3] >= consumer.padded(n)
        wq, wk = consumer.scale_widths(n)
        for x, shape in ((q_scale, (b, h, wq)), (k_scale, (b, h, wk)), (v_scale, (b, h, d))):
            assert x.shape == shape and x.is_contiguous()
        self.calls.append(scale)
        o.copy_(emulated_attention(self.encoded, scale)[:, :n])


@pytest.fixture
def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let CPU tensors pass for CUDA ones, and note what streams are told."""
    told: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            told.append(f"{self.name} waits for {other.name}")

    current, legacy = Stream("current"), Stream("legacy")
    cuda = SimpleNamespace(current_stream=lambda device: current, default_stream=lambda device: legacy)
    monkeypatch.setattr(_cuda, "source", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(_cuda, "is_capturing", lambda: False)
    monkeypatch.setattr(sageattention, "_DEVICE_TYPE", "cpu")
    return told


@pytest.mark.parametrize(
    ("layout", "entries"),
    [
        ("sage2_sm90", {"_qattn_sm90": "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf"}),
        ("sage2_sm90", {"sm90_compile": "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf"}),
        ("sage2_sm89_sm120", {"_qattn_sm89": "qk_int8_sv_f8_accum_f16_fuse_v_scale_attn_inst_buf"}),
        ("sage2_sm89_sm120", {"_qattn_sm89": "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf"}),
    ],
)
def test_the_library_gets_what_it_asks_for(monkeypatch, pretend_cuda, layout, entries):
    """Its operands, in stream order both ways, and a zero tail."""
    encoded = encode(Case(1, 2, 2, 520, 511, 64, BF16, layout, "normal"))
    library = Library(monkeypatch, encoded, **entries)
    out = sage_attention(encoded, 0.3)
    assert library.calls == [0.3]
    assert pretend_cuda == ["legacy waits for current", "current waits for legacy"]
    assert torch.equal(out, emulated_attention(encoded, 0.3)) and not out[:, 511:].any()
    target = torch.full_like(out, 7.0)
    assert sage_attention(encoded, 0.3, out=target) is target and torch.equal(target, out)
    for bad in (target[:, :-1], target.float(), target.mT.contiguous().mT):
        with pytest.raises(ArgumentValueError, match="out must be"):
            sage_attention(encoded, out=bad)


def test_misaligned_operands_are_refused_before_the_library_would_end_the_process(monkeypatch, pretend_cuda):
    encoded = encode(Case(1, 1, 1, 64, 64, 64, BF16, "sage2_sm90", "normal"))
    library = Library(monkeypatch, encoded, _qattn_sm90="qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf")
    shifted = torch.empty(encoded.q.numel() + 1, dtype=torch.int8)[1:].view(encoded.q.shape)
    for name in ("q", "k"):
        with pytest.raises(ArgumentValueError, match=f"encoded.{name} must have dense rows and 16-byte"):
            sage_attention(change(encoded, name, shifted))
    assert library.calls == []


def test_a_capture_is_refused(monkeypatch, pretend_cuda):
    encoded = encode(Case(1, 1, 1, 64, 64, 64, BF16, "sage2_sm90", "normal"))
    monkeypatch.setattr(_cuda, "is_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="can't be captured"):
        sage_attention(encoded)


def test_an_absent_or_broken_library_is_named(monkeypatch):
    with pytest.raises(UnsupportedError, match="not installed"):
        sageattention.find_kernel(SM90)
    encoded = encode(Case(1, 1, 1, 64, 64, 64, BF16, "sage2_sm90", "normal"))
    with pytest.raises(UnsupportedError, match="needs a CUDA device"):
        sage_attention(encoded)
    Library(monkeypatch, encoded, _qattn_sm90="qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf")
    assert sageattention.find_kernel(SM90) is not None
    with pytest.raises(UnsupportedError, match=r"no kernel for layout sage2_sm89_sm120.*_qattn_sm89 has no"):
        sageattention.find_kernel(SM89_SM120)


def test_a_library_that_fails_while_it_is_imported_is_named(monkeypatch, tmp_path):
    for number, (source, text) in enumerate(
        [
            ("raise OSError('libcudart.so.12: cannot open')", "fails while it is imported: OSError: libcudart"),
            ("import a_module_that_is_not_there", "can't be imported: No module named 'a_module_that_is_not_there'"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "sageattention.py").write_text(source, encoding="utf-8")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder))
            patch.delitem(sys.modules, "sageattention", raising=False)
            with pytest.raises(UnsupportedError, match=text):
                sageattention.find_kernel(SM90)
