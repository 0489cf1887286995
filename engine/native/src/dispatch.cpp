// Which kernels this machine runs.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "handle.h"

namespace dspark {

namespace {

const Kernels* const kAll[] = {
#if defined(DSPARK_X86)
    &kAvx512Bf16,
    &kAvx512,
    &kAvx2,
#endif
    &kPortable,
};

// Whether a product of every weight format comes out as the portable kernels have it, up to rounding. A processor, or an
// emulator, that claims an instruction set and gets it wrong shall cost speed, not answers.
bool computes_right(const Kernels& kernels) {
    constexpr int kRows = 40, kCols = 64, kCount = 3;
    uint32_t seed = 1;
    const auto random = [&seed] { return (seed = seed * 1664525u + 1013904223u) >> 8; };
    Pool alone(1);
    for (const Format format : {Format::kBf16, Format::kQ4_0, Format::kQ4_1, Format::kQ8_0}) {
        std::vector<uint8_t> rows(kRows * row_bytes(format, kCols));
        for (auto& byte : rows) byte = static_cast<uint8_t>(random());
        const size_t block = row_bytes(format, kGroup);
        for (size_t at = 0; at < rows.size(); at += format == Format::kBf16 ? 2 : block) {
            rows[at + 1] = static_cast<uint8_t>(0x2c | (random() & 3));  // scales and weights of a sensible size
            if (format == Format::kQ4_1) rows[at + 3] = 0x28;
        }
        std::vector<float> x(kCount * kCols), out[2];
        for (auto& value : x) value = static_cast<float>(random() % 2001) / 1000.0f - 1.0f;
        float largest = 0.0f, worst = 0.0f;
        for (const Kernels* each : {&kPortable, &kernels}) {
            Arena arena;
            const size_t stride = kCols / kGroup * group_bytes(format);
            const Matrix matrix = pack(format, rows.data(), kRows, kCols, each->lanes, arena.take(2 * stride), stride);
            out[each != &kPortable].resize(kCount * kRows);
            each->product(alone, matrix, x.data(), kCount, out[each != &kPortable].data());
        }
        for (size_t i = 0; i < out[0].size(); ++i) {
            largest = std::max(largest, std::fabs(out[0][i]));
            worst = std::max(worst, std::fabs(out[0][i] - out[1][i]));
        }
        if (!(worst <= 0.01f * largest)) return false;
    }
    return true;
}

}  // namespace

// Kernels that this machine runs, best first.
const std::vector<const Kernels*>& usable() {
    static const std::vector<const Kernels*> kernels = [] {
        std::vector<const Kernels*> out;
        for (const Kernels* each : kAll)
            if (each->supported() && (each == &kPortable || computes_right(*each))) out.push_back(each);
        return out;
    }();
    return kernels;
}

const Kernels& best_kernels() { return *usable().front(); }

const Kernels& find_kernels(const std::string& name) {
    for (const Kernels* kernels : usable())
        if (name == kernels->name) return *kernels;
    throw std::invalid_argument("this machine does not run the kernels '" + name + "'");
}

}  // namespace dspark
