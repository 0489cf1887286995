// Passes over a row of the vocabulary of any size. Included by isa_*.cpp behind kernels.h.

// A vector from the end of a row, filled up with `fill`.
inline F load_rest(const float* x, int count, float fill) {
    float rest[kMaxLanes];
    std::fill(rest, rest + L, fill);
    std::copy(x, x + count, rest);
    return Isa::load(rest);
}

// The largest value; NaN if there is one.
inline float row_max(const float* x, int size) {
    F most = Isa::set(-INFINITY), poison = Isa::zero();
    int i = 0;
    for (; i + L <= size; i += L) {
        const F v = Isa::load(x + i);
        most = Isa::max(most, v);
        poison = Isa::fma(v, Isa::zero(), poison);  // NaN from a NaN, and from an infinity as well
    }
    if (i < size) {
        const F v = load_rest(x + i, size - i, x[size - 1]);
        most = Isa::max(most, v);
        poison = Isa::fma(v, Isa::zero(), poison);
    }
    if (Isa::reduce_add(poison) == 0.0f) return Isa::reduce_max(most);
    float top = -INFINITY;  // some are infinite or NaN: look closely
    for (i = 0; i < size; ++i) {
        if (std::isnan(x[i])) return x[i];
        top = std::max(top, x[i]);
    }
    return top;
}

// out = exp((x - top) / temperature); what lies below e^-87 is 0.
inline void exponentials(const float* x, int size, float top, float temperature, float* out) {
    const F subtract = Isa::set(top), by = Isa::set(temperature), floor = Isa::set(-87.0f);
    const auto one = [&](F value) {
        const F y = Isa::div(Isa::sub(value, subtract), by);
        return Isa::select_negative(Isa::sub(y, floor), Isa::zero(), exponential(y));
    };
    int i = 0;
    for (; i + L <= size; i += L) Isa::store(out + i, one(Isa::load(x + i)));
    if (i == size) return;
    float rest[kMaxLanes];
    Isa::store(rest, one(load_rest(x + i, size - i, top)));
    std::copy(rest, rest + (size - i), out + i);
}

// The values that are at least `floor`, in order; returns how many. out [size]
inline int at_least(const float* x, int size, float floor, float* out) {
    const F limit = Isa::set(floor);
    int count = 0, i = 0;
    for (; i + L <= size; i += L)
        for (unsigned found = Isa::which_at_least(Isa::load(x + i), limit); found; found &= found - 1)
            out[count++] = x[i + __builtin_ctz(found)];
    for (; i < size; ++i)
        if (x[i] >= floor) out[count++] = x[i];
    return count;
}
