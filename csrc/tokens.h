// Token ids from whatever Python has them in, as unsigned 32-bit words.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>

namespace lmkv {

// Fills out[n] from the n items of a list or tuple from `start` on. Throws nanobind::value_error naming the
// position, counted from `start`, of the first item that is no integer in [0, 2^32); a bool is none.
void tokens_from_items(PyObject* sequence, std::size_t start, std::size_t n, std::uint32_t* out);

// Fills out[n] from integers of `itemsize` bytes that lie `stride` bytes apart. Throws the same.
void tokens_from_array(const char* data, bool is_signed, std::size_t itemsize, std::ptrdiff_t stride, std::size_t n,
                       std::uint32_t* out);

}  // namespace lmkv
