// The forward pass, written once over a vector type and compiled once per instruction set.
//
// Included by isa_*.cpp inside a namespace of their own, after they have defined
//   struct Isa    vector type F of kLanes floats, its arithmetic, and the integer dot products.
// Every row of a batch goes through the same operations in the same order whatever else is in the batch: rows are only
// grouped to share loads. No sum is ever split by thread, batch or page, so a row's bits depend on the row alone.

constexpr int L = Isa::kLanes;
using F = Isa::F;

// ---- products: R rows of activations times N blocks of L weight rows, for one format

struct Rows {
    const float* values;   // [.][cols]
    const int8_t* quants;  // [.][cols]
    const float* scales;   // [.][groups]
    const float* sums;     // [.][groups]
    int cols;

    Rows from(int row) const {
        const size_t groups = cols / kGroup;
        return {values + static_cast<size_t>(row) * cols, quants + static_cast<size_t>(row) * cols,
                scales + row * groups, sums + row * groups, cols};
    }
};

inline Rows rows_of(const Activations& a) {
    return {a.values.data(), a.quants.data(), a.scales.data(), a.sums.data(), a.cols};
}

template <int R, int N>
[[gnu::noinline]] void product_bf16(const Matrix& w, int block, Rows x, float* out, int stride) {
    const int cols = w.cols;
    const size_t block_size = static_cast<size_t>(cols) * L;  // in bf16
    const auto* base = reinterpret_cast<const uint16_t*>(w.weights.data()) + block * block_size;
    F sum[R][N];
DSPARK_UNROLL(8)
    for (int r = 0; r < R; ++r)
DSPARK_UNROLL(8)
        for (int n = 0; n < N; ++n) sum[r][n] = Isa::zero();
    for (int k = 0; k < cols; k += 2) {
        F even[N], odd[N];
DSPARK_UNROLL(8)
        for (int n = 0; n < N; ++n) {
            const uint16_t* p = base + n * block_size + static_cast<size_t>(k) * L;
            Isa::load_bf16_pairs(p, even[n], odd[n]);
            if (R == 1) Isa::prefetch(p + 512);
        }
DSPARK_UNROLL(8)
        for (int r = 0; r < R; ++r) {
            const F a = Isa::broadcast(x.values + static_cast<size_t>(r) * cols + k);
            const F b = Isa::broadcast(x.values + static_cast<size_t>(r) * cols + k + 1);
DSPARK_UNROLL(8)
            for (int n = 0; n < N; ++n) sum[r][n] = Isa::fma(odd[n], b, Isa::fma(even[n], a, sum[r][n]));
        }
    }
DSPARK_UNROLL(8)
    for (int r = 0; r < R; ++r)
DSPARK_UNROLL(8)
        for (int n = 0; n < N; ++n) Isa::store(out + static_cast<size_t>(r) * stride + n * L, sum[r][n]);
}

template <int R, int N, bool Minimum>
[[gnu::noinline]] void product_q4(const Matrix& w, int block, Rows x, float* out, int stride) {
    const int groups = w.groups();
    F sum[R][N];
DSPARK_UNROLL(8)
    for (int r = 0; r < R; ++r)
DSPARK_UNROLL(8)
        for (int n = 0; n < N; ++n) sum[r][n] = Isa::zero();
    for (int g = 0; g < groups; ++g) {
DSPARK_UNROLL(8)
        for (int n = 0; n < N; ++n) {
            const size_t at = static_cast<size_t>(block + n) * groups + g;
            const uint8_t* p = w.weights.data() + at * 16 * L;
            if (R == 1) Isa::prefetch(p + 1024);
            typename Isa::Q4 dot[R];
DSPARK_UNROLL(8)
            for (int r = 0; r < R; ++r) dot[r] = Isa::q4_zero();
DSPARK_UNROLL(4)
            for (int quad = 0; quad < 4; ++quad) {
                typename Isa::I low, high;
                Isa::load_nibbles(p + static_cast<size_t>(quad) * 4 * L, low, high);
DSPARK_UNROLL(8)
                for (int r = 0; r < R; ++r) {
                    const int8_t* q = x.quants + static_cast<size_t>(r) * w.cols + g * kGroup + quad * 4;
                    dot[r] = Isa::q4_dot(dot[r], low, q);
                    dot[r] = Isa::q4_dot(dot[r], high, q + 16);
                }
            }
            const F d = Isa::load_half(w.scales.data() + at * L);
            const F m = Minimum ? Isa::load_half(w.minima.data() + at * L) : Isa::mul(d, Isa::set(-8.0f));
DSPARK_UNROLL(8)
            for (int r = 0; r < R; ++r) {
                const size_t s = static_cast<size_t>(r) * groups + g;
                const F scaled = Isa::mul(d, Isa::broadcast(x.scales + s));
                sum[r][n] = Isa::fma(Isa::q4_total(dot[r]), scaled, sum[r][n]);
                sum[r][n] = Isa::fma(m, Isa::broadcast(x.sums + s), sum[r][n]);
            }
        }
    }
DSPARK_UNROLL(8)
    for (int r = 0; r < R; ++r)
DSPARK_UNROLL(8)
        for (int n = 0; n < N; ++n) Isa::store(out + static_cast<size_t>(r) * stride + n * L, sum[r][n]);
}

