// Memory straight from the system: zeroed, touched page by page, in huge pages where the system has them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

namespace dspark {

constexpr size_t kHugePage = size_t{2} << 20;

// A big K/V pool in a Buffer costs nothing until it is used.
template <class T>
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(size_t count) { resize(count); }
    ~Buffer() { release(); }
    Buffer(Buffer&& other) noexcept { *this = std::move(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(base_, other.base_);
        std::swap(data_, other.data_);
        std::swap(mapped_, other.mapped_);
        std::swap(size_, other.size_);
        return *this;
    }
    // What it held is lost.
    void resize(size_t count) {
        release();
        if (count == 0) return;
        // A mapping of its own starts at any page; only whole huge pages inside it can be huge.
        const size_t bytes = count * sizeof(T), spare = bytes >= kHugePage ? kHugePage : 0;
        void* memory = mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        base_ = memory, mapped_ = bytes + spare, size_ = count;
        auto start = reinterpret_cast<uintptr_t>(memory);
        if (spare) start = (start + kHugePage - 1) / kHugePage * kHugePage;
        data_ = reinterpret_cast<T*>(start);
#ifdef MADV_HUGEPAGE
        if (spare) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
    }
    T* data() { return data_; }
    const T* data() const { return data_; }
    size_t size() const { return size_; }
    T& operator[](size_t i) { return data_[i]; }
    const T& operator[](size_t i) const { return data_[i]; }

  private:
    void release() {
        if (base_) munmap(base_, mapped_);
        base_ = nullptr, data_ = nullptr, size_ = mapped_ = 0;
    }
    void* base_ = nullptr;
    size_t mapped_ = 0;
    T* data_ = nullptr;
    size_t size_ = 0;
};

// Weights one behind the other, in the order in which they were asked for: a forward pass reads them as one stream.
class Arena {
  public:
    uint8_t* take(size_t bytes) {
        bytes = (bytes + 63) / 64 * 64;
        if (chunks_.empty() || used_ + bytes > chunks_.back().size()) {
            chunks_.emplace_back(bytes > kChunk ? bytes : kChunk);
            used_ = 0;
        }
        uint8_t* out = chunks_.back().data() + used_;
        used_ += bytes;
        return out;
    }

  private:
    static constexpr size_t kChunk = size_t{256} << 20;
    std::vector<Buffer<uint8_t>> chunks_;
    size_t used_ = 0;
};

}  // namespace dspark
