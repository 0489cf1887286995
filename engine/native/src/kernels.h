// The forward pass, written once over a vector type and compiled once per instruction set.
//
// Included by isa_*.cpp inside a namespace of their own, after they have defined
//   struct Isa    vector type F of kLanes floats, its arithmetic, and the integer dot products.
// Every row of a batch goes through the same operations in the same order whatever else is in the batch: rows are only
// grouped to share loads. No sum is ever split by thread, batch or page, so a row's bits depend on the row alone.

constexpr int L = Isa::kLanes;
using F = Isa::F;

// ---- products: R rows of activations times one strand of a weight tile, for one format

struct Rows {
    const float* values;  // see Activations
    const int8_t* quants;
    const float* scales;
    const float* sums;
    int cols;

    // The following two are for the first row of a strip.
    const int8_t* quants_of(int row) const { return quants + static_cast<size_t>(row) * cols; }
    size_t scale_at(int row) const { return static_cast<size_t>(row) * (cols / kGroup); }
};

inline Rows rows_of(const Activations& a) {
    return {a.values.data(), a.quants.data(), a.scales.data(), a.sums.data(), a.cols};
}

// What a pass over a strand fetches for later: `lines` cache lines a group, of the tile that this thread likely takes
// next. Memory is then busy while the arithmetic of this tile goes on.
struct Ahead {
    const uint8_t* from;
    int lines;

    void fetch(int group) const {
        const uint8_t* p = from + static_cast<size_t>(group) * lines * 64;
        for (int i = 0; i < lines; ++i) Isa::prefetch(p + 64 * i);
    }
};

// Isa::dot_bf16, where there is one.
template <class Set>
inline F dot_bf16(F sum, const uint8_t* weights, const uint16_t* x) {
    if constexpr (Set::kDotsBf16) return Set::dot_bf16(sum, weights, x);
    return sum;
}

template <int R>
[[gnu::noinline]] void product_bf16(const uint8_t* p, Rows x, int row, float* out, int stride, Ahead ahead) {
    const size_t cols = x.cols;
    const float* values = x.values + row * cols;
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(x.values) + row * cols;
    F sum[R][2];
DSPARK_UNROLL(8)
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = Isa::zero();
    for (int g = 0; g < x.cols / kGroup; ++g) {
        ahead.fetch(g);
        for (int k = 0; k < kGroup; k += 2, values += 2, halves += 2, p += 8 * L) {
            if constexpr (Isa::kDotsBf16) {
DSPARK_UNROLL(8)
                for (int r = 0; r < R; ++r) {
                    sum[r][0] = dot_bf16<Isa>(sum[r][0], p, halves + r * cols);
                    sum[r][1] = dot_bf16<Isa>(sum[r][1], p + 4 * L, halves + r * cols);
                }
                continue;
            }
            F even[2], odd[2];
            Isa::load_bf16_pairs(reinterpret_cast<const uint16_t*>(p), even[0], odd[0]);
            Isa::load_bf16_pairs(reinterpret_cast<const uint16_t*>(p + 4 * L), even[1], odd[1]);
DSPARK_UNROLL(8)
            for (int r = 0; r < R; ++r) {
                const F a = Isa::broadcast(values + r * cols);
                sum[r][0] = Isa::fma(even[0], a, sum[r][0]);
                sum[r][1] = Isa::fma(even[1], a, sum[r][1]);
            }
DSPARK_UNROLL(8)
            for (int r = 0; r < R; ++r) {
                const F b = Isa::broadcast(values + r * cols + 1);
                sum[r][0] = Isa::fma(odd[0], b, sum[r][0]);
                sum[r][1] = Isa::fma(odd[1], b, sum[r][1]);
            }
        }
    }
DSPARK_UNROLL(8)
    for (int r = 0; r < R; ++r) {
        Isa::store(out + static_cast<size_t>(r) * stride, sum[r][0]);
        Isa::store(out + static_cast<size_t>(r) * stride + L, sum[r][1]);
    }
}