template <int R, int N>
[[gnu::noinline]] void product_q8(const Matrix& w, int block, Rows x, float* out, int stride) {
    const int groups = w.groups();
    F sum[R][N];
DSPARK_UNROLL(8)
    for (int r = 0; r < R; ++r)
DSPARK_UNROLL(8)
        for (int n = 0; n < N; ++n) sum[r][n] = Isa::zero();
    for (int g = 0; g < groups; ++g) {
DSPARK_UNROLL(8)
        for (int n = 0; n < N; ++n) {
            const size_t at = static_cast<size_t>(block + n) * groups + g;
            const uint8_t* p = w.weights.data() + at * 32 * L;
            if (R == 1) Isa::prefetch(p + 2048);
            typename Isa::I dot[R];
DSPARK_UNROLL(8)
            for (int r = 0; r < R; ++r) dot[r] = Isa::int_zero();
DSPARK_UNROLL(8)
            for (int quad = 0; quad < 8; ++quad) {
                const typename Isa::Q8 weights = Isa::load_q8(p + static_cast<size_t>(quad) * 4 * L);
DSPARK_UNROLL(8)
                for (int r = 0; r < R; ++r) {
                    const int8_t* q = x.quants + static_cast<size_t>(r) * w.cols + g * kGroup + quad * 4;
                    dot[r] = Isa::q8_dot(dot[r], weights, q);
                }
            }
            const F d = Isa::load_half(w.scales.data() + at * L);
DSPARK_UNROLL(8)
            for (int r = 0; r < R; ++r) {
                const F scaled = Isa::mul(d, Isa::broadcast(x.scales + static_cast<size_t>(r) * groups + g));
                sum[r][n] = Isa::fma(Isa::to_float(dot[r]), scaled, sum[r][n]);
            }
        }
    }
DSPARK_UNROLL(8)
    for (int r = 0; r < R; ++r)
DSPARK_UNROLL(8)
        for (int n = 0; n < N; ++n) Isa::store(out + static_cast<size_t>(r) * stride + n * L, sum[r][n]);
}

template <int R, int N>
inline void product_tile(const Matrix& w, int block, Rows x, float* out, int stride) {
    switch (w.format) {
        case Format::kBf16: return product_bf16<R, N>(w, block, x, out, stride);
        case Format::kQ4_0: return product_q4<R, N, false>(w, block, x, out, stride);
        case Format::kQ4_1: return product_q4<R, N, true>(w, block, x, out, stride);
        case Format::kQ8_0: return product_q8<R, N>(w, block, x, out, stride);
    }
}

// `count` blocks from `block` on, for R rows: N blocks at a time, as many as keep the accumulators in registers.
template <int R>
inline void product_rows(const Matrix& w, int block, int count, Rows x, float* out, int stride) {
    constexpr int kMany = R == 1 ? 4 : 2;                               // bf16: R * N sums and little else
    constexpr int kFew = Isa::kRegisters >= 32 ? kMany : R == 1 ? 4 : R == 2 ? 2 : 1;  // quantised: dots as well
    int b = 0;
    if (quantised(w.format))
        for (; b + kFew <= count; b += kFew) product_tile<R, kFew>(w, block + b, x, out + b * L, stride);
    else
        for (; b + kMany <= count; b += kMany) product_tile<R, kMany>(w, block + b, x, out + b * L, stride);
    for (; b < count; ++b) product_tile<R, 1>(w, block + b, x, out + b * L, stride);
}

// out[r][0 .. count * L) for all rows, bias added. Not inlined: it is big, and called from several phases.
[[gnu::noinline]] inline void product(const Matrix& w, int block, int count, Rows x, int rows, float* out, int stride) {
    int r = 0;
    for (; r + 4 <= rows; r += 4)
        product_rows<4>(w, block, count, x.from(r), out + static_cast<size_t>(r) * stride, stride);
    switch (rows - r) {
        case 3: product_rows<3>(w, block, count, x.from(r), out + static_cast<size_t>(r) * stride, stride); break;
        case 2: product_rows<2>(w, block, count, x.from(r), out + static_cast<size_t>(r) * stride, stride); break;
        case 1: product_rows<1>(w, block, count, x.from(r), out + static_cast<size_t>(r) * stride, stride); break;
        default: break;
    }
    if (w.bias.size() == 0) return;
    const float* bias = w.bias.data() + static_cast<size_t>(block) * L;
    for (r = 0; r < rows; ++r)
        for (int i = 0; i < count * L; i += L) {
            float* p = out + static_cast<size_t>(r) * stride + i;
            Isa::store(p, Isa::add(Isa::load(p), Isa::load(bias + i)));
        }
}

