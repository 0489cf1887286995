// What the files of the C interface share.
#pragma once

#include <exception>
#include <string>

#include "model.h"

namespace dspark {

struct Handle {
    const Kernels* kernels;
    Model model;
};

// What stands for a layer's index where no layer is meant.
constexpr int kHead = -1;   // the head and the final norm
constexpr int kDraft = -2;  // the parts of a draft model

std::string& last_error();

// 0, or -1 with the message of what was thrown kept for dspark_error.
template <class Work>
int guarded(Work work) {
    try {
        work();
        return 0;
    } catch (const std::exception& error) {
        last_error() = error.what();
    } catch (...) {
        last_error() = "unknown error";
    }
    return -1;
}

// A batch of spans [n][3] = rows, start position, offset into `pages`.
Batch latch(const Model& m, int span_count, const int32_t* spans, const int32_t* pages);
// Scratch for so many rows.
void reserve(Model& m, int rows);

}  // namespace dspark
