"""The native executor: right up to its rounding, and the same bits for a row whatever runs beside it."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from drafters.ngram import NgramDrafter
from engine.batch import VerificationBatch
from engine.models.config import ModelConfig
from engine.models.decoder import FusedDecoder
from engine.native import loader
from engine.native.loader import NativeError, supported
from engine.native.weights import Rows, as_bf16
from engine.native_executor import NativeExecutor, runs_natively
from engine.torch_executor import TorchExecutor
from tests.engine.harness import VOCAB, Engine, hf_model
from tests.engine.invariance import check_random_batches
from tests.engine.test_forward import item

pytestmark = pytest.mark.skipif(not supported(), reason="the kernels were not built")

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
FAMILIES = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {},
}
BLOCK = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


def tiny(name: str):
    """(config, tensors rounded to bf16) of a tiny random model that the kernels run."""
    model = hf_model(name.partition("-")[0], initializer_range=0.15, **SHAPE, **FAMILIES[name])
    config = ModelConfig.from_dict(model.config.to_dict())
    assert runs_natively(config) is None
    tensors = {
        key: value.to(torch.bfloat16).float() if value.ndim > 1 else value
        for key, value in model.state_dict().items()
    }
    return config, tensors


def executor(name: str, kernels: str | None = None, threads: int = 2) -> NativeExecutor:
    config, tensors = tiny(name)
    return NativeExecutor(config, as_bf16(tensors.items()), 40, threads, 512, kernels)


def random_blocks(kind: str, count: int, cols: int, rng: np.random.Generator):
    """Random rows in GGUF's form, and their values."""
    import gguf

    blocks = rng.integers(0, 256, (count, cols // 32, BLOCK[kind]), dtype=np.uint8)
    halves = 2 if kind == "Q4_1" else 1
    scales = rng.uniform(-0.1, 0.1, (count, cols // 32, halves)).astype(np.float16)
    blocks[:, :, : 2 * halves] = scales.view(np.uint8).reshape(count, cols // 32, 2 * halves)
    rows = blocks.reshape(count, -1)
    return rows, gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])


def test_no_kernels_that_this_machine_has_fail_their_own_check():
    """They would be left out without a word, and these tests would try the others only."""
    cpu = Path("/proc/cpuinfo")
    flags = set(cpu.read_text().split()) if cpu.exists() else set()
    needed = {
        "avx2": {"avx2", "fma"},
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
    }
    needed["avx512bf16"] = needed["avx512"] | {"avx512_bf16"}
    present = {name for name, wanted in needed.items() if wanted <= flags}
    assert set(supported()) == present | {"portable"}


@pytest.mark.parametrize("kernels", supported())
@pytest.mark.parametrize("kind", ["BF16", "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
def test_products_equal_the_dequantised_product(kernels, kind, rows):
    rng = np.random.default_rng(3)
    count, cols = 75, 96
    native = executor("llama", kernels)
    if kind == "BF16":
        values = torch.randn(count, cols).to(torch.bfloat16)
        data, values = values.view(torch.int16).numpy().view(np.uint8), values.float().numpy()
    else:
        data, values = random_blocks(kind, count, cols, rng)
    bias = rng.normal(size=count).astype(np.float32)
    code = {"BF16": 0, "Q4_0": 1, "Q4_1": 2, "Q8_0": 3}[kind]
    data = np.ascontiguousarray(data)
    status = native.model.lib.dspark_set_matrix(
        native.model.handle, 0, 3, code, data.ctypes.data, count, cols, bias.ctypes.data
    )
    assert status == 0
    x = rng.normal(size=(rows, cols)).astype(np.float32)
    out = np.empty((rows, count), dtype=np.float32)
    native.model.lib.dspark_product(native.model.handle, 0, 3, x.ctypes.data, rows, out.ctypes.data)
    if kind != "BF16":  # the kernels round activations to 8 bits in groups of 32
        groups = x.reshape(rows, -1, 32)
        scale = np.abs(groups).max(-1, keepdims=True) / 127
        x = (np.rint(groups / scale) * scale).reshape(rows, cols).astype(np.float32)
    elif kernels == "avx512bf16":  # these round them to bf16, as they take them in pairs
        x = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    wanted = x.astype(np.float64) @ values.astype(np.float64).T + bias
    assert np.abs(out - wanted).max() < 2e-4 * max(1.0, np.abs(wanted).max())


@pytest.mark.parametrize("kernels", supported())
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_features_equal_the_torch_executors(name, kernels):
    config, tensors = tiny(name)
    torch_side = TorchExecutor(FusedDecoder(config, tensors.items(), torch.float32), 40, 16)
    native = NativeExecutor(config, as_bf16(tensors.items()), 40, 2, 512, kernels)
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, VOCAB, size).astype(np.int32) for size in (301, 40))
    pages = rng.permutation(40).astype(np.int32)
    first = VerificationBatch((item(a, 0, 290, pages[:20], sample=False), item(b, 0, 33, pages[20:24])))
    second = VerificationBatch(
        (item(a, 290, 11, pages[:20]), item(b[:34], 33, 7, pages[20:24], draft=b[34:40].tolist()))
    )
    for batch in (first, second):
        wanted, got = torch_side.forward(batch, (0, -1)), native.forward(batch, (0, -1))
        # K and V are kept in bf16, which is the whole difference, unless activations are rounded as well
        near = 0.05 if kernels == "avx512bf16" else 0.03
        assert (got.logits - wanted.logits).abs().max() < near * wanted.logits.abs().max()
        assert (got.features - wanted.features).abs().max() < near * wanted.features.abs().max()


def quantised_weights(config: ModelConfig, tensors: dict[str, torch.Tensor]):
    """The matrices in Q4_1 blocks (embedding and head in Q8_0), as GGUF would hold them."""
    import gguf

    weights = as_bf16(tensors.items())
    for name, value in weights.items():
        if isinstance(value, Rows):
            kind = "Q8_0" if name in ("embed_tokens.weight", "lm_head.weight") else "Q4_1"
            full = tensors.get(f"model.{name}", tensors.get(name)).numpy()
            rows = gguf.quantize(full, gguf.GGMLQuantizationType[kind])
            weights[name] = Rows(kind, np.ascontiguousarray(rows).view(np.uint8), value.cols)
    return weights


@pytest.mark.parametrize("quantised", [False, True], ids=["bf16", "q4_1"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_a_rows_bits_depend_on_nothing_but_its_context(name, quantised):
    """Random batches on two threads and other pages, against each row alone on one thread."""
    config, tensors = tiny(name)
    weights = quantised_weights(config, tensors) if quantised else as_bf16(tensors.items())
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, VOCAB, size).astype(np.int32) for size in (290, 61, 34, 17, 16)]
    alone = NativeExecutor(config, weights, 40, 1, 512)
    for threads in (1, 2, 3):
        check_random_batches(alone, NativeExecutor(config, weights, 60, threads, 512), texts, 150, rng)


def test_texts_are_bit_identical_with_speculation_and_in_a_crowd():
    config, tensors = tiny("llama")
    weights = as_bf16(tensors.items())

    def texts(policy: str, names: range):
        drafter = NgramDrafter(1, 3) if policy != "off" else None
        engine = Engine(
            FusedDecoder(config, tensors.items(), torch.float32),
            drafter,
            policy,
            num_pages=40,
            page_size=16,
            wrap=lambda _: NativeExecutor(config, weights, 40, 2, 512),
        )
        for index in names:
            seed = {} if index % 3 == 0 else {"seed": index}
            temperature = 0.0 if index % 3 == 0 else 1.0
            engine.add(
                str(index),
                [3 + index, 5, 7] * 3,
                max_tokens=60,
                temperature=temperature,
                ignore_eos=True,
                **seed,
            )
        engine.run()
        return engine.texts()

    crowd = texts("fixed:4", range(9))
    assert crowd == texts("off", range(9))
    for index in range(9):
        assert texts("off", range(index, index + 1))[str(index)] == crowd[str(index)]


def test_a_bad_call_is_an_error_and_not_a_crash():
    config, tensors = tiny("llama")
    weights = as_bf16(tensors.items())
    with pytest.raises(NativeError, match="does not run"):
        NativeExecutor(config, weights, 8, 1, 64, "no-such-kernels")
    del weights["layers.1.mlp.up_proj.weight"]
    with pytest.raises(NativeError, match="up_proj"):
        NativeExecutor(config, weights, 8, 1, 64)
    native = executor("llama")
    with pytest.raises(NativeError, match="rotary"):
        native.forward(VerificationBatch((item(np.zeros(600), 599, 1, np.arange(40)),)))


def test_weights_are_bf16_where_there_are_no_blocks_to_take(tmp_path):
    from safetensors.torch import save_file

    from engine.native.weights import load_weights

    save_file({"a.weight": torch.ones(2, 32), "b.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    weights = load_weights(tmp_path, "auto")
    assert weights["a.weight"].format == "BF16"
    with pytest.raises(FileNotFoundError):
        load_weights(tmp_path, "gguf")


def test_without_the_library_models_do_not_run_natively(monkeypatch):
    config, _ = tiny("llama")
    monkeypatch.setattr(loader, "native_library", lambda: None)
    assert "not built" in str(runs_natively(config))


@pytest.mark.parametrize("vocab", [3, 64, 65, 49152])
def test_coupled_argmax_equals_torchs(vocab):
    from engine.draws import _coupled_argmax, coupled_argmax
    from engine.noise import row_keys

    torch.manual_seed(0)
    rows = 60
    p = torch.softmax(torch.randn(rows, vocab) * torch.linspace(0.1, 6, rows)[:, None], -1)
    p[::3] *= (torch.rand(p[::3].shape) < 0.5).float()  # filtered rows
    p[:, 0] += 1e-9
    keys = row_keys(torch.arange(rows), torch.arange(rows), torch.arange(rows))
    assert torch.equal(coupled_argmax(p, keys), _coupled_argmax(p, keys))


@pytest.mark.parametrize("vocab", [2, 5, 300, 49152])
def test_filters_equal_torchs(vocab):
    from engine.params import SamplingParams
    from engine.sampling import _filter, _torch_filter

    rng = np.random.default_rng(vocab)
    torch.manual_seed(vocab)
    for width in (0.0, 0.3, 2.0, 8.0):
        for coarse in (False, True):  # coarse logits make ties
            logits = torch.randn(12, vocab) * width
            logits = logits.round() if coarse else logits
            logits[:, rng.integers(0, vocab, vocab // 3)] = -torch.inf
            logits[:, 0] = 0.0
            params = [
                SamplingParams(
                    top_k=int(rng.choice([0, 1, 3, 50, vocab])),
                    top_p=float(rng.choice([1.0, 0.95, 0.5, 1e-6])),
                    min_p=float(rng.choice([0.0, 0.0, 0.1, 1.0])),
                )
                for _ in range(12)
            ]
            p = torch.softmax(logits, -1)
            ours, wanted = _filter(p.clone(), params), _torch_filter(p.clone(), params)
            assert torch.equal(ours > 0, wanted > 0)
            assert torch.allclose(ours, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("vocab", [1, 7, 8, 300, 49155])
@pytest.mark.parametrize(
    "changes",
    [
        {"presence_penalty": 0.7},
        {"frequency_penalty": -0.3},
        {"presence_penalty": -1.5, "frequency_penalty": 0.1},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7, "presence_penalty": 0.3},
    ],
    ids=str,
)
def test_penalties_equal_torchs(vocab, changes):
    """To the last bit."""
    from engine.native import loader
    from engine.params import SamplingParams
    from engine.sampling import SamplingState

    rng = np.random.default_rng(vocab)
    prompt = rng.integers(0, vocab, 9).tolist()
    state = SamplingState(SamplingParams(**changes), vocab, frozenset(), prompt)
    for token in rng.integers(0, vocab, 40).tolist():
        state.advance(token)
    logits = torch.randn(vocab) * 9
    logits[rng.integers(0, vocab, vocab // 4)] = -torch.inf
    ours, wanted = logits.clone(), logits.clone()
    state.adjust(ours)
    with mock.patch.object(loader, "native_library", return_value=None):
        state.adjust(wanted)
    assert torch.equal(ours, wanted)
    assert not torch.equal(ours, logits)


@pytest.mark.parametrize("vocab", [1, 7, 8, 300, 49155])
def test_only_what_is_allowed_stays(vocab):
    from engine.native import rows as native

    allowed = np.random.default_rng(vocab).random(vocab) < 0.3
    logits = torch.randn(vocab)
    found = logits.clone()
    native.allow(native.kernels_for(found), found, np.packbits(allowed, bitorder="little"))
    assert torch.equal(found, logits.masked_fill(torch.from_numpy(~allowed), -torch.inf))


@pytest.mark.timeout(60)  # it once went on for ever
@pytest.mark.parametrize("vocab", [5, 40000])
@pytest.mark.parametrize(
    "cuts",
    [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}],
    ids=str,
)
def test_a_broken_row_has_no_law_with_any_filter(vocab, cuts):
    """Nothing allowed, or what is not finite: first, last, everywhere."""
    from engine.params import SamplingParams
    from engine.sampling import _torch_filter, probabilities

    params = SamplingParams(temperature=1.0, **cuts)
    for places, value in [
        (slice(None), -torch.inf),
        (slice(None), torch.nan),
        (0, torch.nan),
        (vocab - 1, torch.nan),
        (1, torch.inf),
    ]:
        logits = torch.randn(3, vocab)
        sound = probabilities(logits.clone(), [params] * 3)
        logits[1, places] = value
        law = probabilities(logits.clone(), [params] * 3)
        assert law[1].isnan().all()
        assert torch.equal(law[::2], sound[::2])
        if cuts:
            assert _torch_filter(torch.softmax(logits[1:2], -1), [params]).isnan().all()


def test_softmax_equals_torchs():
    from engine.native import rows as native

    torch.manual_seed(0)
    for vocab in (1, 5, 300, 49155):
        logits = torch.randn(7, vocab) * torch.tensor([0.0, 0.1, 1, 3, 10, 40, 1])[:, None]
        logits[6, : vocab // 2] = -torch.inf
        chosen, heat = [6, 2, 4, 0, 5], [1.0, 0.01, 0.7, 2.0, 1.3]
        found = native.softmax(native.kernels_for(logits), logits, chosen, heat)
        wanted = torch.softmax(logits[chosen].double() / torch.tensor(heat)[:, None], -1)
        assert (found - wanted).abs().max() < 1e-6
        assert torch.allclose(found.double(), wanted, rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize("vocab", [2, 255, 256, 600, 49155])
def test_decisions_equal_torchs(vocab):
    """Every kind, with and without filters; after rejections that leave nothing; and rows that are broken."""
    from engine.decision import Choice, _decide, decide
    from engine.params import SamplingParams

    rng = np.random.default_rng(vocab)
    torch.manual_seed(vocab)
    logits = torch.randn(8, vocab) * 3
    logits[6, rng.integers(vocab)], logits[7, rng.integers(vocab)] = torch.nan, torch.inf
    few = torch.randperm(vocab)[: max(1, vocab // 3)]
    laws = [
        (None, None),
        (torch.softmax(torch.randn(vocab) * 3, -1), None),
        (torch.softmax(logits[0], -1), None),
        (torch.softmax(torch.randn(len(few)) * 3, -1), few),  # of a reduced vocabulary
    ]
    filters = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}]
    differ = total = lengths = 0
    for _ in range(40):
        runs = []
        for _ in range(5):
            temperature = float(rng.choice([0.0, 0.3, 1.0]))
            seed = {"seed": 1} if rng.random() < 0.3 else {}
            params = SamplingParams(temperature=temperature, **seed, **filters[rng.integers(5)])
            run = []
            for _ in range(rng.integers(1, 4)):
                choice = Choice(int(rng.integers(8)), params, key=tuple(rng.integers(2**32, size=2).tolist()))
                choice.accept_u, choice.final_u = rng.random(2).tolist()
                if rng.random() < 0.8:
                    likely = rng.random() < 0.7 and choice.row < 6
                    choice.draft = int(logits[choice.row].argmax()) if likely else int(rng.integers(vocab))
                    if not seed and temperature:
                        choice.law, choice.d2t = laws[rng.integers(4)]
                run.append(choice)
            runs.append(run)
        for run, ours, wanted in zip(runs, decide(logits, runs), _decide(logits, runs), strict=True):
            lengths += len(wanted)
            total += 1
            if ours != wanted:
                differ += 1
                continue
            assert [decision is None for decision in ours] == [c.row >= 6 for c in run[: len(ours)]]
            goes_on = [decision is not None and decision.accepted for decision in ours]
            assert all(goes_on[:-1])
            assert not goes_on[-1] or len(ours) == len(run)
    assert lengths > 1.2 * total
    assert differ <= 2  # a number within rounding of an edge


def test_a_rejection_that_leaves_nothing_draws_from_p():
    from engine.decision import Choice, decide
    from engine.params import SamplingParams

    logits = torch.randn(1, 300)
    p = torch.softmax(logits[0], -1)
    draft = int(p.argmin())
    choice = Choice(0, SamplingParams(), draft, p * 4.0, accept_u=0.99, final_u=0.5)
    ((decision,),) = decide(logits, [[choice]])
    assert not decision.accepted
    assert p.cumsum(0)[decision.token] >= 0.5 - 1e-6 > p.cumsum(0)[decision.token] - p[decision.token] - 2e-6


@pytest.mark.parametrize("vocab", [1, 4, 256, 512, 2048])
def test_draws_invert_the_cumulative_sum_at_every_edge(vocab):
    """Equal chances that are powers of two, so that u = k / V hits every edge exactly."""
    from engine.decision import Choice, decide
    from engine.params import SamplingParams

    edges = [k / vocab for k in range(vocab)]
    below = [float(np.nextafter(edge, 0.0)) for edge in edges[1:]] + [1.0 - 2.0**-53]
    for numbers in (edges, below):
        choices = [Choice(0, SamplingParams(), final_u=u) for u in numbers]
        found = [run[0].token for run in decide(torch.zeros(1, vocab), [[choice] for choice in choices])]
        assert found == list(range(vocab))