template <int R, bool Minimum>
[[gnu::noinline]] void product_q4(const uint8_t* p, Rows x, int row, float* out, int stride, Ahead ahead) {
    F sum[R];
DSPARK_UNROLL(8)
    for (int r = 0; r < R; ++r) sum[r] = Isa::zero();
    const int8_t* q = x.quants_of(row);
    const float *scale = x.scales + x.scale_at(row), *total = x.sums + x.scale_at(row);
    for (int g = 0; g < x.cols / kGroup; ++g, q += kStrip * kGroup, scale += kStrip, total += kStrip) {
        ahead.fetch(g);
        typename Isa::Q4 dot[R];
DSPARK_UNROLL(8)
        for (int r = 0; r < R; ++r) dot[r] = Isa::q4_zero();
DSPARK_UNROLL(4)
        for (int quad = 0; quad < 4; ++quad, p += 4 * L) {
            typename Isa::I low, high;
            Isa::load_nibbles(p, low, high);
DSPARK_UNROLL(8)
            for (int r = 0; r < R; ++r) {
                dot[r] = Isa::q4_dot(dot[r], low, q + r * kGroup + quad * 4);
                dot[r] = Isa::q4_dot(dot[r], high, q + r * kGroup + quad * 4 + 16);
            }
        }
        const auto* halves = reinterpret_cast<const uint16_t*>(p);
        const F d = Isa::load_half(halves);
        const F m = Minimum ? Isa::load_half(halves + L) : Isa::mul(d, Isa::set(-8.0f));
        p += Minimum ? 4 * L : 2 * L;
DSPARK_UNROLL(8)
        for (int r = 0; r < R; ++r) {
            sum[r] = Isa::fma(Isa::q4_total(dot[r]), Isa::mul(d, Isa::broadcast(scale + r)), sum[r]);
            sum[r] = Isa::fma(m, Isa::broadcast(total + r), sum[r]);
        }
    }
DSPARK_UNROLL(8)
    for (int r = 0; r < R; ++r) Isa::store(out + static_cast<size_t>(r) * stride, sum[r]);
}

template <int R>
[[gnu::noinline]] void product_q8(const uint8_t* p, Rows x, int row, float* out, int stride, Ahead ahead) {
    F sum[R];
DSPARK_UNROLL(8)
    for (int r = 0; r < R; ++r) sum[r] = Isa::zero();
    const int8_t* q = x.quants_of(row);
    const float* scale = x.scales + x.scale_at(row);
    for (int g = 0; g < x.cols / kGroup; ++g, q += kStrip * kGroup, scale += kStrip) {
        ahead.fetch(g);
        typename Isa::I dot[R];
DSPARK_UNROLL(8)
        for (int r = 0; r < R; ++r) dot[r] = Isa::int_zero();
DSPARK_UNROLL(8)
        for (int quad = 0; quad < 8; ++quad, p += 4 * L) {
            const typename Isa::Q8 weights = Isa::load_q8(p);
DSPARK_UNROLL(8)
            for (int r = 0; r < R; ++r) dot[r] = Isa::q8_dot(dot[r], weights, q + r * kGroup + quad * 4);
        }
        const F d = Isa::load_half(reinterpret_cast<const uint16_t*>(p));
        p += 2 * L;
DSPARK_UNROLL(8)
        for (int r = 0; r < R; ++r)
            sum[r] = Isa::fma(Isa::to_float(dot[r]), Isa::mul(d, Isa::broadcast(scale + r)), sum[r]);
    }
DSPARK_UNROLL(8)
    for (int r = 0; r < R; ++r) Isa::store(out + static_cast<size_t>(r) * stride, sum[r]);
}

template <int R>
inline void product_pass(Format format, const uint8_t* strand, Rows x, int row, float* out, int stride, Ahead ahead) {
    switch (format) {
        case Format::kBf16: return product_bf16<R>(strand, x, row, out, stride, ahead);
        case Format::kQ4_0: return product_q4<R, false>(strand, x, row, out, stride, ahead);
        case Format::kQ4_1: return product_q4<R, true>(strand, x, row, out, stride, ahead);
        case Format::kQ8_0: return product_q8<R>(strand, x, row, out, stride, ahead);
    }
}

