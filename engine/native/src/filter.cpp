// Min-p, top-k and top-p on rows of fp32, as engine/sampling.py defines them.
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "model.h"
#include "pool.h"
#include "vocabulary.h"

namespace dspark {

namespace {

struct Values {
    const float* data;
    int size;
    const float* begin() const { return data; }
    const float* end() const { return data + size; }
};

// The values of a row that are at least `floor`, in order of their index. Good until the next call.
Values at_least(const float* p, int size, float floor) {
    static thread_local std::vector<float> out;
    if (static_cast<int>(out.size()) < size) out.resize(size);
    return {out.data(), best_kernels().at_least(p, size, floor, out.data())};
}

// Values in descending order, as far as it matters: found through a histogram of their leading bits; only the bins in which a cut falls are
// ever sorted. All values are >= 0, so their bit patterns are ordered as they are.
class Ranking {
  public:
    struct Cut {
        int kept = 0;         // how many of the largest values stay
        float least = 0.0f;   // the smallest of them
        int ties = 0;         // how many values equal to it stay
        double mass = 0.0;
    };

    explicit Ranking(Values values) : values_(values), count_(kBins), mass_(kBins) {
        for (const float value : values) {
            const int bin = bin_of(value);
            ++count_[bin];
            mass_[bin] += value;
        }
    }

    // The n largest (all, if there are fewer).
    Cut by_count(int n) const {
        return walk([n](const Cut& cut, float) { return cut.kept < n; });
    }
    // The fewest whose mass reaches `target`, at least one.
    Cut by_mass(double target) const {
        return walk([target](const Cut& cut, float) { return cut.kept == 0 || cut.mass < target; });
    }
    // All that are at least `floor`.
    Cut by_floor(float floor) const {
        return walk([floor](const Cut&, float value) { return value >= floor; });
    }

  private:
    static constexpr int kBins = 4096;  // sign (always 0), exponent and 4 bits of mantissa

    static int bin_of(float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        return static_cast<int>(bits >> 19) & (kBins - 1);
    }

    static float least_of(int bin) {
        const uint32_t bits = static_cast<uint32_t>(bin) << 19;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }

    // Take values in descending order while `goes_on(so far, next)`; it must not come true again.
    template <class Test>
    Cut walk(Test goes_on) const {
        Cut cut;
        std::vector<float> values;
        for (int bin = kBins - 1; bin >= 0; --bin) {
            if (count_[bin] == 0) continue;
            Cut whole = cut;  // if even the bin's least value would still be taken last, the bin goes as a whole
            whole.kept += count_[bin] - 1;
            whole.mass += mass_[bin];
            if (bin > 0 && goes_on(whole, least_of(bin))) {
                ++whole.kept;
                whole.least = least_of(bin);
                whole.ties = values_.size;  // whatever equals it is in this bin, and stays
                cut = whole;
                continue;
            }
            values.clear();
            for (const float value : values_)
                if (bin_of(value) == bin) values.push_back(value);
            std::sort(values.begin(), values.end(), std::greater<float>());
            for (const float value : values) {
                if (!goes_on(cut, value)) return cut;
                cut.ties = cut.kept > 0 && value == cut.least ? cut.ties + 1 : 1;
                cut.least = value;
                cut.mass += value;
                ++cut.kept;
            }
        }
        return cut;
    }

    const Values values_;
    std::vector<int> count_;
    std::vector<double> mass_;
};

// Min-p, then top-k, then top-p, on the largest values of a row of `size`. False if the cut may lie below them.
bool find_cut(Values values, int size, float top, int top_k, double top_p, double min_p,
              Ranking::Cut& cut) {
    const Ranking ranking(values);
    const int seen = values.size;
    const bool whole = seen == size;
    cut = {};
    cut.kept = size, cut.mass = 1.0, cut.ties = size;  // least is 0: everything stays
    if (min_p > 0.0) {
        cut = ranking.by_floor(static_cast<float>(min_p) * top);
        if (cut.kept == seen && !whole) return false;
    }
    if (top_k > 0 && top_k < cut.kept) {
        if (top_k >= seen && !whole) return false;
        cut = ranking.by_count(top_k);
    }
    if (top_p < 1.0) {
        const Ranking::Cut nucleus = ranking.by_mass(top_p * cut.mass);
        if (nucleus.kept == seen && !whole && nucleus.kept < cut.kept) return false;
        if (nucleus.kept < cut.kept) cut = nucleus;
    }
    return true;
}

DSPARK_CLONES
int drop_below(float* p, int size, float least) {
    int equal = 0;
    for (int i = 0; i < size; ++i) {
        equal += p[i] == least;
        p[i] = p[i] < least ? 0.0f : p[i];
    }
    return equal;
}

}  // namespace

void filter_row(float* p, int size, int top_k, double top_p, double min_p) {
    // Few values decide, as a rule: only those not too far below the largest are ranked, more if they do not settle it.
    const float top = best_kernels().row_max(p, size);
    if (std::isnan(top)) {  // no value is at least as large, so that no cut would ever be found
        std::fill(p, p + size, top);
        return;
    }
    Ranking::Cut cut;
    for (float share = 0x1p-12f;; share = share > 0x1p-24f ? share * 0x1p-12f : 0.0f) {
        if (find_cut(at_least(p, size, top * share), size, top, top_k, top_p, min_p, cut)) break;
    }
    const int equal = drop_below(p, size, cut.least);
    for (int i = 0, ties = cut.ties; equal > cut.ties && i < size; ++i)
        if (p[i] == cut.least && ties-- <= 0) p[i] = 0.0f;
    row_divide(p, size, static_cast<float>(row_sum(p, size)));
}

}  // namespace dspark

#pragma GCC visibility push(default)
extern "C" {

// Filters of each row, in place; p [rows][size], top_k [rows] (0: off), top_p and min_p [rows]
void dspark_filter(float* p, int rows, int size, const int32_t* top_k, const double* top_p,
                   const double* min_p) {
    dspark::by_rows(rows, [&](int r) {
        dspark::filter_row(p + static_cast<int64_t>(r) * size, size, top_k[r], top_p[r], min_p[r]);
    });
}

}  // extern "C"
#pragma GCC visibility pop