// ---- rows

// Quantise [cols] floats in groups of 32: q = round(x / s), s = max|x| / 127.
inline void quantise(const float* x, int cols, int8_t* quants, float* scales, float* sums) {
    for (int g = 0; g < cols / kGroup; ++g) {
        const float* p = x + g * kGroup;
        F top = Isa::zero();
        for (int i = 0; i < kGroup; i += L) top = Isa::max(top, Isa::abs(Isa::load(p + i)));
        const float most = Isa::reduce_max(top);
        const float scale = most / 127.0f;
        const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
        const int total = Isa::quantise_group(p, inverse, quants + g * kGroup);
        scales[g] = scale;
        sums[g] = scale * static_cast<float>(total);
    }
}

// Hand `count` columns of a row, from `column` on, to the next product, in the form that its weights need.
inline void hand_over_part(const float* x, int count, int row, int column, Format format, Activations& out) {
    const size_t at = static_cast<size_t>(row) * out.cols + column;
    if (quantised(format)) {
        quantise(x, count, out.quants.data() + at, out.scales.data() + at / kGroup, out.sums.data() + at / kGroup);
    } else {
        std::memcpy(out.values.data() + at, x, sizeof(float) * count);
    }
}

inline void hand_over(const float* x, int cols, int row, Format format, Activations& out) {
    hand_over_part(x, cols, row, 0, format, out);
}

inline void rms_norm(const float* x, const float* weight, int size, float eps, float* out) {
    F squares = Isa::zero();
    for (int i = 0; i < size; i += L) squares = Isa::fma(Isa::load(x + i), Isa::load(x + i), squares);
    const F scale = Isa::set(1.0f / std::sqrt(Isa::reduce_add(squares) / static_cast<float>(size) + eps));
    for (int i = 0; i < size; i += L)
        Isa::store(out + i, Isa::mul(Isa::mul(Isa::load(x + i), scale), Isa::load(weight + i)));
}

// Rotary embedding in place, dimension i paired with i + half.
inline void rotate(float* x, const float* cosines, int half) {
    const float* sines = cosines + half;
    for (int i = 0; i < half; i += L) {
        const F a = Isa::load(x + i), b = Isa::load(x + half + i), c = Isa::load(cosines + i), s = Isa::load(sines + i);
        Isa::store(x + i, Isa::sub(Isa::mul(a, c), Isa::mul(b, s)));
        Isa::store(x + half + i, Isa::add(Isa::mul(b, c), Isa::mul(a, s)));
    }
}

// e^x within 2 ulp or so for x <= 0; below -87 it is as good as 0.
inline F exponential(F x) {
    x = Isa::max(x, Isa::set(-87.0f));
    const F n = Isa::round(Isa::mul(x, Isa::set(1.44269504088896341f)));
    F f = Isa::fma(n, Isa::set(-0.693359375f), x);
    f = Isa::fma(n, Isa::set(2.12194440e-4f), f);
    F p = Isa::set(1.9875691500e-4f);
    p = Isa::fma(p, f, Isa::set(1.3981999507e-3f));
    p = Isa::fma(p, f, Isa::set(8.3334519073e-3f));
    p = Isa::fma(p, f, Isa::set(4.1665795894e-2f));
    p = Isa::fma(p, f, Isa::set(1.6666665459e-1f));
    p = Isa::fma(p, f, Isa::set(5.0000001201e-1f));
    p = Isa::fma(p, Isa::mul(f, f), Isa::add(f, Isa::set(1.0f)));
    return Isa::scale_by_power(p, n);
}

// gate * sigmoid(gate) * up, in place of gate. exp is only taken of numbers <= 0.
inline void silu_times(float* gate, const float* up, int size) {
    for (int i = 0; i < size; i += L) {
        const F g = Isa::load(gate + i), one = Isa::set(1.0f);
        const F e = exponential(Isa::sub(Isa::zero(), Isa::abs(g)));
        const F numerator = Isa::select_negative(g, e, one);  // sigmoid(g) = e/(1+e) below zero, 1/(1+e) above
        const F sigmoid = Isa::div(numerator, Isa::add(one, e));
        Isa::store(gate + i, Isa::mul(Isa::mul(g, sigmoid), Isa::load(up + i)));
    }
}