// out[r][0 .. 32) for all rows. A strand's weights stay in the nearest cache while all rows pass over them.
inline void product_tile(Format format, const uint8_t* tile, Rows x, int rows, float* out, int stride, const uint8_t* next) {
    const int width = quantised(format) ? L : 2 * L, strands = kTile / width, groups = x.cols / kGroup;
    const size_t tile_bytes = groups * group_bytes(format), strand_bytes = tile_bytes / strands;
    const int passes = strands * ((rows + kStrip - 1) / kStrip);
    const int per_pass = passes * groups * 64;  // bytes, at a line a group
    Ahead ahead{next, static_cast<int>((tile_bytes + per_pass - 1) / per_pass)};
    for (int strand = 0; strand < strands; ++strand, tile += strand_bytes, out += width)
        for (int r = 0; r < rows; r += kStrip) {
            float* to = out + static_cast<size_t>(r) * stride;
            switch (std::min(rows - r, kStrip)) {
                case 4: product_pass<4>(format, tile, x, r, to, stride, ahead); break;
                case 3: product_pass<3>(format, tile, x, r, to, stride, ahead); break;
                case 2: product_pass<2>(format, tile, x, r, to, stride, ahead); break;
                case 1: product_pass<1>(format, tile, x, r, to, stride, ahead); break;
            }
            ahead.from += static_cast<size_t>(groups) * ahead.lines * 64;
        }
}

// out[r][0 .. count * 32) for `count` tiles from `tile` on and all rows, bias added; meanwhile the memory `next` bytes
// behind is fetched. Not inlined: it is big, and called from several phases.
[[gnu::noinline]] inline void product(const Matrix& w, int tile, int count, Rows x, int rows, float* out, int stride,
                                      size_t next) {
    for (int t = tile; t < tile + count; ++t, out += kTile) {
        product_tile(w.format, w.tile(t), x, rows, out, stride, w.tile(t) + next);
        if (w.bias.empty()) continue;
        const float* bias = w.bias.data() + static_cast<size_t>(t) * kTile;
        for (int r = 0; r < rows; ++r)
            for (int i = 0; i < kTile; i += L) {
                float* p = out + static_cast<size_t>(r) * stride + i;
                Isa::store(p, Isa::add(Isa::load(p), Isa::load(bias + i)));
            }
    }
}

// ---- rows

// Hand `count` columns of a row, from `column` on, to the next product, in the form that its weights need: as they are,
// or quantised in groups of 32: q = round(x / s), s = max|x| / 127.
inline void hand_over_part(const float* x, int count, int row, int column, Format format, Activations& out) {
    if (Isa::kDotsBf16 && !quantised(format)) {
        uint16_t* halves = reinterpret_cast<uint16_t*>(out.values.data()) + static_cast<size_t>(row) * out.cols + column;
        for (int i = 0; i < count; ++i) halves[i] = float_to_bf16(x[i]);
        return;
    }
    if (!quantised(format)) {
        std::memcpy(out.values.data() + static_cast<size_t>(row) * out.cols + column, x, sizeof(float) * count);
        return;
    }
    const size_t groups = out.cols / kGroup;
    for (int i = 0; i < count; i += kGroup) {
        const size_t at = (row / kStrip * groups + (column + i) / kGroup) * kStrip + row % kStrip;
        F top = Isa::zero(), poison = Isa::zero();
        for (int j = i; j < i + kGroup; j += L) {
            const F v = Isa::load(x + j);
            top = Isa::max(top, Isa::abs(v));
            poison = Isa::fma(v, Isa::zero(), poison);
        }
        const float most = Isa::reduce_max(top);
        const float scale = most / 127.0f + Isa::reduce_add(poison);
        if (std::isnan(scale)) {  // no integer stands for what is not finite, and it must not be lost
            std::memset(out.quants.data() + at * kGroup, 0, kGroup);
            out.scales[at] = out.sums[at] = scale;
            continue;
        }
        const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
        const int total = Isa::quantise_group(x + i, inverse, out.quants.data() + at * kGroup);
        out.scales[at] = scale;
        out.sums[at] = scale * static_cast<float>(total);
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

// e^x within 2 ulp or so for x <= 0; below -87 it is as good as 0. NaN stays NaN: of the two, max returns the second.
inline F exponential(F x) {
    x = Isa::max(Isa::set(-87.0f), x);
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
